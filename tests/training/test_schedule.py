"""Schedules: validation, group sizes, ineffective hyperparameters, limits in steps."""

import warnings

import pytest
from rich.console import Console

from evogrpo import HyperparameterConfig, Objective, RLParameter, evolve
from evogrpo.cli.main import main
from evogrpo.evolution.strategies import Fixed, Narrowing, RandomSearch
from evogrpo.reporting.records import GenerationReport, StepReport, TestReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.display import RunDisplay
from evogrpo.training.schedule import Schedule, warn_without_effect
from tests.tiny_steps import QUICK, cart_pole, step_population, step_run
from tests.tiny_training import finish, tiny_env, tiny_population


@pytest.mark.parametrize(
    ("group_size", "space", "expected"),
    [
        (8, {}, 4),
        (8, {"group_size": RLParameter(choices=[4, 16])}, 8),
        (
            2,
            {"group_size": RLParameter(choices=[4, 16])},
            16,
        ),  # a member outside the search space counts
        (
            8,
            {"group_size": RLParameter(min=3, max=20)},
            8,
        ),  # 4 is the smallest divisor of 32 in the range
    ],
)
def test_the_block_holds_the_questions_of_the_smallest_group_size(group_size, space, expected):
    hp_config = HyperparameterConfig(**space) if space else None
    population = tiny_population(2, group_size=4, hp_config=hp_config, samples_per_step=32)
    population[0].group_size = group_size
    population[1].group_size = 16
    assert Schedule(generations=1, samples_per_step=32).starts_per_step(population) == expected


CLIP = {"clip_coef": RLParameter(min=0.1, max=0.3)}


@pytest.mark.parametrize(
    ("options", "space", "neutral"),
    [
        ({}, CLIP, ["clip_coef"]),
        ({"batch_size": 63}, CLIP, []),
        ({"update_epochs": 2}, CLIP, []),
        ({}, CLIP | {"update_epochs": RLParameter(choices=[1, 2])}, []),
        ({}, CLIP | {"batch_size": RLParameter(choices=[32, 64])}, []),
        ({}, CLIP | {"batch_size": RLParameter(choices=[64, 128])}, ["clip_coef", "batch_size"]),
        ({}, {"lr": RLParameter(min=1e-4, max=1e-3)}, []),
    ],
)
def test_evolving_hyperparameters_without_effect_warn(options, space, neutral):
    population = tiny_population(2, hp_config=HyperparameterConfig(**space), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_without_effect(population, Schedule(generations=1, samples_per_step=64))
    assert [
        str(each.message).split()[0]
        for each in caught
        if "evolves without effect" in str(each.message)
    ] == neutral


CLIPS_SET = {"clip_low": 0.1, "clip_high": 0.3}
RATES = HyperparameterConfig(lr=RLParameter(min=1e-4, max=1e-3))
WIDE = HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))


@pytest.mark.parametrize(
    ("size", "options", "strategy", "named"),
    [
        (1, {"hp_config": RATES}, None, ["search space (lr stays 0.001)"]),
        (1, {}, Narrowing(), ["strategy Narrowing"]),
        (1, {"hp_config": RATES}, RandomSearch(), ["lr stays 0.001", "strategy RandomSearch"]),
        (1, {"lr": 0.2, "target_kl": 0.03}, None, ["lr=0.2", "target_kl=0.03"]),
        (2, {}, None, ["same hyperparameters"]),
        (2, {"hp_config": WIDE}, None, ["lr evolves from 1e-05 to 0.001 on a linear scale"]),
        (1, {"clip_coef": 0.1}, None, ["clip_coef has no effect"]),
        (1, {"beta": 0.1, "objective": Objective(reference="old")}, None, ["beta has no effect"]),
        (
            1,
            CLIPS_SET | {"update_epochs": 2, "loss_type": "sapo"},
            None,
            ["clip_low has no", "clip_high has no"],
        ),
        (2, {"hp_config": RATES}, Narrowing(), []),
        (1, {}, None, []),
        (1, {"lr": 1e-4, "target_kl": 0.03}, Fixed(), []),
        (1, {"lr": 0.2}, None, []),
        (1, {"clip_coef": 0.1, "update_epochs": 2}, None, []),
    ],
)
def test_settings_without_effect_warn_once(size, options, strategy, named):
    population = tiny_population(size, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = evolve(population, tiny_env(), generations=1, samples_per_step=8, strategy=strategy)
    assert run.population is population
    messages = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    text = " ".join(messages)
    assert all(text.count(name) == 1 for name in named)
    assert bool(messages) == bool(named)


def test_explicit_sizes_beyond_the_held_out_questions_warn():
    env = cart_pole(validation_size=4, test_size=2)
    with pytest.warns(
        UserWarning, match="validation_questions=5 exceeds the validation split. All 4 "
    ):
        evolve(step_population(2, env), env, generations=1, validation_questions=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = evolve(
            step_population(1, env), env, generations=1, validation_questions=4, test_questions=2
        )
    assert len(run.population) == 1


def played(run):
    """Return the number of steps after each learning step, from the lengths of episodes."""
    total = 0.0
    counted = []
    for report in run.reports():
        if isinstance(report, StepReport):
            lengths = [
                member.metrics["completions/mean_length"] for member in report.learned.values()
            ]
            total += QUICK["samples_per_step"] * sum(lengths)
            counted.append(round(total))
    return counted


def test_a_run_ends_with_the_step_that_reaches_the_limit():
    timesteps = played(step_run(None))
    for budget, steps in ((timesteps[2], 3), (timesteps[2] + 1, 4)):
        run = step_run(None, generations=None, max_timesteps=budget)
        reports = finish(run)
        assert sum(isinstance(report, StepReport) for report in reports) == steps
        assert isinstance(reports[-2], GenerationReport)  # every trained generation is evaluated
        assert isinstance(reports[-1], TestReport)
        assert (
            run.result.timesteps
            == reports[-2].timesteps
            == timesteps[steps - 1]
            < run.result.tokens
        )
        assert run.result.complete
        assert run.result.reason == f"max_timesteps {budget:,} reached"
        assert RunDisplay(Console(), run).fraction() == 1.0


@pytest.mark.usefixtures("without_charts")
def test_a_resumed_run_counts_earlier_steps_and_may_raise_the_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (
        "schedule.samples_per_step=8 schedule.steps_per_generation=1 population.size=2"
        " task.validation_size=2"
    )
    words += (
        " hyperparameters.group_size=4 schedule.test_questions=0 task.max_episode_steps=20"
        " schedule.generations=null"
    )
    words += " schedule.max_timesteps=20 fitness=validation"
    assert main(["train", "--env", "CartPole-v1", "--run-dir", "run", *words.split()]) == 0
    assert "max_timesteps=null" in capsys.readouterr().out  # otherwise the run would end at once
    assert main(["resume", "run"]) == 0
    assert "max_timesteps 20 reached" in capsys.readouterr().out
    assert main(["resume", "run", "max_timesteps=400"]) == 0
    shown = capsys.readouterr().out
    generations = [
        event
        for event in read_journal(tmp_path / "run" / "journal.jsonl")
        if event["event"] == "generation"
    ]
    counts = [event["timesteps"] for event in generations]
    assert counts[-2] < 400 <= counts[-1]
    assert f"{counts[-1]} environment steps" in shown
