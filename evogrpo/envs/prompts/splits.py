"""Three disjoint, deduplicated splits of prompt datasets: train, validation (selection) and test (reported once)."""

import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from evogrpo.envs.groups import SPLITS, Split
from evogrpo.randomness import generator

DEFAULT_SIZES: Mapping[Split, int] = {"validation": 64, "test": 256}


class Table(Protocol):
    """A prompt dataset: a `datasets.Dataset` or any sequence of mappings."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Any:
        """Return one row: a mapping of column names to values."""


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """How many rows of one split were left out, and why; each row counts once.

    Attributes:
        too_long: The prompt has more tokens than `max_prompt_length`.
        duplicates: An earlier row of the split has the same prompt.
        held_out: The prompt also occurs in a split that is kept apart (test, and for train also validation).
    """

    too_long: int = 0
    duplicates: int = 0
    held_out: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
    """The rows of one split that are used.

    Attributes:
        table: The dataset they come from.
        rows: Row number in `table` of each question.
        prompts: Token ids of the prompt of each question.
    """

    table: Table
    rows: Sequence[int]
    prompts: Sequence["array[int]"]

    def take(self, positions: Iterable[int]) -> "Questions":
        """Return the questions at the given positions, in that order."""
        chosen = list(positions)
        return replace(
            self, rows=[self.rows[position] for position in chosen], prompts=[self.prompts[p] for p in chosen]
        )


def check_table(table: object, columns: Sequence[str], name: str) -> None:
    """Refuse anything that is not a non-empty table with the given columns.

    Raises:
        ValueError: With the name of the argument, what was found and what to do.
    """
    if isinstance(table, Mapping):
        raise ValueError(f"{name} must be one split, got a mapping of {list(table)}: pass one of its values")
    if not hasattr(table, "__len__") or not hasattr(table, "__getitem__"):
        raise ValueError(
            f"{name} must have a length and rows by number (a datasets.Dataset or a list of mappings), "
            f"got {type(table).__name__}: turn a streamed dataset into a list first"
        )
    if len(table) == 0:
        raise ValueError(f"{name} must hold at least one row, got none")
    names = getattr(table, "column_names", None)
    present = list(table[0]) if names is None else list(names)
    missing = [column for column in columns if column not in present]
    if missing:
        raise ValueError(
            f"{name} must have the columns {list(columns)}, got {present}: rename columns to provide {missing} "
            "(reward_fn, or form: agilerl, reads question and answer; reward_funcs, or form: trl, read prompt)"
        )


def make_splits(
    tables: Mapping[Split, Table],
    tokens: Callable[[Split, Table], Sequence["array[int]"]],
    *,
    max_prompt_length: int | None,
    sizes: Mapping[Split, int | None],
    seed: int,
) -> tuple[dict[Split, Questions], dict[Split, Filtered]]:
    """Return train, validation and test questions that never share a prompt.

    Two rows are the same question when the model would read the same tokens. A prompt that occurs in several given
    datasets stays in test first, then in validation. A held-out split without a dataset is drawn from the training
    questions by a seeded shuffle: test before validation.

    Args:
        tables: The given datasets; "train" is required.
        tokens: Returns the prompt token ids of every row of a table.
        max_prompt_length: Longest prompt kept, in tokens; None keeps all.
        sizes: Questions to draw for a held-out split that is not given; None means 64 for validation and 256 for
            test, or a fifth of the training questions where that is fewer.
        seed: Seed of the draw.

    Returns:
        The questions and the counts of what was left out, per split.

    Raises:
        ValueError: If a split ends up empty.
    """
    splits: dict[Split, Questions] = {}
    filtered: dict[Split, Filtered] = {}
    kept_apart: set[bytes] = set()
    for split in (split for split in reversed(SPLITS) if split in tables):  # test first: it keeps what it shares
        table = tables[split]
        questions = Questions(table=table, rows=range(len(table)), prompts=tokens(split, table))
        splits[split], filtered[split] = _clean(questions, max_prompt_length, kept_apart)
        kept_apart.update(ids.tobytes() for ids in splits[split].prompts)
        if not splits[split].rows:
            raise ValueError(f"every row of {split}_dataset was left out ({filtered[split]}): nothing is left to use")
    total = len(splits["train"].rows)
    order = [int(position) for position in generator(seed, "splits").permutation(total)]
    for split in (split for split in reversed(SPLITS) if split not in tables):
        chosen = sizes[split]
        size = max(1, min(DEFAULT_SIZES[split], total // 5)) if chosen is None else chosen
        if not 1 <= size < len(order):
            raise ValueError(
                f"{split}_size must be at least 1 and less than the {len(order)} questions left in train, got {size}: "
                f"pass {split}_dataset, a smaller {split}_size or more training rows"
            )
        splits[split] = splits["train"].take(order[:size])
        filtered[split] = Filtered()
        order = order[size:]
    splits["train"] = splits["train"].take(sorted(order))
    _warn(filtered)
    return {split: splits[split] for split in SPLITS}, {split: filtered[split] for split in SPLITS}


def _clean(questions: Questions, max_prompt_length: int | None, kept_apart: set[bytes]) -> tuple[Questions, Filtered]:
    """Leave out prompts that are too long, kept apart, or seen before; `kept_apart` is only read."""
    counts = {"too_long": 0, "duplicates": 0, "held_out": 0}
    seen: set[bytes] = set()
    positions = []
    for position, ids in enumerate(questions.prompts):
        key = ids.tobytes()
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            counts["too_long"] += 1
        elif key in kept_apart:
            counts["held_out"] += 1
        elif key in seen:
            counts["duplicates"] += 1
        else:
            positions.append(position)
        seen.add(key)
    return questions.take(positions), Filtered(**counts)


def _warn(filtered: Mapping[Split, Filtered]) -> None:
    if all(counts == Filtered() for counts in filtered.values()):
        return
    parts = [
        f"{split}: {counts.too_long} too long, {counts.duplicates} duplicates, {counts.held_out} held out elsewhere"
        for split in SPLITS
        if (counts := filtered[split]) != Filtered()
    ]
    warnings.warn(f"rows were left out of the prompt datasets ({'; '.join(parts)})", UserWarning, stacklevel=5)
