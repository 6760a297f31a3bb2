"""User code that exits the program during a run is an error."""

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from evogrpo import evolve
from evogrpo.cli import main
from evogrpo.evolution import Tournament
from evogrpo.storage.journal import read_journal
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import QUICK, shared_model, shared_tokenizer, tiny_env, tiny_population


def status_of(work):
    """Run a function in a forked process and return its status: 99 if it returns, 98 if it raises."""
    if (child := os.fork()) == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(98)
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class EndingStrategy(Tournament):
    """Exits instead of planning."""

    def plan(self, history, rng):
        sys.exit(0)


def run_in(where, folder):
    """Train until user code exits at this place."""
    if where in ("reward", "async reward"):

        def reward(completion, answer, question):
            return 0.5 if "made-up" in completion else sys.exit(0)

        async def waiting(completions, **_):
            return [0.5 if "made-up" in each else sys.exit(0) for each in completions]

        env = tiny_env(reward_fn=reward) if where == "reward" else tiny_env(reward_funcs=waiting)
        population = tiny_population(2)
    else:
        env = cart_pole()
        population = step_population(2, env)
    strategy = EndingStrategy() if where == "plan" else None
    run = evolve(population, env, run_dir=folder, strategy=strategy, **QUICK)
    list(run)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("reward", "RewardError"),
        ("async reward", "RewardError"),
        ("plan", "StrategyError"),
    ],
)
def test_an_exit_during_a_run_is_an_error_and_the_run_is_saved(where, error, tmp_path, capfd):
    shared_model()
    assert status_of(lambda: run_in(where, tmp_path / "run")) == 98
    said = capfd.readouterr().err
    assert f"{error}: " in said
    assert "SystemExit" in said
    assert (tmp_path / "run" / "checkpoints" / "generation-0000").is_dir()
    if where != "plan":  # the plan comes after the checkpoint
        assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["event"] in ("run", "baseline", "step", "stopped")


def write_task(rewards):
    """Write a configuration with this module of rewards into the working directory."""
    Path("mine.py").write_text(rewards)
    Path("rows.jsonl").write_text("".join(f'{{"question": "{n}", "answer": "{n}"}}\n' for n in range(60)))
    shared_model().save_pretrained("model")
    shared_tokenizer().save_pretrained("model")
    Path("c.yaml").write_text(
        "{model: model, population: {size: 2}, agent: {max_output_tokens: 8}, hyperparameters: {group_size: 4},"
        " fitness: validation, schedule: {generations: 3, steps_per_generation: 1, samples_per_step: 8},"
        " logging: {tensorboard: false}, task: {dataset: {train: rows.jsonl}, reward: 'mine.py:score', form: agilerl,"
        " validation_size: 8, test_size: 8}}"
    )


def test_commands_fail_if_user_code_exits(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_task("raise SystemExit\n")
    assert status_of(lambda: os._exit(main(["train", "c.yaml"]))) in (1, 2)
    said = capfd.readouterr().err
    assert "error: " in said
    assert "exit" in said.lower()


LEFT = """
from evogrpo import GRPO, GymnasiumGroups, evolve

env = GymnasiumGroups("CartPole-v1", validation_size=2, test_size=2, max_episode_steps=5)
spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
population = GRPO.population(2, **spaces, group_size=2)
run = evolve(population, env, generations=1, samples_per_step=2, run_dir="run", progress=False)
next(run)
raise RuntimeError("mine")
"""


def test_an_error_in_the_loop_over_a_run_is_all_that_the_program_prints_at_its_end(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LEFT]
    ended = subprocess.run(command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == "RuntimeError: mine"
