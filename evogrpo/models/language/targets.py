"""LoRA targets: the layers that a LoraConfig adapts, except those that cannot be trained or exported."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from evogrpo.models.language.adapter_files import as_peft_loads
from evogrpo.models.language.compatibility import frozen_model, logits_of
from evogrpo.models.language.lora import Target, adapts_all, check_supported

FUSED = "stacked weights such as fused experts"
NOT_LINEAR = "not a plain linear layer that sees every token"
UNUSED = "not called for text"
MISREAD = "PEFT cannot load its adapter"


@dataclass(frozen=True, kw_only=True)
class LoraTargets:
    """Adapted modules of a model.

    Attributes:
        targets: The adapted modules, in the order of a member's flat vector.
        left_out: Reasons by name of modules without adapters: stacked weights, and linear layers that "all-linear"
            covers but that cannot be adapted. Layer numbers in names are replaced by a star.
    """

    targets: tuple[Target, ...]
    left_out: Mapping[str, str]

    def summary(self, model: nn.Module) -> str:
        """Return the number of adapted layers and the modules left out; empty if none are."""
        if not self.left_out:
            return ""
        return f"{len(self.targets)} linear layers of {type(model).__name__}, without {_in_words(self.left_out)}"


def choose_targets(model: PreTrainedModel, config: LoraConfig, *, outline: bool = False) -> LoraTargets:
    """Return the modules that `config` adapts, so that PEFT loads an export onto the same modules.

    Args:
        model: The base model. It runs once on a few tokens.
        config: LoRA configuration.
        outline: The model has no weights; skip the forward pass and trust the classes of layers.

    Raises:
        ValueError: If nothing can be adapted, or `config` names a module that cannot be.
    """
    targets = find_targets(model, config)
    odd = {} if outline else _odd(model, targets)
    if not adapts_all(config):  # keep named layers for images, as of a stored adapter
        odd = {name: reason for name, reason in odd.items() if reason != UNUSED}
    fitting, misread = as_peft_loads(model, [target for target in targets if target.name not in odd], config)
    unfit = odd | dict.fromkeys((target.name for target in misread), MISREAD)
    if not fitting or (unfit and not adapts_all(config)):
        remedy = "Use another architecture." if adapts_all(config) else "Name others, or use 'all-linear'."
        raise ValueError(
            f"lora_config.target_modules={config.target_modules!r} names modules of {type(model).__name__} that cannot "
            f"be adapted: {_in_words(_grouped(unfit))}. {remedy}"
        )
    left_out = _grouped(dict.fromkeys(_stacks(model), FUSED) | unfit)
    packed: list[Target] = []
    for target in fitting:  # each starts at the end of the one before
        packed.append(dataclasses.replace(target, start=packed[-1].end if packed else 0))
    return LoraTargets(targets=tuple(packed), left_out=left_out)


def find_targets(model: nn.Module, config: LoraConfig) -> tuple[Target, ...]:
    """Return the modules that `config` targets, in the model's order.

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
                f"{' (the vocabulary head)' if module is head else ''}. Target linear layers inside the model, "
                "or use target_modules='all-linear'."
            )
        # Conv1D stores its weight as [in, out]; that of nn.Linear may be packed.
        shape = module.weight.shape if isinstance(module, Conv1D) else (module.in_features, module.out_features)
        width_in, width_out = shape
        start = targets[-1].end if targets else 0
        targets.append(Target(name=name, width_in=width_in, width_out=width_out, start=start, rank=config.r))
    if not targets:
        raise ValueError(
            f"lora_config.target_modules={config.target_modules!r} matches no module of {type(model).__name__}. "
            "Use target_modules='all-linear', or names from model.named_modules()."
        )
    widest = max(max(target.width_in, target.width_out) for target in targets)
    if config.r > widest:
        raise ValueError(
            f"lora_config.r must be at most {widest}, the largest width of an adapted layer of {type(model).__name__}, "
            f"got {config.r}."
        )
    return tuple(targets)


def _excluded(config: LoraConfig, name: str) -> bool:
    if not config.exclude_modules:
        return False
    probe = dataclasses.replace(config, target_modules=config.exclude_modules, exclude_modules=None)
    return bool(check_target_module_exists(probe, name))


def _odd(model: PreTrainedModel, targets: Sequence[Target]) -> dict[str, str]:
    """Return reasons by name of layers that do not map rows `[n, ..., in]` to `[n, ..., out]`.

    These are routers that return tuples, block-diagonal layers, experts that see some tokens, image encoders, and
    layers whose weights the model reads without a call.
    """
    rows, tokens = 2, 5
    found = {target.name: UNUSED for target in targets}

    def watching(target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            *shape, width = args[0].shape
            in_rows = shape[0] == rows if len(shape) > 1 else shape == [rows * tokens]
            linear = width == target.width_in and isinstance(output, Tensor)
            if not (in_rows and linear and [*output.shape] == [*shape, target.width_out]):
                found[target.name] = NOT_LINEAR
            elif found.get(target.name) == UNUSED:
                del found[target.name]

        return watch

    device = next(model.parameters()).device
    handles = [model.get_submodule(target.name).register_forward_hook(watching(target)) for target in targets]
    try:
        with frozen_model(model), torch.no_grad():
            logits_of(model, torch.ones((rows, tokens), dtype=torch.long, device=device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _stacks(model: nn.Module) -> list[str]:
    """Return the names of weights with more than two axes, in modules outside torch."""
    return [
        f"{name}.{own}"
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
        for own, values in module.named_parameters(recurse=False)
        if sum(width > 1 for width in values.shape) > 2
    ]


def _grouped(reasons: Mapping[str, str]) -> dict[str, str]:
    return {re.sub(r"\.\d+(?=\.)", ".*", name): reason for name, reason in reasons.items()}


def _in_words(reasons: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(group)} ({reason})" for reason, group in names.items())
