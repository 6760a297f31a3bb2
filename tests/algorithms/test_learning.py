"""Minibatches, passes and metrics of a learning step, members together and alone.

Formulas: test_objectives.py.
"""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from docs.generate.metrics import NAMES
from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.algorithms.learning.metrics import PER_POLICY
from evogrpo.functional.loss_types import ADVANTAGES, LOSS_TYPES
from evogrpo.members.requests import Learner
from tests.oracles.objective_by_hand import ByHand, divergence, rows_of
from tests.policy_banks import assert_gradients_agree, assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_training import (
    DAMPED,
    HOLES,
    REWARDS,
    equal_states,
    flat,
    learn_from,
    own_rows,
    peft_twin,
    random_agent,
    randomise_adapter,
    sampled,
    tiny_agent,
    tiny_env,
    tiny_population,
)


def test_truncated_completions_can_be_masked():
    """They count in the group's statistics and, for "grpo", in the number of completions."""
    objective = Objective(mask_truncated=True)
    population = tiny_population(
        1, objective=objective, optimizer=DAMPED, temperature=2.0, update_epochs=2
    )
    randomise_adapter(population[0])
    collected = population.collect(tiny_env(), step=0, samples_per_step=16, starts_per_step=4)
    batch = collected.experience["default"]
    assert 0 < int(collected.truncated.sum()) < 16
    assert not batch.action_mask[collected.truncated].any()
    assert torch.equal(batch.action_mask[~collected.truncated], batch.present[~collected.truncated])
    batch = replace(batch, rewards=torch.rand(16, generator=torch.Generator().manual_seed(0)))
    hand = ByHand(peft_twin(population[0]), batch, population[0].hyperparameters, objective)
    hand.learn(minibatches(population[0].learner(0), batch, 0))
    population.learn({"default": batch}, step=0)
    assert float((population[0].state()["adapter"] - flat(hand.member.parameters)).norm()) < 1e-4


@pytest.mark.parametrize(("epochs", "size"), [(1, 100), (2, 5)])
def test_old_log_probs_are_computed_where_they_are_missing(epochs, size):
    """For one optimizer step none are needed; for several, those of rows after the first."""
    agent = random_agent(update_epochs=epochs, batch_size=size, optimizer=DAMPED)
    batch = sampled(agent, REWARDS + 0.01 * torch.arange(12.0).view(3, 4))
    clone = agent.clone()
    wrong = agent.clone()
    plan = minibatches(agent.learner(), batch, 0)
    given = learn_from(agent, batch)
    missing = learn_from(clone, replace(batch, sampler_log_probs=None))
    assert_states_agree(clone.state(), agent.state(), lr=agent.lr)
    assert missing.loss == pytest.approx(given.loss, rel=1e-3, abs=1e-5)
    later = [row for row in range(12) if row not in plan[0]]
    passes = [*plan, *([torch.tensor(later)] if later else [])]
    bank = agent.members.banks["default"]
    assert missing.tokens == sum(bank.cost(batch.select(rows))[0] for rows in passes)
    learn_from(wrong, replace(batch, sampler_log_probs=batch.sampler_log_probs - 5.0))
    # The first policy is the sampling one.
    assert equal_states(wrong.state(), agent.state()) == (len(plan) == 1)


def test_rows_without_gradient_are_not_evaluated():
    agent = tiny_agent(update_epochs=2)
    batch = sampled(agent, torch.ones(3, 4))
    report = learn_from(agent, batch)
    assert (report.tokens, report.loss, report.grad_norm, report.optimizer_steps) == (
        0,
        0.0,
        0.0,
        2,
    )
    assert int(agent.state()["step"]) == 2
    # A tiny entropy bonus makes every row run, with the same update otherwise.
    agent = random_agent()
    running = random_agent(entropy_coef=1e-30)
    batch = sampled(agent, REWARDS)
    reports = [learn_from(each, batch) for each in (agent, running)]
    assert reports[0].tokens < reports[1].tokens
    assert_gradients_agree(agent.state()["exp_avg"], running.state()["exp_avg"])
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-3, abs=1e-5)


