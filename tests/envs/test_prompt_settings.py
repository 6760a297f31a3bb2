"""Task settings of prompt datasets: prompts, columns, reward weights, metric and data weights."""

import math
import warnings

import numpy as np
import pytest

from evogrpo import HuggingFaceGym, MultiTurnGym
from evogrpo.config.task_settings import NO_SETTINGS, TaskSettings
from evogrpo.envs.protocol import SupportsTaskSettings, make_batch_for, select_starts_for
from evogrpo.envs.text.environment_gym import EnvironmentGym
from evogrpo.records import single_turn_conversations
from tests.envs.conftest import build
from tests.envs.test_environment_gym import CHAT as TOOLS_CHAT

QA = [
    {"question": f"{n}+1", "answer": str(n + 1), "level": "hard" if n % 3 == 0 else "easy"}
    for n in range(60)
]
CHATS = [{"prompt": [{"role": "user", "content": row["question"]}], **row} for row in QA]
STYLE = {"style": "Be brief."}
BRACES = r'Use {style} and \boxed{answer} {"a": {}} {{x}}.'


def right(completion, answer, question):
    return float(completion == answer)


def length(completion, answer, question, style="none"):
    return len(completion) + 100 * len(style)


def measured(completion, answer, question, unread):
    return float(len(unread))


def single(tokenizer, **options):
    defaults = {"reward_fn": [right, length], "validation_size": 8, "test_size": 8}
    return HuggingFaceGym(QA, None, tokenizer, **(defaults | options))


def texts(env, split, starts, settings=()):
    return [env.tokenizer.decode(ids) for ids in env.make_batch(split, starts, settings).prompts]


def scored(env, split, settings=NO_SETTINGS, completion="7"):
    ids = env.tokenizer([completion], add_special_tokens=False)["input_ids"]
    return env.make_batch(split, [0], [settings]).score(single_turn_conversations([0], ids, [0]))


def chats(tokenizer, **options):
    def lengths(completions, style, **columns):
        lengths.styles = style
        return [float(len(text)) for text in style]

    defaults = {"reward_funcs": lengths, "validation_size": 8, "test_size": 8}
    return HuggingFaceGym(CHATS, None, tokenizer, **(defaults | options)), lengths


# ---- prompts


def test_only_declared_settings_are_fields_of_a_system_prompt(tokenizer):
    env = single(tokenizer, system_prompt=BRACES, settings=STYLE)
    plain = single(tokenizer, system_prompt=BRACES.replace("{style}", STYLE["style"]))
    assert texts(env, "train", range(5)) == texts(plain, "train", range(5))
    member = TaskSettings({"task.style": "{question} {style}"})
    (configured, own) = texts(env, "train", [0, 0], [NO_SETTINGS, member])
    assert own == configured.replace(STYLE["style"], "{question} {style}")
    assert r'\boxed{answer} {"a": {}} {{x}}' in own


def test_templates_read_columns_and_settings(tokenizer):
    template = [{"role": "user", "content": "{style} {level}: {question} {{level}}"}]
    env = single(tokenizer, conversation_template=template, settings=STYLE)
    row = env.make_batch("train", [0]).rows[0]
    expected = f"<u>Be brief. {row['level']}: {row['question']} {{level}}<eos><a>"
    assert texts(env, "train", [0]) == [expected]
    with pytest.raises(ValueError, match="style"):
        single(
            tokenizer,
            conversation_template=[{"role": "user", "content": "{styl} {question}"}],
            settings=STYLE,
        )


def test_a_member_replaces_the_row_and_the_row_the_configured_value(tokenizer):
    env = single(tokenizer, system_prompt="{level}", settings={"level": "?", **STYLE})
    (row,) = env.make_batch("train", [0]).rows
    assert texts(env, "train", [0])[0].startswith(f"<s>{row['level']}<eos>")
    member = TaskSettings({"task.level": "own"})
    batch = env.make_batch("train", [0], [member])
    assert env.tokenizer.decode(batch.prompts[0]).startswith("<s>own<eos>")
    assert batch.rows[0]["level"] == "own"


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("Answer {question}", r"\{question\} stays as it is"),
        (r"Think.\nAnswer.", r"system_prompt: '\\nAnswer\.'"),
    ],
)
def test_texts_of_prompts_that_are_probably_not_meant_are_warned_of(tokenizer, prompt, found):
    with pytest.warns(UserWarning, match=found):
        single(tokenizer, system_prompt=prompt, settings=None)


def test_a_system_prompt_is_one_text(tokenizer):
    with pytest.raises(ValueError, match="system_prompt must be a text, got \\['a', 'b'\\]"):
        single(tokenizer, system_prompt=["a", "b"], settings=None)


