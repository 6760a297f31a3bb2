"""PettingZooGroups: groups of joint episodes of a parallel PettingZoo environment."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray
from pettingzoo import ParallelEnv

from evogrpo.config.checks import names_unknown
from evogrpo.data import Actor
from evogrpo.envs.control.action_noise import AgentUniforms, of_entries
from evogrpo.envs.control.episodes import JointEpisodes, JointRecorder
from evogrpo.envs.control.joint_checks import STARTS, opposed, repeating
from evogrpo.envs.control.joint_vector_env import JointEnv, JointVectorEnv, begun
from evogrpo.envs.control.making import DEFAULT_MAX_EPISODE_STEPS, Distinct, declared_limit
from evogrpo.envs.control.policy_mapping import PolicyMapping, join_names, map_policies, prefix_of
from evogrpo.envs.control.rendering import WINDOW, JointGymEnv, check_renderable, window
from evogrpo.envs.control.reset_seeds import SeededGroups
from evogrpo.envs.control.rollout import EpisodeRequest, play_episodes, requested
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import Split
from evogrpo.warnings import warn

ScoreFunction = Callable[[Mapping[str, float]], float]
"""(what each agent earned in a joint episode) -> what the episode is worth to whoever selects members."""

Score = str | Sequence[str] | ScoreFunction
"""How callers name one: "sum", "min" or "mean" over all agents; agents, or groups of agents named alike but for their
number, whose returns are added up; or a function."""


def summed(returns: Mapping[str, float]) -> float:
    """Return what all agents earned together."""
    return float(sum(returns.values()))


def _least(returns: Mapping[str, float]) -> float:
    return float(min(returns.values(), default=0.0))


def _mean(returns: Mapping[str, float]) -> float:
    return summed(returns) / max(1, len(returns))


_OVER_ALL: Mapping[str, tuple[ScoreFunction, str]] = {
    "sum": (summed, "what all agents earn together"),
    "min": (_least, "what the agent earns that earns least"),
    "mean": (_mean, "what an agent earns on average"),
}


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A score that was chosen.

    Attributes:
        function: What computes it.
        label: What it is, in words.
        identity: What tells it from others, for fingerprints.
        by_default: Whether nobody chose it: the sum, which says nothing where agents are opposed.
        sum_is_meant: Whether somebody chose the sum.
    """

    function: ScoreFunction
    label: str
    identity: str
    by_default: bool = False
    sum_is_meant: bool = False


def scoring(score: Score, agents: Sequence[str]) -> Scoring:
    """Return the score that a caller names.

    Args:
        score: See `Score`.
        agents: The agents that are known beforehand.

    Raises:
        ValueError: If it names an agent that is not among them, or nothing at all.
    """
    if callable(score):
        name = getattr(score, "__name__", type(score).__name__)
        label = _OVER_ALL["sum"][1] if score is summed else f"your {name}"
        identity = f"code {code_hash(score)}"
        return Scoring(function=score, label=label, identity=identity, by_default=score is summed)
    if isinstance(score, str) and score in _OVER_ALL:
        function, label = _OVER_ALL[score]
        identity = f"code {code_hash(function)}"
        return Scoring(function=function, label=label, identity=identity, sum_is_meant=function is summed)
    named = _named(score, agents)
    chosen = tuple(agent for agent in agents if agent in named or prefix_of(agent) in named)

    def earned(returns: Mapping[str, float]) -> float:
        # By name, not by `chosen`: agents of a group may be born that nobody knew.
        return float(sum(own for agent, own in returns.items() if agent in named or prefix_of(agent) in named))

    label = f"what {join_names(chosen)} {'earns' if len(chosen) == 1 else 'earn together'}"
    return Scoring(function=earned, label=label, identity=f"returns of {', '.join(sorted(named))}")


def _named(score: Score, agents: Sequence[str]) -> frozenset[str]:
    names = [score] if isinstance(score, str) else list(score) if isinstance(score, Sequence) else []
    groups = list(dict.fromkeys(map(prefix_of, agents)))
    wrong = [name for name in names if name not in agents and name not in groups]
    if wrong or not names:
        raise ValueError(
            f"score must be one of {', '.join(map(repr, _OVER_ALL))}, a function of what each agent earned, or name "
            f"agents ({', '.join(agents)}) or groups of agents named alike but for their number ({', '.join(groups)}), "
            f"got {wrong[0] if wrong else score!r}"
        )
    return frozenset(names)


