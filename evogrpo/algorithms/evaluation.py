"""Evaluation on held-out questions: all members at once, or in racing rounds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from types import MappingProxyType

import numpy as np

from evogrpo.arrays import BoolArray, FloatArray
from evogrpo.config.task_settings import NO_SETTINGS, TaskSettings
from evogrpo.envs.protocol import GroupEnvironment, Split
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.evolution.fitness import Fitness, FitnessConfig, paired_difference
from evogrpo.interruption import NEVER, Stop
from evogrpo.members.members import Members
from evogrpo.members.requests import EvaluationRequest
from evogrpo.validation import whole_between
from evogrpo.warnings import warn


def evaluate_questions(
    members: Members, env: GroupEnvironment, request: EvaluationRequest
) -> tuple[FloatArray, tuple[int, ...]]:
    """Evaluate members on held-out questions, on part of them on each rank.

    Returns:
        `[slots, questions]` raw task rewards, averaged over the answers that have one; NaN where
        none has. And the tokens (or environment steps) of each slot.

    Raises:
        ValueError: If no reward applies to a completion and the environment does not exclude
            failures.
    """
    # 1. Evaluate all questions, or this rank's part of them.
    members.prepare_sampling()
    ranks = members.processes
    shape = (len(request.slots), len(request.questions), request.answers_per_question)
    if ranks.size == 1:
        rewards, tokens = members.evaluate(env, request)
    else:
        shares = np.array_split(np.asarray(request.questions), ranks.size)
        questions = tuple(shares[ranks.rank].tolist())

        def work() -> tuple[FloatArray, tuple[int, ...]] | None:
            """Return the results of this rank's questions; None if it has none."""
            if questions:
                return members.evaluate(env, replace(request, questions=questions))
            return None

        # Shares are contiguous and results come in rank order, so the columns are in the order of
        # the questions.
        results = [result for result in ranks.gather_results(work) if result is not None]
        # Rows of a slot are next to each other.
        rows = [values.reshape(len(request.slots), -1) for values, _ in results]
        rewards = np.hstack(rows)
        spent_by_rank = np.array([spent for _, spent in results])
        tokens = tuple(spent_by_rank.sum(axis=0).tolist())
    # 2. Average over the answers to each question.
    #    An environment may exclude completions whose reward function failed.
    missing = int((~np.isfinite(rewards)).sum())
    if missing and not (isinstance(env, PromptEnvironment) and env.on_reward_error == "exclude"):
        fix = "Return a number for every held-out question"
        if missing < rewards.size:
            fix += ", or set on_reward_error='exclude'"
        raise ValueError(
            f"{missing} of {rewards.size} {request.split} completions have no reward, but fitness"
            f" needs one for each. {fix}."
        )
    rewards = rewards.reshape(shape)
    scored = np.isfinite(rewards)
    with np.errstate(invalid="ignore"):  # 0 / 0 where no answer has a reward
        sums = np.where(scored, rewards, 0.0).sum(axis=2)
        means = sums / scored.sum(axis=2)
    return means, tokens


def _question_count(env: GroupEnvironment, split: Split, questions: int | None) -> int:
    """Return the number of questions to answer: `questions` at most, all by default."""
    count = env.size(split)
    if questions is not None:
        count = min(whole_between("questions", questions, 1), count)
    if count < 1:
        raise ValueError(
            f"The {split} split is empty, so nothing can be evaluated on it. Add questions to it."
        )
    return count


def evaluate(
    members: Members,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    questions: int | None = None,
    settings: Mapping[int, TaskSettings] = MappingProxyType({}),
    base: bool = False,
    answers: int | None = None,
) -> FloatArray:
    """Evaluate members on held-out questions, all in one batch.

    Training random streams are not touched.

    Args:
        members: All members.
        slots: Slots to evaluate. With `base`, a single slot, whose value has no effect.
        env: Provides questions and rewards.
        split: "validation" for selection, "test" for the final report.
        questions: Number of questions, from the first on; None = all.
        settings: Task settings by slot; members that are missing have none.
        base: Evaluate the untrained base instead of members.
        answers: Number of sampled answers per question, averaged; None = one greedy answer.

    Returns:
        `[members, questions]` raw task rewards, float64; NaN where the environment excludes a
        completion.

    Raises:
        ValueError: If the split is empty, or a completion has no reward and the environment does
            not exclude failures.
    """
    count = _question_count(env, split, questions)
    request = EvaluationRequest(
        split=split,
        questions=tuple(range(count)),
        slots=tuple(slots),
        settings=tuple(settings.get(slot, NO_SETTINGS) for slot in slots),
        base=base,
        answers=answers,
    )
    return evaluate_questions(members, env, request)[0]


