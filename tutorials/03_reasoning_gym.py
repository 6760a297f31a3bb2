# ---
# jupyter:
#   evogrpo:
#     needs: [reasoning_gym]
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tasks of reasoning-gym and a manual curriculum
#
# **The question.** A small model solves almost no questions of a hard task, so
# it gets almost no learning signal. Does it help to start with an easier task?
#
# **You will learn**
#
# - how to use the generators and verifiers of
#   [reasoning-gym](https://github.com/open-thought/reasoning-gym) as rewards;
# - how to weight several reward functions and record each of them;
# - how to switch tasks by hand, and how to measure whether it helped.
#
# **It needs** the installation described in [all tutorials](README.md), which
# includes the model, and the extra `reasoning` (`pip install -e ".[reasoning]"`
# in the checkout); one CPU core, about 6 minutes and 3 GB of memory. One
# dependency of reasoning-gym is compiled during installation, so a C compiler
# is required. Without reasoning-gym, `make tutorials` skips this notebook and
# prints a message.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=03`
# in the repository. The file `03_reasoning_gym.py` holds the same content as
# text.

# %%
import os
import re

import matplotlib.pyplot as plt
import reasoning_gym
import torch

from evogrpo import GRPO, HuggingFaceGym, Population, evolve, load_base
from evogrpo.evolution import Fixed

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
STEPS, SAMPLES, GROUP = (4, 4, 2) if SHORT else (24, 64, 8)
HELD_OUT, TOKENS = (2, 2) if SHORT else (64, 12)
torch.set_num_threads(1)

# %% [markdown]
# ## Three levels
#
# reasoning-gym generates any number of questions of a given difficulty from a
# seed. This tutorial uses sums at three levels.

# %%
# (numbers to add, digits of each)
LEVELS = {
    "two digits": (2, 1),
    "three digits": (3, 1),
    "two numbers up to 99": (2, 2),
}
TASKS = {
    name: reasoning_gym.create_dataset(
        "chain_sum",
        seed=0,
        size=1000,
        min_terms=terms,
        max_terms=terms,
        min_digits=digits,
        max_digits=digits,
    )
    for name, (terms, digits) in LEVELS.items()
}
for name, task in TASKS.items():
    print(f"{name:20} {task[0]['question']} {task[0]['answer']}")

# %% [markdown]
# ## Two rewards
#
# Each task has a verifier, `score_answer`. Test it before you use it.

# %%
entry = TASKS["two digits"][0]
texts = (
    entry["answer"],
    f"The answer is {entry['answer']}.",
    f"{entry['answer']} or maybe 7",
    "I do not know",
)
scores = [TASKS["two digits"].score_answer(text, entry) for text in texts]
for text, value in zip(texts, scores, strict=True):
    print(f"{value:.2f}  {text!r}")
assert scores[0] == 1 > scores[1] > scores[3] == 0

# %% [markdown]
# A plain correct answer scores 1. A text that contains the answer scores less,
# and the longer the text, the lower the score. An agent that always answers
# correctly in a full sentence would therefore score close to 0. The training
# reward is our own function, which checks the last number. The verifier is
# recorded with weight 0.


# %%
def environment(name: str) -> HuggingFaceGym:
    task = TASKS[name]

    def score(completions, entry, **columns):
        texts = [completion[0]["content"].strip() for completion in completions]
        return [
            task.score_answer(text, question)
            for text, question in zip(texts, entry, strict=True)
        ]

    def right(completions, entry, **columns):
        texts = [completion[0]["content"] for completion in completions]
        return [
            float(re.findall(r"-?\d+", text)[-1:] == [question["answer"]])
            for text, question in zip(texts, entry, strict=True)
        ]

    rows = [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "entry": entry,
        }
        for entry in task
    ]
    return HuggingFaceGym(
        rows,
        tokenizer=base.tokenizer,
        reward_funcs=[right, score],
        reward_weights=[1.0, 0.0],
        validation_size=HELD_OUT,
        test_size=HELD_OUT,
    )


base = load_base("smollm2-135m")
environments = {name: environment(name) for name in LEVELS}

