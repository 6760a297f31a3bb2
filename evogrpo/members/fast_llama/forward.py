"""fast_llama: the forward pass of Llama-like models, computed from the weights of a transformers model.

Letters in shapes are those of `evogrpo.members.fast_llama.attention`. In norms and linear layers,
`m` counts tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from transformers.cache_utils import Cache

from evogrpo.functional.log_probs import row_tiles
from evogrpo.functional.matmul import add_frozen_linear_, frozen_linear, padding_rows
from evogrpo.members.fast_llama.attention import SharedPrompts, attention, prompt_runs
from evogrpo.members.fast_llama.weight_layout import Layer, NamedLinear, WeightLayout
from evogrpo.members.language.adapters import LoraHook, StackedAdapters
from evogrpo.members.language.fsdp import ShardedLayers

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries `[kv, n, rep * t, d]`, keys and values `[kv, n, t, d]`."""
Attend = Callable[..., Tensor]
"""(layer number, layer, heads of rows, heads of further rows if any) -> `[tokens, kv * rep * d]`.
"""
Rotations = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Cosine and sine `[n, t, d / 2]` of each token's position, for keys and, scaled, for queries."""

# ---- norms, gates and rotary embeddings, with their gradients


def _tiles(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split half-precision rows into tiles, so that their float32 copies fit into the CPU cache."""
    if tensors[0].dtype == torch.float32:
        return [tensors]
    return (tuple(tensor[rows] for tensor in tensors) for rows in row_tiles(tensors[0]))


class _RMSNorm(torch.autograd.Function):
    """Divides rows `[m, h]` by their root mean square, computed in float32, and multiplies by the frozen weight `[h]`.

    Source: RMSNorm (arXiv:1910.07467).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        inverses = x.new_empty((len(x), 1), dtype=torch.float32)
        for rows, inverse, out_rows in _tiles(x, inverses, out):
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32, out=inverse)
            inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            torch.mul(rows, inverse, out=out_rows).mul_(weight)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverses = ctx.saved_tensors
        out = torch.empty_like(x)
        for rows, inverse, grad, out_rows in _tiles(x, inverses, grads[0], out):
            torch.mul(grad, weight, out=out_rows)
            # y = x / s with s^2 = mean(x^2) + eps, so dx = (g - x mean(g x) / s^2) / s.
            mean = (
                torch.linalg.vecdot(out_rows, rows)[:, None].float() * inverse.pow(3) / -x.shape[-1]
            )
            out_rows.mul_(inverse).addcmul_(rows, mean.to(x.dtype))
        return out, None, None


rms_norm = _RMSNorm.apply
"""(rows `[m, h]`, weight `[h]`, eps) -> normalised rows."""


class _GatedUnit(torch.autograd.Function):
    """Computes silu(gate) * up of the gate and up projections `[m, w]`.

    Source: SwiGLU (arXiv:2002.05202).
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = gate.new_empty(gate.shape)
        for rows in row_tiles(out):  # tiles fit into the CPU cache
            torch.mul(silu(gate[rows]), up[rows], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty_like(grad)
        grad_up = torch.empty_like(grad)
        for rows in row_tiles(grad):
            torch.mul(silu(gate[rows]), grad[rows], out=grad_up[rows])
            grad_gate[rows] = torch.ops.aten.silu_backward(grad[rows] * up[rows], gate[rows])
        return grad_gate, grad_up


gated_unit = _GatedUnit.apply
"""(gate `[m, w]`, up `[m, w]`) -> silu(gate) * up."""


def _by_head(x: Tensor, shape: torch.Size, heads: tuple[int, int]) -> Tensor:
    """View `[n * t, kv * rep * d]` as `[kv, n, rep, t, d]`."""
    return x.view(*shape[:2], *heads, 2 * shape[2]).permute(2, 0, 3, 1, 4)


def _rotate_into(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> None:
    """Write rotated `[kv, n, rep, t, d]` into `out`.

    A `sign` of -1 rotates back, which is the transpose.
    """
    (left, right), (new_left, new_right) = x.chunk(2, -1), out.chunk(2, -1)
    cos = cos[None, :, None]
    sin = sin[None, :, None]
    torch.mul(left, cos, out=new_left)
    new_left.addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=new_right)
    new_right.addcmul_(left, sin, value=sign)


class _Rotate(torch.autograd.Function):
    """Rotary position embeddings.

    `cos` and `sin` are `[n, t, d / 2]` and may include a constant factor.

    The head dimension moves to the front: `[n * t, kv * rep * d]` becomes `[kv, n, rep * t, d]`.

    Source: RoFormer (arXiv:2104.09864); the two halves of a head are paired, as in Llama.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        n, t, half = cos.shape
        out = x.new_empty((heads[0], n, heads[1], t, 2 * half))
        _rotate_into(_by_head(x, cos.shape, heads), cos, sin, 1.0, out)
        return out.view(heads[0], n, heads[1] * t, 2 * half)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        n, t, half = cos.shape
        kv, rep = ctx.heads
        out = grads[0].new_empty((n * t, kv * rep * 2 * half))
        _rotate_into(
            grads[0].view(kv, n, rep, t, 2 * half),
            cos,
            sin,
            -1.0,
            _by_head(out, cos.shape, ctx.heads),
        )
        return out, None, None, None


