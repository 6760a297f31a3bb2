"""Processes that are killed at random moments, under a launcher that starts all of them again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from evogrpo.training.saved import open_run
from tests.cli.project import write_project
from tests.processes.killing import elastic, events_in
from tests.tiny_training import nameless, story

pytestmark = pytest.mark.slow

KILLS = 5
"""Of each run: 20 in all of those that have all of a base, and 10 of one in parts."""
COMMAND = ("-m", "evogrpo", "train")
COMMANDS: dict[str, Sequence[str]] = {
    "networks": (
        *COMMAND,
        "--env",
        "CartPole-v1",
        "population.size=3",
        "schedule.generations=4",
        "schedule.steps_per_generation=4",
        "schedule.samples_per_step=16",
        "task.validation_size=8",
        "task.test_size=8",
        "task.max_episode_steps=60",
        "logging.checkpoint_steps=2",
    ),
    "language": (*COMMAND, "tiny.yaml", "population.size=3", "schedule.steps_per_generation=4"),
    "parts": (*COMMAND, "tiny.yaml", "population.size=3", "schedule.steps_per_generation=4", "base_parts=2"),
    "opened": ("program.py", "dist.init_process_group('gloo')"),
    "met": ("program.py", "processes(), Accelerator(cpu=True)"),
}
SETTINGS = {"opened": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""What a program needs that opens torch.distributed before evogrpo does; else it meets processes that were killed."""
PROGRAM = """
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator

import evogrpo
from evogrpo.processes import processes

eval(sys.argv[1])
env = evogrpo.GymnasiumGroups("CartPole-v1", max_episode_steps=60, validation_size=8, test_size=8)
begun = [Path("run/journal.jsonl").exists()]
dist.broadcast_object_list(begun)
if begun[0]:
    run = evogrpo.resume("run", env)
else:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    population = evogrpo.GRPO.population(3, **spaces, group_size=4)
    lengths = {"generations": 4, "steps_per_generation": 4, "samples_per_step": 16}
    run = evogrpo.evolve(population, env, run_dir="run", checkpoint_steps=2, **lengths)
run.finish()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both runs, which nobody disturbs, in folders beside that of what they train on."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_project(folder)
    (folder / "program.py").write_text(PROGRAM)
    folders = {kind: folder / kind for kind in COMMANDS}
    for kind, place in folders.items():
        place.mkdir()
        seen = elastic(place, words(kind, folder), settings=SETTINGS.get(kind))
        assert seen.status == 0, seen.said
    return folders


def words(kind: str, project: Path) -> list[str]:
    given = [str(project / word) if word.endswith((".yaml", ".py")) else word for word in COMMANDS[kind]]
    return given if "program.py" in COMMANDS[kind] else [*given, "--run-dir", "run"]


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_whose_processes_are_killed_ends_as_if_nobody_had(
    kind: str, seed: int, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    """Journal, learner states and best member, bit for bit, clock readings aside."""
    moments = np.sort(np.random.default_rng(seed).uniform(0, events_in(undisturbed[kind]) - 1, KILLS))
    seen = elastic(
        tmp_path, words(kind, undisturbed[kind].parent), kills=moments.tolist(), seed=seed, settings=SETTINGS.get(kind)
    )
    print(kind, seed, seen.killed)
    assert seen.status == 0, seen.said
    assert len(seen.killed) >= KILLS - 1, "kills that come when the run has ended test nothing"
    run, straight = tmp_path / "run", undisturbed[kind] / "run"
    assert story(run) == story(straight)
    ended, same = open_run(run), open_run(straight)
    assert not ended.skipped
    assert ended.tensors.keys() == same.tensors.keys()
    assert all(ended.tensors[name].equal(tensor) for name, tensor in same.tensors.items())
    assert ended.best is not None
    assert same.best is not None
    assert nameless(ended.best[1]) == nameless(same.best[1])
