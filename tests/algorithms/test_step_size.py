"""Control of the step size by `target_kl`: the learning rate is searched, and the KL of a learning step is bounded."""

import math

import gymnasium
import numpy as np
import pytest
import torch

from evogrpo import GRPO, EvolvableAlgorithm, HyperparameterConfig, MultiAgentGRPO, Objective
from evogrpo.algorithms.learning.step_size import StepControl, measured_step, step_target
from evogrpo.config.hyperparameters import DEFAULT_TARGET_KL
from evogrpo.config.optimizer import Optimizer
from tests.tiny_models import tiny_model
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_teams import team_env, team_population
from tests.tiny_training import equal_states, tiny_env, tiny_population

TARGET = 0.005


@pytest.mark.parametrize("scale", [1e-10, 0.005, 1e6])
def test_search_finds_the_learning_rate_of_a_quadratic_kl(scale):
    """KL grows with the square of the learning rate for small steps."""
    control = StepControl(1.0, 0.0, target=TARGET, target_kl=TARGET)
    while control.update(scale * control.factor**2, 0.0):
        pass
    assert control.passes <= 7
    assert TARGET / 1.5 <= scale * control.factor**2 <= 1.5 * TARGET
    assert control.result() == (control.factor, control.factor)
    control = StepControl(1.0, 0.0, target=TARGET, target_kl=TARGET)
    while control.update(TARGET, 0.5 if control.factor > 0.01 else 0.0):
        pass
    assert control.factor <= 0.01  # learning rates that clip are avoided
    assert not control.undone


@pytest.mark.parametrize("bound", [0.05, 0.1, 0.4, 0.9])
def test_search_ends_early_where_the_clip_fraction_is_the_limit(bound):
    control = StepControl(1.0, 0.0, target=TARGET, target_kl=TARGET)
    while control.update(TARGET * control.factor**2, 0.5 if control.factor > bound else 0.0):
        pass
    assert control.passes <= 6
    assert bound / 1.5 <= control.factor <= bound
    assert not control.undone


def test_weak_signals_leave_room_and_steps_far_beyond_the_limit_are_left_out():
    control = StepControl(1.0, 0.0, target=TARGET / 4, target_kl=TARGET)
    assert not control.update(TARGET / 4, 0.0)
    assert control.result() == (1.0, 2.0)  # KL of the ceiling: 4 times as much, the whole target
    control = StepControl(1.0, 1.0, target=TARGET, target_kl=TARGET)
    assert [control.update(math.nan, 0.0) for _ in range(4)] == [True, True, True, False]
    assert control.undone
    assert control.result()[0] == pytest.approx(1e-4)


def test_a_search_that_finds_nothing_starts_again_with_the_next_batch():
    control = StepControl(3.0, 0.0, target=TARGET, target_kl=TARGET)
    while control.update(1e3, 0.0):
        pass
    assert control.undone
    assert control.result() == (3.0, 0.0)


@pytest.mark.parametrize(
    ("kl", "start", "factor"),
    [(0.015, 1.0, math.sqrt(2 / 3)), (0.0075, 1.0, 1.0), (0.004, 1.0, 1.2), (0.0, 1.25, 1.3)],
)
def test_later_steps_move_the_factor_up_to_the_ceiling_without_a_repetition(kl, start, factor):
    control = StepControl(start, 1.3, target=TARGET, target_kl=TARGET)
    assert not control.update(kl, 0.5)
    assert control.result()[0] == pytest.approx(factor)
    assert control.result()[1] == 1.3


def test_target_follows_the_effective_number_of_actions():
    advantages = torch.zeros(1000)
    advantages[:100] = torch.tensor([1.0, -1.0]).repeat(50)
    assert step_target(TARGET, advantages, transitions=True) == pytest.approx(TARGET * 100 / 1000)
    assert step_target(TARGET, torch.ones(1000), transitions=True) == TARGET
    assert step_target(TARGET, advantages, transitions=False) == TARGET


def test_measured_kl_is_the_exact_one_in_expectation():
    # All actions of a distribution, each as often as its probability says: the mean of the
    # estimates is the KL.
    before = torch.tensor([0.5, 0.3, 0.2]).log()
    after = torch.tensor([0.4, 0.4, 0.2]).log()
    counts = torch.tensor([5, 3, 2])
    rows = [values.repeat_interleave(counts)[None] for values in (before, after)]
    mask = torch.ones(1, 10, dtype=torch.bool)
    kl, outside = measured_step(*rows, mask, 0.1, 0.4)
    assert kl == pytest.approx(float((before.exp() * (before - after)).sum()), rel=1e-5)
    assert outside == pytest.approx(0.5)  # 0.4 / 0.5 is below 0.9, 0.4 / 0.3 is below 1.4


KINDS = {"networks": (step_population, cart_pole), "language": (tiny_population, tiny_env)}


def step_of(population, env, step=0, **options):
    rollout = population.collect(env, step=step, samples_per_step=16, block=4)
    return population.learn(rollout.experience, step=step, **options)


def learnt(kind, *, target_kls, lrs):
    """Return a population after a learning step, and the reports.

    Without momentum, there is no warm-up.
    """
    make, make_env = KINDS[kind]
    population = make(
        len(lrs), update_epochs=2, group_size=4, optimizer=Optimizer(betas=(0.0, 0.999))
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
    # networks aim for less, as there are few actions
    assert 0 < reports[1].metrics["step_kl"] <= 1.5 * TARGET
    plain, _ = learnt(kind, target_kls=(None, None), lrs=(1e-3, reports[1].lr))
    assert equal_states(weights(population, 0), weights(plain, 0))
    # repeated passes have fewer rows, so that rounding differs
    for name, value in weights(population, 1).items():
        torch.testing.assert_close(value, weights(plain, 1)[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_later_steps_stay_below_the_limit(kind):
    make, make_env = KINDS[kind]
    population = make(1, update_epochs=2, group_size=4, target_kl=TARGET, lr=1.0)
    env = make_env()
    measured = [step_of(population, env, step)[0].metrics.get("step_kl") for step in range(5)]
    if kind == "language":  # measuring takes a pass, so that it is done now and then
        assert [kl is not None for kl in measured] == [step in (0, 4) for step in range(5)]
    assert all(kl <= 4 * TARGET for kl in measured if kl is not None)


def test_a_member_without_signal_takes_no_step():
    env = tiny_env(reward_fn=lambda completion, answer, question: 1.0)
    population = tiny_population(2, group_size=4, update_epochs=2)
    population[1].target_kl = TARGET
    before = [agent.state() for agent in population]
    # momentum alone would move the weights
    for agent, state in zip(population, before, strict=True):
        state["exp_avg"] += 0.1
        state["step"] += 5
        population.members.load_state(agent.slot, state)
    reports = step_of(population, env)
    assert reports[1].optimizer_steps == 0
    assert equal_states(before[1], population[1].state())
    assert not torch.equal(before[0]["adapter"], population[0].state()["adapter"])


@pytest.mark.parametrize(
    "lr", [1e8, 1e30]
)  # a KL far above the limit, and weights that are not finite
def test_a_step_that_is_left_out_reports_no_updates(lr):
    population = tiny_population(1, group_size=4, update_epochs=2, target_kl=TARGET)
    env = tiny_env()
    step_of(population, env)
    population[0].lr, before = lr, weights(population, 0)
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
