# ---
# jupyter:
#   evogrpo:
#     needs: [trl, datasets]
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Coming from TRL, AgileRL or Ray Tune
#
# **The question.** You have a script for another library. What stays, what
# changes, and what are the benefits?
#
# **You will learn**
#
# - how to use TRL's dataset, reward function and settings without changes;
# - how the same steps look in AgileRL and in Ray Tune, and the corresponding
#   terms here;
# - the cost of one learning step in TRL and here, on this machine.
#
# **It needs** the installation described in [all tutorials](README.md), and in
# the checkout `pip install -e ".[datasets]" trl`; one CPU core, about 3 minutes
# and 4 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=07`
# in the repository. The file `07_coming_from_elsewhere.py` holds the same
# content as text.
#
# **Executed and quoted code:** TRL and evogrpo are executed. The code of
# AgileRL and of Ray Tune is quoted from their documentation. It was *not*
# executed for this page, and nothing was measured with it.

# %%
import os
import time

import matplotlib.pyplot as plt
import torch
from datasets import Dataset

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HuggingFaceGym,
    HyperparameterConfig,
    RLParameter,
    evolve,
    from_trl,
    load_base,
)
from evogrpo.evolution import Fixed, TruncationPBT

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
STEPS, PROMPTS, GROUP, TOKENS = (2, 2, 2, 2) if SHORT else (3, 2, 8, 16)
torch.set_num_threads(1)

# %% [markdown]
# ## The task
#
# The dataset has a `prompt` column, and the reward function takes lists, as in
# TRL. The reward is the share of digits, which can be learnt in three steps.

# %%
rows = [
    {"prompt": f"The year in which a child born in {year} turned {age} was"}
    for year in range(1900, 1950)
    for age in (7, 8)
]
dataset = Dataset.from_list(rows)


def share_of_digits(completions: list[str], **columns: object) -> list[float]:
    return [
        sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions
    ]


# %% [markdown]
# ## TRL
#
# [TRL](https://huggingface.co/docs/trl/grpo_trainer)'s `GRPOTrainer` trains one
# agent with fixed hyperparameters.

# %%
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

base = load_base("smollm2-135m")
config = GRPOConfig(
    output_dir="runs/tutorial-07",
    learning_rate=5e-4,
    lr_scheduler_type="constant",
    max_steps=STEPS,
    per_device_train_batch_size=PROMPTS * GROUP,
    num_generations=GROUP,
    max_completion_length=TOKENS,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    seed=0,
)


class Clock(TrainerCallback):
    """Measures the CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *arguments: object, **others: object) -> None:
        """Start the clock."""
        self.began = time.process_time()

    def on_step_end(self, *arguments: object, **others: object) -> None:
        """Record the step and restart the clock."""
        self.seconds.append(time.process_time() - self.began)
        self.began = time.process_time()


clock = Clock()
lora = LoraConfig(
    r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
)
trainer = GRPOTrainer(
    # A second copy of the model, because TRL adds its adapter to it.
    model=load_base("smollm2-135m").model,
    processing_class=base.tokenizer,
    reward_funcs=share_of_digits,
    train_dataset=dataset,
    args=config,
    peft_config=lora,
    callbacks=[clock],
)
trainer.remove_callback(PrinterCallback)  # prints every metric of every step
trainer.train()
trl_rewards = [
    entry["reward"] for entry in trainer.state.log_history if "reward" in entry
]
print("rewards:", [round(value, 2) for value in trl_rewards])

# %% [markdown]
# ## The same with evogrpo
#
# Dataset and reward function are unchanged. `evogrpo.from_trl` reads the
# settings. Settings without a counterpart are listed with the reason, and
# unsupported settings raise an error.

# %%
settings = from_trl(config)
print("hyperparameters:", dict(settings.hyperparameters))
print("left aside, for example:", dict(list(settings.ignored.items())[:3]))


def train(members: int) -> tuple[list[float], list[float]]:
    """Return the first agent's rewards, and CPU seconds per agent and step."""
    env = HuggingFaceGym(
        dataset,
        tokenizer=base.tokenizer,
        reward_funcs=share_of_digits,
        validation_size=4,
        test_size=4,
    )
    population = GRPO.population(
        members,
        actor_network=base.model,  # loaded once for all, and never changed
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=TOKENS,
        lora_config=lora,
        objective=settings.objective,
        optimizer=settings.optimizer,
        **settings.hyperparameters,
    )
    run = evolve(
        population,
        env,
        strategy=Fixed(),
        fitness="rollouts",
        generations=STEPS,
        steps_per_generation=1,
        samples_per_step=PROMPTS * GROUP,
        test_questions=0,
        progress=False,
    )
    rewards, seconds, began = [], [], None
    for generation in run:
        if began is not None:  # the first step includes the untrained baseline
            seconds.append((time.process_time() - began) / members)
        began = time.process_time()
        rewards.append(generation.members[0].metrics["reward"])
    return rewards, seconds


