"""PolicyBank and Sampler protocols: the weights of all members, and sampling with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.learn_reports import UpdateReport
from evogrpo.records import Batch, Rollout, SamplingBatch

FinishedCallback = Callable[[Sequence[int], Sequence[Sequence[int]]], None]
"""Called while sampling with the numbers of newly finished rows and their token ids without
padding; both may be empty.
"""


class SamplerError(ValueError):
    """An external sampler cannot sample.

    The run is saved and ends; it can be resumed without changes.
    """


class Sampler(Protocol):
    """Generates completions, in this process (the bank) or in an engine such as vLLM."""

    def sample(
        self,
        rows: SamplingBatch,
        *,
        base: bool = False,
        on_finished: FinishedCallback | None = None,
    ) -> Rollout:
        """Sample one completion per row, in the order of the rows; tensors may be on any device.

        Args:
            rows: Prompts, member of each row, and sampling options. Log-probabilities are those of
                the truncated and rescaled distribution that `rows.options` describes.
            base: Sample from the untrained base model and ignore `rows.member_ids`.
            on_finished: May be called with each finished row, at most once, so that rewards can
                start early. A sampler may ignore it.
        """

    def sync(self, slots: Sequence[int]) -> None:
        """Reload the weights of these slots.

        Called before sampling whenever weights have changed, on all ranks.
        """


LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(row numbers `[k]` in the batch, their log_probs `[k, t]` and entropies `[k, t]`, both in nats
and 0 where masked) -> `[k]` weighted losses, to be summed. Must have no side effects: rows are
repeated after running out of memory. Entropies carry a gradient only in
`update(..., entropy_gradient=True)`. If `StackedBank.update` gets `reference_distributions`, the
loss gets a fourth argument: divergences `[k, t]` from them, in nats and with a gradient; 0 where
masked.
"""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step of several members, and the scores that their losses were computed from.

    Attributes:
        reports: Reports by slot.
        log_probs: `[n, t]` log-probabilities of the batch's actions before the step, in nats; 0
            where masked.
        entropies: `[n, t]` entropies of the action distributions before the step, in nats; 0 where
            masked.
        divergences: `[n, t]` divergences from the reference distributions, in nats; None = not
            requested.
    """

    reports: dict[int, UpdateReport]
    log_probs: Tensor
    entropies: Tensor
    divergences: Tensor | None = None


RepeatStep = Callable[[Hyperparameters], UpdateReport]
"""Function that takes an optimizer step again with the same gradient and other hyperparameters,
from the current train state.
"""
PolicyVersion = Literal["weights", "reference", "base"]
"""The members' current weights, the reference policy of the KL term, or the untrained base policy.
"""

TrainState = dict[str, Tensor]
"""Copies of one member's weights, optimizer moments, step count, running statistics and, if it has
one, reference.
"""


# The learning step changes these columns in place; children inherit them, checkpoints store them.
RUNNING_STATS = (
    "kl_factor",
    "reward_count",
    "reward_mean",
    "reward_m2",
    "lr_factor",
    "lr_ceiling",
    "lr_searched_for",
)
"""Columns of `PolicyBank.running_stats`: factor on beta (adaptive KL); count, mean and sum of
squared deviations of the raw rewards so far (running reward normalisation); factor on lr, its
largest value, and a checksum of the hyperparameters that they were found with (`target_kl`).
"""

INITIAL_RUNNING_STATS = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
"""Running statistics of a new member."""


# ---- weights and optimizers


class PolicyBank(Protocol):
    """Policies and optimizers of all members of a population.

    Members are independent: up to rounding, each gets the result that a bank with that member alone
    would compute.
    """

    @property
    def size(self) -> int:
        """Number of slots."""

    @property
    def seed(self) -> int:
        """Root of the random streams of this policy."""

    @property
    def rows_are_transitions(self) -> bool:
        """True if each action is scored independently: episodes can be split into single actions.

        False if actions depend on earlier ones, as the tokens of a completion do.
        """

    @property
    def running_stats(self) -> Tensor:
        """`[p, 7]` float64 on the CPU, modified in place: the columns `RUNNING_STATS`.

        Inherited and saved.
        """

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions in nats, without gradient.

        0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Use the untrained base policy instead of the members' policies.
        """

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the action distributions in nats, without gradient.

        0 where masked.
        """

    def distributions(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return what determines the action distributions, `[n, t, ...]`, without gradient.

        Only `divergences` and `update` of the same bank can read it. 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            reference: Use the reference policies.
        """

    def divergences(self, batch: Batch, before: Tensor) -> Tensor:
        """Return exact KL(before || current) `[n, t]` in nats, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            before: Result of `distributions` for these rows, under earlier weights.
        """

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the reference policy in nats, without gradient.

        0 where masked.

        The reference is each member's own if the bank stores one per member, and the base policy
        otherwise.
        """

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * policy + (1 - mixing) * reference.

        A mixing of 1 copies the policy.

        Raises:
            ValueError: If the bank does not store one reference per member.
        """

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        repeats: "dict[int, RepeatStep] | None" = None,
    ) -> Update:
        """Take one optimizer step for every slot in `hyperparameters`, even for slots without rows.

        A member with a non-finite gradient takes no step; its report has a norm of NaN.

        Args:
            batch: Rows of these members.
            loss_fn: Weighted losses of rows; their sum is minimised.
            hyperparameters: Hyperparameters by slot.
            entropy_gradient: Make the entropies that `loss_fn` gets differentiable.
            repeats: Filled by banks that keep gradients: a function for each slot that repeats this
                step. The caller first loads the train state from before the step.
        """

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return the tokens (or environment steps) of one pass over the batch, by slot."""

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, all at once; None = a new member."""

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state, the same for all members."""

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a member's train state."""

    def state(self, slot: int) -> TrainState:
        """Return a copy of a member's train state."""

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If keys, shapes or dtypes do not match; the slot is then unchanged.
        """


# ---- checks of all banks


def check_parents(parents: Sequence[int | None], size: int) -> None:
    """Raise ValueError unless `parents` is one existing slot (or None) for each of `size` slots."""
    slots = [parent for parent in parents if parent is not None]
    exist = all(0 <= slot < size for slot in slots)
    if len(parents) != size or not exist:
        raise ValueError(
            f"parents must contain a slot from 0 to {size - 1} or None for each slot, got"
            f" {parents}."
        )


NO_REFERENCES = "Members have no references of their own. Set reference='snapshot'."
"""Message of an error: `mix_reference` of a bank that stores no reference per member."""


def check_train_state(
    state: Mapping[str, Tensor], example: Mapping[str, Tensor], settings: str
) -> None:
    """Raise ValueError unless a train state has the names, shapes and types of an example.

    Args:
        state: The train state.
        example: Tensors of the right shapes and types.
        settings: Settings that must equal those of the saved state; named in the message.
    """

    def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
        """Return shape and dtype of each tensor by name."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    expected = described(example)
    given = described(state)
    # Names of either side: a missing tensor and an unknown one are both reported.
    for name in expected | given:
        if given.get(name) != expected.get(name):
            raise ValueError(
                f"Train state {name!r} must be {expected.get(name)}, got {given.get(name)}. Use the"
                f" {settings} and reference ('base' or 'snapshot') it was saved with."
            )
    if state["step"] < 0:
        raise ValueError(f"Train state 'step' must be at least 0, got {int(state['step'])}.")
