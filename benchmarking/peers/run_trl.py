"""Time TRL's GRPOTrainer on the fixed work; runs inside TRL's own environment."""

from __future__ import annotations

import tempfile
from typing import Any

import workload

# before torch is imported, which reads the number of threads
arguments = workload.parse_arguments(__doc__)
work = arguments.work

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class StepClock(TrainerCallback):
    """Records the time at the start of training and at the end of every learning step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Record the start of training."""
        self.times.append(arguments.seconds())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of an optimizer step."""
        self.times.append(arguments.seconds())


def share_of_digits(
    completions: list[str], completion_ids: list[list[int]], **_: Any
) -> list[float]:
    """Reward every completion, and check that it has the number of tokens of all systems."""
    for ids in completion_ids:
        workload.check_tokens("a completion", len(ids), work.completion_tokens)
    return [workload.reward(completion) for completion in completions]


def configuration(folder: str) -> GRPOConfig:
    """Return TRL's defaults with the settings of the fixed work."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps + 1,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=workload.SAMPLES_PER_STEP // arguments.micro_batch,
        num_generations=workload.GROUP_SIZE,
        max_completion_length=work.completion_tokens,
        generation_kwargs={"min_new_tokens": work.completion_tokens},
        temperature=1.0,
        beta=workload.BETA,
        epsilon=workload.CLIP_COEF,
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=workload.MAX_GRAD_NORM,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=arguments.device == "cpu",
        logging_steps=arguments.steps + 1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def main() -> None:
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = work.pad_token
    for prompt in work.prompts:
        workload.check_tokens("a prompt", len(tokenizer(prompt)["input_ids"]), work.prompt_tokens)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                arguments.model, dtype=getattr(torch, arguments.precision)
            ),
            reward_funcs=share_of_digits,
            args=configuration(folder),
            train_dataset=Dataset.from_dict({"prompt": list(work.prompts)}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=workload.LORA_RANK,
                lora_alpha=workload.LORA_ALPHA,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            callbacks=[clock],
        )
        trainer.train()
    step_seconds = [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)]
    settings: dict[str, object] = {
        "reference": "adapters switched off",
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "log": trainer.state.log_history,
    }
    workload.write_report(
        arguments, step_seconds, ["trl", "transformers", "peft", "torch"], settings
    )


if __name__ == "__main__":
    main()
