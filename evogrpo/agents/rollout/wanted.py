"""What is asked of members that act, and what comes back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evogrpo.agents.learning.learner import Learner
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.groups import Scores
from evogrpo.outline import outline
from evogrpo.records import Experience


@dataclass(frozen=True, kw_only=True)
class Wanted:
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

    __repr__ = outline

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

    def _spread(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(torch.tensor(self.counts))


Observed = Mapping[str, ObservationStatistics]
"""What samples add to the running statistics of observations, by policy."""


@dataclass(frozen=True, kw_only=True)
class Collected:
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
    """

    experience: Experience
    scores: Scores
    member_ids: Tensor
    start_ids: Tensor
    truncated: Tensor
    tokens: dict[int, int]
    starts: tuple[int, ...] = ()
    questions: tuple[str, ...] = ()
    observed: tuple[Observed, ...] = field(default=())

    __repr__ = outline
