"""Checkpoints of agents and populations: saving, validation and loading."""

import dataclasses
import pkgutil
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from evogrpo.algorithms.factory import AGENT_CLASSES
from evogrpo.algorithms.population import Population
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.distributed import processes
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import MemberRecord
from evogrpo.members.members import Members, SavedMembers
from evogrpo.safe_parsing import dump_json
from evogrpo.storage.checkpoint import (
    CheckpointError,
    checkpoint_errors,
    checkpoint_path,
    read_checkpoint,
    write_checkpoint,
)
from evogrpo.synonyms import unknown_name_error
from evogrpo.text import class_name, expand_user
from evogrpo.validation import Whole, dump, validate, whole_between

if TYPE_CHECKING:
    from accelerate import Accelerator

    from evogrpo.algorithms.agent import Agent

AnyAgent = TypeVar("AnyAgent", bound="Agent")

CONSTANT = "shared by all: "
"""Prefix of the names of tensors that all members of a checkpoint share."""
TASK_SETTINGS = "task_settings.json"
"""File of an agent's checkpoint with its task settings by full name, if it has any."""


@dataclass(frozen=True, kw_only=True)
class StoredMember:
    """Fields of a member in a checkpoint, in addition to its train state; see `Agent`."""

    index: Whole
    parent: Whole | None
    born: Whole
    failed: str | None
    retired: bool
    training: bool
    steps: Whole
    hyperparameters: Hyperparameters
    fitness: Fitness | None


@dataclass(frozen=True, kw_only=True)
class AgentRecord:
    """Record of an agent's checkpoint.

    Attributes:
        shared: Result of `Members.checkpoint_record`, with `kind`, `settings` and `hp_config`.
        member: The agent.
        note: Further plain values.
    """

    shared: Mapping[str, Any]
    member: StoredMember
    note: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PopulationRecord:
    """Record of a population's checkpoint, without the lineage.

    Attributes:
        shared: Result of `Members.checkpoint_record`, with `kind`, `settings` and `hp_config`.
        members: One per slot.
        next_index: First unused index.
    """

    shared: Mapping[str, Any]
    members: tuple[StoredMember, ...]
    next_index: Whole


def save_agent(
    agent: "Agent", path: str | Path, *, replace: bool, note: Mapping[str, Any] | None = None
) -> None:
    """Save one agent; see `GRPO.save_checkpoint`.

    Args:
        agent: The agent.
        path: Folder to create.
        replace: Replace an existing checkpoint.
        note: Plain JSON values to store in the record.
    """
    members = agent.members
    record = AgentRecord(shared=_members_record(members), member=_stored(agent), note=note or {})
    tensors = {**agent.state(), **_shared_by_name(members)}
    files = dict(members.files(agent.slot))
    settings = agent.hyperparameters.task_settings
    if settings:
        # For other programs: `load_agent` reads the record.
        text = dump_json(dict(settings), what="task settings", indent=1)
        files[TASK_SETTINGS] = text.encode("ascii")
    write_checkpoint(path, tensors, dump(record), files=files, kind="agent", replace=replace)


def load_agent(
    kind: type[AnyAgent],
    path: str | Path,
    *,
    device: str | torch.device | None,
    accelerator: "Accelerator | None",
    actor_network: nn.Module | None,
) -> AnyAgent:
    """Load one agent into a bank of its own; see `GRPO.load`."""
    # 1. Recognise folders that are often passed by mistake.
    path = expand_user(path)
    folder = checkpoint_path(path)
    if not (folder / "manifest.json").exists():
        best = path / "best"
        if checkpoint_path(best).is_dir():
            raise CheckpointError(
                f"{path} is a run directory, not an agent. Load its best member: {best}"
            )
        if (path / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{path} is a PEFT adapter without the agent's settings. Load the folder best of"
                " its run, or start an agent from it: GRPO(actor_network=...,"
                f" adapter={str(path)!r})."
            )
    # 2. Read the checkpoint.
    tensors, values = read_checkpoint(path, kind="agent")
    with checkpoint_errors(path):
        record = validate(AgentRecord, values, extra="forbid")
        stored_kind = record.shared["kind"]
        if stored_kind in AGENT_CLASSES and stored_kind not in kind.kinds:
            raise CheckpointError(
                f"{path} must hold a {kind.__name__}, got an agent of kind {stored_kind!r}. Load it"
                f" with {AGENT_CLASSES[stored_kind]}.load."
            )
        # 3. Build the member, then set its train state and all of its fields.
        members = _open(
            kind,
            record.shared,
            1,
            folder,
            actor_network,
            tensors,
            device=device,
            accelerator=accelerator,
        )
        agent = kind.in_slot(members, 0, 0, record.member.hyperparameters)
        _restore(agent, record.member, split_shared(tensors)[1])
    return agent


