"""Sampling: distribution, ends of completions, independence of other rows."""

import dataclasses

import pytest
import torch

from evogrpo.data import SamplingBatch
from evogrpo.models.fast_llama import decode
from evogrpo.models.language import sampling
from evogrpo.testing.samplers import (
    GROUP_SIZES,
    PROMPTS,
    TEMPERATURES,
    as_batch,
    different_members,
    make_rows,
    with_robust_uniforms,
)
from tests.oracles.peft_members import PeftMember
from tests.rounding import LOG_PROB
from tests.tiny_batches import lora, rows_run, sampled_batch
from tests.tiny_models import ARCHITECTURES, EOS, PAD, VOCABULARY, tiny_model

MODEL = tiny_model("llama")
FIELDS = ("actions", "present", "truncated")


def one_prompt(prompt, uniforms, *, temperature=1.0, slot=0, min_new_tokens=0):
    """Return rows of one member and one prompt with uniforms `[n, t]`."""
    count = len(uniforms)
    return SamplingBatch(
        prompts=(tuple(prompt),),
        prompt_ids=torch.zeros(count, dtype=torch.long),
        member_ids=torch.full((count,), slot),
        temperature=torch.full((count,), temperature),
        uniforms=uniforms,
        min_new_tokens=min_new_tokens,
    )


def test_remaining_rows_are_multiples_of_eight(monkeypatch):
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)  # each row is run by itself
    bank = different_members(MODEL, 1)
    counts = rows_run(bank, monkeypatch)
    rollout = bank.sample(one_prompt(PROMPTS[0], torch.rand(45, 120, generator=torch.Generator().manual_seed(0))))
    alive = [int(rollout.action_mask[:, step + 1].sum()) for step in range(len(counts))]
    assert len(set(counts)) >= 3
    assert set(counts) <= {45, 40, 32, 24, 16, *range(1, 9)}
    assert all(living <= carried for carried, living in zip(counts, alive, strict=True))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_follow_the_softmax_at_the_temperature(architecture):
    """On a grid of uniforms, each token's frequency equals its probability."""
    bank = different_members(tiny_model(architecture), 2)
    count = 1000
    grid = (torch.arange(count, dtype=torch.float64)[:, None] + 0.5) / count
    for slot, temperature in ((0, 1.0), (1, 0.6)):
        member = PeftMember(bank.base.model, lora(), bank.peft_files(slot)[0], [EOS])
        expected = member.probabilities(PROMPTS[0], temperature=temperature)
        drawn = bank.sample(one_prompt(PROMPTS[0], grid, temperature=temperature, slot=slot))
        frequency = drawn.actions[:, 0].bincount(minlength=VOCABULARY) / count
        assert float((frequency - expected).abs().max()) <= 1 / count + 1e-4
        torch.testing.assert_close(
            drawn.log_probs[:, 0].double(), expected[drawn.actions[:, 0]].log(), rtol=1e-4, atol=1e-4
        )


def test_second_token_depends_on_the_first():
    bank = different_members(MODEL, 1)
    member = PeftMember(MODEL, lora(), bank.peft_files(0)[0], [EOS])
    count = 200
    second = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for first in (0.1, 0.5, 0.9):
        uniforms = torch.stack([torch.full_like(second, first), second], 1)
        drawn = bank.sample(one_prompt(PROMPTS[1], uniforms, min_new_tokens=1)).actions
        (token,) = drawn[:, 0].unique().tolist()
        expected = member.probabilities((*PROMPTS[1], token), temperature=1.0)
        frequency = drawn[:, 1].bincount(minlength=VOCABULARY) / count
        assert float((frequency - expected).abs().max()) <= 1 / count + 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampled_log_probs_equal_scored_ones(architecture):
    bank = different_members(tiny_model(architecture), 3)
    batch = sampled_batch(bank, tokens=8, min_new_tokens=3)
    torch.testing.assert_close(bank.log_probs(batch), batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    assert bool((batch.sampler_log_probs[batch.present] < 0).all())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("min_new_tokens", [0, 4])
def test_greedy_decoding_equals_transformers_generate(architecture, min_new_tokens):
    bank = different_members(tiny_model(architecture), 2, eos_token_ids=[EOS, 40])
    rows = make_rows([0, 1], tokens=12, greedy=True, min_new_tokens=min_new_tokens)
    rollout = bank.sample(rows)
    for slot in range(2):
        member = PeftMember(bank.base.model, lora(), bank.peft_files(slot)[0], [EOS, 40])
        for prompt_id, prompt in enumerate(PROMPTS):
            mine = ((rows.member_ids == slot) & (rows.prompt_ids == prompt_id)).nonzero()[:, 0]
            ids = torch.tensor([prompt])
            with torch.no_grad():
                whole = member.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=12,
                    min_new_tokens=min_new_tokens or None,
                    eos_token_id=[EOS, 40],
                    pad_token_id=PAD,
                )
            expected = whole[0, len(prompt) :].tolist()
            for row in mine.tolist():
                assert rollout.actions[row][rollout.present[row]].tolist() == expected
    assert torch.equal(rollout.log_probs, torch.zeros_like(rollout.log_probs))