def measure_fitness(
    members: Members,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    config: FitnessConfig,
    questions: int | None = None,
    rival: Fitness | None = None,
    settings: Mapping[int, TaskSettings] = MappingProxyType({}),
    base: bool = False,
    stop: Stop = NEVER,
) -> tuple[dict[int, Fitness], dict[int, int]]:
    """Measure the fitness of members on the first questions of a split, with or without racing.

    A race ends when only the leader is left. The leader still answers all questions, unless it is
    clearly behind the rival, so the best member so far always has a complete evaluation.

    Args:
        members: All members.
        slots: Slots to evaluate, at least one.
        env: Provides questions and rewards.
        split: Name of the split.
        config: Sampling and racing settings.
        questions: Maximum number of questions; None = all.
        rival: Fitness of the best member so far, on the same split; None = there is none yet.
        settings: Task settings by slot; members that are missing have none.
        base: Evaluate the untrained base instead; `slots` then has a single slot, whose value has
            no effect.
        stop: See `EvaluationRequest`.

    Returns:
        Fitness, and tokens (or environment steps) processed, by slot.

    Raises:
        ValueError: If the split is empty, or fewer than half of its questions have a reward for all
            members.
    """
    # 1. Set up the race. Scores are NaN until a member has answered.
    count = _question_count(env, split, questions)
    scores = np.full((len(slots), count), np.nan)
    tokens = dict.fromkeys(slots, 0)
    evaluated = np.zeros(scores.shape, dtype=np.bool_)
    # The error of the whole race is divided among its comparisons and all pairs with the leader
    # (Bonferroni).
    comparisons = len(list(rounds(count, racing=True))) - 1  # one after each round but the last
    pairs = max(1, len(slots) - 1)
    error = config.race_error / max(1, comparisons) / pairs
    running = list(range(len(slots)))  # rows of `scores`: members that are still in the race
    # 2. Evaluate in rounds; members that are clearly behind leave the race.
    for first, last in rounds(count, racing=config.racing and not base):
        # Members that have lost the race answer no further questions.
        answering = tuple(slots[row] for row in running)
        request = EvaluationRequest(
            split=split,
            questions=tuple(range(first, last)),
            slots=answering,
            settings=tuple(settings.get(slot, NO_SETTINGS) for slot in answering),
            base=base,
            answers=config.answers if config.sampled else None,
            stop=stop,
        )
        rewards, spent = evaluate_questions(members, env, request)
        scores[running, first:last] = rewards
        evaluated[running, first:last] = True
        for slot, amount in zip(request.slots, spent, strict=True):
            tokens[slot] += amount
        if last < count:
            left = still_racing(scores[running, :last], error)
            running = [running[row] for row in left]
            # The last member races against the best member so far.
            if len(running) == 1 and rival is not None:
                # NaN where the rival has no score.
                rival_scores = [rival.by_key.get(question, np.nan) for question in range(count)]
                if clearly_behind(np.array(rival_scores), scores[running[0]], error):
                    break
    # 3. Compare members on the questions that have a reward for all of them.
    kept = common_questions(scores, evaluated, split)
    measured = []
    for row, answered in zip(scores, kept & evaluated, strict=True):
        questions_answered = np.flatnonzero(answered).tolist()
        measured.append(Fitness.from_scores(row[answered].tolist(), questions_answered))
    # 4. Estimate, for all questions, the fitness of members that left the race early.
    still_running = [measured[row] for row in running]
    leader = max(still_running, key=lambda fitness: fitness.mean)
    fitness = [on_all_questions(each, leader) for each in measured]
    return dict(zip(slots, fitness, strict=True)), tokens


