"""Held-out questions asked of members, all of them at once or in rounds, and what they earned and cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.rollout.requests import EvaluationRequest
from evogrpo.envs.protocol import GroupEnvironment, Split
from evogrpo.envs.text.datasets import PromptEnvironment
from evogrpo.evolution.fitness import (
    Fitness,
    FitnessConfig,
    clearly_behind,
    looks,
    on_all_questions,
    rounds,
    still_racing,
)
from evogrpo.warnings import warn


@dataclass(frozen=True, kw_only=True)
class FitnessResult:
    """What members earned on held-out questions.

    Attributes:
        fitness: By slot.
        tokens: Tokens that were read and written for it, or steps in the environment; by slot.
    """

    fitness: dict[int, Fitness]
    tokens: dict[int, int]


def evaluate_questions(
    members: PolicySet, env: GroupEnvironment, asked: EvaluationRequest
) -> tuple[NDArray[np.float64], tuple[int, ...]]:
    """Answer held-out questions.

    Returns:
        `[slots, questions]` raw task rewards, each the mean over the answers to a question that have one; NaN where
        none has. And for each slot the tokens, or steps in the environment, that this took.

    Raises:
        ValueError: If no reward applies to a completion and the environment is not to leave such ones out.
    """
    found = members.evaluate(env, asked)
    missing = int((~np.isfinite(found.rewards)).sum())
    if missing and not (isinstance(env, PromptEnvironment) and env.excludes_failures):
        raise ValueError(
            f"fitness needs a reward for every {asked.split} completion, but none applied to {missing} of "
            f"{found.rewards.size}: let at least one reward function return a number for every question of the "
            "held-out splits, or leave out those that have none (on_reward_error='exclude')"
        )
    rewards = found.rewards.reshape(len(asked.slots), len(asked.questions), asked.each)
    scored = np.isfinite(rewards)
    with np.errstate(invalid="ignore"):  # 0 / 0 where no answer has a reward
        means = np.where(scored, rewards, 0.0).sum(axis=2) / scored.sum(axis=2)
    return means, found.tokens


def measure_fitness(
    members: PolicySet,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    config: FitnessConfig,
    questions: int | None = None,
    rival: Fitness | None = None,
    base: bool = False,
) -> FitnessResult:
    """Measure what members earn on the first questions of a split, in rounds where the settings say so.

    A race is over when the leader is the only one that is still asked; it answers all the same, unless it is clearly
    behind the rival. So whoever could be the best ever has answered everything.

    Args:
        members: Who acts.
        slots: Those that are asked, at least one.
        env: Where the questions come from.
        split: Which of its splits.
        config: How they are asked.
        questions: How many at most; None = all of them.
        rival: The best so far, on questions of the same split.
        base: Whether it is the untrained base that answers, as one slot of any number.

    Raises:
        ValueError: If the split is empty, or too few of its questions have a reward for everybody.
    """
    count = env.size(split) if questions is None else min(questions, env.size(split))
    table, tokens = np.full((len(slots), count), np.nan), dict.fromkeys(slots, 0)
    asked = np.zeros(table.shape, dtype=np.bool_)
    error = config.race_error / max(1, looks(count)) / max(1, len(slots) - 1)
    running = list(range(len(slots)))
    if count < 1:
        raise ValueError(f"the {split} split holds no questions, so nothing can be evaluated on it")
    for first, last in rounds(count, racing=config.racing and not base):
        wanted = EvaluationRequest(
            split=split,
            questions=tuple(range(first, last)),
            slots=tuple(slots[row] for row in running),
            base=base,
            answers=config.answers if config.sampled else None,
        )
        table[running, first:last], spent = evaluate_questions(members, env, wanted)
        asked[running, first:last] = True
        for slot, amount in zip(wanted.slots, spent, strict=True):
            tokens[slot] += amount
        if last < count:
            running = [running[row] for row in still_racing(table[running, :last], error)]
            if len(running) == 1 and rival is not None and _is_behind(table[running[0]], rival, error):
                break
    kept = common_questions(table, asked, split)
    every = [
        Fitness.from_scores(row[own].tolist(), np.flatnonzero(own).tolist())
        for row, own in zip(table, kept & asked, strict=True)
    ]
    leader = max((every[row] for row in running), key=lambda fitness: fitness.mean)
    fitness = [on_all_questions(each, leader) for each in every]
    return FitnessResult(fitness=dict(zip(slots, fitness, strict=True)), tokens=tokens)


def _is_behind(scores: NDArray[np.float64], rival: Fitness, error: float) -> bool:
    theirs = np.full(len(scores), np.nan)
    for key, score in rival.by_key.items():
        if key < len(scores):
            theirs[key] = score
    return clearly_behind(theirs, scores, error)


def common_questions(rewards: NDArray[np.float64], asked: NDArray[np.bool_], split: Split) -> NDArray[np.bool_]:
    """Return `[questions]` which questions have a reward for all that were asked, so that all are compared alike.

    Args:
        rewards: `[members, questions]`; NaN where there is none.
        asked: `[members, questions]` who was asked what.
        split: For messages.

    Raises:
        ValueError: If these are less than half of the questions that anybody was asked.
    """
    anybody = np.any(asked, axis=0)
    kept: NDArray[np.bool_] = np.logical_and(anybody, np.all(np.isfinite(rewards) | ~asked, axis=0))
    total, left = int(anybody.sum()), int(kept.sum())
    if left < total:
        if 2 * left < total:
            raise ValueError(
                f"members are compared by the {split} questions that all of them have a reward for, but these are only "
                f"{left} of {total}: mend the reward function, or let it return a number where it fails"
            )
        warn(f"{total - left} of {total} {split} questions are left out: not everybody's completion could be rewarded")
    return kept
