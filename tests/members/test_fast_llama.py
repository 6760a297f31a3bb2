"""fast_llama matches transformers, and is not used for unsupported models."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional import matmul as products
from evogrpo.members.fast_llama import attention, decode
from evogrpo.testing.samplers import PROMPTS, as_batch, different_members, make_rows
from tests.tiny_batches import assert_banks_agree, grpo_loss, lora, tiny_bank
from tests.tiny_models import COMMON, tiny_model

SIZE = 3
HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(SIZE)}
SYSTEM = (7, 9, 4, 8, 5, 6, 11, 10, 9)
ONE_KEY_PER_HEAD = {"num_key_value_heads": 4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}

SUPPORTED = {
    "llama, tied": LlamaConfig(
        **COMMON,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ),
    "llama 3, keys for every head": LlamaConfig(
        **COMMON | ONE_KEY_PER_HEAD, rope_parameters=LLAMA3
    ),
    "llama, wide heads, a window that it has not": LlamaConfig(
        **COMMON | {"head_dim": 16, "num_key_value_heads": 1},
        sliding_window=3,
        layer_types=["sliding_attention"] * 2,
    ),
    "mistral, window": MistralConfig(**COMMON, sliding_window=5),
    "qwen2, some windows": Qwen2Config(
        **COMMON, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen2": Qwen2Config(**COMMON, rope_parameters=YARN),
    "qwen3": Qwen3Config(**COMMON, attention_bias=True, tie_word_embeddings=True),
}


def built(config, seed=0):
    """Build a model with random weights, biases and norms."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        for weights in model.parameters():
            torch.nn.init.normal_(weights, mean=float(weights.dim() == 1), std=0.3)
    return model


def uses_fast_llama(model, **settings):
    """Return True if a bank on a model uses fast_llama."""
    base = different_members(model, SIZE, **settings).base
    with base.working():
        return base.uses_fast_llama


@pytest.fixture
def fast_and_slow(monkeypatch):
    """Build the same bank with fast_llama and with transformers."""

    def build(model, **settings):
        settings = {"micro_batch_tokens": 100} | settings
        fast = different_members(model, SIZE, **settings)
        monkeypatch.setenv("EVOGRPO_SLOW", "1")
        slow = different_members(model, SIZE, **settings)
        monkeypatch.delenv("EVOGRPO_SLOW")
        for bank, direct in ((fast, True), (slow, False)):
            with bank.base.working():
                assert bank.base.uses_fast_llama is direct
        return fast, slow

    return build


LATER = tuple((*SYSTEM, *prompt) for prompt in (*PROMPTS, (20,)))
IN_BLOCKS = [(attention, "BLOCK", 2), (attention, "MAX_KEPT_KEYS", 4)]
RECOMPUTED = [(attention, "BLOCK", 64), (attention, "MAX_KEPT_KEYS", 0)]
BY_TORCH = [
    (attention, "BLOCK", 0),
    (attention, "_in_blocks", lambda *given: attention._by_torch(*given[:-1])),
]
GROWING = [(decode, "MIN_GROWTH", 2)]
SEVEN = {"tokens": 7}
BELOW = ("mistral, window", "qwen2, some windows")
CASES = [
    *(
        (name, {}, {"tokens": 6, "prompts": (*PROMPTS, (20,))}, [])
        for name in SUPPORTED
        if name not in BELOW
    ),
    # Prompts that begin alike.
    ("mistral, window", {"micro_batch_tokens": 270}, {"tokens": 6, "prompts": LATER}, []),
    # Adapters on some layers.
    ("qwen2", {"lora_config": lora(target_modules=["v_proj", "down_proj"])}, {}, []),
    ("qwen2", {"lora_config": lora(target_modules=["o_proj", "gate_proj"])}, {}, []),
    ("qwen2", {"lora_config": lora(target_modules=r".*layers\.1\.self_attn\.k_proj")}, {}, []),
    # Attention in blocks with recomputation, and as on other devices.
    ("llama 3, keys for every head", {}, SEVEN, IN_BLOCKS),
    ("qwen2, some windows", {}, SEVEN, IN_BLOCKS),
    ("qwen2, some windows", {}, SEVEN, RECOMPUTED),
    ("qwen2, some windows", {}, {}, BY_TORCH),
    # A KV cache that grows.
    ("qwen2, some windows", {}, {"tokens": 9}, GROWING),
]


