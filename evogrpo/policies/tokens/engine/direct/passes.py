"""The direct pass: what `CausalModel` has a model of transformers compute, computed here from the same weights."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.cache_utils import Cache

from evogrpo.policies.tokens.bases.parts import PartedLayers
from evogrpo.policies.tokens.engine.cache import Prefix
from evogrpo.policies.tokens.engine.direct.attention import Shared, attended, in_runs
from evogrpo.policies.tokens.engine.direct.elementwise import gated, normed, rotated
from evogrpo.policies.tokens.engine.direct.linears import projected
from evogrpo.policies.tokens.engine.direct.reading import Anatomy, Layer
from evogrpo.policies.tokens.weights.weights import View

Attend = Callable[[int, Layer, Tensor, Tensor, Tensor], Tensor]
"""(number, layer, queries `[kv, n, rep * t, d]`, keys `[kv, n, t, d]`, values alike) -> `[n * t, kv * rep * d]`."""
Turns = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Cosine and sine of each token's position, `[n, t, d / 2]`: for keys, and for queries, which they scale as well."""


class DirectPasses:
    """Passes through a decoder's weights where they are.

    Args:
        parts: The decoder, taken apart.
        changed: Dotted names of the modules whose output views change.
        gathering: What puts layers together, where several processes hold them.
    """

    def __init__(self, parts: Anatomy, changed: Collection[str], gathering: PartedLayers | None = None) -> None:
        self.parts, self.changed, self._gathering = parts, frozenset(changed), gathering

    def gather(self, layer: nn.Module) -> None:
        """Put a layer together, where several processes hold it, before its weights are read."""
        if self._gathering is not None:
            self._gathering.gather(layer)

    def run(self, ids: Tensor, mask: Tensor, cache: Cache | None, view: View | None) -> Tensor:
        """Return final hidden states `[n, t, h]`; see `CausalModel.run`."""
        t = ids.shape[1]
        biases = Biases(self.parts, mask, mask.shape[1] - t, t)

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None:
                k, v = (x.transpose(0, 1) for x in cache.update(k.transpose(0, 1), v.transpose(0, 1), number))
            return attended(q, k, v, t, biases.whole(layer.window), None, None)

        return self.through(ids, mask, view, attend)

    def extend(self, prefix: Prefix, rows: Tensor, ids: Tensor, present: Tensor, view: View | None) -> Tensor:
        """Return hidden states `[n, t, h]` of tokens on top of shared prompts; see `TokenModel.extend`."""
        mask = torch.cat([prefix.mask[rows], present], dim=1)
        past = prefix.mask.shape[1]
        biases = Biases(self.parts, mask, past, ids.shape[1])
        order, runs = in_runs(rows, len(prefix.mask))
        numbers = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs)).to(rows.device)

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (
                x.transpose(0, 1) if order is None else x.transpose(0, 1)[:, order] for x in prefix.layers[number]
            )
            own, of_prompts = biases.apart(layer.window)
            return attended(q, k, v, ids.shape[1], own, Shared(keys, values, numbers, runs), of_prompts)

        return self.through(ids, mask, view, attend)

    def through(self, ids: Tensor, mask: Tensor, view: View | None, attend: Attend) -> Tensor:
        """Return final hidden states `[n, t, h]` of tokens `[n, t]`, the last of those that `mask` `[n, P + t]` has."""
        hidden = self.embedded(ids)
        turns = self.turns(hidden, mask)
        hidden = hidden.flatten(0, 1)
        for number in range(len(self.parts.layers)):
            hidden = self.layer(number, hidden, turns, view, attend)
        return self.ended(hidden).view(*ids.shape, -1)

    def embedded(self, ids: Tensor) -> Tensor:
        """Return what the first layer reads, `[n, t, h]`."""
        return embedding(ids, self.parts.decoder.embed_tokens.weight)

    def turns(self, hidden: Tensor, mask: Tensor) -> Turns:
        """Return what turns keys and queries by each token's position, counted from the first True."""
        return self.turns_at((mask.cumsum(1) - 1).clamp(min=0)[:, -hidden.shape[1] :])

    def turns_at(self, positions: Tensor) -> Turns:
        """Return what turns keys and queries of tokens at positions `[n, t]`."""
        cos, sin = self.parts.decoder.rotary_emb(self.parts.decoder.norm.weight, positions)
        half = self.parts.width // 2  # the second half repeats the first
        cos, sin, scaling = cos[..., :half], sin[..., :half], self.parts.scaling
        return (cos, sin), (cos * scaling, sin * scaling)

    def layer(self, number: int, hidden: Tensor, turns: Turns, view: View | None, attend: Attend) -> Tensor:
        """Return what one layer makes of `[n * t, h]`."""
        layer, heads, (of_keys, of_queries) = self.parts.layers[number], self.parts.heads, turns
        rows = len(of_keys[0])
        self.gather(layer.module)
        q, k, v = self._projected(_normed(hidden, layer.before_attention), layer.projections, view, rows)
        if layer.head_norms is not None:
            q, k = (
                _normed(x.view(-1, self.parts.width), norm).view(x.shape)
                for x, norm in zip((q, k), layer.head_norms, strict=True)
            )
        q, k = rotated(q, *of_queries, heads), rotated(k, *of_keys, (heads[0], 1))
        v = v.view(rows, -1, heads[0], self.parts.width).permute(2, 0, 1, 3).contiguous()
        hidden = hidden + self._projected(attend(number, layer, q, k, v), [layer.output], view, rows)[0]
        gate, up = self._projected(_normed(hidden, layer.before_mlp), layer.gates, view, rows)
        made: Tensor = hidden + self._projected(gated(gate, up), [layer.down], view, rows)[0]
        if self._gathering is not None:
            self._gathering.again(layer.module, made)
        return made

    def ended(self, hidden: Tensor) -> Tensor:
        """Return final hidden states `[m, h]`, given what the last layer made."""
        return _normed(hidden, self.parts.decoder.norm)

    def _projected(self, x: Tensor, layers: Any, view: View | None, rows: int) -> Any:
        return projected(x, layers, view, rows, self.changed)


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return normed(hidden, norm.weight, norm.variance_epsilon)


