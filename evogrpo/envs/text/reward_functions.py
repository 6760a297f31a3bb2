"""Reward functions: user callables in AgileRL's and TRL's form, checked and called in one way."""

import asyncio
import contextlib
import copy
import functools
import inspect
import itertools
import math
import os
import sys
import threading
import traceback
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

from evogrpo.interruption import NEVER, Interrupted, Stop
from evogrpo.synonyms import close_match
from evogrpo.text import class_name, escaped_prints, one_line, pluralize, shown
from evogrpo.validation import FLOAT32_LIMIT, finite_number, plain_list, plain_scalar, whole_between

Function = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

GRACE_SECONDS = 1.0  # between cancelling coroutines and abandoning or stopping their event loop


class CallFailedError(Exception):
    """A call without a result.

    The message completes a sentence that starts with the function's name.
    """


def timeout_error(seconds: float) -> CallFailedError:
    """Return the error of a call that exceeded the time limit."""
    return CallFailedError(f"took longer than {seconds:g} s and was stopped")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Calls of one reward function that run together.

    Attributes:
        name: Name of the function.
        parts: Indices of the completions of each call. Only jobs of async functions have several
            calls.
        batched: True if a call returns a list with a value for each of its completions, False if it
            has one completion and returns its value.
    """

    name: str
    parts: tuple[tuple[int, ...], ...]
    batched: bool

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of all completions."""
        return tuple(itertools.chain.from_iterable(self.parts))


Results = list[Any]
"""A value or exception for each call of a job."""


def is_async(function: Function) -> bool:
    """Return True for `async def` functions and objects with an async `__call__`."""
    if inspect.iscoroutinefunction(function):
        return True
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(call)


def call_sync(function: Function, call: Call) -> Any:
    """Return the result of a call, or the exception that it raised.

    End processes that the function forked off.

    Settings of torch for the whole program, such as those for a reward model, are undone: the run
    has its own.
    """
    args, keywords = call
    process = os.getpid()
    with _torch_settings_kept():
        try:
            result = function(*args, **keywords)
        except BaseException as error:  # noqa: BLE001 (user code may raise anything)
            result = error
    if os.getpid() != process:
        end_fork(result)
    if isinstance(result, KeyboardInterrupt | Interrupted):
        raise result
    return result


@contextlib.contextmanager
def _torch_settings_kept() -> Iterator[None]:
    """Restore torch's gradient mode, default dtype and default device at the end."""
    torch = sys.modules.get("torch")
    if torch is None:  # worker processes import it only if a function does
        yield
        return
    enabled = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:  # setting a device slows down all operations
            torch.set_default_device(None if device.type == "cpu" else device)


