"""Rewards of completions: calls of reward functions, checks of values, and the weighted sum."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from evogrpo.arrays import FloatArray
from evogrpo.envs.text.reward_functions import (
    OnRewardError,
    Reward,
    RewardError,
    RewardInputs,
    StepRewards,
    reasoned,
)
from evogrpo.envs.text.reward_runner import Outcome, RewardRunner
from evogrpo.envs.text.user_functions import CallFailedError
from evogrpo.interruption import NEVER, Stop
from evogrpo.text import class_name, escaped_prints, shown, text_of
from evogrpo.validation import FLOAT32_LIMIT, float32_number, plain_list
from evogrpo.warnings import warn

POLL_SECONDS = 0.2  # longest wait without checking for a stop


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardResult:
    """Rewards of `n` completions.

    Attributes:
        rewards: `[n]` weighted sum of the reward functions; NaN if none applies or the completion
            is excluded.
        components: `[n]` values of each function, before its weight; NaN where it does not apply.
        weights: `[n, k]` weight of each of the k functions for each completion.
        steps: Values of each function that returned step rewards; None for completions without.
        feedback: Reasons of each completion by function; empty mappings where none was given.
    """

    rewards: FloatArray
    components: dict[str, FloatArray]
    weights: FloatArray
    steps: dict[str, list[StepRewards | None]] = field(default_factory=dict)
    feedback: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class RewardCall:
    """A call of a reward function for some completions.

    Attributes:
        reward: The function.
        rows: Indices of the completions.
    """

    reward: Reward
    rows: tuple[int, ...]

    def by_row(self, result: Any) -> "KnownValues":
        """Return the values of a result, or its exception, for each completion."""
        # An exception concerns all completions of the call.
        values = result
        if isinstance(result, BaseException):
            values = [result] * len(self.rows)
        keys = [(self.reward.name, row) for row in self.rows]
        return dict(zip(keys, values, strict=True))

    def checked(self, value: Any) -> Any:
        """Return a list with the value of each completion, or an exception.

        Raises:
            RewardError: If the value is a coroutine, no list, or of the wrong length.
        """
        _check_awaited(self.reward.name, value)
        if isinstance(value, BaseException):
            return value
        # AgileRL's form: the value of the one completion.
        if not self.reward.batched:
            return [value]
        values = plain_list(value)
        if values is not None and len(values) == len(self.rows):
            return values
        received = shown(value) if values is None else f"{len(values)} values"
        raise RewardError(
            f"Reward function {self.reward.name!r} must return a list of {len(self.rows)} rewards,"
            f" got {received}."
        )


StartedCall = tuple[RewardCall, Outcome]
KnownValues = dict[tuple[str, int], Any]
"""Value, or exception, by name of the function and index of the completion."""


def compute_rewards(
    rewards: Sequence[Reward],
    inputs: RewardInputs,
    on_error: OnRewardError,
    runner: RewardRunner | None = None,
    *,
    weights: FloatArray | None = None,
    retry: bool = False,
    started: Sequence[StartedCall] = (),
    known: KnownValues | None = None,
    stop: Stop = NEVER,
) -> RewardResult:
    """Compute the rewards of completions.

    Args:
        rewards: The reward functions.
        inputs: The n completions with their dataset rows.
        on_error: "raise", or "exclude": a completion with a failed reward gets NaN, with one
            warning per call.
        runner: Calls the functions; None = in this process.
        weights: `[n, k]` weight of each of the k functions for each completion; None = those of
            `rewards`.
        retry: Repeat failed calls once if on_error is "exclude": the cause may be temporary.
        started: Calls for some of the completions that the runner has already started.
        known: Values that need no call; None = there are none.
        stop: Checked between calls.

    Raises:
        RewardError: If a function returns the wrong number of values, or a weighted sum is too
            large for float32. With on_error "raise" also if a function raises, exceeds the time
            limit, ends its process, or returns something other than a finite number, StepRewards or
            None. The message shows the function and the (escaped) completion.
    """
    runner = runner or RewardRunner(rewards)
    stop_at_first = on_error == "raise"
    run = partial(_run, inputs=inputs, runner=runner, stop=stop, stop_at_first=stop_at_first)
    values: KnownValues = dict(known or {})
    # 1. Call all functions. Those that run in the background start first: each call in this thread
    #    blocks it.
    done = set(values)
    for call, _ in started:
        done.update((call.reward.name, row) for row in call.rows)
    calls = []
    numbers_of_texts = range(len(inputs.texts))
    for reward in sorted(rewards, key=lambda each: not runner.in_background(each.name)):
        rows = [row for row in numbers_of_texts if (reward.name, row) not in done]
        calls += [RewardCall(reward, group) for group in reward.groups(inputs, rows)]
    values |= _values_of_calls(run, calls, started, inputs, on_error, retry=retry)
    # 2. Check the values.
    components: dict[str, FloatArray] = {}
    steps: dict[str, list[StepRewards | None]] = {}
    failures: dict[int, RewardError] = {}
    feedback = tuple(dict[str, str]() for _ in inputs.texts)
    for reward in rewards:
        numbers = np.full(len(inputs.texts), np.nan)
        step_rewards: list[StepRewards | None] = [None] * len(inputs.texts)
        for row in range(len(inputs.texts)):
            value = values.get((reward.name, row))
            with_reason = reasoned(value)
            if with_reason is not None:
                value = with_reason.value
                if with_reason.reason:
                    feedback[row][reward.name] = with_reason.reason
            # With "exclude" the first failure of a completion is kept for the warning.
            try:
                numbers[row] = _checked_number(reward.name, value, inputs, row)
            except RewardError as error:
                if on_error == "raise":
                    raise
                failures.setdefault(row, error)
                continue
            if isinstance(value, StepRewards):
                step_rewards[row] = value
        components[reward.name] = numbers
        # `steps` has only functions that returned step rewards.
        if any(step_rewards):
            steps[reward.name] = step_rewards
    # 3. Combine them. This is the only place where weights enter.
    if weights is None:
        own_weights = [reward.weight for reward in rewards]
        weights = np.array([own_weights] * len(inputs.texts))
    table = np.stack(list(components.values()), axis=1)
    total = _weighted_sum(table, weights, inputs)
    if failures:
        total[list(failures)] = np.nan
        first = failures[min(failures)]
        warn(
            f"{len(failures)} of {len(total)} completions excluded; the first: {first}",
            rank_zero_only=False,
        )
    return RewardResult(
        rewards=total, components=components, weights=weights, steps=steps, feedback=feedback
    )


def _values_of_calls(
    run: Callable[..., list[tuple[RewardCall, Any]]],
    calls: Sequence[RewardCall],
    started: Sequence[StartedCall],
    inputs: RewardInputs,
    on_error: OnRewardError,
    *,
    retry: bool,
) -> KnownValues:
    """Make calls and repeat failed ones; return a value or exception for each completion."""
    # 1. Make the calls.
    values: KnownValues = {}
    failed: list[tuple[RewardCall, BaseException]] = []  # calls for several completions
    singles = []
    for call, result in run(calls, started):
        if isinstance(result, BaseException) and len(call.rows) > 1:
            failed.append((call, result))
            singles += [RewardCall(call.reward, (row,)) for row in call.rows]
            continue
        values |= call.by_row(result)
        # The cause of a failure on held-out questions may be temporary, such as a lost connection.
        if isinstance(result, BaseException) and retry and on_error == "exclude":
            singles.append(call)
    # 2. Repeat failed calls one completion at a time, to find those that cause the failure.
    for call, result in run(singles):
        values |= call.by_row(result)
    # 3. Call the function again with all completions that did not fail alone, as their rewards may
    #    depend on each other.
    repeated = []
    for call, error in failed:
        succeeded = []
        for row in call.rows:
            value = values.get((call.reward.name, row))
            if not isinstance(value, BaseException):
                succeeded.append(row)
        if on_error == "exclude" and len(succeeded) > 1:
            repeated.append(RewardCall(call.reward, tuple(succeeded)))
        # With "raise", the caller raises the error of a single completion.
        if on_error == "raise" and len(succeeded) == len(call.rows):
            raise _batch_error(call, error, inputs)
    for call, result in run(repeated):
        if isinstance(result, BaseException):
            failure = _batch_error(call, result, inputs)
            warn(f"Rewards of single completions are used: {failure}", rank_zero_only=False)
        else:
            values |= call.by_row(result)
    return values


def _weighted_sum(values: FloatArray, weights: FloatArray, inputs: RewardInputs) -> FloatArray:
    """Return the `[n]` sum over the functions that apply; NaN if none applies.

    Args:
        values: `[n, k]` value of each function; NaN where it does not apply.
        weights: `[n, k]` weight of each function for each completion.
        inputs: The completions, for the message.

    Raises:
        RewardError: If a sum is too large for float32.
    """
    # nansum alone is 0 where no function applies.
    without_reward = np.isnan(values).all(axis=1)
    sums = np.nansum(weights * values, axis=1)
    total = np.where(without_reward, np.nan, sums)
    too_large = np.flatnonzero(np.abs(total) > FLOAT32_LIMIT)
    if len(too_large):
        row = too_large[0]
        raise RewardError(
            f"Rewards times reward_weights must be at most {FLOAT32_LIMIT:g}, got {total[row]:g}"
            f" for {shown(inputs.texts[row], 160)}."
        )
    return total


def _run(
    calls: Sequence[RewardCall],
    started: Sequence[StartedCall] = (),
    *,
    inputs: RewardInputs,
    runner: RewardRunner,
    stop: Stop,
    stop_at_first: bool,
) -> list[tuple[RewardCall, Any]]:
    """Make calls and wait for those already started.

    With `stop_at_first`, the calls that are unfinished when one fails are cancelled and left out.

    Returns:
        Each call with a list of the value of each completion, or an exception.
    """
    running = list(started)
    try:
        with escaped_prints():
            for call in calls:
                in_worker = runner.in_worker(call.reward.name)
                arguments = call.reward.arguments(inputs, call.rows, in_worker=in_worker)
                outcome = runner.submit(call.reward.name, arguments, stop)
                running.append((call, outcome))
                if stop_at_first and _any_failed(running[-1:]):
                    break
            # The wait is cut into short ones, so that a stop request is seen.
            outcomes = [outcome for _, outcome in running]
            while wait(outcomes, timeout=POLL_SECONDS).not_done:
                stop.check()
                runner.cancel_overdue()
                if stop_at_first and _any_failed(running):
                    break
        # After a failure the others may be unfinished; they are left out.
        finished = [(call, outcome) for call, outcome in running if outcome.done()]
        return [(call, _result(call, outcome)) for call, outcome in finished]
    finally:
        runner.cancel([outcome for _, outcome in running])


def _any_failed(running: Iterable[StartedCall]) -> bool:
    """Return True if a call that has ended failed."""
    return any(
        outcome.done() and isinstance(_result(call, outcome), BaseException)
        for call, outcome in running
    )


def _result(call: RewardCall, outcome: Outcome) -> Any:
    """Return a list with the value of each completion of a finished call, or an exception."""
    if outcome.cancelled():
        return CallFailedError("was cancelled or blocked its event loop")
    return call.checked(outcome.result())


def _checked_number(name: str, value: Any, inputs: RewardInputs, row: int) -> float:
    """Return one reward as a float, NaN for None; raise RewardError if it is invalid."""
    text = inputs.texts[row]
    _check_awaited(name, value)
    if isinstance(value, BaseException):
        raise _reward_error(name, value, text)
    if value is None:
        return math.nan
    if isinstance(value, StepRewards):
        # Positions count tokens or characters.
        length = len(inputs.token_ids[row] if value.unit == "token" else text)
        last = max(value.positions, default=-1)
        if last >= length:
            raise RewardError(
                f"Reward function {name!r} returned step rewards at position {last}"
                f" of a completion of {length} {value.unit}s: {shown(text, 160)}"
            )
        value = value.total
    if isinstance(value, Mapping):
        raise RewardError(
            f"Reward function {name!r} must return a mapping with the key score, got"
            f" {shown(value)} for the completion {shown(text, 160)}."
        )
    number = float32_number(value)
    if number is None:
        raise RewardError(
            f"Reward function {name!r} must return None or finite numbers of at most"
            f" {FLOAT32_LIMIT:g}, got {shown(value)} for the completion {shown(text, 160)}."
        )
    return number


def _check_awaited(name: str, value: Any) -> None:
    """Raise RewardError for a coroutine: only functions that are declared as async are awaited."""
    if inspect.isawaitable(value):
        raise RewardError(
            f"Reward function {name!r} returned a coroutine. Declare it with `async def`, and"
            " `await` what it calls."
        )


def _reward_error(name: str, error: BaseException, text: str, note: str = "") -> RewardError:
    """Return the RewardError for a failed call."""
    reason = text_of(error)
    if not isinstance(error, CallFailedError):
        reason = f"raised {class_name(error)}: {shown(reason, 240)}"
    failure = RewardError(
        f"Reward function {name!r} {reason}{note} for the completion {shown(text, 160)}"
    )
    # The traceback of the user's function stays visible.
    failure.__cause__ = error
    return failure


def _batch_error(call: RewardCall, error: BaseException, inputs: RewardInputs) -> RewardError:
    """Return the error of a call that fails on a batch, but on none of its completions alone."""
    note = f" (on a batch of {len(call.rows)} completions, not on single ones)"
    text = inputs.texts[call.rows[0]]
    return _reward_error(call.reward.name, error, text, note=note)
