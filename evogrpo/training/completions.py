"""Completions tables: completions of each learning step with their rewards and advantages."""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from evogrpo.config.checks import whole_between
from evogrpo.reporting.step_records import Example
from evogrpo.storage.atomic_files import make_folder, replace_file
from evogrpo.text import extra_command

if TYPE_CHECKING:  # a configuration is checked before torch is imported
    from evogrpo.algorithms.rollout.requests import RolloutBatch
    from evogrpo.data import LearnReport

COMPLETIONS = "completions"
CompletionsFormat = Literal["jsonl", "parquet"]


def select_examples(
    collected: "RolloutBatch", indices: Mapping[int, int], learned: "Mapping[int, LearnReport]", *, step: int, most: int
) -> tuple[Example, ...]:
    """Return the first completions of each member in a learning step, equally many of each.

    Args:
        collected: The training batch.
        indices: Member index by slot.
        learned: Reports of the learning step, by slot.
        step: Number of the step.
        most: Total number; every member gets at least one.

    Returns:
        Examples in slot order; those of a member in the order they were sampled, so groups stay together.
    """
    if not collected.questions:
        return ()  # not a task in words
    share, rest = divmod(max(most, len(indices)), len(indices))
    slots = collected.member_ids.tolist()
    prompt_ids = collected.start_ids.tolist()
    examples = []
    for number, (slot, index) in enumerate(indices.items()):
        own = [row for row, owner in enumerate(slots) if owner == slot]
        for place, row in enumerate(own[: share + (number < rest)]):
            examples.append(
                Example(
                    prompt=collected.questions[prompt_ids[row]],
                    completion=collected.scores.completions[row],
                    reward=_number(collected.scores.rewards[row]),
                    index=index,
                    step=step,
                    rewards={name: _number(values[row]) for name, values in collected.scores.components.items()},
                    advantage=_number(learned[slot].advantages[place]),
                    truncated=bool(collected.truncated[row]),
                    columns={name: _plain(values[row]) for name, values in collected.scores.columns.items()},
                )
            )
    return tuple(examples)


def _plain(value: Any) -> bool | int | float | str | None:
    """Convert a value that a reward function logged to a number, a text or None."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class CompletionsLog:
    """Writer of completions tables, one file per learning step.

    Columns: step, index (of the member), prompt (the question alone), completion, reward (total), advantage (mean over
    the completion's actions), truncated, rewards/<function> before its weight, and values logged by `log_extra`. null =
    missing.

    Args:
        folder: Folder of the files; created with the first one.
        most: Completions per step; 0 = write nothing.
        form: "jsonl", with non-ASCII characters escaped, or "parquet".
    """

    def __init__(self, folder: Path, *, most: int = 16, form: CompletionsFormat = "jsonl") -> None:
        self.most = most
        self._folder, self._form = folder, form

    def write(self, step: int, examples: Sequence[Example]) -> None:
        """Write the table of one step atomically; a repeated step overwrites its own."""
        if not self.most or not examples:
            return
        make_folder(self._folder)
        rows = [_row(example) for example in examples[: self.most]]
        content = _parquet(rows) if self._form == "parquet" else _jsonl(rows)
        replace_file(self._folder / f"step-{step:06d}.{self._form}", content)


def check_completions(most: int, form: str) -> int:
    """Return the validated number of completions; raise ValueError for a bad number, format or missing package."""
    number = whole_between("completions", most, 0)
    if form not in get_args(CompletionsFormat):
        raise ValueError(f"completions_format must be one of {', '.join(get_args(CompletionsFormat))}, got {form!r}")
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"completions_format parquet needs the package pyarrow: {extra_command('datasets')}")
    return number


def _row(example: Example) -> dict[str, Any]:
    values = {name: value for name, value in vars(example).items() if name not in ("rewards", "columns")}
    order = ("step", "index", "prompt", "completion", "reward", "advantage", "truncated")
    return {
        **{name: values[name] for name in order},
        **{f"rewards/{name}": value for name, value in example.rewards.items()},
        **{name: value for name, value in example.columns.items() if name not in order},
    }


def _jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    # ASCII only, so that control characters of a completion cannot affect a terminal that shows the file.
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).replace("\x7f", "\\u007f").encode()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"step": pa.int64(), "index": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
    kinds |= {"truncated": pa.bool_()}
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(value, str) for value in values):
            kinds.setdefault(name, pa.string())
            values = [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]
        columns[name] = pa.array(values, type=kinds.get(name, pa.float64()))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())
