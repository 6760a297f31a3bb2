"""A run from which nothing can be learnt says so early, once, with what to change."""

import warnings

import pytest

from evogrpo import GRPO, GymnasiumGroups, evolve, resume
from tests.tiny_training import shared_model, tiny_env, tiny_population

BRIEF = {"generations": 2, "steps_per_generation": 2, "samples_per_step": 8, "validation_questions": 2}
BRIEF |= {"test_questions": 0}


def run(env, **schedule):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in evolve(tiny_population(2), env, **(BRIEF | schedule)):
            pass
    return [str(each.message) for each in told if "No learning signal" in str(each.message)], told


@pytest.mark.parametrize("value", [0.0, 1, -2.5])
def test_a_constant_reward_is_told_of_once(value):
    messages, told = run(tiny_env(reward_fn=lambda completion, answer, question: value))
    (message,) = messages
    assert f"the first 3 learning steps: all rewards were {value:g}" in message
    assert "partial credit" in message
    assert {each.filename for each in told if str(each.message) == message} == {__file__}  # the user's own line


def test_a_reward_that_only_questions_decide_is_told_of():
    def by_question(completion, answer, question):
        return float(answer)

    ((message,), _) = run(tiny_env(reward_fn=by_question), generations=1)
    assert "the first 2 learning steps: all rewards within each group were equal" in message


def test_rewards_that_differ_once_are_enough():
    seen = []

    def late(completions, **_):
        seen.append(len(completions))
        return [float(n == 0 and len(seen) == 6) for n in range(len(completions))]  # the third step

    assert run(tiny_env(reward_funcs=late))[0] == []
    assert run(tiny_env())[0] == []


def test_a_reward_that_never_applies_is_told_of():
    calls = []

    def held_out_only(completions, **_):
        calls.append(1)
        return [None if len(completions) > 4 else 0.0 for _ in completions]

    ((message,), _) = run(tiny_env(reward_funcs=held_out_only), steps_per_generation=4, generations=1)
    assert "no reward applied to any sample" in message


def test_small_networks_that_always_earn_the_same_are_told_of():
    env = GymnasiumGroups("MountainCar-v0", max_episode_steps=5)
    population = GRPO.population(2, observation_space=env.observation_space, action_space=env.action_space)
    with pytest.warns(UserWarning, match="all rewards were -5"):
        list(evolve(population, env, **(BRIEF | {"generations": 1, "steps_per_generation": 3})))


def test_a_run_that_goes_on_is_past_its_first_steps(tmp_path):
    def solved(completion, answer, question):
        return 1.0

    with pytest.warns(UserWarning, match="No learning signal in the first 3"):
        list(evolve(tiny_population(2), tiny_env(reward_fn=solved), run_dir=tmp_path / "run", **BRIEF))
    again = resume(tmp_path / "run", tiny_env(reward_fn=solved), actor_network=shared_model(), generations=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(again)) == 2
