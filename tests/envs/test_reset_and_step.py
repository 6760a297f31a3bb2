"""reset, step and eval_mode of HuggingFaceGym."""

import copy

import pytest
import torch

from evogrpo.envs import HuggingFaceGym

QA = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(6) for b in range(5)]
HELD_OUT = [{"question": f"{a}*{a}?", "answer": str(a * a)} for a in range(5)]


def exact(completion, answer, question):
    return float(completion == answer)


@pytest.fixture
def env(tokenizer):
    return HuggingFaceGym(
        QA,
        HELD_OUT,
        tokenizer,
        reward_fn=exact,
        validation_dataset=[{"question": "v", "answer": ""}],
        data_batch_size=3,
    )


def questions_of(tokenizer, prompts):
    return [tokenizer.decode(prompt["input_ids"][0], skip_special_tokens=True) for prompt in prompts]


def solve(question):
    return str(eval(question.rstrip("?")))  # noqa: S307 (our own questions)


def respond(tokenizer, prompts, *texts):
    """Return groups of padded completions with these texts; "=" is replaced by the right answer."""
    groups = []
    for prompt, question in zip(prompts, questions_of(tokenizer, prompts), strict=True):
        ids = [tokenizer((solve(question) if t == "=" else t) + "<eos>")["input_ids"] for t in texts]
        width = max(map(len, ids))
        rows = [prompt["input_ids"][0].tolist() + row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids]
        groups.append(torch.tensor(rows))
    return groups


def test_step_returns_rewards_and_the_next_batch(env, tokenizer):
    prompts, served = env.reset()
    assert [tuple(prompt["input_ids"].shape) for prompt in prompts] == [(1, 7)] * 3
    assert all(torch.equal(prompt["attention_mask"], torch.ones_like(prompt["input_ids"])) for prompt in prompts)
    assert served == {"split": "train", "starts": env.deal(0, 3, 3)}
    after, rewards, terminated, truncated, report = env.step(respond(tokenizer, prompts, "=", "long wrong", "="))
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[1.0, 0.0, 1.0]] * 3
    assert terminated.shape == truncated.shape == (3, 3)
    assert terminated.all()
    assert not truncated.any()
    assert report["rewards/exact"].tolist() == rewards.tolist()
    assert [texts[1] for texts in report["completions"]] == ["long wrong"] * 3
    assert report["starts"] == env.deal(1, 3, 3)
    assert questions_of(tokenizer, after) != questions_of(tokenizer, prompts)


def test_rewards_belong_to_their_prompt_and_row(env, tokenizer):
    prompts, _ = env.reset()
    groups = respond(tokenizer, prompts, "no", "=")
    groups[1] = groups[1].flip(0)
    assert env.step(groups)[1].tolist() == [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]


def test_one_pass_covers_every_training_question(env, tokenizer):
    prompts, _ = env.reset()
    seen = []
    for _ in range(len(env) // 3):
        seen += questions_of(tokenizer, prompts)
        prompts = env.step(respond(tokenizer, prompts, "1", "2"))[0]
    assert sorted(seen) == sorted(row["question"] for row in QA)


def test_reset_repeats_the_batch_and_a_seed_starts_a_new_order(env, tokenizer):
    first = questions_of(tokenizer, env.reset()[0])
    second = questions_of(tokenizer, env.step(respond(tokenizer, env.reset()[0], "1", "2"))[0])
    assert questions_of(tokenizer, env.reset()[0]) == second != first
    assert questions_of(tokenizer, env.reset(seed=0)[0]) == first
    assert questions_of(tokenizer, env.reset(options={"step": 1})[0]) == second
    assert questions_of(tokenizer, env.reset()[0]) == second
    assert questions_of(tokenizer, env.reset(reset_dataloaders=True)[0]) == first  # AgileRL's argument
    assert questions_of(tokenizer, env.reset(seed=5)[0]) != first
    assert questions_of(tokenizer, env.reset(seed=5)[0]) == questions_of(tokenizer, env.reset(seed=5)[0])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_eval_mode_keeps_the_training_position(env, tokenizer, split):
    twin_prompts = env.step(respond(tokenizer, env.reset()[0], "1", "2"))[0]
    with env.eval_mode(split):
        assert len(env) == env.size(split)
        prompts, _ = env.reset(seed=9, options={"step": 1})
        for _ in range(3):
            groups = [torch.cat([p["input_ids"], torch.tensor([[tokenizer.eos_token_id]])], dim=1) for p in prompts]
            prompts = env.step(groups)[0]
    assert len(env) == len(QA)
    # The current batch is still the one before eval_mode, and the next batch follows it.
    assert env.step(respond(tokenizer, twin_prompts, "=", "2"))[4]["starts"] == env.deal(2, 3, 3)


def test_eval_mode_starts_at_the_first_question(env, tokenizer):
    for _ in range(2):
        with env.eval_mode("test"):
            prompts, served = env.reset()
            assert served == {"split": "test", "starts": (0, 1, 2)}
            prompts, rewards, *_, report = env.step(respond(tokenizer, prompts, "="))
            assert rewards.tolist() == [[1.0]] * 3
            assert report["starts"] == (3, 4)
            prompts, rewards, *_, report = env.step(respond(tokenizer, prompts, "no"))
            assert rewards.tolist() == [[0.0]] * 2
            assert report["starts"] == (0, 1, 2)


def test_eval_mode_uses_validation_by_default(env):
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
    env = HuggingFaceGym(
        [{"prompt": "ab"}],
        [{"prompt": "x"}],
        tokenizer,
        validation_dataset=[{"prompt": "y"}],
        reward_funcs=reward,
        data_batch_size=1,
    )
    start = env.reset()[0][0]["input_ids"][0].tolist()
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    rows = [[9, eos, pad, pad], [9, 8, 7, 6], [9, eos, eos, 5], [eos, pad, pad, pad]]
    rewards = env.step([torch.tensor([[*start, *row] for row in rows])])[1]
    assert seen == [[9, eos], [9, 8, 7, 6], [9, eos], [eos]]
    assert rewards[0, 0].isnan()
    assert rewards[0, 1:].tolist() == [2.0] * 3


def test_invalid_shapes_are_refused(env, tokenizer):
    with pytest.raises(ValueError, match="reset"):
        env.step([])
    prompts, _ = env.reset()
    good = respond(tokenizer, prompts, "1", "2")
    for bad in [
        good[:2],
        [good[0][0], *good[1:]],
        [good[0][:1], *good[1:]],
        [group[:1] for group in good],
        [good[1], good[0], good[2]],
        [group[:, 1:] for group in good],
    ]:
        with pytest.raises(ValueError, match="completion_ids"):
            env.step(bad)
    assert env.step(good)[1].shape == (3, 2)  # a refused step changes nothing


def test_single_completions_are_rewarded_only_in_eval_mode(env, tokenizer):
    with env.eval_mode("test"):
        assert env.step(respond(tokenizer, env.reset()[0], "="))[1].tolist() == [[1.0]] * 3


@pytest.mark.parametrize("options", [{"cursor": 1}, {"step": -1}, {"step": "1"}])
def test_unknown_options_are_refused(env, options):
    with pytest.raises(ValueError, match="option"):
        env.reset(options=options)
