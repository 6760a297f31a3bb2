"""Bases whose linear layers are held in 8 or 4 bits, as transformers loads them with torchao and bitsandbytes.

Layers compute in the precision of everything else: weights are widened where they are used, row by row alike. So a
neighbour never changes a member, as it would with LLM.int8(), which rounds activations by what else is in the batch.
"""

import copy
import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from evogrpo.installing import extra_command

Quantisation = Literal["int8", "nf4"]
"""8 bits with a scale for each row of a weight (torchao); 4-bit normal floats in blocks, as in QLoRA (bitsandbytes)."""

PACKAGES: dict[str, str] = {"int8": "torchao", "nf4": "bitsandbytes"}
BITS: dict[str, float] = {"int8": 8.0, "nf4": 4.0 + 8 / 64 + 32 / (64 * 256)}
"""Of a weight, scales included but those of rows: nf4 has one in 8 bits for 64 weights, and one in 32 for 256 such."""
DEVICES: dict[str, tuple[str, ...]] = {"int8": ("cpu", "cuda"), "nf4": ("cuda",)}
"""On many CPUs bitsandbytes packs weights anew where no gradient is asked for, and then lets none through any more."""


@dataclass(frozen=True)
class LoadedQuantised:
    """How `from_pretrained` is told.

    Attributes:
        quantization_config: transformers' own.
        device_map: Where everything goes, as what is quantised cannot be moved afterwards.
    """

    quantization_config: Any
    device_map: dict[str, str]


def check_quantised(kind: str | None, device: str, parts: int = 1) -> None:
    """Refuse a quantised base where it cannot be loaded.

    Args:
        kind: "int8", "nf4", or a precision that is no quantisation, which is never refused.
        device: Where it will be.
        parts: How many processes would hold it together.

    Raises:
        ValueError: If the package is missing, or nothing computes with it there.
    """
    if kind is None or kind not in PACKAGES:
        return
    if torch.device(device).type not in DEVICES[kind]:
        places = " and ".join(DEVICES[kind])
        raise ValueError(
            f"a base in {kind} is trained on {places} only, got the device {device!r}: choose another precision there"
        )
    if parts > 1:
        raise ValueError(
            f"a base in {kind} cannot be held in parts, got base_parts {parts}: take bfloat16 in parts, or leave "
            "base_parts at 1"
        )
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        raise ValueError(
            f"a base in {kind} needs {PACKAGES[kind]}, which is not installed; run: {extra_command('quantised')}"
        )


def quantising(kind: Quantisation, compute: torch.dtype, device: str) -> LoadedQuantised:
    """Return how to load a base in 8 or 4 bits that computes in a precision."""
    check_quantised(kind, device)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return LoadedQuantised(TorchAoConfig(Int8WeightOnlyConfig()), {"": device})
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    return LoadedQuantised(config, {"": device})


def is_quantised(model: PreTrainedModel) -> bool:
    """Whether a model's weights are held in fewer bits than it computes in, whoever has loaded it."""
    return getattr(model, "hf_quantizer", None) is not None


def check_gradients_pass(model: PreTrainedModel) -> None:
    """Refuse a model with quantised layers through which no gradient passes once it has been run without any.

    Raises:
        ValueError: If there is one.
    """
    if not is_quantised(model):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter:
            x = torch.zeros((1, module.in_features), dtype=model.dtype, device=model.device)
            with torch.no_grad():
                module(x)
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of what is refused here
                (gradient,) = torch.autograd.grad(module(x.requires_grad_()).sum(), x, allow_unused=True)
            if gradient is None:
                raise ValueError(
                    f"no gradient passes through {name}, a {type(module).__name__} on {model.device.type}: load the "
                    "base in int8, or in bfloat16"
                )


def plain_outline(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model's outline on the meta device, with plain layers in the place of quantised ones."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        outline: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return outline


def stored_bytes(values: torch.Tensor) -> int:
    """Return the bytes of what weights are held in, which may be other tensors than they look like."""
    if hasattr(values, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(values, name)) for name in values.__tensor_flatten__()[0])
    return values.numel() * values.element_size()


def bytes_of(outline: PreTrainedModel, kind: str, compute: int) -> int:
    """Return the bytes of a model's weights once its linear layers, the vocabulary head apart, are quantised.

    Args:
        outline: The model without its weights.
        kind: "int8" or "nf4".
        compute: Bytes of a number in the precision that it computes in.
    """
    head = outline.get_output_embeddings()
    narrow = sum(
        module.weight.numel() for module in outline.modules() if isinstance(module, nn.Linear) and module is not head
    )
    rest = sum(values.numel() for values in outline.parameters()) - narrow
    return round(narrow * BITS[kind] / 8) + rest * compute
