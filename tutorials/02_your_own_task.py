# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your own reasoning task
#
# **The question.** You have questions and a reward function that checks
# answers. The model is trained to maximise that function. Does the function
# reward what you intend?
#
# **You will learn**
#
# - how to use your own questions and rewards, and hold out questions;
# - how a model exploits a plausible reward, and how a second reward with weight
#   0 reveals it;
# - how to run slow verifiers in separate processes, and kill those that hang.
#
# **It needs** the installation described in [all tutorials](README.md), which
# includes the model, one CPU core, about 4 minutes and 3 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=02`
# in the repository. The file `02_your_own_task.py` holds the same content as
# text.

# %%
import os
import random
import time

import matplotlib.pyplot as plt
import torch

from evogrpo import GRPO, HuggingFaceGym, Population, evolve, load_base
from evogrpo.evolution import Fixed

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
STEPS, SAMPLES, GROUP = (1, 4, 2) if SHORT else (8, 32, 8)
HELD_OUT, TOKENS = (2, 4) if SHORT else (48, 16)
torch.set_num_threads(1)

# %% [markdown]
# ## Questions
#
# Questions are a list of mappings. Here each row has a `prompt` in chat format,
# and an `answer` that only the reward function receives.

# %%
rng = random.Random(0)
pairs = {tuple(rng.sample(range(10, 1000), 2)) for _ in range(1500)}
questions = [
    {
        "prompt": [
            {
                "role": "user",
                "content": f"Which number is larger, {a} or {b}? "
                "Answer with one number.",
            }
        ],
        "answer": str(max(a, b)),
    }
    for a, b in sorted(pairs)
]
print(len(questions), "questions, the first:", questions[0])

# %% [markdown]
# ## A plausible reward
#
# The reward functions go into their own file, `my_rewards.py`. Other processes
# can then import them, which is needed below. Each function receives all
# completions of a step, and one list for each column that it names.
#
# The first function searches for the correct number in the completion. What
# could go wrong?

# %%
# %%writefile my_rewards.py
import re
from time import sleep


def numbers(completion):
    """Return all numbers in a completion, which is a list of one message."""
    return re.findall(r"\d+", completion[0]["content"])


def contains_answer(completions, answer, **columns):
    return [
        float(right in numbers(completion))
        for completion, right in zip(completions, answer, strict=True)
    ]


def is_answer(completions, answer, **columns):
    return [
        float(set(numbers(completion)) == {right})
        for completion, right in zip(completions, answer, strict=True)
    ]


def slow_is_answer(completions, answer, **columns):
    # Stands for a compiler, a prover or a judge on a server.
    sleep(0.25 * len(completions))
    return is_answer(completions, answer)


def hangs_on_nonsense(completions, answer, **columns):
    if not all(numbers(completion) for completion in completions):
        sleep(3600)
    return is_answer(completions, answer)


# %% [markdown]
# `contains_answer` is the training reward. `is_answer` is only recorded,
# because its weight is 0. It requires the correct number *and no other*.
# Training, validation and test questions are disjoint. The split of a question
# depends on its text, so the same question never occurs in two splits.

# %%
import my_rewards

base = load_base("smollm2-135m")  # or a hub id, a folder, a .gguf file


def environment(*weights: float) -> HuggingFaceGym:
    rewards = [my_rewards.contains_answer, my_rewards.is_answer]
    return HuggingFaceGym(
        questions,
        tokenizer=base.tokenizer,
        reward_funcs=rewards,
        reward_weights=weights,
        validation_size=HELD_OUT,
        test_size=HELD_OUT,
    )


def agent() -> Population:
    return GRPO.population(
        1,  # one agent: hyperparameters do not matter here
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=TOKENS,
        group_size=GROUP,
        batch_size=32,
        lr=5e-4,
    )


def train(env: HuggingFaceGym) -> tuple:
    """Train one agent; return its run and the mean rewards of every step."""
    run = evolve(
        agent(),
        env,
        strategy=Fixed(),
        fitness="rollouts",
        generations=STEPS,
        steps_per_generation=1,
        samples_per_step=SAMPLES,
        test_questions=HELD_OUT,
        progress=False,
    )
    rewards = {"contains_answer": [], "is_answer": []}
    for generation in run:
        metrics = generation.members[0].metrics
        for name, values in rewards.items():
            values.append(metrics[f"rewards/{name}/mean"])
    return run, rewards


run, gamed = train(environment(1.0, 0.0))
test = run.result.test
print("test, as it is paid:", test.before, "→", test.after)

# %% [markdown]
# The test reward increased a lot. By this number alone, training was a success.
# Now compare it with the second function.

# %%
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
steps = range(1, STEPS + 1)
for name, colour, role in (
    ("contains_answer", "tab:red", "paid"),
    ("is_answer", "tab:blue", "watches"),
):
    label = f"{name} ({role})"
    axis.plot(steps, gamed[name], "o-", color=colour, label=label)
