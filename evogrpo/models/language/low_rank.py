"""LoRA of all members in one forward pass: each row is multiplied by its own member's matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from evogrpo.models.language.lora import Target

Run = tuple[slice, slice, int]
"""Adjacent segments of equal length: their tokens, their slots, and the number of segments."""


def runs_of(sizes: Sequence[int], begin: int = 0) -> list[Run]:
    """Group adjacent segments of equal length, so that one batched product covers each group.

    Args:
        sizes: Tokens of each slot's segment.
        begin: Offset of the first token.
    """
    found, first, at = list[Run](), 0, begin
    while first < len(sizes):
        last = first
        while last < len(sizes) and sizes[last] == sizes[first]:
            last += 1
        end = at + sizes[first] * (last - first)
        found.append((slice(at, end), slice(first, last), last - first))
        first, at = last, end
    return found


@dataclass(frozen=True)
class _Segment:
    """Adjacent rows of one slot, and `later` rows of the slot after the rows of all slots."""

    slot: int
    rows: int
    later: int = 0


class AdapterLeaves(NamedTuple):
    """Adapters of modules with the same input, as autograd leaves.

    Attributes:
        runs: Token segments, in order.
        acting: True for each module with an adapter.
        leaves: A and B of every slot for the first adapted module, then for the second, ...
        scale: Factor on B A x.
    """

    runs: list[Run]
    acting: list[bool]
    leaves: list[Tensor]
    scale: float

    def joined(self, leaves: Sequence[Tensor], dtype: torch.dtype) -> "StackedAdapters":
        """Stack the leaves for products of all slots and modules at once."""
        # Leaves are ordered (module, slot, A or B); the stack of A matrices is ordered (slot, module).
        modules = sum(self.acting)
        slots = len(leaves) // (2 * modules)
        every_a = [leaves[2 * (slot + slots * number)] for slot in range(slots) for number in range(modules)]
        every_b = iter(leaves[1::2])
        return StackedAdapters(
            self.runs,
            torch.cat(every_a).view(slots, -1, every_a[0].shape[1]).to(dtype),
            [torch.stack([next(every_b) for _ in range(slots)]).to(dtype) if acts else None for acts in self.acting],
            self.scale,
        )


class StackedAdapters(NamedTuple):
    """Adapters of modules with the same input, stacked for products of all slots and modules at once.

    Attributes:
        runs: Token segments, in order.
        a: `[s, modules * r, in]`.
        b: `[s, out, r]` of each module; None without adapter.
        scale: Factor on B A x.
    """

    runs: list[Run]
    a: Tensor
    b: list[Tensor | None]
    scale: float


class LoraAdapters:
    """LoRA matrices of all members.

    Args:
        targets: The adapted modules.
        weights: `[p, k]` adapters of all members; the matrices are views of it.
        scale: Factor on B A x.
    """

    def __init__(self, targets: Sequence[Target], weights: Tensor, scale: float) -> None:
        self.targets = {target.name: target for target in targets}
        self.weights = weights
        self.scale = scale
        self.leaves = {target.name: [_leaves(target, row) for row in weights] for target in targets}

    def hook(self, slots: Tensor) -> "LoraHook":
        """Return the hook for rows of these slots, which are sorted."""
        values, counts = torch.unique_consecutive(slots, return_counts=True)
        return LoraHook(self, tuple(map(_Segment, values.tolist(), counts.tolist())))

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Accumulate a member's gradient into `buffer` `[k]` in the following backward passes; None stops it."""
        for name, target in self.targets.items():
            for leaf, matrix_of in zip(self.leaves[name][slot], (target.a, target.b), strict=True):
                leaf.grad = None if buffer is None else matrix_of(buffer)


