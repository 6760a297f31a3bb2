"""MultiAgentGRPO: several policies of one member, learning together in a joint environment."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.factory import (
    MultiAgentOptions,
    build_joint_policy_set,
    check_founders,
    check_size,
    founder_samples,
    resolve_search_space,
)
from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.policies.distributed import distribute, placement_of
from evogrpo.algorithms.policies.settings import JointSettings
from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.collect import collect
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.config.checks import flag, lists_options
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import AgentSpaces


class MultiAgentGRPO(GRPO):
    """A member that acts for every agent of a joint environment, trained by group relative policy optimisation.

    A group is `group_size` joint episodes from one joint reset seed. Each agent's part of an episode is compared with
    the same agent's parts of the group's other episodes: an advantage is relative within (seed, agent). A policy that
    several agents share learns from all their rows.

    Everything else is as in `GRPO`; `learn` takes what `collect` returned as `experience`. The constructor makes one
    member in banks of its own; `MultiAgentGRPO.population` makes several that share them.

    Args:
        observation_spaces: What each agent sees, by its name, as `PettingZooGroups.observation_spaces` has it.
        action_spaces: Where each agent acts, by its name.
        options: Everything else, with defaults: see `evogrpo.algorithms.factory.MultiAgentOptions`.

    Raises:
        ValueError: If an argument is unknown or out of range, or agents of one policy differ in their spaces.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1, applied to every agent apart.
    """

    __slots__ = ()

    kinds = ("joint",)

    @lists_options(MultiAgentOptions.__annotations__, Hyperparameters, JointSettings)
    def __init__(
        self,
        observation_spaces: AgentSpaces | None = None,
        action_spaces: AgentSpaces | None = None,
        **options: Unpack[MultiAgentOptions],
    ) -> None:
        members, first = build_joint_policy_set(1, observation_spaces, action_spaces, options)
        Agent.__init__(self, members, 0, options.get("index", 0), first)

    @classmethod
    @lists_options(MultiAgentOptions.__annotations__, Hyperparameters, JointSettings)
    def population(  # type: ignore[override]  # spaces by agent
        cls,
        size: int | None = None,
        observation_spaces: AgentSpaces | None = None,
        action_spaces: AgentSpaces | None = None,
        wrapper_cls: type[Any] | None = None,
        wrapper_kwargs: Mapping[str, Any] | None = None,
        *,
        samples_per_step: int | None = None,
        spread: bool = True,
        founders: Sequence[Hyperparameters] | None = None,
        **options: Unpack[MultiAgentOptions],
    ) -> Population:
        """Make members that play and learn together.

        The first member has the given hyperparameters; those that evolve are spread over their ranges for the others.

        Args:
            size: Number of members.
            observation_spaces: As for one member.
            action_spaces: As for one member.
            wrapper_cls: Wraps every agent that the population hands out: `wrapper_cls(agent, **wrapper_kwargs)`.
            wrapper_kwargs: See `wrapper_cls`.
            samples_per_step: Joint episodes per member and learning step, if group_size evolves over a range: only its
                divisors are dealt. Unneeded when group_size has choices.
            spread: False lets every member start with the given hyperparameters.
            founders: What the first members begin with of what evolves, as `evogrpo.best_hyperparameters(RUN)` gives;
                the rest are spread. Values outside their ranges are moved to the nearest, with a warning.
            options: As for one member.

        Raises:
            ValueError: If an argument is unknown or out of range.
        """
        size = check_size(size, options)
        flag("spread", spread)
        options = resolve_search_space(options, samples_per_step, words=False)
        samples = founder_samples(options, samples_per_step)
        places = placement_of(size)
        members, first = build_joint_policy_set(places.held, observation_spaces, action_spaces, options)
        members = distribute(members, places)
        given = check_founders(founders, first, members.hp_config, samples)
        agents = cls.founders(members, first, options.get("index", 0), samples=samples, spread=spread, given=given)
        return Population(agents, members, wrapper_cls=wrapper_cls, wrapper_kwargs=wrapper_kwargs)

    # ---- acting and learning

    def get_action(self, states: Any, training: bool | None = None, action_mask: Any = None) -> Any:
        """Choose what every living agent does in one joint environment.

        Args:
            states: What each of them sees, by agent, as the environment's `reset` and `step` return it.
            training: True samples; False takes the most likely actions. None = the member's training mode.
            action_mask: Legal values by agent, where the observations themselves do not say; None = all.

        Returns:
            The environment's own actions, by agent.

        Raises:
            ValueError: If an agent has no policy, or an observation or a mask does not fit.
        """
        return super().get_action(states, training, action_mask)

    def collect(self, env: PettingZooGroups, samples_per_step: int | None = None) -> RolloutBatch:
        """Play groups of joint episodes on the training starts of the agent's present step, to learn from.

        Args:
            env: Where to act.
            samples_per_step: Joint episodes; one group by default.

        Raises:
            ValueError: If the group size does not divide it, or the environment is not one for this member.
        """
        self.members.check(env)
        samples = samples_per_step or self.group_size
        block = max(1, samples // self.group_size)
        return collect(self.members, [self.learner()], env, samples_per_step=samples, block=block)


_CLASSES: dict[str, type[GRPO]] = {kind: each for each in (GRPO, MultiAgentGRPO) for kind in each.kinds}


def own_algorithm(algorithm: type[Agent]) -> str | None:
    """Return what a checkpoint calls an algorithm of the user's own; None for ours."""
    return None if algorithm in _CLASSES.values() else algorithm.__qualname__


def algorithm_class(kind: str, stored: str | None, given: type[Agent] | None = None) -> type[Agent]:
    """Return the class of a stored population's agents; a name in a checkpoint is never imported.

    Args:
        kind: Of their members.
        stored: What the checkpoint calls the algorithm; None = one of ours.
        given: The class, if the caller has one of its own.

    Raises:
        ValueError: If a class of the user's own is needed, or another one was given.
        KeyError: If nothing of ours has members of that kind.
    """
    found = _CLASSES[kind] if given is None and stored is None else given
    if found is None:
        raise ValueError(f"this run's agents are of a class of your own, {stored!r}: give it as algorithm={stored}")
    if own_algorithm(found) != stored or kind not in found.kinds:
        ours = stored or _CLASSES[kind].__name__
        raise ValueError(
            f"this run's agents are of the class {ours!r}, got {found.__qualname__!r}: give algorithm={ours}"
        )
    return found
