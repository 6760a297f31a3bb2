"""`generate`: texts in, texts out."""

import pytest
import torch
from gymnasium.spaces import Box, Discrete

from evogrpo import GRPO, MultiAgentGRPO
from tests.tiny_models import TEMPLATE, tiny_model
from tests.tiny_training import randomise_adapter, shared_tokenizer, state_of, tiny_agent, tiny_population

TEXTS = ["1+2=", "30+4=", "a"]


def one_by_one(agent, text, tokens):
    """Greedy decoding by whole passes over one growing row."""
    tokenizer = shared_tokenizer()
    ids = tokenizer(text)["input_ids"]
    written = []
    while len(written) < tokens and 1 not in written:
        written.append(int(agent.get_policy()(torch.tensor([[*ids, *written]]))[0, -1].argmax()))
    return tokenizer.decode(written, skip_special_tokens=True)


def test_texts_are_continued_greedily():
    population = tiny_population(2)
    for seed, agent in enumerate(population):
        randomise_adapter(agent, seed=seed)
    answers = [agent.generate(TEXTS, shared_tokenizer()) for agent in population]
    for agent, own in zip(population, answers, strict=True):
        assert own == [one_by_one(agent, text, 6) for text in TEXTS]
    assert answers[0] != answers[1]
    assert population[0].generate(TEXTS[:1], shared_tokenizer(), max_output_tokens=2) == [
        one_by_one(population[0], TEXTS[0], 2)
    ]


def test_conversations_use_the_chat_template():
    agent = tiny_agent()
    randomise_adapter(agent)
    conversation = [{"role": "user", "content": "1+2="}]
    assert "{{ m['role'][0] }}:{{ m['content'] }}" in TEMPLATE
    assert agent.generate([conversation], shared_tokenizer()) == agent.generate(["u:1+2=\na:"], shared_tokenizer())


def test_sampled_texts_are_ordered_by_prompt_and_differ_between_calls():
    agent = tiny_agent()
    randomise_adapter(agent, std=0.02)
    before = state_of(agent)
    drawn = [agent.generate(TEXTS, shared_tokenizer(), n=4, temperature=1.0) for _ in range(2)]
    assert [len(texts) for texts in drawn] == [12, 12]
    assert drawn[0] != drawn[1]
    assert len(set(drawn[0][:4])) > 1
    assert agent.generate(TEXTS, shared_tokenizer(), n=2, temperature=0.0)[::2] == agent.generate(
        TEXTS, shared_tokenizer()
    )
    same = tiny_agent()
    randomise_adapter(same, std=0.02)
    assert same.generate(TEXTS, shared_tokenizer(), n=4, temperature=1.0) == drawn[0]
    assert agent.steps == 0
    assert all(torch.equal(values, state_of(agent)[name]) for name, values in before.items())


def test_the_tokenizer_is_loaded_from_the_bases_source(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    base = type(tiny_model()).from_pretrained(tmp_path)
    agent = GRPO(actor_network=base, pad_token_id=0, max_output_tokens=4)
    with pytest.raises(ValueError, match=r"base model .* cannot be loaded"):
        agent.generate(TEXTS)
    shared_tokenizer().save_pretrained(tmp_path)
    assert agent.generate(TEXTS) == agent.generate(TEXTS, shared_tokenizer())


def test_a_path_in_a_checkpoint_is_not_followed_for_a_tokenizer(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    shared_tokenizer().save_pretrained(tmp_path / "base")
    base = type(tiny_model()).from_pretrained(tmp_path / "base")
    GRPO(actor_network=base, pad_token_id=0).save_checkpoint(tmp_path / "agent", include_base=True)
    with pytest.raises(ValueError, match="tokenizer"):
        GRPO.load(tmp_path / "agent").generate(TEXTS)


@pytest.mark.parametrize(
    ("prompts", "options", "rule"),
    [
        ("1+2=", {}, "prompts"),
        ([{"role": "user", "content": "1"}], {}, "prompts"),
        ([[{"role": "user"}]], {}, "a prompt must be a non-empty list of"),
        (["1", [{"role": "user", "content": "1"}]], {}, "generate"),
        ([3], {}, "a prompt must be a non-empty list of"),
        ([""], {}, "generate"),
        (["1" * 200], {}, "the model's context is 128"),
        (["1"], {"n": 0}, "n must be a whole number of at least 1"),
        (["1"], {"n": 1.5}, "n must be a whole number of at least 1"),
        (["1"], {"temperature": -1.0}, "temperature"),
        (["1"], {"temperature": float("nan")}, "temperature"),
        (["1"], {"max_output_tokens": 0}, "max_output_tokens must be a whole number of at least 1"),
    ],
)
def test_invalid_arguments_raise(prompts, options, rule):
    with pytest.raises(ValueError, match=rule):
        tiny_agent().generate(prompts, shared_tokenizer(), **options)


def test_no_prompts_give_no_texts():
    assert tiny_agent().generate([]) == []


def test_small_networks_raise():
    with pytest.raises(ValueError, match="generate"):
        GRPO(Box(-1.0, 1.0, (2,)), Discrete(2)).generate(TEXTS)
    with pytest.raises(ValueError, match="generate"):
        MultiAgentGRPO({"a": Box(-1.0, 1.0, (2,))}, {"a": Discrete(2)}).generate(TEXTS)
