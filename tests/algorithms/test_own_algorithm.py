"""A user-defined algorithm as in docs/own_algorithm.md."""

import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from evogrpo import (
    GRPO,
    EvolvableAlgorithm,
    GymnasiumGroups,
    HyperparameterConfig,
    RLParameter,
    evolve,
    resume,
)
from evogrpo.randomness import generator
from tests.tiny_steps import cart_pole
from tests.tiny_training import equal_states, shared_model, tiny_env, tiny_options

PAGE = (Path(__file__).parents[2] / "docs" / "own_algorithm.md").read_text(encoding="utf-8")
CLASS, USE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)[:2]
SPACE = HyperparameterConfig(lr=RLParameter(min=1e-3, max=1e-1, scale="log"))


NAMES: dict[str, type[EvolvableAlgorithm]] = {}
exec(CLASS, NAMES)  # noqa: S102 (the page is the test's subject)
Reinforce = NAMES["Reinforce"]


def small(size: int, env: GymnasiumGroups, **options):
    options = {"group_size": 4, "lr": 1e-2} | options
    return Reinforce.population(size, env.observation_space, env.action_space, **options)


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = USE.replace(
        '"CartPole-v1"', '"CartPole-v1", max_episode_steps=20, validation_size=4, test_size=4'
    )
    shortest = short.replace("steps_per_generation=5", "steps_per_generation=1")
    exec(shortest, {"Reinforce": Reinforce})  # noqa: S102
    assert [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()
    ] == list("1234")


def test_a_step_is_the_policy_gradient():
    """The loss is the mean of advantage times log-probability, leave-one-out."""
    env = cart_pole()
    population = small(1, env, max_grad_norm=1e9)
    collected = population.collect(env, step=0, samples_per_step=8, starts_per_step=2)
    batch = collected.experience["default"]
    means = torch.stack([batch.rewards[(batch.group_ids == g)].mean() for g in batch.group_ids])
    expected = (batch.rewards - means) * 4 / 3  # r - (sum - r) / (n - 1), with n = 4
    log_probs = population.members.banks["default"].log_probs(batch)
    report = population.learn(collected.experience, step=0)[0]
    assert report.loss == pytest.approx(float(-(expected[:, None] * log_probs).sum() / 8), rel=1e-5)
    assert report.advantages == pytest.approx(expected.tolist(), abs=1e-4)
    assert not equal_states(population[0].state(), small(1, env)[0].state())


def test_clones_mutates_evolves_saves_and_resumes(tmp_path):
    env = cart_pole()
    options = {
        "steps_per_generation": 2,
        "samples_per_step": 8,
        "test_questions": 4,
        "validation_questions": 4,
    }
    uninterrupted = evolve(small(3, env, hp_config=SPACE), env, generations=3, **options)
    first = evolve(
        small(3, env, hp_config=SPACE), env, run_dir=tmp_path / "parts", generations=1, **options
    )
    assert (len(list(uninterrupted)), len(list(first))) == (3, 1)
    for wrong in ({}, {"algorithm": GRPO}):
        with pytest.raises(ValueError, match="algorithm=Reinforce"):
            resume(tmp_path / "parts", env, **wrong)
    resumed = resume(tmp_path / "parts", env, algorithm=Reinforce, generations=3)
    list(resumed)
    for agent, same in zip(uninterrupted.population, resumed.population, strict=True):
        assert type(same) is Reinforce
        assert agent.hyperparameters == same.hyperparameters
        assert equal_states(agent.state(), same.state())
    member = resumed.population[0]
    assert type(member.clone()) is Reinforce
    assert set(member.mutate(generator(0, "test"))) == {"lr"}
    member.save_checkpoint(tmp_path / "agent")
    assert equal_states(Reinforce.load(tmp_path / "agent").state(), member.state())


class Reports(Reinforce):
    """Returns reports with the values in `wrong`."""

    wrong: ClassVar[dict[str, object]] = {}

    @classmethod
    def learn_together(cls, members, learners, experience):
        reports = super().learn_together(members, learners, experience)
        return {slot: replace(report, **cls.wrong) for slot, report in reports.items()}


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 1.5), ("tokens", torch.tensor(2)), ("optimizer_steps", -1), ("failed", True)],
)
def test_reports_that_a_journal_cannot_hold_are_refused(monkeypatch, name, value):
    env = cart_pole()
    population = Reports.population(2, env.observation_space, env.action_space, group_size=4)
    collected = population.collect(env, step=0, samples_per_step=8, starts_per_step=2)
    monkeypatch.setattr(Reports, "wrong", {name: value})
    with pytest.raises(ValueError, match=f"LearnReport.{name}"):
        population.learn(collected.experience, step=0)
    monkeypatch.setattr(Reports, "wrong", {"tokens": 8.0, "optimizer_steps": np.int64(3)})
    report = population.learn(collected.experience, step=0)[0]
    assert (type(report.tokens), type(report.optimizer_steps)) == (int, int)


def test_trains_language_models():
    options = {
        name: value
        for name, value in tiny_options().items()
        if name not in Reinforce.unused_options
    }
    population = Reinforce.population(2, actor_network=shared_model(), hp_config=SPACE, **options)
    schedule = {
        "generations": 1,
        "steps_per_generation": 1,
        "samples_per_step": 8,
        "test_questions": 4,
    }
    run = evolve(population, tiny_env(), **schedule)
    assert [report.generation for report in run] == [1]
    assert run.result.test is not None


@pytest.mark.parametrize(
    "options", [{"clip_coef": 0.1}, {"hp_config": HyperparameterConfig(clip_coef=(0.1, 0.3))}]
)
def test_meaningless_settings_raise(options):
    with pytest.raises(ValueError, match="clip_coef"):
        small(2, cart_pole(), **options)
    with pytest.raises(TypeError, match="learn_together"):  # a missing learning rule
        EvolvableAlgorithm(cart_pole().observation_space, cart_pole().action_space)


class Unused(GRPO):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mine = 1

    def learn(self, experiences):
        raise NotImplementedError

    def get_action(self, states, training=None, action_mask=None):
        raise NotImplementedError


class Wrapped:
    def __init__(self, agent):
        self.agent = agent

    def predict(self, observation):
        raise NotImplementedError


def test_methods_that_evolve_does_not_call_are_named():
    env = cart_pole()
    spaces = (env.observation_space, env.action_space)
    population = Unused.population(2, *spaces, group_size=4, wrapper_cls=Wrapped)
    assert Unused(*spaces).clone().mine == 1
    names = "Unused.__init__, Unused.get_action, Unused.learn, Wrapped.predict"
    with pytest.warns(UserWarning, match=names + ".*learn_together"):
        evolve(population, env, generations=1, steps_per_generation=1, samples_per_step=8)
