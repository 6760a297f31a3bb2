"""Stop strings: where they end completions, in both samplers, loops and conversations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from evogrpo import GRPO, MultiTurnGym, Objective
from evogrpo.members.language import sampling
from evogrpo.members.language.vllm_sampler import VLLMSampler
from evogrpo.stop_strings import StopStrings
from evogrpo.testing.samplers import example_replies, make_rows, next_turn
from tests.members.test_sampling import FIELDS, sample_with_reports, tokens_of
from tests.rounding import LOG_PROB
from tests.tiny_batches import tiny_bank
from tests.tiny_models import tiny_model
from tests.tiny_training import (
    QUESTIONS,
    shared_tokenizer,
    tiny_agent,
    tiny_env,
    tiny_options,
    tiny_population,
)
from tests.vllm_server import VLLMServer

WORDS = ["\n", "Q", ":", "\nQ", "Q: ", "é", "日", "stop", " s", "to", "p", "<end>"]
DIGITS = tuple("0123456789")
"""About a sixth of the tokens of the tiny tokenizer."""


def byte_tokenizer():
    """Return a tokenizer of bytes and of some words, one of them a special token."""
    as_characters = ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = dict.fromkeys(sorted(ByteLevel.alphabet()))
    for word in WORDS:
        vocabulary[as_characters.pre_tokenize_str(word)[0][0]] = None
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


BYTES = byte_tokenizer()


def stops(*texts):
    return StopStrings(texts=texts, tokenizer=shared_tokenizer())


def shortest_prefix(tokens, texts, tokenizer):
    """Return the first tokens whose text contains a stop string, found token by token."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], clean_up_tokenization_spaces=False)
        if any(stop in text for stop in texts):
            return tokens[:count]
    return None


@given(
    tokens=st.lists(st.integers(250, len(BYTES) - 1) | st.integers(0, 255), max_size=30),
    texts=st.lists(st.sampled_from(["\nQ:", "stop", "日", "é", ": ", "<end>"]), min_size=1),
    every=st.integers(1, 9),
)
def test_an_end_does_not_depend_on_how_often_it_is_looked_for(tokens, texts, every):
    stop_strings = StopStrings(texts=tuple(texts), tokenizer=BYTES)
    expected = shortest_prefix(tokens, texts, BYTES)
    found = None
    for checked in range(0, len(tokens), every):
        start = stop_strings.first_unchecked(checked)
        end = stop_strings.end_of(tokens[start : checked + every])
        if end is not None:
            found = tokens[: start + end]
            break
    assert found == expected


def test_completions_end_with_the_first_token_that_completes_a_stop_string(monkeypatch):
    """Rows are cut as if each was decoded after every token, together as alone."""
    bank = tiny_bank()
    texts = ("3", "ab", "H\n", *DIGITS[5:])
    rows = make_rows(range(3), tokens=20)
    whole = bank.sample(rows)
    stopping = replace(rows, stop_strings=stops(*texts), keep=True)
    expected = []
    for tokens in tokens_of(whole):
        expected.append(shortest_prefix(tokens, texts, shared_tokenizer()) or tokens)
    got, reports = sample_with_reports(bank, stopping)
    assert tokens_of(got) == expected
    assert {row: tokens for row, tokens, _ in reports} == dict(enumerate(expected))
    was_cut = got.present.sum(1) < whole.present.sum(1)
    assert 0 < int(was_cut.sum()) < len(rows)
    assert torch.equal(got.truncated[~was_cut], whole.truncated[~was_cut])
    assert not got.truncated[was_cut].any()
    log_probs = whole.log_probs * got.present
    torch.testing.assert_close(got.log_probs, log_probs, rtol=LOG_PROB, atol=LOG_PROB)
    assert not got.actions[~got.present].any()
    # A further turn continues from the caches of rows that were cut.
    replies = example_replies(rows, 0)
    second = next_turn(stopping, got, replies)
    kept = bank.sample(second)
    again = bank.sample(replace(second, kept=None, kept_rows=None))
    for field in FIELDS:
        assert torch.equal(getattr(kept, field), getattr(again, field))
    # Other intervals and batches.
    monkeypatch.setattr(sampling, "CHECK_EVERY", 3)
    for row in (0, 7, 20):
        alone = bank.sample(stopping.select(torch.tensor([row])))
        assert tokens_of(alone) == [expected[row]]


def test_a_stop_string_at_the_maximum_length_is_no_truncation():
    bank = tiny_bank()
    rows = make_rows([0], tokens=2, greedy=True).select(torch.tensor([0]))
    tokens = tokens_of(bank.sample(rows))[0]
    text = shared_tokenizer().decode(tokens)
    assert len(text) == 2
    rollout = bank.sample(replace(rows, stop_strings=stops(text)))
    assert tokens_of(rollout) == [tokens]
    assert rollout.truncated.tolist() == [False]


