"""Fit the cost model of a generation to what one core of this machine takes, and say how well it fits.

    python benchmarking/scale_fit.py

What a part should take by its operations and bytes, at the speed that this core has in one large product and in one
large matrix times a vector, is compared with what it does take. The ratios say which part of that speed is attained;
`scale_model.py` takes them for a GPU as well. Seconds are those of the processor, in one thread, so that other programs
hardly count, and the core's speed is measured in between. What is stored has seconds of the clock, the least of three.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evogrpo import GRPO, HuggingFaceGym, load_base

ROWS = (4, 16, 48)
"""Rows that are written at once."""
LENGTHS = (4, 12)
"""Tokens that are written: the difference is that of decoding alone."""
LEARNT = (8, 16, 32)
"""Completions of a learning step."""
MEMBERS = (1, 2, 4)
"""Members that share rows, and completions, of one number."""
SHARED = 16
"""That number."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one core does at best.

    Attributes:
        flops: Operations a second in a large product.
        bandwidth: Bytes a second in a large matrix times a vector.
    """

    flops: float
    bandwidth: float


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Return what a piece of work takes."""
    began = clock()
    work()
    return clock() - began


def speed() -> Speed:
    """Measure what this core does at best: the median of five."""
    left, right = torch.randn(1024, 1536), torch.randn(1536, 1536)
    matrix, vector = torch.randn(8192, 8192), torch.randn(8192)
    products = [seconds(lambda: left @ right) for _ in range(5)]
    reads = [seconds(lambda: torch.mv(matrix, vector)) for _ in range(5)]
    operations = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return Speed(
        flops=operations / statistics.median(products),
        bandwidth=matrix.numel() * 4 / statistics.median(reads),
    )


def fitted(columns: Sequence[Sequence[float]], took: Sequence[float]) -> tuple[list[float], float]:
    """Return the factors of the columns that fit best, none negative, and the largest relative error."""
    from scipy.optimize import nnls

    table, measured = np.array(columns).T, np.array(took)
    factors, _ = nnls(table / measured[:, None], np.ones(len(measured)))  # of relative errors
    errors = table @ factors / measured - 1
    return factors.tolist(), float(np.abs(errors).max())


class Lab:
    """Members whose parts of a generation are timed.

    Args:
        base: The base model's name.
    """

    def __init__(self, base: str) -> None:
        self._base = load_base(base, dtype=torch.float32)  # as what the core does at best is measured in
        self.bytes = next(self._base.model.parameters()).element_size()
        self.parameters = sum(weights.numel() for weights in self._base.model.parameters())
        asked = [
            {"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10, 60) for b in range(10, 40)
        ]
        self._env = HuggingFaceGym(asked, tokenizer=self._base.tokenizer, reward_fn=_length)

    def population(self, members: int, tokens: int) -> Any:
        """Return members that write so many tokens."""
        return GRPO.population(
            members,
            actor_network=self._base.model,
            pad_token_id=self._base.tokenizer.pad_token_id,
            max_output_tokens=tokens,
            min_output_tokens=tokens,
            group_size=4,
        )

    def token(self, rows: int, members: int = 1) -> float:
        """Return the seconds of one further token of so many rows, of all members together."""
        took = []
        for tokens in LENGTHS:
            collect = partial(self._collect, self.population(members, tokens), rows // members)
            took.append(min(seconds(collect) for _ in range(2)))
        return (took[1] - took[0]) / (LENGTHS[1] - LENGTHS[0])

    def learning(self, completions: int, members: int = 1, tokens: int = 16) -> tuple[float, int]:
        """Return the seconds of a learning step of all members, and the tokens that it reads: a group's prompt once."""
        population = self.population(members, tokens)
        experience = self._collect(population, completions // members).experience
        took = min(seconds(lambda: population.learn(experience, step=0)) for _ in range(2))
        return took, sum(each.tokens for each in population.learn(experience, step=1).values())

    def _collect(self, population: Any, rows: int) -> Any:
        return population.collect(self._env, step=0, samples_per_step=rows, block=rows // 4)


def _length(completion: str, answer: str, question: str) -> float:
    return len(completion) % 7 / 7


def stored(size: int = 200_000_000) -> float:
    """Return the bytes a second that are hashed and written: the most of three."""
    tensors = {"weights": torch.zeros(size // 4)}
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            path = Path(folder, "state.safetensors")
            save_file(tensors, path)
            hashlib.sha256(path.read_bytes()).hexdigest()

        return size / min(seconds(write, time.monotonic) for _ in range(3))


def report_members(lab: Lab) -> None:
    """Measure what the same work takes that is shared among several members, in turns, and print it."""
    tokens: dict[int, list[float]] = {members: [] for members in MEMBERS}
    steps: dict[int, list[float]] = {members: [] for members in MEMBERS}
    for _ in range(3):
        for members in MEMBERS:
            tokens[members].append(lab.token(SHARED, members))
            steps[members].append(lab.learning(SHARED, members)[0])
    for what, took in (("a token", tokens), ("learning", steps)):
        medians = [statistics.median(took[members]) for members in MEMBERS]
        more, alone = np.polyfit(np.array(MEMBERS) - 1, medians, 1)
        ranges = ", ".join(f"{min(each):.3f} to {max(each):.3f}" for each in took.values())
        print(f"{what} of {SHARED} rows of {MEMBERS} members: {ranges} s; {alone:.3f} s and {more:.3f} s more a member")


def report(base: str) -> None:
    """Measure, fit and print."""
    torch.set_num_threads(1)
    lab, best = Lab(base), [speed()]
    tokens = []
    for rows in ROWS:
        tokens.append(lab.token(rows))
        best.append(speed())
    steps = []
    for completions in LEARNT:
        steps.append(lab.learning(completions))
        best.append(speed())
    flops, bandwidth = (statistics.median(getattr(each, name) for each in best) for name in ("flops", "bandwidth"))
    print(
        f"this core at best: {flops / 1e9:.0f} Gflop/s in a product, {bandwidth / 1e9:.1f} GB/s in a matrix times a "
        "vector"
    )
    reading = [lab.bytes * lab.parameters / bandwidth] * len(ROWS)
    products = [2 * lab.parameters * rows / flops for rows in ROWS]
    (of_reading, of_products), error = fitted([reading, products], tokens)
    for rows, took in zip(ROWS, tokens, strict=True):
        print(f"a token of {rows} rows: {1e3 * took:.0f} ms")
    print(
        f"writing a token: {of_reading:.2f} x reading the base + {of_products:.2f} x its products; "
        f"worst error {error:.0%}"
    )
    learnt = [6 * lab.parameters * read / flops for _, read in steps]
    (of_learning, once), wrong = fitted([learnt, [1.0] * len(steps)], [took for took, _ in steps])
    for took, read in steps:
        print(f"learning from {read} tokens: {took:.2f} s")
    print(f"learning: {of_learning:.2f} x 6 operations a parameter and token + {once:.2f} s; worst error {wrong:.0%}")
    report_members(lab)
    print(f"hashed and written: {stored() / 1e9:.2f} GB/s")


def main(given: Sequence[str]) -> None:
    """Fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2-135m")
    report(parser.parse_args(given).base)


if __name__ == "__main__":
    main(sys.argv[1:])
