"""Train states of small networks: members with one architecture are rows of one stack."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import NetworkConfig
from evogrpo.config.optimizer import Optimizer
from evogrpo.functional.optim import clipped_adamw_steps_
from evogrpo.members.bank import (
    INITIAL_RUNNING_STATS,
    RUNNING_STATS,
    check_parents,
    check_train_state,
)
from evogrpo.members.devices import check_allocation
from evogrpo.members.networks.architecture import Parameters, morph
from evogrpo.members.networks.distributions import Distribution, distribution_for
from evogrpo.members.networks.networks import (
    DefaultNetwork,
    FloatArray,
    ModuleNetwork,
    Network,
    Shapes,
    join,
    split,
)
from evogrpo.records import UpdateReport
from evogrpo.validation import dump

IntArray = NDArray[np.int64]

ROW_MULTIPLE = 64  # a multiple of the width of vector instructions


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Items of several members, padded to the same number for each.

    Attributes:
        rows: `[q]` rows of the members in their stack.
        index: `[q, w]` item numbers; padding repeats an item of its member.
        real: `[c]` flat positions in `index` that are not padding; None = all.
    """

    rows: IntArray
    index: IntArray
    real: IntArray | None

    @property
    def items(self) -> IntArray:
        """`[c]` item numbers without padding."""
        flat = self.index.reshape(-1)
        return flat if self.real is None else flat[self.real]

    @cached_property
    def items_in_order(self) -> bool:
        """True if the items without padding are numbered 0, 1, 2 and so on."""
        items = self.items
        return bool(np.array_equal(items, np.arange(len(items))))

    @property
    def in_order(self) -> bool:
        """True if `index` is 0, 1, 2 and so on, without padding."""
        return self.real is None and self.items_in_order


def lay_out(rows: IntArray) -> list[Layout]:
    """Arrange items by member, padded to the same number for each.

    If padding would more than double the work, only members whose numbers of items differ by a
    factor of at most two share a layout.

    Args:
        rows: `[c]` row of each item's member, in any order.

    Returns:
        Layouts that contain each item once, apart from padding.
    """
    if not len(rows):
        return []
    # 1. Sort the items by member.
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    starts = np.cumsum(counts) - counts
    members = np.flatnonzero(counts)
    # 2. Group the members: by the rounded-down log2 of their items if one group would be mostly
    #    padding.
    wasteful = len(members) * counts.max() > 2 * len(rows)
    if wasteful:
        sizes = np.log2(counts[members]).astype(np.int64)
    else:
        sizes = np.zeros_like(members)
    # 3. Lay out each group; a member with fewer items than `width` repeats its first one.
    layouts = []
    for size in np.unique(sizes):
        group = members[sizes == size]
        width = int(counts[group].max())
        place = np.arange(width)
        real = place < counts[group][:, None]
        index = order[starts[group][:, None] + np.where(real, place, 0)]
        layouts.append(
            Layout(rows=group, index=index, real=None if real.all() else np.flatnonzero(real))
        )
    return layouts


