"""Reward functions: the user's functions in AgileRL's and TRL's form, and their arguments."""

import copy
import functools
import inspect
import itertools
import math
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Literal, get_args

from evogrpo.envs.text.user_functions import Call
from evogrpo.synonyms import close_match
from evogrpo.text import class_name, one_line, pluralize, shown
from evogrpo.validation import (
    FLOAT32_LIMIT,
    finite_number,
    plain_list,
    plain_value,
    refuse_unknown,
    whole_between,
)

PositionUnit = Literal["token", "character"]


@dataclass(frozen=True)
class StepRewards:
    """Rewards at positions inside one completion.

    A reward function may return them instead of a number. The completion's reward is the sum of the
    values, 0 without any. Several values at one position are added.

    Attributes:
        values: Rewards, each finite.
        positions: Position of each reward from 0, in the completion's token ids or in its text,
            usually that of the last token or character of a step. A character's reward goes to the
            token that completes it.
        unit: Unit of positions: "token" or "character".

    Raises:
        ValueError: If values and positions have different lengths, or one of them or the unit is
            invalid.
    """

    values: Sequence[float]
    positions: Sequence[int]
    unit: PositionUnit = "token"

    def __post_init__(self) -> None:
        values = _listed("values", self.values)
        positions = _listed("positions", self.positions)
        if not isinstance(self.unit, str) or self.unit not in get_args(PositionUnit):
            raise ValueError(
                f'unit of StepRewards must be "token" or "character", got {shown(self.unit)}.'
            )
        if len(values) != len(positions):
            counts = [pluralize(len(values), "value"), pluralize(len(positions), "position")]
            found = " and ".join(counts)
            raise ValueError(f"StepRewards needs one position per value: got {found}.")
        # Values of numpy and torch become plain numbers, so that records compare equal.
        whole = [whole_between("positions of StepRewards", each, 0) for each in positions]
        finite = [finite_number("values of StepRewards", each) for each in values]
        if max(map(abs, finite), default=0.0) > FLOAT32_LIMIT:
            raise ValueError(
                f"values of StepRewards must be at most {FLOAT32_LIMIT:g}, got {shown(finite)}."
            )
        # The record is frozen.
        object.__setattr__(self, "positions", tuple(whole))
        object.__setattr__(self, "values", tuple(finite))

    @property
    def total(self) -> float:
        """Sum of the values."""
        return math.fsum(self.values)


@dataclass(frozen=True, kw_only=True)
class Reasoned:
    """A reward with a reason in words.

    Attributes:
        value: The reward.
        reason: The reason; untrusted text.
    """

    value: Any
    reason: str


def reasoned(result: Any) -> Reasoned | None:
    """Return a reward with its reason; None if a result is a plain reward.

    A function may return `(reward, reason)`, a mapping with "score" and "feedback", or an object
    with these attributes, as metrics of GEPA and DSPy do. A mapping may leave out the reason and
    have other keys, as in verl; the reason is then empty.
    """
    if isinstance(result, Reasoned):
        return result
    if isinstance(result, tuple | list) and len(result) == 2:
        value, reason = result
    # The type itself: an object such as a mock may claim another class.
    elif issubclass(type(result), Mapping):
        value = result.get("score")
        reason = result.get("feedback", "")
    else:
        value = getattr(result, "score", None)
        reason = getattr(result, "feedback", None)
    if value is None or not isinstance(reason, str):
        return None
    return Reasoned(value=value, reason=reason[:MAX_REASON])


def _listed(name: str, given: Any) -> list[Any]:
    """Return a list of plain numbers or texts, or raise ValueError."""
    items = plain_list(given)
    if items is None:
        raise ValueError(f"{name} of StepRewards must be a list, got {shown(given)}.")
    return [plain_value(item) for item in items]


MAX_REASON = 2000
"""Maximum number of characters of a reason; the rest is cut off."""
OnRewardError = Literal["raise", "exclude"]
RewardValue = float | StepRewards | tuple[float | StepRewards, str] | Mapping[str, Any]
RewardFn = Callable[[str, Any, Any], RewardValue | Awaitable[RewardValue]]
RewardFunc = Callable[..., Sequence[RewardValue | None] | Awaitable[Sequence[RewardValue | None]]]
Weights = Sequence[float] | Mapping[str, float]
"""Factors of reward functions, in their order or by name."""

