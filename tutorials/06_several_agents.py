# ---
# jupyter:
#   evogrpo:
#     needs: [mpe2, moviepy, pygame]
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Several agents
#
# **The question.** Three agents must cover three landmarks without collisions.
# Should they share one policy or train one each? Should an agent learn from its
# own rewards or from those of the team?
#
# **You will learn**
#
# - how to train several agents in an environment with PettingZoo's parallel
#   API;
# - the meaning of `policies` and `credit`, and their effect in this game;
# - how to record a video of the result.
#
# **It needs** the installation described in [all tutorials](README.md), and in
# the checkout `pip install -e ".[video]" mpe2`; one CPU core, about 3 minutes
# and 1 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=06`
# in the repository. The file `06_several_agents.py` holds the same content as
# text.

# %%
import itertools
import os
import shutil

import imageio.v3 as imageio
import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Image as Shown
from mpe2 import simple_spread_v3
from PIL import Image

from evogrpo import (
    MultiAgentGRPO,
    PettingZooGroups,
    Population,
    evolve,
    record_video,
)
from evogrpo.evolution import Fixed

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
STEPS, EPISODES = (2, 16) if SHORT else (25, 48)
torch.set_num_threads(1)  # the networks are tiny, so one thread is fastest

# %% [markdown]
# ## The game
#
# In `simple_spread`, an agent observes its own position and the relative
# positions of all agents and landmarks. It accelerates in one of four
# directions or does nothing. The game ends after 25 steps. The team reward is
# minus the distance from each landmark to the nearest agent. An agent also gets
# a penalty for each collision. All returns are negative, and the best is close
# to 0.

# %%
GAME = PettingZooGroups(
    simple_spread_v3.parallel_env,
    env_kwargs={"N": 3, "max_cycles": 25, "dynamic_rescaling": True},
    test_size=8 if SHORT else 100,
)
print(GAME.agents)
shape = GAME.observation_spaces["agent_0"].shape
actions = GAME.action_spaces["agent_0"].n
print("one sees", shape, "numbers and has", actions, "actions")

# %% [markdown]
# ## Two settings, four combinations
#
# - `policies="shared"` is one network for all three agents. It trains on three
#   times as many samples. `agent_ids` adds the agent's identity to the
#   observation, so that agents can act differently on equal observations.
#   `"independent"` is one network per agent.
# - `credit="team"` rewards an action with the later rewards of *all* agents.
#   `"agent"` counts only the agent's own rewards.
#
# Each combination is trained with a population of two. The two members sample
# different actions, and nothing evolves. All combinations use the same starts.


# %%
def population(policies: str, credit: str, size: int = 2) -> Population:
    return MultiAgentGRPO.population(
        size,
        GAME.observation_spaces,
        GAME.action_spaces,
        policies=policies,
        credit=credit,
        agent_ids=policies == "shared",
        lr=3e-3,
        gamma=0.95,
        batch_size=1024,
    )


runs, curves = {}, {}
settings = itertools.product(("shared", "independent"), ("team", "agent"))
for policies, credit in settings:
    run = evolve(
        population(policies, credit),
        GAME,
        strategy=Fixed(),
        fitness="rollouts",  # the mean return of the training episodes
        generations=STEPS,
        steps_per_generation=1,
        samples_per_step=EPISODES,
        progress=False,
    )
    curves[policies, credit] = np.array(
        [[member.fitness for member in step.members] for step in run]
    )
    runs[policies, credit] = run
    trained, untrained = run.result.test.after, run.result.test.before
    value = f"{trained.mean:6.1f} ± {trained.standard_error:.1f}"
    print(f"{policies:11} policies, {credit:5} credit: {value}")
print(f"untrained: {untrained.mean:6.1f} ± {untrained.standard_error:.1f}")

# %% [markdown]
# The values are sums over the three agents on 100 held-out starts. The ± is the
# standard error over these starts. It does not include the variation between
# seeds. For that, see the figure, which shows the two members of each
# combination separately.