class Stack:
    """Weights and optimizer state of all members with one architecture, as matrices with one row per member.

    Shapes have q members, w observations of each, and o outputs of the network with the free
    parameters of its distribution.

    Args:
        network: The network.
        distribution: Action distribution of its outputs.
        config: The architecture; None for a user's module.
        slots: Slots of the members.
        tensors: `[q, k]` by name ("weights", "exp_avg", "exp_avg_sq", perhaps "reference").

    Attributes:
        tensors: `[q, k]` by name, rows padded with zeros.
        gradient: `[q, k]`, padded in the same way.
        reads_features: An observation is an array of features, so that `outputs_in_numpy` can be
            used.
    """

    def __init__(
        self,
        network: Network,
        distribution: Distribution,
        config: NetworkConfig | None,
        slots: Sequence[int],
        tensors: Mapping[str, Tensor],
    ) -> None:
        self.network = network
        self.config = config
        self.slots = list(slots)
        self.shapes: Shapes = network.shapes | dict(distribution.free_parameters)
        self._length = next(iter(tensors.values())).shape[1]
        # With whole vector registers, the rounding of a row does not depend on the rows after it.
        self.tensors = {
            name: pad(matrix, (0, -self._length % ROW_MULTIPLE)) for name, matrix in tensors.items()
        }
        self._free_names = list(distribution.free_parameters)
        self.gradient = torch.zeros_like(self.tensors["weights"])
        self._gradients = split(self.gradient, self.shapes)
        self._views = {name: split(matrix, self.shapes) for name, matrix in self.tensors.items()}
        if isinstance(network, DefaultNetwork):
            space = network.encoder.space
        else:
            space = None
        self.reads_features = isinstance(space, spaces.Box) and space.dtype != np.uint8

    def row(self, name: str, row: int) -> Tensor:
        """Return a view `[k]` of one member's row of a tensor."""
        return self.tensors[name][row, : self._length]

    def outputs(self, name: str, rows: IntArray, observations: Any) -> Tensor:
        """Return distribution parameters `[q, w, o]` for observations `[q, w, ...]`, without gradient."""
        parameters = self._parameters(name, rows)
        return self._with_free(self.network(parameters, observations), parameters)

    def vjp(self, rows: IntArray, observations: Any) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return outputs under the weights, and a function that adds the gradient of a loss to `gradient`.

        The function takes the loss's gradient with respect to the outputs, `[q, w, o]`; see
        `DefaultNetwork.vjp`.
        """
        parameters = self._parameters("weights", rows)
        all_members = len(rows) == len(self.slots)
        outputs, add_gradients = self.network.vjp(parameters, observations)

        def backward(grad: Tensor) -> None:
            # 1. The network's gradient, from the columns of its outputs.
            if all_members:
                flat = self.gradient
            else:
                flat = torch.zeros_like(self.gradient[: len(rows)])
            if all_members:
                gradients = self._gradients
            else:
                gradients = split(flat, self.shapes)
            grad_outputs, grad_free = grad.tensor_split([outputs.shape[2]], 2)
            add_gradients(grad_outputs, gradients)
            # 2. Free parameters are the last columns, the same for every observation: sum over
            #    observations. Sum by a matrix product: unlike `sum`, its rounding does not depend
            #    on the number of members.
            ones = grad.new_ones(len(grad), 1, grad.shape[1])
            widths = [math.prod(self.shapes[name]) for name in self._free_names]
            for name, part in zip(self._free_names, grad_free.split(widths, 2), strict=True):
                gradients[name] += torch.bmm(ones, part).view(len(grad), *self.shapes[name])
            if not all_members:
                self.gradient[torch.from_numpy(rows).to(flat.device)] += flat

        return self._with_free(outputs, parameters), backward

    def outputs_in_numpy(self, rows: IntArray, features: FloatArray) -> FloatArray:
        """Return `outputs` under the weights, faster on a CPU: features `[q, w, f]` of `rows` of this stack."""
        assert isinstance(self.network, DefaultNetwork)  # see reads_features
        arrays = self._arrays
        if len(rows) != len(self.slots):
            arrays = {key: value[rows] for key, value in arrays.items()}
        outputs = self.network.outputs_in_numpy(arrays, features)
        free_parameters = [arrays[key].reshape(len(rows), 1, -1) for key in self._free_names]
        repeated = [
            np.broadcast_to(values, (*outputs.shape[:2], values.shape[2]))
            for values in free_parameters
        ]
        if repeated:
            return np.concatenate([outputs, *repeated], axis=2)
        return outputs

    def _parameters(self, name: str, rows: IntArray) -> Parameters:
        """Return the parameters `[q, ...]` of some members: views of all, copies of fewer."""
        matrix = self.tensors[name]
        if len(rows) == len(matrix):
            return self._views[name]
        return split(matrix[torch.from_numpy(rows).to(matrix.device)], self.shapes)

    def _with_free(self, outputs: Tensor, parameters: Parameters) -> Tensor:
        free = [
            parameters[name].flatten(1)[:, None].expand(*outputs.shape[:2], -1)
            for name in self._free_names
        ]
        if free:
            return torch.cat([outputs, *free], dim=2)
        return outputs

    @cached_property
    def _arrays(self) -> dict[str, FloatArray]:
        """Views of the weights in numpy, by parameter."""
        return {key: value.numpy() for key, value in self._views["weights"].items()}


@dataclass(frozen=True, kw_only=True)
class _TrainState:
    """Train state of one member; `config` is None for a user's module."""

    config: NetworkConfig | None
    tensors: dict[str, Tensor]
    running_stats: Tensor
    step: int


