"""HuggingFaceGym: forms of datasets and rewards, questions, template options, bad arguments."""

import json
from itertools import product

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from evogrpo import HuggingFaceGym
from evogrpo.envs.protocol import SPLITS
from evogrpo.envs.text.datasets import tables_by_split
from evogrpo.records import single_turn_conversations
from tests.envs.conftest import build

QA = [
    {"question": f"{a}+{b}?", "answer": str(a + b), "level": a}
    for a, b in product(range(6), range(5))
]
HELD_OUT = [{"question": f"{a}*{a}?", "answer": str(a * a), "level": a} for a in range(4)]
TEMPLATE = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Q: {question}"}]


def exact(completion, answer, question):
    return float(completion == str(answer))


def zero(completions, **_):
    return [0.0 for _ in completions]


def agilerl(tokenizer, train=QA, test=HELD_OUT, **options):
    return HuggingFaceGym(train, test, tokenizer, **{"reward_fn": exact, **options})


def user(text):
    return [{"role": "user", "content": text}]


def test_contents_may_be_lists_of_text_parts(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "+b?", "image": None}]
    rows = [{"prompt": [{"role": "user", "content": [*parts, f"{n}"]}]} for n in range(9)]
    env = HuggingFaceGym(rows, None, tokenizer, reward_funcs=zero)
    batch = env.make_batch("train", [0])
    assert tokenizer.decode(batch.prompts[0]) == f"<u>{batch.questions[0]}<eos><a>"
    assert batch.questions[0].startswith("a+b?")
    other = {"type": "reasoning", "text": "a"}
    for part in ({"type": "image"}, other):
        rows = [{"prompt": [{"role": "user", "content": [part]}]}] * 9
        with pytest.raises(ValueError, match=rf"Row 0.*prompt.*text.*{part['type']}"):
            HuggingFaceGym(rows, None, tokenizer, reward_funcs=zero)
    # A generator is no dataset, but its function makes a streamed one.
    with pytest.raises(ValueError, match=r"IterableDataset\.from_generator"):
        HuggingFaceGym((row for row in rows), None, tokenizer, reward_funcs=zero)


@pytest.mark.parametrize("skip", [True, False])
def test_rewards_see_special_tokens_on_request(tokenizer, encode, skip):
    seen = []

    def keep(completion, answer, question):
        seen.append(completion)
        return 1.0

    env = agilerl(tokenizer, reward_fn=keep, skip_special_tokens=skip)
    scores = env.make_batch("train", [0]).score(single_turn_conversations([0], [encode("7<eos>")]))
    assert seen == list(scores.completions) == ["7" if skip else "7<eos>"]
    assert ("skip_special_tokens" in env.fingerprint()) is not skip


# ---- tables


class Frame:
    """Interface of polars data frames."""

    def __init__(self, rows):
        self._rows = rows

    def to_dicts(self):
        return self._rows


ROWS = [
    {"question": f"{n}?", "answer": n, "hint": None if n % 2 else [n, n + 1]} for n in range(20)
]
FORMS = {
    "datasets": datasets.Dataset.from_list,
    "pandas": pd.DataFrame,
    "pandas read back": lambda rows: pa.Table.from_pylist(rows).to_pandas(),
    "polars": Frame,
    "pyarrow": pa.Table.from_pylist,
    "datasets with tensors": lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
    "datasets with a transform": (
        lambda rows: datasets.Dataset.from_list(rows).with_transform(lambda batch: batch)
    ),
    "splits": lambda rows: {"train": rows},
    "DatasetDict": lambda rows: datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}),
}


