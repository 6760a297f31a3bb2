"""Penalties on repetition and tokens that are ruled out, against transformers' own processors of logits."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from evogrpo.functional.log_probs import penalise_repetition, truncate

LOGITS = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
TIED = LOGITS.round()


@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["distinct", "tied"])
@pytest.mark.parametrize("top_k", [0, 1, 5, 30, 10**9])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.9])
def test_what_stays_is_what_stays_in_transformers(logits, top_k, min_p):
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    assert torch.equal(truncate(logits, top_k=top_k, top_p=1.0, min_p=min_p), expected)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.7, 0.99])
@pytest.mark.parametrize("top_k", [0, 5])
def test_the_nucleus_is_that_of_transformers_behind_the_most_likely(top_p, top_k):
    expected = TopKLogitsWarper(top_k)(None, LOGITS) if top_k else LOGITS
    expected = MinPLogitsWarper(0.02)(None, TopPLogitsWarper(top_p)(None, expected))
    assert torch.equal(truncate(LOGITS, top_k=top_k, top_p=top_p, min_p=0.02), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_what_was_said_is_penalised_as_in_transformers(penalty):
    said = torch.randint(0, 30, (40, 12), generator=torch.Generator().manual_seed(1))  # with repetitions
    actual = penalise_repetition(LOGITS, said, penalty)
    assert torch.equal(actual, RepetitionPenaltyLogitsProcessor(penalty)(said, LOGITS.clone()))
    assert torch.equal(actual[LOGITS < 0], LOGITS[LOGITS < 0]) == (penalty == 1.0)


def test_tokens_that_are_ruled_out_stay_out_and_rows_stand_alone():
    banned = LOGITS.clone()
    banned[:, :20] = -torch.inf
    options = {"top_k": 8, "top_p": 0.9, "min_p": 0.01}
    whole = truncate(banned, **options)
    assert not whole[:, :20].isfinite().any()
    assert whole.isfinite().any(1).all()
    assert torch.equal(torch.cat([truncate(row, **options) for row in banned.split(1)]), whole)
