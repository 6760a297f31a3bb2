"""fast_llama: the forward pass of Llama-like models, computed from their weights.

Letters in shapes: `n` rows, `t` new tokens of a row, `s` its cached and new tokens, `m` prompts,
`P` tokens of a prompt; `kv` key-value heads, `rep` query heads that share one, `d` width of a head,
`h` width of a hidden state, `r` rank of an adapter. In norms and linear layers, `m` counts tokens
and `w` is the width of the MLP.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from evogrpo.functional.log_probs import row_tiles
from evogrpo.functional.matmul import add_frozen_linear_, frozen_linear, padding_rows
from evogrpo.members.fast_llama.attention import SharedPrompts, attention, prompt_runs
from evogrpo.members.fast_llama.weight_layout import Layer, NamedLinear, WeightLayout
from evogrpo.members.language.adapters import LoraHook, StackedAdapters
from evogrpo.members.language.fsdp import ShardedLayers

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries `[kv, n, rep * t, d]`, keys and values `[kv, n, t, d]`."""
Attend = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(layer number, layer, heads of each group of rows) -> output `[tokens, kv * rep * d]` of the
attention, and the keys and values `[kv, n, s, d]` of the first group with what is cached.
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
    """Divides rows `[m, h]` by their root mean square, and multiplies by a frozen weight `[h]`.

    The root mean square is computed in float32.

    Source: RMSNorm (arXiv:1910.07467).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        inverses = x.new_empty((len(x), 1), dtype=torch.float32)
        for rows, inverse, out_rows in _tiles(x, inverses, out):
            # 1 / sqrt(mean(x^2) + eps), computed in place from the norm of x.
            torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32, out=inverse)
            inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            torch.mul(rows, inverse, out=out_rows).mul_(weight)
        ctx.save_for_backward(x, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient `[m, h]` of x; weight and eps have none."""
        x, weight, inverses = ctx.saved_tensors
        out = torch.empty_like(x)
        for rows, inverse, grad, out_rows in _tiles(x, inverses, grads[0], out):
            torch.mul(grad, weight, out=out_rows)
            # y = x / s with s^2 = mean(x^2) + eps, so dx = (g - x mean(g x) / s^2) / s.
            products = torch.linalg.vecdot(out_rows, rows)[:, None].float()
            factor_of_x = products * inverse.pow(3) / -x.shape[-1]
            out_rows.mul_(inverse).addcmul_(rows, factor_of_x.to(x.dtype))
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
        # Tiles fit into the CPU cache.
        for rows in row_tiles(out):
            torch.mul(silu(gate[rows]), up[rows], out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients `[m, w]` of gate and up."""
        grad = grads[0]
        gate, up = ctx.saved_tensors
        grad_gate = torch.empty_like(grad)
        grad_up = torch.empty_like(grad)
        # y = silu(g) u, so du = dy silu(g) and dg = dy u silu'(g).
        for rows in row_tiles(grad):
            torch.mul(silu(gate[rows]), grad[rows], out=grad_up[rows])
            grad_activation = grad[rows] * up[rows]
            grad_gate[rows] = torch.ops.aten.silu_backward(grad_activation, gate[rows])
        return grad_gate, grad_up


gated_unit = _GatedUnit.apply
"""(gate `[m, w]`, up `[m, w]`) -> silu(gate) * up."""


def _by_head(x: Tensor, shape: torch.Size, heads: tuple[int, int]) -> Tensor:
    """View `[n * t, kv * rep * d]` as `[kv, n, rep, t, d]`."""
    n, t, half = shape
    return x.view(n, t, *heads, 2 * half).permute(2, 0, 3, 1, 4)


def _rotate_into(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> None:
    """Write rotated `[kv, n, rep, t, d]` into `out`.

    A `sign` of -1 rotates back, which is the transpose.
    """
    left, right = x.chunk(2, -1)
    new_left, new_right = out.chunk(2, -1)
    cos = cos[None, :, None]
    sin = sin[None, :, None]
    # (left, right) is rotated by the angle of its position.
    torch.mul(left, cos, out=new_left)
    new_left.addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=new_right)
    new_right.addcmul_(left, sin, value=sign)


class _Rotate(torch.autograd.Function):
    """Rotary position embeddings.

    `cos` and `sin` are `[n, t, d / 2]` and may include a constant factor. Heads move to the front:
    `[n * t, kv * rep * d]` becomes `[kv, n, rep * t, d]`.

    Source: RoFormer (arXiv:2104.09864); the two halves of a head are paired, as in Llama.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        n, t, half = cos.shape  # half = d / 2
        kv, rep = heads
        out = x.new_empty((kv, n, rep, t, 2 * half))
        by_head = _by_head(x, cos.shape, heads)
        _rotate_into(by_head, cos, sin, 1.0, out)
        return out.view(kv, n, rep * t, 2 * half)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient `[n * t, kv * rep * d]` of x, rotated back by the same angles."""
        cos, sin = ctx.saved_tensors
        n, t, half = cos.shape
        kv, rep = ctx.heads
        # [kv, n, rep * t, d] -> [kv, n, rep, t, d], as `_rotate_into` takes it.
        grad = grads[0].view(kv, n, rep, t, 2 * half)
        out = grad.new_empty((n * t, kv * rep * 2 * half))
        by_head = _by_head(out, cos.shape, ctx.heads)
        _rotate_into(grad, cos, sin, -1.0, by_head)
        return out, None, None, None


rotated = _Rotate.apply
"""(rows `[n * t, kv * rep * d]`, cosine and sine `[n, t, d / 2]`, (kv, rep)) -> rotated heads
`[kv, n, rep * t, d]`.
"""

# ---- linear layers with adapters


def projected(x: Tensor, layers: Sequence[NamedLinear], hook: LoraHook | None) -> Sequence[Tensor]:
    """Return the outputs `[m, out]` of linear layers with adapters for their input `[m, in]`."""
    names = tuple(name for name, _ in layers)
    linears = [layer for _, layer in layers]
    if hook is not None and not torch.is_grad_enabled():
        outputs = [frozen_linear(x, layer.weight, layer.bias) for layer in linears]
        adapters = hook.stacked(names, len(x), x.dtype, transposed=True)
        _add_adapters(x, outputs, adapters)
        return outputs
    # A and B of every slot, module by module, so that autograd asks for their gradients.
    leaves = list[Tensor]()
    if hook is not None:
        for name in names:
            by_slot = hook.adapters.leaves.get(name)
            if by_slot is not None:
                for slot in hook.slots:
                    leaves += by_slot[slot]
    return _Linears.apply(x, linears, hook, names, *leaves)  # type: ignore[no-any-return]


def _add_adapters(
    x: Tensor, outputs: Sequence[Tensor], adapters: Sequence[StackedAdapters]
) -> Tensor | None:
    """Add scale * (x A^T) B^T to the outputs of layers in place.

    Returns:
        x A^T `[m, modules * r]`; None without adapters.
    """
    if not adapters:
        return None
    low = x.new_empty((len(x), adapters[0].a.shape[1]))
    for part in adapters:
        tokens = part.tokens
        slots = len(part.a)
        # x A^T of all modules in one product.
        segments = x[tokens].view(slots, -1, x.shape[1])
        low_segments = low[tokens].view(slots, -1, low.shape[1])
        torch.bmm(segments, part.a.mT, out=low_segments)
        # B of each module.
        for module, columns, b in part.b:
            out = outputs[module][tokens]
            low_of_module = low[tokens, columns].reshape(slots, -1, b.shape[2])
            wide = out.view(slots, -1, out.shape[1])
            wide.baddbmm_(low_of_module, b.mT, alpha=part.scale)
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
        low = None
        if hook is not None:
            adapters = hook.stacked(names, len(x), x.dtype)
            low = _add_adapters(x, outputs, adapters)
        # Gradients of outputs that are not used stay None, and cost no product.
        ctx.set_materialize_grads(False)
        ctx.layers = layers
        ctx.hook = hook
        ctx.names = names
        ctx.save_for_backward(x, low)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the leaves; the frozen layers have none."""
        # 1. The frozen layers: dx = sum of dy W.
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
        # 2. Buffers. With l = x A^T and y = scale * l B^T, the gradients are dl = scale * dy B,
        #    dB^T = scale * l^T dy, dA = dl^T x and dx = dl A.
        adapters = ctx.hook.stacked(ctx.names, len(x), x.dtype)
        slots = len(ctx.hook.slots)
        dtype = ctx.hook.adapters.weights.dtype
        modules = adapters[0].b
        grad_low = torch.zeros_like(low)
        grad_a = x.new_zeros((slots, *adapters[0].a.shape[1:]), dtype=dtype)
        # By module, of B^T `[slots, r, out]`.
        grad_b = {}
        for module, _, b in modules:
            _, width, rank = b.shape
            grad_b[module] = b.new_zeros((slots, rank, width), dtype=dtype)
        for part in adapters:
            tokens = part.tokens
            count = len(part.a)
            # 3. dl and dB of each module.
            for module, columns, b in part.b:
                if grads[module] is None:
                    continue
                grad = grads[module][tokens]
                grad = grad.view(count, -1, grad.shape[1])  # [s, tokens of each, out]
                rank = b.shape[2]
                scaled = torch.bmm(grad, b).mul_(part.scale)
                grad_low[tokens, columns] = scaled.view(-1, rank)
                low_of_module = low[tokens, columns] * part.scale
                low_of_module = low_of_module.view(count, -1, rank)
                grad_b[module][part.slots] += torch.bmm(low_of_module.mT, grad)
            # 4. dA of all modules, and the adapters' part of dx.
            low_part = grad_low[tokens].view(count, -1, low.shape[1])
            segments = x[tokens].view(count, -1, x.shape[1])
            grad_a[part.slots] += torch.bmm(low_part.mT, segments)
            if grad_x is not None:
                grad_segments = grad_x[tokens].view(count, -1, x.shape[1])
                grad_segments.baddbmm_(low_part, part.a)
        # 5. Gradients in the order of the leaves.
        grad_leaves = list[Tensor | None]()
        for module, columns, _ in modules:
            for slot in range(slots):
                if grads[module] is None:
                    grad_leaves += [None, None]
                else:
                    grad_leaves.append(grad_a[slot, columns])
                    grad_leaves.append(grad_b[module][slot].mT)
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
        """Return True if embeddings, layers and final norm give the model's own results.

        Each layer gets the model's own input, because bfloat16 rounding errors of two correct
        passes grow over layers.
        """
        # 1. Record inputs and outputs of the model's own layers.
        decoder = self.layout.decoder
        recorded = list[tuple[Tensor, Tensor]]()
        embeddings = decoder.embed_tokens.weight
        ids = torch.tensor([PROBE], device=embeddings.device) % len(embeddings)

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
            """Return True if a result differs by rounding only."""
            relative, rounding = TOLERANCES[expected.dtype]
            error = (result - expected).float().norm()
            size = expected.float().norm()
            stream = residual.float().norm()
            return bool(error <= relative * size + rounding * stream)

        mask = torch.ones_like(ids, dtype=torch.bool)
        rotations = self.rotations(mask, ids.shape[1])
        attend = self._attend_within(mask, ids.shape[1], None)
        # Embeddings are copied from the same matrix, so they must be equal.
        first, _ = recorded[0]
        if not torch.equal(self.embed(ids)[0], first):
            return False
        for number, (before, after) in enumerate(recorded):
            result = self._layer(number, before, [rotations], None, attend)
            if not near(result - before, after - before, after):
                return False
        _, last = recorded[-1]
        return near(_normed(last, decoder.norm), final, last)

    def run(
        self,
        ids: Tensor,
        mask: Tensor,
        cache: Cache | None,
        hook: LoraHook | None,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Return final hidden states `[n, t, h]`; see `CausalModel.run`.

        `recompute` computes layers again in the backward pass instead of storing their activations.
        """
        hidden = self.embed(ids).flatten(0, 1)
        rotations = self.rotations(mask, ids.shape[1])
        attend = self._attend_within(mask, ids.shape[1], cache)
        for number in range(len(self.layout.layers)):
            hidden = self._layer(number, hidden, [rotations], hook, attend, recompute=recompute)
        return _normed(hidden, self.layout.decoder.norm).view(*ids.shape, -1)

    def run_with_prompts(
        self,
        prompts: tuple[Tensor, Tensor, Cache],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        hook: LoraHook | None,
        *,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        """Run prompts and completions in one pass, which halves the number of matrix products.

        Args:
            prompts: Tokens `[m, t]` of the prompts; mask and cache as for `run`.
            rows: `[n]` prompt of each row.
            ids: `[n, t]` tokens after the prompt.
            present: `[n, t]` booleans: True for real tokens.
            hook: Adapter hook of all prompt tokens, then of all row tokens.
            recompute: As for `run`.

        Returns:
            Hidden states of the prompts' last tokens `[m, h]`, and of the rows' tokens `[n, t, h]`.
        """
        # 1. Embed prompts and rows; pad the number of tokens to one for which products are fast.
        prompt_ids, prompt_mask, cache = prompts
        prompt_t = prompt_ids.shape[1]
        past = prompt_mask.shape[1]
        t = ids.shape[1]
        mask = torch.cat([prompt_mask[rows], present], dim=1)  # [n, P + t]
        of_prompts = self.embed(prompt_ids).flatten(0, 1)
        of_rows = self.embed(ids).flatten(0, 1)
        tokens = len(of_prompts) + len(of_rows)
        padding = padding_rows(tokens, of_rows.dtype, ids.device)
        hidden = torch.cat([of_prompts, of_rows, *_zeros(padding, of_rows)])
        rotations = [self.rotations(prompt_mask, prompt_t), self.rotations(mask, t)]
        # 2. Attention: prompts within themselves, rows on top of the prompts' keys and values
        #    `[kv, m, P, d]`.
        attend_prompts = self._attend_within(prompt_mask, prompt_t, cache)
        own_biases = attention_biases(self.layout, mask, t, slice(past, None))
        prompt_biases = attention_biases(self.layout, mask, t, slice(past))
        order, runs = prompt_runs(rows, len(prompt_mask))
        prompt_numbers = torch.arange(len(runs))
        prompt_of = prompt_numbers.repeat_interleave(torch.tensor(runs)).to(rows.device)

        def attend(
            number: int, layer: Layer, prompt_heads: Heads, row_heads: Heads
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Compute the attention of one layer; see `Attend`."""
            # Rows attend to the keys and values that the prompts' attention has computed.
            of_prompts, keys, values = attend_prompts(number, layer, prompt_heads)
            # Bring the prompts into the order of the rows, unless they are in it.
            if order is not None:
                keys = keys[:, order]
                values = values[:, order]
            shared = SharedPrompts(keys, values, prompt_of, runs)
            q, k, v = row_heads
            own_bias = own_biases[layer.window]
            of_rows = attention(q, k, v, t, own_bias, shared, prompt_biases[layer.window])
            out = torch.cat([of_prompts, of_rows, *_zeros(padding, of_prompts)])
            return out, keys, values

        for number in range(len(self.layout.layers)):
            hidden = self._layer(number, hidden, rotations, hook, attend, recompute=recompute)
        # 3. Split the hidden states again.
        sizes = [prompt_ids.numel(), ids.numel(), padding]
        of_prompts, of_rows, _ = hidden.split(sizes)
        last = of_prompts.view(*prompt_ids.shape, -1)[:, -1]
        norm = self.layout.decoder.norm
        normed_rows = _normed(of_rows, norm).view(*ids.shape, -1)
        return _normed(last, norm), normed_rows

    def _attend_within(self, mask: Tensor, t: int, cache: Cache | None) -> Attend:
        """Return the attention over rows' own and cached tokens."""
        biases = attention_biases(self.layout, mask, t, slice(None))

        def attend(number: int, layer: Layer, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
            """Compute the attention of one layer; see `Attend`."""
            q, k, v = heads
            if cache is not None:
                # Caches of transformers have the rows first: [n, kv, t, d].
                keys, values = cache.update(k.transpose(0, 1), v.transpose(0, 1), number)
                k = keys.transpose(0, 1)
                v = values.transpose(0, 1)
            out = attention(q, k, v, t, biases[layer.window], None, None)
            return out, k, v

        return attend

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings `[n, t, h]`."""
        return embedding(ids, self.layout.decoder.embed_tokens.weight)

    def rotations(self, mask: Tensor, t: int) -> Rotations:
        """Return the rotary embeddings of the last t tokens.

        Positions are counted from the first True.
        """
        # Padding on the left has no position, so the value is of no importance.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return self.rotations_at(positions[:, -t:])

    def rotations_at(self, positions: Tensor) -> Rotations:
        """Return the rotary embeddings at positions `[n, t]`.

        Those of queries contain the attention scale.
        """
        decoder = self.layout.decoder
        half = self.layout.width // 2
        scaling = self.layout.scaling
        cos, sin = decoder.rotary_emb(decoder.norm.weight, positions)
        # The second half repeats the first.
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
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Gather a layer if it is sharded, and return `_layer_output`; see `run`."""
        module = self.layout.layers[number].module
        inputs = (number, hidden, rotations, hook, attend)
        if self.sharded_layers is not None:
            self.sharded_layers.gather(module)
        if recompute:
            after: Tensor = checkpoint(
                self._layer_output, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        else:
            after = self._layer_output(*inputs)
        if self.sharded_layers is not None:
            self.sharded_layers.gather_in_backward(module, after)
        return after

    def _layer_output(
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
        layer = self.layout.layers[number]
        kv, rep = self.layout.heads
        width = self.layout.width
        # 1. Queries, keys and values `[tokens, heads * d]`, normalised by head.
        normed = _normed(hidden, layer.before_attention)
        q, k, v = projected(normed, layer.projections, hook)
        if layer.head_norms is not None:
            q_norm, k_norm = layer.head_norms
            q = _normed(q.view(-1, width), q_norm).view(q.shape)
            k = _normed(k.view(-1, width), k_norm).view(k.shape)
        # 2. Rotate the heads of each group of rows. Padding tokens at the end are in no group.
        sizes = [of_keys[0].shape[:2].numel() for of_keys, _ in rotations]
        sizes.append(len(hidden) - sum(sizes))
        groups = zip(rotations, q.split(sizes), k.split(sizes), v.split(sizes), strict=False)
        heads = list[Heads]()
        for (of_keys, of_queries), group_q, group_k, group_v in groups:
            n, t, _ = of_keys[0].shape
            queries = rotated(group_q, *of_queries, (kv, rep))
            keys = rotated(group_k, *of_keys, (kv, 1))
            by_token = group_v.view(n, t, kv, width)
            values = by_token.permute(2, 0, 1, 3).contiguous()
            heads.append((queries, keys, values))
        # 3. Attention.
        attended, _, _ = attend(number, layer, *heads)
        (added,) = projected(attended, [layer.output], hook)
        hidden = hidden + added
        # 4. MLP. Gate and up projections share a product with the adapters' A.
        normed = _normed(hidden, layer.before_mlp)
        gate, up = projected(normed, layer.gates, hook)
        (added,) = projected(gated_unit(gate, up), [layer.down], hook)
        return hidden + added


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
    """Return the biases `[n or 1, t, keys]` on attention scores, by window size.

    They mask padding, later tokens, and tokens outside of the window.

    Args:
        layout: Layout of the decoder.
        mask: `[n, s]` booleans: True for real tokens.
        t: Number of query tokens, the last ones.
        keys: Keys that the scores are about. A bias is None where all of them are visible. On
            accelerators, whose kernels mask later tokens, it is also None where every real token
            sees all tokens before it.
    """
    kernels_are_causal = mask.device.type != "cpu"
    dtype = layout.decoder.norm.weight.dtype
    # Not -inf: tokens without visible keys must not become NaN.
    lowest = torch.finfo(dtype).min / 2
    positions = torch.arange(mask.shape[1], device=mask.device)
    distance = positions[-t:, None] - positions[keys]  # [t, keys]
    no_padding = bool(mask.all())
    biases = dict[int | None, Tensor | None]()
    for window in {layer.window for layer in layout.layers}:
        near = distance >= 0
        if window is not None:
            near &= distance < window
        # Without padding, all rows have the same bias.
        visible = near[None] if no_padding else near & mask[:, None, keys]
        biases[window] = None
        # Keys that must be masked by the bias.
        masked = ~visible
        if kernels_are_causal:
            masked = masked & (distance >= 0)
            if not no_padding:
                masked = masked & mask[:, -t:, None]
        if bool(masked.any()):
            zeros = torch.zeros(visible.shape, dtype=dtype, device=mask.device)
            biases[window] = zeros.masked_fill_(~visible, lowest)
    return biases
