# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What did evolution find?
#
# **The question.** A run has ended, and its best member is good. Which hyperparameters did that? Would a fresh agent do
# as well with them? And did evolution help at all, or would the best of eight random guesses have done?
#
# **You will learn**
#
# - how to read a run: its members, its lineage, its hyperparameters over time;
# - why the winner's last learning rate is not what made it good, and what is;
# - how to export the schedule that evolution found, and replay it;
# - how to ask a control, and how to read an answer that drowns in noise.
#
# **It needs** what [all tutorials](README.md) need, one CPU core, about 5 minutes and 1 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or `make tutorials ARGS=04` in the repository. The other half of the
# pair, `04_what_did_evolution_find.py`, is the same as text.

# %%
import os
import shutil

import matplotlib.pyplot as plt
import numpy as np
import torch

import evogrpo
from evogrpo import GRPO, GymnasiumGroups, HyperparameterConfig, Population, RLParameter, Tournament, evolve
from evogrpo.evolution import Fixed, SelectionOnly, Strategy

SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"  # a quick look whether everything runs; figures then say little
GENERATIONS, STEPS, STARTS, SEEDS = (2, 1, 4, (0, 1)) if SHORT else (8, 4, 32, (0, 1, 2, 3))
torch.set_num_threads(1)  # the networks are tiny: threads would wait for each other

# %% [markdown]
# ## A run to look at
#
# Pendulum has a rod that has to be swung up and held there. Every step costs the more, the further the rod is from
# standing still at the top. An episode has 200 steps. An untrained agent earns about −1,200, and one that swings up at
# once −150.
#
# We pretend to know nothing of three hyperparameters. The learning rate may be anything from 1e-5 to 1e-1. The first
# member begins at the lower end, and the others are spread over the ranges. Everything is written to one folder.

# %%
FOLDER = "runs/tutorial-04"
shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier time through this notebook
ENV = GymnasiumGroups("Pendulum-v1", test_size=100, max_episode_steps=10 if SHORT else None)
SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-5, max=1e-1, scale="log"),
    clip_coef=RLParameter(min=0.05, max=0.5, scale="log"),
    group_size=RLParameter(choices=[4, 8, 16]),
)
SCHEDULE = {
    "generations": GENERATIONS,
    "steps_per_generation": STEPS,
    "samples_per_step": 32,
    "validation_questions": 32,
}


def population(seed: int, size: int = 8, **hyperparameters: float) -> Population:
    options = {"lr": 1e-5, "hp_config": SPACE} | hyperparameters
    return GRPO.population(size, ENV.observation_space, ENV.action_space, seed=seed, **options)


run = evolve(population(seed=0), ENV, run_dir=f"{FOLDER}/run", **SCHEDULE).finish()

# %% [markdown]
# ## Who descends from whom
#
# `read_run` turns the run's journal into data frames. A row of `members` is one member at the end of one generation.
# Here is the last generation.

# %%
told = evogrpo.read_run(f"{FOLDER}/run")
columns = ["member", "parent", "fitness", "standard_error", "lr", "clip_coef", "group_size"]
told.members[told.members.generation == GENERATIONS][columns].round({"fitness": 1, "standard_error": 1, "clip_coef": 3})

# %% [markdown]
# And here is the whole run. Each line is a member's life, coloured by its learning rate. Thin grey lines lead from a
# parent to its clone. Black circles mark the way to the winner.

# %%
members, births = told.members, told.births.set_index("member")
figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
for member, life in members.groupby("member"):
    colour = plt.colormaps["plasma"]((np.log10(life.lr.iloc[0]) + 5) / 4.5)
    parent = members[
        members.generation.eq(births.born[member]) & members.member.eq(births.parent[member]).fillna(False)
    ]
    for axis, column in zip(axes, ("fitness", "lr"), strict=True):
        axis.plot(life.generation, life[column], "o-", color=colour, markersize=5)
        first = life.iloc[0]
        axis.plot([*parent.generation, first.generation], [*parent[column], first[column]], color="lightgrey", zorder=0)
way = members[members.in_best_lineage]
for axis, column in zip(axes, ("fitness", "lr"), strict=True):
    axis.plot(way.generation, way[column], "o", color="none", markeredgecolor="black", markersize=10)
axes[0].set(xlabel="generation", ylabel="mean return on validation starts", title="how well they play")
axes[1].set(xlabel="generation", ylabel="learning rate", yscale="log", title="what they learn with")
plt.show()
print(
    way[["generation", "member", "lr", "fitness_before", "fitness"]].to_string(
        index=False, float_format="{:.3g}".format
    )
)
assert SHORT or 2e-3 < way.lr.iloc[0] < 5e-2, "the winner's line begins near 1e-2"

# %% [markdown]
# Follow the circles. The winner's line begins with a founder that had a learning rate of almost 1e-2, by nothing but
# the way in which founders are spread over the range. Mutations then changed it little. What evolution did is visible
# on the left: up to generation 4 the line is one of several, and from generation 6 on everybody who is left descends
# from it or stands beside it. The others were replaced by its clones.
#
# The circles are also a *schedule*: what the winner's state was trained with, step by step. Its last values are not all
# of it.
#
# ## When does which learning rate pay?
#
# A member's gain in a generation is its fitness at the end less the fitness of the state that it began with.

# %%
gains = members.fitness - members.fitness_before
early = members.generation <= 2
figure, axes = plt.subplots(1, 2, figsize=(12, 3.6), layout="constrained")
for axis, chosen, title in zip(axes, (early, ~early), ("generations 1 and 2", "later generations"), strict=True):
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.plot(members.lr[chosen], gains[chosen], "o", alpha=0.6)
    axis.set(xscale="log", xlim=(7e-6, 1.4e-1), xlabel="learning rate", title=title)
