"""reset, step and eval_mode of HuggingFaceGym."""

import copy
from itertools import product

import pytest
import torch

from evogrpo.envs.text.huggingface_gym import HuggingFaceGym

QA = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in product(range(6), range(5))]
HELD_OUT = [{"question": f"{a}*{a}?", "answer": str(a * a)} for a in range(5)]
ANSWERS = {row["question"]: row["answer"] for row in QA + HELD_OUT}


def exact(completion, answer, question):
    return float(completion == answer)


@pytest.fixture
def env(tokenizer):
    validation = [{"question": "v", "answer": ""}]
    options = {"validation_dataset": validation, "data_batch_size": 3}
    return HuggingFaceGym(QA, HELD_OUT, tokenizer, reward_fn=exact, **options)


def questions_of(env, prompts):
    return [
        env.tokenizer.decode(prompt["input_ids"][0], skip_special_tokens=True) for prompt in prompts
    ]


def respond(env, prompts, *texts):
    """Return groups of padded completions with these texts; "=" is replaced by the right answer."""
    groups = []
    for prompt, question in zip(prompts, questions_of(env, prompts), strict=True):
        rows = [
            env.tokenizer((ANSWERS.get(question, "") if t == "=" else t) + "<eos>")["input_ids"]
            for t in texts
        ]
        width = max(map(len, rows))
        pad = env.tokenizer.pad_token_id
        padded = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
        groups.append(torch.cat([prompt["input_ids"].repeat(len(rows), 1), padded], dim=1))
    return groups


def test_step_returns_rewards_and_the_next_batch(env):
    prompts, served = env.reset()
    assert [tuple(prompt["input_ids"].shape) for prompt in prompts] == [(1, 7)] * 3
    assert all(
        torch.equal(prompt["attention_mask"], torch.ones_like(prompt["input_ids"]))
        for prompt in prompts
    )
    assert served == {"split": "train", "starts": env.select_starts(0, 3, 3)}
    groups = respond(env, prompts, "=", "long wrong", "=")
    groups[1] = groups[1].flip(0)[1:].repeat(2, 1)[:3]  # wrong, right, wrong
    after, rewards, terminated, truncated, report = env.step(groups)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    assert terminated.shape == truncated.shape == (3, 3)
    assert terminated.all()
    assert not truncated.any()
    assert report["rewards/exact"].tolist() == rewards.tolist()
    assert report["completions"][0][1] == report["completions"][1][0] == "long wrong"
    assert report["starts"] == env.select_starts(1, 3, 3)
    assert questions_of(env, after) != questions_of(env, prompts)


def test_reset_repeats_the_batch_and_a_seed_starts_a_new_order(env):
    def reset(*args, **options):
        return questions_of(env, env.reset(*args, **options)[0])

    first = reset()
    second = questions_of(env, env.step(respond(env, env.reset()[0], "1", "2"))[0])
    assert reset() == second != first
    assert reset(seed=0) == first
    assert reset(options={"step": 1}) == second
    assert reset() == second
    assert reset(reset_dataloaders=True) == first  # AgileRL's argument
    assert reset(seed=5) == reset(seed=5) != first


@pytest.mark.parametrize("split", ["validation", "test"])
def test_eval_mode_keeps_the_training_position(env, split):
    prompts = env.step(respond(env, env.reset()[0], "1", "2"))[0]
    with env.eval_mode(split):
        assert len(env) == env.size(split)
        held_out = env.reset(seed=9, options={"step": 1})[0]
        for _ in range(3):
            held_out = env.step(respond(env, held_out, ""))[0]
    assert len(env) == len(QA)
    # The current batch is still the one before eval_mode, and the next batch follows it.
    assert env.step(respond(env, prompts, "=", "2"))[4]["starts"] == env.select_starts(2, 3, 3)


def test_eval_mode_starts_at_the_first_question_and_takes_single_completions(env):
    for _ in range(2):
        with env.eval_mode("test"):
            prompts, served = env.reset()
            assert served == {"split": "test", "starts": (0, 1, 2)}
            prompts, rewards, *_, report = env.step(respond(env, prompts, "="))
            assert rewards.tolist() == [[1.0]] * 3
            assert report["starts"] == (3, 4)
            prompts, rewards, *_, report = env.step(respond(env, prompts, "no"))
            assert rewards.tolist() == [[0.0]] * 2
            assert report["starts"] == (0, 1, 2)
    with env.eval_mode():
        assert env.reset()[1]["split"] == "validation"
    with pytest.raises(ValueError, match="eval_mode 'train'"), env.eval_mode("train"):
        pass


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_padding_is_removed_from_completions(tokenizer, pad):
    seen = []

    def reward(completion_ids, **_):
        seen.extend(completion_ids)
        return [None, *[2.0] * (len(completion_ids) - 1)]

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = pad
    tables = {split: [{"prompt": split}] for split in ("train", "validation", "test")}
    env = HuggingFaceGym(tables, None, tokenizer, reward_funcs=reward, data_batch_size=1)
    start = env.reset()[0][0]["input_ids"][0].tolist()
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    rows = [[9, eos, pad, pad], [9, 8, 7, 6], [9, eos, eos, 5], [eos, pad, pad, pad]]
    rewards = env.step([torch.tensor([[*start, *row] for row in rows])])[1]
    # Tokens after an end are rewarded too: the agent that sampled them may have other end tokens.
    assert seen == [[9, eos], [9, 8, 7, 6], [9, eos, eos, 5], [eos]]
    assert rewards[0, 0].isnan()
    assert rewards[0, 1:].tolist() == [2.0] * 3


def test_invalid_shapes_are_refused(env):
    with pytest.raises(ValueError, match="reset"):
        env.step([])
    prompts, _ = env.reset()
    good = respond(env, prompts, "1", "2")
    for bad in [
        good[:2],
        None,
        [group.tolist() for group in good],
        [group[0] for group in good],
        [good[0][0], *good[1:]],
        [good[0][:1], *good[1:]],
        [group[:1] for group in good],
        [good[1], good[0], good[2]],
        [group[:, 1:] for group in good],
    ]:
        with pytest.raises(ValueError, match="completion_ids"):
            env.step(bad)
    assert env.step(good)[1].shape == (3, 2)  # a refused step changes nothing


@pytest.mark.parametrize("options", [{"cursor": 1}, {"step": -1}, {"step": "1"}])
def test_unknown_options_are_refused(env, options):
    with pytest.raises(ValueError, match="option"):
        env.reset(options=options)
