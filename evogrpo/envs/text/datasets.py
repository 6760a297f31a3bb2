"""Prompt datasets: tables, and their disjoint splits for training, fitness and the final report."""

import hashlib
import inspect
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from evogrpo.envs.fingerprint import canonical
from evogrpo.envs.protocol import SPLITS, TEST_SIZE, VALIDATION_SIZE, Split
from evogrpo.envs.text.templates import numbered
from evogrpo.synonyms import close_match, counterpart
from evogrpo.text import pluralize, shown
from evogrpo.warnings import warn

AnyTable = Any
"""A `datasets.Dataset`, a pandas or polars data frame, a pyarrow table, or any sequence of
mappings.
"""


def tables_by_split(train: Any, validation: Any, test: Any) -> dict[Split, Any]:
    """Return the dataset of each split as a sequence of rows; None where there is none.

    Args:
        train: A dataset, or a mapping of splits to datasets, such as a `datasets.DatasetDict`.
        validation: A dataset or None.
        test: A dataset or None.

    Raises:
        ValueError: If a split is passed twice, or there is no training dataset.
    """
    tables: dict[Split, Any] = {"train": train, "validation": validation, "test": test}
    # A mapping of splits, such as a `datasets.DatasetDict`.
    if isinstance(train, Mapping) and "train" in train:
        for split in SPLITS[1:]:
            if split in train and tables[split] is not None:
                raise ValueError(
                    f"train_dataset contains a {split} split, and {split}_dataset is set. Remove"
                    " one."
                )
        tables |= {split: train[split] for split in SPLITS if split in train}
        # A split under another name would otherwise be ignored in silence.
        if unused := [name for name in train if name not in SPLITS]:
            warn(
                f"train_dataset has parts that are not used: {shown(unused, 200)}. Rename them to"
                f" {', '.join(SPLITS)}."
            )
    if tables["train"] is None:
        raise ValueError(
            "train_dataset must be given: rows such as [{'question': ..., 'answer': ...}], got"
            " None."
        )
    for split in SPLITS[1:]:
        if is_stream(tables[split]):  # held-out questions are used again and again
            tables[split] = list(tables[split])
    return {split: _rows(table) for split, table in tables.items()}


def is_stream(table: Any) -> bool:
    """Return True for a dataset without a length, such as a `datasets.IterableDataset`."""
    return hasattr(table, "take") and hasattr(table, "__iter__") and not hasattr(table, "__len__")


def first_row(table: Any) -> Mapping[str, Any]:
    """Return the first row of a training dataset in any form; an empty one if it has none."""
    row: Any = None
    with suppress(Exception):  # objects of a user may raise any; `check_table` refuses them
        if isinstance(table, Mapping):
            table = table["train"]
        if hasattr(table, "head"):  # a data frame
            table = _rows(table.head(1))
        elif hasattr(table, "slice"):  # an arrow table
            table = _rows(table.slice(0, 1))
        row = next(iter(table))
    return row if isinstance(row, Mapping) else {}


