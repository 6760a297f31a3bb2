"""Runs whose ranks are killed at random moments under `torchrun --max-restarts`.

The series makes 25 kills. It starts torchrun 10 times and two processes 35 times, which takes 12 minutes on two busy
cores.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from evogrpo.storage.checkpoint import read_checkpoint
from evogrpo.training.run_dir import open_run
from tests.cli.project import write_project
from tests.distributed.killing import Pace, elastic, events_in
from tests.tiny_training import events_of, without_run_id

pytestmark = pytest.mark.slow

KILLS = 5
"""Kills of each run."""
COMMAND = ("-m", "evogrpo", "train")
LONGER = ("schedule.steps_per_generation=8", "schedule.samples_per_step=32", "agent.max_output_tokens=32")
"""Length at which a run takes some seconds, so that kills fall into it."""
COMMANDS: dict[str, Sequence[str]] = {
    "networks": (
        *COMMAND,
        "--env",
        "CartPole-v1",
        "population.size=3",
        "schedule.generations=4",
        "schedule.steps_per_generation=8",
        "schedule.samples_per_step=64",
        "task.validation_size=8",
        "task.test_size=8",
        "task.max_episode_steps=200",
        "logging.checkpoint_steps=2",
    ),
    "language": (*COMMAND, "tiny.yaml", "population.size=3", *LONGER),
    "parts": (*COMMAND, "tiny.yaml", "population.size=3", *LONGER, "base_parts=2"),
    "opened": ("program.py", "dist.init_process_group('gloo')"),
    "met": ("program.py", "processes(), Accelerator(cpu=True)"),
}
SETTINGS = {"opened": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Environment of programs that initialise torch.distributed themselves; they would connect to killed processes."""
PROGRAM = """
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator

import evogrpo
from evogrpo.distributed import processes

eval(sys.argv[1])
env = evogrpo.GymnasiumGroups("CartPole-v1", max_episode_steps=200, validation_size=8, test_size=8)
begun = [any(Path("run/checkpoints").glob("generation-*"))]
dist.broadcast_object_list(begun)
if begun[0]:
    run = evogrpo.resume("run", env)
else:
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    population = evogrpo.GRPO.population(3, **spaces, group_size=4)
    lengths = {"generations": 4, "steps_per_generation": 8, "samples_per_step": 64}
    run = evogrpo.evolve(population, env, run_dir="run", checkpoint_steps=2, **lengths)
run.finish()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Pace]]:
    """All runs without kills: their folders and speeds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_project(folder)
    (folder / "program.py").write_text(PROGRAM)
    found = {}
    for kind in COMMANDS:
        place = folder / kind
        place.mkdir()
        seen = elastic(place, words(kind, folder), settings=SETTINGS.get(kind))
        assert seen.status == 0, seen.said
        found[kind] = place, seen.pace
    return found


def words(kind: str, project: Path) -> list[str]:
    given = [str(project / word) if word.endswith((".yaml", ".py")) else word for word in COMMANDS[kind]]
    return given if "program.py" in COMMANDS[kind] else [*given, "--run-dir", "run"]


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_run_with_killed_ranks_ends_like_an_undisturbed_one(
    kind: str, undisturbed: dict[str, tuple[Path, Pace]], tmp_path: Path
) -> None:
    """Journal, train states and best member are bit-equal, apart from clock readings."""
    place, pace = undisturbed[kind]
    moments = np.sort(np.random.default_rng(0).uniform(0, events_in(place) - 1, KILLS))
    seen = elastic(
        tmp_path,
        words(kind, place.parent),
        kills=moments.tolist(),
        pace=pace,
        settings=SETTINGS.get(kind),
    )
    print(kind, seen.killed)
    assert seen.status == 0, seen.said
    assert len(seen.killed) >= KILLS - 1, "kills that come when the run has ended test nothing"
    run, straight = tmp_path / "run", place / "run"
    assert events_of(run) == events_of(straight)
    ended, same = open_run(run), open_run(straight)
    assert not ended.skipped
    assert ended.tensors.keys() == same.tensors.keys()
    assert all(ended.tensors[name].equal(tensor) for name, tensor in same.tensors.items())
    (_, one), (_, other) = (read_checkpoint(folder / "best", kind="agent") for folder in (run, straight))
    assert without_run_id(one) == without_run_id(other)
