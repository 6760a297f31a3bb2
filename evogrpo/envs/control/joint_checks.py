"""Checks of joint environments by random play: determinism, and agents whose rewards are opposed."""

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
from evogrpo.envs.control.joint_vector_env import JointEnv, JointStep
from evogrpo.envs.control.policy_mapping import prefix_of
from evogrpo.randomness import generator

_STEPS = 64  # most steps of an episode


def _random_episode(env: JointEnv, reset_seed: int, seed: int, replica: int) -> Iterator[JointStep]:
    """Yield the reset and the steps of an episode with random legal actions, named by seed and replica."""
    named = generator(seed, "by chance", reset_seed, replica)
    spaces_of: dict[str, spaces.Space[Any]] = {}
    latest = env.reset(reset_seed)
    yield latest
    for _ in range(_STEPS):
        if not latest.observations:
            return
        actions = {}
        for agent in latest.observations:
            if agent not in spaces_of:
                spaces_of[agent] = deepcopy(env.action_space(agent))
                spaces_of[agent].seed(int(named.integers(2**31)))
            actions[agent] = (
                _sample(spaces_of[agent], latest.mask(agent)) if latest.can_act(agent) else env.no_action(agent)
            )
        latest = env.step(actions)
        yield latest


def _sample(space: spaces.Space[Any], mask: Any) -> Any:
    """Sample a legal action in the environment's form."""
    flags = legal_actions(space, [mask])
    if flags is None:
        action = space.sample()
    elif isinstance(space, spaces.Discrete):
        action = space.sample(mask=flags[0].astype(np.int8))
    else:
        parts = np.split(flags[0].astype(np.int8), np.cumsum(mask_sizes(space))[:-1])
        action = space.sample(mask=tuple(parts))
    return action.item() if np.ndim(action) == 0 else action


def check_joint_determinism(
    make: Callable[[bool], JointEnv], seeds: tuple[int, int], seed: int, recreate_env: bool | None
) -> tuple[bool, str | None]:
    """Play one start twice; return the value of `recreate_env` to use, and a warning or None.

    Args:
        make: Creates an environment, given `recreate_env`.
        seeds: Reset seeds of the start, and of another one that is played in between.
        seed: Names the actions.
        recreate_env: Value set by the caller; None = True if only a new environment per episode makes episodes equal.
    """
    difference = _difference(make, seeds, seed, recreate_env=bool(recreate_env))
    if difference is None:
        return bool(recreate_env), None
    message = f"is not deterministic: with equal reset seed and actions, {difference}."
    if recreate_env is None and _difference(make, seeds, seed, recreate_env=True) is None:
        return True, f"{message} A new environment per episode avoids this. Set recreate_env=True to confirm."
    fix = "Let reset(seed=...) seed all of its randomness and discard the previous episode."
    return bool(recreate_env), f"{message} {fix}"


def _difference(
    make: Callable[[bool], JointEnv], seeds: tuple[int, int], seed: int, *, recreate_env: bool
) -> str | None:
    with closing(make(recreate_env)) as env:
        first, _, again = (
            [_values(step) for step in _random_episode(env, reset_seed, seed, replica)]
            for reset_seed, replica in ((seeds[0], 0), (seeds[1], 1), (seeds[0], 0))
        )
    for step, (one, other) in enumerate(zip(first, again, strict=False)):
        for name in one:
            for agent in {**one[name], **other[name]}:
                values = one[name].get(agent), other[name].get(agent)
                if not _equal(*values):
                    when = "right after reset" if step == 0 else f"after {step} steps"
                    return f"{name} of {agent} {when} was {_short(values[0])} and then {_short(values[1])}"
    return None


def _values(step: JointStep) -> dict[str, Mapping[str, Any]]:
    ends = dict.fromkeys(step.terminated, "terminated") | dict.fromkeys(step.truncated, "truncated")
    # Copied: an environment may reuse its arrays.
    return {"observation": deepcopy(dict(step.observations)), "reward": dict(step.rewards), "end": ends}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if one is None or other is None:
        return one is other
    arrays = np.asarray(one), np.asarray(other)
    return np.array_equal(*arrays, equal_nan=all(each.dtype.kind in "fc" for each in arrays))


def _short(value: Any) -> str:
    return "none" if value is None else reprlib.repr(value.tolist() if isinstance(value, np.ndarray) else value)


STARTS = 64
"""Maximum number of starts for `find_opposed_agent`."""

_GROUP_SIZE = 4  # episodes per start
_STAGES = (1024, 4096)  # total steps of the first and the second test; rare encounters require more steps
_SHUFFLES = 199  # a correlation below all of them has probability 1/200 if rewards are independent
_LEAST_CORRELATION = 0.2

