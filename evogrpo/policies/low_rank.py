"""Low-rank adapters acting on a model through forward hooks, each row of a forward pass through its own member's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from evogrpo.policies.lora import Target


@dataclass(frozen=True)
class _Segment:
    """Neighbouring rows of one forward pass that belong to one slot."""

    slot: int
    rows: int


class LowRankAdapters:
    """The adapters of all members over one model.

    Args:
        model: The base model.
        targets: Its adapted modules.
        weights: `[p, k]` adapters of all members; views of it are what acts.
        scale: Factor on B A x.
    """

    def __init__(self, model: nn.Module, targets: Sequence[Target], weights: Tensor, scale: float) -> None:
        self._model = model
        self._targets = targets
        self._weights = weights
        self._scale = scale
        self._segments: tuple[_Segment, ...] = ()
        self._leaves = {target.name: [_leaves(target, row) for row in weights] for target in targets}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hook the adapters into the model for the length of a `with`; no rows are routed at its start or end."""
        modules = dict(self._model.named_modules())
        handles: list[RemovableHandle] = []
        try:
            handles.extend(modules[target.name].register_forward_hook(self._hook(target)) for target in self._targets)
            yield
        finally:
            self._segments = ()
            for handle in handles:
                handle.remove()

    def route(self, slots: Tensor | None) -> None:
        """Set which slot each row of the next forward passes belongs to, sorted; None = adapters off."""
        self._segments = ()
        if slots is not None:
            values, counts = torch.unique_consecutive(slots, return_counts=True)
            self._segments = tuple(map(_Segment, values.tolist(), counts.tolist()))

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Let backward passes add a member's gradient into `buffer` `[k]`; None ends that."""
        for target in self._targets:
            for leaf, view in zip(self._leaves[target.name][slot], (target.a, target.b), strict=True):
                leaf.grad = None if buffer is None else view(buffer)

    def _hook(self, target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]:
        leaves = self._leaves[target.name]

        def add_adapters(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not self._segments:
                return None
            x = args[0].reshape(-1, target.width_in).to(self._weights.dtype)
            out = output.view(-1, target.width_out)
            # Not output.shape[0]: some architectures flatten rows and positions before their linear layers.
            per_row = len(out) // sum(segment.rows for segment in self._segments)
            sizes = [segment.rows * per_row for segment in self._segments]
            if not torch.is_grad_enabled() and self._is_whole_bank(sizes):
                members = len(self._weights)
                low = torch.bmm(x.view(members, -1, target.width_in), target.a(self._weights).mT)
                delta = torch.bmm(low, target.b(self._weights).mT).view(out.shape)
                return out.add_(delta.to(out.dtype), alpha=self._scale).view(output.shape)
            pieces = list(zip(self._segments, x.split(sizes), out.split(sizes), strict=True))
            if torch.is_grad_enabled():
                added = [self._adapted(part, base, *leaves[segment.slot]) for segment, part, base in pieces]
                return (added[0] if len(added) == 1 else torch.cat(added)).view(output.shape)
            for segment, part, base in pieces:
                base.copy_(self._adapted(part, base, *leaves[segment.slot]))
            return output

        return add_adapters

    def _adapted(self, x: Tensor, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return out + scale * (x A^T) B^T."""
        if out.dtype == x.dtype:
            return torch.addmm(out, x @ a.mT, b.mT, alpha=self._scale)
        return out + (self._scale * (x @ a.mT) @ b.mT).to(out.dtype)

    def _is_whole_bank(self, sizes: Sequence[int]) -> bool:
        """Tell whether the rows are every member's, equally many each: then one batched product serves all."""
        return len(sizes) == len(self._weights) > 1 and len(set(sizes)) == 1


def _leaves(target: Target, row: Tensor) -> tuple[Tensor, Tensor]:
    """Make the autograd leaves of one adapter: views of a member's row, so a step on the row moves them."""
    return target.a(row).detach().requires_grad_(), target.b(row).detach().requires_grad_()
