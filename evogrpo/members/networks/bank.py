"""StackedBank: small networks of all members, stacked on a member axis and computed together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.arrays import Float32Array, IntArray
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.bank import LossFunction, PolicyVersion, RepeatStep, Update
from evogrpo.members.networks.networks import ModuleNetwork
from evogrpo.members.networks.train_states import (
    Layout,
    Stack,
    StackedTrainStates,
    lay_out,
)
from evogrpo.records import Batch, SampledActions, map_tensors

Layouts = list[tuple[Stack, Layout]]

Tape = list[tuple[Tensor, Callable[[Tensor], None]]]
"""Outputs of each layout, and a function of their gradient that adds the weights' gradients."""

Read = Callable[[Batch, Tensor | None, Tensor], Sequence[Tensor]]
"""(rows, positions in `[n * t]` or None for all in order, network outputs `[c, o]` there) -> values
`[c, ...]`.
"""


class StackedBank(StackedTrainStates):
    """Small networks of all members, each with its own weights, computed together.

    Members with one architecture are rows of one stack, and each method computes a stack in batched
    products. On the CPU acting is numpy: a call takes half as long as in torch.

    Args:
        observation_space: Observation space of the members.
        action_space: Action space of the members.
        memory: Approximate maximum of bytes that one forward pass with gradients keeps.
        options: Further arguments of `StackedTrainStates`.

    Attributes:
        memory: As given.
    """

    rows_are_transitions = True

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None,
        action_space: spaces.Space[Any] | None,
        *,
        memory: int = 1 << 26,
        **options: Any,
    ) -> None:
        super().__init__(observation_space, action_space, **options)
        self.memory = memory
        self._layout_cache: dict[str, tuple[tuple[int, bool], IntArray, Layouts]] = {}

    def description(self, slot: int) -> str:
        """Return a description of a member's network."""
        stack, _ = self.locate(slot)
        network = stack.network
        if isinstance(network, ModuleNetwork):
            return f"{network.name}, a module of your own"
        if network.encoder.images:
            return f"convolutions, then {network.config.description}"
        return network.config.description

    # ---- acting

    def act(
        self,
        observations: Any,
        member_ids: IntArray,
        *,
        uniforms: Float32Array | None,
        temperature: Float32Array | None = None,
        action_mask: Any = None,
        base: bool = False,
    ) -> SampledActions:
        """Choose one action for each observation; see `evogrpo.records.Actor`.

        Raises:
            ValueError: If an observation does not fit its space.
        """
        layouts = self._layouts("act", member_ids, base=base)
        rows = len(member_ids)
        parts = []
        # Weights that are not finite give no warning here: their member fails when it learns.
        with np.errstate(all="ignore"):
            # 1. Compute distribution parameters `[c, o]` of each layout's rows, in numpy where that
            #    is faster.
            for stack, layout in layouts:
                if stack.reads_features and self.device.type == "cpu":
                    features = np.asarray(observations, dtype=np.float32)
                    features = features.reshape(rows, -1)
                    # All observations in order: a view, without gathering.
                    if layout.in_order and layout.index.size == rows:
                        features = features.reshape(*layout.index.shape, -1)
                    else:
                        features = features[layout.index]  # [q, w, f]
                    outputs = stack.outputs_in_numpy(layout.rows, features)
                else:
                    take = itemgetter(torch.from_numpy(layout.index))
                    laid_out = map_tensors(to_tensors(observations), take)
                    outputs = stack.outputs("weights", layout.rows, laid_out).cpu().numpy()
                outputs = outputs.reshape(-1, outputs.shape[2])
                if layout.real is not None:
                    outputs = outputs[layout.real]
                parts.append(outputs)
            # 2. Put them in the order of the observations: `[m, o]`.
            outputs = parts[0]
            if len(parts) > 1 or not layouts[0][1].in_order:
                outputs = np.empty((rows, parts[0].shape[1]), dtype=np.float32)
                for (_, layout), part in zip(layouts, parts, strict=True):
                    outputs[layout.items] = part
            # 3. Sample the actions.
            actions, log_probs = self.distribution.sample(
                outputs, uniforms, temperature, action_mask
            )
        return SampledActions(actions=actions, log_probs=log_probs)

    def _layouts(self, purpose: str, slots: IntArray, *, base: bool) -> Layouts:
        """Lay items out by stack and member; under the base policy all belong to one member.

        Environments and optimizer steps often repeat the same slots, so the latest layouts of each
        purpose are cached.
        """
        # 1. Return the cached layouts if they are of the same slots and stacks.
        key = (self.version, base)
        if purpose in self._layout_cache:
            cached_key, cached_slots, layouts = self._layout_cache[purpose]
            if cached_key == key and np.array_equal(cached_slots, slots):
                return layouts
        # 2. Lay out the items of each stack.
        if base:
            zeros = np.zeros_like(slots)
            layouts = [(self.base, layout) for layout in lay_out(zeros)]
        else:
            layouts = []
            for number, stack in enumerate(self.stacks):
                items = np.flatnonzero(self._stack_of[slots] == number)
                rows = self._row_of[slots[items]]
                for layout in lay_out(rows):
                    layouts.append((stack, replace(layout, index=items[layout.index])))
        self._layout_cache[purpose] = (key, slots.copy(), layouts)
        return layouts

    def outputs(self, slot: int, observations: Any, *, base: bool = False) -> Tensor:
        """Return one member's distribution parameters `[m, o]`, without gradient.

        Args:
            slot: Slot of the member.
            observations: Tensors or arrays `[m, ...]`; dicts and tuples of these for Dict and Tuple
                spaces.
            base: Use the initial weights instead.
        """
        if base:
            stack = self.base
            row = 0
        else:
            stack, row = self.locate(slot)
        # One member: [1, m, ...].
        batched = map_tensors(to_tensors(observations), itemgetter(None))
        return stack.outputs("weights", np.array([row]), batched)[0]

    # ---- log-probabilities

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions in nats, without gradient.

        0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Under the initial policy instead of the members' own.
        """
        return self._scores(batch, "base" if base else "weights")[0]

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the action distributions, in nats, without gradient.

        0 where masked.
        """
        return self._scores(batch, "weights")[1]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under each member's reference, without gradient.

        0 where masked.
        """
        return self._scores(batch, self._reference)[0]

    @property
    def _reference(self) -> PolicyVersion:
        return "reference" if self.own_reference else "base"

    def distributions(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return `[n, t, o]` parameters of the action distributions, without gradient.

        0 where masked.

        Args:
            batch: Rows of any members, in any order.
            reference: Use the reference policy instead of the members' policies.
        """
        # The outputs of the network and the free parameters, as they are.
        free = self.distribution.free_parameters.values()
        width = self.distribution.outputs + sum(map(math.prod, free))

        def read(rows: Batch, positions: Tensor | None, outputs: Tensor) -> Sequence[Tensor]:
            return [outputs]

        (values,) = self._evaluate(
            batch, self._reference if reference else "weights", read, [(width,)]
        )
        return values

    @torch.no_grad()
    def divergences(self, batch: Batch, before: Tensor) -> Tensor:
        """Return exact KL(before || policy) `[n, t]`, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            before: Result of `distributions` for these rows, under earlier weights.
        """
        mask = batch.action_mask
        counted = mask.flatten().nonzero()[:, 0]
        outputs = _take(self.distributions(batch), positions=counted)
        *_, divergences = self._read_scores(
            batch, counted, outputs, entropy_gradient=False, reference=before, reverse_kl=True
        )
        zeros = divergences.new_zeros(mask.numel())
        return zeros.index_copy(0, counted, divergences).view(mask.shape)

    def _scores(self, batch: Batch, version: PolicyVersion) -> list[Tensor]:
        """Return log-probabilities and entropies `[n, t]` without gradient; 0 where masked."""
        read = partial(self._read_scores, entropy_gradient=False)
        return self._evaluate(batch, version, read, [(), ()])

    @torch.no_grad()
    def _evaluate(
        self, batch: Batch, version: PolicyVersion, read: Read, shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Return values `[n, t, *shape]` computed from the outputs, part by part."""
        mask = batch.action_mask
        device = mask.device
        found = [torch.zeros(*mask.shape, *shape, device=device) for shape in shapes]
        for part in self._parts(batch):
            batch.stop.check()
            computed = self._forward(batch.select(part), version, None, read)
            for values, new in zip(found, computed, strict=True):
                values[part] = new
        return found

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return the environment steps that one pass over the batch processes, by slot."""
        member_ids = batch.member_ids.cpu()
        steps = torch.zeros(self.size, dtype=torch.int64)
        steps.index_add_(0, member_ids, batch.action_mask.sum(1).cpu())
        return {slot: int(steps[slot]) for slot in member_ids.unique().tolist()}

    # ---- learning

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        repeats: dict[int, RepeatStep] | None = None,
        reference_distributions: Tensor | None = None,
        reverse_kl: bool = False,
    ) -> Update:
        """Take one AdamW step for every member named in `hyperparameters`.

        See `evogrpo.members.bank`. No gradients are kept: passes of small networks are cheap.

        With `reference_distributions` `[n, t, o]`, as `distributions` returns them, `loss_fn` also
        gets the divergences KL(policy || reference), or KL(reference || policy) with `reverse_kl`.
        """
        # 1. Allocate losses by slot, gradients, and scores `[n, t]` of each kind.
        losses = torch.zeros(self.size)
        for stack in self.stacks:
            stack.gradient.zero_()
        mask = batch.action_mask
        kinds = 2 if reference_distributions is None else 3
        scores = [torch.zeros(mask.shape, device=mask.device) for _ in range(kinds)]
        for part in self._parts(batch, hyperparameters):
            batch.stop.check()
            # 2. Run the forward pass of some rows.
            rows = batch if len(part) == len(batch) else batch.select(part)
            reference = None
            if reference_distributions is not None:
                reference = reference_distributions[part]
            read = partial(
                self._read_scores,
                entropy_gradient=entropy_gradient,
                reference=reference,
                reverse_kl=reverse_kl,
            )
            tape: Tape = []
            found = self._forward(rows, "weights", tape, read)
            loss = loss_fn(part, *found)
            # 3. Autograd computes gradients with respect to the outputs, each stack those with
            #    respect to the weights. Losses of members are summed: no term depends on two.
            all_outputs = [outputs for outputs, _ in tape]
            grads = torch.autograd.grad(loss.sum(), all_outputs)
            for (_, backward), grad in zip(tape, grads, strict=True):
                backward(grad)
            row_losses = loss.detach().float().cpu()
            losses.index_add_(0, rows.member_ids.cpu(), row_losses)
            # 4. Keep the scores of these rows.
            for values, new in zip(scores, found, strict=True):
                values[part] = new.detach()
        # 5. Take the optimizer steps. The last chance to stop is before weights change.
        batch.stop.check()
        reports = self.step(hyperparameters, losses.tolist())
        log_probs, entropies, *divergences = scores
        return Update(
            reports=reports,
            log_probs=log_probs,
            entropies=entropies,
            divergences=divergences[0] if divergences else None,
        )

    def _parts(self, batch: Batch, slots: Mapping[int, Any] | None = None) -> list[Tensor]:
        """Split the rows with actions into parts, each with a share of every member's rows."""
        # 1. Choose the rows to compute.
        counts = batch.action_mask.sum(1).cpu().numpy()
        member_ids = batch.member_ids.cpu().numpy()
        included = counts > 0
        if slots is not None and len(slots) < self.size:
            included &= np.isin(member_ids, list(slots))
        rows = np.flatnonzero(included)
        # 2. Compute the number of parts from the bytes of all float32 values.
        values = max(stack.network.values_per_observation for stack in self.stacks)
        needed = 4 * values * int(counts[rows].sum())
        parts = min(len(rows), math.ceil(needed / self.memory))
        # 3. Every part takes each `parts`-th row of those sorted by member, so it has rows of all
        #    members, and the batched products stay full.
        if parts > 1:
            rows = rows[np.argsort(member_ids[rows], kind="stable")]
        chosen = [torch.from_numpy(rows[start::parts]) for start in range(parts)]
        return [part.to(batch.actions.device) for part in chosen]

    def _forward(
        self,
        batch: Batch,
        version: PolicyVersion,
        tape: Tape | None,
        read: Read,
    ) -> list[Tensor]:
        """Return values computed from the outputs of one pass, `[n, t, ...]` each.

        With a tape, they are functions of the outputs on it, each with a function that adds the
        weights' gradients.
        """
        # 1. Lay the counted actions out by stack and member.
        mask = batch.action_mask
        counted = np.flatnonzero(mask.cpu().numpy())
        row_of_action = counted // mask.shape[1]
        slots = batch.member_ids.cpu().numpy()[row_of_action]
        layouts = self._layouts("learn", slots, base=version == "base")
        # Transitions are usually sorted by member, and then need no gathering.
        all_counted = len(counted) == mask.numel()
        in_order = all_counted and len(layouts) == 1 and layouts[0][1].items_in_order
        # The base policy is a stack of its own, with the initial weights as "weights".
        name = "weights" if version == "base" else version
        # 2. Run each stack.
        parts = []
        for stack, layout in layouts:
            positions = None
            if not in_order or layout.real is not None:
                positions = torch.from_numpy(counted[layout.index])  # [q, w]
            take = partial(_take, positions=positions, shape=layout.index.shape)
            observations = map_tensors(batch.inputs.observations, take)
            if tape is None:
                outputs = stack.outputs(name, layout.rows, observations)  # [q, w, o]
            else:
                outputs, backward = stack.vjp(layout.rows, observations)
                tape.append((outputs.requires_grad_(), backward))
            outputs = outputs.flatten(0, 1)
            if layout.real is not None:
                real = torch.from_numpy(layout.real).to(outputs.device)
                outputs = outputs.index_select(0, real)
            parts.append(outputs)
        outputs = torch.cat(parts) if len(parts) > 1 else parts[0]  # [c, o]
        # 3. Compute the values and put them back in the order of the batch.
        positions = None
        if not in_order:
            items = np.concatenate([layout.items for _, layout in layouts])
            positions = torch.from_numpy(counted[items])
        found = []
        for computed in read(batch, positions, outputs):
            values = computed.to(mask.device)
            shape = values.shape[1:]
            if positions is not None:
                zeros = values.new_zeros(mask.numel(), *shape)
                values = zeros.index_copy(0, positions.to(mask.device), values)
            found.append(values.view(*mask.shape, *shape))
        return found

    def _read_scores(
        self,
        batch: Batch,
        positions: Tensor | None,
        outputs: Tensor,
        *,
        entropy_gradient: bool,
        reference: Tensor | None = None,
        reverse_kl: bool = False,
    ) -> list[Tensor]:
        """Return log-probabilities, entropies and, with a reference, divergences `[c]`."""
        # 1. Read temperatures and masks of legal actions at the counted actions; None = they change
        #    nothing.
        take = partial(_take, positions=positions)
        distribution = self.distribution
        temperature = None
        if not bool((batch.inputs.temperature == 1).all()):
            of_actions = batch.inputs.temperature[:, None].expand(batch.action_mask.shape)
            temperature = take(of_actions).to(outputs)
        legal = None
        if batch.inputs.action_masks is not None:
            legal = take(batch.inputs.action_masks).to(outputs.device)

        # 2. Apply temperatures and masks to the parameters of the policy, and of the reference.
        def adjusted(parameters: Tensor) -> Tensor:
            """Return parameters at the temperatures, with illegal actions masked."""
            if temperature is not None:
                parameters = distribution.at_temperature(parameters, temperature)
            if legal is None:
                return parameters
            return distribution.masked(parameters, legal)

        # 3. Compute log-probabilities and entropies; divergences if there is a reference.
        actions = take(batch.actions).to(outputs.device)
        policy = adjusted(outputs)
        log_probs, entropies = distribution.evaluate_actions(
            policy, actions, entropy_gradient=entropy_gradient
        )
        if reference is None:
            return [log_probs, entropies]
        # Adjusted again: the gradients of the two uses are added up at `outputs` only.
        first = adjusted(outputs)
        second = adjusted(take(reference).to(outputs.device))
        if reverse_kl:
            first, second = second, first
        return [log_probs, entropies, distribution.kl(first, second)]


def _take(
    values: Tensor, *, positions: Tensor | None, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Return `[n, t, ...]` at positions in `[n * t]`, in the shape of `positions`.

    Without positions, all values in order, in `shape`.
    """
    # Rows and steps become one axis.
    flat = values.flatten(0, 1)
    if positions is not None:
        positions = positions.to(flat.device)
        taken = flat.index_select(0, positions.flatten())
        return taken.view(*positions.shape, *flat.shape[1:])
    if shape is not None:
        flat = flat.unflatten(0, shape)
    return flat


def to_tensors(tree: Any) -> Any:
    """Convert arrays, or dicts and tuples of arrays, to tensors that share their memory.

    Tensors stay.
    """
    if isinstance(tree, Mapping):
        return {key: to_tensors(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(to_tensors(value) for value in tree)
    if isinstance(tree, Tensor):
        return tree
    return torch.from_numpy(np.ascontiguousarray(tree))
