"""MultiAgentGRPO: members with several policies that learn in a multi-agent environment."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.factory import MultiAgentOptions, build_joint_policy_set, create_population
from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.policies.policy_set import PolicySet, RolloutBatch
from evogrpo.algorithms.policies.settings import JointSettings
from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.collect import collect
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import AgentSpaces
from evogrpo.validation import lists_options


class MultiAgentGRPO(GRPO):
    """A member that acts for all agents of a multi-agent environment, trained by group relative policy optimisation.

    A group is `group_size` joint episodes from one joint reset seed. Each agent's part of an episode is compared with
    the same agent's parts of the group's other episodes: an advantage is relative within (seed, agent). A policy that
    several agents share learns from all their rows.

    Everything else is as in `GRPO`; `learn` takes the `experience` that `collect` returned. The constructor creates one
    member in banks of its own; `MultiAgentGRPO.population` creates several that share them.

    Args:
        observation_spaces: Observation space of each agent by name, as in `PettingZooGroups.observation_spaces`.
        action_spaces: Action space of each agent by name.
        options: All other options, with defaults; see `evogrpo.algorithms.factory.MultiAgentOptions`.

    Raises:
        ValueError: If an argument is unknown or out of range, or agents of one policy differ in their spaces.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1, applied to each agent separately.
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
        """Create members that play and learn in the same batches.

        The first member has the given hyperparameters; those that evolve are spread over their ranges for the others.

        Args:
            size: Number of members.
            observation_spaces: As for one member.
            action_spaces: As for one member.
            wrapper_cls: Class that wraps every agent: `population[i]` is `wrapper_cls(agent, **wrapper_kwargs)`.
            wrapper_kwargs: Keyword arguments of `wrapper_cls`.
            samples_per_step: Joint episodes per member and learning step. Only needed if group_size evolves over a
                range: values are then divisors of it.
            spread: False starts all members with the given hyperparameters.
            founders: Hyperparameters of the first members, as `evogrpo.best_hyperparameters(RUN)` returns them; the
                others are spread. Values outside their ranges are moved to the nearest bound, with a warning.
            options: As for one member.

        Raises:
            ValueError: If an argument is unknown or out of range.
        """

        def build(size: int, options: Mapping[str, Any]) -> tuple[PolicySet, Hyperparameters]:
            return build_joint_policy_set(size, observation_spaces, action_spaces, options)

        return create_population(
            cls,
            build,
            size,
            options,
            words=False,
            samples_per_step=samples_per_step,
            spread=spread,
            founders=founders,
            wrapper_cls=wrapper_cls,
            wrapper_kwargs=wrapper_kwargs,
        )

    def collect(self, env: PettingZooGroups, samples_per_step: int | None = None) -> RolloutBatch:
        """Play groups of joint episodes for one learning step, on the training starts of the agent's current step.

        Args:
            env: The environment.
            samples_per_step: Number of joint episodes; one group by default.

        Raises:
            ValueError: If the group size does not divide it, or the environment does not fit the member.
        """
        self.check_single_rank("collect")
        self.members.check(env)
        samples = samples_per_step or self.group_size
        block = max(1, samples // self.group_size)
        return collect(self.members, [self.learner()], env, samples_per_step=samples, block=block)


_CLASSES: dict[str, type[GRPO]] = {kind: each for each in (GRPO, MultiAgentGRPO) for kind in each.kinds}


def own_algorithm(algorithm: type[Agent]) -> str | None:
    """Return the name of a user's own algorithm for checkpoints; None for built-in ones."""
    return None if algorithm in _CLASSES.values() else algorithm.__qualname__


def algorithm_class(kind: str, stored: str | None, given: type[Agent] | None = None) -> type[Agent]:
    """Return the class of a stored population's agents; a name in a checkpoint is never imported.

    Args:
        kind: Kind of their policy set.
        stored: Name of the algorithm in the checkpoint; None = built-in.
        given: The user's class; None = the built-in class of this kind.

    Raises:
        ValueError: If the user's class is missing or does not match.
        KeyError: If no built-in class has this kind.
    """
    found = _CLASSES[kind] if given is None and stored is None else given
    if found is None:
        raise ValueError(f"The run's agents have a class of your own, {stored!r}. Pass algorithm={stored}.")
    if own_algorithm(found) != stored or kind not in found.kinds:
        ours = stored or _CLASSES[kind].__name__
        raise ValueError(
            f"The run's agents have the class {ours!r}, got {found.__qualname__!r}. Pass algorithm={ours}."
        )
    return found
