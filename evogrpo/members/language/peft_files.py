"""Adapters in PEFT's format: files, and the modules that PEFT loads them onto."""

import copy
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from evogrpo.members.language.compatibility import is_quantised
from evogrpo.members.language.fsdp import sharded_over
from evogrpo.members.language.lora import Target, check_supported, scaling, without_sets
from evogrpo.text import class_name, expand_user, shown

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
"""Names of the files of an adapter."""
NOT_ARGUMENTS = ("peft_type", "auto_mapping")
"""Keys of adapter_config.json that are not arguments of LoraConfig."""
TRAINING_FIELDS = {
    "lora_dropout": 0.0,
    "init_lora_weights": True,
    "inference_mode": False,
    "task_type": "CAUSAL_LM",
}
"""Fields of training and initialisation, which are reset when an adapter is read."""
SEPARATE_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base unchanged."""


# ---- modules that PEFT loads an adapter onto


def _peft_record(targets: Sequence[Target], config: LoraConfig) -> dict[str, Any]:
    """Return the values of adapter_config.json."""
    record = config.to_dict()
    record |= {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
        # Full names, as "all-linear" may mean other modules in later versions of PEFT.
        "target_modules": sorted(target.name for target in targets),
        "exclude_modules": None,
    }
    return without_sets(record)


# Results of `loadable_by_peft`, by model structure and configuration.
_LOADABLE: dict[Any, list[Target]] = {}


def loadable_by_peft(
    model: PreTrainedModel, targets: Sequence[Target], config: LoraConfig
) -> list[Target]:
    """Return the targets whose adapters PEFT loads onto the right modules.

    PEFT mistakes some modules for fused experts, such as `mlp.up_proj` in a model with
    `mlp.experts`, and refuses others, such as Mamba's `out_proj`.
    """
    # 1. Reuse an earlier result for the same structure and configuration.
    modules = tuple((name, type(module)) for name, module in model.named_modules())
    record = json.dumps(_peft_record(targets, config), sort_keys=True, default=str)
    key = (model.config.model_type, modules, tuple(targets), record)
    if key in _LOADABLE:
        return _LOADABLE[key]
    empty = _without_weights(model)

    def not_loaded(chosen: Sequence[Target]) -> set[str]:
        """Return the modules whose adapter does not load; all if PEFT adapts other modules too."""
        # Names and shapes of the file that these targets would be exported to.
        shapes: dict[str, tuple[int, ...]] = {}
        for target in chosen:
            a, b = target.peft_names
            shapes[a] = (target.rank, target.width_in)
            shapes[b] = (target.width_out, target.rank)
        missing, adapts_others = _not_loaded_by_peft(empty, shapes, _peft_record(chosen, config))
        # A target is lost if PEFT did not load one of its two matrices.
        lost = {target.name for target in chosen if not missing.isdisjoint(target.peft_names)}
        # Which target brings the other modules in is unknown, so all are returned.
        if adapts_others and not lost:
            return {target.name for target in chosen}
        return lost

    # 2. Drop targets until PEFT loads all that are left.
    fitting = list(targets)
    while lost := not_loaded(fitting):
        # A single refused module makes PEFT raise, so that all are lost. Find it by one target of
        # each kind of layer.
        if len(lost) == len(fitting):
            # The kind of a layer is the last part of its name, such as "q_proj".
            example_of = {target.name.rpartition(".")[2]: target for target in fitting}
            refused = {kind for kind, example in example_of.items() if not_loaded([example])}
            if refused:
                lost = {name for name in lost if name.rpartition(".")[2] in refused}
        fitting = [target for target in fitting if target.name not in lost]
    _LOADABLE[key] = fitting
    return fitting


def _not_loaded_by_peft(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], record: Mapping[str, Any]
) -> tuple[set[str], bool]:
    """Load an adapter with PEFT onto a copy of the model without weights.

    Args:
        model: The base model, with or without weights.
        shapes: Shapes of the tensors in adapter_model.safetensors.
        record: Values of adapter_config.json.

    Returns:
        Names of tensors that do not arrive at their modules (all if PEFT raises), and whether PEFT
        adapts other modules.
    """
    # 1. Load tensors filled with their numbers. Expanded from one value, they take no memory.
    marks = {}
    for number, (name, shape) in enumerate(shapes.items()):
        marks[name] = torch.tensor(float(number)).expand(shape)
    values = {key: value for key, value in record.items() if key not in NOT_ARGUMENTS}
    try:
        config = LoraConfig(**values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModelForCausalLM(_without_weights(model), config, low_cpu_mem_usage=True)
            set_peft_model_state_dict(loaded, dict(marks), low_cpu_mem_usage=True)
    except Exception:  # noqa: BLE001  # any error means that PEFT does not load the adapter
        return set(shapes), False
    # 2. Find each number in the module that its tensor's name belongs to.
    missing = set(shapes)
    adapts_others = False
    for module, layer in loaded.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for part in ("lora_A", "lora_B"):
            name = f"{module}.{part}.weight"
            if name not in marks:
                adapts_others = True
                continue
            mark = marks[name]
            weight = getattr(layer, part)["default"].weight
            # Weights that PEFT did not fill stay on the meta device.
            arrived = not weight.is_meta and weight.shape == mark.shape
            scaled = math.isclose(layer.scaling["default"], scaling(config))
            if arrived and scaled and bool(weight[0, 0] == mark[0, 0]):
                missing.discard(name)
    return missing, adapts_others


def _without_weights(model: nn.Module) -> nn.Module:
    """Copy a model without weights: each is one zero, expanded to the shape."""
    # A sharded or quantised model cannot be copied; exports are for the plain one.
    if isinstance(model, PreTrainedModel) and (sharded_over(model) > 1 or is_quantised(model)):
        config = copy.deepcopy(model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # `deepcopy` takes the copy of an object from its memo, by the object's id. With a stand-in for
    # every tensor there, it copies the modules around them and no weights.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        zeros = torch.zeros(()).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
    for buffer in model.buffers():
        zero = torch.zeros((), dtype=buffer.dtype)
        memo[id(buffer)] = zero.expand(buffer.shape)
    return copy.deepcopy(model, memo)


# ---- files


def peft_files(
    targets: Sequence[Target], config: LoraConfig, flat: Tensor
) -> tuple[dict[str, Tensor], bytes]:
    """Return a member `[k]` in PEFT's format: tensors by name, and bytes of adapter_config.json."""
    tensors: dict[str, Tensor] = {}
    for target in targets:
        for name, matrix in zip(target.peft_names, target.matrices(flat), strict=True):
            tensors[name] = matrix.detach().cpu().clone()
    record = _peft_record(targets, config)
    text = json.dumps(record, indent=2, sort_keys=True, default=str)
    return tensors, f"{text}\n".encode()


