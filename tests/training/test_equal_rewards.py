"""Warning about rewards without a learning signal."""

import warnings

import pytest

from evogrpo import evolve, resume
from tests.tiny_training import shared_model, tiny_env, tiny_population

BRIEF = {"generations": 2, "steps_per_generation": 2, "samples_per_step": 8, "validation_questions": 2}
BRIEF |= {"test_questions": 0}


def run(env, **schedule):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in evolve(tiny_population(2), env, **(BRIEF | schedule)):
            pass
    return [str(each.message) for each in caught if "No learning signal" in str(each.message)], caught


def test_constant_rewards_warn_once():
    (message,), caught = run(tiny_env(reward_fn=lambda completion, answer, question: -2.5))
    assert "the first 3 learning steps: all rewards within each group were equal" in message
    assert "partial credit" in message
    assert {each.filename for each in caught if str(each.message) == message} == {__file__}  # the user's line


def test_rewards_that_depend_on_the_question_only_warn():
    def by_question(completion, answer, question):
        return float(answer)

    ((message,), _) = run(tiny_env(reward_fn=by_question), generations=1)
    assert "the first 2 learning steps: all rewards within each group were equal" in message


def test_one_difference_prevents_the_warning():
    seen = []

    def late(completions, **_):
        seen.append(len(completions))
        return [float(n == 0 and len(seen) == 6) for n in range(len(completions))]  # the third step

    assert run(tiny_env(reward_funcs=late))[0] == []


def test_a_resumed_run_does_not_warn(tmp_path):
    def solved(completion, answer, question):
        return 1.0

    with pytest.warns(UserWarning, match="No learning signal in the first 3"):
        list(evolve(tiny_population(2), tiny_env(reward_fn=solved), run_dir=tmp_path / "run", **BRIEF))
    again = resume(tmp_path / "run", tiny_env(reward_fn=solved), actor_network=shared_model(), generations=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(again)) == 2
