"""Log-probabilities and gradients of a stacked bank's members, in passes that fit into memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evogrpo.data import Batch, map_tensors
from evogrpo.interruption import check_interrupted
from evogrpo.models.bank import LossFunction, PolicyVersion, ReferenceDistributions
from evogrpo.models.networks.distributions import Distribution
from evogrpo.models.networks.stacks import IntArray, Layout, Stack, StackedStates, lay_out

LEAST_MEMORY = 1024  # bytes: a pass of one row cannot be halved

_Read = Callable[[Batch, Tensor | None, Tensor], Sequence[Tensor]]
"""(rows, places of `[n * t]`, or None for all in order, and the outputs `[c, o]` there) -> values `[c, ...]`."""


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """What one stack put out in a pass, and what adds the gradients up, given the slope of it."""

    outputs: Tensor
    backward: Callable[[Tensor], None]


@dataclass(frozen=True)
class _Picked:
    """Picks places of `[n * t]` (None = all, in order) from tensors `[n, t, ...]`, in some shape (None = a list)."""

    places: Tensor | None
    shape: tuple[int, ...] | None = None

    def __call__(self, values: Tensor) -> Tensor:
        flat = values.flatten(0, 1)
        if self.places is not None:
            places = self.places.to(flat.device)
            return flat.index_select(0, places.flatten()).view(*places.shape, *flat.shape[1:])
        return flat if self.shape is None else flat.unflatten(0, self.shape)


class StackedPasses:
    """Scores batches under what members have learnt.

    Args:
        states: What they have learnt.
        distribution: How outputs become actions.
        memory: Most bytes that one forward pass with gradients keeps, roughly. Halved when memory runs out.
    """

    def __init__(self, states: StackedStates, distribution: Distribution, memory: int) -> None:
        self._states, self._distribution, self.memory = states, distribution, memory
        self._laid_out: tuple[IntArray, tuple[int, bool], list[tuple[Stack, Layout]]] | None = None

    @torch.no_grad()
    def score(self, batch: Batch, name: PolicyVersion) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` in nats, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            name: Under which policies.
        """
        log_probs, entropies = self._read(batch, name, partial(self._scored, entropy_gradient=False), [(), ()])
        return log_probs, entropies

    @torch.no_grad()
    def outputs(self, batch: Batch, name: PolicyVersion) -> Tensor:
        """Return `[n, t, o]` the numbers that the action distributions are made of; 0 where masked."""
        width = self._distribution.outputs + sum(math.prod(shape) for shape in self._distribution.free.values())
        (outputs,) = self._read(batch, name, lambda rows, place, outputs: [outputs], [(width,)])
        return outputs

    def _read(self, batch: Batch, name: PolicyVersion, read: _Read, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return what is read off the outputs of a batch, `[n, t, *shape]` each, in passes that fit into memory."""
        mask = batch.action_mask
        found = [torch.zeros(*mask.shape, *shape, device=mask.device) for shape in shapes]
        while True:
            try:
                for part in self._parts(batch):
                    check_interrupted()
                    for values, own in zip(found, self._pass(batch.select(part), name, None, read), strict=True):
                        values[part] = own
                return found
            except torch.OutOfMemoryError:
                if self.memory < LEAST_MEMORY:
                    raise
                self.memory //= 2

    def add_gradients(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        slots: Mapping[int, Any],
        *,
        entropy_gradient: bool,
        reference_distributions: ReferenceDistributions | None = None,
    ) -> list[float]:
        """Put the gradients of the loss into the stacks, and return the losses by slot.

        Args:
            batch: Rows of any members, in any order.
            loss_fn: Weighted losses of rows; their sum is differentiated.
            slots: Only rows of these members take part.
            entropy_gradient: Whether the entropies that the loss sees carry a gradient.
            reference_distributions: What the divergences are from that the loss sees as well; None = it sees none.
        """
        while True:
            losses = torch.zeros(self._states.size)
            for stack in self._states.stacks:
                stack.gradient.zero_()
            try:
                parts = self._parts(batch, slots)
                for part in parts:
                    check_interrupted()
                    own = batch if len(part) == len(batch) else batch.select(part)
                    tape: list[_Recorded] = []
                    held = None if reference_distributions is None else reference_distributions.select(part)
                    read = partial(self._scored, entropy_gradient=entropy_gradient, reference_distributions=held)
                    loss = loss_fn(part, *self._pass(own, "weights", tape, read))
                    slopes = torch.autograd.grad(loss.sum(), [recorded.outputs for recorded in tape])
                    for recorded, slope in zip(tape, slopes, strict=True):
                        recorded.backward(slope)
                    losses.index_add_(0, own.member_ids.cpu(), loss.detach().float().cpu())
                return losses.tolist()
            except torch.OutOfMemoryError:
                if self.memory < LEAST_MEMORY:
                    raise
                self.memory //= 2

    def _pass(self, batch: Batch, name: PolicyVersion, tape: "list[_Recorded] | None", read: _Read) -> list[Tensor]:
        """Return what is read off one pass, `[n, t, ...]` each; with a tape, as functions of what is on it."""
        mask = batch.action_mask
        counted = np.flatnonzero(mask.cpu().numpy())
        slots = batch.member_ids.cpu().numpy()[counted // mask.shape[1]]
        layouts = self._lay_out(slots, base=name == "base")
        # Transitions sorted by member, as they mostly come, need no gathering at all.
        in_order = len(counted) == mask.numel() and len(layouts) == 1 and layouts[0][1].items_in_order
        parts = []
        for stack, layout in layouts:
            whole = in_order and layout.real is None
            picked = _Picked(None if whole else torch.from_numpy(counted[layout.index]), layout.index.shape)
            seen = map_tensors(batch.inputs.observations, picked)
            if tape is None:
                outputs = stack.outputs("weights" if name == "base" else name, layout.rows, seen)
            else:
                outputs, backward = stack.record(layout.rows, seen)
                tape.append(_Recorded(outputs=outputs.requires_grad_(), backward=backward))
            outputs = outputs.flatten(0, 1)
            if layout.real is not None:
                outputs = outputs.index_select(0, torch.from_numpy(layout.real).to(outputs.device))
            parts.append(outputs)
        place = None
        if not in_order:
            place = torch.from_numpy(counted[np.concatenate([layout.items for _, layout in layouts])])
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        found = [values.to(mask.device) for values in read(batch, place, outputs)]
        if place is not None:
            place = place.to(mask.device)
            empty = [values.new_zeros(mask.numel(), *values.shape[1:]) for values in found]
            found = [zeros.index_copy(0, place, values) for zeros, values in zip(empty, found, strict=True)]
        return [values.view(*mask.shape, *values.shape[1:]) for values in found]

    def _lay_out(self, slots: IntArray, *, base: bool) -> list[tuple[Stack, Layout]]:
        """Lay items out; the optimizer steps of one learning step mostly have the same numbers of them."""
        key = (self._states.changes, base)
        if self._laid_out is None or self._laid_out[1] != key or not np.array_equal(self._laid_out[0], slots):
            self._laid_out = (slots, key, lay_out_slots(self._states, slots, base=base))
        return self._laid_out[2]

    def _scored(
        self,
        batch: Batch,
        place: Tensor | None,
        outputs: Tensor,
        *,
        entropy_gradient: bool,
        reference_distributions: ReferenceDistributions | None = None,
    ) -> list[Tensor]:
        """Return log-probabilities, entropies and, if policies are held to something, divergences from it, `[c]` each.

        They are of the actions at places of `[n * t]`, given the outputs there.
        """
        masks, legal, picked = batch.inputs.action_masks, None, _Picked(place)
        if masks is not None:
            parts = masks if isinstance(masks, tuple | list) else [masks]
            legal = torch.cat([picked(part).flatten(1) for part in parts], 1).bool().to(outputs.device)
        temperature = batch.inputs.temperature
        if bool((temperature == 1).all()):
            temperature = None
        else:
            temperature = picked(temperature[:, None].expand(batch.action_mask.shape)).to(outputs)
        actions, score = picked(batch.actions).to(outputs.device), self._distribution.score
        found = list(score(outputs, actions, temperature, legal, entropy_gradient=entropy_gradient))
        if reference_distributions is not None:
            pair = outputs, picked(reference_distributions.outputs).to(outputs.device)
            first, second = reversed(pair) if reference_distributions.reverse else pair
            found.append(self._distribution.divergence(first, second, temperature, legal))
        return found

    def _parts(self, batch: Batch, slots: Mapping[int, Any] | None = None) -> list[Tensor]:
        """Split the rows with actions (of some members) into parts that each have a share of every member's rows."""
        counts, member_ids = batch.action_mask.sum(1).cpu().numpy(), batch.member_ids.cpu().numpy()
        taking_part = counts > 0
        if slots is not None and len(slots) < self._states.size:
            taking_part &= np.isin(member_ids, list(slots))
        rows = np.flatnonzero(taking_part)
        widest = max(stack.network.values_kept for stack in self._states.stacks)
        needed = 4 * widest * int(counts[rows].sum())
        count = min(len(rows), -(-needed // self.memory))
        if count > 1:
            rows = rows[np.argsort(member_ids[rows], kind="stable")]
        return [torch.from_numpy(rows[start::count]).to(batch.actions.device) for start in range(count)]


def lay_out_slots(states: StackedStates, slots: IntArray, *, base: bool) -> list[tuple[Stack, Layout]]:
    """Lay items of the given slots out by stack and member; under the base policy they are all of one member."""
    if base:
        return [(states.base, layout) for layout in lay_out(np.zeros_like(slots))]
    return [(stack, layout.of(items)) for stack, items, rows in states.placed(slots) for layout in lay_out(rows)]
