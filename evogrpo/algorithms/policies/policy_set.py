"""PolicySet protocol: the policies of all members of a population."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.banks import Banks
from evogrpo.algorithms.rollout.requests import (
    EvaluationRequest,
    ObservedStatistics,
    RolloutBatch,
    SamplingRequest,
)
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Experience
from evogrpo.distributed import Processes
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.history import ArchitectureChange
from evogrpo.models.bank import PolicyBank, Sampler

CheckpointFiles = dict[str, bytes | Callable[[], bytes]]
"""Additional files of a checkpoint: bytes, or a function that is called when the file is written."""


class Settings(Protocol):
    """Settings that all members share, that do not evolve, and that checkpoints store."""

    @property
    def objective(self) -> Objective:
        """The objective; members may have loss and advantage types of their own."""
        ...

    @property
    def seed(self) -> int:
        """Root of every random stream."""
        ...

    @property
    def max_actions(self) -> int:
        """Maximum number of actions in a training row; some losses divide by it."""
        ...


class Policy(Protocol):
    """One policy of all members."""

    @property
    def bank(self) -> PolicyBank:
        """Weights and optimizers."""
        ...

    @property
    def settings(self) -> Settings:
        """Settings of the policy."""
        ...


class PolicySet(Protocol):
    """Policies of all members of a population: language models, small networks, or several networks per member.

    Attributes:
        kind: Name of the implementation in checkpoints.
        settings: Settings that do not evolve.
        hp_config: The search space; None = nothing evolves.
        policies: The policies by name; "default" if each member has a single policy.
        banks: Weights and optimizers of all policies.
        processes: Ranks that hold the same members and divide the work; this process alone at first.
    """

    kind: str
    hp_config: HyperparameterConfig | None
    banks: Banks
    processes: Processes

    @property
    def settings(self) -> Settings:
        """Settings that do not evolve."""
        ...

    @property
    def policies(self) -> Mapping[str, Policy]:
        """The policies by name."""
        ...

    @property
    def observation_space(self) -> spaces.Space[Any] | None:
        """Observation space; None for several agents, and for language models unless given."""
        ...

    @property
    def action_space(self) -> spaces.Space[Any] | None:
        """Action space; None for several agents, and for language models unless given."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the banks."""
        ...

    @property
    def weights(self) -> tuple[str, ...]:
        """Keys of a train state that hold the policy's weights."""
        ...

    def new_member(self, *, wrap: bool = True) -> Self:
        """Return a policy set of one fresh member; `wrap` keeps the accelerator's precision."""
        ...

    # ---- acting

    def sample_with(self, sampler: Sampler) -> None:
        """Generate completions with an external engine; ValueError for small networks."""
        ...

    def check(self, env: Any) -> None:
        """Raise ValueError if the members cannot act in the environment."""
        ...

    def sample(self, env: GroupEnvironment, starts: Sequence[int], request: SamplingRequest) -> RolloutBatch:
        """Sample and reward the requested rows, in whole groups.

        A row's result does not depend on the other rows that are sampled with it.
        """
        ...

    def evaluate(
        self, env: GroupEnvironment, request: EvaluationRequest
    ) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        """Evaluate members on held-out questions; training random streams are not touched.

        Returns:
            `[n]` raw task rewards in the order of `EvaluationRequest.start_ids`, float64; NaN = no reward. And the
            tokens (or environment steps) processed, for each slot of the request.
        """
        ...

    def update_statistics(self, observed: Sequence[ObservedStatistics]) -> None:
        """Add the observations of a learning step to the members' running statistics."""
        ...

    def act(self, learner: Learner, states: Any, *, training: bool, action_mask: Any = None) -> Any:
        """Choose actions; see `GRPO.get_action`."""
        ...

    def predict(self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any) -> Any:
        """Choose actions in the environment's format; see `GRPO.predict`."""
        ...

    def generate(self, learner: Learner, prompts: Sequence[Any], **options: Any) -> list[str]:
        """Complete texts; see `GRPO.generate`."""
        ...

    def experience(self, learner: Learner, experiences: Any) -> Experience:
        """Convert the experiences of a user's own loop to batches; see `GRPO.learn`."""
        ...

    # ---- the network

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a member's policy, or the untrained base, as a module."""
        ...

    def recompile(self) -> None:
        """Discard the compiled forms of the model."""
        ...

    def unwrap(self) -> None:
        """Stop using the accelerator's precision."""
        ...

    @property
    def evolves(self) -> bool:
        """True if mutation changes architectures."""
        ...

    def propose_architecture(self, slot: int, rng: np.random.Generator) -> ArchitectureChange | None:
        """Draw a change of a member's architecture; None = no change."""
        ...

    def change_architecture(self, slot: int, architecture: Mapping[str, Any], rng: np.random.Generator) -> None:
        """Apply a drawn architecture to a member and keep what it has learnt."""
        ...

    # ---- checkpoints

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not in the settings."""
        ...

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the policy set, as plain JSON values."""
        ...

    def check_record(self, record: Mapping[str, Any], where: object) -> None:
        """Raise CheckpointError if a checkpoint's record does not fit this policy set."""
        ...

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that all members share and that checkpoints store, by name."""
        ...

    def files(self, slot: int, *, include_base: bool) -> CheckpointFiles:
        """Return the additional files of one member's checkpoint."""
        ...
