"""Tasks of language models: checks before the weights are loaded, costs, and members."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.population import Population
from evogrpo.config.agent import LanguageOptions
from evogrpo.config.task_settings import TaskSettings
from evogrpo.distributed import processes
from evogrpo.envs.text.preflight import SAMPLE_COMPLETIONS, Preflight
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.members.devices import DEFAULT_MICRO_BATCH_TOKENS, available_device, device_memory
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
from evogrpo.members.language.lora import lora_from_json
from evogrpo.members.language.lora_targets import LoraTargets
from evogrpo.members.language.peft_files import read_adapter
from evogrpo.members.language.sampling import CACHED_TOKENS, rows_at_once
from evogrpo.members.language.sizing import (
    FLOAT,
    MEMORY_SHARE,
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
    sizes_text,
    work_rows,
)
from evogrpo.training.run_dir import StoredRun
from evogrpo.training.run_state import RunState
from evogrpo.training.schedule import Schedule, check_task
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
        learning: Activations and logits of one micro-batch or of the longest row.
        sampling: KV caches of the rows that are sampled at once. Conversations also keep some
            between turns: those of one turn are replaced when those of the next one are complete.
        recompute: Layers of the longest row are computed again in the backward pass.
    """

    base: int
    members: int
    learning: int
    sampling: int
    recompute: bool

    @property
    def total(self) -> int:
        """Bytes at the peak; learning and sampling alternate, so the larger of them counts."""
        return self.base + self.members + max(self.learning, self.sampling)


