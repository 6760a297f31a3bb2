"""Train states of small networks: members with one architecture are rows of one stack.

Letters in shapes: `q` members, `w` observations of each, `c` observations without padding, `o`
outputs, `k` parameters of a member.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import pad

from evogrpo.arrays import Float32Array, IntArray
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import NetworkConfig
from evogrpo.config.optimizer import Optimizer
from evogrpo.functional.optim import clipped_adamw_steps_
from evogrpo.learn_reports import UpdateReport
from evogrpo.members.bank import (
    INITIAL_RUNNING_STATS,
    NO_REFERENCES,
    RUNNING_STATS,
    TrainState,
    check_parents,
    check_train_state,
)
from evogrpo.members.devices import check_allocation
from evogrpo.members.networks.architecture import Parameters, morph
from evogrpo.members.networks.distributions import Distribution, distribution_for
from evogrpo.members.networks.networks import (
    DefaultNetwork,
    ModuleNetwork,
    Network,
    Shapes,
    join,
    split,
)
from evogrpo.validation import dump

# A multiple of the width of vector instructions.
ROW_MULTIPLE = 64
# Key of all free parameters; no parameter has an empty name.
FREE = ""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Items of a batch, such as observations, by member; padded to the same number for each.

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
        if self.real is None:
            return flat
        return flat[self.real]

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
    sizes = np.zeros_like(members)
    if len(members) * counts.max() > 2 * len(rows):
        sizes = np.log2(counts[members]).astype(np.int64)
    # 3. Lay out each group; a member with fewer items than `width` repeats its first one.
    layouts = []
    for size in np.unique(sizes):
        group = members[sizes == size]  # [q]
        width = int(counts[group].max())
        column = np.arange(width)
        is_real = column < counts[group][:, None]  # [q, w]
        first = starts[group][:, None]
        index = order[first + np.where(is_real, column, 0)]
        real = None
        if not is_real.all():
            real = np.flatnonzero(is_real)
        layouts.append(Layout(rows=group, index=index, real=real))
    return layouts


class Stack:
    """Weights and optimizer state of all members with one architecture: one row per member.

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
        self.shapes = network.shapes | dict(distribution.free_parameters)
        self._length = tensors["weights"].shape[1]
        # Free parameters are the last columns.
        free_size = sum(map(math.prod, distribution.free_parameters.values()))
        self._has_free = free_size > 0
        self._free = slice(self._length - free_size, self._length)
        # With whole vector registers, the rounding of a row does not depend on the rows after it.
        padding = -self._length % ROW_MULTIPLE
        self.tensors = {name: pad(matrix, (0, padding)) for name, matrix in tensors.items()}
        self.gradient = torch.zeros_like(self.tensors["weights"])
        self._gradients = split(self.gradient, self.shapes)
        self._views = {name: split(matrix, self.shapes) for name, matrix in self.tensors.items()}
        space = None
        if isinstance(network, DefaultNetwork):
            space = network.encoder.space
        self.reads_features = isinstance(space, spaces.Box) and space.dtype != np.uint8

    def row(self, name: str, row: int) -> Tensor:
        """Return a view `[k]` of one member's row of a tensor."""
        return self.tensors[name][row, : self._length]

    def outputs(self, name: str, rows: IntArray, observations: Any) -> Tensor:
        """Return distribution parameters `[q, w, o]` for observations, without gradient."""
        flat, parameters = self._select(name, rows)
        return self._with_free(self.network(parameters, observations), flat)

    def vjp(self, rows: IntArray, observations: Any) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Return outputs under the weights, and a function that adds to `gradient`.

        The function takes the loss's gradient with respect to the outputs, `[q, w, o]`; see
        `DefaultNetwork.vjp`.
        """
        flat, parameters = self._select("weights", rows)
        outputs, add_gradients = self.network.vjp(parameters, observations)

        def backward(grad: Tensor) -> None:
            """Add to the gradients of the members, given that of the outputs."""
            # 1. Gradients of all members are written in place, those of fewer are added below.
            all_members = len(rows) == len(self.slots)
            if all_members:
                gradient = self.gradient
                gradients = self._gradients
            else:
                gradient = torch.zeros_like(flat)
                gradients = split(gradient, self.shapes)
            # 2. The network's gradient, from the columns of its outputs.
            grad_outputs, grad_free = grad.tensor_split([outputs.shape[2]], 2)
            add_gradients(grad_outputs, gradients)
            # 3. Free parameters are the same for every observation: sum over observations, by a
            #    matrix product. Unlike that of `sum`, its rounding does not depend on the number of
            #    members.
            if self._has_free:
                ones = grad.new_ones(len(grad), 1, grad.shape[1])
                sums = torch.bmm(ones, grad_free)  # [q, 1, o']
                gradient[:, self._free] += sums[:, 0]
            if not all_members:
                numbers = torch.from_numpy(rows).to(flat.device)
                self.gradient[numbers] += gradient

        return self._with_free(outputs, flat), backward

    def outputs_in_numpy(self, rows: IntArray, features: Float32Array) -> Float32Array:
        """Return `outputs` under the weights for features `[q, w, f]`, faster on a CPU."""
        # Callers check `reads_features`.
        assert isinstance(self.network, DefaultNetwork)
        arrays = self._arrays
        if len(rows) != len(self.slots):
            arrays = {name: values[rows] for name, values in arrays.items()}
        outputs = self.network.outputs_in_numpy(arrays, features)
        if not self._has_free:
            return outputs
        free = arrays[FREE][:, None]  # [q, 1, o']
        q, w, _ = outputs.shape
        repeated = np.broadcast_to(free, (q, w, free.shape[2]))
        return np.concatenate([outputs, repeated], axis=2)

    def _select(self, name: str, rows: IntArray) -> tuple[Tensor, Parameters]:
        """Return some members' rows `[q, k]` and parameters: views of all, copies of fewer."""
        # Rows are distinct and sorted: as many rows as members are those of all members, in order.
        matrix = self.tensors[name]
        if len(rows) == len(matrix):
            return matrix, self._views[name]
        numbers = torch.from_numpy(rows).to(matrix.device)
        flat = matrix[numbers]
        return flat, split(flat, self.shapes)

    def _with_free(self, outputs: Tensor, flat: Tensor) -> Tensor:
        """Append free parameters, from rows `[q, k]`, to the outputs of every observation."""
        if not self._has_free:
            return outputs
        q, w, _ = outputs.shape
        free = flat[:, None, self._free].expand(q, w, -1)
        return torch.cat([outputs, free], dim=2)

    @cached_property
    def _arrays(self) -> dict[str, Float32Array]:
        """Views of the weights in numpy: by parameter, and all free parameters together."""
        arrays = {name: values.numpy() for name, values in self._views["weights"].items()}
        arrays[FREE] = self.tensors["weights"][:, self._free].numpy()
        return arrays


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
        running_stats: `[p, 7]` float64 on the CPU: running statistics; see
            `evogrpo.members.bank.RUNNING_STATS`.
        extra_stats: `[p, s]` float64 on the CPU: additional running statistics, changed in place;
            saved and inherited.
        distribution: Action distribution of the networks' outputs.
        stacks: One stack per architecture.
        base: The initial weights, as a stack of one row.
        own_reference: As given.
        device: As given.
        version: Incremented whenever the stacks are rebuilt.
        state_keys: Keys of a train state.

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
        # 1. Build the initial network.
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
        # 2. Check the memory: weights, two moments, gradient and maybe a reference of each member;
        #    base and initial state.
        count = _size(shapes)
        copies = size * (4 + int(own_reference)) + 2
        what = (
            f"the networks of {size} members with {count:,} weights each. Use fewer members, or"
            " smaller layers."
        )
        check_allocation(4 * count * copies, self.device, what)
        # 3. Build the train state of a new member.
        parameters = initial.initial_parameters(seed)
        log_std = 0.0 if config is None else config.log_std
        for name, shape in free.items():
            parameters[name] = torch.full(shape, log_std)
        weights = join(parameters, shapes).to(device)
        self._initial = {
            "weights": weights,
            "exp_avg": torch.zeros_like(weights),
            "exp_avg_sq": torch.zeros_like(weights),
        }
        if own_reference:
            self._initial["reference"] = weights
        # Names of the tensors `[k]`.
        self._vectors = tuple(self._initial)
        initial_stats = (*INITIAL_RUNNING_STATS, *[0.0] * extra_stats)
        stats = torch.tensor(initial_stats, dtype=torch.float64)
        self._initial["architecture"] = self._encoded(config)
        self._initial["running_stats"] = stats
        self._initial["step"] = torch.tensor(0)
        self.state_keys = tuple(self._initial)
        # 4. Build the base, and all members. Running statistics are views of one matrix.
        self.base = Stack(initial, self.distribution, config, [0], {"weights": weights[None]})
        self.size = size
        self._stats = stats.repeat(size, 1)
        self.running_stats, self.extra_stats = self._stats.tensor_split([len(RUNNING_STATS)], 1)
        self._steps = [0] * size
        self._stack_of = np.zeros(size, dtype=np.int64)
        self._row_of = np.zeros(size, dtype=np.int64)
        self._rebuild_stacks([self._initial] * size)

    # ---- stacks

    def _network_for(self, config: NetworkConfig | None) -> Network:
        """Return the network of an architecture; None = the user's own module."""
        if config is not None:
            return DefaultNetwork(config, self._observation_space, self.distribution.outputs)
        assert self._module is not None
        return self._module

    def _shapes_for(self, config: NetworkConfig | None) -> Shapes:
        return self._network_for(config).shapes | dict(self.distribution.free_parameters)

    def architecture(self, slot: int) -> NetworkConfig | None:
        """Return a member's architecture; None for a user's module."""
        stack, _ = self.locate(slot)
        return stack.config

    def _encoded(self, config: NetworkConfig | None) -> Tensor:
        """Return an architecture, or the name of a user's module, as JSON text in bytes."""
        if self._module is None:
            values = dump(config)
        else:
            values = {"module": self._module.name}
        text = json.dumps(values, sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def _decoded(self, architecture: Tensor) -> NetworkConfig | None:
        """Return the architecture that `_encoded` wrote; None for a user's module."""
        if self._module is not None:
            return None
        return NetworkConfig(**json.loads(bytes(architecture.tolist())))

    def locate(self, slot: int) -> tuple[Stack, int]:
        """Return a member's stack and its row there."""
        if not 0 <= slot < self.size:
            raise ValueError(f"slot must be one of 0 to {self.size - 1}, got {slot}.")
        stack = self.stacks[self._stack_of[slot]]
        return stack, int(self._row_of[slot])

    def _rebuild_stacks(self, states: Sequence[TrainState]) -> None:
        """Build the stacks from train states in the order of slots."""
        # 1. Group the slots by architecture.
        by_config: dict[NetworkConfig | None, list[int]] = {}
        for slot, state in enumerate(states):
            config = self._decoded(state["architecture"])
            by_config.setdefault(config, []).append(slot)
            self._stats[slot] = state["running_stats"]
            self._steps[slot] = int(state["step"])
        # 2. Build one stack for each.
        self.stacks: list[Stack] = []
        for number, (config, slots) in enumerate(by_config.items()):
            matrices = {}
            for name in self._vectors:
                rows = [states[slot][name].to(self.device) for slot in slots]
                matrices[name] = torch.stack(rows)
            network = self._network_for(config)
            self.stacks.append(Stack(network, self.distribution, config, slots, matrices))
            self._stack_of[slots] = number
            self._row_of[slots] = np.arange(len(slots))
        self.version += 1

    def _replace(self, slot: int, state: TrainState) -> None:
        """Rebuild the stacks with another train state in one slot."""
        # All stacks are built again: members move between them.
        states = [self.state(other) for other in range(self.size)]
        states[slot] = state
        self._rebuild_stacks(states)

    # ---- states

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, all at once; None = a new member.

        Raises:
            ValueError: If `parents` is not one existing slot (or None) per slot.
        """
        check_parents(parents, self.size)
        self._rebuild_stacks(
            [self._initial if parent is None else self.state(parent) for parent in parents]
        )

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a member's train state."""
        stack, row = self.locate(slot)
        if name == "architecture":
            return self._encoded(stack.config)
        if name == "running_stats":
            return self._stats[slot].clone()
        if name == "step":
            return torch.tensor(self._steps[slot])
        return stack.row(name, row).clone()

    def state(self, slot: int) -> TrainState:
        """Return a copy of a member's train state."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned into a slot, architecture included.

        Raises:
            ValueError: If names, shapes or types are wrong; nothing is changed then.
        """
        stack, row = self.locate(slot)
        example = self.state(slot)
        # 1. Check the architecture. Its bytes may be missing, or anything else.
        architecture = state.get("architecture", torch.empty(0))
        try:
            config = self._decoded(architecture)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"train state 'architecture' is damaged: {error}") from error
        changed = architecture.tolist() != example["architecture"].tolist()
        if self._module is not None and changed:
            raise ValueError(
                "train state 'architecture' does not match the network of these members. Load it"
                " with GRPO.load."
            )
        # 2. Check names, shapes and types.
        vector = torch.empty(_size(self._shapes_for(config)))
        example |= dict.fromkeys(self._vectors, vector)
        example["architecture"] = torch.empty(architecture.shape, dtype=torch.uint8)
        check_train_state(state, example, "spaces, network")
        # 3. Load it, in place if the architecture is the same.
        if config != stack.config:
            self._replace(slot, dict(state))
            return
        for name in self._vectors:
            stack.row(name, row).copy_(state[name])
        self._stats[slot] = state["running_stats"]
        self._steps[slot] = int(state["step"])

    def rebuild(self, slot: int, config: NetworkConfig, rng: np.random.Generator) -> None:
        """Give a member another architecture and keep what it has learned; see `morph`.

        Raises:
            ValueError: If the change is not possible.
        """
        stack, _ = self.locate(slot)
        if stack.config is None:
            raise ValueError(
                "The architecture of a custom module cannot change. Leave out actor_network to"
                " evolve it."
            )
        # Convert weights, moments and reference together, each as a dict of parameters.
        state = self.state(slot)
        parameters = {name: split(state[name], stack.shapes) for name in self._vectors}
        shapes = self._shapes_for(config)
        for name, changed in morph(parameters, stack.config, config, rng).items():
            state[name] = join(changed, shapes)
        state["architecture"] = self._encoded(config)
        self._replace(slot, state)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * weights + (1 - mixing) * reference.

        Source: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), the soft
        update.

        Raises:
            ValueError: If members have no references of their own.
        """
        if not self.own_reference:
            raise ValueError(NO_REFERENCES)
        stack, row = self.locate(slot)
        weights = stack.row("weights", row)
        stack.row("reference", row).lerp_(weights, mixing)

    # ---- learning

    @torch.no_grad()
    def step(
        self, hyperparameters: Mapping[int, Hyperparameters], losses: Sequence[float]
    ) -> dict[int, UpdateReport]:
        """Clip the gradients and take AdamW steps, except where a gradient is not finite.

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
                values = hyperparameters.get(slot)
                if values is None:
                    lrs.append(None)
                    max_norms.append(math.inf)
                else:
                    factor = settings.factor(self._steps[slot])
                    lrs.append(values.lr * factor)
                    max_norms.append(values.max_grad_norm)
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
            results = zip(stack.slots, lrs, norms, finite, strict=True)
            for slot, lr, norm, healthy in results:
                if lr is None:
                    continue
                # A step that was not taken is not counted.
                if not math.isnan(norm):
                    self._steps[slot] += 1
                reports[slot] = UpdateReport(
                    grad_norm=norm if healthy else math.nan,
                    lr=lr,
                    loss=losses[slot],
                    step=self._steps[slot],
                )
        return reports


def _size(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
