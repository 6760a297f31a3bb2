"""Control of the step size by `target_kl`: search of the learning rate, bounded KL per step."""

import math
import warnings

import gymnasium
import numpy as np
import pytest
import torch

from evogrpo import (
    GRPO,
    EvolvableAlgorithm,
    GymnasiumGroups,
    HyperparameterConfig,
    MultiAgentGRPO,
    Objective,
)
from evogrpo.algorithms.learning.step_size import MAX_SEARCH_PASSES, StepControl, step_target
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL, Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.members.bank import RUNNING_STATS
from tests.tiny_models import tiny_model
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_teams import team_env, team_population
from tests.tiny_training import equal_states, tiny_env, tiny_population

TARGET = 0.005


def search(kl_of, *, factor=1.0, ceiling=0.0, target=TARGET):
    """Return the control after a step whose KL is a function of the factor, and the last KL."""
    control = StepControl(factor, ceiling, target=target, target_kl=TARGET)
    kl = kl_of(control.factor)
    while control.update(kl):
        kl = kl_of(control.factor)
    return control, kl


@pytest.mark.parametrize("scale", [1e-10, 0.005, 1e6])
@pytest.mark.parametrize("power", [1.0, 2.0, 2.5])
def test_search_finds_the_learning_rate_of_a_growing_kl(scale, power):
    """KL grows with the square of the learning rate for small steps, and clipping changes that."""
    control, kl = search(lambda factor: scale * factor**power)
    assert control.passes <= 8
    assert TARGET / 1.2 <= kl <= 1.2 * TARGET


@pytest.mark.parametrize("scale", [0.006, 1e6])
def test_the_stored_factor_goes_by_the_kl_that_was_reached(scale):
    control, _ = search(lambda factor: scale * factor**2)
    factor, ceiling = control.result()
    assert factor == ceiling
    assert scale * factor**2 == pytest.approx(TARGET)


@pytest.mark.parametrize("jump", [0.01, 0.3, 2.0])
def test_search_takes_the_smaller_of_two_learning_rates_between_which_the_kl_jumps(jump):
    control, kl = search(lambda factor: 3 * TARGET if factor > jump else TARGET / 3)
    assert kl == TARGET / 3
    assert control.passes <= MAX_SEARCH_PASSES + 1
    assert not control.undone


def test_weak_signals_leave_room_and_steps_far_beyond_the_limit_are_left_out():
    control, _ = search(lambda factor: TARGET / 4, target=TARGET / 4)
    assert control.result() == (1.0, 2.0)  # KL of the ceiling: 4 times as much, the whole target
    control = StepControl(1.0, 1.0, target=TARGET, target_kl=TARGET)
    assert [control.update(math.nan) for _ in range(4)] == [True, True, True, False]
    assert control.undone
    assert control.result()[0] == pytest.approx(1e-4)


def test_a_search_that_finds_nothing_starts_again_with_the_next_batch():
    control, _ = search(lambda factor: 1e3, factor=3.0)
    assert control.undone
    assert control.result() == (3.0, 0.0)


@pytest.mark.parametrize(
    ("kl", "start", "factor"),
    [(0.01, 1.0, math.sqrt(1 / 2)), (0.0055, 1.0, 1.0), (0.003, 1.0, 1.2), (0.0, 1.25, 1.3)],
)
def test_later_steps_move_the_factor_up_to_the_ceiling_without_a_repetition(kl, start, factor):
    control = StepControl(start, 1.3, target=TARGET, target_kl=TARGET)
    assert not control.update(kl)
    assert control.result()[0] == pytest.approx(factor)
    assert control.result()[1] == 1.3


def test_target_follows_the_effective_number_of_actions():
    advantages = torch.zeros(1000)
    advantages[:100] = torch.tensor([1.0, -1.0]).repeat(50)
    assert step_target(TARGET, advantages, transitions=True) == pytest.approx(TARGET * 100 / 1000)
    assert step_target(TARGET, torch.ones(1000), transitions=True) == TARGET
    assert step_target(TARGET, advantages, transitions=False) == TARGET


