"""An external sampler process with PEFT adapters, with importance correction."""

import pytest
import torch

from evogrpo import Objective
from evogrpo.algorithms.rollout.evaluation import evaluate
from tests.outside_sampler import GenerateSampler
from tests.tiny_models import tiny_model
from tests.tiny_training import randomise_adapter, tiny_env, tiny_population


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Return a population of two and the external sampler of its completions."""
    model, objective = tiny_model(), Objective(importance_correction="token_truncate", importance_cap=2.0)
    population = tiny_population(2, actor_network=model, objective=objective, lr=3e-3)
    for agent in population:
        randomise_adapter(agent, agent.slot, std=0.05)
    sampler = GenerateSampler(population, model, tmp_path_factory.mktemp("sampler"))
    population.sample_with(sampler)
    yield population, sampler
    sampler.close()


def test_members_learn_from_external_samples_and_are_synchronised(outside):
    population, sampler = outside
    env = tiny_env()
    collected = population.collect(env, step=0, samples_per_step=16, block=4)
    batch = collected.experience["default"]
    assert not batch.exact
    trainer = population.members.banks["default"].log_probs(batch)
    gaps = (trainer - batch.sampler_log_probs).abs() * batch.action_mask
    assert 0 < float(gaps.max()) < 1.0  # half precision against float32
    assert float(gaps[batch.action_mask].mean()) < 0.1
    before = [agent.state()["adapter"] for agent in population]
    for slot, report in population.learn(collected.experience, step=0).items():
        assert report.failed is None
        rows = (batch.member_ids == slot).nonzero()[:, 0]
        widest = float(gaps[rows[torch.tensor(report.advantages) != 0]].max())  # other rows need no scores
        assert report.metrics["sampling/sampling_logp_difference/max"] == pytest.approx(widest, abs=1e-4)
        assert report.metrics["sampling/importance_sampling_ratio/max"] <= 2.0
        assert not torch.equal(population[slot].state()["adapter"], before[slot])
    population.evaluate(env)
    # Both are loaded at first and after learning, none without a change.
    population.collect(env, step=1, samples_per_step=16, block=4)
    assert sampler.loaded == [[0, 1], [0, 1], []]
    population.members.banks.inherit([0, 0])
    evaluate(population.members, [0], env, "validation", base=True)
    assert sampler.loaded[-1] == [1]
