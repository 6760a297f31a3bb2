"""The one seam between policies and everything above them: the PolicyBank and Sampler protocols."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.hyperparameters import Hyperparameters
from evogrpo.records import Acted, Batch, Rollout, Rows, UpdateReport

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(row numbers `[k]` in the batch, their log_probs `[k, t]` and entropies `[k, t]`, both in nats and 0 where masked) ->
`[k]` weighted losses, to be summed. Entropies carry a gradient only in `update(..., entropy_gradient=True)`."""

State = dict[str, Tensor]
"""Everything a member has learnt: weights, optimiser moments, step count, running statistics, and its own reference
where it has one. Plain tensors, each a copy."""

CARRIED = ("kl_factor", "reward_count", "reward_mean", "reward_m2")
"""Columns of `PolicyBank.carried`: the factor on beta under an adaptive KL; count, mean and sum of squared deviations
of the raw rewards seen, under running reward normalisation."""

CARRIED_AT_BIRTH = (1.0, 0.0, 0.0, 0.0)
"""What a fresh member carries, column by column."""


class Sampler(Protocol):
    """Whatever can act for members: the bank itself, or later an external engine."""

    def sample(self, rows: Rows, *, base: bool = False) -> Rollout:
        """Sample one completion for each row, from its member's policy or from the untrained base."""
        ...

    def sync(self, changed: Sequence[int]) -> None:
        """Take note that the weights in these slots have changed since the last call; all have before the first."""
        ...


class Actor(Protocol):
    """Whatever can act for members step by step, as environments ask; a bank of small networks does."""

    @property
    def uniforms_per_action(self) -> int:
        """How many uniform numbers one action is drawn with."""
        ...

    def act(
        self,
        observations: Any,
        member_ids: NDArray[np.int64],
        *,
        uniforms: NDArray[np.float32] | None,
        temperature: NDArray[np.float32] | None = None,
        action_mask: Any = None,
        base: bool = False,
    ) -> Acted:
        """Choose one action for each observation.

        Args:
            observations: `[m, ...]` as the observation space has them; for Dict and Tuple dicts and tuples of such.
            member_ids: `[m]` slots, in ascending order.
            uniforms: `[m, uniforms_per_action]` in [0, 1); None = the most likely actions.
            temperature: `[m]` at least 0; 0 means the most likely action. None = 1.
            action_mask: Legal values (True) of Discrete actions `[m, values]`; of MultiDiscrete ones side by side, or a
                tuple of one per component. None = all.
            base: Act from the untrained base instead.
        """
        ...


class PolicyBank(Protocol):
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

    @property
    def rows_are_transitions(self) -> bool:
        """Whether actions are scored one by one, so that an episode may be taken apart into rows of one action each.

        False where actions depend on those before them, as the tokens of a completion do.
        """
        ...

    @property
    def carried(self) -> Tensor:
        """`[p, 4]` float64 on the CPU: running statistics that members inherit and save, to be changed in place.

        Columns: `CARRIED`. State key "carried".
        """
        ...

    def log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions in nats, without gradient; 0 where masked."""
        ...

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the distributions acted from, in nats, without gradient; 0 where masked."""
        ...

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the reference policy, without gradient; 0 where masked."""
        ...

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their own references; ValueError without own references."""
        ...

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Move a member's own reference towards its policy: reference = mixing * policy + (1 - mixing) * reference.

        Weights are mixed, not distributions; ValueError without own references.
        """
        ...

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
    ) -> dict[int, UpdateReport]:
        """Take one optimizer step for every member named in `hyperparameters`, rows or no rows.

        A member whose gradient is not finite takes no step; its report shows the norm. With `entropy_gradient` the
        entropies that the loss sees carry a gradient; otherwise they are numbers.
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
