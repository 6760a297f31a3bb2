"""Adapter files in PEFT's format: written for PEFT, and read to start from."""

import copy
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.models.language.fsdp import sharded_over
from evogrpo.models.language.lora import Target, check_supported, scaling
from evogrpo.models.language.quantised import is_quantised, plain_outline

Named = tuple[tuple[Target, ...], tuple[Target, ...]]
_TRIED: dict[Any, Named] = {}  # PEFT's reading of models that were tried before, by their structure
STEM = "base_model.model."  # begins every name in a PEFT file of a transformers model


def peft_files(targets: Sequence[Target], config: LoraConfig, flat: Tensor) -> tuple[dict[str, Tensor], bytes]:
    """Return one member as PEFT stores it: tensors of adapter_model.safetensors and bytes of adapter_config.json.

    Args:
        targets: The adapted modules.
        config: What they were made from.
        flat: `[k]` the member's adapters.
    """
    tensors: dict[str, Tensor] = {}
    for target in targets:
        tensors[f"{STEM}{target.name}.lora_A.weight"] = target.a(flat).detach().cpu().clone()
        tensors[f"{STEM}{target.name}.lora_B.weight"] = target.b(flat).detach().cpu().clone()
    record = peft_record(targets, config)
    return tensors, (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()


def peft_record(targets: Sequence[Target], config: LoraConfig) -> dict[str, Any]:
    """Return the values of adapter_config.json."""
    record: dict[str, Any] = config.to_dict()
    record.update(peft_type="LORA", task_type="CAUSAL_LM", inference_mode=True, lora_dropout=0.0, bias="none")
    # Full names, so that a folder loads the same whatever a later PEFT counts as "all-linear".
    record.update(
        target_modules=sorted(target.name for target in targets if not target.by_weight),
        target_parameters=sorted(f"{target.name}.weight" for target in targets if target.by_weight) or None,
        exclude_modules=None,
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in record.items()}


def as_peft_loads(model: PreTrainedModel, targets: Sequence[Target], config: LoraConfig) -> Named:
    """Name every target so that PEFT puts its adapter where it belongs.

    PEFT takes some names of modules for those of fused experts, `mlp.up_proj` in a model with `mlp.experts` for
    instance, and refuses others. What is misread by the name of the module is named by its weight.

    Args:
        model: The base; only its modules' names and shapes are read.
        targets: The adapted modules.
        config: What they were made from.

    Returns:
        The targets as PEFT is to be told them, and those for which there is no such name.
    """
    key = _structure(model), tuple(targets), json.dumps(peft_record(targets, config), sort_keys=True, default=str)
    if key not in _TRIED:
        _TRIED[key] = _tried(_outline(model), tuple(targets), config)
    return _TRIED[key]


def _structure(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return all that PEFT's reading of names depends on."""
    return model.config.model_type, *((name, type(module)) for name, module in model.named_modules())


def _tried(outline: nn.Module, named: tuple[Target, ...], config: LoraConfig) -> Named:
    wrong, strays = _misread(outline, named, config)
    if not wrong and not strays:
        return named, ()
    by_weight = tuple(replace(target, by_weight=target.name in wrong) for target in named)
    if len(wrong) < len(named) and _misread(outline, by_weight, config) == (frozenset(), False):
        return by_weight, ()
    families: dict[str, list[Target]] = {}
    for target in named:  # what PEFT makes of a name depends on its last word
        families.setdefault(target.name.rpartition(".")[2], []).append(target)
    kept: dict[str, Target] = {}
    for family in families.values():
        for attempt in (family, [replace(target, by_weight=True) for target in family]):
            wrong, strays = _misread(outline, attempt, config)
            if not strays:
                kept.update((target.name, target) for target in attempt if target.name not in wrong | kept.keys())
    fitting = tuple(kept[target.name] for target in named if target.name in kept)
    while fitting:  # what is read well family by family may not be so together
        wrong, strays = _misread(outline, fitting, config)
        if not wrong and not strays:
            break
        fitting = tuple(target for target in fitting if not strays and target.name not in wrong)
    return fitting, tuple(target for target in named if target.name not in {each.name for each in fitting})


def _misread(model: nn.Module, targets: Sequence[Target], config: LoraConfig) -> tuple[frozenset[str], bool]:
    """Return the names of targets whose exported adapters PEFT does not load into their modules, unchanged.

    Args:
        model: The base, or its outline; PEFT is given a copy without weights.
        targets: The adapted modules.
        config: What they were made from.

    Returns:
        The names, and whether PEFT adapts something else.
    """
    names = {f"{STEM}{target.name}.lora_{part}.weight": target.name for target in targets for part in "AB"}
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes[f"{STEM}{target.name}.lora_A.weight"] = (target.rank, target.width_in)
        shapes[f"{STEM}{target.name}.lora_B.weight"] = (target.width_out, target.rank)
    lost, strays = _lost(model, shapes, peft_record(targets, config))
    return frozenset(names[name] for name in lost), strays


def check_export(folder: Path, model: nn.Module) -> int:
    """Load the names and shapes of an exported adapter the way PEFT does.

    Args:
        folder: With adapter_model.safetensors and adapter_config.json.
        model: The base, or its outline.

    Returns:
        How many tensors arrive.

    Raises:
        ValueError: If one does not.
    """
    record = json.loads((folder / "adapter_config.json").read_text())
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    missing, strays = _lost(model, shapes, record)
    if missing or strays:
        raise ValueError(
            f"PEFT does not load {len(missing)} of the {len(shapes)} tensors in {folder} onto {type(model).__name__}"
            f"{f', {min(missing)} for one' if missing else ', and adapts what they do not cover'}: the adapter belongs "
            "to another base model, or was written by another version"
        )
    return len(shapes)


def _lost(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], record: Mapping[str, Any]
) -> tuple[frozenset[str], bool]:
    """Return which tensors of an adapter PEFT does not put, unchanged, where their names say; all if it refuses.

    Args:
        model: The base, or its outline; PEFT is given a copy without weights.
        shapes: Of the tensors in adapter_model.safetensors.
        record: The values of adapter_config.json.

    Returns:
        The names, and whether PEFT adapts what the tensors do not cover.
    """
    # The values of a tensor say which one it is; expanded from one number, it takes no memory.
    marks = {name: torch.tensor(float(number)).expand(shape) for number, (name, shape) in enumerate(shapes.items())}
    values = {key: value for key, value in record.items() if key not in ("peft_type", "auto_mapping")}
    try:
        config = LoraConfig(**values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModelForCausalLM(_outline(model), config, low_cpu_mem_usage=True)
            set_peft_model_state_dict(loaded, dict(marks), low_cpu_mem_usage=True)
    except Exception:  # noqa: BLE001  # whatever PEFT raises, it does not load the adapter
        return frozenset(shapes), False
    held = {
        f"{name}.lora_{part}.weight": (layer, getattr(layer, f"lora_{part}")["default"].weight)
        for name, layer in loaded.named_modules()
        if isinstance(layer, LoraLayer)
        for part in "AB"
    }
    factor = scaling(LoraConfig(**values))  # PEFT rewrites the config that it is given
    lost = frozenset(name for name in marks if name not in held or not _holds(*held[name], marks[name], factor))
    return lost, bool(held.keys() - shapes.keys())


def _holds(layer: LoraLayer, weight: Tensor, mark: Tensor, factor: float) -> bool:
    """Tell whether a layer of PEFT's holds the tensor that was meant for it, scaled as it is meant to be."""
    same = weight.shape == mark.shape and weight.device == mark.device and bool(weight[0, 0] == mark[0, 0])
    return same and math.isclose(layer.scaling["default"], factor)


def _outline(model: nn.Module) -> nn.Module:
    """Copy a model without its weights: each is one zero, expanded to the shape."""
    if isinstance(model, PreTrainedModel) and (sharded_over(model) > 1 or is_quantised(model)):
        model = plain_outline(model)  # no copies can be made of parts, and what is exported is for the plain model
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    return copy.deepcopy(model, memo)


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
