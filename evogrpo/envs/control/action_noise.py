"""Random numbers to sample actions with."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from evogrpo.arrays import Float32Array, IntArray
from evogrpo.randomness import generator

Uniforms = Callable[[Sequence[str], IntArray, IntArray], Float32Array]
"""(agents `[m]`, or () for a single agent, rows `[m]`, their steps t `[m]`) -> `[m, d]` numbers in
[0, 1); the same for the same entry at every call.
"""

_FIRST_CHUNK = 64  # steps; each further chunk is twice as long, so that few are drawn


class ActionNoise:
    """Uniform random numbers in [0, 1) for every agent, row and step of episodes of any length.

    Row r of stream s has entry [r, t] of a table at its step t. Chunk c of the table comes from the
    generator (seed, purpose, *streams[s], c) and has twice as many steps as chunk c - 1. The
    numbers depend on neither the order nor the number of the calls. Agent a has tables of its own,
    of the purpose "purpose for a", so its numbers do not depend on other agents; a single agent
    uses the purpose itself.

    Args:
        seed: Root seed of the run.
        purpose: Purpose of the random streams.
        streams: Numbers that name the stream of each member, e.g. (learning step, index).
        rows: Number of rows of each stream. Rows are numbered stream after stream.
        width_of: Returns the numbers per action of an agent; its name is "" if it is a single
            agent.
    """

    def __init__(
        self,
        seed: int,
        purpose: str,
        *,
        streams: Sequence[tuple[int, ...]],
        rows: Sequence[int],
        width_of: Callable[[str], int],
    ) -> None:
        self._seed = seed
        self._purpose = purpose
        self._width_of = width_of
        self._streams = tuple(zip(streams, rows, strict=True))
        self._tables: dict[str, Float32Array] = {}  # `[rows, steps, width]` of each agent
        self._chunks: dict[str, int] = defaultdict(int)

    def __call__(self, agents: Sequence[str], rows: IntArray, t: IntArray) -> Float32Array:
        """Return the numbers `[m, width]` of agents `[m]` of one policy.

        Args:
            agents: Agents; empty for a single agent.
            rows: `[m]` episodes.
            t: `[m]` their steps.
        """
        names = sorted(set(agents)) or [""]
        for agent in names:
            # 1. Draw the numbers of further steps.
            table = self._tables.get(agent)
            last = t.max(initial=0)
            while table is None or table.shape[1] <= last:
                part = self._chunks[agent]
                width = self._width_of(agent)
                purpose = f"{self._purpose} for {agent}" if agent else self._purpose
                length = _FIRST_CHUNK << part
                chunks = []
                for stream, count in self._streams:
                    rng = generator(self._seed, purpose, *stream, part)
                    chunks.append(rng.random((count, length, width), dtype=np.float32))
                chunk = np.concatenate(chunks)
                if table is None:
                    table = chunk
                else:
                    table = np.concatenate([table, chunk], axis=1)
                self._tables[agent] = table
                self._chunks[agent] += 1
        # 2. Look them up.
        result: Float32Array = self._tables[names[0]][rows, t]
        for agent in names[1:]:
            selected = np.array(agents) == agent
            table = self._tables[agent]
            result[selected] = table[rows[selected], t[selected]]
        return result
