"""What is asked of members that act, to learn from or to be evaluated, and what comes back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.data import Experience
from evogrpo.envs.control.observations import ObservationStatistics
from evogrpo.envs.protocol import Scores, Split
from evogrpo.text import short_repr


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Samples that members are to make, the rows of a member next to each other.

    Attributes:
        learners: The members, all at the same learning step.
        counts: How many rows each of them makes.
        start_ids: `[n]` position of each row's start among those opened.
        group_ids: `[n]` one number per member and start.
        purpose: Names the random stream, with step and index.
        number: Tells apart streams of one purpose within a step.
    """

    learners: tuple[Learner, ...]
    counts: tuple[int, ...]
    start_ids: Tensor
    group_ids: Tensor
    purpose: str
    number: int = 0

    __repr__ = short_repr

    @property
    def member_ids(self) -> Tensor:
        """`[n]` slots."""
        return self._spread(torch.tensor([learner.slot for learner in self.learners]))

    @property
    def temperature(self) -> Tensor:
        """`[n]` sampling temperatures."""
        return self._spread(torch.tensor([learner.hyperparameters.temperature for learner in self.learners]))

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """The numbers that name each member's random stream, beside the purpose."""
        further = [self.number] if self.number else []
        return [(learner.step, learner.index, *further) for learner in self.learners]

    def rows(self, part: Tensor | None = None) -> "RequestedRows":
        """Return the rows, or the given ones of them."""
        chosen = torch.arange(len(self.start_ids)) if part is None else part
        return RequestedRows(
            chosen=chosen,
            member_ids=self.member_ids[chosen],
            start_ids=self.start_ids[chosen],
            group_ids=self.group_ids[chosen],
            temperature=self.temperature[chosen],
        )

    def _spread(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(torch.tensor(self.counts))


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestedRows:
    """Rows that are sampled at once, of all that are wanted.

    Attributes:
        chosen: `[k]` which of all; random numbers are drawn by these.
        member_ids: `[k]` slots.
        start_ids: `[k]` position of each row's start among those opened.
        group_ids: `[k]` one number per member and start.
        temperature: `[k]` sampling temperatures.
    """

    chosen: Tensor
    member_ids: Tensor
    start_ids: Tensor
    group_ids: Tensor
    temperature: Tensor

    __repr__ = short_repr


ObservedStatistics = Mapping[str, ObservationStatistics]
"""What samples add to the running statistics of observations, by policy."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Rewarded samples, the rows of a member next to each other, and so those of a group.

    Attributes:
        experience: What members learn from.
        scores: What the environment said, row by row, without any penalty; step rewards are in the experience alone.
        member_ids: `[n]` who acted, by slot.
        start_ids: `[n]` positions among `starts`.
        truncated: `[n]` which completions ran out of length, or in which episodes somebody was cut off.
        tokens: Tokens (or environment steps) processed, by slot; groups that were sampled and discarded included.
        starts: Training starts that were opened.
        questions: What these starts ask, in words for people; untrusted text. Empty where they ask nothing.
        observed: What these samples add to running statistics of observations; one entry per sampling.
        earned: By slot, the mean raw reward of each group whose samples have any, by the position of its start; without
            the groups that took the place of others because these taught nothing.
    """

    experience: Experience
    scores: Scores
    member_ids: Tensor
    start_ids: Tensor
    truncated: Tensor
    tokens: dict[int, int]
    starts: tuple[int, ...] = ()
    questions: tuple[str, ...] = ()
    observed: tuple[ObservedStatistics, ...] = field(default=())
    earned: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    __repr__ = short_repr

    def by_start(self) -> dict[int, dict[int, float]]:
        """Return what `earned` is for these samples as they are."""
        found: dict[int, dict[int, list[float]]] = {}
        rows = zip(self.member_ids.tolist(), self.start_ids.tolist(), self.scores.rewards.tolist(), strict=True)
        for slot, start, reward in rows:
            if math.isfinite(reward):
                found.setdefault(slot, {}).setdefault(start, []).append(reward)
        return {
            slot: {start: math.fsum(rewards) / len(rewards) for start, rewards in each.items()}
            for slot, each in found.items()
        }


HELD_OUT = "held-out answers"
"""Names the random numbers of sampled evaluations: the same for all members and at every evaluation."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Held-out questions that members are to answer: each slot all of them, each question as often as wanted.

    Attributes:
        split: Where the questions come from.
        questions: Their positions in it.
        slots: Who answers; for the untrained base one entry, of any value.
        base: Whether the untrained base answers.
        answers: How many answers are sampled to each question, at temperature 1; None = a greedy one.
    """

    split: Split
    questions: tuple[int, ...]
    slots: tuple[int, ...]
    base: bool = False
    answers: int | None = None

    @property
    def each(self) -> int:
        """Answers of a slot to a question."""
        return self.answers or 1

    @property
    def start_ids(self) -> Tensor:
        """`[n]` position of each row's question among `questions`: slot by slot, question by question."""
        return torch.arange(len(self.questions)).repeat_interleave(self.each).repeat(len(self.slots))

    @property
    def member_ids(self) -> Tensor:
        """`[n]` slots."""
        return torch.tensor(self.slots).repeat_interleave(self.per_slot)

    @property
    def per_slot(self) -> int:
        """Rows of a slot."""
        return len(self.questions) * self.each

    @property
    def temperature(self) -> Tensor:
        """`[n]` 1 where answers are sampled, 0 where they are greedy."""
        return torch.full((len(self.slots) * self.per_slot,), 0.0 if self.answers is None else 1.0)

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """The numbers that name each question's random stream, beside the purpose."""
        return [(number,) for number in self.questions]


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult:
    """Answers to held-out questions.

    Attributes:
        rewards: `[n]` raw task rewards in the order of `EvaluationRequest.start_ids`, float64; NaN where there is none.
        tokens: For each of the slots asked, tokens that were read and written, or steps in the environment.
    """

    rewards: NDArray[np.float64]
    tokens: tuple[int, ...]
