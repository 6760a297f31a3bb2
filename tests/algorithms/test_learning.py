"""A learning step against GRPO with PEFT and PyTorch, and members together against alone."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.config.hyperparameters import Hyperparameters, Optimizer
from evogrpo.data import Batch
from evogrpo.testing.policy_banks import assert_states_agree
from tests.oracles.peft_members import PeftMember
from tests.oracles.slow_advantages import outcome
from tests.rounding import assert_metrics_agree
from tests.tiny_batches import lora
from tests.tiny_training import (
    equal_states,
    flat,
    graded,
    peft_twin,
    randomise_adapter,
    sampled,
    shared_model,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
)

NAN = math.nan
DAMPED = Optimizer(eps=1e-5)  # Adam divides rounding errors of vanishing gradients by eps


def by_hand(
    member: PeftMember, batch: Batch, plan: list[Tensor], h: Hyperparameters, objective: Objective
) -> list[float]:
    """Train a PEFT model by the papers' formulas, one completion at a time; return the loss of every optimizer step."""
    optimizer = torch.optim.AdamW(member.parameters.values(), lr=h.lr, eps=DAMPED.eps, weight_decay=0.0)
    rows = range(len(batch))
    prompts = [batch.inputs.prompts[number] for number in batch.inputs.prompt_ids.tolist()]
    tokens = [batch.actions[row][batch.present[row]].tolist() for row in rows]
    counts = [batch.action_mask[row][batch.present[row]] for row in rows]
    values = outcome(batch.rewards.tolist(), batch.group_ids.tolist(), objective.advantage_eps)

    def log_probs(row: int) -> Tensor:
        return member.log_probs(prompts[row], tokens[row], temperature=h.temperature)

    with torch.no_grad():
        old = [log_probs(row) for row in rows]
        with member.model.disable_adapter():
            reference = [log_probs(row) for row in rows]
    losses = []
    for chosen in plan:
        optimizer.zero_grad()
        actions = sum(int(counts[row].sum()) for row in chosen.tolist())
        total = 0.0
        for row in chosen.tolist():
            if not counts[row].any():
                continue
            now = log_probs(row)
            ratio = torch.exp(now - old[row])
            bounded = ratio.clamp(1 - h.clip_coef, 1 + h.clip_coef)
            divergence = torch.exp(reference[row] - now) - (reference[row] - now) - 1
            each = -torch.minimum(ratio * values[row], bounded * values[row]) + h.beta * divergence
            whole = (each * counts[row]).sum()
            amount = actions if objective.loss_type == "dapo" else int(counts[row].sum()) * len(chosen)
            loss = whole / amount
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(member.parameters.values(), h.max_grad_norm)
        optimizer.step()
        losses.append(total)
    return losses


CASES = {
    "plain": ({}, {}),
    "dapo": ({}, {"loss_type": "dapo"}),
    "beta": ({"beta": 0.2}, {}),
    "beta and dapo": ({"beta": 0.2}, {"loss_type": "dapo"}),
    "small batches": ({"batch_size": 5, "beta": 0.05}, {}),
    "small batches and dapo": ({"batch_size": 5}, {"loss_type": "dapo"}),
    "hot": ({"temperature": 1.7, "max_grad_norm": 0.02}, {"advantage_eps": 0.5}),
}
REWARDS = {
    "distinct": [[0.1, 0.4, 0.2, 0.9], [0.3, 0.0, 0.5, 0.6], [1.0, 0.2, 0.7, 0.3]],
    "a group that teaches nothing": [[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, 0.2, 0.7, 0.3]],
    "rewards that do not apply": [[NAN, 0.4, 0.2, 0.9], [NAN, NAN, 0.5, NAN], [NAN, NAN, NAN, NAN]],
}


@pytest.mark.parametrize(
    ("case", "rewards"),
    [(case, next(iter(REWARDS))) for case in CASES] + [(next(iter(CASES)), rewards) for rewards in list(REWARDS)[1:]],
)
def test_learning_equals_the_papers_formulas(case, rewards):
    choices, objective = CASES[case][0], Objective(**CASES[case][1])
    agent = tiny_agent(
        **({"update_epochs": 2, "lr": 5e-3, "clip_coef": 0.1} | choices), objective=objective, optimizer=DAMPED
    )
    randomise_adapter(agent)
    batch = sampled(agent, torch.tensor(REWARDS[rewards]))
    learner = agent.learner()
    plan = minibatches(learner, batch, seed=0)
    member = peft_twin(agent)
    losses = by_hand(member, batch, plan, agent.hyperparameters, objective)
    report = learn(agent.members, [learner], {"default": batch})[0]
    assert report.optimizer_steps == len(plan) == 2 * math.ceil(12 / agent.batch_size)
    assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-5)
    learnt, expected = state_of(agent)["adapter"], flat(member.parameters)
    start = tiny_agent()
    randomise_adapter(start)
    moved = (expected - state_of(start)["adapter"]).norm()
    assert moved > 0.01
    assert float((learnt - expected).norm()) < 2e-3 * float(moved)


