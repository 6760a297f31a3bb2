"""Adapter files in PEFT's format: writing and reading, and checks that PEFT loads them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from evogrpo.models.language.lora import Target, check_supported, not_loaded_by_peft, peft_record


def peft_files(targets: Sequence[Target], config: LoraConfig, flat: Tensor) -> tuple[dict[str, Tensor], bytes]:
    """Return one member in PEFT's format: tensors of adapter_model.safetensors and bytes of adapter_config.json.

    Args:
        targets: The adapted modules.
        config: LoRA configuration of the targets.
        flat: `[k]` adapters of the member.
    """
    tensors: dict[str, Tensor] = {}
    for target in targets:
        for name, matrix in zip(target.peft_names, (target.a(flat), target.b(flat)), strict=True):
            tensors[name] = matrix.detach().cpu().clone()
    record = peft_record(targets, config)
    return tensors, (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()


def check_export(folder: Path, model: nn.Module) -> int:
    """Check that PEFT loads an exported adapter, by names and shapes.

    Args:
        folder: Folder with adapter_model.safetensors and adapter_config.json.
        model: The base model, with or without weights.

    Returns:
        Number of tensors.

    Raises:
        ValueError: If PEFT does not load one of them.
    """
    record = json.loads((folder / "adapter_config.json").read_text())
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    missing, strays = not_loaded_by_peft(model, shapes, record)
    if missing or strays:
        raise ValueError(
            f"PEFT does not load {len(missing)} of the {len(shapes)} tensors in {folder} onto {type(model).__name__}"
            f"{f' (for example {min(missing)})' if missing else ' but adapts other modules'}. The adapter belongs to "
            "another base model, or was written by another version of PEFT."
        )
    return len(shapes)


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Fields of training and initialisation, reset when an adapter is read.
TRAINING_FIELDS = {"lora_dropout": 0.0, "init_lora_weights": True, "inference_mode": False, "task_type": "CAUSAL_LM"}


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """LoRA adapter in PEFT's format.

    Attributes:
        lora_config: Its configuration.
        tensors: Its matrices, by names in adapter_model.safetensors.
    """

    lora_config: LoraConfig
    tensors: Mapping[str, Tensor]

    def flat(self, targets: Sequence[Target]) -> Tensor:
        """Return the adapter as a member's flat vector `[k]`, float32.

        Args:
            targets: The adapted modules of the members.

        Raises:
            ValueError: If modules or shapes differ, or values are not finite.
        """
        names = {name for target in targets for name in target.peft_names}
        odd = sorted(names ^ self.tensors.keys())
        if odd:
            raise ValueError(
                f"The adapter has {len(self.tensors)} matrices, members of this model have {len(names)}; for example, "
                f"{odd[0]!r} is not in both. The adapter belongs to another base model."
            )
        flat = torch.zeros(targets[-1].end)
        for target in targets:
            for name, matrix in zip(target.peft_names, (target.a(flat), target.b(flat)), strict=True):
                values = self.tensors[name]
                if values.shape != matrix.shape:
                    raise ValueError(
                        f"The adapter's {name} must have the shape {tuple(matrix.shape)}, got {tuple(values.shape)}. "
                        "The adapter belongs to another base model."
                    )
                matrix.copy_(values)
        if not bool(torch.isfinite(flat).all()):
            raise ValueError("The adapter contains values that are not finite.")
        return flat


def read_adapter(folder: str | Path) -> StoredAdapter:
    """Read an adapter folder written by PEFT or `evogrpo export`.

    Raises:
        ValueError: If a file is missing or damaged, or the adapter is not a supported LoRA.
    """
    place = Path(folder).expanduser()
    missing = [name for name in (CONFIG, TENSORS) if not (place / name).is_file()]
    if missing:
        raise ValueError(
            f"adapter must be a folder with {CONFIG} and {TENSORS}, but {str(folder)!r} has no {missing[0]}. Use a "
            "folder written by PEFT or `evogrpo export`. Download one from the hub with "
            "huggingface_hub.snapshot_download first."
        )
    try:
        record = json.loads((place / CONFIG).read_text())
        tensors = load_file(place / TENSORS)
        config = _config(record)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        cause = (str(error).splitlines() or [""])[0]
        raise ValueError(f"The adapter in {folder} cannot be read ({type(error).__name__}: {cause}).") from error
    check_supported(config)
    return StoredAdapter(lora_config=config, tensors=tensors)


def _config(record: dict[str, Any]) -> LoraConfig:
    """Return the LoraConfig of adapter_config.json; targets named by weight become modules again."""
    if record.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {record.get('peft_type')!r}")
    values = {
        name: value for name, value in record.items() if name not in ("peft_type", "auto_mapping")
    } | TRAINING_FIELDS
    by_weight = values.pop("target_parameters", None) or []
    if by_weight and all(name.endswith(".weight") for name in by_weight):
        values["target_modules"] = [*(values["target_modules"] or ()), *(n.removesuffix(".weight") for n in by_weight)]
    elif by_weight:
        values["target_parameters"] = by_weight
    known = {name: value for name, value in values.items() if name in LoraConfig.__dataclass_fields__}
    if newer := {name: value for name, value in values.items() if name not in known and value}:
        raise ValueError(f"The installed peft does not support these settings of the adapter: {newer}. Update peft.")
    return LoraConfig(**known)
