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
# **The question.** A run has finished with a good best member. Which hyperparameters caused that? Does a new agent
# reach the same result with them? Did evolution help, or is the best of eight random settings as good?
#
# **You will learn**
#
# - how to read a run: its members, its lineage, and its hyperparameters over time;
# - why the winner's last learning rate does not explain its result, and what does;
# - how to export and replay the schedule that evolution found;
# - how to run a control, and how to interpret differences within noise.
#
# **It needs** the installation described in [all tutorials](README.md), one CPU core, about 5 minutes and 1 GB of
# memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=04` in the repository. The file
# `04_what_did_evolution_find.py` holds the same content as text.

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
# ## A run
#
# In Pendulum, a rod has to be swung up and held upright. The cost of a step grows with the distance from standing
# still at the top. An episode has 200 steps. An untrained agent has a return of about −1,200. An agent that swings up
# at once has −150.
#
# Three hyperparameters are searched. The learning rate may lie anywhere between 1e-5 and 1e-1. The first member
# starts at the lower end, and the others are spread over the ranges. One folder holds all files.

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
# ## The lineage
#
# `read_run` converts the run's journal to data frames. A row of `members` is one member at the end of one generation.
# This is the last generation.

# %%
told = evogrpo.read_run(f"{FOLDER}/run")
columns = ["member", "parent", "fitness", "standard_error", "lr", "clip_coef", "group_size"]
told.members[told.members.generation == GENERATIONS][columns].round({"fitness": 1, "standard_error": 1, "clip_coef": 3})

# %% [markdown]
# This figure shows the whole run. Each line is one member, coloured by its learning rate. Thin grey lines connect
# parents with their clones. Black circles mark the lineage of the winner.

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
# The winner's lineage starts with a founder whose learning rate was almost 1e-2. That value came from the initial
# spread over the range. Later mutations changed it little. The left figure shows the effect of evolution. Up to
# generation 4, this lineage is one of several. From generation 6 on, most living members belong to it, because its
# clones replaced the others.
#
# The circles also form a *schedule*: the hyperparameters that the winner was trained with in each step. Its last
# values are only one part of it.
#
# ## Which learning rate helps when?
#
# The gain of a member in a generation is its fitness at the end minus its fitness at the start.

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
assert SHORT or gains[early].max() < gains[~early].max() / 2, "gains are small early"

# %% [markdown]
# The two axes have different scales: the left one is much smaller. In the first two generations all gains are small,
# and the largest learning rate loses. Later, a learning rate of 1e-2 gives the largest gains *and* large losses. Each
# point is one member in one generation, and many points belong to clones of each other. The figure suggests
# hypotheses and proves none.
#
# ## Does a new agent reach the same result?
#
# The winner's schedule can be exported and replayed with one new agent, without selection.

# %%
# !evogrpo export runs/tutorial-04/run --schedule runs/tutorial-04/found.yaml
# !head -n 18 runs/tutorial-04/found.yaml

# %% [markdown]
# `generations: [4, 4, 4]` means three generations of four learning steps each. Four new agents follow the whole
# schedule. Four others use the winner's last values from the first step on, for the same number of steps.


# %%
def test_of(run: "evogrpo.training.evolve.Run") -> float:
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
# All new agents improved, and none is as good as the winner. This is expected. The winner is the best of eight, so it
# was also lucky, and luck cannot be exported. The mean of the schedule is better than that of the last values. With
# four agents each, the results overlap too much for a conclusion.
#
# (The warnings above concern agents that are still better with sampled actions than with greedy ones. evogrpo warns
# because fitness is measured greedily unless you set `fitness={"sampled": True}`.)
#
# ## Was it evolution?
#
# A population of eight is eight attempts. The best of them might be as good without evolution. Two controls have the
# same cost. `Fixed` trains all eight members to the end with their initial values. `SelectionOnly` replaces the worst
# members by clones of the best, but never changes a hyperparameter. Each arm has four seeds.

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
# The run above is one of the best points of the first row. Two other seeds of the same arm are far worse. On average,
# evolution was *not* better than its controls here, and the differences are about as large as their standard errors.
# The experiment shows no effect in either direction. Most of the winner's result came from the eight founders: one of
# them started close to a good learning rate, and selection kept it.
#
# One seed without a control would have suggested a success of evolution that was luck.
# [docs/results.md](../docs/results.md) has studies with enough seeds to show where evolution helps.
#
# ## Three things to try
#
# 1. Remove the lucky founder: `RLParameter(min=1e-5, max=1e-1, scale="log", founders=[1e-5, 3e-5])`. Evolution then
#    has to find a good learning rate. Do the controls still reach the same result?
# 2. Double the number of generations. Does evolution become better than selection alone?
# 3. Open the same run in a browser: `evogrpo report runs/tutorial-04/run` writes `report.html`, which shows details
#    of each point.
