"""Warning about rewards without a learning signal."""

import re
import warnings

import pytest

from evogrpo import GRPO, TOOLS_TEMPLATE, HuggingFaceGym, Objective, evolve, resume
from evogrpo.envs.text.reward_functions import RewardError
from tests.envs.test_environment_gym import gym, tiny_language_model
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import QUESTIONS, shared_model, shared_tokenizer, tiny_env, tiny_population

BRIEF = {
    "generations": 2,
    "steps_per_generation": 2,
    "samples_per_step": 8,
    "validation_questions": 2,
}
BRIEF |= {"test_questions": 0}


def run(env, population=None, **schedule):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in evolve(population or tiny_population(2), env, **(BRIEF | schedule)):
            pass
    return [
        str(each.message) for each in caught if "No learning signal" in str(each.message)
    ], caught


def test_constant_rewards_warn_once():
    (message,), caught = run(tiny_env(reward_fn=lambda completion, answer, question: -2.5))
    assert "the first 3 learning steps: all rewards within each group were equal" in message
    assert "partial credit" in message
    # The warning points at the user's line.
    assert {each.filename for each in caught if str(each.message) == message} == {__file__}


def test_rewards_that_depend_on_the_question_only_warn():
    def by_question(completion, answer, question):
        return float(answer)

    (message,), _ = run(tiny_env(reward_fn=by_question), generations=1)
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
        list(
            evolve(
                tiny_population(2), tiny_env(reward_fn=solved), run_dir=tmp_path / "run", **BRIEF
            )
        )
    again = resume(
        tmp_path / "run", tiny_env(reward_fn=solved), actor_network=shared_model(), generations=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(again)) == 2


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


def never(completions, **_):
    return [0.0] * len(completions)


def unfinished(completions, **_):
    return [None] * len(completions)


def test_rewards_that_are_constant_beside_others_are_named():
    env = tiny_env(reward_funcs=[length, never, unfinished])
    population = tiny_population(1, objective=Objective(overlong_buffer=1))
    _, caught = run(env, population, generations=1)
    messages = [str(each.message) for each in caught if "same value" in str(each.message)]
    assert len(messages) == 1
    assert re.search(
        r"first 2 learning steps.*: never \(0\), unfinished \(no numbers\)\.", messages[0]
    )


def test_constant_components_of_an_environment_are_named():
    env = cart_pole(
        rewards={"bonus": lambda *_: 0.0, "tilt": lambda seen, *_: float(seen[2])},
        train_size=4,
    )
    with pytest.warns(UserWarning, match=r"first 1 learning step.*: bonus \(0\)\."):
        list(
            evolve(
                step_population(1, env),
                env,
                **BRIEF | {"steps_per_generation": 1, "generations": 1},
            )
        )


@pytest.mark.parametrize("size", [1e8, 1e12])
def test_rewards_too_large_for_their_differences_are_named(size):
    def large(completions, **_):
        return [size + len(completion) for completion in completions]

    with pytest.warns(UserWarning, match="float32 loses differences"):
        evolve(tiny_population(1), tiny_env(reward_funcs=large), **BRIEF).finish()


def test_a_metric_that_is_always_the_same_is_named():
    def solved(completion, answer, question):
        return 1.0

    with pytest.warns(UserWarning, match="held-out scores so far are 1,"):
        evolve(
            tiny_population(2),
            tiny_env(metric=solved),
            **BRIEF | {"generations": 1, "validation_questions": 4},
        ).finish()


def test_tools_that_no_conversation_calls_are_told():
    env = gym(TOOLS_TEMPLATE)
    model = tiny_language_model(len(env.tokenizer))
    population = GRPO.population(
        1, actor_network=model, pad_token_id=0, group_size=4, max_output_tokens=2
    )
    _, caught = run(env, population, generations=1)
    (message,) = [str(each.message) for each in caught if "called a tool" in str(each.message)]
    assert "first 2 learning steps" in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mask_truncated": True}, "mask_truncated left .* raise max_output_tokens"),
        ({"min_group_reward": 50.0}, "min_group_reward left"),
        ({"max_group_reward": -50.0}, "max_group_reward left"),
    ],
)
def test_samples_left_out_of_the_loss_are_the_reason_given(settings, reason):
    # No completion may end before the maximum length, so all are truncated.
    lengths = {"min_output_tokens": 3, "max_output_tokens": 3}
    population = tiny_population(1, objective=Objective(**settings), **lengths)
    (message,), _ = run(tiny_env(), population)
    assert re.search(reason, message)
    assert "equal" not in message


def test_rewards_that_read_messages_as_text_are_told_their_form():
    def contains(completions, answer, **columns):
        return [
            float(right in completion)
            for completion, right in zip(completions, answer, strict=True)
        ]

    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in QUESTIONS
    ]
    env = HuggingFaceGym(
        rows, None, shared_tokenizer(), reward_funcs=contains, validation_size=4, test_size=4
    )
    (message,), _ = run(env, tiny_population(1), generations=1)
    assert "lists of messages" in message

    def length(completions, **columns):
        return [len(completion.strip()) for completion in completions]

    env = HuggingFaceGym(
        rows, None, shared_tokenizer(), reward_funcs=length, validation_size=4, test_size=4
    )
    with pytest.raises(RewardError, match="lists of messages"):
        run(env, tiny_population(1))
