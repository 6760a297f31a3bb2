"""Architecture of small networks: its settings, and the limits within which it evolves."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from evogrpo.validation import REAL, WHOLE, PositiveShare, settings

Activation = Literal["tanh", "relu", "elu"]
# Larger values are typing errors that would exhaust memory.
MAX_LAYERS = 64
MAX_UNITS = 65_536
_Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS), WHOLE]
_Units = Annotated[int, Field(ge=1, le=MAX_UNITS), WHOLE]
Convolution = tuple[_Units, _Units, _Units]
"""(channels, kernel size, stride)."""


@settings
class NetworkConfig:
    """Architecture of one member's network.

    Attributes:
        hidden: Units of each hidden layer; () is a linear policy.
        activation: Activation after each hidden layer.
        convolutions: (channels, kernel size, stride) of the first layers on each image, each
            followed by a ReLU. None chooses them by the image's size. No effect on observations
            without images.
        log_std: Logarithm of a Gaussian policy's initial standard deviation, in units of half the
            action's range if that is bounded. No effect on discrete actions.

    Raises:
        ValueError: If a value is of the wrong type or out of range.
    """

    hidden: Annotated[tuple[_Units, ...], Field(max_length=MAX_LAYERS)] = (64, 64)
    activation: Activation = "tanh"
    convolutions: tuple[Convolution, ...] | None = None
    log_std: Annotated[float, Field(ge=-20, le=20), REAL] = 0.0

    @property
    def description(self) -> str:
        """Hidden layers and activation, such as "64-64 tanh"."""
        if self.hidden:
            return f"{'-'.join(map(str, self.hidden))} {self.activation}"
        return "linear"


@settings
class ArchitectureLimits:
    """Limits of architecture mutations.

    Attributes:
        min_layers: Minimum number of hidden layers, at least 1.
        max_layers: Maximum number of hidden layers.
        min_units: Minimum number of units of a layer, at least 1.
        max_units: Maximum number of units of a layer.
        unit_steps: Numbers of units that one mutation can add or remove.
        activations: Activations to choose from.
        probability: Probability, in (0, 1], that a mutated child also changes its architecture.

    Raises:
        ValueError: If a value is of the wrong type or out of range.
    """

    min_layers: _Layers = 1
    max_layers: _Layers = 3
    min_units: _Units = 16
    max_units: _Units = 256
    unit_steps: tuple[_Units, ...] = (16, 32, 64)
    activations: tuple[Activation, ...] = ("tanh", "relu", "elu")
    probability: PositiveShare = 0.25

    def __post_init__(self) -> None:
        if self.min_layers > self.max_layers:
            raise ValueError(
                f"min_layers must be at most max_layers, got {self.min_layers} and"
                f" {self.max_layers}."
            )
        if self.min_units > self.max_units:
            raise ValueError(
                f"min_units must be at most max_units, got {self.min_units} and {self.max_units}."
            )


class NothingToChangeError(ValueError):
    """The limits allow no change of an architecture."""


def mutate_architecture(
    config: NetworkConfig, limits: ArchitectureLimits, rng: np.random.Generator
) -> NetworkConfig:
    """Add or remove a layer, change the units of a layer, or change the activation.

    All possible kinds of change are equally likely, and so are all changes of the chosen kind.

    Args:
        config: The architecture; may be outside the limits.
        limits: Limits of what changes; other parts may lie outside.
        rng: Random generator.

    Returns:
        The new architecture.

    Raises:
        NothingToChangeError: If the limits allow no change.
    """
    # 1. Collect the possible changes by kind.
    hidden = config.hidden
    kinds = dict[str, list[NetworkConfig]]()

    def propose(kind: str, **fields: Any) -> None:
        kinds.setdefault(kind, []).append(replace(config, **fields))

    # A new layer has the units of the last one.
    if (
        hidden
        and len(hidden) < limits.max_layers
        and limits.min_units <= hidden[-1] <= limits.max_units
    ):
        propose("add layer", hidden=(*hidden, hidden[-1]))
    if len(hidden) > limits.min_layers:
        propose("remove layer", hidden=hidden[:-1])
    for layer, units in enumerate(hidden):
        before = hidden[:layer]
        after = hidden[layer + 1 :]
        for step in limits.unit_steps:
            if units + step <= limits.max_units:
                propose("add units", hidden=(*before, units + step, *after))
            if units - step >= limits.min_units:
                propose("remove units", hidden=(*before, units - step, *after))
    for activation in limits.activations:
        # A linear policy has no activation.
        if hidden and activation != config.activation:
            propose("activation", activation=activation)
    if not kinds:
        raise NothingToChangeError(f"The limits {limits} allow no change of {config}. Widen them.")
    # 2. Draw a kind, then a change of this kind. A kind with many changes is no more likely.
    names = list(kinds)
    kind = names[int(rng.integers(len(names)))]
    choices = kinds[kind]
    return choices[int(rng.integers(len(choices)))]
