"""Agents and populations as checkpoints: what is stored, and the checks before anything is loaded."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from evogrpo.agents.members import language, networks
from evogrpo.agents.members.language import LanguageSettings
from evogrpo.agents.members.networks import NetworkSettings
from evogrpo.agents.members.prompting import LanguagePlay
from evogrpo.agents.members.shared import Shared
from evogrpo.agents.members.stepping import StepPlay
from evogrpo.agents.population import Population
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import Lineage
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, unknown_name_error
from evogrpo.persistence.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.persistence.placement import stored_at

if TYPE_CHECKING:
    from evogrpo.agents.agent import EvolvableAlgorithm

Agent = TypeVar("Agent", bound="EvolvableAlgorithm")

CONSTANT = "shared by all: "
"""Begins the names of tensors that a checkpoint's members share."""
COUNTERS = ("slot", "index", "parent", "born", "failed", "retired", "training", "steps")


def save_agent(
    agent: "EvolvableAlgorithm",
    path: str | Path,
    *,
    include_base: bool,
    replace: bool,
    note: Mapping[str, Any] | None = None,
) -> None:
    """Write one agent and, in its record, a note of plain JSON values; see `GRPO.save_checkpoint`."""
    shared = agent._shared
    record = {"shared": _shared_record(shared), "member": _member_record(agent), "note": dict(note or {})}
    files = shared.body.files(agent.slot, include_base=include_base)
    tensors = {**shared.bank.state(agent.slot), **_named(shared.body.constants())}
    write_checkpoint(path, tensors, record, files=files, kind="agent", replace=replace)


def load_agent(
    kind: type[Agent],
    path: str | Path,
    *,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
    actor_network: nn.Module | None,
) -> Agent:
    """Bring one agent back in a bank of its own; see `GRPO.load`."""
    best = Path(path) / "best"
    if stored_at(best).is_dir() and not stored_at(Path(path) / "manifest.json").exists():
        raise CheckpointError(f"{path} is the folder of a run, not of an agent: load its best member, {best}")
    tensors, record = read_checkpoint(path, kind="agent")
    with _damage(path):
        stored = record["shared"]["kind"]
        if stored in _OPENERS and stored not in kind.kinds:
            raise CheckpointError(
                f"{path} holds an agent of kind {stored!r}, not one of {kind.__name__}: bring it back with "
                f"{class_name(stored)}.load"
            )
        folder = stored_at(Path(path))
        network = _as_saved(actor_network, tensors, path)
        shared = _open(record["shared"], 1, folder, network, device=device, accelerator=accelerator)
        agent = kind._member(shared, 0, 0, Hyperparameters())
        _restore(agent, record["member"], learnt(tensors), path)
    return agent


def read_agent(agent: "EvolvableAlgorithm", path: str | Path) -> None:
    """Put a saved agent into an existing one; see `GRPO.load_checkpoint`."""
    tensors, record = read_checkpoint(path, kind="agent")
    with _damage(path):
        stored = record["shared"]["kind"]
        if stored != agent._shared.body.kind:
            raise CheckpointError(
                f"{path} holds an agent of kind {stored!r}, but this one is of kind {agent._shared.body.kind!r}: bring "
                f"the saved one back with {class_name(stored)}.load"
            )
        body = agent._shared.body
        body.check(record["shared"], path)
        own, saved = _named(body.constants()), {name: tensors[name] for name in tensors if name.startswith(CONSTANT)}
        if own.keys() != saved.keys() or any(not torch.equal(own[name], saved[name]) for name in own):
            raise CheckpointError(
                f"{path} holds an agent whose module came with other weights or buffers than this one's: bring it back "
                f"with {type(agent).__name__}.load"
            )
        _restore(agent, record["member"], learnt(tensors), path)


def population_state(population: Population) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Return everything a checkpoint of a population must hold: tensors by name, and a JSON record.

    The tensors are copied when they are asked for, each time anew, so that the members are never in memory twice: save
    them before the population goes on, or keep `dict(tensors)`.
    """
    record = {
        "shared": _shared_record(population.shared),
        "members": [_member_record(agent) for agent in population.agents],
        "lineage": population.lineage.to_json(),
        "next_index": population.next_index,
    }
    return _MemberTensors(population.shared), record


def restore_population(
    kind: "type[EvolvableAlgorithm]",
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    actor_network: nn.Module | None,
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    together: type[Population] = Population,
) -> Population:
    """Build a population from what `population_state` returned.

    Args:
        kind: The agents' class.
        tensors: As returned.
        record: As returned.
        actor_network: The base model, or the caller's own module; see `GRPO.load`.
        path: Where the state was read.
        device: Where to put the model; it stays where it is by default.
        together: The population's class.

    Raises:
        CheckpointError: If the state is of another base model or does not fit together.
    """
    with _damage(path):
        members = record["members"]
        network = _as_saved(actor_network, tensors, path)
        shared = _open(record["shared"], len(members), Path(path), network, device=device, accelerator=None)
        agents = []
        for slot, member in enumerate(members):
            agent = kind._member(shared, slot, member["index"], Hyperparameters())
            own = {
                name.removeprefix(f"{slot}."): value for name, value in tensors.items() if name.startswith(f"{slot}.")
            }
            _restore(agent, member, own, path)
            agents.append(agent)
        population = together(agents, shared, lineage=Lineage.from_json(record["lineage"]))
        population.next_index = record["next_index"]
    return population


def learnt(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint without those that its members share."""
    return {name: value for name, value in tensors.items() if not name.startswith(CONSTANT)}


