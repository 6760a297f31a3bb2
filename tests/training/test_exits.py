"""User code that exits the program during a run is an error."""

import os
import subprocess
import sys

import pytest

from evogrpo import evolve
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.evolution import Tournament
from evogrpo.storage.journal import read_journal
from evogrpo.training.trainer import StrategyError
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import QUICK, tiny_env, tiny_population


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

        if where == "reward":
            env = tiny_env(reward_fn=reward)
        else:
            env = tiny_env(reward_funcs=waiting)
        population = tiny_population(2)
    else:
        env = cart_pole()
        population = step_population(2, env)
    strategy = EndingStrategy() if where == "plan" else None
    run = evolve(population, env, run_dir=folder, strategy=strategy, **QUICK)
    list(run)


@pytest.mark.parametrize(
    ("where", "error"),
    [("reward", RewardError), ("async reward", RewardError), ("plan", StrategyError)],
)
def test_an_exit_during_a_run_is_an_error_and_the_run_is_saved(where, error, tmp_path):
    with pytest.raises(error, match="SystemExit"):
        run_in(where, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "generation-0000").is_dir()
    if where != "plan":  # the plan comes after the checkpoint
        assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["event"] in (
            "run",
            "baseline",
            "step",
            "stopped",
        )


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
    ended = subprocess.run(
        command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ended.stderr.splitlines()[-1] == "RuntimeError: mine"
