"""Settings of a population that do not evolve, for each kind of members."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, InstanceOf

from evogrpo.config.hyperparameters import Hyperparameters, Optimizer, check_calibration
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.envs.control.policy_mapping import Policies
from evogrpo.functional.loss_types import FULL_KLS, LOSS_TYPES
from evogrpo.members.networks.architecture import (
    ArchitectureLimits,
    NetworkConfig,
    mutate_architecture,
)
from evogrpo.records import UNTRUNCATED, SamplingOptions, changed_options
from evogrpo.validation import WHOLE, Flag, Float, Int, NonNegativeInt, PositiveInt, Seed, settings

STEPWISE = Objective(loss_type="dapo", advantage="return_to_go_timestep")
"""Default objective of small networks: clipped loss averaged over actions, returns-to-go compared
per time step.
"""

NETWORK_DEFAULTS: Mapping[str, Any] = {
    "lr": 5e-3,
    "batch_size": 2048,
    "update_epochs": 4,
    "gamma": 0.99,
    "max_grad_norm": 0.5,
}
"""Default hyperparameters of small networks that differ from those of language models."""


def check_action_objective(objective: Objective) -> None:
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
    aggregation = objective.aggregation or LOSS_TYPES[objective.loss_type].aggregation
    if not LOSS_TYPES[loss_type].per_action:
        raise ValueError(
            f"loss_type={loss_type!r} needs whole completions. Choose 'dapo', 'bnpo' or 'cispo'."
        )
    if aggregation != "token-mean":
        raise ValueError(
            f"loss_type={loss_type!r} with aggregation={aggregation!r} needs whole completions."
            " Choose 'dapo', 'bnpo' or 'cispo', or aggregation='token-mean'."
        )


def check_own_loop(objective: Objective, names: Iterable[str]) -> None:
    """Refuse settings that act while samples are collected: `learn` cannot apply them to samples of a user's own loop.

    Raises:
        ValueError: If one of the settings is on.
    """
    for name in names:
        if getattr(objective, name):
            raise ValueError(
                f"{name} has no effect in learn(), because it acts while samples are collected."
                " Leave it out and apply it in your loop, or train with evogrpo.evolve(...)."
            )


def check_hyperparameters(
    settings: "NetworkSettings | LanguageSettings",
    hyperparameters: Hyperparameters,
    space: HyperparameterConfig | None,
    *,
    per_action: bool,
) -> None:
    """Require hyperparameters that fit the objective and the optimizer, now and after any mutation.

    Args:
        settings: The population's settings.
        hyperparameters: The member's hyperparameters.
        space: The search space; None = nothing evolves.
        per_action: True if members learn from single actions, as small networks do.

    Raises:
        ValueError: See `Objective.check_member`, `check_calibration` and `check_action_objective`.
    """
    objective = settings.objective
    objective.check_member(hyperparameters, space)
    check_calibration(settings.optimizer, hyperparameters.target_kl, space or ())
    if per_action:
        for name in ("loss_type", "advantage"):
            for kind in (
                getattr(hyperparameters, name),
                *(space[name].names if space and name in space else ()),
            ):
                check_action_objective(objective.with_types(**{name: kind}))


@settings
class NetworkSettings:
    """Settings of a population of small networks that do not evolve; stored in checkpoints.

    Attributes:
        network: Initial architecture; ignored for a user's own module.
        evolve_network: Limits of architecture mutation; None = architectures are fixed.
        normalise_observations: Standardise floating-point observations by each member's running
            mean and variance; the statistics change between learning steps only.
        objective: The objective.
        optimizer: AdamW settings.
        seed: Root of every random stream.
    """

    network: InstanceOf[NetworkConfig] = field(default_factory=NetworkConfig)
    evolve_network: InstanceOf[ArchitectureLimits] | None = None
    normalise_observations: Flag = False
    objective: InstanceOf[Objective] = STEPWISE
    optimizer: InstanceOf[Optimizer] = field(default_factory=Optimizer)
    seed: Seed = 0

    max_actions: ClassVar[int] = 1  # episodes are split into single actions
    sampling_options: ClassVar[SamplingOptions] = UNTRUNCATED

    def __post_init__(self) -> None:
        if self.objective.overlong_buffer is not None:
            raise ValueError("overlong_buffer is for language models. Leave it out.")
        check_action_objective(self.objective)
        if self.evolve_network is not None:
            # raises for empty limits
            mutate_architecture(self.network, self.evolve_network, np.random.default_rng(0))


Credit = Literal["team", "agent"]


@settings
class JointSettings(NetworkSettings):
    """Settings of a multi-agent population that do not evolve; stored in checkpoints.

    Attributes:
        policies: Rule by which agents share a policy; see
            `evogrpo.envs.control.policy_mapping.PolicyMapping`.
        credit: Rewards of an agent's actions: "team" = rewards of all agents, "agent" = its own.
        agent_ids: Add the agent's identity to the observations of policies shared by several
            agents.
    """

    policies: Policies = "shared"
    credit: Credit = "team"
    agent_ids: Flag = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling is not available for several agents, because a joint episode"
                " belongs to one group per agent. Leave it out."
            )


MAX_OUTPUT_TOKENS = 10_000_000
"""Maximum of `max_output_tokens`; beyond any model's context."""


