"""PettingZooGroups: groups of joint episodes of a parallel PettingZoo environment."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.conversion import (
    can_act,
    legal_actions,
    own_copy,
    scalars,
    to_environment,
)
from evogrpo.envs.control.policy_mapping import AgentSpaces, PolicyMapping, map_policies, prefix_of
from evogrpo.envs.control.random_play import check_determinism
from evogrpo.envs.control.rollout import EpisodeRequest, Episodes
from evogrpo.envs.control.seeded_groups import (
    DEFAULT_MAX_EPISODE_STEPS,
    SeededGroups,
    declared_limit,
    make_example,
)
from evogrpo.envs.control.single_env import (
    ACTION_MASK,
    RESET_RESULTS,
    STEP_RESULTS,
    EndForkedChildren,
    check_mask_name,
    check_same_actions,
    checked_results,
)
from evogrpo.envs.control.vector_env import PolicyInput, SerialVectorEnv, VectorEnv, VectorStep
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import TEST_SIZE, VALIDATION_SIZE, Split
from evogrpo.extras import require
from evogrpo.records import Actor
from evogrpo.text import class_name
from evogrpo.validation import flag, names_unknown, whole_between

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

AgentValues = Mapping[Any, Any]
"""One value per agent."""

AGENT_REWARDS = "rewards of agents"
"""Key of the rewards of all agents in the infos of `JointGymEnv`."""

AgentDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """Result of a reset or a step of one joint environment.

    Attributes:
        observations: Observations of the agents that are active next.
        masks: Action masks of the same agents, from their observation or info; None = no mask.
        rewards: Rewards of all agents that the environment named in this step.
        terminated: Agents that reached a terminal state in this step.
        truncated: Agents that were truncated in this step.
    """

    observations: Mapping[str, Any]
    masks: Mapping[str, Any]
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: frozenset[str] = frozenset()
    truncated: frozenset[str] = frozenset()


class JointEnv:
    """A parallel environment with checks and a step limit, whose agents are named by text.

    Args:
        env: The environment.
        max_episode_steps: Steps after which all active agents are truncated.
        action_spaces: Action spaces of the agents known in advance, which a reset must not change.

    Attributes:
        env: As given.
    """

    def __init__(
        self, env: "ParallelEnv[Any, Any, Any]", max_episode_steps: int, action_spaces: AgentSpaces
    ) -> None:
        self.env = env
        self._limit = max_episode_steps
        self._action_spaces = action_spaces
        self._ids: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._steps = 0

    def reset(self, seed: int) -> JointStep:
        """Start an episode."""
        with EndForkedChildren():
            observations, infos = checked_results(self.env.reset(seed=seed), RESET_RESULTS)
        self._ids = {str(agent): agent for agent in self.env.agents}
        self._ended = set()
        self._steps = 0
        for name, agent in self._ids.items():
            if name in self._action_spaces:
                check_same_actions(self._action_spaces[name], self.env.action_space(agent), "reset")
        return self._latest(observations, infos)

    def step(self, actions: Mapping[str, Any]) -> JointStep:
        """Step with actions by agent, in the environment's form.

        Other active agents get an action of zeros.

        Most environments expect an action of agents that cannot act, and ignore it.

        Raises:
            ValueError: If an agent returns after its end or has no reward.
        """
        # 1. Give each active agent an action.
        acting = set(self._ids)
        all_actions = {}
        for name, agent in self._ids.items():
            if name in actions:
                all_actions[agent] = actions[name]
            else:
                space = self.env.action_space(agent)
                blank = np.zeros((1, *(space.shape or ())), dtype=space.dtype)
                all_actions[agent] = plain_action(to_environment(space, blank)[0])
        # 2. Step the environment.
        with EndForkedChildren():
            outcome = checked_results(self.env.step(dict(all_actions)), STEP_RESULTS)
        observations, rewards, terminations, truncations, infos = outcome
        without_reward = [str(agent) for agent in all_actions if agent not in rewards]
        if without_reward:
            raise ValueError(
                f"{self.env.unwrapped} must give a reward to all agents that acted:"
                f" {without_reward}"
            )
        self._steps += 1
        # 3. Find the agents that ended: by a flag, without a flag, or at the step limit.
        active = {str(agent): agent for agent in self.env.agents}
        terminated = acting & {str(agent) for agent, flag in terminations.items() if flag}
        truncated = (
            acting & {str(agent) for agent, flag in truncations.items() if flag}
        ) - terminated
        terminated |= acting - set(active) - truncated  # agents that left without a flag
        # Some environments still list agents that have ended.
        for name in terminated | truncated:
            active.pop(name, None)
        if self._steps == self._limit:
            truncated |= set(active) & acting
            active = {}
        returned = self._ended & set(active)
        if returned:
            raise ValueError(
                f"Agents {sorted(returned)} returned after their end. A new agent needs a new name."
            )
        self._ended |= terminated | truncated
        self._ids = active
        return self._latest(
            observations,
            infos,
            rewards={
                str(agent): float(scalars([reward], np.float64, f"reward of {agent}")[0])
                for agent, reward in rewards.items()
            },
            terminated=frozenset(terminated),
            truncated=frozenset(truncated),
        )

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _latest(self, observations: AgentValues, infos: AgentValues, **results: Any) -> JointStep:
        # Copies, as an environment may write the results of its next call, or of another
        # environment, into the same arrays.
        copies = {name: own_copy(observations[agent]) for name, agent in self._ids.items()}
        masks: dict[str, Any] = {}
        for name, agent in self._ids.items():
            observation = copies[name]
            if isinstance(observation, Mapping) and ACTION_MASK in observation:
                masks[name] = observation[ACTION_MASK]
                continue
            info = infos.get(agent) or {}
            check_mask_name(info)
            masks[name] = own_copy(info.get(ACTION_MASK))
        return JointStep(observations=copies, masks=masks, **results)


def plain_action(action: Any) -> Any:
    """Return a Python number, which every environment accepts, or a copy that an environment may write into."""
    if np.ndim(action) == 0:
        return action.item()
    return action.copy()


class JointVectorEnv(SerialVectorEnv):
    """Vector environment of several agents in this process.

    Its environments get no noise of their own.
    """

    _running: list[tuple[JointEnv, JointStep]]
    _acting: Mapping[str, list[tuple[int, str]]]  # position and agent of each input

    def _reset(
        self, envs: Sequence[JointEnv], seeds: Sequence[int], replicas: Sequence[int]
    ) -> list[JointStep]:
        steps = []
        for env, seed in zip(envs, seeds, strict=True):
            self.stop.check()
            steps.append(env.reset(seed))
        return steps

    def finished(self) -> NDArray[np.bool_]:
        """See `VectorEnv`; an episode has ended when no agent is active."""
        return np.array([not latest.observations for _, latest in self._running], dtype=np.bool_)

    def inputs(self, mapping: PolicyMapping) -> Mapping[str, PolicyInput]:
        """See `VectorEnv`."""
        self._acting = {}
        for position, (_, latest) in enumerate(self._running):
            for agent in latest.observations:
                if can_act(latest.masks[agent]):
                    self._acting.setdefault(mapping.policy_of(agent), []).append((position, agent))
        result = {}
        for policy, acting in self._acting.items():
            spec = mapping.specs[policy]
            agents = tuple(agent for _, agent in acting)
            pairs = [(self._running[position][1], agent) for position, agent in acting]
            observations = [
                spec.split_mask(latest.observations[agent])[0] for latest, agent in pairs
            ]
            result[policy] = PolicyInput(
                observations=spec.stack(observations, agents),
                action_masks=legal_actions(
                    spec.action_space, [latest.masks[agent] for latest, agent in pairs]
                ),
                positions=np.array([position for position, _ in acting], dtype=np.int64),
                agents=agents,
            )
        return result

    def step(self, actions: Mapping[str, NDArray[Any]]) -> VectorStep:
        """See `VectorEnv`."""
        chosen: list[dict[str, Any]] = [{} for _ in self._running]
        for policy, policy_actions in actions.items():
            for (position, agent), action in zip(self._acting[policy], policy_actions, strict=True):
                chosen[position][agent] = plain_action(action)
        stepped = []
        for (env, _), joint in zip(self._running, chosen, strict=True):
            self.stop.check()
            stepped.append((env, env.step(joint)))
        self._running = stepped
        steps = [step for _, step in stepped]
        entries = [
            (position, agent) for position, step in enumerate(steps) for agent in step.rewards
        ]
        return VectorStep(
            rewards=np.array(
                [reward for step in steps for reward in step.rewards.values()], dtype=np.float64
            ),
            terminated=np.array(
                [agent in steps[position].terminated for position, agent in entries], dtype=np.bool_
            ),
            truncated=np.array(
                [agent in steps[position].truncated for position, agent in entries], dtype=np.bool_
            ),
            positions=np.array([position for position, _ in entries], dtype=np.int64),
            agents=[agent for _, agent in entries],
            totals=np.array([sum(step.rewards.values()) for step in steps], dtype=np.float64),
        )


class JointGymEnv(gymnasium.Env[AgentDict, AgentDict]):
    """A joint environment as a Gymnasium environment of a single player that acts for all agents.

    Observations contain the agents that can act; the others take no action. The reward is the sum
    of all rewards. The infos contain the action masks by agent, and every agent's reward under
    `AGENT_REWARDS`.

    Args:
        env: The joint environment.
        max_episode_steps: Steps after which all active agents are truncated.
        observation_space: Observation spaces by agent.
        action_space: Action spaces by agent.
    """

    def __init__(
        self,
        env: "ParallelEnv[Any, Any, Any]",
        max_episode_steps: int,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Dict,
    ) -> None:
        self._env = JointEnv(env, max_episode_steps, action_space.spaces)
        self.observation_space = observation_space
        self.action_space = action_space
        self.metadata = dict(getattr(env, "metadata", {}))
        self.render_mode = getattr(env, "render_mode", None)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        """Start an episode; a seed is required."""
        assert seed is not None
        return self._inputs(self._env.reset(seed))

    def step(self, action: Mapping[str, Any]) -> tuple[AgentDict, float, bool, bool, AgentDict]:
        """Step with the actions of all agents; the episode ends when no agent is active."""
        result = self._env.step(action)
        over = not result.observations
        cut = bool(result.truncated)
        observations, infos = self._inputs(result)
        return (
            observations,
            float(sum(result.rewards.values())),
            over and not cut,
            over and cut,
            infos,
        )

    def render(self) -> Any:
        """Render the joint environment."""
        return self._env.env.render()

    def close(self) -> None:
        """Close the joint environment."""
        self._env.env.close()

    def _inputs(self, latest: JointStep) -> tuple[AgentDict, AgentDict]:
        acting = {
            agent: mask for agent in latest.observations if can_act(mask := latest.masks[agent])
        }
        masks = {agent: mask for agent, mask in acting.items() if mask is not None}
        infos = {ACTION_MASK: masks, AGENT_REWARDS: latest.rewards}
        return {agent: latest.observations[agent] for agent in acting}, infos


ScoreFunction = Callable[[Mapping[str, float]], float]
"""(return of each agent in a joint episode) -> fitness of the episode."""

Score = str | Sequence[str] | ScoreFunction
"""A score: "sum", "min" or "mean" over all agents; names of agents, or their prefixes, whose
returns are added; or a function.
"""


_OVER_ALL: Mapping[str, tuple[ScoreFunction, str]] = {
    "sum": (lambda returns: float(sum(returns.values())), "sum of all agents' returns"),
    "min": (lambda returns: float(min(returns.values(), default=0.0)), "lowest return of an agent"),
    "mean": (
        lambda returns: float(sum(returns.values())) / max(1, len(returns)),
        "mean return of all agents",
    ),
}


def choose_score(score: Score, agents: Sequence[str]) -> tuple[ScoreFunction, str]:
    """Convert the argument `score` to a function and its label in reports.

    Args:
        score: See `Score`.
        agents: Agents known in advance.

    Raises:
        ValueError: If it names an unknown agent, or none.
    """
    if isinstance(score, str) and score in _OVER_ALL:
        return _OVER_ALL[score]
    if callable(score):
        return score, f"your {getattr(score, '__name__', type(score).__name__)}"
    if isinstance(score, str):
        names = [score]
    elif isinstance(score, Sequence):
        names = list(score)
    else:
        names = []
    prefixes = list(dict.fromkeys(map(prefix_of, agents)))
    wrong = [name for name in names if name not in agents and name not in prefixes]
    if wrong or not names:
        raise ValueError(
            f"score must be one of {', '.join(map(repr, _OVER_ALL))}, a function, or names of"
            f" agents or prefixes, got {wrong[0] if wrong else score!r}. Agents:"
            f" {', '.join(agents)}. Prefixes: {', '.join(prefixes)}."
        )
    named = frozenset(names)

    def total(returns: Mapping[str, float]) -> float:
        # Tested by prefix again, because agents may be born that were not known in advance.
        return float(
            sum(
                value
                for agent, value in returns.items()
                if agent in named or prefix_of(agent) in named
            )
        )

    return total, f"returns of {', '.join(sorted(named))}"


class PettingZooGroups(SeededGroups):
    """Groups of joint episodes of a parallel PettingZoo environment.

    A group starts from one joint reset seed.

    Train, validation and test starts are seeds of three disjoint ranges without repetition. All
    rows of a call, of all members, run in parallel, one environment after another in this process;
    waiting rows replace ended episodes. Agents may be born and may end at any step. Action masks
    are read from the entry "action_mask" of a Dict observation, which policies do not see, or from
    `infos[agent]["action_mask"]`. An agent whose mask allows no action does not act, as in a
    turn-based game.

    An episode must be a function of its reset seed and its actions. The constructor checks this
    with at most a few hundred steps, and warns about the first difference. Episodes of a group
    share the seed, and so all later randomness of the environment (common random numbers).

    Args:
        env: Creates a parallel environment, e.g. `mpe2.simple_spread_v3.parallel_env`.
        env_kwargs: Keyword arguments of the callable.
        max_episode_steps: Steps after which all active agents are truncated; None = the
            environment's own limit (its `max_cycles`), or 1,000 with a warning if there is none.
        num_envs: Maximum number of parallel joint episodes.
        score: Fitness of a joint episode: "sum" (the default), "min" or "mean" of all agents'
            returns; the name of an agent, the prefix of several agents, or a list of these, whose
            returns are added; or a function of all returns. In a competition, where the sum is
            meaningless, name the agents that count.
        recreate_env: Create a new environment for every episode instead of resetting one; None =
            True if a reset does not restore it.
        train_size: Number of training starts.
        validation_size: Number of starts for selection.
        test_size: Number of starts for the final report.
        seed: Seed of the starts and of their order.

    Attributes:
        seed: As passed.
        name: Name of the environment.
        score: Function that computes the fitness of a joint episode.
        score_label: Description of the score in reports.
        max_episode_steps: Steps after which all active agents are truncated.
        uses_default_limit: True if `max_episode_steps` is the default because no limit is known.
        recreate_env: True if a new environment is created for every episode.
        agents: Names of the agents known in advance: `possible_agents`, otherwise those of the
            first training start.
        observation_spaces: Observation spaces of these agents, by name.
        action_spaces: Action spaces of these agents, by name.

    Raises:
        ValueError: If an argument is invalid, or the callable creates anything else.
    """

    @names_unknown
    def __init__(
        self,
        env: "Callable[..., ParallelEnv[Any, Any, Any]]",
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        num_envs: int = 64,
        score: Score = "sum",
        recreate_env: bool | None = None,
        train_size: int = 100_000,
        validation_size: int = VALIDATION_SIZE,
        test_size: int = TEST_SIZE,
        seed: int = 0,
    ) -> None:
        # 1. Check the arguments.
        if not callable(env):
            raise ValueError(
                f"env must be a callable such as a module's parallel_env, got {class_name(env)}."
            )
        require("PettingZooGroups", "pettingzoo")
        sizes: dict[Split, int] = {
            "train": train_size,
            "validation": validation_size,
            "test": test_size,
        }
        super().__init__(seed, sizes, env_kwargs, {"max_episode_steps": max_episode_steps})
        if recreate_env is not None:
            flag("recreate_env", recreate_env)
        self._make = env
        self._num_envs = whole_between("num_envs", num_envs, 1)

        # 2. Create an example for the agents, their spaces and the step limit.
        example = make_example(self._create)
        inner = example.unwrapped
        declared = declared_limit(inner) or declared_limit(getattr(inner, "env", None))
        if max_episode_steps is None:
            limit = declared
        else:
            limit = max_episode_steps
        self._set_limit = max_episode_steps
        self.max_episode_steps = limit or DEFAULT_MAX_EPISODE_STEPS
        self.uses_default_limit = limit is None
        # JointEnv truncates at a limit that the caller has set. Otherwise the environment should
        # end its episodes itself, so JointEnv truncates only at the larger of the declared and the
        # default limit: some would never end.
        self._enforced_limit = max_episode_steps or max(
            DEFAULT_MAX_EPISODE_STEPS, self.max_episode_steps
        )
        # A truncation after this many steps causes a warning.
        if max_episode_steps is None:
            self._default_limit = self._enforced_limit
        else:
            self._default_limit = None
        self.name = str(example)
        known = getattr(example, "possible_agents", None)
        if not known:  # agents are then known after a reset only
            example.reset(seed=self.reset_seed("train", 0))
            known = example.agents
        self.agents: tuple[str, ...] = tuple(str(agent) for agent in known)
        self.observation_spaces: dict[str, gymnasium.Space[Any]] = {
            str(agent): example.observation_space(agent) for agent in known
        }
        self.action_spaces: dict[str, gymnasium.Space[Any]] = {
            str(agent): example.action_space(agent) for agent in known
        }
        self._code = code_hash(type(inner))
        example.close()
        self.score, self.score_label = choose_score(score, self.agents)
        if callable(score):
            self._score_identity = f"code {code_hash(score)}"
        else:
            self._score_identity = self.score_label

        # 3. Check that episodes are deterministic, with as few policies as the spaces allow: the
        # last mapping that raises no error has the fewest.
        self._mapping = map_policies(self.observation_spaces, self.action_spaces, "independent")
        for policies in ("prefix", "shared"):
            with suppress(ValueError):
                self._mapping = map_policies(self.observation_spaces, self.action_spaces, policies)
        self.recreate_env, _ = check_determinism(
            self.name,
            lambda recreate_env, _: self._joint_env(recreate_env),
            self._mapping,
            recreate_env=recreate_env,
        )

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        """Observation spaces of all agents, by name."""
        return gymnasium.spaces.Dict(self.observation_spaces)

    @property
    def action_space(self) -> gymnasium.spaces.Dict:
        """Action spaces of all agents, by name."""
        return gymnasium.spaces.Dict(self.action_spaces)

    def play_request(
        self, actors: Mapping[str, Actor], mapping: PolicyMapping, request: EpisodeRequest
    ) -> Episodes:
        """Play one joint episode per row of the request; their rewards are the score."""
        played = super().play_request(actors, mapping, request)
        return replace(played, rewards=self.scores(played))

    def scores(self, played: Episodes) -> NDArray[np.float64]:
        """Return the fitness `[n]` of n joint episodes.

        Raises:
            ValueError: If `score` returns a value that is not a finite number.
        """
        values = scalars(
            [self.score(dict(returns)) for returns in played.returns], np.float64, "score"
        )
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(
                f"score must be finite, got {values[place]} for {dict(played.returns[place])}."
            )
        return values

    def gym_env(self, **env_kwargs: Any) -> JointGymEnv:
        """Return one environment in which a single player acts for all agents.

        Args:
            env_kwargs: Further keyword arguments of the environment, such as its `render_mode`.
        """
        return JointGymEnv(
            self._create(**env_kwargs),
            self._enforced_limit,
            self.observation_space,
            self.action_space,
        )

    def _identity(self) -> dict[str, str]:
        spaces = [
            f"{agent} {self.observation_spaces[agent]} {self.action_spaces[agent]}"
            for agent in self.agents
        ]
        return {
            "environment": f"{self.name}, code {code_hash(self._make)}",
            "code": self._code,
            "env_kwargs": canonical(self._kwargs),
            "max_episode_steps": str(self._set_limit),
            "score": self._score_identity,
            "spaces": short_hash(*spaces),
        }

    def _create_vector_env(self) -> VectorEnv:
        return self._joint_env(self.recreate_env)

    def _joint_env(self, recreate_env: bool) -> JointVectorEnv:
        return JointVectorEnv(
            lambda: JointEnv(self._create(), self._enforced_limit, self.action_spaces),
            recreate_env=recreate_env,
        )

    def _create(self, **env_kwargs: Any) -> "ParallelEnv[Any, Any, Any]":
        from pettingzoo import ParallelEnv

        env = self._make(**{**self._kwargs, **env_kwargs})
        if not isinstance(env, ParallelEnv):
            raise ValueError(
                f"env must create a pettingzoo ParallelEnv, got {class_name(env)}. Convert an"
                " AECEnv with pettingzoo.utils.conversions.aec_to_parallel."
            )
        return env
