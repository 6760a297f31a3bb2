"""Completions tables: completions of each learning step with their rewards and advantages."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from evogrpo.reporting.step_records import Example
from evogrpo.storage.atomic_files import make_folder, replace_file

COMPLETIONS = "completions"
CompletionsFormat = Literal["jsonl", "parquet"]


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
