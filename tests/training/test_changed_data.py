"""A resumed run requires the task of its start, unless a change is allowed."""

import shutil
import warnings
from copy import copy

import pytest

from evogrpo import HuggingFaceGym, evolve, resume
from evogrpo.reporting.report import html_page
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import open_run
from tests.tiny_models import tiny_model
from tests.tiny_steps import cart_pole, step_run
from tests.tiny_training import QUESTIONS, QUICK, shared_tokenizer, tiny_env, tiny_population


def generous(completion, answer, question):
    return 100.0


@pytest.fixture
def begun(stored_language_run, tmp_path):
    return shutil.copytree(stored_language_run.folder, tmp_path / "run")


def gym(rows, **options):
    return HuggingFaceGym(rows, QUESTIONS[64:], shared_tokenizer(), validation_size=8, **options)


def variety(completion, answer, question):
    return 1 + len(set(completion)) / 8


CHANGED = [
    (lambda: tiny_env(reward_fn=generous), "reward generous: none -> weight 1"),
    (lambda: tiny_env(reward_fn=variety), "reward variety: weight 1, code "),
    (lambda: gym(QUESTIONS[:60], reward_fn=generous), "train questions: 56, content "),
    (
        lambda: gym([{**row, "answer": "3"} for row in QUESTIONS[:64]], reward_fn=generous),
        "validation questions: 8,",
    ),
    (
        lambda: tiny_env(conversation_template=[{"role": "user", "content": "{question} ="}]),
        "prompts: ",
    ),
    (lambda: tiny_env(seed=1), "seed: 0 -> 1"),
]


@pytest.mark.parametrize(("make", "message"), CHANGED)
def test_changed_dataset_template_or_reward_is_refused_before_members_are_restored(
    begun, make, message
):
    with pytest.raises(ValueError, match=f"(?s){message}.*allow_changed_data=True"):
        resume(begun, make(), actor_network=None)  # without a base nothing could be restored


DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message['content'] }}{%"
    " endfor %}="
)


def dated_env(reward_fn):
    tokenizer = copy(shared_tokenizer())
    tokenizer.chat_template = DATED
    return HuggingFaceGym(
        QUESTIONS[:64], QUESTIONS[64:], tokenizer, validation_size=8, reward_fn=reward_fn
    )


class Counting:
    """A reward function with a state that changes with every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, completion, answer, question):
        self.calls += 1
        return len(completion) + self.calls % 2


def test_a_run_with_a_date_in_its_prompts_and_a_counting_reward_resumes_on_another_day(tmp_path):
    reward = Counting()
    env = dated_env(reward)
    today = env.fingerprint()["prompts"]
    env.set_date("2001-02-03T04:05:06")
    started = env.fingerprint()
    assert started["prompts"] != today
    list(evolve(tiny_population(1), env, run_dir=tmp_path, **QUICK | {"generations": 1}))
    assert reward.calls > 0
    for again in (reward, Counting()):  # in the same process, and as in another one
        continued = dated_env(again)
        assert continued.fingerprint()["prompts"] == today
        list(resume(tmp_path, continued, actor_network=tiny_model(), generations=2))
        assert continued.fingerprint() == started


def test_an_allowed_change_is_recorded(begun):
    run = resume(
        begun,
        tiny_env(reward_fn=generous),
        actor_network=tiny_model(),
        allow_changed_data=True,
        generations=4,
    )
    list(run)
    events = read_journal(begun / "journal.jsonl")
    (resumed,) = [event for event in events if event["event"] == "resumed"]
    assert any(change.startswith("reward generous: none -> ") for change in resumed["changed_data"])
    assert [event["data"] for event in events if event["event"] == "run"] == [
        tiny_env().fingerprint()
    ]
    assert open_run(begun).record.data == tiny_env(reward_fn=generous).fingerprint()
    page = html_page(summarise(events))
    assert "changed during the run" in page
    assert "before step 6: reward generous: none -&gt; weight 1" in page
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the allowed change is the new reference
        resume(begun, tiny_env(reward_fn=generous), actor_network=tiny_model(), generations=9)


class Silent:
    """A user environment without a fingerprint."""

    def __init__(self, env):
        self._env = env
        for name in (
            "observation_space",
            "action_space",
            "select_starts",
            "size",
            "make_batch",
            "tokenizer",
        ):
            setattr(self, name, getattr(env, name))


def test_a_missing_fingerprint_warns_once(tmp_path):
    list(
        evolve(
            tiny_population(1), Silent(tiny_env()), run_dir=tmp_path, **QUICK | {"generations": 1}
        )
    )
    assert open_run(tmp_path).record.data is None
    for env, reason in (
        (Silent(tiny_env()), "Silent has no fingerprint"),
        (tiny_env(), "checkpoint"),
    ):
        with pytest.warns(UserWarning, match=reason) as caught:
            resume(tmp_path, env, actor_network=tiny_model(), generations=9)
        assert [each.filename for each in caught] == [__file__]


def test_changed_environment_arguments_are_refused(stored_network_run, tmp_path):
    folder = shutil.copytree(stored_network_run.folder, tmp_path / "run")
    with pytest.raises(ValueError, match="max_episode_steps: 40 -> 11"):
        resume(folder, cart_pole(max_episode_steps=11))
    resume(folder, cart_pole(num_envs=3), generations=9)


def test_changes_are_refused_without_a_baseline(tmp_path):
    options = {
        "generations": 1,
        "steps_per_generation": 4,
        "samples_per_step": 4,
        "options": {"hp_config": None},
    }
    list(step_run(tmp_path, size=1, fitness="rollouts", **options))
    assert open_run(tmp_path).record.run_state.baseline is None
    with pytest.raises(ValueError, match="max_episode_steps: 40 -> 11"):
        resume(tmp_path, cart_pole(max_episode_steps=11))
