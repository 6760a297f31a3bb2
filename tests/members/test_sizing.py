"""Memory estimates, and the default size of micro-batches on CUDA."""

from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING

from evogrpo.members.language import sizing
from evogrpo.members.language.sizing import (
    MAX_TOKENS,
    MIN_TOKENS,
    learning_bytes,
    sampling_bytes,
    size_for_memory,
    widths_of,
)
from evogrpo.testing.samplers import different_members
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama")


@pytest.mark.parametrize(("reduced", "logits"), [(True, 256), (False, 2048)])
def test_default_size_follows_the_memory_estimate(reduced, logits, monkeypatch):
    bank = different_members(MODEL, 2, reduce_memory_peak=reduced)
    # Weights and two moments of each member, and a gradient.
    taken = sizing.base_bytes(MODEL) + (2 * 3 + 1) * bank.weights[0].nbytes
    enough = taken + 2 * sizing.learning_bytes(MODEL, 2048, logits, 4)
    for memory, size in (
        (enough, 2048),
        (enough - 1, 1024),
        (taken, MIN_TOKENS),
        (1000 * enough, MAX_TOKENS),
        (None, MAX_TOKENS),
    ):
        monkeypatch.setattr(
            sizing, "device_memory", lambda device, memory=memory: (memory, "memory")
        )
        assert size_for_memory(bank) == size


ODD = (
    "dots3_note_text",
    "falcon_mamba",
    "gemma3n_text",
    "gemma4_text",
    "gpt2",
    "mamba2",
    "rwkv",
    "xlstm",
)
"""Kinds of models whose configs name no heads, or no intermediate size, or have several of them."""


@pytest.mark.parametrize("name", [name for name in ODD if name in CONFIG_MAPPING])
def test_memory_is_estimated_without_some_config_fields(name):
    model = SimpleNamespace(config=CONFIG_MAPPING[name]())
    assert sampling_bytes(model, 100, 2) > 0
    assert learning_bytes(model, 200, 10, 2) > learning_bytes(model, 100, 10, 2) > 0


def test_the_largest_layer_determines_the_estimate():
    model = SimpleNamespace(
        config=CONFIG_MAPPING["gemma4_text"](num_hidden_layers=2, hidden_size=64)
    )
    heads = [layer.head_dim * layer.num_key_value_heads for layer in model.config.per_layer_config]
    assert len(set(heads)) == 2
    assert widths_of(model).keys == max(heads)
    listed = CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=2, intermediate_size=[96, 128])
    assert widths_of(SimpleNamespace(config=listed)).intermediate == 128


def test_memory_of_recurrent_models_is_that_of_their_states():
    config = CONFIG_MAPPING["mamba"](hidden_size=32, state_size=4, expand=2, num_hidden_layers=3)
    assert sampling_bytes(SimpleNamespace(config=config), 10, 2) == 10 * 64 * 4 * 4
