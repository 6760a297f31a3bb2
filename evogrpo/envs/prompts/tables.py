"""Datasets in the forms people have them in, as rows by number: data frames, arrow tables, several splits at once."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from evogrpo.envs.groups import SPLITS, Split

AnyTable = Any
"""A `datasets.Dataset`, a data frame of pandas or polars, a table of pyarrow, or any sequence of mappings."""


def split_tables(train: Any, validation: Any, test: Any) -> dict[Split, Any]:
    """Return the dataset of each split, as rows by number; None where it is not given.

    Args:
        train: A dataset, or several by the name of their split, such as a `datasets.DatasetDict`.
        validation: A dataset or None.
        test: Likewise.

    Raises:
        ValueError: If a split is given twice, or there is no training dataset.
    """
    given: dict[Split, Any] = {"train": train, "validation": validation, "test": test}
    if isinstance(train, Mapping) and "train" in train:
        for split in SPLITS[1:]:
            if split in train and given[split] is not None:
                raise ValueError(
                    f"train_dataset holds a {split} split, and {split}_dataset is given as well: leave one of them out"
                )
        given |= {split: train[split] for split in SPLITS if split in train}
    if given["train"] is None:
        raise ValueError("train_dataset must be given: rows such as [{'question': ..., 'answer': ...}], got None.")
    return {split: _rows(table) for split, table in given.items()}


def _rows(table: Any) -> Any:
    """Return a data frame or an arrow table as rows with plain values; anything else as it is."""
    if hasattr(table, "iloc") and hasattr(table, "notna"):  # pandas, where what is missing is NaN
        return [_plain(row) for row in table.astype(object).where(table.notna(), None).to_dict("records")]
    if hasattr(table, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(table, "to_pylist"):  # pyarrow
        return table.to_pylist()
    form = getattr(table, "format", None)
    if isinstance(form, Mapping) and form.get("type") not in (None, "custom"):
        # A datasets.Dataset that hands out its rows as tensors, arrays or frames.
        return table.with_format(None, columns=form["columns"])
    return table


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def check_table(table: object, columns: Sequence[str], name: str) -> list[str]:
    """Refuse anything that is not a non-empty table with the given columns; return all that it has.

    Raises:
        ValueError: With the name of the argument, what was found and what to do.
    """
    if isinstance(table, str | bytes | PathLike):
        raise ValueError(
            f"{name} must be rows, got {table!r}: read a file first, JSON lines by [json.loads(line) for line in "
            "open(path)], a CSV file by list(csv.DictReader(open(path))) or pandas.read_csv(path)"
        )
    if isinstance(table, Mapping):
        if set(columns) <= set(table):
            remedy = "make rows of its columns, by datasets.Dataset.from_dict or pandas.DataFrame"
        else:
            remedy = "pass one of its values (train_dataset also takes a mapping of splits with the key train)"
        raise ValueError(f"{name} must be one split, row by row, got a mapping of {list(table)}: {remedy}")
    if not hasattr(table, "__len__") or not hasattr(table, "__getitem__"):
        raise ValueError(
            f"{name} must have a length and rows by number (a datasets.Dataset or a list of mappings), "
            f"got {type(table).__name__}: turn a streamed dataset into a list first"
        )
    if len(table) == 0:
        raise ValueError(f"{name} must hold at least one row, got none")
    names = getattr(table, "column_names", None)
    if names is None and not isinstance(table[0], Mapping):
        raise ValueError(
            f"{name} must have a mapping of columns in every row, got {table[0]!r:.80} in row 0: write "
            f"{{{', '.join(f'{column!r}: ...' for column in columns)}}}"
        )
    present = list(table[0]) if names is None else list(names)
    missing = [column for column in columns if column not in present]
    if missing:
        raise ValueError(
            f"{name} must have the columns {list(columns)}, got {present!s:.200}. Rename columns to provide "
            f"{missing}; the first line of a CSV file must name them."
        )
    return present
