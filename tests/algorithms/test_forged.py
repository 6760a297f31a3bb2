"""Forged checkpoints with valid hashes raise CheckpointError quickly."""

import json
import resource
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from safetensors.torch import load_file, save

import evogrpo
from benchmarking.soaking.forging import forged, put_bytes, put_in
from evogrpo import GRPO, MultiAgentGRPO, Tournament
from evogrpo.cli import main
from evogrpo.randomness import generator
from evogrpo.storage.checkpoint import CheckpointError, generation_folder
from tests.envs import joint_probes
from tests.tiny_models import tiny_model
from tests.tiny_steps import cart_pole, step_agent, step_run
from tests.tiny_training import finish, tiny_agent, tiny_env, tiny_run


def team():
    env = evogrpo.PettingZooGroups(joint_probes.Favours, validation_size=20, test_size=20, score="sum")
    return MultiAgentGRPO(env.observation_spaces, env.action_spaces)


def mixed():
    observed = spaces.Dict(
        b=spaces.MultiBinary(3), d=spaces.MultiDiscrete([3, 4]), i=spaces.Box(0, 255, (8, 8, 1), np.uint8)
    )
    return GRPO(observation_space=observed, action_space=spaces.MultiDiscrete([2, 3]))


MAKE = {"networks": step_agent, "joint": team, "language": tiny_agent, "mixed": mixed}


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Return a function that saves an agent of a kind once and returns it with its folder."""
    made = {}

    def agent(kind):
        if kind not in made:
            made[kind] = MAKE[kind](), tmp_path_factory.mktemp(kind) / "agent"
            base = {"include_base": True} if kind == "language" else {}
            made[kind][0].save_checkpoint(made[kind][1], **base)
        return made[kind]

    return agent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return run directories whose checkpoints hold finalists and births."""
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in ("networks", "language")}
    way = {"fitness": {"second_set": 4, "finalists": 2}, "env": cart_pole(validation_size=10), "generations": 2}
    finish(step_run(folders["networks"], strategy=Tournament(z=0.0), **way))
    finish(tiny_run(folders["language"], generations=2))
    return folders