def questions_of(env):
    opened = {split: env.make_batch(split, range(env.size(split))) for split in SPLITS}
    return {
        split: list(zip(each.questions, each.prompts, each.rows, strict=True))
        for split, each in opened.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_all_table_types_give_the_same_environment(tokenizer, form):
    def typed(completion, answer, question):
        assert type(answer) is int
        return float(answer)

    sizes = {"validation_size": 2, "test_size": 3, "reward_fn": typed}
    env = HuggingFaceGym(FORMS[form](ROWS), None, tokenizer, **sizes)
    plain = HuggingFaceGym(ROWS, None, tokenizer, **sizes)
    assert questions_of(env) == questions_of(plain)
    assert env.fingerprint() == plain.fingerprint()
    env.preflight()


def test_mappings_of_splits_are_accepted(tokenizer):
    parts = {"train": ROWS[:10], "validation": ROWS[10:12], "test": ROWS[12:15], "other": ROWS[15:]}
    with pytest.warns(UserWarning, match="'other'"):
        env = agilerl(tokenizer, parts, None)
    assert [env.size(split) for split in SPLITS] == [10, 2, 3]
    for train, test, message in [
        ({"train": ROWS, "test": ROWS}, ROWS[12:15], r"train_dataset .*test_dataset"),
        ({"train_sft": ROWS}, None, r"train_dataset .*mapping"),
        (ROWS, {"test": ROWS}, r"test_dataset .*mapping"),
    ]:
        with pytest.raises(ValueError, match=message):
            agilerl(tokenizer, train, test)


def test_values_of_frames_become_plain(tokenizer):
    """Missing values become None, arrays lists; so do messages and columns."""
    frame = pd.DataFrame({"x": [1.5, np.nan], "y": [np.array([[1, 2]]), 0]})
    rows = tables_by_split(frame, None, None)["train"]
    assert list(rows) == [{"x": 1.5, "y": [[1, 2]]}, {"x": None, "y": 0}]

    def level(completions, level, **_):
        return [float(each) for each in level]

    arrays = [{"prompt": np.array(user(f"{n}")), "level": np.int64(n)} for n in range(9)]
    lists = [{"prompt": user(f"{n}"), "level": n} for n in range(9)]
    env = HuggingFaceGym(arrays, None, tokenizer, reward_funcs=level)
    plain = HuggingFaceGym(lists, None, tokenizer, reward_funcs=level)
    assert env.fingerprint() == plain.fingerprint()
    assert env.make_batch("train", [0]).questions[0].isdigit()
    env.preflight()


# ---- forms of rewards


def test_agilerl_form_renders_and_rewards(tokenizer, plain_tokenizer, encode):
    env = agilerl(tokenizer, conversation_template=TEMPLATE)
    assert env.size("train") + env.size("validation") == 30
    episodes = env.make_batch("test", [3, 1])
    assert episodes.questions == ("3*3?", "1*1?")  # without the template
    assert episodes.prompts == (
        encode("<s>Add.<eos><u>Q: 3*3?<eos><a>"),
        encode("<s>Add.<eos><u>Q: 1*1?<eos><a>"),
    )
    texts = [encode(text) for text in ("1<eos>", "9<eos>", "0<eos>", "9")]
    scores = episodes.score(single_turn_conversations([1, 0, 1, 0], texts))
    assert scores.rewards.tolist() == scores.components["exact"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert scores.completions == ("1", "9", "0", "9")
    plain = agilerl(plain_tokenizer).make_batch("test", [0])  # plain text without a chat template
    assert plain_tokenizer.decode(plain.prompts[0]) == "0*0?"


def test_the_question_of_a_conversation_is_its_last_user_message(tokenizer):
    turns = [
        ("system", "Be brief."),
        ("user", "early"),
        ("assistant", "yes"),
        ("user", "late"),
        ("assistant", "So"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    env = HuggingFaceGym(
        [{"prompt": user(text)} for text in "abc"],
        [{"prompt": messages}],
        tokenizer,
        reward_funcs=zero,
    )
    assert env.make_batch("test", [0]).questions == ("late",)


# ---- questions and template options


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [n, 2, 3],
        lambda n: {"nums": [n], "target": n},
        lambda n: [{"role": "user", "content": str(n)}],
        lambda n: f"{n} \N{SNOWMAN} \u202e {{answer}}",
    ],
)
def test_questions_may_be_any_json_value(tokenizer, make):
    table = [{"question": make(n), "answer": n} for n in range(12)]
    test = [{"question": make(n), "answer": n} for n in (100, 101)]
    seen = []

    def reward(completion, answer, question):
        seen.append(question)
        return 1.0

    mixed = [*json.loads(json.dumps(table)), {"question": [], "answer": "z"}]
    opened = HuggingFaceGym(mixed, test, tokenizer, reward_fn=reward).make_batch("test", [0])
    assert opened.questions == (str(make(100)),)
    opened.score(single_turn_conversations([0], [[3]]))
    assert seen == [make(100)]


TOOLS = (
    "{% for m in messages %}<u>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{%"
    " endif %}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<u>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{%"
    " if not enable_thinking | default(true) %}</think>{% endif %}{{ style | default('') }}{%"
    " endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def calling(number, **more):
    return [*user(f"{number}?"), {"role": "assistant", "tool_calls": [CALL], **more}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_calls_reach_the_template(content):
    tokenizer = build(TOOLS)
    rows = [
        {"prompt": [*calling(n, **content), {"role": "tool", "content": "2"}]} for n in range(9)
    ]
    opened = HuggingFaceGym(rows, None, tokenizer, reward_funcs=zero).make_batch("train", [0])
    text = tokenizer.decode(opened.prompts[0])
    assert json.loads(text[text.index("[{") : text.index("}]") + 2]) == [CALL]
    assert opened.questions[0].endswith("?")


def test_template_options_of_a_row_override_those_of_the_environment():
    tokenizer = build(THINKING)
    table = [{"question": f"{n}", "answer": n, "chat_template_kwargs": None} for n in range(12)]
    row_options = {"enable_thinking": True, "style": "!"}
    test = [
        {**table[0], "question": "a"},
        {**table[0], "question": "b", "chat_template_kwargs": row_options},
    ]

    def prompts(**options):
        env = agilerl(tokenizer, table, test, **options)
        return [tokenizer.decode(prompt) for prompt in env.make_batch("test", [0, 1]).prompts]

    assert prompts() == ["<u>a<eos><a>", "<u>b<eos><a>!"]
    silent = prompts(chat_template_kwargs={"enable_thinking": False})
    assert silent == ["<u>a<eos><a></think>", "<u>b<eos><a>!"]


# ---- invalid arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward_fn": None, "reward_funcs": zero}, r"columns \['prompt'\], got"),
        ({"on_reward_error": "skip"}, "got 'skip'"),
        ({"reward_timeout": "5"}, "reward_timeout .*'5'"),
        ({"test_size": 3}, "test_size .*test_dataset"),
        ({"validation_size": 30}, "validation_size .* 30"),
        ({"conversation_template": user("{question} {prompt}")}, "conversation_template 'prompt'"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "enable_thinking"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs .*{name}")
            for name in ("tokenize", "messages")
        ),
        ({"train": None}, "train_dataset"),
        ({"test": [{"question": "a"}]}, "test_dataset .*columns"),
        ({"validation_dataset": [{"prompt": "a"}]}, "validation_dataset .*columns"),
        ({"train": [*QA, {"question": "x", "answer": ""}]}, "Row 30"),
        ({"train": [*QA, None]}, "Row 30 .* None"),
        ({"train": QA[:1]}, "1 question .*validation_dataset"),
        ({"train": [QA[0]] * 9}, "1 question .* 8 duplicates"),
        ({"train": {"test": QA}}, "without train"),
        ({"reward_workers": 10**6}, "reward_workers .* 1000000"),
        ({"max_prompt_length": 1}, "too long.*max_prompt_length=1"),
        ({"tokenizer": "gpt2"}, "tokenizer .*'gpt2'"),
    ],
)
def test_invalid_arguments_are_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        agilerl(**{"tokenizer": tokenizer, **options})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *(
            ({"question": missing}, "Row 30 .* of train_dataset has no question")
            for missing in (None, np.nan, "  \n")
        ),
        *(
            ({"answer": missing}, "Row 30 .* of train_dataset has no answer")
            for missing in (None, np.nan)
        ),
        ({"question": b"1+1"}, "Row 30 .*question.* bytes"),
        ({"answer": b"2"}, "Row 30 .*answer.* bytes"),
        ({"question": "\ud83d"}, "Row 30 "),
    ],
)
def test_invalid_rows_are_refused(tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        agilerl(tokenizer, [*QA, {"question": "1?", "answer": "1", "level": 0, **row}])


@pytest.mark.parametrize(
    "write", [json.dumps, str, lambda messages: json.dumps(messages, indent=1)]
)
def test_messages_written_as_text_are_refused(tokenizer, write):
    rows = [{"prompt": write(user(f"{n}?"))} for n in range(12)]
    with pytest.raises(ValueError, match=r"Row 0 .*prompt"):
        HuggingFaceGym(rows, None, tokenizer, reward_funcs=zero)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "Row 9 .*prompt"),
        ("  ", "Row 9 .*prompt"),
        ([{"role": "user"}], "role.*content"),
        ([{"content": "x"}], "role.*content"),
        (["x"], "role.*content"),
        ([{"role": "asistant", "content": "x"}], "role.*assistant"),
        (calling(1), "Row 9 .*tool_calls"),
    ],
)
def test_invalid_prompts_are_refused(tokenizer, prompt, message):
    rows = [{"prompt": user(f"{n}")} for n in range(9)]
    with pytest.raises(ValueError, match=message):
        HuggingFaceGym([*rows, {"prompt": prompt}], None, tokenizer, reward_funcs=zero)