ALL = list(range(12))
TEACHING = [0, 1, 2, 3, 8, 9, 10, 11]
CORRECTION = {"importance_correction": "token_mask"}
COSTS = {
    "KL to the old policy": ({"beta": 0.1}, {"reference": "old"}, [ALL]),
    "beta 0, several epochs": ({"update_epochs": 2}, {}, [TEACHING, TEACHING]),
    "KL in the loss, several epochs": ({"beta": 0.1, "update_epochs": 3}, {}, [ALL] * 4),
    "KL in rewards": ({"beta": 0.1}, {"kl_placement": "reward"}, [ALL, ALL]),
    "entropy bonus": ({"entropy_coef": 0.1}, {}, [ALL]),
    "uncertain actions": ({}, {"top_entropy_quantile": 0.5}, [ALL, TEACHING]),
    "correction, several epochs": ({"update_epochs": 2}, CORRECTION, [TEACHING] * 2),
    "correction and KL in rewards": (
        {"beta": 0.1},
        CORRECTION | {"kl_placement": "reward"},
        [ALL, ALL, ALL],
    ),
}


@pytest.mark.parametrize("case", COSTS)
def test_passes_are_made_and_counted_only_where_needed(case):
    """The second of three groups has equal rewards and no signal."""
    choices, objective, passes = COSTS[case]
    agent = random_agent(**choices, objective=Objective(**objective))
    batch = sampled(agent, REWARDS)
    start = agent.state()["adapter"]
    report = learn_from(agent, batch)
    bank = agent.members.banks["default"]
    assert report.tokens == sum(bank.cost(batch.select(torch.tensor(rows)))[0] for rows in passes)
    assert not torch.equal(agent.state()["adapter"], start)


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (3, 5)])
def test_minibatches_cover_all_rows_and_keep_groups_together(epochs, size):
    agent = tiny_agent(update_epochs=epochs, batch_size=size)
    batch = sampled(agent, torch.zeros(3, 4))
    batch = replace(
        batch, member_ids=torch.tensor([0, 1] * 6), group_ids=torch.tensor([5, 9, 2, 9] * 3)
    )
    learner = agent.learner()
    plan = minibatches(learner, batch, seed=0)
    per_pass = math.ceil(6 / size)
    assert len(plan) == epochs * per_pass
    for number in range(epochs):
        rows = torch.cat(plan[number * per_pass : (number + 1) * per_pass])
        assert sorted(rows.tolist()) == [0, 2, 4, 6, 8, 10]
        assert batch.group_ids[rows].tolist() in ([5] * 3 + [2] * 3, [2] * 3 + [5] * 3)
    assert [p.tolist() for p in plan] == [p.tolist() for p in minibatches(learner, batch, seed=0)]


def test_minibatches_are_shuffled_by_step_member_and_seed():
    agent = tiny_agent(batch_size=1)
    batch = replace(sampled(agent, torch.zeros(3, 4)), group_ids=torch.arange(12))

    def order(seed=0, **changes):
        learner = Learner(
            **(
                {"slot": 0, "index": 0, "step": 0, "hyperparameters": agent.hyperparameters}
                | changes
            )
        )
        return tuple(int(row) for row in minibatches(learner, batch, seed))

    assert len({order(), order(step=1), order(index=1), order(seed=1), tuple(range(12))}) == 5


def test_a_batch_holds_rows_of_learning_members_only():
    population = tiny_population(3)
    batch = population.collect(
        tiny_env(), step=0, samples_per_step=8, starts_per_step=8
    ).experience["default"]
    with pytest.raises(ValueError, match=r"slots \[0, 2\]"):
        population.learn({"default": batch.select_members([0, 2])}, step=0)
    with pytest.raises(ValueError, match=r"slots \[0, 1, 2\]"):
        learn(population.members, [population[0].learner(0)], {"default": batch})


