"""KV caches of transformers' causal models, and decoding with and without a cache.

Letters in shapes: `n` rows, `t` new tokens, `m` prompts, `P` tokens of a prompt, `h` width of a
hidden state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from evogrpo.members.language.adapters import HookFactory, LoraHook


class PrefixLayer(DynamicLayer):
    """Keys and values of one attention layer: each row's shared prefix, then its new tokens.

    Sliding-window layers keep all positions too; the model's mask applies the window.

    Args:
        prefix: Keys and values `[m, heads, P, width]` of the prefixes.
        rows: `[n]` prefix of each row; None = one prefix per row.
        order: `[n, P + t]` position that each position of the result is read from; None =
            unchanged.

    Attributes:
        whole: All keys and values of the first forward pass; None before it. When a backward pass
            computes a layer again, these stay.
    """

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

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the prefix and the new tokens."""
        keys = self._joined(0, key_states)
        values = self._joined(1, value_states)
        if self.whole is None:
            self.whole = (keys, values)
        return keys, values

    def _joined(self, kind: int, states: Tensor) -> Tensor:
        """Return the keys (0) or values (1) of the prefix, then of the new tokens."""
        if self.prefix is not None:
            past = self.prefix[kind]
            # Each row gets a copy of its prompt's states.
            if self.rows is not None:
                past = past[self.rows]
            states = torch.cat([past, states], dim=-2)
        # Move padding to the left of the past; see `CausalModel._prepare`.
        if self.order is not None:
            order = self.order[:, None, :, None]
            states = states.gather(2, order.expand(states.shape))
        return states

    def get_seq_length(self) -> int:
        """Return the length of the prefix."""
        if self.prefix is None:
            return 0
        return int(self.prefix[0].shape[-2])


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of rows that later tokens attend to.

    Attributes:
        layers: Keys and values `[m, heads, P, width]` of every attention layer.
        mask: `[m, P]` booleans, False for padding, which is on the left.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor

    def left_padded(self) -> "KVCache":
        """Return a copy with masked positions on the left, without columns masked in all rows."""
        width = int(self.mask.sum(1).max())
        # A stable sort of booleans moves False to the left and keeps the order of real tokens.
        order = self.mask.int().argsort(dim=1, stable=True)
        order = order[:, self.mask.shape[1] - width :]
        places = order[:, None, :, None]  # [m, 1, width, 1]
        layers = []
        for keys, values in self.layers:
            kv = keys.shape[1]
            # Keys and values may have heads of different widths.
            moved_keys = keys.gather(2, places.expand(-1, kv, -1, keys.shape[3]))
            moved_values = values.gather(2, places.expand(-1, kv, -1, values.shape[3]))
            layers.append((moved_keys, moved_values))
        return KVCache(layers=tuple(layers), mask=self.mask.gather(1, order))


@dataclass(frozen=True, kw_only=True)
class Prefix(KVCache):
    """KV cache of prompts after prefill.

    Attributes:
        last_hidden: `[m, h]` final hidden state of each prompt's last token.
    """

    last_hidden: Tensor


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts of a model whose cache cannot be shared; every pass runs them again.

    Attributes:
        ids: `[m, P]` token ids.
        mask: `[m, P]` booleans, False for padding, which is on the left.
    """

    ids: Tensor
    mask: Tensor


ForwardPass = Callable[[Tensor, Tensor, Cache | None, LoraHook | None], Tensor]
"""(token ids `[n, t]`, mask `[n, P + t]`, KV cache, adapter hook) -> hidden states `[n, t, h]`."""


class Decoding(Protocol):
    """Rows that are decoded token by token."""

    def first_hidden(self) -> Tensor:
        """Return hidden states `[n, h]` of the prompts' last tokens."""

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token `[n]` per row and return its hidden states `[n, h]`."""

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only, in this order; a repeated row is copied."""

    def copy_cache(self, rows: Tensor, real: Tensor) -> Any:
        """Return the KV cache of `rows`: prompt, then own tokens. The next turn continues from it.

        None if the model has no cache; see `CausalModel.resume`.

        Args:
            rows: Row numbers `[k]`.
            real: `[k, t]` booleans: False for fed tokens that are padding.
        """


class CachedDecoding:
    """Decoding with a KV cache.

    Args:
        run: Forward pass of the model.
        prefix: Prompts after prefill.
        rows: `[n]` prompt of each row.
        slots: `[n]` slot of each row, sorted.
        make_hook: Hooks of the weights, the reference or the base.
    """

    def __init__(
        self, run: ForwardPass, prefix: Prefix, rows: Tensor, slots: Tensor, make_hook: HookFactory
    ) -> None:
        self._run = run
        self._make_hook = make_hook
        self._slots = slots
        self._first = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._prompt_width = prefix.mask.shape[1]
        # A cache of transformers, filled with each row's prompt.
        self._layers = [DynamicLayer() for _ in prefix.layers]
        self._cache = Cache(layers=list(self._layers))
        for number, (keys, values) in enumerate(prefix.layers):
            self._cache.update(keys[rows], values[rows], number)
        self._adapter_hook = make_hook(slots)

    def first_hidden(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        return self._first

    def advance(self, tokens: Tensor) -> Tensor:
        """Feed one token per row."""
        self._mask = pad(self._mask, (0, 1), value=True)
        hidden = self._run(tokens[:, None], self._mask, self._cache, self._adapter_hook)
        return hidden[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        # Rows of the cache, of the mask and of the adapters go together.
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self._slots = self._slots[rows]
        self._adapter_hook = self._make_hook(self._slots)

    def copy_cache(self, rows: Tensor, real: Tensor) -> KVCache:
        """Return the KV cache of `rows`: their prompts, then their own tokens."""
        # `self._mask` is True for fed padding, too, so `real` replaces it after the prompt.
        prompt_mask = self._mask[rows, : self._prompt_width]
        mask = torch.cat([prompt_mask, real], dim=1)
        layers = [(layer.keys[rows], layer.values[rows]) for layer in self._layers]  # type: ignore[index]
        return KVCache(layers=tuple(layers), mask=mask).left_padded()


class PlainDecoding:
    """Decoding without a KV cache: the whole sequence runs again for every token.

    Args:
        run: Forward pass of the model.
        prompts: Prompts.
        rows: `[n]` prompt of each row.
        slots: `[n]` slot of each row, sorted.
        make_hook: Hooks of the weights, the reference or the base.
    """

    def __init__(
        self,
        run: ForwardPass,
        prompts: Prompts,
        rows: Tensor,
        slots: Tensor,
        make_hook: HookFactory,
    ) -> None:
        self._run = run
        self._make_hook = make_hook
        self._slots = slots
        self._ids = prompts.ids[rows]
        self._mask = prompts.mask[rows]
        self._adapter_hook = make_hook(slots)

    def first_hidden(self) -> Tensor:
        """Return hidden states of the prompts' last tokens."""
        hidden = self._run(self._ids, self._mask, None, self._adapter_hook)
        return hidden[:, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """Run the whole sequences with one more token per row."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._mask = pad(self._mask, (0, 1), value=True)
        return self.first_hidden()

    def keep(self, rows: Tensor) -> None:
        """Keep these rows only."""
        self._ids = self._ids[rows]
        self._mask = self._mask[rows]
        self._slots = self._slots[rows]
        self._adapter_hook = self._make_hook(self._slots)

    def copy_cache(self, rows: Tensor, real: Tensor) -> None:
        """Return None: there is no cache."""
