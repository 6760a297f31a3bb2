"""What all members of one population share: what they are made of and how they act, both chosen once, and settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from evogrpo.hyperparameters import HyperparameterConfig
from evogrpo.objective import Objective
from evogrpo.policies.bank import PolicyBank

if TYPE_CHECKING:
    from evogrpo.agents.members.play import Play

Files = dict[str, bytes | Callable[[], bytes]]
"""Files of a checkpoint beside tensors and record: bytes, or a function that is called when they are written."""


class Settings(Protocol):
    """The settings that do not evolve and that a checkpoint stores, as far as everybody may read them."""

    @property
    def objective(self) -> Objective:
        """The loss."""
        ...

    @property
    def seed(self) -> int:
        """Root of every random stream."""
        ...

    @property
    def max_output_tokens(self) -> int:
        """Most actions of one row that is learnt from."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        ...


class Body(Protocol):
    """What members are made of: their bank, and what differs between banks of different kinds."""

    @property
    def kind(self) -> str:
        """One word that says in checkpoints which kind this is."""
        ...

    @property
    def bank(self) -> PolicyBank:
        """The weights and optimisers of all members."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the bank computes."""
        ...

    @property
    def weights(self) -> tuple[str, ...]:
        """The parts of a learner state that make up the policy."""
        ...

    def alone(self, *, wrap: bool) -> Self:
        """Return the same with a new bank of one member; `wrap` keeps the accelerator's precision."""
        ...

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not among the settings."""
        ...

    def policy(self, slot: int) -> nn.Module:
        """Return a member's policy as a module."""
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

    def proposal(self, slot: int, rng: np.random.Generator) -> tuple[str, str] | None:
        """Draw a change of a member's architecture, in words: (old, new); None = no change."""
        ...

    def reshape(self, slot: int, words: str, rng: np.random.Generator) -> None:
        """Give a member the architecture that `proposal` named."""
        ...

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint says of all this, as plain JSON values."""
        ...

    def check(self, record: Mapping[str, Any], where: object) -> None:
        """Refuse with a CheckpointError a record of members that mean nothing here."""
        ...

    def constants(self) -> Mapping[str, Tensor]:
        """Return tensors by name that members share and that a checkpoint holds beside them."""
        ...

    def files(self, slot: int, *, include_base: bool) -> Files:
        """Return further files of one member's checkpoint."""
        ...


@dataclass(kw_only=True)
class Shared:
    """What the members of one population share.

    Attributes:
        body: What they are made of.
        play: How they act in environments.
        settings: What does not evolve.
        hp_config: What evolves and between which values; None = nothing.
        observation_space: What members read; None for language models unless given.
        action_space: What members do; None for language models unless given.
    """

    body: Body
    play: "Play"
    settings: Settings
    hp_config: HyperparameterConfig | None
    observation_space: spaces.Space[Any] | None = None
    action_space: spaces.Space[Any] | None = None

    @property
    def bank(self) -> PolicyBank:
        """Their weights and optimisers."""
        return self.body.bank

    def alone(self, *, wrap: bool = True) -> "Shared":
        """Return the same with a new bank of one member.

        Args:
            wrap: Whether the new bank runs under the same accelerator's precision.
        """
        body = self.body.alone(wrap=wrap)
        return replace(self, body=body, play=self.play.over(body))
