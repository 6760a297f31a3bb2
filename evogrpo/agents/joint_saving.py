"""Bringing multi-agent members and populations back from checkpoints; they are saved as all others are."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from evogrpo.agents.joint_body import JointBody, JointSettings
from evogrpo.agents.joint_play import joint_shared
from evogrpo.agents.joint_population import MultiAgentPopulation
from evogrpo.agents.saving import COUNTERS, read_agent
from evogrpo.agents.shared import Shared
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.lineage import Lineage
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters
from evogrpo.persistence.checkpoint import read_checkpoint
from evogrpo.persistence.manifest import CheckpointError

if TYPE_CHECKING:
    from evogrpo.agents.multi_agent import MultiAgentGRPO

Agent = TypeVar("Agent", bound="MultiAgentGRPO")


def load_joint_agent(kind: type[Agent], path: str | Path, *, device: str | torch.device | None) -> Agent:
    """Bring one member back in banks of its own; see `MultiAgentGRPO.load`."""
    _, record = read_checkpoint(path, kind="agent")
    agent = kind._member(_open(record["shared"], 1, path, device), 0, 0, Hyperparameters())
    read_agent(agent, path)
    return agent


def restore_joint_population(
    kind: "type[MultiAgentGRPO]",
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    path: str | Path,
    *,
    device: str | torch.device | None = None,
) -> MultiAgentPopulation:
    """Build a population from what `evogrpo.agents.saving.population_state` returned.

    Args:
        kind: The agents' class.
        tensors: As returned.
        record: As returned.
        path: Where the state was read, for messages.
        device: Where the banks compute.

    Raises:
        CheckpointError: If the state is not that of a multi-agent population or does not fit together.
    """
    members = record["members"]
    shared = _open(record["shared"], len(members), path, device)
    agents = []
    for slot, member in enumerate(members):
        agent = kind._member(shared, slot, member["index"], Hyperparameters())
        try:
            agent.hyperparameters = Hyperparameters.from_json(member["hyperparameters"])
            agent.fitness = None if member["scores"] is None else Fitness.from_scores(member["scores"])
            start = f"{slot}."
            own = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            shared.bank.load_state(slot, own)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be loaded: {error}") from error
        for name in COUNTERS:
            setattr(agent, name, member[name])
        agents.append(agent)
    population = MultiAgentPopulation(agents, shared, lineage=Lineage.from_json(record["lineage"]))
    population.next_index = record["next_index"]
    return population


def _open(record: Mapping[str, Any], size: int, path: str | Path, device: str | torch.device | None) -> Shared:
    if record["kind"] != JointBody.kind:
        raise CheckpointError(
            f"{path} holds members of kind {record['kind']!r}, not multi-agent ones: bring them back with the class "
            "that saved them"
        )
    try:
        config = record["hp_config"]
        hp_config = None if config is None else HyperparameterConfig.from_json(config)
        settings = JointSettings.from_json(record["settings"])
        return joint_shared(JointBody.stored(record, settings, size, device=device), hp_config)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
