"""KV cache of transformers' causal models, and decoding with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from evogrpo.models.language.token_model import AdapterHook, HookFactory


class PrefixLayer(CacheLayerMixin):
    """Key/values of one attention layer: a prefix of other rows, gathered per row, followed by what comes in.

    Every position is kept, for sliding-window layers too: their window is applied by the model's own mask.

    Args:
        prefix: Keys and values `[m, heads, P, width]` to continue.
        rows: `[n]` which prefix each row continues.
        order: `[n, P + t]` where each position of prefix and new tokens together is taken from.
    """

    is_sliding = False

    def __init__(
        self,
        prefix: "tuple[Tensor, Tensor] | None" = None,
        rows: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.rows = rows
        self.order = order
        self.is_initialized = True
        self.whole: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: shapes come from the prefix."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of prefix and new tokens together."""
        self.whole = (key_states, value_states)
        if self.prefix is not None:
            keys, values = (past if self.rows is None else past[self.rows] for past in self.prefix)
            self.whole = torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)
        if self.order is not None:
            order = self.order[:, None, :, None]
            keys, values = (part.gather(2, order.expand(part.shape)) for part in self.whole)
            self.whole = keys, values
        return self.whole

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values that the last pass attention to."""
        assert self.whole is not None, "the model left this layer of the cache unused"
        return self.whole

    def get_seq_length(self) -> int:
        """Return the length of the prefix."""
        return 0 if self.prefix is None else int(self.prefix[0].shape[-2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions are attention to, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1


class _GrowingLayer(PrefixLayer):
    """Key/values that grow by one token a step inside storage allocated once."""

    def __init__(self, prefix: tuple[Tensor, Tensor], rows: Tensor, room: int) -> None:
        super().__init__()
        self.length = int(prefix[0].shape[-2])
        self.storage = tuple(self._expand(part, rows, room) for part in prefix)

    def _expand(self, part: Tensor, rows: Tensor, room: int) -> Tensor:
        heads, width = part.shape[1], part.shape[3]
        storage = part.new_empty((len(rows), heads, self.length + room, width))
        values, counts = torch.unique_consecutive(rows, return_counts=True)
        for value, own in zip(values.tolist(), storage[:, :, : self.length].split(counts.tolist()), strict=True):
            own.copy_(part[value])
        return storage

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        for storage, states in zip(self.storage, (key_states, value_states), strict=True):
            storage[:, :, self.length : end] = states
        self.length = end
        keys, values = (storage[:, :, :end] for storage in self.storage)
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but the given ones."""
        self.storage = tuple(storage[rows] for storage in self.storage)

    def rows_taken(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of some rows."""
        keys, values = (storage[rows, :, : self.length] for storage in self.storage)
        return keys, values


class GrowingCache(Cache):
    """Key/values of rows that are being decoded."""

    def __init__(self, prefix: "Prefix", rows: Tensor, room: int) -> None:
        self.growing = [_GrowingLayer(layer, rows, room) for layer in prefix.layers]
        super().__init__(layers=list(self.growing))

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but the given ones, in every layer."""
        for layer in self.growing:
            layer.keep(rows)

    def taken(self, rows: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return copies of the keys and values of some rows, layer by layer."""
        return tuple(layer.rows_taken(rows) for layer in self.growing)


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Rows that have been run: what further tokens attend to.

    Attributes:
        layers: Keys and values `[m, heads, P, width]` of every attention layer.
        mask: `[m, P]` booleans, False on the padding, which is on the left.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor

    def tightened(self) -> "KVCache":
        """Return the same with all that is masked, wherever it is, moved to the left, and no more of it than needed."""
        width = int(self.mask.sum(1).max())
        order = self.mask.int().argsort(dim=1, stable=True)[:, self.mask.shape[1] - width :]
        place = order[:, None, :, None]
        return KVCache(
            layers=tuple(
                (
                    keys.gather(2, place.expand(*keys.shape[:2], width, keys.shape[3])),
                    values.gather(2, place.expand(*values.shape[:2], width, values.shape[3])),
                )
                for keys, values in self.layers
            ),
            mask=self.mask.gather(1, order),
        )


def collected(parts: Sequence[KVCache], part_of: Tensor, row_of: Tensor) -> KVCache:
    """Return rows of several contexts as one, padded to the widest: row i is row `row_of[i]` of part `part_of[i]`."""
    numbers = part_of.unique().tolist()
    used, rows = [parts[number] for number in numbers], [row_of[part_of == number] for number in numbers]
    back = torch.argsort(torch.argsort(part_of, stable=True))
    width = max(part.mask.shape[1] for part in used)

    def joined(values: Sequence[Tensor], dim: int) -> Tensor:
        chosen = [value[own] for value, own in zip(values, rows, strict=True)]
        after = [0, 0] * (chosen[0].dim() - 1 - dim)
        wide = [torch.nn.functional.pad(value, (*after, width - value.shape[dim], 0)) for value in chosen]
        return torch.cat(wide)[back]

    return KVCache(
        layers=tuple(
            (joined([part.layers[layer][0] for part in used], 2), joined([part.layers[layer][1] for part in used], 2))
            for layer in range(len(used[0].layers))
        ),
        mask=joined([part.mask for part in used], 1),
    )


@dataclass(frozen=True, kw_only=True)
class Prefix(KVCache):
    """Prompts that have been run: what rows that share them continue from.

    Attributes:
        last_hidden: `[m, h]` final hidden state of each prompt's last token.
    """

    last_hidden: Tensor


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts that are run again with everything that continues them, where a cache cannot be shared.

    Attributes:
        ids: `[m, P]` token ids.
        mask: `[m, P]` booleans, False on the padding, which is on the left.
    """

    ids: Tensor
    mask: Tensor


Run = Callable[[Tensor, Tensor, Cache | None, AdapterHook | None], Tensor]
"""(token ids `[n, t]`, mask `[n, P + t]`, what they continue, their weights) -> hidden states `[n, t, h]`."""


class CachedDecoding:
    """Decoding on top of prompts that have been run; see `evogrpo.models.language.token_model.Decoding`.

    Args:
        run: Runs tokens through the model.
        prefix: The prompts.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        room: Most tokens that are fed back.
        make_hook: Directs rows to weights.
    """

    def __init__(
        self, run: Run, prefix: Prefix, rows: Tensor, slots: Tensor, room: int, make_hook: HookFactory
    ) -> None:
        self._run, self._make_hook, self._slots = run, make_hook, slots
        self._first = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._prompt_width = prefix.mask.shape[1]
        self._cache = GrowingCache(prefix, rows, room)
        self._adapter_hook = make_hook(slots)

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._first

    def advance(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row."""
        self._mask = pad(self._mask, (0, 1), value=True)
        return self._run(tokens[:, None], self._mask, self._cache, self._adapter_hook)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone."""
        self._cache.keep(rows)
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._adapter_hook = self._make_hook(self._slots)

    def save_cache(self, rows: Tensor, real: Tensor) -> KVCache:
        """Return the keys and values of some rows, what is not theirs masked."""
        mask = torch.cat([self._mask[rows, : self._prompt_width], real], dim=1)
        return KVCache(layers=self._cache.taken(rows), mask=mask).tightened()


class PlainDecoding:
    """Decoding for models whose cache cannot be shared: the whole sequence runs again for every token.

    Args:
        run: Runs tokens through the model.
        prompts: What rows continue.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        make_hook: Directs rows to weights.
    """

    def __init__(self, run: Run, prompts: Prompts, rows: Tensor, slots: Tensor, make_hook: HookFactory) -> None:
        self._run, self._make_hook, self._slots = run, make_hook, slots
        self._ids, self._mask = prompts.ids[rows], prompts.mask[rows]
        self._adapter_hook = make_hook(slots)

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._run(self._ids, self._mask, None, self._adapter_hook)[:, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """Run everything again, with one more token of each row."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._mask = pad(self._mask, (0, 1), value=True)
        return self.start()

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone."""
        self._ids, self._mask, self._slots = self._ids[rows], self._mask[rows], self._slots[rows]
        self._adapter_hook = self._make_hook(self._slots)

    def save_cache(self, rows: Tensor, real: Tensor) -> None:
        """Return nothing: there is no cache to go on from."""