MIXED = [
    {"beta": 0.1, "clip_coef": 0.3, "max_grad_norm": 0.01},
    {
        "loss_type": "dapo",
        "advantage": "rloo",
        "group_size": 2,
        "update_epochs": 3,
        "batch_size": 5,
    },
    {
        "loss_type": "cispo",
        "beta": 0.4,
        "entropy_coef": 0.2,
        "clip_low": 0.1,
        "group_size": 8,
        "batch_size": 7,
    },
    {
        "loss_type": "sapo",
        "advantage": "batch_std",
        "temperature": 0.7,
        "advantage_clip": 0.5,
        "gamma": 0.9,
    },
]
CENTRED = [
    {"advantage": "mean_only", "beta": 0.1},
    {"advantage": "rloo", "batch_size": 5},
    {"advantage": "mean_only", "beta": 0.2},
]
HELD = [{"beta": 0.1}, {"beta": 0.5, "update_epochs": 1}, {"beta": 0.0, "loss_type": "dapo"}]

RUNS: dict[str, tuple[dict, list[dict]]] = {
    "loss types": (
        {},
        [{"loss_type": name, "clip_high": 0.05 * (i + 1)} for i, name in enumerate(LOSS_TYPES)],
    ),
    "advantages": (
        {},
        [{"advantage": name, "gamma": 1 - 0.05 * i} for i, name in enumerate(ADVANTAGES)],
    ),
    "coefficients": ({}, MIXED),
    "uncertain actions": ({"whiten_advantages": True, "top_entropy_quantile": 0.4}, MIXED),
    "correction by action": (
        {
            "kl_bias_correction": True,
            "importance_correction": "token_truncate",
            "importance_cap": 1.05,
        },
        [*MIXED, {"loss_type": "gspo", "beta": 0.2}],
    ),
    "correction by completion": (
        {"dual_clip": 1.1, "importance_correction": "sequence_mask", "importance_cap": 1.1},
        [{}, {"loss_type": "dapo", "clip_coef": 0.1}, {"loss_type": "gspo"}],
    ),
    "running statistics": (
        {
            "advantage": "rloo",
            "reward_norm": "running",
            "reward_scale": True,
            "kl_target": 0.5,
            "kl_horizon": 40,
        }
        | {"kl_placement": "reward"},
        CENTRED,
    ),
    "batch statistics": ({"advantage": "rloo", "reward_norm": "batch"}, CENTRED),
    "old policies as references": ({"reference": "old"}, HELD),
    "own references": (
        {
            "reference": "snapshot",
            "reference_sync_steps": 2,
            "reference_mixing": 0.3,
            "kl_target": 0.02,
        }
        | {"kl_horizon": 40},
        HELD,
    ),
}


def population_of(run):
    objective, members = RUNS[run]
    population = tiny_population(
        len(members), optimizer=DAMPED, objective=Objective(**objective), **members[0]
    )
    for seed, (agent, options) in enumerate(zip(population, members, strict=True)):
        randomise_adapter(agent, seed)
        for name, value in ({"update_epochs": 2, "lr": 2e-3, "batch_size": 8} | options).items():
            setattr(agent, name, value)
    return population


def experience(population, step, noise=0.2):
    """Act with all members and add random step rewards and sampler log-probabilities."""
    batch = population.collect(
        tiny_env(), step=step, samples_per_step=8, starts_per_step=4
    ).experience["default"]
    draws = torch.Generator().manual_seed(step)
    log_probs = batch.sampler_log_probs
    if population.members.settings.objective.importance_correction:
        # An external engine reports other log-probabilities than the trainer.
        log_probs = log_probs + noise * torch.randn(log_probs.shape, generator=draws)
    return replace(
        batch,
        rewards=torch.rand(len(batch), generator=draws),
        step_rewards=torch.rand(batch.action_mask.shape, generator=draws),
        reward_components=torch.rand(len(batch), 2, generator=draws),
        component_weights=torch.tensor([1.0, 2.0]).repeat(len(batch), 1),
        component_names=("one", "other"),
        sampler_log_probs=log_probs,
    )


