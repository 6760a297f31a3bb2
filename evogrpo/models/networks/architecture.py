"""The shape of a small network as a frozen record, and changes of it that keep what a member has learnt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from evogrpo.config.checks import finite_number, names_unknown, refuse_unknown, whole_between, whole_number

Activation = Literal["tanh", "relu", "elu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
Convolution = tuple[int, int, int]
"""(channels, kernel size, stride)."""

Parameters = dict[str, Tensor]
"""One member's parameters by name: "hidden0.weight" `[in, out]`, "hidden0.bias" `[out]`, ..., "output.weight", ..."""

Learnt = dict[str, Parameters]
"""What a member has learnt for each of its parameters: "weights", "exp_avg", "exp_avg_sq", perhaps "reference"."""

MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}  # the power of the gradient that each averages
MOST_LAYERS, MOST_UNITS = 64, 65_536  # more is a slip, and memory runs out
TANH_SCALE = 0.25  # tanh(x / 4) * 4 is x to 2 % at |x| = 1


@names_unknown
@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The architecture of one member's network.

    Attributes:
        hidden: Units of each hidden layer; () is a linear policy.
        activation: After each hidden layer.
        convolutions: (channels, kernel size, stride) of the layers through which every image goes first, each followed
            by a ReLU; None chooses by the image's size. Has no effect on observations without images.
        log_std: Logarithm of a fresh Gaussian policy's standard deviation, in units of half the action's range where
            that is bounded. Has no effect on discrete actions.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    convolutions: tuple[Convolution, ...] | None = None
    log_std: float = 0.0

    def __post_init__(self) -> None:
        # Lists when read from YAML or JSON.
        object.__setattr__(self, "hidden", _sizes("hidden", self.hidden))
        if self.convolutions is not None:
            if isinstance(self.convolutions, str) or not isinstance(self.convolutions, Sequence):
                raise ValueError(f"convolutions must be a sequence of triples, got {self.convolutions!r:.80}")
            layers = tuple(_sizes("each of convolutions", layer) for layer in self.convolutions)
            if any(len(layer) != 3 for layer in layers):
                raise ValueError(f"convolutions must be triples (channels, kernel size, stride), got {layers}")
            object.__setattr__(self, "convolutions", layers)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        object.__setattr__(self, "log_std", float(finite_number("log_std", self.log_std)))
        if abs(self.log_std) > 20:
            raise ValueError(f"log_std must lie in [-20, 20], got {self.log_std}: it is a logarithm")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned; raises ValueError for an unknown name or a refused value."""
        refuse_unknown("network setting", values, cls.__dataclass_fields__)
        return cls(**values)

    def to_tensor(self) -> Tensor:
        """Return the JSON text as bytes `[b]`, to be stored next to the weights it describes."""
        return bytes_tensor(self.to_json())

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        """Build from what `to_tensor` returned; raises ValueError if it is anything else."""
        values = _json_of(tensor)
        if not isinstance(values, dict):
            raise ValueError(f"an architecture must be a JSON object, got {values!r}")
        return cls.from_json(values)


@names_unknown
@dataclass(frozen=True, kw_only=True)
class ArchitectureLimits:
    """What changes of architecture may lead to.

    Attributes:
        min_layers: Fewest hidden layers, at least 1.
        max_layers: Most hidden layers.
        min_units: Fewest units of a layer, at least 1.
        max_units: Most units of a layer.
        unit_steps: How many units may be added or removed at once.
        activations: To choose from.
        probability: Chance, in (0, 1], that a child that is mutated changes its architecture as well.
    """

    min_layers: int = 1
    max_layers: int = 3
    min_units: int = 16
    max_units: int = 256
    unit_steps: tuple[int, ...] = (16, 32, 64)
    activations: tuple[Activation, ...] = ACTIVATIONS
    probability: float = 0.25

    def __post_init__(self) -> None:
        if isinstance(self.activations, str) or not isinstance(self.activations, Sequence):
            raise ValueError(f"activations must be a sequence of names, got {self.activations!r:.80}")
        object.__setattr__(self, "activations", tuple(self.activations))
        for name, most in (("layers", MOST_LAYERS), ("units", MOST_UNITS)):
            for edge in ("min", "max"):
                field = f"{edge}_{name}"
                object.__setattr__(self, field, whole_between(field, getattr(self, field), 1, most))
        object.__setattr__(self, "unit_steps", _sizes("unit_steps", self.unit_steps))
        if self.min_layers > self.max_layers:
            raise ValueError(f"need 1 <= min_layers <= max_layers, got {self.min_layers} and {self.max_layers}")
        if self.min_units > self.max_units:
            raise ValueError(f"need 1 <= min_units <= max_units, got {self.min_units} and {self.max_units}")
        refuse_unknown("name in activations:", self.activations, ACTIVATIONS)
        object.__setattr__(self, "probability", finite_number("probability", self.probability))
        if not 0 < self.probability <= 1:
            raise ValueError(f"probability must lie in (0, 1], got {self.probability}")


class NothingToChangeError(ValueError):
    """The limits leave nothing to change about an architecture."""


def mutate_architecture(
    config: NetworkConfig, limits: ArchitectureLimits, rng: np.random.Generator
) -> tuple[NetworkConfig, str]:
    """Change one thing about an architecture: a layer, the units of a layer, or the activation.

    The kind of change is drawn first, so that all kinds that are possible are equally likely.

    Args:
        config: What to change; may lie outside the limits.
        limits: What the result must lie in, as far as it was changed.
        rng: Draws the change.

    Returns:
        The new architecture and what was changed, in words.

    Raises:
        NothingToChangeError: If the limits leave nothing to change.
    """
    hidden, kinds = config.hidden, dict[str, list[tuple[NetworkConfig, str]]]()

    def propose(kind: str, words: str, **fields: Any) -> None:
        kinds.setdefault(kind, []).append((replace(config, **fields), words))

    if hidden and len(hidden) < limits.max_layers:
        propose("add layer", f"added a layer of {hidden[-1]} units", hidden=(*hidden, hidden[-1]))
    if len(hidden) > limits.min_layers:
        propose("remove layer", f"removed the last layer of {hidden[-1]} units", hidden=hidden[:-1])
    for layer, units in enumerate(hidden):
        for step in limits.unit_steps:
            if units + step <= limits.max_units:
                wider = (*hidden[:layer], units + step, *hidden[layer + 1 :])
                propose("add units", f"added {step} units to layer {layer}", hidden=wider)
            if units - step >= limits.min_units:
                narrower = (*hidden[:layer], units - step, *hidden[layer + 1 :])
                propose("remove units", f"removed {step} units from layer {layer}", hidden=narrower)
    for activation in limits.activations if hidden else ():  # a linear policy has none
        if activation != config.activation:
            propose("activation", f"activation {config.activation} became {activation}", activation=activation)
    if not kinds:
        raise NothingToChangeError(f"the limits {limits} leave nothing to change about {config}: widen them")
    names = list(kinds)
    choices = kinds[names[int(rng.integers(len(names)))]]
    return choices[int(rng.integers(len(choices)))]


def morph(learnt: Learnt, old: NetworkConfig, new: NetworkConfig, rng: np.random.Generator) -> Learnt:
    """Carry what a member has learnt over to another architecture.

    Layers are added and removed at the end of the hidden ones, then each layer gets its new number of units. Added
    units and layers leave the network's function as it is: exactly so for new units, and for new layers under "relu"
    and "elu"; to about 2 % of the last hidden layer's values under "tanh". Removing, and changing the activation, do
    change it. AdamW's moments stay with the weights that stay and are 0 for new ones.

    Args:
        learnt: Parameters and what goes with them; not changed.
        old: Their architecture.
        new: The architecture wanted; only hidden layers and activation may differ.
        rng: Draws the incoming weights of new units.

    Returns:
        The same for the new architecture.

    Raises:
        ValueError: If the architectures differ in more than hidden layers and activation, or exactly one of them is
            linear.

    Source: Net2Net (arXiv:1511.05641).
    """
    if replace(old, hidden=new.hidden, activation=new.activation) != new:
        raise ValueError(f"only hidden layers and activation can be changed, not {old} into {new}")
    if bool(old.hidden) != bool(new.hidden):
        raise ValueError(f"a linear policy has no hidden layer to build on: cannot change {old.hidden} to {new.hidden}")
    sizes = list(old.hidden)
    while len(sizes) > len(new.hidden):
        learnt = remove_layer(learnt, len(sizes))
        sizes.pop()
    while len(sizes) < len(new.hidden):
        learnt = add_layer(learnt, len(sizes), new.activation)
        sizes.append(sizes[-1])
    for layer, (now, wanted) in enumerate(zip(sizes, new.hidden, strict=True)):
        after = f"hidden{layer + 1}" if layer + 1 < len(sizes) else "output"
        if wanted > now:
            learnt = add_units(learnt, f"hidden{layer}", after, wanted - now, rng)
        elif wanted < now:
            learnt = keep_units(learnt, f"hidden{layer}", after, wanted)
    return learnt


def add_units(learnt: Learnt, layer: str, after: str, count: int, rng: np.random.Generator) -> Learnt:
    """Add units whose incoming weights are random and whose outgoing weights are 0: the function stays the same."""
    fan_in = learnt["weights"][f"{layer}.weight"].shape[0]
    drawn = torch.from_numpy(rng.standard_normal((fan_in, count), dtype=np.float32)) / fan_in**0.5
    changed = {}
    for name, parameters in learnt.items():
        weight, bias, out = (parameters[key] for key in (f"{layer}.weight", f"{layer}.bias", f"{after}.weight"))
        new = torch.zeros_like(drawn) if name in MOMENTS else drawn
        changed[name] = parameters | {
            f"{layer}.weight": torch.cat([weight, new.to(weight)], 1),
            f"{layer}.bias": torch.cat([bias, bias.new_zeros(count)]),
            f"{after}.weight": torch.cat([out, out.new_zeros(count, out.shape[1])]),
        }
    return changed


def keep_units(learnt: Learnt, layer: str, after: str, count: int) -> Learnt:
    """Keep the units on which the next layer leans most, by the 2-norm of their outgoing weights, in their order."""
    strength = torch.linalg.vector_norm(learnt["weights"][f"{after}.weight"], dim=1)
    kept = torch.argsort(strength, descending=True, stable=True)[:count].sort().values
    return {
        name: parameters
        | {
            f"{layer}.weight": parameters[f"{layer}.weight"][:, kept],
            f"{layer}.bias": parameters[f"{layer}.bias"][kept],
            f"{after}.weight": parameters[f"{after}.weight"][kept],
        }
        for name, parameters in learnt.items()
    }


def add_layer(learnt: Learnt, depth: int, activation: Activation) -> Learnt:
    """Add a hidden layer after the last of `depth`, that passes on what it gets.

    Values h after a ReLU are at least 0, so relu(h) = h. After an ELU they are above -1, so elu(h + 1) = h + 1, and the
    next bias takes the 1 off. No layer passes tanh values on exactly; tanh(h / 4) * 4 nearly does.
    """
    scale, shift = (TANH_SCALE, 0.0) if activation == "tanh" else (1.0, float(activation == "elu"))
    changed = {}
    for name, parameters in learnt.items():
        out, bias = parameters["output.weight"], parameters["output.bias"]
        new = torch.zeros(out.shape[0], out.shape[0]).to(out)
        power = MOMENTS.get(name, -1)  # a weight that is 1 / s as large has a gradient that is s times as large
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


def remove_layer(learnt: Learnt, depth: int) -> Learnt:
    """Remove the last of `depth` hidden layers by multiplying it into the output, as if it had no activation.

    This undoes `add_layer`. The product is a new weight, without moments.
    """
    last = f"hidden{depth - 1}"
    changed = {}
    for name, parameters in learnt.items():
        kept = {key: value for key, value in parameters.items() if not key.startswith(f"{last}.")}
        product = parameters[f"{last}.weight"] @ parameters["output.weight"]
        if name in MOMENTS:
            changed[name] = kept | {"output.weight": torch.zeros_like(product)}
        else:
            bias = parameters[f"{last}.bias"] @ parameters["output.weight"] + parameters["output.bias"]
            changed[name] = kept | {"output.weight": product, "output.bias": bias}
    return changed


def bytes_tensor(values: Any) -> Tensor:
    """Return plain JSON values as the bytes `[b]` (uint8) of their text, keys sorted."""
    return torch.tensor(list(json.dumps(values, sort_keys=True).encode()), dtype=torch.uint8)


def _json_of(tensor: Tensor) -> Any:
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise ValueError(f"an architecture must be a vector of bytes, got {tuple(tensor.shape)} of {tensor.dtype}")
    try:
        return json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"an architecture must be JSON text: {error}") from error


def _sizes(what: str, values: Sequence[Any]) -> tuple[int, ...]:
    """Return whole numbers of at least 1, or raise ValueError naming `what`."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{what} must be a sequence of whole numbers, got {values!r}")
    if len(values) > MOST_LAYERS:
        raise ValueError(f"{what} must hold at most {MOST_LAYERS} numbers, got {len(values)}")
    sizes = tuple(whole_number(what, value) for value in values)
    if any(not 1 <= size <= MOST_UNITS for size in sizes):
        raise ValueError(f"{what} must hold numbers from 1 to {MOST_UNITS:,}, got {sizes}")
    return sizes
