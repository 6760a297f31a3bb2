"""Environments in processes of their own: start, order of replies, and end."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from evogrpo.envs.control.env_process import EnvProcess, EnvProcessError, env_handler
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from tests.envs.actors import play_each
from tests.envs.probes import Forks, Odd

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import gymnasium, numpy as np, torch
from gymnasium import spaces
from evogrpo import GymnasiumGroups
from evogrpo.records import SampledActions
from evogrpo.envs.control.policy_mapping import single_agent

parent = os.getpid()
torch.set_num_threads(2)
# Start torch's threads: a fork of this process would hang.
torch.ones(1_000_000).mul(2).sum()

class Mine(gymnasium.Env):
    observation_space, action_space = spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        torch.ones(1_000_000).mul(2).sum()
        print("printed by the environment")
        os.write(1, b"written by the environment")
        if os.getpid() != parent and len(sys.argv) > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(600)
        return np.ones(2, np.float32), 1.0, True, False, {}

class First:
    def act(self, seen, members, **options):
        actions = np.zeros(len(members), np.int64)
        return SampledActions(actions=actions, log_probs=np.zeros(len(members), np.float32))

gymnasium.register("Mine-v0", entry_point="__main__:Mine", max_episode_steps=5)
with GymnasiumGroups("Mine-v0", vectorization="processes", num_envs=1) as env:
    mapping = single_agent(env.observation_space, env.action_space)
    played = env.make_batch("train", [0]).play({"default": First()}, mapping, [0], [0])
    print("return", played.rewards.tolist())
"""


@pytest.fixture
def script(tmp_path):
    """A program without a main guard, which registers an environment that uses torch."""
    path = tmp_path / "program.py"
    path.write_text(SCRIPT)
    return [sys.executable, "-W", "ignore", str(path)]


def test_environments_of_a_program_that_has_used_torch_run_in_processes(script):
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert "return [1.0]" in done.stdout, done.stderr


def test_worker_processes_import_no_torch():
    """It would take most of their memory, and two seconds of each."""
    rooms = ("control.env_process", "control.reward_components", "text.reward_worker")
    imports = "; ".join(f"import evogrpo.envs.{room}" for room in rooms)
    program = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_processes_end_with_a_killed_program(script, tmp_path):
    """Also if they ignore SIGTERM and are within a step."""
    pids = tmp_path / "pids"
    program = subprocess.Popen(
        [*script, str(pids)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    program.send_signal(signal.SIGKILL)
    program.wait()
    pid = int(pids.read_text())
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_fork
@pytest.mark.parametrize("vectorization", ["serial", "processes"])
@pytest.mark.parametrize("ending", ["return", "exit", "raise"])
def test_forks_of_an_environment_neither_reply_nor_go_on(vectorization, ending, tmp_path):
    """Every episode is that of an environment that does not fork."""
    log = tmp_path / "processes"
    expected = play_each(GymnasiumGroups(lambda: Forks("")))
    with GymnasiumGroups(lambda: Forks(ending), vectorization=vectorization, num_envs=2) as env:
        played = play_each(env)
    with log.open("a") as file:
        file.write("one\n")  # a child that goes on writes a second line
    assert np.array_equal(played.observations, expected.observations)
    assert np.array_equal(played.own_rewards, expected.own_rewards)
    assert log.read_text() == "one\n"


def test_a_process_that_ignores_signals_is_killed():
    class Hangs(Odd):
        def step(self, action):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)

    process = EnvProcess(env_handler(Hangs, recreate_env=False))
    process.send("reset", (0, {}))
    process.receive()
    process.send("step", 0)
    began = time.monotonic()
    process.end()
    process.close()
    assert time.monotonic() - began < 10
    assert not process.running


def test_a_reply_to_another_request_ends_the_process():
    process = EnvProcess(env_handler(Odd, recreate_env=False))
    process.send("reset", (0, {}))
    process.send("reset", (1, {}))
    with pytest.raises(EnvProcessError, match="vectorization"):
        process.receive()
    assert not process.running
    process.close()


def test_environments_that_cannot_be_sent_are_refused():
    lock = threading.Lock()
    env = GymnasiumGroups(
        lambda: Odd(reward=1.0 if lock else 0.0), vectorization="processes", num_envs=1
    )
    with pytest.raises(ValueError, match="vectorization"):
        play_each(env, rows=1)


def test_an_environment_that_exits_is_reported():
    def leave(*_):
        sys.exit(3)

    exits = []
    env = GymnasiumGroups(
        lambda: Odd(step=leave if exits else (lambda *result: result)),
        vectorization="processes",
        num_envs=1,
    )
    exits.append(True)
    with pytest.raises(RuntimeError, match="SystemExit"):
        play_each(env, rows=1)


@pytest.mark.parametrize(
    ("vectorization", "shown_as"),
    [
        ("serial", np.asarray),
        ("serial", torch.from_numpy),
        ("serial", memoryview),
        ("processes", np.asarray),
    ],
)
def test_environments_that_share_their_arrays_change_no_record(vectorization, shown_as):
    """All environments write each observation into the same array."""
    shared = np.zeros(2, np.float32)

    class Shares(Odd):
        def observe(self):
            shared[:] = (self.steps, self.episode)
            return shown_as(shared)

        def reset(self, *, seed=None, options=None):
            self.episode = seed % 1000
            return super().reset(seed=seed)

    with GymnasiumGroups(Shares, vectorization=vectorization, num_envs=4) as env:
        played = play_each(env)
        seeds = [env.reset_seed("train", start) % 1000 for start in range(4)]
    assert played.observations[..., 0].tolist() == [[0, 1, 2]] * 4
    assert played.observations[:, 0, 1].tolist() == seeds
