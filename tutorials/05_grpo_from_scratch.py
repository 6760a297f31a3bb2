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
# **The question.** PPO needs a critic, a second network that estimates returns.
# Group relative policy optimisation (GRPO) has none. It runs several episodes
# from the same start and compares them with each other. Is that enough to
# balance a pole? And does it work without a tuned learning rate?
#
# **You will learn**
#
# - how to write GRPO's group advantage in twenty lines, in three variants;
# - why one of the three cannot learn on CartPole;
# - how to find the learning rate from the samples, in fifteen lines;
# - how to train the same with evogrpo, with eight agents at once, and what it
#   costs.
#
# **It needs** the installation described in [all tutorials](README.md), one CPU
# core, about 6 minutes and 1 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=05`
# in the repository. The file `05_grpo_from_scratch.py` holds the same content
# as text.

# %%
import copy
import os
import time
import warnings

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
STEPS, SEEDS = (3, (0,)) if SHORT else (20, (0, 1, 2))
# The networks are tiny: threads would wait for each other.
torch.set_num_threads(1)

# %% [markdown]
# ## A group: one start, eight episodes
#
# CartPole gives a reward of 1 for every step in which the pole stands. An
# episode ends when the pole falls, or after 500 steps. The policy is a small
# network. It maps four observed numbers to the probability of a push to the
# right.


# %%
def new_policy(seed: int) -> nn.Sequential:
    """Two layers of 64; both actions are equally likely at first."""
    generator = torch.Generator().manual_seed(seed)
    policy = nn.Sequential(
        nn.Linear(4, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 2),
    )
    for layer, gain in ((0, 2**0.5), (2, 2**0.5), (4, 0.01)):
        weight, bias = policy[layer].weight, policy[layer].bias
        nn.init.orthogonal_(weight, gain, generator=generator)
        nn.init.zeros_(bias)
    return policy


