"""Protocols of language models: Weights (trained by members), AdapterHook (applies them) and Decoding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
        """`[p, 6]` running statistics; see `evogrpo.models.bank.RUNNING_STATS`."""
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
        """Return the KV cache of some rows for `CausalModel.resume`, or None if the model has none.

        Args:
            rows: Row numbers `[k]`.
            real: `[k, t]` booleans: False for fed tokens that are padding.
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
