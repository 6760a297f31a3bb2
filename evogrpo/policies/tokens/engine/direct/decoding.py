"""Writing rows token by token with the direct pass: prompts' keys are read once for all rows."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.policies.tokens.engine.cache import Context, Prefix
from evogrpo.policies.tokens.engine.direct.attention import Keys, Shared, attended_once, in_runs, of_prompts
from evogrpo.policies.tokens.engine.direct.columns import ColumnPasses
from evogrpo.policies.tokens.engine.direct.passes import DirectPasses
from evogrpo.policies.tokens.engine.direct.reading import Layer
from evogrpo.policies.tokens.weights.weights import Route

LEAST_ROOM = 16  # tokens; beyond that a cache grows by a quarter


class DirectDecoding:
    """Decoding on top of prompts that have been run; see `evogrpo.policies.tokens.engine.token_model.Decoding`.

    Attention reads all the room that there is for a row's own keys, what is not filled yet masked: a part of it would
    be copied for each product.

    Args:
        passes: The model's.
        prefix: The prompts.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        room: Most tokens that are fed back.
        route: Directs rows to weights.
    """

    def __init__(
        self,
        passes: DirectPasses,
        prefix: Prefix,
        rows: Tensor,
        slots: Tensor,
        room: int,
        route: Route,
    ) -> None:
        self._passes, self._route, self._slots = passes, route, slots
        self._windows = {layer.window for layer in passes.parts.layers}
        self._first = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._past, self._length, self._most = prefix.mask.shape[1], 0, room
        self._prompts = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in prefix.layers]
        heads, width = passes.parts.heads[0], passes.parts.width
        self._own = [[keys.new_empty((heads, len(rows), 0, width)) for _ in range(2)] for keys, _ in prefix.layers]
        self._continue(rows)

    def _continue(self, rows: Tensor) -> None:
        """Note which prompt each row continues, and forget prompts that none does."""
        order, runs = in_runs(rows, self._prompts[0][0].shape[1])
        if order is not None:
            self._prompts = [(keys[:, order], values[:, order]) for keys, values in self._prompts]
        counts = torch.tensor(runs, device=rows.device)
        self._rows = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts)
        self._shared = [of_prompts(Shared(*prompts, self._rows, runs)) for prompts in self._prompts]
        self._columns = ColumnPasses(self._passes, self._route(self._slots))
        self._positions = self._mask.sum(1)
        self._look()

    def _look(self) -> None:
        """Find what is added to scores `[n, 1, P + room]`: padding of prompts, and room not filled, are not seen."""
        room = self._own[0][0].shape[2]
        seen = pad(self._mask, (0, room))
        seen[:, self._past : self._past + self._length] = True
        bias = torch.zeros(seen.shape, dtype=self._own[0][0].dtype, device=seen.device)
        self._seen = bias.masked_fill_(~seen, self._lowest)[:, None]
        self._places = torch.arange(seen.shape[1], device=seen.device)

    @property
    def _lowest(self) -> float:
        return torch.finfo(self._own[0][0].dtype).min / 2  # as in `passes.Biases`

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._first

    def advance(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row."""
        room, at = self._own[0][0].shape[2], self._length
        if at == room:
            self._move(None, min(self._most, room + max(LEAST_ROOM, room // 4)))
            self._look()
        self._length += 1
        place = self._past + at
        self._seen[:, :, place] = 0.0
        seen = {window: self._near(window, place) for window in self._windows}

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._own[number]
            keys[:, :, at], values[:, :, at] = k.mT, v.mT
            own = Keys(slice(None), keys.flatten(0, 1).mT, values.flatten(0, 1))
            return attended_once(q, own, self._shared[number], seen[layer.window])

        return self._columns.through(tokens, self._positions + at, attend)

    def _near(self, window: int | None, place: int) -> Tensor:
        """Return what is added to scores of a token at a place where only the nearest are seen; None = all are."""
        return self._seen if window is None else self._seen.masked_fill(self._places <= place - window, self._lowest)

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone, or with several copies of some."""
        self._move(rows, self._own[0][0].shape[2])
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._continue(self._rows[rows])

    def _move(self, rows: Tensor | None, room: int) -> None:
        """Move the keys and values of some rows, or all, to where there is so much room; layer by layer to save it."""
        for parts in self._own:
            for number, part in enumerate(parts):
                parts[number] = _moved(part, rows, self._length, room)

    def set_aside(self, rows: Tensor, real: Tensor) -> Context:
        """Return the keys and values of some rows, what is not theirs masked."""
        mask = torch.cat([self._mask[rows], real], dim=1)
        layers = tuple(
            tuple(
                torch.cat([past[:, self._rows[rows]], own[:, rows, : self._length]], 2).transpose(0, 1)
                for past, own in zip(prompts, parts, strict=True)
            )
            for prompts, parts in zip(self._prompts, self._own, strict=True)
        )
        return Context(layers=layers, mask=mask).tightened()  # type: ignore[arg-type]  # pairs


def _moved(part: Tensor, rows: Tensor | None, length: int, room: int) -> Tensor:
    """Return some rows, or all, of `[kv, n, ., d]` with `length` places filled, and 0 in what room is left."""
    kept = part.new_zeros((part.shape[0], part.shape[1] if rows is None else len(rows), room, part.shape[3]))
    kept[:, :, :length] = part[:, :, :length] if rows is None else part[:, rows, :length]
    return kept
