"""What processes send each other, as it is told before a run: against what does travel."""

import pickle

import pytest

from evogrpo.agents.members.spread.lending import lend
from evogrpo.agents.members.spread.places import Places
from evogrpo.training.configuration.reading import parse_config
from evogrpo.training.kinds.playing_memory import lent_episode
from evogrpo.training.traffic import LENT, MESSAGES, PROMPT_TOKEN, Traffic, lent_bytes
from tests.cli.project import CONFIG
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import tiny_env, tiny_population


def traffic(shares: list[int], members: int, sources: int) -> Traffic:
    return Traffic(members=members, shares=shares, samples=8, steps=2, state=100, sources=sources, sample=1000)


@pytest.mark.parametrize(
    ("shares", "members", "sources", "lent", "messages"),
    [
        ([4], 4, 3, 0, 0),  # all are in one process
        ([2, 2], 4, 0, 0, 0),  # each learns from its own
        ([2, 2], 4, 3, LENT + 2 * 8 * 1000, 2 + 2 * 2),
        ([3, 2, 2], 7, 6, 2 * LENT + 5 * 8 * 1000, 2 + 2 * 3),
        ([3, 2, 2], 7, 1, LENT + 8 * 1000, 2 + 2),  # the leader's alone
        ([1, 1, 1], 2, 1, LENT + 8 * 1000, 2 + 2),  # two of them share a member's work
    ],
)
def test_samples_of_members_elsewhere_travel(
    shares: list[int], members: int, sources: int, lent: int, messages: int
) -> None:
    """Once in each step to every process, and none where nobody learns from them."""
    found = traffic(shares, members, sources)
    assert found.lent == 2 * lent
    assert found.messages == 2 * (MESSAGES + messages)


@pytest.mark.parametrize(
    ("shares", "members", "pooled"),
    [([2, 2], 4, 0), ([1, 1, 1], 2, 2 * 4 * 1000), ([1, 1, 1], 1, 2 * 2 * 3 * 1000)],
)
def test_samples_of_a_shared_member_travel(shares: list[int], members: int, pooled: int) -> None:
    """Each of its processes gets what the others took: halves of 8, or thirds, the longest of 3."""
    assert traffic(shares, members, 0).pooled == pooled


@pytest.mark.parametrize("correction", [None, "token_truncate"])
def test_completions_take_as_many_bytes_as_is_told(correction: str | None) -> None:
    """Within a tenth, whatever has to be told of the policies that acted."""
    objective = {"importance_correction": correction} if correction else {}
    config = parse_config(CONFIG | {"agent": {"objective": objective}, "experience": "own"})
    population = tiny_population(
        1, objective=config.agent.objective, group_size=4, max_output_tokens=24, min_output_tokens=24
    )
    batch = population.collect(tiny_env(), step=0, samples_per_step=32, block=8).experience
    prompt = len(batch["default"].inputs.prompts[0])
    told = LENT + 32 * lent_bytes(config, actions=24, shared=prompt)
    assert told == pytest.approx(sent(population, batch), rel=0.1)
    assert lent_bytes(config, actions=24, shared=400) - lent_bytes(config, actions=24) == PROMPT_TOKEN * 100


def test_episodes_take_as_many_bytes_as_is_told() -> None:
    """Within a tenth, where all are as long as can be."""
    env = cart_pole(max_episode_steps=9)
    config = parse_config({"task": {"env": "CartPole-v1"}, "population": {"size": 2}})
    population = step_population(1, env)
    batch = population.collect(env, step=0, samples_per_step=32, block=8).experience
    assert batch["default"].actions.shape == (32, 9)
    told = LENT + 32 * lent_episode(config, [(env.observation_space, env.action_space)], longest=9)
    assert told == pytest.approx(sent(population, batch), rel=0.1)


def sent(population, batch) -> int:
    """Return the bytes of what a process hands over."""
    return len(pickle.dumps(lend(population.members, Places(1, 1, 0), batch, [0])))