class StackedTrainStates:
    """Train states of all members, in one stack per architecture.

    Slots move between stacks when they inherit or change their architecture.

    Args:
        observation_space: Observation space of the members.
        action_space: Action space of the members.
        size: Number of members.
        network: Initial architecture of all members (by default two tanh layers of 64), or a user's
            module, which is run once per member; see `ModuleNetwork`.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial weights, which are the same for all members.
        own_reference: Each member has its own reference policy, set by `mix_reference`. Otherwise
            the reference is the initial policy.
        device: Device of weights and computation.
        extra_stats: Number of additional running statistics per member, initially 0.

    Attributes:
        size: Number of slots.
        running_stats: `[p, 6]` float64 on the CPU: running statistics; see
            `evogrpo.members.bank.RUNNING_STATS`.
        extra_stats: `[p, s]` float64 on the CPU: additional running statistics, changed in place;
            saved and inherited.
        distribution: Action distribution of the networks' outputs.
        stacks: One stack per architecture.
        base: The initial weights, as a stack of one row.
        own_reference: As given.
        device: As given.
        version: Incremented whenever the stacks are rebuilt.

    Raises:
        ValueError: If a space is not supported, or the network does not fit it.
    """

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
        extra_stats: int = 0,
    ) -> None:
        self.distribution = distribution_for(action_space)
        self._observation_space = observation_space
        self._optimizer = optimizer or Optimizer()
        self.seed = seed
        self.own_reference = own_reference
        self.device = torch.device(device)
        self.version = 0
        # 1. The initial network.
        self._module: ModuleNetwork | None = None
        config = None
        free = self.distribution.free_parameters
        if not isinstance(network, nn.Module):
            config = network or NetworkConfig()
        else:
            self._module = ModuleNetwork(
                network, observation_space, self.distribution.outputs, device
            )
            reserved = sorted(set(self._module.shapes) & set(free))
            if reserved:
                raise ValueError(
                    f"{self._module.name} must have no parameter named {reserved[0]!r}, which is"
                    " reserved for the action distribution. Rename the parameter."
                )
        initial = self._network_for(config)
        shapes = initial.shapes | dict(free)
        # 2. Check the memory: weights, two moments, gradient and reference of each member; base and
        #    initial state.
        count = sum(math.prod(shape) for shape in shapes.values())
        copies = size * (5 if own_reference else 4) + 2
        what = (
            f"the networks of {size} members with {count:,} weights each: use fewer, or smaller"
            " layers"
        )
        check_allocation(4 * count * copies, self.device, what)
        # 3. The train state of a new member.
        parameters = initial.initial_parameters(seed)
        for name, shape in free.items():
            parameters[name] = torch.full(shape, 0.0 if config is None else config.log_std)
        weights = join(parameters, shapes).to(device)
        tensors = {
            "weights": weights,
            "exp_avg": torch.zeros_like(weights),
            "exp_avg_sq": torch.zeros_like(weights),
        }
        if own_reference:
            tensors["reference"] = weights
        stats = torch.tensor((*INITIAL_RUNNING_STATS, *[0.0] * extra_stats), dtype=torch.float64)
        self._initial = _TrainState(config=config, tensors=tensors, running_stats=stats, step=0)
        # 4. The base, and all members.
        self.base = Stack(initial, self.distribution, config, [0], {"weights": weights[None]})
        self.size = size
        self._stats = stats.repeat(size, 1)
        self._steps = [0] * size
        # views
        self.running_stats, self.extra_stats = self._stats.tensor_split([len(RUNNING_STATS)], dim=1)
        self._rebuild_stacks([self._initial] * size)

    # ---- stacks

    def _network_for(self, config: NetworkConfig | None) -> Network:
        if config is not None:
            return DefaultNetwork(config, self._observation_space, self.distribution.outputs)
        assert self._module is not None
        return self._module

    def architecture(self, slot: int) -> NetworkConfig | None:
        """Return a member's architecture; None for a user's module."""
        return self.locate(slot)[0].config

    def locate(self, slot: int) -> tuple[Stack, int]:
        """Return a member's stack and its row there."""
        if not 0 <= slot < self.size:
            raise ValueError(f"slot must be one of 0 to {self.size - 1}, got {slot}.")
        return self.stacks[self._stack_of[slot]], int(self._row_of[slot])

    def _rebuild_stacks(self, states: Sequence[_TrainState]) -> None:
        """Build the stacks from train states in the order of slots."""
        by_config: dict[NetworkConfig | None, list[int]] = {}
        for slot, state in enumerate(states):
            by_config.setdefault(state.config, []).append(slot)
        self.stacks: list[Stack] = []
        self._stack_of = np.zeros(len(states), dtype=np.int64)
        self._row_of = np.zeros(len(states), dtype=np.int64)
        for number, (config, slots) in enumerate(by_config.items()):
            tensors = {
                name: torch.stack([states[slot].tensors[name] for slot in slots])
                for name in self._initial.tensors
            }
            self.stacks.append(
                Stack(self._network_for(config), self.distribution, config, slots, tensors)
            )
            self._stack_of[slots], self._row_of[slots] = number, np.arange(len(slots))
        for slot, state in enumerate(states):
            self._stats[slot] = state.running_stats
            self._steps[slot] = state.step
        self.version += 1

    def _replace(self, slot: int, state: _TrainState) -> None:
        """Rebuild the stacks with another train state in one slot."""
        self._rebuild_stacks(
            [state if other == slot else self._view(other) for other in range(self.size)]
        )

    def _view(self, slot: int) -> _TrainState:
        """Return a member's train state; its tensors are views."""
        stack, row = self.locate(slot)
        return _TrainState(
            config=stack.config,
            tensors={name: stack.row(name, row) for name in stack.tensors},
            running_stats=self._stats[slot].clone(),
            step=self._steps[slot],
        )

    # ---- states

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot parents[i] to slot i, all at once.

        None = a fresh initialisation.

        Raises:
            ValueError: If `parents` does not name one existing slot (or None) per slot.
        """
        check_parents(parents, self.size)
        self._rebuild_stacks(
            [self._initial if parent is None else self._view(parent) for parent in parents]
        )

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of `state`."""
        return *self._initial.tensors, "architecture", "running_stats", "step"

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a member's train state."""
        stack, row = self.locate(slot)
        if name == "architecture":  # as JSON text, in bytes
            if self._module:
                values = {"module": self._module.name}
            else:
                values = dump(stack.config)
            return torch.tensor(
                list(json.dumps(values, sort_keys=True).encode()), dtype=torch.uint8
            )
        if name == "step":
            return torch.tensor(self._steps[slot])
        if name == "running_stats":
            return self._stats[slot].clone()
        return stack.row(name, row).clone()

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return a copy of a member's train state: weights and moments `[k]`, architecture, statistics, step count."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned into a slot, architecture included.

        Raises:
            ValueError: If names, shapes or types are wrong; nothing is changed then.
        """
        stack, row = self.locate(slot)
        # 1. Check the architecture.
        config = None
        architecture = state.get("architecture", torch.empty(0))
        if self._module is None:
            try:
                config = NetworkConfig(**json.loads(bytes(architecture.tolist())))
            except (
                ValueError,
                TypeError,
                RecursionError,
            ) as error:  # other bytes, or no bytes at all
                raise ValueError(f"train state 'architecture' is damaged: {error}") from error
        elif architecture.dtype != torch.uint8 or not architecture.equal(
            self.state_tensor(slot, "architecture")
        ):
            raise ValueError(
                "train state 'architecture' does not match the network of these members. Load it"
                " with GRPO.load."
            )
        # 2. Check names, shapes and types.
        shapes = self._network_for(config).shapes | dict(self.distribution.free_parameters)
        weights = ((sum(math.prod(shape) for shape in shapes.values()),), torch.float32)
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(
            self._initial.tensors, weights
        )
        expected |= {
            "running_stats": (tuple(self._stats.shape[1:]), torch.float64),
            "step": ((), torch.int64),
        }
        expected["architecture"] = (tuple(architecture.shape), torch.uint8)
        check_train_state(state, expected, "spaces, network")
        # 3. Load it.
        tensors = {name: state[name].to(self.device) for name in self._initial.tensors}
        if config != stack.config:
            new = _TrainState(
                config=config, tensors=tensors, running_stats=self._stats[slot], step=0
            )
            self._replace(slot, new)
        else:
            for name, values in tensors.items():
                stack.row(name, row).copy_(values)
        self._stats[slot], self._steps[slot] = state["running_stats"].cpu(), int(state["step"])

    def rebuild(self, slot: int, config: NetworkConfig, rng: np.random.Generator) -> None:
        """Give a member another architecture and keep what it has learned; see `morph`.

        Raises:
            ValueError: If the change is not possible.
        """
        stack = self.locate(slot)[0]
        state = self._view(slot)
        if stack.config is None:
            raise ValueError(
                "The architecture of a custom module cannot change. Leave out actor_network to"
                " evolve it."
            )
        shapes = self._network_for(config).shapes | dict(self.distribution.free_parameters)
        parameters = {name: split(values, stack.shapes) for name, values in state.tensors.items()}
        changed = {
            name: join(part, shapes)
            for name, part in morph(parameters, stack.config, config, rng).items()
        }
        self._replace(slot, replace(state, config=config, tensors=changed))

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * weights + (1 - mixing) * reference.

        ValueError without own references.

        Source: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), the soft
        update.
        """
        if not self.own_reference:
            raise ValueError("Members have no references of their own. Set reference='snapshot'.")
        stack, row = self.locate(slot)
        stack.row("reference", row).lerp_(stack.row("weights", row), mixing)

    # ---- learning

    @torch.no_grad()
    def step(
        self, hyperparameters: Mapping[int, Hyperparameters], losses: Sequence[float]
    ) -> dict[int, UpdateReport]:
        """Clip the gradients in the stacks and take AdamW steps, except where a gradient is not finite.

        Args:
            hyperparameters: Hyperparameters by slot of the members that step; `lr` and
                `max_grad_norm` are used.
            losses: Loss by slot, for the reports.

        Returns:
            Reports by slot; the norm is NaN if the gradient or the weights after the step are not
            finite.
        """
        settings = self._optimizer
        reports = dict[int, UpdateReport]()
        for stack in self.stacks:
            # 1. Learning rates of the members that step.
            lrs: list[float | None] = []
            max_norms = []
            for slot in stack.slots:
                own = hyperparameters.get(slot)
                lrs.append(None if own is None else own.lr * settings.factor(self._steps[slot]))
                max_norms.append(math.inf if own is None else own.max_grad_norm)
            # 2. Clip the gradients and take AdamW steps.
            norms = clipped_adamw_steps_(
                stack.tensors["weights"],
                stack.gradient,
                stack.tensors["exp_avg"],
                stack.tensors["exp_avg_sq"],
                steps=[self._steps[slot] + 1 for slot in stack.slots],
                lrs=lrs,
                max_norms=max_norms,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
            # 3. Reports. One sum finds any NaN or infinity in a member's weights.
            finite = stack.tensors["weights"].sum(1).isfinite().tolist()
            for slot, lr, norm, healthy in zip(stack.slots, lrs, norms, finite, strict=True):
                if lr is None:
                    continue
                self._steps[slot] += not math.isnan(norm)
                reports[slot] = UpdateReport(
                    grad_norm=norm if healthy else math.nan,
                    lr=lr,
                    loss=losses[slot],
                    step=self._steps[slot],
                )
        return reports
