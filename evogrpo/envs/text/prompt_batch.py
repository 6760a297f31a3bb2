"""Batches of dataset prompts, and the rewards of their completions: calls of all functions, checks, weighted sums."""

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, takewhile
from operator import eq
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.protocol import REPLY, Scores
from evogrpo.envs.text.reward_functions import (
    CallFailedError,
    InProcessRunner,
    Job,
    OnRewardError,
    Results,
    Reward,
    RewardError,
    RewardInputs,
    StepRewards,
)
from evogrpo.envs.text.templates import Tokenizer, check_messages
from evogrpo.envs.text.verifier_pool import RewardRunner
from evogrpo.extras import require
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Conversation
from evogrpo.text import class_name, escaped_prints, printable, shown, text_of
from evogrpo.validation import FLOAT32_LIMIT, float32_number, plain_list
from evogrpo.warnings import warn

POLL_SECONDS = 0.2  # longest wait without checking for a stop
StartedJob = tuple[Job, "Future[Results]"]
MAX_NAME = 200
"""Maximum number of characters in the name of a metric."""
RESERVED_NAMES = (
    *(
        "slot",
        "index",
        "loss",
        "learning_rate",
        "step_kl",
        "step_passes",
        "calibrated_lr",
        "grad_norm",
        "reward",
    ),
    *(
        "reward_std",
        "frac_reward_zero_std",
        "shared_ess",
        "shared_outside",
        "shared_share",
        "kl",
        "kl_coef",
        "entropy",
    ),
    *("optimizer_steps", "tokens", "num_tokens", "step_time"),
)
RESERVED_PREFIXES = ("rewards/", "completions/", "clip_ratio/", "sampling/", "tools/")
"""Names of built-in metrics and keys of a journal entry, which logged metrics cannot have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardResult:
    """Rewards of `n` completions.

    Attributes:
        rewards: `[n]` weighted sum of the reward functions; NaN if none applies or the completion
            is excluded.
        components: `[n]` values of each function, before its weight; NaN where it does not apply.
        steps: Values of each function that returned step rewards; None for completions without.
    """

    rewards: NDArray[np.float64]
    components: dict[str, NDArray[np.float64]]
    steps: dict[str, list[StepRewards | None]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class SingleTurnBatch:
    """A batch of dataset prompts with one completion each; base class of `MultiTurnBatch`.

    Call `start_scoring` for finished groups, then `score` for all completions, or `cancel`.

    Attributes:
        prompts: Token ids of each prompt.
        rows: Dataset row of each prompt.
        rewards: The reward functions.
        runner: Calls them.
        tokenizer: Decodes completions.
        on_reward_error: "raise" or "exclude".
        progress: Number of learning steps taken, and of all learning steps (0 if unknown).
        max_turns: 1, except in subclasses with several turns.
        held_out: True for validation and test prompts. Failed rewards are computed once more before
            they are excluded.
    """

    prompts: Sequence[Sequence[int]]
    rows: Sequence[Mapping[str, Any]]
    rewards: Sequence[Reward]
    runner: RewardRunner
    tokenizer: Tokenizer
    on_reward_error: OnRewardError
    progress: tuple[int, int] = (0, 0)
    max_turns: int = 1
    held_out: bool = False
    _started: list[StartedJob] = field(default_factory=list, init=False, repr=False)
    # Values that reward functions log: by column and row of the completions table; by metric, with
    # the number of rows.
    _columns: dict[str, dict[int, Any]] = field(default_factory=dict, init=False, repr=False)
    _metrics: dict[str, list[tuple[int, float]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def questions(self) -> tuple[str, ...]:
        """Question of each prompt; for messages the last user message."""
        texts = []
        for row in self.rows:
            question = row["prompt" if self.rewards[0].batched else "question"]
            if self.rewards[0].batched and not isinstance(question, str):
                messages = check_messages(question, "prompt")
                user = [message["content"] for message in messages if message["role"] == "user"]
                question = user[-1] if user else messages[-1]["content"]
            texts.append(str(question))
        return tuple(texts)

    def respond(self, conversations: Sequence[Conversation]) -> Sequence[Sequence[int] | None]:
        """Return None for each conversation: there is only one turn."""
        return [None] * len(conversations)

    @property
    def background_rewards(self) -> list[Reward]:
        """Rewards that can be computed in the background."""
        return [reward for reward in self.rewards if self.runner.runs_in_background(reward.name)]

    def start_scoring(self, conversations: Sequence[Conversation]) -> None:
        """Start to compute the rewards of a finished group in the background.

        Call `score` later with the conversations of all groups, in the order of their rows. Its
        result is the same as without this call.
        """
        inputs = self._reward_inputs(conversations)
        for reward in self.background_rewards:
            for job in reward.jobs(inputs, range(len(conversations)), 1):
                parts = tuple(tuple(conversations[row].row for row in part) for part in job.parts)
                future = self.runner.submit(job.name, reward.calls(inputs, job))
                self._started.append((replace(job, parts=parts), future))

    def cancel(self) -> None:
        """Cancel all started groups."""
        self.runner.cancel([future for _, future in self._started])
        self._started.clear()

    def score(self, conversations: Sequence[Conversation], stop: Stop = NEVER) -> Scores:
        """Compute the rewards of conversations; see `PromptBatch.score`.

        `stop` is checked between calls.

        Raises:
            RewardError: If a reward function fails.
        """
        # 1. Wait for the rewards that were started, and compute the others.
        started = list(self._started)
        self._started.clear()
        inputs = self._reward_inputs(conversations)
        result = compute_rewards(
            self.rewards,
            inputs,
            self.on_reward_error,
            self.runner,
            retry=self.held_out,
            started=started,
            stop=stop,
        )
        # 2. Add the values that were logged. Rows without a value, such as those of failed calls,
        #    get None.
        columns = {
            name: tuple(values.get(row) for row in range(len(conversations)))
            for name, values in self._columns.items()
        }
        metrics = {
            name: float(
                np.average([value for _, value in values], weights=[size for size, _ in values])
            )
            for name, values in self._metrics.items()
        }
        self._columns.clear()
        self._metrics.clear()
        return Scores(
            rewards=result.rewards,
            components=result.components,
            completions=tuple(map(_display_text, inputs.turns or ())),
            weights=tuple(reward.weight for reward in self.rewards),
            step_rewards=(
                self._step_rewards(result, inputs, conversations) if result.steps else None
            ),
            columns=columns,
            metrics=metrics,
        )

    def _reward_inputs(self, conversations: Sequence[Conversation]) -> RewardInputs:
        turns = [self._turn_texts(conversation) for conversation in conversations]
        token_ids = [list(conversation.tokens) for conversation in conversations]
        return RewardInputs(
            rows=[self.rows[conversation.start] for conversation in conversations],
            texts=[
                texts[0] if len(texts) == 1 else self._text(ids)
                for texts, ids in zip(turns, token_ids, strict=True)
            ],
            token_ids=token_ids,
            groups=[(conversation.member, conversation.start) for conversation in conversations],
            turns=turns,
            trainer=lambda rows: self.trainer_arguments([conversations[row].row for row in rows]),
        )

    def trainer_arguments(self, rows: Sequence[int]) -> Mapping[str, Any]:
        """Return the trainer's arguments of a call for these rows, in TRL's form.

        Worker processes cannot log.
        """
        require("A reward function in TRL's form", "transformers")
        from transformers import TrainerState

        state = TrainerState(global_step=self.progress[0], max_steps=self.progress[1])
        if not self.runner.in_process:
            return {"trainer_state": SimpleNamespace(**vars(state))}  # pickled without transformers

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(rows):
                raise ValueError(
                    f"log_extra needs {len(rows)} values, got {len(values)} for {shown(column)}."
                )
            self._columns.setdefault(str(column), {}).update(zip(rows, values, strict=True))

        def log_metric(name: str, value: Any) -> None:
            number = float32_number(value)
            if not isinstance(name, str) or len(name) > MAX_NAME or printable(name) != name:
                raise ValueError(
                    f"The name of log_metric must be printable text of at most {MAX_NAME}"
                    f" characters, got {shown(name)}."
                )
            if name in RESERVED_NAMES or name.startswith(RESERVED_PREFIXES):
                raise ValueError(f"The log_metric name {name!r} is reserved. Choose another one.")
            if number is None:
                raise ValueError(
                    f"log_metric values must be finite numbers of at most {FLOAT32_LIMIT:g}, got"
                    f" {shown(value)} for {shown(name)}."
                )
            self._metrics.setdefault(name, []).append((len(rows), number))

        return {"trainer_state": state, "log_extra": log_extra, "log_metric": log_metric}

    def _step_rewards(
        self, result: RewardResult, inputs: RewardInputs, conversations: Sequence[Conversation]
    ) -> NDArray[np.float64]:
        """Return the `[n, t]` reward at each sampled token.

        Rewards of whole completions are at the last one.
        """
        table = np.full((len(inputs.texts), max(1, *map(len, inputs.token_ids))), np.nan)
        for row, conversation in enumerate(conversations):
            ids = inputs.token_ids[row]
            sampled = conversation.sampled
            # a user's own loop may give a completion without tokens
            if np.isnan(result.rewards[row]) or not ids:
                continue
            # Rewards at tokens of a reply belong to the last sampled token before it.
            last_sampled = np.maximum.accumulate(np.where(sampled, np.arange(len(sampled)), 0))
            for reward in self.rewards:
                value = result.components[reward.name][row]
                if reward.name in result.steps:
                    steps = result.steps[reward.name][row]
                else:
                    steps = None
                if np.isnan(value):
                    continue
                if steps is None:  # a reward of the whole completion
                    parts = [(last_sampled[-1], value)]
                else:
                    positions = token_positions(steps, ids, inputs.texts[row], self._text)
                    parts = [
                        (last_sampled[at], part)
                        for at, part in zip(positions, steps.values, strict=True)
                    ]
                for place, part in parts:
                    table[row, place] = np.nansum([table[row, place], reward.weight * part])
        return table

    def _turn_texts(self, conversation: Conversation) -> list[str]:
        """Return the texts of completions and replies, in order."""
        return [self._text(list(part)) for part in conversation.turns]

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _display_text(turns: Sequence[str]) -> str:
    """Return completions as they are, and replies in lines with the prefix `REPLY`."""
    replies = [
        "".join(f"\n{REPLY}{line}" for line in reply.split("\n")) + "\n" for reply in turns[1::2]
    ]
    return "".join(text + reply for text, reply in zip(turns[::2], [*replies, ""], strict=False))


def token_positions(
    rewards: StepRewards, token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]
) -> list[int]:
    """Return the token position of each value of a completion's step rewards.

    A character belongs to the token that completes it: if its bytes are spread over several tokens,
    to the last one.

    Args:
        rewards: The step rewards.
        token_ids: Tokens of the completion.
        text: `decode(token_ids)`.
        decode: The tokenizer's decoding, without special tokens.
    """
    if rewards.unit == "token" or not rewards.positions:
        return list(rewards.positions)
    # 1. Numbers of complete characters after each token, if tokens decode to the same text alone as
    #    in context.
    pieces = [decode([token]) for token in token_ids]
    if "".join(pieces) != text:
        # Slower: decode every prefix, as spaces between words and parts of characters depend on
        # context.
        prefixes = [decode(list(token_ids[:count])) for count in range(1, len(token_ids))]
        # A prefix that ends within a character decodes to a replacement character, so only leading
        # characters that agree with the text are complete. The running maximum keeps the counts
        # sorted for `bisect_right`.
        equal = [sum(takewhile(bool, map(eq, prefix, text))) for prefix in prefixes]
        ends = [*accumulate(equal, max), len(text)]
    else:
        ends = list(accumulate(map(len, pieces)))
    # 2. The first token after which each character is complete.
    return [bisect_right(ends, position) for position in rewards.positions]


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
        on_error: "raise", or "exclude": a completion with a failed reward gets NaN, with one
            warning per call.
        runner: Calls the functions; None = in this process.
        retry: Repeat failed calls once if on_error is "exclude": the cause may be temporary.
        started: Jobs for some of the completions that the runner has already started.
        stop: Checked between calls.

    Raises:
        RewardError: If a function returns the wrong number of values. With on_error "raise" also if
            it raises, exceeds the time limit, ends its process, or returns something other than a
            finite number, StepRewards or None. The message shows the function and the (escaped)
            completion.
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
    run = partial(_run, by_name, inputs, runner, stop, stop_at_first=stop_at_first)
    values: dict[tuple[str, int], Any] = {}
    failed: list[tuple[str, tuple[int, ...], BaseException]] = []  # calls for several completions
    for name, part, result in run(jobs, started):
        if not isinstance(result, BaseException):
            values |= {(name, row): value for row, value in zip(part, result, strict=True)}
        elif len(part) == 1:
            values[name, part[0]] = result
        else:
            failed.append((name, part, result))
    # 2. Repeat failed calls for several completions one by one, to find the completions that cause
    #    the failure.
    repeated = [(name, row) for name, part, _ in failed for row in part]
    if retry and on_error == "exclude":
        repeated += [key for key, value in values.items() if isinstance(value, BaseException)]
    jobs = [job for name, row in repeated for job in by_name[name].jobs(inputs, [row], 1)]
    for name, part, result in run(jobs):
        values[name, part[0]] = result if isinstance(result, BaseException) else result[0]
    # 3. Call the function with the other completions together, as their rewards may depend on each
    #    other.
    jobs = []
    for name, part, error in failed:
        others = tuple(
            row for row in part if not isinstance(values.get((name, row)), BaseException)
        )
        if stop_at_first and others == part:
            raise _batch_error(name, error, inputs, part)
        if len(others) > 1 and not stop_at_first:
            jobs.append(Job(name=name, parts=(others,), batched=True))
    for name, part, result in run(jobs):
        if not isinstance(result, BaseException):
            values |= {(name, row): value for row, value in zip(part, result, strict=True)}
            continue
        failure = _batch_error(name, result, inputs, part)
        warn(f"Rewards of single completions are used: {failure}", rank_zero_only=False)
    # 4. Check the values.
    components: dict[str, NDArray[np.float64]] = {}
    steps: dict[str, list[StepRewards | None]] = {}
    failures: dict[int, RewardError] = {}
    for name in by_name:
        components[name] = np.full(len(inputs.texts), np.nan)
        step_values: list[StepRewards | None] = [None] * len(inputs.texts)
        for row in range(len(inputs.texts)):
            try:
                components[name][row], step_values[row] = _checked_value(
                    name, values.get((name, row)), inputs, row
                )
            except RewardError as error:
                if on_error == "raise":
                    raise
                failures.setdefault(row, error)
        if any(value is not None for value in step_values):
            steps[name] = step_values
    # 5. Weighted sum over the functions that apply.
    table = np.stack(list(components.values()))
    weights = np.array([reward.weight for reward in rewards])[:, None]
    total = np.where(np.isnan(table).all(axis=0), np.nan, np.nansum(weights * table, axis=0))
    total[list(failures)] = np.nan
    if (np.abs(total) > FLOAT32_LIMIT).any():
        row = int(np.nanargmax(np.abs(total)))
        text = shown(inputs.texts[row], 160)
        raise RewardError(
            f"Rewards times reward_weights must be at most {FLOAT32_LIMIT:g}, got {total[row]:g}"
            f" for {text}."
        )
    if failures:
        first = failures[min(failures)]
        warn(
            f"{len(failures)} of {len(total)} completions excluded; the first: {first}",
            rank_zero_only=False,
        )
    return RewardResult(rewards=total, components=components, steps=steps)


def _run(
    rewards: Mapping[str, Reward],
    inputs: RewardInputs,
    runner: RewardRunner,
    stop: Stop,
    jobs: Sequence[Job],
    started: Sequence[StartedJob] = (),
    *,
    stop_at_first: bool,
) -> list[tuple[str, tuple[int, ...], Any]]:
    """Run jobs and wait for those already started.

    With `stop_at_first`, the jobs that are unfinished when one fails are cancelled and left out.

    Returns:
        For each call the name of the function, the rows, and a list with the value of each row, or
        an exception.
    """
    running = list(started)
    try:
        with escaped_prints():
            for job in jobs:
                calls = rewards[job.name].calls(inputs, job)
                running.append((job, runner.submit(job.name, calls, stop)))
                if stop_at_first and _has_failed(*running[-1]):
                    break
            while wait([future for _, future in running], timeout=POLL_SECONDS).not_done:
                stop.check()
                if stop_at_first and any(_has_failed(job, future) for job, future in running):
                    break
        finished = [(job, _results(job, future)) for job, future in running if future.done()]
    finally:
        runner.cancel([future for _, future in running])
    return [
        (job.name, part, result)
        for job, results in finished
        for part, result in zip(job.parts, results, strict=True)
    ]


def _has_failed(job: Job, future: "Future[Results]") -> bool:
    return future.done() and any(
        isinstance(result, BaseException) for result in _results(job, future)
    )


def _results(job: Job, future: "Future[Results]") -> list[Any]:
    """Return, for each call of a finished job, a list with the value of each row, or an exception."""
    error = (
        CallFailedError("was cancelled or blocked its event loop")
        if future.cancelled()
        else future.exception()
    )
    if error is not None:
        if not isinstance(error, CallFailedError):
            raise error
        return [error] * len(job.parts)
    results: list[Any] = []
    for part, value in zip(job.parts, future.result(), strict=True):
        if isinstance(value, BaseException):
            results.append(value)
        else:
            results.append(_checked_list(job.name, value, len(part)) if job.batched else [value])
    return results


def _checked_value(
    name: str, value: Any, inputs: RewardInputs, row: int
) -> tuple[float, StepRewards | None]:
    """Return one reward as a float, NaN for None, and its step rewards.

    Raise RewardError if it is invalid.
    """
    text = inputs.texts[row]
    _check_awaited(name, value)
    if isinstance(value, BaseException):
        raise _reward_error(name, value, text)
    if value is None:
        return math.nan, None
    steps = value if isinstance(value, StepRewards) else None
    if steps is not None:
        if steps.unit == "token":
            length = len(inputs.token_ids[row])
        else:
            length = len(text)
        if any(position >= length for position in steps.positions):
            raise RewardError(
                f"Reward function {name!r} returned step rewards at position {max(steps.positions)}"
                f" of a completion of {length} {steps.unit}s: {shown(text, 160)}"
            )
        value = steps.total
    number = float32_number(value)
    if number is None:
        raise RewardError(
            f"Reward function {name!r} must return None or finite numbers of at most"
            f" {FLOAT32_LIMIT:g}, got {shown(value)} for the completion {shown(text, 160)}."
        )
    return number, steps


def _checked_list(name: str, values: Any, count: int) -> list[Any]:
    """Return the result of a call for several completions as a list of the right length."""
    _check_awaited(name, values)
    items = plain_list(values)
    if items is None or len(items) != count:
        if items is None:
            received = shown(values)
        else:
            received = f"{len(items)} values"
        raise RewardError(
            f"Reward function {name!r} must return a list of {count} rewards, got {received}."
        )
    return items


def _check_awaited(name: str, value: Any) -> None:
    """Raise RewardError for a coroutine: only functions that are declared as async are awaited."""
    if inspect.isawaitable(value):
        raise RewardError(
            f"Reward function {name!r} returned a coroutine. Declare it with `async def`, and"
            " `await` what it calls."
        )


def _reward_error(name: str, error: BaseException, text: str, note: str = "") -> RewardError:
    """Return the RewardError for a failed call."""
    raised = f"raised {class_name(error)}: {shown(text_of(error), 240)}"
    if isinstance(error, CallFailedError):
        reason = str(error)
    else:
        reason = raised
    failure = RewardError(
        f"Reward function {name!r} {reason}{note} for the completion {shown(text, 160)}"
    )
    failure.__cause__ = error
    return failure


def _batch_error(
    name: str, error: BaseException, inputs: RewardInputs, rows: Sequence[int]
) -> RewardError:
    """Return the RewardError for a call that fails on a batch, but on none of its completions alone."""
    note = f" (on a batch of {len(rows)} completions, not on single ones)"
    return _reward_error(name, error, inputs.texts[rows[0]], note=note)


def _short_repr(value: object) -> str:
    """Return a short repr with control characters escaped: completions are untrusted text."""
    if isinstance(value, str) and len(value) > 240:
        return f"{value[:160]!r} ... {value[-60:]!r}"
    return f"{value!r:.240}"