def test_truncated_completions_can_be_masked():
    """They count in the group's statistics and, for "grpo", in the number of completions."""
    objective = Objective(mask_truncated=True)
    population = tiny_population(1, objective=objective, optimizer=DAMPED, temperature=2.0, update_epochs=2)
    randomise_adapter(population[0])
    collected = population.collect(tiny_env(), step=0, samples_per_step=16, block=4)
    batch = collected.experience["default"]
    assert 0 < int(collected.truncated.sum()) < 16
    assert not batch.action_mask[collected.truncated].any()
    assert torch.equal(batch.action_mask[~collected.truncated], batch.present[~collected.truncated])
    batch = replace(batch, rewards=torch.rand(16, generator=torch.Generator().manual_seed(0)))
    learner = population[0].learner(0)
    member = peft_twin(population[0])
    by_hand(member, batch, minibatches(learner, batch, 0), population[0].hyperparameters, objective)
    population.learn({"default": batch}, step=0)
    difference = (state_of(population[0])["adapter"] - flat(member.parameters)).norm()
    assert float(difference) < 1e-4


def test_missing_old_log_probs_are_computed_for_several_steps():
    agent = tiny_agent(update_epochs=2, batch_size=5, lr=5e-3, optimizer=DAMPED)
    randomise_adapter(agent)
    batch = sampled(agent, graded([torch.zeros(4)] * 3))
    twin = agent.clone()
    with_log_probs = learn(agent.members, [agent.learner()], {"default": batch})[0]
    without_log_probs = learn(twin.members, [agent.learner()], {"default": replace(batch, sampler_log_probs=None)})[0]
    assert_states_agree(state_of(twin), state_of(agent), lr=agent.lr)
    assert without_log_probs.loss == pytest.approx(with_log_probs.loss, rel=1e-3, abs=1e-5)
    assert without_log_probs.tokens > with_log_probs.tokens  # the pass is counted


def test_a_single_step_needs_no_old_log_probs():
    agent = tiny_agent()
    randomise_adapter(agent)
    batch = sampled(agent, graded([torch.zeros(4)] * 3))
    twin = agent.clone()
    with_log_probs = learn(agent.members, [agent.learner()], {"default": batch})[0]
    missing = learn(twin.members, [agent.learner()], {"default": replace(batch, sampler_log_probs=None)})[0]
    assert equal_states(state_of(twin), state_of(agent))
    without = {name: value for name, value in with_log_probs.metrics.items() if not name.startswith("sampling/")}
    assert missing == replace(with_log_probs, metrics=without)
    wrong = agent.clone()
    learn(agent.members, [agent.learner()], {"default": batch})
    learn(
        wrong.members, [agent.learner()], {"default": replace(batch, sampler_log_probs=batch.sampler_log_probs - 5.0)}
    )
    assert equal_states(state_of(wrong), state_of(agent))  # the first step's policy is the sampling policy


def test_rows_without_gradient_are_not_evaluated():
    agent = tiny_agent(update_epochs=2)
    batch = sampled(agent, torch.ones(3, 4))
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    assert (report.tokens, report.loss, report.grad_norm, report.optimizer_steps) == (0, 0.0, 0.0, 2)
    assert report.frac_reward_zero_std == 1.0
    assert int(state_of(agent)["step"]) == 2
    agent.beta = 0.1  # now every row has a gradient
    randomise_adapter(agent)
    assert learn(agent.members, [agent.learner()], {"default": batch})[0].tokens > 0
    assert state_of(agent)["exp_avg"].norm() > 0


def test_report_of_a_learning_step():
    agent = tiny_agent()
    batch = sampled(agent, torch.tensor(REWARDS["rewards that do not apply"]))
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    assert report.reward == pytest.approx((0.4 + 0.2 + 0.9 + 0.5) / 4)
    assert report.reward_std == pytest.approx(torch.tensor([0.4, 0.2, 0.9]).std())
    assert report.frac_reward_zero_std == pytest.approx(2 / 3)
    assert report.mean_length == pytest.approx(float(batch.action_mask.sum()) / 12)
    assert report.failed is None
    nothing = learn(agent.members, [agent.learner()], {"default": replace(batch, rewards=torch.full((12,), NAN))})[0]
    assert math.isnan(nothing.reward)
    assert (nothing.reward_std, nothing.grad_norm) == (0.0, 0.0)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("size", [1, 5, 8, 12, 100])
