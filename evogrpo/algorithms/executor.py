"""Who lets the members of a population act and learn: this process, or several that have some of them each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.distributed import DistributedPolicySet, SplitEvaluator
from evogrpo.algorithms.policies.placement import Placement
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.policies.replicated import ReplicatedPolicySet
from evogrpo.algorithms.policies.row_exchange import borrow, lend, lent_slots
from evogrpo.algorithms.rollout.collect import collect, merge_ranks
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.data import Batch, Experience, LearnReport
from evogrpo.distributed import Processes
from evogrpo.envs.protocol import GroupEnvironment

if TYPE_CHECKING:
    from evogrpo.algorithms.agent import Agent


class Executor:
    """Lets all members act and learn in this process.

    Args:
        members: All of them.

    Attributes:
        members: Those in this process.
        processes: Who trains them.
    """

    def __init__(self, members: PolicySet) -> None:
        self.members = members
        self.processes = Processes()

    def collect(
        self,
        learners: Sequence[Learner],
        env: GroupEnvironment,
        *,
        samples_per_step: int,
        block: int,
        samples: Mapping[int, int] | None,
    ) -> RolloutBatch:
        """Let members sample what they learn from; see `collecting.collect`."""
        return collect(self.members, learners, env, samples_per_step=samples_per_step, block=block, samples=samples)

    def learn(
        self, algorithm: "type[Agent]", learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Let members learn from what they sampled; see `Agent.learn_together`."""
        return algorithm.learn_together(self.members, learners, experience)

    def inherit(self, parents: Sequence[int | None], vacant: Collection[int]) -> None:
        """Give slot i everything slot parents[i] has learnt; some slots hold nobody from now on."""
        self.members.banks.inherit(parents)

    def settle(self, vacant: Collection[int]) -> None:
        """Share out members that have their states, where some slots hold nobody: here all are in one process."""

    def checkpoint_agent(self, agent: "Agent", state: Mapping[str, Tensor]) -> "Agent":
        """Return an agent that can be saved in this process, given what it has learnt: here it is all there."""
        return agent

    def evaluation_member(self) -> PolicySet:
        """Return one fresh member, to be given a learner state and asked held-out questions."""
        return self.members.new_member()


class DistributedExecutor(Executor):
    """Lets every process's members act and learn there, and tells all processes what came of it.

    What members have sampled stays in their process, unless others learn from it: in `RolloutBatch.experience` rows are
    numbered by place.
    """

    def __init__(self, members: DistributedPolicySet) -> None:
        super().__init__(members.local)
        self.processes, self._banks = members.processes, members.banks

    @property
    def _places(self) -> Placement:
        return self._banks.places

    @property
    def _speaks(self) -> bool:
        """Whether this process tells the others of its members: one of those that have the same."""
        own = self._places.own
        return len(own) > 0 and self._places.owner(own[0]) == self._places.rank

    @property
    def _shares_learning(self) -> bool:
        """Whether this process does a part of what a member learns, and others the rest."""
        return self._places.divided and isinstance(self.members, ReplicatedPolicySet) and self.members.shares_learning

    def _here(self, learners: Sequence[Learner]) -> list[Learner]:
        """Return the learners of this process by its own numbers, and so those whom they learn from."""
        places = self._places
        return [
            replace(
                learner,
                slot=places.place(learner.slot),
                sources=None if learner.sources is None else tuple(places.number(slot) for slot in learner.sources),
            )
            for learner in learners
            if learner.slot in places.own
        ]

    def collect(
        self,
        learners: Sequence[Learner],
        env: GroupEnvironment,
        *,
        samples_per_step: int,
        block: int,
        samples: Mapping[int, int] | None,
    ) -> RolloutBatch:
        """Let members sample where they live."""
        here, slots = self._here(learners), self._places.own
        counts = None if samples is None else {place: samples[slot] for place, slot in enumerate(slots)}
        own: RolloutBatch | None = None

        def sample() -> RolloutBatch | None:
            nonlocal own
            if not here:
                return None
            own = collect(self.members, here, env, samples_per_step=samples_per_step, block=block, samples=counts)
            if not self._speaks:
                return None
            return replace(
                own,
                experience={},
                observed=(),
                member_ids=torch.tensor(slots)[own.member_ids],
                tokens={slots[place]: tokens for place, tokens in own.tokens.items()},
                earned={slots[place]: groups for place, groups in own.earned.items()},
            )

        found = [part for part in self.processes.run_section(sample, divided=self._places.divided) if part is not None]
        return replace(merge_ranks(found), experience={} if own is None else own.experience)

    def learn(
        self, algorithm: "type[Agent]", learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Let members learn where they live, from what they and their sources elsewhere have sampled."""
        here, places = self._here(learners), self._places
        lent = lent_slots(places, learners)
        if lent:
            experience = self._with_lent(here, experience, lent)

        def learn() -> dict[int, LearnReport]:
            found = algorithm.learn_together(self.members, here, experience) if here else {}
            return {places.own[place]: report for place, report in found.items()} if self._speaks else {}

        reports = self.processes.run_section(learn, divided=self._shares_learning)
        return {slot: report for part in reports for slot, report in part.items()}

    def _with_lent(self, here: Sequence[Learner], experience: Experience, lent: Sequence[int]) -> Experience:
        """Return what was sampled here, and what members here learn from of what was sampled elsewhere."""
        places, own = self._places, dict[str, Batch]()

        def find() -> None:
            own.update(lend(self.members, places, experience, lent))

        self.processes.run_section(find, divided=self._shares_learning)
        lenders = sorted({places.owner(slot) for slot in lent})
        parts = {rank: self.processes.broadcast(own if rank == places.rank else {}, source=rank) for rank in lenders}
        return borrow(self.members, places, experience, here, parts)

    def inherit(self, parents: Sequence[int | None], vacant: Collection[int]) -> None:
        """Let members take over states, and share them out anew."""
        self._banks.inherit(parents, vacant)
        if isinstance(self.members, ReplicatedPolicySet):
            self.members.regroup(self.processes.squad(self._places.squads))

    def settle(self, vacant: Collection[int]) -> None:
        """Share out those that remain; each keeps its state."""
        self.inherit([None if slot in vacant else slot for slot in range(self._banks.size)], vacant)

    def checkpoint_agent(self, agent: "Agent", state: Mapping[str, Tensor]) -> "Agent":
        """Return an agent of its own, wherever the member lives."""
        return agent.copy_with_state(state)

    def evaluation_member(self) -> PolicySet:
        """Return one fresh member, of whom every process asks a part of the questions."""
        return cast(PolicySet, SplitEvaluator(self.members.new_member(), self.processes))


def executor_for(members: PolicySet) -> Executor:
    """Return who lets these members act and learn."""
    return DistributedExecutor(members) if isinstance(members, DistributedPolicySet) else Executor(members)
