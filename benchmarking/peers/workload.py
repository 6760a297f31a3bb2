"""The fixed work of all systems, and the report of a runner.

Standard library only, as it runs in all environments.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging"
    " Face<|im_end|>\n<|im_start|>user\n{}What is {} + {}? Reply with the sum and nothing"
    " else.<|im_end|>\n<|im_start|>assistant\n"
)
EXAMPLES = "Q: What is 21 plus 14?\nA: 35\nQ: What is 38 plus 27?\nA: 65\n"
EXAMPLES_TEMPLATE = "{}" + EXAMPLES + "Q: What is {} plus {}?\nA:"
ADVICE = "Read this with care and take all the time that you need. "  # 13 tokens
FURTHER = "Think. "  # 2 tokens
ANSWERS = ("72", "81")
GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Prompts, and lengths of prompts and completions.

    Attributes:
        before: Text before the question of each prompt.
        prompt_tokens: Tokens of each prompt, so that no system pads.
        completion_tokens: Tokens of each completion, so that all systems process the same number.
        template: Prompt with fields for the text before the question, and for two numbers.
        pad_token: A reserved token that the model practically never samples: a completion that
            held the padding token would be cut.
    """

    before: str
    prompt_tokens: int
    completion_tokens: int
    template: str = TEMPLATE
    pad_token: str = "<jupyter_script>"

    def prompt(self, a: int, b: int) -> str:
        """Return a prompt that asks for the sum of two numbers of two digits each."""
        return self.template.format(self.before, a, b)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts of a learning step."""
        return self.prompt(27, 45), self.prompt(63, 18)


SETTINGS = {
    "short": Setting(before="", prompt_tokens=49, completion_tokens=24),
    "long-prompt": Setting(
        before=11 * ADVICE + 4 * FURTHER, prompt_tokens=200, completion_tokens=48
    ),
    "long-completion": Setting(before=ADVICE + FURTHER, prompt_tokens=64, completion_tokens=192),
    "gemma3": Setting(
        before="",
        prompt_tokens=54,
        completion_tokens=16,
        template=EXAMPLES_TEMPLATE,
        pad_token="<unused0>",
    ),
}
"""The setting "gemma3" needs `--model` with a folder of Gemma 3 270M."""
PRECISIONS = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
SAMPLES_PER_STEP = len(ANSWERS) * GROUP_SIZE

BETA = 0.04
LEARNING_RATE = 1e-4
CLIP_COEF = 0.2
MAX_GRAD_NORM = 0.5
LORA_RANK = 16
LORA_ALPHA = 32


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Command line of a runner.

    Attributes:
        model: Folder of the base model.
        steps: Learning steps to measure; one more is run before them and left out.
        micro_batch: Samples per forward and backward pass of the learning step.
        agents: Agents in the process.
        threads: Threads that torch may use.
        out: JSON file to write.
        setting: Key of `SETTINGS`.
        precision: Of the base model's weights and activations; adapters are in float32.
        defaults: Leave settings that do not change the result at the system's defaults, instead of
            the fastest values.
        device: Device of the model.
        clock: "wall", or "processor" for the time on all cores, which other programs hardly change.
    """

    model: Path
    steps: int
    micro_batch: int
    agents: int
    threads: int
    out: Path
    setting: str
    precision: str
    defaults: bool
    device: str
    clock: str

    @property
    def work(self) -> Setting:
        """Prompts, and lengths of prompts and completions."""
        return SETTINGS[self.setting]

    def seconds(self) -> float:
        """Return the seconds of the chosen clock."""
        return CLOCKS[self.clock]()


def reward(completion: str) -> float:
    """Return the share of digits in a text, in [0, 1]. It differs between samples of a group."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def parse_arguments(description: str | None) -> Arguments:
    """Read a runner's command line, and set the number of threads before torch is imported."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument(
        "--steps", type=int, default=3, help="learning steps to measure, after one that is left out"
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=SAMPLES_PER_STEP,
        help="samples per pass of a learning step",
    )
    parser.add_argument("--agents", type=int, default=1, help="agents in the process")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="threads that torch may use"
    )
    parser.add_argument(
        "--setting", choices=SETTINGS, default="short", help="lengths of prompts and completions"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32", help="of the base model"
    )
    parser.add_argument(
        "--defaults", action="store_true", help="the system's own defaults where others are faster"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="device of the model")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time of a step")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = Arguments(**vars(parser.parse_args()))
    os.environ.update(
        OMP_NUM_THREADS=str(arguments.threads), MKL_NUM_THREADS=str(arguments.threads)
    )
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return arguments


def check_tokens(label: str, found: int, wanted: int) -> None:
    """Stop a run whose work differs from that of other systems.

    Raises:
        ValueError: If the two numbers of tokens differ.
    """
    if found != wanted:
        raise ValueError(
            f"{label} must have {wanted} tokens, got {found}: the systems would not do the same"
            " work"
        )


def version(package: str) -> str:
    """Return the version of an imported package, installed or not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(sys.modules[package].__version__)


def peak_bytes(device: str) -> int:
    """Return the peak memory of this process, on a GPU that of tensors on it."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def write_report(
    arguments: Arguments,
    step_seconds: Sequence[float],
    packages: Sequence[str],
    settings: dict[str, object],
) -> None:
    """Write the measurements of a run.

    Args:
        arguments: Command line of the runner.
        step_seconds: Seconds of every learning step of all agents together, the first included.
        packages: Imported packages whose versions are recorded.
        settings: Further settings of the system, as plain JSON values.

    Raises:
        ValueError: If the number of steps is not the one asked for.
    """
    if len(step_seconds) != arguments.steps + 1:
        raise ValueError(
            f"expected {arguments.steps + 1} learning steps, the system reported"
            f" {len(step_seconds)}"
        )
    report = {
        "agents": arguments.agents,
        "micro_batch": arguments.micro_batch,
        "threads": arguments.threads,
        "precision": arguments.precision,
        "device": arguments.device,
        "clock": arguments.clock,
        "first_step_seconds": step_seconds[0],
        "step_seconds": list(step_seconds[1:]),
        "peak_bytes": peak_bytes(arguments.device),
        "versions": {name: version(name) for name in packages},
        "settings": settings,
    }
    arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))
