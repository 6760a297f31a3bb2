"""What has been said and heard in conversations with an environment, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

from evogrpo.outline import outline


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """One conversation so far, without its prompt.

    Attributes:
        row: Its number among the conversations of one opening: a name under which an environment may keep what it
            needs between turns.
        start: Position of its start among those that were opened.
        said: Each completion so far: the sampled token ids without padding; a final EOS is included.
        heard: What the environment replied to each of them, one fewer than `said` while no reply has followed the last.

    Raises:
        ValueError: If nothing was said, or completions and replies do not take turns.
    """

    row: int
    start: int
    said: tuple[tuple[int, ...], ...]
    heard: tuple[tuple[int, ...], ...] = ()

    __repr__ = outline

    def __post_init__(self) -> None:
        if not self.said or len(self.said) - len(self.heard) not in (0, 1):
            raise ValueError(
                "completions and replies take turns, beginning with a completion, got "
                f"{len(self.said)} completions and {len(self.heard)} replies"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything after the prompt, in order."""
        return tuple(token for part in self.turns for token in part)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each of `tokens` whether it was said (True) or heard."""
        return tuple(number % 2 == 0 for number, part in enumerate(self.turns) for _ in part)

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Completions and replies in order: said, heard, said and so on."""
        return tuple(part for pair in zip(self.said, (*self.heard, ()), strict=False) for part in pair)[
            : len(self.said) + len(self.heard)
        ]


def in_one_turn(starts: Sequence[int], completions: Sequence[Sequence[int]]) -> tuple[Transcript, ...]:
    """Return conversations of one completion each, numbered in the order given.

    Args:
        starts: For each of the n conversations, the position of its start among those that were opened.
        completions: What was said in each.

    Raises:
        ValueError: If the two differ in length.
    """
    if len(starts) != len(completions):
        raise ValueError(f"every completion has one start, got {len(starts)} starts for {len(completions)} completions")
    return tuple(
        Transcript(row=row, start=int(start), said=(tuple(map(int, completion)),))
        for row, (start, completion) in enumerate(zip(starts, completions, strict=True))
    )
