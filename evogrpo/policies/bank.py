"""The one seam between policies and everything above them: the PolicyBank and Sampler protocols."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from evogrpo.hyperparameters import Hyperparameters
from evogrpo.records import Batch, Rollout, Rows, UpdateReport

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(row numbers `[k]` in the batch, their log_probs `[k, t]`) -> `[k]` weighted losses, to be summed."""

State = dict[str, Tensor]
"""Everything a member has learnt: weights, optimiser moments, step count. Plain tensors, each a copy."""


class Sampler(Protocol):
    """Whatever can act for members: the bank itself, or later an external engine."""

    def sample(self, rows: Rows, *, reference: bool = False) -> Rollout:
        """Sample one completion for each row, from its member's policy or from the reference policy."""
        ...


class PolicyBank(Sampler, Protocol):
    """N members' policies and optimisers in one place.

    Members never influence each other: what a method computes for one is, up to rounding, what a bank of that member
    alone would compute.
    """

    @property
    def size(self) -> int:
        """Number of slots."""
        ...

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the sampler's log-probabilities are those of `log_probs`, up to rounding in float32."""
        ...

    def log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions in nats, without gradient; 0 where masked."""
        ...

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the reference policy, without gradient; 0 where masked."""
        ...

    def update(
        self, batch: Batch, loss_fn: LossFunction, hyperparameters: Mapping[int, Hyperparameters]
    ) -> dict[int, UpdateReport]:
        """Take one optimizer step for every member named in `hyperparameters`, rows or no rows.

        A member whose gradient is not finite takes no step; its report shows the norm.
        """
        ...

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return how many tokens (or environment steps) one pass over the batch processes, by slot."""
        ...

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i the whole learner state of slot parents[i], all at once; None = a fresh initialisation."""
        ...

    def state(self, slot: int) -> State:
        """Return a copy of everything the member in `slot` has learnt."""
        ...

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put a learner state into `slot`; refuse one of other names, shapes or types before changing anything."""
        ...
