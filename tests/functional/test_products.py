"""Products by either library, against float64, and who is asked."""

import pytest
import torch

from evogrpo.functional import matmul as products
from evogrpo.functional.log_probs import chunked_log_probs
from evogrpo.functional.matmul import add_product, by_onednn, filled_up, lacking, product, product_of_columns

EPS = torch.finfo(torch.float32).eps


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def library(request, monkeypatch):
    """Ask one of the two, whatever this CPU is."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: request.param)
    monkeypatch.setattr(products, "LEAST", 0)


def operands(rows, width=24, out=40):
    rng = torch.Generator().manual_seed(rows)
    return (torch.randn(*shape, generator=rng) for shape in ((rows, width), (out, width), (out,), (rows, out)))


def assert_rounded(got, x, weight, *added):
    """Compare with float64: every number is a sum of so many terms, each rounded once or twice."""
    terms = x.shape[1] + len(added) + 1
    expected = x.double() @ weight.double().T + sum(each.double() for each in added)
    sizes = x.double().abs() @ weight.double().abs().T + sum(each.double().abs() for each in added)
    assert bool(((got.double() - expected).abs() <= terms * EPS * sizes).all())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_products_are_rounded_sums_of_products(rows):
    x, weight, bias, into = operands(rows)
    with torch.no_grad():
        assert_rounded(product(x, weight), x, weight)
        assert_rounded(product(x, weight, bias), x, weight, bias.expand(rows, -1))
        assert_rounded(product_of_columns(weight, x.T).T, x, weight)
        assert_rounded(product_of_columns(weight, x.T.contiguous(), bias).T, x, weight, bias.expand(rows, -1))
        assert_rounded(product(x, weight.T.contiguous().T), x, weight)  # of any order in memory
        assert_rounded(product(x.T.contiguous().T, weight), x, weight)
        before = into.clone()
        add_product(into, x, weight)
        assert_rounded(into, x, weight, before)


@pytest.mark.usefixtures("library")
def test_a_bias_may_lie_anywhere_in_memory():
    x, weight, bias, _ = operands(5)
    apart = torch.stack([bias, -bias], 1)[:, 0]
    with torch.no_grad():
        assert torch.equal(product(x, weight, apart), product(x, weight, bias))


@pytest.mark.usefixtures("library")
def test_products_carry_gradients_where_these_are_recorded():
    x, weight, bias, slope = operands(5)
    (product(x.requires_grad_(), weight, bias) * slope).sum().backward()
    assert_rounded(x.grad, slope, weight.T)


@pytest.mark.usefixtures("library")
def test_rows_of_logits_that_are_made_at_once_change_nothing_but_rounding(monkeypatch):
    x, weight, _, _ = operands(9)
    targets, temperature = torch.arange(9), torch.ones(9)
    nothing = torch.zeros(9, dtype=torch.bool), torch.zeros(0, dtype=torch.long)
    monkeypatch.setattr("evogrpo.functional.log_probs.FEW", 4)
    monkeypatch.setattr("evogrpo.functional.log_probs.WHOLE", 2)
    hidden = x.requires_grad_()
    found, entropies = chunked_log_probs(hidden, torch.nn.Identity(), targets, temperature, *nothing, 9, weight=weight)
    expected = (hidden.double() @ weight.double().T).log_softmax(1)
    torch.testing.assert_close(found, expected.diagonal().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(1).float().detach(), rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(each.sum(), hidden)[0] for each in (found, expected.diagonal())]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_onednn_is_asked_for_large_matrices_of_float32_alone_on_cpus_that_gain_by_it(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: True)
    few, many = torch.zeros(2, 64), torch.zeros(products.LEAST // 64, 64)
    assert by_onednn(2, few, many)
    assert by_onednn(len(many), many, few)
    assert not by_onednn(2, few, many[1:])
    assert not by_onednn(2, few.bfloat16(), many.bfloat16())
    assert not by_onednn(2, few.to("meta"), many.to("meta"))
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    assert not by_onednn(2, few, many)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_zeros_make_many_tokens_a_number_that_onednn_is_asked_for(dtype, monkeypatch):
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: True)
    large, cpu = torch.zeros(products.LEAST, 1), torch.device("cpu")
    for tokens in range(1, 300):
        rest = lacking(tokens, dtype, cpu)
        assert 0 <= rest < products.WHOLE
        assert by_onednn(tokens + rest, large, large)
        assert (tokens + rest) % products.EIGHT == 0
        assert tokens <= products.FEW or by_onednn(tokens, large, large) == (rest == 0)
    assert lacking(129, dtype, torch.device("meta")) == 0
    monkeypatch.setattr(products, "onednn_is_quicker", lambda: False)
    assert lacking(129, torch.float32, cpu) == 0


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_cpus_that_gain_are_amds_with_avx512(vendor, capability, expected, monkeypatch):
    monkeypatch.setattr(products.Path, "read_text", lambda path, **how: f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.onednn_is_quicker.__wrapped__() is (expected and torch.backends.mkldnn.is_available())


def test_rows_are_written_in_numbers_that_onednn_is_asked_for_however_many_there_are(library):
    for rows in range(1, 300):
        count = filled_up(rows)
        assert rows <= count < rows + (8 if count <= 128 else 32)
        if rows >= 8:
            assert lacking(count, torch.bfloat16, torch.device("cpu")) == 0
