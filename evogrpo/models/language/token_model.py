"""TokenModel and Weights protocols: a language model's passes, and the weights of its members."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import UpdateReport
from evogrpo.models.bank import PolicyVersion


class AdapterHook(Protocol):
    """The weights that the rows of one forward pass act with, each row with its own member's."""

    def __call__(self, module: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return what a module of the base puts out under these weights; may overwrite `output`.

        Args:
            module: Its dotted name; one of `Weights.modules`.
            inputs: What went into it, the rows in their order.
            output: What came out of the base's own.
        """
        ...


HookFactory = Callable[[Tensor], AdapterHook | None]
"""Slots of the rows of a forward pass, sorted -> the weights that these rows act with; None = the base's alone."""


class Weights(Protocol):
    """What members have learnt, with one flat gradient `[k]` per member that is open."""

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
        """Whether every member has a reference of its own; otherwise the reference is the base."""
        ...

    def hook_factory(self, policy: PolicyVersion) -> HookFactory:
        """Return what directs rows to their members' weights; "reference" only where members have their own."""
        ...

    def changes(self, slot: int) -> int:
        """Return a count that differs whenever the member's weights may."""
        ...

    def new_gradient(self) -> Tensor:
        """Return zeros `[k]`."""
        ...

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Let backward passes add a member's gradient into `buffer` `[k]`; None ends that."""
        ...

    def step(self, slot: int, gradient: Tensor, hyperparameters: Hyperparameters, loss: float) -> UpdateReport:
        """Clip one member's gradient, which is overwritten, and take its optimizer step; none where it is not finite.

        The report's norm is NaN when the gradient, or the weights after the step, are not finite.
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
        """Return a member as other programs read it: tensors to be stored, and the bytes of their description.

        Args:
            slot: Which member.
            base: Name of the base model.
        """
        ...


P = TypeVar("P")


class Decoding(Protocol):
    """Rows that are written token by token."""

    def start(self) -> Tensor:
        """Return the hidden states `[n, h]` from which the first token of each row is predicted."""
        ...

    def advance(self, tokens: Tensor) -> Tensor:
        """Return the hidden states `[n, h]` after one more token `[n]` of each row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone, in that order; one that is there several times goes on as so many."""
        ...

    def save_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return what `TokenModel.resume` lets the given rows go on from, or None where there is no such thing.

        Args:
            rows: Which.
            real: `[k, t]` booleans: which of the t tokens they have been advanced by are theirs.
        """
        ...


class TokenModel(Protocol[P]):
    """A base model that rows of several members run through, each with its own weights, given as a hook or a make_hook.

    `P` is what the model makes of prompts, for its own `extend` and `decode`.

    Attributes:
        pad_id: Token id used as padding.
        device: Where it runs.
        context: Most tokens of a sequence; None = no limit.
        shares_prefix: Whether rows that continue one prompt share its pass.
        autocast: Makes the context, for mixed precision, that passes run in; losses are outside.
    """

    pad_id: int
    device: torch.device
    context: int | None
    shares_prefix: bool
    autocast: Callable[[], AbstractContextManager[None]]

    @property
    def exact(self) -> bool:
        """Whether sampling and scoring agree up to rounding in float32."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Make the model ready; all calls below happen inside, and leaving it puts everything back."""
        ...

    def prefix(self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int], make_hook: HookFactory) -> P:
        """Prepare prompts for what continues them, gradients included.

        Args:
            prompts: Token ids of each.
            slots: Whose weights run each prompt, sorted.
            make_hook: Directs rows to weights.
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
        """Return prompts `[n]`: rows that were set aside, each continued by some tokens.

        Args:
            parts: What `Decoding.save_cache` returned.
            part_of: `[n]` which part each row is in.
            row_of: `[n]` which of the rows set aside in that part it is.
            tokens: Of each row, those that follow, at least one.
            slots: `[n]` whose weights run each row, sorted.
            make_hook: Directs rows to weights.
        """
        ...

    def extend(self, prefix: P, rows: Tensor, ids: Tensor, present: Tensor, hook: AdapterHook | None) -> Tensor:
        """Return hidden states `[n, 1 + t, h]`, from which the token after each prompt and each token is predicted.

        Args:
            prefix: The prompts.
            rows: `[n]` which prompt each row continues.
            ids: `[n, t]` its tokens.
            present: `[n, t]` booleans: real tokens.
            hook: The weights that each row acts with.
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
        """Return what `extend` does of rows that continue prompts not run yet; all at once where that takes less time.

        Args:
            prompts: Token ids of each.
            slots: Whose weights run each prompt, sorted.
            rows: `[n]` which prompt each row continues, one whose slot is the row's own.
            ids: `[n, t]` its tokens.
            present: `[n, t]` booleans: real tokens.
            members: `[n]` whose weights run each row, sorted.
            make_hook: Directs rows to weights.
        """
        ...

    def decode(self, prefix: P, rows: Tensor, slots: Tensor, room: int, make_hook: HookFactory) -> Decoding:
        """Begin to write rows that continue prompt number `rows[i]`, by up to `room` tokens that are fed back.

        Args:
            prefix: The prompts.
            rows: `[n]` which prompt each row continues.
            slots: `[n]` whose weights each row acts with, sorted.
            room: Most calls of `Decoding.advance`.
            make_hook: Directs rows to weights.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[m, v]`, given hidden states `[m, h]`, without gradients."""
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
    """Refuse with a ValueError sequences of more tokens than the model's context; None = no limit."""
    if context is not None and width > context:
        raise ValueError(
            f"{longest} and its completion take {width} tokens, but the model's context is {context}. Lower "
            "max_output_tokens, or set max_prompt_length to leave long prompts out. The config sets the context: "
            "max_position_embeddings, or original_max_position_embeddings (longrope), or floor_scale (Llama 4)."
        )
