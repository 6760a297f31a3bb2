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
# # Tasks of reasoning-gym, and a curriculum by hand
#
# **The question.** A small model gets almost nothing right on a hard task, so there is almost nothing to learn from.
# Does it help to begin with an easier one?
#
# **You will learn**
#
# - how to use the generators and verifiers of [reasoning-gym](https://github.com/open-thought/reasoning-gym) as
#   rewards;
# - how several reward functions are weighed, and seen apart;
# - how to go from one task to the next by hand, and how to ask whether that paid.
#
# **It needs** what [all tutorials](README.md) need, which brings the model, and the extra `reasoning`
# (`pip install -e ".[reasoning]"` in the checkout); one CPU core, about 6 minutes and 3 GB of memory. One of the
# requirements of reasoning-gym is compiled while it is installed, so a C compiler has to be there. Where reasoning-gym
# is missing, `make tutorials` leaves this notebook out and says so.
#
# **To run it:** open this notebook in Jupyter, or `make tutorials ARGS=03` in the repository. The other half of the
# pair, `03_reasoning_gym.py`, is the same as text.

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
# reasoning-gym makes questions from a seed, as many as one likes, and says how hard. We take one family, sums, at three
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
# ## Two rewards, seen apart
#
# Each task brings its verifier, `score_answer`. Let us ask it before we trust it.

# %%
entry = TASKS["two digits"][0]
texts = (entry["answer"], f"The answer is {entry['answer']}.", f"{entry['answer']} or maybe 7", "I do not know")
paid = [TASKS["two digits"].score_answer(text, entry) for text in texts]
for text, value in zip(texts, paid, strict=True):
    print(f"{value:.2f}  {text!r}")
assert paid[0] == 1 > paid[1] > paid[3] == 0

# %% [markdown]
# It pays in full for the answer alone, and a little where the answer stands somewhere in a text: the less, the longer
# the text. So an agent that is always right, but says so in a sentence, would look as if it knew next to nothing. We
# want it to be right. So we pay for a function of our own, is the last number the answer, and let the verifier watch
# with weight 0.


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
# (Where the verifier alone is enough, `HuggingFaceGym.from_reasoning_gym("chain_sum", tokenizer=...)` does all of this
# in one line. Questions that occur twice are left out, which for two digits leaves few.)
#
# ## From easy to hard, or straight to it
#
# Two agents take 24 learning steps each. One spends all of them on numbers up to 99. The other begins with two digits,
# goes on with three, and ends with numbers up to 99, for which it has half the steps. Both take the same number of
# samples per step.


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
# Mind that the coloured pieces are of different tasks. Only the red piece can be compared with the grey line.
#
# ## The test
#
# Both answer the same test questions of the hard task, which neither has seen.

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
# Both have learnt: from none to a third of the test questions. The curriculum was neither better nor worse. Its twelve
# easier steps were worth as much as twelve more steps of the hard task, and no more: one seed and 64 questions could
# hide a difference of 0.1 either way.
#
# The samples tell two things more. What we took for the middle level is the hardest: after six steps of single digits
# the model got every second of them right, of three digits almost none, and then again a fifth of the two numbers up to
# 99. How hard a task looks to us says little. Measure before you order them. And the grey line leaps, since a step asks
# eight questions, eight times each: the 0.72 of step 13 was a lucky eight. The test is what counts.
#
# ## Three things to try
#
# 1. Let the population decide: four agents with `hp_config=HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3,
#    scale="log"))` in place of one agent with a learning rate that we chose.
# 2. Pay both functions, `reward_weights=[1.0, 0.2]`. Does the model learn to answer with the number alone, and is it
#    right as often?
# 3. Another family: `reasoning_gym.create_dataset("leg_counting", ...)`. Look at ten questions, guess what the model
#    earns untrained, and check.
