"""What TRL offers to reward functions beside prompts and columns: the trainer's state, and somewhere to log to."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

TAKEN = ("slot", "index")
"""What stands beside metrics in a journal."""


@dataclass(kw_only=True)
class Advance:
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
class Logged:
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
        if str(name) in TAKEN:
            raise ValueError(f"log_metric takes any name but {', '.join(TAKEN)}, got {name!r}: choose another one")
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"log_metric takes a finite number, got {value!r:.80} for {name!r:.80}")
        self.values.setdefault(str(name), []).append(float(value))

    def offered(self, pace: Advance, *, here: bool) -> Mapping[str, Any]:
        """Return the arguments; in another process there is nowhere to log to."""
        if not here:
            return {"trainer_state": pace.state(plain=True)}
        return {
            "trainer_state": pace.state(plain=False),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }


Part = tuple[Sequence[int], Logged]
"""Numbers of completions, and what was logged about them."""


def whole_columns(parts: Sequence[Part], count: int) -> dict[str, tuple[Any, ...]]:
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


def means(parts: Sequence[Part]) -> dict[str, float]:
    """Return the mean of each metric: a number counts as often as there are completions that it is about."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for _, logged in parts for name in logged.values):
        told = [(len(rows), value) for rows, logged in parts for value in logged.values.get(name, ())]
        most = max(weight for weight, _ in told)
        weights = [weight / most for weight, _ in told]
        found[name] = math.fsum(w * value for w, (_, value) in zip(weights, told, strict=True)) / math.fsum(weights)
    return found
