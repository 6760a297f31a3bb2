"""Reward functions: user callables in AgileRL's and TRL's form, checked and called in one way."""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeVar

from evogrpo.config.checks import finite_number, whole_number
from evogrpo.distributed import cores_per_rank
from evogrpo.envs.text.reward_calls import Call, InProcessRunner, Job, RewardRunner, is_async
from evogrpo.envs.text.step_rewards import StepRewards
from evogrpo.envs.text.verifier_pool import VerifierPool

OnRewardError = Literal["raise", "exclude"]
Value = float | StepRewards
RewardFn = Callable[[str, Any, Any], Value | Awaitable[Value]]
RewardFunc = Callable[..., Sequence[Value | None] | Awaitable[Sequence[Value | None]]]
F = TypeVar("F", bound=Callable[..., Any])

AGILERL_ARGUMENTS = ("completion", "answer", "question")
"""Arguments of AgileRL's form, in their order."""
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of TRL's form, beside the dataset's columns."""
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's form that the trainer provides."""
MAX_WORKERS = 8
"""Largest default number of worker processes."""
DEFAULT_REWARD_TIMEOUT: float | None = None
"""Default time limit of one call of a reward function, in seconds; None = no limit."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Parameters of a function.

    Attributes:
        names: Parameters that can be passed by name, in order.
        required: Those of `names` without a default.
        positional: Parameters that can be passed by position, in order.
        accepts_any: True if the function takes arguments of any name.
        bind: Raises TypeError for arguments that the function does not accept.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: tuple[str, ...]
    accepts_any: bool
    bind: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Signature | None":
        """Return the signature of a function, or None if it has none, as some C functions."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return None
        named = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        return cls(
            names=tuple(parameter.name for parameter in named),
            required=tuple(parameter.name for parameter in named if parameter.default is parameter.empty),
            positional=tuple(
                parameter.name
                for parameter in signature.parameters.values()
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            ),
            accepts_any=any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()),
            bind=signature.bind,
        )

    def accepts(self, *args: Any, **keywords: Any) -> bool:
        """Return True if the function can be called with these arguments."""
        try:
            self.bind(*args, **keywords)
        except TypeError:
            return False
        return True


