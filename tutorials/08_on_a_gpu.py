# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One GPU and several
#
# **The question.** Which model and how many agents fit on a GPU? How are
# several GPUs used?
#
# **You will learn**
#
# - how to place a run on a GPU, and what differs from a CPU;
# - the cost of a further member in time and memory;
# - how several processes share a population with the same results.
#
# **It needs** the installation described in [all tutorials](README.md), which
# includes the model; about 2 minutes and 3 GB of memory. A GPU is used if there
# is one.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=08`
# in the repository. The file `08_on_a_gpu.py` holds the same content as text.

# %%
import os
import shutil
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from evogrpo import GRPO, HuggingFaceGym, evolve, load_base, read_run
from evogrpo.evolution import Fixed

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
SIZES = (1, 2) if SHORT else (1, 2, 4)
SAMPLES, GROUP, TOKENS = (4, 2, 2) if SHORT else (16, 8, 8)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if GPU:
    print("this was executed on", torch.cuda.get_device_name())
else:
    print(
        "this was executed on a CPU: no figure on this page was taken on a GPU"
    )

# %% [markdown]
# The line above names the device of this page. All seconds below were measured
# on it. A GPU needs large batches to be busy, so a further member should cost
# less there than on a CPU. All published [results](../docs/results.md) were
# measured on CPUs.
#
# ## Device and dtype
#
# Pass the device to `load_base`. The default dtype is bfloat16 on a GPU and
# float32 on a CPU; `dtype` changes it. Adapters and optimizer state are always
# float32, because small updates would be lost in bfloat16. Commands choose the
# device automatically; `device: cuda` in a configuration requires a GPU. With
# `precision: auto`, commands also use bfloat16 on CPUs where it is faster.

# %%
base = load_base("smollm2-135m", device=DEVICE)
parameter = next(base.model.parameters())
millions = sum(each.numel() for each in base.model.parameters()) / 1e6
dtype, device = parameter.dtype, parameter.device
print(f"{millions:.0f} million parameters, {dtype}, {device}")

# %% [markdown]
# ## Cost of a further member
#
# The next cell trains populations of different sizes for two steps each and
# measures the second step. All members sample and learn in the same batches.
# The base model is read once for all.

# %%
rows = [
    {"prompt": f"{a} plus {b} is", "answer": str(a + b)}
    for a in range(10, 25)
    for b in range(10, 25)
]


def digits(completions, **columns):
    return [
        sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions
    ]


def seconds_of_a_step(members: int) -> float:
    env = HuggingFaceGym(
        rows,
        tokenizer=base.tokenizer,
        reward_funcs=digits,
        validation_size=4,
        test_size=4,
    )
    population = GRPO.population(
        members,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=TOKENS,
        group_size=GROUP,
        batch_size=SAMPLES,
    )
    run = evolve(
        population,
        env,
        strategy=Fixed(),
        fitness="rollouts",
        generations=2,
        steps_per_generation=1,
        samples_per_step=SAMPLES,
        test_questions=0,
        progress=False,
    )
    next(run)  # also evaluates the untrained base model
    clock = time.perf_counter if GPU else time.process_time
    began = clock()
    next(run)
    return clock() - began


seconds = {members: seconds_of_a_step(members) for members in SIZES}
for members, value in seconds.items():
    each = f"{value / members:.1f} s for each"
    print(
        f"{members} member{'s' * (members > 1)}: {value:5.1f} s a step, {each}"
    )
assert SHORT or seconds[4] / 4 < 0.75 * seconds[1]

# %% [markdown]
# ## Memory
#
# Memory has three parts. The base model is stored once. Each member needs its
# adapter and two AdamW moments, 12 bytes per parameter, and a copy of them
# while it learns. Learning needs activations, limited by `micro_batch_tokens`,
# and sampling needs a KV cache. The first two parts can be computed from the
# models' shapes without loading weights.

# %%
# Roughly Qwen2.5: hidden size, intermediate size, layers, heads, key-value
# heads, tied embeddings.
FAMILY = {
    "0.5B": (896, 4864, 24, 14, 2, True),
    "1.5B": (1536, 8960, 28, 12, 2, True),
    "3B": (2048, 11008, 36, 16, 2, True),
    "7B": (3584, 18944, 28, 28, 4, False),
}


