"""Low-rank adapters: which modules a peft.LoraConfig targets, how they start, and how they are written for PEFT."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from evogrpo.config.checks import refuse_unknown
from evogrpo.randomness import generator

SUPPORTED = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "init_lora_weights"}
# Fields that describe the file rather than the computation.
INERT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "fan_in_fan_out", "runtime_config", "megatron_core", "qalora_group_size",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """One adapted module.

    Attributes:
        name: Its dotted name in the base model.
        width_in: Features in.
        width_out: Features out.
        start: Where its A, then its B, begins in a member's flat vector.
        rank: Inner width of the adapter.
        by_weight: Whether PEFT is told the module's weight rather than the module; see `exports.as_peft_loads`.
    """

    name: str
    width_in: int
    width_out: int
    start: int
    rank: int
    by_weight: bool = False

    @property
    def middle(self) -> int:
        """Where A ends and B begins."""
        return self.start + self.rank * self.width_in

    @property
    def end(self) -> int:
        """Where B ends."""
        return self.middle + self.rank * self.width_out

    def a(self, flat: Tensor) -> Tensor:
        """AdapterHook A `[..., r, in]` in flat vectors `[..., k]`."""
        hook: Tensor = flat[..., self.start : self.middle].unflatten(-1, (self.rank, self.width_in))
        return hook

    def b(self, flat: Tensor) -> Tensor:
        """AdapterHook B `[..., out, r]` in flat vectors `[..., k]`."""
        hook: Tensor = flat[..., self.middle : self.end].unflatten(-1, (self.width_out, self.rank))
        return hook


def default_lora_config() -> LoraConfig:
    """Return the adapters used when none are asked for: rank 16 on every linear layer but the vocabulary head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def lora_to_json(config: LoraConfig) -> dict[str, Any]:
    """Return the supported fields as plain JSON values."""
    values = {name: getattr(config, name) for name in sorted(SUPPORTED)}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def lora_from_json(values: Mapping[str, Any]) -> LoraConfig:
    """Build from what `lora_to_json` returned.

    Raises:
        ValueError: If a field is unknown or unsupported.
    """
    refuse_unknown("field of lora_config", values, sorted(SUPPORTED))
    return LoraConfig(**values, task_type="CAUSAL_LM")


def check_supported(config: LoraConfig) -> None:
    """Refuse, by name, every LoraConfig field that the bank would otherwise ignore.

    Raises:
        ValueError: If a field outside the supported ones differs from its default.
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
        raise ValueError(
            f"lora_config.lora_alpha must be a finite number above 0, got {config.lora_alpha!r}: at 0 an adapter would "
            "change nothing"
        )
    if config.target_modules is None:
        raise ValueError(
            "lora_config.target_modules must say what to adapt, got None: use 'all-linear', a list of module names or "
            "a regular expression"
        )
    if config.init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"lora_config.init_lora_weights must be True or 'gaussian', got {config.init_lora_weights!r}: "
            "other initialisations change the base weights, which members share"
        )


def adapts_all(config: LoraConfig) -> bool:
    """Tell whether a config names all linear layers rather than some."""
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def find_targets(model: nn.Module, config: LoraConfig) -> tuple[Target, ...]:
    """List the modules that `config` adapts, in the model's own order.

    Raises:
        ValueError: If nothing matches, or a match is not a linear layer (nn.Linear or GPT-2's Conv1D), or it is the
            vocabulary head.
    """
    check_supported(config)
    head = model.get_output_embeddings()  # type: ignore[operator]
    targets: list[Target] = []
    for name, module in model.named_modules():
        linear = isinstance(module, (nn.Linear, Conv1D))
        if adapts_all(config):
            matched = linear and module is not head and not _excluded(config, name)
        else:
            matched = bool(check_target_module_exists(config, name))
        if not matched:
            continue
        if not linear or module is head:
            raise ValueError(
                f"lora_config.target_modules matches {name!r}, a {type(module).__name__}"
                f"{' that is the vocabulary head' if module is head else ''}: adapters go on linear layers inside "
                "the model. Name others, or use target_modules='all-linear'."
            )
        # Conv1D stores its weight as [in, out]; that of nn.Linear may be packed.
        shape = module.weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        width_in, width_out = shape
        start = targets[-1].end if targets else 0
        targets.append(Target(name=name, width_in=width_in, width_out=width_out, start=start, rank=config.r))
    if not targets:
        raise ValueError(
            f"lora_config.target_modules={config.target_modules!r} matches no module of {type(model).__name__}; "
            "use target_modules='all-linear', or names from model.named_modules()"
        )
    widest = max(max(target.width_in, target.width_out) for target in targets)
    if config.r > widest:
        raise ValueError(
            f"lora_config.r must be at most {widest}, the width of the widest adapted layer of {type(model).__name__}, "
            f"got {config.r}: ranks of 8 to 64 are common"
        )
    return tuple(targets)


def _excluded(config: LoraConfig, name: str) -> bool:
    if not config.exclude_modules:
        return False
    probe = dataclasses.replace(config, target_modules=config.exclude_modules, exclude_modules=None)
    return bool(check_target_module_exists(probe, name))


def scaling(config: LoraConfig) -> float:
    """Return the factor on B A x: alpha / r, or alpha / sqrt(r) for rank-stabilised adapters (arXiv:2312.03732)."""
    return float(config.lora_alpha) / (math.sqrt(config.r) if config.use_rslora else config.r)


def initial_weights(targets: tuple[Target, ...], config: LoraConfig, seed: int) -> Tensor:
    """Return the flat vector `[k]` float32 every member starts from: random A, zero B, so the policy is the base.

    All members share it, so that they differ in their hyperparameters and random draws alone.

    Source: LoRA (arXiv:2106.09685), section 4.1; the ranges are PEFT's.
    """
    rng = generator(seed, "adapter")
    flat = torch.zeros(targets[-1].end)
    for target in targets:
        shape = (target.rank, target.width_in)
        if config.init_lora_weights == "gaussian":
            values = rng.standard_normal(shape, dtype=np.float32) / target.rank
        else:
            bound = 1.0 / math.sqrt(target.width_in)  # kaiming_uniform_ with a = sqrt(5)
            values = rng.uniform(-bound, bound, shape).astype(np.float32)
        target.a(flat).copy_(torch.from_numpy(values))
    return flat
