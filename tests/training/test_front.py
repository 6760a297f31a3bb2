"""`train`: one call from an environment to a trained population."""

import dataclasses
import inspect

import gymnasium
import numpy as np
import pytest
import torch

from evogrpo import (
    GRPO,
    Callback,
    GymnasiumGroups,
    HyperparameterConfig,
    NetworkConfig,
    RLParameter,
    evolve,
    resume,
    train,
)
from evogrpo.evolution import Fixed
from evogrpo.safe_parsing import read_yaml_file
from evogrpo.storage.journal import read_journal
from evogrpo.training.evolve import Run
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.training.trainer import Trainer
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_teams import team_env
from tests.tiny_training import equal_states, tiny_env

SMALL = {
    "size": 2, "samples_per_step": 8, "group_size": 4, "steps_per_generation": 2,
    "max_episode_steps": 20,
    "validation_size": 4, "test_size": 4, "target_fitness": None, "progress": False,
}  # fmt: skip


def test_train_returns_a_best_member_that_acts_saves_and_loads(tmp_path):
    run = train("CartPole-v1", total_timesteps=600, **SMALL)
    assert run.result.complete
    assert 600 <= run.result.timesteps < 600 + 2 * 8 * 20  # at most one learning step more
    best = run.best
    assert (best.index, best.fitness.mean) == (run.result.best.index, run.result.best.fitness.mean)
    assert best.hyperparameters == run.result.best.hyperparameters
    groups = GymnasiumGroups("CartPole-v1", max_episode_steps=20, validation_size=4, test_size=4)
    assert best.test(groups) == best.fitness.mean
    for agent in run.population:
        agent.load_state(run.population[0].state())  # the best is a separate agent
    assert best.test(groups) == best.fitness.mean
    env = gymnasium.make("CartPole-v1")
    seen, _ = env.reset(seed=0)
    action, _ = best.predict(seen, deterministic=True)
    assert env.action_space.contains(int(action))
    best.save_checkpoint(tmp_path / "best")
    again = GRPO.load(tmp_path / "best")
    assert equal_states(again.state(), best.state())
    assert again.predict(seen, deterministic=True)[0] == action


def test_the_signature_shows_the_defaults(tmp_path):
    own = (
        "env",
        "total_timesteps",
        "preset",
        "run_dir",
        "progress",
        "callback",
        "callbacks",
        "skip_memory_check",
    )
    defaults = {
        name: each.default
        for name, each in inspect.signature(train).parameters.items()
        if name not in own
    }
    del defaults["target_fitness"]  # the environment's reward threshold
    short = {"generations": 1, "steps_per_generation": 1}
    stored = []
    for settings in ({}, defaults, {"env_kwargs": {"sutton_barto_reward": np.bool_(False)}}):
        train("CartPole-v1", run_dir=tmp_path / str(len(stored)), **{**settings, **short})
        stored.append(read_yaml_file(tmp_path / str(len(stored)) / "config.yaml"))
        del stored[-1]["run_id"], stored[-1]["run_dir"]
    assert stored[0] == stored[1]
    assert stored[2]["task"]["env_kwargs"] == {"sutton_barto_reward": False}


def test_train_equals_population_and_evolve():
    settings = {
        "lr": 3e-3,
        "gamma": 0.95,
        "group_size": 4,
        "batch_size": 64,
        "update_epochs": 1,
        "clip_coef": 0.2,
    }
    space = HyperparameterConfig(gamma=RLParameter(min=0.9, max=1.0))
    network = NetworkConfig(hidden=(5,), activation="relu")
    short = train(
        "CartPole-v1", None, generations=2, seed=4, network=network, hp_config=space,
        strategy=Fixed(),
        **{**SMALL, **settings},
    )  # fmt: skip
    env = GymnasiumGroups(
        "CartPole-v1", max_episode_steps=20, validation_size=4, test_size=4, seed=4
    )
    population = GRPO.population(
        2,
        env.observation_space,
        env.action_space,
        seed=4,
        network=network,
        hp_config=space,
        **settings,
    )
    by_hand = evolve(
        population, env, strategy=Fixed(), generations=2, steps_per_generation=2, samples_per_step=8
    ).finish()
    # Seconds differ, so costs are not compared.
    tests = [dataclasses.replace(each.result.test, cost=None) for each in (by_hand, short)]
    assert tests[0] == tests[1]
    for one, other in zip(population, short.population, strict=True):
        assert equal_states(one.state(), other.state())


class Wait:
    """Not callable, like callbacks of Stable-Baselines3."""

    def on_step(self):
        return True


def make_cart_pole():
    return gymnasium.wrappers.TimeLimit(
        gymnasium.make("CartPole-v1").unwrapped, max_episode_steps=20
    )


def test_factories_and_groups_are_accepted_instead_of_ids(tmp_path):
    settings = {name: value for name, value in SMALL.items() if name != "max_episode_steps"}
    assert train(make_cart_pole, 300, run_dir=tmp_path / "run", **settings).result.complete
    settings = {
        name: value
        for name, value in settings.items()
        if name not in ("validation_size", "test_size")
    }
    assert train(cart_pole(seed=1), 300, **settings).result.complete


