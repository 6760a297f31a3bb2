"""Checks of joint environments by random play: repeatable episodes, and opposed rewards."""

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.envs.control.actions import legal_actions, mask_sizes
from evogrpo.envs.control.joint_vector_env import JointEnv, JointStep, any_legal, mask_of, nothing
from evogrpo.envs.control.policy_mapping import prefix_of
from evogrpo.randomness import generator

STEPS = 64
"""Most steps of such an episode."""


def played_by_chance(lane: JointEnv, start: int, seed: int, replica: int) -> Iterator[JointStep]:
    """Yield what an episode's agents see, from its start on; who sees the same does the same, and any legal thing.

    Args:
        lane: Where to play.
        start: Reset seed.
        seed: Names the draws.
        replica: Tells apart the episodes from one start.
    """
    named = generator(seed, "by chance", start, replica)
    drawn: dict[str, spaces.Space[Any]] = {}
    seen = lane.reset(start)
    yield seen
    for _ in range(STEPS):
        if not seen.observations:
            return
        for agent in seen.observations:
            if agent not in drawn:
                drawn[agent] = deepcopy(lane.action_space(agent))
                drawn[agent].seed(int(named.integers(2**31)))
        seen = lane.step({agent: _by_chance(drawn[agent], mask_of(seen, agent)) for agent in seen.observations})
        yield seen


def _by_chance(space: spaces.Space[Any], mask: Any) -> Any:
    """Return an action as the environment takes it, any of the legal ones alike."""
    if mask is not None and not any_legal(mask):
        return nothing(space)
    flags = legal_actions(space, [mask])
    if flags is None:
        action = space.sample()
    elif isinstance(space, spaces.Discrete):
        action = space.sample(mask=flags[0].astype(np.int8))
    else:
        parts = np.split(flags[0].astype(np.int8), np.cumsum(mask_sizes(space))[:-1])
        action = space.sample(mask=tuple(parts))
    return action.item() if np.ndim(action) == 0 else action


@dataclass(frozen=True, kw_only=True)
class Repeating:
    """What came of playing one start twice.

    Attributes:
        recreate_env: Whether every episode is to get an environment made anew.
        words: What differed, and what to do; None if nothing did.
    """

    recreate_env: bool
    words: str | None = None


def repeating(
    make: Callable[[bool], JointEnv], seeds: tuple[int, int], seed: int, recreate_env: bool | None
) -> Repeating:
    """Play one start twice and find out whether environments have to be made anew for each episode.

    Args:
        make: Makes a lane, whose environment is made anew for each episode or not.
        seeds: Reset seeds of the start, and of another one that is played in between.
        seed: Names the actions.
        recreate_env: What the caller says; None = nothing.
    """
    found = _difference(make, seeds, seed, recreate_env=bool(recreate_env))
    if found is None:
        return Repeating(recreate_env=bool(recreate_env))
    said = f"is not a function of its reset seed and its actions: of one start played twice, {found}"
    if recreate_env is None and _difference(make, seeds, seed, recreate_env=True) is None:
        return Repeating(
            recreate_env=True,
            words=f"{said}. A new environment for each episode mends it, so every episode gets one (recreate_env=True)",
        )
    return Repeating(
        recreate_env=bool(recreate_env),
        words=f"{said}. Members are compared by episodes from one start: let the environment draw from a generator "
        "that reset(seed=...) makes, and forget at reset what came before",
    )


def _difference(
    make: Callable[[bool], JointEnv], seeds: tuple[int, int], seed: int, *, recreate_env: bool
) -> str | None:
    with closing(make(recreate_env)) as lane:
        first, _, again = (
            [_noted(seen) for seen in played_by_chance(lane, start, seed, replica)]
            for start, replica in ((seeds[0], 0), (seeds[1], 1), (seeds[0], 0))
        )
    for step, (one, other) in enumerate(zip(first, again, strict=False)):
        for what in one:
            for agent in {**one[what], **other[what]}:
                values = one[what].get(agent), other[what].get(agent)
                if not _equal(*values):
                    steps = "at its start" if step == 0 else f"after {step} steps"
                    return f"{what} of {agent} {steps} was {_short(values[0])} and then {_short(values[1])}"
    return None


def _noted(seen: JointStep) -> dict[str, Mapping[str, Any]]:
    ends = dict.fromkeys(seen.terminated, "terminated") | dict.fromkeys(seen.truncated, "truncated")
    # Copied: an environment may go on writing into what it has shown.
    return {"the observation": deepcopy(dict(seen.observations)), "the reward": dict(seen.rewards), "the end": ends}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if one is None or other is None:
        return one is other
    numbers = np.asarray(one), np.asarray(other)
    return np.array_equal(*numbers, equal_nan=all(each.dtype.kind in "fc" for each in numbers))


def _short(value: Any) -> str:
    return "none" if value is None else reprlib.repr(value.tolist() if isinstance(value, np.ndarray) else value)


STARTS = 64
"""Most starts that are played."""

