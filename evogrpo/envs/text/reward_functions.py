"""Reward functions: the user's callables in one form."""

import functools
import inspect
import math
import numbers
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

from evogrpo.config.checks import finite_number, whole_number
from evogrpo.envs.text.reward_calls import Call, InProcessRunner, Job, RewardRunner, is_async
from evogrpo.envs.text.step_rewards import StepRewards
from evogrpo.envs.text.verifier_pool import VerifierPool

RESERVED_NAMES = ("slot", "index")
"""What stands beside metrics in a journal."""


@dataclass(kw_only=True)
class TrainingProgress:
    """How far training has come: what `trainer_state` is made of.

    Attributes:
        step: Learning steps taken.
        most: Learning steps in all; 0 where that is not known.
    """

    step: int = 0
    most: int = 0

    def state(self, *, plain: bool) -> Any:
        """Return a `transformers.TrainerState`; or, to be sent to another process, an object with its attributes."""
        from transformers import TrainerState

        state = TrainerState(global_step=self.step, max_steps=self.most)
        return SimpleNamespace(**vars(state)) if plain else state


@dataclass(kw_only=True)
class RewardLog:
    """What reward functions log about one batch of completions.

    Attributes:
        columns: Values per completion, by column of the completions table.
        values: Numbers about the whole batch, by metric.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add values to a column of the completions table, one per completion."""
        self.columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        """Note a number about the batch; several under one name are averaged.

        Raises:
            ValueError: If the name is taken, or the value is no number.
        """
        value = value.tolist() if hasattr(value, "tolist") else value
        if str(name) in RESERVED_NAMES:
            raise ValueError(f"log_metric must not use the name {name!r}: choose another one")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"log_metric takes a finite number, got {value!r:.80} for {name!r:.80}")
        self.values.setdefault(str(name), []).append(float(value))

    def offered(self, pace: TrainingProgress, *, here: bool) -> Mapping[str, Any]:
        """Return the arguments; in another process there is nowhere to log to."""
        if not here:
            return {"trainer_state": pace.state(plain=True)}
        return {
            "trainer_state": pace.state(plain=False),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }


Part = tuple[Sequence[int], RewardLog]
"""Numbers of completions, and what was logged about them."""


def merge_columns(parts: Sequence[Part], count: int) -> dict[str, tuple[Any, ...]]:
    """Return the columns that hold one value for each of `count` completions."""
    found: dict[str, tuple[Any, ...]] = {}
    for name in dict.fromkeys(name for _, logged in parts for name in logged.columns):
        told = [(rows, logged.columns[name]) for rows, logged in parts if name in logged.columns]
        if all(len(rows) == len(values) for rows, values in told):
            pairs = (pair for each in told for pair in zip(*each, strict=True))
            numbered = sorted(pairs, key=lambda pair: pair[0])
            if [row for row, _ in numbered] == list(range(count)):
                found[name] = tuple(value for _, value in numbered)
    return found


