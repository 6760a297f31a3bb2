"""What members have computed while writing, for a learning step under the same weights to read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Stamp = tuple[int, int]
"""Which weights tokens were run under: slot and count of changes."""
Written = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A row: slot, prompt and what was written."""


class Known(NamedTuple):
    """What a linear layer put out for the tokens of a pass, its adapters included.

    Attributes:
        whole: `[., out]` of all tokens recorded.
        places: `[m]` where those of the pass are.
    """

    whole: Tensor
    places: Tensor

    def copied(self, rows: slice = slice(None)) -> Tensor:
        """Return a copy `[m, out]`, or of some of its rows."""
        return self.whole.index_select(0, self.places[rows])

    def stood_for(self) -> Tensor:
        """Return something of the shape `[m, out]` that takes no memory, for gradients to go by."""
        return self.whole.new_zeros(1).expand(len(self.places), self.whole.shape[1])


Given = Callable[[str], Known]
"""Dotted name of a linear layer -> what it put out for the tokens of a pass."""


class PassRecording:
    """What linear layers and the vocabulary head put out, token by token.

    Every token that passes run has a number, and so has every one whose logits were found. The memory stays taken when
    what is in it is forgotten, for what is recorded next: taking it anew is what would cost the most time.

    Args:
        changes: Tells the count of changes of a slot's weights: of what these have become since nothing is found here.

    Attributes:
        tokens: How many tokens have been numbered.
        open: Whether anything is recorded at all: no longer once memory has run out.
    """

    def __init__(self, changes: Callable[[int], int]) -> None:
        self._changes = changes
        self._made = dict[str, _Growing]()
        self._logits = _Growing()
        self._prompts = dict[tuple[Stamp, tuple[int, ...]], Tensor]()
        self._rows = dict[tuple[Stamp, tuple[int, ...], tuple[int, ...]], tuple[Tensor, Tensor]]()
        self._wave = _Wave.empty(0, 0, torch.device("cpu"))
        self._first = self.tokens = self._choices = 0
        self.open = True

    def forget(self) -> None:
        """Begin again: nothing that was recorded is found any more."""
        self._prompts.clear()
        self._rows.clear()
        self._first = self.tokens = self._choices = 0

    def close(self) -> None:
        """Forget everything, give back the memory and record nothing any more."""
        self.forget()
        self._made, self._logits, self.open = {}, _Growing(), False

    def _stamp(self, slot: int) -> Stamp:
        return slot, self._changes(slot)

    # ---- while rows are written

    def run(self, tokens: int) -> int:
        """Number the tokens of the pass that follows, and return the first one's number."""
        self._first, self.tokens = self.tokens, self.tokens + tokens
        return self._first

    def keep(self, layers: Sequence[tuple[str, nn.Module]], made: Sequence[Tensor]) -> None:
        """Keep what layers that read one input have made of the tokens of the latest pass, each `[m, out]`."""
        for (name, _), out in zip(layers, made, strict=True):
            self._made.setdefault(name, _Growing()).put(self._first, out)

    def keep_logits(self, logits: Tensor) -> None:
        """Keep logits `[m, v]`, of as many tokens that are about to be chosen."""
        self._logits.put(self._choices, logits)
        self._choices += len(logits)

    def read(self, slots: Sequence[int], prompts: Sequence[tuple[int, ...]], places: Sequence[Sequence[int]]) -> None:
        """Note the numbers of the tokens of prompts."""
        for slot, prompt, own in zip(slots, prompts, places, strict=True):
            self._prompts[self._stamp(slot), prompt] = torch.tensor(own)

    def begin(self, rows: int, width: int, device: torch.device) -> None:
        """Begin with a wave of rows of up to so many tokens."""
        self._wave = _Wave.empty(rows, width, device)

    def feed(self, rows: Tensor, at: int, run: int, run_as: Tensor) -> None:
        """Number the tokens of the pass that follows, which runs token `at` of these rows of the wave.

        Args:
            rows: `[c]` which.
            at: Which of their tokens.
            run: How many tokens the pass has.
            run_as: `[c]` which of these is each row's.
        """
        self._wave.fed[rows, at] = self.run(run) + run_as

    def chosen(self, rows: Tensor, at: int, run: int, run_as: Tensor) -> None:
        """Note that token `at` of these rows was chosen from the latest logits, of so many tokens; see `feed`."""
        self._wave.chosen[rows, at] = self._choices - run + run_as

    def end(self, written: Sequence[Written]) -> None:
        """Note what the rows of the wave have become."""
        fed, chosen = self._wave.fed.cpu(), self._wave.chosen.cpu()
        for number, (slot, prompt, tokens) in enumerate(written):
            self._rows[self._stamp(slot), prompt, tokens] = fed[number], chosen[number]

    # ---- while members learn

    def recall(self, prompts: Sequence[tuple[int, tuple[int, ...]]], rows: Sequence[Written]) -> "Recalled | None":
        """Return what was recorded of a pass, or None where it was not of all of it, or weights have changed since.

        Args:
            prompts: Slot and tokens of each prompt.
            rows: Those that continue them.
        """
        try:
            of_prompts = [self._prompts[self._stamp(slot), prompt] for slot, prompt in prompts]
            of_rows = [self._rows[self._stamp(slot), prompt, tokens] for slot, prompt, tokens in rows]
        except KeyError:
            return None
        fed, chosen = (pad_sequence(list(places), batch_first=True) for places in zip(*of_rows, strict=True))
        logits = self._logits.whole if self._choices else None
        return Recalled(made=self._made, logits=logits, prompts=of_prompts, fed=fed, chosen=chosen)


