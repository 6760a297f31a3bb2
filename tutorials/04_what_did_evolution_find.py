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
# **The question.** A run has finished with a good best member. Which
# hyperparameters caused that? Does a new agent reach the same result with them?
# Did evolution help, or would one agent with the defaults have been as good?
#
# **You will learn**
#
# - how to read a run: its members, its lineage, and its hyperparameters over
#   time;
# - what calibration of the learning rate leaves for evolution to find;
# - how to export and replay the schedule that evolution found;
# - how to run controls, and how to interpret differences within noise.
#
# **It needs** the installation described in [all tutorials](README.md), one CPU
# core, about 6 minutes and 1 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=04`
# in the repository. The file `04_what_did_evolution_find.py` holds the same
# content as text.

# %%
import os
import shutil

import matplotlib.pyplot as plt
import numpy as np
import torch

import evogrpo
from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HyperparameterConfig,
    Population,
    RLParameter,
    Tournament,
    evolve,
)
from evogrpo.evolution import Fixed, SelectionOnly, Strategy
from evogrpo.training.evolve import Run

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
GENERATIONS, STEPS, SEEDS = (2, 1, (0, 1)) if SHORT else (8, 4, (0, 1, 2))
# The networks are tiny: threads would wait for each other.
torch.set_num_threads(1)

# %% [markdown]
# ## A run
#
# In Pendulum, a rod has to be swung up and held upright. The cost of a step
# grows with the distance from standing still at the top. An episode has 200
# steps. An untrained agent has a return of about −1,200. An agent that swings
# up at once has −150.
#
# No learning rate is given, so it is calibrated: evogrpo searches, on the first
# samples, the learning rate with which a learning step changes the policy by
# `target_kl`. Evolution searches the rest: `target_kl` itself, the number of
# epochs, the clip coefficient and the group size. The first member starts with
# a step and a number of epochs that are far too small, and the others are
# spread over the ranges. One folder holds all files.

# %%
FOLDER = "runs/tutorial-04"
shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier execution
ENV = GymnasiumGroups(
    "Pendulum-v1", test_size=100, max_episode_steps=10 if SHORT else None
)
SPACE = HyperparameterConfig(
    target_kl=RLParameter(min=0.0005, max=0.02, scale="log"),
    update_epochs=RLParameter(min=1, max=8, scale="log"),
    clip_coef=RLParameter(min=0.1, max=0.4, scale="log"),
    group_size=RLParameter(choices=[4, 8]),
)
POOR = {"target_kl": 0.0005, "update_epochs": 1}
SCHEDULE = {
    "generations": GENERATIONS,
    "steps_per_generation": STEPS,
    "samples_per_step": 16,
    "validation_questions": 32,
}


def population(seed: int, size: int = 8, **options: object) -> Population:
    spaces = ENV.observation_space, ENV.action_space
    options = {"hp_config": SPACE, **POOR, **options}
    return GRPO.population(size, *spaces, seed=seed, **options)


run = evolve(
    population(seed=0),
    ENV,
    strategy=Tournament(),
    run_dir=f"{FOLDER}/run",
    progress=False,
    **SCHEDULE,
).finish()

# %% [markdown]
# ## The lineage
#
# `read_run` converts the run's journal to data frames. A row of `members` is
# one member at the end of one generation. This is the last generation.

# %%
frames = evogrpo.read_run(f"{FOLDER}/run")
members = frames.members
SEARCHED = ["target_kl", "update_epochs", "clip_coef", "group_size"]
columns = ["member", "parent", "fitness", "standard_error", *SEARCHED]
digits = {"fitness": 1, "standard_error": 1, "clip_coef": 3, "target_kl": 4}
members[members.generation == GENERATIONS][columns].round(digits)

# %% [markdown]
# This figure shows the whole run. Each line is one member, coloured by its
# `target_kl`. Thin grey lines connect parents with their clones. Black circles
# mark the lineage of the winner.

