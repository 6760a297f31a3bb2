"""Members of one architecture, stacked; and how ragged work is laid out on the member axis."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.config.optimizer import Optimizer
from evogrpo.functional.optim import adamw_steps_
from evogrpo.policies.control.architecture import NetworkConfig, Parameters
from evogrpo.policies.control.distributions import Distribution
from evogrpo.policies.control.layers import FloatArray
from evogrpo.policies.control.networks import DefaultNetwork, Network, Shapes, split

IntArray = NDArray[np.int64]

VECTOR = 64  # numbers; a multiple of what one instruction works on
SHORT = 1 << 17  # up to so many numbers a member, one step of a whole stack is faster than one step for each member


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Items of several members, laid out with equally many places for each.

    Attributes:
        rows: `[q]` which members, as rows of their stack.
        index: `[q, w]` item numbers; a place that is left over repeats an item of its member.
        real: `[c]` places of `index`, flattened, that hold an item for the first time; None = all of them.
    """

    rows: IntArray
    index: IntArray
    real: IntArray | None

    @property
    def items(self) -> IntArray:
        """`[c]` item numbers in the order of `real`."""
        flat = self.index.reshape(-1)
        return flat if self.real is None else flat[self.real]

    @cached_property
    def items_in_order(self) -> bool:
        """Whether the items, without those that fill places up, are numbered 0, 1, 2 and so on."""
        items = self.items
        return bool(np.array_equal(items, np.arange(len(items))))

    @property
    def in_order(self) -> bool:
        """Whether the places hold items 0, 1, 2 and so on, and nothing else."""
        return self.real is None and self.items_in_order

    def of(self, numbers: IntArray) -> "Layout":
        """Return the same layout for items that are numbered differently: number i is now `numbers[i]`."""
        return replace(self, index=numbers[self.index])


def lay_out(rows: IntArray) -> list[Layout]:
    """Lay items out on the member axis.

    Members with different numbers of items are padded. Where that would more than double the work, members whose
    numbers of items differ by a factor of up to two share a layout, and others get one of their own.

    Args:
        rows: `[c]` which member each item belongs to, in any order.

    Returns:
        Layouts that hold each item once.
    """
    if not len(rows):
        return []
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    starts = np.cumsum(counts) - counts
    members = np.flatnonzero(counts)
    wasteful = len(members) * counts.max() > 2 * len(rows)
    sizes = np.log2(counts[members]).astype(np.int64) if wasteful else np.zeros_like(members)
    layouts = []
    for size in np.unique(sizes):
        some = members[sizes == size]
        width = int(counts[some].max())
        place = np.arange(width)
        real = place < counts[some][:, None]
        index = order[starts[some][:, None] + np.where(real, place, 0)]
        layouts.append(Layout(rows=some, index=index, real=None if real.all() else np.flatnonzero(real)))
    return layouts


