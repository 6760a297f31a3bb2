"""Settings that all members of a population share.

Each kind of agent has a record of options. Its fields are keyword arguments of the agents and keys
of the section `agent` of a configuration. A subclass adds the keys that only a configuration has,
another one adds what is known when members are built, and is stored in checkpoints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import ArchitectureLimits, NetworkConfig, mutate_architecture
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer, check_calibration
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.functional.loss_types import FULL_KLS, LOSS_TYPES
from evogrpo.records import UNTRUNCATED, SamplingOptions, changed_options
from evogrpo.validation import (
    WHOLE,
    Flag,
    Int,
    NonNegativeInt,
    PositiveInt,
    Seed,
    Text,
    plain,
    settings,
)

Policies = Literal["shared", "prefix", "independent"]
Credit = Literal["team", "agent"]

MAX_OUTPUT_TOKENS = 10_000_000
"""Maximum of `max_output_tokens`; beyond any model's context."""

STEPWISE = Objective(loss_type="dapo", advantage="return_to_go_timestep")
"""Default objective of small networks: clipped loss averaged over actions, returns-to-go compared
per time step.
"""

NETWORK_DEFAULTS: Mapping[str, Any] = {
    "lr": 5e-3,
    "batch_size": 2048,
    "update_epochs": 4,
    "gamma": 0.99,
}
"""Default hyperparameters of small networks that differ from those of language models."""


@settings
class AgentOptions:
    """Options of all kinds of agents.

    Attributes:
        objective: Loss, advantages, KL, reference and reward switches.
        optimizer: AdamW settings: betas, eps, weight decay, warm-up and schedule.
    """

    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)

    def check(self, hyperparameters: Hyperparameters, space: HyperparameterConfig | None) -> None:
        """Require hyperparameters that fit the objective and the optimizer, now and after mutation.

        Args:
            hyperparameters: The member's hyperparameters.
            space: The search space; None = nothing evolves.

        Raises:
            ValueError: See `Objective.check_member` and `check_calibration`.
        """
        self.objective.check_member(hyperparameters, space)
        check_calibration(self.optimizer, hyperparameters.target_kl, space or ())


@settings
class Seeded:
    """Seed of a population.

    Attributes:
        seed: Root of every random stream.
    """

    seed: Seed = 0


# ---- language models


def _as_tuple(value: Any) -> Any:
    """Return one or several token ids or texts as a tuple."""
    if isinstance(value, Integral | str) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return tuple(value)
    return value


