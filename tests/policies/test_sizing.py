"""The size of micro-batches that is tried: which one is taken, and that nothing is learnt on the way."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.policies.tokens import sizing
from evogrpo.policies.tokens.sizing import (
    LEAST,
    MOST,
    begun_with,
    fastest,
    is_tried,
    learning_bytes,
    sampling_bytes,
    tried_size,
    widths_of,
)
from tests.tiny_batches import different_members, grpo_loss, same_state, sampled_batch
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama")


def taking(start, token, memory=math.inf):
    """Return how long passes take whose start costs as much as is given: closed form of a device of some memory."""
    return lambda tokens: math.inf if tokens > memory else start + token * tokens


@pytest.mark.parametrize(
    ("seconds", "most", "size"),
    [
        (taking(0, 1e-6), MOST, 1024),  # all alike
        # Twice as many as n take (s / 2 n + 1) / (s / n + 1) of the time for each, at most 1 / 1.05 up to n = 9.5 s.
        (taking(1000e-6, 1e-6), MOST, 16384),
        (taking(1000e-6, 1e-6), 5000, 4096),  # room for no more
        (taking(1000e-6, 1e-6, memory=8192), MOST, 8192),  # more does not fit
        (taking(1000e-6, 1e-6), 300, 256),  # not even for the usual size
        (taking(1000e-6, 1e-6), 100, LEAST),
        (taking(40e-6, 1e-6), MOST, 1024),  # 2048 are faster, but by 2 % only
        (lambda tokens: 1e-6 * tokens**1.1, MOST, LEAST),  # half of them by 7 %
        (lambda tokens: 1e-6 * tokens**1.05, MOST, 1024),  # half of them by 3.5 %
        (taking(10, 1e-6), MOST, 1024),  # would take too long to find out
    ],
)
def test_the_largest_size_that_is_clearly_faster_is_taken(seconds, most, size):
    assert fastest(seconds, most) == size


def test_what_slows_single_passes_down_does_not_choose():
    passes = []

    def seconds(tokens):
        passes.append(tokens)
        return 1e-6 * tokens * (3 if len(passes) % 3 == 0 else 1)

    assert fastest(seconds, MOST) == 1024
    assert set(passes) == {LEAST, 512, 1024, 2048}


@pytest.mark.parametrize(
    ("wanted", "device", "tried", "first"),
    [(None, "cpu", False, 1024), (None, "cuda:1", True, 1024), ("auto", "cpu", True, 1024), (96, "cuda", False, 96)],
)
def test_by_default_it_is_tried_with_cuda(wanted, device, tried, first):
    assert is_tried(wanted, device) is tried
    assert begun_with(wanted) == first


@pytest.mark.parametrize("size", [1, 3])
def test_a_trial_changes_nothing_and_draws_nothing(size):
    bank, control = (different_members(MODEL, size, micro_batch_tokens=48) for _ in range(2))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tried_size(bank, MODEL)
    assert torch.equal(torch.get_rng_state(), before)
    assert bank.micro_batch_tokens == 48
    batch = sampled_batch(bank)
    chosen = {slot: Hyperparameters(lr=1e-3) for slot in range(size)}
    for each in (bank, control):
        each.update(batch, grpo_loss(batch), chosen)
    for slot in range(size):
        assert same_state(bank.state(slot), control.state(slot))


@pytest.mark.parametrize("tokens", [LEAST, 1024, 4096])
def test_what_is_timed_is_one_micro_batch_of_just_that_size(tokens, monkeypatch):
    bank, fed = different_members(MODEL, 3), []
    forward = bank.passes.model.continued

    def counting(prompts, slots, rows, ids, *rest):
        fed.append(sum(map(len, prompts)) + (ids.shape[1] + 1) * len(ids))
        return forward(prompts, slots, rows, ids, *rest)

    monkeypatch.setattr(bank.passes.model, "continued", counting)
    with bank.base.working():
        assert 0 < sizing._seconds(bank, tokens) < math.inf
    assert fed == [tokens]


@pytest.mark.parametrize(("reduced", "logits"), [(True, 256), (False, 2048)])
def test_memory_bounds_what_is_tried(reduced, logits, monkeypatch):
    bank = different_members(MODEL, 2, reduce_memory_peak=reduced)
    taken = sizing.base_bytes(MODEL) + 3 * sum(bank.part(0, name).nbytes for name in bank.parts)
    there = taken + 2 * sizing.learning_bytes(MODEL, 2048, logits, 4)
    monkeypatch.setattr(sizing, "memory_of", lambda device: (there, "memory"))
    assert sizing._room(bank, MODEL) == 2048
    monkeypatch.setattr(sizing, "FASTER", 0.0)  # whatever it takes
    assert tried_size(bank, MODEL) == 2048
    there -= 1
    assert sizing._room(bank, MODEL) == 1024
    there = taken
    assert sizing._room(bank, MODEL) == 0
    assert tried_size(bank, MODEL) == LEAST


ODD = ("dots3_note_text", "falcon_mamba", "gemma3n_text", "gemma4_text", "gpt2", "mamba2", "rwkv", "xlstm")
"""Kinds of models whose configs name no heads, or no intermediate size, or have several of them."""


@pytest.mark.parametrize("name", [name for name in ODD if name in CONFIG_MAPPING])
def test_memory_is_estimated_whatever_the_config_says_of_widths(name):
    model = SimpleNamespace(config=CONFIG_MAPPING[name]())
    assert sampling_bytes(model, 100, 2) > 0
    assert learning_bytes(model, 200, 10, 2) > learning_bytes(model, 100, 10, 2) > 0


def test_where_layers_differ_the_widest_counts():
    model = SimpleNamespace(config=CONFIG_MAPPING["gemma4_text"](num_hidden_layers=2, hidden_size=64))
    heads = [layer.head_dim * layer.num_key_value_heads for layer in model.config.per_layer_config]
    assert len(set(heads)) == 2
    assert widths_of(model).keys == max(heads)
    listed = CONFIG_MAPPING["gemma3n_text"](num_hidden_layers=2, intermediate_size=[96, 128])
    assert widths_of(SimpleNamespace(config=listed)).intermediate == 128


def test_without_attention_states_are_estimated():
    config = CONFIG_MAPPING["mamba"](hidden_size=32, state_size=4, expand=2, num_hidden_layers=3)
    assert sampling_bytes(SimpleNamespace(config=config), 10, 2) == 10 * 64 * 4 * 4
