"""Protocols of language models: TokenModel (forward passes of the base) and Weights (what members train)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import UpdateReport
from evogrpo.models.bank import PolicyVersion


class AdapterHook(Protocol):
    """Adds the members' weights to the outputs of the base's modules in one forward pass."""

    def __call__(self, module: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return a module's output with each row's adapter applied; may overwrite `output`.

        Args:
            module: Dotted name, one of `Weights.modules`.
            inputs: Input of the module.
            output: Output of the base's module.
        """
        ...


HookFactory = Callable[[Tensor], AdapterHook | None]
"""Sorted slots of the rows of a forward pass -> hook that applies their weights; None = base only."""


class Weights(Protocol):
    """Trainable weights of all members; the gradient of one member is a flat vector `[k]`."""

    @property
    def size(self) -> int:
        """Number of slots."""
        ...

    @property
    def modules(self) -> Sequence[str]:
        """Dotted names of the base's modules whose output the weights change."""
        ...

    @property
    def running_stats(self) -> Tensor:
        """`[p, 4]` running statistics; see `evogrpo.models.bank.RUNNING_STATS`."""
        ...

    @property
    def own_reference(self) -> bool:
        """True if every member stores its own reference; otherwise the reference is the base."""
        ...

    def hook_factory(self, policy: PolicyVersion) -> HookFactory:
        """Return the hooks of a policy version; "reference" requires own references."""
        ...

    def changes(self, slot: int) -> int:
        """Return a counter that increases whenever the member's weights change."""
        ...

    def new_gradient(self) -> Tensor:
        """Return zeros `[k]`."""
        ...

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Accumulate a member's gradient into `buffer` `[k]` in the following backward passes; None stops it."""
        ...

    def step(self, slot: int, gradient: Tensor, hyperparameters: Hyperparameters, loss: float) -> UpdateReport:
        """Clip one member's gradient in place and take its optimizer step; no step if the gradient is not finite.

        The norm in the report is NaN if the gradient, or the weights after the step, are not finite.
        """
        ...

    def inherit(self, parents: Sequence[int | None]) -> None:
        """See `PolicyBank.inherit`."""
        ...

    def keep_reference(self, slots: Sequence[int]) -> None:
        """See `PolicyBank.keep_reference`."""
        ...

    def mix_reference(self, slot: int, mixing: float) -> None:
        """See `PolicyBank.mix_reference`."""
        ...

    @property
    def state_keys(self) -> tuple[str, ...]:
        """See `PolicyBank.state_keys`."""
        ...

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """See `PolicyBank.state_tensor`."""
        ...

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """See `PolicyBank.load_state`."""
        ...

    def files(self, slot: int, base: str | None) -> tuple[dict[str, Tensor], bytes]:
        """Return a member for export: named tensors and the bytes of the configuration file.

        Args:
            slot: Slot of the member.
            base: Name of the base model.
        """
        ...


P = TypeVar("P")


class Decoding(Protocol):
    """Rows that are decoded token by token."""

    def start(self) -> Tensor:
        """Return hidden states `[n, h]` of the prompts' last tokens."""
        ...

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token `[n]` per row and return its hidden states `[n, h]`."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, in this order; a repeated row is copied."""
        ...

    def save_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return the KV cache of some rows for `TokenModel.resume`, or None if the model has none.

        Args:
            rows: Row numbers `[k]`.
            real: `[k, t]` booleans: False for fed tokens that are padding.
        """
        ...


class TokenModel(Protocol[P]):
    """A base model whose forward passes contain rows of several members, each with its own weights.

    `P` is the type of prepared prompts that `prefix` returns and `extend` and `decode` accept.

    Attributes:
        pad_id: Token id used as padding.
        device: Device of the model.
        context: Maximum sequence length in tokens; None = no limit.
        shares_prefix: Rows that continue one prompt share its forward pass.
        autocast: Returns the context manager of forward passes, for mixed precision. Losses are computed outside.
    """

    pad_id: int
    device: torch.device
    context: int | None
    shares_prefix: bool
    autocast: Callable[[], AbstractContextManager[None]]

    @property
    def exact(self) -> bool:
        """True if log-probabilities of sampling and scoring agree up to float32 rounding."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Prepare the model for the calls below; restore it on exit."""
        ...

    def prefix(self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int], make_hook: HookFactory) -> P:
        """Prepare prompts for `extend` and `decode`, gradients included.

        Args:
            prompts: Token ids of each prompt.
            slots: Slot of each prompt, sorted.
            make_hook: Hooks of the policy version.
        """
        ...

    def resume(
        self,
        parts: Sequence[Any],
        part_of: Tensor,
        row_of: Tensor,
        tokens: Sequence[tuple[int, ...]],
        slots: Tensor,
        make_hook: HookFactory,
    ) -> P:
        """Prepare rows `[n]` that continue from saved caches.

        Args:
            parts: Results of `Decoding.save_cache`.
            part_of: `[n]` index into `parts` of each row.
            row_of: `[n]` row within that part.
            tokens: New tokens of each row, at least one.
            slots: `[n]` slot of each row, sorted.
            make_hook: Hooks of the policy version.
        """
        ...

    def extend(self, prefix: P, rows: Tensor, ids: Tensor, present: Tensor, hook: AdapterHook | None) -> Tensor:
        """Return hidden states `[n, 1 + t, h]` of each prompt's last token and of the tokens that follow.

        Args:
            prefix: Prepared prompts.
            rows: `[n]` prompt of each row.
            ids: `[n, t]` token ids after the prompt.
            present: `[n, t]` booleans: True for real tokens.
            hook: Hook of the rows.
        """
        ...

    def continued(
        self,
        prompts: Sequence[tuple[int, ...]],
        slots: Sequence[int],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        members: Tensor,
        make_hook: HookFactory,
    ) -> Tensor:
        """Return the same as `prefix` and then `extend`, in a single forward pass if that is faster.

        Args:
            prompts: Token ids of each prompt.
            slots: Slot of each prompt, sorted.
            rows: `[n]` prompt of each row; prompt and row have the same slot.
            ids: `[n, t]` token ids after the prompt.
            present: `[n, t]` booleans: True for real tokens.
            members: `[n]` slot of each row, sorted.
            make_hook: Hooks of the policy version.
        """
        ...

    def decode(self, prefix: P, rows: Tensor, slots: Tensor, room: int, make_hook: HookFactory) -> Decoding:
        """Start decoding.

        Args:
            prefix: Prepared prompts.
            rows: `[n]` prompt of each row.
            slots: `[n]` slot of each row, sorted.
            room: Maximum number of calls of `Decoding.advance`.
            make_hook: Hooks of the policy version.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[m, v]` of hidden states `[m, h]`, without gradient."""
        ...

    def score(
        self,
        hidden: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        forbidden: Tensor,
        forbidden_ids: Tensor,
        chunk: int,
        *,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return `[k]` log-probabilities of tokens and `[k]` entropies in nats, given hidden states `[k, h]`.

        The arguments are those of `evogrpo.functional.log_probs.chunked_log_probs`.
        """
        ...


def check_context(context: int | None, width: int, longest: str = "The longest prompt") -> None:
    """Raise a ValueError if sequences of `width` tokens exceed the model's context; None = no limit."""
    if context is not None and width > context:
        raise ValueError(
            f"{longest} and its completion take {width} tokens, but the model's context is {context}. Lower "
            "max_output_tokens, or set max_prompt_length to leave long prompts out. The config sets the context: "
            "max_position_embeddings, or original_max_position_embeddings (longrope), or floor_scale (Llama 4)."
        )
