"""Uniform random numbers named by row, step and agent, so that who else plays and in which lane never changes one."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from evogrpo.randomness import generator

StepUniforms = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same for the same (row, t) at every call."""

AgentUniforms = Callable[[str, NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]
"""(agent, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in [0, 1); the same for the same arguments always."""

_FIRST_CHUNK = 64


class ActionNoise:
    """Uniforms in [0, 1) for the steps of episodes whose lengths nobody knows beforehand.

    Row number r of stream s draws, at its step t, the number [r, t] of the generators (seed, purpose, *streams[s], 0),
    (..., 1) and so on, each good for twice as many steps as the one before. Calling it with rows and steps in any
    order, any number of times, gives the same numbers.

    Args:
        seed: Root seed of the run.
        purpose: What is drawn.
        streams: Numbers that name the stream of each member, e.g. (learning step, index).
        rows: How many rows each stream has; the rows are numbered through, stream after stream.
        width: Numbers per action.
    """

    def __init__(
        self, seed: int, purpose: str, *, streams: Sequence[tuple[int, ...]], rows: Sequence[int], width: int
    ) -> None:
        if len(streams) != len(rows):
            raise ValueError(f"rows must say how many rows each stream has, got {len(rows)} for {len(streams)} streams")
        self._seed = seed
        self._purpose = purpose
        self._streams = tuple(zip(streams, rows, strict=True))
        self._width = width
        self._chunks = 0
        self._table = np.empty((sum(rows), 0, width), dtype=np.float32)

    def __call__(self, rows: NDArray[np.int64], t: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the draws `[m, width]` of rows `[m]` at their steps `t` `[m]`."""
        while len(t) and self._table.shape[1] <= t.max():
            length = _FIRST_CHUNK << self._chunks
            chunk = [
                generator(self._seed, self._purpose, *name, self._chunks).random(
                    (count, length, self._width), dtype=np.float32
                )
                for name, count in self._streams
            ]
            self._table = np.concatenate([self._table, np.concatenate(chunk)], axis=1)
            self._chunks += 1
        drawn: NDArray[np.float32] = self._table[rows, t]
        return drawn


class AgentActionNoise:
    """Uniforms in [0, 1) for every agent's every step: `ActionNoise` under each agent's own name.

    Args:
        seed: Root seed of the run.
        purpose: What is drawn.
        streams: Numbers that name the stream of each member, e.g. (learning step, index).
        rows: How many joint episodes each stream has; they are numbered through, stream after stream.
        width_of: Numbers per action of an agent.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        *,
        streams: "list[tuple[int, ...]]",
        rows: "list[int]",
        width_of: Callable[[str], int],
    ) -> None:
        self._seed, self._purpose, self._streams, self._rows = seed, purpose, streams, rows
        self._width_of = width_of
        self._agents: dict[str, ActionNoise] = {}

    def __call__(self, agent: str, rows: NDArray[np.int64], t: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the draws `[m, width]` of an agent in the joint episodes `rows` `[m]` at their steps `t` `[m]`."""
        if agent not in self._agents:
            self._agents[agent] = ActionNoise(
                self._seed,
                f"{self._purpose} for {agent}",
                streams=self._streams,
                rows=self._rows,
                width=self._width_of(agent),
            )
        return self._agents[agent](rows, t)


def of_entries(
    uniforms: AgentUniforms, agents: Sequence[str], rows: NDArray[np.int64], t: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the draws `[m, width]` of agents `[m]`, whose policies draw alike, in rows `[m]` at their steps `[m]`."""
    names, number = np.unique(np.array(agents), return_inverse=True)
    parts = [
        (number == each, uniforms(str(name), rows[number == each], t[number == each]))
        for each, name in enumerate(names)
    ]
    drawn = np.empty((len(agents), parts[0][1].shape[1]), dtype=np.float32)
    for own, values in parts:
        drawn[own] = values
    return drawn
