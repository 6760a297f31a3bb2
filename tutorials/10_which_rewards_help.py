# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which rewards and prompts help?
#
# **The question.** You have three reward functions and two prompts, and do not
# know which of them teach the task. Can a population find out while it trains?
#
# **You will learn**
#
# - how members differ in *task settings*: weights of reward functions and texts
#   of the prompt;
# - why fitness is measured by a *metric* that never changes;
# - how to read which settings helped, and how sure that is.
#
# **It needs** the installation described in [all tutorials](README.md), which
# includes the model, one CPU core, about 7 minutes and 3 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=10`
# in the repository. The file `10_which_rewards_help.py` holds the same content
# as text.

# %%
import os
import random
import re
import shutil

import matplotlib.pyplot as plt
import torch

import evogrpo
from evogrpo import (
    GRPO,
    HuggingFaceGym,
    HyperparameterConfig,
    SuccessiveHalving,
    evolve,
    load_base,
)

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
MEMBERS, STEPS, SAMPLES = (2, 1, 8) if SHORT else (4, 2, 64)
HELD_OUT, TOKENS = (4, 4) if SHORT else (64, 12)
FOLDER = "runs/tutorial-10"
shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier execution
torch.set_num_threads(1)

# %% [markdown]
# ## A task with little signal
#
# The model has to add two numbers of three digits. It is right in a few of a
# hundred attempts. In most groups no answer is right, so all rewards are equal,
# and GRPO learns nothing from them.

# %%
rng = random.Random(0)
pairs = {tuple(rng.sample(range(100, 500), 2)) for _ in range(2000)}
questions = [
    {"question": f"{a} + {b} =", "answer": str(a + b)} for a, b in sorted(pairs)
]
print(len(questions), "questions, the first:", questions[0])

# %% [markdown]
# ## Three rewards, and two prompts
#
# The first function is what we want. The second gives credit for every right
# digit. The third gives more for shorter answers: perhaps it helps, perhaps it
# distracts.


# %%
def last_number(text: str) -> str:
    numbers = re.findall(r"\d+", text.replace(",", ""))
    return numbers[-1] if numbers else ""


def right(completion: str, answer: str, question: str) -> float:
    """Score 1 for the right number."""
    return float(last_number(completion) == answer)


def digits(completion: str, answer: str, question: str) -> float:
    """Score the share of right digits of a number of the right length."""
    given = last_number(completion)
    if len(given) != len(answer):
        return 0.0
    return sum(map(str.__eq__, given, answer)) / len(answer)


def brief(completion: str, answer: str, question: str) -> float:
    """Score short answers."""
    return max(0.0, 1 - len(completion) / 40)


# %% [markdown]
# A field in braces is a task setting. Here the field `before` stands before the
# question. Which is better, two worked examples or an instruction?

# %%
PROMPTS = [
    "412 + 173 = 585\n608 + 254 = 862\n",
    "State the final answer to the following arithmetic problem: ",
]
base = load_base("smollm2-135m")
env = HuggingFaceGym(
    questions,
    tokenizer=base.tokenizer,
    reward_fn=[right, digits, brief],
    metric=right,
    conversation_template=[{"role": "user", "content": "{before}{question}"}],
    settings={"before": PROMPTS[0]},
    validation_size=HELD_OUT,
    test_size=2 * HELD_OUT,
)

# %% [markdown]
# `metric` is the measure of success: fitness, the untrained model and the final
# test are measured by it. It is the same for all members, although their
# rewards differ.
#
# ## Members that differ
#
# The search space has one entry for each setting. Weights of 0 switch a reward
# off. The learning rate is calibrated and does not evolve.

# %%
space = HyperparameterConfig(
    reward_weights={"digits": [0, 1], "brief": [0, 1]},
    task={"before": PROMPTS},
)
population = GRPO.population(
    MEMBERS,
    actor_network=base.model,
    pad_token_id=base.tokenizer.pad_token_id,
    max_output_tokens=TOKENS,
    hp_config=space,
    samples_per_step=SAMPLES,
    batch_size=32,
    group_size=4 if SHORT else 8,
)
for agent in population:
    print(agent.index, dict(agent.task_settings))

# %% [markdown]
# All members sample and learn together on one copy of the model. After each
# generation, the worse half is stopped, unless it may be as good as the best up
# to noise. The rest get the samples of stopped members.

# %%
run = evolve(
    population,
    env,
    strategy=SuccessiveHalving(),
    generations=2 if SHORT else 3,
    steps_per_generation=STEPS,
    samples_per_step=SAMPLES,
    run_dir=FOLDER,
    progress=False,
).finish()
test = run.result.test
print(f"untrained {test.before.mean:.3f}, best member {test.after.mean:.3f}")
print(dict(run.result.best.hyperparameters.task_settings))
assert (
    SHORT or test.after.mean > test.before.mean + 2 * test.after.standard_error
)

# %% [markdown]
# ## What helped?
#
# Each line is a member, coloured by its prompt. A solid line means that right
# digits were rewarded.

# %%
members = evogrpo.read_run(FOLDER).members
figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
for member, rows in members.groupby("member"):
    settings = rows.iloc[0]
    prompt = PROMPTS.index(settings["task.before"])
    rewarded = settings["reward_weights.digits"] == 1
    used = [
        n for n in ("digits", "brief") if settings[f"reward_weights.{n}"] == 1
    ]
    names = ["right", *used]
    axis.plot(
        [0, *rows.generation],
        [test.before.mean, *rows.fitness],
        "o-" if rewarded else "o--",
        color=f"C{prompt}",
        label=f"member {member}: prompt {prompt + 1}, {', '.join(names)}",
    )
axis.set(xlabel="generation", ylabel="share of right answers, validation")
axis.set_xticks(range(int(members.generation.max()) + 1))
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# How sure is this? The terminal answers with one line per setting.

# %%
# !evogrpo best runs/tutorial-10

# %% [markdown]
# A value is called better if at least three families of members had it, three
# others did not, and the difference exceeds two standard errors. With two
# members for each value, the lines show a direction only. Eight members would
# say more.
#
# [Which task settings
# helped](../docs/evolution.md#which-task-settings-helped) explains the lines.
#
# ## Three things to try
#
# 1. Write a prompt of your own into `PROMPTS`. Is it better than both?
# 2. Leave the sign of a reward open: `"brief": {"min": -1, "max": 1}`. Does the
#    best member reward short answers, or long ones?
# 3. Train eight members. Can the terminal tell now which settings help?
