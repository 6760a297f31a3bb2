"""Architecture of small networks, and mutations of it that keep what a member has learned."""

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from evogrpo.validation import REAL, WHOLE, PositiveShare, settings

Activation = Literal["tanh", "relu", "elu"]
# larger values are typing errors that would exhaust memory
MAX_LAYERS = 64
MAX_UNITS = 65_536
_Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS), WHOLE]
_Units = Annotated[int, Field(ge=1, le=MAX_UNITS), WHOLE]
Convolution = tuple[_Units, _Units, _Units]
"""(channels, kernel size, stride)."""

Parameters = dict[str, Tensor]
"""One member's parameters by name: "hidden0.weight" `[in, out]`, "hidden0.bias" `[out]`, ...,
"output.weight", ...
"""

StateParameters = dict[str, Parameters]
"""Parameters by name of a train state's tensors: "weights", "exp_avg", "exp_avg_sq", perhaps
"reference".
"""

MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}  # each is an average of this power of the gradient
TANH_SCALE = 0.25  # tanh(x / 4) * 4 is x to 2 % at |x| = 1


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
        limits: Limits of the part that changes.
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

    if (
        hidden
        and len(hidden) < limits.max_layers
        and limits.min_units <= hidden[-1] <= limits.max_units
    ):
        propose("add layer", hidden=(*hidden, hidden[-1]))
    if len(hidden) > limits.min_layers:
        propose("remove layer", hidden=hidden[:-1])
    for layer, units in enumerate(hidden):
        for step in limits.unit_steps:
            if units + step <= limits.max_units:
                propose("add units", hidden=(*hidden[:layer], units + step, *hidden[layer + 1 :]))
            if units - step >= limits.min_units:
                propose(
                    "remove units", hidden=(*hidden[:layer], units - step, *hidden[layer + 1 :])
                )
    for activation in limits.activations if hidden else ():  # a linear policy has none
        if activation != config.activation:
            propose("activation", activation=activation)
    if not kinds:
        raise NothingToChangeError(f"The limits {limits} allow no change of {config}. Widen them.")
    # 2. Draw a kind, then a change of this kind. A kind with many changes is no more likely.
    names = list(kinds)
    choices = kinds[names[int(rng.integers(len(names)))]]
    return choices[int(rng.integers(len(choices)))]


def morph(
    state: StateParameters, old: NetworkConfig, new: NetworkConfig, rng: np.random.Generator
) -> StateParameters:
    """Convert the parameters of a train state to another architecture.

    Layers are added and removed after the last hidden layer, then each layer gets its new number of
    units. Adding preserves the network's function: exactly for units, and for layers with "relu"
    and "elu"; to about 2 % of the last hidden layer's values with "tanh". Removing units or layers
    and changing the activation do not preserve it. AdamW's moments are kept for weights that stay
    and are 0 for new ones.

    Args:
        state: Parameters of weights, moments and reference; not changed.
        old: Architecture of the train state.
        new: The new architecture; only hidden layers and activation may differ.
        rng: Random generator for the incoming weights of new units.

    Returns:
        The parameters for the new architecture.

    Raises:
        ValueError: If the architectures differ in more than hidden layers and activation, or
            exactly one of them is linear.

    Source: Net2Net (arXiv:1511.05641).
    """
    if replace(old, hidden=new.hidden, activation=new.activation) != new:
        raise ValueError(f"only hidden and activation can change, got {old} and {new}.")
    if bool(old.hidden) != bool(new.hidden):
        raise ValueError(
            f"hidden cannot change between a linear policy and layers, got {old.hidden} and"
            f" {new.hidden}."
        )
    # 1. Remove or add layers at the end; a new layer has as many units as the one before it.
    sizes = list(old.hidden)
    while len(sizes) > len(new.hidden):
        state = remove_layer(state, len(sizes))
        sizes.pop()
    while len(sizes) < len(new.hidden):
        state = add_layer(state, len(sizes), new.activation)
        sizes.append(sizes[-1])
    # 2. Remove or add units of each layer, and their weights in the layer after it.
    for layer, (now, wanted) in enumerate(zip(sizes, new.hidden, strict=True)):
        if layer + 1 < len(sizes):
            after = f"hidden{layer + 1}"
        else:
            after = "output"
        if wanted > now:
            state = add_units(state, f"hidden{layer}", after, wanted - now, rng)
        elif wanted < now:
            state = keep_units(state, f"hidden{layer}", after, wanted)
    return state


