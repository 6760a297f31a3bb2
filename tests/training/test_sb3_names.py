"""Runs of small networks under the log names of Stable-Baselines3: what each means, and that counters survive."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evogrpo import evolve
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.history.steps import StepReport
from evogrpo.persistence.journal import read_journal
from evogrpo.training.loop.progress import Progress
from evogrpo.training.loop.reports.sb3_names import SB3_NAMES, names_of
from tests.envs import joint_probes
from tests.tiny_steps import QUICK, cart_pole, resumed_step_run, step_population, step_run
from tests.tiny_training import finish
from tests.training.test_multi_agent_runs import environment, members

MEASURED = {
    "reward": 21.5,
    "completions/mean_length": 20.0,
    "approx_kl": 0.01,
    "clip_fraction": 0.125,
    "entropy": 0.6,
    "learning_rate": 3e-3,
    "loss": -0.02,
    "grad_norm": 0.5,
}
COUNTED = {"iterations": 3, "seconds": 2.5, "timesteps": 1000, "epochs": 12}
RUN_NAMES = set(SB3_NAMES)


def test_what_each_name_means():
    named = names_of(MEASURED, Hyperparameters(clip_coef=0.3), **COUNTED)
    assert set(named) == RUN_NAMES
    assert named == {
        "rollout/ep_rew_mean": 21.5,
        "rollout/ep_len_mean": 20.0,
        "train/approx_kl": 0.01,
        "train/clip_fraction": 0.125,
        "train/clip_range": 0.3,
        "train/entropy_loss": -0.6,
        "train/learning_rate": 3e-3,
        "train/loss": -0.02,
        "train/policy_gradient_loss": -0.02,
        "train/n_updates": 12,
        "time/iterations": 3,
        "time/time_elapsed": 2,
        "time/total_timesteps": 1000,
        "time/fps": 400,
    }


@pytest.mark.parametrize(
    ("measured", "choices", "counted", "missing"),
    [
        ({"entropy": None}, {}, {}, {"train/entropy_loss"}),
        ({"reward": None, "approx_kl": None}, {}, {}, {"rollout/ep_rew_mean", "train/approx_kl"}),
        ({}, {"clip_high": 0.5}, {}, {"train/clip_range"}),
        ({}, {"entropy_coef": 0.01}, {}, {"train/policy_gradient_loss"}),
        ({}, {"beta": 0.01}, {}, {"train/policy_gradient_loss"}),
        ({}, {}, {"timesteps": None, "epochs": None}, {"time/total_timesteps", "time/fps", "train/n_updates"}),
    ],
)
def test_what_has_no_meaning_is_missing(measured, choices, counted, missing):
    names = names_of(MEASURED | measured, Hyperparameters(**choices), **COUNTED | counted)
    assert RUN_NAMES - set(names) == missing


def steps_of(folder):
    return [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "step"]


def check_counters(folder):
    """Compare a journal's counters with sums over what its steps measured: 8 episodes each, 2 passes over them."""
    timesteps, seconds = {}, 0.0
    events = steps_of(folder)
    assert len(events) == QUICK["generations"] * QUICK["steps_per_generation"]
    for number, event in enumerate(events, 1):
        seconds += event["seconds"]
        for member in event["members"]:
            slot = member["slot"]
            timesteps[slot] = timesteps.get(slot, 0) + round(8 * member["completions/mean_length"])
            assert member["time/total_timesteps"] == timesteps[slot] < member["num_tokens"]
            assert (member["time/iterations"], member["train/n_updates"]) == (number, 2 * number)
            assert member["time/time_elapsed"] >= int(seconds)  # evaluations take their time as well
            assert 0 < member["time/fps"] <= timesteps[slot] / seconds


def test_a_journal_has_every_name_beside_the_others(tmp_path):
    finish(step_run(tmp_path / "run"))
    check_counters(tmp_path / "run")
    for event in steps_of(tmp_path / "run"):
        for member in event["members"]:
            assert member.keys() >= RUN_NAMES
            assert member["rollout/ep_rew_mean"] == member["reward"] == member["rollout/ep_len_mean"]  # of CartPole
            assert member["train/entropy_loss"] == -member["entropy"]
            assert member["train/clip_range"] > 0


def test_counters_go_on_in_a_resumed_run(tmp_path):
    run = step_run(tmp_path / "run")
    for report in run.reports():
        if isinstance(report, StepReport) and report.step == 2:
            run.stop()
    finish(resumed_step_run(tmp_path / "run"))
    check_counters(tmp_path / "run")


def test_a_run_that_an_earlier_version_began_goes_on_without_what_was_not_counted():
    saved = Progress(members=2).to_json()
    del saved["slot_timesteps"], saved["slot_epochs"]
    progress = Progress.from_json(saved)
    progress.add_step(1.0, {0: 5, 1: 7}, {}, timesteps={0: 2, 1: 3}, epochs={0: 1, 1: 1}, earned={})
    assert progress.slot_tokens == [5, 7]
    run = step_run(None)
    run.progress.slot_timesteps, run.progress.slot_epochs = [], []
    assert isinstance(next(run.reports()), StepReport)


def test_several_agents_have_the_names_too(tmp_path):
    env = environment(joint_probes.Favours)
    for _ in evolve(members(env, update_epochs=2), env, run_dir=tmp_path / "run", **QUICK | {"generations": 1}):
        pass
    for number, event in enumerate(steps_of(tmp_path / "run"), 1):
        for member in event["members"]:
            assert member.keys() >= RUN_NAMES
            assert (member["time/iterations"], member["train/n_updates"]) == (number, 2 * number)
            assert 0 < member["time/total_timesteps"] < member["num_tokens"]


def test_tensorboard_shows_the_names(tmp_path):
    env = cart_pole()
    for _ in evolve(step_population(2, env), env, run_dir=tmp_path / "run", **QUICK | {"generations": 1}):
        pass
    logs = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    logs.Reload()
    assert {f"{name}/slot_{slot}" for name in RUN_NAMES for slot in range(2)} <= set(logs.Tags()["scalars"])
    written = [event["members"][1]["time/total_timesteps"] for event in steps_of(tmp_path / "run")]
    assert [each.value for each in logs.Scalars("time/total_timesteps/slot_1")] == written
