"""Memory estimates and limits."""

import gymnasium
import numpy as np
import pytest

from evogrpo import GRPO, GymnasiumGroups, NetworkConfig, evolve
from evogrpo.config.agent import LanguageAgent
from evogrpo.members.devices import process_memory
from evogrpo.members.language.sizing import learning_bytes
from evogrpo.training.forecast import MemoryNeed, available_memory, check_memory
from evogrpo.training.task_types.language import peak_memory
from tests.tiny_models import tiny_model

GIGABYTE = 10**9


def limits(folder, membership, **files):
    """Write control groups and the process's membership; return `process_memory`'s arguments."""
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (folder / "membership").write_text(membership)
    return folder, folder / "membership"


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/\n", {"memory.max": GIGABYTE}),
        ("0::/a/b\n", {"a/b/memory.max": GIGABYTE, "a/memory.max": 2 * GIGABYTE}),
        ("0::/docker/x\n", {"memory.max": GIGABYTE}),
    ],
)
def test_limits_of_control_groups(tmp_path, membership, files):
    assert process_memory(*limits(tmp_path, membership, **files)) == GIGABYTE


def test_without_a_limit_the_machines_memory_counts(tmp_path):
    machine = process_memory(tmp_path, tmp_path / "missing")
    assert machine is not None
    assert machine == process_memory(*limits(tmp_path, "0::/a\n", **{"a/memory.max": "max"}))
    assert process_memory() <= machine


def test_processes_on_one_machine_share_the_memory():
    available = process_memory()
    for count, fits in ((2, True), (3, False)):
        need = MemoryNeed(
            size=available * 2 // 5, device="cpu", savings="population.size", processes=count
        )
        assert need.total == count * need.size
        if fits:
            check_memory(need)
            continue
        with pytest.raises(
            ValueError, match=r"\(3 processes, each with its own base .* start fewer processes"
        ):
            check_memory(need)


def test_too_much_memory_is_refused_unless_allowed():
    small = MemoryNeed(size=1, device="cpu", savings="population.size")
    large = MemoryNeed(size=1 << 60, device="cpu", savings="population.size")
    check_memory(small)
    assert available_memory("cpu").endswith(" GB of memory")
    with pytest.raises(
        ValueError,
        match=r"needs about 1,152,921,505 GB, .* Lower population.size, or set skip_memory_check",
    ):
        check_memory(large)


@pytest.mark.parametrize("turns", [1, 2])
def test_kept_caches_are_limited(turns):
    """Prompts of 56 tokens and 72 after them: 256 rows are sampled at once.

    Between turns, as many caches are kept.
    """
    sizes = {
        "members": 2,
        "validation": 1,
        "weights": 10,
        "precision": 4,
        "base": 0,
        "device": "cuda:0",
    }
    agent = LanguageAgent(max_output_tokens=72, max_episode_tokens=72, gradient_checkpointing=False)
    for samples, rows in ((64, 128), (10**6, 256)):
        memory = peak_memory(
            tiny_model(), agent=agent, samples=samples, turns=turns, longest_prompt=56, **sizes
        )
        bytes_per_token = 2 * 2 * (2 * 8) * 4  # layers, keys and values, their width, float32
        assert memory.sampling == (1 if turns == 1 else 3) * rows * 128 * bytes_per_token


def test_gradient_checkpointing_counts():
    """Rows of 4,096 tokens are longer than a micro-batch; they are checkpointed where needed."""
    model = tiny_model()
    plain, less = (
        learning_bytes(model, 4096, 256, 4, recompute=recompute) for recompute in (False, True)
    )
    sizes = {"members": 1, "samples": 8, "validation": 1, "weights": 10, "precision": 4}
    for setting, base, expected in (
        (True, 0, less),
        (False, 0, plain),
        ("auto", 0, plain),
        ("auto", process_memory() - plain, less),
    ):
        memory = peak_memory(
            model,
            agent=LanguageAgent(max_output_tokens=4000, gradient_checkpointing=setting),
            turns=1,
            longest_prompt=96,
            base=base,
            device="cpu",
            **sizes,
        )
        assert memory.learning == expected + 10 * 4
        assert memory.recompute == (expected == less)


class Pictures(gymnasium.Env):
    """Images, and endless episodes."""

    observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}


def test_images_of_a_batch_count():
    env = GymnasiumGroups(Pictures, max_episode_steps=10**6, validation_size=2, test_size=2)
    spaces = env.observation_space, env.action_space
    population = GRPO.population(2, *spaces, network=NetworkConfig(hidden=(4,)))
    run = {"generations": 1, "samples_per_step": 64}
    # 2 members x 64 episodes x a million steps x 12 kB, 3.5 times over
    with pytest.raises(
        ValueError, match=r"5,[56]\d\d GB.*samples_per_step.*skip_memory_check=True"
    ):
        evolve(population, env, **run)
    # Nothing is played before the first iteration.
    evolve(population, env, **run, skip_memory_check=True)
