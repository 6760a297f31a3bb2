"""PolicyBank and Sampler protocols: weights of all members, and what samples with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import Batch, Rollout, SamplingBatch, UpdateReport


class Sampler(Protocol):
    """Whatever samples completions for members: their bank, or an engine that holds copies of their weights."""

    def sample(self, rows: SamplingBatch, *, base: bool = False) -> Rollout:
        """Sample one completion for each row, in the order of the rows; the tensors may be on any device.

        Args:
            rows: Which member completes which prompt, and from how much of the distribution (`rows.options`): what is
                left out is not drawn, and the log-probabilities are those of what is left.
            base: Sample from the untrained base, whatever `rows.member_ids` says.
        """
        ...

    def sync(self, changed: Sequence[int]) -> None:
        """Be told, before it samples again, which slots' weights have changed since it was last told.

        An engine with copies of its own loads these members again.
        """
        ...


LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(row numbers `[k]` in the batch, their log_probs `[k, t]` and entropies `[k, t]`, both in nats and 0 where masked) ->
`[k]` weighted losses, to be summed. Entropies carry a gradient only in `update(..., entropy_gradient=True)`.
With `update(..., reference_distributions=...)` a fourth argument follows: divergences `[k, t]` in nats with a gradient,
0 where masked."""

PolicyVersion = Literal["weights", "reference", "base"]
"""What members are, what beta holds them to, or the untrained policy that all share."""

TrainState = dict[str, Tensor]
"""Everything a member has learnt: weights, optimiser moments, step count, running statistics, and its own reference
where it has one. Plain tensors, each a copy."""


@dataclass(frozen=True, kw_only=True)
class ReferenceDistributions:
    """What the policies of a batch's rows are held to, as whole distributions.

    Attributes:
        outputs: `[n, t, o]` as `FullDistributionBank.distributions` returns them.
        reverse: Whether the divergence is KL(these || policy) instead of KL(policy || these).
    """

    outputs: Tensor
    reverse: bool

    def select(self, rows: Tensor) -> "ReferenceDistributions":
        """Return what the given rows are held to, in that order."""
        return ReferenceDistributions(outputs=self.outputs[rows], reverse=self.reverse)


RUNNING_STATS = ("kl_factor", "reward_count", "reward_mean", "reward_m2")
"""Columns of `PolicyBank.running_stats`: factor on beta (adaptive KL); count, mean and sum of squared deviations of the
raw rewards so far (running reward normalisation)."""

INITIAL_RUNNING_STATS = (1.0, 0.0, 0.0, 0.0)
"""What a fresh member carries, column by column."""


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
    def rows_are_transitions(self) -> bool:
        """Whether actions are scored one by one, so that an episode may be taken apart into rows of one action each.

        False where actions depend on those before them, as the tokens of a completion do.
        """
        ...

    @property
    def running_stats(self) -> Tensor:
        """`[p, 4]` float64 on the CPU: running statistics that members inherit and save, to be changed in place.

        Columns: `RUNNING_STATS`. TrainState key "running_stats".
        """
        ...

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions in nats, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Under the untrained policy that all members started from, whatever beta holds them to.
        """
        ...

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the distributions acted from, in nats, without gradient; 0 where masked."""
        ...

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the policy that beta holds to, without gradient; 0 where masked.

        That is each member's own reference where the bank was made with them, and the base otherwise.
        """
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
        last: bool = False,
    ) -> dict[int, UpdateReport]:
        """Take one optimizer step for every member named in `hyperparameters`, rows or no rows.

        A member whose gradient is not finite takes no step; its report shows the norm. With `entropy_gradient` the
        entropies that the loss sees carry a gradient; otherwise they are numbers. `last` says that the learning step
        ends with this one, which `evogrpo.interruption.before_changes` wants to know before anything is changed.
        """
        ...

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return how many tokens (or environment steps) one pass over the batch processes, by slot."""
        ...

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i the whole learner state of slot parents[i], all at once; None = a fresh initialisation."""
        ...

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What a learner state consists of, by name: the keys of `state`, the same for all members."""
        ...

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of what the member in `slot` has learnt."""
        ...

    def state(self, slot: int) -> TrainState:
        """Return a copy of everything the member in `slot` has learnt."""
        ...

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put a learner state into `slot`; refuse one of other names, shapes or types before changing anything."""
        ...


@runtime_checkable
class FullDistributionBank(Protocol):
    """What a bank can do beside `PolicyBank` where the distributions over actions are small enough to be kept."""

    def distributions(self, batch: Batch, *, reference: bool) -> Tensor:
        """Return `[n, t, o]` numbers that make each action's distribution, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            reference: Under the policy that beta holds to rather than under the members' own.
        """
        ...

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        reference_distributions: ReferenceDistributions | None = None,
        last: bool = False,
    ) -> dict[int, UpdateReport]:
        """Take one optimizer step; with `reference_distributions`, the loss also receives the divergences from them."""
        ...