@pytest.mark.parametrize("run", RUNS)
def test_members_learn_together_as_alone(run):
    population = population_of(run)
    clones = [agent.clone() for agent in population]
    starts = [agent.state()["adapter"] for agent in population]
    carries = "kl_target" in RUNS[run][0]
    for step in range(2 if carries else 1):
        batch = experience(population, step)
        together = population.learn({"default": batch}, step=step)
        for slot, clone in enumerate(clones):
            alone = learn_from(clone, own_rows(batch, slot), step)
            assert together[slot].failed is alone.failed is None
            assert_metrics_agree(together[slot].metrics, alone.metrics)
            assert together[slot].advantages == pytest.approx(alone.advantages, rel=1e-3, abs=1e-5)
            assert (together[slot].tokens, together[slot].optimizer_steps) == (
                alone.tokens,
                alone.optimizer_steps,
            )
            assert_states_agree(population[slot].state(), clone.state(), lr=clone.lr)
    for slot, start in enumerate(starts):
        assert float((population[slot].state()["adapter"] - start).norm()) > 1e-3


@pytest.mark.parametrize("run", ["running statistics", "uncertain actions"])
def test_a_neighbours_rewards_losses_and_coefficients_have_no_effect(run):
    """Bit for bit: the neighbour's values change, the shapes do not."""
    one = population_of(run)
    other = population_of(run)
    batch = experience(one, 0)
    last = len(one) - 1
    changes = {"clip_coef": 0.9, "max_grad_norm": 3.0, "lr": 0.03, "advantage_clip": 0.3}
    for name, value in changes.items():
        setattr(other[last], name, value)
    rewards = torch.where(batch.member_ids == last, -batch.rewards, batch.rewards)
    one.learn({"default": batch}, step=0)
    other.learn({"default": replace(batch, rewards=rewards)}, step=0)
    for slot in range(last):
        assert equal_states(one[slot].state(), other[slot].state())
    assert not equal_states(one[last].state(), other[last].state())


def known(name):
    """Return True if a metric is documented."""
    if name.startswith("rewards/"):
        return f"rewards/<function>/{name.rpartition('/')[2]}" in NAMES
    policy, _, rest = name.rpartition("/")
    return name in NAMES or (policy in ("red", "blue") and rest in PER_POLICY)