def raises_checkpoint_error(load):
    """Return True if loading raises a CheckpointError; other exceptions fail the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load()
        except CheckpointError:
            return True
    return False


@pytest.mark.parametrize(("kind", "number"), [("networks", 40), ("joint", 40), ("language", 6)])
def test_forged_agent_records_raise_or_load(agents, kind, number, tmp_path):
    agent, original = agents(kind)
    record = json.loads((original / "agent.json").read_text())
    folder = Path(shutil.copytree(original, tmp_path / "agent"))
    refused = 0
    for each in range(number):
        forgery, _ = forged(record, generator(each, f"forge {kind}"))
        put_in(folder, "agent.json", forgery)
        for load in (type(agent).load, agent.load_checkpoint):
            refused += raises_checkpoint_error(lambda load=load: load(folder))
    assert refused >= number / 2


@pytest.mark.parametrize(("kind", "number"), [("networks", 8), ("language", 4)])
def test_forged_run_records_raise_or_resume(runs, kind, number, tmp_path):
    given = {"env": tiny_env(), "actor_network": tiny_model()}
    if kind == "networks":
        given = {"env": cart_pole(validation_size=10)}
    folder = Path(shutil.copytree(runs[kind], tmp_path / "run"))
    shutil.rmtree(generation_folder(folder, 1))
    newest = generation_folder(folder, 2)
    record = json.loads((newest / "population.json").read_text())
    outcomes = []
    for each in range(number):
        work = Path(shutil.copytree(folder, tmp_path / str(each)))
        forgery, _ = forged(record, generator(each, f"forge {kind}"))
        put_in(generation_folder(work, 2), "population.json", forgery)

        def go_on(work=work):
            list(evogrpo.resume(work, generations=3, progress=False, test_questions=0, **given))

        outcomes.append(raises_checkpoint_error(go_on))
    assert sum(outcomes) > 0  # some of them raise


def test_an_unreadable_newest_checkpoint_is_skipped(runs, tmp_path):
    folder = Path(shutil.copytree(runs["networks"], tmp_path / "run"))
    newest = generation_folder(folder, 2)
    record = json.loads((newest / "population.json").read_text())
    record["run_state"]["tokens"] = "many"
    put_in(newest, "population.json", record)
    with pytest.warns(
        UserWarning, match="generation-0002 cannot be loaded: run_state.tokens must be an integer, got 'many'"
    ):
        run = evogrpo.resume(folder, cart_pole(validation_size=10), progress=False, generations=2)
    assert run.trainer.run_state.generation == 1


def test_commands_report_forged_records(runs, tmp_path, capsys):
    folder = Path(shutil.copytree(runs["language"], tmp_path / "run"))
    record = json.loads((folder / "best" / "agent.json").read_text())
    for shared in (None, [], {"kind": "language"}, {"kind": 3, "source": 4}):
        put_in(folder / "best", "agent.json", {**record, "shared": shared, "member": {"index": []}})
        assert main(["export", str(folder), str(tmp_path / "adapter")]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_invalid_tensors_raise(runs, tmp_path):
    """Of members and finalists."""
    given = {"env": cart_pole(validation_size=10), "progress": False}
    tensors = load_file(generation_folder(runs["networks"], 2) / "population.safetensors")
    firsts = {name.split(" ")[0]: name for name in sorted(tensors) if name.endswith("weights")}
    assert sorted(firsts) == ["0.weights", "1.weights", "2.weights", "best:", "finalist"]
    wrong = {
        "halved": lambda t: t[: len(t) // 2].clone(),
        "double": lambda t: t.double(),
        "one": lambda t: t[0].clone(),
    }
    for name in firsts.values():
        for how, change in {"gone": None, **wrong}.items():
            folder = Path(shutil.copytree(runs["networks"], tmp_path / f"{name} {how}"))
            shutil.rmtree(generation_folder(folder, 1))
            others = {each: tensor for each, tensor in tensors.items() if each != name}
            if change is not None:
                others[name] = change(tensors[name])
            put_bytes(generation_folder(folder, 2), "population.safetensors", save(others))
            with pytest.raises(CheckpointError):
                evogrpo.resume(folder, **given)


def sized(kind, *place):
    return kind, "agent.json", ("shared", *place)


SIZES = [
    (sized("networks", "observation_spaces", 0, 1, "shape"), lambda n: [n]),
    (sized("networks", "observation_spaces", 0, 1, "shape"), lambda n: [n, n]),
    (sized("networks", "action_spaces", 0, 1, "n"), lambda n: n),
    (sized("networks", "settings", "network", "hidden"), lambda n: [n, n]),
    (sized("networks", "settings", "network", "hidden"), lambda n: [min(n, 65_536)] * 8),
    (sized("mixed", "observation_spaces", 0, 1, "parts", 0, 1, "n"), lambda n: n),
    (sized("mixed", "observation_spaces", 0, 1, "parts", 1, 1, "nvec"), lambda n: [n, n]),
    (sized("mixed", "observation_spaces", 0, 1, "parts", 2, 1, "shape"), lambda n: [n, n, 3]),
    (sized("mixed", "action_spaces", 0, 1, "nvec"), lambda n: [n, n]),
    (sized("mixed", "settings", "network", "convolutions"), lambda n: [[n, 3, 1], [n, 3, 1]]),
    (sized("language", "lora_config", "r"), lambda n: n),
    *(
        (("language", "base_config.json", (name,)), lambda n: n)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    ),
]


@pytest.mark.parametrize("size", [2**20, 2**31, 2**62])
def test_declared_sizes_are_checked_before_allocation(agents, size, tmp_path):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    for number, ((kind, name, place), value_of) in enumerate(SIZES):
        agent, original = agents(kind)
        folder = Path(shutil.copytree(original, tmp_path / str(number)))
        record = json.loads((folder / name).read_text())
        parent = record
        for key in place[:-1]:
            parent = parent[key]
        assert place[-1] in parent
        parent[place[-1]] = value_of(size)
        put_in(folder, name, record)
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
        try:
            with pytest.raises(CheckpointError) as refused:
                type(agent).load(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert "memory" not in str(refused.value), (kind, place)  # not an allocation error
