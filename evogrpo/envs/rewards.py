"""Reward functions of the user: how they are called, checked, and combined into one reward per completion."""

import functools
import inspect
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

OnRewardError = Literal["raise", "exclude"]
RewardFn = Callable[[str, Any, Any], float]
RewardFunc = Callable[..., Sequence[float | None]]

F = TypeVar("F", bound=Callable[..., Any])

_TRL_OWN = ("prompt", "completion", "completion_ids")


class RewardError(ValueError):
    """A reward function raised, or returned something that is no reward."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What reward functions may see, one entry per completion.

    Attributes:
        rows: Dataset row that each completion answers.
        texts: Decoded completions.
        token_ids: Token ids of the completions, without padding.
    """

    rows: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    token_ids: Sequence[list[int]]

    def only(self, position: int) -> "Answers":
        """Return the answers with a single completion left."""
        row = slice(position, position + 1)
        return replace(self, rows=self.rows[row], texts=self.texts[row], token_ids=self.token_ids[row])


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward function.

    Attributes:
        name: What it is called in reports.
        weight: Its factor in the sum.
        batched: Whether one call takes all completions.
        call: Values of the given answers, one per completion, unchecked.
    """

    name: str
    weight: float
    batched: bool
    call: Callable[[Answers], Any]


def make_rewards(
    reward_fn: RewardFn | None,
    reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
    reward_weights: Sequence[float] | None,
) -> tuple[Reward, ...]:
    """Return the reward functions in one form.

    Args:
        reward_fn: AgileRL's form, `reward_fn(completion, answer, question) -> float`, called per completion.
        reward_funcs: TRL's form, one or several `f(prompts=, completions=, completion_ids=, **columns)` that return
            one float or None (not applicable) per completion, each called once with all completions.
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
        call = functools.partial(_call_agilerl, _checked(reward_fn))
        return (Reward(name=_name(reward_fn), weight=1.0, batched=False, call=call),)
    assert reward_funcs is not None
    functions: list[RewardFunc] = list(reward_funcs) if isinstance(reward_funcs, Sequence) else [reward_funcs]
    if not functions:
        raise ValueError("reward_funcs must hold at least one function, got none")
    weights = [1.0] * len(functions) if reward_weights is None else [float(weight) for weight in reward_weights]
    if len(weights) != len(functions) or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"reward_weights must be {len(functions)} finite numbers, one per function, got {weights}")
    made: dict[str, Reward] = {}
    for weight, function in zip(weights, functions, strict=True):
        base = name = _name(_checked(function))
        while name in made:
            name = f"{base}_{len(made) + 1}"
        made[name] = Reward(name=name, weight=weight, batched=True, call=functools.partial(_call_trl, function))
    return tuple(made.values())


def evaluate(
    rewards: Sequence[Reward], answers: Answers, on_error: OnRewardError
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return the weighted sum of the reward functions, and each function's values.

    Args:
        rewards: The reward functions.
        answers: The n completions and what they answer.
        on_error: "raise", or "exclude": a completion whose reward fails gets NaN, with one warning per call.

    Returns:
        Rewards [n], NaN where no function applies or the completion is excluded, and unweighted values [n] per name.

    Raises:
        RewardError: If a function returns the wrong number of values; and, where on_error is "raise", if it raises or
            returns something other than a finite number or None. Shows the function and the (escaped) completion.
    """
    components: dict[str, NDArray[np.float64]] = {}
    failures: dict[int, RewardError] = {}
    for reward in rewards:
        components[reward.name], failed = _evaluate_one(reward, answers, on_error)
        failures.update(failed)
    values = np.stack(list(components.values()))
    weights = np.array([reward.weight for reward in rewards])[:, None]
    total = np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(weights * values, axis=0))
    total[list(failures)] = np.nan
    if failures:
        first = failures[min(failures)]
        warnings.warn(f"{len(failures)} of {len(total)} completions excluded; the first: {first}", stacklevel=2)
    return total, components


def _evaluate_one(
    reward: Reward, answers: Answers, on_error: OnRewardError
) -> tuple[NDArray[np.float64], dict[int, RewardError]]:
    count = len(answers.texts)
    outcomes = _outcomes(reward, answers, stop_at_first=on_error == "raise")
    values = np.full(count, np.nan)
    failures: dict[int, RewardError] = {}
    for position, outcome in enumerate(outcomes):
        try:
            values[position] = _number(reward.name, outcome, answers.texts[position])
        except RewardError as error:
            if on_error == "raise":
                raise
            failures[position] = error
    return values, failures


def _outcomes(reward: Reward, answers: Answers, *, stop_at_first: bool) -> list[Any]:
    """Return one value, or the exception that stands in for it, per completion."""
    whole = _attempt(reward, answers) if reward.batched else None
    if isinstance(whole, list):
        return whole
    outcomes: list[Any] = []
    failed = False
    # A failed batched call is repeated row by row, which finds the completion that is to blame.
    for position in range(len(answers.texts)):
        outcome = _attempt(reward, answers.only(position))
        outcomes += outcome if isinstance(outcome, list) else [outcome]
        failed = failed or isinstance(outcome, Exception)
        if failed and stop_at_first:
            break
    if whole is not None and not failed:
        raise _raised(reward.name, whole, answers.texts[0], note=" (with all completions; alone, none fails)")
    return outcomes


def _attempt(reward: Reward, answers: Answers) -> list[Any] | Exception:
    try:
        values = reward.call(answers)
    except Exception as error:  # noqa: BLE001 (the user's code: anything may come out of it)
        return error
    return _listed(reward.name, values, len(answers.texts))


def _number(name: str, value: Any, text: str) -> float:
    if isinstance(value, Exception):
        raise _raised(name, value, text)
    if value is None:
        return math.nan
    if hasattr(value, "tolist"):  # numpy and torch scalars
        value = value.tolist()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"reward function {name!r} must return numbers or None, got {_shown(value)} "
            f"for the completion {_shown(text)}"
        )
    if not math.isfinite(value):
        raise RewardError(
            f"reward function {name!r} must return finite numbers, got {float(value)} for the completion "
            f"{_shown(text)}: return None where it does not apply"
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


def _raised(name: str, error: Exception, text: str, note: str = "") -> RewardError:
    raised = RewardError(
        f"reward function {name!r} raised {type(error).__name__}: {_shown(str(error))}{note} "
        f"for the completion {_shown(text)}"
    )
    raised.__cause__ = error
    return raised


def _shown(value: object) -> str:
    """Return a short repr in which control codes are escaped: completions are untrusted text."""
    if isinstance(value, str) and len(value) > 240:
        return f"{value[:160]!r} ... {value[-60:]!r}"
    return f"{value!r:.240}"


def _call_agilerl(function: RewardFn, answers: Answers) -> list[Any]:
    rows = zip(answers.texts, answers.rows, strict=True)
    return [function(text, row["answer"], row["question"]) for text, row in rows]


def _call_trl(function: RewardFunc, answers: Answers) -> Any:
    prompts = [row["prompt"] for row in answers.rows]
    completions: list[Any] = list(answers.texts)
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in answers.texts]
    columns = {key: [row[key] for row in answers.rows] for key in answers.rows[0] if key not in _TRL_OWN}
    return function(prompts=prompts, completions=completions, completion_ids=list(answers.token_ids), **columns)


def _checked(function: F) -> F:
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"a reward function must be a plain (not async) function, got {function!r:.200}")
    return function


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
