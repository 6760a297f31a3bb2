"""PettingZooGroups: groups of joint episodes of a parallel PettingZoo environment."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.config.task_settings import SettingValue
from evogrpo.envs.control.conversion import scalars
from evogrpo.envs.control.episodes import Episodes
from evogrpo.envs.control.joint_env import JointEnv, JointGymEnv, JointVectorEnv
from evogrpo.envs.control.policy_mapping import PolicyMapping, map_policies, prefix_of
from evogrpo.envs.control.random_play import check_determinism
from evogrpo.envs.control.reward_components import Component
from evogrpo.envs.control.rollout import EpisodeRequest
from evogrpo.envs.control.seeded_groups import (
    SeededGroups,
    declared_limit,
    make_example,
)
from evogrpo.envs.control.single_env import EndForkedChildren
from evogrpo.envs.control.vector_env import VectorEnv
from evogrpo.envs.fingerprint import canonical, class_identity, code_hash, short_hash
from evogrpo.envs.protocol import TEST_SIZE, VALIDATION_SIZE
from evogrpo.extras import require
from evogrpo.records import Actor
from evogrpo.text import class_name
from evogrpo.validation import names_unknown, whole_between
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


ScoreFunction = Callable[[Mapping[str, float]], float]
"""(return of each agent in a joint episode) -> fitness of the episode."""

Score = str | Sequence[str] | ScoreFunction
"""A score: "sum", "min" or "mean" over all agents; names of agents, or their prefixes, whose
returns are added; or a function.
"""


_MIN_SCORES = 8  # with fewer episodes, equal scores may be chance

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
    # 1. A score over all agents, or a function.
    if isinstance(score, str) and score in _OVER_ALL:
        return _OVER_ALL[score]
    if callable(score):
        return score, f"your {getattr(score, '__name__', type(score).__name__)}"
    # 2. Names of agents, or their prefixes.
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
        """Return the sum of the returns of the named agents."""
        # Tested by prefix again, because agents may be born that were not known in advance.
        counted = []
        for agent, value in returns.items():
            if agent in named or prefix_of(agent) in named:
                counted.append(value)
        return float(sum(counted))

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
        rewards: Components of the training reward by name: functions (observation after the step,
            action, reward, info) -> a number, or keys of info. They are computed for each agent by
            itself. The training reward of an agent in a step is the weighted sum of its reward and
            its components. The score and held-out episodes use the environment's rewards alone.
        reward_weights: Weight of each component, and of the environment's own reward, which is
            called "reward"; 1 by default. Members may have weights of their own, as task settings
            `reward_weights.NAME`.
        settings: Options of every reset by name, numbers or texts, which the environment must read.
            Members may have values of their own in training, as task settings `task.NAME`.
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
        ValueError: If an argument is invalid, or the callable creates no parallel environment.
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
        rewards: Mapping[str, Component] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        settings: Mapping[str, SettingValue] | None = None,
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
        super().__init__(
            seed=seed,
            train_size=train_size,
            validation_size=validation_size,
            test_size=test_size,
            env_kwargs=env_kwargs,
            max_episode_steps=max_episode_steps,
            num_envs=num_envs,
            recreate_env=recreate_env,
            rewards=rewards,
            reward_weights=reward_weights,
            settings=settings,
        )
        self._make = env
        self._num_envs = whole_between("num_envs", num_envs, 1)
        # 2. Create an example for the agents, their spaces and the step limit.
        example = make_example(self._create)
        inner = example.unwrapped
        self._class_identity = class_identity(type(inner))
        # Some environments, such as those of PettingZoo's sisl, have the limit one object deeper.
        if declared_limit(inner) is None:
            inner = getattr(inner, "env", None)
        self._set_limit = max_episode_steps
        self._enforced_limit = self._set_limits(max_episode_steps, inner)
        self.name = str(example)
        known = getattr(example, "possible_agents", None)
        if not known:  # agents are then known after a reset only
            example.reset(seed=self.reset_seed("train", 0))
            known = example.agents
        self.agents: tuple[str, ...] = tuple(map(str, known))
        self.observation_spaces: dict[str, gymnasium.Space[Any]] = {}
        self.action_spaces: dict[str, gymnasium.Space[Any]] = {}
        for agent in known:
            self.observation_spaces[str(agent)] = example.observation_space(agent)
            self.action_spaces[str(agent)] = example.action_space(agent)
        example.close()
        self._check_options({})
        self.score, self.score_label = choose_score(score, self.agents)
        if callable(score):
            self._score_identity = f"code {code_hash(score)}"
        else:
            self._score_identity = self.score_label
        self._warned_of_constant_score = False
        # 3. Check that episodes are deterministic, with as few policies as the spaces allow: the
        #    last mapping that raises no error has the fewest.
        self._mapping = map_policies(self.observation_spaces, self.action_spaces, "independent")
        for policies in ("prefix", "shared"):
            with suppress(ValueError):
                self._mapping = map_policies(self.observation_spaces, self.action_spaces, policies)
        self.recreate_env, _ = check_determinism(
            self.name,
            self._trial_env,
            self._mapping,
            recreate_env=recreate_env,
        )
        self._check_copied_options()

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
        with EndForkedChildren():
            found = [self.score(dict(returns)) for returns in played.returns]
        values = scalars(found, np.float64, "score")
        if not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(
                f"score must be finite, got {values[first]} for {dict(played.returns[first])}."
            )
        self._warn_if_constant(played, values)
        return values

    def _warn_if_constant(self, played: Episodes, values: NDArray[np.float64]) -> None:
        """Warn once if scores are equal and returns are not, as in a competition."""
        if self._warned_of_constant_score or len(values) < _MIN_SCORES:
            return
        first = dict(played.returns[0])
        different = any(dict(returns) != first for returns in played.returns)
        if different and np.allclose(values, values[0], rtol=1e-9, atol=1e-9):
            self._warned_of_constant_score = True
            warn(
                f"The score ({self.score_label}) was the same in all {len(values)} episodes,"
                " although returns differed. In a competition, name the agents that count, such as"
                f" score={self.agents[0]!r}, and set credit='agent'.",
                rank_zero_only=False,
            )

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
            self.settings,
        )

    def _identity(self) -> dict[str, str]:
        """Return short texts that identify the environment, for its fingerprint."""
        spaces = [
            f"{agent} {self.observation_spaces[agent]} {self.action_spaces[agent]}"
            for agent in self.agents
        ]
        return {
            "environment": f"{self.name}, code {code_hash(self._make)}",
            **self._class_identity,
            "env_kwargs": canonical(self._kwargs),
            "max_episode_steps": str(self._set_limit),
            "score": self._score_identity,
            "spaces": short_hash(*spaces),
        }

    def _create_vector_env(self) -> VectorEnv:
        return self._joint_env(self.recreate_env)

    def _joint_env(self, recreate_env: bool) -> JointVectorEnv:
        """Return the vector environment of joint episodes."""
        return JointVectorEnv(
            lambda: JointEnv(
                self._create(), self._enforced_limit, self.action_spaces, self.settings
            ),
            recreate_env=recreate_env,
        )

    def _trial_env(self, recreate_env: bool, noisy: bool) -> VectorEnv:
        # Joint environments get no noise of their own.
        env = self._joint_env(recreate_env)
        env.components = self.components
        return env

    def _create_unset(self) -> "ParallelEnv[Any, Any, Any]":
        return self._create()

    def _create(self, **env_kwargs: Any) -> "ParallelEnv[Any, Any, Any]":
        """Return one environment, with further keyword arguments."""
        from pettingzoo import ParallelEnv

        env = self._make(**{**self._kwargs, **env_kwargs})
        if not isinstance(env, ParallelEnv):
            raise ValueError(
                f"env must create a pettingzoo ParallelEnv, got {class_name(env)}. Convert an"
                " AECEnv with pettingzoo.utils.conversions.aec_to_parallel."
            )
        return env
