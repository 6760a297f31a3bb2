"""Rewards of completions: calls of all reward functions, checked values, weighted sums."""

import math
import numbers
from collections.abc import Mapping, Sequence
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
    safe_repr,
    safe_str,
)
from evogrpo.envs.text.reward_functions import OnRewardError, Reward, RewardError, RewardInputs
from evogrpo.envs.text.step_rewards import MAX_REWARD, StepRewards, fits_float32
from evogrpo.interruption import NEVER, Stop
from evogrpo.warnings import warn


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardResult:
    """Rewards of `n` completions.

    Attributes:
        rewards: `[n]` weighted sum of the reward functions; NaN if none applies or the completion is excluded.
        components: `[n]` values of each function, before its weight; NaN where it does not apply.
        steps: Values of each function that returned step rewards; None for completions without.
    """

    rewards: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]
    steps: dict[str, list[StepRewards | None]] = field(default_factory=dict)


def compute_rewards(
    rewards: Sequence[Reward],
    inputs: RewardInputs,
    on_error: OnRewardError,
    runner: RewardRunner | None = None,
    *,
    retry: bool = False,
    pending: Sequence[PendingJob] = (),
    stop: Stop = NEVER,
) -> RewardResult:
    """Compute the rewards of completions.

    Args:
        rewards: The reward functions.
        inputs: The n completions with their dataset rows.
        on_error: "raise", or "exclude": a completion with a failed reward gets NaN, with one warning per call.
        runner: Calls the functions; None = in this process.
        retry: Repeat failed calls once if on_error is "exclude": the cause may be temporary.
        pending: Jobs for some of the completions that the runner has already started.
        stop: Checked between calls.

    Raises:
        RewardError: If a function returns the wrong number of values. With on_error "raise" also if it raises, exceeds
            the time limit, ends its process, or returns something other than a finite number, StepRewards or None.
            The message shows the function and the (escaped) completion.
    """
    # 1. Call all functions.
    runner = runner or InProcessRunner({reward.name: reward.function for reward in rewards})
    outcomes = _call_rewards(rewards, inputs, runner, pending, stop, stop_at_first=on_error == "raise")
    if retry and on_error == "exclude":
        failed = [
            job
            for reward in rewards
            for row, value in outcomes[reward.name].items()
            if isinstance(value, BaseException)
            for job in reward.jobs(inputs, [row], 1)
        ]
        _run_jobs(failed, {reward.name: reward for reward in rewards}, runner, outcomes, stop, stop_at_first=False)
    # 2. Check the values.
    components: dict[str, NDArray[np.float64]] = {}
    steps: dict[str, list[StepRewards | None]] = {}
    failures: dict[int, RewardError] = {}
    for reward in rewards:
        values = np.full(len(inputs.texts), np.nan)
        step_values: list[StepRewards | None] = [None] * len(inputs.texts)
        for row, outcome in sorted(outcomes[reward.name].items()):
            try:
                values[row], step_values[row] = _checked_value(reward.name, outcome, inputs, row)
            except RewardError as error:
                if on_error == "raise":
                    raise
                failures.setdefault(row, error)
        components[reward.name] = values
        if any(value is not None for value in step_values):
            steps[reward.name] = step_values
    # 3. Weighted sum over the functions that apply.
    table = np.stack(list(components.values()))
    weights = np.array([reward.weight for reward in rewards])[:, None]
    total = np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(weights * table, axis=0))
    total[list(failures)] = np.nan
    if (np.abs(total) > MAX_REWARD).any():
        row = int(np.nanargmax(np.abs(total)))
        raise RewardError(
            f"Weighted sums of rewards must be at most {MAX_REWARD:g}, got {total[row]:g} for the completion "
            f"{_short_repr(inputs.texts[row])}. Lower reward_weights or the returned values."
        )
    if failures:
        first = failures[min(failures)]
        warn(f"{len(failures)} of {len(total)} completions excluded; the first: {first}", rank_zero_only=False)
    return RewardResult(rewards=total, components=components, steps=steps)


