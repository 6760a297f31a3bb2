"""Lessons: which member learns from which sampled row; one row may teach several members, and is never copied whole."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evogrpo.agents.learning.learner import Learner
from evogrpo.data import Batch


@dataclass(frozen=True, kw_only=True)
class Lessons:
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

    def only(self, numbers: Tensor) -> "Lessons":
        """Return some of the lessons, in that order."""
        rows = numbers if self.rows is None else self.rows[numbers]
        return Lessons(batch=self.batch, rows=rows, outcomes=self.outcomes.select(numbers))

    def as_sampled(self, numbers: Tensor) -> Batch:
        """Return the rows of some lessons as a batch of the members that acted."""
        part = self.select(numbers)
        return part if part.sampled_by is None else replace(part, member_ids=part.sampled_by)

    def taken_apart(self) -> "Lessons":
        """Return one lesson for each action that counts, in order."""
        mask = self.outcomes.action_mask
        places = mask.flatten().nonzero()[:, 0]
        batch = self.batch.flattened()
        if self.rows is None:
            return Lessons(batch=batch, rows=None, outcomes=batch.outcomes())
        # Where a row's first action stands among all of the batch's, then each of its lesson's actions from there.
        counts = self.batch.action_mask.sum(1)
        first = counts.cumsum(0) - counts
        lesson = places // mask.shape[1]
        amounts = mask.sum(1)
        place = torch.arange(len(places), device=places.device) - (amounts.cumsum(0) - amounts)[lesson]
        rows = first[self.rows[lesson]] + place
        own = replace(batch.outcomes().select(rows), member_ids=self.outcomes.member_ids[lesson])
        return Lessons(batch=batch, rows=rows, outcomes=own)


def lessons_of(batch: Batch, learners: Mapping[int, Learner]) -> Lessons:
    """Return what each member is to learn from.

    Args:
        batch: Rows of any members.
        learners: By slot. Those without `sources` learn from their own rows.

    Raises:
        ValueError: If a member is to learn from others in a batch that does not know how likely its actions were.
    """
    if all(learner.sources is None for learner in learners.values()):
        return Lessons(batch=batch, rows=None, outcomes=batch.outcomes())
    if batch.sampler_log_probs is None:
        raise ValueError(
            "members learn from each other's samples by how likely these were when they were sampled, but this batch "
            "has no sampler_log_probs: let every member learn from its own, or record them"
        )
    acted = batch.member_ids
    rows, owners = [], []
    for slot in sorted(learners):
        sources = torch.tensor(learners[slot].taught_by, device=acted.device, dtype=acted.dtype)
        rows.append(torch.isin(acted, sources).nonzero()[:, 0])
        owners.append(torch.full_like(rows[-1], slot))
    row, owner = torch.cat(rows), torch.cat(owners)
    known = replace(batch, sampled_by=acted)
    outcomes = replace(
        known.outcomes().select(row),
        member_ids=owner,
        # A group stays one group for each member that learns from it.
        group_ids=batch.group_ids[row] * (1 + max(learners)) + owner,
    )
    return Lessons(batch=known, rows=row, outcomes=outcomes)
