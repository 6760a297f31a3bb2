"""Training rows: which member learns from which sampled row, with cached log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.data import Batch
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.functional.corrections import effective_sample_fraction
from evogrpo.models.bank import FullDistributionBank, PolicyBank


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One member that takes part in a learning step.

    Attributes:
        slot: Where it lives.
        index: Who it is; names its random stream.
        step: Which learning step of its this is; names the stream as well.
        hyperparameters: Read here and nowhere else.
        sources: Slots of the members whose samples it learns from, each at the temperature it was sampled at; None =
            its own only.
        shared: Which of these sources count, and how; None = all of them, each row like one of its own.
    """

    slot: int
    index: int
    step: int
    hyperparameters: Hyperparameters
    sources: tuple[int, ...] | None = None
    shared: SharedExperience | None = None

    @property
    def source_slots(self) -> tuple[int, ...]:
        """Slots of the members whose samples it learns from."""
        return (self.slot,) if self.sources is None else self.sources


@dataclass(frozen=True, kw_only=True)
class TrainingRows:
    """Rows of a batch, each for one member that learns from it.

    Attributes:
        batch: What was sampled, by whomever.
        rows: `[m]` the row of the batch that each lesson teaches; None = lesson i teaches row i, to its own member.
        outcomes: `[m]` rows without inputs, of the members that learn: all that advantages, masks and losses read.
    """

    batch: Batch
    rows: Tensor | None
    outcomes: Batch

    def select(self, numbers: Tensor) -> Batch:
        """Return some lessons as a batch of the members that learn, inputs included."""
        if self.rows is None:
            return self.batch.select(numbers)
        return replace(self.batch.select(self.rows[numbers]), member_ids=self.outcomes.member_ids[numbers])

    @property
    def of_others(self) -> Tensor:
        """`[m]` booleans: another member than the one that learns has sampled the lesson's row."""
        sampled_by, learners = self.outcomes.sampled_by, self.outcomes.member_ids
        return torch.zeros_like(learners, dtype=torch.bool) if sampled_by is None else sampled_by != learners

    def only(self, numbers: Tensor) -> "TrainingRows":
        """Return some of the lessons, in that order."""
        rows = numbers if self.rows is None else self.rows[numbers]
        return TrainingRows(batch=self.batch, rows=rows, outcomes=self.outcomes.select(numbers))

    def as_sampled(self, numbers: Tensor) -> Batch:
        """Return the rows of some lessons as a batch of the members that acted."""
        part = self.select(numbers)
        return part if part.sampled_by is None else replace(part, member_ids=part.sampled_by)

    def taken_apart(self) -> "TrainingRows":
        """Return one lesson for each action that counts, in order."""
        mask = self.outcomes.action_mask
        places = mask.flatten().nonzero()[:, 0]
        batch = self.batch.flatten_actions()
        if self.rows is None:
            return TrainingRows(batch=batch, rows=None, outcomes=batch.without_inputs())
        # Where a row's first action stands among all of the batch's, then each of its lesson's actions from there.
        counts = self.batch.action_mask.sum(1)
        first = counts.cumsum(0) - counts
        lesson = places // mask.shape[1]
        amounts = mask.sum(1)
        place = torch.arange(len(places), device=places.device) - (amounts.cumsum(0) - amounts)[lesson]
        rows = first[self.rows[lesson]] + place
        own = replace(batch.without_inputs().select(rows), member_ids=self.outcomes.member_ids[lesson])
        return TrainingRows(batch=batch, rows=rows, outcomes=own)


def select_training_rows(batch: Batch, learners: Mapping[int, Learner]) -> TrainingRows:
    """Return what each member is to learn from.

    Args:
        batch: Rows of any members.
        learners: By slot. Those without `sources` learn from their own rows.

    Raises:
        ValueError: If a member is to learn from others in a batch that does not know how likely its actions were.
    """
    if all(learner.sources is None for learner in learners.values()):
        return TrainingRows(batch=batch, rows=None, outcomes=batch.without_inputs())
    if batch.sampler_log_probs is None:
        raise ValueError(
            "members learn from each other's samples by how likely these were when they were sampled, but this batch "
            "has no sampler_log_probs: let every member learn from its own, or record them"
        )
    acted = batch.member_ids
    rows, owners = [], []
    for slot in sorted(learners):
        sources = torch.tensor(learners[slot].source_slots, device=acted.device, dtype=acted.dtype)
        rows.append(torch.isin(acted, sources).nonzero()[:, 0])
        owners.append(torch.full_like(rows[-1], slot))
    row, owner = torch.cat(rows), torch.cat(owners)
    known = replace(batch, sampled_by=acted)
    outcomes = replace(
        known.without_inputs().select(row),
        member_ids=owner,
        # A group stays one group for each member that learns from it.
        group_ids=batch.group_ids[row] * (1 + max(learners)) + owner,
    )
    return TrainingRows(batch=known, rows=row, outcomes=outcomes)