def _agilerl_argument_names(name: str, function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names by which a function in AgileRL's form gets its arguments; None = by position.

    A function whose required parameters are all among `completion`, `answer` and `question` is called by name. Any
    other function gets these three by position, in this order.

    Raises:
        ValueError: If it takes another number of arguments, or has one of the names at another's position.
    """
    signature = Signature.of(function)
    if signature is None:
        return None
    if {"completions", "prompts"}.intersection(signature.names):
        raise ValueError(
            f"Reward function {name!r} takes {', '.join(signature.names)}, which is TRL's form. Pass it as "
            "reward_funcs=[...] (form: trl), or let it take (completion, answer, question)."
        )
    # 1. By name, if its names are AgileRL's.
    named = tuple(argument for argument in AGILERL_ARGUMENTS if argument in signature.names)
    if (named or signature.accepts_any) and set(signature.required) <= set(AGILERL_ARGUMENTS):
        names = AGILERL_ARGUMENTS if signature.accepts_any else named
        if signature.accepts(**dict.fromkeys(names)):
            return names
    # 2. By position otherwise.
    parameters = ", ".join(dict.fromkeys((*signature.positional, *signature.names)))
    if not signature.accepts(*AGILERL_ARGUMENTS):
        raise ValueError(
            f"Reward function {name!r} must take (completion, answer, question), got ({parameters}). Use these names "
            "in any order, or other names in this order. Other columns need TRL's form (reward_funcs)."
        )
    for position, parameter in enumerate(signature.positional[: len(AGILERL_ARGUMENTS)]):
        if parameter in AGILERL_ARGUMENTS and AGILERL_ARGUMENTS[position] != parameter:
            raise ValueError(
                f"Reward function {name!r} takes ({parameters}) but is called by position as (completion, answer, "
                "question), because of the other names. Use these three names, then any order works."
            )
    return None


class RewardError(ValueError):
    """A reward function raised, returned an invalid reward, exceeded the time limit, or ended its process."""


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """Arguments of reward functions, one entry per completion.

    Attributes:
        rows: Dataset row of each completion.
        texts: Decoded completions.
        token_ids: Token ids of the completions, without padding.
        turns: Texts of completions and replies in turn, where `texts` and `token_ids` hold whole conversations; None
            for single completions.
        trainer: Arguments that the trainer provides to functions in TRL's form.
    """

    rows: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    token_ids: Sequence[list[int]]
    turns: Sequence[Sequence[str]] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def select(self, positions: Sequence[int]) -> "RewardInputs":
        """Return the inputs of these completions."""
        return RewardInputs(
            rows=[self.rows[position] for position in positions],
            texts=[self.texts[position] for position in positions],
            token_ids=[self.token_ids[position] for position in positions],
            turns=None if self.turns is None else [self.turns[position] for position in positions],
            trainer=self.trainer,
        )


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function with its weight.

    Attributes:
        name: Name in reports.
        weight: Factor in the sum of rewards.
        batched: True if one call takes all completions (TRL's form), False if one (AgileRL's form).
        function: The user's function.
    """

    name: str
    weight: float
    batched: bool
    function: Callable[..., Any]

    @functools.cached_property
    def argument_names(self) -> tuple[str, ...] | None:
        """Names by which a function in AgileRL's form gets its arguments; None = by position."""
        return _agilerl_argument_names(self.name, self.function)

    @functools.cached_property
    def signature(self) -> Signature | None:
        """Signature of the function, or None if it has none."""
        return Signature.of(self.function)

    def check(self, columns: Collection[str], where: str, *, in_process: bool) -> None:
        """Check that the parameters of the function are available.

        Args:
            columns: Columns of the dataset.
            where: Name of the dataset, for messages.
            in_process: True if the function runs in this process.

        Raises:
            ValueError: If a required parameter is not available.
        """
        # 1. AgileRL's form.
        if not self.batched:
            _ = self.argument_names
            return
        # 2. TRL's form: all arguments are passed by name.
        if self.signature is None:
            return
        required = self.signature.required
        available = tuple(dict.fromkeys((*TRL_ARGUMENTS, *columns, *TRAINER_ARGUMENTS)))
        missing = [parameter for parameter in required if parameter not in available]
        if missing:
            fix = "Rename a parameter or a column."
            if "completion" in missing:
                fix = "Pass a function of a single completion as reward_fn (form: agilerl)."
            raise ValueError(
                f"Reward function {self.name!r} takes {', '.join(missing)}, but {where} has the columns "
                f"{sorted(columns)}. Also available: {', '.join((*TRL_ARGUMENTS, *TRAINER_ARGUMENTS))}. {fix}"
            )
        names = [
            parameter for parameter in available if self.signature.accepts_any or parameter in self.signature.names
        ]
        if not names or not self.signature.accepts(**dict.fromkeys(names)):
            raise ValueError(
                f"Reward function {self.name!r} is called by name, f(prompts=, completions=, completion_ids=, "
                f"**columns), but takes ({', '.join(self.signature.names) or 'no such names'}). It must at least take "
                "completions."
            )
        # 3. Worker processes cannot log.
        logging = set(required).intersection(("log_extra", "log_metric"))
        if logging and not in_process:
            raise ValueError(
                f"Reward function {self.name!r} takes {', '.join(sorted(logging))}, which is not available in worker "
                "processes. Remove reward_workers and reward_timeout, or give the parameter a default."
            )

    def jobs(self, inputs: RewardInputs, rows: Sequence[int], num_workers: int) -> list[Job]:
        """Return the calls that reward these rows. Calls for several rows are split between `num_workers`."""
        if self.batched or is_async(self.function):
            size = max(1, -(-len(rows) // num_workers))
            parts = [tuple(rows[first : first + size]) for first in range(0, len(rows), size)]
        else:
            parts = [(row,) for row in rows]
        return [Job(name=self.name, rows=part, calls=self._calls(inputs.select(part))) for part in parts]

    def _calls(self, inputs: RewardInputs) -> tuple[Call, ...]:
        """Return the calls of the function for these completions, in its form."""
        if not self.batched:
            return tuple(self._call(text, row) for text, row in zip(inputs.texts, inputs.rows, strict=True))
        # TRL's form: one call with everything that the function names.
        prompts = [row["prompt"] for row in inputs.rows]
        completions: list[Any] = list(inputs.texts)
        if not isinstance(prompts[0], str):
            turns = [[text] for text in inputs.texts] if inputs.turns is None else inputs.turns
            completions = [as_messages(texts) for texts in turns]
        replaced = ("prompt", "completion", "completion_ids")  # columns that TRL's own arguments replace
        columns = {key: [row[key] for row in inputs.rows] for key in inputs.rows[0] if key not in replaced}
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": list(inputs.token_ids)}
        keywords = {**arguments, **columns, **inputs.trainer}
        if self.signature is not None and not self.signature.accepts_any:
            keywords = {name: value for name, value in keywords.items() if name in self.signature.names}
        return (((), keywords),)

    def _call(self, text: str, row: Mapping[str, Any]) -> Call:
        values = {"completion": text, "answer": row["answer"], "question": row["question"]}
        if self.argument_names is None:
            return tuple(values.values()), {}
        return (), {name: values[name] for name in self.argument_names}


def as_messages(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return alternating completions and replies as assistant and user messages."""
    return [{"role": "user" if number % 2 else "assistant", "content": text} for number, text in enumerate(texts)]


def make_rewards(
    reward_fn: RewardFn | None,
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    reward_weights: Sequence[float] | None,
) -> tuple[Reward, ...]:
    """Return the user's reward functions in one form.

    Args:
        reward_fn: AgileRL's form, `reward_fn(completion, answer, question) -> float`, called per completion. Arguments
            are passed by these names in any order, or by position in this order.
        reward_funcs: TRL's form, one or several `f(prompts=, completions=, completion_ids=, **columns)`, each called
            with many completions at once and those of these arguments that it takes. Returns one float or None (not
            applicable) per completion.
        reward_weights: One factor per function of `reward_funcs`; None means 1 each.

    Raises:
        ValueError: If not exactly one form is used, a function is not callable, or the weights do not fit.
    """
    if (reward_fn is None) == (reward_funcs is None):
        raise ValueError(
            f"Exactly one of reward_fn and reward_funcs must be set, got {'none' if reward_fn is None else 'both'}. "
            "Use reward_fn(completion, answer, question) for AgileRL's form, "
            "reward_funcs=[f(prompts=, completions=, **columns)] for TRL's."
        )
    # 1. AgileRL's form.
    if reward_fn is not None:
        if reward_weights is not None:
            raise ValueError("reward_weights requires reward_funcs, got reward_fn. Scale its value instead.")
        return (Reward(name=_name(_checked(reward_fn)), weight=1.0, batched=False, function=reward_fn),)
    # 2. TRL's form.
    assert reward_funcs is not None
    several = isinstance(reward_funcs, Sequence) and not isinstance(reward_funcs, str)
    functions: list[RewardFunc] = list(reward_funcs) if several else [reward_funcs]  # type: ignore[arg-type, list-item]
    if not functions:
        raise ValueError("reward_funcs must contain at least one function, got none.")
    factors = [1.0] * len(functions) if reward_weights is None else reward_weights
    if not isinstance(factors, Iterable) or len(weights := list(factors)) != len(functions):
        raise ValueError(
            f"reward_weights must be {len(functions)} finite numbers, one per function, got {reward_weights!r:.200}."
        )
    # 3. Functions of the same name get a number.
    rewards: dict[str, Reward] = {}
    for weight, function in zip(weights, functions, strict=True):
        base = name = _name(_checked(function))
        while name in rewards:
            name = f"{base}_{len(rewards) + 1}"
        factor = float(finite_number("each of reward_weights", weight))
        rewards[name] = Reward(name=name, weight=factor, batched=True, function=function)
    return tuple(rewards.values())


def make_reward_runner(rewards: Sequence[Reward], timeout: float | None, workers: int | None) -> RewardRunner:
    """Return a runner that calls the reward functions.

    Args:
        rewards: The reward functions.
        timeout: Time limit of one call, in seconds; None = no limit.
        workers: Number of worker processes; 0 = call functions in this process; None = one per core, at most 8, if a
            timeout is set and a function is not async, otherwise 0.

    Raises:
        ValueError: If a number is out of range, a timeout needs worker processes, or a function cannot be pickled.
    """
    check_worker_limits(timeout, workers)
    functions = {reward.name: reward.function for reward in rewards}
    synchronous = [name for name, function in functions.items() if not is_async(function)]
    # Only worker processes can stop a function that is not async.
    if workers is None:
        workers = min(MAX_WORKERS, cores_per_rank()) if timeout is not None and synchronous else 0
    if workers > 0:
        return VerifierPool(functions, workers=workers, timeout=timeout)
    if timeout is not None and synchronous:
        raise ValueError(
            f"reward_timeout requires reward_workers of at least 1 for {synchronous[0]!r}, got 0. A function that is "
            "not async can only be stopped in a worker process."
        )
    return InProcessRunner(functions, timeout)


def check_worker_limits(timeout: float | None, workers: int | None) -> None:
    """Raise ValueError if a time limit or number of worker processes is out of range."""
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"reward_timeout must be a finite number of seconds above 0, or None, got {timeout!r:.80}.")
    if workers is not None and whole_number("reward_workers", workers) < 0:
        raise ValueError(f"reward_workers must be at least 0, or None, got {workers}.")


def _checked(function: F) -> F:
    """Return the argument if it is a function; otherwise raise ValueError."""
    if isinstance(function, str) or (hasattr(function, "forward") and hasattr(function, "parameters")):
        received = repr(function) if isinstance(function, str) else f"the model {type(function).__name__}"
        raise ValueError(
            f"A reward must be a function, got {received}. To use a reward model, load it and pass a function "
            "f(prompts, completions, **columns) that returns its score of each text."
        )
    if not callable(function):
        raise ValueError(f"A reward must be a function, got {function!r:.200}.")
    return function


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
