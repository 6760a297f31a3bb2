"""Sampling: distribution, options, ends of completions, independence of rows, reports."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from evogrpo.interruption import Stop
from evogrpo.members.fast_llama import decode
from evogrpo.members.language import sampling
from evogrpo.records import SamplingBatch, SamplingOptions
from evogrpo.testing.samplers import (
    PROMPTS,
    different_members,
    example_replies,
    make_rows,
    next_turn,
    with_robust_uniforms,
)
from tests.members.test_devices import DEVICES
from tests.members.test_kv_caches import bank_with_early_ends, frequent_end_ids
from tests.oracles.peft_members import PeftMember
from tests.rounding import LOG_PROB
from tests.tiny_batches import lora, sampled_batch, tiny_bank
from tests.tiny_models import EOS, PAD, VOCABULARY, tiny_model
from tests.tiny_training import tiny_env, tiny_population

FIELDS = ("actions", "present", "truncated")


OPTIONS = {
    "whole distribution": SamplingOptions(),
    "all": SamplingOptions(top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=0.6),
}


def one_prompt(prompt, uniforms, *, temperature=1.0, slot=0, **fields):
    """Return rows of one member and one prompt with uniforms `[n, t]`."""
    count = len(uniforms)
    return SamplingBatch(
        prompts=(tuple(prompt),),
        prompt_ids=torch.zeros(count, dtype=torch.long),
        member_ids=torch.full((count,), slot),
        temperature=torch.full((count,), temperature),
        uniforms=uniforms,
        **fields,
    )


@torch.no_grad()
def token_probabilities(member, tokens, options, temperature):
    """Return the distribution of the next token by transformers."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(temperature))
    if options.top_k:
        chain.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        chain.append(MinPLogitsWarper(options.min_p))
    ids = torch.tensor([tokens])
    return chain(ids, member.model(input_ids=ids).logits[:, -1].clone()).double().softmax(1)[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_token_frequencies_match_transformers(name):
    """On a grid of uniforms, frequencies equal probabilities, for the first and second token."""
    options = OPTIONS[name]
    bank = tiny_bank(2)
    count = 400
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for slot, temperature, first in ((0, 1.0, None), (1, 0.6, 0.3)):
        member = PeftMember(bank.base.model, lora(), bank.peft_files(slot)[0], [EOS])
        if first is None:
            uniforms = grid[:, None]
        else:
            uniforms = torch.stack([torch.full_like(grid, first), grid], 1)
        rows = one_prompt(PROMPTS[1], uniforms, temperature=temperature, slot=slot, options=options)
        drawn = bank.sample(rows)
        assert drawn.exact is (options == SamplingOptions()), (
            "the trainer scores the whole distribution"
        )
        before = drawn.actions[0, :-1].tolist()
        assert bool((drawn.actions[:, :-1] == torch.tensor(before, dtype=torch.long)).all())
        expected = token_probabilities(member, (*PROMPTS[1], *before), options, temperature)
        last = drawn.actions[:, -1]
        frequency = last.bincount(minlength=VOCABULARY) / count
        assert float((frequency - expected).abs().max()) <= 1 / count + 1e-4
        torch.testing.assert_close(
            drawn.log_probs[:, -1].double(), expected[last].log(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("architecture", "min_new_tokens", "penalty"),
    [("llama", 0, 1.0), ("gemma2", 0, 1.0), ("gpt2", 4, 1.0), ("llama", 0, 1.5)],
)
def test_greedy_decoding_equals_transformers_generate(architecture, min_new_tokens, penalty):
    """A penalty may change the most likely token; the other options never do."""
    bank = tiny_bank(2, architecture, eos_token_ids=[EOS, 40])
    rows = make_rows([0, 1], tokens=12, greedy=True, min_new_tokens=min_new_tokens)
    if penalty != 1.0:
        rows = replace(
            rows, options=SamplingOptions(repetition_penalty=penalty, top_k=3, top_p=0.5, min_p=0.3)
        )
    rollout = bank.sample(rows)
    for slot in range(2):
        member = PeftMember(bank.base.model, lora(), bank.peft_files(slot)[0], [EOS, 40])
        for prompt_id, prompt in enumerate(PROMPTS):
            ids = torch.tensor([prompt])
            with torch.no_grad():
                tokens = member.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=12,
                    min_new_tokens=min_new_tokens or None,
                    repetition_penalty=penalty,
                    eos_token_id=[EOS, 40],
                    pad_token_id=PAD,
                )
            expected = tokens[0, len(prompt) :].tolist()
            mine = (rows.member_ids == slot) & (rows.prompt_ids == prompt_id)
            for row in mine.nonzero()[:, 0].tolist():
                assert rollout.actions[row][rollout.present[row]].tolist() == expected
    if penalty == 1.0:
        assert torch.equal(rollout.log_probs, torch.zeros_like(rollout.log_probs))


def test_greedy_and_sampled_rows_of_one_batch_do_not_affect_each_other():
    bank = tiny_bank()
    greedy = make_rows(range(3), greedy=True)
    sampled = with_robust_uniforms(bank, make_rows(range(3)))
    cold = torch.arange(len(sampled.prompt_ids)) % 2 == 0
    mixed = bank.sample(replace(sampled, temperature=torch.where(cold, 0.0, sampled.temperature)))
    assert torch.equal(mixed.actions[cold], bank.sample(greedy).actions[cold])
    assert torch.equal(mixed.actions[~cold], bank.sample(sampled).actions[~cold])


def test_decoding_stops_when_all_rows_ended():
    bank = tiny_bank(eos_token_ids=range(1, 40))  # most tokens end a completion
    rows = make_rows(range(3), tokens=40)
    calls = []
    handle = bank.base.model.base_model.register_forward_hook(lambda *_: calls.append(1))
    rollout = bank.sample(rows)
    handle.remove()
    longest = int(rollout.present.sum(1).max())
    assert longest < 40
    assert len(calls) == longest  # the prompts, then one pass for each token but the last


def test_no_eos_before_min_new_tokens():
    """Forbidden end tokens raise the other probabilities in sampling and scoring."""
    frequent = frequent_end_ids(tiny_bank())
    bank = tiny_bank(eos_token_ids=frequent)
    batch = sampled_batch(bank, tokens=8, min_new_tokens=5)
    ends = torch.isin(batch.actions, torch.tensor(frequent)) & batch.present
    assert not ends[:, :5].any()
    assert ends[:, 5].any()
    scored = bank.log_probs(batch)
    torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    unaware = bank.log_probs(replace(batch, inputs=replace(batch.inputs, min_new_tokens=0)))
    assert bool((scored[:, :5] > unaware[:, :5]).all())
    late = batch.present[:, 5:]
    torch.testing.assert_close(scored[:, 5:][late], unaware[:, 5:][late], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("architecture", "shared"), [("llama", True), ("llama", False), ("gemma2", True)]
)
def test_results_do_not_depend_on_order_or_batches(architecture, shared, device, monkeypatch):
    bank = different_members(tiny_model(architecture).to(device), 3)
    bank.base.shares_prefix = shared
    rows = make_rows(range(3), tokens=6)
    expected = bank.sample(rows).to(torch.device("cpu"))
    all_rows = torch.arange(len(rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    # The rows come in one batch, or in several.
    parts = (
        (sampling.CACHED_TOKENS, all_rows[::3]),
        (1, order[:6]),
        (11 * 10, order),
    )
    for cached_tokens, selected in parts:
        monkeypatch.setattr(sampling, "CACHED_TOKENS", cached_tokens)
        got = bank.sample(rows.select(selected)).to(torch.device("cpu"))
        for field in FIELDS:
            assert torch.equal(getattr(got, field), getattr(expected, field)[selected]), field
        torch.testing.assert_close(
            got.log_probs, expected.log_probs[selected], rtol=1e-4, atol=1e-4
        )


def test_check_interval_does_not_change_completions(monkeypatch):
    bank = tiny_bank()
    rows = with_robust_uniforms(bank, make_rows(range(3), tokens=9))
    expected = bank.sample(rows)
    assert 0 < int(expected.truncated.sum()) < len(rows)
    monkeypatch.setattr(sampling, "CHECK_EVERY_ON_CPU", 5)
    actual = bank.sample(rows)
    for field in FIELDS:
        assert torch.equal(getattr(actual, field), getattr(expected, field))
    torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=LOG_PROB, atol=LOG_PROB)


def test_options_apply_alike_to_single_rows_and_further_turns():
    bank = tiny_bank()
    options = OPTIONS["all"]
    rows = with_robust_uniforms(bank, replace(make_rows(range(3), tokens=8), options=options))
    together = bank.sample(replace(rows, keep=True))
    for row in (0, 7, 20):
        alone = bank.sample(rows.select(torch.tensor([row])))
        assert torch.equal(
            alone.actions[0][alone.present[0]], together.actions[row][together.present[row]]
        )
    second = with_robust_uniforms(bank, next_turn(rows, together, example_replies(rows, 0)))
    assert second.options == options
    kept = bank.sample(second)
    again = bank.sample(replace(second, kept=None, kept_rows=None))
    assert torch.equal(kept.actions, again.actions)
    member = PeftMember(bank.base.model, lora(), bank.peft_files(0)[0], [EOS])
    for row in (second.member_ids == 0).nonzero()[:3, 0].tolist():
        assert second.history is not None
        read = (*second.prompts[int(second.prompt_ids[row])], *second.history[row])
        expected = token_probabilities(member, read, options, float(second.temperature[row]))
        assert float(kept.log_probs[row, 0]) == pytest.approx(
            float(expected[kept.actions[row, 0]].log()), abs=1e-3
        )


def sample_with_reports(bank, rows):
    """Return a rollout and its reports: row, tokens and progress."""
    reports = []
    parts = [0.0]

    def on_finished(numbers, completions):
        reports.extend((*each, parts[-1]) for each in zip(numbers, completions, strict=True))

    stop = Stop()
    stop.listener = lambda work: parts.append(work.fraction)
    return bank.sample(replace(rows, stop=stop), on_finished=on_finished), reports


def tokens_of(rollout):
    return [
        row[present].tolist() for row, present in zip(rollout.actions, rollout.present, strict=True)
    ]


@pytest.mark.parametrize(("cached_tokens", "look_every"), [(sampling.CACHED_TOKENS, 1), (110, 8)])
def test_every_row_is_reported_once_when_finished(cached_tokens, look_every, monkeypatch):
    bank = bank_with_early_ends()
    monkeypatch.setattr(sampling, "CACHED_TOKENS", cached_tokens)
    monkeypatch.setattr(sampling, "CHECK_EVERY_ON_CPU", look_every)
    rows = make_rows(range(3), tokens=8)
    rows = rows.select(torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)))
    alone = bank.sample(rows)
    got, reports = sample_with_reports(bank, rows)
    assert all(
        torch.equal(getattr(got, name), getattr(alone, name)) for name in (*FIELDS, "log_probs")
    )
    assert sorted(row for row, *_ in reports) == list(range(len(rows)))
    assert {row: tokens for row, tokens, _ in reports} == dict(enumerate(tokens_of(got)))
    assert (
        min(part for *_, part in reports) < max(part for *_, part in reports) == pytest.approx(1.0)
    )


