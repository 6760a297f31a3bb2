"""Exports of a run beside its journal: completions tables, and scalars for TensorBoard."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from evogrpo.reporting.records import Example, MemberReport, StepReport
from evogrpo.storage.atomic_files import make_folder, replace_file
from evogrpo.training.configuration.sections import CompletionsFormat

COMPLETIONS = "completions"


class CompletionsLog:
    """Writer of completions tables, one file per learning step.

    Columns: step, index (of the member), prompt (the question alone), completion, reward (total), advantage (mean over
    the completion's actions), truncated, rewards/<function> before its weight, and values logged by `log_extra`. null =
    missing.

    Args:
        folder: Folder of the files; created with the first one.
        limit: Completions per step; 0 = write nothing.
        form: "jsonl", with non-ASCII characters escaped, or "parquet".
    """

    def __init__(self, folder: Path, *, limit: int = 16, form: CompletionsFormat = "jsonl") -> None:
        self.limit = limit
        self._folder, self._form = folder, form

    def write(self, step: int, examples: Sequence[Example]) -> None:
        """Write the table of one step atomically; a repeated step overwrites its own."""
        if not self.limit or not examples:
            return
        make_folder(self._folder)
        rows = [_row(example) for example in examples[: self.limit]]
        content = _parquet(rows) if self._form == "parquet" else _jsonl(rows)
        replace_file(self._folder / f"step-{step:06d}.{self._form}", content)


def _row(example: Example) -> dict[str, Any]:
    """Return one row: step and index first, then the other fields, rewards and logged values, which replace none."""
    fields = dict(vars(example))
    rewards, logged = fields.pop("rewards"), fields.pop("columns")
    row = {"step": example.step, "index": example.index, **fields}
    row |= {f"rewards/{name}": value for name, value in rewards.items()}
    return row | {name: value for name, value in logged.items() if name not in row}


def _jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    # ASCII only, so that control characters of a completion cannot affect a terminal that shows the file.
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).replace("\x7f", "\\u007f").encode()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a parquet file. Each logged column has its own type, or text if no type fits all of its values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        # Rewards and advantages are floats in every file, even where all of them are missing.
        is_float = name in ("reward", "advantage") or name.startswith("rewards/")
        try:
            columns[name] = pa.array(values, type=pa.float64() if is_float else None)
        # Mixed types, integers beyond 64 bits, or lone surrogates, which UTF-8 cannot encode.
        except (pa.ArrowException, OverflowError, UnicodeError):
            texts = [None if value is None else str(value).encode("utf-8", "replace").decode() for value in values]
            columns[name] = pa.array(texts, type=pa.string())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


EARNED = ("fitness", "reward")
"""Metrics with a best and a mean; each has one chart with all its curves under "custom scalars"."""


def step_curves(report: StepReport) -> dict[str, float]:
    """Return scalars of a learning step by tag: metrics by slot, tokens per second, seconds by phase and rank."""
    speed = {"tokens_per_second": report.tokens / report.seconds} if report.seconds else {}
    seconds = {f"seconds/{phase}": value for phase, value in report.phases.items()}
    waiting = {f"seconds/waiting_{rank}": value for rank, value in enumerate(report.waiting)}
    return {**scalars({slot: each.metrics for slot, each in report.learned.items()}), **speed, **seconds, **waiting}


def scalars(members: Mapping[int, Mapping[str, float | None]]) -> dict[str, float]:
    """Return scalars by tag.

    Args:
        members: Metrics of each member, by slot; None = not finite.
    """
    curves = {
        f"{name}/slot_{slot}": value
        for slot, each in members.items()
        for name, value in each.items()
        if value is not None
    }
    for name in EARNED:
        values = [value for each in members.values() if (value := each.get(name)) is not None]
        if values:
            curves |= {f"{name}/best": max(values), f"{name}/mean": sum(values) / len(values)}
    return curves


def generation_curves(members: Sequence[MemberReport], evolving: Collection[str]) -> dict[str, float]:
    """Return scalars of an evaluation by tag: fitness by every measure, its cost, and hyperparameters.

    Args:
        members: Reports of the members.
        evolving: Names of the evolving hyperparameters. Others are included if members differ in them.
    """
    values = {member.slot: member.hyperparameters.to_json() for member in members}
    first = next(iter(values.values()), {})
    shown = [name for name in first if name in evolving or any(own[name] != first[name] for own in values.values())]
    curves: dict[int, dict[str, float | None]] = {}
    for member in members:
        numbers = {name: own for name in shown if not isinstance(own := values[member.slot][name], str)}
        others = {f"measured_{name}": each.mean for name, each in member.measured.items()}
        cost = {} if member.evaluation is None else {"evaluation_cost": float(member.evaluation.tokens)}
        curves[member.slot] = {"fitness": member.fitness, **others, **cost, **numbers}
    return scalars(curves)


def layout() -> dict[str, dict[str, list[object]]]:
    """Return the layout of TensorBoard's custom charts."""
    return {"population": {name: ["Multiline", [f"^{name}/"]] for name in EARNED}}
