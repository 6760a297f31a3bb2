"""The drifting Gaussian process: closed forms, a slow oracle, and what it makes of gains."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.founders import at
from evogrpo.evolution.strategies.bandit.gains import gains, normal_scores
from evogrpo.evolution.strategies.bandit.gaussian_process import DriftingProcess, Kernel, fitted
from evogrpo.evolution.strategies.bandit.unit_cube import fractions_of, placed, point_of
from tests.evolution.test_backtracking import earned, member, told

KERNEL = Kernel(lengths=(0.3, 0.7), noise=0.2, forgetting=0.19)


def test_one_observation_has_a_closed_form():
    point, value = np.array([[0.5, 0.5]]), 2.0
    process = DriftingProcess(KERNEL, point, np.array([1.0]), np.array([value]))
    asked = np.array([[0.5, 0.5], [0.8, 0.5], [0.5, 0.5]])
    mean, deviation = process.predict(asked, np.array([1.0, 1.0, 3.0]))
    # At the point; one length away, where the kernel is exp(-1/2); and two units of time later, where 19 % is new.
    covariance = np.array([1.0, math.exp(-0.5), 0.81])
    assert mean == pytest.approx(covariance * value / 1.2)
    assert deviation**2 == pytest.approx(1.0 - covariance**2 / 1.2)
    assert process.log_likelihood == pytest.approx(-0.5 * value**2 / 1.2 - 0.5 * math.log(2 * math.pi * 1.2))


def test_many_observations_are_conditioned_on_as_a_normal_distribution_is():
    rng = np.random.default_rng(0)
    points, times, values = rng.random((12, 2)), rng.integers(1, 5, 12).astype(float), rng.standard_normal(12)
    asked, when = rng.random((5, 2)), np.full(5, 5.0)
    everything, moments = np.concatenate([points, asked]), np.concatenate([times, when])
    joint = KERNEL.between(everything, moments, everything, moments)
    assert np.allclose(np.diag(joint), 1.0)
    noisy = joint[:12, :12] + KERNEL.noise * np.eye(12)
    inverse = np.linalg.inv(noisy)
    process = DriftingProcess(KERNEL, points, times, values)
    mean, deviation = process.predict(asked, when)
    assert mean == pytest.approx(joint[12:, :12] @ inverse @ values)
    assert deviation**2 == pytest.approx(np.diag(joint[12:, 12:] - joint[12:, :12] @ inverse @ joint[:12, 12:]))
    expected = -0.5 * values @ inverse @ values - 0.5 * np.linalg.slogdet(2 * math.pi * noisy)[1]
    assert process.log_likelihood == pytest.approx(expected)
    again, surer = process.imagined(asked[:2], when[:2]).predict(asked, when)
    assert again == pytest.approx(mean)
    assert (surer <= deviation + 1e-12).all()
    assert (surer[:2] < deviation[:2]).all()


def test_it_finds_out_what_matters_and_whether_it_drifts():
    rng = np.random.default_rng(1)
    points, times = rng.random((60, 2)), np.repeat(np.arange(10.0), 6)
    still = normal_scores(np.sin(6 * points[:, 0]) + 0.05 * rng.standard_normal(60))
    process = fitted(points, times, still)
    assert process.kernel.lengths[0] < process.kernel.lengths[1]
    assert process.kernel.forgetting == 0.0
    drifting = normal_scores(np.sin(6 * points[:, 0] + 0.9 * times))
    assert fitted(points, times, drifting).kernel.forgetting > 0.0


def test_normal_scores_go_by_order_alone_and_treat_equals_alike():
    scores = normal_scores(np.array([3.0, -1e9, 3.0, 7.0, 1e9]))
    assert scores == pytest.approx(normal_scores(np.array([0.3, 0.1, 0.3, 0.7, 0.9])))
    assert scores[0] == scores[2] == pytest.approx(-0.2533471)  # two fifths lie below the middle of both
    assert list(np.argsort(scores, kind="stable")) == [1, 0, 2, 3, 4]
    assert scores[1] == -scores[4]


def test_gains_are_of_the_state_that_a_generation_began_with():
    a, b = member(0, 0), member(1, 1)
    child, back = member(1, 5, parent=0, born=1), member(1, 6, parent=0, born=2, back_to=1)
    history = told(
        [(a, earned(5)), (b, earned(2))],
        [(a, earned(6)), (child, earned(9))],
        [(a, None), (back, earned(4))],
        [(member(0, 7, parent=6, born=3), earned(4.5)), (back, earned(4))],
        kept=[(a, 1, earned(5))],
    )
    found = [(each.generation, each.gain) for each in gains(history)]
    expected = [(1, 3), (1, 0), (2, 1), (2, 4), (3, -1), (3, -1), (4, 0), (4, 0.5)]
    assert found == [(generation, pytest.approx(gain)) for generation, gain in expected]


SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-2, scale="log", founders=(1e-4, 1e-3)),
    clip_coef=RLParameter(min=0.1, max=0.3),
    group_size=RLParameter(choices=[2, 4, 16]),
    loss_type=RLParameter(choices=["dapo", "grpo", "dr_grpo"]),
)


def test_places_are_on_the_scale_of_each_range():
    values = Hyperparameters(lr=1e-4, clip_coef=0.15, group_size=4, loss_type="grpo")
    at = {name: point_of(values, HyperparameterConfig(**{name: SPACE[name]})) for name in SPACE}
    assert [float(at[name][0]) for name in ("lr", "clip_coef", "group_size")] == pytest.approx([0.5, 0.25, 0.5])
    other = point_of(replace(values, loss_type="dapo"), HyperparameterConfig(loss_type=SPACE["loss_type"]))
    assert np.linalg.norm(other - at["loss_type"]) == pytest.approx(1.0)
    assert np.array_equal(point_of(values, SPACE), np.concatenate([at[name] for name in SPACE]))


@pytest.mark.parametrize(("lr", "value"), [(1e-9, 0.0), (1.0, 1.0)])
def test_values_outside_a_range_lie_on_its_bound(lr, value):
    assert point_of(Hyperparameters(lr=lr), HyperparameterConfig(lr=SPACE["lr"])) == [value]


def test_what_does_not_count_lies_in_the_middle():
    beta = RLParameter(min=0.01, max=0.1, when={"loss_type": ["grpo"]})
    space = HyperparameterConfig(beta=beta, loss_type=SPACE["loss_type"])
    points = [point_of(Hyperparameters(beta=value, loss_type="dapo"), space) for value in (0.01, 0.1)]
    assert np.array_equal(*points)
    assert 0.5 in points[0]
    counting = [point_of(Hyperparameters(beta=value, loss_type="grpo"), space) for value in (0.01, 0.1)]
    assert not np.array_equal(*counting)
    fractions = np.random.default_rng(0).random((8, 2))
    made = [at(space, Hyperparameters(), dict(zip(space, row, strict=True))) for row in fractions]
    assert np.array_equal(placed(fractions, space, Hyperparameters()), [point_of(each, space) for each in made])


def test_fractions_bring_back_the_values_they_are_of():
    numbers = {name: SPACE[name] for name in ("clip_coef", "group_size", "loss_type")}
    space = HyperparameterConfig(**numbers)
    values = Hyperparameters(clip_coef=0.15, group_size=4, loss_type="grpo")
    back = at(space, Hyperparameters(), dict(zip(space, fractions_of(values, space), strict=True)))
    assert (back.clip_coef, back.group_size, back.loss_type) == (pytest.approx(0.15), 4, "grpo")
    points = np.stack([point_of(values, space)] * 2)
    assert placed(np.stack([fractions_of(values, space)] * 2), space, values) == pytest.approx(points)
