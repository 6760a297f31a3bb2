"""Chat templates: tokens that end a turn, and limits of rendering."""

import pytest

from evogrpo import chat_templates
from evogrpo.chat_templates import QUESTION, end_of_turn_ids, render_chat
from tests.envs.conftest import CHAT, SPECIAL, build

EOS = SPECIAL.index("<eos>")
U = SPECIAL.index("<u>")
TURNS = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
OPEN = "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
OPEN_OR_EOS = OPEN.replace("{% endif %}", "{% else %}<eos>{% endif %}")
LAST = "{% if loop.last and not add_generation_prompt %}<eos>{% else %}<u>{% endif %}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, {EOS}),
        (CHAT, {EOS}),  # assistant messages have no end
        (f"{TURNS}<u>\n{{% endfor %}}{OPEN}", {EOS, U}),  # ChatML
        (f"{TURNS} <u>{{% endfor %}}{OPEN}", {EOS, U}),
        # Two markers: the turn ends with the second.
        (f"{TURNS}<a><u>\n{{% endfor %}}{OPEN}", {EOS, U}),
        # Phi: the conversation ends with EOS, unless a further turn begins.
        (f"{TURNS}<u>\n{{% endfor %}}{OPEN_OR_EOS}", {EOS, U}),
        # gpt-oss: the last message ends with EOS, others with another token.
        (f"{TURNS}{LAST}{{% endfor %}}{OPEN}", {EOS}),
        (f"{TURNS}END\n{{% endfor %}}{OPEN}", {EOS}),  # ordinary text
        ("{{ raise_exception('no') }}", {EOS}),
        ("nothing", {EOS}),
    ],
)  # fmt: skip
def test_end_of_turn_tokens(template, ends):
    assert set(end_of_turn_ids(build(template), {})) == ends


@pytest.mark.parametrize(
    "template", [LOOP, f"{{% macro loop() %}}{LOOP}{{% endmacro %}}{{{{ loop() }}}}"]
)
def test_endless_templates_are_refused(monkeypatch, template):
    monkeypatch.setattr(chat_templates, "RENDER_SECONDS", 0.1)
    with pytest.raises(ValueError, match="chat_template"):
        render_chat(build(template), [QUESTION])
    with pytest.raises(ValueError, match="chat_template"):
        end_of_turn_ids(build(template), {})


def test_huge_texts_are_refused():
    template = "{% for i in range(99999) %}{{ 'a long text that is repeated, ' * 20 }}{% endfor %}"
    with pytest.raises(ValueError, match="chat_template"):
        render_chat(build(template), [QUESTION])