def _as_tuple(value: Any) -> Any:
    """Return one or several token ids as a tuple."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return tuple(value)
    return value


@settings
class LanguageSettings:
    """Settings of a population of language models that do not evolve; stored in checkpoints.

    Attributes:
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion; None = those that the model, the tokenizer or
            its chat template names.
        max_output_tokens: Maximum number of tokens of a completion, or of each turn of a
            conversation.
        min_output_tokens: Number of first tokens of a completion or turn at which an end of
            sequence has probability 0, in sampling and learning.
        max_episode_tokens: Maximum number of tokens of a conversation, sampled turns and replies
            together. A turn starts only if a turn of `max_output_tokens` fits. None = the model's
            context.
        top_k: Sample from this many of the most likely tokens; 0 = all. For this and the next
            three, see `SamplingOptions`.
        top_p: Sample from the most likely tokens that together have this probability; 1 = all.
        min_p: Sample from tokens at least this many times as likely as the most likely one; 0 =
            all.
        repetition_penalty: Factor that makes tokens less likely if the prompt or completion
            contains them already, also in greedy answers; 1 = none.
        objective: The loss.
        optimizer: AdamW settings.
        seed: Root of every random stream.
        calc_position_embeddings: Pass positions, counted without padding, to the model.
        reduce_memory_peak: Compute the logits of at most a few hundred tokens at a time.
        micro_batch_tokens: Maximum number of tokens in one forward pass with gradients; None = the
            device's default.
    """

    pad_token_id: NonNegativeInt
    eos_token_ids: Annotated[
        Annotated[tuple[Int, ...], Field(min_length=1)] | None, BeforeValidator(_as_tuple)
    ] = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS), WHOLE] = 128
    min_output_tokens: Int = 0
    max_episode_tokens: Int | None = None
    top_k: Int = 0
    top_p: Float = 1.0
    min_p: Float = 0.0
    repetition_penalty: Float = 1.0
    objective: InstanceOf[Objective] = field(default_factory=Objective)
    optimizer: InstanceOf[Optimizer] = field(default_factory=Optimizer)
    seed: Seed = 0
    calc_position_embeddings: Flag = True
    reduce_memory_peak: Flag = True
    micro_batch_tokens: PositiveInt | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_output_tokens <= self.max_output_tokens:
            raise ValueError(
                f"min_output_tokens must be in [0, max_output_tokens = {self.max_output_tokens}], "
                f"got {self.min_output_tokens}."
            )
        if self.max_episode_tokens is not None and self.max_episode_tokens < self.max_output_tokens:
            raise ValueError(
                f"max_episode_tokens must be at least max_output_tokens = {self.max_output_tokens},"
                f" got {self.max_episode_tokens}."
            )
        if self.objective.kl_estimator in FULL_KLS:
            raise ValueError(
                f"kl_estimator={self.objective.kl_estimator!r} is not available for language"
                " models. Choose 'k3' or 'k2'."
            )
        buffer = self.objective.overlong_buffer
        if buffer is not None and buffer > self.max_output_tokens:
            raise ValueError(
                f"overlong_buffer must be at most max_output_tokens = {self.max_output_tokens}, got"
                f" {buffer}."
            )
        narrowed = changed_options(self.sampling_options)  # raises for values out of range
        if self.objective.importance_correction is not None and narrowed:
            # The sampler's log-probabilities are then those of another distribution than the
            # trainer's.
            given = ", ".join(f"{name}={value}" for name, value in narrowed.items())
            raise ValueError(
                f"importance_correction needs samples from the whole distribution, got {given}."
                " Remove one of them."
            )

    @cached_property
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
