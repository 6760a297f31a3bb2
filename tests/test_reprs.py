"""String representations of objects."""

import pytest

from evogrpo import evolve
from tests.test_progress import language, networks, teams

MOST = 200


def zero(completions, **_):
    return [0.0] * len(completions)


def every_object(population, env):
    """Return all objects that a user gets during a run."""
    collected = population.collect(env, step=0, samples_per_step=8, starts_per_step=2)
    learned = population.learn(collected.experience, step=0)
    run = evolve(population, env, generations=1, steps_per_generation=1, samples_per_step=8)
    steps = []
    generations = []
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
