"""Writing rows token by token with a causal model: on a cache of keys and values, or by running everything again."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from evogrpo.policies.tokens.engine.cache import Context, GrowingCache, Prefix, Prompts
from evogrpo.policies.tokens.weights.weights import Route, View

Run = Callable[[Tensor, Tensor, Cache | None, View | None], Tensor]
"""(token ids `[n, t]`, mask `[n, P + t]`, what they continue, their weights) -> hidden states `[n, t, h]`."""


class CachedDecoding:
    """Decoding on top of prompts that have been run; see `evogrpo.policies.tokens.engine.token_model.Decoding`.

    Args:
        run: Runs tokens through the model.
        prefix: The prompts.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        room: Most tokens that are fed back.
        route: Directs rows to weights.
    """

    def __init__(self, run: Run, prefix: Prefix, rows: Tensor, slots: Tensor, room: int, route: Route) -> None:
        self._run, self._route, self._slots = run, route, slots
        self._first = prefix.last_hidden[rows]
        self._mask = prefix.mask[rows]
        self._prompt_width = prefix.mask.shape[1]
        self._cache = GrowingCache(prefix, rows, room)
        self._view = route(slots)

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._first

    def advance(self, tokens: Tensor) -> Tensor:
        """Run one more token of each row."""
        self._mask = pad(self._mask, (0, 1), value=True)
        return self._run(tokens[:, None], self._mask, self._cache, self._view)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone."""
        self._cache.keep(rows)
        self._mask, self._slots = self._mask[rows], self._slots[rows]
        self._view = self._route(self._slots)

    def set_aside(self, rows: Tensor, real: Tensor) -> Context:
        """Return the keys and values of some rows, what is not theirs masked."""
        mask = torch.cat([self._mask[rows, : self._prompt_width], real], dim=1)
        return Context(layers=self._cache.taken(rows), mask=mask).tightened()


class PlainDecoding:
    """Decoding for models whose cache cannot be shared: the whole sequence runs again for every token.

    Args:
        run: Runs tokens through the model.
        prompts: What rows continue.
        rows: `[n]` which prompt each row continues.
        slots: `[n]` whose weights each row acts with, sorted.
        route: Directs rows to weights.
    """

    def __init__(self, run: Run, prompts: Prompts, rows: Tensor, slots: Tensor, route: Route) -> None:
        self._run, self._route, self._slots = run, route, slots
        self._ids, self._mask = prompts.ids[rows], prompts.mask[rows]
        self._view = route(slots)

    def start(self) -> Tensor:
        """Return the hidden states of the prompts' last tokens."""
        return self._run(self._ids, self._mask, None, self._view)[:, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """Run everything again, with one more token of each row."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=1)
        self._mask = pad(self._mask, (0, 1), value=True)
        return self.start()

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone."""
        self._ids, self._mask, self._slots = self._ids[rows], self._mask[rows], self._slots[rows]
        self._view = self._route(self._slots)

    def set_aside(self, rows: Tensor, real: Tensor) -> None:
        """Return nothing: there is no cache to go on from."""