def play(
    env: gymnasium.Env, policy: nn.Module, start: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Return observations, actions and rewards of one episode."""
    observations, actions, rewards = [], [], []
    observation, _ = env.reset(seed=start)
    ended = False
    while not ended:
        with torch.no_grad():
            probabilities = policy(torch.as_tensor(observation)).softmax(-1)
        observations.append(observation)
        actions.append(int(rng.random() < probabilities[1].item()))
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        rewards.append(reward)
        ended = terminated or truncated
    return np.array(observations), np.array(actions), np.array(rewards)


env = gymnasium.make("CartPole-v1")
untrained, rng = new_policy(0), np.random.default_rng(0)
group = [play(env, untrained, start=7, rng=rng) for _ in range(8)]
print("steps until the pole fell:", [len(rewards) for *_, rewards in group])

# %% [markdown]
# All eight episodes began with the same state. Only the sampled actions
# differed. A longer episode must contain better actions. GRPO uses no other
# information.
#
# ## The group advantage in three variants
#
# An *advantage* is positive if an action should become more likely, and
# negative if it should become less likely. A group gives advantages in three
# ways:
#
# - **outcome**: compare the total rewards of the episodes. All actions of an
#   episode get the same number.
#   ([DeepSeekMath](https://arxiv.org/abs/2402.03300), section 4.1.2)
# - **process**: compare each single reward with all rewards of the group, then
#   sum over the later rewards of each action. (the same paper, section 4.1.3)
# - **return to go**: first sum the later rewards of each action, then compare
#   these sums within the group. (proposed [for classic
#   environments](https://www.kaggle.com/discussions/general/573162))

# %%
GAMMA = 0.99  # weight of the next reward; later ones count less


def returns_to_go(rewards: np.ndarray) -> np.ndarray:
    """Return the discounted sum of the rewards from each step on."""
    total, sums = 0.0, np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        total = sums[t] = rewards[t] + GAMMA * total
    return sums


def standardise(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Subtract the group's mean and divide by its standard deviation."""
    return (values - group.mean()) / (group.std(ddof=1) + 1e-4)


def outcome(group: list[np.ndarray]) -> list[np.ndarray]:
    totals = np.array([rewards.sum() for rewards in group])
    last = [np.eye(len(rewards))[-1] for rewards in group]  # 1 at the end
    scores = standardise(totals, totals)
    return [returns_to_go(e * score) for e, score in zip(last, scores)]


def process(group: list[np.ndarray]) -> list[np.ndarray]:
    pool = np.concatenate(group)
    return [returns_to_go(standardise(rewards, pool)) for rewards in group]


def return_to_go(group: list[np.ndarray]) -> list[np.ndarray]:
    sums = [returns_to_go(rewards) for rewards in group]
    return [standardise(each, np.concatenate(sums)) for each in sums]


VARIANTS = {
    "outcome": outcome,
    "process": process,
    "return_to_go_group": return_to_go,
}

# %% [markdown]
# In the first variant, the advantage is placed on the last action and
# discounted backwards. evogrpo does the same. The next cell checks that the
# library's functions return the same numbers.

# %%
from evogrpo.functional.advantages import advantages

rewards = [episode[2] for episode in group]
mask = torch.zeros(8, max(map(len, rewards)), dtype=torch.bool)
for row, each in enumerate(rewards):
    mask[row, : len(each)] = True  # an action that was taken
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
    difference = np.concatenate(ours(rewards)) - theirs[mask].numpy()
    print(f"{name:20} largest difference {np.abs(difference).max():.1e}")
    assert np.abs(difference).max() < 1e-6

# %%
colours = plt.colormaps["viridis"](np.linspace(0, 0.9, 8))
order = np.argsort([len(each) for each in rewards])
figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
for colour, row in zip(colours, order):
    axes[0].plot(np.degrees(group[row][0][:, 2]), color=colour)
    for axis, variant in zip(axes[1:], VARIANTS.values()):
        axis.plot(variant(rewards)[row], color=colour)
axes[0].set(title="one group: eight episodes", xlabel="step")
axes[0].set_ylabel("angle of the pole (degrees)")
for axis, name in zip(axes[1:], VARIANTS):
    axis.axhline(0, color="grey", linewidth=0.5)
    axis.set(title=name, xlabel="step", ylabel="advantage", ylim=(-2.7, 2.7))
plt.show()

# %% [markdown]
# Dark lines are short episodes, light lines are long ones.
#
# - *outcome* gives long episodes a positive and short episodes a negative
#   advantage.
# - *process* is 0 everywhere. Every step has a reward of exactly 1, so all
#   rewards are equal. There is no learning signal.
# - *return to go* is negative for the last actions of every episode, also of
#   long ones, because they are close to the fall.

# %%
assert all(np.all(each == 0) for each in process(rewards))

# %% [markdown]
# ## Learning
#
# The rest is PPO's clipped objective. The probability ratio of an action is
# clipped to 0.8 to 1.2. Each step samples 4 groups of 8 episodes and trains on
# them for four epochs. The learning rate of 5e-3 was tuned by hand.


# %%
Samples = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Observations, actions and advantages."""


def log_probs(policy: nn.Module, samples: Samples) -> torch.Tensor:
    observations, actions, _ = samples
    logits = torch.log_softmax(policy(observations), -1)
    return logits.gather(1, actions[:, None])[:, 0]


def learn(
    policy: nn.Module,
    adam: torch.optim.Optimizer,
    samples: Samples,
    rng: np.random.Generator,
) -> None:
    with torch.no_grad():
        old = log_probs(policy, samples)
    for _ in range(4):
        order = rng.permutation(len(old))
        for rows in np.array_split(order, max(1, len(old) // 2048)):
            minibatch = tuple(each[rows] for each in samples)
            ratio = (log_probs(policy, minibatch) - old[rows]).exp()
            gain = minibatch[2]
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * gain, clipped * gain).mean()
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            adam.step()


def sample(
    policy: nn.Module, variant: str, starts: range, rng: np.random.Generator
) -> tuple[Samples, float]:
    """Play a group from each start; return samples and the mean return."""
    groups = [
        [play(env, policy, start, rng) for _ in range(8)] for start in starts
    ]
    found = [VARIANTS[variant]([each[2] for each in group]) for group in groups]
    episodes = [episode for group in groups for episode in group]
    observations, actions, rewards = map(np.concatenate, zip(*episodes))
    gains = np.concatenate([each for group in found for each in group])
    samples = (observations, actions, gains.astype(np.float32))
    return tuple(map(torch.as_tensor, samples)), rewards.sum() / len(episodes)


def train_from_scratch(
    variant: str, seed: int, lr: float = 5e-3, learn=learn
) -> dict[str, list[float]]:
    rng, policy = np.random.default_rng(seed), new_policy(seed)
    adam = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    curve = {"return": [], "transitions": [], "seconds": [], "lr": []}
    began, transitions = time.process_time(), 0
    for step in range(STEPS):
        first = 1000 * seed + 4 * step
        samples, mean = sample(policy, variant, range(first, first + 4), rng)
        learn(policy, adam, samples, rng)
        transitions += len(samples[1])
        curve["return"].append(mean)
        curve["transitions"].append(transitions)
        curve["seconds"].append(time.process_time() - began)
        curve["lr"].append(adam.param_groups[0]["lr"])
    return curve


scratch = {
    (variant, seed): train_from_scratch(variant, seed)
    for variant in VARIANTS
    for seed in SEEDS
}
for (variant, seed), curve in scratch.items():
    first, last = curve["return"][0], curve["return"][-1]
    print(f"{variant:20} seed {seed}: {first:3.0f} →{last:4.0f} steps", end="")
    print(f" per episode, {curve['transitions'][-1]:8,} transitions")

# %%
COLOURS = {
    "outcome": "tab:blue",
    "process": "tab:grey",
    "return_to_go_group": "tab:orange",
}


def learning_curves(axis: plt.Axes, title: str) -> None:
    axis.axhline(475, color="grey", linestyle=":", linewidth=1)
    axis.text(1, 479, "counts as solved", fontsize=8, color="grey")
    axis.set(xlabel="learning step (32 episodes each)", title=title)
    axis.set_ylabel("mean return while learning")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend()


figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for (variant, seed), curve in scratch.items():
    label = variant if seed == SEEDS[0] else None
    steps = range(1, STEPS + 1)
    axis.plot(steps, curve["return"], color=COLOURS[variant], label=label)
learning_curves(axis, "GRPO from scratch")
plt.show()

# %% [markdown]
# GRPO balances the pole without a critic. Each line is one seed. Seeds differ a
# lot, most of all with *outcome*: with one number per episode, good actions in
# bad episodes get a negative advantage. *process* does not learn, as the zeros
# above predicted. Three seeds do not show which of the other two is better, but
# they show that both learn.

# %%
last = {
    name: np.mean([scratch[name, seed]["return"][-1] for seed in SEEDS])
    for name in VARIANTS
}
print({name: round(float(value)) for name, value in last.items()})
assert last["process"] < 60, "all rewards are equal"
assert SHORT or min(last["outcome"], last["return_to_go_group"]) > 100

# %% [markdown]
# ## Without a learning rate
#
# What if the 5e-3 were not known? A learning rate is hard to guess, because
# its effect depends on the network, the optimizer and the number of updates.
# Its *effect* is easier to choose: how much may one learning step change the
# policy? The measure is the KL divergence between the policies before and
# after, averaged over the sampled states. A common value is 0.01 nats.
#
# The next cell repeats each learning step with other learning rates until its
# KL is near 0.01. Adam's KL grows about with the square of the learning rate,
# so a few attempts suffice. Trials need no new episodes.


# %%
def learn_calibrated(
    policy: nn.Module,
    adam: torch.optim.Optimizer,
    samples: Samples,
    rng: np.random.Generator,
    target_kl: float = 0.01,
) -> None:
    with torch.no_grad():
        old = torch.log_softmax(policy(samples[0]), -1)
    start = copy.deepcopy((policy.state_dict(), adam.state_dict()))
    lr = adam.param_groups[0]["lr"]
    for _ in range(10):
        policy.load_state_dict(start[0])
        adam.load_state_dict(start[1])
        adam.param_groups[0]["lr"] = lr
        learn(policy, adam, samples, rng)
        with torch.no_grad():
            new = torch.log_softmax(policy(samples[0]), -1)
        kl = (old.exp() * (old - new)).sum(-1).mean().item()
        if target_kl / 1.5 < kl < target_kl * 1.5:
            return
        lr *= min(10.0, max(0.1, (target_kl / max(kl, 1e-12)) ** 0.5))


RATES = (1e-5, 5e-3, 1e-1)
fixed, calibrated = (
    [train_from_scratch("return_to_go_group", 0, lr, rule) for lr in RATES]
    for rule in (learn, learn_calibrated)
)
figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for axis, curves in zip(axes, (fixed, calibrated)):
    for lr, curve in zip(RATES, curves):
        label = f"{'from' if curves is calibrated else 'fixed at'} {lr:.0e}"
        axis.plot(range(1, STEPS + 1), curve["return"], label=label)
learning_curves(axes[0], "a fixed learning rate")
learning_curves(axes[1], "a calibrated learning rate")
plt.show()
for lr, one, other in zip(RATES, fixed, calibrated):
    end, own = one["return"][-1], other["return"][-1]
    found = f"{other['lr'][0]:.0e} in the first, {other['lr'][-1]:.0e} in the"
    print(
        f"{lr:.0e}: fixed {end:3.0f}, calibrated {own:3.0f} ({found} last step)"
    )
assert SHORT or min(each["return"][-1] for each in calibrated) > 150
assert SHORT or max(fixed[0]["return"][-1], fixed[2]["return"][-1]) < 100

# %% [markdown]
# With a fixed learning rate, two of three guesses learn little. Calibrated,
# all three reach 500. The first step already corrects the guess to between 3e-3
# and 1e-2.
#
# One curve falls again at the end. When all episodes are long, the group has
# little left to compare, and a step that is forced to a KL of 0.01 follows
# noise. The learning rate has grown tenfold by then. evogrpo therefore uses the
# KL to find the learning rate, and as an upper limit later.
#
# ## The same with evogrpo
#
# evogrpo calibrates by default: `GRPO.population` below gets no learning rate.
# The strategy `Fixed` changes nothing, so these are eight independent agents
# without evolution. They have equal initial weights and sample different
# actions. `fitness="rollouts"` computes fitness from the training episodes, so
# no further episodes are run.

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
    run = evolve(
        population,
        env,
        strategy=Fixed(),
        fitness="rollouts",
        generations=STEPS,
        steps_per_generation=1,
        samples_per_step=32,
        test_questions=0,
        progress=False,
    )
    began, curve = time.process_time(), []
    for generation in run:
        returns = [member.metrics["reward"] for member in generation.members]
        seconds = time.process_time() - began
        curve.append((returns, generation.timesteps, seconds))
    names = ("return", "transitions", "seconds")
    return dict(zip(names, map(np.array, zip(*curve))))


with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    library = {variant: train_with_evogrpo(variant, 8) for variant in VARIANTS}
print("evogrpo warns:", warned[0].message, end="\n\n")
for variant, curve in library.items():
    ends = ", ".join(f"{value:.0f}" for value in sorted(curve["return"][-1]))
    print(f"{variant:20} eight agents end at {ends}")

# %% [markdown]
# The library warns about the missing learning signal of *process*. The other
# two learn without a learning rate.
#
# The next figure shows the cost: transitions per second of CPU time.

# %%
rates = {
    "from scratch": scratch["return_to_go_group", 0],
    "evogrpo, 1 agent": train_with_evogrpo("return_to_go_group", 1),
    "evogrpo, 8 agents": library["return_to_go_group"],
}
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
speed = {}
for name, curve in rates.items():
    speed[name] = curve["transitions"][-1] / curve["seconds"][-1]
    returns = np.array(curve["return"]).reshape(STEPS, -1)
    (line,) = axes[0].plot(curve["seconds"], returns.mean(1), label=name)
    axes[0].fill_between(
        curve["seconds"],
        returns.min(1),
        returns.max(1),
        color=line.get_color(),
        alpha=0.15,
        linewidth=0,
    )
axes[0].set(xlabel="processor seconds", ylabel="mean return while learning")
axes[0].set_title("return to go, by time")
axes[0].legend()
bars = axes[1].barh(list(speed), list(speed.values()))
axes[1].bar_label(bars, [f"{rate:,.0f}" for rate in speed.values()], padding=4)
axes[1].invert_yaxis()
axes[1].set(xlabel="transitions per processor second", xticks=[])
axes[1].set_title("how fast it plays and learns")
axes[1].set_xlim(right=1.25 * max(speed.values()))
plt.show()
ratio = speed["evogrpo, 8 agents"] / speed["from scratch"]
print(f"a population of eight: {ratio:.1f} times the loop above")
assert SHORT or ratio > 3

# %% [markdown]
# The speedup comes from batching. All 256 episodes of the eight agents run in
# one vectorised CartPole, which equals Gymnasium's bit for bit. The eight
# networks are stacked into one. The band on the left covers the worst to the
# best of the eight agents. One agent gains less, because its batches are
# smaller.
#
# ## Evaluation on held-out starts
#
# A training return is not a test, because actions are sampled and the starts
# change. The last run trains four agents with all defaults. The best on 16
# validation starts is tested on 100 starts that neither training nor selection
# used. The default advantage is `return_to_go_timestep`. It compares returns to
# go only with other episodes *at the same step*. This removes the negative
# advantage of last steps shown above.

# %%
env = GymnasiumGroups("CartPole-v1", test_size=100)
population = GRPO.population(
    4,
    observation_space=env.observation_space,
    action_space=env.action_space,
)
run = evolve(
    population,
    env,
    strategy=Fixed(),
    generations=2 if SHORT else 8,
    steps_per_generation=1 if SHORT else 5,
    samples_per_step=32,
    validation_questions=16,
    progress=False,
)
for generation in run:
    fitness = [f"{member.fitness:.0f}" for member in generation.members]
    print(f"generation {generation.generation}:", ", ".join(fitness))
test = run.result.test
print(f"test before {test.before}, after {test.after} steps")
assert SHORT or (test.beyond_noise and test.after.mean > 400)

# %% [markdown]
# Agents differ by chance alone, since their settings are equal. A single agent
# can be unlucky; selection on held-out starts makes use of that.
#
# ## Three things to try
#
# 1. Give `play` the seed `start=rng.integers(1_000_000)`, so that a "group" has
#    eight different starts. How much worse does *return to go* learn when
#    starts of different difficulty are compared?
# 2. Change `target_kl` to 0.001 and to 0.1. Which is too careful, and which too
#    bold?
# 3. Make *process* learn: wrap CartPole so that the reward of a step is `1 -
#    abs(angle)`. Plot its advantages.