class CachedLogProbs:
    """Log-probabilities of lessons' actions under the policies that sampled them and under the reference.

    Args:
        bank: Whose policies.
        lessons: Whole episodes.
        trust_sampler: Whether the sampler's own log-probabilities, where they are known, are those of the bank.

    Attributes:
        lessons: The episodes, or after `take_apart` their single actions.
        old: `[m, t]` of the policy that acted, in nats; read where they are known.
        reference: `[m, t]` of the learner's reference, in nats; read where they were asked for.
        distributions: `[m, t, o]` what the learner is held to, as its bank puts it; None = not asked for.
        known: `[m]` booleans: the lesson's old log-probabilities are known.
        of_trainer: `[m]` booleans: they come from the bank rather than from the sampler.
        tokens: How many tokens the passes have processed, by slot.
    """

    def __init__(self, bank: PolicyBank, lessons: TrainingRows, *, trust_sampler: bool) -> None:
        outcomes = lessons.outcomes
        mask = outcomes.action_mask
        self._bank, self.lessons = bank, lessons
        self.old, self.reference = (torch.zeros(mask.shape, device=mask.device) for _ in range(2))
        self.known, self.of_trainer = (torch.zeros(len(mask), dtype=torch.bool, device=mask.device) for _ in range(2))
        self.distributions: Tensor | None = None
        self.tokens: dict[int, int] = {}
        if trust_sampler:
            assert outcomes.sampler_log_probs is not None
            self.old = torch.where(mask, outcomes.sampler_log_probs, 0.0)
            self.known[:] = True

    def find_reference(self, rows: Tensor) -> None:
        """Find the given lessons' log-probabilities under the reference of who learns."""
        if len(rows):
            part = self.lessons.select(rows)
            self.reference[rows] = self._bank.reference_log_probs(part)
            self.charge(part)

    def find_distributions(self, rows: Tensor, *, old: bool) -> None:
        """Find the whole distributions that the learner is held to in the given lessons.

        Args:
            rows: The lessons.
            old: Those of who acted, whose policies must still be the old ones, rather than the reference's.

        Raises:
            ValueError: If the bank cannot tell.
        """
        if not isinstance(self._bank, FullDistributionBank):
            raise ValueError(
                "kl_estimator 'full' compares whole distributions over actions, which these policies do not tell: "
                "choose k3 or k2"
            )
        if len(rows):
            given, here = self._as_acted("behaviour_distributions", rows) if old else (None, rows)
            if len(here):
                part = self.lessons.as_sampled(here) if old else self.lessons.select(here)
                found = self._bank.distributions(part, reference=not old)
                if given is None:
                    given = found.new_zeros(len(self.known), *found.shape[1:])
                given = given.index_copy(0, here, found)
            self.distributions = given
            self.charge(self.lessons.select(rows))

    def find_old(self, rows: Tensor) -> None:
        """Find the old log-probabilities that are not known; the policies must still be the old ones."""
        rows = rows[~self.known[rows]]
        if len(rows):
            given, here = self._as_acted("behaviour_log_probs", rows)
            if given is not None:
                self.old[rows] = given[rows].to(self.old.dtype)
            if len(here):
                self.old[here] = self._bank.log_probs(self.lessons.as_sampled(here))
            self.known[rows] = self.of_trainer[rows] = True
            self.charge(self.lessons.select(rows))

    def _as_acted(self, name: str, rows: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return what other banks have told of all lessons, 0 where nothing, and which of some lessons to find here."""
        given: Tensor | None = getattr(self.lessons.outcomes, name)
        if given is None:
            return None, rows
        mask = self.lessons.outcomes.action_mask
        unknown = mask & given.isnan().reshape(*mask.shape, -1).any(2)
        return given.nan_to_num(nan=0.0), rows[unknown[rows].any(1)]

    def take(self, rows: Tensor, log_probs: Tensor) -> None:
        """Make log-probabilities `[k, t]` that were computed anyway, before anything was learnt, the old ones.

        Only where the member that learns is the one that acted: another's policy is not the one that sampled.
        """
        outcomes = self.lessons.outcomes
        if outcomes.sampled_by is not None:
            own = outcomes.sampled_by[rows] == outcomes.member_ids[rows]
            rows, log_probs = rows[own], log_probs[own]
        self.old[rows] = log_probs.detach().to(self.old.dtype)
        self.known[rows] = self.of_trainer[rows] = True

    def take_apart(self) -> None:
        """Go on with one lesson per action that counts."""
        places, row = self.lessons.outcomes.counted_actions()
        self.lessons = self.lessons.taken_apart()
        self.old, self.reference = (each.flatten()[places][:, None] for each in (self.old, self.reference))
        if self.distributions is not None:
            self.distributions = self.distributions.flatten(0, 1)[places][:, None]
        self.known, self.of_trainer = self.known[row], self.of_trainer[row]

    def charge(self, part: Batch) -> None:
        """Count the tokens of one pass over some lessons, for the members that learn."""
        for slot, tokens in self._bank.cost(part).items():
            self.tokens[slot] = self.tokens.get(slot, 0) + tokens


def uses_sampler_log_probs(batch: Batch, objective: Objective) -> bool:
    """Return whether the old log-probabilities of a batch's actions are those that its sampler has told."""
    return batch.exact and objective.importance_correction is None and batch.sampler_log_probs is not None


@dataclass(frozen=True, kw_only=True)
class FilteredRows:
    """Lessons without those of sources that are too far away.

    Attributes:
        lessons: Those that count.
        tokens: How many tokens were processed to find out, by slot of the member that learns.
        metrics: What was found of a member's sources, by slot: see `metrics.NAMES`.
    """

    lessons: TrainingRows
    tokens: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)