@settings
class LanguageOptions(SamplingOptions, AgentOptions):
    """Options of language models.

    Learning uses the whole distribution. If `top_k`, `top_p`, `min_p` or `repetition_penalty`
    changes it, old log-probabilities are computed by the trainer, and
    `Objective.importance_correction` can correct for the difference.

    Attributes:
        max_output_tokens: Maximum number of tokens of a completion, or of each turn of a
            conversation.
        min_output_tokens: Number of first tokens of a completion or turn at which an end of
            sequence has probability 0, in sampling and learning.
        max_episode_tokens: Maximum number of tokens of a conversation, sampled turns and replies
            together. A turn starts only if a turn of `max_output_tokens` fits. None = the model's
            context.
        eos_token_ids: Token or tokens that end a completion; None = those that the model, the
            tokenizer or its chat template names.
        stop_strings: Text or texts that end a completion or turn, which keeps them; a stop string
            may span several tokens. None = none.
        calc_position_embeddings: Pass positions, counted without padding, to the model. False is
            for models that take none.
        reduce_memory_peak: Compute the logits of at most a few hundred tokens at a time. False
            computes those of a whole micro-batch at once. Same results, up to rounding.
        micro_batch_tokens: Maximum number of tokens in one forward pass with gradients. None = 1024
            on CPUs; on CUDA the largest power of two estimated to fit into half of the memory left
            by the base and the members. Halved if memory runs out.
        gradient_checkpointing: Store only the input of each layer, and compute the rest again in
            the backward pass: about a tenth of the memory, and up to half more time. Same results.
            "auto" does so for passes whose activations do not fit into memory by estimate.
    """

    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS), WHOLE] = 128
    min_output_tokens: NonNegativeInt = 0
    max_episode_tokens: PositiveInt | None = None
    eos_token_ids: Annotated[
        Annotated[tuple[Int, ...], Field(min_length=1)] | None, BeforeValidator(_as_tuple)
    ] = None
    stop_strings: Annotated[
        Annotated[tuple[Annotated[Text, Field(min_length=1)], ...], Field(min_length=1)] | None,
        BeforeValidator(_as_tuple),
    ] = None
    calc_position_embeddings: Flag = True
    reduce_memory_peak: Flag = True
    micro_batch_tokens: PositiveInt | None = None
    gradient_checkpointing: Literal["auto"] | Flag = "auto"

    def __post_init__(self) -> None:
        # 1. Lengths: limits and penalties must fit the maximum of a completion.
        longest = self.max_output_tokens
        if self.min_output_tokens > longest:
            raise ValueError(
                f"min_output_tokens must be at most max_output_tokens = {longest}, got"
                f" {self.min_output_tokens}."
            )
        if self.max_episode_tokens is not None and self.max_episode_tokens < longest:
            raise ValueError(
                f"max_episode_tokens must be at least max_output_tokens = {longest}, got"
                f" {self.max_episode_tokens}."
            )
        if self.stop_strings is not None and self.min_output_tokens:
            raise ValueError(
                "stop_strings may end a completion at any token, got min_output_tokens ="
                f" {self.min_output_tokens}. Remove one of them."
            )
        buffer = self.objective.overlong_buffer
        if buffer is not None and buffer > longest:
            raise ValueError(
                f"overlong_buffer must be at most max_output_tokens = {longest}, got {buffer}."
            )
        # 2. The exact KL needs the whole distribution of every action, which is too large here.
        if self.objective.kl_estimator in FULL_KLS:
            raise ValueError(
                f"kl_estimator={self.objective.kl_estimator!r} is not available for language"
                " models. Choose 'k3' or 'k2'."
            )
        # 3. Importance weights divide probabilities of the trainer by those of the sampler, which
        #    must be of the same distribution.
        changed = changed_options(self.sampling_options)
        if self.objective.importance_correction is not None and changed:
            parts = [f"{name}={value}" for name, value in changed.items()]
            raise ValueError(
                "importance_correction needs samples from the whole distribution, got"
                f" {', '.join(parts)}. Remove importance_correction, or these options."
            )

    @property
    def sampling_options(self) -> SamplingOptions:
        """Truncation and rescaling of the sampling distribution."""
        return SamplingOptions(
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    @property
    def max_actions(self) -> int:
        """Maximum number of actions of a training row.

        Without `max_episode_tokens`, of a single turn.
        """
        return self.max_episode_tokens or self.max_output_tokens


@settings
class LanguageSettings(LanguageOptions, Seeded):
    """Settings of members that are language models; stored in checkpoints.

    Attributes:
        pad_token_id: Token used for padding.
    """

    pad_token_id: NonNegativeInt


@settings
class LoraSettings:
    """LoRA adapters, with the names and defaults of `peft.LoraConfig`.

    Attributes:
        r: Rank.
        lora_alpha: The update is scaled by lora_alpha / r.
        target_modules: Adapted modules: "all-linear", a regular expression, or module names.
        exclude_modules: Modules that are not adapted: a regular expression or module names.
        use_rslora: Scale by lora_alpha / sqrt(r) instead.
    """

    r: PositiveInt = 16
    lora_alpha: PositiveInt = 32
    target_modules: Text | tuple[Text, ...] = "all-linear"
    exclude_modules: Text | tuple[Text, ...] | None = None
    use_rslora: Flag = False


@settings
class LanguageAgent(LanguageOptions):
    """Section `agent` of language models.

    Attributes:
        lora: Shape of the adapters.
        full_finetuning: Train all weights of the model instead of adapters.
        adapter: Folder of a PEFT adapter that all members start from, instead of `lora`.
    """

    lora: LoraSettings = field(default_factory=LoraSettings)
    full_finetuning: Flag = False
    adapter: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Members train new adapters, stored ones, or all weights.
        has_lora = self.lora != LoraSettings()
        if self.adapter is not None and has_lora:
            raise ValueError(f"adapter {self.adapter!r} has its own LoRA settings. Remove lora.")
        if self.full_finetuning and (self.adapter is not None or has_lora):
            raise ValueError("full_finetuning trains all weights. Remove lora and adapter.")


# ---- small networks


def _with_stepwise(objective: Any) -> Any:
    """Add the settings of `STEPWISE` that a mapping leaves out; an `Objective` stays as it is."""
    if isinstance(objective, Mapping):
        return {**plain(STEPWISE), **objective}
    return objective


@settings
class NetworkOptions(AgentOptions):
    """Options of small networks; also the section `agent` of a configuration.

    The default objective is `STEPWISE`: loss type "dapo" with advantage "return_to_go_timestep". A
    mapping as `objective` takes the settings that it leaves out from there.

    Attributes:
        network: Initial architecture; ignored for a user's own module.
        evolve_network: Limits within which mutation changes architectures; None = architectures are
            fixed.
        normalise_observations: Standardise floating-point observations by each member's running
            mean and variance; the statistics change between learning steps only.
    """

    objective: Annotated[Objective, BeforeValidator(_with_stepwise)] = STEPWISE
    network: NetworkConfig = field(default_factory=NetworkConfig)
    evolve_network: ArchitectureLimits | None = None
    normalise_observations: Flag = False

    max_actions: ClassVar[int] = 1  # episodes are split into single actions
    sampling_options: ClassVar[SamplingOptions] = UNTRUNCATED

    def __post_init__(self) -> None:
        if self.objective.overlong_buffer is not None:
            raise ValueError("overlong_buffer is for language models. Leave it out.")
        _check_per_action(self.objective)
        if self.evolve_network is not None:
            # Raises an error if the limits allow no change.
            mutate_architecture(self.network, self.evolve_network, np.random.default_rng(0))

    def check(self, hyperparameters: Hyperparameters, space: HyperparameterConfig | None) -> None:
        """Require hyperparameters that fit, as for all agents, and losses of single actions."""
        super().check(hyperparameters, space)
        space = space or HyperparameterConfig()
        for loss_type in self.objective.possible("loss_type", hyperparameters, space):
            _check_per_action(self.objective.with_types(loss_type=loss_type))
        for advantage in self.objective.possible("advantage", hyperparameters, space):
            _check_per_action(self.objective.with_types(advantage=advantage))


def _check_per_action(objective: Objective) -> None:
    """Require an objective that works on single actions, as small networks learn them.

    Raises:
        ValueError: If the loss is not a plain mean over actions, or the advantage needs several
            reward functions.
    """
    if objective.advantage == "gdpo":
        raise ValueError(
            "advantage='gdpo' needs several reward functions, but an environment has one reward."
            " Choose 'return_to_go_timestep' or 'outcome'."
        )
    loss_type = objective.loss_type
    properties = LOSS_TYPES[loss_type]
    if not properties.per_action:
        raise ValueError(
            f"loss_type={loss_type!r} needs whole completions. Choose 'dapo', 'bnpo' or 'cispo'."
        )
    aggregation = objective.aggregation or properties.aggregation
    if aggregation != "token-mean":
        raise ValueError(
            f"loss_type={loss_type!r} with aggregation={aggregation!r} needs whole completions."
            " Choose 'dapo', 'bnpo' or 'cispo', or aggregation='token-mean'."
        )


@settings
class NetworkSettings(NetworkOptions, Seeded):
    """Settings of members that are small networks; stored in checkpoints."""


# ---- several agents


@settings
class TeamOptions:
    """Options of members that act for several agents.

    Attributes:
        policies: "shared": one policy for all agents; "prefix": one for each group of agents whose
            names agree before the last underscore; "independent": one for each agent.
        credit: Rewards that an agent's action is credited with: "team" = those of all agents,
            "agent" = its own, as in a competition.
        agent_ids: Add the agent's identity to the observations of a policy that several agents
            share.
    """

    policies: Policies = "shared"
    credit: Credit = "team"
    agent_ids: Flag = False


@settings
class JointSettings(NetworkSettings, TeamOptions):
    """Settings of members that act for several agents; stored in checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling is not available for several agents, because a joint episode"
                " belongs to one group per agent. Leave it out."
            )
