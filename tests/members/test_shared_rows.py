"""Rows that run once: identical completions in learning, equal beginnings in sampling.

Micro-batches.
"""

import itertools
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.functional.matmul import padded_rows
from evogrpo.members.fast_llama import decode
from evogrpo.members.language.micro_batches import RowSizes, micro_batches
from evogrpo.randomness import generator
from evogrpo.records import SamplingOptions
from evogrpo.testing.samplers import (
    PROMPTS,
    as_batch,
    different_members,
    make_rows,
    with_robust_uniforms,
)
from tests.policy_banks import assert_gradients_agree
from tests.tiny_batches import grpo_loss, rows_run, tiny_bank
from tests.tiny_models import EOS, tiny_model

SIZE = 3
HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(SIZE)}


def repeated(bank):
    """Return shuffled completions with repetitions, which differ in all but their tokens."""
    rows = make_rows(range(SIZE), tokens=5, prompts=PROMPTS[:2])
    batch = as_batch(rows, bank.sample(rows))
    batch = batch.select(
        torch.randperm(9 * len(rows), generator=torch.Generator().manual_seed(0)) % len(rows)
    )
    kind = torch.arange(len(batch)) % 4
    mask = batch.action_mask.clone()
    chosen = batch.present.clone()
    mask[kind <= 1, 1] = False
    chosen[(kind == 0) & (batch.actions[:, 2] != EOS), 1] = (
        False  # a reply, so the next token begins a turn
    )
    temperature = batch.inputs.temperature * torch.where(
        kind == 2, 1.0 + torch.finfo(torch.float32).eps, 1.0
    )
    inputs = replace(batch.inputs, temperature=temperature, min_new_tokens=1)
    return replace(
        batch,
        inputs=inputs,
        action_mask=mask,
        chosen=chosen,
        rewards=torch.arange(len(batch)) % 5.0,
    )


@pytest.fixture
def row_counts(monkeypatch):
    """Return a function that records the number of rows a bank runs."""

    def watch(bank):
        sizes = []
        hidden = bank.base.hidden

        def watched(prompts, slots, rows, *others):
            sizes.append(len(rows))
            return hidden(prompts, slots, rows, *others)

        monkeypatch.setattr(bank.base, "hidden", watched)
        return sizes

    return watch


def distinct(batch, *, of_base=False):
    """Count distinct completions."""
    if of_base:
        members = torch.zeros_like(batch.member_ids)
    else:
        members = batch.member_ids
    columns = [members, batch.inputs.prompt_ids, batch.inputs.temperature]
    columns += [torch.where(batch.present, batch.actions, -1), batch.action_mask, batch.chosen]
    lists = [column.tolist() for column in columns]
    return len({tuple(map(str, row)) for row in zip(*lists, strict=True)})