def merge_metrics(parts: Sequence[Part]) -> dict[str, float]:
    """Return the mean of each metric: a number counts as often as there are completions that it is about."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for _, logged in parts for name in logged.values):
        told = [(len(rows), value) for rows, logged in parts for value in logged.values.get(name, ())]
        most = max(weight for weight, _ in told)
        weights = [weight / most for weight, _ in told]
        found[name] = math.fsum(w * value for w, (_, value) in zip(weights, told, strict=True)) / math.fsum(weights)
    return found


AGILERL_ARGUMENTS = ("completion", "answer", "question")
"""Arguments of AgileRL's form, in their order."""
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of TRL's form that are always there, beside the columns."""
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's form that training gives."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The parameters of a function.

    Attributes:
        names: Those that can be given by name, in their order.
        required: Those of them that have to be.
        places: Those that can be given by place, in their order.
        anything: Whether it takes arguments of any name.
        bind: Tells with a TypeError whether it takes the given arguments.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    places: tuple[str, ...]
    anything: bool
    bind: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature | None":
        """Read a function's signature; None where it has none, as some that are written in C."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return None
        named = [
            each
            for each in signature.parameters.values()
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        return cls(
            names=tuple(each.name for each in named),
            required=tuple(each.name for each in named if each.default is each.empty),
            places=tuple(
                each.name
                for each in signature.parameters.values()
                if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            ),
            anything=any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()),
            bind=signature.bind,
        )

    def takes(self, *given: Any, **named: Any) -> bool:
        """Tell whether it takes these arguments."""
        try:
            self.bind(*given, **named)
        except TypeError:
            return False
        return True


def agilerl_argument_names(name: str, function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names under which a function in AgileRL's form is given its arguments; None = by place.

    Where all it needs are `completion`, `answer` and `question`, or some of them, they are given by name, in whatever
    order it has them. Where it has other names, it is given the three by place, in this order.

    Raises:
        ValueError: If it takes another number of arguments, or has one of the names at the place of another.
    """
    signature = Signature.of(function)
    if signature is None:
        return None
    known = tuple(each for each in AGILERL_ARGUMENTS if each in signature.names)
    if {"completions", "prompts"}.intersection(signature.names):
        raise ValueError(
            f"reward function {name!r} asks for {', '.join(signature.names)}, as TRL's form does: give it as "
            "reward_funcs=[...] (form: trl), or let it take (completion, answer, question)"
        )
    if (known or signature.anything) and set(signature.required) <= set(AGILERL_ARGUMENTS):
        chosen = AGILERL_ARGUMENTS if signature.anything else known
        if signature.takes(**dict.fromkeys(chosen)):
            return chosen
    asks = f"reward function {name!r} takes ({', '.join(dict.fromkeys((*signature.places, *signature.names)))})"
    if not signature.takes(*AGILERL_ARGUMENTS):
        raise ValueError(
            f"{asks}, but is called with three arguments, completion, answer and question: let it take these three, "
            "by these names in any order, or by other names in this one (further columns go to functions in TRL's form)"
        )
    for place, own in enumerate(signature.places[: len(AGILERL_ARGUMENTS)]):
        if own in AGILERL_ARGUMENTS and AGILERL_ARGUMENTS[place] != own:
            raise ValueError(
                f"{asks}, but is given completion, answer and question in this order, as not all of its parameters are "
                "named so: use these three names, then any order serves"
            )
    return None


def check_trl_arguments(name: str, function: Callable[..., Any], columns: Collection[str], where: str) -> None:
    """Refuse a function in TRL's form that cannot be given what it asks for, all by name.

    Args:
        name: What it is called.
        function: The function.
        columns: Of the dataset.
        where: The dataset's name, in messages.

    Raises:
        ValueError: If it needs an argument that there is not.
    """
    offered = tuple(dict.fromkeys((*TRL_ARGUMENTS, *columns, *TRAINER_ARGUMENTS)))
    signature = Signature.of(function)
    if signature is None:
        return
    missing = [each for each in signature.required if each not in offered]
    if missing:
        remedy = "rename a parameter or a column"
        if "completion" in missing:
            remedy = "give a function of a single completion as reward_fn (form: agilerl)"
        raise ValueError(
            f"reward function {name!r} asks for {', '.join(missing)}, but {where} has the columns {sorted(columns)}, "
            f"beside which there are {', '.join((*TRL_ARGUMENTS, *TRAINER_ARGUMENTS))}: {remedy}"
        )
    chosen = offered if signature.anything else [each for each in offered if each in signature.names]
    if not chosen or not signature.takes(**dict.fromkeys(chosen)):
        raise ValueError(
            f"reward function {name!r} is called by name, f(prompts=, completions=, completion_ids=, **columns), but "
            f"takes ({', '.join(signature.names) or 'no such names'}): name at least completions"
        )


OnRewardError = Literal["raise", "exclude"]
Value = float | StepRewards
RewardFn = Callable[[str, Any, Any], Value | Awaitable[Value]]
RewardFunc = Callable[..., Sequence[Value | None] | Awaitable[Sequence[Value | None]]]

F = TypeVar("F", bound=Callable[..., Any])

_TRL_OWN = ("prompt", "completion", "completion_ids")
MAX_WORKERS = 8  # when their number is not given


