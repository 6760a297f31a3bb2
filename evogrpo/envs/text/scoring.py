"""Scoring of completions: rewards of all functions, checked and added up."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.text.reward_calls import (
    CallFailedError,
    InProcessRunner,
    Job,
    Outcome,
    PendingJob,
    RewardRunner,
    said,
    shown,
)
from evogrpo.envs.text.reward_functions import OnRewardError, Reward, RewardError, RewardInputs
from evogrpo.envs.text.step_rewards import MAX_REWARD, StepRewards, fits_float32
from evogrpo.warnings import warn


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardResult:
    """What completions have earned.

    Attributes:
        rewards: Weighted sum of the reward functions [n]; NaN where none applies or the completion is excluded.
        components: Values of each function [n], before its weight; NaN where it does not apply.
        steps: Of each function that looked inside a completion: what it returned there, None elsewhere.
    """

    rewards: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]
    steps: dict[str, list[StepRewards | None]] = field(default_factory=dict)


def compute_rewards(
    rewards: Sequence[Reward],
    answers: RewardInputs,
    on_error: OnRewardError,
    runner: RewardRunner | None = None,
    *,
    again: bool = False,
    begun: Sequence[PendingJob] = (),
) -> RewardResult:
    """Reward completions.

    Args:
        rewards: The reward functions.
        answers: The n completions and what they answer.
        on_error: "raise", or "exclude": a completion whose reward fails gets NaN, with one warning per call.
        runner: Calls the functions; by default in this process.
        again: Where on_error is "exclude", make calls that failed once more: the cause may have passed.
        begun: Calls for some of the completions that the runner has begun already.

    Raises:
        RewardError: If a function returns the wrong number of values; and, where on_error is "raise", if it raises,
            takes too long, ends its process, or returns something other than a finite number, StepRewards or None.
            Shows the function and the (escaped) completion.
    """
    runner = runner or InProcessRunner({reward.name: reward.function for reward in rewards})
    outcomes = _outcomes(rewards, answers, runner, begun, stop_at_first=on_error == "raise")
    if again and on_error == "exclude":
        _retry(rewards, answers, runner, outcomes)
    components: dict[str, NDArray[np.float64]] = {}
    steps: dict[str, list[StepRewards | None]] = {}
    failures: dict[int, RewardError] = {}
    for reward in rewards:
        values = np.full(len(answers.texts), np.nan)
        inside: list[StepRewards | None] = [None] * len(answers.texts)
        for row, outcome in sorted(outcomes[reward.name].items()):
            try:
                values[row], inside[row] = _checked_value(reward.name, outcome, answers, row)
            except RewardError as error:
                if on_error == "raise":
                    raise
                failures.setdefault(row, error)
        components[reward.name] = values
        if any(each is not None for each in inside):
            steps[reward.name] = inside
    table = np.stack(list(components.values()))
    weights = np.array([reward.weight for reward in rewards])[:, None]
    total = np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(weights * table, axis=0))
    total[list(failures)] = np.nan
    if (np.abs(total) > MAX_REWARD).any():
        row = int(np.nanargmax(np.abs(total)))
        raise RewardError(
            f"rewards times their weights must add up to at most {MAX_REWARD:g}, got {total[row]:g} for the completion "
            f"{_shown(answers.texts[row])}: lower reward_weights, or what the functions return"
        )
    if failures:
        first = failures[min(failures)]
        warn(f"{len(failures)} of {len(total)} completions excluded; the first: {first}", rank_zero_only=False)
    return RewardResult(rewards=total, components=components, steps=steps)


def _outcomes(
    rewards: Sequence[Reward],
    answers: RewardInputs,
    runner: RewardRunner,
    begun: Sequence[PendingJob],
    *,
    stop_at_first: bool,
) -> dict[str, dict[int, Any]]:
    """Return, by function and row, a value or the exception that stands in for it."""
    by_name = {reward.name: reward for reward in rewards}
    asked = {(each.job.name, row) for each in begun for row in each.job.rows}
    left = {name: [row for row in range(len(answers.texts)) if (name, row) not in asked] for name in by_name}
    jobs = [job for reward in rewards for job in reward.jobs(answers, left[reward.name], runner.shares)]
    begun = [*begun, *runner.begin(jobs)]
    values: dict[str, dict[int, Any]] = {reward.name: {} for reward in rewards}
    suspects: list[tuple[Job, Exception]] = []
    for each, outcome in zip(begun, runner.finish(begun, stop_at_first=stop_at_first), strict=True):
        error = _spread(each.job, outcome, values[each.job.name], batched=by_name[each.job.name].batched)
        if error is not None:
            suspects.append((each.job, error))
    for job, error in suspects:
        # A call for several completions failed as a whole: made one by one, it shows which is to blame.
        alone = [each for row in job.rows for each in by_name[job.name].jobs(answers, [row], 1)]
        again = runner.finish(runner.begin(alone), stop_at_first=stop_at_first)
        for single, outcome in zip(alone, again, strict=True):
            failed = _spread(single, outcome, values[job.name], batched=by_name[job.name].batched)
            if failed is not None:
                values[job.name][single.rows[0]] = failed
        if not any(isinstance(values[job.name].get(row), BaseException) for row in job.rows):
            note = f" (with {len(job.rows)} completions at once; alone, none fails)"
            raise _failed(job.name, error, answers.texts[job.rows[0]], note=note)
    return values


def _retry(
    rewards: Sequence[Reward], answers: RewardInputs, runner: RewardRunner, outcomes: dict[str, dict[int, Any]]
) -> None:
    """Make the calls that failed once more, one by one, and note what comes out of them."""
    by_name = {reward.name: reward for reward in rewards}
    failed = [
        job
        for name, values in outcomes.items()
        for row, value in values.items()
        if isinstance(value, BaseException)
        for job in by_name[name].jobs(answers, [row], 1)
    ]
    for job, outcome in zip(failed, runner.finish(runner.begin(failed), stop_at_first=False), strict=True):
        error = _spread(job, outcome, outcomes[job.name], batched=by_name[job.name].batched)
        if error is not None:
            outcomes[job.name][job.rows[0]] = error


def _spread(job: Job, outcome: Outcome, values: dict[int, Any], *, batched: bool) -> Exception | None:
    """Note a job's values by row; return the error of a call for several completions that failed as a whole."""
    if outcome is None:
        return None
    whole = outcome if isinstance(outcome, CallFailedError) else outcome[0] if batched else None
    if isinstance(whole, BaseException):
        words = f"raised {type(whole).__name__}: {_shown(said(whole))}"
        error = whole if isinstance(whole, Exception) else CallFailedError(words)
        if len(job.rows) > 1:
            return error
        values[job.rows[0]] = error
        return None
    assert isinstance(outcome, list)
    listed = _listed(job.name, outcome[0], len(job.rows)) if batched else outcome
    values.update(zip(job.rows, listed, strict=False))  # fewer where the first failure ended the job
    return None


