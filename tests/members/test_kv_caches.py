"""KV caches: prompts that run once per member, and turns that resume with replies."""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, MambaConfig

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.members.language import sampling
from evogrpo.members.language.bank import AdapterBank
from evogrpo.testing.samplers import (
    PROMPTS,
    different_members,
    example_replies,
    make_rows,
    next_turn,
    with_robust_uniforms,
)
from tests.oracles.peft_members import PeftMember
from tests.tiny_batches import grpo_loss, join_turns, lora, sampled_batch, tiny_bank
from tests.tiny_models import COMMON, EOS, PAD, VOCABULARY, tiny_model

SYSTEM = (7, 9, 4, 8, 5, 6, 11, 10, 9)
MIN_TOKENS = 2  # minimum number of tokens of every turn


def frequent_end_ids(bank):
    """Return EOS tokens that end rows at different lengths."""
    batch = sampled_batch(bank, tokens=8)
    return (
        batch.actions[:, 1:]
        .flatten()
        .bincount(minlength=VOCABULARY)
        .argsort(descending=True)[:3]
        .tolist()
    )


def bank_with_early_ends(architecture="llama", **settings):
    """Build a bank in which many rows end early."""
    ends = [EOS, *frequent_end_ids(tiny_bank(3, architecture))]
    return tiny_bank(3, architecture, eos_token_ids=ends, **settings)


def tokens_fed(model, work):
    """Return the number of tokens, padding included, that a call feeds, and its result."""
    counts = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    result = work()
    hook.remove()
    return sum(counts), result


def sample_turns(bank, rows, turns=3, like=None):
    """Sample turns with resumed caches and again without; return (rows, rollout, replies) of each.

    `like` are turns of the same bank; their uniforms, which are clear of token boundaries, are used
    again.
    """
    rows = replace(rows, keep=True)
    found = []
    for turn in range(turns):
        if like is None:
            rows = with_robust_uniforms(bank, rows)
        else:
            rows = replace(rows, uniforms=like[turn][0].uniforms)
        rollout = bank.sample(rows)
        replies = example_replies(rows, turn)
        again = bank.sample(replace(rows, kept=None, kept_rows=None))
        for name in ("actions", "present", "truncated"):
            assert torch.equal(getattr(rollout, name), getattr(again, name)), (turn, name)
        torch.testing.assert_close(rollout.log_probs, again.log_probs, rtol=1e-4, atol=1e-4)
        found.append((rows, rollout, replies))
        rows = next_turn(rows, rollout, replies, seed=turn + 1)
    return found


@pytest.fixture(scope="module")
def before():
    """Return a bank in which many rows end early, and its sampled turns."""
    bank = bank_with_early_ends()
    return bank, sample_turns(bank, make_rows(range(3), tokens=5, prompts=PROMPTS[:2]))


@pytest.mark.parametrize(("cached_tokens", "turns"), [(1, 1), (70, 2)])
def test_saved_caches_are_limited(before, cached_tokens, turns, monkeypatch):
    bank, expected = before
    rows = make_rows(range(3), tokens=5, prompts=PROMPTS[:2])
    monkeypatch.setattr(sampling, "CACHED_TOKENS", cached_tokens)
    got = sample_turns(bank, rows, turns, like=expected)
    for (_, one, _), (_, other, _) in zip(expected, got, strict=False):
        assert torch.equal(one.actions, other.actions)
    kept = got[0][1].kept
    if cached_tokens == 1:
        assert kept is None
    else:
        assert 0 < int((kept.part_of >= 0).sum()) < len(rows)


def test_out_of_memory_halves_resumed_rows(before, monkeypatch):
    bank, expected = before
    rows = make_rows(range(3), tokens=5, prompts=PROMPTS[:2], keep=True)
    head = bank.base.head

    def small(hidden):
        if len(hidden) > 5:
            raise torch.OutOfMemoryError("no room for more logits")
        return head(hidden)

    monkeypatch.setattr(bank.base, "head", small)
    for (_, one, _), (_, other, _) in zip(
        expected[:2], sample_turns(bank, rows, turns=2, like=expected), strict=True
    ):
        assert torch.equal(one.actions, other.actions)
        assert len(other.kept.parts) > len(one.kept.parts)


