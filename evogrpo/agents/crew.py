"""Who lets the members of a population act and learn: this process, or several that have some of them each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torch import Tensor

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.members.members import Members
from evogrpo.agents.members.spread.spread_members import Examinee, SpreadMembers
from evogrpo.agents.rollout.collecting import collect
from evogrpo.agents.rollout.merging import merged
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.processes import Processes
from evogrpo.records import Experience, LearnReport

if TYPE_CHECKING:
    from evogrpo.agents.agent import Agent


class Crew:
    """Lets all members act and learn in this process.

    Args:
        members: All of them.

    Attributes:
        members: Those in this process.
        processes: Who trains them.
    """

    def __init__(self, members: Members) -> None:
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
    ) -> Collected:
        """Let members sample what they learn from; see `collecting.collect`."""
        return collect(self.members, learners, env, samples_per_step=samples_per_step, block=block, samples=samples)

    def learn(
        self, algorithm: "type[Agent]", learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Let members learn from what they sampled; see `Agent.learn_together`."""
        return algorithm.learn_together(self.members, learners, experience)

    def savable(self, agent: "Agent", state: Mapping[str, Tensor]) -> "Agent":
        """Return an agent that can be saved in this process, given what it has learnt: here it is all there."""
        return agent

    def examinee(self) -> Members:
        """Return one fresh member, to be given a learner state and asked held-out questions."""
        return self.members.alone()


class SpreadCrew(Crew):
    """Lets every process's members act and learn there, and tells all processes what came of it.

    What members have sampled stays in their process: in `Collected.experience` rows are numbered by place.
    """

    def __init__(self, members: SpreadMembers) -> None:
        super().__init__(members.local)
        self.processes, self._places = members.processes, members.places

    @property
    def _speaks(self) -> bool:
        """Whether this process tells the others of its members: one of those that have the same."""
        own = self._places.own
        return len(own) > 0 and self._places.owner(own.start) == self._places.rank

    def _here(self, learners: Sequence[Learner]) -> list[Learner]:
        first, own = self._places.own.start, self._places.own
        return [replace(learner, slot=learner.slot - first) for learner in learners if learner.slot in own]

    def collect(
        self,
        learners: Sequence[Learner],
        env: GroupEnvironment,
        *,
        samples_per_step: int,
        block: int,
        samples: Mapping[int, int] | None,
    ) -> Collected:
        """Let members sample where they live."""
        here, first = self._here(learners), self._places.own.start
        counts = None if samples is None else {slot - first: samples[slot] for slot in self._places.own}
        own: Collected | None = None

        def sample() -> Collected | None:
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
                member_ids=own.member_ids + first,
                tokens={first + place: tokens for place, tokens in own.tokens.items()},
                earned={first + place: groups for place, groups in own.earned.items()},
            )

        found = [part for part in self.processes.together(sample, divided=self._places.divided) if part is not None]
        return replace(merged(found), experience={} if own is None else own.experience)

    def learn(
        self, algorithm: "type[Agent]", learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Let members learn where they live."""
        here, first = self._here(learners), self._places.own.start

        def learn() -> dict[int, LearnReport]:
            found = algorithm.learn_together(self.members, here, experience) if here else {}
            return {first + place: report for place, report in found.items()} if self._speaks else {}

        parts = self.processes.together(learn, divided=self._places.divided)
        return {slot: report for part in parts for slot, report in part.items()}

    def savable(self, agent: "Agent", state: Mapping[str, Tensor]) -> "Agent":
        """Return an agent of its own, wherever the member lives."""
        return agent.twin(state)

    def examinee(self) -> Members:
        """Return one fresh member, of whom every process asks a part of the questions."""
        return cast(Members, Examinee(self.members.alone(), self.processes))


def crew_of(members: Members) -> Crew:
    """Return who lets these members act and learn."""
    return SpreadCrew(members) if isinstance(members, SpreadMembers) else Crew(members)