@pytest.mark.parametrize(("architecture", "entropy_gradient"), [("llama", True), ("gemma2", False)])
def test_shared_rows_match_running_every_row(
    architecture, entropy_gradient, row_counts, monkeypatch
):
    bank = tiny_bank(SIZE, architecture, micro_batch_tokens=70)
    batch = repeated(bank)
    loss = grpo_loss(batch)
    sizes = row_counts(bank)

    def loss_with_entropies(rows, log_probs, entropies):
        return loss(rows, log_probs, entropies) - 0.1 * entropies.sum(1)

    def results():
        sizes.clear()
        scores = bank.log_probs(batch), bank.entropies(batch), bank.reference_log_probs(batch)
        initial = torch.zeros_like(scores[0]), scores[1].clone()
        with bank.base.working():
            learnt = bank.gradients(
                batch, range(SIZE), loss_with_entropies, initial, entropy_gradient=entropy_gradient
            )
            return (
                scores,
                [(slot, gradient.clone(), value) for slot, gradient, value in learnt],
                sum(sizes),
            )

    scores, learnt, ran = results()
    monkeypatch.setenv("EVOGRPO_SLOW", "1")  # the model stays the same
    expected, expected_learnt, all_ran = results()
    assert all_ran == 4 * len(batch)
    assert ran == 3 * distinct(batch) + distinct(batch, of_base=True) < 0.6 * all_ran
    for one, other in zip(scores, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for (slot, gradient, value), (other, *wanted) in zip(learnt, expected_learnt, strict=True):
        assert slot == other
        assert value == pytest.approx(wanted[1], rel=1e-3, abs=1e-4)
        assert_gradients_agree(gradient, wanted[0], label=f"gradient of slot {slot}")


def test_base_runs_identical_rows_of_members_once(row_counts):
    bank = tiny_bank(SIZE)
    batch = repeated(bank)
    alone = batch.select((batch.member_ids == 0).nonzero()[:, 0])
    copies = replace(
        alone.select(torch.arange(len(alone)).repeat(SIZE)),
        member_ids=torch.arange(SIZE).repeat_interleave(len(alone)),
    )
    sizes = row_counts(bank)
    found = bank.reference_log_probs(copies)
    assert sizes == [distinct(alone)]
    assert torch.equal(found, bank.reference_log_probs(alone).repeat(SIZE, 1))
    members = bank.log_probs(copies)
    assert sum(sizes) == (2 + SIZE) * distinct(alone)
    assert not torch.allclose(members[: len(alone)], members[-len(alone) :], atol=1e-2), (
        "their adapters differ"
    )


def alike(members=range(SIZE), *, copies=4, temperature=0.4, **settings):
    """Return rows of which many sample equal tokens: low temperatures, large groups."""
    rows = make_rows(members, **settings)
    order = torch.arange(len(rows)).repeat_interleave(copies)
    draws = torch.rand(
        len(order), rows.uniforms.shape[1], generator=torch.Generator().manual_seed(3)
    )
    rows = replace(rows.select(order), uniforms=draws.double())
    return replace(rows, temperature=torch.full_like(rows.temperature, temperature))


def distinct_prefixes(rows, rollout, at):
    """Return the distinct prefixes of `at` tokens."""
    if at < rollout.present.shape[1]:
        unfinished = rollout.present[:, at]
    else:
        unfinished = torch.zeros(len(rows), dtype=torch.bool)
    return {
        (int(rows.member_ids[row]), int(rows.prompt_ids[row]), *rollout.actions[row, :at].tolist())
        for row in unfinished.nonzero()[:, 0].tolist()
    }


@pytest.mark.parametrize("end_ids", [[1], list(range(1, 12))])
def test_sampling_of_shared_prefixes_matches_separate_rows(end_ids, monkeypatch):
    bank = tiny_bank(SIZE, eos_token_ids=end_ids)
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    rows = with_robust_uniforms(bank, alike(tokens=8, min_new_tokens=2, temperature=0.2))
    counts = rows_run(bank, monkeypatch)
    expected = bank.sample(rows)
    separate_counts = list(counts)
    counts.clear()
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 1.0)
    got = bank.sample(rows)
    for name in ("actions", "present", "truncated"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    needed = [len(distinct_prefixes(rows, expected, at)) for at in range(1, len(counts) + 1)]
    assert counts[0] == padded_rows(needed[0])
    assert all(least <= ran for least, ran in zip(needed, counts, strict=True))
    assert sum(counts) < 0.7 * sum(separate_counts)


def test_rows_run_separately_when_few_prefixes_are_equal(monkeypatch):
    bank = tiny_bank(SIZE)
    rows = with_robust_uniforms(bank, alike(tokens=12, temperature=0.7, min_new_tokens=12))
    counts = rows_run(bank, monkeypatch)
    got = bank.sample(rows)
    needed = [len(distinct_prefixes(rows, got, at)) for at in range(1, 12)]
    within = [least <= decode.MAX_DISTINCT_SHARE * len(rows) for least in needed]
    assert any(within)
    assert not all(within)
    assert counts == [
        padded_rows(least) if few else len(rows) for least, few in zip(needed, within, strict=True)
    ]
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    assert torch.equal(bank.sample(rows).actions, got.actions)


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(), SamplingOptions(top_k=5, top_p=0.7, min_p=0.05, repetition_penalty=1.3)],
)
def test_shared_prefixes_match_with_all_options_and_different_temperatures(options, monkeypatch):
    bank = tiny_bank(SIZE)
    rows = alike(tokens=8, min_new_tokens=8)
    temperature = rows.temperature + 0.1 * (torch.arange(len(rows)) % 2)
    rows = with_robust_uniforms(bank, replace(rows, options=options, temperature=temperature))
    got = bank.sample(rows)
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    expected = bank.sample(rows)
    assert torch.equal(got.actions, expected.actions)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


