"""Preparation and cost of runs of language models: members are LoRA adapters on a base model, or own all weights."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.population import Population
from evogrpo.config.agent import LanguageOptions
from evogrpo.distributed import processes
from evogrpo.envs.text.prompt_environment import SAMPLE_COMPLETIONS, Preflight, PromptEnvironment
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.members.devices import DEFAULT_MICRO_BATCH_TOKENS, available_device
from evogrpo.members.language.bank import REDUCED_LOGITS_ROWS
from evogrpo.members.language.compatibility import (
    check_causal_class,
    check_context,
    check_token_ids,
    context_of,
    end_ids_of,
)
from evogrpo.members.language.fsdp import NEEDS_SAMPLER, check_sharding, shard_count
from evogrpo.members.language.full_finetuning import AllWeights, choose_trained
from evogrpo.members.language.loading import (
    PACKAGES,
    BaseModel,
    check_quantised,
    choose_precision,
    default_dtype,
    load_base,
    load_outline,
)
from evogrpo.members.language.lora import LoraTargets, lora_from_json, read_adapter
from evogrpo.members.language.sampling import CACHED_TOKENS, rows_at_once
from evogrpo.members.language.sizing import (
    FLOAT,
    base_bytes,
    learning_bytes,
    parameters_per_rank,
    quantised_bytes,
    sampling_bytes,
)
from evogrpo.members.requests import RolloutBatch
from evogrpo.records import DEFAULT_POLICY
from evogrpo.text import count_text, number_text, pluralize, shorten, user_line
from evogrpo.training.configuration.sections import Config
from evogrpo.training.forecast import (
    Forecast,
    MemoryNeed,
    gigabytes,
    possible_values,
    processes_per_device,
    samples_text,
    schedule_rows,
    sizes_text,
)
from evogrpo.training.run_dir import StoredRun
from evogrpo.training.run_state import RunState
from evogrpo.training.schedule import Schedule
from evogrpo.validation import plain

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

SAVINGS = (
    "population.size, agent.micro_batch_tokens, agent.max_output_tokens or agent.max_episode_tokens"
)


VECTORS_BESIDE_MEMBERS = 5
"""Float32 vectors of one member's size besides the members' train states: weights and two moments
of the best member so far, the initial weights, one gradient.
"""

VECTORS_OF_EXPORT = 12
"""Estimated number of float32 vectors of one member's size while the best member is exported."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Estimated peak memory in bytes, by part.

    Attributes:
        base: Weights of the frozen base model on one rank.
        members: Train states of all members and of the best one so far, the initial weights, one
            gradient, and the larger of the copies before a learning step and those made while the
            best member is exported.
        learning: Activations and logits of one micro-batch.
        sampling: KV caches of the rows that are sampled at once. Conversations also keep some
            between turns: those of one turn are replaced when those of the next one are complete.
    """

    base: int
    members: int
    learning: int
    sampling: int

    @property
    def total(self) -> int:
        """Bytes at the peak; learning and sampling alternate, so the larger of them counts."""
        return self.base + self.members + max(self.learning, self.sampling)


@dataclass(frozen=True, kw_only=True)
class PreparedLanguage:
    """Prepared run of language models, without loaded weights.

    Attributes:
        config: The configuration, with the chosen precision.
        model: Name or path of the base model.
        outline: Tokenizer and architecture of the base model, without weights.
        env: The environment.
        trial: Results of testing the reward functions.
        device: Device of the members.
        lora: Settings of the adapters; None = members train all weights.
        trained: What members train.
    """

    one_thread: ClassVar[bool] = False

    config: Config
    model: str
    outline: BaseModel
    env: PromptEnvironment
    trial: Preflight
    device: str
    lora: "LoraConfig | None"
    trained: LoraTargets | AllWeights

    def facts(self) -> dict[str, str]:
        """Return facts about model, task and members."""
        config = self.config
        trained = self.trained.summary(self.outline.model)
        return {
            "model": f"{self.model} on {self.device} in {config.precision}{self._sharding_text()}",
            **({"adapters": f"train {trained}"} if trained else {}),
            **({} if config.sampler is None else {"sampler": config.sampler["name"]}),
            "task": f"{config.task.label}: {sizes_text(self.env)} questions",
            "population": (
                f"{pluralize(config.population.size, 'member')}, {self.trained.description}"
                + (f" that starts from {config.agent.adapter}" if config.agent.adapter else "")
            ),
        }

    def forecast(self) -> Forecast:
        """Return the costs of the run: upper bounds where completions may end early or hyperparameters evolve."""
        config = self.config
        env = self.env
        outline = self.outline.model
        device = self.device
        # 1. Work: optimizer steps and tokens.
        schedule = config.schedule
        members = config.population.size
        optimizer_steps = [
            epochs * math.ceil(config.schedule.samples_per_step / batch)
            for epochs in possible_values(config, "update_epochs")
            for batch in possible_values(config, "batch_size")
        ]
        fewest = min(optimizer_steps)
        most = max(optimizer_steps)
        batch = env.open("train", range(env.size("train")))
        longest = max(map(len, batch.prompts))
        turns = batch.max_turns
        row = max_row_tokens(config.agent, turns, min(map(len, batch.prompts)), context_of(outline))
        groups = schedule.samples_per_step // min(possible_values(config, "group_size"))
        per_step = members * _member_tokens(config, groups, longest, row)
        in_all = ""
        if schedule.generations is not None:
            in_all = (
                f", {count_text(schedule.generations * schedule.steps_per_generation * per_step)}"
                " in all"
            )
        # 2. Memory: members and the share of the base model.
        weights = self.trained.size
        parts = shard_count(config.base_parts)
        precision = FLOAT if config.precision == "float32" else 2
        if config.precision in PACKAGES:
            precision = default_dtype(device).itemsize
            base = quantised_bytes(outline, config.precision, precision)
        else:
            base = parameters_per_rank(outline, parts) * precision
        memory = peak_memory(
            outline,
            agent=config.agent,
            members=members,
            samples=config.schedule.samples_per_step,
            validation=schedule.questions("validation", env),
            weights=weights,
            longest_prompt=longest,
            turns=turns,
            precision=precision,
            base=base,
            device=device,
        )
        # 3. Rows of the plan.
        first = " ".join(map(str, self.trial.tokens[:12]))
        none = "none (does the function return a value?)"
        earned = {
            name: none if value is None else number_text(value)
            for name, value in self.trial.rewards.items()
        }
        if fewest == most:
            steps = pluralize(most, "step")
        else:
            steps = f"{fewest} to {pluralize(most, 'step')}"
        micro_batch = config.agent.micro_batch_tokens
        size = f"at most {pluralize(micro_batch or DEFAULT_MICRO_BATCH_TOKENS, 'token')}"
        if micro_batch is None and device.startswith("cuda"):  # chosen when the run starts
            size = "as many tokens as fit into memory"
        bound = "at most"
        limits = f"completions of at most {row}"
        if turns > 1:
            limits = f"conversations of at most {row} in up to {turns} turns"
            if config.agent.max_episode_tokens is None:
                bound = "about"
                limits = f"{limits}: replies as long as completions, without max_episode_tokens"
        rounds = schedule_rows(config, env, "completions")
        rows = {
            "first prompt": (
                f"{shorten(self.trial.prompt, 400)!r},"
                f" {pluralize(len(self.trial.tokens), 'token')}:"
                f" {first}{' …' if len(self.trial.tokens) > 12 else ''}"
            ),
            "rewards": f"{', '.join(map(' '.join, earned.items()))} for {SAMPLE_COMPLETIONS[0]!r}",
            "end tokens": self._end_tokens_text(),
            "samples": samples_text(config, "completions"),
            "groups": rounds["groups"],
            "optimizer": f"{steps} per member and learning step, in micro-batches of {size}",
            "steps": rounds["steps"],
            "tokens": (
                f"{bound} {count_text(per_step)} per learning step{in_all} (prompts of at most"
                f" {longest}, {limits}; updates included, evaluations left out)"
            ),
            "parameters": (
                f"{_millions_text(sum(map(Tensor.numel, outline.parameters())))} in the base, "
                f"{_millions_text(weights)} in each member"
            ),
            "memory": (
                f"about {gigabytes(memory.total)} at the peak: base {gigabytes(memory.base)} +"
                f" members {gigabytes(memory.members)} ({members} × weights and two moments, twice,"
                f" float32) + the larger of learning {gigabytes(memory.learning)} (activations and"
                f" logits of a micro-batch, gradients) and sampling {gigabytes(memory.sampling)}"
                " (KV cache); without Python and its libraries"
            ),
        }
        return Forecast(rows=rows, memory=_memory_need(memory, device))

    @property
    def longest_sample(self) -> int:
        """Maximum number of tokens of a completion or conversation, without its prompt."""
        turns = self.env.open("train", range(1)).max_turns
        return max_row_tokens(self.config.agent, turns, 0, context_of(self.outline.model))

    def mean_length(self, sampled: RolloutBatch) -> float:
        """Return the mean number of tokens of the sampled completions or conversations."""
        rows = sampled.experience[DEFAULT_POLICY].present
        return float(rows.sum()) / len(rows)

    def population(self) -> Population:
        """Load the base model and make the founders."""
        # `lora` became an object of peft; an adapter has its own.
        options = {**vars(self.config.agent)}
        del options["lora"]
        options["lora_config"] = None if options["adapter"] else self.lora
        tokenizer = self.outline.tokenizer
        # Padding is masked, so any token can be used.
        if tokenizer.pad_token_id is None:
            padding = tokenizer.eos_token_id
        else:
            padding = tokenizer.pad_token_id
        return GRPO.population(
            self.config.population.size,
            self.env.observation_space,
            self.env.action_space,
            actor_network=self._base(),
            pad_token_id=int(padding or 0),
            source=self.model,
            **options,
            **self.config.founder_options(),
        )

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Load the base model and the members of a stored run."""
        return saved.restore(self._base())

    def _base(self) -> "PreTrainedModel":
        """Load the base model in the precision that `prepare` chose."""
        precision = self.config.precision
        if precision in PACKAGES:
            dtype: Any = precision
        else:
            dtype = getattr(torch, precision)
        return load_base(
            self.model, dtype=dtype, device=self.device, parts=self.config.base_parts
        ).model

    def _end_tokens_text(self) -> str:
        """Return the tokens that end a completion."""
        config = self.config.agent
        tokenizer = self.outline.tokenizer
        ends = config.eos_token_ids or sorted(
            end_ids_of(self.outline.model).union(self.env.action_space.end_ids)
        )
        return ", ".join(
            f"{token} {shorten(str(tokenizer.decode([token])), 40)!r}" for token in ends
        )

    def _sharding_text(self) -> str:
        """Return a note on the sharding of the base model, if it was requested."""
        requested = self.config.base_parts
        parts = shard_count(self.config.base_parts)
        if requested == 1:
            return ""
        if processes().size == 1:
            return ", not sharded: there is one process"
        if parts == 1:
            layout = "a full copy in every process"
        else:
            layout = f"each copy sharded over {parts} processes"
        return f", {layout}" + (
            f" ({requested} do not divide {processes().size})" if parts != requested else ""
        )