results = {members: train(members) for members in (1, 2 if SHORT else 4)}
for members, (rewards, seconds) in results.items():
    rounded = [round(value, 2) for value in rewards]
    cost = f"{min(seconds):.1f} s per agent and step"
    print(f"population of {members}: rewards {rounded}, {cost}")

# %%
costs = {"TRL, 1 agent": min(clock.seconds)}
for members, (_, seconds) in results.items():
    costs[f"evogrpo, {members} agent{'s' * (members > 1)}"] = min(seconds)
colours = ["tab:grey", "tab:orange", "tab:green"]
labels = [f"{value:.1f} s" for value in costs.values()]
figure, axes = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
bars = axes[0].barh(list(costs), list(costs.values()), color=colours)
axes[0].bar_label(bars, labels, padding=4)
axes[0].invert_yaxis()
axes[0].set(
    xlabel="processor seconds per agent and learning step",
    xticks=[],
    xlim=(0, 1.2 * max(costs.values())),
)
axes[0].set_title(
    "what a step costs: the quickest of those measured", fontsize=10
)
steps = range(1, STEPS + 1)
axes[1].plot(steps, trl_rewards, "o-", color=colours[0], label="TRL")
axes[1].plot(steps, results[1][0], "o-", color=colours[1], label="evogrpo")
axes[1].set(
    xlabel="learning step",
    ylabel="share of digits in the samples",
    title="both learn from samples of their own",
)
axes[1].xaxis.get_major_locator().set_params(integer=True)
axes[1].legend()
plt.show()
assert SHORT or min(results[4][1]) < min(clock.seconds)