def test_minibatches_cover_all_rows_and_keep_groups_together(epochs, size):
    agent = tiny_agent(update_epochs=epochs, batch_size=size)
    batch = sampled(agent, torch.zeros(3, 4))
    batch = replace(batch, member_ids=torch.tensor([0, 1] * 6), group_ids=torch.tensor([5, 9, 2, 9] * 3))
    learner = agent.learner()
    plan = minibatches(learner, batch, seed=0)
    per_pass = math.ceil(6 / size)
    assert len(plan) == epochs * per_pass
    for number in range(epochs):
        rows = torch.cat(plan[number * per_pass : (number + 1) * per_pass])
        assert sorted(rows.tolist()) == [0, 2, 4, 6, 8, 10]
        groups = batch.group_ids[rows].tolist()
        assert groups in ([5] * 3 + [2] * 3, [2] * 3 + [5] * 3)
    assert [p.tolist() for p in plan] == [p.tolist() for p in minibatches(learner, batch, seed=0)]


def test_minibatches_are_shuffled_by_step_member_and_seed():
    agent = tiny_agent(batch_size=1)
    batch = sampled(agent, torch.zeros(3, 4))
    batch = replace(batch, group_ids=torch.arange(12))

    def order(seed=0, **changes):
        learner = Learner(**({"slot": 0, "index": 0, "step": 0, "hyperparameters": agent.hyperparameters} | changes))
        return tuple(int(row) for row in minibatches(learner, batch, seed))

    assert len({order(), order(step=1), order(index=1), order(seed=1), tuple(range(12))}) == 5


def different_population():
    """Return three members that differ in all evolving hyperparameters.

    Learning rates are small enough that rounding does not grow from one optimizer step to the next.
    """
    population = tiny_population(3, optimizer=DAMPED)
    changes = [
        {"lr": 2e-3, "group_size": 2, "update_epochs": 1, "batch_size": 64, "beta": 0.1, "clip_coef": 0.3},
        {"lr": 3e-3, "group_size": 4, "update_epochs": 3, "batch_size": 5, "temperature": 0.7, "clip_coef": 0.05},
        {"lr": 5e-4, "group_size": 8, "update_epochs": 2, "batch_size": 8, "max_grad_norm": 0.01, "temperature": 1.4},
    ]
    for seed, (agent, own) in enumerate(zip(population, changes, strict=True)):
        randomise_adapter(agent, seed)
        for name, value in own.items():
            setattr(agent, name, value)
    return population


def test_members_learn_together_as_alone():
    population = different_population()
    batch = population.collect(tiny_env(), step=4, samples_per_step=16, block=8).experience["default"]
    twins = [agent.clone() for agent in population]
    together = population.learn({"default": batch}, step=4)
    for slot, twin in enumerate(twins):
        own = batch.select_members([slot])
        own = replace(own, member_ids=torch.zeros_like(own.member_ids))
        alone = learn(twin.members, [twin.learner(4)], {"default": own})[0]
        assert alone.optimizer_steps == (1, 12, 4)[slot] == int(state_of(twin)["step"])
        assert_states_agree(state_of(population[slot]), state_of(twin), lr=twin.lr)
        assert together[slot].failed is alone.failed is None
        assert_metrics_agree(together[slot].metrics, alone.metrics)
        assert together[slot].advantages == alone.advantages
        assert together[slot].tokens == alone.tokens


def test_a_neighbours_rewards_and_hyperparameters_have_no_effect():
    one, other = different_population(), different_population()
    batch = one.collect(tiny_env(), step=0, samples_per_step=16, block=8).experience["default"]
    # Equal rewards stay equal, so that the same rows are run: bit-equality needs equal batch shapes.
    rewards = torch.where(batch.member_ids == 1, -batch.rewards, batch.rewards)
    other[1].lr, other[1].clip_coef, other[1].max_grad_norm = 0.5, 0.9, 3.0
    one.learn({"default": batch}, step=0)
    other.learn({"default": replace(batch, rewards=rewards)}, step=0)
    assert equal_states(state_of(one[0]), state_of(other[0]))
    assert equal_states(state_of(one[2]), state_of(other[2]))
    assert not equal_states(state_of(one[1]), state_of(other[1]))


def test_a_batch_holds_rows_of_learning_members_only():
    population = different_population()
    batch = population.collect(tiny_env(), step=0, samples_per_step=16, block=8).experience["default"]
    with pytest.raises(ValueError, match=r"slots \[0, 2\]"):
        population.learn({"default": batch.select_members([0, 2])}, step=0)
    with pytest.raises(ValueError, match=r"slots \[0, 1, 2\]"):
        learn(population.members, [population[0].learner(0)], {"default": batch})


def test_the_base_model_never_changes():
    before = {name: value.clone() for name, value in shared_model().state_dict().items()}
    agent = tiny_agent(lora_config=lora(), beta=0.1, lr=0.1)
    for seed in range(2):
        ids, masks = agent.get_action(tiny_env().reset()[0])
        agent.learn((ids, masks, graded(ids, seed)))
    assert equal_states(dict(shared_model().state_dict()), before)
    assert all(parameter.requires_grad for parameter in shared_model().parameters())