def count_parameters(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> tuple[int, int]:
    """Return the parameters of the base model and of one adapter of rank 16.

    The adapter is on all linear layers except the vocabulary head.
    """
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):  # shapes without weights
        model = AutoModelForCausalLM.from_config(config)
    adapter = sum(
        16 * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    return model.num_parameters(), adapter


MEMBERS = 8
names, bases, adapters = list(FAMILY), [], []
for name, shape in FAMILY.items():
    parameters, adapter = count_parameters(*shape)
    bases.append(2 * parameters / 1e9)  # bfloat16
    adapters.append(MEMBERS * 12 * adapter / 1e9)
    members = f"{MEMBERS} members {adapters[-1]:4.1f} GB"
    copies = f"as {MEMBERS} copies {MEMBERS * bases[-1]:5.1f} GB and more"
    print(f"{name:5} base {bases[-1]:4.1f} GB, {members}; {copies}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
costs = [value / members for members, value in seconds.items()]
axes[0].plot(SIZES, costs, "o-", color="tab:green")
axes[0].set_xticks(SIZES)
axes[0].set(
    xlabel="members",
    ylabel=f"seconds per member and step ({DEVICE.upper()})",
    ylim=0,
    title="SmolLM2, measured",
)
axes[1].bar(names, bases, color="tab:grey", label="base model, bfloat16, once")
label = f"{MEMBERS} members: adapters and AdamW, float32"
axes[1].bar(names, adapters, bottom=bases, color="tab:green", label=label)
for size in (16, 24):
    axes[1].axhline(size, color="black", linestyle=":", linewidth=1)
    axes[1].annotate(
        f"a GPU of {size} GB",
        (-0.4, size),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=8,
    )
axes[1].set(
    ylabel="GB", title="Qwen2.5, counted: activations come on top", ylim=(0, 27)
)
axes[1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, 0.55))
plt.show()
assert np.all(np.less(adapters, bases)), "more than a second copy"
assert adapters[-1] < 0.3 * bases[-1]

# %% [markdown]
# Left: four members take two to three times as long as one, so each costs
# two thirds of a single agent or less. One reason is that the weights of the
# base model are read once for all members. Each time is one measurement, so
# small differences mean nothing.
#
# Right: eight members together need less memory than a second copy of the base
# model, at 7B a quarter of it. Base model and members take less than 16 GB up
# to 3B, and less than 24 GB at 7B. The bars do not include activations and KV
# caches, which are not small.
#
# Before a real run, use `--dry-run`. It estimates the memory for your model and
# schedule, including activations, and trains nothing:

# %%
configuration = """
model: smollm2-135m
task: {name: two_digit_sums}
population: {size: 8}
agent: {max_output_tokens: 12}
schedule: {generations: 8, steps_per_generation: 4, samples_per_step: 64}
"""
Path("my.yaml").write_text(configuration, encoding="utf-8")
# !evogrpo train my.yaml --dry-run | grep -A2 "^memory"

# %% [markdown]
# ## Several GPUs
#
# A launcher, `torchrun` or `accelerate launch`, starts one process per GPU.
# Each process holds the base model and all members. The processes divide the
# sampling, the forward and backward passes of language models and the held-out
# questions. The number of processes does not change the results, up to
# rounding. The next cell shows this with small networks: the same run in one
# process and in two.

# %%
# Delete the runs of an earlier execution of this notebook.
shutil.rmtree("runs/tutorial-08", ignore_errors=True)
configuration = """
task: {env: CartPole-v1}
population: {size: 4}
schedule:
  generations: 3
  steps_per_generation: 2
  samples_per_step: 16
  validation_questions: 8
  test_questions: 0
"""
Path("my.yaml").write_text(configuration, encoding="utf-8")
# !evogrpo train my.yaml --run-dir runs/tutorial-08/one > my.log 2>&1
# !torchrun --nproc-per-node 2 -m evogrpo train my.yaml \
#     --run-dir runs/tutorial-08/two > my.log 2>&1
one = read_run("runs/tutorial-08/one").members
two = read_run("runs/tutorial-08/two").members
columns = ["generation", "member", "parent", "fitness"]
print(one[columns].tail(4).to_string(index=False))
assert one.member.tolist() == two.member.tolist()
assert np.allclose(one.fitness.to_numpy(), two.fitness.to_numpy())
print("in two processes: the same members, and the same fitness")

# %% [markdown]
# Start your own program that calls `evolve` in the same way: `accelerate launch
# --num_processes 4 my_program.py`. The page on
# [clusters](../docs/howto/cluster.md) has details. By default each process
# holds the whole base model. `base_parts` divides a larger one among several
# processes.
#
# ## vLLM as the sampler
#
# A [vLLM](../docs/howto/vllm.md) server on a second GPU can sample the
# completions. Two lines of a configuration choose it:
#
# ```yaml
# sampler: {vllm: "http://127.0.0.1:8000", adapters_dir: adapters}
# agent: {objective: {importance_correction: token_truncate}}
# ```
#
# `evogrpo vllm-command my.yaml` prints the command that starts the server. It
# depends on the model, the LoRA rank and the number of members. `evogrpo train
# my.yaml` then checks that the server has the same base model, writes the
# changed adapters to the folder before each step, and lets the server sample
# for all members. The log-probabilities of vLLM differ by rounding, for which
# `importance_correction` corrects. In Python, call
# `population.sample_with(VLLMSampler(url, adapters_dir="adapters"))`. For other
# engines, implement the two methods of `evogrpo.members.bank.Sampler`.
#
# ## Three things to try
#
# 1. Run this notebook on a GPU. From how many members on does the cost of a
#    further one increase?
# 2. Halve `micro_batch_tokens`. Compare the memory in `--dry-run` and the time
#    of a run.
# 3. Load a model with 0.5B parameters by its hub id instead of "smollm2-135m".
#    Which part of the memory grows most?
