"""Checkpoints of populations."""

import gc

import pytest
import torch
from peft import LoraConfig

from evogrpo import GRPO, HyperparameterConfig, RLParameter
from evogrpo.algorithms.checkpointing import PopulationRecord, population_state, restore_population
from evogrpo.storage.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from evogrpo.validation import dump, validate
from tests.tiny_models import tiny_model
from tests.tiny_training import (
    SPACE,
    equal_states,
    randomise_adapter,
    shared_model,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)


def test_a_population_round_trips(tmp_path):
    population = tiny_population(3, hp_config=SPACE, update_epochs=2)
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed)
    population.evaluate(tiny_env())
    population.learn(population.collect(tiny_env(), step=0, samples_per_step=8, block=4).experience, step=0)
    population[1].failed = "for a reason"
    population[2].retired = True
    tensors, record = population_state(population)
    write_checkpoint(tmp_path / "population", tensors, dump(record))
    tensors, values = read_checkpoint(tmp_path / "population")
    stored = tensors, validate(PopulationRecord, values, extra="forbid")
    path, lineage = tmp_path / "population", population.lineage
    again = restore_population(GRPO, *stored, tiny_model(), path, lineage=lineage)
    for agent, twin in zip(population, again, strict=True):
        assert equal_states(state_of(agent), state_of(twin))
        assert twin.record() == agent.record()
        assert (twin.fitness, twin.failed, twin.retired) == (agent.fitness, agent.failed, agent.retired)
        assert twin.steps == agent.steps
    assert (again.lineage, again.next_index) == (population.lineage, population.next_index)
    assert dict(again.space) == dict(population.space)
    env = tiny_env()
    for each in (population, again):
        each.learn(each.collect(env, step=1, samples_per_step=8, block=4).experience, step=1)
    assert all(equal_states(state_of(agent), state_of(twin)) for agent, twin in zip(population, again, strict=True))


def test_tensors_are_read_lazily():
    def bytes_alive():
        return sum(value.nbytes for value in gc.get_objects() if type(value) is torch.Tensor)

    population = tiny_population(4)
    gc.collect()
    before = bytes_alive()
    tensors, _ = population_state(population)
    assert bytes_alive() == before
    for slot, agent in enumerate(population):
        randomise_adapter(agent, slot)  # reading gives the current state
        assert torch.equal(tensors[f"{slot}.adapter"], state_of(agent)["adapter"])
        tensors[f"{slot}.adapter"].zero_()
        assert state_of(agent)["adapter"].any()
    assert bytes_alive() == before
    assert len(list(tensors)) == len(tensors) == 4 * len(state_of(population[0]))


def test_tensors_may_be_split_into_several_files(tmp_path):
    population = tiny_population(3)
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed)
    tensors, record = population_state(population)
    write_checkpoint(tmp_path / "p", tensors, dump(record), file_bytes=tensors["0.adapter"].nbytes + 1)
    assert len(list((tmp_path / "p").glob("population-*.safetensors"))) > 3
    again = restore_population(GRPO, read_checkpoint(tmp_path / "p")[0], record, shared_model(), tmp_path / "p")
    assert all(equal_states(state_of(agent), state_of(twin)) for agent, twin in zip(population, again, strict=True))


@pytest.mark.parametrize("lost", ["1.adapter", "0.step"])
def test_a_missing_tensor_raises(lost):
    tensors, record = population_state(tiny_population(2))
    tensors = {name: value for name, value in tensors.items() if name != lost}
    with pytest.raises(CheckpointError, match="somewhere"):
        restore_population(GRPO, tensors, record, shared_model(), "somewhere")


def test_another_adapter_shape_raises():
    tensors, _ = population_state(tiny_population(2))
    _, record = population_state(tiny_population(2, lora_config=LoraConfig(r=5, target_modules="all-linear")))
    with pytest.raises(CheckpointError, match="somewhere"):
        restore_population(GRPO, tensors, record, shared_model(), "somewhere")


def test_another_base_raises():
    tensors, record = population_state(tiny_population(2))
    with pytest.raises(CheckpointError, match="fingerprint"):
        restore_population(GRPO, tensors, record, tiny_model(seed=1), "somewhere")


def test_spaces_round_trip(tmp_path):
    space = HyperparameterConfig(
        lr=RLParameter(min=1e-5, max=1e-3, scale="log", factor=1.5), group_size=RLParameter(choices=[2, 6])
    )
    tiny_agent(hp_config=space, group_size=6).save_checkpoint(tmp_path / "agent")
    assert dict(GRPO.load(tmp_path / "agent", actor_network=shared_model()).hp_config) == dict(space)