def test_greedy_and_sampled_rows_in_one_batch():
    bank = different_members(MODEL, 3)
    greedy, sampled = make_rows(range(3), greedy=True), with_robust_uniforms(bank, make_rows(range(3)))
    cold = torch.arange(len(sampled.prompt_ids)) % 2 == 0
    mixed = bank.sample(dataclasses.replace(sampled, temperature=torch.where(cold, 0.0, sampled.temperature)))
    assert torch.equal(mixed.actions[cold], bank.sample(greedy).actions[cold])
    assert torch.equal(mixed.actions[~cold], bank.sample(sampled).actions[~cold])


def test_a_low_temperature_approaches_greedy_decoding():
    bank = different_members(MODEL, 2)
    rows = make_rows([0, 1])
    cold = dataclasses.replace(rows, temperature=torch.full_like(rows.temperature, 1e-4))
    assert torch.equal(bank.sample(cold).actions, bank.sample(make_rows([0, 1], greedy=True)).actions)


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-24, 1 - 2**-53])
def test_extreme_uniforms_give_valid_tokens(edge):
    bank = different_members(MODEL, 1)
    rollout = bank.sample(one_prompt(PROMPTS[0], torch.full((1, 4), edge, dtype=torch.float64), min_new_tokens=2))
    assert bool(rollout.log_probs.isfinite().all())
    assert bool((rollout.actions < VOCABULARY).all())


def tokens_that_occur(bank, tokens=10):
    """Return tokens at second or later positions of many completions, to use as EOS."""
    batch = sampled_batch(bank, tokens=tokens)
    return batch.actions[:, 1:].flatten().bincount(minlength=VOCABULARY).argsort(descending=True)[:4].tolist()


@pytest.mark.parametrize("shared", [True, False])
def test_rows_end_at_their_first_eos(shared):
    frequent = tokens_that_occur(different_members(MODEL, 3))
    bank = different_members(MODEL, 3, eos_token_ids=frequent)
    bank.base.shares_prefix = shared
    rows = with_robust_uniforms(bank, make_rows(range(3), tokens=10))
    rollout = bank.sample(rows)
    ends = torch.isin(rollout.actions, torch.tensor(frequent)) & rollout.present
    lengths = rollout.present.sum(1)
    for row, length in enumerate(lengths.tolist()):
        assert rollout.present[row].tolist() == [True] * length + [False] * (10 - length)
        assert ends[row].nonzero()[:, 0].tolist() in ([], [length - 1])
        assert bool(ends[row].any()) == (not bool(rollout.truncated[row]))
        assert rollout.truncated[row] == (length == 10 and not bool(ends[row, -1]))
    absent = ~rollout.present
    assert bool((rollout.actions[absent] == PAD).all())
    assert bool((rollout.log_probs[absent] == 0).all())
    assert (
        len({rollout.actions[row, length - 1].item() for row, length in enumerate(lengths.tolist()) if length < 10}) > 1
    )
    assert lengths.unique().numel() > 3
    # Tokens before the end do not depend on end tokens.
    endless = different_members(MODEL, 3, eos_token_ids=[EOS])
    endless.base.shares_prefix = shared
    free = endless.sample(rows).actions
    both = rollout.present & (torch.isin(free, torch.tensor([EOS])).cumsum(1) == 0)
    assert torch.equal(rollout.actions[both], free[both])


def test_eos_as_last_token_is_not_truncated():
    bank = different_members(MODEL, 1)
    rows = make_rows([0], tokens=3)
    last = int(bank.sample(rows).actions[0, 2])
    others = bank.sample(rows).actions[0, :2].tolist()
    assert last not in others
    ended = different_members(MODEL, 1, eos_token_ids=[last]).sample(rows.select(torch.tensor([0])))
    assert ended.present.tolist() == [[True] * 3]
    assert ended.truncated.tolist() == [False]


def test_decoding_stops_when_all_rows_ended():
    bank = different_members(MODEL, 3, eos_token_ids=range(1, 40))  # most tokens end a completion
    rows = make_rows(range(3), tokens=40)
    calls = []
    handle = MODEL.base_model.register_forward_hook(lambda *_: calls.append(1))
    rollout = bank.sample(rows)
    handle.remove()
    longest = int(rollout.present.sum(1).max())
    assert longest < 40
    assert len(calls) == longest  # the prompts, then one pass for each token but the last


