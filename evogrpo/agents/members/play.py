"""How members act, whatever they act in: the records and the protocol that collecting, evaluating and agents share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.groups import GroupEnvironment, Scores, Split
from evogrpo.records import Batch


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


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Rewarded samples, the rows of a member next to each other, and so those of a group.

    Attributes:
        batch: What members learn from; prompt numbers are positions in the step's block.
        scores: What the environment said, row by row, without any penalty; step rewards are in the batch alone.
        tokens: Tokens (or environment steps) processed, by slot.
        starts: The part of the block that was opened.
        questions: What these starts ask, in words; empty where they ask nothing.
        observed: What these samples add to running statistics of observations; one entry per sampling.
    """

    batch: Batch
    scores: Scores
    tokens: dict[int, int]
    starts: tuple[int, ...] = ()
    questions: tuple[str, ...] = ()
    observed: tuple[ObservationStatistics, ...] = field(default=())


class Play(Protocol):
    """How members act: by writing whole completions, or step by step as an environment asks.

    Chosen when a population is made; nobody else asks which it is.
    """

    def over(self, body: Any) -> "Play":
        """Return the same for the members of another bank."""
        ...

    def check(self, env: Any) -> None:
        """Refuse with a ValueError an environment that these members cannot act in."""
        ...

    def sample(self, env: GroupEnvironment, starts: Sequence[int], wanted: Wanted) -> Sampled:
        """Act from training starts, sampling."""
        ...

    def evaluate(
        self, env: GroupEnvironment, split: Split, count: int, slots: Sequence[int], *, base: bool
    ) -> NDArray[np.float64]:
        """Act greedily from the first `count` starts of a split; return raw rewards `[slots * count]`, slot by slot."""
        ...

    def absorb(self, observed: Sequence[ObservationStatistics]) -> None:
        """Add to the members' running statistics what a learning step's samples observed."""
        ...

    def act(self, learner: Learner, seen: Any, *, training: bool, action_mask: Any = None) -> Any:
        """Choose actions for what a caller's own loop saw; see `GRPO.get_action`."""
        ...

    def predict(
        self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any
    ) -> NDArray[Any]:
        """Choose actions as the environment takes them; see `GRPO.predict`."""
        ...

    def batch(self, learner: Learner, experiences: Any) -> Batch:
        """Read what a caller's own loop collected; see `GRPO.learn`."""
        ...
