"""Step rewards: validation and token positions."""

from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from evogrpo import HuggingFaceGym, StepRewards
from evogrpo.envs.text.prompt_batch import token_positions
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.records import single_turn_conversations

ROWS = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in product(range(3), range(4))]
NAN = np.nan


def scored(tokenizer, *functions, texts, weights=None):
    test = [{"prompt": "9*9", "answer": "81"}]
    env = HuggingFaceGym(ROWS, test, tokenizer, reward_funcs=functions, reward_weights=weights)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return env.make_batch("test", [0]).score(single_turn_conversations([0] * len(ids), ids))


def returning(*values):
    def steps(**_):
        return list(values)

    return steps


def test_all_list_types_are_accepted():
    for make in (list, tuple, np.array, torch.tensor):
        rewards = StepRewards(make([1.0, -0.25]), make([3, 0]))
        assert rewards == StepRewards((1.0, -0.25), (3, 0), "token")
        assert rewards.total == 0.75
    assert StepRewards([], []).total == 0.0
    assert StepRewards([np.float32(1), 1], [torch.tensor(2), np.int8(0)]).positions == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0], []), "one position per value"),
        (([1.0], [0], "word"), "unit of StepRewards"),
        (([float("nan")], [0]), "values of StepRewards"),
        ((["1"], [0]), "values of StepRewards"),
        (([1.0], [-1]), "positions of StepRewards"),
        (([1.0], [0.5]), "positions of StepRewards"),
        ((1.0, [0]), "values of StepRewards"),
        (([1.0], "0"), "positions of StepRewards"),
    ],
)
def test_invalid_step_rewards_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        StepRewards(*arguments)


def test_positions_count_from_the_start_of_the_completion(plain_tokenizer):
    """There is one token per character, and an EOS without text."""
    by_token = StepRewards([1.0, 2.0], [0, 4])
    by_character = StepRewards([1.0, 2.0, 4.0], [1, 3, 1], "character")
    none = StepRewards([], [])
    scores = scored(
        plain_tokenizer, returning(by_token, by_character, none), texts=["abcd<eos>"] * 3
    )
    np.testing.assert_array_equal(
        scores.step_rewards,
        [[1, NAN, NAN, NAN, 2], [NAN, 5, NAN, 2, NAN], [NAN, NAN, NAN, NAN, NAN]],
    )
    assert scores.rewards.tolist() == scores.components["steps"].tolist() == [3.0, 7.0, 0.0]


def test_weights_apply_to_steps_and_scalars_go_to_the_last_token(plain_tokenizer):
    steps = returning(StepRewards([1.0], [0]), None, StepRewards([2.0], [2]))
    scalars = returning(10.0, 20.0, None)
    scores = scored(plain_tokenizer, steps, scalars, texts=["abc", "ab", "abc"], weights=[2.0, 0.5])
    np.testing.assert_array_equal(scores.step_rewards, [[2, NAN, 5], [NAN, 10, NAN], [NAN, NAN, 4]])
    np.testing.assert_array_equal(np.nansum(scores.step_rewards, axis=1), scores.rewards)
    assert scores.weights.tolist() == [[2.0, 0.5]] * len(scores.rewards)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (StepRewards([1.0], [3]), "3 .* 3 tokens: 'ab'"),
        (StepRewards([1.0, 1.0], [0, 2], "character"), "2 .* 2 characters: 'ab'"),
    ],
)
def test_positions_beyond_the_completion_are_refused(plain_tokenizer, rewards, message):
    with pytest.raises(RewardError, match=f"'steps' .*position {message}"):
        scored(plain_tokenizer, returning(rewards), texts=["ab<eos>"])


@pytest.fixture(scope="module")
def byte_level():
    """A byte tokenizer with a few merges: other characters than ASCII have several tokens."""
    raw = ByteLevelBPETokenizer()
    raw.train_from_iterator(
        ["the sum is seven the sum is four"] * 8, vocab_size=280, min_frequency=2
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=RawTokenizer.from_str(raw.to_str()), eos_token="<|e|>"
    )


@pytest.mark.parametrize(
    "text", ["the sum is seven", "the séven 😀 is four 😀", "\n\n", "x" * 40, "日本語"]
)
def test_characters_belong_to_the_token_that_completes_them(byte_level, text):
    """Slow oracle: the shortest token prefix with the complete character."""
    decode = byte_level.decode
    ids = byte_level(text)["input_ids"]
    rewards = StepRewards([1.0] * len(text), range(len(text)), "character")
    for character, token in enumerate(token_positions(rewards, ids, text, decode)):
        prefixes = (
            count
            for count in range(1, len(ids) + 1)
            if decode(ids[:count])[: character + 1] == text[: character + 1]
        )
        assert token == next(prefixes) - 1


def test_spaces_between_words_belong_to_the_next_token():
    raw = RawTokenizer(
        models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2, "<unk>": 3}, unk_token="<unk>")
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    text = "one two three"  # a space before each word, except at the start of the text
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    ends = StepRewards([1.0] * 6, [0, 2, 3, 6, 7, 12], "character")
    assert token_positions(ends, ids, text, tokenizer.decode) == [0, 0, 1, 1, 2, 2]
    rewards = StepRewards([1.0] * 4, [0, 3, 6, 12], "character")
    assert token_positions(rewards, ids, text, tokenizer.decode) == [0, 1, 1, 2]
