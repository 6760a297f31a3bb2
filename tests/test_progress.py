"""Progress of long operations."""

import pytest
import torch

from evogrpo.interruption import NEVER, Stop
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_teams import team_env, team_population
from tests.tiny_training import tiny_env, tiny_population


def language():
    return tiny_population(2, beta=0.1, batch_size=4), tiny_env()


def networks():
    env = cart_pole(max_episode_steps=20, validation_size=2, test_size=2)
    return step_population(2, env), env


def teams():
    env = team_env(validation_size=2, test_size=2)
    return team_population(2, env, policies="shared", hp_config=None, group_size=4), env


def take_a_step(population, env, stop=NEVER):
    collected = population.collect(env, step=0, samples_per_step=8, starts_per_step=2, stop=stop)
    population.learn(collected.experience, step=0, stop=stop)
    population.evaluate(env)
    return [population.members.state(agent.slot) for agent in population.agents]


@pytest.mark.parametrize("make", [language, networks, teams])
def test_every_part_of_a_step_runs_from_zero_to_its_total(make):
    updates = []
    stop = Stop()
    stop.listener = lambda work: updates.append(
        (f"{work.activity} {work.count} {work.noun}", work.fraction)
    )
    listened = take_a_step(*make(), stop)
    learning = next(label for label, _ in updates if label.startswith("learning"))
    if make is language:
        acting = "writing 16 completions"
    else:
        acting = "playing 16 episodes"
    parts = {}
    for label, part in updates:
        parts.setdefault(label, []).append(part)
    assert {acting, learning} <= set(parts)
    for label in (acting, learning, *(["scoring 16 completions"] if make is language else [])):
        # An evaluation, and each policy of a team, starts at zero again.
        rises = [
            after - before for before, after in zip(parts[label], parts[label][1:], strict=False)
        ]
        assert all(
            rise >= 0 or parts[label][position + 1] == 0 for position, rise in enumerate(rises)
        ), label
        assert len(parts[label]) > (2 if label == acting and make is not teams else 1), label
        assert max(parts[label]) == pytest.approx(1.0), label
    for state, other in zip(listened, take_a_step(*make()), strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
