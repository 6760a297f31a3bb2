"""Dataset files: sources of questions in a configuration, and their rows."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from evogrpo.envs.protocol import SPLITS, Split
from evogrpo.envs.text.datasets import check_column_names
from evogrpo.envs.text.templates import numbered
from evogrpo.extras import require
from evogrpo.safe_parsing import unique_keys
from evogrpo.synonyms import close_match
from evogrpo.text import class_name, one_line, pluralize, shown
from evogrpo.training.configuration.sections import DATASET_SUFFIXES
from evogrpo.validation import PositiveInt, Text, settings

_MAX_FILES = 5  # in a message


@settings
class DatasetFiles:
    """Source of questions: files, a dataset of the Hugging Face hub, or a number of starts.

    A held-out split that is not given is drawn from the training split.

    Attributes:
        train: Training file; with `hub`, the name of a split, by default "train".
        validation: Validation file or split, or null.
        test: Test file or split, or null.
        hub: Id of a dataset, such as openai/gsm8k, or a local folder that `datasets.load_dataset`
            reads.
        subset: Configuration of the dataset, such as main.
        revision: Branch, tag or commit of the dataset.
        streaming: Read a dataset of the hub as far as it is needed, in its order. Held-out splits
            that are not given are its first rows.
        starts: Number of starts, instead of a dataset, of an environment that chooses its task in
            `reset`.
    """

    train: Text | None = None
    validation: Text | None = None
    test: Text | None = None
    hub: Text | None = None
    subset: Text | None = None
    revision: Text | None = None
    streaming: bool = False
    starts: PositiveInt | None = None

    def __post_init__(self) -> None:
        # Exactly one source, whose files are not addresses.
        others = [self.train, self.validation, self.test, self.hub]
        if self.starts is not None and any(others):
            raise ValueError(
                "starts cannot be combined with train, validation, test or hub. Remove starts or"
                " the others."
            )
        if self.hub is None and self.train is None and self.starts is None:
            raise ValueError(
                "a dataset needs a source. Give train with a file, or hub with the id of a dataset."
            )
        for split in SPLITS:
            name = getattr(self, split)
            if name is not None and "://" in name:
                raise ValueError(
                    f"{split} must be a file, got the address {shown(name)}. Download it, or give"
                    " hub."
                )
        for name in ("subset", "revision", "streaming"):
            if self.hub is None and getattr(self, name):
                raise ValueError(
                    f"{name} requires hub. Give hub, the id of a dataset or a folder of files, or"
                    f" remove {name}."
                )

    @property
    def label(self) -> str:
        """Short description of the source."""
        if self.starts is not None:
            return pluralize(self.starts, "start")
        if self.hub is None:
            return Path(self.train or "").name
        if self.subset is None:
            return self.hub
        return f"{self.hub} {self.subset}"

    def tables(self) -> dict[Split, Any]:
        """Return the rows of every split, or the number of starts.

        Raise ValueError if a split cannot be read, or the package `datasets` is missing.
        """
        tables: dict[Split, Any] = {"train": self.starts, "validation": None, "test": None}
        for split in SPLITS:
            name = getattr(self, split)
            if self.hub is not None and split == "train":
                name = name or "train"
            if name is None:
                continue
            if self.hub is None:
                tables[split] = read_rows(Path(name))
                continue
            require(f"The dataset {self.hub!r} of the hub", "datasets")
            from datasets import load_dataset

            try:
                tables[split] = load_dataset(
                    self.hub,
                    self.subset,
                    split=name,
                    revision=self.revision,
                    streaming=self.streaming,
                )
            except Exception as error:  # the hub, the network or a file may raise anything
                raise ValueError(
                    f"cannot read split {name!r} of the dataset {self.label}: {class_name(error)}:"
                    f" {one_line(error)}. Check the names and the network connection."
                ) from error
        return tables


def read_rows(path: Path) -> Sequence[Any]:
    """Read a dataset file: one mapping of columns per row.

    Args:
        path: A .jsonl or .json file (a list of objects, or one object per line), a .csv or .tsv
            file (all values are text), or a .parquet file, which needs the extra `datasets`.

    Raises:
        ValueError: If the file is missing, has another type, or has content that does not match its
            suffix.
    """
    # 1. Check the suffix, and that the file exists.
    suffix = path.suffix.lower()
    if suffix not in DATASET_SUFFIXES:
        advice = ""
        if suffix == "":
            advice = " Give a folder or a dataset of the hub as dataset.hub."
        elif suffix in (".gz", ".zip"):
            advice = " Unpack it."
        raise ValueError(
            f"A dataset file must end in {', '.join(DATASET_SUFFIXES)}, got {path}.{advice}"
        )
    if not path.is_file():
        raise ValueError(
            f"cannot read the dataset {path}, there is no such file. {_similar_files(path)}"
        )
    # 2. Read it in the format of its suffix.
    if suffix == ".parquet":
        require(f"Reading {path}", "datasets")
        from datasets import Dataset

        try:
            table: Sequence[Any] = Dataset.from_parquet(str(path))
        except Exception as error:  # several libraries may raise anything
            raise ValueError(f"{path} is not a valid .parquet file: {error}") from error
        return table
    try:
        # With or without a byte order mark.
        with path.open(encoding="utf-8-sig", newline="") as file:
            if suffix in (".csv", ".tsv"):
                rows = _read_table(file, path)
            else:
                rows = _read_json(file, path)
    except OSError as error:
        raise ValueError(
            f"cannot read the dataset {path}: {error.strerror or error}. Check the file."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8 ({error}). Save it in UTF-8.") from error
    except csv.Error as error:
        raise ValueError(
            f"{path} is not a valid CSV file: {error}. Check its quotes and line ends."
        ) from error
    # 3. Check that each row is a mapping.
    if not isinstance(rows, list):
        received = class_name(rows)
        if isinstance(rows, dict):
            received = f"one object with the keys {shown(list(rows), 100)}"
        raise ValueError(
            f"{path} must contain a list of objects, one per row, or an object on each line, got"
            f" {received}."
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f"{numbered(number, str(path))} must be an object with columns, got {shown(row)}."
            )
    return rows


def _similar_files(path: Path) -> str:
    """Suggest a similar file, or list the files of the folder."""
    files = sorted(
        each.name for each in path.parent.glob("*") if each.suffix.lower() in DATASET_SUFFIXES
    )
    match = close_match(path.name, files)
    if match is not None:
        return f"Did you mean {match}?"
    if files:
        others = " and others" if len(files) > _MAX_FILES else ""
        return f"{path.parent} has {', '.join(files[:_MAX_FILES])}{others}."
    return (
        "Paths in a configuration are relative to its folder, those in overrides to the working"
        " directory."
    )


def _read_table(file: TextIO, path: Path) -> list[Any]:
    """Read the rows of a .csv or .tsv file."""
    # Only the first line is needed to find the delimiter.
    heading = file.readline()
    file.seek(0)
    csv.field_size_limit(2**31 - 1)

    def columns(delimiter: str) -> int:
        return len(next(csv.reader([heading], delimiter=delimiter), []))

    # The delimiter is the one that gives the most columns.
    reader = csv.DictReader(file, delimiter=max(",;\t", key=columns))
    check_column_names(reader.fieldnames or [], str(path))
    rows = []
    for row in reader:
        # Surplus values have the key None, and missing ones are None.
        if None in row or None in row.values():
            raise ValueError(
                f"Line {reader.line_num} of {path} must have one value for each of the"
                f" {len(reader.fieldnames or [])} columns. Check its quotes and separators."
            )
        rows.append(row)
    return rows


def _read_json(file: TextIO, path: Path) -> Any:
    """Read a .json or .jsonl file: a list of objects, or one object per line."""
    heading = file.readline()
    file.seek(0)
    is_jsonl = path.suffix.lower() == ".jsonl"
    # A .json file may hold one object per line, and the reverse.
    if heading.lstrip().startswith("[") or not (is_jsonl or _is_object(heading)):
        return parse_json(file.read(), str(path))
    rows = []
    for number, line in enumerate(file, 1):
        if line.strip():
            rows.append(parse_json(line, f"line {number} of {path}"))
    # A single object of a .json file is not a row: it may hold the rows under one of its keys. The
    # caller refuses it.
    if len(rows) == 1 and not is_jsonl:
        return rows[0]
    return rows


def _is_object(text: str) -> bool:
    """Return True if a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def parse_json(text: str, source: str) -> Any:
    """Return the value of a JSON text, or raise ValueError with its source."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    # Invalid JSON, repeated keys and huge integers; deep nesting.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
