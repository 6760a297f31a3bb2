"""Starting from an earlier run's best hyperparameters, without its weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from evogrpo import (
    HyperparameterConfig,
    Hyperparameters,
    Objective,
    RLParameter,
    best_hyperparameters,
    train,
)
from evogrpo.evolution.founders import warm_start_founders
from evogrpo.training.configuration.environment_tasks import merge_sections, packaged_values
from evogrpo.training.configuration.reading import load_config, parse_config
from tests.reporting.journals import generation, member, written
from tests.tiny_steps import STEP_SPACE, step_population
from tests.tiny_training import equal_states, tiny_population

RUN = {"event": "run", "evolvable": {}, "samples_per_step": 8}
FIRST = Hyperparameters(group_size=4)
SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-3, max=1e-2, scale="log"),
    update_epochs=RLParameter(min=2, max=4),
    group_size=RLParameter(choices=[2, 4]),
    loss_type=RLParameter(choices=["grpo", "dapo"]),
    clip_low=RLParameter(min=0.1, max=0.2),
)


def with_rates(*rates, fitness=None):
    """Write members with these learning rates."""
    return [
        member(
            slot, slot, hyperparameters={"lr": rate}, fitness=(fitness or {}).get(slot, 0.1 * slot)
        )
        for slot, rate in enumerate(rates)
    ]


def test_the_winner_comes_first_then_survivors_by_fitness_without_duplicates(tmp_path):
    events = [
        RUN,
        generation(1, *with_rates(1e-3, 2e-3, 3e-3, fitness={1: 0.9}), best=1),
        generation(
            2,
            *with_rates(1e-3, 2e-3, 3e-3, 4e-3, 1e-3, fitness={0: 0.2, 1: None, 2: 0.8, 4: 0.3}),
            best=2,
            best_ever=[1, 1],
        ),
    ]
    found = best_hyperparameters(written(tmp_path / "run", *events))
    rates = [each.lr for each in found]
    assert rates[:2] == [2e-3, 3e-3]
    assert sorted(rates[2:]) == [1e-3, 4e-3]  # equally good


VALUES = {
    "lr": (1e-4, 5e-3, 1.0),
    "update_epochs": (1, 3, 9),
    "group_size": (2, 8, 64),
    "loss_type": ("dapo", "cispo", None),
    "clip_low": (None, 0.15, 0.9),
}


@pytest.mark.parametrize("seed", range(3))
def test_values_outside_the_space_move_to_the_nearest_with_a_warning(seed):
    rng = np.random.default_rng(seed)
    earlier = []
    for number in range(4):
        earlier.append(
            replace(
                FIRST,
                **{name: values[rng.integers(3)] for name, values in VALUES.items()},
                temperature=0.5 + number,
            )
        )
    founders, words = warm_start_founders(earlier, FIRST, SPACE, 8)
    warning = " ".join(words)
    for record in earlier:
        for name, parameter in SPACE.items():
            value = getattr(record, name)
            inside = value is None or parameter.closest(value) == value
            assert (f"{name} {value} -> " in warning) == (not inside)
    for founder in founders:
        for name, parameter in SPACE.items():
            value = getattr(founder, name)
            assert value is None or parameter.closest(value) == value
        assert founder.temperature == FIRST.temperature
        assert isinstance(founder.update_epochs, int)
    assert "temperature stays 1.0: it does not evolve in this run" in words
    assert len(set(founders)) == len(founders)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": 2e-3}, ()),  # evolves
        ({"temperature": 0.7}, ("temperature stays 1.5: it does not evolve in this run",)),
        ({"task.style": "b"}, ("task.style stays a: it does not evolve in this run",)),
        (
            {"reward_weights.right": 0},
            ("reward_weights.right 0 is not used: it does not evolve in this run",),
        ),
        ({"temperature": 1.5, "task.style": "a"}, ()),  # those of the new run
    ],
)
def test_values_that_do_not_evolve_are_named_and_not_taken(values, words):
    space = HyperparameterConfig(lr=(1e-3, 1e-2))
    first = replace(FIRST, lr=1e-3, temperature=1.5).with_values({"task.style": "a"})
    earlier = replace(FIRST, lr=1e-3).with_values(values)
    founders, changes = warm_start_founders([earlier], first, space, 8)
    assert changes == words
    rest = [name for name in first.by_name() if name not in space]
    assert [founders[0].get(name) for name in rest] == [first.get(name) for name in rest]


def test_the_first_founder_has_the_names_of_the_objective():
    space = HyperparameterConfig(
        loss_type=RLParameter(choices=["grpo", "dapo", "cispo"]),
        advantage=RLParameter(choices=["outcome", "rloo"]),
        clip_low=RLParameter(min=0.1, max=0.3),
    )
    objective = Objective(loss_type="cispo", cispo_clip_low=True)
    first, *others = (
        agent.hyperparameters for agent in tiny_population(4, hp_config=space, objective=objective)
    )
    assert (first.loss_type, first.advantage, first.clip_low) == ("cispo", "outcome", None)
    assert {each.loss_type for each in others} == {"grpo", "dapo", "cispo"}


def test_a_population_starts_with_the_earlier_hyperparameters_and_new_weights(stored_network_run):
    found = best_hyperparameters(stored_network_run.folder)
    population = step_population(len(found) + 1, hp_config=STEP_SPACE, founders=found, seed=5)
    for agent, record in zip(population.agents, found, strict=False):
        assert (agent.hyperparameters.lr, agent.hyperparameters.clip_coef) == (
            record.lr,
            record.clip_coef,
        )
    plain = step_population(len(found) + 1, hp_config=STEP_SPACE, seed=5)
    for agent, other in zip(population.agents, plain.agents, strict=True):
        assert equal_states(agent.state(), other.state())
    alike = step_population(3, hp_config=STEP_SPACE, founders=found[:1], spread=False)
    assert len({agent.hyperparameters for agent in alike.agents}) == 1


@pytest.mark.parametrize("given", [[], "runs/earlier", [{"lr": 1e-3}], 3, FIRST])
def test_invalid_founders_are_refused(given):
    with pytest.raises(ValueError, match="founders"):
        step_population(2, founders=given)


SMALL = {
    "schedule": {
        "generations": 1,
        "steps_per_generation": 1,
        "samples_per_step": 8,
        "test_questions": 0,
    },
    "population": {"size": 3},
    "task": {"validation_size": 2},
}


@pytest.mark.filterwarnings("ignore:founders")
def test_a_configuration_names_the_earlier_run_and_stores_the_founders(
    stored_network_run, tmp_path
):
    earlier = stored_network_run.folder
    folder = tmp_path / "run"
    settings = {}
    for part in SMALL.values():
        settings.update(part)
    settings["hp_config"] = HyperparameterConfig(lr=(1e-3, 2e-2), clip_coef=(0.1, 0.4))
    run = train("CartPole-v1", like=str(earlier), run_dir=folder, max_episode_steps=20, **settings)
    found = best_hyperparameters(earlier)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert stored["population"]["like"] == str(earlier)
    assert stored["population"]["founders"] == [each.to_json() for each in found]
    space = load_config(folder / "config.yaml").search_space
    for birth, record in zip(run.population.lineage, found, strict=False):
        assert birth.hyperparameters.lr == space["lr"].closest(record.lr)
        assert birth.hyperparameters.clip_coef == space["clip_coef"].closest(record.clip_coef)
    # The earlier run may be deleted by then.
    stored["population"]["like"] = str(tmp_path / "gone")
    assert parse_config(stored).founders == load_config(folder / "config.yaml").founders


def test_founders_in_a_configuration_override_the_defaults():
    values = merge_sections(
        packaged_values("CartPole-v1", with_preset=False),
        {
            "population": {"founders": [{"lr": 2e-3}, {"clip_coef": 0.3}]},
            "schedule": {"samples_per_step": 8},
        },
    )
    config = parse_config(json.loads(json.dumps(values)))
    assert [(each.lr, each.clip_coef) for each in config.founders] == [(2e-3, None), (5e-3, 0.3)]
