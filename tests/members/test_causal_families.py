"""Causal architectures: the bank matches PEFT, or raises before anything runs."""

import copy
import json
import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from evogrpo import GRPO
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.language.causal_model import CausalModel
from evogrpo.members.language.compatibility import find_decoder, find_head
from evogrpo.members.language.loading import BaseModel
from evogrpo.members.language.peft_files import check_export
from evogrpo.testing.samplers import different_members, make_rows
from tests.causal_families import FAMILIES, family_model
from tests.tiny_batches import grpo_loss, lora, sampled_batch
from tests.tiny_models import PAD, tiny_model

# Experts beside dense and shared layers, an unsupported layer, modules named like experts, scaled
# hidden states, and an inner model under another name.
DIFFERENT = ["deepseek_v3", "laguna", "falcon_mamba", "beam", "minicpm3", "llama4_text"]
NOT_CAUSAL = ["bert-generation", "xlm", "cpmant"]
# Encoders under a causal head, models that left padding breaks, heads of several layers, and two
# others.
REFUSED = {
    *NOT_CAUSAL, "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp",
    "pegasus", "plbart",
    "recurrent_gemma", "rwkv", "trocr", "modernbert-decoder", "prophetnet", "reformer", "xlnet",
}  # fmt: skip
slow = pytest.mark.slow


def log_probs_one_by_one(model, batch, row):
    """Score a row token by token: no later tokens, no padding, no cache."""
    prompt = batch.inputs.prompts[int(batch.inputs.prompt_ids[row])]
    completion = batch.actions[row][batch.present[row]].tolist()
    values = []
    for position, token in enumerate(completion):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion[:position]]])).logits[
                0, -1
            ]
        values.append((logits / batch.inputs.temperature[row]).log_softmax(0)[token])
    return torch.stack(values)


def written(bank, folder, slot=0):
    tensors, config = bank.peft_files(slot)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(config)
    return tensors, json.loads(config)


