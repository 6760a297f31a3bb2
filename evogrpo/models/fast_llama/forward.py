"""The direct pass: what `CausalModel` has a model of transformers compute, computed here from the same weights."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.cache_utils import Cache

from evogrpo.functional.matmul import padding_rows
from evogrpo.models.fast_llama.attention import SharedPrompts, attention, prompt_runs
from evogrpo.models.fast_llama.layers import gated, normed, projected, rotated
from evogrpo.models.fast_llama.weight_layout import Layer, Norm, WeightLayout
from evogrpo.models.language.fsdp import ShardedLayers
from evogrpo.models.language.kv_cache import Prefix
from evogrpo.models.language.token_model import AdapterHook

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries `[kv, n, rep * t, d]`, keys `[kv, n, t, d]` and values alike."""
Attend = Callable[..., Tensor]
"""(number, layer, heads of some rows, and heads of those that come after them, if any) -> `[tokens, kv * rep * d]`."""
Rotations = dict[str | None, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
"""Cosine and sine of each token's position, `[n, t, d / 2]`: for keys, and for queries, which they scale as well.

By the kind of layers.
"""


class FastLlama:
    """Passes through a decoder's weights where they are.

    Args:
        parts: The decoder, taken apart.
        changed: Dotted names of the modules whose output hooks change.
        gathering: What puts layers together, where several processes hold them.
    """

    def __init__(self, parts: WeightLayout, changed: Collection[str], gathering: ShardedLayers | None = None) -> None:
        self.parts, self.changed, self._gathering = parts, frozenset(changed), gathering

    def gather(self, layer: nn.Module) -> None:
        """Put a layer together, where several processes hold it, before its weights are read."""
        if self._gathering is not None:
            self._gathering.gather(layer)

    def run(self, ids: Tensor, mask: Tensor, cache: Cache | None, hook: AdapterHook | None) -> Tensor:
        """Return final hidden states `[n, t, h]`; see `CausalModel.run`."""
        hidden = self.embedded(ids).flatten(0, 1)
        turns, attend = self.turns(mask, ids.shape[1]), self._within(mask, ids.shape[1], cache)
        for number in range(len(self.parts.layers)):
            hidden = self.layer(number, hidden, [turns], hook, lambda *heads: attend(*heads)[0])
        return self.ended(hidden).view(*ids.shape, -1)

    def extend(self, prefix: Prefix, rows: Tensor, ids: Tensor, present: Tensor, hook: AdapterHook | None) -> Tensor:
        """Return hidden states `[n, t, h]` of tokens on top of shared prompts; see `TokenModel.extend`."""
        mask = torch.cat([prefix.mask[rows], present], dim=1)
        hidden, turns = self.embedded(ids).flatten(0, 1), self.turns(mask, ids.shape[1])
        follow = self._following(prefix.mask, rows, mask)

        def attend(number: int, layer: Layer, heads: Heads) -> Tensor:
            keys, values = (x.transpose(0, 1) for x in prefix.layers[number])
            return follow(layer, heads, keys, values)

        for number in range(len(self.parts.layers)):
            hidden = self.layer(number, hidden, [turns], hook, attend)
        return self.ended(hidden).view(*ids.shape, -1)

    def both(
        self,
        prompts: tuple[Tensor, Tensor, Cache],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        hook: AdapterHook | None,
    ) -> tuple[Tensor, Tensor]:
        """Run prompts and what continues them at once: one product where there were two.

        Args:
            prompts: Their tokens `[m, t]`, and mask and cache as for `run`.
            rows: `[n]` which prompt each row continues.
            ids: `[n, t]` its tokens.
            present: `[n, t]` booleans: real tokens.
            hook: The weights that tokens act with: those of all prompts, then those of all rows.

        Returns:
            Hidden states of prompts' last tokens `[m, h]`, and of rows' tokens `[n, t, h]`.
        """
        read, mask, cache = prompts
        whole = torch.cat([mask[rows], present], dim=1)
        parts = [self.embedded(part).flatten(0, 1) for part in (read, ids)]
        rest = padding_rows(read.numel() + ids.numel(), parts[0].dtype, ids.device)
        hidden = torch.cat([*parts, *_zeros(rest, parts[0])])
        turns = [self.turns(mask, read.shape[1]), self.turns(whole, ids.shape[1])]
        within, follow = self._within(mask, read.shape[1], cache), self._following(mask, rows, whole)

        def attend(number: int, layer: Layer, first: Heads, later: Heads) -> Tensor:
            made, keys, values = within(number, layer, first)
            return torch.cat([made, follow(layer, later, keys, values), *_zeros(rest, made)])

        for number in range(len(self.parts.layers)):
            hidden = self.layer(number, hidden, turns, hook, attend)
        of_prompts, of_rows, _ = hidden.split([read.numel(), ids.numel(), rest])
        last = of_prompts.view(*read.shape, -1)[:, -1]
        return self.ended(last), self.ended(of_rows).view(*ids.shape, -1)

    def _within(
        self, mask: Tensor, t: int, cache: Cache | None
    ) -> Callable[[int, Layer, Heads], tuple[Tensor, Tensor, Tensor]]:
        """Return what attends to rows' own tokens and those cached, and returns these keys and values as well."""
        biases = AttentionBias(self.parts, mask, mask.shape[1] - t, t)

        def attend(number: int, layer: Layer, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = heads
            if cache is not None:
                k, v = (x.transpose(0, 1) for x in cache.update(k.transpose(0, 1), v.transpose(0, 1), number))
            return attention(q, k, v, t, biases.whole(layer.window), None, None), k, v

        return attend

    def _following(
        self, prompts: Tensor, rows: Tensor, mask: Tensor
    ) -> Callable[[Layer, Heads, Tensor, Tensor], Tensor]:
        """Return what attends to rows' own tokens, and to keys and values `[kv, m, P, d]` of prompts.

        Args:
            prompts: `[m, P]` booleans: real tokens.
            rows: `[n]` which prompt each row continues.
            mask: `[n, P + t]` booleans: real tokens.
        """
        past = prompts.shape[1]
        biases = AttentionBias(self.parts, mask, past, mask.shape[1] - past)
        order, runs = prompt_runs(rows, len(prompts))
        numbers = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs)).to(rows.device)

        def attend(layer: Layer, heads: Heads, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = (x if order is None else x[:, order] for x in (keys, values))
            own, of_prompts = biases.apart(layer.window)
            return attention(*heads, mask.shape[1] - past, own, SharedPrompts(keys, values, numbers, runs), of_prompts)

        return attend

    def embedded(self, ids: Tensor) -> Tensor:
        """Return what the first layer reads, `[n, t, h]`."""
        found = embedding(ids, self.parts.decoder.embed_tokens.weight)
        scale = self.parts.embedding_scale
        return found if scale is None else found * scale.to(found.dtype)

    def turns(self, mask: Tensor, t: int) -> Rotations:
        """Return what turns keys and queries of the last t tokens by their positions, counted from the first True."""
        return self.turns_at((mask.cumsum(1) - 1).clamp(min=0)[:, -t:])

    def turns_at(self, positions: Tensor) -> Rotations:
        """Return what turns keys and queries of tokens at positions `[n, t]`."""
        half, scaling, found = self.parts.width // 2, self.parts.scaling, Rotations()
        for kind in {layer.kind for layer in self.parts.layers}:
            given = () if kind is None else (kind,)
            cos, sin = self.parts.decoder.rotary_emb(self.parts.decoder.norm.weight, positions, *given)
            cos, sin = cos[..., :half], sin[..., :half]  # the second half repeats the first
            found[kind] = (cos, sin), (cos * scaling, sin * scaling)
        return found

    def layer(
        self, number: int, hidden: Tensor, turns: Sequence[Rotations], hook: AdapterHook | None, attend: Attend
    ) -> Tensor:
        """Return what one layer makes of `[tokens, h]`.

        Args:
            number: Which layer.
            hidden: What it reads: of rows of equally many tokens, then of others, as often as there are turns; then,
                where there is more than one, of rows that are there for the sake of products alone.
            turns: Of each.
            hook: The weights that tokens act with.
            attend: What attends.
        """
        layer, (kv, rep) = self.parts.layers[number], self.parts.heads
        own_turns = [each[layer.kind] for each in turns]
        shapes = [of_keys[0].shape[:2] for of_keys, _ in own_turns]
        rows = shapes[0][0] if len(shapes) == 1 else len(hidden)
        self.gather(layer.module)
        made = projected(_normed(hidden, layer.before_attention), layer.projections, hook, rows, self.changed)
        if layer.head_norms is not None:
            norms = zip(made[:2], layer.head_norms, strict=True)
            made = [*(_normed(x.view(-1, norm.width), norm).view(x.shape) for x, norm in norms), made[2]]
        heads = [
            (
                rotated(q, *of_queries, (kv, rep)),
                rotated(k, *of_keys, (kv, 1)),
                v.view(*shape, kv, self.parts.width).permute(2, 0, 1, 3).contiguous(),
            )
            for (q, k, v), (of_keys, of_queries), shape in zip(_parts(made, shapes), own_turns, shapes, strict=True)
        ]
        added = projected(attend(number, layer, *heads), [layer.output], hook, rows, self.changed)[0]
        hidden = hidden + _normed(added, layer.after_attention)
        gate, up = projected(_normed(hidden, layer.before_mlp), layer.gates, hook, rows, self.changed)
        added = projected(gated(gate, up, self.parts.activation), [layer.down], hook, rows, self.changed)[0]
        after: Tensor = hidden + _normed(added, layer.after_mlp)
        if self._gathering is not None:
            self._gathering.gather_in_backward(layer.module, after)
        return after

    def ended(self, hidden: Tensor) -> Tensor:
        """Return final hidden states `[m, h]`, given what the last layer made."""
        return _normed(hidden, self.parts.last)


def _parts(made: Sequence[Tensor], shapes: Sequence[torch.Size]) -> Sequence[Any]:
    """Cut what was made of all tokens, each kind into parts of these shapes."""
    if len(shapes) == 1:
        return [made]
    sizes = [shape.numel() for shape in shapes]
    return list(zip(*(x.split([*sizes, len(x) - sum(sizes)])[:-1] for x in made), strict=True))


def _zeros(rows: int, like: Tensor) -> list[Tensor]:
    """Return so many rows of zeros, if any."""
    return [like.new_zeros((rows, like.shape[1]))] if rows else []


def _normed(hidden: Tensor, norm: Norm | None) -> Tensor:
    return hidden if norm is None else normed(hidden, norm.weight, norm.eps)


class AttentionBias:
    """What is added to scores, so that tokens attend to real ones before them, and in some layers to the nearest only.

    Args:
        parts: The decoder.
        mask: `[n, P + s]` booleans: real tokens.
        past: P.
        t: How many tokens, the last ones, attend.
    """

    def __init__(self, parts: WeightLayout, mask: Tensor, past: int, t: int) -> None:
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
