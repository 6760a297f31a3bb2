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
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.bank import LossFunction, PolicyVersion, Update
from evogrpo.members.networks.distributions import MASKED_LOGIT
from evogrpo.members.networks.networks import ModuleNetwork
from evogrpo.members.networks.train_states import (
    IntArray,
    Layout,
    Stack,
    StackedTrainStates,
    lay_out,
)
from evogrpo.records import Batch, SampledActions, map_tensors

Layouts = list[tuple[Stack, Layout]]
MIN_MEMORY = 1024  # bytes; below it, running out of memory is an error

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
        memory: Approximate maximum of bytes that one forward pass with gradients keeps. Halved when
            out of memory.
        options: Further arguments of `StackedTrainStates`.

    Attributes:
        memory: As given, or halved.
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
        network = self.locate(slot)[0].network
        if isinstance(network, ModuleNetwork):
            return f"{network.name}, a module of your own"
        return (
            f"{'convolutions, then ' if network.encoder.images else ''}{network.config.description}"
        )

    # ---- acting

    def act(
        self,
        observations: Any,
        member_ids: NDArray[np.int64],
        *,
        uniforms: NDArray[np.float32] | None,
        temperature: NDArray[np.float32] | None = None,
        action_mask: Any = None,
        base: bool = False,
    ) -> SampledActions:
        """Choose one action for each observation; see `evogrpo.records.Actor`.

        Raises:
            ValueError: If an observation does not fit its space.
        """
        layouts = self._layouts("act", member_ids, base=base)
        parts = []
        # Weights that are not finite give no warning here: their member fails when it learns.
        with np.errstate(all="ignore"):
            # 1. Distribution parameters `[c, o]` of each layout's rows, in numpy where that is
            #    faster.
            for stack, layout in layouts:
                if stack.reads_features and self.device.type == "cpu":
                    features = np.asarray(observations, dtype=np.float32).reshape(
                        len(member_ids), -1
                    )
                    # needs no gathering
                    all_in_order = layout.in_order and layout.index.size == len(member_ids)
                    if all_in_order:
                        features = features.reshape(*layout.index.shape, -1)
                    else:
                        features = features[layout.index]
                    outputs = stack.outputs_in_numpy(layout.rows, features)
                else:
                    laid_out = map_tensors(
                        to_tensors(observations), itemgetter(torch.from_numpy(layout.index))
                    )
                    outputs = stack.outputs("weights", layout.rows, laid_out).cpu().numpy()
                outputs = outputs.reshape(-1, outputs.shape[2])
                parts.append(outputs if layout.real is None else outputs[layout.real])
            # 2. Distribution parameters `[m, o]` in the order of the observations.
            outputs = parts[0]
            if len(parts) > 1 or not layouts[0][1].in_order:
                outputs = np.empty((len(member_ids), parts[0].shape[1]), dtype=np.float32)
                for (_, layout), part in zip(layouts, parts, strict=True):
                    outputs[layout.items] = part
            # 3. Actions.
            actions, log_probs = self.distribution.sample(
                outputs, uniforms, temperature, action_mask
            )
        return SampledActions(actions=actions, log_probs=log_probs)

    def _layouts(self, purpose: str, slots: IntArray, *, base: bool) -> Layouts:
        """Lay items out by stack and member; under the base policy all are items of one member.

        Environments and optimizer steps often repeat the same slots, so the latest layouts of each
        purpose are cached.
        """
        key = (self.version, base)
        cached = self._layout_cache.get(purpose)
        if cached is None or cached[0] != key or not np.array_equal(cached[1], slots):
            if base:
                layouts = [(self.base, layout) for layout in lay_out(np.zeros_like(slots))]
            else:
                layouts = []
                for number, stack in enumerate(self.stacks):
                    items = np.flatnonzero(self._stack_of[slots] == number)
                    rows = self._row_of[slots[items]]
                    layouts += [
                        (stack, replace(layout, index=items[layout.index]))
                        for layout in lay_out(rows)
                    ]
            cached = self._layout_cache[purpose] = (key, slots.copy(), layouts)
        return cached[2]

    def outputs(self, slot: int, observations: Any, *, base: bool = False) -> Tensor:
        """Return one member's distribution parameters `[m, o]`, without gradient.

        Args:
            slot: Slot of the member.
            observations: Tensors or arrays `[m, ...]`; dicts and tuples of these for Dict and Tuple
                spaces.
            base: Use the initial weights instead.
        """
        stack, row = (self.base, 0) if base else self.locate(slot)
        batched = map_tensors(to_tensors(observations), lambda leaf: leaf[None])
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
        return self._scores(batch, "reference" if self.own_reference else "base")[0]

    def distributions(self, batch: Batch, *, reference: bool) -> Tensor:
        """Return `[n, t, o]` parameters of the action distributions, without gradient.

        0 where masked.

        Args:
            batch: Rows of any members, in any order.
            reference: Use the reference policy instead of the members' policies.
        """
        width = self.distribution.outputs + sum(
            map(math.prod, self.distribution.free_parameters.values())
        )
        if self.own_reference:
            reference_version: PolicyVersion = "reference"
        else:
            reference_version = "base"
        if reference:
            version: PolicyVersion = reference_version
        else:
            version = "weights"
        return self._evaluate(batch, version, lambda rows, places, outputs: [outputs], [(width,)])[
            0
        ]

    def _scores(self, batch: Batch, version: PolicyVersion) -> list[Tensor]:
        """Return log-probabilities and entropies `[n, t]` without gradient; 0 where masked."""
        return self._evaluate(
            batch, version, partial(self._read_scores, entropy_gradient=False), [(), ()]
        )

    @torch.no_grad()
    def _evaluate(
        self, batch: Batch, version: PolicyVersion, read: Read, shapes: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Return values computed from the outputs, `[n, t, *shape]` each, in passes that fit into memory."""
        mask = batch.action_mask
        found = [torch.zeros(*mask.shape, *shape, device=mask.device) for shape in shapes]
        while True:
            try:
                for part in self._parts(batch):
                    batch.stop.check()
                    for values, new in zip(
                        found, self._forward(batch.select(part), version, None, read), strict=True
                    ):
                        values[part] = new
                return found
            except torch.OutOfMemoryError:
                if self.memory < MIN_MEMORY:
                    raise
                self.memory //= 2

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return the number of environment steps that one pass over the batch processes, by slot."""
        member_ids = batch.member_ids.cpu()
        steps = torch.zeros(self.size, dtype=torch.int64)
        steps.index_add_(0, member_ids, batch.action_mask.sum(1).cpu())
        rows = member_ids.bincount(minlength=self.size).tolist()
        return {slot: count for slot, count in enumerate(steps.tolist()) if rows[slot]}

    # ---- learning

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        reference_distributions: Tensor | None = None,
        reverse_kl: bool = False,
    ) -> Update:
        """Take one AdamW step for every member named in `hyperparameters`.

        See `evogrpo.members.bank`.

        With `reference_distributions` `[n, t, o]`, as `distributions` returns them, `loss_fn` also
        gets the divergences KL(policy || reference), or KL(reference || policy) with `reverse_kl`.
        """
        while True:
            try:
                losses, scores = self._add_gradients(
                    batch,
                    loss_fn,
                    hyperparameters,
                    entropy_gradient,
                    reference_distributions,
                    reverse_kl,
                )
                break
            except torch.OutOfMemoryError:
                if self.memory < MIN_MEMORY:
                    raise
                self.memory //= 2  # repeat with smaller parts; no weights have changed yet
        batch.stop.check()  # before weights change
        log_probs, entropies, *divergences = scores
        return Update(
            reports=self.step(hyperparameters, losses),
            log_probs=log_probs,
            entropies=entropies,
            divergences=divergences[0] if divergences else None,
        )

    def _add_gradients(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        entropy_gradient: bool,
        reference_distributions: Tensor | None,
        reverse_kl: bool,
    ) -> tuple[list[float], list[Tensor]]:
        """Compute the gradients of all stacks.

        Return the losses by slot, and the scores `[n, t]` of each kind.
        """
        losses = torch.zeros(self.size)
        scores = list[Tensor]()
        for stack in self.stacks:
            stack.gradient.zero_()
        for part in self._parts(batch, hyperparameters):
            batch.stop.check()
            # 1. Forward pass of some rows.
            if len(part) == len(batch):
                rows = batch
            else:
                rows = batch.select(part)
            if reference_distributions is None:
                reference = None
            else:
                reference = reference_distributions[part]
            read = partial(
                self._read_scores,
                entropy_gradient=entropy_gradient,
                reference=reference,
                reverse_kl=reverse_kl,
            )
            tape: list[tuple[Tensor, Callable[[Tensor], None]]] = []
            found = self._forward(rows, "weights", tape, read)
            loss = loss_fn(part, *found)
            # 2. Gradients with respect to the outputs by autograd, with respect to the weights by
            #    each stack.
            grads = torch.autograd.grad(loss.sum(), [outputs for outputs, _ in tape])
            for (_, backward), grad in zip(tape, grads, strict=True):
                backward(grad)
            losses.index_add_(0, rows.member_ids.cpu(), loss.detach().float().cpu())
            # 3. Keep the scores of these rows.
            if len(part) == len(batch):
                scores = [values.detach() for values in found]
                continue
            scores = scores or [values.new_zeros(len(batch), values.shape[1]) for values in found]
            for values, new in zip(scores, found, strict=True):
                values[part] = new.detach()
        kinds = 2 if reference_distributions is None else 3
        return (
            losses.tolist(),
            scores or [torch.zeros(batch.action_mask.shape, device=self.device)] * kinds,
        )

    def _parts(self, batch: Batch, slots: Mapping[int, Any] | None = None) -> list[Tensor]:
        """Split the rows with actions (of some members) into parts, each with a share of every member's rows."""
        counts = batch.action_mask.sum(1).cpu().numpy()
        member_ids = batch.member_ids.cpu().numpy()
        included = counts > 0
        if slots is not None and len(slots) < self.size:
            included &= np.isin(member_ids, list(slots))
        rows = np.flatnonzero(included)
        # Bytes of all float32 values; dividing by the memory and rounding up gives the number of
        # parts.
        needed = (
            4
            * max(stack.network.values_per_observation for stack in self.stacks)
            * int(counts[rows].sum())
        )
        count = min(len(rows), -(-needed // self.memory))
        if count > 1:
            rows = rows[np.argsort(member_ids[rows], kind="stable")]
        return [
            torch.from_numpy(rows[start::count]).to(batch.actions.device) for start in range(count)
        ]

    def _forward(
        self,
        batch: Batch,
        version: PolicyVersion,
        tape: list[tuple[Tensor, Callable[[Tensor], None]]] | None,
        read: Read,
    ) -> list[Tensor]:
        """Return values computed from the outputs of one pass, `[n, t, ...]` each.

        With a tape, they are functions of the outputs on it, each with a function that adds the
        weights' gradients.
        """
        # 1. Lay the counted actions out by stack and member.
        mask = batch.action_mask
        counted = np.flatnonzero(mask.cpu().numpy())
        slots = batch.member_ids.cpu().numpy()[counted // mask.shape[1]]
        layouts = self._layouts("learn", slots, base=version == "base")
        # Transitions are usually sorted by member, and then need no gathering.
        in_order = (
            len(counted) == mask.numel() and len(layouts) == 1 and layouts[0][1].items_in_order
        )
        # 2. Run each stack.
        parts = []
        for stack, layout in layouts:
            if in_order and layout.real is None:
                places = None
            else:
                places = torch.from_numpy(counted[layout.index])
            observations = map_tensors(
                batch.inputs.observations, partial(_take, places=places, shape=layout.index.shape)
            )
            if tape is None:
                # The base policy is a stack of its own, with the initial weights as "weights".
                outputs = stack.outputs(
                    "weights" if version == "base" else version, layout.rows, observations
                )
            else:
                outputs, backward = stack.vjp(layout.rows, observations)
                tape.append((outputs.requires_grad_(), backward))
            outputs = outputs.flatten(0, 1)
            if layout.real is not None:
                outputs = outputs.index_select(0, torch.from_numpy(layout.real).to(outputs.device))
            parts.append(outputs)
        outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
        # 3. Compute the values and put them back in the order of the batch.
        if in_order:
            found = [values.to(mask.device) for values in read(batch, None, outputs)]
        else:
            places = torch.from_numpy(
                counted[np.concatenate([layout.items for _, layout in layouts])]
            )
            found = [values.to(mask.device) for values in read(batch, places, outputs)]
            places = places.to(mask.device)
            found = [
                values.new_zeros(mask.numel(), *values.shape[1:]).index_copy(0, places, values)
                for values in found
            ]
        return [values.view(*mask.shape, *values.shape[1:]) for values in found]

    def _read_scores(
        self,
        batch: Batch,
        places: Tensor | None,
        outputs: Tensor,
        *,
        entropy_gradient: bool,
        reference: Tensor | None = None,
        reverse_kl: bool = False,
    ) -> list[Tensor]:
        """Return log-probabilities, entropies and, with reference distributions, divergences `[c]` of some actions."""
        # 1. Temperatures and masks of legal actions; None = they change nothing.
        take = partial(_take, places=places)
        distribution = self.distribution
        temperature = batch.inputs.temperature
        masks = batch.inputs.action_masks
        legal = None
        if bool((temperature == 1).all()):
            temperature = None
        else:
            temperature = take(temperature[:, None].expand(batch.action_mask.shape)).to(outputs)
        if masks is not None:
            legal = take(masks).to(outputs.device)

        # 2. Apply both to the parameters of the policy, and of the reference.
        def adjusted(parameters: Tensor) -> Tensor:
            if temperature is not None:
                parameters = distribution.at_temperature(parameters, temperature)
            if legal is None:
                return parameters
            return parameters.masked_fill(~legal, MASKED_LOGIT)

        # 3. Log-probabilities and entropies; divergences if there is a reference.
        actions = take(batch.actions).to(outputs.device)
        policy = adjusted(outputs)
        found = list(
            distribution.evaluate_actions(policy, actions, entropy_gradient=entropy_gradient)
        )
        if reference is not None:
            pair = adjusted(outputs), adjusted(take(reference).to(outputs.device))
            found.append(distribution.kl(*reversed(pair) if reverse_kl else pair))
        return found


def _take(values: Tensor, *, places: Tensor | None, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return `[n, t, ...]` at positions in `[n * t]`, in the shape of `places`.

    None = all in order, in `shape`.
    """
    flat = values.flatten(0, 1)
    if places is not None:
        places = places.to(flat.device)
        return flat.index_select(0, places.flatten()).view(*places.shape, *flat.shape[1:])
    return flat if shape is None else flat.unflatten(0, shape)


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
