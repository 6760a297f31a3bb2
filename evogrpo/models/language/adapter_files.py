"""Adapter files in PEFT's format: writing and reading, and checks that PEFT loads them."""

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
_TRIED: dict[Any, Named] = {}  # results of `as_peft_loads`, by model structure and configuration
PREFIX = "base_model.model."  # of every name in a PEFT file of a transformers model


def peft_files(targets: Sequence[Target], config: LoraConfig, flat: Tensor) -> tuple[dict[str, Tensor], bytes]:
    """Return one member in PEFT's format: tensors of adapter_model.safetensors and bytes of adapter_config.json.

    Args:
        targets: The adapted modules.
        config: LoRA configuration of the targets.
        flat: `[k]` adapters of the member.
    """
    tensors: dict[str, Tensor] = {}
    for target in targets:
        tensors[f"{PREFIX}{target.name}.lora_A.weight"] = target.a(flat).detach().cpu().clone()
        tensors[f"{PREFIX}{target.name}.lora_B.weight"] = target.b(flat).detach().cpu().clone()
    record = peft_record(targets, config)
    return tensors, (json.dumps(record, indent=2, sort_keys=True, default=str) + "\n").encode()


def peft_record(targets: Sequence[Target], config: LoraConfig) -> dict[str, Any]:
    """Return the values of adapter_config.json."""
    record: dict[str, Any] = config.to_dict()
    record.update(peft_type="LORA", task_type="CAUSAL_LM", inference_mode=True, lora_dropout=0.0, bias="none")
    # Full names, because "all-linear" may mean other modules in later versions of PEFT.
    record.update(
        target_modules=sorted(target.name for target in targets if not target.by_weight),
        target_parameters=sorted(f"{target.name}.weight" for target in targets if target.by_weight) or None,
        exclude_modules=None,
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in record.items()}


def as_peft_loads(model: PreTrainedModel, targets: Sequence[Target], config: LoraConfig) -> Named:
    """Choose the name of each target in PEFT's files, so that PEFT loads its adapter onto the right module.

    PEFT mistakes some modules for fused experts, such as `mlp.up_proj` in a model with `mlp.experts`, and rejects
    others. These are named by their weight instead of the module.

    Args:
        model: The base model; only names and shapes are used.
        targets: The adapted modules.
        config: LoRA configuration of the targets.

    Returns:
        The targets with their names, and the targets that PEFT cannot load under any name.
    """
    # The key is all that PEFT's result depends on.
    structure = model.config.model_type, *((name, type(module)) for name, module in model.named_modules())
    key = structure, tuple(targets), json.dumps(peft_record(targets, config), sort_keys=True, default=str)
    if key not in _TRIED:
        _TRIED[key] = _tried(_outline(model), tuple(targets), config)
    return _TRIED[key]


def _tried(outline: nn.Module, named: tuple[Target, ...], config: LoraConfig) -> Named:
    # 1. All modules by name; then those that PEFT misreads by weight.
    wrong, strays = _misread(outline, named, config)
    if not wrong and not strays:
        return named, ()
    by_weight = tuple(replace(target, by_weight=target.name in wrong) for target in named)
    if len(wrong) < len(named) and _misread(outline, by_weight, config) == (frozenset(), False):
        return by_weight, ()
    # 2. Modules with the same last name together, by name or by weight.
    families: dict[str, list[Target]] = {}
    for target in named:  # PEFT matches the last part of a name
        families.setdefault(target.name.rpartition(".")[2], []).append(target)
    kept: dict[str, Target] = {}
    for family in families.values():
        for attempt in (family, [replace(target, by_weight=True) for target in family]):
            wrong, strays = _misread(outline, attempt, config)
            if not strays:
                kept.update((target.name, target) for target in attempt if target.name not in wrong | kept.keys())
    fitting = tuple(kept[target.name] for target in named if target.name in kept)
    # 3. Drop targets until all remaining ones load together.
    while fitting:
        wrong, strays = _misread(outline, fitting, config)
        if not wrong and not strays:
            break
        fitting = tuple(target for target in fitting if not strays and target.name not in wrong)
    return fitting, tuple(target for target in named if target.name not in {each.name for each in fitting})