def test_greedy_rows_never_separate(monkeypatch):
    bank = tiny_bank(SIZE)
    rows = alike(tokens=8, min_new_tokens=8, temperature=0.0)
    counts = rows_run(bank, monkeypatch)
    bank.sample(rows)
    assert set(counts) == {9}, "one for each prompt of each member"
    counts.clear()
    monkeypatch.setenv("EVOGRPO_SLOW", "1")
    slow = different_members(tiny_model("llama"), SIZE)
    slow.sample(rows)
    assert set(counts) == {len(rows)}, "slow mode runs each row"


def test_further_turns_resume_from_shared_prefixes(monkeypatch):
    bank = tiny_bank(SIZE)
    rows = with_robust_uniforms(
        bank, replace(alike(tokens=8, min_new_tokens=8, temperature=0.2), keep=True)
    )
    turns = []
    for most in (1.0, 0.0):
        monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", most)
        first = bank.sample(rows)
        assert first.kept is not None
        history = tuple((*completion, 3, 4) for completion in map(tuple, first.actions.tolist()))
        turns.append(bank.sample(replace(rows, history=history, kept=first.kept)))
    assert torch.equal(turns[0].present, turns[1].present)
    torch.testing.assert_close(
        turns[0].log_probs[:, 0], turns[1].log_probs[:, 0], rtol=1e-4, atol=1e-4
    )


LENGTHS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=0, max_size=20)


@given(
    LENGTHS,
    st.lists(st.integers(1, 9), min_size=5, max_size=5),
    st.integers(1, 120),
    st.integers(1, 3),
)
def test_micro_batches_respect_the_budget(rows, widths, budget, ranks):
    rows = sorted(rows, key=lambda row: row[0])
    prefixes = [prefix for prefix, _ in rows]
    members = [prefix // 2 for prefix in prefixes]
    lengths = [length for _, length in rows]
    sizes = RowSizes(members, prefixes, [widths[prefix] for prefix in prefixes], lengths)
    parts = micro_batches([range(len(rows))], sizes, budget, ranks)
    assert sorted(chain.from_iterable(parts)) == list(range(len(rows)))
    # Only a few gradients exist at once, as members follow each other.
    in_order = [members[row] for part in parts for row in part]
    assert in_order == sorted(in_order)
    for part, following in itertools.zip_longest(parts, parts[1:]):
        assert part == sorted(part)
        assert len(part) == 1 or sizes.padded_tokens(part) <= budget
        # Full: the next rows would exceed the budget.
        if following is not None and ranks == 1:
            assert sizes.padded_tokens([*part, *following]) > budget


def test_ranks_are_busy_and_padding_is_small():
    """Eight prompts of 256 tokens, with eight completions of 1 to 1,024 tokens each."""
    lengths = (1 + 1023 * generator(0, "lengths").random(64)).astype(int).tolist()
    prefixes = [row // 8 for row in range(64)]
    sizes = RowSizes([0] * 64, prefixes, [256] * 64, lengths)
    real = 8 * 256 + sum(lengths)
    assert sizes.padded_tokens(range(64)) > 8192
    for ranks, count in ((1, None), (8, 8)):
        parts = micro_batches([range(64)], sizes, 8192, ranks)
        tokens = [sizes.padded_tokens(part) for part in parts]
        assert sum(tokens) < 1.45 * real
        if count is not None:
            assert len(parts) == count
            assert max(tokens) < 1.5 * real / ranks
