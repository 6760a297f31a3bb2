"""String representations of objects."""

import pytest
import torch

from evogrpo import evolve
from evogrpo.data import TokenInputs
from tests.test_progress import language, networks, teams

MOST = 200


def zero(completions, **_):
    return [0.0] * len(completions)


def every_object(population, env):
    """Return all objects that a user gets during a run."""
    collected = population.collect(env, step=0, samples_per_step=8, block=2)
    learned = population.learn(collected.experience, step=0)
    run = evolve(population, env, generations=1, steps_per_generation=1, samples_per_step=8)
    steps, generations = [], []
    for report in run.trainer.reports():
        (generations if hasattr(report, "members") else steps).append(report)
    batches = list(collected.experience.values())
    return [
        env,
        population,
        *population.agents,
        population.space,
        run,
        run.result,
        collected,
        collected.scores,
        *batches,
        *(batch.inputs for batch in batches),
        *learned.values(),
        *steps,
        *generations,
        *generations[0].members,
    ]


@pytest.mark.parametrize("make", [language, networks, teams])
def test_representations_are_one_short_line(make):
    for each in every_object(*make()):
        shown = repr(each)
        assert "\n" not in shown, shown
        assert "tensor(" not in shown, shown
        assert "array(" not in shown, shown
        assert " object at 0x" not in shown, shown
        most = 400 if type(each).__name__ in ("Batch", "RolloutBatch") else MOST
        assert len(shown) <= most, (len(shown), shown)
        assert type(each).__name__ in shown


def test_representations_show_the_essentials():
    population, env = language()
    population.evaluate(env)
    scores = [agent.fitness.mean for agent in population.agents]
    for agent, score in zip(population.agents, scores, strict=True):
        assert f"#{agent.index} {score:.3g}" in repr(population)
        assert f"index={agent.index}" in repr(agent)
        assert f"lr={agent.hyperparameters.lr}" in repr(agent)
        assert f"fitness={score:.3g}" in repr(agent)
    assert repr(env) == "HuggingFaceGym(train 54, validation 8, test 36 questions, variety)"
    assert repr(networks()[1]) == "GymnasiumGroups('CartPole-v1', train 100000, validation 2, test 2 starts)"


def test_long_values_are_cut():
    rows = TokenInputs(
        prompts=tuple((1, 2, 3) for _ in range(1000)), prompt_ids=torch.arange(1000), temperature=torch.ones(1000)
    )
    assert repr(rows) == (
        "TokenInputs(prompts=<1000 entries>, prompt_ids=int64[1000], temperature=float32[1000], min_new_tokens=0)"
    )
    inputs = networks()[0].collect(networks()[1], step=0, samples_per_step=4, block=1).experience["default"].inputs
    assert "observations=float32[8, " in repr(inputs)
