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

# Each moment of AdamW is an average of this power of the gradient.
MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}
# tanh(x / 4) * 4 is x to 2 % at |x| = 1.
TANH_SCALE = 0.25


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
    weight_name = f"{layer}.weight"
    bias_name = f"{layer}.bias"
    out_name = f"{after}.weight"
    fan_in = len(state["weights"][weight_name])
    # Divided by sqrt(fan_in), the values of new units have the scale of their inputs.
    normal = torch.from_numpy(rng.standard_normal((fan_in, count), dtype=np.float32))
    drawn = normal / fan_in**0.5
    changed = {}
    for name, parameters in state.items():
        weight = parameters[weight_name]  # [in, units]
        bias = parameters[bias_name]  # [units]
        out = parameters[out_name]  # [units, out]
        # All tensors of the train state change their shape; moments of new weights are 0.
        new = torch.zeros_like(drawn) if name in MOMENTS else drawn
        changed[name] = parameters | {
            weight_name: torch.cat([weight, new.to(weight)], 1),
            bias_name: torch.cat([bias, bias.new_zeros(count)]),
            out_name: torch.cat([out, out.new_zeros(count, out.shape[1])]),
        }
    return changed


def keep_units(state: StateParameters, layer: str, after: str, count: int) -> StateParameters:
    """Keep the units with the largest 2-norm of their outgoing weights, in their order."""
    weight_name = f"{layer}.weight"
    bias_name = f"{layer}.bias"
    out_name = f"{after}.weight"
    # Units with small outgoing weights change the outputs least.
    strength = torch.linalg.vector_norm(state["weights"][out_name], dim=1)
    strongest = torch.argsort(strength, descending=True, stable=True)[:count]
    kept = strongest.sort().values
    changed = {}
    for name, parameters in state.items():
        changed[name] = parameters | {
            weight_name: parameters[weight_name][:, kept],
            bias_name: parameters[bias_name][kept],
            out_name: parameters[out_name][kept],
        }
    return changed


def add_layer(state: StateParameters, depth: int, activation: Activation) -> StateParameters:
    """Add an identity layer after the last of `depth` hidden layers.

    Values h after a ReLU are at least 0, so relu(h) = h. After an ELU they are above -1, so elu(h +
    1) = h + 1; the output bias subtracts the sum of the weights, which cancels the 1. After tanh,
    tanh(h / 4) * 4 is approximately h.
    """
    scale = 1.0
    shift = 0.0
    if activation == "tanh":
        scale = TANH_SCALE
    elif activation == "elu":
        shift = 1.0
    changed = {}
    for name, parameters in state.items():
        out = parameters["output.weight"]  # [units, out]
        output_bias = parameters["output.bias"]
        weight = torch.zeros(len(out), len(out)).to(out)
        bias = torch.zeros_like(out[:, 0])
        if name in MOMENTS:
            # The output weights are divided by `scale`, so their gradient is multiplied by it.
            power = MOMENTS[name]
        else:
            # The new layer returns scale * h + shift, which the output layer undoes.
            power = -1
            weight.fill_diagonal_(scale)
            bias.fill_(shift)
            output_bias = output_bias - shift * out.sum(0)
        changed[name] = parameters | {
            f"hidden{depth}.weight": weight,
            f"hidden{depth}.bias": bias,
            "output.weight": out * scale**power,
            "output.bias": output_bias,
        }
    return changed


def remove_layer(state: StateParameters, depth: int) -> StateParameters:
    """Remove the last of `depth` hidden layers by multiplying its weights into the output layer.

    This is the inverse of `add_layer`. The activation is ignored, and moments of the product are 0.
    """
    changed = {}
    for name, parameters in state.items():
        kept = dict(parameters)
        weight = kept.pop(f"hidden{depth - 1}.weight")
        bias = kept.pop(f"hidden{depth - 1}.bias")
        out = kept["output.weight"]
        # (h W + b) U + c = h (W U) + (b U + c), without the activation.
        product = weight @ out  # [units of the layer before, out]
        if name in MOMENTS:
            kept["output.weight"] = torch.zeros_like(product)
        else:
            kept["output.weight"] = product
            kept["output.bias"] = bias @ out + kept["output.bias"]
        changed[name] = kept
    return changed