class Stack:
    """What members of one architecture have learnt, as matrices with one row per member.

    Args:
        network: Their network.
        distribution: How its outputs become actions.
        config: Their architecture; None for a module of the caller's.
        slots: Who they are.
        learnt: By name ("weights", "exp_avg", "exp_avg_sq", perhaps "reference"): `[q, k]`.

    Attributes:
        learnt: `[q, k]` each, rows filled up with zeros.
        gradient: `[q, k]`, likewise.
        reads_features: Whether an observation is an array of features, so that `act` can be used.
    """

    def __init__(
        self,
        network: Network,
        distribution: Distribution,
        config: NetworkConfig | None,
        slots: Sequence[int],
        learnt: Mapping[str, Tensor],
    ) -> None:
        self.network, self.config, self.slots = network, config, list(slots)
        self.shapes: Shapes = network.shapes | dict(distribution.free)
        self._length = next(iter(learnt.values())).shape[1]
        # Whole vector registers in every row: then the last numbers of a row are rounded as all others are, whoever
        # comes after it.
        self.learnt = {name: pad(matrix, (0, -self._length % VECTOR)) for name, matrix in learnt.items()}
        self._free = list(distribution.free)
        self.gradient = torch.zeros_like(self.learnt["weights"])
        self._gradients = split(self.gradient, self.shapes)
        self._views = {name: split(matrix, self.shapes) for name, matrix in self.learnt.items()}
        self.reads_features = isinstance(network, DefaultNetwork) and network.encoding.is_plain

    def row(self, name: str, row: int) -> Tensor:
        """Return a view `[k]` of what one member has learnt."""
        return self.learnt[name][row, : self._length]

    def outputs(self, name: str, rows: IntArray, observations: Any) -> Tensor:
        """Return `[q, w, o]` numbers of the distribution for observations `[q, w, ...]`, without gradient."""
        parameters = self._parameters(name, rows)
        return self._with_free(self.network(parameters, observations), parameters)

    def record(self, rows: IntArray, observations: Any) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return the same under the weights, and what adds a slope `[q, w, o]` of it to `gradient`; see `Network`."""
        parameters, everyone = self._parameters("weights", rows), len(rows) == len(self.slots)
        outputs, add = self.network.record(parameters, observations)

        def backward(slope: Tensor) -> None:
            part = self.gradient if everyone else torch.zeros_like(self.gradient[: len(rows)])
            gradients, width = self._gradients if everyone else split(part, self.shapes), outputs.shape[2]
            add(slope[..., :width], gradients)
            for name in self._free:
                free = self.shapes[name]
                count = prod(free)
                ones = slope.new_ones(len(slope), 1, slope.shape[1])  # a sum that is rounded alike; see HiddenLayers
                total = torch.bmm(ones, slope[..., width : width + count])
                gradients[name] += total.view(len(slope), *free)
                width += count
            if not everyone:
                self.gradient[torch.from_numpy(rows).to(part.device)] += part

        return self._with_free(outputs, parameters), backward

    def act(self, name: str, rows: IntArray, features: FloatArray) -> FloatArray:
        """Return the distribution's numbers `[q, w, o]` for features `[q, w, f]`, in numpy."""
        assert isinstance(self.network, DefaultNetwork)  # see reads_features
        arrays = self._arrays[name]
        if len(rows) != len(self.slots):
            arrays = {key: value[rows] for key, value in arrays.items()}
        outputs = self.network.act(arrays, features)
        free = [arrays[key].reshape(len(rows), 1, -1) for key in self._free]
        spread = [np.broadcast_to(values, (*outputs.shape[:2], values.shape[2])) for values in free]
        return np.concatenate([outputs, *spread], axis=2) if spread else outputs

    def _parameters(self, name: str, rows: IntArray) -> Parameters:
        """Return the parameters `[q, ...]` of some members: views where all are wanted, copies otherwise."""
        matrix = self.learnt[name]
        if len(rows) == len(matrix):
            return self._views[name]
        return split(matrix[torch.from_numpy(rows).to(matrix.device)], self.shapes)

    def _with_free(self, outputs: Tensor, parameters: Parameters) -> Tensor:
        free = [parameters[name].flatten(1)[:, None].expand(*outputs.shape[:2], -1) for name in self._free]
        return torch.cat([outputs, *free], dim=2) if free else outputs

    @cached_property
    def _arrays(self) -> dict[str, dict[str, FloatArray]]:
        return {name: {key: value.numpy() for key, value in views.items()} for name, views in self._views.items()}

    @torch.no_grad()
    def step(
        self,
        rows: Sequence[int],
        steps: Sequence[int],
        lrs: Sequence[float],
        max_norms: Sequence[float],
        settings: Optimizer,
    ) -> tuple[list[float], list[bool]]:
        """Clip gradients and take AdamW steps; members whose gradient is not finite, and all others, are untouched.

        `gradient` is used as scratch space.

        Args:
            rows: Which members step.
            steps: Which step it is for each of them, from 1.
            lrs: Learning rate of each.
            max_norms: Bound on each one's gradient norm.
            settings: AdamW settings.

        Returns:
            Gradient norms before clipping, NaN where they, or the weights after the step, are not finite; and whether
            each step was taken.
        """
        norms = torch.linalg.vector_norm(self.gradient, dim=1).tolist()
        taken = {
            row: (step, lr, min(1.0, bound / (norms[row] + 1e-6)))
            for row, step, lr, bound in zip(rows, steps, lrs, max_norms, strict=True)
            if math.isfinite(norms[row])
        }
        if self._length <= SHORT and taken:
            self._step_block(range(len(self.slots)), taken, settings)
        else:
            for row in taken:
                self._step_block(range(row, row + 1), taken, settings)
        healthy = self.learnt["weights"].sum(1).isfinite().tolist()
        stepped = [row in taken for row in rows]
        return [norms[row] if row in taken and healthy[row] else math.nan for row in rows], stepped

    def _step_block(self, block: range, taken: Mapping[int, tuple[int, float, float]], settings: Optimizer) -> None:
        """Take the steps (number, lr, factor on the gradient) of some members that lie next to each other.

        All of them are computed, in one shape, and those that take no step are put back: so who else steps changes no
        bit of a member.
        """
        part, idle = slice(block.start, block.stop), [row for row in block if row not in taken]
        matrices = [self.learnt[name] for name in ("weights", "exp_avg", "exp_avg_sq")]
        saved = [matrix[idle] for matrix in matrices] if idle else []
        numbers, lrs, factors = zip(*(taken.get(row, (1, 0.0, 1.0)) for row in block), strict=True)
        gradients = self.gradient[part]
        gradients.mul_(torch.tensor(factors, device=gradients.device)[:, None])
        weights, exp_avg, exp_avg_sq = (matrix[part] for matrix in matrices)
        adamw_steps_(
            weights,
            gradients,
            exp_avg,
            exp_avg_sq,
            numbers,
            lrs,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        for matrix, values in zip(matrices, saved, strict=False):
            matrix[idle] = values