AGILERL_ARGUMENTS = ("completion", "answer", "question")
"""Arguments of AgileRL's form, in their order."""
_COMPLETION_NAMES = (
    "completion", "solution_str", "response", "model_output", "generation", "prediction", "output",
)  # fmt: skip
_ANSWER_NAMES = (
    "answer", "ground_truth", "label", "reference", "reference_answer", "gold", "target",
    "expected",
)  # fmt: skip
_QUESTION_NAMES = ("question", "prompt", "prompt_str", "query", "problem", "input")
ARGUMENT_OF = {
    **dict.fromkeys(_COMPLETION_NAMES, "completion"),
    **dict.fromkeys(_ANSWER_NAMES, "answer"),
    **dict.fromkeys(_QUESTION_NAMES, "question"),
}
"""Argument of AgileRL's form by its name there, in verl, OpenRLHF, verifiers and others."""
OTHER_ARGUMENTS = ("data_source", "extra_info", "state", "info", "parser", "metadata")
"""Arguments of other libraries without a counterpart; they are passed if they are columns."""
BATCH_NAMES = {
    "prompts", "completions", "completion_ids", "queries", "labels", "responses", "solutions",
    "answers", "questions", "data_sources", "solution_strs", "ground_truths", "extra_infos",
}  # fmt: skip
"""Arguments of functions that take many completions, in all libraries."""
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of TRL's form, in addition to the dataset's columns."""
REPLACED_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns of the dataset that arguments of TRL's form replace."""
ENVIRONMENTS = "environments"
"""Argument of TRL's form with the environment of each conversation."""
TRAINER_ARGUMENTS = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's form that the trainer provides. Worker processes get the first one."""
DEFAULT_REWARD_TIMEOUT: float | None = None
"""Default time limit of one call of a reward function, in seconds; None = no limit."""


class RewardError(ValueError):
    """A reward function raised, returned an invalid reward, took too long, or ended its process."""


