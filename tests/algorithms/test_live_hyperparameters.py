"""A hyperparameter that changes on an existing member acts as if the member had been built with it.

The formulas of members built with a value are in test_objectives.py. The learning rate or the loss
type, which is a name, is tested on each route by which a value arrives: assignment, mutation,
selection, loading, resuming.
"""

from dataclasses import replace

import numpy as np
import pytest

from evogrpo import GRPO, HyperparameterConfig, RLParameter
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.evolution import Fixed, MemberRecord, Plan
from tests.policy_banks import assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_training import (
    graded,
    randomise_adapter,
    resumed_run,
    shared_model,
    tiny_agent,
    tiny_env,
    tiny_population,
    tiny_run,
)


def assigned(name, value, folder, options):
    agent = tiny_agent(**options)
    setattr(agent, name, value)
    return agent


def mutated(name, value, folder, options):
    agent = tiny_agent(
        **options,
        hp_config=HyperparameterConfig(**{name: RLParameter(choices=[options[name], value])}),
    )
    assert agent.mutate(np.random.default_rng(0)) == {name: (options[name], value)}
    return agent


def inherited(name, value, folder, options):
    population = tiny_population(3, **options)
    changed = replace(population[0].hyperparameters, **{name: value})
    changes = {name: (options[name], value)}
    child = MemberRecord(
        slot=2, index=3, parent=0, born=1, hyperparameters=changed, changes=changes
    )
    population.apply(Plan(generation=1, parents=(0, 1, 0), children=(child,), reasons=("", "", "")))
    return population[2]


def loaded(name, value, folder, options):
    assigned(name, value, folder, options).save_checkpoint(folder / "agent")
    return GRPO.load(folder / "agent", actor_network=shared_model())


def loaded_into_another(name, value, folder, options):
    assigned(name, value, folder, options).save_checkpoint(folder / "agent")
    agent = tiny_agent(**options)
    agent.load_checkpoint(folder / "agent")
    return agent


def resumed(name, value, folder, options):
    run = tiny_run(folder / "run", size=2, strategy=Fixed(), options={"hp_config": None} | options)
    setattr(run.population[1], name, value)
    steps = run.reports()
    next(steps)
    run.stop()
    assert not list(steps)
    return resumed_run(folder / "run").population[1]


ROUTES = (assigned, mutated, inherited, loaded, loaded_into_another, resumed)
MOVING = {"update_epochs": 2, "lr": 0.01}  # ratios differ from 1
VALUES = {
    "lr": (1e-3, 4e-3, {}),
    "target_kl": (0.016, 0.001, {"lr": 1e-5}),
    "max_grad_norm": (0.1, 0.01, {}),
    "update_epochs": (1, 3, {}),
    "batch_size": (64, 5, {}),
    "beta": (0.0, 0.3, {}),
    "temperature": (1.0, 0.6, {}),
    "group_size": (4, 8, {}),
    "entropy_coef": (0.0, 0.3, {}),
    "advantage_clip": (2.0, 0.4, {}),
    "gamma": (1.0, 0.6, {}),
    "loss_type": ("luspo", "dr_grpo", {}),
    "advantage": ("outcome", "mean_only", {}),
    "clip_coef": (0.2, 0.02, MOVING),
    "clip_low": (0.4, 0.01, MOVING | {"clip_high": 0.05}),
    "clip_high": (0.4, 0.005, MOVING | {"loss_type": "cispo"}),
}


def step_of(agent):
    """Return the actions, the report and the state of a learning step from random adapters."""
    randomise_adapter(agent)
    agent.steps = 0
    ids, masks = agent.get_action(tiny_env().reset()[0], training=True)
    report = agent.learn((ids, masks, graded(ids)))
    return [rows.tolist() for rows in ids], report, agent.state()


@pytest.mark.parametrize(
    ("route", "name"),
    [(assigned, name) for name in VALUES]
    + [(route, ("lr", "loss_type")[i % 2]) for i, route in enumerate(ROUTES[1:])],
)
def test_a_changed_hyperparameter_acts_like_a_given_one(route, name, tmp_path):
    default, value, others = VALUES[name]
    options = {"update_epochs": 1, "max_grad_norm": 1e9} | others
    agent = route(name, value, tmp_path, options | {name: default})
    assert getattr(agent, name) == value
    new = tiny_agent(**options | {name: value}, index=agent.index)
    old = tiny_agent(**options | {name: default}, index=agent.index)
    (actions, report, state), (expected, *others), (before, *_, unlike) = map(
        step_of, (agent, new, old)
    )
    assert actions == expected
    assert (actions != before) == (name in ("temperature", "group_size"))
    assert_metrics_agree(report.metrics, others[0].metrics)
    assert_states_agree(state, others[1], lr=report.lr)
    with pytest.raises(AssertionError):
        assert_states_agree(state, unlike, lr=report.lr)


def test_every_evolving_hyperparameter_is_tested():
    assert VALUES.keys() == set(HYPERPARAMETER_NAMES)