_LANES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class JointStartBatch:
    """Opened starts, from each of which any number of joint episodes can be played.

    Attributes:
        env: The environment.
        seeds: Joint reset seed of each opened start.
    """

    env: "PettingZooGroups"
    seeds: tuple[int, ...]

    def play(
        self,
        actors: Mapping[str, Actor],
        mapping: PolicyMapping,
        start_of_row: Sequence[int],
        member_ids: Sequence[int],
        *,
        uniforms: AgentUniforms | None = None,
        temperature: ArrayLike | None = None,
        base: bool = False,
    ) -> JointEpisodes:
        """Play one joint episode per row to its end; each policy acts for all its living agents at once.

        An episode depends on its start and its draws alone: not on the other rows, nor on how many lanes there are.
        Rows of one member with one start are a group.

        Args:
            actors: The members' policies, by name.
            mapping: Which policy acts for which agent.
            start_of_row: For each of the n rows, its position in `seeds`; any order, any group sizes.
            member_ids: For each row, the slot of the member all of whose policies act, at least 0.
            uniforms: Numbers to draw actions with, by agent, row and step (`AgentActionNoise`); None acts greedily.
            temperature: `[n]` sampling temperatures; None means 1.
            base: Let the untrained base act.

        Returns:
            The agents' episodes by policy.

        Raises:
            ValueError: If the arguments do not fit each other, an agent has no policy, actions or masks do not fit the
                action space, a reward or an observation is not finite, or an episode does not end.
        """
        missing = sorted(set(mapping.specs) - set(actors))
        if missing:
            raise ValueError(f"an actor is missing for the policies {missing}")
        wanted = requested(
            self.seeds,
            start_of_row,
            member_ids,
            uniforms=None if uniforms is None else partial(of_entries, uniforms),
            temperature=temperature,
            statistics=None,
            base=base,
            max_episode_steps=self.env.max_episode_steps,
        )
        groups = _numbered(list(zip(wanted.member_ids.tolist(), map(int, start_of_row), strict=True)))
        return self.env._play(actors, mapping, wanted, groups)