axis.set(
    xlabel="learning step",
    ylabel="mean reward of the samples",
    ylim=(-0.03, 1.03),
    title="paid for containing",
)
axis.legend()
plt.show()

# %% [markdown]
# ## The completion that exploits the reward
#
# What does the model write? Generate completions for some of the questions.

# %%
examples = questions[:: len(questions) // 6][: 1 if SHORT else 6]


def print_completions(best: GRPO) -> None:
    completions = best.generate([example["prompt"] for example in examples])
    for example, text in zip(examples, completions, strict=True):
        question = example["prompt"][0]["content"][:40]
        print(f"{question:42} right: {example['answer']:4} wrote: {text!r}")


print_completions(run.best)

# %% [markdown]
# The model writes *both* numbers. The correct one is always among them, so the
# reward is always 1. The model did not learn to compare numbers. It learnt to
# maximise the reward.
#
# ## The intended reward
#
# Questions, samples per step and seed are the same. Only the weights are
# swapped.

# %%
honest_run, honest = train(environment(0.0, 1.0))
test = honest_run.result.test
print("test, as it is paid:", test.before, "→", test.after)
print_completions(honest_run.best)

# %%
figure, axes = plt.subplots(
    1, 2, figsize=(11, 3.6), layout="constrained", sharey=True
)
titles = ("paid for containing", "paid for being")
for axis, curves, title in zip(axes, (gamed, honest), titles, strict=True):
    for name, colour in (
        ("contains_answer", "tab:red"),
        ("is_answer", "tab:blue"),
    ):
        axis.plot(steps, curves[name], "o-", color=colour, label=name)
    axis.set(xlabel="learning step", ylim=(-0.03, 1.03), title=title)
axes[0].set_ylabel("mean reward of the samples")
axes[1].legend()
plt.show()
gap = {
    name: curves["contains_answer"][-1] - curves["is_answer"][-1]
    for name, curves in (("gamed", gamed), ("honest", honest))
}
print({name: round(value, 2) for name, value in gap.items()})
assert SHORT or gap["gamed"] > 0.4 > gap["honest"]

# %% [markdown]
# On the left, `contains_answer` is the training reward and the two functions
# diverge: the reward is close to 1, and few answers are correct. On the right,
# `is_answer` is the training reward, and both functions increase together.
#
# Read the completions of the second model again. All six are correct, and the
# correct number is the first in two questions and the second in four. So the
# model does not just name a position. It is correct in 83 % ± 5 of the test
# questions. When a reward increases, read samples.
#
# The test split could not reveal the problem. It is disjoint from training, but
# it uses the same wrong reward. A second function with weight 0 and a look at
# six samples did reveal it.
#
# ## A verifier that is slow or hangs
#
# Real verifiers compile code or query a server. `slow_is_answer` takes a
# quarter of a second per completion. With `reward_workers`, the completions of
# a step are divided among processes. The processes import the functions by
# name, so the functions must be in a file.


# %%
def score(
    texts: list[str], reward: object, **options: object
) -> tuple[list[float], float]:
    """Return the rewards of completions of one question, and the seconds."""
    env = HuggingFaceGym(
        questions,
        tokenizer=base.tokenizer,
        reward_funcs=reward,
        data_batch_size=1,
        validation_size=4,
        test_size=4,
        **options,
    )
    (prompt,), _ = env.reset()
    written = base.tokenizer(
        texts, padding=True, padding_side="right", return_tensors="pt"
    ).input_ids
    prompts = prompt["input_ids"].repeat(len(texts), 1)
    completions = torch.cat([prompts, written], dim=1)
    env.step([completions])  # the first call starts the processes
    env.reset(seed=0)
    began = time.perf_counter()
    rewards = env.step([completions])[1][0]
    return rewards.tolist(), time.perf_counter() - began


texts = ["it is 7"] * 8
for workers in (0, 2, 4):
    _, seconds = score(texts, my_rewards.slow_is_answer, reward_workers=workers)
    print(f"{workers or 'no'} workers: {seconds:.1f} s for 8 completions")

# %% [markdown]
# Some verifiers hang on some completions. A call that takes longer than
# `reward_timeout` is killed, with all processes that it started. With
# `on_reward_error="exclude"`, the completion that caused it is excluded (its
# reward is NaN), and a warning names it. The rest of the step continues.

# %%
rewards, seconds = score(
    ["it is 7", "I do not know", "it is 8"],
    my_rewards.hangs_on_nonsense,
    reward_workers=1,
    reward_timeout=1.0,
    on_reward_error="exclude",
)
print(rewards, f"after {seconds:.1f} s")

# %% [markdown]
# ## Three things to try
#
# 1. Use both rewards: `environment(0.5, 0.5)`. Does half the weight on the
#    wrong reward halve its effect?
# 2. Find an exploit of `is_answer`. What is its reward for "It is not 379"? Fix
#    it, and read samples again.
# 3. Use your own questions: a JSON file with `prompt` and `answer`, and a
#    reward function that is hard to exploit.