# %% [markdown]
# Left: times are CPU seconds, so other programs on the machine do not count. In
# this run, one evogrpo agent needs two thirds of TRL's time per step. Each of
# four agents needs less than half of it. [docs/results.md](../docs/results.md)
# compares the costs more carefully, with medians, equal completion lengths and
# memory.
#
# Right: both learn. Each step has the same number of prompts and completions in
# both libraries, but the samples differ. Three steps do not show which one
# learns faster.
#
# What changes:
#
# | TRL | here |
# |---|---|
# | `GRPOTrainer`, `trainer.train()` | `GRPO.population(...)`, `evolve(...)` |
# | one configuration | a population, over one base model |
# | `train_dataset`, `eval_dataset` | train, validation and test questions |
# | `report_to`, `log_completions` | files in `run_dir` |
# | `resume_from_checkpoint` | `evogrpo.resume(run_dir, env)`, bit for bit |
#
# The questions are split automatically by default. Validation questions select
# members. Test questions are used once, at the end. `run_dir` holds a journal,
# TensorBoard files, completions and a report.
#
# ## AgileRL
#
# AgileRL has populations, tournaments and mutations, which the user combines.
# Its GRPO trains a Hugging Face model. This code is shortened from [its
# tutorial](https://docs.agilerl.com/en/latest/tutorials/llm_finetuning/grpo_hpo.html).
# It was not executed here:
#
# ```python
# from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
# from agilerl.hpo.mutation import Mutations
# from agilerl.hpo.tournament import TournamentSelection
# from agilerl.training.train_llm import finetune_llm
#
# hp_config = HyperparameterConfig(
#     lr=RLParameter(min=1e-6, max=1e-4),
#     beta=RLParameter(min=0.0001, max=0.01),
# )
# tournament = TournamentSelection(
#     tournament_size=2, elitism=True, population_size=4, eval_loop=1
# )
# mutations = Mutations(no_mutation=0.1, rl_hp_mut=0.6, ...)
# finetune_llm(
#     pop,
#     env,
#     evo_steps=10,
#     tournament=tournament,
#     mutation=mutations,
#     ...
# )
# ```
#
# Here, `HyperparameterConfig` and `RLParameter` have the same names and
# arguments. The tournament is one argument of `evolve` and includes mutation. A
# hand-written loop over `env.reset`, `agent.get_action`, `env.step` and
# `agent.learn` works as in AgileRL. There are three differences. Members share
# one base model and are computed in one batch. A member is cloned only if it is
# better by more than noise. Fitness is never measured on the test set.
#
# ## Ray Tune
#
# Ray Tune runs any training function as separate trials, and a scheduler copies
# and perturbs them. This code is shortened from [its
# guide](https://docs.ray.io/en/latest/tune/examples/pbt_guide.html). It was not
# executed here:
#
# ```python
# scheduler = PopulationBasedTraining(
#     time_attr="training_iteration",
#     perturbation_interval=5,
#     hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-1)},
#     quantile_fraction=0.25,
#     resample_probability=0.25,
# )
# tuned = tune.TuneConfig(
#     scheduler=scheduler, num_samples=8, metric="reward", mode="max"
# )
# tune.Tuner(train_function, tune_config=tuned).fit()
# ```
#
# The training function has to save and load checkpoints, because a clone is a
# trial that loads another trial's checkpoint. Here, the same rule is a
# strategy, and cloning copies a row of a matrix:

# %%
env = GymnasiumGroups("CartPole-v1", max_episode_steps=20 if SHORT else None)
run = evolve(
    GRPO.population(
        8,  # num_samples
        env.observation_space,
        env.action_space,
        hp_config=HyperparameterConfig(  # hyperparam_mutations
            lr=RLParameter(min=1e-4, max=1e-1, scale="log")
        ),
    ),
    env,
    strategy=TruncationPBT(
        quantile=0.25,  # quantile_fraction
        resample=0.25,  # resample_probability
    ),
    steps_per_generation=1 if SHORT else 5,  # perturbation_interval
    generations=2 if SHORT else 4,
    samples_per_step=32,
    validation_questions=8,
    progress=False,
)
for generation in run:
    rates = [f"{m.hyperparameters.lr:.0e}" for m in generation.members]
    best = generation.best.fitness
    print(
        f"generation {generation.generation}: best {best:3.0f} "
        f"with learning rates {', '.join(rates)}"
    )

# %% [markdown]
# | Ray Tune | here |
# |---|---|
# | `PopulationBasedTraining` | `TruncationPBT` |
# | `perturbation_interval` | `steps_per_generation` |
# | `num_samples` | `size` of the population |
# | `tune.report` and your own checkpoints | not needed |
# | values may leave their initial range | values stay in the range |
# | any training function, on a cluster | GRPO agents, in several processes |
#
# To tune anything other than GRPO agents, use Ray Tune.
#
# ## Three things to try
#
# 1. Read one of your own configurations with `evogrpo.from_trl` (or
#    `from_roll`), and check `ignored`.
# 2. Give `train` an `hp_config` with `lr=RLParameter(min=1e-5, max=1e-3,
#    scale="log")` and leave out `strategy=Fixed()`. This turns the TRL run into
#    a population.
# 3. Install Ray Tune and run the same search with it. Compare CPU seconds,
#    including the startup of the trials.