@pytest.mark.parametrize("target_kl", [0.0025, 0.01, 0.04])
def test_the_clip_range_follows_the_step(target_kl):
    # Log-ratios of a small step of KL k are nearly normal with variance 2 k: the same share of them
    # lies outside the range at any target.
    low, high = Hyperparameters(target_kl=target_kl).clip_bounds
    deviation = math.sqrt(2 * target_kl)
    assert low == high == pytest.approx(math.sqrt(2) * deviation)
    assert Hyperparameters(target_kl=0.01).clip_bounds == Hyperparameters().clip_bounds
    assert Hyperparameters(target_kl=target_kl, clip_coef=0.3).clip_bounds == (0.3, 0.3)
    assert Hyperparameters(target_kl=100.0).clip_bounds[0] < 1


KINDS = {"networks": (step_population, cart_pole), "language": (tiny_population, tiny_env)}


def step_of(population, env, step=0, **options):
    rollout = population.collect(env, step=step, samples_per_step=16, starts_per_step=4)
    return population.learn(rollout.experience, step=step, **options)


def learnt(kind, *, target_kls, lrs):
    """Return a population after a learning step, and the reports.

    Without momentum, there is no warm-up. All clip alike.
    """
    make, make_env = KINDS[kind]
    population = make(
        len(lrs),
        update_epochs=2,
        group_size=4,
        clip_coef=0.2,
        optimizer=Optimizer(betas=(0.0, 0.999)),
    )
    for agent, target_kl, lr in zip(population, target_kls, lrs, strict=True):
        agent.target_kl = target_kl
        agent.lr = lr
    return population, step_of(population, make_env())


