"""Stacked networks: weights and AdamW states of all members with one architecture."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.data import UpdateReport
from evogrpo.functional.optim import adamw_steps_
from evogrpo.models.bank import INITIAL_RUNNING_STATS
from evogrpo.models.devices import check_allocation
from evogrpo.models.networks.architecture import NetworkConfig, Parameters, bytes_tensor, morph
from evogrpo.models.networks.distributions import Distribution
from evogrpo.models.networks.layers import FloatArray
from evogrpo.models.networks.networks import DefaultNetwork, ModuleNetwork, Network, Shapes, join, split

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


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One member's learner state; `config` is None for a module of the caller's."""

    config: NetworkConfig | None
    learnt: dict[str, Tensor]
    running_stats: Tensor
    step: int


class StackedStates:
    """The learner states of all members of a stacked bank.

    Members of one architecture are rows of one stack. Slots move between stacks as they inherit or change
    architecture.

    Args:
        network_for: Makes the network of an architecture.
        distribution: How outputs become actions.
        config: The architecture that members start with; None for a module of the caller's.
        size: Number of members.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial weights, which are the same for all members.
        own_reference: Whether every member keeps weights of its own to be compared with.
        device: Where everything lives.
        statistics: How many further running statistics a member carries; 0 at birth.

    Attributes:
        stacks: One per architecture.
        base: The initial weights, as a stack of one.
        running_stats: `[p, 4 + statistics]` float64 on the CPU; first `evogrpo.models.bank.RUNNING_STATS`.
        changes: How often the stacks were made anew.
    """

    def __init__(
        self,
        network_for: Callable[[NetworkConfig | None], Network],
        distribution: Distribution,
        config: NetworkConfig | None,
        size: int,
        *,
        optimizer: Optimizer,
        seed: int,
        own_reference: bool,
        device: torch.device | str,
        statistics: int = 0,
    ) -> None:
        self._network_for, self._distribution, self._optimizer = network_for, distribution, optimizer
        self.own_reference, self._device, self.changes = own_reference, device, 0
        network = network_for(config)
        numbers = sum(math.prod(shape) for shape in (network.shapes | dict(distribution.free)).values())
        copies = size * (5 if own_reference else 4) + 2  # weights, moments, gradient; the base and the first founder
        members = f"the networks of {size} members with {numbers:,} weights each: use fewer, or smaller layers"
        check_allocation(4 * numbers * copies, torch.device(device), members)
        first = network.initial(seed)
        for name, shape in distribution.free.items():
            first[name] = torch.full(shape, 0.0 if config is None else config.log_std)
        weights = join(first, network.shapes | dict(distribution.free)).to(device)
        learnt = {"weights": weights, "exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights)}
        if own_reference:
            learnt["reference"] = weights
        at_birth = torch.tensor((*INITIAL_RUNNING_STATS, *[0.0] * statistics), dtype=torch.float64)
        self._first = _Member(config=config, learnt=learnt, running_stats=at_birth, step=0)
        self.base = Stack(network, distribution, config, [0], {"weights": weights[None]})
        self.running_stats = at_birth.repeat(size, 1)
        self._steps = [0] * size
        self._arrange([self._first] * size)

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._steps)

    # ---- where members are

    def config(self, slot: int) -> NetworkConfig | None:
        """Return a member's architecture; None for a module of the caller's."""
        return self.place(slot)[0].config

    def placed(self, slots: IntArray) -> Iterator[tuple[Stack, IntArray, IntArray]]:
        """Yield, for items of the given slots, each stack concerned, its item numbers, and the row of each."""
        if len(self.stacks) == 1:
            yield self.stacks[0], np.arange(len(slots)), slots
            return
        for number, stack in enumerate(self.stacks):
            items = np.flatnonzero(self._stack_of[slots] == number)
            if len(items):
                yield stack, items, self._row_of[slots[items]]

    def place(self, slot: int) -> tuple[Stack, int]:
        """Return the stack a member is in, and its row there."""
        if not 0 <= slot < self.size:
            raise ValueError(f"slot must be one of 0 to {self.size - 1}, got {slot}")
        return self.stacks[self._stack_of[slot]], int(self._row_of[slot])

    def _arrange(self, members: Sequence[_Member]) -> None:
        """Make the stacks anew, for these members in the order of their slots."""
        alike: dict[NetworkConfig | None, list[int]] = {}
        for slot, member in enumerate(members):
            alike.setdefault(member.config, []).append(slot)
        self.stacks: list[Stack] = []
        self._stack_of = np.zeros(len(members), dtype=np.int64)
        self._row_of = np.zeros(len(members), dtype=np.int64)
        for number, (config, slots) in enumerate(alike.items()):
            learnt = {name: torch.stack([members[slot].learnt[name] for slot in slots]) for name in self._first.learnt}
            self.stacks.append(Stack(self._network_for(config), self._distribution, config, slots, learnt))
            self._stack_of[slots], self._row_of[slots] = number, np.arange(len(slots))
        for slot, member in enumerate(members):
            self.running_stats[slot] = member.running_stats
            self._steps[slot] = member.step
        self.changes += 1

    # ---- states

    def _member(self, slot: int) -> _Member:
        """Return what a member has learnt: views, not copies."""
        stack, row = self.place(slot)
        return _Member(
            config=stack.config,
            learnt={name: stack.row(name, row) for name in stack.learnt},
            running_stats=self.running_stats[slot].clone(),
            step=self._steps[slot],
        )

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt, all at once; None = a fresh initialisation.

        Raises:
            ValueError: If `parents` does not name one existing slot (or None) per slot.
        """
        if len(parents) != self.size or any(p is not None and not 0 <= p < self.size for p in parents):
            raise ValueError(
                f"parents must name one of the slots 0 to {self.size - 1} (or None) per slot, got {parents}"
            )
        self._arrange([self._first if parent is None else self._member(parent) for parent in parents])

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What a learner state consists of, by name."""
        return *self._first.learnt, "architecture", "running_stats", "step"

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of a member's learner state: a vector `[k]`, its architecture and so on."""
        stack, row = self.place(slot)
        if name == "architecture":
            return self._architecture(stack.config)
        if name == "step":
            return torch.tensor(self._steps[slot])
        return self.running_stats[slot].clone() if name == "running_stats" else stack.row(name, row).clone()

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of a member's weights and moments `[k]`, its architecture and everything else it has."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot, architecture and all.

        Raises:
            ValueError: If names, shapes or types are not those of such a state; nothing is changed then.
        """
        stack, row = self.place(slot)
        member = self._checked(state)
        if member.config != stack.config:
            self._arrange([member if other == slot else self._member(other) for other in range(self.size)])
            return
        for name, values in member.learnt.items():
            stack.row(name, row).copy_(values)
        self.running_stats[slot] = member.running_stats
        self._steps[slot] = member.step

    def _checked(self, state: Mapping[str, Tensor]) -> _Member:
        expected = set(self.state_keys)
        if set(state) != expected:
            hint = ""
            if set(state) ^ expected == {"reference"}:
                hint = ": it belongs to an objective whose reference is the other one of 'base' and 'snapshot'"
            raise ValueError(f"a learner state holds {sorted(expected)}, got {sorted(state)}{hint}")
        config = None
        if self._first.config is not None:
            try:
                config = NetworkConfig.from_tensor(state["architecture"])
            except ValueError as error:
                raise ValueError(f"learner state 'architecture' is damaged: {error}") from error
        elif not _same_bytes(state["architecture"], self._architecture(None)):
            raise ValueError("learner state 'architecture' is not that of this bank's module")
        shapes = self._network_for(config).shapes | dict(self._distribution.free)
        length = sum(int(np.prod(shape)) for shape in shapes.values())
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = dict.fromkeys(
            self._first.learnt, ((length,), torch.float32)
        )
        wanted |= {"running_stats": (tuple(self._first.running_stats.shape), torch.float64), "step": ((), torch.int64)}
        for name, (shape, dtype) in wanted.items():
            if tuple(state[name].shape) != shape or state[name].dtype != dtype:
                raise ValueError(
                    f"learner state {name!r} must be {shape} of {dtype} for this architecture, got "
                    f"{tuple(state[name].shape)} of {state[name].dtype}: the spaces must be those it was saved with"
                )
        if state["step"] < 0:
            raise ValueError(f"learner state 'step' must be at least 0, got {int(state['step'])}")
        learnt = {name: state[name].to(self._device) for name in self._first.learnt}
        return _Member(
            config=config, learnt=learnt, running_stats=state["running_stats"].cpu(), step=int(state["step"])
        )

    def _architecture(self, config: NetworkConfig | None) -> Tensor:
        if config is not None:
            return config.to_tensor()
        network = self.base.network
        assert isinstance(network, ModuleNetwork)
        return bytes_tensor({"module": network.name})

    def rebuild(self, slot: int, config: NetworkConfig, rng: np.random.Generator) -> None:
        """Give a member another architecture, keeping what it has learnt; see `morph`.

        Raises:
            ValueError: If the bank's network is a module of the caller's, or the change is not possible.
        """
        stack, _ = self.place(slot)
        if stack.config is None:
            raise ValueError("the architecture of a custom module cannot change: leave out actor_network to let it")
        member = self._member(slot)
        old, new = stack.shapes, self._network_for(config).shapes | dict(self._distribution.free)
        parts = {name: split(values, old) for name, values in member.learnt.items()}
        learnt = {name: join(part, new) for name, part in morph(parts, stack.config, config, rng).items()}
        changed = _Member(config=config, learnt=learnt, running_stats=member.running_stats, step=member.step)
        self._arrange([changed if other == slot else self._member(other) for other in range(self.size)])

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current weights of these members their own references; ValueError without own references."""
        for slot in slots:
            self.mix_reference(slot, 1.0)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * weights + (1 - mixing) * reference; ValueError without own references.

        Source: Learning dynamics of TR-DPO (arXiv:2404.09656), equation 4.
        """
        if not self.own_reference:
            raise ValueError("members have no references of their own to change: make them with reference='snapshot'")
        stack, row = self.place(slot)
        stack.row("reference", row).lerp_(stack.row("weights", row), mixing)

    # ---- learning

    def step(self, hyperparameters: Mapping[int, Hyperparameters], losses: Sequence[float]) -> dict[int, UpdateReport]:
        """Clip each member's gradient, as its stack has it, and take its AdamW step; none where it is not finite.

        Args:
            hyperparameters: By slot, of the members that step; `lr` and `max_grad_norm` are used.
            losses: By slot, for the reports.

        Returns:
            Reports by slot; a norm is NaN when the gradient, or the weights after the step, are not finite.
        """
        settings, reports = self._optimizer, dict[int, UpdateReport]()
        for stack in self.stacks:
            slots = [slot for slot in stack.slots if slot in hyperparameters]
            lrs = [hyperparameters[slot].lr * settings.factor(self._steps[slot]) for slot in slots]
            norms, taken = stack.step(
                [int(self._row_of[slot]) for slot in slots],
                [self._steps[slot] + 1 for slot in slots],
                lrs,
                [hyperparameters[slot].max_grad_norm for slot in slots],
                settings,
            )
            for slot, lr, norm, stepped in zip(slots, lrs, norms, taken, strict=True):
                self._steps[slot] += int(stepped)
                reports[slot] = UpdateReport(grad_norm=norm, lr=lr, loss=losses[slot], step=self._steps[slot])
        return reports


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype == torch.uint8 and torch.equal(one, other)
