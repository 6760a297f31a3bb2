"""Chunked log-probabilities, sampling and truncation against naive versions, transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from evogrpo.functional import log_probs as module
from evogrpo.functional.log_probs import (
    apply_repetition_penalty,
    chunked_log_probs,
    sample_inverse_cdf,
    truncate_logits,
)

ROWS = 13
WIDTH = 8
VOCABULARY = 37


@pytest.fixture
def problem():
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random)
    return {
        "hidden": torch.randn(ROWS, WIDTH, generator=random).requires_grad_(),
        "head": lambda x: 5.0 * torch.tanh(x @ weight.T / 5.0),  # soft-capped, so not linear
        "targets": torch.randint(0, VOCABULARY, (ROWS,), generator=random),
        "temperature": 0.5 + torch.rand(ROWS, generator=random),
        "forbidden": torch.zeros(ROWS, dtype=torch.bool),
        "forbidden_ids": torch.tensor([3, 30]),
    }


def whole(problem):
    logits = problem["head"](problem["hidden"]) / problem["temperature"][:, None]
    ruled_out = torch.zeros_like(logits, dtype=torch.bool)
    ruled_out[:, problem["forbidden_ids"]] = problem["forbidden"][:, None]
    log_softmax = logits.masked_fill(ruled_out, -1e30).log_softmax(1)
    log_probs = log_softmax.gather(1, problem["targets"][:, None])[:, 0]
    return log_probs, -(log_softmax.exp() * log_softmax).sum(1)


@pytest.fixture(params=[module.TILE, 2 * VOCABULARY])
def tile(request, monkeypatch):
    """Set the size of tiles."""
    monkeypatch.setattr(module, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("chunk", [1, 4, 10_000])
@pytest.mark.parametrize("forbid", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_match_softmax_for_any_chunk(problem, chunk, forbid, entropy_gradient):
    if forbid:
        problem["forbidden"][::2] = True
        problem["targets"][problem["forbidden"]] = 5
    found = chunked_log_probs(**problem, chunk=chunk, entropy_gradient=entropy_gradient)
    expected = whole(problem)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    weights = torch.linspace(-1, 2, ROWS)
    others = torch.linspace(3, -1, ROWS) * entropy_gradient
    gradients = [
        torch.autograd.grad((weights * log_probs + others * entropies).sum(), problem["hidden"])[0]
        for log_probs, entropies in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 if entropy_gradient else 1e-6)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_weight_in_place_of_a_linear_head_gives_the_same_values(problem, entropy_gradient, dtype):
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    problem["forbidden"][::2] = True
    weights = torch.linspace(-1, 2, ROWS)
    others = torch.linspace(3, -1, ROWS)
    found = []
    for form in ({"head": lambda x: x @ weight.T}, {"head": None, "weight": weight}):
        arguments = (
            problem | form | {"hidden": problem["hidden"].detach().to(dtype).requires_grad_()}
        )
        values = chunked_log_probs(**arguments, chunk=4, entropy_gradient=entropy_gradient)
        total = (weights * values[0]).clamp(min=-50).sum() + (others * values[1]).sum()
        found.append((*values, *torch.autograd.grad(total, arguments["hidden"])))
    assert all(map(torch.equal, *found))


def test_forbidden_targets_have_probability_zero(problem):
    everything = torch.arange(VOCABULARY)
    row = problem["hidden"][:1].expand(VOCABULARY, -1)
    log_probs, entropies = chunked_log_probs(
        row,
        problem["head"],
        everything,
        torch.ones(VOCABULARY),
        torch.ones(VOCABULARY, dtype=torch.bool),
        problem["forbidden_ids"],
        5,
    )
    assert torch.isneginf(log_probs[problem["forbidden_ids"]]).all()
    assert float(log_probs.exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)
    assert entropies.isfinite().all()


def test_head_is_called_with_one_chunk_at_a_time_and_once(problem):
    seen = []
    head = problem["head"]
    problem["head"] = lambda x: (seen.append(len(x)), head(x))[1]
    found = chunked_log_probs(**problem, chunk=4)
    found[0].sum().backward()
    assert seen == [4, 4, 4, 1]
    with torch.no_grad():
        again = chunked_log_probs(**problem, chunk=4)
    assert not again[0].requires_grad
    assert all(map(torch.equal, again, found))


WEIGHTS = arrays.arrays(
    np.float32, st.integers(1, 70), elements=st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.5])
)


@given(WEIGHTS, st.floats(0, 1, exclude_max=True), st.sampled_from([1, 3, 8, 64, 256]))
def test_sampling_matches_naive_inversion_for_any_block(weights, uniform, block):
    """The weights are multiples of 1/4, so all partial sums are exact."""
    if not weights.any():
        weights[-1] = 1.0
    uniform = float(np.float32(uniform) if np.float32(uniform) < 1 else 0.5)
    threshold = np.float32(uniform) * weights.sum(dtype=np.float32)
    if threshold >= weights.sum():
        threshold = np.nextafter(weights.sum(), np.float32(0))
    naive = int(np.searchsorted(np.cumsum(weights), threshold, side="right"))
    got = sample_inverse_cdf(torch.from_numpy(weights)[None], torch.tensor([uniform]), block)
    assert int(got) == naive
    assert weights[int(got)] > 0


EDGES = [0.0, 1e-45, 1e-8, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), 1 - 2**-53]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 256, 257, 1000])
def test_tokens_of_probability_zero_are_never_sampled(width, dtype):
    random = torch.Generator().manual_seed(width)
    weights = torch.rand(50, width, generator=random)
    weights[:, :2] = 0.0
    weights[:, -2:] = 0.0
    weights[10:][torch.rand(40, width, generator=random) < 0.9] = 0.0
    weights[:, 2] = 1e-30  # possible, if only just
    for edge in EDGES:
        drawn = sample_inverse_cdf(weights, torch.full((50,), edge, dtype=dtype))
        assert bool((weights.gather(1, drawn[:, None]) > 0).all()), edge
    last = sample_inverse_cdf(weights, torch.full((50,), EDGES[-1], dtype=dtype))
    sizeable = weights > 1e-20
    final = width - 1 - sizeable.flip(1).int().argmax(1)
    assert torch.equal(last, torch.where(sizeable.any(1), final, 2))


LOGITS = 3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
TIED = LOGITS.round()


@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["distinct", "tied"])
@pytest.mark.parametrize("top_k", [0, 1, 5, 30, 10**9])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.9])
def test_top_k_and_min_p_match_transformers(logits, top_k, min_p):
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    assert torch.equal(truncate_logits(logits, top_k=top_k, top_p=1.0, min_p=min_p), expected)


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.7, 0.99])
@pytest.mark.parametrize("top_k", [0, 5])
def test_top_p_matches_transformers(top_p, top_k):
    expected = TopKLogitsWarper(top_k)(None, LOGITS) if top_k else LOGITS
    expected = MinPLogitsWarper(0.02)(None, TopPLogitsWarper(top_p)(None, expected))
    assert torch.equal(truncate_logits(LOGITS, top_k=top_k, top_p=top_p, min_p=0.02), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_matches_transformers(penalty):
    # Token ids repeat within a row.
    token_ids = torch.randint(0, 30, (40, 12), generator=torch.Generator().manual_seed(1))
    actual = apply_repetition_penalty(LOGITS, token_ids, penalty)
    assert torch.equal(actual, RepetitionPenaltyLogitsProcessor(penalty)(token_ids, LOGITS.clone()))
    assert torch.equal(actual[LOGITS < 0], LOGITS[LOGITS < 0]) == (penalty == 1.0)