def weights(population, slot):
    """Return a train state without the running statistics, which hold the step size."""
    return {
        name: value for name, value in population[slot].state().items() if name != "running_stats"
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_searched_step_equals_a_step_with_the_learning_rate_found(kind):
    # Passes that were undone leave no trace, in the member or beside it; the neighbour is as
    # without a search.
    population, reports = learnt(kind, target_kls=(None, TARGET), lrs=(1e-3, 1e-7))
    assert reports[1].metrics["step_passes"] > 2
    # Networks aim for less: there are few actions.
    target = reports[1].metrics["step_target"]
    assert target < TARGET if kind == "networks" else target == TARGET
    assert target / 1.5 <= reports[1].metrics["step_kl"] <= 1.5 * target
    plain, _ = learnt(kind, target_kls=(None, None), lrs=(1e-3, reports[1].lr))
    assert equal_states(weights(population, 0), weights(plain, 0))
    # Repeated passes have fewer rows, so rounding differs.
    for name, value in weights(population, 1).items():
        torch.testing.assert_close(value, weights(plain, 1)[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_stay_below_the_limit(kind):
    make, make_env = KINDS[kind]
    population = make(1, update_epochs=2, group_size=4, target_kl=TARGET, lr=1.0)
    env = make_env()
    measured = [step_of(population, env, step)[0].metrics.get("step_kl") for step in range(6)]
    if kind == "language":  # measuring takes passes, so that it is done now and then
        assert [kl is not None for kl in measured] == [step != 5 for step in range(6)]
    assert all(kl <= 4 * TARGET for kl in measured if kl is not None)


def own_divergence(population, batch, before, slot=0):
    """Return the exact KL per action between two train states of a language model."""
    bank = population.members.bank
    rows = torch.cat(
        [torch.tensor(batch.inputs.prompts)[batch.inputs.prompt_ids], batch.actions], 1
    )
    width = rows.shape[1] - batch.actions.shape[1]
    seen = torch.cat([torch.ones(len(rows), width, dtype=torch.bool), batch.present], 1)
    after = bank.state(slot)
    scores = []
    for state in (before, after):
        bank.load_state(slot, state)
        logits = bank.policy(slot)(rows, seen)[:, width - 1 : -1][batch.action_mask]
        scores.append(torch.distributions.Categorical(logits=logits.double()))
    return float(torch.distributions.kl_divergence(*scores).mean())


def test_reported_kl_is_the_exact_one_over_the_vocabulary():
    population = tiny_population(1, group_size=4, target_kl=TARGET)
    rollout = population.collect(tiny_env(), step=0, samples_per_step=16, starts_per_step=4)
    before = population.members.bank.state(0)
    report = population.learn(rollout.experience, step=0)[0]
    own = own_divergence(population, rollout.experience["default"], before)
    assert report.metrics["step_kl"] == pytest.approx(own, rel=1e-3)


class TestPaths:
    """Equal values of `target_kl` give equal steps, however a member came to its value."""

    def kl_of_step(self, population, kind, step):
        return step_of(population, KINDS[kind][1](), step)[0].metrics["step_kl"]

    def started(self, kind, **options):
        options = {"group_size": 4, "update_epochs": 2, "batch_size": 64} | options
        return KINDS[kind][0](1, **options)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("change", [{"target_kl": 4 * TARGET}, {"update_epochs": 6}])
    def test_a_mutated_member_takes_the_step_of_its_new_values(self, kind, change):
        population = self.started(kind, target_kl=TARGET)
        self.kl_of_step(population, kind, 0)
        for name, value in change.items():
            setattr(population[0], name, value)
        fresh = self.started(kind, **({"target_kl": TARGET} | change))
        aim = self.kl_of_step(fresh, kind, 5)
        assert self.kl_of_step(population, kind, 5) == pytest.approx(aim, rel=0.5)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_clone_takes_the_step_of_its_parent(self, kind):
        population = KINDS[kind][0](2, group_size=4, target_kl=TARGET)
        step_of(population, KINDS[kind][1]())
        before = population.members.banks["default"].running_stats[0].clone()
        population.members.inherit([0, 0])
        stats = population.members.banks["default"].running_stats
        assert torch.equal(stats[1], before)

    def test_an_own_clip_range_does_not_bound_a_step_of_one_update(self):
        narrow = self.started("language", target_kl=TARGET, clip_coef=0.02)
        kl = self.kl_of_step(narrow, "language", 0)
        assert TARGET / 1.2 <= kl <= 1.2 * TARGET


def test_a_warning_says_that_an_own_clip_range_bounds_the_step():
    # The KL that clipping allows differs between seeds, and with rounding.
    for seed in (2, 3, 1):
        env = GymnasiumGroups("CartPole-v1", seed=seed)
        spaces = env.observation_space, env.action_space
        population = GRPO.population(1, *spaces, seed=seed, target_kl=0.01, clip_coef=0.1)
        rollout = population.collect(env, step=0, samples_per_step=128, starts_per_step=16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metrics = population.learn(rollout.experience, step=0)[0].metrics
        short = metrics["step_kl"] < metrics["step_target"] / 1.5
        assert [("clip_coef" in str(each.message)) for each in caught] == [True] * short
        if short:
            return
    pytest.fail("clipping bounded no step")


def test_a_member_without_signal_takes_no_step():
    env = tiny_env(reward_fn=lambda completion, answer, question: 1.0)
    population = tiny_population(2, group_size=4, update_epochs=2)
    population[1].target_kl = TARGET
    before = [agent.state() for agent in population]
    # Momentum alone would move the weights.
    for agent, state in zip(population, before, strict=True):
        state["exp_avg"] += 0.1
        state["step"] += 5
        population.members.load_state(agent.slot, state)
    reports = step_of(population, env)
    assert reports[1].optimizer_steps == 0
    assert equal_states(before[1], population[1].state())
    assert not torch.equal(before[0]["adapter"], population[0].state()["adapter"])


# A KL far above the limit, and weights that are not finite.
@pytest.mark.parametrize("factor", [1e8, 1e30])
def test_a_step_that_is_left_out_reports_no_updates(factor):
    population = tiny_population(1, group_size=4, update_epochs=2, target_kl=TARGET)
    env = tiny_env()
    step_of(population, env)
    population.members.bank.running_stats[0, RUNNING_STATS.index("lr_factor")] = factor
    before = weights(population, 0)
    report = step_of(population, env, 4)[0]
    assert equal_states(before, weights(population, 0))
    assert (report.optimizer_steps, report.failed, report.metrics["step_kl"]) == (0, None, 0.0)
    assert not {"loss", "grad_norm", "learning_rate", "entropy"} & set(report.metrics)


def test_a_step_without_measured_kl_keeps_the_kl_factor():
    objective = Objective(kl_target=0.01, kl_horizon=16)
    population = tiny_population(1, group_size=4, target_kl=TARGET, beta=0.1, objective=objective)
    report = step_of(population, tiny_env(reward_fn=lambda completion, answer, question: 1.0))[0]
    assert "kl" not in report.metrics
    assert report.metrics["kl_coef"] == 0.1
    assert float(population.members.bank.running_stats[0, 0]) == 1.0


def test_each_policy_of_a_team_has_its_own_step_size():
    population = team_population(
        1, policies="independent", hp_config=None, lr=1e-6, group_size=4, target_kl=TARGET
    )
    step_of(population, team_env())
    factors = {
        name: float(bank.running_stats[0, -2]) for name, bank in population.members.banks.items()
    }
    assert len(factors) == 3
    assert len(set(factors.values())) > 1
    assert all(factor > 10 for factor in factors.values())


BESIDE = {
    "schedule": {
        "optimizer": Optimizer(schedule="linear", total_steps=100),
        "max_grad_norm": 1e-3,
        "objective": Objective(importance_correction="token_truncate"),
    },
    "many updates": {
        "update_epochs": 2,
        "batch_size": 4,
        "loss_type": "dapo",
        "beta": 0.1,
        "objective": Objective(kl_target=1e-3),
    },
    "completions are clipped, by bounds far below the ratios of single actions": {
        "loss_type": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
}


@pytest.mark.parametrize("case", BESIDE)
def test_search_works_beside_other_settings(case):
    population = tiny_population(
        1, **({"group_size": 4, "lr": 1e-7, "target_kl": TARGET} | BESIDE[case])
    )
    report = step_of(population, tiny_env())[0]
    assert TARGET / 1.5 <= report.metrics["step_kl"] <= 1.5 * TARGET
    assert report.metrics["step_passes"] <= 7


SPACES = gymnasium.spaces.Box(-1, 1, (3,), np.float32), gymnasium.spaces.Discrete(2)


class TestLearningRates:
    """Defaults of lr and target_kl; see docs/objective.md."""

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, DEFAULT_TARGET_KL),
            ({"lr": "auto"}, DEFAULT_TARGET_KL),
            ({"lr": 1e-3, "target_kl": 0.02}, 0.02),
            ({"lr": 1e-3}, None),
            ({"target_kl": None}, None),
            ({"hp_config": HyperparameterConfig(lr=(1e-4, 1e-2))}, None),
            ({"hp_config": HyperparameterConfig(target_kl=(0.005, 0.05))}, DEFAULT_TARGET_KL),
        ],
    )
    def test_a_learning_rate_that_is_not_given_is_calibrated(self, options, expected):
        team = {"left": SPACES[0], "right": SPACES[0]}, {"left": SPACES[1], "right": SPACES[1]}
        agents = (
            GRPO(*SPACES, **options),
            GRPO.population(2, *SPACES, **options)[0],
            GRPO(actor_network=tiny_model(), pad_token_id=0, **options),
            MultiAgentGRPO(*team, **options),
        )
        assert [agent.target_kl for agent in agents] == [expected] * 4

    @pytest.mark.parametrize(
        "arguments", [SPACES, (None, None, tiny_model(), 0)], ids=["networks", "language"]
    )
    def test_calibration_refuses_a_warm_up_whose_first_step_changes_nothing(self, arguments):
        warm_up = Optimizer(warmup_steps=3)
        space = HyperparameterConfig(target_kl=(0.005, 0.05))
        for options in ({}, {"lr": 1e-3, "target_kl": 0.02}, {"lr": 1e-3, "hp_config": space}):
            with pytest.raises(ValueError, match="warmup_steps"):
                GRPO(*arguments, optimizer=warm_up, **options)
        agent = GRPO(*arguments, optimizer=warm_up, lr=1e-3)
        with pytest.raises(ValueError, match="warmup_steps"):
            agent.target_kl = 0.01

    def test_own_algorithms_use_their_learning_rate(self):
        class Own(EvolvableAlgorithm):
            @classmethod
            def learn_together(cls, members, learners, experience):
                raise NotImplementedError

        assert Own(*SPACES).target_kl is None
        population = Own.population(2, *SPACES, hp_config="auto", samples_per_step=16)
        assert "lr" in population.space
        assert "target_kl" not in population.space


def test_the_search_of_a_language_model_computes_its_first_gradient_once(monkeypatch):
    population = tiny_population(2, target_kl=0.01, lr=1e-4, batch_size=32, group_size=4)
    bank = population.members.bank
    counts = []
    gradients = bank.gradients

    def counted(batch, *arguments, **options):
        counts.append(len(batch))
        return gradients(batch, *arguments, **options)

    monkeypatch.setattr(bank, "gradients", counted)
    env = tiny_env(data_batch_size=8)
    sampled = population.collect(env, step=0, samples_per_step=32, starts_per_step=8)
    reports = population.learn(sampled.experience, step=0)
    assert min(report.metrics["step_passes"] for report in reports.values()) > 1
    assert len(counts) == 1