rotated = _Rotate.apply
"""(rows `[n * t, kv * rep * d]`, cosine and sine `[n, t, d / 2]`, (kv, rep)) -> rotated heads
`[kv, n, rep * t, d]`.
"""

# ---- linear layers with adapters


def projected(x: Tensor, layers: Sequence[NamedLinear], hook: LoraHook | None) -> Sequence[Tensor]:
    """Return the outputs `[m, out]` of linear layers with adapters, given their common input `[m, in]`."""
    names = tuple(name for name, _ in layers)
    linears = [layer for _, layer in layers]
    if hook is None or torch.is_grad_enabled():
        leaves_of = {} if hook is None else hook.adapters.leaves
        slots = () if hook is None else hook.slots
        leaves = [
            leaf
            for name in names
            if name in leaves_of
            for slot in slots
            for leaf in leaves_of[name][slot]
        ]
        return _Linears.apply(x, linears, hook, names, *leaves)  # type: ignore[no-any-return]
    outputs = [frozen_linear(x, layer.weight, layer.bias) for layer in linears]
    _add_adapters(x, outputs, hook.stacked(names, len(x), x.dtype, transposed=True))
    return outputs


def _add_adapters(
    x: Tensor, outputs: Sequence[Tensor], adapters: Sequence[StackedAdapters]
) -> Tensor | None:
    """Add scale * (x A^T) B^T to the outputs of layers in place, and return x A^T `[m, modules * r]`."""
    if adapters:
        low = x.new_empty((len(x), adapters[0].a.shape[1]))
    else:
        low = None
    for part in adapters:
        assert low is not None
        tokens = part.tokens
        slots = len(part.a)
        torch.bmm(
            x[tokens].view(slots, -1, x.shape[1]),
            part.a.mT,
            out=low[tokens].view(slots, -1, low.shape[1]),
        )
        for module, columns, b in part.b:
            out = outputs[module]
            low_of_module = low[tokens, columns].reshape(slots, -1, b.shape[2])
            out[tokens].view(slots, -1, out.shape[1]).baddbmm_(
                low_of_module, b.mT, alpha=part.scale
            )
    return low


