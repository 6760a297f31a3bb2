"""Keyword arguments and attributes of agents, for type checkers.

Generated from the records of settings by `python -m docs.generate.keywords`. Do not edit.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from evogrpo.config.agent import Credit, Policies
from evogrpo.config.network import ArchitectureLimits, NetworkConfig
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.task_settings import TaskSettings
from evogrpo.functional.loss_types import AdvantageType, LossType


class HyperparameterKeywords(TypedDict, total=False):
    """Keyword arguments that set hyperparameters."""

    lr: Literal["auto"] | float
    clip_coef: float | None
    group_size: int
    beta: float
    temperature: float
    update_epochs: int
    max_grad_norm: float
    batch_size: int
    clip_low: float | None
    clip_high: float | None
    entropy_coef: float
    advantage_clip: float | None
    gamma: float
    target_kl: float | None
    loss_type: LossType | None
    advantage: AdvantageType | None
    task_settings: Mapping[str, Any] | TaskSettings


class LanguageKeywords(TypedDict, total=False):
    """Keyword arguments of language models."""

    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_output_tokens: int
    min_output_tokens: int
    max_episode_tokens: int | None
    eos_token_ids: int | tuple[int, ...] | None
    stop_strings: str | tuple[str, ...] | None
    calc_position_embeddings: bool
    reduce_memory_peak: bool
    micro_batch_tokens: int | None
    gradient_checkpointing: Literal["auto"] | bool


class NetworkKeywords(TypedDict, total=False):
    """Keyword arguments of small networks."""

    network: NetworkConfig
    evolve_network: ArchitectureLimits | None
    normalise_observations: bool


class SharedKeywords(TypedDict, total=False):
    """Keyword arguments of all agents."""

    objective: Objective
    optimizer: Optimizer
    seed: int


class TeamKeywords(TypedDict, total=False):
    """Keyword arguments of members that act for several agents."""

    policies: Policies
    credit: Credit
    agent_ids: bool


class HyperparameterAttributes:
    """Hyperparameters as attributes of an agent."""

    __slots__ = ()

    lr: float
    clip_coef: float | None
    group_size: int
    beta: float
    temperature: float
    update_epochs: int
    max_grad_norm: float
    batch_size: int
    clip_low: float | None
    clip_high: float | None
    entropy_coef: float
    advantage_clip: float | None
    gamma: float
    target_kl: float | None
    loss_type: LossType | None
    advantage: AdvantageType | None
    task_settings: TaskSettings
