"""top_k, top_p, min_p and repetition_penalty match transformers."""

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

from evogrpo.data import SamplingBatch, SamplingOptions
from evogrpo.testing.samplers import (
    PROMPTS,
    different_members,
    example_replies,
    make_rows,
    next_turn,
    with_robust_uniforms,
)
from tests.oracles.peft_members import PeftMember
from tests.tiny_batches import lora
from tests.tiny_models import EOS, PAD, VOCABULARY, tiny_model

OPTIONS = {
    "top_k": SamplingOptions(top_k=5),
    "top_p": SamplingOptions(top_p=0.6),
    "min_p": SamplingOptions(min_p=0.2),
    "repetition_penalty": SamplingOptions(repetition_penalty=1.8),
    "all": SamplingOptions(top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=0.6),
}


def processors(options: SamplingOptions, temperature: float) -> LogitsProcessorList:
    """Return the logits processors of transformers for these options."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(options.repetition_penalty)])
    chain.append(TemperatureLogitsWarper(temperature))
    if options.top_k:
        chain.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        chain.append(MinPLogitsWarper(options.min_p))
    return chain


@torch.no_grad()
def chances(member: PeftMember, tokens, options: SamplingOptions, temperature: float) -> torch.Tensor:
    """Return the distribution of the next token."""
    ids = torch.tensor([tokens])
    logits = member.model(input_ids=ids).logits[:, -1].clone()
    return processors(options, temperature)(ids, logits).double().softmax(1)[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_token_frequencies_match_transformers(name):
    options, bank, count = OPTIONS[name], different_members(tiny_model("llama"), 1), 400
    member = PeftMember(bank.base.model, lora(), bank.peft_files(0)[0], [EOS])
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    uniforms = torch.stack([torch.full_like(grid, 0.3), grid], 1)
    rows = SamplingBatch(
        prompts=(PROMPTS[1],),
        prompt_ids=torch.zeros(count, dtype=torch.long),
        member_ids=torch.zeros(count, dtype=torch.long),
        temperature=torch.full((count,), 0.8),
        uniforms=uniforms,
        min_new_tokens=0,
        options=options,
    )
    drawn = bank.sample(rows)
    assert not drawn.exact, "the trainer scores the whole distribution"
    (first,) = drawn.actions[:, 0].unique().tolist()
    expected = chances(member, (*PROMPTS[1], first), options, 0.8)
    frequency = drawn.actions[:, 1].bincount(minlength=VOCABULARY) / count
    assert float((frequency - expected).abs().max()) <= 1 / count + 1e-4
    recorded = drawn.log_probs[:, 1].double()
    torch.testing.assert_close(recorded, expected[drawn.actions[:, 1]].log(), rtol=1e-4, atol=1e-4)
    whole = bank.sample(replace(rows, options=SamplingOptions()))
    assert whole.exact
    assert not torch.equal(whole.actions, drawn.actions)


def test_options_with_other_rows_and_further_turns():
    bank, options = different_members(tiny_model("llama"), 3), OPTIONS["all"]
    rows = with_robust_uniforms(bank, replace(make_rows(range(3), tokens=8), options=options))
    together = bank.sample(replace(rows, keep=True))
    for row in (0, 7, 20):
        alone = bank.sample(rows.select(torch.tensor([row])))
        assert torch.equal(alone.actions[0][alone.present[0]], together.actions[row][together.present[row]])
    second = with_robust_uniforms(bank, next_turn(rows, together, example_replies(rows, 0)))
    assert second.options == options
    kept = bank.sample(second)
    again = bank.sample(replace(second, kept=None, kept_rows=None))
    assert torch.equal(kept.actions, again.actions)
    member = PeftMember(bank.base.model, lora(), bank.peft_files(0)[0], [EOS])
    for row in (second.member_ids == 0).nonzero()[:3, 0].tolist():
        assert second.history is not None
        read = (*second.prompts[int(second.prompt_ids[row])], *second.history[row])
        expected = chances(member, read, options, float(second.temperature[row]))
        assert float(kept.log_probs[row, 0]) == pytest.approx(float(expected[kept.actions[row, 0]].log()), abs=1e-3)


@pytest.mark.parametrize("penalty", [0.7, 1.5])
def test_repetition_penalty_matches_generate(penalty):
    bank = different_members(tiny_model("llama"), 1, eos_token_ids=[EOS])
    options = SamplingOptions(repetition_penalty=penalty, top_k=3, top_p=0.5, min_p=0.3)
    rows = replace(make_rows([0], tokens=12, greedy=True), options=options)
    rollout = bank.sample(rows)
    member = PeftMember(bank.base.model, lora(), bank.peft_files(0)[0], [EOS])
    for prompt_id, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = member.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                repetition_penalty=penalty, eos_token_id=EOS, pad_token_id=PAD,
            )  # fmt: skip
        expected = whole[0, len(prompt) :].tolist()
        for row in (rows.prompt_ids == prompt_id).nonzero()[:, 0].tolist():
            assert rollout.actions[row][rollout.present[row]].tolist() == expected
    plain = bank.sample(replace(rows, options=SamplingOptions()))
    assert plain.actions.shape != rollout.actions.shape or not torch.equal(plain.actions, rollout.actions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"), -0.5)),
        *(("min_p", value) for value in (1.0, -0.1, float("nan"))),
        *(("repetition_penalty", value) for value in (0.0, -1.0, float("inf"), float("nan"))),
    ],
)
def test_options_out_of_range_raise(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*, got {value}: "):
        SamplingOptions(**{name: value})