_GROUP_SIZE = 4  # episodes from each start
_STAGES = (1024, 4096)  # steps in all after which no further start is played: what is rare takes more of them
_SHUFFLES = 199  # a correlation beyond all of them has probability 1/200 where rewards are independent
_CLEARLY = 0.2


_Group = list[list[Mapping[str, float]]]  # rewards by agent: of every episode from a start, at every step


@dataclass(frozen=True, kw_only=True)
class Opposed:
    """An agent whose rewards move against those of the others.

    Attributes:
        agent: Its name.
        agents: All agents.
        correlation: Of its rewards with the sum of all others', step by step, within episodes from one start.
    """

    agent: str
    agents: tuple[str, ...]
    correlation: float

    def advice(self, *, learning: bool, fitness: bool) -> str:
        """Say what to do where members learn from what all agents earn together, or where that is their fitness."""
        others = [name for name in self.agents if name != self.agent]
        groups = [prefix_of(name) for name in others if prefix_of(name) != prefix_of(self.agent)]
        added = " and ".join(["learn from"] * learning + ["are selected by"] * fitness)
        remedies = [
            *["credit='agent' lets every agent learn from what it earns itself"] * learning,
            *[f"score= says whose returns are fitness, such as score={(groups or others)[0]!r}"] * fitness,
        ]
        return (
            f"what {self.agent} earns moves against what the other agents earn (a correlation of "
            f"{self.correlation:.2f} where chance plays), but members {added} what all agents earn together, so that "
            f"agents are trained against themselves: {', '.join(remedies)}; score='sum' says that the sum is meant"
        )


def opposed(lane: JointEnv, seeds: Sequence[int], seed: int) -> Opposed | None:
    """Find the agent whose rewards move most clearly against those of the others, if there is one.

    Episodes from one start differ by their actions alone, so what is compared is what actions bring: the deviation of
    an agent's reward from its mean over the start's episodes at the same step, with that of the sum of all others'.
    Where agents have nothing to do with each other, it makes no difference which of a start's episodes of one agent
    is held against which of another. So these are shuffled, 199 times: an agent is opposed if its correlation is below
    -0.2 and below the lowest of any agent in every shuffle. That is a permutation test at 0.5 %, however rewards are
    distributed and hang together in time. Unless all correlations are above 0.2 it is repeated with four times as many
    steps, so that an encounter may be rare.

    Args:
        lane: Where to play.
        seeds: Reset seeds of as many starts as may be needed.
        seed: Names the actions and the shuffles.
    """
    groups: list[_Group] = []
    rng, waiting = generator(seed, "opposed"), iter(seeds)
    for budget in _STAGES:
        while sum(len(episode) for group in groups for episode in group) < budget:
            start = next(waiting, None)
            if start is None:
                break
            groups.append(_group(lane, start, seed))
        agents, rewards = _table(groups)
        if len(agents) < 2 or not np.isfinite(rewards).all():  # what is not finite is refused where it is learnt from
            return None
        deviations = rewards - rewards.mean(axis=1, keepdims=True)
        found = _correlations(deviations)
        place = int(found.argmin())
        if found[place] > _CLEARLY:
            return None
        if found[place] < -_CLEARLY and all(
            _correlations(_shuffled(deviations, rng)).min() > found[place] for _ in range(_SHUFFLES)
        ):
            return Opposed(agent=agents[place], agents=agents, correlation=float(found[place]))
    return None


def _group(lane: JointEnv, start: int, seed: int) -> _Group:
    episodes = (played_by_chance(lane, start, seed, replica) for replica in range(_GROUP_SIZE))
    return [[seen.rewards for seen in episode][1:] for episode in episodes]


def _table(groups: Sequence[_Group]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Return agents and their rewards `[starts, episodes, steps, agents]`, 0 where they are not there."""
    episodes = [episode for group in groups for episode in group]
    agents = tuple(dict.fromkeys(agent for episode in episodes for rewards in episode for agent in rewards))
    table = np.zeros((len(episodes), max(map(len, episodes)), len(agents)))
    for row, episode in zip(table, episodes, strict=True):
        for step, rewards in zip(row, episode, strict=False):
            step[:] = [rewards.get(agent, 0.0) for agent in agents]
    return agents, table.reshape(len(groups), _GROUP_SIZE, *table.shape[1:])


def _correlations(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each agent's with the sum of all others, `[agents]`; 0 where one of them never varies."""
    rest = deviations.sum(axis=-1, keepdims=True) - deviations
    spread = np.sqrt((deviations**2).sum(axis=(0, 1, 2)) * (rest**2).sum(axis=(0, 1, 2)))
    together = (deviations * rest).sum(axis=(0, 1, 2))
    result: NDArray[np.float64] = np.divide(together, spread, out=np.zeros_like(together), where=spread > 1e-12)
    return result


def _shuffled(deviations: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Hold each agent's episodes against any others of the same start."""
    starts, episodes, _, agents = deviations.shape
    order = rng.permuted(np.broadcast_to(np.arange(episodes)[None, :, None], (starts, episodes, agents)), axis=1)
    return np.take_along_axis(deviations, order[:, :, None, :], axis=1)
