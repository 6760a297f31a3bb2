"""From a configuration to a run: check everything cheap first, then load weights; and the same for resuming."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from evogrpo.agents.grpo import GRPO
from evogrpo.envs.huggingface import HuggingFaceGym
from evogrpo.persistence.journal import read_journal
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.policies.lora import Target, check_supported, find_targets, lora_from_json
from evogrpo.policies.models import BaseModel, load_base, load_outline
from evogrpo.training.config import CONFIG_FILE, Config, override, parse_config, write_config
from evogrpo.training.evolve import Evolution
from evogrpo.training.rundir import JOURNAL, RunDir, open_run
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.strict_yaml import parse_override, read_yaml_file
from evogrpo.training.typed import plain, typed

"""What a resumed run may change of its schedule; the rest is part of what makes resuming exact."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything about a run that can be had without loading weights.

    Attributes:
        config: The configuration.
        outline: The base model's tokenizer and architecture.
        env: Where members act.
        device: Where they will live.
        lora: The adapters.
        targets: The modules they adapt.
    """

    config: Config
    outline: BaseModel
    env: HuggingFaceGym
    device: str
    lora: LoraConfig
    targets: tuple[Target, ...]

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token; for one that has none, its end of sequence, as padding is masked anyway."""
        tokenizer = self.outline.tokenizer
        chosen = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return int(chosen or 0)


def prepare(config: Config) -> Prepared:
    """Check a configuration against the device, the model's architecture, its tokenizer and the task.

    Raises:
        ValueError: If one of them does not fit, with what to do.
    """
    device = choose_device(config.device)
    lora = lora_from_json(plain(config.agent.lora))
    check_supported(lora)
    outline = load_outline(config.model)
    targets = find_targets(outline.model, lora)
    longest = config.task.max_prompt_length
    context = getattr(outline.model.config.get_text_config(), "max_position_embeddings", None)
    if longest is None and context is not None:
        longest = int(context) - config.agent.max_output_tokens
        if longest < 1:
            raise ValueError(
                f"agent.max_output_tokens must leave room for a prompt in the model's context of {context} tokens, "
                f"got {config.agent.max_output_tokens}"
            )
    seed = config.seed if config.task.seed is None else config.task.seed
    env = config.task.environment(outline.tokenizer, seed=seed, max_prompt_length=longest)
    return Prepared(config=config, outline=outline, env=env, device=device, lora=lora, targets=targets)


def choose_device(wanted: str | None) -> str:
    """Return the device to use: the one asked for if it is there, else a GPU if there is one.

    Raises:
        ValueError: If the device does not exist here.
    """
    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {wanted!r} cannot be used: {str(error).splitlines()[0]}") from error
    return wanted


def free_run_dir(name: str, folder: Path | None = None) -> Path:
    """Return `runs/name`, or `runs/name-2` and so on: the first that holds nothing yet."""
    parent = folder or Path("runs")
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return path
        number += 1


def start(prepared: Prepared, run_dir: Path) -> Evolution:
    """Load the base model, make the population and open the run's folder.

    Raises:
        ValueError: If the weights cannot be loaded, or the folder already holds a run.
    """
    config, env = prepared.config, prepared.env
    base = load_base(config.model, device=prepared.device)
    options: dict[str, Any] = {**config.hyperparameters.to_json(), **config.agent.settings()}
    if config.agent.eos_token_ids is not None:
        options["eos_token_ids"] = config.agent.eos_token_ids
    population = GRPO.population(
        config.population.size,
        env.observation_space,
        env.action_space,
        actor_network=base.model,
        pad_token_id=prepared.pad_token_id,
        samples_per_step=config.schedule.samples_per_step,
        spread=config.population.spread,
        hp_config=config.evolve,
        lora_config=prepared.lora,
        seed=config.seed,
        source=config.model,
        **options,
    )
    evolution = Evolution(
        population,
        env,
        schedule=config.schedule,
        strategy=config.strategy,
        run_dir=_run_dir(config, run_dir),
        description={"task": config.task.label, "model": config.model},
    )
    write_config(config, run_dir)
    return evolution


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """A stored run that can go on.

    Attributes:
        config: Its configuration, with what the caller changed.
        schedule: Its schedule, likewise.
        generation: Generations evaluated in the checkpoint that it goes on from.
        step: Learning steps taken there.
        skipped: Why each newer checkpoint cannot be used.
        complete: Whether nothing is left to do under this schedule.
    """

    config: Config
    schedule: Schedule
    generation: int
    step: int
    skipped: tuple[CheckpointError, ...]
    complete: bool


