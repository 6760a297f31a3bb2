"""Costs of a run of language models: tokens, optimizer steps, parameters and memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from evogrpo.algorithms.policies.settings import LanguageSettings
from evogrpo.envs.text.datasets import SAMPLE_COMPLETIONS, Preflight
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.evolution.shared_experience import max_sources
from evogrpo.models.devices import DEFAULT_MICRO_BATCH_TOKENS
from evogrpo.models.language.fsdp import gathered_parameters, parameters_per_rank, shard_count
from evogrpo.models.language.loading import own_precision
from evogrpo.models.language.lora import Target
from evogrpo.models.language.quantised import PACKAGES, bytes_of
from evogrpo.models.language.sampling import rows_at_once
from evogrpo.models.language.sizing import learning_bytes, sampling_bytes
from evogrpo.text import count_text, number_text, pluralize, shorten
from evogrpo.training.configuration.agent_sections import LanguageAgent
from evogrpo.training.configuration.question_tasks import QuestionTask
from evogrpo.training.configuration.sections import AnyConfig, Config
from evogrpo.training.forecast import (
    Need,
    Rounds,
    bytes_text,
    gigabytes,
    possible,
    samples_row,
    sharing,
)

FLOAT = 4  # bytes of a float32
SAVINGS = "population.size, agent.micro_batch_tokens or agent.max_output_tokens, or take a smaller model"
NO_REWARD = "none (does the function return a value?)"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Estimated peak memory in bytes, by part.

    Attributes:
        base: Weights of the frozen base model on one rank.
        members: Adapters and AdamW moments of all members, their copies before a learning step, one gradient and the
            common first adapter.
        learning: Activations and logits of one micro-batch.
        sampling: KV cache, with the copy made when it grows.
    """

    base: int
    members: int
    learning: int
    sampling: int

    @property
    def total(self) -> int:
        """Total; learning and sampling alternate, so the larger counts."""
        return self.base + self.members + max(self.learning, self.sampling)


@dataclass(frozen=True, kw_only=True)
class LanguageForecast:
    """Costs of a run of language models; upper bounds where completions may end early or values may evolve.

    Attributes:
        rounds: Numbers of groups, steps and evaluations.
        optimizer_steps: Minimum and maximum number per learning step and member.
        longest_prompt: Length of the longest training prompt, in tokens.
        longest_completion: Maximum length of a completion, in tokens.
        tokens_per_step: Maximum number of tokens of one learning step, for all members, updates included.
        tokens: Maximum number of tokens of the run without evaluations; None if tokens or seconds limit the run.
        parameters: Number of parameters of the base model.
        adapter_parameters: Number of parameters of one adapter.
        memory: Estimated peak memory.
        device: Device of this memory.
        processes: Number of processes that share the device's memory.
        trial: Results of testing the reward functions.
        fetched: With a sharded base model, bytes that each process receives from others in one forward pass.
    """

    rounds: Rounds
    optimizer_steps: tuple[int, int]
    longest_prompt: int
    longest_completion: int
    tokens_per_step: int
    tokens: int | None
    parameters: int
    adapter_parameters: int
    memory: Memory
    device: str
    processes: int
    trial: Preflight
    fetched: int = 0

    @property
    def need(self) -> Need:
        """Peak memory."""
        return Need(size=self.memory.total, device=self.device, savings=SAVINGS, processes=self.processes)

    def rows(self, config: AnyConfig) -> dict[str, str]:
        """Return the rows of the plan."""
        fewest, most = self.optimizer_steps
        tokens = f"at most {count_text(self.tokens_per_step)} a learning step"
        if self.tokens is not None:
            tokens += f", {count_text(self.tokens)} in all"
        steps = pluralize(most, "step") if fewest == most else f"{fewest} to {pluralize(most, 'step')}"
        fetched = f"{bytes_text(self.fetched)} from other processes per forward pass, also for each sampled token"
        written, form = config.logging.completions, config.logging.completions_format
        return {
            "first prompt": f"{shorten(self.trial.prompt, 400)!r}, {_ids_text(self.trial.tokens)}",
            "rewards": f"{_rewards_text(self.trial)} for {SAMPLE_COMPLETIONS[0]!r}",
            "samples": samples_row(config, "completions"),
            "groups": self.rounds.groups_row(),
            "optimizer": f"{steps} per member and learning step, in micro-batches of "
            f"{_micro_batch_text(config.agent.micro_batch_tokens, self.device)}",
            "steps": self.rounds.steps_row(config, "completions of held-out questions"),
            "tokens": f"{tokens} (prompts of at most {self.longest_prompt}, completions of at most "
            f"{self.longest_completion}; updates included, evaluations left out)",
            "parameters": f"{_millions_text(self.parameters)} in the base, "
            f"{_millions_text(self.adapter_parameters)} in each member's adapter",
            "memory": _memory_row(self.memory, config.population.size),
            **({"base in parts": f"each process receives {fetched}"} if self.fetched else {}),
            "completions": f"{written} per learning step are written as {form}" if written else "none are written",
        }