def read_agent(agent: "Agent", path: str | Path) -> None:
    """Load a saved agent into an existing one; see `GRPO.load_checkpoint`."""
    # 1. Read the checkpoint.
    path = expand_user(path)
    tensors, values = read_checkpoint(path, kind="agent")
    with checkpoint_errors(path):
        record = validate(AgentRecord, values, extra="forbid")
        # 2. Check that kind, spaces or base model, and initial tensors are those of the existing
        #    agent.
        stored_kind = record.shared["kind"]
        members = agent.members
        if stored_kind != members.kind:
            made_by = AGENT_CLASSES.get(stored_kind, "its own class")
            raise CheckpointError(
                f"{path} must hold an agent of kind {members.kind!r}, got kind {stored_kind!r}."
                f" Load it with {made_by}.load."
            )
        expected = members.checkpoint_record()
        # Weights fit only the spaces or the base model that they were trained with.
        for name in members.identity:
            if record.shared[name] != expected[name]:
                raise CheckpointError(
                    f"{path} has {name} {record.shared[name]}, but the agent that loads it has"
                    f" {expected[name]}. Load it with {class_name(agent)}.load."
                )
        shared = members.shared_tensors()
        stored_shared, state = split_shared(tensors)
        equal = shared.keys() == stored_shared.keys() and all(
            torch.equal(value, stored_shared[name]) for name, value in shared.items()
        )
        if not equal:
            raise CheckpointError(
                f"{path} holds an agent whose module had other weights or buffers, or that started"
                f" from another adapter. Load it with {class_name(agent)}.load."
            )
        # 3. Set the train state and all fields, except for those that a population identifies the
        #    agent by.
        identity = {name: getattr(agent, name) for name in ("index", "parent", "born", "retired")}
        _restore(agent, dataclasses.replace(record.member, **identity), state)


def population_state(population: Population) -> tuple[Mapping[str, Tensor], PopulationRecord]:
    """Return the tensors of a population's checkpoint, and a record without the lineage.

    Tensors are copied on access, so members are never in memory twice. Save them before the
    population changes, or keep `dict(tensors)`.
    """
    record = PopulationRecord(
        shared=_members_record(population.members),
        members=tuple(map(_stored, population.agents)),
        next_index=population.next_index,
    )
    members = population.members
    tensors: dict[str, Any] = {}
    for slot in range(members.size):
        for key in members.state_keys:
            tensors[f"{slot}.{key}"] = partial(members.state_tensor, slot, key)
    return _LazyTensors({**tensors, **_shared_by_name(members)}), record


def restore_population(
    kind: "type[Agent]",
    tensors: Mapping[str, Tensor],
    record: PopulationRecord,
    actor_network: nn.Module | None,
    path: str | Path,
    *,
    lineage: Sequence[MemberRecord] | None = None,
    device: str | torch.device | None = None,
) -> Population:
    """Build a population from the results of `population_state`.

    Args:
        kind: Class of the agents.
        tensors: Tensors of the checkpoint.
        record: Record of the checkpoint.
        actor_network: The base model, or the user's own module; see `GRPO.load`.
        path: Path of the checkpoint.
        lineage: All members of the run in order of birth; None = the members become founders.
        device: Device of the model; None = where it is.

    Raises:
        CheckpointError: If the state is of another base model or inconsistent.
    """
    with checkpoint_errors(path):
        # 1. Build the members.
        stored = record.members
        members = _open(
            kind,
            record.shared,
            len(stored),
            Path(path),
            actor_network,
            tensors,
            device=device,
            accelerator=None,
        )
        members.processes = processes()
        # 2. Build each agent, then set its train state and all of its fields.
        agents = []
        for slot, member in enumerate(stored):
            agent = kind.in_slot(members, slot, member.index, member.hyperparameters)
            # Names in a checkpoint are "SLOT.NAME".
            prefix = f"{slot}."
            state = {}
            for name, value in tensors.items():
                if name.startswith(prefix):
                    state[name.removeprefix(prefix)] = value
            _restore(agent, member, state)
            # Without a lineage, parents are unknown members.
            if lineage is None:
                agent.parent = None
                agent.born = 0
            agents.append(agent)
        population = Population(agents, members, lineage=lineage)
        # 3. Check that members and lineage agree, and that the next index is unused.
        indices = [agent.index for agent in agents]
        if len(set(indices)) < len(indices):
            raise ValueError(
                f"The indices of members must be distinct, got {indices}. Load another checkpoint."
            )
        born = {birth.index for birth in population.lineage}
        missing = sorted(set(indices) - born)
        if missing:
            raise ValueError(
                f"Members {missing} are missing from the lineage. Load another checkpoint."
            )
        population.next_index = whole_between(
            "next_index", record.next_index, max(born, default=-1) + 1
        )
    return population


