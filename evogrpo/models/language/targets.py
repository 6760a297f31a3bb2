"""Which layers of a model members train: those that a LoraConfig adapts, less what cannot be trained or exported."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.models.language.adapter_files import as_peft_loads
from evogrpo.models.language.compatibility import frozen_model, logits_of
from evogrpo.models.language.lora import Target, adapts_all, find_targets
from evogrpo.warnings import warn

STACKED = "no linear layers, but stacks of weights, as fused experts are"
NOT_LINEAR = "no plain linear layer that sees every token"
IDLE = "not called with text, whether or not their weights are read"
_TOLD: WeakSet[nn.Module] = WeakSet()
MISREAD = "PEFT would refuse its adapter or load it elsewhere"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the adapters of a model train.

    Attributes:
        targets: The adapted modules, one after another in a member's flat vector.
        left_out: What they leave out, by name, each with the reason: stacks of weights, such as fused experts, and
            linear layers that "all-linear" would have named. In names, numbers of layers are replaced by a star.
    """

    targets: tuple[Target, ...]
    left_out: Mapping[str, str]

    def told(self, model: nn.Module) -> str:
        """Say how much is trained and what is left out; nothing where that is nothing."""
        if not self.left_out:
            return ""
        return f"{len(self.targets)} linear layers of {type(model).__name__} and leave out {_in_words(self.left_out)}"


def choose_targets(model: PreTrainedModel, config: LoraConfig, *, outline: bool = False) -> Trained:
    """Choose the modules that adapters change, such that an export means the same to PEFT.

    Args:
        model: The base. It runs once on a few tokens.
        config: What to adapt.
        outline: The model has no weights, so it does not run, and layers are taken to be what their class says.

    Raises:
        ValueError: If nothing can be adapted, or `config` names a module that cannot.
    """
    targets = find_targets(model, config)
    odd = {} if outline else _odd(model, targets)
    if not adapts_all(config):  # a stored adapter, say, keeps what it has for reading images
        odd = {name: reason for name, reason in odd.items() if reason != IDLE}
    fitting, misread = as_peft_loads(model, [target for target in targets if target.name not in odd], config)
    unfit = odd | dict.fromkeys((target.name for target in misread), MISREAD)
    if not fitting or (unfit and not adapts_all(config)):
        remedy = "use another architecture" if adapts_all(config) else "name others, or use 'all-linear'"
        raise ValueError(
            f"lora_config.target_modules={config.target_modules!r} names modules of {type(model).__name__} that cannot "
            f"be adapted: {_in_words(_grouped(unfit))}; {remedy}"
        )
    left_out = _grouped(dict.fromkeys(_stacks(model), STACKED) | unfit)
    return Trained(targets=_in_a_row(fitting), left_out=left_out)


def warn_left_out(trained: Trained, model: nn.Module) -> None:
    """Warn of what adapters leave out, if that is anything, once for every model."""
    told = trained.told(model)
    if told and model not in _TOLD:
        _TOLD.add(model)
        warn(f"adapters train {told}")


def _in_a_row(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Let each target begin where the one before ends."""
    row: list[Target] = []
    for target in targets:
        row.append(replace(target, start=row[-1].end if row else 0))
    return tuple(row)


def _odd(model: PreTrainedModel, targets: Sequence[Target]) -> dict[str, str]:
    """Return, with the reason, the names of layers that do not map rows `[n, ..., in]` to `[n, ..., out]`.

    A router that returns a tuple, a layer of several blocks, an expert that sees some tokens of all rows, or none; a
    part that reads images; a layer whose weights are read past it, so that nothing that is added to what it puts out
    would act.
    """
    rows, tokens = 2, 5
    found = {target.name: IDLE for target in targets}

    def watching(target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            *shape, width = args[0].shape
            in_rows = shape[0] == rows if len(shape) > 1 else shape == [rows * tokens]
            linear = width == target.width_in and isinstance(output, Tensor)
            if not (in_rows and linear and [*output.shape] == [*shape, target.width_out]):
                found[target.name] = NOT_LINEAR
            elif found.get(target.name) == IDLE:
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
    """Return the names of weights with more axes than a matrix, in modules that are not torch's own."""
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
