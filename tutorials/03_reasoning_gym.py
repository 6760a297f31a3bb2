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
# **The question.** A small model solves almost no questions of a hard task, so it gets almost no learning signal.
# Does it help to start with an easier task?
#
# **You will learn**
#
# - how to use the generators and verifiers of [reasoning-gym](https://github.com/open-thought/reasoning-gym) as
#   rewards;
# - how to weight several reward functions and record each of them;
# - how to switch tasks by hand, and how to measure whether it helped.
#
# **It needs** the installation described in [all tutorials](README.md), which includes the model, and the extra
# `reasoning` (`pip install -e ".[reasoning]"` in the checkout); one CPU core, about 6 minutes and 3 GB of memory. One
# dependency of reasoning-gym is compiled during installation, so a C compiler is required. Without reasoning-gym,
# `make tutorials` skips this notebook and prints a message.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=03` in the repository. The file
# `03_reasoning_gym.py` holds the same content as text.

# %%
import os
import re

import matplotlib.pyplot as plt
import reasoning_gym
import torch

from evogrpo import GRPO, HuggingFaceGym, Population, evolve, load_base
from evogrpo.evolution import Fixed

SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"  # a quick look whether everything runs; figures then say little
STEPS, SAMPLES, GROUP, HELD_OUT, TOKENS = (4, 4, 2, 2, 2) if SHORT else (24, 64, 8, 64, 12)
torch.set_num_threads(1)

# %% [markdown]
# ## Three levels
#
# reasoning-gym generates any number of questions of a given difficulty from a seed. This tutorial uses sums at three
# levels.

# %%
LEVELS = {
    "two digits": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "three digits": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "two numbers up to 99": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
}
TASKS = {name: reasoning_gym.create_dataset("chain_sum", seed=0, size=1000, **how) for name, how in LEVELS.items()}
for name, task in TASKS.items():
    print(f"{name:20} {task[0]['question']} {task[0]['answer']}")

# %% [markdown]
# ## Two rewards
#
# Each task has a verifier, `score_answer`. Test it before you use it.

# %%
entry = TASKS["two digits"][0]
texts = (entry["answer"], f"The answer is {entry['answer']}.", f"{entry['answer']} or maybe 7", "I do not know")
paid = [TASKS["two digits"].score_answer(text, entry) for text in texts]
for text, value in zip(texts, paid, strict=True):
    print(f"{value:.2f}  {text!r}")
assert paid[0] == 1 > paid[1] > paid[3] == 0

# %% [markdown]
# A plain correct answer scores 1. A text that contains the answer scores less, and the longer the text, the lower the
# score. An agent that always answers correctly in a full sentence would therefore score close to 0. The training
# reward is our own function, which checks the last number. The verifier is recorded with weight 0.


# %%
def environment(name: str) -> HuggingFaceGym:
    task = TASKS[name]

    def score(completions, entry, **columns):
        return [task.score_answer(each[0]["content"].strip(), of) for each, of in zip(completions, entry, strict=True)]

    def right(completions, entry, **columns):
        numbers = [re.findall(r"-?\d+", each[0]["content"])[-1:] for each in completions]
        return [float(found == [of["answer"]]) for found, of in zip(numbers, entry, strict=True)]

    rows = [{"prompt": [{"role": "user", "content": entry["question"]}], "entry": entry} for entry in task]
    held_out = {"validation_size": HELD_OUT, "test_size": HELD_OUT}
    return HuggingFaceGym(
        rows, tokenizer=base.tokenizer, reward_funcs=[right, score], reward_weights=[1.0, 0.0], **held_out
    )


base = load_base("smollm2-135m")
environments = {name: environment(name) for name in LEVELS}

# %% [markdown]
# (If the verifier alone is enough, `HuggingFaceGym.from_reasoning_gym("chain_sum", tokenizer=...)` replaces this
# cell. Duplicate questions are dropped, so few questions with two digits remain.)
#
# ## Curriculum or direct training
#
# Two agents train for 24 learning steps each. One trains only on numbers up to 99. The other starts with two digits,
# continues with three, and spends half of its steps on numbers up to 99. Both use the same number of samples per
# step.


# %%
def agent() -> Population:
    return GRPO.population(
        1,  # one agent: this story is about tasks, not about hyperparameters
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=TOKENS,
        group_size=GROUP,
        batch_size=32,
        lr=3e-4,
    )


def learn(population: Population, name: str, steps: int, *, tested: bool) -> tuple:
    """So many steps of one task; returns the run, and the share of right answers among the samples of each step."""
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
    return run, [generation.members[0].metrics["rewards/right/mean"] for generation in run]


HARD = "two numbers up to 99"
PLAN = dict(zip(LEVELS, (STEPS // 4, STEPS // 4, STEPS // 2), strict=True))
straight, straight_right = learn(agent(), HARD, STEPS, tested=True)
climber, climbed = agent(), []
for name, steps in PLAN.items():
    climbing, rights = learn(climber, name, steps, tested=name == HARD)
    climbed.append((name, rights))
    print(f"{name:20} right among the samples: {', '.join(f'{value:.2f}' for value in rights)}")
print(f"{'straight to it':20} right among the samples: {', '.join(f'{value:.2f}' for value in straight_right)}")

# %%
figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
axis.plot(range(1, STEPS + 1), straight_right, "o-", color="tab:grey", label=f"straight to it: {HARD}")
at = 1
for (name, rights), colour in zip(climbed, ("tab:green", "tab:olive", "tab:red"), strict=True):
    axis.plot(range(at, at + len(rights)), rights, "o-", color=colour, label=f"curriculum: {name}")
    at += len(rights)
axis.set(xlabel="learning step", ylabel="right answers among the samples", ylim=(-0.03, 1.03))
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# The coloured segments show different tasks. Only the red segment is comparable with the grey line.
#
# ## The test
#
# Both agents answer the same held-out test questions of the hard task.

# %%
for name, run in (("straight to it", straight), ("curriculum", climbing)):
    test = run.result.test
    print(f"{name:15} right {test.before.mean:.2f} → {test.after.mean:.2f} ± {test.after.standard_error:.2f}")
    assert SHORT or test.after.mean > test.before.mean + 2 * test.after.standard_error, "nothing was learnt"
one, other = (torch.tensor(run.result.test.scores) for run in (climbing, straight))
difference = one - other  # question by question
error = difference.std() / len(difference) ** 0.5
print(f"curriculum less straight: {difference.mean():+.2f} ± {error:.2f}")

# %% [markdown]
# Both improved from none to a third of the test questions. The curriculum was neither better nor worse: its twelve
# easier steps were worth as much as twelve steps of the hard task. With one seed and 64 questions, a difference of
# 0.1 in either direction would not be visible.
#
# The samples show two more things. The task that we placed in the middle is the hardest. After six steps the model
# solved half of the two-digit tasks, then almost no three-digit tasks, and then a fifth of the tasks with numbers up
# to 99. Measure the difficulty of tasks before you order them. The grey line is noisy, because a step has eight
# questions with eight completions each. The value of 0.72 in step 13 was luck. Use the test for conclusions.
#
# ## Three things to try
#
# 1. Use a population: four agents with `hp_config=HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3,
#    scale="log"))` instead of one agent with a fixed learning rate.
# 2. Use both functions, `reward_weights=[1.0, 0.2]`. Does the model learn to answer with the number alone, and does
#    accuracy stay the same?
# 3. Use another task: `reasoning_gym.create_dataset("leg_counting", ...)`. Read ten questions, guess the untrained
#    model's score, and check it.
