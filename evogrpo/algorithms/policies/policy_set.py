"""Members: what the agents of one population are made of and how they act, whatever kind they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from evogrpo.algorithms.learning.learning_step import LearningSettings, Policy
from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.banks import Banks
from evogrpo.algorithms.rollout.requests import (
    EvaluationRequest,
    EvaluationResult,
    ObservedStatistics,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Experience
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.lineage import ArchitectureChange
from evogrpo.models.bank import Sampler

CheckpointFiles = dict[str, bytes | Callable[[], bytes]]
"""Files of a checkpoint beside tensors and record: bytes, or a function that is called when they are written."""


class Settings(LearningSettings, Protocol):
    """The settings that do not evolve and that a checkpoint stores, as far as everybody may read them."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """Texts that a member is to answer; see `GRPO.generate`.

    Attributes:
        prompts: Texts, or conversations as lists of messages.
        tokenizer: Writes and reads tokens; None = the base model's own.
        n: Answers to each prompt.
        temperature: Of the draws; 0 takes what is most likely.
        max_output_tokens: Most tokens of an answer; None = as in training.
        calls: How many such requests the agent has answered: names the random stream.
        base: Let the untrained base answer.
    """

    prompts: Sequence[Any]
    tokenizer: Any
    n: int
    temperature: float
    max_output_tokens: int | None
    calls: int
    base: bool


class PolicySet(Protocol):
    """All members of one population: chosen when it is made; nobody above asks of which kind they are.

    Attributes:
        kind: One word that says in checkpoints which kind this is.
        agent_class: The name of the class whose agents these are.
        settings: What does not evolve.
        hp_config: What evolves and between which values; None = nothing.
        policies: Their policies by name; "default" where a member has only one.
        banks: The weights and optimisers of all policies together.
    """

    kind: ClassVar[str]
    agent_class: ClassVar[str]
    hp_config: HyperparameterConfig | None
    banks: Banks

    @property
    def settings(self) -> Settings:
        """What does not evolve."""
        ...

    @property
    def policies(self) -> Mapping[str, Policy]:
        """What learns, by the policy's name."""
        ...

    @property
    def observation_space(self) -> spaces.Space[Any] | None:
        """What members read; None for language models unless given, and for several agents."""
        ...

    @property
    def action_space(self) -> spaces.Space[Any] | None:
        """What members do; likewise."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the banks compute."""
        ...

    @property
    def weights(self) -> tuple[str, ...]:
        """The parts of a learner state that make up the policy."""
        ...

    def alone(self, *, wrap: bool = True) -> Self:
        """Return one fresh member of the same kind; `wrap` keeps the accelerator's precision."""
        ...

    # ---- acting

    def sample_with(self, sampler: Sampler) -> None:
        """Let an outside engine sample; ValueError where members act as environments ask."""
        ...

    def check(self, env: Any) -> None:
        """Refuse with a ValueError an environment that these members cannot act in."""
        ...

    def sample(
        self, env: GroupEnvironment, starts: Sequence[int], wanted: SamplingRequest, part: Tensor | None = None
    ) -> RolloutBatch:
        """Act from training starts, sampling; only the rows `part` `[k]` of what is wanted, in whole groups, if given.

        What comes of a row does not depend on which others are sampled.
        """
        ...

    def evaluate(self, env: GroupEnvironment, asked: EvaluationRequest) -> EvaluationResult:
        """Answer held-out questions; training streams and cursors stay where they are."""
        ...

    def update_statistics(self, observed: Sequence[ObservedStatistics]) -> None:
        """Add to the members' running statistics what a learning step's samples observed."""
        ...

    def act(self, learner: Learner, seen: Any, *, training: bool, action_mask: Any = None) -> Any:
        """Choose actions for what a caller's own loop saw; see `GRPO.get_action`."""
        ...

    def predict(self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any) -> Any:
        """Choose actions as the environment takes them; see `GRPO.predict`."""
        ...

    def generate(self, learner: Learner, asked: TextRequest) -> list[str]:
        """Answer texts with texts; see `GRPO.generate`."""
        ...

    def experience(self, learner: Learner, experiences: Any) -> Experience:
        """Read what a caller's own loop collected; see `GRPO.learn`."""
        ...

    # ---- the network

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a member's policy as a module, or the untrained base."""
        ...

    def recompile(self) -> None:
        """Forget what torch.compile made of the model."""
        ...

    def unwrap(self) -> None:
        """Stop computing under an accelerator's precision."""
        ...

    @property
    def evolves(self) -> bool:
        """Whether architectures change when members are mutated."""
        ...

    def proposal(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of a member's architecture; None = no change."""
        ...

    def reshape(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Give a member the architecture that `proposal` drew, keeping what it has learnt."""
        ...

    # ---- checkpoints

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not among the settings."""
        ...

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint says of all this, as plain JSON values."""
        ...

    def check_record(self, record: Mapping[str, Any], where: object) -> None:
        """Refuse with a CheckpointError a record of members that mean nothing here."""
        ...

    def constants(self) -> Mapping[str, Tensor]:
        """Return tensors by name that members share and that a checkpoint holds beside them."""
        ...

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return further files of one member's checkpoint."""
        ...