def _named(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{CONSTANT}{name}": value for name, value in constants.items()}


def _as_saved(network: Any, tensors: Mapping[str, Tensor], path: str | Path) -> Any:
    """Return a copy of the caller's module with the weights and buffers that it had when the agents were made."""
    state = {name.removeprefix(CONSTANT): value for name, value in tensors.items() if name.startswith(CONSTANT)}
    if not state or not isinstance(network, nn.Module):
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
    *,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
) -> Shared:
    """Build what the members of a checkpoint shared, with a fresh bank of `size` members."""
    if record["kind"] not in _OPENERS:
        raise unknown_name_error(f"kind of agent in {folder}:", record["kind"], _OPENERS)
    config = record["hp_config"]
    hp_config = None if config is None else HyperparameterConfig.from_json(config)
    if accelerator is not None:
        language.device_of(accelerator, device)
    return _OPENERS[record["kind"]](record, size, folder, actor_network, hp_config, device, accelerator)


def _open_language(
    record: Mapping[str, Any],
    size: int,
    folder: Path,
    model: Any,
    hp_config: HyperparameterConfig | None,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
) -> Shared:
    settings = LanguageSettings.from_json(record["settings"])
    body = language.stored_body(
        record, settings, size, folder, actor_network=model, device=device, accelerator=accelerator
    )
    return Shared(body=body, play=LanguagePlay(body, settings), settings=settings, hp_config=hp_config)


def _open_networks(
    record: Mapping[str, Any],
    size: int,
    folder: Path,
    module: Any,
    hp_config: HyperparameterConfig | None,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
) -> Shared:
    settings = NetworkSettings.from_json(record["settings"])
    device = device if accelerator is None else accelerator.device
    body = networks.stored_body(record, settings, size, module=module, device=device)
    return Shared(
        body=body,
        play=StepPlay(body),
        settings=settings,
        hp_config=hp_config,
        observation_space=body.observation_space,
        action_space=body.action_space,
    )


def _open_joint(
    record: Mapping[str, Any],
    size: int,
    folder: Path,
    actor_network: Any,
    hp_config: HyperparameterConfig | None,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
) -> Shared:
    from evogrpo.agents.members.joint_body import JointBody, JointSettings
    from evogrpo.agents.members.joint_play import joint_shared

    if accelerator is not None or actor_network is not None:
        raise ValueError("multi-agent members take neither an accelerator nor an actor_network: leave them out")
    settings = JointSettings.from_json(record["settings"])
    return joint_shared(JointBody.stored(record, settings, size, device=device), hp_config)


_OPENERS: Mapping[str, Callable[..., Shared]] = {
    "joint": _open_joint,
    "language": _open_language,
    "networks": _open_networks,
}
"""What reads the record of each kind of body."""


def class_name(kind: str) -> str:
    """Return the name of the class whose agents are of a kind."""
    return "MultiAgentGRPO" if kind == "joint" else "GRPO"


def _shared_record(shared: Shared) -> dict[str, Any]:
    return {
        "kind": shared.body.kind,
        "settings": shared.settings.to_json(),
        "hp_config": None if shared.hp_config is None else shared.hp_config.to_json(),
        **shared.body.record(),
    }


def _member_record(agent: "EvolvableAlgorithm") -> dict[str, Any]:
    return {
        **{name: getattr(agent, name) for name in COUNTERS},
        "hyperparameters": agent.hyperparameters.to_json(),
        "scores": None if agent.fitness is None else list(agent.fitness.scores),
    }


def _restore(
    agent: "EvolvableAlgorithm", member: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str | Path
) -> None:
    """Give an agent all that was saved of one, or change nothing; it stays in its own slot."""
    # Earlier versions retired nobody.
    counters = {name: {"retired": False, **member}[name] for name in COUNTERS if name != "slot"}
    try:
        hyperparameters = Hyperparameters.from_json(member["hyperparameters"])
        fitness = None if member["scores"] is None else Fitness.from_scores(member["scores"])
        agent._shared.bank.load_state(agent.slot, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    agent.hyperparameters, agent.fitness = hyperparameters, fitness
    for name, value in counters.items():
        setattr(agent, name, value)


class _MemberTensors(Mapping[str, Tensor]):
    """The learner states of members: `{slot}.{name}` -> a copy made when it is asked for; and what they share."""

    def __init__(self, shared: Shared) -> None:
        self._bank, self._shared = shared.bank, _named(shared.body.constants())
        parts = list(self._bank.state(0))
        self._places = {f"{slot}.{part}": (slot, part) for slot in range(self._bank.size) for part in parts}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._shared:
            return self._shared[name]
        slot, part = self._places[name]
        return self._bank.state(slot)[part]

    def __iter__(self) -> Iterator[str]:
        yield from self._places
        yield from self._shared

    def __len__(self) -> int:
        return len(self._places) + len(self._shared)


@contextmanager
def _damage(path: str | Path) -> Iterator[None]:
    """Turn a record of the wrong shape into a checkpoint error: hashes protect from damage, not from forgery."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a checkpoint whose record this version cannot read ({type(error).__name__}: {error}): "
            "use the version that wrote it, or another checkpoint"
        ) from error
