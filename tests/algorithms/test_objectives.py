"""Every objective end to end: a learning step against formulas with PEFT and PyTorch."""

import math
from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn, minibatches
from evogrpo.config.hyperparameters import Optimizer
from evogrpo.data import Batch
from evogrpo.functional.loss_types import LOSS_TYPES
from tests.oracles.objective_by_hand import ByHand
from tests.tiny_training import flat, peft_twin, randomise_adapter, sampled, state_of, tiny_agent

DAMPED = Optimizer(eps=1e-5)  # Adam divides rounding errors of vanishing gradients by eps
NAN = math.nan
REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, NAN, 0.7, 0.3]])
TWICE = {"update_epochs": 2, "lr": 5e-3, "batch_size": 5}  # ratios differ from 1 after the first of 6 steps

CASES: dict[str, tuple[dict, dict]] = {
    **{loss_type: ({}, {"loss_type": loss_type}) for loss_type in LOSS_TYPES},
    **{
        f"{loss_type}, everything": (
            {"beta": 0.2, "entropy_coef": 0.1, "clip_low": 0.02, "clip_high": 0.05, "temperature": 1.3},
            {"loss_type": loss_type, "kl_estimator": "k2"} | ({"delta": 1.1} if LOSS_TYPES[loss_type].bounded else {}),
        )
        for loss_type in LOSS_TYPES
    },
    "dual clip": ({"clip_coef": 0.01}, {"dual_clip": 1.02}),
    "cispo, floor": ({"clip_coef": 0.01}, {"loss_type": "cispo", "cispo_clip_low": True}),
    "sapo, steep": ({}, {"loss_type": "sapo", "sapo_tau_positive": 3.0, "sapo_tau_negative": 0.5}),
    "token-mean": ({"beta": 0.1}, {"aggregation": "token-mean", "kl_estimator": "abs"}),
    "seq-mean-token-sum": ({}, {"aggregation": "seq-mean-token-sum"}),
    "seq-mean-token-sum-norm": ({}, {"loss_type": "dapo", "aggregation": "seq-mean-token-sum-norm"}),
    "rloo": ({}, {"advantage": "rloo"}),
    "mean_only": ({}, {"advantage": "mean_only"}),
    "batch_std": ({}, {"advantage": "batch_std", "reward_clip": 0.8}),
    "gdpo": ({}, {"advantage": "gdpo"}),
    "reinforce": ({"gamma": 0.9}, {"advantage": "reinforce", "reward_clip": 0.8}),
    "process": ({"gamma": 0.9}, {"advantage": "process"}),
    "return_to_go_group": ({"gamma": 0.8}, {"advantage": "return_to_go_group"}),
    "return_to_go_timestep": ({"advantage_clip": 0.7}, {"advantage": "return_to_go_timestep"}),
    "entropy, mean": ({"entropy_coef": 0.2}, {"entropy_reduction": "mean"}),
    "entropy, mean, of completions": (
        {"entropy_coef": 0.2, "beta": 0.1},
        {"loss_type": "gspo", "entropy_reduction": "mean"},
    ),
    "KL, bias corrected": ({"beta": 0.3}, {"kl_bias_correction": True}),
    "KL, bias corrected by completion": ({"beta": 0.3}, {"kl_bias_correction": True, "loss_type": "gspo"}),
    "KL in rewards": ({"beta": 0.3}, {"kl_placement": "reward", "kl_estimator": "k1"}),
    "KL in rewards, clipped": (
        {"beta": 0.5, "gamma": 0.9, "advantage_clip": 0.9},
        {"kl_placement": "reward", "reward_clip": 0.6},
    ),
}


def with_steps(batch: Batch) -> Batch:
    """Add step rewards and a second reward function."""
    steps = torch.rand(batch.action_mask.shape, generator=torch.Generator().manual_seed(1))
    components = torch.rand(len(batch), 2, generator=torch.Generator().manual_seed(2))
    return replace(
        batch,
        step_rewards=steps,
        reward_components=components,
        component_weights=(1.0, 0.5),
        component_names=("one", "other"),
    )


@pytest.mark.parametrize("case", CASES)
def test_learning_equals_the_formulas(case):
    choices, objective = CASES[case][0], Objective(**CASES[case][1])
    agent = tiny_agent(**TWICE | choices, objective=objective, optimizer=DAMPED)
    randomise_adapter(agent)
    start = state_of(agent)["adapter"]
    batch = with_steps(sampled(agent, REWARDS))
    learner = agent.learner()
    plan = minibatches(learner, batch, seed=0)
    by_hand = ByHand(peft_twin(agent), batch, agent.hyperparameters, objective)
    losses = by_hand.learn(plan)
    report = learn(agent.members, [learner], {"default": batch})[0]
    assert report.optimizer_steps == len(plan) == 6
    assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-5)
    expected = flat(by_hand.member.parameters)
    moved = (expected - start).norm()
    assert moved > 0.01
    assert float((state_of(agent)["adapter"] - expected).norm()) < 2e-3 * float(moved)
    means = [sum(row) / max(len(row), 1) for row in by_hand.advantages]
    assert report.advantages == pytest.approx(means, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("advantage", ["outcome", "reinforce", "batch_std"])
def test_the_difficulty_mask_removes_groups_from_the_loss_not_from_statistics(advantage):
    """The update equals that of empty action masks."""
    rewards = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.0, 0.0, 0.0, 0.1], [1.0, 1.0, 0.9, 1.0]])
    moved = []
    for bounds in ({"min_group_reward": 0.1, "max_group_reward": 0.95}, {}):
        agent = tiny_agent(**TWICE, objective=Objective(advantage=advantage, **bounds), optimizer=DAMPED)
        randomise_adapter(agent)
        batch = sampled(agent, rewards)
        if not bounds:
            learnt = (batch.group_ids == batch.group_ids[0])[:, None]
            batch = replace(batch, action_mask=batch.action_mask & learnt, chosen=batch.action_mask)
        report = learn(agent.members, [agent.learner()], {"default": batch})[0]
        assert sum(value != 0 for value in report.advantages) == 4
        moved.append(state_of(agent)["adapter"])
    assert torch.equal(*moved)
