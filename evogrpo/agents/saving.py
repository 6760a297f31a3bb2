"""Agents and populations as checkpoints: what is stored, and the checks before anything is loaded."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from safetensors.torch import save as tensor_bytes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from evogrpo.agents.population import Population
from evogrpo.agents.shared import Settings, Shared, make_shared
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import Lineage
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters
from evogrpo.persistence.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.persistence.placement import stored_at
from evogrpo.policies.adapters import AdapterBank
from evogrpo.policies.lora import lora_from_json, lora_to_json
from evogrpo.policies.models import fingerprint, load_base

if TYPE_CHECKING:
    from evogrpo.agents.base import EvolvableAlgorithm

Agent = TypeVar("Agent", bound="EvolvableAlgorithm")

COUNTERS = ("slot", "index", "parent", "born", "failed", "training", "steps")
BASE_CONFIG, BASE_WEIGHTS = "base_config.json", "base_model.safetensors"


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
    adapters, config = shared.bank.peft_files(agent.slot)
    # Functions, so that only the file that is being written is in memory as bytes.
    files: dict[str, bytes | Callable[[], bytes]] = {
        "adapter_model.safetensors": lambda: _bytes(adapters),
        "adapter_config.json": config,
    }
    if include_base:
        model = shared.bank.base.model
        # Tied weights are one parameter, so nothing is stored twice.
        files[BASE_WEIGHTS] = lambda: _bytes({name: value.detach() for name, value in model.named_parameters()})
        files[BASE_CONFIG] = model.config.to_json_string(use_diff=False).encode()
    record = {"shared": _shared_record(shared), "member": _member_record(agent), "note": dict(note or {})}
    write_checkpoint(path, shared.bank.state(agent.slot), record, files=files, kind="agent", replace=replace)


def load_agent(
    kind: type[Agent],
    path: str | Path,
    *,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
    actor_network: PreTrainedModel | None,
) -> Agent:
    """Bring one agent back in a bank of its own; see `GRPO.load`."""
    tensors, record = read_checkpoint(path, kind="agent")
    with _damage(path):
        model = actor_network or _saved_base(stored_at(Path(path))) or named_base(record["shared"])
        shared = _open(record["shared"], model, 1, path, device=device, accelerator=accelerator)
        agent = kind._member(shared, 0, 0, Hyperparameters())
        _restore(agent, record["member"], tensors, path)
    return agent


def read_agent(agent: "EvolvableAlgorithm", path: str | Path) -> None:
    """Put a saved agent into an existing one; see `GRPO.load_checkpoint`."""
    tensors, record = read_checkpoint(path, kind="agent")
    with _damage(path):
        _check_base(record["shared"], agent._shared.fingerprint, path)
        saved, own = record["shared"]["lora_config"], lora_to_json(agent._shared.bank.lora_config)
        if saved != own:
            raise CheckpointError(
                f"{path} holds an adapter of lora_config {saved}, but this agent has {own}: make the agent with the "
                "same lora_config, or bring the saved one back with GRPO.load"
            )
        _restore(agent, record["member"], tensors, path)


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
    return _MemberTensors(population.shared.bank), record


def restore_population(
    kind: "type[EvolvableAlgorithm]",
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    model: PreTrainedModel,
    path: str | Path,
    *,
    device: str | torch.device | None = None,
) -> Population:
    """Build a population from what `population_state` returned.

    Args:
        kind: The agents' class.
        tensors: As returned.
        record: As returned.
        model: The base model.
        path: Where the state was read, for messages.
        device: Where to put the model; it stays where it is by default.

    Raises:
        CheckpointError: If the state is of another base model or does not fit together.
    """
    with _damage(path):
        members = record["members"]
        shared = _open(record["shared"], model, len(members), path, device=device, accelerator=None)
        agents = []
        for slot, member in enumerate(members):
            agent = kind._member(shared, slot, member["index"], Hyperparameters())
            own = {
                name.removeprefix(f"{slot}."): value for name, value in tensors.items() if name.startswith(f"{slot}.")
            }
            _restore(agent, member, own, path)
            agents.append(agent)
        population = Population(agents, shared, lineage=Lineage.from_json(record["lineage"]))
        population.next_index = record["next_index"]
    return population


def named_base(record: Mapping[str, Any]) -> PreTrainedModel:
    """Load the base model that a record names, unless that name is a path: paths in checkpoints are never followed.

    Raises:
        ValueError: If it is a path or cannot be loaded; the message names the argument to give instead.
    """
    source = str(record["source"])
    remedy = "give the base model as actor_network=, loaded with evogrpo.policies.models.load_base"
    if source.startswith((".", "~", "/", "\\")) or Path(source).exists() or source.endswith(".gguf"):
        raise ValueError(f"the checkpoint's base model came from the path {source!r}, which is not followed: {remedy}")
    try:
        return load_base(source).model
    except ValueError as error:
        raise ValueError(f"the checkpoint's base model {source!r} cannot be loaded: {remedy}. {error}") from error


def _saved_base(folder: Path) -> PreTrainedModel | None:
    """Load the base model saved inside a checked checkpoint, or return None."""
    if not (folder / BASE_WEIGHTS).is_file():
        return None
    values = json.loads((folder / BASE_CONFIG).read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    weights = load_file(folder / BASE_WEIGHTS)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=next(iter(weights.values())).dtype)
    missing = set(dict(model.named_parameters())) ^ set(weights)
    if missing:
        raise CheckpointError(f"{folder / BASE_WEIGHTS} does not fit its config: {sorted(missing)[:3]} are unmatched")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def _open(
    record: Mapping[str, Any],
    model: PreTrainedModel,
    size: int,
    path: str | Path,
    *,
    device: str | torch.device | None,
    accelerator: Accelerator | None,
) -> Shared:
    _check_base(record, fingerprint(model), path)
    config = record["hp_config"]
    shared = make_shared(
        model,
        size,
        Settings.from_json(record["settings"]),
        lora_config=lora_from_json(record["lora_config"]),
        hp_config=None if config is None else HyperparameterConfig.from_json(config),
        source=record["source"],
        accelerator=accelerator,
        device=device,
    )
    shared.bank.micro_batch_tokens = record["micro_batch_tokens"]
    return shared


def _check_base(record: Mapping[str, Any], actual: str, path: str | Path) -> None:
    if record["fingerprint"] != actual:
        raise CheckpointError(
            f"{path} was trained on the base model {record['source']!r} with fingerprint {record['fingerprint']}, but "
            f"the model given has {actual}: adapters mean nothing on another base, so give the same model"
        )


def _shared_record(shared: Shared) -> dict[str, Any]:
    return {
        "settings": shared.settings.to_json(),
        "lora_config": lora_to_json(shared.bank.lora_config),
        "hp_config": None if shared.hp_config is None else shared.hp_config.to_json(),
        "source": shared.source,
        "fingerprint": shared.fingerprint,
        "micro_batch_tokens": shared.bank.micro_batch_tokens,
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
    counters = {name: member[name] for name in COUNTERS if name != "slot"}
    try:
        hyperparameters = Hyperparameters.from_json(member["hyperparameters"])
        fitness = None if member["scores"] is None else Fitness.from_scores(member["scores"])
        agent._shared.bank.load_state(agent.slot, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    agent.hyperparameters, agent.fitness = hyperparameters, fitness
    for name, value in counters.items():
        setattr(agent, name, value)


def _bytes(tensors: Mapping[str, Tensor]) -> bytes:
    plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
    return tensor_bytes(plain, metadata={"format": "pt"})


class _MemberTensors(Mapping[str, Tensor]):
    """The learner states of a bank's members: `{slot}.{name}` -> a copy made when it is asked for."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        parts = list(bank.state(0))
        self._places = {f"{slot}.{part}": (slot, part) for slot in range(bank.size) for part in parts}

    def __getitem__(self, name: str) -> Tensor:
        slot, part = self._places[name]
        return self._bank.state(slot)[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
