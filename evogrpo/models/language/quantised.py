"""Base models with linear layers in 8 or 4 bits, loaded by transformers with torchao or bitsandbytes.

Only weights are quantised, so a row's result does not depend on other rows. LLM.int8() would break this: it rounds
activations depending on the batch.
"""

import copy
import importlib.util
import warnings
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from evogrpo.text import extra_command

Quantisation = Literal["int8", "nf4"]
"""8 bits with a scale for each row of a weight (torchao); 4-bit normal floats in blocks, as in QLoRA (bitsandbytes)."""

PACKAGES: dict[str, str] = {"int8": "torchao", "nf4": "bitsandbytes"}
BITS: dict[str, float] = {"int8": 8.0, "nf4": 4.0 + 8 / 64 + 32 / (64 * 256)}
"""Bits per weight. nf4 includes its scales: 8 bits per 64 weights, and 32 bits per 256 of these scales."""
DEVICES: dict[str, tuple[str, ...]] = {"int8": ("cpu", "cuda"), "nf4": ("cuda",)}
"""On many CPUs, bitsandbytes repacks weights in passes without gradient, after which gradients no longer flow."""


def check_quantised(kind: str | None, device: str, parts: int = 1) -> None:
    """Check that a quantised base can be loaded.

    Args:
        kind: "int8", "nf4", or a precision without quantisation, which always passes.
        device: Device of the base.
        parts: Number of FSDP shards.

    Raises:
        ValueError: If the package is missing, or the device or `parts` is not supported.
    """
    if kind is None or kind not in PACKAGES:
        return
    if torch.device(device).type not in DEVICES[kind]:
        places = " or ".join(DEVICES[kind])
        raise ValueError(f"A base in {kind} requires the device {places}, got {device!r}. Use another precision.")
    if parts > 1:
        raise ValueError(f"A base in {kind} cannot be sharded, got base_parts={parts}. Use bfloat16 or base_parts=1.")
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        raise ValueError(
            f"A base in {kind} needs {PACKAGES[kind]}, which is not installed. Run: {extra_command('quantised')}"
        )


def quantised_options(kind: Quantisation, compute: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load a base in 8 or 4 bits with a compute dtype."""
    check_quantised(kind, device)
    device_map = {"": device}  # quantised modules cannot be moved later
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "device_map": device_map}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    return {"quantization_config": config, "device_map": device_map}


def is_quantised(model: PreTrainedModel) -> bool:
    """Return True if a model is quantised."""
    return getattr(model, "hf_quantizer", None) is not None


def check_gradients_pass(model: PreTrainedModel) -> None:
    """Raise a ValueError if gradients do not flow through a quantised layer after a pass without gradient."""
    if not is_quantised(model):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            x = torch.zeros((1, module.in_features), dtype=model.dtype, device=model.device)
            with torch.no_grad():
                module(x)
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own warning about the same fault
                (gradient,) = torch.autograd.grad(module(x.requires_grad_()).sum(), x, allow_unused=True)
            if gradient is None:
                raise ValueError(
                    f"No gradient flows through {name}, a {type(module).__name__} on {model.device.type}. Load the "
                    "base in int8 or bfloat16."
                )


def plain_outline(model: PreTrainedModel) -> PreTrainedModel:
    """Return the unquantised architecture of a model, on the meta device."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        outline: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return outline


def stored_bytes(values: torch.Tensor) -> int:
    """Return the bytes of a tensor; of a tensor subclass, those of its inner tensors."""
    if hasattr(values, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(values, name)) for name in values.__tensor_flatten__()[0])
    return values.numel() * values.element_size()


def bytes_of(outline: PreTrainedModel, kind: str, compute: int) -> int:
    """Return the bytes of a model's weights with quantised linear layers, the vocabulary head excepted.

    Args:
        outline: The model without weights.
        kind: "int8" or "nf4".
        compute: Bytes per number in the compute dtype.
    """
    head = outline.get_output_embeddings()
    narrow = sum(
        module.weight.numel() for module in outline.modules() if isinstance(module, nn.Linear) and module is not head
    )
    rest = sum(values.numel() for values in outline.parameters()) - narrow
    return round(narrow * BITS[kind] / 8) + rest * compute
