"""Gradient accumulation: micro-batches do not change the update."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.data import LearnReport
from evogrpo.functional.loss_types import AGGREGATIONS, LOSS_TYPES
from evogrpo.testing.policy_banks import assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_training import randomise_adapter, sampled, state_of, tiny_agent

REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, 0.2, 0.7, 0.3]])
EVERYTHING = {"beta": 0.2, "entropy_coef": 0.1}
CASES: dict[str, tuple[dict, dict]] = {
    **{loss_type: (EVERYTHING, {"loss_type": loss_type}) for loss_type in LOSS_TYPES},
    **{f"dapo by {mode}": (EVERYTHING, {"loss_type": "dapo", "aggregation": mode}) for mode in AGGREGATIONS},
    "whitened": ({}, {"whiten_advantages": True}),
    "uncertain actions": (EVERYTHING, {"top_entropy_quantile": 0.3}),
    "KL in rewards": ({"beta": 0.3}, {"kl_placement": "reward"}),
    "correction": ({}, {"importance_correction": "sequence_truncate", "importance_cap": 1.2}),
}


@cache  # computed once and compared with every split
def updated(case: str, tokens: int) -> tuple[dict[str, Tensor], LearnReport]:
    """Return the state and the report of a learner for this size of micro-batches."""
    choices, objective = CASES[case]
    agent = tiny_agent(
        **{"update_epochs": 2, "lr": 2e-3} | choices, objective=Objective(**objective), micro_batch_tokens=tokens
    )
    randomise_adapter(agent)
    batch = sampled(agent, REWARDS)
    noise = torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    if "importance_correction" in objective:
        batch = replace(batch, sampler_log_probs=batch.sampler_log_probs + 0.2 * noise)
    report = learn(agent.members, [agent.learner()], {"default": batch})[0]
    return state_of(agent), report


@pytest.mark.parametrize("budget", [1, 45])
@pytest.mark.parametrize("case", CASES)
def test_any_split_gives_the_same_update(case, budget):
    (whole, one), (split, other) = updated(case, 10**6), updated(case, budget)
    assert_states_agree(split, whole, lr=2e-3)
    assert float(whole["exp_avg"].norm()) > 1e-3
    assert_metrics_agree(other.metrics, one.metrics)
    assert other.tokens == one.tokens