def add_units(
    state: StateParameters, layer: str, after: str, count: int, rng: np.random.Generator
) -> StateParameters:
    """Add units with random incoming and zero outgoing weights, which preserves the function."""
    fan_in = state["weights"][f"{layer}.weight"].shape[0]
    drawn = torch.from_numpy(rng.standard_normal((fan_in, count), dtype=np.float32)) / fan_in**0.5
    changed = {}
    for name, parameters in state.items():
        weight, bias, out = (
            parameters[key] for key in (f"{layer}.weight", f"{layer}.bias", f"{after}.weight")
        )
        new = torch.zeros_like(drawn) if name in MOMENTS else drawn
        changed[name] = parameters | {
            f"{layer}.weight": torch.cat([weight, new.to(weight)], 1),
            f"{layer}.bias": torch.cat([bias, bias.new_zeros(count)]),
            f"{after}.weight": torch.cat([out, out.new_zeros(count, out.shape[1])]),
        }
    return changed


def keep_units(state: StateParameters, layer: str, after: str, count: int) -> StateParameters:
    """Keep the units with the largest 2-norm of their outgoing weights, in their order."""
    strength = torch.linalg.vector_norm(state["weights"][f"{after}.weight"], dim=1)
    kept = torch.argsort(strength, descending=True, stable=True)[:count].sort().values
    return {
        name: (
            parameters
            | {
                f"{layer}.weight": parameters[f"{layer}.weight"][:, kept],
                f"{layer}.bias": parameters[f"{layer}.bias"][kept],
                f"{after}.weight": parameters[f"{after}.weight"][kept],
            }
        )
        for name, parameters in state.items()
    }


def add_layer(state: StateParameters, depth: int, activation: Activation) -> StateParameters:
    """Add an identity layer after the last of `depth` hidden layers.

    Values h after a ReLU are at least 0, so relu(h) = h. After an ELU they are above -1, so elu(h +
    1) = h + 1; the output bias subtracts the sum of the weights, which cancels the 1. After tanh,
    tanh(h / 4) * 4 is approximately h.
    """
    scale, shift = (TANH_SCALE, 0.0) if activation == "tanh" else (1.0, float(activation == "elu"))
    changed = {}
    for name, parameters in state.items():
        out = parameters["output.weight"]
        bias = parameters["output.bias"]
        new = torch.zeros(out.shape[0], out.shape[0]).to(out)
        power = MOMENTS.get(name, -1)  # a weight divided by s has a gradient multiplied by s
        if name not in MOMENTS:
            new.fill_diagonal_(scale)
            bias = bias - shift * out.sum(0)
        changed[name] = parameters | {
            f"hidden{depth}.weight": new,
            f"hidden{depth}.bias": torch.full_like(out[:, 0], 0.0 if name in MOMENTS else shift),
            "output.weight": out * scale**power,
            "output.bias": bias,
        }
    return changed


def remove_layer(state: StateParameters, depth: int) -> StateParameters:
    """Remove the last of `depth` hidden layers by multiplying its weights into the output layer.

    This is the inverse of `add_layer`. The activation is ignored, and moments of the product are 0.
    """
    last = f"hidden{depth - 1}"
    changed = {}
    for name, parameters in state.items():
        kept = {key: value for key, value in parameters.items() if not key.startswith(f"{last}.")}
        product = parameters[f"{last}.weight"] @ parameters["output.weight"]
        if name in MOMENTS:
            changed[name] = kept | {"output.weight": torch.zeros_like(product)}
        else:
            bias = (
                parameters[f"{last}.bias"] @ parameters["output.weight"] + parameters["output.bias"]
            )
            changed[name] = kept | {"output.weight": product, "output.bias": bias}
    return changed
