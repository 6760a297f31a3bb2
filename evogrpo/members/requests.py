"""Requests to members for samples and evaluations, and the rewarded samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.task_settings import NO_SETTINGS, TaskSettings
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.protocol import Scores, Split
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Experience
from evogrpo.text import short_repr


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One member that takes part in a learning step.

    Attributes:
        slot: Its slot in the bank.
        index: Its identity; part of the name of its random streams.
        step: Number of the learning step; part of the name as well.
        hyperparameters: Its hyperparameters in this step.
    """

    slot: int
    index: int
    step: int
    hyperparameters: Hyperparameters


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingRequest:
    """Rows to sample; the rows of a member are next to each other.

    Attributes:
        learners: The members that act, all at the same learning step.
        counts: Number of rows of each member, on all ranks.
        row_ids: `[k]` numbers of the rows among those of all ranks; they select the random numbers.
        member_ids: `[k]` slots.
        start_ids: `[k]` position of each row's start in the batch of starts.
        group_ids: `[k]` one number per member and start.
        settings: Task settings of each start; empty = all without any.
        temperature: `[k]` sampling temperatures.
        purpose: Name of the random streams; the numbers of each are in `streams`.
        number: Distinguishes streams of one purpose within a step.
        stop: Checked between tokens or steps, and between reward calls.
    """

    learners: tuple[Learner, ...]
    counts: tuple[int, ...]
    row_ids: Tensor
    member_ids: Tensor
    start_ids: Tensor
    group_ids: Tensor
    temperature: Tensor
    purpose: str
    settings: tuple[TaskSettings, ...] = ()
    number: int = 0
    stop: Stop = NEVER

    __repr__ = short_repr

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Numbers of each member's random stream: step, index and, unless it is 0, `number`."""
        further = [self.number] if self.number else []
        return [(learner.step, learner.index, *further) for learner in self.learners]

    def select(self, rows: Tensor) -> "SamplingRequest":
        """Return the request for some of its rows."""
        # Learners and counts stay: they name the random streams of all ranks' rows.
        names = ("row_ids", "member_ids", "start_ids", "group_ids", "temperature")
        chosen: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **chosen)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Rewarded samples; the rows of a member, and within them of a group, are next to each other.

    Attributes:
        experience: The samples as batches to learn from, by policy.
        scores: Rewards and texts of the environment, row by row, without penalties and step
            rewards.
        member_ids: `[n]` slots of the members that acted.
        start_ids: `[n]` positions in `starts`.
        truncated: `[n]` completions that ran out of length, or episodes in which an agent was
            truncated.
        tokens: Tokens (or environment steps) processed, by slot, discarded groups included.
        starts: Training starts that were opened; one that is opened with several task settings is
            repeated.
        questions: Texts of the starts, for display; untrusted. Empty for environments without
            texts.
        observed: Observation statistics by policy, to add to the running ones; one entry per
            sampling.
        group_rewards: Mean raw reward of each group that has rewards, by slot and position of the
            start, before dynamic sampling.
        scoring_seconds: Time that reward functions took; 0 for environments that are played.
    """

    experience: Experience
    scores: Scores
    member_ids: Tensor
    start_ids: Tensor
    truncated: Tensor
    tokens: dict[int, int]
    starts: tuple[int, ...] = ()
    questions: tuple[str, ...] = ()
    observed: tuple[Mapping[str, ObservationStatistics], ...] = field(default=())
    group_rewards: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    scoring_seconds: float = 0.0

    __repr__ = short_repr


HELD_OUT = "held-out answers"
"""Purpose of the random stream of sampled evaluations, the same for all members and evaluations."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Held-out questions to evaluate members on; every slot answers every question.

    Attributes:
        split: Name of the split.
        questions: Positions of the questions in the split.
        slots: Slots to evaluate. With `base`, a single slot, whose value has no effect.
        settings: Task settings of the member in each slot; empty = none has any.
        base: Evaluate the untrained base.
        answers: Number of answers per question, sampled at temperature 1; None = one greedy answer.
        stop: As in `SamplingRequest`.
    """

    split: Split
    questions: tuple[int, ...]
    slots: tuple[int, ...]
    settings: tuple[TaskSettings, ...] = ()
    base: bool = False
    answers: int | None = None
    stop: Stop = NEVER

    @property
    def _distinct(self) -> tuple[TaskSettings, ...]:
        """Distinct settings, at least one."""
        return tuple(dict.fromkeys(self.settings)) or (NO_SETTINGS,)

    @property
    def starts(self) -> tuple[int, ...]:
        """Questions: all of them for each of the distinct settings."""
        return self.questions * len(self._distinct)

    @property
    def start_settings(self) -> tuple[TaskSettings, ...]:
        """Task settings of each of `starts`."""
        settings: tuple[TaskSettings, ...] = ()
        for each in self._distinct:
            settings += (each,) * len(self.questions)
        return settings

    @property
    def answers_per_question(self) -> int:
        """Number of answers of each slot to each question."""
        return self.answers or 1

    @property
    def start_ids(self) -> Tensor:
        """`[n]` position in `starts` of each row, ordered by slot, then question."""
        count = len(self.questions)
        questions = torch.arange(count).repeat_interleave(self.answers_per_question)
        # Position of the first start with each of the distinct settings.
        first = {each: count * number for number, each in enumerate(self._distinct)}
        of_slots = self.settings or (NO_SETTINGS,) * len(self.slots)
        return torch.cat([first[each] + questions for each in of_slots])

    @property
    def member_ids(self) -> Tensor:
        """`[n]` slots."""
        return torch.tensor(self.slots).repeat_interleave(self.rows_per_slot)

    @property
    def rows_per_slot(self) -> int:
        """Number of rows of a slot."""
        return len(self.questions) * self.answers_per_question

    @property
    def temperature(self) -> Tensor:
        """`[n]` 1 for sampled answers, 0 for greedy ones."""
        value = 0.0 if self.answers is None else 1.0
        return torch.full((len(self.slots) * self.rows_per_slot,), value)

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Numbers of each question's random stream."""
        return [(number,) for number in self.questions]