def read_resumable(run_dir: Path, overrides: Sequence[str] = ()) -> Resumable:
    """Read what a run needs to go on.

    Args:
        run_dir: The run's folder.
        overrides: `key=value` for a limit of the schedule, such as `generations=8`, for `model` or for `device`.

    Raises:
        ValueError: If the folder holds no run, its configuration is damaged, or an override is refused.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        raise ValueError(
            f"{run_dir} holds no {CONFIG_FILE}: name the folder of a run started with `evogrpo demo` or `evogrpo "
            "train`; one started by evolve() in Python goes on with evogrpo.resume()"
        )
    limits, rest = _split_overrides(overrides)
    config = parse_config(override(read_yaml_file(run_dir / CONFIG_FILE), rest))
    saved = open_run(run_dir)
    schedule = dataclasses.replace(saved.schedule, **limits)
    progress = saved.record["progress"]
    spent = {"generations": "generation", "max_tokens": "tokens", "max_seconds": "seconds"}
    limited = {limit: getattr(schedule, limit) for limit in spent}
    ended = any(most is not None and progress[spent[limit]] >= most for limit, most in limited.items())
    if schedule.target_fitness is not None and saved.best is not None:
        scores = saved.best[1]["member"]["scores"]
        ended = ended or sum(scores) / len(scores) >= schedule.target_fitness
    tested = schedule.test_questions == 0 or _tested(run_dir)
    return Resumable(
        config=config,
        schedule=schedule,
        generation=progress["generation"],
        step=progress["step"],
        skipped=saved.skipped,
        complete=ended and tested and progress["generation"] > 0 and progress["step_in_generation"] == 0,
    )


def resume(prepared: Prepared, resumable: Resumable, run_dir: Path) -> Evolution:
    """Load the base model and restore the newest complete checkpoint of a run.

    Raises:
        ValueError: If the weights cannot be loaded, or they are not the ones the run was trained on.
    """
    base = load_base(prepared.config.model, device=prepared.device)
    saved = open_run(run_dir)
    population, progress = saved.restore(base.model)
    return Evolution(
        population,
        prepared.env,
        schedule=resumable.schedule,
        strategy=saved.strategy,
        run_dir=_run_dir(prepared.config, run_dir),
        progress=progress,
        description={"task": prepared.config.task.label, "model": prepared.config.model},
    )


def _run_dir(config: Config, run_dir: Path) -> RunDir:
    logging = config.logging
    return RunDir(
        run_dir,
        keep=logging.keep_checkpoints,
        tensorboard=logging.tensorboard,
        completions=logging.completions,
        completions_format=logging.completions_format,
    )


def _split_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Tell limits of the schedule, already typed, from changes to the configuration."""
    limits: dict[str, Any] = {}
    rest: list[str] = []
    for text in overrides:
        keys, value = parse_override(text)
        name = keys[-1]
        if name in LIMITS and keys[:-1] in ((), ("schedule",)):
            limits[name] = typed(Schedule.__dataclass_fields__[name].type, value, f"schedule.{name}")
        elif keys in (("model",), ("device",)):
            rest.append(text)
        else:
            raise ValueError(
                f"a resumed run may change {', '.join(LIMITS)}, model and device, got {'.'.join(keys)!r}: anything "
                "else would make it another run; start that with `evogrpo train`"
            )
    return limits, rest


def _tested(run_dir: Path) -> bool:
    """Tell whether the run has answered the test split since it last went on."""
    if not (run_dir / JOURNAL).exists():  # killed after the founders were saved and before the first event
        return False
    events = [event["event"] for event in read_journal(run_dir / JOURNAL)]
    resumed = max((number for number, event in enumerate(events) if event == "resumed"), default=-1)
    return "test" in events[resumed + 1 :]