class Biases:
    """What is added to scores, so that tokens attend to real ones before them, and in some layers to the nearest only.

    Args:
        parts: The decoder.
        mask: `[n, P + s]` booleans: real tokens.
        past: P.
        t: How many tokens, the last ones, attend.
    """

    def __init__(self, parts: Anatomy, mask: Tensor, past: int, t: int) -> None:
        dtype = parts.decoder.norm.weight.dtype
        lowest = torch.finfo(dtype).min / 2  # not -inf: what is left of a token that sees nothing must be a number
        place = torch.arange(mask.shape[1], device=mask.device)
        distance = place[-t:, None] - place
        real = bool(mask.all())
        self._of = dict[int | None, tuple[Tensor | None, Tensor | None, Tensor | None]]()
        for window in {layer.window for layer in parts.layers}:
            near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            seen = near[None] if real else near & mask[:, None]  # one for all rows where all tokens are real
            bias = torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill_(~seen, lowest)
            apart = (None if bool(part.all()) else part for part in (seen, seen[..., past:], seen[..., :past]))
            cuts = (bias, bias[..., past:], bias[..., :past])
            whole, own, of_prompts = (None if part is None else cut for part, cut in zip(apart, cuts, strict=True))
            self._of[window] = whole, own, of_prompts

    def whole(self, window: int | None) -> Tensor | None:
        """Return `[n or 1, t, P + s]`; None = nothing is added."""
        return self._of[window][0]

    def apart(self, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """Return `[n or 1, t, s]` of rows' own tokens, and `[n or 1, t, P]` of prompts; None = nothing is added."""
        return self._of[window][1:]
