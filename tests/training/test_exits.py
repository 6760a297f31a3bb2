"""User code that exits the program during a run is an error."""

import os
import subprocess
import sys

import gymnasium
import pytest

from evogrpo import Callback, evolve
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


class EndingCallback(Callback):
    """Exits after the first step."""

    def on_step(self, report):
        sys.exit(0)


class EndingEnvironment(gymnasium.Wrapper):
    """Exits in its constructor, or in a step after the check by random play."""

    def __init__(self, env, where, calls):
        super().__init__(env)
        self.where = where
        self.calls = calls
        if where == "constructor":
            sys.exit(0)

    def step(self, action):
        self.calls.append(action)
        if self.where == "step" and len(self.calls) == 300:
            sys.exit(0)
        return self.env.step(action)


def run_in(where, folder):
    """Train until user code exits at this place."""
    env = tiny_env() if "reward" in where else cart_pole()
    if where == "reward":

        def reward(completion, answer, question):
            return 0.5 if "made-up" in completion else sys.exit(0)

        env = tiny_env(reward_fn=reward)
    elif where == "async reward":

        async def waiting(completions, **_):
            return [0.5 if "made-up" in each else sys.exit(0) for each in completions]

        env = tiny_env(reward_funcs=waiting)
    elif where in ("constructor", "step"):
        calls = []
        env = cart_pole(wrappers=[lambda inner: EndingEnvironment(inner, where, calls)])
    elif where == "component":
        env = cart_pole(rewards={"far": lambda *_: sys.exit(0)})
    population = tiny_population(2) if "reward" in where else step_population(2, env)
    strategy = EndingStrategy() if where == "plan" else None
    callbacks = [EndingCallback()] if where == "on_step" else []
    options = {**QUICK, "strategy": strategy, "callbacks": callbacks, "trackers": ()}
    list(evolve(population, env, run_dir=folder, **options))


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("reward", RewardError),
        ("async reward", RewardError),
        ("plan", StrategyError),
        ("on_step", RuntimeError),
        ("step", RuntimeError),
    ],
)
def test_an_exit_during_a_run_is_an_error_and_the_run_is_saved(where, error, tmp_path):
    with pytest.raises(error, match="SystemExit"):
        run_in(where, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "generation-0000").is_dir()
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["event"] != "ended"


@pytest.mark.parametrize(
    ("where", "error"), [("constructor", RuntimeError), ("component", ValueError)]
)
def test_an_exit_while_an_environment_is_checked_is_an_error(where, error):
    with pytest.raises(error, match="SystemExit"):
        run_in(where, None)


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
