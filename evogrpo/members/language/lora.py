"""LoRA: supported configurations, the adapted modules, and adapter files in PEFT's format."""

import copy
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModelForCausalLM
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from evogrpo.members.language.compatibility import (
    frozen_model,
    is_quantised,
    logits_of,
)
from evogrpo.members.language.fsdp import sharded_over
from evogrpo.randomness import generator
from evogrpo.text import class_name, expand_user, shown
from evogrpo.validation import flag, refuse_unknown

SUPPORTED = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora"}
# Fields that do not change the computation.
INERT = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "fan_in_fan_out", "runtime_config", "megatron_core", "qalora_group_size",
}  # fmt: skip

PREFIX = "base_model.model."  # of every name in a PEFT file of a transformers model


@dataclass(frozen=True, kw_only=True)
class Target:
    """One adapted module.

    Attributes:
        name: Dotted name in the base model.
        width_in: Input features.
        width_out: Output features.
        start: Offset of A, followed by B, in a member's flat vector.
        rank: Rank of the adapter.
    """

    name: str
    width_in: int
    width_out: int
    start: int
    rank: int

    @property
    def end(self) -> int:
        """Offset of the end of B."""
        return self.start + self.rank * (self.width_in + self.width_out)

    @property
    def peft_names(self) -> tuple[str, str]:
        """Names of A and B in adapter_model.safetensors."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"

    def matrices(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return A `[..., r, in]` and B `[..., out, r]` as views of flat vectors `[..., k]`."""
        middle = self.start + self.rank * self.width_in
        flat_a = flat[..., self.start : middle]
        flat_b = flat[..., middle : self.end]
        a = flat_a.unflatten(-1, (self.rank, self.width_in))
        b = flat_b.unflatten(-1, (self.width_out, self.rank))
        return a, b


def lora_to_json(config: LoraConfig | None) -> dict[str, Any] | None:
    """Return the supported fields as plain JSON values; None if members train all weights."""
    if config is None:
        return None
    return _without_sets({name: getattr(config, name) for name in sorted(SUPPORTED)})


def _without_sets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace sets by sorted lists, as JSON has no sets."""
    plain = dict(values)
    for name, value in plain.items():
        if isinstance(value, set):
            plain[name] = sorted(value)
    return plain


def lora_from_json(values: Mapping[str, Any] | None) -> LoraConfig | None:
    """Return the configuration that `lora_to_json` wrote; ValueError if a field is unknown."""
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
        raise ValueError(
            f"lora_config supports {', '.join(sorted(SUPPORTED))}; got {', '.join(refused)}. Leave"
            " these at their defaults."
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
        elif not isinstance(value, list | tuple | set) or {*map(type, value)} - {str}:
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


# ---- the modules that a config adapts

# Reasons for which a module gets no adapter.
FUSED = "stacked weights such as fused experts"
NOT_LINEAR = "not a plain linear layer that sees every token"
UNUSED = "not called for text"
NOT_LOADED = "PEFT cannot load its adapter"


@dataclass(frozen=True, kw_only=True)
class LoraTargets:
    """Adapted modules of a model.

    Attributes:
        targets: The adapted modules, in the order of a member's flat vector.
        left_out: Reasons by name of modules without adapters: stacked weights, and linear layers
            that "all-linear" covers but that cannot be adapted.
    """

    targets: tuple[Target, ...]
    left_out: Mapping[str, str]

    @property
    def size(self) -> int:
        """Number of weights of a member."""
        return self.targets[-1].end

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted modules."""
        return tuple(target.name for target in self.targets)

    @property
    def rank(self) -> int:
        """Rank of the adapters."""
        return self.targets[0].rank

    @property
    def description(self) -> str:
        """Words for each member in the plan of a run."""
        return f"each a LoRA adapter of rank {self.rank}"

    def summary(self, model: nn.Module) -> str:
        """Return the number of adapted layers and the modules left out; empty if none are."""
        if not self.left_out:
            return ""
        without = _in_words(self.left_out)
        return f"{len(self.targets)} linear layers of {class_name(model)}, without {without}"


