"""What the members of a stacked bank have learnt: one stack per architecture, step counts, running statistics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.data import UpdateReport
from evogrpo.policies.bank import CARRIED_AT_BIRTH
from evogrpo.policies.control.architecture import NetworkConfig, bytes_tensor, morph
from evogrpo.policies.control.distributions import Distribution
from evogrpo.policies.control.networks import ModuleNetwork, Network, join, split
from evogrpo.policies.control.stacks import IntArray, Stack
from evogrpo.policies.devices import check_room


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One member's learner state; `config` is None for a module of the caller's."""

    config: NetworkConfig | None
    learnt: dict[str, Tensor]
    carried: Tensor
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
        carried: `[p, 4 + statistics]` float64 on the CPU, in front what `evogrpo.policies.bank.CARRIED` names.
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
        check_room(4 * numbers * copies, torch.device(device), members)
        first = network.initial(seed)
        for name, shape in distribution.free.items():
            first[name] = torch.full(shape, 0.0 if config is None else config.log_std)
        weights = join(first, network.shapes | dict(distribution.free)).to(device)
        learnt = {"weights": weights, "exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights)}
        if own_reference:
            learnt["reference"] = weights
        at_birth = torch.tensor((*CARRIED_AT_BIRTH, *[0.0] * statistics), dtype=torch.float64)
        self._first = _Member(config=config, learnt=learnt, carried=at_birth, step=0)
        self.base = Stack(network, distribution, config, [0], {"weights": weights[None]})
        self.carried = at_birth.repeat(size, 1)
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
            self.carried[slot] = member.carried
            self._steps[slot] = member.step
        self.changes += 1

    # ---- states

    def _member(self, slot: int) -> _Member:
        """Return what a member has learnt: views, not copies."""
        stack, row = self.place(slot)
        return _Member(
            config=stack.config,
            learnt={name: stack.row(name, row) for name in stack.learnt},
            carried=self.carried[slot].clone(),
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
    def parts(self) -> tuple[str, ...]:
        """What a learner state consists of, by name."""
        return *self._first.learnt, "architecture", "carried", "step"

    def part(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of a member's learner state: a vector `[k]`, its architecture and so on."""
        stack, row = self.place(slot)
        if name == "architecture":
            return self._architecture(stack.config)
        if name == "step":
            return torch.tensor(self._steps[slot])
        return self.carried[slot].clone() if name == "carried" else stack.row(name, row).clone()

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of a member's weights and moments `[k]`, its architecture and everything else it has."""
        return {name: self.part(slot, name) for name in self.parts}

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
        self.carried[slot] = member.carried
        self._steps[slot] = member.step

    def _checked(self, state: Mapping[str, Tensor]) -> _Member:
        expected = set(self.parts)
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
        wanted |= {"carried": (tuple(self._first.carried.shape), torch.float64), "step": ((), torch.int64)}
        for name, (shape, dtype) in wanted.items():
            if tuple(state[name].shape) != shape or state[name].dtype != dtype:
                raise ValueError(
                    f"learner state {name!r} must be {shape} of {dtype} for this architecture, got "
                    f"{tuple(state[name].shape)} of {state[name].dtype}: the spaces must be those it was saved with"
                )
        if state["step"] < 0:
            raise ValueError(f"learner state 'step' must be at least 0, got {int(state['step'])}")
        learnt = {name: state[name].to(self._device) for name in self._first.learnt}
        return _Member(config=config, learnt=learnt, carried=state["carried"].cpu(), step=int(state["step"]))

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
        changed = _Member(config=config, learnt=learnt, carried=member.carried, step=member.step)
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