def max_row_tokens(agent: LanguageOptions, turns: int, prompt: int, context: int | None) -> int:
    """Return the maximum number of tokens of a completion or conversation, without its prompt.

    Without a limit on a conversation, its replies are assumed to be as long as its completions.

    Args:
        agent: Settings of the members.
        turns: Maximum number of completions of a conversation.
        prompt: Tokens of the prompt; shorter ones leave more room in the context.
        context: The model's context in tokens; None = no limit.
    """
    if turns == 1:
        return agent.max_output_tokens
    # a reply between two completions
    tokens = agent.max_episode_tokens or (2 * turns - 1) * agent.max_output_tokens
    if context is None:
        return tokens
    return max(agent.max_output_tokens, min(tokens, context - prompt))


def _member_tokens(config: Config, groups: int, longest_prompt: int, row_tokens: int) -> int:
    """Return the maximum number of tokens of one member's learning step: sampling, updates, and the reference pass.

    Args:
        config: Configuration of the run.
        groups: Maximum number of groups of a learning step.
        longest_prompt: Tokens of the longest prompt.
        row_tokens: Result of `max_row_tokens`.
    """
    completions = config.schedule.samples_per_step * row_tokens
    one_pass = groups * longest_prompt + completions  # groups share their prompt
    epochs = max(possible_values(config, "update_epochs"))
    splits = (
        math.ceil(config.schedule.samples_per_step / min(possible_values(config, "batch_size"))) - 1
    )
    # Dynamic sampling may resample all groups.
    sampling = (1 + config.agent.objective.dynamic_sampling) * one_pass
    # A group that is split between two optimizer steps runs its prompt twice.
    updates = epochs * (one_pass + splits * longest_prompt)
    has_reference = config.hyperparameters.beta > 0 or "beta" in config.search_space
    total: int = sampling + updates + (one_pass if has_reference else 0)
    return total


