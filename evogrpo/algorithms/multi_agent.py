"""MultiAgentGRPO: members that act for all agents of an environment."""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.collect import sample_groups
from evogrpo.algorithms.factory import (
    MultiAgentOptions,
    MultiAgentPopulationOptions,
    build_joint_members,
)
from evogrpo.algorithms.grpo import GRPO, EvolvableAlgorithm
from evogrpo.algorithms.population import Population
from evogrpo.config.agent import JointSettings
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import MAX_SAMPLES, check_group_size
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import AgentSpaces
from evogrpo.members.members import Members
from evogrpo.members.networks.members import NetworkMembers
from evogrpo.members.requests import RolloutBatch
from evogrpo.validation import lists_options, refuse_unknown, whole_between


class MultiAgentGRPO(GRPO):
    """A member that acts for all agents of an environment, trained by GRPO.

    A group is `group_size` joint episodes from one joint reset seed. Each agent's part of an
    episode is compared with the same agent's parts of the group's other episodes: an advantage is
    relative within (seed, agent). A policy that several agents share learns from all their rows.

    Everything else is as in `GRPO`; `learn` takes the `experience` that `collect` returned. The
    constructor creates one member in banks of its own; `MultiAgentGRPO.population` creates several
    that share them.

    Args:
        observation_spaces: Observation space of each agent by name, as in
            `PettingZooGroups.observation_spaces`.
        action_spaces: Action space of each agent by name.
        options: All other options, with defaults; see
            `evogrpo.algorithms.factory.MultiAgentOptions`.

    Raises:
        ValueError: If an argument is unknown or out of range, or agents of one policy differ in
            their spaces.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1, applied to each agent separately.
    """

    __slots__ = ()

    kinds: ClassVar[Mapping[str, type[Members] | str]] = {"joint": NetworkMembers}
    _build = staticmethod(build_joint_members)

    @lists_options(MultiAgentOptions.__annotations__, Hyperparameters, JointSettings)
    def __init__(
        self,
        observation_spaces: AgentSpaces | None = None,
        action_spaces: AgentSpaces | None = None,
        **options: Unpack[MultiAgentOptions],
    ) -> None:
        members, first = self._build(1, observation_spaces, action_spaces, None, None, options)
        Agent.__init__(self, members, 0, options.get("index", 0), first)

    @classmethod
    @lists_options(
        MultiAgentPopulationOptions.__annotations__,
        Hyperparameters,
        JointSettings,
        EvolvableAlgorithm.population,
    )
    def population(  # type: ignore[override]  # spaces by agent
        cls,
        size: int | None = None,
        observation_spaces: AgentSpaces | None = None,
        action_spaces: AgentSpaces | None = None,
        **options: Unpack[MultiAgentPopulationOptions],
    ) -> Population:
        """Create members that play and learn in the same batches; see `GRPO.population`.

        Args:
            size: Number of members.
            observation_spaces: As for one member.
            action_spaces: As for one member.
            options: As for one member, and `wrapper_cls`, `wrapper_kwargs`, `samples_per_step`
                (joint episodes), `spread` and `founders` as in `GRPO.population`.

        Raises:
            ValueError: If an argument is unknown or out of range.
        """
        # Options of language models have no meaning for several agents.
        arguments: Any = options
        names = (
            "size",
            "observation_spaces",
            "action_spaces",
            *MultiAgentPopulationOptions.__annotations__,
        )
        refuse_unknown("argument", options, names)
        return super().population(size, observation_spaces, action_spaces, **arguments)  # type: ignore[arg-type]

    def collect(self, env: PettingZooGroups, samples_per_step: int | None = None) -> RolloutBatch:
        """Play groups of joint episodes on the training starts of the agent's current step.

        Args:
            env: The environment.
            samples_per_step: Number of joint episodes; one group by default.

        Raises:
            ValueError: If the group size does not divide it, or the environment does not fit the
                member.
        """
        # The groups of one agent are not divided among ranks.
        self.check_single_rank("collect")
        self.members.check(env)
        samples = self.group_size
        if samples_per_step is not None:
            samples = whole_between("samples_per_step", samples_per_step, 1, MAX_SAMPLES)
        check_group_size(self.group_size, samples, owner="the member")
        groups = range(samples // self.group_size)
        sampled = sample_groups(
            self.members,
            env,
            [self.learner()],
            [groups],
            starts_per_step=len(groups),
            purpose="sample",
        )
        self.members.update_statistics(sampled.observed)
        return sampled