@pytest.mark.parametrize("extra", [0, 2])
def test_vllm_gets_the_stop_strings(extra, tmp_path):
    """A server may sample some tokens more than it needs, as with speculative decoding."""
    server = VLLMServer(tiny_model(), tokenizer=shared_tokenizer())
    bank = tiny_bank()
    rows = replace(make_rows(range(3), tokens=30), uniforms=None, max_new_tokens=30)

    def fault(body, answer):
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop" and choice["stop_reason"] != 1:
                choice["token_ids"] += [20] * extra
                choice["logprobs"]["token_logprobs"] += [-1.0] * extra
        return answer

    try:
        sampler = VLLMSampler(server.url, tmp_path, timeout=20.0)
        sampler.connect(bank)
        server.fault = fault
        rollout = sampler.sample(replace(rows, stop_strings=stops(*DIGITS)))
    finally:
        server.stop()
    assert server.posts("/v1/completions")[-1]["stop"] == list(DIGITS)
    texts = [shared_tokenizer().decode(tokens) for tokens in tokens_of(rollout)]
    ended = [text[-1] in DIGITS for text in texts]
    assert sum(ended) > len(rows) / 2
    assert not any(character in DIGITS for text in texts for character in text[:-1])
    assert not rollout.truncated[torch.tensor(ended)].any()


def test_agents_sample_learn_evaluate_and_generate_up_to_stop_strings():
    env = tiny_env()
    agent = GRPO(
        env.observation_space,
        env.action_space,
        actor_network=tiny_model(),
        objective=Objective(mask_truncated=True),
        **tiny_options(stop_strings=DIGITS, max_output_tokens=30, temperature=1.5),
    )
    # 1. A hand-written loop, before any environment was opened by the agent.
    ids, masks = agent.get_action(env.reset()[0])
    lengths = [mask.sum(1) for mask in masks]
    assert min(int(length.min()) for length in lengths) < 30
    rewards = torch.rand(len(ids), 4)
    report = agent.learn((ids, masks, rewards))
    truncated = torch.cat(lengths) == 30
    assert report.metrics["completions/clipped_ratio"] == pytest.approx(truncated.float().mean())
    # 2. Texts.
    texts = agent.generate(["ab"], n=20, temperature=1.5, tokenizer=shared_tokenizer())
    assert any(text[-1] in DIGITS for text in texts)
    assert not any(character in DIGITS for text in texts for character in text[:-1])
    # 3. Training and evaluation.
    population = GRPO.population(
        1, actor_network=tiny_model(), **tiny_options(stop_strings="5", max_output_tokens=40)
    )
    seen = []

    def reward(completion, answer, question):
        seen.append(completion)
        return float(len(completion))

    env = tiny_env(reward_fn=reward)
    population.collect(env, step=0, samples_per_step=24, starts_per_step=6)
    population.evaluate(env)
    assert any("5" in text for text in seen)
    assert not any("5" in text[:-1] for text in seen)


def test_turns_of_conversations_end_with_stop_strings():
    turns = []

    def reply(row, messages):
        turns.append(messages[-1]["content"])
        return "go on"

    env = MultiTurnGym(
        [{"prompt": [{"role": "user", "content": row["question"]}]} for row in QUESTIONS],
        None,
        shared_tokenizer(),
        reply=reply,
        max_turns=3,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        validation_size=4,
    )
    population = GRPO.population(
        1, actor_network=tiny_model(), **tiny_options(stop_strings=DIGITS, max_output_tokens=12)
    )
    rollout = population.collect(env, step=0, samples_per_step=24, starts_per_step=6)
    assert turns
    assert sum(turn[-1:] in DIGITS for turn in turns) > len(turns) / 2
    assert not any(character in DIGITS for turn in turns for character in turn[:-1])
    assert bool(rollout.experience["default"].action_mask.any())


def test_a_minimum_length_is_refused():
    with pytest.raises(ValueError, match=r"stop_strings .*min_output_tokens"):
        tiny_agent(stop_strings="5", min_output_tokens=2)


def test_stop_strings_that_no_token_can_spell_are_warned_of():
    population = tiny_population(1, stop_strings=["1", "日", r"\n1"])
    with pytest.warns(UserWarning, match="stop_strings") as found:
        population.members.check(tiny_env())
    unwritable, no_line_break = (str(each.message) for each in found)
    assert "日" in unwritable
    assert "'1'" not in unwritable
    assert r"'\n1'" in no_line_break
