"""Members that are small networks: their settings and defaults, and a bank of networks stacked on a member axis."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from evogrpo.agents.checkpoints.stored_spaces import space_from_json, space_to_json
from evogrpo.agents.learning.shaping import refuse_whole_completions
from evogrpo.agents.members.shared import Files
from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves
from evogrpo.envs.control.trees import flatten, unflatten
from evogrpo.hyperparameters import refuse_unknown
from evogrpo.objective import Objective, Optimizer
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.policies.control.architecture import (
    ArchitectureLimits,
    NetworkConfig,
    NothingToChangeError,
    mutate_architecture,
)
from evogrpo.policies.control.stacked import StackedBank

STEPWISE = Objective(loss_type="dapo", advantage="return_to_go_timestep")
"""The objective by default: GRPO's clipped loss as a mean over actions, returns-to-go compared at the same step."""

NETWORK_DEFAULTS: Mapping[str, Any] = {
    "lr": 5e-3,
    "batch_size": 2048,
    "update_epochs": 4,
    "gamma": 0.99,
    "max_grad_norm": 0.5,
}
"""Hyperparameters of small networks where they are not those of a language model: a tiny network takes far larger
steps, on thousands of transitions each, and what an action earns fades with time."""


@dataclass(frozen=True, kw_only=True)
class NetworkSettings:
    """Settings of a population of small networks that do not evolve and that a checkpoint stores.

    Attributes:
        network: The architecture that members start with; without effect on a module of the caller's.
        evolve_network: What changes of architecture may lead to; None = architectures stay as they are.
        normalise_observations: Whether each member sees floating-point observations in deviations from the running
            mean of what it has seen; the statistics change between learning steps, never within one.
        objective: The loss.
        optimizer: AdamW settings.
        seed: Root of every random stream.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    evolve_network: ArchitectureLimits | None = None
    normalise_observations: bool = False
    objective: Objective = STEPWISE
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0

    max_output_tokens: ClassVar[int] = 1  # learning takes episodes apart into single actions

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if not isinstance(self.network, NetworkConfig):
            raise ValueError(
                f"network must be a NetworkConfig, such as NetworkConfig(hidden=(64, 64)), got {self.network!r}"
            )
        if self.objective.overlong_buffer is not None:
            raise ValueError("overlong_buffer is for completions of tokens: leave it out for small networks")
        refuse_whole_completions(self.objective)
        if self.evolve_network is not None:
            mutate_architecture(self.network, self.evolve_network, np.random.default_rng(0))  # refuses empty limits

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned; raises ValueError for an unknown name or a refused value."""
        refuse_unknown("setting", values, cls.__dataclass_fields__)
        plain = dict(values)
        limits = plain["evolve_network"]
        plain["network"] = NetworkConfig.from_json(plain["network"])
        plain["evolve_network"] = None if limits is None else ArchitectureLimits(**limits)
        plain["objective"] = Objective(**plain["objective"])
        plain["optimizer"] = Optimizer(**plain["optimizer"])
        return cls(**plain)


