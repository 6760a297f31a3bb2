"""Adapters that PEFT has stored, as something for members to start from."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from evogrpo.policies.tokens.exports import STEM
from evogrpo.policies.tokens.lora import Target, check_supported

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What says how an adapter was trained or begun, and not what it computes.
PAST = {"lora_dropout": 0.0, "init_lora_weights": True, "inference_mode": False, "task_type": "CAUSAL_LM"}


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """A LoRA adapter as PEFT stores it.

    Attributes:
        lora_config: What it adapts, and how.
        tensors: Its matrices, by their names in adapter_model.safetensors.
    """

    lora_config: LoraConfig
    tensors: Mapping[str, Tensor]

    def flat(self, targets: Sequence[Target]) -> Tensor:
        """Return the adapter as a member's flat vector `[k]`, float32.

        Args:
            targets: The modules that the model's members adapt.

        Raises:
            ValueError: If these are not the adapter's modules, or have other shapes.
        """
        names = {f"{STEM}{target.name}.lora_{part}.weight" for target in targets for part in "AB"}
        odd = sorted(names ^ self.tensors.keys())
        if odd:
            raise ValueError(
                f"the adapter has {len(self.tensors)} matrices and this model's members have {len(names)}, "
                f"{odd[0]!r} for one is not in both: it was made for another base model, or adapts what cannot be "
                "trained here"
            )
        flat = torch.zeros(targets[-1].end)
        for target in targets:
            for part, place in (("A", target.a(flat)), ("B", target.b(flat))):
                values = self.tensors[f"{STEM}{target.name}.lora_{part}.weight"]
                if values.shape != place.shape:
                    raise ValueError(
                        f"the adapter's lora_{part} of {target.name} must be {tuple(place.shape)} for this model, got "
                        f"{tuple(values.shape)}: it was made for another base model"
                    )
                place.copy_(values)
        if not bool(torch.isfinite(flat).all()):
            raise ValueError("the adapter holds numbers that are not finite: its training has failed")
        return flat


def read_adapter(folder: str | Path) -> StoredAdapter:
    """Read an adapter folder that PEFT, or an export, has written.

    Raises:
        ValueError: If there is none, a file is damaged, or the adapter is of a kind that members cannot be.
    """
    place = Path(folder).expanduser()
    missing = [name for name in (CONFIG, TENSORS) if not (place / name).is_file()]
    if missing:
        raise ValueError(
            f"adapter must be a folder with {CONFIG} and {TENSORS}, but {str(folder)!r} has no {missing[0]}: give the "
            "folder that PEFT's save_pretrained or `evogrpo export` wrote; one on the hub is first downloaded with "
            "huggingface_hub.snapshot_download"
        )
    try:
        record = json.loads((place / CONFIG).read_text())
        tensors = load_file(place / TENSORS)
        config = _config(record)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        cause = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the adapter in {folder} cannot be read ({type(error).__name__}: {cause})") from error
    check_supported(config)
    return StoredAdapter(lora_config=config, tensors=tensors)


def _config(record: dict[str, Any]) -> LoraConfig:
    """Read adapter_config.json; modules that are named by their weight are named as modules again."""
    if record.get("peft_type") != "LORA":
        raise ValueError(f"the adapter must be of peft_type 'LORA', got {record.get('peft_type')!r}")
    values = {name: value for name, value in record.items() if name not in ("peft_type", "auto_mapping")} | PAST
    by_weight = values.pop("target_parameters", None) or []
    if by_weight and all(name.endswith(".weight") for name in by_weight):
        values["target_modules"] = [*(values["target_modules"] or ()), *(n.removesuffix(".weight") for n in by_weight)]
    elif by_weight:
        values["target_parameters"] = by_weight
    known = {name: value for name, value in values.items() if name in LoraConfig.__dataclass_fields__}
    if newer := {name: value for name, value in values.items() if name not in known and value}:
        raise ValueError(f"the adapter has settings that the installed peft does not know: {newer}; update peft")
    return LoraConfig(**known)
