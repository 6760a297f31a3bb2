# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A tool task
#
# **The question.** SmolLM2 with 135 million parameters cannot multiply
# three-digit numbers. Can it learn to call a function that can?
#
# **You will learn**
#
# - how to give a model tools, in the form of TRL;
# - how a chat template shows tools, calls and results to the model;
# - how partial credit makes a rare success a learning signal;
# - how to test that the tool, and not the training, makes the difference.
#
# **It needs** the installation described in [all tutorials](README.md), which
# includes the model, one CPU core, about 7 minutes and 3 GB of memory.
#
# **To run it:** open this notebook in Jupyter, or run `make tutorials ARGS=09`
# in the repository. The file `09_tools.py` holds the same content as text.

# %%
import json
import os
import random

import matplotlib.pyplot as plt
import torch

from evogrpo import (
    GRPO,
    EnvironmentGym,
    HuggingFaceGym,
    Population,
    evolve,
    load_base,
)
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.evolution import Fixed
from evogrpo.training.evolve import Run

# "short" only checks that all cells run; its results mean little.
SHORT = os.environ.get("EVOGRPO_TUTORIAL") == "short"
SEEDS, STEPS, SAMPLES, HELD_OUT = (1, 1, 4, 2) if SHORT else (2, 4, 32, 32)
TOKENS = 8 if SHORT else 40
torch.set_num_threads(1)

# %% [markdown]
# ## A tool
#
# A tool is a function with type hints and a docstring. Its name and arguments
# are shown to the model by the chat template.


# %%
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


# %% [markdown]
# The template of SmolLM2 has no support for tools, so this one replaces it. It
# lists the functions in the first message, and writes a call as JSON in
# `<tool_call>` tags, as Qwen and Hermes models do. Templates of larger models
# support tools.