def choose_targets(
    model: PreTrainedModel, config: LoraConfig, *, outline: bool = False
) -> LoraTargets:
    """Return the modules that `config` adapts, so that PEFT loads an export onto the same modules.

    Args:
        model: The base model. It runs once on a few tokens.
        config: LoRA configuration.
        outline: The model has no weights; skip the forward pass and trust the classes of layers.

    Raises:
        ValueError: If nothing can be adapted, or `config` names a module that cannot be.
    """
    # 1. Find modules that cannot be adapted.
    targets = find_targets(model, config)
    unfit: dict[str, str] = {}
    if not outline:
        unfit = _not_linear(model, targets)
    # A stored adapter may name layers for images, which text does not call.
    if not adapts_all(config):
        unfit = {name: reason for name, reason in unfit.items() if reason != UNUSED}
    # 2. Find modules whose adapter PEFT would not load.
    linear = [target for target in targets if target.name not in unfit]
    fitting = _loadable_by_peft(model, linear, config)
    for target in linear:
        if target not in fitting:
            unfit[target.name] = NOT_LOADED
    # 3. Raise if none is left, or if the configuration names one of them. "all-linear" leaves them
    #    out.
    if not fitting or (unfit and not adapts_all(config)):
        if adapts_all(config):
            remedy = "Use another architecture."
        else:
            remedy = "Name others, or use 'all-linear'."
        raise ValueError(
            f"lora_config.target_modules={config.target_modules!r} names modules of"
            f" {class_name(model)} that cannot be adapted: {_in_words(unfit)}. {remedy}"
        )
    # 4. Lay out the others in the vector that holds all LoRA weights of one member: each begins
    #    where the one before ends.
    placed: list[Target] = []
    end = 0
    for target in fitting:
        placed.append(replace(target, start=end))
        end = placed[-1].end
    left_out = dict.fromkeys(_stacked_weights(model), FUSED) | unfit
    return LoraTargets(targets=tuple(placed), left_out=left_out)


def find_targets(model: nn.Module, config: LoraConfig) -> tuple[Target, ...]:
    """Return the modules that `config` targets, in the model's order.

    Raises:
        ValueError: If nothing matches, or a match is not a linear layer (nn.Linear or GPT-2's
            Conv1D), or it is the vocabulary head.
    """
    # 1. PEFT's rule matches names; "all-linear" matches all, and the loop leaves out others.
    check_supported(config)
    pattern = config
    if adapts_all(config):
        pattern = replace(config, target_modules=".*")
    head = model.get_output_embeddings()  # type: ignore[operator]
    targets: list[Target] = []
    end = 0
    # 2. Collect the linear layers.
    for name, module in model.named_modules():
        if not check_target_module_exists(pattern, name):
            continue
        if module is head or not isinstance(module, (nn.Linear, Conv1D)):
            if adapts_all(config):
                continue
            what = class_name(module)
            if module is head:
                what = "the vocabulary head"
            raise ValueError(
                f"lora_config.target_modules matches {name!r}, {what}. Target linear layers inside"
                " the model, or use target_modules='all-linear'."
            )
        # Conv1D stores its weight as [in, out]; that of nn.Linear may be packed.
        if isinstance(module, Conv1D):
            width_in, width_out = module.weight.shape
        else:
            width_in = module.in_features
            width_out = module.out_features
        targets.append(
            Target(name=name, width_in=width_in, width_out=width_out, start=end, rank=config.r)
        )
        end = targets[-1].end
    if not targets:
        raise ValueError(
            f"lora_config.target_modules={config.target_modules!r} matches no module of"
            f" {class_name(model)}. Use target_modules='all-linear', or names from"
            " model.named_modules()."
        )
    return tuple(targets)


