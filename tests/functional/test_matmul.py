"""Products with frozen weights by MKL and oneDNN against float64, and the choice between them."""

import pytest
import torch

from evogrpo.functional import matmul
from evogrpo.functional.log_probs import chunked_log_probs
from evogrpo.functional.matmul import (
    add_frozen_linear_,
    frozen_linear,
    frozen_linear_columns,
    uses_onednn,
)

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def library(request, monkeypatch):
    """Use one of the two libraries on any CPU."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: request.param)
    monkeypatch.setattr(matmul, "MIN_ELEMENTS", 0)


def operands(rows, width=24, out=40):
    rng = torch.Generator().manual_seed(rows)
    return (
        torch.randn(*shape, generator=rng)
        for shape in ((rows, width), (out, width), (out,), (rows, out))
    )


def assert_rounded(got, x, weight, *added):
    """Compare with float64 within the rounding of a sum."""
    terms = x.shape[1] + len(added) + 1
    expected = x.double() @ weight.double().T + sum(each.double() for each in added)
    sizes = x.double().abs() @ weight.double().abs().T + sum(each.double().abs() for each in added)
    assert bool(((got.double() - expected).abs() <= terms * EPS * sizes).all())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_products_match_float64(rows):
    x, weight, bias, into = operands(rows)
    with torch.no_grad():
        assert_rounded(frozen_linear(x, weight), x, weight)
        assert_rounded(frozen_linear(x, weight, bias), x, weight, bias.expand(rows, -1))
        assert_rounded(frozen_linear_columns(weight, x.T).T, x, weight)
        assert_rounded(
            frozen_linear_columns(weight, x.T.contiguous(), bias).T,
            x,
            weight,
            bias.expand(rows, -1),
        )
        assert_rounded(frozen_linear(x, weight.T.contiguous().T), x, weight)
        assert_rounded(frozen_linear(x.T.contiguous().T, weight), x, weight)
        strided = torch.stack([bias, -bias], 1)[:, 0]  # with strides
        assert torch.equal(frozen_linear(x, weight, strided), frozen_linear(x, weight, bias))
        before = into.clone()
        add_frozen_linear_(into, x, weight)
        assert_rounded(into, x, weight, before)


@pytest.mark.usefixtures("library")
def test_gradients_match_float64():
    x, weight, bias, slope = operands(5)
    (frozen_linear(x.requires_grad_(), weight, bias) * slope).sum().backward()
    assert_rounded(x.grad, slope, weight.T)


@pytest.mark.usefixtures("library")
def test_chunked_log_probs_with_onednn(monkeypatch):
    x, weight, _, _ = operands(9)
    targets = torch.arange(9)
    temperature = torch.ones(9)
    nothing = torch.zeros(9, dtype=torch.bool), torch.zeros(0, dtype=torch.long)
    monkeypatch.setattr("evogrpo.functional.log_probs.FEW_ROWS", 4)
    monkeypatch.setattr("evogrpo.functional.log_probs.ROW_MULTIPLE", 2)
    hidden = x.requires_grad_()
    found, entropies = chunked_log_probs(
        hidden, torch.nn.Identity(), targets, temperature, *nothing, 9, weight=weight
    )
    expected = (hidden.double() @ weight.double().T).log_softmax(1)
    torch.testing.assert_close(found, expected.diagonal().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        entropies, -(expected.exp() * expected).sum(1).float().detach(), rtol=1e-5, atol=1e-5
    )
    gradients = [
        torch.autograd.grad(each.sum(), hidden)[0] for each in (found, expected.diagonal())
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_onednn_is_used_for_large_float32_matrices_only(monkeypatch):
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    few = torch.zeros(2, 64)
    many = torch.zeros(matmul.MIN_ELEMENTS // 64, 64)
    assert uses_onednn(2, few, many)
    assert uses_onednn(len(many), many, few)
    assert not uses_onednn(2, few, many[1:])
    assert not uses_onednn(2, few.bfloat16(), many.bfloat16())
    assert not uses_onednn(2, few.to("meta"), many.to("meta"))
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: False)
    assert not uses_onednn(2, few, many)
