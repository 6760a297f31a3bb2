"""Conversion of a train state to another architecture, which keeps what a member has learned."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from evogrpo.config.network import Activation, NetworkConfig

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