def split_shared(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `Members.shared_tensors` of a checkpoint, and all other tensors."""
    shared = {}
    others = {}
    for name, tensor in tensors.items():
        if name.startswith(CONSTANT):
            shared[name.removeprefix(CONSTANT)] = tensor
        else:
            others[name] = tensor
    return shared, others


def _shared_by_name(members: Members) -> dict[str, Tensor]:
    """Return the tensors that all members share, by their names in a checkpoint."""
    return {f"{CONSTANT}{name}": tensor for name, tensor in members.shared_tensors().items()}


def _open(
    algorithm: "type[Agent]",
    record: Mapping[str, Any],
    size: int,
    folder: Path,
    actor_network: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: str | torch.device | None,
    accelerator: "Accelerator | None",
) -> Members:
    """Build the members of a checkpoint, without train states."""
    # 1. Find the class of the members. A checkpoint names a kind, never a class.
    kind = record["kind"]
    if kind not in algorithm.kinds:
        raise unknown_name_error(f"kind of agent in {folder}:", kind, algorithm.kinds)
    # 2. Collect what the class needs.
    hp_config = None
    if record["hp_config"] is not None:
        hp_config = HyperparameterConfig(**record["hp_config"])
    saved = SavedMembers(
        record=record,
        size=size,
        hp_config=hp_config,
        shared_tensors=split_shared(tensors)[0],
        tensor_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        folder=folder,
    )
    # 3. Import the class if it is given as "module:Class", and build the members.
    members_class = algorithm.kinds[kind]
    if isinstance(members_class, str):
        members_class = pkgutil.resolve_name(members_class)
    return members_class.from_checkpoint(
        saved, actor_network=actor_network, device=device, accelerator=accelerator
    )


def _members_record(members: Members) -> dict[str, Any]:
    """Return the part of a record that is common to all members."""
    hp_config = None
    if members.hp_config is not None:
        hp_config = members.hp_config.to_json()
    return {
        "kind": members.kind,
        "settings": dump(members.settings),
        "hp_config": hp_config,
        **members.checkpoint_record(),
    }


def _stored(agent: "Agent") -> StoredMember:
    """Return the fields of an agent that checkpoints store."""
    values = {field.name: getattr(agent, field.name) for field in fields(StoredMember)}
    return StoredMember(**values)


def _restore(agent: "Agent", member: StoredMember, tensors: Mapping[str, Tensor]) -> None:
    """Restore a saved agent into this one; on errors nothing changes."""
    # 1. Hyperparameters; the agent refuses those that do not fit its settings.
    earlier = agent.hyperparameters
    agent.hyperparameters = member.hyperparameters
    # 2. The train state, which members refuse if it has other names, shapes or types.
    try:
        agent.load_state(tensors)
    except ValueError:
        agent.hyperparameters = earlier
        raise
    # 3. All other fields.
    for field in fields(member):
        setattr(agent, field.name, getattr(member, field.name))


class _LazyTensors(UserDict[str, Any]):
    """Tensors by name; a function in place of a tensor returns it on access."""

    def __getitem__(self, name: str) -> Tensor:
        value: Any = self.data[name]
        if callable(value):
            value = value()
        tensor: Tensor = value
        return tensor