@dataclass(frozen=True, kw_only=True)
class LanguageTask:
    """Checked task of language models, without loaded weights.

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
        base = f"{self.model} on {self.device} in {config.precision}{self._sharding()}"
        facts = {"model": base}
        trained = self.trained.summary(self.outline.model)
        if trained:
            facts["adapters"] = f"train {trained}"
        if config.sampler is not None:
            facts["sampler"] = config.sampler["name"]
        facts["task"] = f"{config.task.label}: {sizes_text(self.env)} questions"
        members = pluralize(config.population.size, "member")
        facts["population"] = f"{members}, {self.trained.description}"
        if config.agent.adapter:
            facts["population"] += f" that starts from {config.agent.adapter}"
        return facts

    def _sharding(self) -> str:
        """Return a note on the sharding of the base model, if it was requested."""
        requested = self.config.base_parts
        if requested == 1:
            return ""
        size = processes().size
        if size == 1:
            return ", not sharded: there is one process"
        # The greatest common divisor of the requested parts and the number of processes.
        parts = shard_count(requested)
        layout = "a full copy in every process"
        if parts > 1:
            layout = f"each copy sharded over {parts} processes"
        note = f" ({requested} do not divide {size})" if parts != requested else ""
        return f", {layout}{note}"

    @cached_property
    def forecast(self) -> Forecast:
        """Costs of the run.

        They are upper bounds where completions may end early or hyperparameters evolve.
        """
        config = self.config
        members = config.population.size
        model = self.outline.model
        samples = config.schedule.samples_per_step
        batch = self.env.make_batch("train", range(self.env.size("train")))
        lengths = [len(prompt) for prompt in batch.prompts]
        # Members may have longer texts in their prompts than the configured ones.
        lengths.append(longest_prompt(self.env, lengths))
        # 1. Optimizer steps of a learning step.
        epochs = possible_values(config, "update_epochs")
        batch_sizes = possible_values(config, "batch_size")
        fewest = min(epochs) * math.ceil(samples / max(batch_sizes))
        most = max(epochs) * math.ceil(samples / min(batch_sizes))
        steps = pluralize(most, "step")
        if fewest < most:
            steps = f"{fewest} to {steps}"
        micro_batch = config.agent.micro_batch_tokens
        size = f"at most {pluralize(micro_batch or DEFAULT_MICRO_BATCH_TOKENS, 'token')}"
        if micro_batch is None and self.device.startswith("cuda"):  # chosen when the run starts
            size = "as many tokens as fit into memory"
        # 2. Memory: the share of the base model, and the members.
        parts = shard_count(config.base_parts)
        precision = FLOAT if config.precision == "float32" else 2
        # A base with quantised weights computes in the default dtype of the device.
        if config.precision in PACKAGES:
            precision = default_dtype(self.device).itemsize
            base = quantised_bytes(model, config.precision, precision)
        else:
            base = parameters_per_rank(model, parts) * precision
        memory = peak_memory(
            model,
            agent=config.agent,
            members=members,
            samples=samples,
            validation=config.schedule.questions("validation", self.env),
            weights=self.trained.size,
            longest_prompt=max(lengths),
            turns=batch.max_turns,
            precision=precision,
            base=base,
            device=self.device,
        )
        # 3. Rows of the plan.
        tokens, limits = self._step_tokens(lengths, batch.max_turns)
        parts_of_learning = "activations, logits and gradients"
        if memory.recompute:
            parts_of_learning += ", with gradient checkpointing"
        in_base = sum(weights.numel() for weights in model.parameters())
        rows = {
            **self._trial_rows(),
            **work_rows(config, self.env, "completions"),
            "optimizer": f"{steps} per member and learning step, in micro-batches of {size}",
            "tokens": limits,
            "parameters": (
                f"{_millions_text(in_base)} in the base,"
                f" {_millions_text(self.trained.size)} in each member"
            ),
            # Learning and sampling do not hold their memory at the same time.
            "memory": (
                f"about {gigabytes(memory.total)} at the peak: base {gigabytes(memory.base)} +"
                f" members {gigabytes(memory.members)} + the larger of learning"
                f" {gigabytes(memory.learning)} ({parts_of_learning}) and sampling"
                f" {gigabytes(memory.sampling)} (KV cache); without Python and its libraries"
            ),
        }
        need = _memory_need(memory, self.device)
        return Forecast(rows=rows, memory=need, step={"tokens": tokens})

    def _trial_rows(self) -> dict[str, str]:
        """Return the rows of the plan on the first prompt, its rewards and the end tokens."""
        tokens = self.trial.tokens
        first = " ".join(str(token) for token in tokens[:12])
        # Enough to see the BOS and the opening of the chat template.
        if len(tokens) > 12:
            first += " …"
        rewards = []
        for name, value in self.trial.rewards.items():
            text = "none (does the function return a value?)"
            if value is not None:
                text = number_text(value)
            rewards.append(f"{name} {text}")
        tokenizer = self.outline.tokenizer
        ends: Collection[int] = self.config.agent.eos_token_ids or ()
        if not ends:
            of_model = end_ids_of(self.outline.model)
            ends = sorted(of_model.union(self.env.action_space.end_ids))
        end_tokens = []
        for end in ends:
            text = str(tokenizer.decode([end]))
            end_tokens.append(f"{end} {shorten(text, 40)!r}")
        stop_strings = self.config.agent.stop_strings or ()
        end_tokens += [f"stop string {shorten(text, 40)!r}" for text in stop_strings]
        ends_text = ", ".join(end_tokens)
        # Models that were not trained to chat rarely write an end token.
        chats = getattr(tokenizer, "chat_template", None) is not None
        if not (chats or stop_strings or self.config.agent.eos_token_ids):
            ends_text += (
                ". The model has no chat template and may continue after its answer. Set"
                " agent.stop_strings to end it"
            )
        prompt = shorten(self.trial.prompt, 400)
        return {
            "first prompt": f"{prompt!r}, {pluralize(len(tokens), 'token')}: {first}",
            **self._other_prompt(),
            "rewards": f"{', '.join(rewards)} for {SAMPLE_COMPLETIONS[0]!r}",
            "end tokens": ends_text,
        }

    def _other_prompt(self) -> dict[str, str]:
        """Return the row of the plan on the first prompt of a member with other texts in it."""
        config = self.config
        if config.population.size == 1 and not config.strategy.mutates:
            return {}
        others: dict[str, Any] = {}
        for name, parameter in config.search_space.task_settings.items():
            if name not in self.env.policy_settings:
                continue
            configured = config.hyperparameters.task_settings[name]
            for value in parameter.choices or parameter.bounds:
                # A proposed text may have a single choice.
                if value != configured:
                    others[name] = value
                    break
        if not others:
            return {}
        settings = TaskSettings(others)
        batch = self.env.make_batch("train", [0], [settings])
        (tokens,) = batch.prompts
        decoded = str(self.outline.tokenizer.decode(tokens))
        text = shorten(decoded, 400)
        parts = [f"{name}={shorten(str(value), 40)!r}" for name, value in others.items()]
        length = pluralize(len(tokens), "token")
        described = f"{text!r}, {length}, of a member with {', '.join(parts)}"
        return {"other prompt": described}

    def _step_tokens(self, lengths: Sequence[int], turns: int) -> tuple[int, str]:
        """Return the tokens of a learning step, and the row of the plan on them.

        They are those of sampling, updates and the reference pass.

        Args:
            lengths: Tokens of each prompt.
            turns: Maximum number of completions of a conversation.
        """
        config = self.config
        schedule = config.schedule
        samples = schedule.samples_per_step
        longest = max(lengths)
        context = context_of(self.outline.model)
        row = max_row_tokens(config.agent, turns, min(lengths), context)
        # 1. One pass over the samples of a member; the completions of a group share their prompt.
        groups = samples // min(possible_values(config, "group_size"))
        one_pass = groups * longest + samples * row
        # 2. Sampling, where dynamic sampling may resample all groups.
        tokens = (1 + config.agent.objective.dynamic_sampling) * one_pass
        # 3. Updates. A group that is split between two optimizer steps runs its prompt twice.
        smallest_batch = min(possible_values(config, "batch_size"))
        splits = math.ceil(samples / smallest_batch) - 1
        epochs = max(possible_values(config, "update_epochs"))
        tokens += epochs * (one_pass + splits * longest)
        # 4. The pass of the reference policy, which KL needs.
        if config.hyperparameters.beta > 0 or "beta" in config.search_space:
            tokens += one_pass
        tokens *= config.population.size
        in_all = ""
        if schedule.generations is not None:
            steps = schedule.generations * schedule.steps_per_generation
            in_all = f", {count_text(steps * tokens)} in all"
        bound = "at most"
        limits = f"completions of at most {row}"
        if turns > 1:
            limits = f"conversations of at most {row} in up to {turns} turns"
            if config.agent.max_episode_tokens is None:
                # The length of replies is unknown.
                bound = "about"
                limits += ": replies as long as completions, without max_episode_tokens"
        text = (
            f"{bound} {count_text(tokens)} per learning step{in_all} (prompts of at most"
            f" {longest}, {limits}; updates included, evaluations left out)"
        )
        return tokens, text

    @property
    def longest_sample(self) -> int:
        """Maximum number of tokens of a completion or conversation, without its prompt."""
        turns = self.env.make_batch("train", range(1)).max_turns
        return max_row_tokens(self.config.agent, turns, 0, context_of(self.outline.model))

    def mean_length(self, sampled: RolloutBatch) -> float:
        """Return the mean number of tokens of the sampled completions or conversations."""
        rows = sampled.experience[DEFAULT_POLICY].present
        return float(rows.sum()) / len(rows)

    def population(self) -> Population:
        """Load the base model and make the founders."""
        config = self.config
        options = {**vars(config.agent), **config.founder_options()}
        # `self.lora` is the section `lora` as an object of peft. An adapter contains its settings.
        del options["lora"]
        if not options["adapter"]:
            options["lora_config"] = self.lora
        # Padding is masked, so any token can be used.
        padding = self.outline.tokenizer.pad_token_id
        if padding is None:
            padding = self.outline.tokenizer.eos_token_id
        return GRPO.population(
            config.population.size,
            self.env.observation_space,
            self.env.action_space,
            actor_network=self._base(),
            pad_token_id=int(padding or 0),
            source=self.model,
            **options,
        )

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Load the base model and the members of a stored run."""
        return saved.restore(self._base())

    def _base(self) -> "PreTrainedModel":
        """Load the base model in the chosen precision."""
        precision = self.config.precision
        dtype: Any = precision if precision in PACKAGES else getattr(torch, precision)
        parts = self.config.base_parts
        return load_base(self.model, dtype=dtype, device=self.device, parts=parts).model


