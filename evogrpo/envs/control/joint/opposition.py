"""Agents whose rewards move against those of the others: found by chance's play, before anybody learns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.joint.assignment import prefix_of
from evogrpo.envs.control.joint.chance import played_by_chance
from evogrpo.envs.control.joint.joint_lanes import JointLane
from evogrpo.randomness import generator

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


def opposed(lane: JointLane, seeds: Sequence[int], seed: int) -> Opposed | None:
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


def _group(lane: JointLane, start: int, seed: int) -> _Group:
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
