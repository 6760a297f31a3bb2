"""Datasets in the forms people have them in, as rows by number: data frames, arrow tables, several splits at once."""

from collections.abc import Mapping
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
        ValueError: If a split is given twice.
    """
    given: dict[Split, Any] = {"train": train, "validation": validation, "test": test}
    if isinstance(train, Mapping) and "train" in train:
        for split in SPLITS[1:]:
            if split in train and given[split] is not None:
                raise ValueError(
                    f"train_dataset holds a {split} split, and {split}_dataset is given as well: leave one of them out"
                )
        given |= {split: train[split] for split in SPLITS if split in train}
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