def test_every_metric_of_a_step():
    agent = random_agent(
        beta=0.1, objective=Objective(kl_target=0.1, importance_correction="token_mask")
    )
    batch = sampled(agent, HOLES)
    lengths = torch.tensor([6, 3, 1, 4, 5, 2, 2, 6, 6, 1, 3, 6])
    present = batch.present & (torch.arange(batch.present.shape[1]) < lengths[:, None])
    lengths = present.sum(1).tolist()
    parts = torch.rand(12, 2, generator=torch.Generator().manual_seed(0))
    parts[:4, 1] = math.nan
    truncated = torch.tensor([True, False, False] * 4)
    left_out = present & (torch.arange(12) != 5)[:, None]
    batch = replace(
        batch,
        present=present,
        chosen=present,
        action_mask=left_out,
        truncated=truncated,
        reward_components=parts,
        component_weights=torch.tensor([1.0, 2.0]).repeat(len(batch), 1),
        component_names=("one", "other"),
    )
    report = learn_from(agent, batch)
    metrics = report.metrics
    fresh = random_agent(beta=0.1)
    member = peft_twin(fresh)
    rows = [row for number, row in enumerate(rows_of(batch)) if number != 5]
    with torch.no_grad():
        entropies = torch.cat([member.entropies(r.prompt, r.tokens, temperature=1.0) for r in rows])
        now = torch.cat([member.log_probs(r.prompt, r.tokens, temperature=1.0) for r in rows])
        with member.model.disable_adapter():
            base = torch.cat([member.log_probs(r.prompt, r.tokens, temperature=1.0) for r in rows])
    applying = HOLES.flatten()[~HOLES.flatten().isnan()]
    ended = [length for length, cut in zip(lengths, truncated.tolist(), strict=True) if not cut]
    spreads = [statistics.stdev(row[~row.isnan()].tolist()) for row in HOLES]
    expected = {
        "reward": float(applying.mean()),
        "reward_std": statistics.fmean(spreads),
        "frac_reward_zero_std": 1 / 3,
        "rewards/one/mean": float(parts[:, 0].mean()),
        "rewards/one/std": float(parts[:, 0].std()),
        "rewards/other/mean": float(parts[4:, 1].mean()),
        "rewards/other/std": float(parts[4:, 1].std()),
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 / 3,
        "completions/mean_terminated_length": statistics.fmean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/region_mean": 0.0,
        "kl": float(divergence("k3", now, base).mean()),
        "kl_coef": 0.1,
        "entropy": float(entropies.mean()),
        "sampling/sampling_logp_difference/mean": 0.0,
        "sampling/sampling_logp_difference/max": 0.0,
        "sampling/importance_sampling_ratio/min": 1.0,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_ratio/max": 1.0,
        "learning_rate": agent.lr,
        "loss": metrics["loss"],  # compared with formulas elsewhere, like the next one
        "grad_norm": metrics["grad_norm"],
    }
    assert_metrics_agree(metrics, expected)
    assert all(known(name) for name in metrics)
    names = ("loss", "kl", "grad_norm", "entropy", "reward", "reward_std", "frac_reward_zero_std")
    assert [getattr(report, name) for name in names] == [metrics[name] for name in names]
    assert (report.lr, report.mean_length) == (agent.lr, metrics["completions/mean_length"])
    assert tuple(report) == (report.loss, report.kl)


def test_missing_metrics_read_as_nan():
    agent = tiny_agent()
    batch = replace(sampled(agent, torch.full((3, 4), math.nan)), sampler_log_probs=None)
    report = learn_from(agent, batch)
    missing = {"reward", "kl", "kl_coef", "entropy", "completions/clipped_ratio"}
    assert not missing & report.metrics.keys()
    assert not any(name.startswith(("rewards/", "sampling/")) for name in report.metrics)
    assert all(math.isnan(value) for value in (report.reward, report.kl, report.entropy))


def test_clip_ratios_count_all_actions_of_the_step():
    agent = random_agent(clip_coef=0.02, lr=0.01, update_epochs=2)
    batch = sampled(agent, HOLES)
    before = peft_twin(agent)
    moved = agent.clone()
    moved.update_epochs = 1
    learn_from(moved, batch)
    after = peft_twin(moved)
    low = 0
    high = 0
    actions = 0
    report = learn_from(agent, batch)
    for row, advantage in zip(rows_of(batch), report.advantages, strict=True):
        with torch.no_grad():
            scores = [
                member.log_probs(row.prompt, row.tokens, temperature=1.0)
                for member in (after, before)
            ]
        ratio = (scores[0] - scores[1]).exp()
        low += int((ratio < 0.98).sum()) if advantage < 0 else 0
        high += int((ratio > 1.02).sum()) if advantage > 0 else 0
        actions += len(row.tokens)
    assert min(low, high) > 0
    # In the first of the two steps nothing is clipped.
    found = [
        report.metrics[f"clip_ratio/{name}_mean"] * 2 * actions
        for name in ("low", "high", "region")
    ]
    assert found == pytest.approx([low, high, low + high])
    assert report.clip_ratio == report.metrics["clip_ratio/region_mean"]
