"""Settings of a population that do not evolve, for each kind of policy set."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np

from evogrpo.algorithms.learning.advantages import check_action_objective
from evogrpo.config.checks import MAX_COUNT, MAX_SEED, finite_number, flag, instance, refuse_unknown, whole_between
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.data import SamplingOptions
from evogrpo.envs.control.policy_mapping import Policies
from evogrpo.functional.loss_types import FULL_KLS
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig, mutate_architecture

STEPWISE = Objective(loss_type="dapo", advantage="return_to_go_timestep")
"""Default objective of small networks: clipped loss averaged over actions, returns-to-go compared per time step."""

NETWORK_DEFAULTS: Mapping[str, Any] = {
    "lr": 5e-3,
    "batch_size": 2048,
    "update_epochs": 4,
    "gamma": 0.99,
    "max_grad_norm": 0.5,
}
"""Default hyperparameters of small networks that differ from those of language models."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Settings of a population of small networks that do not evolve; stored in checkpoints.

    Attributes:
        network: Initial architecture; ignored for a user's own module.
        evolve_network: Limits of architecture mutation; None = architectures are fixed.
        normalise_observations: Standardise floating-point observations by each member's running mean and variance;
            the statistics change between learning steps only.
        objective: The objective.
        optimizer: AdamW settings.
        seed: Root of every random stream.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    evolve_network: ArchitectureLimits | None = None
    normalise_observations: bool = False
    objective: Objective = STEPWISE
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0

    max_actions: ClassVar[int] = 1  # episodes are split into single actions

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole_between("seed", self.seed, 0, MAX_SEED))
        flag("normalise_observations", self.normalise_observations)
        instance("network", self.network, NetworkConfig, "NetworkConfig(hidden=(64, 64))")
        instance("objective", self.objective, Objective, "Objective(loss_type='dapo')")
        instance("optimizer", self.optimizer, Optimizer, "Optimizer(weight_decay=0.1)")
        if self.objective.overlong_buffer is not None:
            raise ValueError("overlong_buffer is for language models. Leave it out.")
        check_action_objective(self.objective)
        if self.evolve_network is not None:
            instance("evolve_network", self.evolve_network, ArchitectureLimits, "ArchitectureLimits(max_layers=2)")
            mutate_architecture(self.network, self.evolve_network, np.random.default_rng(0))  # raises for empty limits

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from the result of `to_json`; ValueError for unknown names or invalid values."""
        refuse_unknown("setting", values, cls.__dataclass_fields__)
        plain = dict(values)
        limits = plain["evolve_network"]
        plain["network"] = NetworkConfig.from_json(plain["network"])
        plain["evolve_network"] = None if limits is None else ArchitectureLimits(**limits)
        plain["objective"] = Objective(**plain["objective"])
        plain["optimizer"] = Optimizer(**plain["optimizer"])
        return cls(**plain)


Credit = Literal["team", "agent"]


@dataclass(frozen=True, kw_only=True)
class JointSettings(NetworkSettings):
    """Settings of a multi-agent population that do not evolve; stored in checkpoints.

    Attributes:
        policies: Which agents share a policy; see `evogrpo.envs.control.policy_mapping.PolicyMapping`.
        credit: Rewards of an agent's actions: "team" = rewards of all agents, "agent" = its own.
        agent_ids: Add the agent's identity to the observations of policies shared by several agents.
    """

    policies: Policies = "shared"
    credit: Credit = "team"
    agent_ids: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, legal in (("policies", get_args(Policies)), ("credit", get_args(Credit))):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} must be one of {list(legal)}, got {getattr(self, name)!r}")
        flag("agent_ids", self.agent_ids)
        if self.objective.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling is not available for several agents, because a joint episode belongs to one group "
                "per agent. Leave it out."
            )


MOST_TOKENS = 10_000_000
"""Maximum of `max_output_tokens`; beyond any model's context."""
_WHOLE = (
    ("max_output_tokens", 1, MOST_TOKENS),
    ("min_output_tokens", -MAX_COUNT, MAX_COUNT),
    ("max_episode_tokens", -MAX_COUNT, MAX_COUNT),
    ("top_k", -MAX_COUNT, MAX_COUNT),
    ("seed", 0, MAX_SEED),
)
"""Integer settings with their minimum and maximum; some have additional rules."""