# %%
TEMPLATE = """\
{% if tools %}<|im_start|>system
You can call these functions:
{%- for tool in tools %} {{ tool.function.name }}\
({{ tool.function.parameters.properties | join(", ") }})
{%- endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>\
{{ {"name": call.function.name,
    "arguments": call.function.arguments} | tojson }}\
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
base = load_base("smollm2-135m")
base.tokenizer.chat_template = TEMPLATE

# %% [markdown]
# ## Questions
#
# Each prompt begins with one worked example: a question, a call, its result and
# an answer. Without it this small model never calls a function, and a model
# that never succeeds gets no reward to learn from.


# %%
def messages(a: int, b: int, *, answered: bool = False) -> list[dict]:
    """A question; with `answered` also the call, its result and the answer."""
    question = {"role": "user", "content": f"What is {a} times {b}?"}
    if not answered:
        return [question]
    call = {"name": "multiply", "arguments": {"a": a, "b": b}}
    calls = [{"type": "function", "function": call}]
    product = str(a * b)
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "multiply", "content": product},
        {"role": "assistant", "content": product},
    ]


rng = random.Random(0)
pairs = {tuple(rng.sample(range(100, 1000), 2)) for _ in range(900)}
example = messages(312, 174, answered=True)
rows = [
    {"prompt": [*example, *messages(a, b)], "answer": str(a * b)}
    for a, b in sorted(pairs)
]


def prompt_text(conversation: list[dict]) -> str:
    """Render messages as the text that the model reads."""
    return base.tokenizer.apply_chat_template(
        conversation,
        tools=[multiply],
        tokenize=False,
        add_generation_prompt=True,
    )


print(prompt_text(rows[0]["prompt"]))

# %% [markdown]
# ## Rewards
#
# A completion is the list of all messages after the prompt. `correct` reads the
# last one. `called` is partial credit: it is 1 if a call returned the right
# product, even if the model does not repeat it. It has a small weight.


# %%
def correct(
    completions: list[list[dict]], answer: list[str], **columns: object
) -> list[float]:
    ends = [
        completion[-1]["content"].strip(" .\n") for completion in completions
    ]
    return [float(end.endswith(right)) for end, right in zip(ends, answer)]


def called(
    completions: list[list[dict]], answer: list[str], **columns: object
) -> list[float]:
    return [
        float(
            any(
                message["role"] == "tool" and message["content"] == right
                for message in completion
            )
        )
        for completion, right in zip(completions, answer)
    ]


# %% [markdown]
# `EnvironmentGym` lets completions call the tool. A conversation has at most
# three completions here: a call, perhaps another one, and an answer. What the
# tool returns is read by the model and not trained on.
#
# The control is the same without a tool. Then only `correct` can be earned.


# %%
def environment(seed: int, *, tool: bool) -> PromptEnvironment:
    options = {
        "tokenizer": base.tokenizer,
        "validation_size": HELD_OUT,
        "test_size": HELD_OUT,
        "seed": seed,
    }
    if not tool:
        return HuggingFaceGym(rows, reward_funcs=[correct], **options)
    return EnvironmentGym(
        rows,
        tools=[multiply],
        max_turns=3,
        reward_funcs=[correct, called],
        reward_weights=[1.0, 0.3],
        **options,
    )


def agent(seed: int) -> Population:
    return GRPO.population(
        1,
        actor_network=base.model,
        pad_token_id=base.tokenizer.pad_token_id,
        max_output_tokens=TOKENS,
        max_episode_tokens=200,
        temperature=0.7,
        group_size=2 if SHORT else 8,
        batch_size=SAMPLES,
        lr=5e-4,
        seed=seed,
    )


def train(seed: int, *, tool: bool) -> tuple[Run, list[dict[str, float]]]:
    """Train one agent; return the run, and the metrics of each step."""
    run = evolve(
        agent(seed),
        environment(seed, tool=tool),
        strategy=Fixed(),
        fitness="rollouts",
        generations=STEPS,
        steps_per_generation=1,
        samples_per_step=SAMPLES,
        test_questions=HELD_OUT,
        progress=False,
    )
    return run, [generation.members[0].metrics for generation in run]


results = [train(seed, tool=True) for seed in range(SEEDS)]
control, control_metrics = train(0, tool=False)

# %% [markdown]
# ## Did it learn to use the tool?
#
# `correct` and `called` have the weights 1 and 0.3, so the best reward is 1.3.

# %%
for seed, (run, _) in enumerate(results):
    test = run.result.test
    print(f"seed {seed}: reward on test questions {test.before} → {test.after}")
    assert SHORT or test.after.mean > 1.1
test = control.result.test
print(f"without the tool:                   {test.before} → {test.after}")
assert test.after.mean < 0.1

# %%
CURVES = {
    "tools/call_frequency": "calls per conversation",
    "rewards/correct/mean": "share of right answers",
}
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for axis, (metric, label) in zip(axes, CURVES.items()):
    for seed, (_, steps) in enumerate(results):
        values = [step[metric] for step in steps]
        axis.plot(range(1, STEPS + 1), values, "o-", label=f"seed {seed}")
    axis.set(xlabel="learning step", ylabel=label, ylim=(-0.05, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
steps = range(1, len(control_metrics) + 1)
values = [step["rewards/correct/mean"] for step in control_metrics]
axes[1].plot(steps, values, "x--", color="grey", label="without the tool")
axes[1].legend()
plt.show()

# %% [markdown]
# Each seed ends at 1.3: with greedy decoding all 32 test questions are answered
# right. Before the training, none was. Seed 1 succeeds for the first time in
# step 1, and seed 0 in step 4. A few successes are enough, because each is
# compared with the failures of its group. Without the tool nothing changes.
#
# The shares in the figure are lower than the test results, because training
# samples at temperature 0.7.
#
# ## One conversation
#
# A question, answered by the agent of seed 0 after its training:

# %%
trained = results[0][0].best
conversation = list(rows[0]["prompt"])
text = trained.generate([prompt_text(conversation)])[0]
print("user:     ", conversation[-1]["content"])
print("assistant:", text)
if not SHORT:
    call = json.loads(
        text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    )
    a, b = call["arguments"]["a"], call["arguments"]["b"]
    conversation += messages(a, b, answered=True)[1:3]
    answer = trained.generate([prompt_text(conversation)])[0]
    print("tool:     ", conversation[-1]["content"])
    print("assistant:", answer)

# %% [markdown]
# The model has not learned to multiply, and the worked example shows how to
# write a call. It has learned *when* to call, and to copy the right numbers.
#
# ## Three things to try
#
# 1. Set the weight of `called` to 0. How many seeds still learn?
# 2. Remove the worked example. Print a few completions to see what the model
#    writes instead.
# 3. Add `add(a, b)` as a second tool and sums to the questions. Does the model
#    choose the right function?