def filter_by_sample_size(bank: PolicyBank, lessons: TrainingRows, learners: Mapping[int, Learner]) -> FilteredRows:
    """Leave out what members would learn from sources whose effective sample size is below their `min_ess`.

    Args:
        bank: Whose policies; nothing has been learnt yet.
        lessons: Of all members.
        learners: By slot.
    """
    least = {slot: each.shared.min_ess for slot, each in learners.items() if each.shared is not None}
    outcomes, of_others = lessons.outcomes, lessons.of_others
    asked = torch.tensor([slot for slot, share in least.items() if share > 0], device=of_others.device)
    rows = (of_others & torch.isin(outcomes.member_ids, asked)).nonzero()[:, 0]
    kept, tokens = torch.ones_like(of_others), dict[int, int]()
    found: dict[int, dict[str, float]] = {slot: {} for slot in least}
    if len(rows):
        assert outcomes.sampled_by is not None  # or nothing would be of others
        part = lessons.select(rows)
        log_ratios, tokens = _log_ratios(bank, part), dict(bank.cost(part))
        sources = 1 + int(outcomes.sampled_by.max())  # some of them perhaps not of this bank
        pair = part.member_ids * sources + outcomes.sampled_by[rows]
        action = pair[:, None].expand(part.action_mask.shape)[part.action_mask]
        ess = effective_sample_fraction(log_ratios[part.action_mask], action, bank.size * sources)
        floor = ess.new_tensor([least.get(slot, 0.0) for slot in range(bank.size)]).repeat_interleave(sources)
        kept[rows] = ~(ess < floor)[pair]
        for slot in found:
            mine = part.action_mask & (part.member_ids == slot)[:, None]
            found[slot] = _metrics(ess.view(bank.size, sources)[slot], log_ratios[mine], learners[slot])
        lessons = lessons.only(kept.nonzero()[:, 0])
    for slot, values in found.items():
        theirs = kept[of_others & (outcomes.member_ids == slot)]
        if len(theirs):
            values["shared_share"] = float(theirs.double().mean())
    return FilteredRows(lessons=lessons, tokens=tokens, metrics=found)


def _log_ratios(bank: PolicyBank, part: Batch) -> Tensor:
    """Return `[k, t]` the log-probabilities under who learns less those under who acted, 0 where either is unknown."""
    assert part.sampler_log_probs is not None  # `select_training_rows` refuses others' samples without
    return torch.where(part.action_mask, bank.log_probs(part) - part.sampler_log_probs, 0.0).nan_to_num(0.0)


def _metrics(ess: Tensor, log_ratios: Tensor, learner: Learner) -> dict[str, float]:
    """Return what a member's sources `[p]` come to, NaN where there is none, and their actions' log-ratios `[k]`."""
    if not len(log_ratios):
        return {}
    low, high = learner.hyperparameters.clip_bounds
    excess = torch.expm1(log_ratios)
    return {
        "shared_ess": float(ess[~ess.isnan()].mean()),
        "shared_outside": float(((excess < -low) | (excess > high)).double().mean()),
    }