async def call_async(function: Function, calls: Sequence[Call], timeout: float | None) -> Results:
    """Make calls concurrently, each within `timeout` seconds; return a value or exception for each."""
    process = os.getpid()

    async def call(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                result = own_list(await function(*args, **keywords))
        except BaseException as error:  # noqa: BLE001 (an exception that leaves a task could end the event loop)
            if timeout is not None and limit.expired():
                result = timeout_error(timeout)
            else:
                result = error
        if os.getpid() != process:
            end_fork(result)
        return result

    return await asyncio.gather(*(call(*each) for each in calls))


def end_fork(outcome: Any) -> NoReturn:
    """End a process that user code forked off and that has left the user's function.

    It would continue the run a second time. As for a Python program, its exit code is 0, that of
    `sys.exit`, or 1 after an exception.

    Args:
        outcome: The value that the function returned, or the exception that it raised.
    """
    code: Any = 0
    if isinstance(outcome, SystemExit):
        code = 0 if outcome.code is None else outcome.code
    elif isinstance(outcome, BaseException):
        traceback.print_exception(outcome)
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    if isinstance(outcome, BaseException):
        outcome.__traceback__ = None  # frees the function's variables, which writes its open files
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(code & 0xFF)


def own_copy(value: Any, name: str) -> Any:
    """Return a deep copy of a value of a dataset row, so that user code cannot change the row.

    Args:
        value: The value. Text, numbers and None are returned as they are.
        name: Name of the column, for messages.

    Raises:
        RewardError: If the value cannot be copied, such as a lock or an open connection.
    """
    if type(value) in (str, int, float, bool, bytes, type(None)):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        reason = f"{class_name(error)}: {one_line(error)}"
        raise RewardError(
            f"Column {shown(name)} has a {class_name(value)} that cannot be copied ({reason})."
            " Functions get copies of a row. Keep such an object in your module, and its name in"
            " the column."
        ) from error


def own_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of a dataset row; see `own_copy`."""
    return {name: own_copy(value, name) for name, value in row.items()}


def own_list(values: Any) -> Any:
    """Return a copy of a list, array or tensor as a list, and other values as they are."""
    listed = plain_list(values)
    return values if listed is None else listed


class InProcessRunner:
    """Runs reward functions in this process: async functions in an event loop, others in the calling thread.

    The event loop has its own thread, so that it works in notebooks. It stays open between calls,
    so that a client opened in one call serves the next.

    Args:
        functions: Reward functions by name.
        timeout: Time limit of one call of an async function, in seconds. Other functions cannot be
            stopped.
    """

    in_process = True  # functions run in this process
    num_workers = 1  # jobs that run in parallel

    def __init__(self, functions: Mapping[str, Function], timeout: float | None = None) -> None:
        self._functions = dict(functions)
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._prints = contextlib.ExitStack()
        self._running: set[Future[Results]] = set()

    def runs_in_background(self, name: str) -> bool:
        """Return True for async functions: they run while this thread does other work."""
        return is_async(self._functions[name])

    def submit(self, name: str, calls: Sequence[Call], stop: Stop = NEVER) -> "Future[Results]":
        """Start the calls of an async function, or make the calls of another function before returning.

        Failures inside the function are results.
        """
        function = self._functions[name]
        if not is_async(function):
            stop.check()
            future: Future[Results] = Future()
            # Copies of the results: a function may return the same list from every call.
            future.set_result([own_list(call_sync(function, call)) for call in calls])
            return future
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name="evogrpo async rewards", daemon=True
            ).start()
        if not self._running:
            self._prints.enter_context(escaped_prints())
        future = asyncio.run_coroutine_threadsafe(
            call_async(function, calls, self._timeout), self._loop
        )
        self._running.add(future)
        if self._timeout is not None:
            # call_async applies the limit; this is for blocking code in the loop.
            timer = threading.Timer(
                self._timeout + GRACE_SECONDS, self._abandon, [future, self._loop]
            )
            timer.daemon = True
            timer.start()
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def _abandon(self, future: "Future[Results]", loop: asyncio.AbstractEventLoop) -> None:
        """Give up a job that does not end, and its event loop unless a new one has replaced it."""
        if future.cancel() and loop is self._loop:
            self.close()

    def cancel(self, futures: Sequence["Future[Results]"]) -> None:
        """Cancel the unfinished jobs among these.

        Call it also when all are done, to restore the output streams.
        """
        for future in futures:
            future.cancel()
        self._running.difference_update(futures)
        if not self._running:
            self._prints.close()

    def close(self) -> None:
        """Cancel unfinished calls and stop the event loop."""
        loop = self._loop
        self._loop = None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_shut_down(), loop)


async def _shut_down() -> None:
    """Cancel all other tasks of this event loop, give them time to end, and stop the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)
    asyncio.get_running_loop().stop()


PositionUnit = Literal["token", "character"]


