# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Evolve a small language model on arithmetic
#
# **The question.** SmolLM2 has 135 million parameters and solves few sums. Can
# it improve within minutes on a laptop if you know no good hyperparameters?
#
# **You will learn**
#
# - how to create an environment from questions and a reward function;
# - how a population of four agents shares one base model and calibrates its
#   learning rates;
# - how to separate learning from luck with held-out questions.
#
# **It needs** the installation described in [all tutorials](README.md), which
# includes the model, one CPU core, about 8 minutes and 3 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=01`
# in the repository. The file `01_small_language_model.py` holds the same
# content as text.

# %%
import os
import random
import re
import shutil

import matplotlib.pyplot as plt
import numpy as np
import torch

from evogrpo import (
    GRPO,
    HuggingFaceGym,
    HyperparameterConfig,
    RLParameter,
    evolve,
    load_base,
    read_run,
)

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
SIZE, GENERATIONS, STEPS = (2, 1, 1) if SHORT else (4, 4, 3)
SAMPLES, TOKENS, HELD_OUT = (4, 4, 2) if SHORT else (32, 12, 64)
torch.set_num_threads(1)
# Delete the run of an earlier execution of this notebook.
shutil.rmtree("runs/tutorial-01", ignore_errors=True)

# %% [markdown]
# ## Questions and a reward
#
# The questions are all sums of two numbers from 2 to 40. Each pair occurs once,
# in one order, so no test question is also a training question. 128 of them are
# kept for the test.

# %%
rng = random.Random(0)
pairs = [
    (a, b) if rng.random() < 0.5 else (b, a)
    for a in range(2, 41)
    for b in range(a, 41)
]
rng.shuffle(pairs)
rows = [
    {
        "question": "State the final answer to the following arithmetic "
        f"problem: {a} + {b} =",
        "answer": str(a + b),
    }
    for a, b in pairs
]
test, train = rows[:128], rows[128:]
print(
    len(train), "to learn from,", len(test), "for the test; the first:", rows[0]
)


def reward(completion: str, answer: str) -> float:
    """Return 1 if the last number is the answer, so a list of guesses fails."""
    numbers = re.findall(r"-?\d+", completion)
    return float(numbers[-1:] == [answer])


# %% [markdown]
# `HuggingFaceGym` combines questions and reward. It draws validation questions
# from `train`. They are used for selection and not for training.

# %%
base = load_base("smollm2-135m")  # or a hub id, a folder, a .gguf file
env = HuggingFaceGym(
    train,
    test,
    tokenizer=base.tokenizer,
    reward_fn=reward,
    validation_size=HELD_OUT,
)

# %% [markdown]
# ## A population
#
# Four agents share the base model, which is loaded once and never changed. Each
# agent has its own LoRA adapter.
#
# No learning rate is given. How far a learning step should move a policy is
# easier to say: `target_kl` is the KL divergence between the policies before
# and after the step. The first step tries several learning rates and keeps one
# that moves the policy this far. Later steps correct it.
#
# Two hyperparameters evolve: `target_kl`, and `group_size`, the number of
# completions per question that are compared with each other. The first agent
# starts with the values given here, the others are spread over the ranges.

# %%
population = GRPO.population(
    SIZE,
    actor_network=base.model,
    pad_token_id=base.tokenizer.pad_token_id,
    max_output_tokens=TOKENS,
    batch_size=16,
    target_kl=0.01,
    group_size=4,
    hp_config=HyperparameterConfig(
        target_kl=RLParameter(min=0.0025, max=0.04, scale="log"),
        group_size=RLParameter(choices=[2, 4] if SHORT else [4, 8, 16]),
    ),
)
examples = test[: 1 if SHORT else 6]
prompts = [[{"role": "user", "content": row["question"]}] for row in examples]
before = population[0].generate(prompts)  # before any learning
for row, text in zip(examples, before, strict=True):
    print(f"{row['question'][-9:]:9} {row['answer']:>3}   {text!r}")

# %% [markdown]
# ## Training
#
# Each generation has three learning steps. All agents then answer the same
# validation questions. In the tournament, a member that loses is replaced by a
# clone of a better one. The hyperparameters of a clone are mutated: perturbed
# or resampled.

