"""Mutation moves, stays in bounds and does not drift; founders cover the space."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.founders import spread_founders
from evogrpo.evolution.mutation import (
    Mutation,
    changes_between,
    neighbour,
    quantile,
    relative_position,
)

LR = RLParameter(min=1e-6, max=1e-3, scale="log")
SPACE = HyperparameterConfig(
    lr=LR,
    clip_coef=RLParameter(min=0.05, max=0.4),
    group_size=RLParameter(choices=[4, 8, 16]),
    update_epochs=RLParameter(min=1, max=4),
    batch_size=RLParameter(min=4, max=256, scale="log"),
)


@st.composite
def parameters(draw, integer):
    """Return a range or choices of positive numbers, with any step up to above its width."""
    numbers = st.integers(1, 1000) if integer else st.floats(1e-6, 1e3)
    if draw(st.booleans()):
        return RLParameter(choices=draw(st.lists(numbers, min_size=2, max_size=6, unique=True)))
    low, high = sorted(draw(st.tuples(numbers, numbers)))
    assume(low < high)
    return RLParameter(
        min=low,
        max=high,
        scale=draw(st.sampled_from(["linear", "log"])),
        factor=draw(st.floats(1.001, 10)),
    )


class TestNeighbour:
    @given(data=st.data(), integer=st.booleans(), upward=st.booleans(), value=st.integers(1, 2000))
    def test_a_value_outside_moves_to_the_nearer_end(self, data, integer, upward, value):
        parameter = data.draw(parameters(integer))
        low, high = parameter.bounds
        assume(not low <= value <= high)
        expected = low if value < low else high
        assert neighbour(parameter, value, upward=upward, integer=integer) == expected

    @given(value=st.floats(2e-6, 5e-4), factor=st.floats(1.01, 1.9))
    def test_a_log_step_up_and_a_log_step_down_cancel(self, value, factor):
        parameter = RLParameter(min=1e-6, max=1e-3, scale="log", factor=factor)
        up = neighbour(parameter, value, upward=True, integer=False)
        down = neighbour(parameter, value, upward=False, integer=False)
        assert up / value == pytest.approx(factor, rel=1e-8)
        # The geometric mean of both outcomes is the start: no drift.
        assert math.sqrt(up * down) == pytest.approx(value, rel=1e-8)

    @pytest.mark.parametrize("scale", ["linear", "log"])
    def test_an_integer_moves_by_at_least_one(self, scale):
        parameter = RLParameter(min=2, max=8, scale=scale, factor=1.2)
        assert neighbour(parameter, 4, upward=True, integer=True) == 5
        assert neighbour(parameter, 4, upward=False, integer=True) == 3

    @pytest.mark.parametrize("upward", [True, False])
    def test_choices_move_by_one_and_turn_at_the_ends(self, upward):
        parameter = RLParameter(choices=[4, 8, 16])
        assert neighbour(parameter, 8, upward=upward, integer=True) == (16 if upward else 4)
        assert neighbour(parameter, 4, upward=upward, integer=True) == 8
        assert neighbour(parameter, 16, upward=upward, integer=True) == 8

    def test_a_range_narrower_than_a_step_is_crossed_to_the_farther_bound(self):
        for parameter in (
            RLParameter(min=1.0, max=1.1, scale="log", factor=1.2),
            RLParameter(min=1.0, max=1.1, factor=3.0),
        ):
            assert neighbour(parameter, 1.02, upward=True, integer=False) == 1.1
            assert neighbour(parameter, 1.08, upward=True, integer=False) == 1.0


class TestMutation:
    @given(seed=st.integers(0, 2**32), probability=st.floats(0.001, 1))
    def test_changes_are_recorded(self, seed, probability):
        parent = Hyperparameters(max_grad_norm=0.7)
        child = Mutation(probability=probability)(parent, SPACE, np.random.default_rng(seed))
        before = parent.to_json()
        after = child.to_json()
        changes = changes_between(parent, child)
        assert changes == {
            name: (before[name], after[name]) for name in before if before[name] != after[name]
        }
        assert changes
        assert set(changes) <= set(SPACE)

    @pytest.mark.parametrize("probability", [1e-9, 0.5])
    def test_each_changes_with_the_stated_probability(self, probability):
        rng = np.random.default_rng(1)
        trials = 1500
        names = len(SPACE)
        counts = dict.fromkeys(SPACE, 0)
        for _ in range(trials):
            child = Mutation(probability=probability)(Hyperparameters(), SPACE, rng)
            for name in changes_between(Hyperparameters(), child):
                counts[name] += 1
        # If none moves by itself, one drawn uniformly does.
        expected = probability + (1 - probability) ** names / names
        for count in counts.values():
            assert abs(count / trials - expected) < 5 * math.sqrt(
                expected * (1 - expected) / trials
            )

    @pytest.mark.parametrize("factor", [None, 1.2, 4])
    def test_many_mutations_do_not_drift_on_a_log_scale(self, factor):
        rng = np.random.default_rng(2)
        trials = 1000
        space = HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-3, scale="log", factor=factor))
        # In the middle of the range there is no drift, by symmetry.
        start = Hyperparameters(lr=math.sqrt(1e-6 * 1e-3))
        logs = [math.log(Mutation()(start, space, rng).lr / start.lr) for _ in range(trials)]
        assert abs(np.mean(logs)) < 5 * np.std(logs) / math.sqrt(trials)
        if factor is not None:  # with an explicit factor every step has this size
            assert np.allclose(np.abs(logs), math.log(factor))

    @pytest.mark.parametrize("start", ["grpo", None])
    def test_a_name_moves_to_every_other_name_with_equal_probability(self, start):
        names = ("grpo", "cispo", "sapo", "gspo")
        trials = 1000
        space = HyperparameterConfig(loss_type=RLParameter(choices=list(names)))
        rng = np.random.default_rng(0)
        parent = Hyperparameters(loss_type=start)
        others = [name for name in names if name != start]
        counts = dict.fromkeys(others, 0)
        for _ in range(trials):
            child = Mutation()(parent, space, rng)
            assert changes_between(parent, child) == {"loss_type": (start, child.loss_type)}
            counts[child.loss_type] += 1
        expected = 1 / len(others)
        for count in counts.values():
            assert abs(count / trials - expected) < 5 * math.sqrt(
                expected * (1 - expected) / trials
            )

    @pytest.mark.parametrize("name", ["clip_low", "clip_high"])
    def test_none_moves_from_the_number_it_stands_for(self, name):
        space = HyperparameterConfig(
            **{name: RLParameter(min=0.1, max=0.9, scale="log", factor=1.5)}
        )
        parent = Hyperparameters(clip_coef=0.3)
        child = Mutation()(parent, space, np.random.default_rng(0))
        assert getattr(child, name) in (pytest.approx(0.45), pytest.approx(0.2))
        assert changes_between(parent, child) == {name: (None, getattr(child, name))}

    @pytest.mark.parametrize(
        "parameter",
        [
            RLParameter(min=0.5, max=4, scale="log"),
            RLParameter(min=0.5, max=4),
            RLParameter(choices=[1, 4]),
        ],
    )
    def test_no_advantage_clip_moves_to_the_widest_bound(self, parameter):
        space = HyperparameterConfig(advantage_clip=parameter)
        for seed in range(8):
            child = Mutation(resample=0)(Hyperparameters(), space, np.random.default_rng(seed))
            assert child.advantage_clip == 4

    def test_an_empty_space_changes_nothing(self):
        parent = Hyperparameters()
        assert Mutation()(parent, HyperparameterConfig(), np.random.default_rng(0)) == parent

    @pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "0.5"])
    @pytest.mark.parametrize("name", ["resample", "probability"])
    def test_invalid_probabilities_are_refused(self, name, value):
        with pytest.raises(ValueError, match=f"{name} must"):
            Mutation(**{name: value})


class TestSteps:
    @given(data=st.data(), integer=st.booleans(), size=st.floats(1e-6, 3), upward=st.booleans())
    def test_steps_of_every_size_move_and_stay_in_bounds(self, data, integer, size, upward):
        parameter = data.draw(parameters(integer))
        value = quantile(parameter, data.draw(st.floats(0, 1)), integer=integer)
        moved = neighbour(parameter, value, upward=upward, integer=integer, size=size)
        low, high = parameter.bounds
        assert moved != value
        assert low <= moved <= high
        assert parameter.choices is None or moved in parameter.choices
        assert not integer or isinstance(moved, int)

    @pytest.mark.parametrize("scale", ["linear", "log"])
    def test_a_step_is_a_fraction_of_the_range_on_its_scale(self, scale):
        parameter = RLParameter(min=1e-4, max=1e-1, scale=scale)
        value = quantile(parameter, 0.4, integer=False)
        assert relative_position(parameter, value) == pytest.approx(0.4)
        for size, upward in ((0.2, True), (0.5, True), (0.1, False)):
            moved = neighbour(parameter, value, upward=upward, integer=False, size=size)
            assert relative_position(parameter, moved) == pytest.approx(
                0.4 + size if upward else 0.4 - size
            )

    def test_every_choice_is_reached_also_by_larger_steps(self):
        rungs = [4, 8, 16, 32, 64]
        space = HyperparameterConfig(batch_size=RLParameter(choices=rungs))
        rng = np.random.default_rng(0)
        value = Hyperparameters(batch_size=4)
        jumps = set()
        seen = set()
        for _ in range(300):
            child = Mutation()(value, space, rng)
            jumps.add(abs(rungs.index(child.batch_size) - rungs.index(value.batch_size)))
            seen.add(child.batch_size)
            value = child
        assert jumps == {1, 2, 3, 4}
        assert seen == set(rungs)

    def test_step_sizes_descend_from_the_parents_step(self):
        space = HyperparameterConfig(lr=LR)
        start = Hyperparameters(lr=3e-5)

        def typical(steps):
            rng = np.random.default_rng(1)
            moved = [Mutation(resample=0)(start, space, rng, steps).lr for _ in range(400)]
            return np.median(
                [abs(relative_position(LR, lr) - relative_position(LR, start.lr)) for lr in moved]
            )

        assert typical({"lr": 0.05}) == pytest.approx(0.05, rel=0.2)
        assert typical({"lr": -0.05}) == typical({"lr": 0.05})
        assert typical(None) == typical({}) == pytest.approx(0.2, rel=0.2)
        # Step sizes have a lower bound.
        assert typical({"lr": 1e-9}) == pytest.approx(0.02, rel=0.2)
        assert typical({"lr": 1.0}) > 0.3

    def test_resampling_draws_from_the_whole_range_with_its_probability(self):
        narrow = RLParameter(min=1e-6, max=1e-3, scale="log", founders=(1e-6, 2e-6))
        space = HyperparameterConfig(lr=narrow)
        rng = np.random.default_rng(0)
        trials = 3000
        start = Hyperparameters(lr=1e-6)
        places = [
            relative_position(LR, Mutation(resample=0.4)(start, space, rng, {"lr": 0.02}).lr)
            for _ in range(trials)
        ]
        # A hundredth of the step sizes exceeds 0.02 exp(3 x 0.75); a sixth of the range's draws is
        # below.
        far = sum(each > 0.2 for each in places) / trials
        assert far == pytest.approx(0.4 * 0.8, abs=0.04)
        # An explicit factor fixes the step.
        exact = HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-3, scale="log", factor=2))
        assert {
            round(Mutation(resample=1.0)(start, exact, rng).lr / start.lr, 6) for _ in range(50)
        } == {2.0}


class TestSpread:
    def spread(self, size, *, defaults=None, space=SPACE, samples_per_step=64, seed=0):
        return spread_founders(
            defaults or Hyperparameters(),
            space,
            size,
            np.random.default_rng(seed),
            samples_per_step,
        )

    def test_the_first_member_has_the_defaults_even_outside_the_space(self):
        defaults = Hyperparameters(lr=0.5, group_size=32)
        assert self.spread(4, defaults=defaults)[0] == defaults

    def test_fixed_hyperparameters_keep_the_default(self):
        members = self.spread(6, defaults=Hyperparameters(beta=0.3, max_grad_norm=2.0))
        assert {(member.beta, member.max_grad_norm) for member in members} == {(0.3, 2.0)}

    @pytest.mark.parametrize("seed", range(2))
    def test_every_part_of_every_range_gets_one_member(self, seed):
        others = self.spread(10, seed=seed)[1:]
        low, high = LR.bounds
        parts = [int(9 * math.log(member.lr / low) / math.log(high / low)) for member in others]
        assert sorted(parts) == list(range(9))
        assert sorted(int(9 * (member.clip_coef - 0.05) / 0.35) for member in others) == list(
            range(9)
        )
        assert sorted(member.group_size for member in others) == [4] * 3 + [8] * 3 + [16] * 3
        assert {member.update_epochs for member in others} == {1, 2, 3, 4}
        assert all(4 <= member.batch_size <= 256 for member in others)

    @pytest.mark.parametrize(("size", "most"), [(4, 1), (7, 2), (10, 3)])
    def test_names_are_shared_evenly(self, size, most):
        names = ["grpo", "cispo", "sapo"]
        space = HyperparameterConfig(loss_type=RLParameter(choices=names))
        others = [member.loss_type for member in self.spread(size, space=space)[1:]]
        assert {name: others.count(name) for name in names} == dict.fromkeys(names, most)

    @pytest.mark.parametrize("seed", range(3))
    def test_founders_differ_while_the_space_has_room(self, seed):
        space = HyperparameterConfig(
            group_size=RLParameter(choices=[4, 8]),
            update_epochs=RLParameter(min=1, max=3),
            loss_type=RLParameter(choices=["grpo", "dapo"]),
        )
        # 12 points, and the defaults, whose loss type is none of these
        for size in (5, 12, 13, 20):
            members = self.spread(size, space=space, seed=seed)
            assert len(set(members)) == min(size, 13)

    def test_none_becomes_a_number_once_it_evolves(self):
        space = HyperparameterConfig(
            clip_low=RLParameter(min=0.1, max=0.3), advantage_clip=RLParameter(choices=[1, 2])
        )
        first, *others = self.spread(5, space=space)
        assert (first.clip_low, first.advantage_clip) == (None, None)
        assert sorted(member.advantage_clip for member in others) == [1, 1, 2, 2]
        assert all(0.1 <= member.clip_low <= 0.3 for member in others)

    def test_equal_generators_give_equal_populations(self):
        assert self.spread(5, seed=3) == self.spread(5, seed=3)
        assert self.spread(5, seed=3) != self.spread(5, seed=4)

    def test_settings_of_unequal_cost_are_refused(self):
        with pytest.raises(
            ValueError, match=r"must divide samples_per_step=12.*got 8. Use 2, 3, 4, 6, 12"
        ):
            self.spread(2, space=HyperparameterConfig(lr=LR), samples_per_step=12)
        with pytest.raises(ValueError, match=r"got \[8, 16\]. Use 2, 3, 4, 6, 12"):
            self.spread(2, samples_per_step=12, defaults=Hyperparameters(group_size=4))
        with pytest.raises(ValueError, match="size must be at least 1"):
            self.spread(0)