@dataclass(frozen=True)
class StepRewards:
    """Rewards at positions inside one completion, which a reward function may return instead of a number.

    The completion's reward is the sum of the values. Several values at one position are added.
    Without values the reward is 0.

    Attributes:
        values: Rewards, each finite.
        positions: Position of each reward from 0, in the completion's token ids or in its text. A
            character's reward goes to the token that completes it. It is usually the last token or
            character of a step.
        unit: Unit of positions: "token" or "character".

    Raises:
        ValueError: If values and positions have different lengths or invalid types.
    """

    values: Sequence[float]
    positions: Sequence[int]
    unit: PositionUnit = "token"

    def __post_init__(self) -> None:
        values = _checked_list("values", self.values)
        positions = _checked_list("positions", self.positions)
        if not isinstance(self.unit, str) or self.unit not in get_args(PositionUnit):
            raise ValueError(
                f'unit of StepRewards must be "token" or "character", got {shown(self.unit)}.'
            )
        if len(values) != len(positions):
            found = f"{pluralize(len(values), 'value')} and {pluralize(len(positions), 'position')}"
            raise ValueError(f"StepRewards needs one position per value: got {found}.")
        whole = tuple(
            whole_between("positions of StepRewards", position, 0) for position in positions
        )
        object.__setattr__(
            self, "values", tuple(finite_number("values of StepRewards", value) for value in values)
        )
        if max(map(abs, self.values), default=0.0) > FLOAT32_LIMIT:
            raise ValueError(
                f"values of StepRewards must be at most {FLOAT32_LIMIT:g}, got"
                f" {shown(self.values)}."
            )
        object.__setattr__(self, "positions", whole)

    @property
    def total(self) -> float:
        """Sum of the values."""
        return math.fsum(self.values)


def _checked_list(name: str, given: Any) -> list[Any]:
    items = plain_list(given)
    if items is None:
        raise ValueError(f"{name} of StepRewards must be a list, got {shown(given)}.")
    return [plain_scalar(item) for item in items]


OnRewardError = Literal["raise", "exclude"]
RewardValue = float | StepRewards
RewardFn = Callable[[str, Any, Any], RewardValue | Awaitable[RewardValue]]
RewardFunc = Callable[..., Sequence[RewardValue | None] | Awaitable[Sequence[RewardValue | None]]]

AGILERL_ARGUMENTS = ("completion", "answer", "question")
"""Arguments of AgileRL's form, in their order."""
OTHER_NAMES: Mapping[str, str] = {
    "completion": "solution_str response model_output generation prediction output",
    "answer": "ground_truth label reference reference_answer gold target expected",
    "question": "prompt prompt_str query problem input",
}
"""Names of these arguments in other libraries (verl, OpenRLHF, verifiers and others), separated by
spaces.
"""
ARGUMENT_OF = {
    name: argument for argument, names in OTHER_NAMES.items() for name in (argument, *names.split())
}
"""Argument of AgileRL's form by name."""
OTHER_ARGUMENTS = ("data_source", "extra_info", "state", "info", "parser", "metadata")
"""Arguments of other libraries that are none of AgileRL's form; they are passed if the dataset has
the column.
"""
BATCH_NAMES = (
    *(
        "prompts",
        "completions",
        "completion_ids",
        "queries",
        "labels",
        "responses",
        "solutions",
        "answers",
    ),
    *("questions", "data_sources", "solution_strs", "ground_truths", "extra_infos"),
)
"""Arguments of functions that take many completions, in all libraries."""
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of TRL's form, in addition to the dataset's columns."""
REPLACED_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns of the dataset that arguments of TRL's form replace."""
ENVIRONMENTS = "environments"
"""Argument of TRL's form with the environment of each conversation."""
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's form that the trainer provides."""
DEFAULT_REWARD_TIMEOUT: float | None = None
"""Default time limit of one call of a reward function, in seconds; None = no limit."""