def _not_linear(model: PreTrainedModel, targets: Sequence[Target]) -> dict[str, str]:
    """Return reasons by name of layers that do not map rows `[n, ..., in]` to `[n, ..., out]`.

    These are routers that return tuples, block-diagonal layers, experts that see some tokens, image
    encoders, and layers whose weights the model reads without a call. The model runs once.
    """
    # 1. Two different sizes, so that rows and tokens are not mistaken for each other. Every layer
    #    counts as unused until it is called.
    rows = 2
    tokens = 5
    reasons = {target.name: UNUSED for target in targets}

    # 2. Observe inputs and outputs of all layers in one forward pass. A layer may be called several
    #    times; one unexpected call is enough.
    def observer(target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def observe(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            """Forward hook: remove the layer's reason if its input and output are as expected."""
            *shape, width = args[0].shape
            if len(shape) > 1:
                sees_all_rows = shape[0] == rows
            else:  # some architectures flatten rows and tokens
                sees_all_rows = shape == [rows * tokens]
            is_linear = (
                sees_all_rows
                and width == target.width_in
                and isinstance(output, Tensor)
                and [*output.shape] == [*shape, target.width_out]
            )
            if not is_linear:
                reasons[target.name] = NOT_LINEAR
            elif reasons.get(target.name) == UNUSED:
                del reasons[target.name]

        return observe

    handles = []
    for target in targets:
        module = model.get_submodule(target.name)
        handles.append(module.register_forward_hook(observer(target)))
    try:
        with frozen_model(model), torch.no_grad():
            ids = torch.ones((rows, tokens), dtype=torch.long)
            logits_of(model, ids.to(next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return reasons


def _stacked_weights(model: nn.Module) -> list[str]:
    """Return the names of weights that stack several matrices, which get no adapters.

    They have more than two axes and belong to modules outside torch, so convolutions do not count.
    """
    names = []
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch."):
            continue
        for parameter, weights in module.named_parameters(recurse=False):
            if sum(size > 1 for size in weights.shape) > 2:
                names.append(f"{name}.{parameter}")
    return names


def _in_words(reasons: Mapping[str, str]) -> str:
    """Return names by reason; layer numbers are replaced by a star."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        starred = re.sub(r"\.\d+(?=\.)", ".*", name)
        group = names.setdefault(reason, [])
        if starred not in group:
            group.append(starred)
    return "; ".join(f"{', '.join(group)} ({reason})" for reason, group in names.items())


# ---- names in PEFT's files


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
    return _without_sets(record)


# Results of `_loadable_by_peft`, by model structure and configuration.
_LOADABLE: dict[Any, list[Target]] = {}


def _loadable_by_peft(
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
    outline = _outline(model)

    def not_loaded(chosen: Sequence[Target]) -> set[str]:
        """Return the modules whose adapter does not load; all if PEFT adapts other modules too."""
        # Names and shapes of the file that these targets would be exported to.
        shapes: dict[str, tuple[int, ...]] = {}
        for target in chosen:
            a, b = target.peft_names
            shapes[a] = (target.rank, target.width_in)
            shapes[b] = (target.width_out, target.rank)
        missing, adapts_others = _not_loaded_by_peft(outline, shapes, _peft_record(chosen, config))
        lost = {target.name for target in chosen if not missing.isdisjoint(target.peft_names)}
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
            loaded = PeftModelForCausalLM(_outline(model), config, low_cpu_mem_usage=True)
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
            arrived = not weight.is_meta and weight.shape == mark.shape
            scaled = math.isclose(layer.scaling["default"], scaling(config))
            if arrived and scaled and bool(weight[0, 0] == mark[0, 0]):
                missing.discard(name)
    return missing, adapts_others


def _outline(model: nn.Module) -> nn.Module:
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
        memo[id(buffer)] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
    return copy.deepcopy(model, memo)


# ---- adapter files


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
        ValueError: If PEFT does not load one of them, by name and shape.
    """
    # Names and shapes suffice: no tensor is read.
    record = json.loads((folder / CONFIG).read_text())
    with safe_open(folder / TENSORS, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    missing, adapts_others = _not_loaded_by_peft(model, shapes, record)
    if missing or adapts_others:
        if missing:
            problem = f"for example {min(missing)}"
        else:
            problem = "it adapts other modules"
        raise ValueError(
            f"PEFT does not load {len(missing)} of the {len(shapes)} tensors in {folder} onto"
            f" {class_name(model)} ({problem}). The adapter belongs to another base model, or was"
            " written by another version of PEFT."
        )
    return len(shapes)


CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
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
        for name in sorted(needed | given):
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
    place = expand_user(folder)
    missing = [name for name in (CONFIG, TENSORS) if not (place / name).is_file()]
    if missing:
        raise ValueError(
            f"adapter must be a folder with {CONFIG} and {TENSORS}, but {str(folder)!r} has no"
            f" {missing[0]}. Use a folder written by PEFT or `evogrpo export`. Download one from"
            " the hub with huggingface_hub.snapshot_download first."
        )
    # 2. Read them. They come from elsewhere, so many errors are possible.
    try:
        record = json.loads((place / CONFIG).read_text())
        tensors = load_file(place / TENSORS)
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