class RewardError(ValueError):
    """A reward function raised, returned something that is no reward, took too long, or ended its process."""


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """What reward functions may see, one entry per completion.

    Attributes:
        rows: Dataset row that each completion answers.
        texts: Decoded completions.
        token_ids: Token ids of the completions, without padding.
        training: What training offers to functions in TRL's form that ask for it, by name.
        turns: Of conversations, which `texts` and `token_ids` hold as a whole: what was said and heard in turns. None
            where a text is all that was said.
    """

    rows: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    token_ids: Sequence[list[int]]
    turns: Sequence[Sequence[str]] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)

    def only(self, positions: Sequence[int]) -> "RewardInputs":
        """Return the answers at the given positions."""
        return RewardInputs(
            rows=[self.rows[position] for position in positions],
            texts=[self.texts[position] for position in positions],
            token_ids=[self.token_ids[position] for position in positions],
            turns=None if self.turns is None else [self.turns[position] for position in positions],
            training=self.training,
        )


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward function.

    Attributes:
        name: What it is called in reports.
        weight: Its factor in the sum.
        batched: Whether one call takes all completions (TRL's form) rather than one (AgileRL's).
        function: The user's.
    """

    name: str
    weight: float
    batched: bool
    function: Callable[..., Any]

    @functools.cached_property
    def asked_by_name(self) -> tuple[str, ...] | None:
        """In AgileRL's form, the names under which it takes its arguments; None = by place."""
        return agilerl_argument_names(self.name, self.function)

    @functools.cached_property
    def signature(self) -> Signature | None:
        """Its parameters; None where they cannot be known."""
        return Signature.of(self.function)

    def check(self, columns: Collection[str], where: str) -> None:
        """Refuse with a ValueError a function that asks for what a dataset with these columns cannot give."""
        if self.batched:
            check_trl_arguments(self.name, self.function, columns, where)
        else:
            _ = self.asked_by_name

    def check_here(self, *, here: bool) -> None:
        """Refuse with a ValueError a function that has to log, where it runs in another process than training."""
        needed = (
            () if self.signature is None else set(self.signature.required).intersection(("log_extra", "log_metric"))
        )
        if needed and not here:
            raise ValueError(
                f"reward function {self.name!r} asks for {', '.join(sorted(needed))}, which needs the run's own "
                "process: leave out reward_workers and reward_timeout, or give the parameter a default"
            )

    def jobs(self, answers: RewardInputs, rows: Sequence[int], shares: int) -> list[Job]:
        """Return the calls that reward the given rows; completions that one call takes are divided into `shares`."""
        if self.batched or is_async(self.function):
            size = max(1, -(-len(rows) // shares))
            parts = [tuple(rows[first : first + size]) for first in range(0, len(rows), size)]
        else:
            parts = [(row,) for row in rows]
        return [Job(name=self.name, rows=part, calls=self._calls(answers.only(part))) for part in parts]

    def _calls(self, answers: RewardInputs) -> tuple[Call, ...]:
        if not self.batched:
            return tuple(self._call(text, row) for text, row in zip(answers.texts, answers.rows, strict=True))
        prompts = [row["prompt"] for row in answers.rows]
        completions: list[Any] = list(answers.texts)
        if not isinstance(prompts[0], str):
            turns = [[text] for text in answers.texts] if answers.turns is None else answers.turns
            completions = [as_messages(spoken) for spoken in turns]
        columns = {key: [row[key] for row in answers.rows] for key in answers.rows[0] if key not in _TRL_OWN}
        given = {"prompts": prompts, "completions": completions, "completion_ids": list(answers.token_ids)}
        offered = {**given, **columns, **answers.training}
        if self.signature is not None and not self.signature.anything:
            offered = {name: value for name, value in offered.items() if name in self.signature.names}
        return (((), offered),)

    def _call(self, text: str, row: Mapping[str, Any]) -> Call:
        values = {"completion": text, "answer": row["answer"], "question": row["question"]}
        if self.asked_by_name is None:
            return tuple(values.values()), {}
        return (), {name: values[name] for name in self.asked_by_name}


def as_messages(spoken: Sequence[str]) -> list[dict[str, str]]:
    """Return the texts of completions and replies, in order, as messages of the assistant and the user."""
    return [{"role": "user" if number % 2 else "assistant", "content": text} for number, text in enumerate(spoken)]


def make_rewards(
    reward_fn: RewardFn | None,
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    reward_weights: Sequence[float] | None,
) -> tuple[Reward, ...]:
    """Return the reward functions in one form.

    Args:
        reward_fn: AgileRL's form, `reward_fn(completion, answer, question) -> float`, called per completion; by these
            names in whatever order it has them, or by place in this one.
        reward_funcs: TRL's form, one or several `f(prompts=, completions=, completion_ids=, **columns)` that return
            one float or None (not applicable) per completion, each called with many completions at once and given
            those of these arguments that it asks for.
        reward_weights: One factor per function of `reward_funcs`; None means 1 each.

    Raises:
        ValueError: If not exactly one form is given, a function cannot be called, or the weights do not fit.
    """
    if (reward_fn is None) == (reward_funcs is None):
        raise ValueError(
            "exactly one of reward_fn and reward_funcs must be given, got "
            f"{'none' if reward_fn is None else 'both'}: reward_fn(completion, answer, question) is AgileRL's form, "
            "reward_funcs=[f(prompts=, completions=, **columns)] is TRL's"
        )
    if reward_fn is not None:
        if reward_weights is not None:
            raise ValueError("reward_weights go with reward_funcs, got reward_fn: scale its value instead")
        return (Reward(name=_name(_checked(reward_fn)), weight=1.0, batched=False, function=reward_fn),)
    assert reward_funcs is not None
    several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
    functions: list[RewardFunc] = list(reward_funcs) if several else [reward_funcs]  # type: ignore[arg-type, list-item]
    if not functions:
        raise ValueError("reward_funcs must hold at least one function, got none")
    given = [1.0] * len(functions) if reward_weights is None else reward_weights
    if not isinstance(given, Iterable) or len(weights := list(given)) != len(functions):
        raise ValueError(
            f"reward_weights must be {len(functions)} finite numbers, one per function, got {reward_weights!r:.200}"
        )
    weights = [float(finite_number("each of reward_weights", weight)) for weight in weights]
    made: dict[str, Reward] = {}
    for weight, function in zip(weights, functions, strict=True):
        base = name = _name(_checked(function))
        while name in made:
            name = f"{base}_{len(made) + 1}"
        made[name] = Reward(name=name, weight=weight, batched=True, function=function)
    return tuple(made.values())


def make_reward_runner(rewards: Sequence[Reward], timeout: float | None, workers: int | None) -> RewardRunner:
    """Return what calls the reward functions.

    Args:
        rewards: The reward functions.
        timeout: Seconds that one call may take; None = no limit.
        workers: Worker processes; 0 = none, all calls are made in this process; None = as many as cores, at most 8,
            where a timeout is given and a function is not async, and none otherwise.

    Raises:
        ValueError: If a number is out of range, a plain function is to be stopped without a process of its own, or a
            function cannot be sent to another process.
    """
    check_worker_limits(timeout, workers)
    functions = {reward.name: reward.function for reward in rewards}
    plain = [name for name, function in functions.items() if not is_async(function)]
    if workers is None:
        workers = min(MAX_WORKERS, os.cpu_count() or 1) if timeout is not None and plain else 0
    if workers > 0:
        return VerifierPool(functions, workers=workers, timeout=timeout)
    if timeout is not None and plain:
        raise ValueError(
            f"reward_timeout needs reward_workers of at least 1 for {plain[0]!r}, got 0: a function that is not async "
            "can only be stopped together with a process of its own"
        )
    return InProcessRunner(functions, timeout)


def check_worker_limits(timeout: float | None, workers: int | None) -> None:
    """Refuse a time limit or a number of worker processes that is out of range."""
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"reward_timeout must be a finite number of seconds above 0, or None, got {timeout!r:.80}")
    if workers is not None and whole_number("reward_workers", workers) < 0:
        raise ValueError(f"reward_workers must be at least 0, or None, got {workers}")


def _checked(function: F) -> F:
    if isinstance(function, str) or (hasattr(function, "forward") and hasattr(function, "parameters")):
        shown = repr(function) if isinstance(function, str) else f"the model {type(function).__name__}"
        raise ValueError(
            f"a reward must be a function, got {shown}: to reward with a model, load it yourself and give a function "
            "f(prompts, completions, **columns) that scores each text with it and returns a list of numbers"
        )
    if not callable(function):
        raise ValueError(f"a reward function must be a function, plain or async, got {function!r:.200}")
    return function


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
