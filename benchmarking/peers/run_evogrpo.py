"""Time a population of evogrpo on the fixed work; runs in the Python that has evogrpo."""

from __future__ import annotations

import math
import tempfile
from itertools import pairwise
from typing import Any

import workload

# before torch is imported, which reads the number of threads
arguments = workload.parse_arguments(__doc__)
work = arguments.work

import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from evogrpo import GRPO, Callback, HuggingFaceGym, evolve  # noqa: E402
from evogrpo.evolution.strategies import Fixed  # noqa: E402


class StepClock(Callback):
    """Records the time at the start of the run and at the end of every learning step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_run_start(self, trainer: Any) -> None:
        """Record the start of the run."""
        self.times.append(arguments.seconds())

    def on_step(self, report: Any) -> None:
        """Record the end of a learning step."""
        self.times.append(arguments.seconds())


def share_of_digits(
    completions: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """Reward every completion, and check that it has the number of tokens of all systems."""
    for completion, ids in zip(completions, completion_ids, strict=True):
        if "made-up" not in completion:  # the completion that evogrpo tests reward functions with
            workload.check_tokens("a completion", len(ids), work.completion_tokens)
    return [workload.reward(completion) for completion in completions]


def micro_batch_tokens() -> int:
    """Return the tokens of the micro-batch, with each prompt counted once per group."""
    groups = math.ceil(arguments.micro_batch / workload.GROUP_SIZE)
    return arguments.micro_batch * work.completion_tokens + groups * work.prompt_tokens


def main() -> None:
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = work.pad_token
    for prompt in work.prompts:
        workload.check_tokens("a prompt", len(tokenizer(prompt)["input_ids"]), work.prompt_tokens)
    env = HuggingFaceGym(
        [{"prompt": prompt} for prompt in work.prompts],
        [{"prompt": work.prompt(11, number)} for number in (22, 33)],
        tokenizer,
        reward_funcs=share_of_digits,
        validation_dataset=[{"prompt": work.prompt(44, number)} for number in (22, 33)],
        seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.precision)
    )
    population = GRPO.population(
        size=arguments.agents,
        actor_network=model.to(arguments.device),
        pad_token_id=tokenizer.pad_token_id,
        batch_size=workload.SAMPLES_PER_STEP,
        group_size=workload.GROUP_SIZE,
        lr=workload.LEARNING_RATE,
        beta=workload.BETA,
        clip_coef=workload.CLIP_COEF,
        max_grad_norm=workload.MAX_GRAD_NORM,
        min_output_tokens=work.completion_tokens,
        max_output_tokens=work.completion_tokens,
        micro_batch_tokens=micro_batch_tokens(),
        lora_config=LoraConfig(
            r=workload.LORA_RANK,
            lora_alpha=workload.LORA_ALPHA,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
        seed=0,
    )
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        for _ in evolve(
            population,
            env,
            progress=False,
            strategy=Fixed(),
            generations=1,
            steps_per_generation=arguments.steps + 1,
            samples_per_step=workload.SAMPLES_PER_STEP,
            run_dir=folder,
            callbacks=[clock],
        ):
            pass
    seconds = [end - start for start, end in pairwise(clock.times)]
    settings: dict[str, object] = {
        "reference": "adapters switched off",
        "micro_batch_tokens": micro_batch_tokens(),
    }
    workload.write_report(
        arguments, seconds, ["evogrpo", "transformers", "peft", "torch"], settings
    )


if __name__ == "__main__":
    main()
