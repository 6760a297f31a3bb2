"""Damaged, incompatible and forged checkpoints raise CheckpointError quickly and change nothing."""

import json
import resource
import shutil
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from safetensors.torch import load_file, save

import evogrpo
from benchmarking.soaking.forging import forged, put_bytes, put_in
from evogrpo import GRPO, Objective
from evogrpo.algorithms.checkpointing import population_state
from evogrpo.randomness import generator
from evogrpo.storage.checkpoint import (
    CheckpointError,
    generation_folder,
    stored_generations,
    write_checkpoint,
)
from evogrpo.validation import dump
from tests.tiny_batches import lora
from tests.tiny_models import tiny_model
from tests.tiny_steps import cart_pole, step_agent, step_population
from tests.tiny_teams import team_population
from tests.tiny_training import (
    SPACE,
    equal_states,
    learn_fixed_batch,
    random_agent,
    shared_model,
    tiny_agent,
    tiny_env,
    tiny_population,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a saved, trained agent."""
    agent = random_agent(hp_config=SPACE, beta=0.25)
    learn_fixed_batch(agent)
    folder = tmp_path_factory.mktemp("saved") / "agent"
    agent.save_checkpoint(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "agent"))


def edit(folder: Path, change, name: str = "agent.json") -> None:
    """Change a record of a checkpoint, with a manifest that matches."""
    record = json.loads((folder / name).read_text())
    change(record)
    put_in(folder, name, record)


def shorten(folder: Path) -> None:
    tensors = load_file(folder / "agent.safetensors")
    put_bytes(
        folder, "agent.safetensors", save(tensors | {"adapter": tensors["adapter"][:-1].clone()})
    )


def unchanged_by(load, agent, rule):
    """Check that loading into an agent raises and changes nothing."""
    state = agent.state()
    attributes = GRPO.inspect_attributes(agent)
    with pytest.raises(CheckpointError, match=rule):
        load()
    assert equal_states(agent.state(), state)
    assert GRPO.inspect_attributes(agent) == attributes


DAMAGES = {
    "another base": (
        lambda folder: edit(folder, lambda r: r["shared"].update(fingerprint="0" * 32)),
        "agent",
    ),
    "shorter tensors": (shorten, "agent"),
    "missing": (shutil.rmtree, "agent"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_raises_and_changes_nothing(copy, case):
    damage, rule = DAMAGES[case]
    damage(copy)
    agent = tiny_agent(lr=2e-2, hp_config=SPACE)
    unchanged_by(lambda: agent.load_checkpoint(copy), agent, rule)
    with pytest.raises(CheckpointError, match=rule):
        GRPO.load(copy, actor_network=shared_model())


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"actor_network": tiny_model(seed=1)}, "fingerprint"),
        *(
            ({"lora_config": lora(**change)}, "lora_config")
            for change in ({"r": 4}, {"lora_alpha": 60}, {"target_modules": ["q_proj"]})
        ),
    ],
)
def test_checkpoints_of_other_members_raise_and_change_nothing(saved, options, rule):
    agent = tiny_agent(**options)
    unchanged_by(lambda: agent.load_checkpoint(saved), agent, rule)


def test_hyperparameters_that_only_fit_the_stored_objective(tmp_path):
    # Objective.delta must exceed 1 + clip_coef, so this one does not fit the default clip_coef of
    # 0.2.
    agent = step_agent(objective=Objective(loss_type="dapo", delta=1.15), clip_coef=0.1)
    agent.save_checkpoint(tmp_path / "agent")
    assert GRPO.load(tmp_path / "agent").clip_coef == 0.1
    step_agent().save_checkpoint(tmp_path / "default")
    unchanged_by(lambda: agent.load_checkpoint(tmp_path / "default"), agent, "delta")


def test_a_member_that_loads_a_checkpoint_keeps_its_identity(tmp_path):
    agent = step_agent(index=7, lr=2e-3)
    agent.steps = 5
    agent.born = 4
    agent.parent = 3
    agent.save_checkpoint(tmp_path / "agent")
    assert (GRPO.load(tmp_path / "agent").index, GRPO.load(tmp_path / "agent").born) == (7, 4)
    population = step_population(2)
    population[1].load_checkpoint(tmp_path / "agent")
    assert [(member.index, member.parent, member.born) for member in population] == [
        (0, None, 0),
        (1, None, 0),
    ]
    assert (population[1].lr, population[1].steps) == (2e-3, 5)
    assert equal_states(population[1].state(), agent.state())


def test_spaces_of_a_language_model_are_stored_if_a_checkpoint_can_store_them(tmp_path):
    tokens = spaces.Sequence(spaces.Discrete(64))
    tiny_agent(observation_space=spaces.Text(9), action_space=tokens).save_checkpoint(
        tmp_path / "agent"
    )
    loaded = GRPO.load(tmp_path / "agent", actor_network=shared_model())
    assert (loaded.observation_space, loaded.action_space) == (None, tokens)


def test_another_base_or_a_population_raises(saved, tmp_path):
    for other in (tiny_model(seed=1), tiny_model("qwen3")):
        with pytest.raises(CheckpointError, match="same base model"):
            GRPO.load(saved, actor_network=other)
    tensors, record = population_state(tiny_population(2))
    write_checkpoint(tmp_path / "population", tensors, dump(record))
    with pytest.raises(CheckpointError, match="kind 'population'"):
        GRPO.load(tmp_path / "population", actor_network=shared_model())


def test_an_adapter_without_a_record_raises(copy):
    (copy / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"PEFT adapter .*adapter="):
        GRPO.load(copy, actor_network=shared_model())


def test_a_path_in_a_checkpoint_is_never_followed(copy, tmp_path, monkeypatch):
    shared_model().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (str(tmp_path / "base"), "base", "~/base", "elsewhere/model.gguf"):
        edit(copy, lambda record, source=source: record["shared"].update(source=source))
        with pytest.raises(ValueError, match=r"not opened.*actor_network="):
            GRPO.load(copy)
    loaded = GRPO.load(copy, actor_network=shared_model())
    assert equal_states(loaded.state(), load_file(copy / "agent.safetensors"))


def test_a_path_in_the_home_directory_is_saved_and_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    agent = step_agent(seed=1)
    agent.save_checkpoint("~/agent")
    assert equal_states(GRPO.load("~/agent").state(), agent.state())
    other = step_agent(seed=1, lr=0.5)
    other.load_checkpoint("~/agent")
    assert other.hyperparameters == agent.hyperparameters


def test_the_source_is_stored_as_named_by_the_user(tmp_path):
    tiny_agent(source="someone/some-model").save_checkpoint(tmp_path / "agent")
    assert (
        json.loads((tmp_path / "agent" / "agent.json").read_text())["shared"]["source"]
        == "someone/some-model"
    )
    assert (
        GRPO.load(tmp_path / "agent", actor_network=shared_model()).members.source
        == "someone/some-model"
    )


def made(kind):
    """Return an agent of a kind."""
    if kind == "mixed":
        image = spaces.Box(0, 255, (8, 8, 1), np.uint8)
        observed = spaces.Dict(b=spaces.MultiBinary(3), d=spaces.MultiDiscrete([3, 4]), i=image)
        return GRPO(observation_space=observed, action_space=spaces.MultiDiscrete([2, 3]))
    return {"networks": step_agent, "joint": lambda: team_population(1)[0], "language": tiny_agent}[
        kind
    ]()


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Return an agent of every kind with its folder."""
    folder = tmp_path_factory.mktemp("agents")
    found = {}
    for kind in ("networks", "joint", "language", "mixed"):
        found[kind] = made(kind), folder / kind
        found[kind][0].save_checkpoint(folder / kind)
    return found


def raises_checkpoint_error(load):
    """Return True if loading raises a CheckpointError; other exceptions fail the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load()
        except CheckpointError:
            return True
    return False


@pytest.mark.parametrize(("kind", "number"), [("networks", 20), ("joint", 20), ("language", 4)])
def test_forged_agent_records_raise_or_load(agents, kind, number, tmp_path):
    agent, original = agents[kind]
    record = json.loads((original / "agent.json").read_text())
    folder = Path(shutil.copytree(original, tmp_path / "agent"))
    refused = 0
    for each in range(number):
        put_in(folder, "agent.json", forged(record, generator(each, f"forge {kind}"))[0])
        load = partial(agent.load, actor_network=shared_model() if kind == "language" else None)
        refused += sum(
            raises_checkpoint_error(partial(each, folder)) for each in (load, agent.load_checkpoint)
        )
    assert refused >= number / 2


def with_newest_only(original, folder):
    """Copy a run without older checkpoints; return its folder and that of the newest checkpoint."""
    shutil.copytree(original, folder)
    newest, *older = (generation_folder(folder, number) for number in stored_generations(folder))
    for each in older:
        shutil.rmtree(each)
    return folder, newest


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), [("networks", 8), ("language", 4)])
def test_forged_run_records_raise_or_resume(
    stored_network_run, stored_language_run, kind, number, tmp_path
):
    given = {"env": tiny_env(), "actor_network": tiny_model()}
    original = stored_language_run.folder
    if kind == "networks":
        given = {"env": cart_pole()}
        original = stored_network_run.folder
    outcomes = []
    for each in range(number):
        folder, newest = with_newest_only(original, tmp_path / str(each))
        record = json.loads((newest / "population.json").read_text())
        put_in(newest, "population.json", forged(record, generator(each, f"forge {kind}"))[0])
        run = partial(
            evogrpo.resume, folder, generations=4, progress=False, test_questions=0, **given
        )
        outcomes.append(raises_checkpoint_error(lambda run=run: list(run())))
    assert sum(outcomes) > 0  # some of them raise


def test_invalid_tensors_raise(stored_network_run, tmp_path):
    """Of members and of the best one."""
    folder, newest = with_newest_only(stored_network_run.folder, tmp_path / "run")
    tensors = load_file(newest / "population.safetensors")
    firsts = {name.split(" ")[0]: name for name in sorted(tensors) if name.endswith("weights")}
    assert sorted(firsts) == ["0.weights", "1.weights", "2.weights", "best:"]
    wrong = [None, lambda t: t[: len(t) // 2].clone(), lambda t: t.double(), lambda t: t[0].clone()]
    for name in firsts.values():
        for change in wrong:
            others = {each: tensor for each, tensor in tensors.items() if each != name}
            changed = {} if change is None else {name: change(tensors[name])}
            put_bytes(newest, "population.safetensors", save(others | changed))
            with pytest.raises(CheckpointError):
                evogrpo.resume(folder, env=cart_pole(), progress=False)


SPACES = ("shared", "observation_spaces", 0, 1)
NETWORK = ("shared", "settings", "network")
SIZES = [
    ("networks", (*SPACES, "shape"), lambda n: [n]),
    ("networks", (*SPACES, "shape"), lambda n: [n, n]),
    ("networks", ("shared", "action_spaces", 0, 1, "n"), lambda n: n),
    ("networks", (*NETWORK, "hidden"), lambda n: [n, n]),
    ("networks", (*NETWORK, "hidden"), lambda n: [min(n, 65_536)] * 8),
    ("mixed", (*SPACES, "parts", 0, 1, "n"), lambda n: n),
    ("mixed", (*SPACES, "parts", 1, 1, "nvec"), lambda n: [n, n]),
    ("mixed", (*SPACES, "parts", 2, 1, "shape"), lambda n: [n, n, 3]),
    ("mixed", ("shared", "action_spaces", 0, 1, "nvec"), lambda n: [n, n]),
    ("mixed", (*NETWORK, "convolutions"), lambda n: [[n, 3, 1], [n, 3, 1]]),
    ("language", ("shared", "lora_config", "r"), lambda n: n),
]


def test_declared_sizes_are_checked_before_allocation(agents, tmp_path):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    for number, (kind, keys, value_of) in enumerate(SIZES):
        agent, original = agents[kind]
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        record = json.loads((folder / "agent.json").read_text())
        parent = record
        for key in keys[:-1]:
            parent = parent[key]
        assert keys[-1] in parent
        parent[keys[-1]] = value_of((2**20, 2**62)[number % 2])
        put_in(folder, "agent.json", record)
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
        try:
            with pytest.raises(CheckpointError) as refused:
                type(agent).load(
                    folder, actor_network=shared_model() if kind == "language" else None
                )
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert "memory" not in str(refused.value), (kind, keys)  # not an allocation error