class _Linears(torch.autograd.Function):
    """x W^T + b + scale * (x A^T) B^T for several layers at once.

    Gradients of x are summed in one buffer.

    Adapter products are in the dtype of `x`; their gradients are cast to that of the adapters.
    Segments of equal length, and the A matrices of all layers, share batched products. `leaves` are
    the A and B of every slot, module by module, which get the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layers: Sequence[nn.Linear],
        hook: LoraHook | None,
        names: tuple[str, ...],
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs = tuple(frozen_linear(x, layer.weight, layer.bias) for layer in layers)
        if hook is None:
            low = None
        else:
            low = _add_adapters(x, outputs, hook.stacked(names, len(x), x.dtype))
        ctx.set_materialize_grads(False)
        ctx.layers = layers
        ctx.hook = hook
        ctx.names = names
        ctx.save_for_backward(x, low)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # 1. The frozen layers.
        x, low = ctx.saved_tensors
        grads = tuple(None if grad is None else grad.contiguous() for grad in grads)
        grad_x: Tensor | None = None
        for layer, grad in zip(ctx.layers, grads, strict=True):
            if ctx.needs_input_grad[0] and grad is not None:
                if grad_x is None:
                    grad_x = frozen_linear(grad, layer.weight.T)
                else:
                    add_frozen_linear_(grad_x, grad, layer.weight.T)
        if low is None:
            return grad_x, None, None, None
        # 2. B: its gradient, and that of x A^T.
        adapters = ctx.hook.stacked(ctx.names, len(x), x.dtype)
        slots = len(ctx.hook.slots)
        dtype = ctx.hook.adapters.weights.dtype
        grad_low = torch.zeros_like(low)
        grad_b = {
            module: b.new_zeros((slots, b.shape[2], b.shape[1]), dtype=dtype)
            for module, _, b in adapters[0].b
        }
        for part in adapters:
            tokens = part.tokens
            count = len(part.a)
            for module, columns, b in part.b:
                grad = grads[module]
                if grad is not None:
                    grad = grad[tokens].view(count, -1, grad.shape[1])
                    grad_low[tokens, columns] = (
                        torch.bmm(grad, b).mul_(part.scale).view(-1, b.shape[2])
                    )
                    low_of_module = (low[tokens, columns] * part.scale).view(count, -1, b.shape[2])
                    grad_b[module][part.slots] += torch.bmm(low_of_module.mT, grad)
        # 3. A, and the adapters' part of the gradient of x.
        grad_a = x.new_zeros((slots, *adapters[0].a.shape[1:]), dtype=dtype)
        for part in adapters:
            tokens = part.tokens
            count = len(part.a)
            low_part = grad_low[tokens].view(count, -1, low.shape[1])
            grad_a[part.slots] += torch.bmm(low_part.mT, x[tokens].view(count, -1, x.shape[1]))
            if grad_x is not None:
                grad_x[tokens].view(count, -1, x.shape[1]).baddbmm_(low_part, part.a)
        # 4. Gradients in the order of the leaves.
        grad_leaves = list[Tensor | None]()
        for module, columns, _ in adapters[0].b:
            for slot in range(slots):
                if grads[module] is None:
                    pair = (None, None)
                else:
                    pair = (grad_a[slot, columns], grad_b[module][slot].mT)
                grad_leaves += pair
        return grad_x, None, None, None, *grad_leaves


# ---- the forward pass

PROBE = (3, 1, 2, 1, 5, 1, 6, 4)
"""Token ids on which a model's own forward pass is compared."""
TOLERANCES = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (0.05, 2.0**-7)}
"""Tolerated error of a layer's update, in norm: relative to the update, and to the rounded residual
stream.
"""