def peak_memory(
    model: "PreTrainedModel",
    *,
    agent: LanguageOptions,
    members: int,
    samples: int,
    validation: int,
    weights: int,
    longest_prompt: int,
    turns: int,
    precision: int,
    base: int,
    device: str,
) -> Memory:
    """Estimate the peak memory.

    If the micro-batch size follows from memory, `DEFAULT_MICRO_BATCH_TOKENS` is assumed: a larger
    size is only chosen if it needs at most half of the remaining memory.

    Args:
        model: The base model, with or without weights.
        agent: Settings of the members.
        members: Number of members.
        samples: Completions per member and learning step.
        validation: Completions per member and evaluation.
        weights: Parameters of one member.
        longest_prompt: Tokens of the longest prompt.
        turns: Maximum number of completions of a conversation.
        precision: Bytes per number of the precision that the base model computes in.
        base: Bytes of the base model's weights on one process.
        device: Device of the members.
    """
    budget = agent.micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS
    # Tokens of the longest row, and rows of all members together.
    width = longest_prompt + max_row_tokens(agent, turns, longest_prompt, context_of(model))
    rows = members * max(samples, validation)
    cached = width * min(rows, rows_at_once(width, device.partition(":")[0]))
    if turns > 1:  # the caches kept from the last turn, and those kept for the next one
        cached += 2 * min(width * rows, CACHED_TOKENS)
    # weights, two moments and a reference
    vectors = members * (3 + (agent.objective.reference == "snapshot"))
    return Memory(
        base=base,
        members=(vectors + VECTORS_BESIDE_MEMBERS + max(vectors, VECTORS_OF_EXPORT))
        * weights
        * FLOAT,
        learning=learning_bytes(
            model, budget, REDUCED_LOGITS_ROWS if agent.reduce_memory_peak else budget, precision
        )
        + members * weights * FLOAT,
        sampling=sampling_bytes(model, cached, precision),
    )