def exported(bank, slot, folder, model):
    written(bank, folder, slot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()


def built(family):
    try:
        model = family_model(family)
        model(input_ids=torch.ones((1, 3), dtype=torch.long))
    except Exception as error:  # noqa: BLE001  # the code of an architecture may raise any error
        pytest.skip(f"{family} cannot be built small: {type(error).__name__}: {error}")
    return model


@pytest.mark.parametrize(
    "family",
    [
        *DIFFERENT,
        *(pytest.param(family, marks=slow) for family in FAMILIES if family not in DIFFERENT),
    ],
)
def test_families_match_peft_or_raise(family, tmp_path):
    """The sweep of all architectures is marked slow; the default run has the distinct ones."""
    model = built(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if family in REFUSED:
            with pytest.raises(ValueError, match=type(model).__name__):
                different_members(model, 2)
            return
        bank = different_members(model, 2)
        batch = sampled_batch(bank, tokens=4)
    rows = [int((batch.member_ids == slot).nonzero()[0, 0]) for slot in range(2)]
    base = bank.log_probs(batch, base=True)
    for row in rows:
        torch.testing.assert_close(
            base[row][batch.present[row]],
            log_probs_one_by_one(model, batch, row),
            atol=2e-3,
            rtol=0,
        )
    reports = bank.update(
        batch, grpo_loss(batch), {slot: Hyperparameters(lr=1e-3) for slot in range(2)}
    ).reports
    assert all(report.grad_norm > 0 for report in reports.values())
    scored = bank.log_probs(batch)
    assert float((scored - base).abs().max()) > 1e-3, "the adapters must matter"
    loaded = exported(bank, 1, tmp_path, model)
    torch.testing.assert_close(
        scored[rows[1]][batch.present[rows[1]]],
        log_probs_one_by_one(loaded, batch, rows[1]),
        atol=2e-3,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("family", "named", "message"),
    [
        (
            "deepseek_v3",
            None,
            (
                r"train 10 linear layers .*\.\*\.mlp\.experts\.gate_up_proj, .*down_proj \(stacked"
                r" weights"
            ),
        ),
        (
            "laguna",
            r".*shared_experts\.up_proj",
            r"shared_experts\.gate_proj.* \(PEFT cannot load its adapter\)",
        ),
        (
            "falcon_mamba",
            ["q_proj", "out_proj"],
            r"train 4 linear layers of FalconMambaForCausalLM, without backbone\..*\.dt_proj \(not"
            r" called .*\); "
            r"backbone\..*\.out_proj \(PEFT cannot load",
        ),
        (
            "phimoe",
            ["q_proj", "router"],
            r"mlp\.router \(not a plain linear layer that sees every token\)",
        ),
    ],
)
def test_unsupported_modules_are_left_out_with_a_warning_or_raise_if_named(family, named, message):
    model = family_model(family)
    with pytest.warns(UserWarning, match=message):
        different_members(model, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Adapters train")
        different_members(model, 2)  # warns once
    if named:
        with pytest.raises(
            ValueError, match=r"cannot be adapted: .*(up_proj|out_proj|router).*\. Name others"
        ):
            different_members(model, 1, lora_config=lora(target_modules=named))


@pytest.mark.parametrize(("dtype", "cap"), [(torch.bfloat16, 50.0)])
def test_soft_cap_is_found_in_every_precision(dtype, cap):
    """With small weights, the logits of a random model are far below the cap."""
    model = family_model("gemma2", final_logit_softcapping=cap)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)
    model.to(dtype)
    with torch.no_grad():
        head = find_head(model, find_decoder(model))
        hidden = 1e4 * torch.randn(5, 32).to(dtype)
        capped = cap * torch.tanh(model.lm_head(hidden).float() / cap)
        values = head(hidden).float()
    assert float(capped.abs().max()) > 0.99 * cap, "the cap must matter"
    torch.testing.assert_close(values, capped, rtol=0.02, atol=0.02 * cap)


CHANGED_EXPORTS = {
    "other widths": ("llama", {}, {"intermediate_size": 40}),
    "another scale": ("llama", {"alpha_pattern": {"q_proj": 99}}, {}),
    "from the future": ("llama", {"unheard_of": 1}, {}),
}


@pytest.mark.parametrize("change", CHANGED_EXPORTS)
def test_exports_are_checked_with_peft(change, tmp_path):
    family, changes, of_base = CHANGED_EXPORTS[change]
    model = family_model(family)
    tensors, record = written(different_members(model, 1), tmp_path)
    assert check_export(tmp_path, model.to("meta")) == len(tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(record | changes))
    with pytest.raises(ValueError, match="PEFT does not load"):
        check_export(tmp_path, family_model(family, **of_base))


def test_an_export_without_tensors_of_a_module_is_refused(tmp_path):
    model = family_model("llama")
    tensors, _ = written(different_members(model, 1), tmp_path)
    module, _, _ = max(tensors).rpartition(".lora_")
    kept = {name: values for name, values in tensors.items() if not name.startswith(module)}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="PEFT adapts modules"):
        check_export(tmp_path, model)


def test_an_export_names_its_base(tmp_path, monkeypatch):
    """A relative folder becomes an absolute one."""
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained("base")
    bank = different_members(AutoModelForCausalLM.from_pretrained("base"), 1)
    exported_to = tmp_path / "adapter"
    exported_to.mkdir()
    written(bank, exported_to)
    monkeypatch.chdir("/")
    ids = torch.tensor([[3, 4, 5]])
    expected = bank.policy(0)(ids)
    torch.testing.assert_close(
        AutoPeftModelForCausalLM.from_pretrained(exported_to)(ids).logits.detach(), expected
    )
    assert (
        json.loads(different_members(tiny_model("llama"), 1).peft_files(0)[1])[
            "base_model_name_or_path"
        ]
        is None
    )


def with_an_adapter():
    model = tiny_model("llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def damaged():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    return model


ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


def test_longrope_models_are_limited_to_the_original_context():
    length = {"original_max_position_embeddings": 24}
    bank = different_members(family_model("phi3", rope_parameters=ROPE | length, **length), 2)
    assert bank.base.context == 24
    longest = tuple(range(3, 20))
    batch = sampled_batch(bank, tokens=7, prompts=((5, 6, 7), longest, (8, 9)))  # at most 24 tokens
    for row in range(len(batch)):
        alone = bank.log_probs(batch.select(torch.tensor([row])))
        torch.testing.assert_close(alone, bank.log_probs(batch)[[row]], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"25 tokens, but the model's context is 24"):
        bank.sample(make_rows([0], tokens=8, prompts=(longest,) * 3))


@pytest.mark.parametrize("rank", [0, "8", None])
def test_invalid_rank_raises(rank):
    with pytest.raises(
        ValueError, match=r"lora_config\.r must be a whole number of at least 1, got"
    ):
        different_members(
            tiny_model("llama"), 1, lora_config=LoraConfig(r=rank, target_modules="all-linear")
        )


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
LLAMA = LlamaConfig(**SMALL, pad_token_id=0)
T5 = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
UNSUPPORTED = {
    "BertForMaskedLM": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "LlamaForSequenceClassification": lambda: LlamaForSequenceClassification(LLAMA),
    "T5ForConditionalGeneration": lambda: T5ForConditionalGeneration(T5),
    "actor_network.*BaseModel": lambda: BaseModel(tiny_model(), None, "tiny"),
    "actor_network.*PeftModel": lambda: get_peft_model(
        tiny_model(), LoraConfig(target_modules=["q_proj"])
    ),
    "actor_network.*DataParallel": lambda: nn.DataParallel(tiny_model()),
    "LlamaForCausalLM already has PEFT adapters": with_an_adapter,
    "LlamaForCausalLM contain NaN": damaged,
    "LlamaForCausalLM has no weights": lambda: tiny_model("llama").to("meta"),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_models_raise(message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        GRPO(actor_network=UNSUPPORTED[message](), pad_token_id=0)


def test_nan_weights_raise():
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        different_members(model, 1)


def test_blockwise_attention_with_padding_raises():
    """DeepSeek-V4 compresses blocks of 4 and 128 tokens, counted with the padding."""
    model = family_model("deepseek_v4", num_hidden_layers=4, max_position_embeddings=64)
    assert {4, 128} <= set(model.config.compress_rates.values())
    with pytest.raises(ValueError, match="Padding"):
        different_members(model, 1)


@pytest.mark.parametrize(
    ("rate", "problem"), [(600, "Padding"), (800, "compress_rates"), (1100, "compress_rates")]
)
def test_blocks_that_the_check_does_not_reach_raise(rate, problem):
    rates = {"compressed_sparse_attention": rate, "heavily_compressed_attention": rate}
    model = family_model(
        "deepseek_v4", num_hidden_layers=4, max_position_embeddings=4096, compress_rates=rates
    )
    with pytest.raises(ValueError, match=problem):
        CausalModel(model, PAD)
    model.config.max_position_embeddings = rate // 2  # no sequence, padding included, fills a block
    CausalModel(model, PAD)
