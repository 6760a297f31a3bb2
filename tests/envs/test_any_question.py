"""Questions of any type, and chat template options."""

import json

import pytest

from evogrpo import HuggingFaceGym
from evogrpo.data import single_turn_conversations
from tests.envs.conftest import build
from tests.tiny_training import shared_tokenizer, tiny_agent, tiny_run

TOOLS = (
    "{% for m in messages %}<u>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<u>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<a>"
    "{% if not enable_thinking | default(true) %}</think>{% endif %}{{ style | default('') }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def right(completion, answer, question):
    return float(completion == str(answer))


def rows(make, count=12):
    return [{"question": make(n), "answer": n} for n in range(count)]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [n, 2, 3],
        lambda n: {"nums": [n], "target": n},
        lambda n: [],
        lambda n: [{"role": "user", "content": str(n)}],
        lambda n: f"{n} \N{SNOWMAN} \u202e {{answer}}",
    ],
)
@pytest.mark.filterwarnings("ignore:rows were left out")
def test_questions_may_be_any_json_value(tokenizer, make):
    table = rows(make)
    test = [{"question": make(n), "answer": n} for n in (100, 101)]
    table.append({"question": "z", "answer": "z"})
    table += [{"question": f"{n}", "answer": n} for n in range(50, 60)]
    seen = []

    def reward(completion, answer, question):
        seen.append(question)
        return 1.0

    env = HuggingFaceGym(json.loads(json.dumps(table)), test, tokenizer, reward_fn=reward, validation_size=2)
    opened = env.open("test", [0])
    assert opened.questions == (str(make(100)),)
    opened.score(single_turn_conversations([0], [[3]]))
    assert seen == [make(100)]


def test_number_lists_train_test_and_evolve():
    env = HuggingFaceGym(rows(lambda n: [n, 2]), None, shared_tokenizer(), reward_fn=right)
    assert tiny_agent().test(env) in (0.0, 1.0)
    reports = list(tiny_run(None, size=1, env=env, generations=1, steps_per_generation=1, options={"hp_config": None}))
    assert reports[0].examples[0].prompt.startswith("[")


@pytest.mark.parametrize("missing", [None, float("nan"), "  \n"])
@pytest.mark.parametrize("form", ["question", "prompt"])
def test_missing_questions_are_refused(tokenizer, plain_tokenizer, missing, form):
    table = [{form: f"{n}?", "answer": n} for n in range(9)]
    table[4] = {form: missing, "answer": 4}
    options = {"reward_fn": right} if form == "question" else {"reward_funcs": lambda completions, **_: [0.0]}
    with pytest.raises(ValueError, match=f"Row 4 of train_dataset .*{form}"):
        HuggingFaceGym(table, None, tokenizer if form == "question" else plain_tokenizer, **options)


def test_incomplete_characters_are_refused(tokenizer):
    table = rows(lambda n: json.loads('"\\ud83d"') if n == 3 else n)
    with pytest.raises(ValueError, match="row 3 of train_dataset"):
        HuggingFaceGym(table, None, tokenizer, reward_fn=right)


def talk(number, **more):
    calls = {"role": "assistant", "tool_calls": [CALL], **more}
    return {"prompt": [{"role": "user", "content": f"{number}?"}, calls, {"role": "tool", "content": "2"}]}


def zero(completions, **_):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tool_calls_reach_the_template(content):
    tokenizer = build(TOOLS)
    env = HuggingFaceGym([talk(n, **content) for n in range(9)], None, tokenizer, reward_funcs=zero)
    opened = env.open("train", [0])
    text = tokenizer.decode(opened.prompts[0])
    assert json.loads(text[text.index("[{") : text.index("}]") + 2]) == [CALL]
    assert opened.questions[0].endswith("?")


def test_templates_without_tool_calls_are_refused(tokenizer):
    table = [*({"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(9)), talk(1)]
    table[-1]["prompt"].pop()
    with pytest.raises(ValueError, match=r"row 9 of train_dataset .*tool_calls"):
        HuggingFaceGym(table, None, tokenizer, reward_funcs=zero)


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "x"}, "x"])
def test_messages_without_content_are_refused(tokenizer, message):
    with pytest.raises(ValueError, match=r"role.*content"):
        HuggingFaceGym([{"prompt": [message]}] * 3, None, tokenizer, reward_funcs=zero)


def test_template_options_of_a_row_override_those_of_the_environment():
    tokenizer = build(THINKING)
    table = [{"question": f"{n}", "answer": n, "chat_template_kwargs": None} for n in range(12)]
    own = {"enable_thinking": True, "style": "!"}
    test = [
        {"question": "a", "answer": 1, "chat_template_kwargs": None},
        {"question": "b", "answer": 1, "chat_template_kwargs": own},
    ]

    def prompts(**options):
        env = HuggingFaceGym(table, test, tokenizer, reward_fn=right, **options)
        return [tokenizer.decode(prompt) for prompt in env.open("test", [0, 1]).prompts]

    assert prompts() == ["<u>a<eos><a>", "<u>b<eos><a>!"]
    silent = prompts(chat_template_kwargs={"enable_thinking": False})
    assert silent == ["<u>a<eos><a></think>", "<u>b<eos><a>!"]


@pytest.mark.parametrize(
    ("options", "message"),
    [([], "chat_template_kwargs"), ({"tokenize": True}, "chat_template_kwargs .*tokenize")],
)
def test_invalid_template_options_are_refused(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceGym(rows(str), None, tokenizer, reward_fn=right, chat_template_kwargs=options)