def own_copy(value: Any, name: str) -> Any:
    """Return a deep copy of a value of a dataset row, so that user code cannot change the row.

    Args:
        value: The value. Text, numbers and None are returned as they are.
        name: Name of the column, for messages.

    Raises:
        RewardError: If the value cannot be copied, such as a lock or an open connection.
    """
    # Immutable values, which are nearly all, need no copy.
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
        environments: Environment of each conversation; None if there are none. Live objects, which
            worker processes do not get.
        trainer: Returns the arguments that the trainer provides to a call in TRL's form for these
            completions, in this process (False) or in a worker process (True).
    """

    rows: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    token_ids: Sequence[list[int]]
    groups: Sequence[Hashable] | None = None
    turns: Sequence[Sequence[str]] | None = None
    messages: Sequence[Sequence[Mapping[str, Any]]] | None = None
    environments: Sequence[Any] | None = None
    trainer: Callable[[Sequence[int], bool], Mapping[str, Any]] = lambda rows, in_worker: {}

    def completion(self, row: int) -> Any:
        """Return a completion in TRL's form: text, or messages if the prompt has messages."""
        if self.messages is not None:
            return own_copy(list(self.messages[row]), "completions")
        if isinstance(self.rows[row]["prompt"], str):
            return self.texts[row]
        # Completions have the form of prompts: a prompt of messages gets messages.
        if self.turns is None:
            return as_messages([self.texts[row]])
        return as_messages(self.turns[row])


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

    # ---- parameters

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """Signature of the function; None if it has none, such as some functions in C."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return None

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return {} if self.signature is None else self.signature.parameters

    @functools.cached_property
    def _takes_any(self) -> bool:
        """True if the function takes any keyword argument, as far as is known."""
        kinds = [parameter.kind for parameter in self._parameters.values()]
        return self.signature is None or inspect.Parameter.VAR_KEYWORD in kinds

    def _accepted(self, names: Iterable[str]) -> list[str]:
        """Return the names that the function accepts as keyword arguments."""
        if self._takes_any:
            return list(names)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = {name for name, each in self._parameters.items() if each.kind in by_name}
        return [name for name in names if name in known]

    def _accepts(self, /, *args: Any, **keywords: Any) -> bool:
        """Return True if the function can be called with these arguments."""
        try:
            if self.signature is not None:
                self.signature.bind(*args, **keywords)
        except TypeError:
            return False
        return True

    def _missing(self, available: Collection[str]) -> list[str]:
        """Return the parameters without a default that are not available."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [
            name
            for name, parameter in self._parameters.items()
            if parameter.default is parameter.empty and parameter.kind not in several
        ]
        return [name for name in required if name not in available]

    def keywords(self, columns: Collection[str]) -> dict[str, str] | None:
        """Return where the arguments of a function in AgileRL's form come from.

        A parameter gets the argument or the column of its name. One without a default may also have
        the name of an argument in another library.

        Args:
            columns: Columns of the dataset.

        Returns:
            "completion" or a column for each parameter that is passed by name; None if completion,
            answer and question are passed by position.
        """
        if self.signature is None:
            return None
        found: dict[str, str] = {}
        # By name: an argument of AgileRL's form or a column, or a known name of another library.
        for name in self._accepted(self._parameters):
            required = self._parameters[name].default is inspect.Parameter.empty
            if name in AGILERL_ARGUMENTS or name in columns:
                found[name] = name
            elif name in ARGUMENT_OF and required:
                found[name] = ARGUMENT_OF[name]
        # **keywords get the other arguments of AgileRL's form, but not all columns.
        if self._takes_any:
            others = [name for name in AGILERL_ARGUMENTS if name not in found.values()]
            found |= dict(zip(others, others, strict=True))
        # Names count only if the function gets the completion and all that it needs.
        if "completion" in found.values() and self._accepts(**dict.fromkeys(found)):
            return found
        return None

    def check(self, columns: Collection[str], where: str, *, in_worker: bool) -> None:
        """Check that the parameters of the function are available.

        Args:
            columns: Columns of the dataset.
            where: Name of the dataset in messages.
            in_worker: True if the function runs in a worker process.

        Raises:
            ValueError: If a parameter has no source, or its name contradicts its position.
        """
        if not self.batched:
            self._check_single(columns, where)
            return
        from_trainer: Sequence[str] = TRAINER_ARGUMENTS
        if in_worker:
            from_trainer = TRAINER_ARGUMENTS[:1]
        self._check_batched(columns, where, from_trainer)

    def _check_single(self, columns: Collection[str], where: str) -> None:
        """Check the parameters of a function in AgileRL's form."""
        if self.keywords(columns) is not None:
            return
        # By position, if no name says otherwise.
        fits = self._accepts(*AGILERL_ARGUMENTS)
        # A name that belongs to another position would get the wrong value in silence.
        for name, argument in zip(self._parameters, AGILERL_ARGUMENTS, strict=False):
            if name in OTHER_ARGUMENTS or name in BATCH_NAMES:
                fits = False
            if ARGUMENT_OF.get(name, argument) != argument:
                fits = False
        if fits:
            return
        message = (
            f"Reward function {self.name!r} must take (completion, answer, question), got"
            f" {self.signature}."
        )
        if BATCH_NAMES & self._parameters.keys():
            raise ValueError(
                f"{message} A function of several completions is passed as reward_funcs, or with"
                " form: trl in a configuration."
            )
        missing = self._missing([*columns, *ARGUMENT_OF])
        raise ValueError(
            f"{message}{_not_found(missing, columns, where)} Rename its parameters, or add columns."
        )

    def _check_batched(
        self, columns: Collection[str], where: str, from_trainer: Sequence[str]
    ) -> None:
        """Check the parameters of a function in TRL's form."""
        for column in columns:
            if not isinstance(column, str):
                raise ValueError(
                    f"Columns must have text as names, got {shown(column)}. Rename the column."
                )
        # As in TRL, columns are passed by name, except for those that other arguments replace.
        passed = [column for column in columns if column not in REPLACED_COLUMNS]
        offered = dict.fromkeys((*TRL_ARGUMENTS, *passed, *from_trainer))
        names = self._accepted(offered)
        if names and self._accepts(**dict.fromkeys(names)):
            return
        message = f"Reward function {self.name!r} takes {self.signature}."
        missing = self._missing(names)
        # A singular name is a sign of a function of one completion.
        if any(ARGUMENT_OF.get(name) == "completion" for name in missing):
            raise ValueError(
                f"{message} A function of one completion is passed as reward_fn, or with"
                " form: agilerl in a configuration."
            )
        arguments = ", ".join((*TRL_ARGUMENTS, *from_trainer, *sorted(passed)))
        raise ValueError(
            f"{message}{_not_found(missing, passed, where)} It is called by name with {arguments}."
            " Rename its parameters, or add a column."
        )

    def reads(self, name: str, columns: Collection[str]) -> bool:
        """Return True if a column is passed to a parameter of its name.

        Args:
            name: The column.
            columns: All columns of the dataset.
        """
        if name not in self._parameters:
            return False
        return self.batched or name in (self.keywords(columns) or {})

    # ---- calls

    def groups(self, inputs: RewardInputs, rows: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the completions of each call, in order: one, or in TRL's form one group."""
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            # In AgileRL's form every completion is a call of its own.
            key: Hashable = row
            if self.batched:
                key = None if inputs.groups is None else inputs.groups[row]
            groups.setdefault(key, []).append(row)
        return [tuple(group) for group in groups.values()]

    def arguments(self, inputs: RewardInputs, rows: Sequence[int], *, in_worker: bool) -> Call:
        """Return the arguments of a call for these completions.

        Each completion has its own copies of the values of its row.

        Raises:
            RewardError: If a value cannot be copied.
        """
        if self.batched:
            return (), self._batched_arguments(inputs, rows, in_worker=in_worker)
        (row,) = rows
        columns = inputs.rows[row]
        # Arguments by name, or the three of AgileRL's form by position.
        keywords = self.keywords(columns)
        sources: Iterable[str] = AGILERL_ARGUMENTS
        if keywords is not None:
            sources = keywords.values()
        values = []
        for source in sources:
            if source == "completion":
                values.append(inputs.texts[row])
            else:
                values.append(own_copy(columns[source], source))
        if keywords is None:
            return tuple(values), {}
        return (), dict(zip(keywords, values, strict=True))

    def _batched_arguments(
        self, inputs: RewardInputs, rows: Sequence[int], *, in_worker: bool
    ) -> dict[str, Any]:
        """Return everything that the function names, with one entry per completion in lists."""
        # 1. What is not a column of the dataset.
        available = {**inputs.trainer(rows, in_worker)}
        if inputs.environments is not None and not in_worker:
            available[ENVIRONMENTS] = [inputs.environments[row] for row in rows]
        # 2. Lists of the arguments that the function takes.
        columns = [name for name in inputs.rows[rows[0]] if name not in REPLACED_COLUMNS]
        arguments: dict[str, Any] = {}
        offered = dict.fromkeys((*TRL_ARGUMENTS, *columns, *available))
        for name in self._accepted(offered):
            if name in available:
                arguments[name] = available[name]
            elif name == "completions":
                arguments[name] = [inputs.completion(row) for row in rows]
            elif name == "completion_ids":
                arguments[name] = [list(inputs.token_ids[row]) for row in rows]
            else:
                column = "prompt" if name == "prompts" else name
                values = [inputs.rows[row][column] for row in rows]
                arguments[name] = [own_copy(value, column) for value in values]
        return arguments


def _not_found(missing: Sequence[str], columns: Collection[str], where: str) -> str:
    """Return a sentence about the first missing parameter; empty if none is missing."""
    if not missing:
        return ""
    match = close_match(missing[0], columns)
    question = "" if match is None else f" (did you mean {match!r}?)"
    among = f"among the columns {shown(list(columns), 200)} of {where}"
    return f" There is no argument {missing[0]!r}{question} {among}."


def as_messages(texts: Sequence[str]) -> list[dict[str, str]]:
    """Return alternating completions and replies as assistant and user messages."""
    messages = []
    for number, text in enumerate(texts):
        messages.append({"role": "user" if number % 2 else "assistant", "content": text})
    return messages


def make_rewards(
    reward_fn: RewardFn | Sequence[RewardFn] | None,
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    reward_weights: Weights | None,
) -> tuple[Reward, ...]:
    """Return the user's reward functions in one form.

    Args:
        reward_fn: AgileRL's form, one or several `f(completion, answer, question) -> float`, each
            called per completion. Arguments and columns are passed by name in any order, or these
            three by position in this order.
        reward_funcs: TRL's form, one or several `f(prompts=, completions=, completion_ids=,
            **columns)`, each called with the completions of one member to one prompt and those of
            these arguments that it takes. Returns one float or None (not applicable) per
            completion.
        reward_weights: One factor per function, or factors by name; 1 if not given.

    Raises:
        ValueError: If not exactly one form is used, a function is not callable, or the weights do
            not fit.
    """
    if (reward_fn is None) == (reward_funcs is None):
        raise ValueError(
            "Exactly one of reward_fn (AgileRL's form) and reward_funcs (TRL's form) must be set,"
            f" got {'none' if reward_fn is None else 'both'}."
        )
    if reward_fn is not None:
        return weighted_rewards("reward_fn", reward_fn, reward_weights, batched=False)
    return weighted_rewards("reward_funcs", reward_funcs, reward_weights, batched=True)


def weighted_rewards(
    argument: str, given: Any, weights: Weights | None, *, batched: bool
) -> tuple[Reward, ...]:
    """Return one or several functions with their weights.

    Args:
        argument: Name of the argument with the functions, for messages.
        given: A function or several ones.
        weights: One factor per function, or factors by name; 1 if not given.
        batched: True for TRL's form, False for AgileRL's.

    Raises:
        ValueError: If one is not a function, or the weights do not fit.
    """
    # 1. Name the functions. Those of the same name get a number.
    functions: list[Any] = [given]
    if isinstance(given, Sequence) and not isinstance(given, str):
        functions = list(given)
    if not functions:
        raise ValueError(f"{argument} must contain at least one function, got none.")
    named: dict[str, Any] = {}
    same_name: dict[str, list[str]] = {}
    for function in functions:
        base = _name(function)
        name = base
        numbers = itertools.count(len(named) + 1)
        while name in named:
            name = f"{base}_{next(numbers)}"
        named[name] = function
        same_name.setdefault(base, []).append(name)
    # 2. Read the weights.
    kind = "metric_weights" if argument == "metric" else "reward_weights"
    factors: Any = [1.0] * len(named) if weights is None else weights
    # Functions that are not named have the factor 1.
    if isinstance(factors, Mapping):
        refuse_unknown(f"function in {kind}", factors, named)
        for names in same_name.values():
            if 0 < sum(name in factors for name in names) < len(names):
                raise ValueError(
                    f"{kind} must have a weight for each of {', '.join(names)}, functions of one"
                    f" name that are numbered, got {shown(weights)}."
                )
        factors = [factors.get(name, 1.0) for name in named]
    factors = plain_list(factors)
    if factors is None or len(factors) != len(named):
        raise ValueError(
            f"{kind} must have one finite number for each of {', '.join(named)}, got"
            f" {shown(weights)}."
        )
    rewards = []
    for (name, function), factor in zip(named.items(), factors, strict=True):
        weight = float(finite_number(f"each of {kind}", factor))
        rewards.append(Reward(name=name, weight=weight, batched=batched, function=function))
    return tuple(rewards)


def _name(function: Any) -> str:
    """Return the name of a function; raise ValueError for any other object."""
    # A torch module is callable, but it would get texts.
    if not callable(function) or (hasattr(function, "forward") and hasattr(function, "parameters")):
        raise ValueError(
            f"A reward must be a function, got {shown(function)}. Wrap a model in a function."
        )
    # Partial functions have the name of the function inside.
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
