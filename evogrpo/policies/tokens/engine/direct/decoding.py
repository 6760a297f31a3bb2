"""Writing rows token by token with the direct pass: prompts' keys are read once for all rows."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.policies.tokens.engine.cache import Context, Prefix
from evogrpo.policies.tokens.engine.direct.attention import Shared, attended, in_runs
from evogrpo.policies.tokens.engine.direct.passes import Biases, DirectPasses
from evogrpo.policies.tokens.engine.direct.reading import Layer
from evogrpo.policies.tokens.weights.weights import Route


class DirectDecoding:
    """Decoding on top of prompts that have been run; see `evogrpo.policies.tokens.engine.token_model.Decoding`.

    Args:
        passes: The model's.
        prefix: The prompts.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        room: Most tokens that are fed back.
        route: Directs rows to weights.
    """

    def __init__(
        self, passes: DirectPasses, prefix: Prefix, rows: Tensor, slots: Tensor, room: int, route: Route
    ) -> None:
        self._passes, self._route, self._slots = passes, route, slots
        self._first = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._past, self._length = prefix.mask.shape[1], 0
        self._prompts = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in prefix.layers]
        heads, width = passes.parts.heads[0], passes.parts.width
        self._own = [
            tuple(keys.new_empty((heads, len(rows), room, width)) for _ in range(2)) for keys, _ in prefix.layers
        ]
        self._view = route(slots)
        self._continue(rows)

    def _continue(self, rows: Tensor) -> None:
        """Note which prompt each row continues, and forget prompts that none does."""
        order, self._runs = in_runs(rows, self._prompts[0][0].shape[1])
        if order is not None:
            self._prompts = [(keys[:, order], values[:, order]) for keys, values in self._prompts]
        counts = torch.tensor(self._runs, device=rows.device)
        self._rows = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts)

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._first

    def advance(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row."""
        self._mask = pad(self._mask, (0, 1), value=True)
        biases = Biases(self._passes.parts, self._mask, self._past, 1)
        at, self._length = self._length, self._length + 1

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._own[number]
            keys[:, :, at], values[:, :, at] = k[:, :, 0], v[:, :, 0]
            own, of_prompts = biases.apart(layer.window)
            shared = Shared(*self._prompts[number], self._rows, self._runs)
            return attended(q, keys[:, :, : at + 1], values[:, :, : at + 1], 1, own, shared, of_prompts)

        return self._passes.through(tokens[:, None], self._mask, self._view, attend)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone."""
        self._own = [tuple(_compacted(part, rows, self._length) for part in parts) for parts in self._own]
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._view = self._route(self._slots)
        self._continue(self._rows[rows])

    def set_aside(self, rows: Tensor, real: Tensor) -> Context:
        """Return the keys and values of some rows, what is not theirs masked."""
        mask = torch.cat([self._mask[rows, : self._past], real], dim=1)
        layers = tuple(
            tuple(
                torch.cat([past[:, self._rows[rows]], own[:, rows, : self._length]], 2).transpose(0, 1)
                for past, own in zip(prompts, parts, strict=True)
            )
            for prompts, parts in zip(self._prompts, self._own, strict=True)
        )
        return Context(layers=layers, mask=mask).tightened()  # type: ignore[arg-type]  # pairs


def _compacted(part: Tensor, rows: Tensor, length: int) -> Tensor:
    """Return some rows of `[kv, n, room, d]`, of which `length` places are filled."""
    kept = part.new_empty((part.shape[0], len(rows), *part.shape[2:]))
    kept[:, :, :length] = part[:, rows, :length]
    return kept