def test_latex_is_no_line_break(tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single(tokenizer, system_prompt="1 \\neq 2\n", settings=None)


def test_a_system_prompt_precedes_messages_of_a_column(tokenizer):
    env, lengths = chats(tokenizer, system_prompt="{style}", settings=STYLE)
    member = TaskSettings({"task.style": "Think."})
    batch = env.make_batch("train", [0, 1], [member, NO_SETTINGS])
    prompts = [env.tokenizer.decode(ids) for ids in batch.prompts]
    assert [text.partition("<eos>")[0] for text in prompts] == ["<s>Think.", "<s>Be brief."]
    assert batch.rows[0]["prompt"][0] == {"role": "system", "content": "Think."}
    assert batch.questions[0] == CHATS[0]["prompt"][0]["content"] or batch.questions[0]
    batch.score(single_turn_conversations([0, 0], [[9], [9]], [0, 0]))
    assert lengths.styles == ["Think.", "Think."]


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("text", "system_prompt .* the text 'text'"),
        ([{"role": "system", "content": "Hi."}], "system_prompt .* system message"),
        (["text"], "Row 0 .*: prompt must be"),
    ],
)
def test_prompts_that_a_system_prompt_does_not_fit_are_refused(tokenizer, prompt, named):
    with pytest.raises(ValueError, match=named):
        HuggingFaceGym(
            [{"prompt": prompt}] * 9,
            None,
            tokenizer,
            reward_funcs=lambda completions: [0.0] * len(completions),
            system_prompt="x",
        )


def test_texts_that_exceed_the_maximum_length_are_named(tokenizer):
    """Rows are left out by the configured text."""
    env = single(tokenizer, system_prompt="{style}", settings=STYLE, max_prompt_length=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.check_settings({"task.style": ["Be brief.", "Think."]})
    with pytest.warns(UserWarning, match=r"task\.style.* max_prompt_length=40"):
        env.check_settings({"task.style": ["Be brief.", "Think. " * 10]})


def test_prompts_with_the_longest_text_are_measured(tokenizer):
    env = single(tokenizer, system_prompt="{style}", settings=STYLE)
    before = env.longest_prompt
    env.check_settings({"task.style": ("Be brief.", "Be brief, please.", "")})
    assert env.longest_prompt == before + len(", please")
    assert env.policy_settings == {"task.style"}


# ---- rewards and metric


def test_weights_and_columns_of_members_count_in_training_only(tokenizer):
    env = single(tokenizer, settings=STYLE, metric=right)
    member = TaskSettings({"reward_weights": {"length": 0.5, "right": -1}, "task.style": "xx"})
    scores = scored(env, "train", member)
    assert scores.components["length"].tolist() == [201.0]
    assert scores.rewards.tolist() == [100.5 - scores.components["right"][0]]
    assert scores.weights.tolist() == [[-1.0, 0.5]]
    for split in ("validation", "test"):
        held_out = scored(env, split, member)
        assert list(held_out.components) == ["right"]
        assert held_out.weights.tolist() == [[1.0]]


def test_the_default_metric_is_the_configured_reward(tokenizer):
    env = single(tokenizer, settings=STYLE, reward_weights={"length": 2.0})
    member = TaskSettings({"reward_weights.length": 9.0, "task.style": "xx"})
    scores = scored(env, "validation", member)
    assert scores.components["length"].tolist() == [1 + 100 * len(STYLE["style"])]
    assert scores.weights.tolist() == [[1.0, 2.0]]


def test_only_settings_of_the_prompt_hold_on_held_out_questions(tokenizer):
    env = single(
        tokenizer,
        settings={**STYLE, "hint": "a"},
        system_prompt="{hint}",
        conversation_template=None,
    )
    member = TaskSettings({"task.style": "xx", "task.hint": "b"})
    (row,) = env.make_batch("validation", [0], [member]).rows
    assert (row["style"], row["hint"]) == (STYLE["style"], "b")
    assert texts(env, "validation", [0], [member])[0].startswith("<s>b<eos>")


# ---- data weights


def test_data_weights_are_shares_of_values(tokenizer):
    env = single(tokenizer, data_column="level")
    rows = env.make_batch("train", range(env.size("train"))).rows
    member = TaskSettings({"data_weights.hard": 3.0})
    other = TaskSettings({"data_weights.hard": 0.0})
    selected = [start for step in range(40) for start in env.select_starts(step, 10, 10, member)]
    levels = [rows[start]["level"] for start in selected]
    share = levels.count("hard") / len(levels)
    assert share == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / len(levels)))
    easy = [start for step in range(40) for start in env.select_starts(step, 10, 10, other)]
    assert all(rows[start]["level"] == "easy" for start in easy)
    # Members share the start wherever they get the same value.
    assert all(a == b for a, b in zip(selected, easy, strict=True) if rows[a]["level"] == "easy")
    assert env.select_starts(3, 4, 10, member) == env.select_starts(3, 10, 10, member)[:4]
    assert env.select_starts(3, 4, 10) == single(tokenizer).select_starts(3, 4, 10)
    # All rows of a value are visited.
    assert len(set(easy)) == sum(row["level"] == "easy" for row in rows)


