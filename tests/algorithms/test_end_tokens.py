"""Tokens that end a completion: from configurations, the tokenizer and its chat template."""

import pytest
import torch
from transformers import GenerationConfig

from evogrpo import GRPO, HuggingFaceGym, load_base
from tests.tiny_models import EOS, TEMPLATE, VOCABULARY, tiny_model, tiny_tokenizer
from tests.tiny_training import QUESTIONS, tiny_options, variety

CLOSING = 20  # token of the character that closes a turn in the chat template
PROMPT = {"input_ids": torch.tensor([[8, 9]])}
OPTIONS = {"max_output_tokens": 40, "temperature": 2.0, "pad_token_id": EOS}


def base():
    """Return a model whose configurations name different end tokens, one not in the vocabulary."""
    model = tiny_model()
    model.config.eos_token_id = 30
    model.generation_config.eos_token_id = [31, VOCABULARY + 5]
    return model


def closing_tokenizer():
    """Return a tokenizer whose chat template closes turns with another token than its EOS."""
    tokenizer = tiny_tokenizer()
    token = tokenizer.convert_ids_to_tokens(CLOSING)
    tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    assert len(tokenizer) == len(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE.replace("\n", f"{token}\n", 1)
    return tokenizer


def env():
    return HuggingFaceGym(
        QUESTIONS, None, closing_tokenizer(), reward_fn=variety, validation_size=4, test_size=4
    )


def completions(ids, masks, prompt=2):
    """Return the sampled tokens of all rows."""
    rows = []
    for group, mask in zip(ids, masks, strict=True):
        rows += [
            tokens[prompt:][counted[prompt - 1 :]].tolist()
            for tokens, counted in zip(group, mask, strict=True)
        ]
    return rows


def test_completions_end_with_any_end_token():
    gym = env()
    agent = GRPO(
        gym.observation_space, gym.action_space, actor_network=base(), **tiny_options(**OPTIONS)
    )
    rows = completions(*agent.get_action([PROMPT] * 20))
    ends = {30, 31, EOS, CLOSING}
    assert not any(ends & set(row[:-1]) for row in rows)
    assert {row[-1] for row in rows if len(row) < 40} == ends
    options = tiny_options(**OPTIONS, min_output_tokens=40)
    held = GRPO(gym.observation_space, gym.action_space, actor_network=base(), **options)
    assert not any(ends & set(row[:39]) for row in completions(*held.get_action([PROMPT] * 20)))


def test_members_without_spaces_take_the_end_tokens_of_an_environment(tmp_path):
    population = GRPO.population(1, actor_network=base(), **tiny_options(**OPTIONS))
    assert population.members.bank.end_ids.tolist() == [30, 31]
    population.evaluate(env())
    assert population.members.bank.end_ids.tolist() == [EOS, CLOSING, 30, 31]
    population[0].save_checkpoint(tmp_path / "agent")
    loaded = GRPO.load(tmp_path / "agent", actor_network=base())
    assert loaded.members.bank.end_ids.tolist() == [EOS, CLOSING, 30, 31]
    explicit = GRPO.population(1, actor_network=base(), eos_token_ids=5, **tiny_options(**OPTIONS))
    explicit.evaluate(env())
    assert explicit.members.bank.end_ids.tolist() == [5]


def test_rows_of_hand_written_loops_end_with_the_turn():
    gym = env()
    prompts, _ = gym.reset()
    tail = torch.tensor([10, CLOSING, EOS, EOS])  # padded with EOS
    rows = [torch.stack([torch.cat([prompt["input_ids"][0], tail])] * 2) for prompt in prompts]
    *_, values = gym.step(rows)
    character = gym.tokenizer.decode([10])
    assert values["completions"] == [[character, character]] * len(prompts)


def test_hand_written_loops_reward_the_tokens_that_are_learned():
    """Also those after the tokenizer's EOS, if the agent has end tokens of its own."""
    gym = env()
    options = tiny_options(**OPTIONS, eos_token_ids=5)
    agent = GRPO(gym.observation_space, gym.action_space, actor_network=base(), **options)
    prompts, _ = gym.reset()
    ids, masks = agent.get_action(prompts)
    *_, values = gym.step(ids)
    passed_the_end = 0
    for prompt, rows, counted, texts in zip(
        prompts, ids, masks, values["completions"], strict=True
    ):
        learned = completions([rows], [counted], prompt=prompt["input_ids"].shape[1])
        assert texts == [gym.tokenizer.decode(row, skip_special_tokens=True) for row in learned]
        passed_the_end += sum(EOS in row[:-1] for row in learned)
    assert passed_the_end


def test_generated_texts_end_with_the_turn_of_the_tokenizer():
    tokenizer = closing_tokenizer()
    agent = GRPO(actor_network=base(), **tiny_options(**OPTIONS))
    texts = agent.generate(["ab"], tokenizer=tokenizer, n=20, temperature=2.0)
    open_texts = agent.generate(["ab"], tokenizer=tiny_tokenizer(), n=20, temperature=2.0)
    closing = tokenizer.convert_ids_to_tokens(CLOSING)
    assert not any(closing in text for text in texts)
    assert any(closing in text for text in open_texts)


@pytest.mark.parametrize("named", [None, 30])
def test_loaded_bases_name_all_ends(tmp_path, named):
    model = tiny_model()
    model.generation_config.eos_token_id = model.config.eos_token_id = named
    model.save_pretrained(tmp_path / "base")
    closing_tokenizer().save_pretrained(tmp_path / "base")
    loaded = load_base(tmp_path / "base").model
    ends = {EOS, CLOSING, *([] if named is None else [named])}
    assert set(loaded.generation_config.eos_token_id) == ends
    agent = GRPO(actor_network=loaded, full_finetuning=True, pad_token_id=0)
    agent.save_checkpoint(tmp_path / "agent")
    assert set(GenerationConfig.from_pretrained(tmp_path / "agent").eos_token_id) == ends
