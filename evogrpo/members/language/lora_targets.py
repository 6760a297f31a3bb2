"""Modules of a model that get LoRA adapters."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from evogrpo.members.language.compatibility import frozen_model, logits_of
from evogrpo.members.language.lora import Target, adapts_all, check_supported
from evogrpo.members.language.peft_files import loadable_by_peft
from evogrpo.text import class_name

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


def choose_targets(model: PreTrainedModel, config: LoraConfig, *, outline: bool) -> LoraTargets:
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
    fitting = loadable_by_peft(model, linear, config)
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
    # 4. Lay out the fitting modules in the vector of all LoRA weights of one member: each begins
    #    where the one before ends.
    adapted: list[Target] = []
    end = 0
    for target in fitting:
        adapted.append(replace(target, offset=end))
        end = adapted[-1].end
    left_out = dict.fromkeys(_stacked_weights(model), FUSED) | unfit
    return LoraTargets(targets=tuple(adapted), left_out=left_out)


def find_targets(model: nn.Module, config: LoraConfig) -> tuple[Target, ...]:
    """Return the modules that `config` targets, in the model's order.

    Raises:
        ValueError: If nothing matches, or a match is not a linear layer (nn.Linear or GPT-2's
            Conv1D), or it is the vocabulary head.
    """
    # 1. PEFT's rule matches names. With "all-linear" all names match, and the loop keeps linear
    #    layers.
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
            Target(name=name, width_in=width_in, width_out=width_out, offset=end, rank=config.r)
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
        """Return a forward hook that checks one layer."""

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
            # It was called at least once, with the shapes of a linear layer.
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
    parts = [f"{', '.join(group)} ({reason})" for reason, group in names.items()]
    return "; ".join(parts)
