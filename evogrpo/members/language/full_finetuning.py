"""Full fine-tuning: members that own all weights, each computed by a model of its own."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from evogrpo.members.language.compatibility import end_ids_of, is_quantised
from evogrpo.members.language.fsdp import sharded_over
from evogrpo.members.language.loading import quietly
from evogrpo.members.language.lora_targets import LoraTargets, choose_targets
from evogrpo.members.language.peft_files import CONFIG, TENSORS, check_export
from evogrpo.text import class_name


@dataclass(frozen=True, kw_only=True)
class AllWeights:
    """All weights of a model, in the order of `model.parameters()`; tied weights are one parameter.

    Attributes:
        size: Number of weights.
    """

    size: int
    # The rest of the interface of `LoraTargets`: no modules with adapters, and no rank.
    modules = ()
    rank = None
    description = "each with all weights of its own"

    def summary(self, model: nn.Module) -> str:
        """Return "": no module is left out."""
        return ""

    def flat(self, model: PreTrainedModel) -> Tensor:
        """Return a copy of a model's weights as a member's flat vector `[k]`."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def choose_trained(
    model: PreTrainedModel, lora_config: LoraConfig | None, *, outline: bool = False
) -> LoraTargets | AllWeights:
    """Return the weights that members train: modules of a LoRA configuration, or all without one.

    Args:
        model: The base model.
        lora_config: LoRA configuration, or None.
        outline: The model has no weights; do not run it, and do not check their dtype.

    Raises:
        ValueError: As `choose_targets`; without a LoRA configuration, if the model is quantised,
            sharded or not in float32.
    """
    if lora_config is not None:
        return choose_targets(model, lora_config, outline=outline)
    # Gradients of all weights need plain float32 tensors in this process.
    if is_quantised(model):
        raise ValueError(
            "full_finetuning requires a base that is not quantised. Load it with load_base(...,"
            " dtype='float32'), or train adapters."
        )
    parts = sharded_over(model)
    if parts > 1:
        raise ValueError(
            f"full_finetuning requires a base that is not sharded, got {parts} parts. Set"
            " base_parts=1, or train adapters."
        )
    dtypes = {parameter.dtype for parameter in model.parameters()}
    others = sorted(str(dtype) for dtype in dtypes - {torch.float32})
    if others and not outline:
        raise ValueError(
            f"full_finetuning requires a base in float32, got {others[0]}. Load it with"
            " load_base(..., dtype='float32')."
        )
    return AllWeights(size=sum(parameter.numel() for parameter in model.parameters()))


class MemberModels:
    """A model of each member, whose parameters are views of the member's weights.

    Modules and configuration are copied from the base, which is never changed; buffers are shared
    with it. The models stay in evaluation mode.

    Args:
        model: The base model.
        weights: `[p, k]` weights of all members.

    Attributes:
        models: Models by slot.
    """

    def __init__(self, model: PreTrainedModel, weights: Tensor) -> None:
        self.models = [_with_weights(model, row) for row in weights]

    def hook(self, slots: Tensor) -> None:
        """Return None: a member's model needs no hook."""

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Accumulate a member's gradient into `buffer` `[k]` in the following backward passes.

        None stops it.
        """
        model = self.models[slot]
        if buffer is None:
            model.zero_grad(set_to_none=True)
            return
        for parameter, part in zip(model.parameters(), _views(buffer, model), strict=True):
            parameter.grad = part


def _views(flat: Tensor, model: nn.Module) -> list[Tensor]:
    """Return the parts of a flat vector `[k]` as views with the shapes of a model's parameters."""
    shapes = [parameter.shape for parameter in model.parameters()]
    sizes = [shape.numel() for shape in shapes]
    parts = flat.split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _with_weights(model: PreTrainedModel, flat: Tensor) -> PreTrainedModel:
    """Copy a model's modules, with a flat vector as its weights; buffers are shared."""
    # `deepcopy` takes the copy of an object from its memo, by the object's id. So it copies the
    # modules, but uses these parameters and buffers.
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter, part in zip(model.parameters(), _views(flat, model), strict=True):
        memo[id(parameter)] = nn.Parameter(part)
    copied: PreTrainedModel = copy.deepcopy(model, memo).eval()
    return copied


# ---- export

MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")


def transformers_files(model: PreTrainedModel, end_ids: Sequence[int]) -> dict[str, bytes]:
    """Return the files of a folder that `from_pretrained` loads, by name.

    Args:
        model: The model.
        end_ids: Tokens that ended completions in training, for its generation config.
    """
    # 1. Copy what is saved: weights on the CPU, and settings with the end tokens of training.
    tensors = {name: values.detach().cpu() for name, values in model.state_dict().items()}
    # `save_pretrained` raises for generation settings that `from_pretrained` accepts, such as a
    # temperature without do_sample. Write them to their file without that check.
    saved = copy.copy(model)
    settings = copy.copy(model.generation_config)
    saved.generation_config = GenerationConfig()
    if settings is not None and end_ids_of(model) != set(end_ids):
        settings.eos_token_id = list(end_ids)
    # 2. Write a folder, and read its files.
    with TemporaryDirectory() as name:
        folder = Path(name)
        with quietly():
            saved.save_pretrained(folder, state_dict=tensors, max_shard_size="1TB")
        if model.can_generate():
            path = folder / "generation_config.json"
            settings.to_json_file(path, keys_to_pop=["compile_config"])
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass(frozen=True, kw_only=True)
class Export:
    """Files of a member in a checkpoint that other programs load.

    Attributes:
        files: Names of the files.
        what: Description of the contents, to be followed by the name of the base.
        loader: Python expression that loads their folder, for `loader.format(repr(folder))`.
    """

    files: tuple[str, ...]
    what: str
    loader: str


def find_export(folder: Path) -> Export:
    """Return the files of an adapter or of a model in a checkpoint."""
    if (folder / CONFIG).is_file():
        base = json.loads((folder / CONFIG).read_text())["base_model_name_or_path"]
        # If the adapter names its base, PEFT loads that too.
        if base:
            model = "AutoPeftModelForCausalLM.from_pretrained({})"
        else:
            model = "PeftModel.from_pretrained(base_model, {})"
        return Export(files=(CONFIG, TENSORS), what="an adapter of", loader=f"peft.{model}")
    files = tuple(name for name in MODEL_FILES if (folder / name).is_file())
    loader = "transformers.AutoModelForCausalLM.from_pretrained({})"
    return Export(files=files, what="a model that started from", loader=loader)


def check_member(folder: Path, outline: PreTrainedModel) -> str:
    """Check that PEFT or transformers loads an exported member; return what was checked.

    Args:
        folder: Folder with an adapter or a model.
        outline: The base model, with or without weights. The configuration in the folder is not
            trusted.

    Raises:
        ValueError: If a tensor is missing, unexpected or of another shape.
    """
    if not (folder / "model.safetensors").is_file():
        return f"PEFT loads all {check_export(folder, outline)} tensors"
    # The folder's own configuration could name code or other shapes.
    with quietly():
        result: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=outline.config, output_loading_info=True, trust_remote_code=False
        )
    # transformers only warns about tensors that do not fit.
    loaded, info = result
    lost = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if lost:
        raise ValueError(
            f"{len(lost)} tensors in {folder} do not fit {class_name(outline)} (for example"
            f" {lost[0]}). Use the base model that it was trained from, and the version of"
            " transformers that wrote it."
        )
    return f"transformers loads all {len(list(loaded.parameters()))} tensors"
