"""Does it help to prefer questions whose groups have differed in reward?

    python benchmarking/chosen_questions.py [--seeds 0 1 2] [--arms "in order"]

One agent learns number_sequences from 64 questions, in four epochs: 32 learning steps of 8 groups
of 8 completions. Prints the accuracy on 256 other questions, and the share of groups with a
learning signal.

in order: every question once per epoch.
less often: in each epoch, a question is left out with probability 1 - 0.5^z, at most 7/8, if its
    latest z groups had equal rewards, as in GRESO (arXiv:2506.02177).
by learnability: after the first epoch, questions are drawn in proportion to p (1 - p), where p is
    the mean reward of the latest two groups, as in arXiv:2502.12272. Each fourth one is that which
    was not asked for the longest time.

Recorded runs are not repeated.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, HuggingFaceGym, load_base
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL
from evogrpo.envs.text.tasks import accuracy, sequence_questions
from evogrpo.randomness import generator

QUESTIONS = 64
STEPS = 32
GROUPS = 8
GROUP_SIZE = 8
SAMPLES = GROUPS * GROUP_SIZE
ARMS = ("in order", "less often", "by learnability")


class ChosenQuestions(HuggingFaceGym):
    """An environment whose questions are chosen by a rule.

    Attributes:
        rule: See the module.
        means: Mean reward of the groups so far, by question.
        asked: Learning step at which each question was last asked; -1 = never.
    """

    def __init__(self, *args: Any, rule: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rule = rule
        self.means: list[list[float]] = [[] for _ in range(self.size("train"))]
        self.asked = [-1] * self.size("train")
        self._position = 0
        self._chosen: tuple[int, ...] = ()

    def choose(self, step: int) -> tuple[int, ...]:
        """Choose the questions of a learning step."""
        if self.rule == "less often":
            self._chosen = self._less_often()
        elif self.rule == "by learnability" and step * GROUPS >= self.size("train"):
            self._chosen = self._by_learnability(step)
        else:
            self._chosen = super().select_starts(step, GROUPS, GROUPS)
        for question in self._chosen:
            self.asked[question] = step
        return self._chosen

    def select_starts(self, *_: Any, **__: Any) -> tuple[int, ...]:
        """Return the chosen questions."""
        return self._chosen

    def _less_often(self) -> tuple[int, ...]:
        size = self.size("train")
        chosen: list[int] = []
        while len(chosen) < GROUPS:
            epoch, place = divmod(self._position, size)
            self._position += 1
            question = int(generator(self.seed, "order", epoch).permutation(size)[place])
            # Groups without signal since the last one with.
            equal = 0
            for mean in reversed(self.means[question]):
                if 0 < mean < 1:
                    break
                equal += 1
            kept = max(1 / 8, 0.5**equal)
            drawn = generator(self.seed, "keep", epoch, question).random()
            if question not in chosen and drawn < kept:
                chosen.append(question)
        return tuple(chosen)

    def _by_learnability(self, step: int) -> tuple[int, ...]:
        rng = generator(self.seed, "learnability", step)
        chosen: list[int] = []
        while len(chosen) < GROUPS:
            left = [each for each in range(self.size("train")) if each not in chosen]
            if len(chosen) % 4 == 3:
                chosen.append(min(left, key=lambda question: self.asked[question]))
                continue
            p = np.array([np.mean(self.means[question][-2:]) for question in left])
            weights = p * (1 - p) + 1e-3
            chosen.append(left[rng.choice(len(left), p=weights / weights.sum())])
        return tuple(chosen)


def train(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """Train an agent; return its test accuracy on the way and the shares of groups with signal."""
    torch.set_num_threads(1)
    base = load_base("smollm2-135m")
    rows = sequence_questions(seed)
    tables = {"train": rows[:QUESTIONS], "validation": rows[-288:-256], "test": rows[-256:]}
    env = ChosenQuestions(tables, tokenizer=base.tokenizer, reward_fn=accuracy, seed=seed, rule=arm)
    population = GRPO.population(
        1,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=12,
        samples_per_step=SAMPLES,
        group_size=GROUP_SIZE,
        target_kl=DEFAULT_TARGET_KL,
        seed=seed,
    )
    began = time.process_time()
    scores = {}
    signal = []
    for step in range(steps):
        questions = env.choose(step)
        sampled = population.collect(
            env, step=step, samples_per_step=SAMPLES, starts_per_step=GROUPS
        )
        means = np.asarray(sampled.scores.rewards).reshape(GROUPS, GROUP_SIZE).mean(1)
        for question, mean in zip(questions, means.tolist(), strict=True):
            env.means[question].append(mean)
        signal.append(float(((means > 0) & (means < 1)).mean()))
        population.learn(sampled.experience, step=step)
        if (step + 1) % GROUPS == 0:
            accuracies = evaluate(population.members, [0], env, "test")
            scores[step + 1] = float(np.mean(accuracies))
    return {"scores": scores, "signal": signal, "seconds": round(time.process_time() - began, 1)}


def main() -> None:
    """Do all runs that are not recorded, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", type=Path, default=Path("runs/chosen_questions"))
    given = parser.parse_args()
    for seed in given.seeds:
        for arm in given.arms:
            path = given.folder / f"{arm} {seed}.json"
            if not path.exists():
                write_record(path, train(arm, seed, given.steps))
            record = json.loads(path.read_text("utf-8"))
            scores = " ".join(f"{score:.3f}" for score in record["scores"].values())
            signal = np.mean(record["signal"])
            print(f"| {arm} | {seed} | {scores} | {signal:.2f} |", flush=True)


if __name__ == "__main__":
    main()
