"""Rewards of completions: calls of all reward functions, checked values, weighted sums."""

import math
import numbers
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.text.reward_calls import (
    CallFailedError,
    InProcessRunner,
    Job,
    Results,
    RewardRunner,
    safe_repr,
    safe_str,
)
from evogrpo.envs.text.reward_functions import (
    MAX_REWARD,
    OnRewardError,
    Reward,
    RewardError,
    RewardInputs,
    StepRewards,
    fits_float32,
)
from evogrpo.interruption import NEVER, Stop
from evogrpo.warnings import warn

POLL_SECONDS = 0.2  # longest wait without checking for a stop
StartedJob = tuple[Job, "Future[Results]"]


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
    started: Sequence[StartedJob] = (),
    stop: Stop = NEVER,
) -> RewardResult:
    """Compute the rewards of completions.

    Args:
        rewards: The reward functions.
        inputs: The n completions with their dataset rows.
        on_error: "raise", or "exclude": a completion with a failed reward gets NaN, with one warning per call.
        runner: Calls the functions; None = in this process.
        retry: Repeat failed calls once if on_error is "exclude": the cause may be temporary.
        started: Jobs for some of the completions that the runner has already started.
        stop: Checked between calls.

    Raises:
        RewardError: If a function returns the wrong number of values. With on_error "raise" also if it raises, exceeds
            the time limit, ends its process, or returns something other than a finite number, StepRewards or None.
            The message shows the function and the (escaped) completion.
    """
    runner = runner or InProcessRunner({reward.name: reward.function for reward in rewards})
    by_name = {reward.name: reward for reward in rewards}
    stop_at_first = on_error == "raise"
    # 1. Call all functions; those that run in the background start first.
    submitted = {(job.name, row) for job, _ in started for row in job.rows}
    jobs = [
        job
        for reward in sorted(rewards, key=lambda reward: not runner.runs_in_background(reward.name))
        for job in reward.jobs(
            inputs,
            [row for row in range(len(inputs.texts)) if (reward.name, row) not in submitted],
            runner.num_workers,
        )
    ]
    values: dict[tuple[str, int], Any] = {}
    failed_jobs: list[tuple[Job, BaseException]] = []
    for job, results in _run(jobs, runner, started, stop, stop_at_first=stop_at_first):
        if len(job.rows) > 1 and isinstance(results[0], BaseException) and all(each is results[0] for each in results):
            failed_jobs.append((job, results[0]))
        else:
            values |= {(job.name, row): value for row, value in zip(job.rows, results, strict=True)}
    # 2. Repeat failed calls for several completions one by one, to find the completion that causes the failure.
    repeated = [(job.name, row) for job, _ in failed_jobs for row in job.rows]
    if retry and on_error == "exclude":
        repeated += [key for key, value in values.items() if isinstance(value, BaseException)]
    jobs = [job for name, row in repeated for job in by_name[name].jobs(inputs, [row], 1)]
    for job, results in _run(jobs, runner, (), stop, stop_at_first=stop_at_first):
        values[job.name, job.rows[0]] = results[0]
    for job, error in failed_jobs:
        repeats = [values.get((job.name, row)) for row in job.rows]
        if not any(isinstance(value, BaseException) for value in repeats):
            note = f" (for {len(job.rows)} completions at once, but for none of them alone)"
            raise _failed(job.name, error, inputs.texts[job.rows[0]], note=note)
    # 3. Check the values.
    components: dict[str, NDArray[np.float64]] = {}
    steps: dict[str, list[StepRewards | None]] = {}
    failures: dict[int, RewardError] = {}
    for name in by_name:
        components[name] = np.full(len(inputs.texts), np.nan)
        step_values: list[StepRewards | None] = [None] * len(inputs.texts)
        for row in range(len(inputs.texts)):
            try:
                components[name][row], step_values[row] = _checked_value(name, values.get((name, row)), inputs, row)
            except RewardError as error:
                if on_error == "raise":
                    raise
                failures.setdefault(row, error)
        if any(value is not None for value in step_values):
            steps[name] = step_values
    # 4. Weighted sum over the functions that apply.
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


def _run(
    jobs: Sequence[Job], runner: RewardRunner, started: Sequence[StartedJob], stop: Stop, *, stop_at_first: bool
) -> list[tuple[Job, list[Any]]]:
    """Run jobs and wait for those already started; return a value or exception for each row of a job.

    With `stop_at_first`, the jobs that are unfinished when one fails are cancelled and left out.
    """
    running = list(started)
    try:
        for job in jobs:
            running.append((job, runner.submit(job, stop)))
            if stop_at_first and _has_failed(*running[-1]):
                break
        while wait([future for _, future in running], timeout=POLL_SECONDS).not_done:
            stop.check()
            if stop_at_first and any(_has_failed(job, future) for job, future in running):
                break
        return [(job, _results(job, future)) for job, future in running if future.done()]
    finally:
        runner.cancel([future for _, future in running])


def _has_failed(job: Job, future: "Future[Results]") -> bool:
    return future.done() and any(isinstance(value, BaseException) for value in _results(job, future))


def _results(job: Job, future: "Future[Results]") -> list[Any]:
    """Return a value or exception for each row of a finished job."""
    error = CallFailedError("was cancelled or blocked its event loop") if future.cancelled() else future.exception()
    if error is not None:
        if not isinstance(error, CallFailedError):
            raise error
        return [error] * len(job.rows)
    values = future.result()
    if not job.batched:
        return values
    if isinstance(values[0], BaseException):
        return values * len(job.rows)
    return _checked_list(job.name, values[0], len(job.rows))


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
