"""Executors: run rollouts and learning steps in one process, or with the members divided among ranks."""

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
from evogrpo.interruption import Stop

if TYPE_CHECKING:
    from evogrpo.algorithms.agent import Agent


class Executor:
    """Runs all members in this process.

    Args:
        members: All members.

    Attributes:
        members: Members of this process.
        processes: The process group.
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
        stop: Stop,
    ) -> RolloutBatch:
        """Sample and reward one learning step; see `rollout.collect.collect`."""
        return collect(
            self.members, learners, env, samples_per_step=samples_per_step, block=block, samples=samples, stop=stop
        )

    def learn(
        self, algorithm: "type[Agent]", learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Take one learning step; see `Agent.learn_together`."""
        return algorithm.learn_together(self.members, learners, experience)

    def inherit(self, parents: Sequence[int | None], vacant: Collection[int]) -> None:
        """Copy the train state of slot `parents[i]` to slot i; slots in `vacant` become empty."""
        self.members.banks.inherit(parents)

    def settle(self, vacant: Collection[int]) -> None:
        """Distribute restored members among ranks; `vacant` slots are empty."""

    def checkpoint_agent(self, agent: "Agent", state: Mapping[str, Tensor]) -> "Agent":
        """Return an agent with this train state that can be saved on this rank."""
        return agent

    def evaluation_member(self) -> PolicySet:
        """Return one fresh member, to load train states into and evaluate them."""
        return self.members.new_member()


class DistributedExecutor(Executor):
    """Runs each rank's members on that rank and shares the results.

    Samples stay on their rank unless members elsewhere learn from them; `RolloutBatch.experience` has local slots.
    """

    def __init__(self, members: DistributedPolicySet) -> None:
        super().__init__(members.local)
        self.processes, self._banks = members.processes, members.banks

    @property
    def _places(self) -> Placement:
        return self._banks.places

    @property
    def _reports(self) -> bool:
        """True on the rank that reports for its members: the first of those that hold the same ones."""
        own = self._places.own
        return len(own) > 0 and self._places.owner(own[0]) == self._places.rank

    @property
    def _shares_learning(self) -> bool:
        """True if several ranks divide the learning of one member."""
        return self._places.divided and isinstance(self.members, ReplicatedPolicySet) and self.members.shares_learning

    def _local_learners(self, learners: Sequence[Learner]) -> list[Learner]:
        """Return the learners of this rank, with local slot numbers."""
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
        stop: Stop,
    ) -> RolloutBatch:
        """Sample on each rank, and merge."""
        here, slots = self._local_learners(learners), self._places.own
        counts = None if samples is None else {place: samples[slot] for place, slot in enumerate(slots)}
        own: RolloutBatch | None = None

        def sample() -> RolloutBatch | None:
            nonlocal own
            if not here:
                return None
            own = collect(
                self.members, here, env, samples_per_step=samples_per_step, block=block, samples=counts, stop=stop
            )
            if not self._reports:
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
        """Learn on each rank, from its own samples and those of sources on other ranks."""
        here, places = self._local_learners(learners), self._places
        lent = lent_slots(places, learners)
        if lent:
            experience = self._add_foreign_rows(here, experience, lent)

        def learn() -> dict[int, LearnReport]:
            found = algorithm.learn_together(self.members, here, experience) if here else {}
            return {places.own[place]: report for place, report in found.items()} if self._reports else {}

        reports = self.processes.run_section(learn, divided=self._shares_learning)
        return {slot: report for part in reports for slot, report in part.items()}

    def _add_foreign_rows(self, here: Sequence[Learner], experience: Experience, lent: Sequence[int]) -> Experience:
        """Add the samples of other ranks that members of this rank learn from."""
        places, own = self._places, dict[str, Batch]()

        def find() -> None:
            own.update(lend(self.members, places, experience, lent))

        self.processes.run_section(find, divided=self._shares_learning)
        lenders = sorted({places.owner(slot) for slot in lent})
        parts = {rank: self.processes.broadcast(own if rank == places.rank else {}, source=rank) for rank in lenders}
        return borrow(self.members, places, experience, here, parts)

    def inherit(self, parents: Sequence[int | None], vacant: Collection[int]) -> None:
        """Copy train states and redistribute members."""
        self._banks.inherit(parents, vacant)
        if isinstance(self.members, ReplicatedPolicySet):
            self.members.regroup(self.processes.squad(self._places.squads))

    def settle(self, vacant: Collection[int]) -> None:
        """Redistribute the remaining members; each keeps its state."""
        self.inherit([None if slot in vacant else slot for slot in range(self._banks.size)], vacant)

    def checkpoint_agent(self, agent: "Agent", state: Mapping[str, Tensor]) -> "Agent":
        """Return an independent agent with this train state."""
        return agent.copy_with_state(state)

    def evaluation_member(self) -> PolicySet:
        """Return one fresh member; each rank evaluates it on part of the questions."""
        return cast(PolicySet, SplitEvaluator(self.members.new_member(), self.processes))


def executor_for(members: PolicySet) -> Executor:
    """Return the executor of these members."""
    return DistributedExecutor(members) if isinstance(members, DistributedPolicySet) else Executor(members)
