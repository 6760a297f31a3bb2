"""What a run will do and cost, computed before it starts: the arithmetic of `--dry-run`."""

import math
from dataclasses import dataclass

from evogrpo.policies.adapters import CACHED_TOKENS
from evogrpo.training.launch import Prepared

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class Memory:
    """An estimate of the peak memory, in bytes, part by part.

    Attributes:
        base: The frozen base model's weights.
        members: Adapters and AdamW's two moments of all members, one gradient and the common first adapter.
        learning: Activations and logits of one micro-batch.
        sampling: Keys and values, held as they grow and copied as they are extended.
    """

    base: int
    members: int
    learning: int
    sampling: int

    @property
    def total(self) -> int:
        """Base and members stay; learning and sampling take turns."""
        return self.base + self.members + max(self.learning, self.sampling)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The numbers of a run; upper bounds where completions may end early or evolution may choose.

    Attributes:
        groups: Prompts per learning step and member, by each group size that a member can come to have.
        optimizer_steps: Fewest and most per learning step and member.
        learning_steps: In all; None when tokens or seconds end the run.
        longest_prompt: Of the training questions, in tokens.
        tokens_per_step: Most tokens of one learning step, all members, updates included.
        tokens: Most tokens of the run, evaluations left out; None when tokens or seconds end it.
        evaluated: Completions of held-out questions in the run; None likewise.
        parameters: Of the base model.
        adapter_parameters: Of one member.
        memory: The estimate.
    """

    groups: dict[int, int]
    optimizer_steps: tuple[int, int]
    learning_steps: int | None
    longest_prompt: int
    tokens_per_step: int
    tokens: int | None
    evaluated: int | None
    parameters: int
    adapter_parameters: int
    memory: Memory


def compute(prepared: Prepared) -> Arithmetic:
    """Do the arithmetic of a run."""
    config, env = prepared.config, prepared.env
    schedule, size = config.schedule, config.population.size
    samples = schedule.samples_per_step
    groups = {group: samples // group for group in _possible(prepared, "group_size")}
    optimizer_steps = [
        epochs * math.ceil(samples / batch)
        for epochs in _possible(prepared, "update_epochs")
        for batch in _possible(prepared, "batch_size")
    ]
    longest = max(len(prompt) for prompt in env.open("train", range(env.size("train"))).prompts)
    per_step = size * _member_tokens(prepared, max(groups.values()), longest)
    steps = None if schedule.generations is None else schedule.generations * schedule.steps_per_generation
    validation = _limited(env.size("validation"), schedule.validation_questions)
    test = _limited(env.size("test"), schedule.test_questions)
    evaluated = None if schedule.generations is None else validation * (1 + size * schedule.generations) + 2 * test
    adapter = sum(target.end - target.start for target in prepared.targets)
    return Arithmetic(
        groups=groups,
        optimizer_steps=(min(optimizer_steps), max(optimizer_steps)),
        learning_steps=steps,
        longest_prompt=longest,
        tokens_per_step=per_step,
        tokens=None if steps is None else steps * per_step,
        evaluated=evaluated,
        parameters=sum(parameter.numel() for parameter in prepared.outline.model.parameters()),
        adapter_parameters=adapter,
        memory=_memory(prepared, adapter, longest),
    )


def _limited(available: int, limit: int | None) -> int:
    return available if limit is None else min(limit, available)


def _possible(prepared: Prepared, name: str) -> list[int]:
    """Return the values that an integer hyperparameter can come to have: its start, and its ladder or bounds."""
    config = prepared.config
    space = config.evolve.for_samples_per_step(config.schedule.samples_per_step)
    values = {int(getattr(config.hyperparameters, name))}
    if name in space:
        values.update(int(value) for value in space[name].ladder or space[name].bounds)
    return sorted(values)


def _member_tokens(prepared: Prepared, groups: int, longest: int) -> int:
    """Return the most tokens of one member's learning step: sampling, updates, and the reference where beta is used."""
    config = prepared.config
    completions = config.schedule.samples_per_step * config.agent.max_output_tokens
    epochs = max(_possible(prepared, "update_epochs"))
    splits = math.ceil(config.schedule.samples_per_step / min(_possible(prepared, "batch_size"))) - 1
    # Groups that teach nothing may be sampled anew, all of them at worst.
    sampling = (1 + config.agent.objective.dynamic_sampling) * (groups * longest + completions)
    # A group cut in two by the end of an optimizer step runs its prompt twice.
    updates = epochs * ((groups + splits) * longest + completions)
    reference = groups * longest + completions if config.hyperparameters.beta > 0 or "beta" in config.evolve else 0
    return sampling + updates + reference


def _memory(prepared: Prepared, adapter: int, longest: int) -> Memory:
    """Estimate the peak memory.

    A layer keeps about 12 hidden vectors and 5 intermediate ones a token for the backward pass, adapters included;
    logits exist in float32 about three times over.
    """
    config = prepared.config
    text = prepared.outline.model.config.get_text_config()
    precision = FLOAT if prepared.device == "cpu" else 2
    parameters = sum(parameter.numel() for parameter in prepared.outline.model.parameters())
    hidden, layers = int(text.hidden_size), int(text.num_hidden_layers)
    intermediate = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head = int(getattr(text, "head_dim", None) or hidden // heads)
    budget = config.agent.micro_batch_tokens
    logits = (256 if config.agent.reduce_memory_peak else budget) * int(text.vocab_size) * FLOAT * 3
    rows = max(
        config.population.size * config.schedule.samples_per_step,
        config.population.size * prepared.env.size("validation"),
    )
    cached = min(rows * (longest + config.agent.max_output_tokens), CACHED_TOKENS)
    return Memory(
        base=parameters * precision,
        members=(3 * config.population.size + 2) * adapter * FLOAT,
        learning=budget * layers * (12 * hidden + 5 * intermediate) * precision + logits,
        sampling=2 * cached * layers * 2 * key_heads * head * precision,
    )