# ---- bad input and fingerprints


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task.styl": ("a", "b")}, "style"),
        ({"task.unread": ("a", "b")}, "task.unread"),
        ({"reward_weights.lengt": (0, 1)}, "length"),
        ({"data_weights.hrd": (0, 1)}, "hard"),
        ({"data_weights.hard": (0, 1), "data_weights.easy": (0, 1)}, "level"),
    ],
)
def test_settings_that_nothing_reads_are_refused(tokenizer, values, message):
    env = single(tokenizer, settings={**STYLE, "unread": "a"}, data_column="level", metric=measured)
    assert isinstance(env, SupportsTaskSettings)
    env.check_settings({"task.style": ("a", "b"), "data_weights.hard": (0, 1)})
    with pytest.raises(ValueError, match=message):
        env.check_settings(values)


@pytest.mark.parametrize(
    ("name", "message"),
    [("task.styl", "task.style"), ("reward_weights.lengt", "length"), ("data_weights.hrd", "hard")],
)
def test_unknown_settings_of_a_member_are_refused(tokenizer, name, message):
    env = single(tokenizer, settings=STYLE, data_column="level")
    with pytest.raises(ValueError, match=message):
        env.make_batch("train", [0], [TaskSettings({name: 1.0})])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_column": "levl"}, "data_column"),
        ({"settings": {"question": "a"}}, "question"),
        ({"settings": {"a b": "a"}}, "a b"),
        ({"settings": {"unread": "a"}}, "unread"),
        ({"settings": {"style": None}}, "style"),
        ({"metric_weights": [1.0]}, "metric"),
        ({"metric": []}, "metric"),
        ({"metric": "right"}, "right"),
        ({"metric": right, "metric_weights": {"rihgt": 1.0}}, "right"),
        ({"reward_weights": {"lenght": 1.0}}, "length"),
    ],
)
def test_invalid_options_are_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        single(tokenizer, **options)


def test_fingerprints_name_settings_and_metric(tokenizer):
    plain = single(tokenizer).fingerprint()
    env = single(tokenizer, settings=STYLE, metric=right, metric_weights=[2.0], data_column="level")
    added = env.fingerprint()
    assert added.keys() - plain.keys() == {
        "metric right",
        "unmeasured setting style",
        "data_column",
    }
    assert {name: added[name] for name in plain} == plain
    # Without a metric, the rewards measure, and one of them reads the setting.
    assert "setting style" in single(tokenizer, settings=STYLE).fingerprint()
    other = single(tokenizer, settings={"style": "x"}, metric=right, data_column="level")
    changed = {name for name, value in other.fingerprint().items() if value != added[name]}
    assert changed == {"metric right", "unmeasured setting style"}


# ---- conversations


def test_settings_are_columns_of_replies_and_arguments_of_resets(tokenizer):
    rows = [{"prompt": [{"role": "user", "content": str(n)}]} for n in range(30)]
    seen = []

    def reply(row, messages):
        seen.append((row["style"], messages[0]))
        return "Go on."

    env = MultiTurnGym(
        rows,
        None,
        tokenizer,
        reply=reply,
        max_turns=2,
        settings=STYLE,
        system_prompt="{style}",
        reward_funcs=lambda completions, **_: [0.0],
        validation_size=4,
        test_size=4,
    )
    member = TaskSettings({"task.style": "Think."})
    env.make_batch("train", [0], [member]).respond(single_turn_conversations([0], [[9]], [0]))
    assert seen == [("Think.", {"role": "system", "content": "Think."})]


class Levels:
    """An environment with a level that a setting chooses."""

    def reset(self, level, prompt):
        self.level = level
        return f" at level {level}"

    def look(self) -> str:
        """Return the level."""
        return str(self.level)

    def get_reward(self) -> float:
        return float(self.level)


@pytest.mark.parametrize(("system_prompt", "held_out"), [(None, 1), ("Level {level}.", 5)])
def test_resets_take_settings_in_training(system_prompt, held_out):
    rows = [{"prompt": [{"role": "user", "content": str(n)}]} for n in range(30)]
    env = EnvironmentGym(
        rows,
        None,
        build(TOOLS_CHAT),
        environment_factory=Levels,
        max_turns=2,
        settings={"level": 1},
        system_prompt=system_prompt,
        validation_size=4,
        test_size=4,
    )
    member = TaskSettings({"task.level": 5})
    env.check_settings({"task.level": (1, 5)})
    for split, level in (("train", 5), ("validation", held_out)):
        batch = env.make_batch(split, [0, 0], [member, NO_SETTINGS])
        own, configured = [env.tokenizer.decode(ids) for ids in batch.prompts]
        assert f"at level {level}" in own
        assert "at level 1" in configured
        assert ("Level 5." in own) == (system_prompt is not None)
        scores = batch.score(single_turn_conversations([0, 1], [[9], [9]], [0, 1]))
        np.testing.assert_array_equal(scores.rewards, [level, 1])
    env.close()


def test_members_with_settings_need_an_environment_that_reads_them(tokenizer):
    member = TaskSettings({"task.style": "short", "data_weights.easy": 2})

    class Without:
        """Environment without task settings."""

    with pytest.raises(ValueError, match=r"Without has no task settings.*task\.style"):
        make_batch_for(Without(), "train", [0], [member])
    with pytest.raises(ValueError, match=r"Without has no task settings"):
        select_starts_for(Without(), 0, 1, 1, member)
