"""What a run will do and cost, computed before it starts: the arithmetic of `--dry-run`."""

import math
from dataclasses import dataclass

from evogrpo.policies.tokens.sampling import CACHED_TOKENS
from evogrpo.training.configuration.record import Config
from evogrpo.training.prepared import Prepared, PreparedLanguage, PreparedNetworks

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
class Rounds:
    """How often what happens, whoever learns.

    Attributes:
        groups: Starts per learning step and member, by each group size that a member can come to have.
        learning_steps: In all; None when tokens or seconds end the run.
        evaluated: Completions, or episodes, from held-out starts in the run; None likewise.
    """

    groups: dict[int, int]
    learning_steps: int | None
    evaluated: int | None


@dataclass(frozen=True, kw_only=True)
class LanguageArithmetic:
    """The numbers of a run of language models; upper bounds where completions may end early or evolution may choose.

    Attributes:
        rounds: How often what happens.
        optimizer_steps: Fewest and most per learning step and member.
        longest_prompt: Of the training questions, in tokens.
        tokens_per_step: Most tokens of one learning step, all members, updates included.
        tokens: Most tokens of the run, evaluations left out; None when tokens or seconds end it.
        parameters: Of the base model.
        adapter_parameters: Of one member.
        memory: The estimate.
    """

    rounds: Rounds
    optimizer_steps: tuple[int, int]
    longest_prompt: int
    tokens_per_step: int
    tokens: int | None
    parameters: int
    adapter_parameters: int
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class NetworkArithmetic:
    """The numbers of a run of small networks; upper bounds where episodes may end early or evolution may choose.

    Attributes:
        rounds: How often what happens.
        episode_steps: Most steps of an episode; None if the environment has no limit, and what follows is not known.
        environment_steps: Most of one learning step, all members.
        optimizer_steps: Most per learning step and member.
        parameters: Of one member's network as it starts.
    """

    rounds: Rounds
    episode_steps: int | None
    environment_steps: int | None
    optimizer_steps: int | None
    parameters: int


Arithmetic = LanguageArithmetic | NetworkArithmetic


def compute(prepared: Prepared) -> Arithmetic:
    """Do the arithmetic of a run."""
    return _of_language(prepared) if isinstance(prepared, PreparedLanguage) else _of_networks(prepared)


def _rounds(prepared: Prepared) -> Rounds:
    config, env = prepared.config, prepared.env
    schedule, size = config.schedule, config.population.size
    validation = _limited(env.size("validation"), schedule.validation_questions)
    test = _limited(env.size("test"), schedule.test_questions)
    generations = schedule.generations
    return Rounds(
        groups={group: schedule.samples_per_step // group for group in _possible(config, "group_size")},
        learning_steps=None if generations is None else generations * schedule.steps_per_generation,
        evaluated=None if generations is None else validation * (1 + size * generations) + 2 * test,
    )


def _of_language(prepared: PreparedLanguage) -> LanguageArithmetic:
    config, env = prepared.config, prepared.env
    rounds, samples = _rounds(prepared), config.schedule.samples_per_step
    optimizer_steps = [
        epochs * math.ceil(samples / batch)
        for epochs in _possible(config, "update_epochs")
        for batch in _possible(config, "batch_size")
    ]
    longest = max(len(prompt) for prompt in env.open("train", range(env.size("train"))).prompts)
    per_step = config.population.size * _member_tokens(prepared, max(rounds.groups.values()), longest)
    adapter = sum(target.end - target.start for target in prepared.targets)
    return LanguageArithmetic(
        rounds=rounds,
        optimizer_steps=(min(optimizer_steps), max(optimizer_steps)),
        longest_prompt=longest,
        tokens_per_step=per_step,
        tokens=None if rounds.learning_steps is None else rounds.learning_steps * per_step,
        parameters=sum(parameter.numel() for parameter in prepared.outline.model.parameters()),
        adapter_parameters=adapter,
        memory=_memory(prepared, adapter, longest),
    )


def _of_networks(prepared: PreparedNetworks) -> NetworkArithmetic:
    config, longest = prepared.config, prepared.env.max_episode_steps
    steps = None if longest is None else longest * config.schedule.samples_per_step
    smallest, epochs = min(_possible(config, "batch_size")), max(_possible(config, "update_epochs"))
    return NetworkArithmetic(
        rounds=_rounds(prepared),
        episode_steps=longest,
        environment_steps=None if steps is None else steps * config.population.size,
        optimizer_steps=None if steps is None else epochs * math.ceil(steps / smallest),
        parameters=prepared.parameters,
    )


def _limited(available: int, limit: int | None) -> int:
    return available if limit is None else min(limit, available)


def _possible(config: Config, name: str) -> list[int]:
    """Return the values that an integer hyperparameter can come to have: its start, and its ladder or bounds."""
    space = config.evolve.for_samples_per_step(config.schedule.samples_per_step)
    values = {int(getattr(config.hyperparameters, name))}
    if name in space:
        values.update(int(value) for value in space[name].ladder or space[name].bounds)
    return sorted(values)


def _member_tokens(prepared: PreparedLanguage, groups: int, longest: int) -> int:
    """Return the most tokens of one member's learning step: sampling, updates, and the reference where beta is used."""
    config, agent = prepared.config, prepared.agent
    completions = config.schedule.samples_per_step * agent.max_output_tokens
    epochs = max(_possible(config, "update_epochs"))
    splits = math.ceil(config.schedule.samples_per_step / min(_possible(config, "batch_size"))) - 1
    # Groups that teach nothing may be sampled anew, all of them at worst.
    sampling = (1 + agent.objective.dynamic_sampling) * (groups * longest + completions)
    # A group cut in two by the end of an optimizer step runs its prompt twice.
    updates = epochs * ((groups + splits) * longest + completions)
    reference = groups * longest + completions if config.hyperparameters.beta > 0 or "beta" in config.evolve else 0
    return sampling + updates + reference


def _memory(prepared: PreparedLanguage, adapter: int, longest: int) -> Memory:
    """Estimate the peak memory.

    A layer keeps about 12 hidden vectors and 5 intermediate ones a token for the backward pass, adapters included;
    logits exist in float32 about three times over.
    """
    config, agent = prepared.config, prepared.agent
    text = prepared.outline.model.config.get_text_config()
    precision = FLOAT if prepared.device == "cpu" else 2
    parameters = sum(parameter.numel() for parameter in prepared.outline.model.parameters())
    hidden, layers = int(text.hidden_size), int(text.num_hidden_layers)
    intermediate = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    heads = int(text.num_attention_heads)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head = int(getattr(text, "head_dim", None) or hidden // heads)
    budget = agent.micro_batch_tokens
    logits = (256 if agent.reduce_memory_peak else budget) * int(text.vocab_size) * FLOAT * 3
    rows = max(
        config.population.size * config.schedule.samples_per_step,
        config.population.size * prepared.env.size("validation"),
    )
    cached = min(rows * (longest + agent.max_output_tokens), CACHED_TOKENS)
    return Memory(
        base=parameters * precision,
        members=(3 * config.population.size + 2) * adapter * FLOAT,
        learning=budget * layers * (12 * hidden + 5 * intermediate) * precision + logits,
        sampling=2 * cached * layers * 2 * key_heads * head * precision,
    )
