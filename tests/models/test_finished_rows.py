"""Finished completions are reported once, during sampling."""

from dataclasses import replace

import pytest
import torch

from evogrpo.interruption import Stop
from evogrpo.models.fast_llama import decode
from evogrpo.models.language import sampling
from evogrpo.testing.samplers import make_rows
from tests.models.test_multi_turn_sampling import ending
from tests.tiny_models import tiny_model

MODEL = tiny_model("llama")
FIELDS = ("actions", "present", "truncated", "log_probs")


def listen(bank, rows):
    """Return a rollout and its reports: row, tokens and progress."""
    told, parts = [], [0.0]

    def on_finished(numbers, completions):
        told.extend((*each, parts[-1]) for each in zip(numbers, completions, strict=True))

    stop = Stop()
    stop.listener = lambda work: parts.append(work.part)
    return bank.sample(replace(rows, stop=stop), on_finished=on_finished), told


def tokens_of(rollout):
    return [row[present].tolist() for row, present in zip(rollout.actions, rollout.present, strict=True)]


@pytest.mark.parametrize(("cached_tokens", "look_every"), [(sampling.CACHED_TOKENS, 1), (110, 8), (1, 1)])
def test_every_row_is_reported_once_when_finished(cached_tokens, look_every, monkeypatch):
    bank = ending(MODEL)
    monkeypatch.setattr(sampling, "CACHED_TOKENS", cached_tokens)
    monkeypatch.setattr("evogrpo.models.language.sampling.CHECK_EVERY", {"cpu": look_every})
    rows = make_rows(range(3), tokens=12)
    rows = rows.select(torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)))
    alone = bank.sample(rows)
    got, told = listen(bank, rows)
    assert all(torch.equal(getattr(got, name), getattr(alone, name)) for name in FIELDS)
    assert sorted(row for row, *_ in told) == list(range(len(rows)))
    assert {row: tokens for row, tokens, _ in told} == dict(enumerate(tokens_of(got)))
    assert min(part for *_, part in told) < max(part for *_, part in told) == pytest.approx(1.0)


@pytest.mark.parametrize("most", [0.0, 0.5], ids=["row by row", "from common beginnings"])
@pytest.mark.parametrize("moment", [1, 2, 4, 9])
def test_reported_rows_survive_out_of_memory(moment, most, monkeypatch):
    monkeypatch.setattr(decode, "MAX_DISTINCT_SHARE", most)
    bank = ending(MODEL)
    rows = make_rows(range(3), tokens=12)
    expected, head, calls = bank.sample(rows), bank.base.head, []

    def once(hidden):
        calls.append(len(hidden))
        if len(calls) == moment:
            raise torch.OutOfMemoryError("this once")
        return head(hidden)

    bank.base.head = once
    got, told = listen(bank, rows)
    assert sorted(row for row, *_ in told) == list(range(len(rows)))
    assert {row: tokens for row, tokens, _ in told} == dict(enumerate(tokens_of(got)))
    assert torch.equal(got.actions, expected.actions)
    assert torch.equal(got.truncated, expected.truncated)
    ended = int((expected.present.sum(1) < moment).sum())
    half = -(-(len(rows) - ended) // 2)
    assert calls[moment] == half if most == 0.0 else calls[moment] <= half, "half of the rows not reported yet"