class LoraHook:
    """Adapters of the rows of one forward pass; see `evogrpo.models.language.protocols.AdapterHook`.

    Args:
        adapters: Adapters of all members.
        segments: Slots of the rows, in order.
    """

    def __init__(self, adapters: LoraAdapters, segments: tuple[_Segment, ...]) -> None:
        self._adapters, self._segments = adapters, segments
        self._rows = sum(segment.rows + segment.later for segment in segments)

    def joined(
        self, modules: tuple[str, ...], tokens: int, dtype: torch.dtype, *, first: bool = False
    ) -> StackedAdapters | None:
        """Return the stacked adapters of modules, without gradient; None if no module has one.

        Args:
            modules: Names of modules with the same input.
            tokens: Number of tokens of all rows.
            dtype: Dtype of the products.
            first: Matrices are the first factor of products instead of, transposed, the last. May return views of the
                weights, valid until the next optimizer step.
        """
        known = [self._adapters.targets.get(name) for name in modules]
        acting = [target for target in known if target is not None]
        if not acting:
            return None
        every, slots = self._adapters.weights, self.slots
        every_a = [_of_slots(target.a(every), slots) for target in acting]
        a = every_a[0] if len(every_a) == 1 else torch.cat(every_a, 1)
        laid_out = torch.Tensor.to if first else _transposed
        bs = [None if target is None else laid_out(_of_slots(target.b(every), slots), dtype) for target in known]
        return StackedAdapters(self._runs(tokens), laid_out(a, dtype), bs, self._adapters.scale)

    def pieces(self, modules: Sequence[str], tokens: int) -> AdapterLeaves | None:
        """Return the adapters of modules as autograd leaves; None if no module has one."""
        every = [self._adapters.leaves.get(name) for name in modules]
        own = [leaf for slots in every if slots is not None for one in self._segments for leaf in slots[one.slot]]
        acting = [slots is not None for slots in every]
        return AdapterLeaves(self._runs(tokens), acting, own, self._adapters.scale) if own else None

    @property
    def slots(self) -> list[int]:
        """Slots of the segments, in order."""
        return [segment.slot for segment in self._segments]

    def followed(self, tokens: int, by: "LoraHook", others: int) -> "LoraHook":
        """Return the hook of these rows followed by the rows of another hook, with tokens as rows.

        Args:
            tokens: Tokens per row.
            by: Hook of the rows that follow, with the same slots.
            others: Tokens per row of these.
        """
        both = zip(self._segments, by._segments, strict=True)
        segments = tuple(_Segment(one.slot, one.rows * tokens, other.rows * others) for one, other in both)
        return LoraHook(self._adapters, segments)

    def _runs(self, tokens: int) -> list[Run]:
        per_row = tokens // self._rows
        first = [per_row * segment.rows for segment in self._segments]
        later = [per_row * segment.later for segment in self._segments]
        return runs_of(first) + (runs_of(later, sum(first)) if any(later) else [])

    def __call__(self, module: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Add scale * B A x to a module's output, in place."""
        target, scale = self._adapters.targets[module], self._adapters.scale
        weights, leaves = self._adapters.weights, self._adapters.leaves[module]
        output = output.contiguous()  # copies only for layers that transpose their output
        x = inputs.reshape(-1, target.width_in).to(weights.dtype)
        out = output.view(-1, target.width_out)
        # Not output.shape[0]: some architectures flatten rows and positions.
        sizes = [segment.rows * (len(out) // self._rows) for segment in self._segments]
        if torch.is_grad_enabled():
            own = [leaf for segment in self._segments for leaf in leaves[segment.slot]]
            added: Tensor = _AddLowRank.apply(output, inputs, sizes, scale, *own)
            return added
        if (
            len(sizes) == len(weights) > 1 and len(set(sizes)) == 1
        ):  # all members with equally many rows: one batched product
            _add_all_low_rank(x.unflatten(0, (len(weights), -1)), out, target.a(weights), target.b(weights), scale)
            return output
        for segment, part, base in zip(self._segments, x.split(sizes), out.split(sizes), strict=True):
            _add_low_rank(part, base, *leaves[segment.slot], scale)
        return output


class _AddLowRank(torch.autograd.Function):
    """output += scale * (x A^T) B^T in place, with one A and B per segment of rows.

    `output` is the first argument because autograd requires this of functions that modify a view.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, output: Tensor, x: Tensor, sizes: Sequence[int], scale: float, *leaves: Tensor
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        parts = zip(rows.split(sizes), output.view(-1, output.shape[-1]).split(sizes), strict=True)
        low = [
            _add_low_rank(part, base, a, b, scale)
            for (part, base), a, b in zip(parts, leaves[::2], leaves[1::2], strict=True)
        ]
        ctx.mark_dirty(output)
        ctx.save_for_backward(rows, *low, *leaves)
        ctx.sizes, ctx.scale, ctx.shape = sizes, scale, x.shape  # type: ignore[attr-defined]
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors  # type: ignore[attr-defined]
        sizes: Sequence[int] = ctx.sizes  # type: ignore[attr-defined]
        low, leaves = saved[: len(sizes)], saved[len(sizes) :]
        slopes = grads[0].reshape(-1, grads[0].shape[-1])
        wanted = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        into = rows.new_empty(rows.shape) if wanted else None
        own: list[Tensor] = []
        # y = s (x A^T) B^T: with g = dy, d(x A^T) = s g B, dA = (s g B)^T x, dB = s g^T (x A^T), dx = s g B A.
        parts = zip(rows.split(sizes), slopes.split(sizes), low, leaves[::2], leaves[1::2], strict=True)
        for number, (x, slope, narrow, a, b) in enumerate(parts):
            back = ctx.scale * (slope.to(a.dtype) @ b)  # type: ignore[attr-defined]
            own += [back.mT @ x.to(a.dtype), ctx.scale * (slope.to(a.dtype).mT @ narrow)]  # type: ignore[attr-defined]
            if into is not None:
                into.split(sizes)[number].copy_(back @ a)
        return grads[0], None if into is None else into.view(ctx.shape), None, None, *own  # type: ignore[attr-defined]


def _add_low_rank(x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Add scale * (x A^T) B^T to `out` in place and return x A^T, in the adapters' precision."""
    with torch.autocast(x.device.type, enabled=False):
        low = x.to(a.dtype) @ a.mT
        if out.dtype == low.dtype:
            out.addmm_(low, b.mT, alpha=scale)
        else:
            out.add_((low @ b.mT).to(out.dtype), alpha=scale)
    return low


def _add_all_low_rank(x: Tensor, out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Do the same for all members at once, given x `[p, m, in]`."""
    with torch.autocast(x.device.type, enabled=False):
        low, wide = torch.bmm(x, a.mT), out.view(len(x), -1, out.shape[-1])
        if wide.dtype == low.dtype:
            wide.baddbmm_(low, b.mT, alpha=scale)
        else:
            wide.add_(torch.bmm(low, b.mT).to(wide.dtype), alpha=scale)


def _of_slots(matrices: Tensor, slots: Sequence[int]) -> Tensor:
    """Return matrices of some slots of `[p, a, b]`, as a view if the slots are adjacent."""
    first, last = slots[0], slots[-1]
    return matrices[first : last + 1] if list(slots) == list(range(first, last + 1)) else matrices[slots]


def _transposed(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `[s, a, b]` in a memory layout whose transpose is contiguous."""
    return matrices.to(dtype).mT.contiguous().mT


def _leaves(target: Target, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B of one adapter as autograd leaves that are views of a member's row."""
    return target.a(row).detach().requires_grad_(), target.b(row).detach().requires_grad_()