def token_ids(what: str, given: object) -> tuple[int, ...]:
    """Return one or several token ids as a tuple; ValueError if there are none.

    The vocabulary is checked later.
    """
    if isinstance(given, Integral) and not isinstance(given, bool):
        given = (given,)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ValueError(f"{what} must be a list of token ids, such as [tokenizer.eos_token_id], got {given!r:.80}")
    found = tuple(int(token) if isinstance(token, Integral) else token for token in given)
    if not found:
        raise ValueError(f"{what} must have at least one token, got none.")
    return found


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """Settings of a population of language models that do not evolve; stored in checkpoints.

    Attributes:
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion.
        max_output_tokens: Most tokens of a completion; of a conversation, of each of its turns.
        min_output_tokens: Ends of sequence are ruled out for that many first tokens of a completion or turn, while
            sampling and learning.
        max_episode_tokens: Most tokens of a conversation, said and heard together: it goes on while a whole further
            turn fits. None = as many as the model's context takes.
        top_k: Completions are drawn from so many of the most likely tokens; 0 = all. See `SamplingOptions`, like the
            next three.
        top_p: From the most likely tokens that together have this probability; 1 = all.
        min_p: From tokens at least this many times as likely as the most likely one; 0 = all.
        repetition_penalty: Makes tokens that are there already less likely, in greedy answers too; 1 = none.
        objective: The loss.
        optimizer: AdamW settings.
        seed: Root of every random stream.
        calc_position_embeddings: Whether positions, counted without padding, are passed to the model.
        reduce_memory_peak: Compute log-probabilities over a few hundred tokens' logits at a time.
        micro_batch_tokens: Most tokens in one forward pass with gradients; None = the default of the device.
    """

    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    max_output_tokens: int = 128
    min_output_tokens: int = 0
    max_episode_tokens: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0
    calc_position_embeddings: bool = True
    reduce_memory_peak: bool = True
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos_token_ids", token_ids("eos_token_ids", self.eos_token_ids))
        object.__setattr__(self, "pad_token_id", whole_between("pad_token_id", self.pad_token_id, 0))
        for name, least, most in _WHOLE:
            if name != "max_episode_tokens" or self.max_episode_tokens is not None:
                object.__setattr__(self, name, whole_between(name, getattr(self, name), least, most))
        if self.micro_batch_tokens is not None:
            object.__setattr__(
                self, "micro_batch_tokens", whole_between("micro_batch_tokens", self.micro_batch_tokens, 1)
            )
        for name in ("top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, float(finite_number(name, getattr(self, name))))
        for name in ("calc_position_embeddings", "reduce_memory_peak"):
            flag(name, getattr(self, name))
        instance("objective", self.objective, Objective, "Objective(loss_type='dapo')")
        instance("optimizer", self.optimizer, Optimizer, "Optimizer(weight_decay=0.1)")
        self._check_ranges()

    def _check_ranges(self) -> None:
        """Check settings against each other."""
        if not 0 <= self.min_output_tokens <= self.max_output_tokens:
            raise ValueError(
                f"min_output_tokens must lie in [0, max_output_tokens = {self.max_output_tokens}], "
                f"got {self.min_output_tokens}"
            )
        if self.max_episode_tokens is not None and self.max_episode_tokens < self.max_output_tokens:
            raise ValueError(
                f"max_episode_tokens must be at least max_output_tokens = {self.max_output_tokens}, "
                f"got {self.max_episode_tokens}."
            )
        if self.objective.kl_estimator in FULL_KLS:
            raise ValueError(
                f"kl_estimator={self.objective.kl_estimator!r} is not available for language models. Choose 'k3' or "
                "'k2'."
            )
        buffer = self.objective.overlong_buffer
        if buffer is not None and buffer > self.max_output_tokens:
            raise ValueError(
                f"overlong_buffer must be at most max_output_tokens = {self.max_output_tokens}, got {buffer}"
            )
        _ = self.sampling_options  # refuses what is out of range

    @property
    def sampling_options(self) -> SamplingOptions:
        """Truncation and rescaling of the sampling distribution."""
        return SamplingOptions(
            top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, repetition_penalty=self.repetition_penalty
        )

    @property
    def max_actions(self) -> int:
        """Maximum number of actions of a training row; without `max_episode_tokens`, of a single turn."""
        return self.max_episode_tokens or self.max_output_tokens

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from the result of `to_json`; ValueError for unknown names or invalid values."""
        refuse_unknown("setting", values, cls.__dataclass_fields__)
        plain = dict(values)
        plain["eos_token_ids"] = tuple(plain["eos_token_ids"])
        plain["objective"] = Objective(**plain["objective"])
        plain["optimizer"] = Optimizer(**plain["optimizer"])
        return cls(**plain)
