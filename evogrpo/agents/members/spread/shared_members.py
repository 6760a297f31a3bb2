"""Members that several processes have, each with its own copy of what they have learnt, and whose work they share."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from evogrpo.agents.members.members import Members
from evogrpo.agents.members.spread.shared_passes import SharedPasses
from evogrpo.agents.members.tokens.language_members import LanguageMembers
from evogrpo.agents.rollout.merging import merged
from evogrpo.agents.rollout.rounds import groups_apart, in_one
from evogrpo.agents.rollout.wanted import Answered, Asked, Collected, Wanted
from evogrpo.data import moved
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.processes import Processes


class SharedMembers:
    """Members of several processes; see `evogrpo.agents.members.members.Members`, whose methods it has.

    All processes of the squad call the same methods. Each acts in whole groups and has them rewarded, and answers some
    of the held-out questions; all of them know what came of it, and learn the same.

    Args:
        local: The members of this process.
        squad: The processes that have the same, at first; perhaps this one alone.

    Attributes:
        shares_learning: Whether each does a part of what is learnt, and not all of it.
    """

    shares_learning: ClassVar[bool] = False

    def __init__(self, local: Members, squad: Processes) -> None:
        self._local, self._squad = local, squad

    def regroup(self, squad: Processes) -> None:
        """Share the work with other processes from now on; all of them call this."""
        self._squad = squad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def sample(self, env: GroupEnvironment, starts: Sequence[int], wanted: Wanted) -> Collected:
        """Sample whole groups in each process, and return those of all."""
        if self._squad.size == 1:
            return self._local.sample(env, starts, wanted)
        own = _groups_dealt(wanted.group_ids, self._squad.size)[self._squad.rank]

        def share() -> Collected | None:
            return _moved(self._local.sample(env, starts, wanted, own), "cpu") if len(own) else None

        parts = [part for part in self._squad.together(share) if part is not None]
        rows = {name: [each.experience[name] for each in parts if name in each.experience] for name in self.policies}
        experience = {name: in_one(groups_apart(batches)) for name, batches in rows.items() if batches}
        observed = tuple(each for part in parts for each in part.observed)
        return _moved(replace(merged(parts), experience=experience, observed=observed), self._local.device)

    def evaluate(self, env: GroupEnvironment, asked: Asked) -> Answered:
        """Answer some of the questions in each process; the base answers what this one is asked."""
        if asked.base or self._squad.size == 1:
            return self._local.evaluate(env, asked)
        return answered_together(self._local, self._squad, env, asked)


class SharedLanguageMembers(SharedMembers):
    """Language models of several processes, each of which does some micro-batches of what is learnt.

    All of them take the same optimizer steps. Small networks are not so: a step of theirs takes less time than telling
    each other gradients.

    Args:
        local: The members of this process.
        squad: The processes that have the same, at first; perhaps this one alone.
    """

    shares_learning = True

    def __init__(self, local: LanguageMembers, squad: Processes) -> None:
        self._bank, self._alone = local.bank, local.bank.passes
        super().__init__(local, Processes())
        self.regroup(squad)

    def regroup(self, squad: Processes) -> None:
        """Share the work with other processes from now on; all of them call this."""
        if squad is self._squad:
            return
        super().regroup(squad)
        # Micro-batches are planned alike in all of them, and memory may have run out in one only.
        self._alone.micro_batch_tokens = min(squad.all(self._bank.micro_batch_tokens))
        self._bank.passes = self._alone if squad.size == 1 else SharedPasses(self._alone, squad)


def answered_together(members: Members, processes: Processes, env: GroupEnvironment, asked: Asked) -> Answered:
    """Let each process ask what all of them have, one policy, a part of the questions."""
    parts = np.array_split(np.asarray(asked.questions), processes.size)
    own = tuple(parts[processes.rank].tolist())
    found = processes.together(lambda: members.evaluate(env, replace(asked, questions=own)) if own else None)
    answers = [part for part in found if part is not None]
    return Answered(
        rewards=np.concatenate([part.rewards for part in answers]),
        tokens=(sum(part.tokens[0] for part in answers),),
    )


def _groups_dealt(group_ids: Tensor, parts: int) -> list[Tensor]:
    """Deal rows in their order, those of a group together."""
    ends = group_ids.unique_consecutive(return_counts=True)[1].cumsum(0)
    shares = np.array_split(np.asarray([0, *ends.tolist()])[1:], parts)
    bounds = [0]
    for share in shares:
        bounds.append(int(share[-1]) if len(share) else bounds[-1])
    return [torch.arange(begin, end) for begin, end in pairwise(bounds)]


def _moved(collected: Collected, device: torch.device | str) -> Collected:
    """Return samples whose tensors are on a device: between processes they travel on the CPU."""
    experience = {policy: moved(batch, device) for policy, batch in collected.experience.items()}
    return replace(collected, experience=experience, truncated=collected.truncated.to(device))