# %%
COLOURS = {"team": "tab:green", "agent": "tab:purple"}
figure, axes = plt.subplots(
    1, 2, figsize=(11, 3.8), layout="constrained", sharey=True
)
for axis, policies in zip(axes, ("shared", "independent"), strict=True):
    for credit, colour in COLOURS.items():
        curve = curves[policies, credit]
        smooth = np.array(
            [
                curve[max(0, step - 4) : step + 1].mean(0)
                for step in range(STEPS)
            ]
        )
        axis.plot(
            range(1, STEPS + 1),
            smooth,
            color=colour,
            label=[f"{credit} credit", None],
        )
    axis.set(
        title=f"{policies} policies",
        xlabel=f"learning step ({EPISODES} episodes each)",
    )
    axis.legend(loc="lower right")
axes[0].set_ylabel(
    "team's return while learning\n(mean of the last five steps)"
)
plt.show()

# %% [markdown]
# All four combinations learn and end close together. The results allow three
# statements:
#
# - Shared policies are not worse than independent ones here, with a third of
#   the weights. In the table they are ahead by a few points. This may be
#   chance: in the figure, two members of one combination end up to three points
#   apart.
# - There is no significant difference between team credit and own credit. In
#   this game, half of an agent's reward is the team's (`local_ratio` is 0.5).
#   Credit matters if agents compete, or if only other agents receive the reward
#   of an action.
# - No return is near 0, and learning has not converged. 25 steps are few.
#
# *Fitness* is always the return of the team. The metric `reward` is the
# training reward, so with `credit="agent"` it is about a third of the team's
# return.

# %%
returns = {key: run.result.test.after.mean for key, run in runs.items()}
assert SHORT or min(returns.values()) > untrained.mean + 10
shared, independent = (
    np.mean([returns[policies, credit] for credit in COLOURS])
    for policies in ("shared", "independent")
)
assert SHORT or shared > independent - 2, "shared policies are worse"

# %% [markdown]
# ## Video
#
# `record_video` runs an episode with a copy of an agent and writes an MP4 file.
# The next cell records the untrained agents and the best ones from one test
# start, and combines both in one animation.

# %%
# Delete the videos of an earlier execution of this notebook.
shutil.rmtree("runs/tutorial-06", ignore_errors=True)
best = max(returns, key=returns.get)
agents = {"untrained": population(*best)[0], "trained": runs[best].best}
start = [GAME.reset_seed("test", 1)]
films = {}
for name, agent in agents.items():
    path = f"runs/tutorial-06/{name}.mp4"
    (film,) = record_video(agent, GAME, path, seeds=start)
    films[name] = imageio.imread(film.path)
    print(f"{name:9} return {film.episode_return:6.1f} in {film.length} steps")
line = np.zeros((films["trained"].shape[1], 6, 3), dtype=np.uint8)
pairs = []
for before, after in zip(films["untrained"], films["trained"], strict=True):
    image = Image.fromarray(np.hstack([before, line, after]))
    pairs.append(image.resize((560, 280)).quantize(16))
pairs[0].save(
    "runs/tutorial-06/both.gif",
    save_all=True,
    append_images=pairs[1:],
    duration=150,
    loop=0,
)
Shown("runs/tutorial-06/both.gif")

# %% [markdown]
# Left: untrained. Right: trained. Blue discs are agents, black discs are
# landmarks. The next figure shows four frames, for formats without animation.

# %%
figure, axes = plt.subplots(2, 4, figsize=(10, 5.2), layout="constrained")
for row, (name, frames) in zip(axes, films.items(), strict=True):
    for axis, step in zip(row, (0, 6, 12, len(frames) - 1), strict=True):
        axis.imshow(frames[step][::3, ::3])
        axis.set(xticks=[], yticks=[], title=f"{name}, step {step}")
plt.show()

# %% [markdown]
# ## Three things to try
#
# 1. Leave out `agent_ids` for the shared policy. Agents with equal observations
#    then have the same policy. How much is lost?
# 2. Add evolution: `credit` does not evolve, but the learning rate and `gamma`
#    do. Give `population` an `hp_config=HyperparameterConfig(lr=...,
#    gamma=...)` and leave out `strategy=Fixed()`.
# 3. Train rivals: `mpe2.simple_tag_v3` has predators and a prey. Use
#    `policies="prefix"` and `credit="agent"`, and read evogrpo's warning if you
#    keep `credit="team"`.
