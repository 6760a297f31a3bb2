# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # GRPO from scratch, then with evogrpo
#
# **The question.** PPO needs a critic, a second network that estimates returns. Group relative policy optimisation
# (GRPO) has none. It runs several episodes from the same start and compares them with each other. Is that enough to
# balance a pole? And which quantities should be compared?
#
# **You will learn**
#
# - how to write GRPO's group advantage in twenty lines, in three variants;
# - why one of the three cannot learn on CartPole;
# - how to train the same with evogrpo, with eight agents at once, and what it costs.
#
# **It needs** the installation described in [all tutorials](README.md), one CPU core, about 2 minutes and 1 GB of
# memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=05` in the repository. The file
# `05_grpo_from_scratch.py` holds the same content as text.

# %%
import os
import time
import warnings

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"  # a quick look whether everything runs; figures then say little
STEPS, SEEDS = (3, (0,)) if SHORT else (20, (0, 1, 2))
torch.set_num_threads(1)  # the networks are tiny: threads would wait for each other

# %% [markdown]
# ## A group: one start, eight episodes
#
# CartPole gives a reward of 1 for every step in which the pole stands. An episode ends when the pole falls, or after
# 500 steps. The policy is a small network. It maps four observed numbers to the probability of a push to the right.


# %%
def new_policy(seed: int) -> nn.Sequential:
    """Two layers of 64, and a last layer so small that both actions begin equally likely."""
    generator = torch.Generator().manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    for layer, gain in ((policy[0], 2**0.5), (policy[2], 2**0.5), (policy[4], 0.01)):
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
        nn.init.zeros_(layer.bias)
    return policy