# %% [markdown]
# (If the verifier alone is enough,
# `HuggingFaceGym.from_reasoning_gym("chain_sum", tokenizer=...)` replaces this
# cell. Duplicate questions are dropped, so few questions with two
# numbers remain.)
#
# ## Curriculum or direct training
#
# Two agents train for 24 learning steps each. One trains only on numbers up to
# 99. The other starts with two one-digit numbers, continues with three, and
# spends half of its steps on numbers up to 99. Both use the same number of
# samples per step.


# %%
def agent() -> Population:
    return GRPO.population(
        1,  # one agent: hyperparameters do not matter here
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=TOKENS,
        group_size=GROUP,
        batch_size=32,
        lr=3e-4,
    )


def learn(
    population: Population, name: str, steps: int, *, tested: bool
) -> tuple:
    """Return the run and the share of right answers in each step's samples."""
    run = evolve(
        population,
        environments[name],
        strategy=Fixed(),
        fitness="rollouts",
        generations=steps,
        steps_per_generation=1,
        samples_per_step=SAMPLES,
        test_questions=HELD_OUT if tested else 0,
        progress=False,
    )
    return run, [step.members[0].metrics["rewards/right/mean"] for step in run]


def print_samples(name: str, shares: list[float]) -> None:
    values = ", ".join(f"{share:.2f}" for share in shares)
    print(f"{name:20} right among the samples: {values}")


HARD = "two numbers up to 99"
PLAN = dict(zip(LEVELS, (STEPS // 4, STEPS // 4, STEPS // 2), strict=True))
straight, straight_right = learn(agent(), HARD, STEPS, tested=True)
student, curriculum_right = agent(), {}
for name, steps in PLAN.items():
    curriculum, right = learn(student, name, steps, tested=name == HARD)
    curriculum_right[name] = right
    print_samples(name, right)
print_samples("straight to it", straight_right)

# %%
figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
steps = range(1, STEPS + 1)
label = f"straight to it: {HARD}"
axis.plot(steps, straight_right, "o-", color="tab:grey", label=label)
colours, start = ("tab:green", "tab:olive", "tab:red"), 1
for name, colour in zip(PLAN, colours, strict=True):
    steps = range(start, start + PLAN[name])
    label = f"curriculum: {name}"
    axis.plot(steps, curriculum_right[name], "o-", color=colour, label=label)
    start += PLAN[name]
axis.set(
    xlabel="learning step",
    ylabel="right answers among the samples",
    ylim=(-0.03, 1.03),
)
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# The coloured segments show different tasks. Only the red segment is comparable
# with the grey line.
#
# ## The test
#
# Both agents answer the same held-out test questions of the hard task.

# %%
for name, run in (("straight to it", straight), ("curriculum", curriculum)):
    before, after = run.result.test.before, run.result.test.after
    change = f"{before.mean:.2f} → {after.mean:.2f}"
    print(f"{name:15} right {change} ± {after.standard_error:.2f}")
    assert SHORT or after.mean > before.mean + 2 * after.standard_error
with_curriculum = torch.tensor(curriculum.result.test.scores)
without = torch.tensor(straight.result.test.scores)
difference = with_curriculum - without  # on each test question
error = difference.std() / len(difference) ** 0.5
print(f"curriculum less straight: {difference.mean():+.2f} ± {error:.2f}")

# %% [markdown]
# Both improved from none to about a quarter of the test questions. The
# curriculum was neither better nor worse: its twelve easier steps were worth
# about as much as twelve steps of the hard task. With one seed and 64
# questions, a difference of 0.1 in either direction would not be visible.
#
# The samples show two more things. First, the task in the middle is not easier
# than the last one. After six steps the model solved half of the tasks with two
# one-digit numbers. It then solved about a tenth of those with three, and later
# about a sixth of the tasks with numbers up to 99. Measure the difficulty of
# tasks before you order them.
#
# Second, the lines are noisy, because a step has only eight questions with
# eight completions each. The grey value of 0.45 in step 12 does not last. Use
# the test for conclusions.
#
# ## Three things to try
#
# 1. Use a population: four agents with
#    `hp_config=HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3,
#    scale="log"))` instead of one agent with a fixed learning rate.
# 2. Use both functions, `reward_weights=[1.0, 0.2]`. Does the model learn to
#    answer with the number alone, and does accuracy stay the same?
# 3. Use another task: `reasoning_gym.create_dataset("leg_counting", ...)`. Read
#    ten questions, guess the untrained model's score, and check it.
