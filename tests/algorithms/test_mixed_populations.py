"""Members with different losses, advantages and coefficients learn together as alone."""

from dataclasses import replace

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.config.hyperparameters import Optimizer
from evogrpo.functional.loss_types import LOSS_TYPES
from evogrpo.testing.policy_banks import assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_training import equal_states, randomise_adapter, state_of, tiny_env, tiny_population

DAMPED = Optimizer(eps=1e-5)
KINDS = ("outcome", "rloo", "mean_only", "batch_std", "gdpo", "process", "return_to_go_group", "return_to_go_timestep")
KINDS += ("reinforce",)
MIXED = [
    {"beta": 0.1, "clip_coef": 0.3},
    {"loss_type": "dapo", "advantage": "rloo", "group_size": 2, "update_epochs": 3, "batch_size": 5},
    {"loss_type": "cispo", "beta": 0.4, "entropy_coef": 0.2, "clip_low": 0.1, "group_size": 8, "batch_size": 7},
    {"loss_type": "sapo", "advantage": "batch_std", "temperature": 0.7, "advantage_clip": 0.5, "gamma": 0.9},
]
CENTRED = [{"advantage": "mean_only"}, {"advantage": "rloo", "batch_size": 5}, {"advantage": "mean_only", "beta": 0.2}]
HELD = [{"beta": 0.1}, {"beta": 0.5, "update_epochs": 1}, {"beta": 0.0, "loss_type": "dapo"}]

RUNS: dict[str, tuple[dict, list[dict]]] = {
    "loss types": ({}, [{"loss_type": name, "clip_high": 0.05 * (i + 1)} for i, name in enumerate(LOSS_TYPES)]),
    "advantages": ({}, [{"advantage": name, "gamma": 1 - 0.05 * i} for i, name in enumerate(KINDS)]),
    "coefficients": ({}, MIXED),
    "bias-corrected KL": ({"kl_bias_correction": True}, [*MIXED, {"loss_type": "gspo", "beta": 0.2}]),
    "whitened": ({"whiten_advantages": True}, MIXED),
    "dual clip": ({"dual_clip": 1.1}, [{}, {"loss_type": "dapo", "clip_coef": 0.1}, {"loss_type": "gspo"}]),
    "running statistics": ({"advantage": "rloo", "reward_norm": "running", "reward_scale": True}, CENTRED),
    "batch statistics": ({"advantage": "rloo", "reward_norm": "batch"}, CENTRED),
    "adaptive KL": ({"kl_target": 0.02, "kl_horizon": 40}, HELD),
    "adaptive KL in rewards": ({"kl_target": 0.5, "kl_horizon": 40, "kl_placement": "reward"}, HELD),
    "uncertain actions": ({"top_entropy_quantile": 0.4}, MIXED),
    "correction by action": ({"importance_correction": "token_truncate", "importance_cap": 1.05}, MIXED),
    "correction by completion": ({"importance_correction": "sequence_mask", "importance_cap": 1.1}, MIXED),
    "own references": ({"reference": "snapshot", "reference_sync_steps": 2, "reference_mixing": 0.3}, HELD),
}


def population_of(run):
    objective, members = RUNS[run]
    population = tiny_population(len(members), optimizer=DAMPED, objective=Objective(**objective), **members[0])
    for seed, (agent, own) in enumerate(zip(population, members, strict=True)):
        randomise_adapter(agent, seed)
        for name, value in ({"update_epochs": 2, "lr": 2e-3, "batch_size": 8} | own).items():
            setattr(agent, name, value)
    return population


def experience(population, step, noise=0.2):
    """Act with all members and add random step rewards and sampler log-probabilities."""
    batch = population.collect(tiny_env(), step=step, samples_per_step=16, block=8).experience["default"]
    draws = torch.Generator().manual_seed(step)
    heard = batch.sampler_log_probs
    if population.members.settings.objective.importance_correction:
        # An external engine reports other log-probabilities than the trainer.
        heard = heard + noise * torch.randn(heard.shape, generator=draws)
    return replace(
        batch,
        rewards=torch.rand(len(batch), generator=draws),
        step_rewards=torch.rand(batch.action_mask.shape, generator=draws),
        reward_components=torch.rand(len(batch), 2, generator=draws),
        component_weights=(1.0, 2.0),
        component_names=("one", "other"),
        sampler_log_probs=heard,
    )


@pytest.mark.parametrize("run", RUNS)
def test_members_learn_together_as_alone(run):
    population = population_of(run)
    twins = [agent.clone() for agent in population]
    starts = [state_of(agent)["adapter"] for agent in population]
    for step in range(2):
        batch = experience(population, step)
        together = population.learn({"default": batch}, step=step)
        for slot, twin in enumerate(twins):
            own = batch.select_members([slot])
            own = replace(own, member_ids=torch.zeros_like(own.member_ids))
            alone = learn(twin.members, [twin.learner(step)], {"default": own})[0]
            assert together[slot].failed is alone.failed is None
            assert_metrics_agree(together[slot].metrics, alone.metrics)
            assert together[slot].advantages == pytest.approx(alone.advantages, rel=1e-3, abs=1e-5)
            assert together[slot].tokens == alone.tokens
            assert_states_agree(state_of(population[slot]), state_of(twin), lr=twin.lr)
    for slot, start in enumerate(starts):
        assert float((state_of(population[slot])["adapter"] - start).norm()) > 1e-3


@pytest.mark.parametrize("run", ["coefficients", "whitened", "running statistics", "adaptive KL", "uncertain actions"])
def test_a_neighbours_losses_and_coefficients_have_no_effect(run):
    """Bit for bit: the neighbour's values change, the shapes do not."""
    one, other = population_of(run), population_of(run)
    batch = experience(one, 0)
    last = len(one) - 1
    changes = {"clip_coef": 0.9, "max_grad_norm": 3.0, "lr": 0.03, "advantage_clip": 0.3}
    for name, value in changes.items():
        setattr(other[last], name, value)
    one.learn({"default": batch}, step=0)
    other.learn({"default": batch}, step=0)
    for slot in range(last):
        assert equal_states(state_of(one[slot]), state_of(other[slot]))
    assert not equal_states(state_of(one[last]), state_of(other[last]))