def test_some_rows_resume_in_any_order():
    bank = bank_with_early_ends()
    rows = make_rows(range(3), tokens=5, prompts=PROMPTS[:2], keep=True)
    first = bank.sample(rows)
    further = with_robust_uniforms(bank, next_turn(rows, first, example_replies(rows, 0)))
    everyone = bank.sample(further)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: len(rows) // 2]
    chosen = further.select(order)
    assert torch.equal(chosen.kept_rows, order)
    model = bank.base.model
    tokens, resumed = tokens_fed(model, lambda: bank.sample(chosen))
    assert torch.equal(resumed.actions, everyone.actions[order])
    assert tokens < tokens_fed(model, lambda: bank.sample(replace(chosen, kept=None)))[0]
    # A later turn resumes as well; its rows are counted by the rollout that kept them.
    third = with_robust_uniforms(
        bank, next_turn(chosen, resumed, example_replies(chosen, 1), seed=2)
    )
    assert torch.equal(
        bank.sample(third).actions, bank.sample(replace(third, kept=None, kept_rows=None)).actions
    )


@pytest.mark.parametrize("change", ["weights", "base", "history", "another sampler"])
def test_outdated_caches_are_not_used(change):
    bank = tiny_bank()
    rows = make_rows(range(3), tokens=4, prompts=PROMPTS[:2], keep=True)
    first = bank.sample(rows)
    replies = example_replies(rows, 0)
    further = next_turn(rows, first, replies)
    if change == "weights":
        bank.inherit([1, 2, 0])
    elif change == "history":
        edited = tuple((*later[:1], 33, *later[2:]) for later in further.history)
        further = replace(further, history=edited)
    elif change == "another sampler":
        further = replace(further, kept=object())
    base = change == "base"
    further = with_robust_uniforms(bank, further, base=base)
    expected = bank.sample(replace(further, kept=None), base=base)
    got = bank.sample(further, base=base)
    assert torch.equal(got.actions, expected.actions)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "shared", "system"),
    [
        ("llama", True, SYSTEM),
        ("llama", False, ()),
        ("gemma2", True, SYSTEM),
        ("gemma2", True, ()),
        ("gpt2", True, ()),
        ("opt", True, ()),
    ],
)
def test_later_turns_match_a_plain_model(architecture, shared, system):
    """Turns that resume equal turns that run again, and a plain model, also in gradients."""
    bank = bank_with_early_ends(architecture, micro_batch_tokens=90)
    bank.base.shares_prefix = shared
    ends = bank.end_ids.tolist()
    model = bank.base.model
    given = tuple((*system, *prompt) for prompt in PROMPTS)
    tokens = 7 if architecture == "gemma2" else 5
    found = sample_turns(
        bank, make_rows(range(3), tokens=tokens, min_new_tokens=MIN_TOKENS, prompts=given), turns=2
    )
    rows = found[0][0]
    turns = [(rollout, replies) for _, rollout, replies in found]
    assert turns[0][0].present.sum(1).unique().numel() > 2, "the test needs ragged completions"
    assert all((rollout.kept is not None) is shared for rollout, _ in turns)
    batch = join_turns(rows, turns)
    # Prompts run once per member, or once per row of a group.
    prompts = (3 if shared else 2 + 3 + 4) * sum(map(len, given))
    assert sum(bank.cost(batch).values()) == int(batch.present.sum()) + prompts  # with replies
    scored = bank.log_probs(batch)
    torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    weights = torch.sin(torch.arange(scored.numel(), dtype=torch.float32)).view(scored.shape)
    steps = {1: Hyperparameters(lr=1e-9, max_grad_norm=1e9)}
    bank.update(batch, lambda rows, log_probs, entropies: (weights[rows] * log_probs).sum(1), steps)
    member = PeftMember(model, lora(), bank.peft_files(1)[0], ends)
    total = torch.zeros(())
    for row in (rows.member_ids == 1).nonzero()[:, 0].tolist():
        context = list(rows.prompts[int(rows.prompt_ids[row])])
        column = 0
        for rollout, replies in turns:
            sampled_tokens = rollout.actions[row][rollout.present[row]].tolist()
            temperature = float(rows.temperature[row])
            expected = member.log_probs(
                context, sampled_tokens, temperature=temperature, min_new_tokens=MIN_TOKENS
            )
            own = slice(column, column + len(sampled_tokens))
            torch.testing.assert_close(scored[row, own], expected.detach(), rtol=1e-4, atol=1e-4)
            total = total + (weights[row, own] * expected).sum()
            context += [*sampled_tokens, *replies[row]]
            column += len(sampled_tokens) + len(replies[row])
    total.backward()
    moment = bank.state(1)["exp_avg"]  # after one step of AdamW: a tenth of the gradient
    for target in bank.targets:
        stem = f"base_model.model.{target.name}"
        for name, own in zip(("lora_A", "lora_B"), target.matrices(moment), strict=True):
            gradient = member.parameters[f"{stem}.{name}.weight"].grad
            bound = {"rtol": 2e-3, "atol": 1e-5 * float(gradient.abs().max()) + 1e-7}
            torch.testing.assert_close(own, 0.1 * gradient, msg=stem, **bound)


HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(3)}

UNSHAREABLE = {
    "state space": MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=PAD,
        eos_token_id=EOS,
    ),
    "hybrid": Lfm2Config(**COMMON, full_attn_idxs=[1]),
}


def test_common_beginning_runs_once_per_member():
    model = tiny_model("llama")
    bank = different_members(model, 3)
    widths = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    bank.sample(make_rows(range(3), tokens=1, prompts=((*SYSTEM, 3, 4), (*SYSTEM, 5))))
    hook.remove()
    assert widths == [(3, len(SYSTEM)), (6, 2)]


@pytest.mark.filterwarnings("ignore:.*KV cache")
@pytest.mark.parametrize("kind", UNSHAREABLE)
def test_model_without_shared_cache_is_exact(kind):
    model = AutoModelForCausalLM.from_config(UNSHAREABLE[kind])
    # Fused kernels bypass the hooks of these modules.
    config = lora(exclude_modules=["out_proj", "dt_proj"])
    bank = different_members(model, 3, lora_config=config)
    assert not bank.base.shares_prefix
    batch = sampled_batch(bank, tokens=4, prompts=PROMPTS[:2])
    scored = bank.log_probs(batch)
    torch.testing.assert_close(scored, batch.sampler_log_probs, rtol=1e-4, atol=1e-4)
    for slot in range(3):
        member = PeftMember(model, config, bank.peft_files(slot)[0], [EOS])
        for row in (batch.member_ids == slot).nonzero()[:, 0].tolist():
            expected = member.log_probs(
                PROMPTS[int(batch.inputs.prompt_ids[row])],
                batch.actions[row][batch.present[row]].tolist(),
                temperature=float(batch.inputs.temperature[row]),
            )
            torch.testing.assert_close(
                scored[row][batch.present[row]], expected.detach(), rtol=1e-4, atol=1e-4
            )
    turns = sample_turns(bank, make_rows(range(3), tokens=3, prompts=PROMPTS[:1]), turns=2)
    assert all(rollout.kept is None for _, rollout, _ in turns)
    assert all(
        r.grad_norm > 0
        for r in bank.update(batch, grpo_loss(batch), HYPERPARAMETERS).reports.values()
    )


def test_fallback_warns_once():
    model = AutoModelForCausalLM.from_config(UNSHAREABLE["state space"])
    with pytest.warns(UserWarning, match="KV cache of MambaForCausalLM") as caught:
        bank = AdapterBank(model, size=2, pad_token_id=PAD, eos_token_ids=[EOS], lora_config=lora())
    assert len([w for w in caught if "cache" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampled_batch(bank)


def test_unsupported_head_raises():
    model = tiny_model("llama")
    inner = model.forward

    def scaled(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match="vocabulary head"):
        AdapterBank(model, size=1, pad_token_id=PAD, eos_token_ids=[EOS])
