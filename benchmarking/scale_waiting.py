"""What processes wait for the slowest of them, by simulation, and what a plan is worth that does not wait."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evogrpo.randomness import generator


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Of what the seconds of a learning step are drawn.

    Attributes:
        median: Tokens of a completion, log-normal.
        spread: Standard deviation of its logarithm.
        most: Tokens at which it is cut off.
        token: Seconds of a decoded token.
        reward: Mean seconds of a reward, exponential; all of a step at the same time.
        learning: Seconds of learning for every hundred tokens.
    """

    median: float = 400.0
    spread: float = 0.7
    most: int = 4096
    token: float = 0.01
    reward: float = 1.0
    learning: float = 0.02

    def draw(self, shape: tuple[int, ...], samples: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return seconds of learning steps: written until the longest ends, rewarded until the slowest, then learnt."""
        found = np.empty(shape)
        for place in np.ndindex(*shape[:-1]):  # few at a time, as every completion is drawn
            lengths = np.minimum(
                self.median * np.exp(self.spread * rng.standard_normal((shape[-1], samples))), self.most
            )
            rewards = rng.exponential(self.reward, (shape[-1], samples)).max(-1)
            found[place] = lengths.max(-1) * self.token + rewards + lengths.sum(-1) / 100 * self.learning
        return found


@dataclass(frozen=True, kw_only=True)
class Waited:
    """What a simulation found.

    Attributes:
        step: Part of the time that processes wait if all meet after every learning step, as they do here.
        generation: Likewise if they meet once a generation.
        apart: How many generations the others' records are older or newer, on average, if nobody ever waits.
        picked: Which part of the best quarter, after equal work and without noise, asynchronous plans find.
        together: Which part of it plans find that are made of equally old records.
    """

    step: float
    generation: float
    apart: float
    picked: float
    together: float


def simulate(
    processes: int, *, members: int = 4, samples: int = 16, steps: int = 10, generations: int = 12,
    slower: float = 0.0, delays: Delays = Delays(), seed: int = 0,
) -> Waited:  # fmt: skip
    """Let processes take steps of random lengths, one member after the other's batch: all members' rows in one.

    For what asynchronous plans find, fitness rises as 1 - exp(-rate x generations), one learner of a process.

    Args:
        processes: How many.
        members: Of each.
        samples: Completions of each in a step.
        steps: Learning steps of a generation.
        generations: How many.
        slower: By which part cards differ in speed, as a standard deviation.
        delays: What is drawn.
        seed: Of all of it.
    """
    rng = generator(seed, "scale", processes)
    speed = np.maximum(0.5, 1 + slower * rng.standard_normal(processes))[:, None, None]
    seconds = delays.draw((processes, generations, steps), members * samples, rng) * speed
    alone = seconds.sum() / processes
    by_generation = seconds.sum(2)
    ends = by_generation.cumsum(1)
    # When a process closes a generation in the middle of the run, how many the others have behind them.
    closing = ends[:, generations // 2]
    behind = (ends[None, :, :] <= closing[:, None, None]).sum(2)
    others = ~np.eye(processes, dtype=bool)
    apart = np.abs(behind - (generations // 2 + 1))[others].mean() if processes > 1 else 0.0
    trials, level = max(1, 400 // processes), np.full_like(behind, generations // 2 + 1)
    together = [_picked(level, generations // 2 + 1, rng) for _ in range(trials)]
    picked = [_picked(behind, generations // 2 + 1, rng) for _ in range(trials)]
    return Waited(
        step=float(1 - alone / seconds.max(0).sum()),
        generation=float(1 - alone / by_generation.max(0).sum()),
        apart=float(apart),
        picked=float(np.mean(picked)),
        together=float(np.mean(together)),
    )


def _picked(behind: NDArray[np.int64], equal: int, rng: np.random.Generator) -> float:
    """Return which part of the best quarter after equal work is found by the plans of processes of unequal work.

    Args:
        behind: `[p, p]` how many generations the others had behind them when each process closed one.
        equal: How many it had itself.
        rng: Draws how fast each learns, and the noise of its fitness.
    """
    processes = len(behind)
    rates, noise = rng.lognormal(math.log(0.1), 0.5, processes), 0.02 * rng.standard_normal(processes)
    quarter = max(1, processes // 4)
    best = set(np.argsort(rates * -equal)[:quarter].tolist())
    told = np.argsort(-(1 - np.exp(-rates * behind) + noise), axis=1)[:, :quarter]
    return float(np.mean([len(best & set(row)) / quarter for row in told.tolist()]))