def _rows(table: Any) -> Any:
    """Return data frames and arrow tables as rows of plain values, other tables unchanged."""
    if hasattr(table, "iloc") and hasattr(table, "columns"):  # pandas, with NaN for missing values
        check_column_names(list(table.columns), "a data frame")
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        return [_plain(row) for row in rows]
    # Frames and arrow tables are recognised by their methods, so none of them is imported.
    if hasattr(table, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(table, "to_pylist") and hasattr(table, "schema"):  # pyarrow
        check_column_names(table.schema.names, "an arrow table")
        return table.to_pylist()
    # A datasets.Dataset may return tensors, arrays or frames. "custom" is a function of the user,
    # which stays in use.
    form = getattr(table, "format", None)
    if isinstance(form, Mapping) and form.get("type") not in (None, "custom"):
        return table.with_format(None, columns=form["columns"])
    return table


def _plain(value: Any) -> Any:
    """Return a value with lists in place of arrays, which data frames contain."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def check_column_names(names: Sequence[Any], where: str) -> None:
    """Raise ValueError if two columns have the same name: only one of them would be read."""
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ValueError(
                f"Columns of {where} must have different names, got {shown(name)} twice."
                " Rename one."
            )


def check_table(table: AnyTable, columns: Sequence[str], name: str) -> list[str]:
    """Check that a dataset is a non-empty table with the required columns in all rows.

    Return all its columns.

    Raises:
        ValueError: If it is not.
    """
    # 1. Check the type.
    indexed = hasattr(table, "__getitem__")
    try:
        len(table)
    except Exception:  # noqa: BLE001 - raised by an object of a user
        indexed = False
    if not indexed or isinstance(table, str | bytes | Mapping):
        received = shown(table)
        if isinstance(table, Mapping):
            received = f"a mapping of {shown(list(table))} without train"
        advice = ""
        if isinstance(table, Iterator) or inspect.isgeneratorfunction(table):
            advice = " Pass a list, or datasets.IterableDataset.from_generator(function)."
        raise ValueError(
            f"{name} must be a list of mappings, a data frame or a datasets.Dataset, got"
            f" {received}.{advice}"
        )
    if len(table) == 0:
        raise ValueError(f"{name} must contain at least one row, got none.")
    # 2. Check each row of a list; a `datasets.Dataset` has the same columns in all rows.
    names = getattr(table, "column_names", None)
    unchecked = range(len(table))
    if names is not None:
        unchecked = range(0)
    for number in unchecked:
        row = table[number]
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{numbered(number, name)} must be a mapping with {list(columns)}, got"
                f" {shown(row)}."
            )
        if set(row) != set(table[0]):
            raise ValueError(
                f"{numbered(number, name)} must have the columns {list(table[0])}, got {list(row)}."
            )
    # 3. Check the columns: names of a `datasets.Dataset`, otherwise those of the first row.
    present = list(table[0]) if names is None else list(names)
    missing = [column for column in columns if column not in present]
    if missing:
        raise ValueError(
            f"{name} must have the columns {list(columns)}, got {shown(present, 200)}. Missing:"
            f" {missing}. {_how_to_name(missing, present, columns)}"
        )
    return present


def check_row(row: Mapping[str, Any], columns: Sequence[str], row_name: str) -> None:
    """Raise ValueError if a required column of a row has no value, or bytes."""
    for name in columns:
        value = row[name]
        if isinstance(value, bytes | bytearray):
            raise ValueError(f"{row_name} must have text as {name}, got bytes. Decode it first.")
        # Data frames have NaN for missing values. Answers may be empty.
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        blank = isinstance(value, str) and not value.strip()
        is_empty_answer = name == "answer" and value == ""
        if missing or (blank and not is_empty_answer):
            raise ValueError(f"{row_name} has no {name}, got {shown(value)}. Remove the row.")


def _how_to_name(missing: Sequence[str], present: Sequence[Any], columns: Sequence[str]) -> str:
    """Return a sentence about the columns to rename, or how to name them."""
    for given in ("messages", "conversations"):
        if given in present:
            return (
                f"Rename {given} to prompt, without the last answer, and use reward_funcs (in a"
                " configuration form: trl). An answer in a column of its own is passed to them."
            )
    renamed = []
    names = [str(given) for given in present if given not in columns]
    for column in missing:
        # Names of other libraries, then similar ones.
        known = [given for given in names if counterpart(given, [column])]
        known += filter(None, [close_match(column, names)])
        if known:
            renamed.append(f"{shown(known[0], 40)} to {column!r}")
        elif "prompt" in present:
            return (
                "With a column prompt, use reward_funcs (in a configuration form: trl): they get"
                " all other columns."
            )
        else:
            return "The first line of a CSV file must name them."
    return f"Rename {' and '.join(renamed)}."


DEFAULT_SIZES: Mapping[Split, int] = {"validation": VALIDATION_SIZE, "test": TEST_SIZE}
HELD_OUT_FRACTION = 0.2
"""Fraction of all questions that a held-out split is drawn from."""


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """Number of rows of one split that were left out, by reason. Each row counts once.

    Attributes:
        too_long: The prompt has more tokens than `max_prompt_length`.
        duplicates: An earlier row of the split has the same prompt and the same other columns.
        held_out: The prompt also occurs in a split with priority (test, then validation).
    """

    too_long: int = 0
    duplicates: int = 0
    held_out: int = 0

    def __str__(self) -> str:
        return (
            f"{self.too_long} too long, {self.duplicates} duplicates, {self.held_out} held out"
            " elsewhere"
        )

    def __add__(self, other: "Filtered") -> "Filtered":
        """Return the numbers of rows of both."""
        return Filtered(
            too_long=self.too_long + other.too_long,
            duplicates=self.duplicates + other.duplicates,
            held_out=self.held_out + other.held_out,
        )


@dataclass(frozen=True)
class RowHashes:
    """Hashes of a row.

    Attributes:
        question: Hash of the question or prompt in the dataset, before templates.
        row: Hash of all columns.
    """

    question: bytes
    row: bytes

    @classmethod
    def of(cls, question: object, row: Mapping[str, Any]) -> "RowHashes":
        """Hash a row."""
        return cls(_hash(canonical(question)), _hash(canonical(dict(row))))

    def position(self, seed: int) -> float:
        """Return a position in [0, 1) that depends on the question and the seed alone."""
        # 48 bits of a hash of seed and question, as a fraction.
        salted = f"{seed} ".encode() + self.question
        digest = hashlib.sha256(salted).digest()
        return int.from_bytes(digest[:6], "big") / 2**48


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptSplit:
    """Rows of one split.

    Attributes:
        table: The dataset.
        rows: Row number in `table` of each prompt.
        prompts: Token ids of each prompt.
        hashes: Hashes of each row.
        whole_rows: True if rows with equal prompts and different other columns are different
            questions.
    """

    table: AnyTable
    rows: Sequence[int]
    prompts: Sequence["array[int]"]
    hashes: Sequence[RowHashes]
    whole_rows: bool = False

    @property
    def keys(self) -> list[bytes]:
        """Keys of the prompts; two rows are the same question if their keys are equal."""
        if self.whole_rows:
            return self.row_keys
        # Bytes of the token ids: equal prompts after templates are one question.
        return [ids.tobytes() for ids in self.prompts]

    @property
    def row_keys(self) -> list[bytes]:
        """Keys of the prompts with their other columns, such as the answer."""
        pairs = zip(self.prompts, self.hashes, strict=True)
        return [ids.tobytes() + hashes.row for ids, hashes in pairs]

    def take(self, positions: Iterable[int]) -> "PromptSplit":
        """Return the prompts at these positions, in this order."""
        rows = []
        prompts = []
        hashes = []
        for position in positions:
            rows.append(self.rows[position])
            prompts.append(self.prompts[position])
            hashes.append(self.hashes[position])
        return replace(self, rows=rows, prompts=prompts, hashes=hashes)


def make_splits(
    tables: Mapping[Split, PromptSplit],
    *,
    max_prompt_length: int | None,
    sizes: Mapping[Split, int | None],
    seed: int,
) -> tuple[dict[Split, PromptSplit], dict[Split, Filtered]]:
    """Return train, validation and test splits that share no prompt.

    Two rows are the same question if their prompts have the same tokens. A prompt that occurs in
    several datasets stays in test, or else in validation. Rows of one question that differ in other
    columns, such as the answer, are kept within a split, but never in two splits.

    A held-out split without a dataset is drawn from the training questions. A hash of each question
    and the seed gives it a position in [0, 1), independent of the rest of the dataset. Test takes
    the lowest positions below `HELD_OUT_FRACTION`, validation the highest positions above 1 -
    `HELD_OUT_FRACTION`. If these intervals hold more questions than needed, the outermost ones are
    held out. When rows are added, no training question becomes a held-out question. For sizes
    beyond the intervals, the outermost questions of all are taken.

    Args:
        tables: All rows of each given dataset, tokenized; "train" is required.
        max_prompt_length: Maximum number of prompt tokens; None = no limit.
        sizes: Number of rows to draw for a held-out split without a dataset; None means
            `DEFAULT_SIZES`, or the number in the split's interval if that is fewer, but at least
            two if there are enough questions.
        seed: Seed of the draw.

    Returns:
        The splits, and the counts of rows that were left out.

    Raises:
        ValueError: If a split is empty.
    """
    splits: dict[Split, PromptSplit] = {}
    filtered: dict[Split, Filtered] = {}
    held_out_prompts: set[bytes] = set()
    # 1. Given datasets; test comes first and keeps the prompts that it shares with others.
    drawn: list[Split] = []
    for split in reversed(SPLITS):
        if split not in tables:
            drawn.append(split)
            continue
        table = tables[split]
        splits[split], filtered[split] = _clean(table, max_prompt_length, held_out_prompts)
        held_out_prompts.update(splits[split].keys)
        if not splits[split].rows:
            limit = ""
            if filtered[split].too_long:
                limit = f" (max_prompt_length={max_prompt_length})"
            raise ValueError(
                f"Every row of {split}_dataset was left out: {filtered[split]}{limit}. Add other"
                " rows."
            )
    # 2. Held-out splits without a dataset, drawn from train.
    train = splits["train"]
    keys = train.keys
    if len(set(keys)) <= len(drawn):
        datasets = " and ".join(f"{split}_dataset" for split in drawn)
        raise ValueError(
            f"train_dataset has {pluralize(len(set(keys)), 'question')} ({filtered['train']}), too"
            f" few to draw other splits. Add rows, or pass {datasets}."
        )
    remaining = {}
    for number, hashes in enumerate(train.hashes):
        remaining[number] = (hashes.position(seed), hashes.row)
    for num_drawn, split in enumerate(drawn):
        # Every split that is still missing, and train, need at least one question.
        num_questions = len({keys[number] for number in remaining})
        most = num_questions - (len(drawn) - num_drawn)
        chosen = _draw(split, remaining, sizes[split], most=most)
        splits[split] = train.take(chosen)
        filtered[split] = Filtered()
        # No question is in two splits: rows of a chosen question that are not chosen are left out.
        held_out = {keys[number] for number in chosen}
        taken = [number for number in remaining if keys[number] in held_out]
        for number in taken:
            del remaining[number]
        filtered["train"] += Filtered(held_out=len(taken) - len(chosen))
    splits["train"] = train.take(remaining)
    # 3. Warn of left-out rows.
    parts = [f"{split}: {filtered[split]}" for split in SPLITS if filtered[split] != Filtered()]
    if parts:
        warn(f"rows were left out of the prompt datasets ({'; '.join(parts)})")
    in_order = {split: splits[split] for split in SPLITS}
    return in_order, {split: filtered[split] for split in SPLITS}


def _draw(
    split: Split, remaining: Mapping[int, tuple[float, bytes]], size: int | None, *, most: int
) -> list[int]:
    """Return the rows of a held-out split, at most `most`.

    Args:
        split: "test" or "validation".
        remaining: Position in [0, 1) and hash of each row that is in no split yet.
        size: Number of rows; None = the default.
        most: Maximum number of rows.

    Raises:
        ValueError: If `size` is not in [1, most].
    """
    # 1. Order the rows by their distance from the split's end of [0, 1). Rows of one question have
    #    equal distances; their content decides, not the order of the dataset.
    depth = {}
    for number, (position, row_hash) in remaining.items():
        distance = position if split == "test" else 1.0 - position
        depth[number] = (distance, row_hash)
    order = sorted(depth, key=lambda number: depth[number])
    # 2. The first ones are held out.
    count = size
    if count is None:
        candidates = sum(distance < HELD_OUT_FRACTION for distance, _ in depth.values())
        at_most_default = min(DEFAULT_SIZES[split], candidates)
        count = min(most, max(2, at_most_default))
    if not 1 <= count <= most:
        raise ValueError(
            f"{split}_size must be in [1, {most}], got {count}. Pass {split}_dataset or more rows."
        )
    return order[:count]


def extend_train(
    splits: Mapping[Split, PromptSplit], rows: PromptSplit, max_prompt_length: int | None
) -> tuple[PromptSplit, Filtered]:
    """Return the training split with further rows of its table, and the counts of left-out rows.

    Rows are left out for the same reasons as in `make_splits`.
    """
    train = splits["train"]
    held_out = set[bytes]()
    for split in SPLITS[1:]:
        held_out.update(splits[split].keys)
    new, filtered = _clean(rows, max_prompt_length, held_out, set(train.row_keys))
    extended = replace(
        train,
        rows=[*train.rows, *new.rows],
        prompts=[*train.prompts, *new.prompts],
        hashes=[*train.hashes, *new.hashes],
    )
    return extended, filtered


def _clean(
    questions: PromptSplit,
    max_prompt_length: int | None,
    held_out_prompts: set[bytes],
    known_rows: Iterable[bytes] = (),
) -> tuple[PromptSplit, Filtered]:
    """Leave out prompts that are too long, in `held_out_prompts`, or duplicates.

    Rows whose keys are in `known_rows` are duplicates too.
    """
    counts = {"too_long": 0, "duplicates": 0, "held_out": 0}
    seen = set(known_rows)
    positions = []
    rows = zip(questions.prompts, questions.keys, questions.row_keys, strict=True)
    for position, (ids, key, row_key) in enumerate(rows):
        # Each row counts once, for the first reason.
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            counts["too_long"] += 1
        elif key in held_out_prompts:
            counts["held_out"] += 1
        elif row_key in seen:
            counts["duplicates"] += 1
        else:
            positions.append(position)
        seen.add(row_key)
    return questions.take(positions), Filtered(**counts)