class NetworkBody:
    """Small networks of all members; see `evogrpo.agents.members.shared.Body`.

    Args:
        observation_space: What members observe.
        action_space: Where they act.
        size: Number of members.
        settings: What does not evolve.
        module: The caller's own network instead of the default one.
        device: Where the networks are.

    Attributes:
        observation_space: As given.
        action_space: As given.
        settings: As given.
        bank: The members.

    Raises:
        ValueError: If a space is not supported, or the module or the settings do not fit.
    """

    kind = "networks"
    weights = ("weights", "architecture")

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        size: int,
        settings: NetworkSettings,
        *,
        module: nn.Module | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if module is not None and settings.evolve_network is not None:
            raise ValueError("the architecture of a custom module cannot change: leave out evolve_network")
        self.observation_space, self.action_space, self.settings = observation_space, action_space, settings
        # A copy: what members are compared with must not change with the caller's own.
        self._module, self._width = deepcopy(module), 0
        if settings.normalise_observations:
            self._width = ObservationStatistics.empty(1, observation_space).mean.shape[1]
        self.bank = StackedBank(
            observation_space,
            action_space,
            size=size,
            network=settings.network if module is None else module,
            optimizer=settings.optimizer,
            seed=settings.seed,
            own_reference=settings.objective.reference == "snapshot",
            device=device,
            statistics=1 + 2 * self._width if self._width else 0,
        )

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return self.bank.device

    def alone(self, *, wrap: bool) -> "NetworkBody":
        """Return a bank of one fresh member; there is nothing to wrap."""
        spaces_ = self.observation_space, self.action_space
        return NetworkBody(*spaces_, 1, self.settings, module=self._module, device=self.device)

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not among the settings, or differ from them."""
        own = {"actor_network": self._module, "device": self.device}
        return own if self._module is None else {**own, "network": None}

    def policy(self, slot: int) -> nn.Module:
        """Return a module that gives, for raw observations `[m, ...]`, the numbers `[m, o]` that parametrise actions.

        For Discrete and MultiDiscrete they are logits, side by side; for MultiBinary the logits of ones; for Box the
        means, in units of half the range from its middle where that is bounded, then the logarithms of the standard
        deviations, likewise.
        """
        return NetworkPolicy(self, slot)

    def recompile(self) -> None:
        """Forget what torch.compile made of the caller's module."""
        torch.compiler.reset()

    def unwrap(self) -> None:
        """Do nothing: small networks compute in float32."""

    # ---- running statistics of observations

    @property
    def statistics(self) -> ObservationStatistics | None:
        """What members normalise their observations with; None where they do not."""
        if not self._width:
            return None
        count, mean, m2 = np.split(self.bank.statistics.numpy(), [1, 1 + self._width], axis=1)
        return ObservationStatistics(count=count[:, 0].copy(), mean=mean.copy(), m2=m2.copy())

    def absorb(self, observed: ObservationStatistics) -> None:
        """Add what members have observed to their statistics."""
        before = self.statistics
        if before is not None:
            later = before.merged(observed)
            values = np.concatenate([later.count[:, None], later.mean, later.m2], axis=1)
            self.bank.statistics.copy_(torch.from_numpy(values))

    def shown(self, observations: Any, member_ids: np.ndarray) -> Any:
        """Return raw observations `[m, ...]` as the members `[m]` see them."""
        statistics = self.statistics
        if statistics is None:
            return observations
        leaves = [np.asarray(leaf) for leaf in flatten(self.observation_space, observations)]
        numbers = normalised_leaves(self.observation_space)
        return unflatten(self.observation_space, statistics.normalise(leaves, numbers, member_ids))

    # ---- architecture

    @property
    def evolves(self) -> bool:
        """Whether architectures change when members are mutated."""
        return self.settings.evolve_network is not None

    def proposal(self, slot: int, rng: np.random.Generator) -> tuple[str, str] | None:
        """Draw whether and how a member's architecture changes, in words: (old, new); None = no change."""
        limits, config = self.settings.evolve_network, self.bank.architecture(slot)
        if limits is None or config is None or rng.random() >= limits.probability:
            return None
        try:
            return in_words(config), in_words(mutate_architecture(config, limits, rng)[0])
        except NothingToChangeError:  # changes until now have led here
            return None

    def reshape(self, slot: int, words: str, rng: np.random.Generator) -> None:
        """Give a member the architecture in words, keeping what it has learnt."""
        config = self.bank.architecture(slot)
        if config is None:
            raise ValueError(f"the architecture of a custom module cannot change, so it cannot become {words!r}")
        hidden, _, activation = words.rpartition(" ")
        units = tuple(int(each) for each in hidden.split("-"))
        self.bank.rebuild(slot, replace(config, hidden=units, activation=activation), rng)  # type: ignore[arg-type]

    # ---- checkpoints

    def record(self) -> dict[str, Any]:
        """Return the spaces and the name of the caller's module."""
        return {
            "observation_space": space_to_json(self.observation_space),
            "action_space": space_to_json(self.action_space),
            "module": None if self._module is None else type(self._module).__qualname__,
        }

    def check(self, record: Mapping[str, Any], where: object) -> None:
        """Refuse members of other spaces or of another module."""
        own = self.record()
        for name in ("observation_space", "action_space", "module"):
            if record[name] != own[name]:
                raise CheckpointError(
                    f"{where} holds an agent with {name} {record[name]}, but this one has {own[name]}"
                )
        name = "normalise_observations"
        if record["settings"][name] != getattr(self.settings, name):
            raise CheckpointError(
                f"{where} holds an agent with {name} {record['settings'][name]}, but this one has "
                f"{getattr(self.settings, name)}: bring the saved one back with GRPO.load"
            )

    def constants(self) -> dict[str, torch.Tensor]:
        """Return what the caller's module came with, by name: the reference of all members, and its buffers."""
        if self._module is None:
            return {}
        return {name: value.detach().cpu().clone() for name, value in self._module.state_dict().items()}

    def files(self, slot: int, *, include_base: bool) -> Files:
        """Return nothing: all of a small network is in its learner state."""
        if include_base and self._module is not None:
            raise ValueError("the code of a custom module cannot be saved: leave out include_base")
        return {}


class NetworkPolicy(nn.Module):
    """A member's network, with the normalisation of its observations."""

    def __init__(self, body: NetworkBody, slot: int) -> None:
        super().__init__()
        self._body, self.slot = body, slot
        self.network = body.bank.policy(slot)

    def forward(self, observations: Any) -> torch.Tensor:
        """Return what parametrises actions `[m, o]`, for raw observations `[m, ...]`; see `NetworkBody.policy`."""
        count = len(np.asarray(flatten(self._body.observation_space, observations)[0]))
        outputs: torch.Tensor = self.network(self._body.shown(observations, np.full(count, self.slot)))
        return outputs


def in_words(config: NetworkConfig) -> str:
    """Return what can change about an architecture, such as "64-64 tanh"."""
    return f"{'-'.join(map(str, config.hidden))} {config.activation}"


def stored_body(
    record: Mapping[str, Any],
    settings: NetworkSettings,
    size: int,
    *,
    module: nn.Module | None,
    device: torch.device | str | None,
) -> NetworkBody:
    """Build the body that a checkpoint's record describes.

    Raises:
        ValueError: If the caller's own module is needed and not given.
    """
    if record["module"] is not None and module is None:
        raise ValueError(
            f"the checkpoint's members are modules of your own class {record['module']}: give one as actor_network="
        )
    observation_space, action_space = (space_from_json(record[name]) for name in ("observation_space", "action_space"))
    return NetworkBody(observation_space, action_space, size, settings, module=module, device=device or "cpu")