def test_no_eos_before_min_new_tokens():
    """Forbidden end tokens raise the other probabilities in sampling and scoring."""
    frequent = tokens_that_occur(different_members(MODEL, 3))
    bank = different_members(MODEL, 3, eos_token_ids=frequent)
    batch = sampled_batch(bank, tokens=8, min_new_tokens=5)
    ends = torch.isin(batch.actions, torch.tensor(frequent)) & batch.present
    assert not ends[:, :5].any()
    assert ends[:, 5].any()
    scored = bank.log_probs(batch)
    torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    unaware = bank.log_probs(dataclasses.replace(batch, inputs=dataclasses.replace(batch.inputs, min_new_tokens=0)))
    assert bool((scored[:, :5] > unaware[:, :5]).all())
    late = batch.present[:, 5:]
    torch.testing.assert_close(scored[:, 5:][late], unaware[:, 5:][late], rtol=1e-4, atol=1e-4)


def test_single_token_completions():
    bank = different_members(MODEL, 2)
    rollout = bank.sample(make_rows([0, 1], tokens=1))
    assert rollout.actions.shape[1] == 1
    assert bool(rollout.present.all())


@pytest.mark.parametrize(("architecture", "shared"), [("llama", True), ("llama", False), ("gemma2", True)])
def test_results_do_not_depend_on_order_or_waves(architecture, shared, monkeypatch):
    bank = different_members(tiny_model(architecture), 3)
    bank.base.shares_prefix = shared
    rows = make_rows(range(3), tokens=6)
    count = len(rows.prompt_ids)
    expected = bank.sample(rows)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    selections = [order, torch.arange(count).flip(0), torch.arange(0, count, 3), torch.tensor([5])]
    for selection in selections:
        got = bank.sample(rows.select(selection))
        for field in FIELDS:
            assert torch.equal(getattr(got, field), getattr(expected, field)[selection]), field
        torch.testing.assert_close(got.log_probs, expected.log_probs[selection], rtol=1e-4, atol=1e-4)
    for cached_tokens in (1, 11 * 10):  # a wave for each row; ten rows a wave
        monkeypatch.setattr(sampling, "CACHED_TOKENS", cached_tokens)
        got = bank.sample(rows.select(order))
        for field in FIELDS:
            assert torch.equal(getattr(got, field), getattr(expected, field)[order]), field


def test_rows_at_once_on_a_cpu():
    for device, width, rows in (("cuda", 64, 512), ("cpu", 64, 256), ("cpu", 256, 128), ("cpu", 1024, 32)):
        assert sampling.rows_at_once(width, device) == rows
    assert sampling.rows_at_once(10**6, "cpu") == 1


def test_sampling_is_deterministic():
    bank = different_members(MODEL, 3)
    one, other = (bank.sample(make_rows(range(3))) for _ in range(2))
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in (*FIELDS, "log_probs"))


def test_prompts_run_once_per_member():
    bank = different_members(MODEL, 3)
    shapes = []
    handle = MODEL.base_model.register_forward_hook(
        lambda _module, _args, keywords, _output: shapes.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
    )
    bank.sample(make_rows(range(3), tokens=2, min_new_tokens=2))
    handle.remove()
    assert shapes == [(3 * len(PROMPTS), max(map(len, PROMPTS))), (sum(GROUP_SIZES) * len(PROMPTS), 1)]


def test_members_have_their_own_temperature():
    """Three equal members with different temperatures: entropies increase with temperature."""
    bank = different_members(MODEL, 3)
    bank.inherit([0, 0, 0])
    draws = torch.rand(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [one_prompt(PROMPTS[0], draws, temperature=t, slot=s, min_new_tokens=6) for s, t in enumerate(TEMPERATURES)]
    together = SamplingBatch(
        prompts=rows[0].prompts,
        min_new_tokens=6,
        **{
            name: torch.cat([getattr(row, name) for row in rows])
            for name in ("prompt_ids", "member_ids", "temperature", "uniforms")
        },
    )
    rollout = bank.sample(together)
    batch = as_batch(together, rollout)
    torch.testing.assert_close(bank.log_probs(batch), rollout.log_probs, rtol=1e-4, atol=1e-4)
    surprise = [-float(rollout.log_probs[together.member_ids == slot].mean()) for slot in range(3)]
    assert surprise[1] < surprise[0] < surprise[2]  # temperatures 0.7, 1.0, 1.3


@pytest.mark.parametrize("every", [2, 5, 100])
def test_check_interval_does_not_change_completions(every, monkeypatch):
    bank = different_members(MODEL, 3)
    rows = with_robust_uniforms(bank, make_rows(range(3), tokens=9))
    expected = bank.sample(rows)
    assert 0 < int(expected.truncated.sum()) < len(rows)
    monkeypatch.setitem(sampling.CHECK_EVERY, "cpu", every)
    actual = bank.sample(rows)
    for field in FIELDS:
        assert torch.equal(getattr(actual, field), getattr(expected, field))
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=LOG_PROB, atol=LOG_PROB)