def _checked_value(name: str, value: Any, answers: RewardInputs, row: int) -> tuple[float, StepRewards | None]:
    text = answers.texts[row]
    if isinstance(value, BaseException):
        raise _failed(name, value, text)
    if value is None:
        return math.nan, None
    if isinstance(value, StepRewards):
        length, what = len(text), "characters"
        if value.unit == "token":
            length, what = len(answers.token_ids[row]), "tokens"
        if any(position >= length for position in value.positions):
            raise RewardError(
                f"reward function {name!r} must return step rewards at positions inside the completion, got position "
                f"{max(value.positions)} for one of {length} {what}: {_shown(text)}"
            )
        return _checked_number(name, value.total, text), value
    if hasattr(value, "tolist"):  # numpy and torch scalars
        value = value.tolist()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"reward function {name!r} must return numbers or None, got {_shown(value)} "
            f"for the completion {_shown(text)}"
        )
    return _checked_number(name, value, text), None


def _checked_number(name: str, value: Any, text: str) -> float:
    if not fits_float32(value):
        shown = f"{float(value)}" if isinstance(value, float) else _shown(value)
        raise RewardError(
            f"reward function {name!r} must return finite numbers, got {shown} for the completion {_shown(text)}: "
            f"return None where it does not apply, and nothing beyond {MAX_REWARD:g}"
        )
    return float(value)


def _listed(name: str, values: Any, count: int) -> list[Any]:
    if hasattr(values, "tolist"):  # arrays and tensors
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(f"reward function {name!r} must return a list of {count} rewards, got {_shown(values)}")
    if len(values) != count:
        raise RewardError(
            f"reward function {name!r} must return one reward per completion, got {len(values)} for {count}"
        )
    return list(values)


def _failed(name: str, error: BaseException, text: str, note: str = "") -> RewardError:
    how = str(error) if isinstance(error, CallFailedError) else f"raised {type(error).__name__}: {_shown(said(error))}"
    raised = RewardError(f"reward function {name!r} {how}{note} for the completion {_shown(text)}")
    raised.__cause__ = error
    return raised


def _shown(value: object) -> str:
    """Return a short repr in which control codes are escaped: completions are untrusted text."""
    if isinstance(value, str) and len(value) > 240:
        return f"{value[:160]!r} ... {value[-60:]!r}"
    return shown(value)


SAMPLE_COMPLETIONS = ("This is a made-up completion: 42.", "This is another made-up completion.")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Results of trying the rewards.

    Attributes:
        prompt: The first training prompt as the model reads it; untrusted text.
        tokens: Its token ids.
        rewards: What the first made-up completion earned, by reward function; None where it does not apply or failed.
    """

    prompt: str
    tokens: tuple[int, ...]
    rewards: dict[str, float | None]


def try_rewards(
    rewards: Sequence[Reward], answers: RewardInputs, on_error: OnRewardError, runner: RewardRunner
) -> dict[str, float | None]:
    """Return what each reward function gives for the first made-up completion.

    Args:
        rewards: The reward functions.
        answers: The completions.
        on_error: With "exclude" a function may fail, but what it returns has to be a reward all the same.
        runner: Calls them.

    Raises:
        RewardError: If a function fails, or returns something that is no reward.
    """
    earned: dict[str, float | None] = {}
    for reward in rewards:
        try:
            value = float(compute_rewards([reward], answers, "raise", runner).rewards[0])
        except RewardError as error:
            if on_error == "exclude" and error.__cause__ is not None:
                earned[reward.name] = None
                continue
            text = f"Reward functions are tried on made-up completions before training: {error}"
            raise RewardError(text) from error.__cause__
        earned[reward.name] = None if math.isnan(value) else value
    return earned
