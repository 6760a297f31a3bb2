"""Rows that have written the same so far are run as one: the same completions, from fewer tokens that are run."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evogrpo.data import SamplingBatch, SamplingOptions
from evogrpo.functional.products import filled_up
from evogrpo.policies.tokens import generation
from evogrpo.policies.tokens import stems as sharing
from evogrpo.policies.tokens.stems import Stems
from tests.tiny_batches import clear, different_members, make_rows, rows_run
from tests.tiny_models import tiny_model

SIZE = 3
KNOWN = ["llama", "qwen3"]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """Pass by the direct passes, however the suite is run."""
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)


def alike(members=range(SIZE), *, copies=4, temperature=0.4, **settings):
    """Return rows of which many write the same: cold ones, several times as many of each prompt."""
    rows = make_rows(members, **settings)
    order = torch.arange(len(rows)).repeat_interleave(copies)
    draws = torch.rand(len(order), rows.uniforms.shape[1], generator=torch.Generator().manual_seed(3))
    rows = replace(rows.select(order), uniforms=draws.double())
    return replace(rows, temperature=torch.full_like(rows.temperature, temperature))


def beginnings(rows, rollout, at):
    """Return the distinct beginnings of `at` tokens that rows go on from."""
    going = rollout.present[:, at] if at < rollout.present.shape[1] else torch.zeros(len(rows), dtype=torch.bool)
    return {
        (int(rows.member_ids[row]), int(rows.prompt_ids[row]), *rollout.actions[row, :at].tolist())
        for row in going.nonzero()[:, 0].tolist()
    }


@pytest.mark.parametrize("ends", [[1], list(range(1, 12))])
@pytest.mark.parametrize("architecture", KNOWN)
def test_the_same_is_written_as_row_by_row(architecture, ends, monkeypatch):
    bank = different_members(tiny_model(architecture), SIZE, eos_token_ids=ends)
    monkeypatch.setattr(sharing, "MOST_STEMS", 0.0)
    rows = clear(bank, alike(tokens=10, min_new_tokens=2, temperature=0.2))
    counts = rows_run(bank, monkeypatch)
    expected = bank.sample(rows)
    apart = list(counts)
    counts.clear()
    monkeypatch.setattr(sharing, "MOST_STEMS", 1.0)
    got = bank.sample(rows)
    for name in ("actions", "present", "truncated"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    needed = [len(beginnings(rows, expected, at)) for at in range(1, len(counts) + 1)]
    assert counts[0] == filled_up(needed[0])
    assert all(least <= ran for least, ran in zip(needed, counts, strict=True))
    assert sum(counts) < 0.7 * sum(apart)


def test_rows_go_by_themselves_once_they_have_little_in_common(monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = clear(bank, alike(tokens=12, temperature=0.7, min_new_tokens=12))
    counts = rows_run(bank, monkeypatch)
    got = bank.sample(rows)
    needed = [len(beginnings(rows, got, at)) for at in range(1, 12)]
    within = [least <= sharing.MOST_STEMS * len(rows) for least in needed]
    assert any(within)
    assert not all(within)
    assert counts == [filled_up(least) if few else len(rows) for least, few in zip(needed, within, strict=True)]
    monkeypatch.setattr(sharing, "MOST_STEMS", 0.0)
    assert torch.equal(bank.sample(rows).actions, got.actions)


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(repetition_penalty=1.3), SamplingOptions(top_k=5), SamplingOptions(top_p=0.7, min_p=0.05)],
)
def test_whatever_is_asked_of_the_tokens(options, monkeypatch):
    monkeypatch.setitem(generation.LOOK_EVERY, "cpu", 100)  # they branch at every token all the same
    bank = different_members(tiny_model("llama"), SIZE)
    rows = clear(bank, replace(alike(tokens=8, min_new_tokens=8), options=options))
    got = bank.sample(rows)
    monkeypatch.setattr(sharing, "MOST_STEMS", 0.0)
    expected = bank.sample(rows)
    assert torch.equal(got.actions, expected.actions)
    torch.testing.assert_close(got.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


def test_greedy_rows_are_one_for_good(monkeypatch):
    bank = different_members(tiny_model("llama"), SIZE)
    rows = alike(tokens=8, min_new_tokens=8, temperature=0.0)
    counts = rows_run(bank, monkeypatch)
    rollout = bank.sample(rows)
    assert set(counts) == {9}, "one for each prompt of each member"
    assert all(len(beginnings(rows, rollout, at)) == 9 for at in range(8))
    assert float(rollout.log_probs.abs().max()) == 0.0


@pytest.mark.parametrize("why", ["turns", "temperatures", "slow"])
def test_rows_are_run_one_by_one_where_they_have_to_be(why, monkeypatch):
    if why == "slow":
        monkeypatch.setenv("EVOGRPO_SLOW", "1")
    bank = different_members(tiny_model("llama"), SIZE)
    rows = alike(tokens=5, min_new_tokens=5, temperature=0.2)
    if why == "turns":
        rows = replace(rows, keep=True)
    elif why == "temperatures":
        rows = replace(rows, temperature=rows.temperature + 0.1 * (torch.arange(len(rows)) % 2))
    counts = rows_run(bank, monkeypatch)
    bank.sample(rows)
    assert set(counts) == {len(rows)}


# ---- where rows have come to

WORDS = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=4, max_size=24)


@given(WORDS, st.lists(st.integers(1, 7), min_size=24, max_size=24), st.sampled_from([0.5, 1.0]))
def test_every_row_s_stem_is_what_it_has_written(words, lengths, most):
    """A decoding that is a list of what has been run; `branch` says how it goes on."""
    count = len(words)
    prompt_of = torch.arange(count) // 4
    rows = SamplingBatch(
        prompts=((1,),),
        prompt_ids=torch.zeros(count, dtype=torch.long),
        member_ids=torch.zeros(count, dtype=torch.long),
        temperature=torch.ones(count),
        uniforms=torch.zeros(count, 6),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MOST_STEMS", most)
        stems = Stems.of_prompts(prompt_of, rows)
        if stems is None:
            assert count < 2 * (count + 3) // 4 / most
            return
        ran = [(prompt,) for prompt in range(stems.run)]
        numbers = torch.arange(count)
        for at in range(6):
            assert [(int(prompt_of[number]), *words[number][:at]) for number in numbers.tolist()] == [
                ran[of] for of in stems.of.tolist()
            ]
            drawn = slice(0, stems.run)
            assert stems.within(drawn)[0] == slice(0, len(numbers))
            assert torch.equal(stems.of[stems.firsts[stems.of]], stems.of)
            staying = torch.tensor([lengths[number] > at for number in numbers.tolist()]).nonzero()[:, 0]
            if not len(staying):
                return
            tokens = torch.tensor([words[number][at] for number in numbers[staying].tolist()])
            order, (keep, fed, after) = stems.branch(stems.of[staying], tokens, at + 1)
            numbers = numbers[staying][order]
            kept = ran if keep is None else [ran[of] for of in keep.tolist()]
            ran = [(*before, token) for before, token in zip(kept, fed.tolist(), strict=True)]
            if after is None:
                assert ran == [(int(prompt_of[number]), *words[number][: at + 1]) for number in numbers.tolist()]
                return
            assert after.run == len(ran)
            stems = after


def test_copying_ends_where_it_takes_longer_than_running(monkeypatch):
    """Of 16 rows 8 are spared at first; one stem goes apart at every token, and 9 are copied, of ever more tokens."""
    monkeypatch.setattr(sharing, "MOST_STEMS", 1.0)
    monkeypatch.setattr(sharing, "DEAREST", 5)
    of = torch.arange(8).repeat_interleave(2)
    tokens = (torch.arange(16) == 1).long()
    stems, written = Stems(of, 8), 0
    while stems is not None:
        written += 1
        _, (_, _, stems) = stems.branch(of, tokens, written)
    assert written == 3, "9 (1 + 2) <= 5 * 8 < 9 (1 + 2 + 3)"