# %%
births = frames.births.set_index("member")
best = members[members.in_best_lineage]
figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
for axis, column in zip(axes, ("fitness", "target_kl")):
    for member, rows in members.groupby("member"):
        first = rows.iloc[0]
        shade = np.log(first.target_kl / 0.0005) / np.log(40)
        colour = plt.colormaps["plasma"](0.9 * shade)
        axis.plot(rows.generation, rows[column], "o-", color=colour)
        parent = members[
            members.generation.eq(births.born[member])
            & members.member.eq(births.parent[member]).fillna(False)
        ]
        axis.plot(
            [*parent.generation, first.generation],
            [*parent[column], first[column]],
            color="lightgrey",
            zorder=0,
        )
    circles = {"color": "none", "markeredgecolor": "black", "markersize": 10}
    axis.plot(best.generation, best[column], "o", **circles)
    axis.set_xlabel("generation")
axes[0].set(ylabel="mean return on validation starts", title="fitness")
axes[1].set(ylabel="target_kl", yscale="log", title="KL of a learning step")
plt.show()
print(
    best[["generation", "member", *SEARCHED, "fitness"]].to_string(
        index=False, float_format="{:.3g}".format
    )
)

# %% [markdown]
# The winner's lineage begins with a founder that takes large steps: a
# `target_kl` of 0.019 and five epochs. In generation 5 a mutation halves
# `target_kl` and reduces the epochs to two. At the end, seven of eight members
# have a `target_kl` near 0.01, which is also the package's default.
#
# The circles also form a *schedule*: the hyperparameters that the winner was
# trained with in each step. Its last values are only one part of it.
#
# ## Which step size helps?
#
# The gain of a member in a generation is its fitness at the end minus its
# fitness at the start.

# %%
gains = members.fitness - members.fitness_before
figure, axes = plt.subplots(1, 2, figsize=(12, 3.6), layout="constrained")
for axis, column in zip(axes, ("target_kl", "update_epochs")):
    points = axis.scatter(members[column], gains, c=members.generation)
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.set(xscale="log", xlabel=column)
axes[0].set_ylabel("gain in one generation")
figure.colorbar(points, label="generation")
plt.show()
half = np.sqrt(0.0005 * 0.02)
print("mean gain, small steps:", round(gains[members.target_kl < half].mean()))
print("mean gain, large steps:", round(gains[members.target_kl > half].mean()))

# %% [markdown]
# Most large gains are at the right of the first figure, and so are some large
# losses. In the last two generations (light points) nothing is gained any more.
# Many points belong to clones of each other. The figure suggests that large
# steps helped early. It proves nothing.
#
# ## Does a new agent reach the same result?
#
# The winner's schedule can be exported and replayed with one new agent, without
# selection.

# %%
# !evogrpo export runs/tutorial-04/run --schedule runs/tutorial-04/found.yaml
# !head -n 18 runs/tutorial-04/found.yaml

# %% [markdown]
# New agents follow the whole schedule. Others use the winner's last values from
# the first step on, for the same number of steps. A third group uses the
# package's defaults. All their learning rates are calibrated.


# %%
def test_of(run: Run) -> float:
    """Mean return on the 100 test starts, which nothing else uses."""
    return run.result.test.after.mean


def alone(
    seed: int, generations: int, samples: int = 16, **values: object
) -> float:
    """Train one agent with constant hyperparameters."""
    spaces = ENV.observation_space, ENV.action_space
    agent = GRPO.population(1, *spaces, seed=100 + seed, **values)
    options = {"generations": generations, "samples_per_step": samples}
    options = SCHEDULE | options | {"strategy": Fixed(), "progress": False}
    return test_of(evolve(agent, ENV, **options).finish())


def replayed(seed: int) -> float:
    """Train one agent with the winner's schedule."""
    agent = population(100 + seed, 1)
    schedule = f"{FOLDER}/found.yaml"
    return test_of(
        evogrpo.replay(schedule, agent, ENV, progress=False).finish()
    )