def _misread(model: nn.Module, targets: Sequence[Target], config: LoraConfig) -> tuple[frozenset[str], bool]:
    """Return the names of targets that PEFT does not load onto their modules, and whether it adapts other modules."""
    names = {f"{PREFIX}{target.name}.lora_{part}.weight": target.name for target in targets for part in "AB"}
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes[f"{PREFIX}{target.name}.lora_A.weight"] = (target.rank, target.width_in)
        shapes[f"{PREFIX}{target.name}.lora_B.weight"] = (target.width_out, target.rank)
    lost, strays = _lost(model, shapes, peft_record(targets, config))
    return frozenset(names[name] for name in lost), strays


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
    missing, strays = _lost(model, shapes, record)
    if missing or strays:
        raise ValueError(
            f"PEFT does not load {len(missing)} of the {len(shapes)} tensors in {folder} onto {type(model).__name__}"
            f"{f' (for example {min(missing)})' if missing else ' but adapts other modules'}. The adapter belongs to "
            "another base model, or was written by another version of PEFT."
        )
    return len(shapes)


def _lost(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], record: Mapping[str, Any]
) -> tuple[frozenset[str], bool]:
    """Load an adapter with PEFT onto a copy of the model without weights.

    Args:
        model: The base model, with or without weights.
        shapes: Shapes of the tensors in adapter_model.safetensors.
        record: Values of adapter_config.json.

    Returns:
        Names of tensors that do not arrive at their modules (all if PEFT raises), and whether PEFT adapts other
        modules.
    """
    # Fill each tensor with its number to identify it; expanded from one value, it takes no memory.
    marks = {name: torch.tensor(float(number)).expand(shape) for number, (name, shape) in enumerate(shapes.items())}
    values = {key: value for key, value in record.items() if key not in ("peft_type", "auto_mapping")}
    try:
        config = LoraConfig(**values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModelForCausalLM(_outline(model), config, low_cpu_mem_usage=True)
            set_peft_model_state_dict(loaded, dict(marks), low_cpu_mem_usage=True)
    except Exception:  # noqa: BLE001  # any error means that PEFT does not load the adapter
        return frozenset(shapes), False
    held = {
        f"{name}.lora_{part}.weight": (layer, getattr(layer, f"lora_{part}")["default"].weight)
        for name, layer in loaded.named_modules()
        if isinstance(layer, LoraLayer)
        for part in "AB"
    }
    factor = scaling(LoraConfig(**values))  # a new config, because PEFT modified the other
    lost = frozenset(name for name in marks if name not in held or not _holds(*held[name], marks[name], factor))
    return lost, bool(held.keys() - shapes.keys())


def _holds(layer: LoraLayer, weight: Tensor, mark: Tensor, factor: float) -> bool:
    """Return True if a layer of PEFT has the expected tensor and scaling."""
    same = weight.shape == mark.shape and weight.device == mark.device and bool(weight[0, 0] == mark[0, 0])
    return same and math.isclose(layer.scaling["default"], factor)


def _outline(model: nn.Module) -> nn.Module:
    """Copy a model without weights: each is one zero, expanded to the shape."""
    if isinstance(model, PreTrainedModel) and (sharded_over(model) > 1 or is_quantised(model)):
        model = plain_outline(model)  # cannot be copied, and exports are for the plain model
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    return copy.deepcopy(model, memo)


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
        names = {f"{PREFIX}{target.name}.lora_{part}.weight" for target in targets for part in "AB"}
        odd = sorted(names ^ self.tensors.keys())
        if odd:
            raise ValueError(
                f"The adapter has {len(self.tensors)} matrices, members of this model have {len(names)}; for example, "
                f"{odd[0]!r} is not in both. The adapter belongs to another base model."
            )
        flat = torch.zeros(targets[-1].end)
        for target in targets:
            for part, place in (("A", target.a(flat)), ("B", target.b(flat))):
                values = self.tensors[f"{PREFIX}{target.name}.lora_{part}.weight"]
                if values.shape != place.shape:
                    raise ValueError(
                        f"The adapter's lora_{part} of {target.name} must have the shape {tuple(place.shape)}, got "
                        f"{tuple(values.shape)}. The adapter belongs to another base model."
                    )
                place.copy_(values)
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
