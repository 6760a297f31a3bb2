"""Action distributions against torch.distributions, exact counts on a grid, closed forms."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as laws

from evogrpo.members.networks.distributions import MASKED_LOGIT, distribution_for

GRID = 20_000
UNIFORMS = ((np.arange(GRID) + 0.5) / GRID).astype(np.float32)[:, None]
BOX = spaces.Box(np.array([-2.0, -np.inf, 1.0]), np.array([4.0, np.inf, 2.0]), dtype=np.float64)


def repeated(values, count=GRID):
    return np.repeat(np.array([values], dtype=np.float32), count, axis=0)


@pytest.mark.parametrize("temperature", [None, 0.5, 2.0])
def test_categorical_frequencies_match_probabilities(temperature):
    logits = [0.3, -1.0, 2.0, -30.0, 0.0]
    dist = distribution_for(spaces.Discrete(5, start=7))
    if temperature is None:
        temperatures = None
    else:
        temperatures = np.full(GRID, temperature, dtype=np.float32)
    actions, log_probs = dist.sample(repeated(logits), UNIFORMS, temperatures, None)
    chances = torch.softmax(
        torch.tensor(logits, dtype=torch.float64) / (temperature or 1.0), 0
    ).numpy()
    # A grid of uniform numbers hits an interval of length p in p * GRID places, up to one at either
    # end.
    assert np.abs(np.bincount(actions, minlength=5) - GRID * chances).max() <= 1.01
    np.testing.assert_allclose(log_probs, np.log(chances)[actions], rtol=1e-4, atol=1e-5)
    assert actions.dtype == np.int64
    assert (np.diff(actions) >= 0).all(), "an inverse cumulative dist rises"


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-24])
def test_illegal_actions_are_never_sampled(uniform):
    dist = distribution_for(spaces.MultiDiscrete([3, 4]))
    legal = np.array([[0, 1, 0, 0, 1, 1, 0]], dtype=bool)
    actions, log_probs = dist.sample(
        repeated([50, -50, 9, 9, 0, 1, 80], 1), np.full((1, 2), uniform, np.float32), None, legal
    )
    assert actions[0, 0] == 1
    assert actions[0, 1] == 1 + (uniform > 0.3)
    chance = 1 / (1 + math.e) if uniform == 0 else math.e / (1 + math.e)
    assert log_probs[0] == pytest.approx(math.log(chance), rel=1e-5)
    for greedy in (None, np.zeros(1, np.float32)):
        uniforms = None if greedy is None else np.full((1, 2), uniform, np.float32)
        assert dist.sample(repeated([50, -50, 9, 9, 0, 1, 80], 1), uniforms, greedy, legal)[
            0
        ].tolist() == [[1, 2]]


@pytest.mark.parametrize("uniform", [None, 0.0, 0.5, 1 - 2.0**-24])
@pytest.mark.parametrize("value", [-2e9, -3e38, 3e38, -np.inf, np.inf, np.nan])
def test_the_only_legal_action_is_taken_for_any_logits(value, uniform):
    dist = distribution_for(spaces.MultiDiscrete([3, 4]))
    legal = np.eye(7, dtype=bool)[[1]] | np.eye(7, dtype=bool)[[5]]
    uniforms = None if uniform is None else np.full((1, 2), uniform, np.float32)
    outputs = repeated([0, value, 3e38, np.nan, 1, value, np.inf], 1)
    with np.errstate(all="ignore"):
        actions, log_probs = dist.sample(outputs, uniforms, None, legal)
    assert actions.tolist() == [[1, 2]]
    masked = (
        torch.from_numpy(outputs)
        .masked_fill(~torch.from_numpy(legal), MASKED_LOGIT)
        .requires_grad_()
    )
    scored, entropy = dist.evaluate_actions(
        masked, torch.from_numpy(actions), entropy_gradient=True
    )
    for each in (torch.from_numpy(log_probs), scored, entropy, dist.kl(masked, masked)):
        assert each.item() == 0 if np.isfinite(value) else each.isnan()


def test_bernoulli_frequencies_match_probabilities():
    logits = [0.0, 1.5, -2.0]
    dist = distribution_for(spaces.MultiBinary(3))
    actions, _ = dist.sample(repeated(logits), UNIFORMS.repeat(3, 1), None, None)
    chances = torch.sigmoid(torch.tensor(logits, dtype=torch.float64)).numpy()
    assert np.abs(actions.sum(0) - GRID * chances).max() <= 1.01
    assert (actions.shape, actions.dtype) == ((GRID, 3), np.int8)


def test_gaussian_samples_match_the_inverse_cdf():
    dist = distribution_for(BOX)
    actions, _ = dist.sample(
        repeated([0.5, 0.5, 0.5, 0.1, 0.2, 0.3]), UNIFORMS.repeat(3, 1), None, None
    )
    middle = torch.tensor([1.0, 0.0, 1.5]).double()
    half = torch.tensor([3.0, 1.0, 0.5]).double()
    normal = laws.Normal(middle + half * 0.5, half * torch.tensor([0.1, 0.2, 0.3]).double().exp())
    expected = normal.icdf(torch.from_numpy(UNIFORMS.astype(np.float64)).expand(-1, 3))
    np.testing.assert_allclose(actions, expected.numpy(), rtol=1e-4, atol=2e-3)
    assert actions.dtype == np.float64
    extremes, log_probs = dist.sample(
        repeated([0] * 6, 2), np.array([[0] * 3, [1 - 2.0**-24] * 3], np.float32), None, None
    )
    assert np.isfinite(extremes).all()
    assert np.isfinite(log_probs).all()


@pytest.mark.parametrize(
    "space", [spaces.Discrete(4), spaces.MultiDiscrete([[2, 3]]), spaces.MultiBinary((2, 2)), BOX]
)
def test_temperature_zero_takes_the_most_likely_action(space):
    dist = distribution_for(space)
    rng = np.random.default_rng(0)
    width = dist.outputs + sum(math.prod(shape) for shape in dist.free_parameters.values())
    outputs = rng.standard_normal((6, width)).astype(np.float32)
    drawn = [rng.random((6, dist.uniforms_per_action)).astype(np.float32) for _ in range(40)]
    best, log_probs = dist.sample(outputs, None, None, None)
    temperatures = np.array([0, 1, 0, 2, 0.5, 0], dtype=np.float32)
    results = [dist.sample(outputs, uniforms, temperatures, None) for uniforms in drawn]
    for actions, values in results:
        np.testing.assert_array_equal(actions[temperatures == 0], best[temperatures == 0])
        np.testing.assert_allclose(
            values[temperatures == 0], log_probs[temperatures == 0], rtol=1e-6
        )
    assert any(
        (actions[row] != best[row]).any() for (actions, _), row in product(results, (1, 3, 4))
    )
    # Slow oracle: the most likely of many actions.
    scored = dist.evaluate_actions(
        torch.from_numpy(outputs), torch.from_numpy(best), entropy_gradient=False
    )[0]
    np.testing.assert_allclose(scored.numpy(), log_probs, rtol=1e-4, atol=1e-5)
    for actions, _ in results:
        other = dist.evaluate_actions(
            torch.from_numpy(outputs), torch.from_numpy(actions), entropy_gradient=False
        )
        assert bool((other[0] <= scored + 1e-5).all())


def test_gaussian_at_a_temperature_is_proportional_to_a_power():
    dist = distribution_for(spaces.Box(-np.inf, np.inf, (1,)))
    outputs = torch.tensor([[0.3, -0.5]])
    points = torch.linspace(-20, 20, 40_001)[:, None]
    for temperature in (0.5, 3.0):
        temperatures = torch.full((len(points),), temperature)
        each = outputs.expand(len(points), 2)
        hot, entropy = dist.evaluate_actions(
            dist.at_temperature(each, temperatures), points, entropy_gradient=False
        )
        cold, _ = dist.evaluate_actions(each, points, entropy_gradient=False)
        power = (cold.double() / temperature).exp()
        torch.testing.assert_close(
            hot.double().exp(), power / (power.sum() * 1e-3), rtol=1e-3, atol=1e-6
        )
        assert float(entropy[0]) == pytest.approx(
            -float((hot.double().exp() * hot.double()).sum() * 1e-3), rel=1e-3
        )


def test_illegal_actions_have_no_probability_and_no_gradient():
    dist = distribution_for(spaces.MultiDiscrete([3, 2]))
    outputs = torch.tensor([[1.0, 5.0, -1.0, 0.5, 0.0]], requires_grad=True)
    masked = outputs.masked_fill(torch.tensor([[False, True, False, False, False]]), MASKED_LOGIT)
    log_prob, entropy = dist.evaluate_actions(masked, torch.tensor([[2, 0]]), entropy_gradient=True)
    parts = (
        laws.Categorical(logits=torch.tensor([1.0, -1.0])),
        laws.Categorical(logits=torch.tensor([0.5, 0.0])),
    )
    expected = parts[0].log_prob(torch.tensor(1)) + parts[1].log_prob(torch.tensor(0))
    assert log_prob.item() == pytest.approx(expected.item())
    assert entropy.item() == pytest.approx(
        (parts[0].entropy() + parts[1].entropy()).item(), rel=1e-5
    )
    (slope,) = torch.autograd.grad((log_prob + entropy).sum(), outputs)
    assert slope[0, 1] == 0
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Box(0, 9, (2,), np.uint8),
        spaces.Dict({"a": spaces.Text(2)}),
        spaces.Tuple(()),
        spaces.Graph(BOX, None),
        None,
    ],
)
def test_unsupported_action_spaces_are_rejected(space):
    with pytest.raises(ValueError, match="action_space"):
        distribution_for(space)


def test_a_dict_or_tuple_is_the_product_of_its_parts():
    leaves = [spaces.Discrete(3), BOX, spaces.MultiBinary(2), spaces.MultiDiscrete([2, 2])]
    whole = spaces.Tuple((spaces.Dict({"a": leaves[0], "b": leaves[1]}), leaves[2], leaves[3]))
    dist = distribution_for(whole)
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((6, dist.outputs + 3)).astype(np.float32)
    uniforms = rng.random((6, dist.uniforms_per_action)).astype(np.float32)
    temperature = np.array([0.5, 1, 2, 1, 0.7, 3], np.float32)
    legal = np.tile([True, False, True, True, True, False, True], (6, 1))
    # Outputs of the network, then free parameters; masks of discrete parts only.
    network = np.split(outputs[:, : dist.outputs], [3, 6, 8], axis=1)
    network[1] = np.concatenate([network[1], outputs[:, dist.outputs :]], axis=1)
    actions, log_probs = dist.sample(outputs, uniforms, temperature, legal)
    columns = np.split(uniforms, [1, 4, 6], axis=1)
    given = (legal[:, :3], None, None, legal[:, 3:])
    hot = torch.from_numpy(temperature)
    other = torch.from_numpy(outputs).flip(0)
    others = list(other[:, : dist.outputs].split([3, 3, 2, 4], dim=1))
    others[1] = torch.cat([others[1], other[:, dist.outputs :]], dim=1)
    scores = np.zeros(6, np.float32)
    expected = torch.zeros(3, 6)
    chosen = []
    for leaf, own, draws, mask, second in zip(leaves, network, columns, given, others, strict=True):
        part = distribution_for(leaf)
        drawn, found = part.sample(own, draws, temperature, mask)
        chosen.append(drawn.reshape(6, -1))
        scores += found
        parameters = part.at_temperature(torch.from_numpy(own), hot)
        if mask is not None:
            parameters = part.masked(parameters, torch.from_numpy(mask))
        both = part.evaluate_actions(parameters, torch.from_numpy(drawn), entropy_gradient=True)
        expected[:2] += torch.stack(both)
        expected[2] += part.kl(second, torch.from_numpy(own))
    np.testing.assert_allclose(actions, np.concatenate(chosen, axis=1), rtol=1e-6)
    np.testing.assert_allclose(log_probs, scores, rtol=1e-5)
    adjusted = dist.masked(
        dist.at_temperature(torch.from_numpy(outputs), hot), torch.from_numpy(legal)
    )
    found = dist.evaluate_actions(adjusted, torch.from_numpy(actions), entropy_gradient=True)
    torch.testing.assert_close(torch.stack(found), expected[:2])
    torch.testing.assert_close(dist.kl(other, torch.from_numpy(outputs)), expected[2])


# ---- KL divergences

CLOSED = {
    "categorical": (distribution_for(spaces.Discrete(4)).kl, lambda x: laws.Categorical(logits=x)),
    "bernoulli": (
        distribution_for(spaces.MultiBinary(4)).kl,
        lambda x: laws.Independent(laws.Bernoulli(logits=x), 1),
    ),
    "gaussian": (
        distribution_for(spaces.Box(-1.0, 1.0, (2,))).kl,
        lambda x: laws.Independent(laws.Normal(x[:, :2], x[:, 2:].exp()), 1),
    ),
}


@pytest.mark.parametrize("size", [1e-3, 1.0, 6.0])
@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_and_gradients_match_torch(name, size):
    divergence_of, made = CLOSED[name]
    random = torch.Generator().manual_seed(1)
    pair = [
        (size * torch.randn(6, 4, dtype=torch.float64, generator=random)).requires_grad_()
        for _ in range(2)
    ]
    found = divergence_of(*pair)
    expected = laws.kl_divergence(*map(made, pair))
    torch.testing.assert_close(found, expected)
    assert float(found.detach().min()) > 0
    weights = torch.arange(6.0, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((weights * found).sum(), pair),
        torch.autograd.grad((weights * expected).sum(), pair),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
        assert bool(one[1:].any(1).all())


@pytest.mark.parametrize("name", CLOSED)
def test_kl_to_itself_is_exactly_zero(name):
    logits = 3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    variable = logits.clone().requires_grad_()
    for pair in ((variable, logits), (logits, variable)):
        value = CLOSED[name][0](*pair)
        assert torch.equal(value, torch.zeros(5))
        (slope,) = torch.autograd.grad(value.sum(), variable)
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-6)


def test_values_excluded_in_both_have_no_effect():
    logits = torch.tensor([[0.3, -1e9, 1.0]], requires_grad=True)
    other = torch.tensor([[1.0, -1e9, -0.5]])
    value = distribution_for(spaces.Discrete(3)).kl(logits, other)
    expected = laws.kl_divergence(
        *(laws.Categorical(logits=each.detach()[:, [0, 2]]) for each in (logits, other))
    )
    torch.testing.assert_close(value.detach(), expected)
    value.sum().backward()
    assert logits.grad[0, 1] == 0
    assert bool(logits.grad.isfinite().all())