class RewardError(ValueError):
    """A reward function raised, returned an invalid reward, exceeded the time limit, or ended its process."""


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """Arguments of reward functions, one entry per completion.

    Attributes:
        rows: Dataset row of each completion.
        texts: Decoded completions.
        token_ids: Token ids of the completions, without padding.
        groups: Group of each completion: member and prompt. None = all are one group.
        turns: Texts of completions and replies in turn, where `texts` and `token_ids` hold whole
            conversations; None for single completions.
        messages: Completions as messages; None = alternating messages of assistant and user, from
            `turns`.
        trainer: Returns the arguments that the trainer provides to a call in TRL's form for these
            completions.
    """

    rows: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    token_ids: Sequence[list[int]]
    groups: Sequence[Hashable] | None = None
    turns: Sequence[Sequence[str]] | None = None
    messages: Sequence[Sequence[Mapping[str, Any]]] | None = None
    trainer: Callable[[Sequence[int]], Mapping[str, Any]] = lambda rows: {}


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function with its weight.

    Attributes:
        name: Name in reports.
        weight: Factor in the sum of rewards.
        batched: True if one call takes a group of completions (TRL's form), False if it takes one
            (AgileRL's form).
        function: The user's function.
    """

    name: str
    weight: float
    batched: bool
    function: Callable[..., Any]

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """Signature of the function; None if it has none, such as some functions in C."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return None

    def sources(
        self, columns: Collection[str], where: str = "the dataset"
    ) -> Mapping[str, str] | None:
        """Return where the arguments of a function in AgileRL's form come from.

        A parameter gets the argument or the column of its name. One without a default may also have
        the name of an argument in another library. A function with other parameters gets
        completion, answer and question by position.

        Args:
            columns: Columns of the dataset.
            where: Name of the dataset in messages.

        Returns:
            "completion" or a column for each argument that is passed by name; None if all are
            passed by position.

        Raises:
            ValueError: If a parameter has no source, or its name contradicts its position.
        """
        if self.signature is None:
            return None
        # 1. By name.
        parameters = self.signature.parameters
        found: dict[str, str] = {}
        for name in self._accepted(parameters):
            if name in AGILERL_ARGUMENTS or name in columns:
                found[name] = name
            elif name in ARGUMENT_OF and parameters[name].default is inspect.Parameter.empty:
                found[name] = ARGUMENT_OF[name]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            found |= {
                argument: argument
                for argument in AGILERL_ARGUMENTS
                if argument not in found.values()
            }
        if "completion" in found.values() and self._accepts(**dict.fromkeys(found)):
            return found
        # 2. By position, if no name says otherwise.
        misplaced = [
            name
            for name, argument in zip(parameters, AGILERL_ARGUMENTS, strict=False)
            if name in (*OTHER_ARGUMENTS, *BATCH_NAMES)
            or ARGUMENT_OF.get(name, argument) != argument
        ]
        if not misplaced and self._accepts(*AGILERL_ARGUMENTS):
            return None
        message = (
            f"Reward function {self.name!r} must take (completion, answer, question), got"
            f" {self.signature}."
        )
        if any(name in BATCH_NAMES for name in parameters):
            raise ValueError(
                f"{message} Pass a function of several completions as reward_funcs (form: trl)."
            )
        missing = [name for name in self._required() if name not in found]
        if missing:
            message += (
                f" There is no column {missing[0]!r}{_similar(missing[0], columns)} of {where}."
            )
        raise ValueError(f"{message} Rename its parameters, or add columns.")

    def _required(self) -> list[str]:
        """Return the names of the parameters without a default."""
        if self.signature is None:
            return []
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in several
        ]

    def _accepted(self, names: Iterable[str]) -> list[str]:
        """Return the names that the function accepts as keyword arguments."""
        if self.signature is None:
            return list(names)
        parameters = self.signature.parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return list(names)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [name for name in names if name in parameters and parameters[name].kind in by_name]

    def _accepts(self, /, *args: Any, **keywords: Any) -> bool:
        """Return True if the function can be called with these arguments."""
        try:
            if self.signature is not None:
                self.signature.bind(*args, **keywords)
        except TypeError:
            return False
        return True

    def check(self, columns: Collection[str], where: str, *, in_process: bool) -> None:
        """Check that the parameters of the function are available.

        Args:
            columns: Columns of the dataset.
            where: Name of the dataset in messages.
            in_process: True if the function runs in this process.

        Raises:
            ValueError: If a required parameter is not available.
        """
        if not self.batched:
            self.sources(columns, where)
            return
        # worker processes cannot log
        others = TRAINER_ARGUMENTS if in_process else TRAINER_ARGUMENTS[:1]
        passed = [column for column in columns if column not in REPLACED_COLUMNS]
        if wrong := [column for column in passed if not isinstance(column, str)]:
            raise ValueError(
                f"Columns must have text as names, got {shown(wrong[0])}. Rename the column."
            )
        names = self._accepted(dict.fromkeys((*TRL_ARGUMENTS, *passed, *others)))
        if names and self._accepts(**dict.fromkeys(names)):
            return
        message = f"Reward function {self.name!r} takes {self.signature}."
        missing = [name for name in self._required() if name not in names]
        if any(ARGUMENT_OF.get(name) == "completion" for name in missing):
            raise ValueError(
                f"{message} Pass a function of one completion as reward_fn (form: agilerl)."
            )
        if missing:
            message += (
                f" There is no argument {missing[0]!r}{_similar(missing[0], passed)} of {where}."
            )
        arguments = ", ".join((*TRL_ARGUMENTS, *others, *sorted(passed)))
        raise ValueError(
            f"{message} It is called by name with {arguments}. Rename its parameters, or add a"
            " column."
        )

    def jobs(self, inputs: RewardInputs, rows: Sequence[int], num_workers: int) -> list[Job]:
        """Return the calls that reward these rows: one per row, or in TRL's form one per group, in order.

        Calls of an async function run concurrently; they are split between `num_workers`.
        """
        # 1. Rows of each call.
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            if inputs.groups is not None:
                group = inputs.groups[row]
            else:
                group = None
            groups.setdefault(group if self.batched else row, []).append(row)
        parts = [tuple(group) for group in groups.values()]
        # 2. Calls of each job.
        if is_async(self.function):
            size = max(1, -(-len(parts) // num_workers))
        else:
            size = 1
        starts = range(0, len(parts), size)
        return [
            Job(name=self.name, parts=tuple(parts[start : start + size]), batched=self.batched)
            for start in starts
        ]

    def calls(self, inputs: RewardInputs, job: Job) -> list[Call]:
        """Return the arguments of a job's calls.

        Each completion has its own copies of the values of its row.

        Raises:
            RewardError: If a value cannot be copied.
        """
        if self.batched:
            return [((), self._batched_arguments(inputs, part)) for part in job.parts]
        calls: list[Call] = []
        for (row,) in job.parts:
            columns = inputs.rows[row]
            sources = self.sources(columns)
            names = AGILERL_ARGUMENTS if sources is None else tuple(sources.values())
            values = [
                inputs.texts[row] if name == "completion" else own_copy(columns[name], name)
                for name in names
            ]
            calls.append(
                (tuple(values), {})
                if sources is None
                else ((), dict(zip(sources, values, strict=True)))
            )
        return calls

    def _batched_arguments(self, inputs: RewardInputs, rows: Sequence[int]) -> dict[str, Any]:
        """Return everything that the function names, with one entry per completion in lists."""
        first = inputs.rows[rows[0]]
        columns = [name for name in first if name not in REPLACED_COLUMNS]
        trainer = inputs.trainer(rows)
        arguments: dict[str, Any] = {}
        for name in self._accepted(dict.fromkeys((*TRL_ARGUMENTS, *columns, *trainer))):
            if name in trainer:
                arguments[name] = trainer[name]
            elif name == "completions":
                arguments[name] = [self._completion(inputs, row) for row in rows]
            elif name == "completion_ids":
                arguments[name] = [list(inputs.token_ids[row]) for row in rows]
            elif name == ENVIRONMENTS:  # live objects, which belong to one conversation each
                arguments[name] = [inputs.rows[row][name] for row in rows]
            else:
                column = "prompt" if name == "prompts" else name
                arguments[name] = [own_copy(inputs.rows[row][column], column) for row in rows]
        return arguments

    def _completion(self, inputs: RewardInputs, row: int) -> Any:
        """Return a completion in TRL's form: text, or messages if the prompt has messages."""
        if inputs.messages is not None:
            return own_copy(list(inputs.messages[row]), "completions")
        if isinstance(inputs.rows[row]["prompt"], str):
            return inputs.texts[row]
        return as_messages([inputs.texts[row]] if inputs.turns is None else inputs.turns[row])


def _similar(name: str, columns: Collection[str]) -> str:
    """Return the columns of a dataset with the one that is most like a name, as the end of a sentence."""
    match = close_match(name, columns)
    if match is None:
        question = ""
    else:
        question = f" (did you mean {match!r}?)"
    return f"{question} among the columns {shown(list(columns), 200)}"


def as_messages(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return alternating completions and replies as assistant and user messages."""
    return [
        {"role": "user" if number % 2 else "assistant", "content": text}
        for number, text in enumerate(texts)
    ]


def make_rewards(
    reward_fn: RewardFn | None,
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    reward_weights: Sequence[float] | None,
) -> tuple[Reward, ...]:
    """Return the user's reward functions in one form.

    Args:
        reward_fn: AgileRL's form, `reward_fn(completion, answer, question) -> float`, called per
            completion. Arguments and columns are passed by name in any order, or these three by
            position in this order.
        reward_funcs: TRL's form, one or several `f(prompts=, completions=, completion_ids=,
            **columns)`, each called with the completions of one member to one prompt and those of
            these arguments that it takes. Returns one float or None (not applicable) per
            completion.
        reward_weights: One factor per function of `reward_funcs`; None means 1 each.

    Raises:
        ValueError: If not exactly one form is used, a function is not callable, or the weights do
            not fit.
    """
    if (reward_fn is None) == (reward_funcs is None):
        raise ValueError(
            "Exactly one of reward_fn (AgileRL's form) and reward_funcs (TRL's form) must be set."
        )
    # 1. AgileRL's form.
    if reward_fn is not None:
        if reward_weights is not None:
            raise ValueError(
                "reward_weights requires reward_funcs, got reward_fn. Scale its value instead."
            )
        return (Reward(name=_name(reward_fn), weight=1.0, batched=False, function=reward_fn),)
    # 2. TRL's form.
    assert reward_funcs is not None
    several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
    functions: list[RewardFunc] = list(reward_funcs) if several else [reward_funcs]  # type: ignore[arg-type, list-item]
    if not functions:
        raise ValueError("reward_funcs must contain at least one function, got none.")
    factors = [1.0] * len(functions) if reward_weights is None else reward_weights
    if not isinstance(factors, Iterable) or len(weights := list(factors)) != len(functions):
        raise ValueError(
            f"reward_weights must be {len(functions)} finite numbers, got {shown(reward_weights)}."
        )
    # 3. Functions of the same name get a number.
    rewards: dict[str, Reward] = {}
    for weight, function in zip(weights, functions, strict=True):
        base = name = _name(function)
        numbers = itertools.count(len(rewards) + 1)
        while name in rewards:
            name = f"{base}_{next(numbers)}"
        factor = float(finite_number("each of reward_weights", weight))
        rewards[name] = Reward(name=name, weight=factor, batched=True, function=function)
    return tuple(rewards.values())


def _name(function: Any) -> str:
    """Return the name of a function; raise ValueError for any other object."""
    if not callable(function) or (hasattr(function, "forward") and hasattr(function, "parameters")):
        raise ValueError(
            f"A reward must be a function, got {shown(function)}. Wrap a model in a function."
        )
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