# ---- races

FIRST_ROUND = 8
"""Number of questions after the first round; it doubles with each further round."""


def rounds(questions: int, *, racing: bool) -> Iterator[tuple[int, int]]:
    """Yield the questions of each round as (first, end).

    A single round without racing or with few questions.
    """
    first = 0
    last = FIRST_ROUND if racing else questions
    while last < questions:
        yield first, last
        first = last
        last = 2 * last
    yield first, questions


def clearly_behind(leader: FloatArray, other: FloatArray, error: float) -> bool:
    """Return True if a member is significantly worse than the leader at error level `error`.

    Args:
        leader: `[n]` the leader's scores.
        other: `[n]` the member's scores on the same questions; NaN where either has none.
        error: Error probability of this comparison.
    """
    differences = leader - other
    differences = differences[np.isfinite(differences)]
    if len(differences) < 2 or differences.mean() <= 0:
        return False
    # Add one artificial difference that contradicts the others: without it, a few equal differences
    # would have no variance and look certain.
    contradicted = np.append(differences, -np.abs(differences).max())
    standard_error = contradicted.std(ddof=1) / math.sqrt(len(contradicted))
    margin = t_quantile(1 - error, len(differences)) * standard_error
    return bool(contradicted.mean() > margin)


def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t.

    For 7 degrees of freedom or more and probabilities up to 0.9995, the relative error is at most
    about 0.1 %.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms: Sequence[float] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    # A series in 1 / degrees, from the normal distribution on.
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def still_racing(scores: FloatArray, error: float) -> list[int]:
    """Return the members that are not clearly behind the leader, with the leader.

    Args:
        scores: `[members, n]` scores on the same questions; NaN where a member has none.
        error: Error probability of each comparison.
    """
    scored = np.isfinite(scores)
    sums = np.where(scored, scores, 0.0).sum(axis=1)
    means = sums / np.maximum(scored.sum(axis=1), 1)
    leader = int(np.where(scored.any(axis=1), means, -np.inf).argmax())
    racing = []
    for row, member_scores in enumerate(scores):
        if row == leader or not clearly_behind(scores[leader], member_scores, error):
            racing.append(row)
    return racing


def on_all_questions(fitness: Fitness, leader: Fitness) -> Fitness:
    """Estimate a member's fitness on all questions of its race.

    The estimate is the leader's mean plus the mean paired difference on the common questions. The
    member's own mean would be biased, because these questions may be easier or harder than the
    others. The variances of the leader's mean and of the difference are added, as if they were
    independent.
    """
    if len(fitness.scores) == len(leader.scores):
        return fitness
    lag, standard_error = paired_difference(fitness, leader)
    return replace(
        fitness,
        mean=leader.mean + lag,
        standard_error=math.hypot(leader.standard_error, standard_error),
    )


# ---- scores that count


def common_questions(rewards: FloatArray, evaluated: BoolArray, split: Split) -> BoolArray:
    """Return `[questions]` True where every evaluated member has a reward.

    Args:
        rewards: `[members, questions]`; NaN where there is none.
        evaluated: `[members, questions]` True where a member was evaluated.
        split: Name of the split, for messages.

    Raises:
        ValueError: If fewer than half of the evaluated questions have a reward for all members.
    """
    any_member = np.any(evaluated, axis=0)
    # Members that have lost the race have no rewards for later questions, and do not count there.
    answered = np.isfinite(rewards) | ~evaluated
    kept: BoolArray = any_member & answered.all(axis=0)
    total = int(any_member.sum())
    left = int(kept.sum())
    if 2 * left < total:
        raise ValueError(
            f"Only {left} of {total} {split} questions have a reward for all members; half are"
            " needed. Fix the reward function, or return a number where it fails."
        )
    if left < total:
        warn(
            f"{total - left} of {total} {split} questions are left out: not all members have a"
            " reward for them."
        )
    return kept


def common_scores(rewards: FloatArray, split: Split) -> FloatArray:
    """Return `[members, k]` rewards of the questions that have one for all members.

    See `common_questions`.
    """
    answered = np.ones(rewards.shape, dtype=np.bool_)
    return rewards[:, common_questions(rewards, answered, split)]