def build(config: Config, env: PromptEnvironment | None = None) -> LanguageTask:
    """Check a configuration against device, architecture, tokenizer and task."""
    agent = config.agent
    assert config.model is not None  # it has a default
    # 1. Check the device, the initial adapter and the architecture of the base model.
    device = available_device(config.device)
    adapter = None if agent.adapter is None else read_adapter(agent.adapter)
    if adapter is not None:
        lora = adapter.lora_config
    elif agent.full_finetuning:
        lora = None
    else:
        lora = lora_from_json(plain(agent.lora))
    outline = load_outline(config.model)
    check_causal_class(outline.model)
    check_sharding(outline.model, config.base_parts, device)
    parts = shard_count(config.base_parts)
    if config.sampler is None and parts > 1:
        raise ValueError(NEEDS_SAMPLER)
    check_quantised(config.precision, device, parts)
    # 2. Choose what members train.
    trained = choose_trained(outline.model, lora, outline=True)
    if adapter is not None and isinstance(trained, LoraTargets):
        adapter.flat(trained.targets)  # raises ValueError if the adapter is of another base model
    # 3. Build the environment. By default, prompts leave room for a completion in the model's
    #    context.
    context = context_of(outline.model)
    if env is None:
        max_prompt_length = config.task.max_prompt_length
        if max_prompt_length is None and context is not None:
            max_prompt_length = context - agent.max_output_tokens
            if max_prompt_length < 1:
                raise ValueError(
                    f"agent.max_output_tokens must be below the model's context of {context}"
                    f" tokens, got {agent.max_output_tokens}."
                )
        config.task.set_templates(outline.tokenizer)
        env = config.task.environment(
            outline.tokenizer, seed=config.task_seed, max_prompt_length=max_prompt_length
        )
    assert env is not None
    # 4. Check the task settings, try the reward functions, and check all tokens against the model.
    check_task(config, env)
    try:
        trial = env.preflight(config.hyperparameters.task_settings)
    except RewardError as error:
        env.close()
        line = ""
        if error.__cause__ is not None:
            line = user_line(error.__cause__)
        raise ValueError(f"{error}{line}") from error
    check_token_ids(outline.model, [env.largest_token], "tokens of prompts")
    check_token_ids(outline.model, agent.eos_token_ids or (), "eos_token_ids")
    # Without an end token, every completion would be truncated.
    if not (agent.eos_token_ids or end_ids_of(outline.model) or env.action_space.end_ids):
        raise ValueError(
            "agent.eos_token_ids must be given: neither the model nor its tokenizer has an end"
            " token."
        )
    check_context(context, env.longest_prompt + agent.max_output_tokens)
    # 5. Choose the precision, the same on all ranks.
    precision = choose_precision(config.precision, outline.model, device, full=lora is None)
    return LanguageTask(
        trial=trial,
        config=replace(config, precision=processes().broadcast(precision)),
        model=config.model,
        outline=outline,
        env=env,
        device=device,
        lora=lora,
        trained=trained,
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
    # There is a reply between two completions.
    tokens = agent.max_episode_tokens or (2 * turns - 1) * agent.max_output_tokens
    if context is None:
        return tokens
    return max(agent.max_output_tokens, min(tokens, context - prompt))


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
    # 1. Members: weights, two moments and a reference if it is a snapshot. Beside them, a copy
    #    before a learning step or the vectors of an export, and `VECTORS_BESIDE_MEMBERS`.
    vectors_of_member = 3
    if agent.objective.reference == "snapshot":
        vectors_of_member += 1
    vectors = members * vectors_of_member
    vectors += VECTORS_BESIDE_MEMBERS + max(vectors, VECTORS_OF_EXPORT)
    state_bytes = vectors * weights * FLOAT
    # 2. Learning: activations and logits of a micro-batch or of the longest row, which is never
    #    split, and one gradient of each member.
    width = longest_prompt + max_row_tokens(agent, turns, longest_prompt, context_of(model))
    tokens = max(budget, width)
    logits_rows = REDUCED_LOGITS_ROWS if agent.reduce_memory_peak else tokens
    learning = learning_bytes(model, tokens, logits_rows, precision)
    recompute = agent.gradient_checkpointing
    if recompute == "auto":
        available, _ = device_memory(device)
        # Where the memory is unknown, activations are stored.
        left = (available or math.inf) - base - state_bytes
        recompute = learning > MEMORY_SHARE * left
    if recompute:
        learning = learning_bytes(model, tokens, logits_rows, precision, recompute=True)
    # 3. Sampling: KV caches of the rows of all members that are sampled at once.
    rows = members * max(samples, validation)
    device_type = device.partition(":")[0]
    cached = width * min(rows, rows_at_once(width, device_type))
    if turns > 1:  # the caches kept from the last turn, and those kept for the next one
        cached += 2 * min(width * rows, CACHED_TOKENS)
    return Memory(
        base=base,
        members=state_bytes,
        learning=learning + members * weights * FLOAT,
        sampling=sampling_bytes(model, cached, precision),
        recompute=recompute,
    )


def longest_prompt(env: Any, lengths: Sequence[int]) -> int:
    """Return the tokens of the longest training prompt, with the longest texts of members."""
    return max(*lengths, getattr(env, "longest_of_members", 0))


def _millions_text(count: int) -> str:
    """Return a number of parameters as text."""
    if count >= 1e5:
        return f"{count / 1e6:.1f} M"
    return count_text(count)


def memory_need(population: Population, env: Any, schedule: Schedule) -> MemoryNeed:
    """Estimate the memory from the base model, the members and the longest prompt."""
    members: Any = population.members
    model = members.bank.base.model
    device = str(members.device)
    prompts = env.make_batch("train", range(env.size("train")))
    memory = peak_memory(
        model,
        agent=members.settings,
        members=members.size,
        samples=schedule.samples_per_step,
        validation=schedule.questions("validation", env),
        weights=members.bank.trained.size,
        longest_prompt=longest_prompt(env, [len(prompt) for prompt in prompts.prompts]),
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