# %%
run = evolve(
    population,
    env,
    generations=GENERATIONS,
    steps_per_generation=STEPS,
    samples_per_step=SAMPLES,
    test_questions=HELD_OUT if SHORT else None,
    run_dir="runs/tutorial-01",
    progress=False,
)
for generation in run:
    print(f"generation {generation.generation}")
    for m in generation.members:
        print(
            f"  #{m.index:<2} fitness {m.fitness:.2f} ± {m.standard_error:.2f}"
            f"   target_kl {m.hyperparameters.target_kl:.4f}"
            f"   group_size {m.hyperparameters.group_size:2}"
            f"   learning rate {m.metrics.get('learning_rate', 0):.1e}"
        )

# %%
members = read_run("runs/tutorial-01").members
figure, axes = plt.subplots(1, 2, figsize=(11, 3.9), layout="constrained")
# In a short run no member may take a step.
columns = ("fitness", "lr" if SHORT else "mean/learning_rate")
circles = {"color": "none", "markeredgecolor": "black", "markersize": 11}
lineage = members[members.in_best_lineage]
for _, history in members.groupby("member"):
    first = history.iloc[0]
    colour = plt.colormaps["plasma"](np.log10(first.target_kl / 0.0025) / 1.4)
    for axis, column in zip(axes, columns, strict=True):
        axis.plot(history.generation, history[column], "o-", color=colour)
    axes[0].plot(
        [first.generation - 1, first.generation],
        [first.fitness_before, first.fitness],
        ":",
        color=colour,
    )
for axis, column in zip(axes, columns, strict=True):
    axis.plot(lineage.generation, lineage[column], "o", **circles)
axes[0].set(
    xlabel="generation",
    ylabel=f"part of {HELD_OUT} validation questions right",
    title="how many are right",
)
axes[1].set(
    xlabel="generation",
    ylabel="learning rate",
    yscale="log",
    title="the learning rates they found",
)
for axis in axes:
    axis.xaxis.get_major_locator().set_params(integer=True)
plt.show()

# %% [markdown]
# Each line is one member. Lines with a larger `target_kl` are brighter. A
# dotted line connects a member with its parent, or with the untrained base
# model. Black circles mark the lineage of the winner.
#
# After one generation the four members solve 19 % to 38 % of the questions. The
# best is #1, with a larger `target_kl` and a larger `group_size` than #0, which
# has the values given above. From generation 3 on, all members are #1 itself or
# its descendants. In that generation, the two members with the largest
# `target_kl` get worse, and the two others get better. The winner has a small
# one. At the end the members solve 56 % to 69 %, each with a standard error of
# 0.06.
#
# The learning rates on the right were found by calibration. At the end they lie
# between 2.0e-4 and 3.8e-4. A larger `target_kl` mostly leads to a larger
# learning rate.
#
# Did evolution help? It replaced members that had learnt less, and #1 when it
# got worse. One run does not show whether #0 would have caught up.
# [What did evolution find?](04_what_did_evolution_find.ipynb) and
# [Evolution](../docs/evolution.md) compare populations with one agent.

# %% [markdown]
# ## Did it learn to add?
#
# The winner was chosen on the validation questions, so its validation fitness
# is biased upwards. The test questions have no such bias. The run evaluates the
# untrained base model and the winner on them once, at the end.

# %%
result = run.result.test
for name in ("before", "after", "gain"):
    value = getattr(result, name)
    print(f"{name:6} {value.mean:.2f} ± {value.standard_error:.2f}")
print("more than two standard errors:", result.beyond_noise)
assert SHORT or result.beyond_noise
assert SHORT or result.after.mean > 2 * result.before.mean

# %%
after = run.best.generate(prompts)
for row, old, new in zip(examples, before, after, strict=True):
    problem = f"{row['question'][-9:]:9} {row['answer']:>3}"
    print(f"{problem}   before {old!r:50} after {new!r}")

# %% [markdown]
# The winner answers five times as many test questions correctly. The gain is
# far beyond noise. Of the six examples above, one was right before and four are
# right now. But six answers are an anecdote, 128 are a measurement.
#
# What did it learn? The untrained model already answers the six examples with a
# short sentence and one number. A better format can therefore hardly explain
# the gain: the winner computes more sums correctly. The reward does not
# separate the two.
#
# ## Three things to try
#
# 1. Run the control: `strategy=SelectionOnly()` from `evogrpo.evolution` never
#    changes hyperparameters. Does mutation help?
# 2. Add subtractions to the questions. Which answers does `final_number` of
#    `evogrpo.envs.text.tasks` score correctly that our `reward` does not?
# 3. Allow reasoning: use a larger `max_output_tokens`, and add "Think step by
#    step" to the question. Does accuracy improve, or only the run time grow?
