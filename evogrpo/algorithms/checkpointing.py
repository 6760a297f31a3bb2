"""Agents and populations as checkpoints: what is stored, and the checks before anything is loaded."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.algorithms.factory import POLICY_SETS
from evogrpo.algorithms.policies.distributed import distribute, placement_of
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.population import KeptStates, Population
from evogrpo.config.checks import declared_fields, unknown_name_error, whole_between
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import Lineage
from evogrpo.models.devices import limit_memory
from evogrpo.storage.checkpoint import checkpoint_path, read_checkpoint, write_checkpoint
from evogrpo.storage.manifest import CheckpointError, checkpoint_errors

if TYPE_CHECKING:
    from evogrpo.algorithms.agent import Agent

AnyAgent = TypeVar("AnyAgent", bound="Agent")

CONSTANT = "shared by all: "
"""Begins the names of tensors that a checkpoint's members share."""


@dataclass(frozen=True, kw_only=True)
class _Counters:
    """What a checkpoint says of a member beside what it has learnt; see `Agent`."""

    index: int
    parent: int | None
    born: int
    back_to: int | None
    failed: str | None
    retired: bool
    training: bool
    steps: int


COUNTERS = tuple(_Counters.__dataclass_fields__)


def save_agent(
    agent: "Agent",
    path: str | Path,
    *,
    include_base: bool,
    replace: bool,
    note: Mapping[str, Any] | None = None,
    fitness: Fitness | None = None,
) -> None:
    """Write one agent and, in its record, a note of plain JSON values; see `GRPO.save_checkpoint`.

    A `fitness` takes the place of the agent's own.
    """
    members, member = agent.members, _member_record(agent)
    if fitness is not None:
        member["scores"] = fitness.to_json()
    record = {"shared": _members_record(members), "member": member, "note": dict(note or {})}
    files = members.files(agent.slot, include_base=include_base)
    tensors = {**agent.state(), **_named(members.shared_tensors())}
    write_checkpoint(path, tensors, record, files=files, kind="agent", replace=replace)


def load_agent(
    kind: type[AnyAgent],
    path: str | Path,
    *,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
    actor_network: nn.Module | None,
) -> AnyAgent:
    """Bring one agent back in a bank of its own; see `GRPO.load`."""
    best = Path(path) / "best"
    if checkpoint_path(best).is_dir() and not checkpoint_path(Path(path) / "manifest.json").exists():
        raise CheckpointError(f"{path} is the folder of a run, not of an agent: load its best member, {best}")
    tensors, record = read_checkpoint(path, kind="agent")
    with checkpoint_errors(path):
        stored = record["shared"]["kind"]
        if stored in POLICY_SETS and stored not in kind.kinds:
            raise CheckpointError(
                f"{path} holds an agent of kind {stored!r}, not one of {kind.__name__}: bring it back with "
                f"{POLICY_SETS[stored].agent_class}.load"
            )
        folder = checkpoint_path(Path(path))
        network = _as_saved(actor_network, tensors, path)
        members = _open(record["shared"], 1, folder, network, tensors, device=device, accelerator=accelerator)
        agent = kind._member(members, 0, 0, Hyperparameters())
        _restore(agent, record["member"], learnt(tensors))
    return agent


def read_agent(agent: "Agent", path: str | Path) -> None:
    """Put a saved agent into an existing one; see `GRPO.load_checkpoint`."""
    tensors, record = read_checkpoint(path, kind="agent")
    with checkpoint_errors(path):
        stored = record["shared"]["kind"]
        members = agent.members
        if stored != members.kind:
            made_by = POLICY_SETS[stored].agent_class if stored in POLICY_SETS else "its own class"
            raise CheckpointError(
                f"{path} holds an agent of kind {stored!r}, but this one is of kind {members.kind!r}: bring the saved "
                f"one back with {made_by}.load"
            )
        members.check_record(record["shared"], path)
        own, saved = (
            _named(members.shared_tensors()),
            {name: tensors[name] for name in tensors if name.startswith(CONSTANT)},
        )
        if own.keys() != saved.keys() or any(not torch.equal(own[name], saved[name]) for name in own):
            raise CheckpointError(
                f"{path} holds an agent whose module came with other weights or buffers than this one's, or that "
                f"started from another adapter: bring it back with {type(agent).__name__}.load"
            )
        _restore(agent, record["member"], learnt(tensors))


