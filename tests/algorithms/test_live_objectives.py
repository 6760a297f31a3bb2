"""Hyperparameters of the objective that change on an existing member change its update as the formula says.

The loss type, which is a name, is tested on every route by which a value arrives.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evogrpo.algorithms.policies.language_sampling import as_batch
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from tests.oracles.objective_by_hand import ByHand
from tests.tiny_routes import DECAY, ROUTES, equal_and_nonzero, graded_experiences
from tests.tiny_training import flat_gradient, peft_twin, state_of


def by_hand(agent, experiences) -> ByHand:
    """Return the agent's learning step for the oracle."""
    h = agent.hyperparameters
    batch = as_batch(experiences, agent.slot, h, 0, agent.device)
    return ByHand(peft_twin(agent), batch, h, agent.members.settings.objective.of(h))


def gradient(hand: ByHand) -> Tensor:
    """Return the gradient of the loss over all completions."""
    hand.loss(range(len(hand.rows))).backward()
    return flat_gradient(hand.member)


FIRST_STEP = {
    "entropy_coef": (0.3, 0.0, {}),
    "entropy_coef beside others": (0.1, 0.4, {"beta": 0.1, "loss_type": "cispo"}),
    "advantage_clip": (0.4, 2.0, {}),
    "gamma": (0.6, 1.0, {}),
    "loss_type": ("dr_grpo", "luspo", {}),
    "loss_type beside others": ("luspo", "sapo", {"entropy_coef": 0.1}),
    "advantage": ("mean_only", "outcome", {}),
    "advantage beside others": ("batch_std", "rloo", {"loss_type": "gspo"}),
}


@pytest.mark.parametrize(
    ("pair", "case"),
    [("assigned", case) for case in FIRST_STEP] + [(route, "loss_type") for route in ROUTES if route != "assigned"],
    indirect=["pair"],
)
def test_the_gradient_equals_the_formula(pair, case):
    value, default, options = FIRST_STEP[case]
    name = case.split()[0]
    agent, twin = pair(name, value, **{name: default} | options)
    experiences = graded_experiences(twin)
    gradients = []
    for learner in (agent, twin):
        expected = gradient(by_hand(learner, experiences))
        learner.learn(experiences)
        gradients.append(state_of(learner)["exp_avg"] / (1 - DECAY))
        assert equal_and_nonzero(gradients[-1], expected, 1e-3)
    assert not equal_and_nonzero(gradients[0], gradients[1], 0.02)


OFF_POLICY = {
    "clip_low": (0.01, 0.4, {"clip_high": 0.05}),
    "clip_low of a geometric mean": (0.01, 0.4, {"loss_type": "gmpo", "lr": 2e-3}),
    "clip_high": (0.01, 0.4, {"clip_low": 0.05}),
    "clip_high of a weight": (0.005, 0.4, {"loss_type": "cispo"}),
    "loss_type": ("sapo", "grpo", {"clip_coef": 0.02}),
    "loss_type of sequences": ("gspo", "dapo", {"clip_coef": 0.02}),
}


@pytest.mark.parametrize("case", OFF_POLICY)
def test_the_gradient_equals_the_formula_after_the_policy_moved(pair, case):
    value, default, options = OFF_POLICY[case]
    name = case.split()[0]
    agent, twin = pair(name, value, **{name: default, "update_epochs": 2, "lr": 0.01} | options)
    experiences = graded_experiences(twin)
    gradients = []
    for learner in (agent, twin):
        first = learner.clone()
        first.update_epochs = 1
        first.learn(experiences)
        hand = by_hand(learner, experiences)  # its old policy is the one before any step
        hand.member = peft_twin(first)
        learner.learn(experiences)
        gradients.append((state_of(learner)["exp_avg"] - DECAY * state_of(first)["exp_avg"]) / (1 - DECAY))
        assert equal_and_nonzero(gradients[-1], gradient(hand), 2e-3)
    assert not equal_and_nonzero(gradients[0], gradients[1], 0.02)


def test_clip_low_and_clip_high_override_clip_coef(pair):
    agent, twin = pair("clip_low", 0.003, clip_low=0.3, clip_coef=0.002, update_epochs=2)
    experiences = graded_experiences(twin)
    reports = [learner.learn(experiences).metrics for learner in (agent, twin)]
    assert reports[0]["clip_ratio/low_mean"] > reports[1]["clip_ratio/low_mean"]
    assert reports[0]["clip_ratio/high_mean"] == pytest.approx(reports[1]["clip_ratio/high_mean"], abs=0.02)
    assert reports[0]["clip_ratio/high_mean"] > 0
    torch.testing.assert_close(
        reports[0]["clip_ratio/region_mean"],
        reports[0]["clip_ratio/low_mean"] + reports[0]["clip_ratio/high_mean"],
    )


def test_every_evolving_hyperparameter_is_tested():
    others = Path(__file__).with_name("test_live_hyperparameters.py").read_text(encoding="utf-8")
    tested = {*re.findall(r'pair\("(\w+)"', others), *(case.split()[0] for case in (*FIRST_STEP, *OFF_POLICY))}
    assert tested == set(HYPERPARAMETER_NAMES)
