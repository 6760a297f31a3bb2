"""A character-level tokenizer with a chat template."""

import string

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>", "<s>", "<u>", "<a>"]
CHAT = (
    "{% for m in messages %}{{ {'system': '<s>', 'user': '<u>', 'assistant': '<a>'}[m.role] +"
    " m.content }}{{ '<eos>' if m.role != 'assistant' else '' }}{% endfor %}{% if"
    " add_generation_prompt %}<a>{% endif %}"
)


def build(chat_template):
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<s>", "<u>", "<a>"],
        chat_template=chat_template,
    )


@pytest.fixture(scope="session")
def tokenizer():
    return build(CHAT)


@pytest.fixture(scope="session")
def plain_tokenizer():
    return build(None)


@pytest.fixture(scope="session")
def encode(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