def population_state(population: Population) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return everything a checkpoint of a population must hold: tensors by name, and a JSON record.

    The tensors are copied when they are asked for, each time anew, so that the members are never in memory twice: save
    them before the population goes on, or keep `dict(tensors)`.
    """
    record = {
        "shared": _members_record(population.members),
        "members": [_member_record(agent) for agent in population.agents],
        "lineage": population.lineage.to_json(),
        "next_index": population.next_index,
        "kept": population.kept.to_json(),
    }
    return _MemberTensors(population.members, population.kept), record


def restore_population(
    kind: "type[Agent]",
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    actor_network: nn.Module | None,
    path: str | Path,
    *,
    device: str | torch.device | None = None,
) -> Population:
    """Build a population from what `population_state` returned.

    Args:
        kind: The agents' class.
        tensors: As returned.
        record: As returned.
        actor_network: The base model, or the caller's own module; see `GRPO.load`.
        path: Where the state was read.
        device: Where to put the model; it stays where it is by default.

    Raises:
        CheckpointError: If the state is of another base model or does not fit together.
    """
    with checkpoint_errors(path):
        stored = record["members"]
        network = _as_saved(actor_network, tensors, path)
        places = placement_of(len(stored))
        members = _open(record["shared"], places.held, Path(path), network, tensors, device=device, accelerator=None)
        members = distribute(members, places)
        agents = []
        for slot, member in enumerate(stored):
            agent = kind._member(members, slot, member["index"], Hyperparameters())
            own = {
                name.removeprefix(f"{slot}."): value for name, value in tensors.items() if name.startswith(f"{slot}.")
            }
            _restore(agent, member, own)
            agents.append(agent)
        population = Population(agents, members, lineage=Lineage.from_json(record["lineage"]))
        population.next_index = _next_index(record["next_index"], population)
        population.kept = KeptStates.restored(record["kept"], tensors, population.executor.members.banks)
        population.executor.settle([agent.slot for agent in agents if agent.retired])
    return population


def _next_index(value: object, population: Population) -> int:
    """Return the next index, if members and lineage agree on who there is and it names nobody yet."""
    living = [agent.index for agent in population.agents]
    born = {birth.index for birth in population.lineage.births}
    if len(set(living)) < len(living) or not set(living) <= born:
        raise ValueError(f"every member must have an index of its own, under which it was born, got {living}")
    return whole_between("next_index", value, max(born, default=-1) + 1)


def learnt(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint without those that its members share."""
    return {name: value for name, value in tensors.items() if not name.startswith(CONSTANT)}


def _named(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{CONSTANT}{name}": value for name, value in constants.items()}


def _shared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the members of a checkpoint share: `PolicySet.shared_tensors`."""
    return {name.removeprefix(CONSTANT): value for name, value in tensors.items() if name.startswith(CONSTANT)}


def _as_saved(network: Any, tensors: Mapping[str, Tensor], path: str | Path) -> Any:
    """Return a copy of the caller's module with the weights and buffers that it had when the agents were made."""
    state = _shared(tensors)
    if not state or not isinstance(network, nn.Module) or isinstance(network, PreTrainedModel):
        return network
    network = deepcopy(network)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path} holds another module than the one given: {error}") from error
    return network


def _open(
    record: Mapping[str, Any],
    size: int,
    folder: Path,
    actor_network: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
) -> PolicySet:
    """Build the members of a checkpoint, fresh."""
    if record["kind"] not in POLICY_SETS:
        raise unknown_name_error(f"kind of agent in {folder}:", record["kind"], POLICY_SETS)
    config = record["hp_config"]
    hp_config = None if config is None else HyperparameterConfig.from_json(config)
    with limit_memory(sum(tensor.nbytes for tensor in tensors.values())):
        return POLICY_SETS[record["kind"]].from_record(
            record,
            size,
            folder,
            hp_config,
            constants=_shared(tensors),
            actor_network=actor_network,
            device=device,
            accelerator=accelerator,
        )


def _members_record(members: PolicySet) -> dict[str, Any]:
    return {
        "kind": members.kind,
        "settings": members.settings.to_json(),
        "hp_config": None if members.hp_config is None else members.hp_config.to_json(),
        **members.record(),
    }


def _member_record(agent: "Agent") -> dict[str, Any]:
    return {
        **{name: getattr(agent, name) for name in ("slot", *COUNTERS)},
        "hyperparameters": agent.hyperparameters.to_json(),
        "scores": None if agent.fitness is None else agent.fitness.to_json(),
    }


def _restore(agent: "Agent", member: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Give an agent all that was saved of one, or change nothing; it stays in its own slot."""
    counters = vars(_Counters(**declared_fields(_Counters, {name: member[name] for name in COUNTERS})))
    hyperparameters = Hyperparameters.from_json(member["hyperparameters"])
    fitness = None if member["scores"] is None else Fitness.from_json(member["scores"])
    agent.load_state(tensors)
    agent.hyperparameters, agent.fitness = hyperparameters, fitness
    for name, value in counters.items():
        setattr(agent, name, value)


class _MemberTensors(Mapping[str, Tensor]):
    """The learner states of members: `{slot}.{name}` -> a copy made when it is asked for.

    Beside them what they share, and the states that are kept: as they are, for nobody changes them.
    """

    def __init__(self, members: PolicySet, kept: KeptStates) -> None:
        self._banks, self._shared = members.banks, {**_named(members.shared_tensors()), **dict(kept.tensors())}
        self._places = {
            f"{slot}.{part}": (slot, part) for slot in range(self._banks.size) for part in self._banks.state_keys
        }

    def __getitem__(self, name: str) -> Tensor:
        if name in self._shared:
            return self._shared[name]
        slot, part = self._places[name]
        return self._banks.state_tensor(slot, part)

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self._shared

    def __len__(self) -> int:
        return len(self._places) + len(self._shared)
