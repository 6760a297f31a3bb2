"""Log-probabilities in chunks and sampling by inversion, against the whole softmax and a naive inversion."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from evogrpo.functional import log_probs as module
from evogrpo.functional.log_probs import chunked_log_probs, invert_cumulative, scaled_logits

ROWS, WIDTH, VOCABULARY = 13, 8, 37


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


@pytest.fixture(params=[module.TILE, 2 * VOCABULARY, 1])
def tile(request, monkeypatch):
    """Cut rows of a chunk into parts that fit into a small cache."""
    monkeypatch.setattr(module, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("chunk", [1, 4, ROWS, 10_000])
@pytest.mark.parametrize("forbid", [False, True])
def test_values_and_gradients_equal_the_whole_softmax_for_any_chunk(problem, chunk, forbid):
    if forbid:
        problem["forbidden"][::2] = True
        problem["targets"][problem["forbidden"]] = 5
    weights = torch.linspace(-1, 2, ROWS)
    (got, entropies), (expected, expected_entropies) = chunked_log_probs(**problem, chunk=chunk), whole(problem)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies, expected_entropies.detach(), rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad((weights * value).sum(), problem["hidden"])[0] for value in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, ROWS])
@pytest.mark.parametrize("forbid", [False, True])
def test_entropies_carry_their_gradient_when_asked(problem, chunk, forbid):
    if forbid:
        problem["forbidden"][::2] = True
        problem["targets"][problem["forbidden"]] = 5
    weights, others = torch.linspace(-1, 2, ROWS), torch.linspace(3, -1, ROWS)
    gradients = [
        torch.autograd.grad((weights * log_probs + others * entropies).sum(), problem["hidden"])[0]
        for log_probs, entropies in (chunked_log_probs(**problem, chunk=chunk, entropy_gradient=True), whole(problem))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_head_that_is_a_product_gives_the_same_by_its_matrix_without_being_called(problem, entropy_gradient, dtype):
    weight = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    problem["forbidden"][::2] = True
    weights, others = torch.linspace(-1, 2, ROWS), torch.linspace(3, -1, ROWS)
    found = []
    for form in ({"head": lambda x: x @ weight.T}, {"head": None, "weight": weight}):
        own = problem | form | {"hidden": problem["hidden"].detach().to(dtype).requires_grad_()}
        values = chunked_log_probs(**own, chunk=4, entropy_gradient=entropy_gradient)
        total = (weights * values[0]).clamp(min=-50).sum() + (others * values[1]).sum()
        found.append((*values, *torch.autograd.grad(total, own["hidden"])))
    assert all(map(torch.equal, *found))


def test_entropies_carry_no_gradient_unless_asked(problem):
    log_probs, entropies = chunked_log_probs(**problem, chunk=4)
    assert log_probs.requires_grad
    assert not entropies.requires_grad


def test_a_forbidden_target_is_impossible_and_the_rest_sum_to_one(problem):
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


def test_no_more_than_a_chunk_of_logits_is_ever_asked_for(problem):
    seen = []
    head = problem["head"]
    problem["head"] = lambda x: (seen.append(len(x)), head(x))[1]
    chunked_log_probs(**problem, chunk=4)[0].sum().backward()
    assert seen == [4, 4, 4, 1]


def test_without_gradients_nothing_is_kept_and_values_are_the_same(problem):
    expected = chunked_log_probs(**problem, chunk=4)
    with torch.no_grad():
        got = chunked_log_probs(**problem, chunk=4)
    assert not got[0].requires_grad
    assert all(map(torch.equal, got, expected))


def test_bfloat16_hidden_states_give_float32_log_probs_and_bfloat16_gradients(problem):
    problem["hidden"] = problem["hidden"].detach().bfloat16().requires_grad_()
    head = problem["head"]
    problem["head"] = lambda x: head(x.float()).bfloat16()
    got, _ = chunked_log_probs(**problem, chunk=4)
    assert got.dtype == torch.float32
    (gradient,) = torch.autograd.grad(got.sum(), problem["hidden"])
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(got, whole(problem)[0].float(), rtol=1e-2, atol=1e-2)


def test_no_rows_give_no_log_probs(problem):
    for name in ("hidden", "targets", "temperature", "forbidden"):
        problem[name] = problem[name][:0]
    assert chunked_log_probs(**problem, chunk=4)[0].shape == (0,)


def test_a_row_that_is_not_finite_stays_alone(problem):
    hidden = problem["hidden"].detach().clone()
    clean, _ = chunked_log_probs(**(problem | {"hidden": hidden}), chunk=4)
    hidden[2] = float("nan")
    spoilt, _ = chunked_log_probs(**(problem | {"hidden": hidden}), chunk=4)
    rest = torch.arange(ROWS) != 2
    assert spoilt[2].isnan()
    assert torch.equal(clean[rest], spoilt[rest])


def test_scaled_logits_are_divided_and_ruled_out_row_by_row():
    logits = torch.arange(8.0).view(2, 4)
    scaled = scaled_logits(logits.clone(), torch.tensor([1.0, 0.5]), torch.tensor([True, False]), torch.tensor([1]))
    assert torch.equal(scaled[0], torch.tensor([0.0, -torch.inf, 2.0, 3.0]))
    assert torch.equal(scaled[1], 2 * logits[1])


WEIGHTS = arrays.arrays(np.float32, st.integers(1, 70), elements=st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.5]))


@given(WEIGHTS, st.floats(0, 1, exclude_max=True), st.sampled_from([1, 3, 8, 64, 256]))
@settings(max_examples=300)
def test_inversion_equals_the_naive_one_for_any_block(weights, uniform, block):
    """The weights are multiples of 1/4, so all partial sums are exact."""
    if not weights.any():
        weights[-1] = 1.0
    uniform = float(np.float32(uniform) if np.float32(uniform) < 1 else 0.5)
    threshold = np.float32(uniform) * weights.sum(dtype=np.float32)
    if threshold >= weights.sum():
        threshold = np.nextafter(weights.sum(), np.float32(0))
    naive = int(np.searchsorted(np.cumsum(weights), threshold, side="right"))
    got = invert_cumulative(torch.from_numpy(weights)[None], torch.tensor([uniform]), block)
    assert int(got) == naive
    assert weights[int(got)] > 0


EDGES = [0.0, 1e-45, 1e-8, 0.5, float(np.nextafter(np.float32(1), np.float32(0))), 1 - 2**-53]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 256, 257, 1000])
def test_tokens_of_probability_zero_are_never_drawn_not_even_at_the_ends(width, dtype):
    random = torch.Generator().manual_seed(width)
    weights = torch.rand(50, width, generator=random)
    weights[:, :2] = 0.0
    weights[:, -2:] = 0.0
    weights[10:][torch.rand(40, width, generator=random) < 0.9] = 0.0
    weights[:, 2] = 1e-30  # possible, if only just
    for edge in EDGES:
        drawn = invert_cumulative(weights, torch.full((50,), edge, dtype=dtype))
        assert bool((weights.gather(1, drawn[:, None]) > 0).all()), edge
    last = invert_cumulative(weights, torch.full((50,), EDGES[-1], dtype=dtype))
    sizeable = weights > 1e-20
    final = width - 1 - sizeable.flip(1).int().argmax(1)
    assert torch.equal(last, torch.where(sizeable.any(1), final, 2))


@pytest.mark.parametrize("width", [7, 300])
def test_a_grid_of_uniforms_draws_every_token_as_often_as_its_probability_says(width):
    random = torch.Generator().manual_seed(0)
    weights = torch.rand(width, generator=random) ** 4
    count = 20_000
    uniforms = (torch.arange(count) + 0.5) / count
    drawn = invert_cumulative(weights.expand(count, -1), uniforms)
    assert bool((drawn.diff() >= 0).all())  # inversion is monotone
    frequency = drawn.bincount(minlength=width) / count
    # An interval of length p holds p * count grid points, give or take one, plus rounding of the ends.
    assert float((frequency - weights / weights.sum()).abs().max()) <= 1 / count + 1e-5


def test_the_scale_of_the_weights_does_not_matter():
    weights = torch.rand(200, 40, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(2))
    assert torch.equal(invert_cumulative(weights, uniforms), invert_cumulative(weights * 1024, uniforms))


def test_rows_that_are_not_finite_do_not_crash_or_spoil_others():
    weights = torch.rand(3, 300, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.3, 0.3, 0.9])
    clean = invert_cumulative(weights, uniforms)
    weights[1] = float("nan")
    assert torch.equal(invert_cumulative(weights, uniforms)[[0, 2]], clean[[0, 2]])