def check_export(folder: Path, model: nn.Module) -> int:
    """Check that PEFT loads an exported adapter, and return its number of tensors.

    Args:
        folder: Folder with adapter_model.safetensors and adapter_config.json.
        model: The base model, with or without weights.

    Raises:
        ValueError: If PEFT does not load one of the tensors, by name and shape, or adapts modules
            without tensors.
    """
    # Names and shapes suffice: no tensor is read.
    record = json.loads((folder / CONFIG).read_text())
    with safe_open(folder / TENSORS, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    missing, adapts_others = _not_loaded_by_peft(model, shapes, record)
    cause = "The adapter belongs to another base model, or was written by another version of PEFT."
    if missing:
        raise ValueError(
            f"PEFT does not load {len(missing)} of the {len(shapes)} tensors in {folder} onto"
            f" {class_name(model)} (for example {min(missing)}). {cause}"
        )
    if adapts_others:
        raise ValueError(
            f"PEFT adapts modules of {class_name(model)} for which {folder} has no tensors. {cause}"
        )
    return len(shapes)


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """LoRA adapter in PEFT's format.

    Attributes:
        lora_config: Configuration of the adapter.
        tensors: Matrices of the adapter, by name in adapter_model.safetensors.
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
        # 1. Compare the names and shapes of the file with views of the flat vector.
        flat = torch.zeros(targets[-1].end)
        matrices: dict[str, Tensor] = {}
        for target in targets:
            matrices |= zip(target.peft_names, target.matrices(flat), strict=True)
        needed = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
        given = {name: tuple(matrix.shape) for name, matrix in self.tensors.items()}
        for name in sorted({*needed, *given}):
            if needed.get(name) != given.get(name):
                raise ValueError(
                    f"The adapter has {name} of shape {given.get(name)}, but this model has"
                    f" {needed.get(name)}. The adapter belongs to another base model."
                )
        # 2. Copy the tensors of the file into the views.
        for name, matrix in matrices.items():
            matrix.copy_(self.tensors[name])
        if not bool(torch.isfinite(flat).all()):
            raise ValueError(
                "The adapter contains values that are not finite. Use another adapter."
            )
        return flat


def read_adapter(folder: str | Path) -> StoredAdapter:
    """Read an adapter folder written by PEFT or `evogrpo export`.

    Raises:
        ValueError: If a file is missing or damaged, or the adapter is not a supported LoRA.
    """
    # 1. Find the files.
    path = expand_user(folder)
    missing = [name for name in (CONFIG, TENSORS) if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"adapter must be a folder with {CONFIG} and {TENSORS}, but {str(folder)!r} has no"
            f" {missing[0]}. Use a folder written by PEFT or `evogrpo export`. Download one from"
            " the hub with huggingface_hub.snapshot_download first."
        )
    # 2. Read them. They come from elsewhere, so many errors are possible.
    try:
        record = json.loads((path / CONFIG).read_text())
        tensors = load_file(path / TENSORS)
        config = _config(record)
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"The adapter in {folder} cannot be read ({class_name(error)}: {cause})."
        ) from error
    check_supported(config)
    return StoredAdapter(lora_config=config, tensors=tensors)


def _config(record: dict[str, Any]) -> LoraConfig:
    """Return the LoraConfig of adapter_config.json.

    Fields that matter only for training are reset; see `TRAINING_FIELDS`.

    Raises:
        ValueError: If the record is not that of a LoRA adapter, or the initialisation changed the
            base.
    """
    if record.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be 'LORA', got {shown(record.get('peft_type'))}.")
    # 1. Initialisations such as PiSSA store the rest of a weight in the base.
    init = record.get("init_lora_weights", True)
    if init not in SEPARATE_INITS:
        raise ValueError(
            f"init_lora_weights={init!r} changed the weights of the base, which an adapter does not"
            " contain. Merge it into its base, or convert it to a plain LoRA adapter with PEFT"
        )
    # 2. Keep what this version of PEFT knows. Unknown settings matter unless they are off.
    known = {}
    unknown = {}
    for name, value in (record | TRAINING_FIELDS).items():
        if name in NOT_ARGUMENTS:
            continue
        if name in LoraConfig.__dataclass_fields__:
            known[name] = value
        elif value:
            unknown[name] = value
    if unknown:
        raise ValueError(
            f"The installed peft does not support these settings: {unknown}. Update it."
        )
    return LoraConfig(**known)
