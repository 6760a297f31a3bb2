"""Members: what a population needs of its members, and the part that kinds with banks share."""

import zlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.arrays import FloatArray
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.distributed import Processes
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.evolution.history import ArchitectureChange
from evogrpo.members.bank import PolicyBank, TrainState
from evogrpo.members.requests import (
    EvaluationRequest,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.records import DEFAULT_POLICY

if TYPE_CHECKING:
    from accelerate import Accelerator

CheckpointFiles = dict[str, bytes | Callable[[], bytes]]
"""Additional files of a checkpoint: bytes, or a function that is called when the file is written.
"""


@dataclass(frozen=True, kw_only=True)
class SavedMembers:
    """Members in a checkpoint, without their train states.

    Attributes:
        record: Result of `Members.checkpoint_record`, with `kind`, `settings` and `hp_config`.
        size: Number of members.
        hp_config: Search space; None = nothing evolves.
        shared_tensors: Result of `Members.shared_tensors`.
        tensor_bytes: Bytes of all tensors in the checkpoint; the record may name a huge size.
        folder: Folder of the checkpoint, for messages.
    """

    record: Mapping[str, Any]
    size: int
    hp_config: HyperparameterConfig | None
    shared_tensors: Mapping[str, Tensor]
    tensor_bytes: int
    folder: Path


class Members(Protocol):
    """Members of a population: their train states, and how they sample, act and are evaluated.

    `Population`, the trainer and checkpoints use members through this class only. Language models
    and small networks are built in (`BankMembers`). Subclass it for a kind of your own, and
    `evogrpo.testing.members.MembersTestCase` to test it.

    A slot is a place for one member. Members must not influence each other.

    A kind may have further methods, which agents look up by name; see `optional_method`. They are
    `act` and `experience` for a caller's own loop, `predict`, `generate`, `policy` (a member as a
    torch module) and `sample_with` (an external sampler).

    Attributes:
        kind: Name of the kind in journals and checkpoints.
        step_based: True if members act step by step in an environment, so that costs are
            environment steps. False if they write text, so that costs are tokens.
        identity: Keys of `checkpoint_record` that must be equal to load a saved member into an
            existing one.
        size: Number of slots.
        settings: Settings that do not evolve: a dataclass with at least `seed` and `objective`.
        hp_config: Search space; None = nothing evolves.
        observation_space: Observation space; None if not given.
        action_space: Action space; None if not given.
        device: Device of the train states.
        processes: Ranks that divide sampling and evaluation; each holds all members.
        banks: Weights and optimizers by policy, for learning rules that use them; may be empty.
    """

    kind: str
    step_based: ClassVar[bool]
    identity: ClassVar[tuple[str, ...]] = ()
    size: int
    settings: Any
    hp_config: HyperparameterConfig | None
    observation_space: spaces.Space[Any] | None
    action_space: spaces.Space[Any] | None
    device: torch.device
    processes: Processes
    banks: Mapping[str, PolicyBank]

    # ---- in environments

    @abstractmethod
    def check(self, env: Any) -> None:
        """Raise ValueError if the members cannot act in the environment."""

    @abstractmethod
    def sample(self, env: Any, starts: Sequence[int], request: SamplingRequest) -> RolloutBatch:
        """Sample and reward one completion or episode for each requested row.

        Row r, action t of a member uses number `[r, t]` of the stream (seed, purpose, step, index,
        number), so that its samples do not depend on other members.

        Args:
            env: Provides prompts or episodes, and rewards.
            starts: Training starts; `request.start_ids` are positions in them.
            request: The rows, and the members that act.
        """

    @abstractmethod
    def evaluate(self, env: Any, request: EvaluationRequest) -> tuple[FloatArray, tuple[int, ...]]:
        """Answer held-out questions; train states and training streams do not change.

        Returns:
            `[n]` raw task rewards in the order of `request.start_ids`; NaN = no reward. And the
            tokens or environment steps processed, for each slot of the request.
        """

    def prepare_sampling(self) -> None:
        """Prepare to sample with the current weights. Called on all ranks before they sample."""
        return

    def update_statistics(self, observed: Sequence[Mapping[str, ObservationStatistics]]) -> None:
        """Add the observations of a learning step to running statistics, if the kind has any."""
        return

    # ---- train states: weights, optimizer and statistics of one member, as named tensors

    @property
    @abstractmethod
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state, the same for all members."""

    @abstractmethod
    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a train state."""

    @abstractmethod
    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If names, shapes or types do not match; nothing is changed then.
        """

    @abstractmethod
    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, all at once; None = a new member.

        Raises:
            ValueError: If `parents` is not one existing slot (or None) per slot.
        """

    def state(self, slot: int) -> TrainState:
        """Return a copy of the train state of a slot."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def snapshot(self, slots: Collection[int]) -> dict[int, TrainState]:
        """Return copies of train states by slot, in CPU memory, for `load_state`."""
        copies = {}
        for slot in slots:
            state = self.state(slot)
            copies[slot] = {name: _on_cpu(value) for name, value in state.items()}
        return copies

    def checksum(self) -> int:
        """Return a checksum of all train states."""
        digest = 0
        for slot in range(self.size):
            for name in self.state_keys:
                # Bytes, so that types without a numpy equivalent, such as bfloat16, count too.
                values = self.state_tensor(slot, name).cpu().contiguous()
                as_bytes = values.flatten().view(torch.uint8)
                digest = zlib.crc32(as_bytes.numpy().data, digest)
        return digest

    def match_ranks(self, slots: Collection[int]) -> None:
        """Make train states bit-equal on all ranks after a learning step, if they may differ."""
        return

    # ---- evolution

    def check_hyperparameters(self, hyperparameters: Hyperparameters) -> None:
        """Raise ValueError for hyperparameters that do not fit the settings."""
        return

    @property
    def evolves(self) -> bool:
        """True if mutation changes architectures."""
        return False

    def propose_architecture(
        self, slot: int, rng: np.random.Generator
    ) -> ArchitectureChange | None:
        """Draw a change of a member's architecture; None = no change."""
        return None

    def change_architecture(
        self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator
    ) -> None:
        """Change a member's architecture and keep what it has learned.

        Args:
            slot: Slot of the member.
            architecture: In the format of `propose_architecture`.
            rng: Random generator of new weights.

        Raises:
            ValueError: If architectures of this kind do not change.
        """
        raise ValueError(f"The architecture of {self.kind} members is fixed, got {architecture}.")

    # ---- copies and checkpoints

    @abstractmethod
    def new_member(self, *, wrap: bool = True) -> "Members":
        """Return members of the same kind with one slot, which holds a new member.

        Args:
            wrap: Keep the accelerator's mixed precision.
        """

    @abstractmethod
    def checkpoint_record(self) -> dict[str, Any]:
        """Return plain values for checkpoints, from which `from_checkpoint` builds the members.

        `kind`, `settings` and `hp_config` are stored beside them.
        """

    @classmethod
    @abstractmethod
    def from_checkpoint(
        cls,
        saved: SavedMembers,
        *,
        actor_network: Any,
        device: torch.device | str | None,
        accelerator: "Accelerator | None",
    ) -> Self:
        """Build members from a checkpoint; their train states are loaded afterwards.

        Args:
            saved: The checkpoint.
            actor_network: Base model or module of the caller; None = not given.
            device: Device of the members; None = not given.
            accelerator: Chooses the device and the precision; None = not given.

        Raises:
            CheckpointError: If the base model or module is another one than in the checkpoint.
            ValueError: If the members cannot be built from the arguments.
        """

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return tensors that all members share and checkpoints store."""
        return {}

    def files(self, slot: int) -> CheckpointFiles:
        """Return additional files of a member's checkpoint."""
        return {}

    def journal_fields(self) -> dict[str, Any]:
        """Return further fields of the journal's first event."""
        return {}

    def arguments(self) -> dict[str, Any]:
        """Return constructor arguments that are not in the settings, for `inspect_attributes`."""
        return {}

    def unwrap(self) -> None:
        """Stop using the accelerator's precision."""
        return


def optional_method(members: Members, name: str, caller: str | None = None) -> Callable[..., Any]:
    """Return a method that only some kinds of members have.

    Args:
        members: The members.
        name: Name of the method.
        caller: Name of the public method that needs it, for the message; `name` by default.

    Raises:
        ValueError: If this kind has none.
    """
    method: Callable[..., Any] | None = getattr(members, name, None)
    if method is None:
        raise ValueError(f"{caller or name} is not available for {members.kind} members.")
    return method


def check_not_nan(log_probs: Any, index: int) -> None:
    """Raise ValueError if an action of a member has a log-probability of NaN.

    Args:
        log_probs: Log-probabilities of its actions, as an array or a tensor.
        index: Index of the member.
    """
    if bool((log_probs != log_probs).any()):  # only NaN differs from itself
        raise ValueError(
            f"The network of member {index} returns NaN. Load a checkpoint, and train with a lower"
            " lr or max_grad_norm."
        )


class BankMembers(Members):
    """Members whose train states are rows of banks, one bank per policy.

    The names in a train state are those of the bank. With several policies, "policy/" comes first.

    Args:
        banks: Bank of each policy, all with the same number of slots.
    """

    def __init__(self, banks: Mapping[str, PolicyBank]) -> None:
        sizes = {bank.size for bank in banks.values()}
        assert len(sizes) == 1, f"banks must have one size, got {sizes}"
        self.banks = banks
        self.size = sizes.pop()

    def check_hyperparameters(self, hyperparameters: Hyperparameters) -> None:
        """Raise ValueError for hyperparameters that do not fit objective and optimizer."""
        self.settings.check(hyperparameters, self.hp_config)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state, the same for all members."""
        # All members have the same policies, so the keys do not depend on the slot.
        keys: list[str] = []
        for policy, bank in self.banks.items():
            keys += [state_key(policy, name) for name in bank.state_keys]
        return tuple(keys)

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a train state."""
        policy, key = _split_key(name)
        return self.banks[policy].state_tensor(slot, key)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot; see `Members.load_state`."""
        # 1. Sort the tensors by policy.
        parts: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            policy, key = _split_key(name)
            parts.setdefault(policy, {})[key] = value
        if set(parts) != set(self.banks):
            raise ValueError(
                f"The train state must have policies {sorted(self.banks)}, got {sorted(parts)}."
            )
        # 2. Load them. If one does not fit, restore the policies before it.
        previous: dict[str, TrainState] = {}
        for policy, bank in self.banks.items():
            if len(self.banks) > 1:
                previous[policy] = bank.state(slot)
            try:
                bank.load_state(slot, parts[policy])
            except ValueError as error:
                for loaded, before in previous.items():
                    self.banks[loaded].load_state(slot, before)
                if policy == DEFAULT_POLICY:
                    raise
                raise ValueError(f"policy {policy!r}: {error}") from error

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy train states between slots; see `Members.inherit`."""
        # Banks have equal sizes, so invalid parents raise at the first one, before any change.
        for bank in self.banks.values():
            bank.inherit(parents)


def state_key(policy: str, name: str) -> str:
    """Return the name of a policy's tensor in a member's train state."""
    if policy == DEFAULT_POLICY:
        return name
    return f"{policy}/{name}"


def _split_key(name: str) -> tuple[str, str]:
    """Return the policy and the bank's name of a tensor; the inverse of `state_key`."""
    policy, _, key = name.rpartition("/")
    return policy or DEFAULT_POLICY, key


def _on_cpu(values: Tensor) -> Tensor:
    """Return a tensor in CPU memory; from a GPU in pinned memory, as transfers to it are faster."""
    if values.device.type != "cuda":
        return values.cpu()
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values)
