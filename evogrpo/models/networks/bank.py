"""StackedBank: small networks of all members stacked on a member axis, acting and learning in batched products."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.data import Batch, SampledActions, UpdateReport, map_tensors
from evogrpo.interruption import before_changes
from evogrpo.models.bank import RUNNING_STATS, LossFunction, PolicyVersion, ReferenceDistributions
from evogrpo.models.networks.architecture import NetworkConfig
from evogrpo.models.networks.distributions import distribution_for
from evogrpo.models.networks.networks import DefaultNetwork, ModuleNetwork, Network
from evogrpo.models.networks.passes import StackedPasses, lay_out_slots
from evogrpo.models.networks.stacks import IntArray, Layout, Stack, StackedStates


class StackedBank:
    """A population of small networks, each with its own weights, computed together.

    Members of one architecture are rows of one stack, and what a method computes for one stack is one batched
    computation. On the CPU acting is numpy: a call costs half of what it costs in torch.

    Args:
        observation_space: What members observe.
        action_space: Where they act.
        size: Number of members.
        network: The architecture that members start with (two tanh layers of 64 by default), or a module of the
            caller's, which takes a forward pass per member; see `ModuleNetwork`.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial weights, which are the same for all members.
        own_reference: Whether every member keeps a reference policy of its own, to be set by `keep_reference`;
            otherwise the reference is the policy that all members started from.
        device: Where weights live and networks run.
        memory: Most bytes that one forward pass with gradients keeps, roughly. Halved when memory runs out.
        statistics: How many further running statistics each member carries for whoever uses the bank; 0 at birth.

    Attributes:
        distribution: How a network's outputs become actions.
        device: As given.

    Raises:
        ValueError: If a space is not supported, or the network does not fit it.
    """

    rows_are_transitions = True

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None,
        action_space: spaces.Space[Any] | None,
        *,
        size: int,
        network: NetworkConfig | nn.Module | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        own_reference: bool = False,
        device: torch.device | str = "cpu",
        memory: int = 1 << 26,
        statistics: int = 0,
    ) -> None:
        if size < 1:
            raise ValueError(f"a bank needs at least 1 member, got size={size}")
        self.distribution = distribution_for(action_space)
        outputs, custom, config = self.distribution.outputs, None, None
        if isinstance(network, nn.Module):
            custom = ModuleNetwork(network, observation_space, outputs, device)
            taken = sorted(set(custom.shapes) & set(self.distribution.free))
            if taken:
                raise ValueError(
                    f"{custom.name} must have no parameter named {taken[0]!r}, which is the action distribution's own: "
                    "rename it, or leave it out and let that one be learnt"
                )
        else:
            config = network or NetworkConfig()

        def network_for(config: NetworkConfig | None) -> Network:
            if config is not None:
                return DefaultNetwork(config, observation_space, outputs)
            assert custom is not None
            return custom

        self._states = StackedStates(
            network_for,
            self.distribution,
            config,
            size,
            optimizer=optimizer or Optimizer(),
            seed=seed,
            own_reference=own_reference,
            device=device,
            statistics=statistics,
        )
        self.device = torch.device(device)
        self._passes = StackedPasses(self._states, self.distribution, memory)
        self._on_cpu = self.device.type == "cpu"
        self._laid_out: tuple[IntArray, tuple[int, bool], list[tuple[Stack, Layout]]] | None = None

    @property
    def size(self) -> int:
        """Number of slots."""
        return self._states.size

    @property
    def running_stats(self) -> Tensor:
        """`[p, 4]` float64 on the CPU: running statistics; see `evogrpo.models.bank.RUNNING_STATS`."""
        return self._states.running_stats[:, : len(RUNNING_STATS)]

    @property
    def statistics(self) -> Tensor:
        """`[p, s]` float64 on the CPU: further running statistics, to be changed in place; saved and inherited."""
        return self._states.running_stats[:, len(RUNNING_STATS) :]

    @property
    def uniforms_per_action(self) -> int:
        """How many uniform numbers one action is drawn with."""
        return self.distribution.uniforms_per_action

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
        """Choose one action for each observation; see `evogrpo.data.Actor`.

        Raises:
            ValueError: If a slot does not exist, or an observation does not fit its space.
        """
        layouts = self._lay_out(member_ids, base=base)
        legal = None
        if action_mask is not None:
            parts = action_mask if isinstance(action_mask, tuple | list) else [action_mask]
            legal = np.concatenate(parts, axis=1).astype(np.bool_)
        with np.errstate(all="ignore"):  # a member whose weights are not finite fails when it learns
            outputs = [self._outputs(stack, layout, observations, len(member_ids)) for stack, layout in layouts]
            if len(outputs) == 1 and layouts[0][1].in_order:
                together = outputs[0]
            else:
                together = np.empty((len(member_ids), outputs[0].shape[1]), dtype=np.float32)
                for (_, layout), part in zip(layouts, outputs, strict=True):
                    together[layout.items] = part
            actions, log_probs = self.distribution.draw(together, uniforms, temperature, legal)
        return SampledActions(actions=actions, log_probs=log_probs)

    def _lay_out(self, member_ids: IntArray, *, base: bool) -> list[tuple[Stack, Layout]]:
        """Lay rows out by member; environments ask with the same rows many times in turn."""
        key = (self._states.changes, base)
        if self._laid_out is not None and self._laid_out[1] == key and np.array_equal(self._laid_out[0], member_ids):
            return self._laid_out[2]
        if not len(member_ids) or member_ids.min() < 0 or member_ids.max() >= self.size:
            raise ValueError(f"member_ids must hold slots from 0 to {self.size - 1}, got {member_ids}")
        layouts = lay_out_slots(self._states, member_ids, base=base)
        self._laid_out = (member_ids.copy(), key, layouts)
        return layouts

    def _outputs(self, stack: Stack, layout: Layout, observations: Any, count: int) -> NDArray[np.float32]:
        """Return the distribution's numbers `[c, o]` of the rows in `layout.items`."""
        if stack.reads_features and self._on_cpu:
            features = np.asarray(observations, dtype=np.float32).reshape(count, -1)
            whole = layout.in_order and layout.index.size == count
            features = features.reshape(*layout.index.shape, -1) if whole else features[layout.index]
            outputs = stack.act("weights", layout.rows, features)
        else:
            index = torch.from_numpy(layout.index)
            seen = map_tensors(_tensors(observations), lambda leaf: leaf[index])
            outputs = stack.outputs("weights", layout.rows, seen).cpu().numpy()
        outputs = outputs.reshape(-1, outputs.shape[2])
        return outputs if layout.real is None else outputs[layout.real]

    # ---- scoring and learning

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions in nats, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Under the policy that all members started from rather than under their own.
        """
        return self._passes.score(batch, "base" if base else "weights")[0]

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the distributions acted from, in nats, without gradient; 0 where masked."""
        return self._passes.score(batch, "weights")[1]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under each member's reference, without gradient; 0 where masked."""
        return self._passes.score(batch, self._held_to)[0]

    def distributions(self, batch: Batch, *, reference: bool) -> Tensor:
        """Return `[n, t, o]` the numbers of action distributions; see `evogrpo.models.bank.FullDistributionBank`."""
        return self._passes.outputs(batch, self._held_to if reference else "weights")

    @property
    def _held_to(self) -> PolicyVersion:
        return "reference" if self._states.own_reference else "base"

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        reference_distributions: ReferenceDistributions | None = None,
        last: bool = False,
    ) -> dict[int, UpdateReport]:
        """Take one AdamW step for every member named in `hyperparameters`; see `evogrpo.models.bank`."""
        settle = before_changes(last=last)
        losses = self._passes.add_gradients(
            batch,
            loss_fn,
            hyperparameters,
            entropy_gradient=entropy_gradient,
            reference_distributions=reference_distributions,
        )
        if settle is not None:
            settle()
        return self._states.step(hyperparameters, losses)

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return how many environment steps one pass over the batch processes, by slot."""
        member_ids, steps = batch.member_ids.cpu(), torch.zeros(self.size, dtype=torch.int64)
        steps.index_add_(0, member_ids, batch.action_mask.sum(1).cpu())
        rows = member_ids.bincount(minlength=self.size).tolist()
        return {slot: count for slot, count in enumerate(steps.tolist()) if rows[slot]}

    # ---- what members have learnt

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt, architecture and all; None = a fresh initialisation."""
        self._states.inherit(parents)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What a learner state consists of, by name."""
        return self._states.state_keys

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of a member's learner state."""
        return self._states.state_tensor(slot, name)

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of everything the member in `slot` has learnt, and its architecture."""
        return self._states.state(slot)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot; see `StackedStates.load_state`."""
        self._states.load_state(slot, state)

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their own references; ValueError without own references."""
        self._states.keep_reference(slots)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Move a member's own reference towards its policy; see `StackedStates.mix_reference`."""
        self._states.mix_reference(slot, mixing)

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a module whose call gives one member's outputs; it reads the bank, and holds no weights of its own."""
        return MemberNetwork(self, slot, base=base)

    def words(self, slot: int) -> str:
        """Say what a member's network is made of."""
        return self._states.place(slot)[0].network.words

    def architecture(self, slot: int) -> NetworkConfig | None:
        """Return a member's architecture; None for a module of the caller's."""
        return self._states.config(slot)

    def rebuild(self, slot: int, config: NetworkConfig, rng: np.random.Generator) -> None:
        """Give a member another architecture, keeping what it has learnt; see `StackedStates.rebuild`."""
        self._states.rebuild(slot, config, rng)


class MemberNetwork(nn.Module):
    """One member of a bank as a module: observations in, the numbers of its action distribution out.

    Args:
        bank: Where the member's weights live.
        slot: Which member.
        base: The untrained base instead, whatever the slot.
    """

    def __init__(self, bank: StackedBank, slot: int, *, base: bool = False) -> None:
        super().__init__()
        self._bank, self._base = bank, base
        self.slot = slot

    def forward(self, observations: Any) -> Tensor:
        """Return outputs `[m, o]` of observations `[m, ...]` in the form of their space, without gradient.

        Args:
            observations: Tensors or arrays; for Dict and Tuple dicts and tuples of such.
        """
        states = self._bank._states
        stack, row = (states.base, 0) if self._base else states.place(self.slot)
        seen = map_tensors(_tensors(observations), lambda leaf: leaf[None])
        return stack.outputs("weights", np.array([row]), seen)[0]


def _tensors(tree: Any) -> Any:
    """Return arrays or tensors, or dicts and tuples of them, as tensors that share their memory."""
    if isinstance(tree, Mapping):
        return {key: _tensors(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_tensors(value) for value in tree)
    return tree if isinstance(tree, Tensor) else torch.from_numpy(np.asarray(tree))