class _Growing:
    """Rows that are written one after another, into memory that grows by a half where there is too little."""

    def __init__(self) -> None:
        self.whole = torch.empty(0)

    def put(self, first: int, rows: Tensor) -> None:
        """Write rows `[m, w]` from number `first` on; all before that have been written."""
        end = first + len(rows)
        if end > len(self.whole):
            grown = rows.new_empty((max(end, first + first // 2), rows.shape[1]))
            if first:
                grown[:first] = self.whole[:first]
            self.whole = grown
        # Most lie column by column: torch copies such with one thread, and multiplies them with all.
        torch.mul(rows, 1.0, out=self.whole[first:end])


@dataclass(frozen=True, kw_only=True, eq=False)
class _Wave:
    """Rows that are being written: numbers `[n, t]` of their tokens, as run and as chosen from logits; 0 = none."""

    fed: Tensor
    chosen: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> "_Wave":
        fed, chosen = (torch.zeros((rows, width), dtype=torch.long, device=device) for _ in range(2))
        return cls(fed=fed, chosen=chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recalled:
    """What was recorded of one pass.

    Attributes:
        made: By the dotted name of a linear layer, `[., out]` of all tokens recorded.
        logits: `[., v]` of all tokens recorded; None = of none.
        prompts: Numbers of the tokens of each prompt.
        fed: `[n, t]` those of each row; any number where a token was not run.
        chosen: `[n, t]` numbers of the logits that each token was chosen from.
    """

    made: dict[str, _Growing]
    logits: Tensor | None
    prompts: list[Tensor]
    fed: Tensor
    chosen: Tensor

    def given(self, places: Tensor) -> Given:
        """Return what gives layers' outputs for tokens of these numbers `[m]`."""

        def known(name: str) -> Known:
            whole = self.made[name].whole
            return Known(whole, places.to(whole.device))

        return known

    def logits_of(self, places: Tensor) -> Callable[[slice], Tensor] | None:
        """Return what gives copies of some of the logits of these numbers `[k]`; None where none were recorded.

        The next ones overwrite those before, and are of no more rows than the first.
        """
        if self.logits is None:
            return None
        known, room = Known(self.logits, places.to(self.logits.device)), list[Tensor]()

        def logits(part: slice) -> Tensor:
            if not room:
                room.append(known.copied(part))
                return room[0]
            own = known.places[part]
            return torch.index_select(known.whole, 0, own, out=room[0][: len(own)])

        return logits


def left_padded(places: Sequence[Tensor]) -> Tensor:
    """Return numbers of the tokens of sequences that are padded on the left, `[m, t]`; 0 where there is padding."""
    return pad_sequence([own.flip(0) for own in places], batch_first=True).flip(1)
