"""LoRA: supported configurations, and the layout of a member's weights."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor

from evogrpo.randomness import generator
from evogrpo.text import shown
from evogrpo.validation import flag, refuse_unknown

# Fields that members support.
SUPPORTED = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora"}
# Fields that do not change the computation.
INERT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "fan_in_fan_out", "runtime_config", "megatron_core", "qalora_group_size",
}  # fmt: skip

NEW_WEIGHTS = {"modules_to_save", "trainable_token_indices"}
"""Fields that train weights of the base model beside adapters."""

PREFIX = "base_model.model."  # of every name in a PEFT file of a transformers model


@dataclass(frozen=True, kw_only=True)
class Target:
    """One adapted module.

    Attributes:
        name: Dotted name in the base model.
        width_in: Input features.
        width_out: Output features.
        offset: Offset of A, followed by B, in a member's flat vector.
        rank: Rank of the adapter.
    """

    name: str
    width_in: int
    width_out: int
    offset: int
    rank: int

    @property
    def end(self) -> int:
        """Offset of the end of B."""
        return self.offset + self.rank * (self.width_in + self.width_out)

    @property
    def peft_names(self) -> tuple[str, str]:
        """Names of A and B in adapter_model.safetensors."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"

    def matrices(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return A `[..., r, in]` and B `[..., out, r]` as views of flat vectors `[..., k]`."""
        middle = self.offset + self.rank * self.width_in
        flat_a = flat[..., self.offset : middle]
        flat_b = flat[..., middle : self.end]
        a = flat_a.unflatten(-1, (self.rank, self.width_in))
        b = flat_b.unflatten(-1, (self.width_out, self.rank))
        return a, b


def lora_to_json(config: LoraConfig | None) -> dict[str, Any] | None:
    """Return the supported fields as plain JSON values; None if members train all weights."""
    if config is None:
        return None
    return without_sets({name: getattr(config, name) for name in sorted(SUPPORTED)})


def without_sets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace sets by sorted lists, as JSON has no sets."""
    plain = dict(values)
    for name, value in plain.items():
        if isinstance(value, set):
            plain[name] = sorted(value)
    return plain


def lora_from_json(values: Mapping[str, Any] | None) -> LoraConfig | None:
    """Return the configuration that `lora_to_json` wrote; None for None.

    Raises:
        ValueError: If a field is unknown.
    """
    if values is None:
        return None
    refuse_unknown("field of lora_config", values, sorted(SUPPORTED))
    return LoraConfig(**values, task_type="CAUSAL_LM")


def check_supported(config: LoraConfig) -> None:
    """Raise ValueError if an unsupported field is set, or a supported one has an invalid value."""
    # 1. Refuse fields that members do not support.
    plain = LoraConfig()
    refused = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in SUPPORTED | INERT and value != getattr(plain, field.name, None):
            refused.append(f"{field.name}={value!r}")
    if refused:
        advice = "Leave these at their defaults."
        if any(getattr(config, name, None) for name in NEW_WEIGHTS):
            advice = (
                "Members share one frozen base. To train its embeddings or head, too, set"
                " full_finetuning=True instead of lora_config."
            )
        raise ValueError(
            f"lora_config supports {', '.join(sorted(SUPPORTED))}; got {', '.join(refused)}."
            f" {advice}"
        )
    # 2. Check the numbers. Not `isinstance`, as True is an int.
    if type(config.r) is not int or config.r < 1:
        raise ValueError(
            f"lora_config.r must be a whole number of at least 1, got {shown(config.r)}."
        )
    if type(config.lora_alpha) not in (int, float) or not 0 < config.lora_alpha < math.inf:
        raise ValueError(
            "lora_config.lora_alpha must be a finite number above 0, got"
            f" {shown(config.lora_alpha)}."
        )
    flag("lora_config.use_rslora", config.use_rslora)
    # 3. Check the names of modules.
    for name in ("target_modules", "exclude_modules"):
        value = getattr(config, name)
        if value is None and name == "exclude_modules":
            continue
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"lora_config.{name}={value!r} is not a regular expression: {error}."
                ) from None
        elif not isinstance(value, list | tuple | set) or any(
            type(each) is not str for each in value
        ):
            raise ValueError(
                f"lora_config.{name} must be a list of module names or a regular expression, got"
                f" {shown(value)}."
            )


def adapts_all(config: LoraConfig) -> bool:
    """Return True if a config targets all linear layers."""
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def scaling(config: LoraConfig) -> float:
    """Return the factor on B A x: alpha / r, or alpha / sqrt(r) for rank-stabilised adapters.

    Source: rsLoRA (arXiv:2312.03732).
    """
    if config.use_rslora:
        return config.lora_alpha / math.sqrt(config.r)
    return config.lora_alpha / config.r


def initial_weights(targets: tuple[Target, ...], seed: int) -> Tensor:
    """Return the first flat vector `[k]` float32 of all members.

    A is random and B is zero, so that the policy equals the base.

    Source: LoRA (arXiv:2106.09685), section 4.1; the ranges are PEFT's.
    """
    rng = generator(seed, "adapter")
    flat = torch.zeros(targets[-1].end)
    for target in targets:
        # The range of torch's kaiming_uniform_ with a = sqrt(5).
        bound = 1.0 / math.sqrt(target.width_in)
        values = rng.uniform(-bound, bound, (target.rank, target.width_in))
        a, _ = target.matrices(flat)
        a.copy_(torch.from_numpy(values.astype(np.float32)))
    return flat
