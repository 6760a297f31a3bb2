"""Identical completions run once and count several times."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.data import Batch, TokenInputs
from evogrpo.models.language.forward import repetitions
from evogrpo.testing.policy_banks import assert_gradients_agree
from evogrpo.testing.samplers import as_batch, different_members, make_rows
from tests.tiny_batches import grpo_loss, same_state
from tests.tiny_models import tiny_model

SIZE = 3
HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-3, max_grad_norm=1e6) for slot in range(SIZE)}


@pytest.fixture(autouse=True)
def unset_evogrpo_slow(monkeypatch):
    """Unset EVOGRPO_SLOW."""
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)


def repeated(bank, *, tokens=8):
    """Return shuffled completions, most of them repeated, with different rewards."""
    rows = make_rows(range(SIZE), tokens=tokens)
    batch = as_batch(rows, bank.sample(rows))
    often = torch.tensor([1 + number % 4 for number in range(len(batch))])
    many = torch.arange(len(batch)).repeat_interleave(often)
    batch = batch.select(many[torch.randperm(len(many), generator=torch.Generator().manual_seed(0))])
    return replace(batch, rewards=torch.arange(len(batch)) % 5.0), int((often > 1).sum())


@pytest.fixture
def row_counts(monkeypatch):
    """Return a function that records the number of rows a bank runs."""

    def watch(bank):
        sizes, hidden = [], bank.base.hidden

        def watched(prompts, slots, rows, *others):
            sizes.append(len(rows))
            return hidden(prompts, slots, rows, *others)

        monkeypatch.setattr(bank.base, "hidden", watched)
        return sizes

    return watch


def distinct(batch, *, of_base=False):
    """Count distinct completions."""
    columns = ("prompt_ids", "temperature")
    return len(
        {
            (
                0 if of_base else int(batch.member_ids[row]),
                *(float(getattr(batch.inputs, name)[row]) for name in columns),
                *batch.actions[row][batch.present[row]].tolist(),
            )
            for row in range(len(batch))
        }
    )


@pytest.mark.parametrize(
    ("architecture", "entropy_gradient"),
    [("llama", False), ("llama", True), ("gemma2", False), ("gpt2", True), ("opt", False)],
)
def test_matches_running_every_row(architecture, entropy_gradient, row_counts, monkeypatch):
    bank = different_members(tiny_model(architecture), SIZE, micro_batch_tokens=70)
    batch, several = repeated(bank)
    assert several > 10
    loss, sizes = grpo_loss(batch), row_counts(bank)

    def both(rows, log_probs, entropies):
        return loss(rows, log_probs, entropies) - 0.1 * entropies.sum(1)

    def found():
        sizes.clear()
        scores = bank.log_probs(batch), bank.entropies(batch), bank.reference_log_probs(batch)
        with bank.base.working():
            learnt = bank.passes.gradients(
                batch,
                range(SIZE),
                both,
                (torch.zeros_like(scores[0]), scores[1].clone()),
                entropy_gradient=entropy_gradient,
            )
            return scores, [(slot, gradient.clone(), value) for slot, gradient, value in learnt], sum(sizes)

    scores, learnt, ran = found()
    monkeypatch.setenv("EVOGRPO_SLOW", "1")  # the model stays the same
    expected, expected_learnt, all_ran = found()
    assert all_ran == 4 * len(batch)
    assert ran == 3 * distinct(batch) + distinct(batch, of_base=True) < 0.6 * all_ran
    for one, other in zip(scores, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for (slot, gradient, value), (other, expected_gradient, expected_value) in zip(
        learnt, expected_learnt, strict=True
    ):
        assert slot == other
        assert value == pytest.approx(expected_value, rel=1e-3, abs=1e-4)
        assert_gradients_agree(gradient, expected_gradient, what=f"gradient of slot {slot}")


def test_base_runs_identical_rows_of_members_once(row_counts):
    bank = different_members(tiny_model("llama"), SIZE)
    batch, _ = repeated(bank)
    alone = batch.select((batch.member_ids == 0).nonzero()[:, 0])
    every = Batch(
        inputs=replace(alone.inputs.select(torch.arange(len(alone)).repeat(SIZE))),
        member_ids=torch.arange(SIZE).repeat_interleave(len(alone)),
        **{
            name: getattr(alone, name).repeat(SIZE, *([1] * (getattr(alone, name).dim() - 1)))
            for name in ("actions", "present", "action_mask", "rewards", "group_ids")
        },
    )
    sizes = row_counts(bank)
    found = bank.reference_log_probs(every)
    assert sizes == [distinct(alone)]
    assert torch.equal(found, bank.reference_log_probs(alone).repeat(SIZE, 1))
    members = bank.log_probs(every)
    assert sum(sizes) == (2 + SIZE) * distinct(alone)
    assert not torch.allclose(members[: len(alone)], members[-len(alone) :], atol=1e-2), "their adapters differ"


def test_completion_beyond_memory_fails_one_member():
    bank, control = (different_members(tiny_model("llama"), SIZE, micro_batch_tokens=64) for _ in range(2))
    batch, _ = repeated(bank)
    loss = grpo_loss(batch)
    text = batch.actions[(batch.member_ids == 1).nonzero()[0, 0]]
    giants = {row for row in range(len(batch)) if torch.equal(batch.actions[row], text)}
    before = bank.state(1)

    def never(rows, log_probs, entropies):
        if giants & set(rows.tolist()):
            raise torch.OutOfMemoryError("too long")
        return loss(rows, log_probs, entropies)

    got, expected = (
        bank.update(batch, never, HYPERPARAMETERS).reports,
        control.update(batch, loss, HYPERPARAMETERS).reports,
    )
    assert np.isnan(got[1].grad_norm)
    assert same_state(bank.state(1), before)
    for slot in (0, 2):
        assert got[slot].grad_norm == pytest.approx(expected[slot].grad_norm, rel=1e-3)


NUMBERS = st.integers(0, 1)
ROWS = st.lists(
    st.tuples(NUMBERS, NUMBERS, NUMBERS, st.tuples(NUMBERS, NUMBERS, NUMBERS), st.integers(1, 3), NUMBERS, NUMBERS),
    min_size=1,
    max_size=12,
)


def batch_of(rows):
    """Build a batch from tuples of member, prompt, temperature, tokens, length, mask and turns."""
    members, prompts, warmer, tokens, lengths, heard, turns = (
        torch.tensor(column) for column in zip(*rows, strict=True)
    )
    present = torch.arange(3) < lengths[:, None]
    chosen = present.clone()
    chosen[:, 1] &= turns == 0  # otherwise a reply
    mask = chosen.clone()
    mask[:, 0] &= heard == 0
    return Batch(
        inputs=TokenInputs(
            prompts=((3, 4), (5,)),
            prompt_ids=prompts,
            temperature=1.0 + warmer * torch.finfo(torch.float32).eps,
            min_new_tokens=1,
        ),
        actions=tokens,
        present=present,
        action_mask=mask,
        chosen=chosen,
        rewards=torch.zeros(len(rows)),
        group_ids=prompts,
        member_ids=members,
    )


@given(ROWS)
def test_repetitions_are_rows_with_equal_inputs(rows):
    batch = batch_of(rows)

    def same(one, other):
        def key(*facts, tokens, length, heard, turns):
            return facts, tokens[:length], heard, turns and length > 1

        names = ("tokens", "length", "heard", "turns")
        first, second = (key(*rows[row][:3], **dict(zip(names, rows[row][3:], strict=True))) for row in (one, other))
        return first == second

    expected = [[other for other in range(len(rows)) if same(row, other)] for row in range(len(rows))]
    assert repetitions(batch, batch.member_ids) == [own if own[0] == row else [] for row, own in enumerate(expected)]
