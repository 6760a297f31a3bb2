"""Decoding of rows with equal tokens as one row: the same completions from fewer forward passes."""

from dataclasses import replace

import pytest
import torch

from evogrpo.data import SamplingOptions
from evogrpo.functional.matmul import padded_rows
from evogrpo.models.fast_llama import decode
from evogrpo.testing.samplers import different_members, make_rows, with_robust_uniforms
from tests.tiny_batches import rows_run
from tests.tiny_models import tiny_model

SIZE = 3
KNOWN = ["llama", "qwen3"]


@pytest.fixture(autouse=True)
def unset_evogrpo_slow(monkeypatch):
    """Unset EVOGRPO_SLOW."""
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)


def alike(members=range(SIZE), *, copies=4, temperature=0.4, **settings):
    """Return rows of which many sample equal tokens: low temperatures, large groups."""
    rows = make_rows(members, **settings)
    order = torch.arange(len(rows)).repeat_interleave(copies)
    draws = torch.rand(len(order), rows.uniforms.shape[1], generator=torch.Generator().manual_seed(3))
    rows = replace(rows.select(order), uniforms=draws.double())
    return replace(rows, temperature=torch.full_like(rows.temperature, temperature))


def beginnings(rows, rollout, at):
    """Return the distinct prefixes of `at` tokens."""
    going = rollout.present[:, at] if at < rollout.present.shape[1] else torch.zeros(len(rows), dtype=torch.bool)
    return {
        (int(rows.member_ids[row]), int(rows.prompt_ids[row]), *rollout.actions[row, :at].tolist())
        for row in going.nonzero()[:, 0].tolist()
    }