def play(env: gymnasium.Env, policy: nn.Module, start: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """One episode from the start that the seed names: observations, actions and rewards."""
    observations, actions, rewards = [], [], []
    observation, _ = env.reset(seed=start)
    ended = False
    while not ended:
        with torch.no_grad():
            right = torch.softmax(policy(torch.as_tensor(observation)), -1)[1].item()
        observations.append(observation)
        actions.append(int(rng.random() < right))
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        rewards.append(reward)
        ended = terminated or truncated
    return np.array(observations), np.array(actions), np.array(rewards)


env = gymnasium.make("CartPole-v1")
untrained, rng = new_policy(0), np.random.default_rng(0)
group = [play(env, untrained, start=7, rng=rng) for _ in range(8)]
print("steps until the pole fell:", [len(rewards) for _, _, rewards in group])

# %% [markdown]
# All eight episodes began with the same state. Only the sampled actions differed. A longer episode must contain
# better actions. GRPO uses no other information.
#
# ## The group advantage in three variants
#
# An *advantage* is positive if an action should become more likely, and negative if it should become less likely. A
# group gives advantages in three ways:
#
# - **outcome**: compare the total rewards of the episodes. All actions of an episode get the same number.
#   ([DeepSeekMath](https://arxiv.org/abs/2402.03300), section 4.1.2)
# - **process**: compare each single reward with all rewards of the group, then sum over the later rewards of each
#   action. (the same paper, section 4.1.3)
# - **return to go**: first sum the later rewards of each action, then compare these sums within the group. (proposed
#   [for classic environments](https://www.kaggle.com/discussions/general/573162))

# %%
GAMMA = 0.99  # what an action earns fades with time


def ahead(rewards: np.ndarray) -> np.ndarray:
    """The discounted sum of the rewards from each step on."""
    total, sums = 0.0, np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        total = sums[t] = rewards[t] + GAMMA * total
    return sums


def compare(values: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """How many standard deviations each value lies above the pool's mean; 0 where all of the pool are equal."""
    return (values - pool.mean()) / (pool.std(ddof=1) + 1e-4)


def outcome(group: list[np.ndarray]) -> list[np.ndarray]:
    totals = np.array([rewards.sum() for rewards in group])
    return [ahead(np.eye(len(r))[-1] * compare(total, totals)) for r, total in zip(group, totals, strict=True)]


def process(group: list[np.ndarray]) -> list[np.ndarray]:
    pool = np.concatenate(group)
    return [ahead(compare(rewards, pool)) for rewards in group]


def return_to_go(group: list[np.ndarray]) -> list[np.ndarray]:
    sums = [ahead(rewards) for rewards in group]
    pool = np.concatenate(sums)
    return [compare(each, pool) for each in sums]


VARIANTS = {"outcome": outcome, "process": process, "return_to_go_group": return_to_go}

# %% [markdown]
# In the first variant, the advantage is placed on the last action and discounted backwards. evogrpo does the same.
# The next cell checks that the library's functions return the same numbers.

# %%
from evogrpo.functional.advantages import advantages

rewards = [episode[2] for episode in group]
mask = torch.zeros(8, max(map(len, rewards)), dtype=torch.bool)  # True = an action that was taken
for row, each in enumerate(rewards):
    mask[row, : len(each)] = True
for name, ours in VARIANTS.items():
    theirs = advantages(
        name,
        rewards=torch.tensor([each.sum() for each in rewards]),
        group_ids=torch.zeros(8, dtype=torch.long),  # all eight are one group
        member_ids=torch.zeros(8, dtype=torch.long),  # of one agent
        mask=mask,
        step_rewards=mask.double(),  # 1 for every step
        gamma=GAMMA,
    )
    difference = np.abs(np.concatenate(ours(rewards)) - theirs[mask].numpy()).max()
    print(f"{name:20} largest difference {difference:.1e}")
    assert difference < 1e-6

# %%
colours = plt.colormaps["viridis"](np.linspace(0, 0.9, 8))
order = np.argsort([len(each) for each in rewards])
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
for colour, row in zip(colours, order, strict=True):
    axes[0].plot(np.degrees(group[row][0][:, 2]), color=colour)
    for axis, variant in zip(axes[1:], VARIANTS.values(), strict=True):
        axis.plot(variant(rewards)[row], color=colour)
axes[0].set(title="one group: eight episodes", xlabel="step", ylabel="angle of the pole (degrees)")
for axis, name in zip(axes[1:], VARIANTS, strict=True):
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.set(title=name, xlabel="step", ylabel="advantage", ylim=(-2.7, 2.7))
plt.show()

# %% [markdown]
# Dark lines are short episodes, light lines are long ones.
#
# - *outcome* gives long episodes a positive and short episodes a negative advantage.
# - *process* is 0 everywhere. Every step has a reward of exactly 1, so all rewards are equal. There is no learning
#   signal.
# - *return to go* is negative for the last actions of every episode, also of long ones, because they are close to the
#   fall.

# %%
assert all(np.all(each == 0) for each in process(rewards))

# %% [markdown]
# ## Learning
#
# The rest is PPO's clipped objective. The probability ratio of an action is clipped at about 20 % per learning step.
# Each step samples 4 groups of 8 episodes and trains on them for four epochs.


# %%
def learn(
    policy: nn.Module, adam: torch.optim.Optimizer, played: tuple[np.ndarray, ...], rng: np.random.Generator
) -> None:
    observations, actions, advantage = (torch.as_tensor(each) for each in played)

    def log_probs(rows: np.ndarray | slice) -> torch.Tensor:
        return torch.log_softmax(policy(observations[rows]), -1).gather(1, actions[rows, None])[:, 0]

    with torch.no_grad():
        old = log_probs(slice(None))
    for _ in range(4):
        for rows in np.array_split(rng.permutation(len(actions)), max(1, len(actions) // 2048)):
            ratio, gain = (log_probs(rows) - old[rows]).exp(), advantage[rows]
            loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            adam.step()


def train_from_scratch(variant: str, seed: int) -> dict[str, list[float]]:
    rng, policy = np.random.default_rng(seed), new_policy(seed)
    adam = torch.optim.AdamW(policy.parameters(), lr=5e-3, weight_decay=0.0)
    curve, began, transitions = {"return": [], "transitions": [], "seconds": []}, time.process_time(), 0
    for step in range(STEPS):
        groups = [
            [play(env, policy, start=1000 * seed + 4 * step + number, rng=rng) for _ in range(8)] for number in range(4)
        ]
        advantage = [each for group in groups for each in VARIANTS[variant]([rewards for *_, rewards in group])]
        episodes = [episode for group in groups for episode in group]
        observations, actions, rewards = (np.concatenate(parts) for parts in zip(*episodes, strict=True))
        learn(policy, adam, (observations, actions, np.concatenate(advantage).astype(np.float32)), rng)
        transitions += len(rewards)
        curve["return"].append(rewards.sum() / len(episodes))
        curve["transitions"].append(transitions)
        curve["seconds"].append(time.process_time() - began)  # of the processor: other programs do not count
    return curve


scratch = {(variant, seed): train_from_scratch(variant, seed) for variant in VARIANTS for seed in SEEDS}
for (variant, seed), curve in scratch.items():
    print(
        f"{variant:20} seed {seed}: {curve['return'][0]:5.0f} →{curve['return'][-1]:5.0f} steps per episode, "
        f"{curve['transitions'][-1]:8,} transitions, {curve['seconds'][-1]:5.1f} s"
    )

# %%
COLOURS = {"outcome": "tab:blue", "process": "tab:grey", "return_to_go_group": "tab:orange"}
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for (variant, seed), curve in scratch.items():
    label = variant if seed == SEEDS[0] else None
    axis.plot(range(1, STEPS + 1), curve["return"], color=COLOURS[variant], label=label)
axis.axhline(475, color="grey", linestyle=":", linewidth=1)
axis.annotate("counts as solved", (1, 475), xytext=(0, 4), textcoords="offset points", fontsize=8, color="grey")
axis.set(xlabel="learning step (32 episodes each)", ylabel="mean return while learning", title="GRPO from scratch")
axis.xaxis.get_major_locator().set_params(integer=True)
axis.legend(loc="center right")
plt.show()

# %% [markdown]
# GRPO balances the pole without a critic. Each line is one seed. Seeds differ a lot, most of all with *outcome*: with
# one number per episode, good actions in bad episodes get a negative advantage. *process* does not learn, as the
# zeros above predicted. Three seeds do not show which of the other two is better, but they show that both learn.

# %%
last = {name: np.mean([scratch[name, seed]["return"][-1] for seed in SEEDS]) for name in VARIANTS}
print({name: round(float(value)) for name, value in last.items()})
assert last["process"] < 60, "what is compared here never differs"
assert SHORT or min(last["outcome"], last["return_to_go_group"]) > 100

# %% [markdown]
# ## The same with evogrpo
#
# The settings are the library's defaults for small networks, except for the advantage. The strategy `Fixed` changes
# nothing, so these are eight independent agents without evolution. They have equal initial weights and sample
# different actions. `fitness="rollouts"` computes fitness from the training episodes, so no further episodes are run.

# %%
from evogrpo import GRPO, GymnasiumGroups, Objective, evolve
from evogrpo.evolution import Fixed


def train_with_evogrpo(advantage: str, members: int) -> dict[str, np.ndarray]:
    env = GymnasiumGroups("CartPole-v1")
    population = GRPO.population(
        members,
        observation_space=env.observation_space,
        action_space=env.action_space,
        objective=Objective(loss_type="dapo", advantage=advantage),
    )
    began, curve = time.process_time(), []
    schedule = {"generations": STEPS, "steps_per_generation": 1, "samples_per_step": 32, "test_questions": 0}
    for generation in evolve(population, env, strategy=Fixed(), fitness="rollouts", progress=False, **schedule):
        returns = [member.metrics["reward"] for member in generation.members]
        curve.append((returns, generation.timesteps, time.process_time() - began))
    returns, transitions, seconds = zip(*curve, strict=True)
    return {"return": np.array(returns), "transitions": np.array(transitions), "seconds": np.array(seconds)}


with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    library = {variant: train_with_evogrpo(variant, members=8) for variant in VARIANTS}
print("evogrpo warns:", warned[0].message, end="\n\n")
for variant, curve in library.items():
    ends = ", ".join(f"{value:.0f}" for value in sorted(curve["return"][-1]))
    print(f"{variant:20} eight agents end at {ends}")
assert SHORT or library["outcome"]["return"][-1].mean() < library["return_to_go_group"]["return"][-1].mean()

# %% [markdown]
# The library warns about the missing learning signal. Eight agents show what three seeds could not. After the same
# number of episodes, *return to go* is ahead of *outcome*, and its agents end close together.
#
# The next figure shows the cost: transitions per second of CPU time.

# %%
rates = {
    "from scratch": scratch["return_to_go_group", 0],
    "evogrpo, 1 agent": train_with_evogrpo("return_to_go_group", members=1),
    "evogrpo, 8 agents": library["return_to_go_group"],
}
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
speed = {}
for name, curve in rates.items():
    speed[name] = curve["transitions"][-1] / curve["seconds"][-1]
    returns = np.array(curve["return"]).reshape(STEPS, -1)
    lines = axes[0].plot(curve["seconds"], returns.mean(1), label=name)
    if returns.shape[1] > 1:
        axes[0].fill_between(
            curve["seconds"], returns.min(1), returns.max(1), color=lines[0].get_color(), alpha=0.15, linewidth=0
        )
axes[0].set(xlabel="processor seconds", ylabel="mean return while learning", title="return to go, by time")
axes[0].legend()
bars = axes[1].barh(list(speed), list(speed.values()), color=["tab:blue", "tab:orange", "tab:green"])
axes[1].bar_label(bars, [f"{value:,.0f}" for value in speed.values()], padding=4)
axes[1].invert_yaxis()
axes[1].set(xlabel="transitions per processor second", title="how fast it plays and learns", xticks=[])
axes[1].set_xlim(right=1.25 * max(speed.values()))
plt.show()
ratio = speed["evogrpo, 8 agents"] / speed["from scratch"]
print(f"a population of eight: {ratio:.1f} times the transitions of the loop above, per processor second")
assert SHORT or ratio > 3

# %% [markdown]
# The speedup comes from batching. All 256 episodes of the eight agents run in one vectorised CartPole, which equals
# Gymnasium's bit for bit. The eight networks are stacked into one. The band on the left covers the worst to the best
# of the eight agents. One agent gains less, because its batches are smaller.
#
# ## Evaluation on held-out starts
#
# A training return is not a test, because actions are sampled and the starts change. The last run therefore uses
# evolution. Eight agents start with learning rates spread over three decades, one of them at the default. The winner
# is tested on starts that neither training nor selection used. The advantage is the library's default,
# `return_to_go_timestep`. It compares returns to go only with other episodes *at the same step*. This removes the
# negative advantage of last steps shown above.

# %%
from evogrpo import HyperparameterConfig, RLParameter

env = GymnasiumGroups("CartPole-v1", test_size=100)
population = GRPO.population(
    8,
    observation_space=env.observation_space,
    action_space=env.action_space,
    hp_config=HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-2, scale="log")),
)
run = evolve(
    population,
    env,
    generations=2 if SHORT else 8,
    steps_per_generation=1 if SHORT else 4,
    samples_per_step=32,
    validation_questions=16,
    progress=False,
).finish()
test = run.result.test
after = f"{test.after.mean:.0f} ± {test.after.standard_error:.0f}"
print(f"before {test.before.mean:.0f}, after {after} steps, on 100 new starts")
print(f"learning rate of the best: {run.result.best.hyperparameters.lr:.1e}")
assert SHORT or (test.beyond_noise and test.after.mean > 400)

# %% [markdown]
# ## Three things to try
#
# 1. Give `play` the seed `start=rng.integers(1_000_000)`, so that a "group" has eight different starts. How much
#    worse does *return to go* learn when starts of different difficulty are compared?
# 2. Use groups of 2 and of 32 instead of 8, still with 32 episodes per step. When does the comparison fail?
# 3. Make *process* learn: wrap CartPole so that the reward of a step is `1 - abs(angle)`. Plot its advantages.
