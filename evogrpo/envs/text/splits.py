"""Three disjoint, deduplicated splits of prompt datasets: train, validation (selection) and test (reported once)."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from evogrpo.envs.fingerprint import canonical
from evogrpo.envs.protocol import SPLITS, Split
from evogrpo.warnings import warn

DEFAULT_SIZES: Mapping[Split, int] = {"validation": 64, "test": 256}
HELD_OUT_FRACTION = 0.2
"""Part of all questions that a held-out split is drawn from."""
RESERVE_FACTOR = 4
"""PromptSplit next in line for a held-out split are not trained on either, up to this many times its size."""


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
        reserve: Next in line for a held-out split that is drawn from train; see `make_splits`.
    """

    too_long: int = 0
    duplicates: int = 0
    held_out: int = 0
    reserve: int = 0

    def __str__(self) -> str:
        return f"{self.too_long} too long, {self.duplicates} duplicates, {self.held_out} held out elsewhere"


@dataclass(frozen=True)
class RowHashes:
    """What a row holds, as hashes.

    Attributes:
        asked: Of the question or prompt as the dataset has it, whatever template surrounds it.
        row: Of all its columns.
    """

    asked: bytes
    row: bytes

    @classmethod
    def of(cls, asked: object, row: Mapping[str, Any]) -> "RowHashes":
        """Hash a row."""
        texts = (canonical(part).encode("utf-8", "surrogatepass") for part in (asked, dict(row)))
        return cls(*(hashlib.sha256(text).digest()[:16] for text in texts))

    def place(self, seed: int) -> float:
        """Return where in [0, 1) the question stands: decided by what it asks and the seed alone."""
        return int.from_bytes(hashlib.sha256(f"{seed} ".encode() + self.asked).digest()[:6], "big") / 2**48


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """The prompts of a table, row by row.

    Attributes:
        prompts: Their token ids.
        contents: What the rows hold.
    """

    prompts: Sequence["array[int]"]
    contents: Sequence[RowHashes]


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptSplit:
    """The rows of one split that are used.

    Attributes:
        table: The dataset they come from.
        rows: Row number in `table` of each question.
        prompts: Token ids of the prompt of each question.
        contents: What each question asks, and its whole row: hashes by which it is known.
    """

    table: Table
    rows: Sequence[int]
    prompts: Sequence["array[int]"]
    contents: Sequence["RowHashes"]

    def take(self, positions: Iterable[int]) -> "PromptSplit":
        """Return the questions at the given positions, in that order."""
        chosen = list(positions)
        return replace(
            self,
            rows=[self.rows[position] for position in chosen],
            prompts=[self.prompts[position] for position in chosen],
            contents=[self.contents[position] for position in chosen],
        )


def make_splits(
    tables: Mapping[Split, Table],
    tokens: Callable[[Split, Table], Tokenized],
    *,
    max_prompt_length: int | None,
    sizes: Mapping[Split, int | None],
    seed: int,
) -> tuple[dict[Split, PromptSplit], dict[Split, Filtered]]:
    """Return train, validation and test questions that never share a prompt.

    Two rows are the same question when the model would read the same tokens. A prompt that occurs in several given
    datasets stays in test first, then in validation.

    A held-out split without a dataset is drawn from the training questions. A hash of each question and the seed gives
    it a position in [0, 1), independent of the rest of the dataset. Test takes the lowest positions below
    `HELD_OUT_FRACTION`, validation the highest positions above 1 - `HELD_OUT_FRACTION`. If these intervals hold more
    questions than needed, the outermost ones are held out. The next ones, up to `RESERVE_FACTOR` times the size, are
    left out of training too. When rows are added, no training question becomes a held-out question, and no held-out
    question a training question until the dataset has grown by `RESERVE_FACTOR`. For sizes beyond the intervals, the
    outermost questions of all are taken.

    Args:
        tables: The given datasets; "train" is required.
        tokens: Returns the prompts of every row of a table.
        max_prompt_length: Longest prompt kept, in tokens; None keeps all.
        sizes: PromptSplit to draw for a held-out split that is not given; None means 64 for validation and 256 for
            test, or what there is up to `HELD_OUT_FRACTION` where that is fewer, but at least one.
        seed: Seed of the draw.

    Returns:
        The questions and the counts of what was left out, per split.

    Raises:
        ValueError: If a split ends up empty.
    """
    splits: dict[Split, PromptSplit] = {}
    filtered: dict[Split, Filtered] = {}
    kept_apart: set[bytes] = set()
    for split in (split for split in reversed(SPLITS) if split in tables):  # test first: it keeps what it shares
        table = tables[split]
        read = tokens(split, table)
        questions = PromptSplit(table=table, rows=range(len(table)), prompts=read.prompts, contents=read.contents)
        splits[split], filtered[split] = _clean(questions, max_prompt_length, kept_apart)
        kept_apart.update(ids.tobytes() for ids in splits[split].prompts)
        if not splits[split].rows:
            raise ValueError(
                f"Every row of {split}_dataset was left out: {filtered[split]}. Raise max_prompt_length or add rows."
            )
    contents = splits["train"].contents
    left = {position: (content.place(seed), content.row) for position, content in enumerate(contents)}
    for split in (split for split in reversed(SPLITS) if split not in tables):
        chosen, reserve = _drawn(split, left, sizes[split])
        splits[split], filtered[split] = splits["train"].take(chosen), Filtered()
        filtered["train"] = replace(filtered["train"], reserve=filtered["train"].reserve + len(reserve))
        for position in (*chosen, *reserve):
            del left[position]
    splits["train"] = splits["train"].take(left)
    _warn(filtered)
    return {split: splits[split] for split in SPLITS}, {split: filtered[split] for split in SPLITS}


def _drawn(split: Split, left: Mapping[int, tuple[float, bytes]], size: int | None) -> tuple[list[int], list[int]]:
    """Return the positions of questions that a held-out split takes, and of those that are next in line for it."""
    depth = {position: (place if split == "test" else 1.0 - place, row) for position, (place, row) in left.items()}
    order = sorted(depth, key=lambda position: depth[position])
    near = sum(value < HELD_OUT_FRACTION for value, _ in depth.values())
    wanted = max(1, min(DEFAULT_SIZES[split], near)) if size is None else size
    if len(order) < 2:
        raise ValueError(
            f"{split} questions are drawn from train, where {len(order)} is left to hold out and to learn from: "
            f"give at least 3 different questions (hundreds, to learn something), or {split}_dataset"
        )
    if not 1 <= wanted < len(order):
        raise ValueError(
            f"{split}_size must be at least 1 and less than the {len(order)} questions left in train, got {wanted}: "
            f"pass {split}_dataset, a smaller {split}_size or more training rows"
        )
    # However few there are, half of the others stay.
    reserved = min(near - wanted, (RESERVE_FACTOR - 1) * wanted, (len(order) - wanted) // 2)
    return order[:wanted], order[wanted : wanted + max(0, reserved)]


def _clean(
    questions: PromptSplit, max_prompt_length: int | None, kept_apart: set[bytes]
) -> tuple[PromptSplit, Filtered]:
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
    told = {split: replace(counts, reserve=0) for split, counts in filtered.items()}  # what is wrong with rows
    if all(counts == Filtered() for counts in told.values()):
        return
    parts = [f"{split}: {counts}" for split in SPLITS if (counts := told[split]) != Filtered()]
    warn(f"rows were left out of the prompt datasets ({'; '.join(parts)})")