@pytest.mark.parametrize(
    ("architecture", "settings", "options", "changes"), CASES, ids=lambda value: str(value)[:40]
)
def test_outputs_match_transformers(
    architecture, settings, options, changes, fast_and_slow, monkeypatch
):
    for module, name, value in changes:
        monkeypatch.setattr(module, name, value)
    assert_banks_agree(
        *fast_and_slow(built(SUPPORTED[architecture]), **settings),
        make_rows(range(SIZE), **options),
    )


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
@pytest.mark.parametrize(("architecture", "few"), [("llama, tied", 4), ("qwen2", 128)])
def test_outputs_match_transformers_with_onednn(architecture, few, fast_and_slow, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(products, "FEW_ROWS", few)  # rows of zeros are added in both cases
    fast, slow = fast_and_slow(built(SUPPORTED[architecture]))
    with OneDNNCalls() as calls:
        assert_banks_agree(fast, slow, make_rows(range(SIZE), tokens=4, prompts=PROMPTS[:2]))
    assert calls.of_onednn


@pytest.mark.parametrize("members", [(0, 0, 0), (1, 0, 0)], ids=str)
def test_members_with_equal_rows_share_products(members, fast_and_slow):
    targets = lora(target_modules=["k_proj", "v_proj", "up_proj"])
    fast, slow = fast_and_slow(built(SUPPORTED["qwen2"]), lora_config=targets)
    fast.micro_batch_tokens = slow.micro_batch_tokens = 10_000  # a single micro-batch
    assert_banks_agree(fast, slow, make_rows(members))


class OneDNNCalls(TorchDispatchMode):
    """Records calls of oneDNN in float32."""

    of_onednn = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of_onednn |= "mkldnn._linear_pointwise" in str(func)
        return func(*args, **kwargs or {})


def test_bfloat16_is_as_accurate_as_transformers(fast_and_slow):
    model = built(SUPPORTED["qwen2, some windows"])
    exact, _ = fast_and_slow(copy.deepcopy(model), std=0.05)
    fast, slow = fast_and_slow(model.to(torch.bfloat16), std=0.05)
    rows = make_rows(range(SIZE))
    batch = as_batch(rows, exact.sample(rows))
    found = {}
    for name, bank in (("exact", exact), ("fast", fast), ("slow", slow)):
        scored = bank.log_probs(batch)
        bank.update(batch, grpo_loss(batch), HYPERPARAMETERS)
        found[name] = scored, torch.cat([bank.state(slot)["exp_avg"] for slot in range(SIZE)])

    def off(name, what):
        return float(
            (found[name][what] - found["exact"][what]).norm() / found["exact"][what].norm()
        )

    for what in (0, 1):
        assert 1e-4 < off("fast", what) < 1.5 * off("slow", what)


def test_members_keep_their_adapters_where_padding_is_as_long_as_the_tokens():
    bank = different_members(built(SUPPORTED["qwen2"]).to(torch.bfloat16), 2)
    rows = make_rows((0, 1), tokens=2, min_new_tokens=2, prompts=((5,),))
    batch = as_batch(rows, bank.sample(rows))
    one_each = batch.select(
        torch.tensor([int((batch.member_ids == slot).nonzero()[0]) for slot in (0, 1)])
    )
    alone = [bank.log_probs(one_each.select(torch.tensor([number]))) for number in (0, 1)]
    torch.testing.assert_close(bank.log_probs(one_each), torch.cat(alone), rtol=0.02, atol=0.02)


def custom_layer(model):
    class Odd(torch.nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj.__class__ = Odd


def custom_tensors(model):
    class Odd(torch.Tensor):
        pass

    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(Odd), requires_grad=False)


def hooked(model):
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None)


def replaced(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = partial(type(mlp).forward, mlp)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**COMMON),
        LlamaConfig(**COMMON, hidden_act="gelu"),
        LlamaConfig(
            **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
    ],
    ids=["another class", "another activation", "frequencies that depend on the length"],
)
def test_unsupported_models_use_transformers(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not uses_fast_llama(built(config))


@pytest.mark.parametrize("change", [custom_layer, custom_tensors, hooked, replaced])
def test_user_hooks_run(change):
    model = tiny_model("llama")
    change(model)
    assert not uses_fast_llama(model)


def test_hooks_added_later_run():
    bank = different_members(tiny_model("llama"), SIZE)
    called = []
    handle = bank.base.model.model.layers[0].register_forward_hook(lambda *_: called.append(1))
    bank.sample(make_rows(range(SIZE), tokens=2))
    assert called
    handle.remove()
    with bank.base.working():
        assert bank.base.uses_fast_llama


def test_unused_layers_are_skipped(fast_and_slow):
    model = built(SUPPORTED["qwen3"])
    model.config.num_hidden_layers = 1
    assert_banks_agree(
        *fast_and_slow(model, lora_config=lora(target_modules=r".*layers\.0\..*_proj")),
        make_rows(range(SIZE)),
    )


def test_autocast_uses_transformers():
    in_bfloat16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    assert not uses_fast_llama(tiny_model("llama"), autocast=in_bfloat16)
    bank = tiny_bank()
    with in_bfloat16(), bank.base.working():
        assert not bank.base.uses_fast_llama


def test_mismatch_warns_and_uses_transformers():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.scaling = 0.7
    with pytest.warns(UserWarning, match="fast_llama") as caught:
        bank = different_members(model, SIZE)
    assert len(caught) == 1
    with bank.base.working():
        assert not bank.base.uses_fast_llama


@pytest.mark.parametrize(("value", "direct"), [("1", False), ("0", True)])
def test_evogrpo_slow_disables_it(value, direct, monkeypatch):
    monkeypatch.setenv("EVOGRPO_SLOW", value)
    assert uses_fast_llama(tiny_model("llama")) is direct