@pytest.mark.parametrize("folder", [None, "run"])
def test_an_extended_run_equals_a_longer_one(folder, tmp_path):
    run_dir = None if folder is None else tmp_path / folder
    longer = train("CartPole-v1", generations=2, **SMALL)
    parts = train("CartPole-v1", generations=1, run_dir=run_dir, **SMALL)
    needed = longer.result.timesteps - parts.result.timesteps
    assert parts.learn(needed) is parts
    assert parts.result.complete
    assert parts.result.timesteps == longer.result.timesteps
    for one, other in zip(longer.population, parts.population, strict=True):
        assert equal_states(one.state(), other.state())
    if run_dir is not None:
        events = [event["event"] for event in read_journal(run_dir / "journal.jsonl")]
        assert events.count("resumed") == 1
        assert events.count("generation") == 2
    with pytest.raises(ValueError, match="total_timesteps must be at least 1"):
        parts.learn(0)


SCHEDULE = {"generations": 1, "samples_per_step": 8, "test_questions": 0}


class Fails(Callback):
    """Raises an error after every learning step."""

    def on_step(self, report):
        raise OSError("no space left")


def test_a_run_that_ended_by_an_error_continues_from_its_checkpoint(tmp_path):
    run = evolve(
        step_population(2), cart_pole(), run_dir=tmp_path / "run", callbacks=[Fails()], **SCHEDULE
    )
    with pytest.raises(OSError, match="no space left"):
        run.finish()
    with pytest.raises(ValueError, match=r"evogrpo\.resume"):
        run.learn(5000)


def test_a_run_that_has_not_begun_can_learn(tmp_path):
    run = evolve(step_population(2), cart_pole(), run_dir=tmp_path / "run", **SCHEDULE)
    assert run.learn(100).result.complete
    again = resume(tmp_path / "run", cart_pole(), max_timesteps=10**6)
    assert again.trainer.run_state.timesteps == run.result.timesteps >= 100


def test_a_run_that_learns_before_it_begins_records_its_description(tmp_path):
    env = cart_pole()
    trainer = Trainer(
        step_population(2, env),
        env,
        schedule=Schedule(**SCHEDULE),
        strategy=Fixed(),
        run_dir=RunDir(tmp_path / "run"),
        description={"task": "a pole"},
    )
    Run(trainer).learn(100)
    assert read_journal(tmp_path / "run" / "journal.jsonl")[0]["task"] == "a pole"


def test_a_resumed_run_that_learns_at_once_records_changed_data_once(tmp_path):
    evolve(step_population(2), cart_pole(), run_dir=tmp_path / "run", **SCHEDULE).finish()
    run = resume(tmp_path / "run", cart_pole(max_episode_steps=30), allow_changed_data=True)
    run.learn(100)
    run.learn(100)
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    changes = [event.get("changed_data") for event in events if event["event"] == "resumed"]
    assert changes == [["max_episode_steps: 40 -> 30"], None]


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor])
def test_a_callback_sees_every_generation_and_may_stop(kind):
    seen = []

    def callback(run):
        seen.append(run.trainer.run_state.generation)
        return kind(len(seen) < 2)

    run = train("CartPole-v1", generations=5, callback=callback, **SMALL)
    assert seen == [1, 2]
    assert run.result.reason == "stopped by the callback"
    assert not run.result.complete


def test_callbacks_run_with_the_callers_number_of_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    during = []
    torch.set_num_threads(2)
    try:
        train("CartPole-v1", 1, callback=lambda _: during.append(torch.get_num_threads()), **SMALL)
        assert during == [2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "settings", "rule"),
    [
        (("CartPol-v1", 100), {}, "not a registered Gymnasium environment"),
        (("mine.py:Walk-v0", 100), {}, "without .py: 'mine:Walk-v0'"),
        (("CartPole-v1", 100), {"max_timesteps": 5}, "it is called 'total_timesteps' here"),
        (
            ("CartPole-v1", 100),
            {"hp_config": {"lr": 1}},
            "hp_config must be a HyperparameterConfig",
        ),
        (
            (cart_pole(), 100),
            {"preset": True},
            "preset requires the id of a registered environment",
        ),
        (
            (cart_pole(), 100),
            {"env_kwargs": {}},
            "env_kwargs is a setting of the environment. Pass it to GymnasiumGroups",
        ),
        ((gymnasium.make("CartPole-v1"), 100), {}, "got <.*CartPole.* Write train"),
        (("Acrobot-v1", "MlpPolicy"), {}, r"Write train\('Acrobot-v1', total_timesteps=100_000\)"),
        (
            ("CartPole-v1", 100),
            {"callback": Wait()},
            "callback must be a function of the run, got Wait",
        ),
        (("CartPole-v1", 100), {"callback": Callback()}, "in the list callbacks"),
        (
            (tiny_env(), 100),
            {},
            r"HuggingFaceGym.* For several agents or language models, .*evolve\(",
        ),
        ((team_env(), 100), {}, r"PettingZooGroups.* .*evolve\("),
        ((5, 100), {}, "env must be an id, a callable .* got 5. Write train"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_played(arguments, settings, rule):
    with pytest.raises(ValueError, match=rule):
        train(*arguments, **settings)