def _millions_text(count: int) -> str:
    if count >= 1e5:
        return f"{count / 1e6:.1f} M"
    return count_text(count)


def prepare(config: Config) -> PreparedLanguage:
    """Check a configuration against the device, the model's architecture and tokenizer, and the task."""
    # 1. Check the device, the initial adapter and the architecture of the base model.
    assert config.model is not None  # it has a default
    device = available_device(config.device)
    if config.agent.adapter is None:
        start = None
    else:
        start = read_adapter(config.agent.adapter)
    if config.agent.full_finetuning:
        fresh = None
    else:
        fresh = lora_from_json(plain(config.agent.lora))
    lora = start.lora_config if start else fresh
    outline = load_outline(config.model)
    check_causal_class(outline.model)
    check_sharding(outline.model, config.base_parts, device)
    if config.sampler is None and shard_count(config.base_parts) > 1:
        raise ValueError(NEEDS_SAMPLER)
    check_quantised(config.precision, device, shard_count(config.base_parts))
    # 2. Choose what members train.
    trained = choose_trained(outline.model, lora, outline=True)
    if start is not None and isinstance(trained, LoraTargets):
        start.flat(trained.targets)  # raises ValueError if the adapter is of another base model
    # 3. Build the environment. By default, prompts leave room for a completion in the model's
    #    context.
    max_prompt_length = config.task.max_prompt_length
    context = context_of(outline.model)
    if max_prompt_length is None and context is not None:
        max_prompt_length = context - config.agent.max_output_tokens
        if max_prompt_length < 1:
            raise ValueError(
                f"agent.max_output_tokens must be below the model's context of {context} tokens,"
                f" got {config.agent.max_output_tokens}."
            )
    config.task.set_templates(outline.tokenizer)
    env = config.task.environment(
        outline.tokenizer, seed=config.task_seed, max_prompt_length=max_prompt_length
    )
    # 4. Try the reward functions, and check all tokens against the model.
    try:
        trial = env.preflight()
    except RewardError as error:
        env.close()
        raise ValueError(
            f"{error}{user_line(error.__cause__) if error.__cause__ else ''}"
        ) from error
    check_token_ids(outline.model, [env.largest_token], "tokens of prompts")
    check_token_ids(outline.model, config.agent.eos_token_ids or (), "eos_token_ids")
    if not (config.agent.eos_token_ids or end_ids_of(outline.model) or env.action_space.end_ids):
        raise ValueError(
            "agent.eos_token_ids must be given: neither the model nor its tokenizer has an end"
            " token."
        )
    check_context(context, env.longest_prompt + config.agent.max_output_tokens)
    # 5. Choose the precision, the same on all ranks.
    precision = processes().broadcast(
        choose_precision(config.precision, outline.model, device, full=lora is None)
    )
    return PreparedLanguage(
        trial=trial,
        config=replace(config, precision=precision),
        model=config.model,
        outline=outline,
        env=env,
        device=device,
        lora=lora,
        trained=trained,
    )


def memory_need(population: Population, env: Any, schedule: Schedule) -> MemoryNeed:
    """Estimate the memory from the base model, the members and the longest prompt."""
    members: Any = population.members
    model = members.bank.base.model
    validation = schedule.questions("validation", env)
    device = str(members.device)
    prompts = env.open("train", range(env.size("train")))
    memory = peak_memory(
        model,
        agent=members.settings,
        members=members.size,
        samples=schedule.samples_per_step,
        validation=validation,
        weights=members.bank.trained.size,
        longest_prompt=max(map(len, prompts.prompts)),
        turns=prompts.max_turns,
        precision=next(model.parameters()).element_size(),
        base=base_bytes(model),
        device=device,
    )
    return _memory_need(memory, device)


def _memory_need(memory: Memory, device: str) -> MemoryNeed:
    return MemoryNeed(
        size=memory.total, device=device, savings=SAVINGS, processes=processes_per_device(device)
    )