winner = run.result.best
last = {name: getattr(winner.hyperparameters, name) for name in SEARCHED}
single = {
    "schedule, replayed": [replayed(seed) for seed in SEEDS],
    "last values": [alone(seed, winner.generation, **last) for seed in SEEDS],
    "defaults": [alone(seed, GENERATIONS) for seed in SEEDS],
    "poor values": [alone(seed, GENERATIONS, **POOR) for seed in SEEDS],
}
print(f"{'the winner':20}", round(test_of(run)))
for name, returns in single.items():
    print(f"{name:20}", sorted(map(round, returns)))
best_single = max(max(returns) for returns in single.values())
assert SHORT or test_of(run) > best_single, "the best of eight was lucky"

# %% [markdown]
# None of the new agents is as good as the winner. The winner was the best of
# many members, so it was also lucky, and luck cannot be exported. The schedule
# is better than its last values alone: small steps from the start are too slow.
# The defaults are about as good as the schedule. The poor values learn nothing.
#
# (The warnings above concern the poor values. evogrpo warns where agents are
# better with sampled actions than with greedy ones.)
#
# ## Was it evolution?
#
# A population of eight is eight attempts, and it samples eight times as much as
# one agent. Three controls have the same number of samples. `Fixed` trains all
# eight members to the end with their initial values. `SelectionOnly` replaces
# the worst members by clones of the best, but never changes a hyperparameter.
# The last control is one agent with the defaults that gets all the samples.

# %%
ARMS: dict[str, Strategy] = {
    "evolution": Tournament(),
    "selection only": SelectionOnly(),
    "fixed": Fixed(),
}
populations = {
    name: [
        test_of(
            evolve(
                population(seed), ENV, strategy=arm, progress=False, **SCHEDULE
            ).finish()
        )
        for seed in SEEDS
    ]
    for name, arm in ARMS.items()
}
populations["one agent, all samples"] = [
    alone(seed, GENERATIONS, samples=8 * 16) for seed in SEEDS
]
everything = populations | single
figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
for place, returns in enumerate(everything.values()):
    axis.plot(returns, [place] * len(returns), "o", markersize=7, alpha=0.7)
    mean = np.mean(returns)
    axis.plot([mean, mean], [place - 0.25, place + 0.25], color="black")
axis.set(
    yticks=range(len(everything)),
    yticklabels=list(everything),
    xlabel="mean return on 100 test starts, one point a seed",
)
axis.invert_yaxis()
axis.axhline(3.5, color="grey", linestyle=":")
axis.set_title("above the dots: 8 times the samples", fontsize=10)
plt.show()


def difference(one: str, other: str) -> str:
    """Mean difference over seeds, and its standard error."""
    values = np.subtract(everything[one], everything[other])
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{one} − {other}: {values.mean():+.0f} ± {error:.0f}"


for other in ("selection only", "fixed", "one agent, all samples"):
    print(difference("evolution", other))
means = {name: np.mean(returns) for name, returns in everything.items()}
assert SHORT or means["one agent, all samples"] > means["evolution"]

# %% [markdown]
# The run above is the best point of the first row. The other seeds of the same
# arm are worse. On average evolution is above its two controls, but by less
# than the standard errors. One agent with the defaults and all the samples has
# nearly the best return in all three seeds.
#
# What did evolution find? From values with which an agent learns nothing, it
# came to a step size near the default and to one good member. That helps if no
# good values are known. If the defaults work, one agent makes better use of the
# samples. [docs/results.md](../docs/results.md) compares more ways to search.
#
# ## Three things to try
#
# 1. Search the learning rate instead: `lr=RLParameter(min=1e-5, max=1e-1,
#    scale="log")` in `SPACE`, without `target_kl`. It is then not calibrated.
# 2. Double the number of generations. Does evolution become better than
#    selection alone?
# 3. Open the same run in a browser: `evogrpo report runs/tutorial-04/run`
#    writes `report.html`, which shows details of each point.