class PettingZooGroups(SeededGroups):
    """Groups of joint episodes of a parallel PettingZoo environment; a group's initial state is a joint reset seed.

    Train, validation and test starts are seeds of three disjoint ranges, the same seed never twice. All rows of a
    call, of all members, run side by side, one environment after the other in this process; an ended episode's lane is
    reset for the next row. Agents may be born and may end at any step. Action masks are understood where PettingZoo
    puts them: `infos[agent]["action_mask"]`, or an observation Dict of exactly "observation" and "action_mask". An
    agent whose mask leaves nothing is not asked to act, as happens to whoever is not to move in a turn-based game.

    An episode must be a function of its reset seed and its actions: one start is played twice by the same actions to
    see that it is, and a warning says what differs. Episodes of a group share that seed and so all later randomness of
    the environment: common random numbers.

    Args:
        env: Makes a parallel environment, e.g. `mpe2.simple_spread_v3.parallel_env`.
        env_kwargs: Its keyword arguments. With render_mode "human" tests are watched in a window, one episode after the
            other; what is learnt from, and fitness, is played without.
        max_episode_steps: Steps after which all living agents are truncated; None = the environment's own limit
            (its `max_cycles`), or 1,000 where it has none; the first episode that is cut off by this is warned of.
        num_envs: Most joint episodes at a time.
        score: What a joint episode is worth as fitness: "sum" (the default), "min" or "mean" of what all agents earn;
            the name of an agent, of a group of agents named alike but for their number, or several of these, whose
            returns are added up; or a function of what each agent earned. In a competition, where the sum says nothing,
            name whose returns count.
        recreate_env: Whether every episode gets a new environment, rather than one that is reset; None = where that
            is found to matter.
        train_size: Number of training starts.
        validation_size: Number of starts for selection.
        test_size: Number of starts for the final report.
        seed: Seed of the starts and of their order.

    Attributes:
        seed: As given.
        name: What the environment calls itself.
        scoring: The score, with its name.
        max_episode_steps: Steps after which all living agents are truncated.
        uses_default_limit: Whether that is this class's own limit, as nothing else says when an episode is to end.
        recreate_env: Whether every episode gets an environment made anew.
        agents: Names of the agents known beforehand: all where the environment has `possible_agents`, otherwise those
            of the first training start.
        observation_spaces: Of these agents, by name.
        action_spaces: Of these agents, by name.

    Raises:
        ValueError: If an argument does not fit, or the callable makes something else.
    """

    @names_unknown
    def __init__(
        self,
        env: "Callable[..., ParallelEnv[Any, Any, Any]]",
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        num_envs: int = _LANES,
        score: Score = summed,
        recreate_env: bool | None = None,
        train_size: int = 100_000,
        validation_size: int = 64,
        test_size: int = 256,
        seed: int = 0,
    ) -> None:
        for name, value in (("max_episode_steps", max_episode_steps), ("num_envs", num_envs)):
            if (value is None and name == "num_envs") or (value is not None and value < 1):
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not callable(env):
            raise ValueError(f"env must make environments, such as a module's parallel_env, got {type(env).__name__}")
        super().__init__(seed, {"train": train_size, "validation": validation_size, "test": test_size})
        self._make, self._kwargs = env, dict(env_kwargs or {})
        self._in_window, self.render_tests = False, self._kwargs.get("render_mode") == WINDOW
        if self.render_tests:  # episodes side by side are not to be watched; `drawn` is
            del self._kwargs["render_mode"]
        self._wanted_limit, self._count = max_episode_steps, num_envs
        self._lanes: list[JointEnv] = []
        self._distinct = Distinct()
        self._said: set[str] = set()
        example = self._made()
        declared = _limit(example) if max_episode_steps is None else max_episode_steps
        self.max_episode_steps, self.uses_default_limit = declared or DEFAULT_MAX_EPISODE_STEPS, declared is None
        self.name = str(example)
        known = getattr(example, "possible_agents", None)
        if not known:
            begun(example, self._starts.of("train", [0])[0])
            known = example.agents
        self.agents: tuple[str, ...] = tuple(str(agent) for agent in known)
        self.observation_spaces: dict[str, gymnasium.Space[Any]] = {
            str(agent): example.observation_space(agent) for agent in known
        }
        self.action_spaces: dict[str, gymnasium.Space[Any]] = {
            str(agent): example.action_space(agent) for agent in known
        }
        self._code = code_hash(type(example.unwrapped))
        example.close()
        map_policies(self.observation_spaces, self.action_spaces, "independent")  # refuses spaces no policy can act in
        self.scoring: Scoring = scoring(score, self.agents)
        self.recreate_env = self._repeating(recreate_env)

    def close(self) -> None:
        """Close environments; the next `play` makes new ones."""
        lanes, self._lanes = self._lanes, []
        with ExitStack() as closing:  # every one, whatever one of them raises
            for lane in lanes:
                closing.callback(lane.close)

    def rendered(self) -> "PettingZooGroups":
        """Return the same starts in a single environment that shows itself in a window, at its own speed.

        Raises:
            ImportError: If a package that it needs is missing.
            ValueError: If it cannot be drawn, or there is no display.
        """
        check_renderable(self._made, self.name)
        shown = copy(self)
        shown._kwargs = {**self._kwargs, "render_mode": WINDOW}
        shown._lanes, shown._count, shown._distinct, shown._in_window = [], 1, Distinct(), True
        return shown

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        """What all agents see together, by name."""
        return gymnasium.spaces.Dict(self.observation_spaces)

    @property
    def action_space(self) -> gymnasium.spaces.Dict:
        """What all agents do together, by name."""
        return gymnasium.spaces.Dict(self.action_spaces)

    def open(self, split: Split, starts: Sequence[int]) -> JointStartBatch:
        """Open starts of a split, each in [0, size(split)); the same start may occur repeatedly.

        Raises:
            ValueError: If the split or a start does not exist.
        """
        return JointStartBatch(env=self, seeds=self._starts.of(split, starts))

    def scores(self, played: JointEpisodes) -> NDArray[np.float64]:
        """Return what each of n joint episodes is worth, `[n]`.

        Raises:
            ValueError: If `score` gives something that is not finite.
        """
        values = np.array([self.scoring.function(returns) for returns in played.returns], dtype=np.float64)
        if not np.isfinite(values).all():
            worst = played.returns[int(np.flatnonzero(~np.isfinite(values))[0])]
            raise ValueError(f"score must return a finite number for every joint episode, not for {dict(worst)}")
        return values

    def _identity(self) -> dict[str, str]:
        spaces = [f"{agent} {self.observation_spaces[agent]} {self.action_spaces[agent]}" for agent in self.agents]
        return {
            "environment": f"{self.name}, code {code_hash(self._make)}",
            "code": self._code,
            "env_kwargs": canonical(self._kwargs),
            "max_episode_steps": str(self._wanted_limit),
            "score": self.scoring.identity,
            "spaces": short_hash(*spaces),
        }

    def _play(
        self, actors: Mapping[str, Actor], mapping: PolicyMapping, wanted: EpisodeRequest, groups: NDArray[np.int64]
    ) -> JointEpisodes:
        lanes = JointVectorEnv(self._lanes, self._lane, mapping)
        spaces = {name: (spec.observation_space, spec.action_space) for name, spec in mapping.specs.items()}
        with self._closed_if_broken(), window() if self._in_window else nullcontext():
            played = play_episodes(lanes, self._count, spaces, actors, JointRecorder(groups, mapping), wanted)
        if self._wanted_limit is None and (played.lengths >= self._last_step).any():
            self._warn(
                f"a joint episode of {self.name} was cut off after {self._last_step:,} steps, as neither the "
                "environment nor anybody else sets a limit: set max_episode_steps to what suits it",
                rank_zero_only=False,
            )
        return played

    @property
    def _last_step(self) -> int:
        """After which lanes truncate: what an environment says of itself is believed, and made sure of later."""
        return (
            self.max_episode_steps
            if self._wanted_limit is not None
            else max(DEFAULT_MAX_EPISODE_STEPS, self.max_episode_steps)
        )

    def _lane(self) -> JointEnv:
        return self._lane_made(self.recreate_env)

    def _lane_made(self, recreate_env: bool) -> JointEnv:
        return JointEnv(self._made, self._last_step, recreate_env=recreate_env)

    def _repeating(self, recreate_env: bool | None) -> bool:
        first, *_, last = self._starts.of("train", [0, self.size("train") - 1])
        found = repeating(self._lane_made, (first, last), self.seed, recreate_env)
        if found.words is not None:
            self._warn(f"{self.name} {found.words}")
        return found.recreate_env

    def warn_opposed_rewards(self, *, team_credit: bool) -> None:
        """Warn, once, if agents' rewards move against each other where learning or fitness adds them up.

        Args:
            team_credit: Whether an action is worth what all agents earn.
        """
        if self.scoring.sum_is_meant or not (team_credit or self.scoring.by_default) or "opposed" in self._said:
            return
        self._said.add("opposed")
        with closing(self._lane()) as lane:
            found = opposed(lane, self._starts.of("train", range(min(STARTS, self.size("train")))), self.seed)
        if found is not None:
            self._warn(f"in {self.name}, {found.advice(learning=team_credit, fitness=self.scoring.by_default)}")

    def _warn(self, words: str, *, rank_zero_only: bool = True) -> None:
        if words not in self._said:
            self._said.add(words)
            warn(words, rank_zero_only=rank_zero_only)

    def gym_env(self, **env_kwargs: Any) -> JointGymEnv:
        """Return one such environment that a single player plays for all agents.

        Args:
            env_kwargs: Further keyword arguments of the environment, such as its `render_mode`.
        """
        make = partial(self._made, **env_kwargs)
        return JointGymEnv(make, self._last_step, self.observation_space, self.action_space)

    def _made(self, **further: Any) -> "ParallelEnv[Any, Any, Any]":
        env = self._make(**{**self._kwargs, **further})
        if not isinstance(env, ParallelEnv):
            raise ValueError(
                f"env must make a pettingzoo ParallelEnv, got {type(env).__name__}: for an AECEnv wrap it with "
                "pettingzoo.utils.conversions.aec_to_parallel, or turn_based_aec_to_parallel for a turn-based game"
            )
        return self._distinct.added(env)


def _limit(env: "ParallelEnv[Any, Any, Any]") -> int | None:
    """Return the limit that an environment names, or what it is built around."""
    inner = env.unwrapped
    return declared_limit(inner) or declared_limit(getattr(inner, "env", None))


def _numbered(names: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.array([numbers[name] for name in names], dtype=np.int64)