class FastLlama:
    """Forward passes with the weights of a decoder.

    See `evogrpo.members.language.causal_model.CausalModel`.

    Args:
        layout: Layout of the decoder.
        sharded_layers: Sharded layers of an FSDP base, if any.
    """

    def __init__(self, layout: WeightLayout, sharded_layers: ShardedLayers | None = None) -> None:
        self.layout = layout
        self.sharded_layers = sharded_layers

    @torch.no_grad()
    def matches_model(self) -> bool:
        """Return True if embeddings, layers and final norm give the model's own results on a few tokens.

        Each layer gets the model's own input, because bfloat16 rounding errors of two correct
        passes grow over layers.
        """
        # 1. Record inputs and outputs of the model's own layers.
        decoder = self.layout.decoder
        recorded = list[tuple[Tensor, Tensor]]()
        ids = torch.tensor([PROBE], device=decoder.embed_tokens.weight.device) % len(
            decoder.embed_tokens.weight
        )

        def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            recorded.append((args[0][0], output[0]))

        handles = [layer.module.register_forward_hook(record) for layer in self.layout.layers]
        try:
            final = decoder(input_ids=ids).last_hidden_state[0]
        finally:
            for handle in handles:
                handle.remove()

        # 2. Compare the embeddings, what each layer adds to the residual stream, and the final
        #    norm.
        def near(result: Tensor, expected: Tensor, residual: Tensor) -> bool:
            relative, rounding = TOLERANCES[expected.dtype]
            error, size, stream = (
                float(x.float().norm()) for x in (result - expected, expected, residual)
            )
            return error <= relative * size + rounding * stream

        mask = torch.ones_like(ids, dtype=torch.bool)
        rotations = self.rotations(mask, ids.shape[1])
        attend = self._attend_within(mask, ids.shape[1], None)
        if not torch.equal(self.embed(ids)[0], recorded[0][0]):
            return False
        for number, (before, after) in enumerate(recorded):
            result = self._layer(
                number, before, [rotations], None, lambda *heads: attend(*heads)[0]
            )
            if not near(result - before, after - before, after):
                return False
        last = recorded[-1][1]
        return near(_normed(last, decoder.norm), final, last)

    def run(self, ids: Tensor, mask: Tensor, cache: Cache | None, hook: LoraHook | None) -> Tensor:
        """Return final hidden states `[n, t, h]`; see `CausalModel.run`."""
        hidden = self.embed(ids).flatten(0, 1)
        rotations = self.rotations(mask, ids.shape[1])
        attend = self._attend_within(mask, ids.shape[1], cache)
        for number in range(len(self.layout.layers)):
            hidden = self._layer(
                number, hidden, [rotations], hook, lambda *heads: attend(*heads)[0]
            )
        return _normed(hidden, self.layout.decoder.norm).view(*ids.shape, -1)

    def run_with_prompts(
        self,
        prompts: tuple[Tensor, Tensor, Cache],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        hook: LoraHook | None,
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
        prompt_ids, prompt_mask, cache = prompts
        mask = torch.cat([prompt_mask[rows], present], dim=1)
        parts = [self.embed(part).flatten(0, 1) for part in (prompt_ids, ids)]
        padding = padding_rows(prompt_ids.numel() + ids.numel(), parts[0].dtype, ids.device)
        hidden = torch.cat([*parts, *_zeros(padding, parts[0])])
        rotations = [
            self.rotations(prompt_mask, prompt_ids.shape[1]),
            self.rotations(mask, ids.shape[1]),
        ]
        # 2. Attention: prompts within themselves, rows on top of the prompts' keys and values
        #    `[kv, m, P, d]`.
        attend_prompts = self._attend_within(prompt_mask, prompt_ids.shape[1], cache)
        past = prompt_mask.shape[1]
        t = ids.shape[1]
        own_biases = attention_biases(self.layout, mask, t, slice(past, None))
        prompt_biases = attention_biases(self.layout, mask, t, slice(past))
        order, runs = prompt_runs(rows, len(prompt_mask))
        prompt_of = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs)).to(rows.device)

        def attend(number: int, layer: Layer, prompt_heads: Heads, row_heads: Heads) -> Tensor:
            of_prompts, *states = attend_prompts(number, layer, prompt_heads)
            keys, values = states if order is None else (x[:, order] for x in states)
            shared = SharedPrompts(keys, values, prompt_of, runs)
            of_rows = attention(
                *row_heads, t, own_biases[layer.window], shared, prompt_biases[layer.window]
            )
            return torch.cat([of_prompts, of_rows, *_zeros(padding, of_prompts)])

        for number in range(len(self.layout.layers)):
            hidden = self._layer(number, hidden, rotations, hook, attend)
        # 3. Split the hidden states again.
        of_prompts, of_rows, _ = hidden.split([prompt_ids.numel(), ids.numel(), padding])
        last = of_prompts.view(*prompt_ids.shape, -1)[:, -1]
        norm = self.layout.decoder.norm
        return _normed(last, norm), _normed(of_rows, norm).view(*ids.shape, -1)

    def _attend_within(
        self, mask: Tensor, t: int, cache: Cache | None
    ) -> Callable[[int, Layer, Heads], tuple[Tensor, Tensor, Tensor]]:
        """Return the attention over rows' own and cached tokens.

        It also returns these keys and values.
        """
        biases = attention_biases(self.layout, mask, t, slice(None))

        def attend(number: int, layer: Layer, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = heads
            if cache is not None:
                k, v = (
                    x.transpose(0, 1)
                    for x in cache.update(k.transpose(0, 1), v.transpose(0, 1), number)
                )
            return attention(q, k, v, t, biases[layer.window], None, None), k, v

        return attend

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings `[n, t, h]`."""
        return embedding(ids, self.layout.decoder.embed_tokens.weight)

    def rotations(self, mask: Tensor, t: int) -> Rotations:
        """Return the rotary embeddings of the last t tokens.

        Positions are counted from the first True.
        """
        return self.rotations_at((mask.cumsum(1) - 1).clamp(min=0)[:, -t:])

    def rotations_at(self, positions: Tensor) -> Rotations:
        """Return the rotary embeddings at positions `[n, t]`.

        Those of queries contain the attention scale.
        """
        decoder = self.layout.decoder
        half = self.layout.width // 2
        scaling = self.layout.scaling
        cos, sin = decoder.rotary_emb(decoder.norm.weight, positions)
        # the second half repeats the first
        cos = cos[..., :half]
        sin = sin[..., :half]
        return (cos, sin), (cos * scaling, sin * scaling)

    def _layer(
        self,
        number: int,
        hidden: Tensor,
        rotations: Sequence[Rotations],
        hook: LoraHook | None,
        attend: Attend,
    ) -> Tensor:
        """Return the hidden states `[tokens, h]` after one layer.

        Args:
            number: Number of the layer.
            hidden: Hidden states of one group of rows per element of `rotations`; with several
                groups, padding tokens follow.
            rotations: Rotary embeddings of each group.
            hook: Adapter hook.
            attend: Attention over the heads of all groups.
        """
        layer, (kv, rep) = self.layout.layers[number], self.layout.heads
        if self.sharded_layers is not None:
            self.sharded_layers.gather(layer.module)
        # 1. Queries, keys and values `[tokens, heads * d]`, normalised by head.
        qkv = projected(_normed(hidden, layer.before_attention), layer.projections, hook)
        if layer.head_norms is not None:
            norms = zip(qkv[:2], layer.head_norms, strict=True)
            qkv = [
                *(_normed(x.view(-1, self.layout.width), norm).view(x.shape) for x, norm in norms),
                qkv[2],
            ]
        # 2. Rotate the heads of each group; leave out the padding tokens at the end.
        shapes = [of_keys[0].shape[:2] for of_keys, _ in rotations]
        sizes = [shape.numel() for shape in shapes]
        groups = zip(
            *(x.split([*sizes, len(x) - sum(sizes)])[: len(sizes)] for x in qkv), strict=True
        )
        heads = [
            (
                rotated(q, *of_queries, (kv, rep)),
                rotated(k, *of_keys, (kv, 1)),
                v.view(*shape, kv, self.layout.width)
                .permute(2, 0, 1, 3)
                .contiguous(),  # `[kv, n, t, d]`
            )
            for (q, k, v), (of_keys, of_queries), shape in zip(
                groups, rotations, shapes, strict=True
            )
        ]
        # 3. Attention.
        (added,) = projected(attend(number, layer, *heads), [layer.output], hook)
        hidden = hidden + added
        # 4. MLP.
        gate, up = projected(_normed(hidden, layer.before_mlp), layer.gates, hook)
        (added,) = projected(gated_unit(gate, up), [layer.down], hook)
        after: Tensor = hidden + added
        if self.sharded_layers is not None:
            self.sharded_layers.gather_in_backward(layer.module, after)
        return after


def _zeros(rows: int, like: Tensor) -> list[Tensor]:
    """Return a list with rows of zeros; empty if `rows` is 0."""
    if rows:
        return [like.new_zeros((rows, like.shape[1]))]
    return []


def _normed(hidden: Tensor, norm: Any) -> Tensor:
    return rms_norm(hidden, norm.weight, norm.variance_epsilon)  # type: ignore[no-any-return]


def attention_biases(
    layout: WeightLayout, mask: Tensor, t: int, keys: slice
) -> dict[int | None, Tensor | None]:
    """Return the biases `[n or 1, t, keys]` on attention scores for padding, causality and windows, by window size.

    Args:
        layout: Layout of the decoder.
        mask: `[n, s]` booleans: True for real tokens.
        t: Number of query tokens, the last ones.
        keys: Keys that the scores are about. A bias is None where all of them are visible.
    """
    dtype = layout.decoder.norm.weight.dtype
    lowest = torch.finfo(dtype).min / 2  # not -inf: tokens without visible keys must not become NaN
    place = torch.arange(mask.shape[1], device=mask.device)
    distance = place[-t:, None] - place[keys]
    no_padding = bool(mask.all())
    biases = dict[int | None, Tensor | None]()
    for window in {layer.window for layer in layout.layers}:
        if window is None:
            near = distance >= 0
        else:
            near = (distance >= 0) & (distance < window)
        # one bias for all rows without padding
        if no_padding:
            visible = near[None]
        else:
            visible = near & mask[:, None, keys]
        zeros = torch.zeros(visible.shape, dtype=dtype, device=mask.device)
        biases[window] = None if bool(visible.all()) else zeros.masked_fill_(~visible, lowest)
    return biases