def _call_rewards(
    rewards: Sequence[Reward],
    inputs: RewardInputs,
    runner: RewardRunner,
    pending: Sequence[PendingJob],
    stop: Stop,
    *,
    stop_at_first: bool,
) -> dict[str, dict[int, Any]]:
    """Return a value or exception by function and row."""
    # 1. Submit the calls that are not pending yet.
    by_name = {reward.name: reward for reward in rewards}
    submitted = {(waiting.job.name, row) for waiting in pending for row in waiting.job.rows}
    missing = {name: [row for row in range(len(inputs.texts)) if (name, row) not in submitted] for name in by_name}
    jobs = [job for reward in rewards for job in reward.jobs(inputs, missing[reward.name], runner.num_workers)]
    pending = [*pending, *runner.submit(jobs)]
    # 2. Collect the results.
    values: dict[str, dict[int, Any]] = {reward.name: {} for reward in rewards}
    failed_jobs: list[tuple[Job, Exception]] = []
    for waiting, outcome in zip(pending, runner.wait(pending, stop_at_first=stop_at_first, stop=stop), strict=True):
        error = _store(waiting.job, outcome, values[waiting.job.name], batched=by_name[waiting.job.name].batched)
        if error is not None:
            failed_jobs.append((waiting.job, error))
    # 3. Repeat failed calls for several completions one by one, to find the completion that causes the failure.
    for job, error in failed_jobs:
        single_jobs = [single for row in job.rows for single in by_name[job.name].jobs(inputs, [row], 1)]
        _run_jobs(single_jobs, by_name, runner, values, stop, stop_at_first=stop_at_first)
        if not any(isinstance(values[job.name].get(row), BaseException) for row in job.rows):
            note = f" (for {len(job.rows)} completions at once, but for none of them alone)"
            raise _failed(job.name, error, inputs.texts[job.rows[0]], note=note)
    return values


def _run_jobs(
    jobs: Sequence[Job],
    by_name: Mapping[str, Reward],
    runner: RewardRunner,
    values: Mapping[str, dict[int, Any]],
    stop: Stop,
    *,
    stop_at_first: bool,
) -> None:
    """Run jobs of one completion each and store their results."""
    outcomes = runner.wait(runner.submit(jobs), stop_at_first=stop_at_first, stop=stop)
    for job, outcome in zip(jobs, outcomes, strict=True):
        _store(job, outcome, values[job.name], batched=by_name[job.name].batched)


def _store(job: Job, outcome: Outcome, values: dict[int, Any], *, batched: bool) -> Exception | None:
    """Store a job's values by row; return the error of a failed call for several completions."""
    if outcome is None:
        return None
    failure = outcome if isinstance(outcome, CallFailedError) else outcome[0] if batched else None
    if isinstance(failure, BaseException):
        words = f"raised {type(failure).__name__}: {_short_repr(safe_str(failure))}"
        error = failure if isinstance(failure, Exception) else CallFailedError(words)
        if len(job.rows) > 1:
            return error
        values[job.rows[0]] = error
        return None
    assert isinstance(outcome, list)
    row_values = _checked_list(job.name, outcome[0], len(job.rows)) if batched else outcome
    values.update(zip(job.rows, row_values, strict=False))  # shorter if the job stopped at its first failure
    return None


def _checked_value(name: str, value: Any, inputs: RewardInputs, row: int) -> tuple[float, StepRewards | None]:
    """Return one reward as a float, NaN for None, and its step rewards; raise RewardError if it is invalid."""
    text = inputs.texts[row]
    if isinstance(value, BaseException):
        raise _failed(name, value, text)
    if value is None:
        return math.nan, None
    steps = value if isinstance(value, StepRewards) else None
    if steps is not None:
        length = len(inputs.token_ids[row]) if steps.unit == "token" else len(text)
        if any(position >= length for position in steps.positions):
            raise RewardError(
                f"Reward function {name!r} returned step rewards at position {max(steps.positions)} of a completion of "
                f"{length} {steps.unit}s: {_short_repr(text)}"
            )
        value = steps.total
    elif hasattr(value, "tolist"):  # numpy and torch scalars
        value = value.tolist()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"Reward function {name!r} must return numbers or None, got {_short_repr(value)} "
            f"for the completion {_short_repr(text)}"
        )
    if not fits_float32(value):
        value_text = f"{float(value)}" if isinstance(value, float) else _short_repr(value)
        raise RewardError(
            f"Reward function {name!r} must return finite numbers of at most {MAX_REWARD:g}, got {value_text} for the "
            f"completion {_short_repr(text)}. Return None where it does not apply."
        )
    return float(value), steps


def _checked_list(name: str, values: Any, count: int) -> list[Any]:
    """Return the result of a call for several completions as a list of the right length."""
    if hasattr(values, "tolist"):  # arrays and tensors
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardError(f"Reward function {name!r} must return a list of {count} rewards, got {_short_repr(values)}.")
    if len(values) != count:
        raise RewardError(
            f"Reward function {name!r} must return one reward per completion, got {len(values)} for {count}."
        )
    return list(values)


def _failed(name: str, error: BaseException, text: str, note: str = "") -> RewardError:
    raised = f"raised {type(error).__name__}: {_short_repr(safe_str(error))}"
    reason = str(error) if isinstance(error, CallFailedError) else raised
    failure = RewardError(f"Reward function {name!r} {reason}{note} for the completion {_short_repr(text)}")
    failure.__cause__ = error
    return failure


def _short_repr(value: object) -> str:
    """Return a short repr with control characters escaped: completions are untrusted text."""
    if isinstance(value, str) and len(value) > 240:
        return f"{value[:160]!r} ... {value[-60:]!r}"
    return safe_repr(value)