@pytest.mark.parametrize(
    ("moment", "most"), [(1, 0.0), (9, 0.5)], ids=["row by row", "from common beginnings"]
)
def test_reported_rows_survive_out_of_memory(moment, most, monkeypatch):
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", most)
    bank = bank_with_early_ends()
    rows = make_rows(range(3), tokens=12)
    expected = bank.sample(rows)
    head = bank.base.head
    calls = []

    def once(hidden):
        calls.append(len(hidden))
        if len(calls) == moment:
            raise torch.OutOfMemoryError("this once")
        return head(hidden)

    bank.base.head = once
    got, reports = sample_with_reports(bank, rows)
    assert sorted(row for row, *_ in reports) == list(range(len(rows)))
    assert {row: tokens for row, tokens, _ in reports} == dict(enumerate(tokens_of(got)))
    assert torch.equal(got.actions, expected.actions)
    assert torch.equal(got.truncated, expected.truncated)
    ended = int((expected.present.sum(1) < moment).sum())
    half = -(-(len(rows) - ended) // 2)
    assert calls[moment] == half if most == 0.0 else calls[moment] <= half, (
        "half of the rows not reported yet"
    )


def first_rows(rollout):
    fields = {
        name: getattr(rollout, name)[1:]
        for name in ("actions", "present", "log_probs", "truncated", "action_mask")
    }
    return replace(rollout, **fields)


WRONG_ROLLOUTS = {
    "nothing": (lambda rollout: None, "must return a Rollout, got None"),
    "fewer rows": (first_rows, "one row for each of 8, got 7"),
    "lists": (lambda rollout: replace(rollout, actions=rollout.actions.tolist()), "actions"),
    "numbers as mask": (lambda rollout: replace(rollout, present=rollout.present.int()), "present"),
    "half precision": (
        lambda rollout: replace(rollout, log_probs=rollout.log_probs.half()),
        "log_probs .*float32.*got .*float16",
    ),
    "one log-probability": (
        lambda rollout: replace(rollout, log_probs=rollout.log_probs.sum(1)),
        "log_probs",
    ),
    "tokens of another vocabulary": (
        lambda rollout: replace(rollout, actions=rollout.actions + VOCABULARY),
        "tokens of the sampler must be in the vocabulary",
    ),
}


@pytest.mark.parametrize("name", WRONG_ROLLOUTS)
def test_wrong_results_of_a_users_sampler_are_refused(name):
    change, message = WRONG_ROLLOUTS[name]
    population = tiny_population(2)
    bank = population.members.banks["default"]

    class Engine:
        def sample(self, rows, *, base=False, on_finished=None):
            return change(bank.sample(rows, base=base))

        def sync(self, slots):
            pass

    population.sample_with(Engine())
    with pytest.raises(ValueError, match=message):
        population.collect(tiny_env(), step=0, samples_per_step=4, starts_per_step=1)


@pytest.mark.parametrize("wrong", [lambda rows: None, object()])
def test_a_sampler_has_two_methods(wrong):
    with pytest.raises(ValueError, match="methods sample and sync"):
        tiny_population(1).sample_with(wrong)