@pytest.mark.parametrize("ends", [[1], list(range(1, 12))])
@pytest.mark.parametrize("architecture", KNOWN)
def test_matches_separate_rows(architecture, ends, monkeypatch):
    bank = different_members(tiny_model(architecture), SIZE, eos_token_ids=ends)
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    rows = with_robust_uniforms(bank, alike(tokens=10, min_new_tokens=2, temperature=0.2))
    counts = rows_run(bank, monkeypatch)
    expected = bank.sample(rows)
    apart = list(counts)
    counts.clear()
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 1.0)
    got = bank.sample(rows)
    for name in ("actions", "present", "truncated"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    needed = [len(beginnings(rows, expected, at)) for at in range(1, len(counts) + 1)]
    assert counts[0] == padded_rows(needed[0])
    assert all(least <= ran for least, ran in zip(needed, counts, strict=True))
    assert sum(counts) < 0.7 * sum(apart)


def test_rows_separate_when_few_prefixes_are_equal(monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = with_robust_uniforms(bank, alike(tokens=12, temperature=0.7, min_new_tokens=12))
    counts = rows_run(bank, monkeypatch)
    got = bank.sample(rows)
    needed = [len(beginnings(rows, got, at)) for at in range(1, 12)]
    within = [least <= decode.MAX_DISTINCT_SHARE * len(rows) for least in needed]
    assert any(within)
    assert not all(within)
    assert counts == [padded_rows(least) if few else len(rows) for least, few in zip(needed, within, strict=True)]
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    assert torch.equal(bank.sample(rows).actions, got.actions)


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(repetition_penalty=1.3), SamplingOptions(top_k=5), SamplingOptions(top_p=0.7, min_p=0.05)],
)
def test_matches_with_all_options(options, monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = with_robust_uniforms(bank, replace(alike(tokens=8, min_new_tokens=8), options=options))
    got = bank.sample(rows)
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    expected = bank.sample(rows)
    assert torch.equal(got.actions, expected.actions)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


def test_greedy_rows_never_separate(monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = alike(tokens=8, min_new_tokens=8, temperature=0.0)
    counts = rows_run(bank, monkeypatch)
    rollout = bank.sample(rows)
    assert set(counts) == {9}, "one for each prompt of each member"
    assert all(len(beginnings(rows, rollout, at)) == 9 for at in range(8))
    assert float(rollout.log_probs.abs().max()) == 0.0


def test_slow_mode_runs_each_row(monkeypatch):
    monkeypatch.setenv("EVOGRPO_SLOW", "1")
    bank = different_members(tiny_model("llama"), SIZE)
    rows = alike(tokens=5, min_new_tokens=5, temperature=0.2)
    counts = rows_run(bank, monkeypatch)
    bank.sample(rows)
    assert set(counts) == {len(rows)}


def test_rows_of_one_prefix_have_their_own_temperature(monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = alike(tokens=8, min_new_tokens=8, temperature=0.2)
    rows = with_robust_uniforms(bank, replace(rows, temperature=rows.temperature + 0.1 * (torch.arange(len(rows)) % 2)))
    got = bank.sample(rows)
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 0.0)
    assert torch.equal(bank.sample(rows).actions, got.actions)


def test_further_turns_resume_from_shared_prefixes(monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = with_robust_uniforms(bank, replace(alike(tokens=8, min_new_tokens=8, temperature=0.2), keep=True))
    turns = []
    for most in (1.0, 0.0):
        monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", most)
        first = bank.sample(rows)
        assert first.kept is not None
        history = tuple((*said, 3, 4) for said in map(tuple, first.actions.tolist()))
        turns.append(bank.sample(replace(rows, history=history, kept=first.kept)))
    assert torch.equal(turns[0].present, turns[1].present)
    torch.testing.assert_close(turns[0].log_probs[:, 0], turns[1].log_probs[:, 0], rtol=1e-4, atol=1e-4)


class RecordedDecoding:
    """A decoding that records its prefixes; the hidden state is the number of the prefix."""

    def __init__(self, rows):
        self.rows, self.numbers, self.advances = [(row,) for row in rows.tolist()], {}, []

    def start(self):
        return self.states()

    def states(self):
        return torch.tensor([[float(self.numbers.setdefault(row, len(self.numbers)))] for row in self.rows])

    def advance(self, tokens):
        self.advances.append(len(tokens))
        self.rows = [(*row, token) for row, token in zip(self.rows, tokens.tolist(), strict=True)]
        return self.states()

    def keep(self, rows):
        self.rows = [self.rows[row] for row in rows.tolist()]


def recorded(prompt_of):
    """Return a shared decoding and its inner decoding."""
    begun = []

    def begin(rows):
        begun.append(RecordedDecoding(prompt_of[rows]))
        return begun[0]

    return decode.shared_prefix_decoding(begin, prompt_of), begun[0]


@pytest.mark.parametrize("most", [0.5, 1.0])
def test_hidden_states_match_the_tokens(most, monkeypatch):
    """Rows choose between two tokens; every third step, a third of the rows ends."""
    rng = torch.Generator().manual_seed(0)
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", most)
    prompt_of = torch.arange(24) // 6
    decoding, beginnings = recorded(prompt_of)
    written = [(prompt,) for prompt in prompt_of.tolist()]
    hidden = decoding.start()
    for step in range(8):
        assert hidden[:, 0].tolist() == [beginnings.numbers[row] for row in written]
        if step % 3 == 2:
            left = (torch.arange(len(written)) % 3 != 0).nonzero()[:, 0]
            decoding.keep(left)
            written = [written[row] for row in left.tolist()]
        tokens = (torch.rand(len(written), generator=rng) < 0.2).long() + 1
        hidden = decoding.advance(tokens)
        written = [(*row, token) for row, token in zip(written, tokens.tolist(), strict=True)]
    assert beginnings.advances[0] < 24


@pytest.mark.parametrize(("most", "ran"), [(1, 32), (2, 24)])
def test_rows_separate_when_copies_cost_too_much(most, ran, monkeypatch):
    """32 rows with 16 prefixes; one fork copies 17 rows, padded to 24."""
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", 1.0)
    monkeypatch.setattr(decode, "MAX_COPIED_PER_SKIPPED", most)
    decoding, beginnings = recorded(torch.arange(16).repeat_interleave(2))
    decoding.advance((torch.arange(32) == 1).long())
    assert beginnings.advances == [ran]