_Group = list[list[Mapping[str, float]]]  # rewards by agent, for every episode of a start and every step


@dataclass(frozen=True, kw_only=True)
class OpposedAgent:
    """An agent whose rewards are negatively correlated with those of the others.

    Attributes:
        agent: Name of the agent.
        agents: All agents.
        correlation: Correlation with the sum of all other rewards, per step, within episodes from one start.
    """

    agent: str
    agents: tuple[str, ...]
    correlation: float

    def advice(self, *, learning: bool, fitness: bool) -> str:
        """Return the warning for members that learn from, or are selected by, the sum of all rewards."""
        others = [name for name in self.agents if name != self.agent]
        groups = [prefix_of(name) for name in others if prefix_of(name) != prefix_of(self.agent)]
        used = " and ".join(["learn from"] * learning + ["are selected by"] * fitness)
        fixes = [
            *["credit='agent' to learn from each agent's own rewards"] * learning,
            *[f"score={(groups or others)[0]!r} or another agent to select by its returns"] * fitness,
        ]
        return (
            f"rewards of {self.agent} are opposed to those of the other agents (correlation {self.correlation:.2f} "
            f"in random play), but members {used} the sum of all rewards. Set {', and '.join(fixes)}; or score='sum' "
            "to keep the sum without this warning."
        )


def find_opposed_agent(env: JointEnv, seeds: Sequence[int], seed: int) -> OpposedAgent | None:
    """Return the agent whose rewards are most clearly opposed to those of the others; None if there is none.

    Episodes from one start differ by their actions only, so the test correlates the deviation of an agent's reward from
    its mean over the start's episodes at the same step with that of the sum of all other rewards. If agents are
    independent, permuting the episodes of each agent within a start makes no difference. An agent is opposed if its
    correlation is below -0.2 and below the lowest of any agent in each of 199 permutations: a permutation test at
    0.5 %, for any distribution and autocorrelation of rewards. Unless all correlations are above 0.2, the test is
    repeated with four times as many steps.

    Args:
        env: Environment to play in.
        seeds: Reset seeds, as many as may be needed.
        seed: Names the actions and the permutations.
    """
    groups: list[_Group] = []
    rng, waiting = generator(seed, "opposed"), iter(seeds)
    for budget in _STAGES:
        while sum(len(episode) for group in groups for episode in group) < budget:
            start = next(waiting, None)
            if start is None:
                break
            groups.append(
                [
                    [step.rewards for step in _random_episode(env, start, seed, replica)][1:]
                    for replica in range(_GROUP_SIZE)
                ]
            )
        agents, rewards = _reward_table(groups)
        if len(agents) < 2 or not np.isfinite(rewards).all():  # training raises an error for the latter
            return None
        deviations = rewards - rewards.mean(axis=1, keepdims=True)
        found = _correlations(deviations)
        place = int(found.argmin())
        if found[place] > _LEAST_CORRELATION:
            return None
        if found[place] < -_LEAST_CORRELATION and all(
            _correlations(_shuffled(deviations, rng)).min() > found[place] for _ in range(_SHUFFLES)
        ):
            return OpposedAgent(agent=agents[place], agents=agents, correlation=float(found[place]))
    return None


def _reward_table(groups: Sequence[_Group]) -> tuple[tuple[str, ...], NDArray[np.float64]]:
    """Return agents and their rewards `[starts, episodes, steps, agents]`, 0 where an agent is absent."""
    episodes = [episode for group in groups for episode in group]
    agents = tuple(dict.fromkeys(agent for episode in episodes for rewards in episode for agent in rewards))
    table = np.zeros((len(episodes), max(map(len, episodes)), len(agents)))
    for row, episode in zip(table, episodes, strict=True):
        for step, rewards in zip(row, episode, strict=False):
            step[:] = [rewards.get(agent, 0.0) for agent in agents]
    return agents, table.reshape(len(groups), _GROUP_SIZE, *table.shape[1:])


def _correlations(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each agent's correlation with the sum of all others, `[agents]`; 0 if one of them is constant."""
    rest = deviations.sum(axis=-1, keepdims=True) - deviations
    spread = np.sqrt((deviations**2).sum(axis=(0, 1, 2)) * (rest**2).sum(axis=(0, 1, 2)))
    together = (deviations * rest).sum(axis=(0, 1, 2))
    result: NDArray[np.float64] = np.divide(together, spread, out=np.zeros_like(together), where=spread > 1e-12)
    return result


def _shuffled(deviations: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Permute the episodes of each agent within each start."""
    starts, episodes, _, agents = deviations.shape
    order = rng.permuted(np.broadcast_to(np.arange(episodes)[None, :, None], (starts, episodes, agents)), axis=1)
    return np.take_along_axis(deviations, order[:, :, None, :], axis=1)