def make_forecast(
    config: Config[QuestionTask, LanguageAgent],
    env: HuggingFaceGym,
    trial: Preflight,
    outline: PreTrainedModel,
    targets: Sequence[Target],
    device: str,
) -> LanguageForecast:
    """Compute the costs of a run.

    Args:
        config: The configuration.
        env: The environment.
        trial: Result of its preflight.
        outline: The base model, without its weights.
        targets: The modules that adapters change.
        device: Device of the members.
    """
    # 1. Work: optimizer steps and tokens.
    rounds, samples = Rounds.of(config, env), config.schedule.samples_per_step
    optimizer_steps = [
        epochs * math.ceil(samples / batch)
        for epochs in possible(config, "update_epochs")
        for batch in possible(config, "batch_size")
    ]
    longest = max(len(prompt) for prompt in env.open("train", range(env.size("train"))).prompts)
    per_step = config.population.size * _member_tokens(config, max(rounds.groups.values()), longest)
    # 2. Memory: adapters and the share of the base model.
    adapter = sum(target.end - target.start for target in targets)
    parts, precision = shard_count(config.base_parts), FLOAT if config.precision == "float32" else 2
    if config.precision in PACKAGES:
        precision = own_precision(device).itemsize
    return LanguageForecast(
        rounds=rounds,
        optimizer_steps=(min(optimizer_steps), max(optimizer_steps)),
        longest_prompt=longest,
        longest_completion=config.agent.max_output_tokens,
        tokens_per_step=per_step,
        tokens=None if rounds.learning_steps is None else rounds.learning_steps * per_step,
        parameters=sum(parameter.numel() for parameter in outline.parameters()),
        adapter_parameters=adapter,
        memory=peak_memory(
            outline,
            agent=config.agent,
            members=config.population.size,
            samples=samples,
            validation=rounds.validation,
            adapter=adapter,
            longest=longest,
            precision=precision,
            base=held_bytes(outline, config.precision, precision, parts),
            device=device,
        ),
        device=device,
        processes=sharing(device),
        trial=trial,
        fetched=gathered_parameters(outline, parts) * precision,
    )


def _ids_text(tokens: Sequence[int]) -> str:
    first = " ".join(map(str, tokens[:12]))
    return f"{pluralize(len(tokens), 'token')}: {first}{' …' if len(tokens) > 12 else ''}"


def _rewards_text(trial: Preflight) -> str:
    values = (f"{name} {NO_REWARD if value is None else number_text(value)}" for name, value in trial.rewards.items())
    return ", ".join(values)


def _member_tokens(config: Config[QuestionTask, LanguageAgent], groups: int, longest: int) -> int:
    """Return the most tokens of one member's learning step: sampling, updates, and the reference where beta is used."""
    completions = config.schedule.samples_per_step * config.agent.max_output_tokens
    epochs = max(possible(config, "update_epochs"))
    splits = math.ceil(config.schedule.samples_per_step / min(possible(config, "batch_size"))) - 1
    # Dynamic sampling may resample all groups.
    sampling = (1 + config.agent.objective.dynamic_sampling) * (groups * longest + completions)
    # A group that is split between two optimizer steps runs its prompt twice.
    updates = epochs * ((groups + splits) * longest + completions)
    if config.experience is not None:  # plus one pass over others' samples for their effective sample size
        others = max_sources(config.experience, config.population.size)
        updates += others * (updates + (groups * longest + completions if config.experience.min_ess else 0))
    reference = (
        groups * longest + completions if config.hyperparameters.beta > 0 or "beta" in config.search_space else 0
    )
    return sampling + updates + reference


def held_bytes(outline: PreTrainedModel, precision: str | None, compute: int, parts: int) -> int:
    """Return the bytes of a base model's weights on one process.

    Args:
        outline: The base model without its weights.
        precision: Precision in which the weights are stored.
        compute: Bytes per number of the precision that it computes in.
        parts: Number of processes that share one copy.
    """
    if precision in PACKAGES:
        return bytes_of(outline, precision, compute)
    return parameters_per_rank(outline, parts) * compute


def peak_memory(
    model: PreTrainedModel,
    *,
    agent: LanguageAgent | LanguageSettings,
    members: int,
    samples: int,
    validation: int,
    adapter: int,
    longest: int,
    precision: int,
    base: int,
    device: str,
) -> Memory:
    """Estimate the peak memory.

    If the micro-batch size follows from memory, `DEFAULT_MICRO_BATCH_TOKENS` is assumed: a larger size is only chosen
    if it needs at most half of the remaining memory.

    Args:
        model: The base model, with or without weights.
        agent: Settings of the members.
        members: Number of members.
        samples: Completions per member and learning step.
        validation: Completions per member and evaluation.
        adapter: Parameters of one member.
        longest: Tokens of the longest prompt.
        precision: Bytes per number of the precision that the base model computes in.
        base: Bytes of the base model's weights on one process.
        device: Device of the members.
    """
    budget = agent.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    width = longest + agent.max_output_tokens
    cached = width * min(members * max(samples, validation), rows_at_once(width, device.partition(":")[0]))
    return Memory(
        base=base,
        members=(2 * 3 * members + 2) * adapter * FLOAT,
        learning=learning_bytes(model, budget, 256 if agent.reduce_memory_peak else budget, precision)
        + members * adapter * FLOAT,
        sampling=sampling_bytes(model, cached, precision),
    )


def _micro_batch_text(tokens: int | None, device: str) -> str:
    """Describe the size of a micro-batch; on a GPU without a setting, it is chosen when the run starts."""
    if tokens is None and device.startswith("cuda"):
        assumed = count_text(DEFAULT_MICRO_BATCH_TOKENS)
        return f"as many tokens as fit into memory (the estimate of memory assumes {assumed})"
    return f"at most {pluralize(tokens or DEFAULT_MICRO_BATCH_TOKENS, 'token')}"


def _memory_row(memory: Memory, size: int) -> str:
    """Describe the estimated peak memory and its parts."""
    return (
        f"about {gigabytes(memory.total)} at the peak: base {gigabytes(memory.base)} + members "
        f"{gigabytes(memory.members)} ({size} × adapter and two moments, twice, float32) + the larger of learning "
        f"{gigabytes(memory.learning)} (activations and logits of a micro-batch, gradients) and sampling "
        f"{gigabytes(memory.sampling)} (KV cache); without Python and its libraries"
    )


def _millions_text(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else count_text(count)
