"""The weights of a population of language models, as sampling and learning use them: the Weights protocol."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import UpdateReport
from evogrpo.policies.bank import PolicyVersion


class View(Protocol):
    """The weights that the rows of one forward pass act with, each row with its own member's."""

    def __call__(self, module: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return what a module of the base puts out under these weights; may overwrite `output`.

        Args:
            module: Its dotted name; one of `Weights.modules`.
            inputs: What went into it, the rows in their order.
            output: What came out of the base's own.
        """
        ...


Route = Callable[[Tensor], View | None]
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
    def carried(self) -> Tensor:
        """`[p, 4]` running statistics; see `evogrpo.policies.bank.CARRIED`."""
        ...

    @property
    def own_reference(self) -> bool:
        """Whether every member has a reference of its own; otherwise the reference is the base."""
        ...

    def route(self, policy: PolicyVersion) -> Route:
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
    def parts(self) -> tuple[str, ...]:
        """See `PolicyBank.parts`."""
        ...

    def part(self, slot: int, name: str) -> Tensor:
        """See `PolicyBank.part`."""
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
