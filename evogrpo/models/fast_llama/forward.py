"""fast_llama: the forward pass of Llama-like models, computed from the weights of a transformers model."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers.cache_utils import Cache

from evogrpo.functional.matmul import padding_rows
from evogrpo.models.fast_llama.attention import SharedPrompts, attention, prompt_runs
from evogrpo.models.fast_llama.layers import gated_unit, projected, rms_norm, rotated
from evogrpo.models.fast_llama.weight_layout import Layer, Norm, WeightLayout
from evogrpo.models.language.fsdp import ShardedLayers
from evogrpo.models.language.kv_cache import Prefix
from evogrpo.models.language.protocols import AdapterHook

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries `[kv, n, rep * t, d]`, keys and values `[kv, n, t, d]`."""
Attend = Callable[..., Tensor]
"""(layer number, layer, heads of rows, heads of further rows if any) -> `[tokens, kv * rep * d]`."""
Rotations = dict[str | None, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]
"""By kind of layer: cosine and sine `[n, t, d / 2]` of each token's position, for keys and, scaled, for queries."""


class FastLlama:
    """Forward passes with the weights of a decoder; see `evogrpo.models.language.causal_model.CausalModel`.

    Args:
        layout: Layout of the decoder.
        changed: Dotted names of the modules whose output the adapter hook changes.
        gathering: Sharded layers of an FSDP base, if any.
    """

    def __init__(self, layout: WeightLayout, changed: Collection[str], gathering: ShardedLayers | None = None) -> None:
        self.layout, self.changed, self._gathering = layout, frozenset(changed), gathering

    def gather(self, layer: nn.Module) -> None:
        """Gather a sharded layer before its weights are used."""
        if self._gathering is not None:
            self._gathering.gather(layer)

    def run(self, ids: Tensor, mask: Tensor, cache: Cache | None, hook: AdapterHook | None) -> Tensor:
        """Return final hidden states `[n, t, h]`; see `CausalModel.run`."""
        hidden = self.embed(ids).flatten(0, 1)
        rotations, attend = self.rotations(mask, ids.shape[1]), self._within(mask, ids.shape[1], cache)
        for number in range(len(self.layout.layers)):
            hidden = self.layer(number, hidden, [rotations], hook, lambda *heads: attend(*heads)[0])
        return self.final_norm(hidden).view(*ids.shape, -1)

    def extend(self, prefix: Prefix, rows: Tensor, ids: Tensor, present: Tensor, hook: AdapterHook | None) -> Tensor:
        """Return hidden states `[n, t, h]` of tokens on top of shared prompts; see `CausalModel.extend`."""
        mask = torch.cat([prefix.mask[rows], present], dim=1)
        hidden, rotations = self.embed(ids).flatten(0, 1), self.rotations(mask, ids.shape[1])
        follow = self._following(prefix.mask, rows, mask)

        def attend(number: int, layer: Layer, heads: Heads) -> Tensor:
            keys, values = (x.transpose(0, 1) for x in prefix.layers[number])
            return follow(layer, heads, keys, values)

        for number in range(len(self.layout.layers)):
            hidden = self.layer(number, hidden, [rotations], hook, attend)
        return self.final_norm(hidden).view(*ids.shape, -1)

    def run_with_prompts(
        self,
        prompts: tuple[Tensor, Tensor, Cache],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        hook: AdapterHook | None,
    ) -> tuple[Tensor, Tensor]:
        """Run prompts and completions in one pass, which halves the number of matrix products.

        Args:
            prompts: Tokens `[m, t]` of the prompts; mask and cache as for `run`.
            rows: `[n]` prompt of each row.
            ids: `[n, t]` tokens after the prompt.
            present: `[n, t]` booleans: True for real tokens.
            hook: Adapter hook of all prompt tokens, then of all row tokens.

        Returns:
            Hidden states of the prompts' last tokens `[m, h]`, and of the rows' tokens `[n, t, h]`.
        """
        # 1. Embed prompts and rows; pad the number of tokens to one for which products are fast.
        read, mask, cache = prompts
        whole = torch.cat([mask[rows], present], dim=1)
        parts = [self.embed(part).flatten(0, 1) for part in (read, ids)]
        rest = padding_rows(read.numel() + ids.numel(), parts[0].dtype, ids.device)
        hidden = torch.cat([*parts, *_zeros(rest, parts[0])])
        rotations = [self.rotations(mask, read.shape[1]), self.rotations(whole, ids.shape[1])]
        # 2. Attention: prompts within themselves, rows on top of the prompts' keys and values.
        within, follow = self._within(mask, read.shape[1], cache), self._following(mask, rows, whole)

        def attend(number: int, layer: Layer, first: Heads, later: Heads) -> Tensor:
            made, keys, values = within(number, layer, first)
            return torch.cat([made, follow(layer, later, keys, values), *_zeros(rest, made)])

        for number in range(len(self.layout.layers)):
            hidden = self.layer(number, hidden, rotations, hook, attend)
        # 3. Split the hidden states again.
        of_prompts, of_rows, _ = hidden.split([read.numel(), ids.numel(), rest])
        last = of_prompts.view(*read.shape, -1)[:, -1]
        return self.final_norm(last), self.final_norm(of_rows).view(*ids.shape, -1)

    def _within(
        self, mask: Tensor, t: int, cache: Cache | None
    ) -> Callable[[int, Layer, Heads], tuple[Tensor, Tensor, Tensor]]:
        """Return the attention over rows' own and cached tokens; it also returns these keys and values."""
        biases = AttentionBias(self.layout, mask, mask.shape[1] - t, t)

        def attend(number: int, layer: Layer, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = heads
            if cache is not None:
                k, v = (x.transpose(0, 1) for x in cache.update(k.transpose(0, 1), v.transpose(0, 1), number))
            return attention(q, k, v, t, biases.whole[layer.window], None, None), k, v

        return attend

    def _following(
        self, prompts: Tensor, rows: Tensor, mask: Tensor
    ) -> Callable[[Layer, Heads, Tensor, Tensor], Tensor]:
        """Return the attention over rows' own tokens and keys and values `[kv, m, P, d]` of prompts.

        Args:
            prompts: `[m, P]` booleans: True for real tokens.
            rows: `[n]` prompt of each row.
            mask: `[n, P + t]` booleans: True for real tokens.
        """
        past = prompts.shape[1]
        biases = AttentionBias(self.layout, mask, past, mask.shape[1] - past)
        order, runs = prompt_runs(rows, len(prompts))
        numbers = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs)).to(rows.device)

        def attend(layer: Layer, heads: Heads, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = (x if order is None else x[:, order] for x in (keys, values))
            shared, window = SharedPrompts(keys, values, numbers, runs), layer.window
            return attention(*heads, mask.shape[1] - past, biases.own[window], shared, biases.prompts[window])

        return attend

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings `[n, t, h]`."""
        found = embedding(ids, self.layout.decoder.embed_tokens.weight)
        scale = self.layout.embedding_scale
        return found if scale is None else found * scale.to(found.dtype)

    def rotations(self, mask: Tensor, t: int) -> Rotations:
        """Return the rotary embeddings of the last t tokens; positions are counted from the first True."""
        return self.rotations_at((mask.cumsum(1) - 1).clamp(min=0)[:, -t:])

    def rotations_at(self, positions: Tensor) -> Rotations:
        """Return the rotary embeddings at positions `[n, t]`."""
        half, scaling, found = self.layout.width // 2, self.layout.scaling, Rotations()
        for kind in {layer.kind for layer in self.layout.layers}:
            given = () if kind is None else (kind,)
            cos, sin = self.layout.decoder.rotary_emb(self.layout.decoder.norm.weight, positions, *given)
            cos, sin = cos[..., :half], sin[..., :half]  # the second half repeats the first
            found[kind] = (cos, sin), (cos * scaling, sin * scaling)
        return found

    def layer(
        self, number: int, hidden: Tensor, rotations: Sequence[Rotations], hook: AdapterHook | None, attend: Attend
    ) -> Tensor:
        """Return the hidden states `[tokens, h]` after one layer.

        Args:
            number: Number of the layer.
            hidden: Hidden states of one group of rows per element of `rotations`; with several groups, padding tokens
                follow.
            rotations: Rotary embeddings of each group.
            hook: Adapter hook.
            attend: Attention over the heads of all groups.
        """
        layer, (kv, rep) = self.layout.layers[number], self.layout.heads
        own_rotations = [each[layer.kind] for each in rotations]
        shapes = [of_keys[0].shape[:2] for of_keys, _ in own_rotations]
        rows = shapes[0][0] if len(shapes) == 1 else len(hidden)
        self.gather(layer.module)
        # 1. Queries, keys and values.
        made = projected(_normed(hidden, layer.before_attention), layer.projections, hook, rows, self.changed)
        if layer.head_norms is not None:
            norms = zip(made[:2], layer.head_norms, strict=True)
            made = [*(_normed(x.view(-1, norm.width), norm).view(x.shape) for x, norm in norms), made[2]]
        groups: Sequence[Any] = [made]
        if len(shapes) > 1:  # leave out the padding tokens at the end
            sizes = [shape.numel() for shape in shapes]
            groups = list(zip(*(x.split([*sizes, len(x) - sum(sizes)])[:-1] for x in made), strict=True))
        heads = [
            (
                rotated(q, *of_queries, (kv, rep)),
                rotated(k, *of_keys, (kv, 1)),
                v.view(*shape, kv, self.layout.width).permute(2, 0, 1, 3).contiguous(),  # `[kv, n, t, d]`
            )
            for (q, k, v), (of_keys, of_queries), shape in zip(groups, own_rotations, shapes, strict=True)
        ]
        # 2. Attention.
        added = projected(attend(number, layer, *heads), [layer.output], hook, rows, self.changed)[0]
        hidden = hidden + _normed(added, layer.after_attention)
        # 3. MLP.
        gate, up = projected(_normed(hidden, layer.before_mlp), layer.gates, hook, rows, self.changed)
        gated = gated_unit(gate, up, self.layout.activation)
        added = projected(gated, [layer.down], hook, rows, self.changed)[0]
        after: Tensor = hidden + _normed(added, layer.after_mlp)
        if self._gathering is not None:
            self._gathering.gather_in_backward(layer.module, after)
        return after

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return final hidden states `[m, h]`, given those after the last layer."""
        return _normed(hidden, self.layout.final_norm)


def _zeros(rows: int, like: Tensor) -> list[Tensor]:
    """Return a list with rows of zeros; empty if `rows` is 0."""
    return [like.new_zeros((rows, like.shape[1]))] if rows else []


def _normed(hidden: Tensor, norm: Norm | None) -> Tensor:
    return hidden if norm is None else rms_norm(hidden, norm.weight, norm.eps)


class AttentionBias:
    """Bias on attention scores for padding, causality and sliding windows; by window size, None = 0.

    Args:
        layout: Layout of the decoder.
        mask: `[n, P + s]` booleans: True for real tokens.
        past: P.
        t: Number of query tokens, the last ones.

    Attributes:
        whole: `[n or 1, t, P + s]` biases of all keys.
        own: `[n or 1, t, s]` biases of rows' own keys.
        prompts: `[n or 1, t, P]` biases of prompts' keys.
    """

    def __init__(self, layout: WeightLayout, mask: Tensor, past: int, t: int) -> None:
        dtype = layout.decoder.norm.weight.dtype
        lowest = torch.finfo(dtype).min / 2  # not -inf: tokens without visible keys must not become NaN
        place = torch.arange(mask.shape[1], device=mask.device)
        distance = place[-t:, None] - place
        real = bool(mask.all())
        self.whole, self.own, self.prompts = (dict[int | None, Tensor | None]() for _ in range(3))
        for window in {layer.window for layer in layout.layers}:
            near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            seen = near[None] if real else near & mask[:, None]  # one bias for all rows if there is no padding
            bias = torch.zeros(seen.shape, dtype=dtype, device=mask.device).masked_fill_(~seen, lowest)
            for biases, keys in (
                (self.whole, slice(None)),
                (self.own, slice(past, None)),
                (self.prompts, slice(past)),
            ):
                biases[window] = None if bool(seen[..., keys].all()) else bias[..., keys]