axes[0].set_ylabel("gain in one generation")
plt.show()
assert SHORT or gains[early].max() < gains[~early].max() / 2, "nobody gains much early"

# %% [markdown]
# Mind the scales: the left one ends where the right one has hardly begun. In the first two generations nobody gains
# much, and the largest learning rate loses. Later a learning rate of 1e-2 brings the largest gains *and* large losses.
# Each point is one member in one generation, and its neighbours are often its clones. So this shows where to look, and
# proves nothing.
#
# ## Would a fresh agent do as well?
#
# The winner's way can be exported, and replayed by one fresh agent that nobody selects.

# %%
# !evogrpo export runs/tutorial-04/run --schedule runs/tutorial-04/found.yaml
# !head -n 18 runs/tutorial-04/found.yaml

# %% [markdown]
# `generations: [4, 4, 4]` reads: three generations of four learning steps each. Four fresh agents now follow the whole
# schedule. Four others train equally long with the values that the winner had in the end, from the first step on.


# %%
def test_of(run: "evogrpo.training.loop.run.Run") -> float:
    """Mean return on the 100 test starts, which neither learning nor selection ever used."""
    return run.result.test.after.mean


schedule = f"{FOLDER}/found.yaml"
replayed = [test_of(evogrpo.replay(schedule, population(1 + seed, 1), ENV, progress=False).finish()) for seed in SEEDS]
last = {name: getattr(run.result.best.hyperparameters, name) for name in ("lr", "clip_coef", "group_size")}
constant, best = [], run.result.best
for seed in SEEDS:
    agent = population(1 + seed, 1, hp_config=None, **last)
    taken = SCHEDULE | {"generations": best.generation}
    constant.append(test_of(evolve(agent, ENV, strategy=Fixed(), progress=False, **taken).finish()))
print("the winner                     ", round(test_of(run)))
print("its schedule, fresh agents     ", sorted(map(round, replayed)))
print("its last values, fresh agents  ", sorted(map(round, constant)))
assert SHORT or min(replayed + constant) > run.result.test.before.mean + 100, "every fresh agent has learnt"
assert SHORT or max(replayed + constant) < test_of(run), "none is as good as the winner"

# %% [markdown]
# Every fresh agent has learnt, and none is as good as the winner. That is no accident. The winner is the best of eight,
# so it was also lucky, and luck cannot be exported. Is the schedule better than its last values? The means say so, but
# four agents of each kind overlap too much to tell.
#
# (The warnings above are of agents that play better at random than greedily, as yet. evogrpo says so, since fitness is
# measured greedily unless you ask for `fitness={"sampled": True}`.)
#
# ## Was it evolution?
#
# A population of eight is eight chances. Perhaps the best of them would have been as good without any evolution. So we
# run two controls at the same cost: `Fixed` lets all eight learn to the end with what they began with. `SelectionOnly`
# replaces the worst by clones of the best, but never changes a hyperparameter. Four seeds each, as one seed is an
# anecdote.

# %%
ARMS: dict[str, Strategy] = {"evolution": Tournament(), "selection only": SelectionOnly(), "fixed": Fixed()}
tested = {
    name: [test_of(evolve(population(seed), ENV, strategy=arm, progress=False, **SCHEDULE).finish()) for seed in SEEDS]
    for name, arm in ARMS.items()
}
everything = tested | {"schedule, replayed": replayed, "last values": constant}
figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
for place, returns in enumerate(everything.values()):
    axis.plot(returns, [place] * len(returns), "o", markersize=7, alpha=0.7)
    axis.plot([np.mean(returns)] * 2, [place - 0.25, place + 0.25], color="black", linewidth=1.5)
axis.set(
    yticks=range(len(everything)),
    yticklabels=list(everything),
    xlabel="mean return on 100 test starts, one point a seed",
)
axis.invert_yaxis()
axis.set_title("the first three: best of eight agents; the last two: one agent", fontsize=10)
plt.show()


def compared(one: str, other: str) -> tuple[float, float]:
    """Mean difference over seeds, which both share, and its standard error."""
    differences = np.subtract(tested[one], tested[other])
    return differences.mean(), differences.std(ddof=1) / len(differences) ** 0.5


for other in ("selection only", "fixed"):
    mean, error = compared("evolution", other)
    print(f"evolution less {other}: {mean:+.0f} ± {error:.0f}")
    assert SHORT or mean < 2 * error, "four seeds show no gain of evolution over this control"

# %% [markdown]
# Here is the honest reading. The run that we looked at is one of the best dots in the first row. Two other seeds of the
# same evolution ended far below. On average evolution did *not* do better than its controls here, and the differences
# are about as large as their standard errors. So nothing is shown either way. Most of what made our winner was in the
# eight founders: one of them happened to begin close to a good learning rate, and selection did the rest.
#
# Had we run one seed without a control, we would have told a fine story about what evolution found. It would have been
# a story about luck. [docs/results.md](../docs/results.md) has studies with enough seeds to say where evolution pays.
#
# ## Three things to try
#
# 1. Take away the lucky founder: `RLParameter(min=1e-5, max=1e-1, scale="log", founders=[1e-5, 3e-5])`. Now somebody
#    has to find the way. Do the controls still keep up?
# 2. Twice as many generations: does evolution catch up where selection alone has nothing left to select from?
# 3. Open the same run in a browser: `evogrpo report runs/tutorial-04/run` writes `report.html`, where every point can
#    be pointed at.
