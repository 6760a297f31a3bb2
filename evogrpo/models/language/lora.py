"""LoRA configuration: supported fields, the layout of adapters, initial weights."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor

from evogrpo.config.checks import refuse_unknown
from evogrpo.randomness import generator

SUPPORTED = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "init_lora_weights"}
# Fields that do not change the computation.
INERT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "fan_in_fan_out", "runtime_config", "megatron_core", "qalora_group_size",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """One adapted module.

    Attributes:
        name: Dotted name in the base model.
        width_in: Input features.
        width_out: Output features.
        start: Offset of A, followed by B, in a member's flat vector.
        rank: Rank of the adapter.
        by_weight: Name the weight instead of the module in PEFT's files; see `adapter_files.as_peft_loads`.
    """

    name: str
    width_in: int
    width_out: int
    start: int
    rank: int
    by_weight: bool = False

    @property
    def middle(self) -> int:
        """Offset of B."""
        return self.start + self.rank * self.width_in

    @property
    def end(self) -> int:
        """Offset of the end of B."""
        return self.middle + self.rank * self.width_out

    def a(self, flat: Tensor) -> Tensor:
        """Return A `[..., r, in]` as a view of flat vectors `[..., k]`."""
        view: Tensor = flat[..., self.start : self.middle].unflatten(-1, (self.rank, self.width_in))
        return view

    def b(self, flat: Tensor) -> Tensor:
        """Return B `[..., out, r]` as a view of flat vectors `[..., k]`."""
        view: Tensor = flat[..., self.middle : self.end].unflatten(-1, (self.width_out, self.rank))
        return view


def lora_to_json(config: LoraConfig) -> dict[str, Any]:
    """Return the supported fields as plain JSON values."""
    values = {name: getattr(config, name) for name in sorted(SUPPORTED)}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def lora_from_json(values: Mapping[str, Any]) -> LoraConfig:
    """Return the configuration that `lora_to_json` wrote.

    Raises:
        ValueError: If a field is unknown or unsupported.
    """
    refuse_unknown("field of lora_config", values, sorted(SUPPORTED))
    return LoraConfig(**values, task_type="CAUSAL_LM")


def check_supported(config: LoraConfig) -> None:
    """Check a LoraConfig.

    Raises:
        ValueError: If an unsupported field differs from its default, or a supported field has an invalid value.
    """
    plain = LoraConfig()
    refused = [
        field.name
        for field in dataclasses.fields(config)
        if field.name not in SUPPORTED | INERT and getattr(config, field.name) != getattr(plain, field.name, None)
    ]
    if refused:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in refused)
        raise ValueError(
            f"lora_config supports {', '.join(sorted(SUPPORTED))}; got {values}. Leave these at their defaults."
        )
    if not isinstance(config.r, int) or config.r < 1:
        raise ValueError(f"lora_config.r must be a whole number of at least 1, got {config.r!r}")
    if not isinstance(config.lora_alpha, int | float) or not 0 < config.lora_alpha < math.inf:
        raise ValueError(f"lora_config.lora_alpha must be a finite number above 0, got {config.lora_alpha!r}.")
    if config.target_modules is None:
        raise ValueError(
            "lora_config.target_modules must be 'all-linear', a list of module names or a regular expression, got None."
        )
    if config.init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"lora_config.init_lora_weights must be True or 'gaussian', got {config.init_lora_weights!r}. "
            "Other initialisations change the base weights, which members share."
        )


def adapts_all(config: LoraConfig) -> bool:
    """Return True if a config targets all linear layers."""
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def scaling(config: LoraConfig) -> float:
    """Return the factor on B A x: alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (arXiv:2312.03732)."""
    return float(config.lora_alpha) / (math.sqrt(config.r) if config.use_rslora else config.r)


def initial_weights(targets: tuple[Target, ...], config: LoraConfig, seed: int) -> Tensor:
    """Return the initial flat vector `[k]` float32: random A, zero B, so that the policy equals the base.

    All members start from the same vector.

    Source: LoRA (arXiv:2106.09685), section 4.1; the ranges are PEFT's.
    """
    rng = generator(seed, "adapter")
    flat = torch.zeros(targets[-1].end)
    for target in targets:
        shape = (target.rank, target.width_in)
        if config.init_lora_weights == "gaussian":
            values = rng.standard_normal(shape, dtype=np.float32) / target.rank  # standard deviation 1 / r, as PEFT
        else:
            bound = 1.0 / math.sqrt(target.width_in)  # kaiming_uniform_ with a = sqrt(5)
            values = rng.uniform(-bound, bound, shape).astype(np.float32)
        target.a(flat).copy_(torch.from_numpy(values))
    return flat
