"""Base models of checkpoints: checked by fingerprint, saved with the adapters, or loaded by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from evogrpo.algorithms.policies.policy_set import CheckpointFiles
from evogrpo.models.devices import check_stored_size
from evogrpo.models.language.compatibility import is_quantised
from evogrpo.models.language.fsdp import sharded_over
from evogrpo.models.language.loading import load_base
from evogrpo.models.language.lora import tensors_file
from evogrpo.storage.checkpoint import CheckpointError, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE_CONFIG, BASE_WEIGHTS = "base_config.json", "base_model.safetensors"


def base_files(model: "PreTrainedModel") -> CheckpointFiles:
    """Return the files that `saved_base` reads.

    Raises:
        ValueError: If the base is sharded or quantised.
    """
    if is_quantised(model):
        raise ValueError(
            "A quantised base cannot be saved. Leave out include_base, and pass the base as actor_network= when "
            "loading, in any precision."
        )
    if sharded_over(model) > 1:
        raise ValueError(
            f"the base is held in {sharded_over(model)} parts, so no rank can save it. Leave out include_base, and "
            "pass the base as actor_network= when loading."
        )
    return {
        # Tied weights are one parameter, so they are stored once.
        BASE_WEIGHTS: lambda: tensors_file({name: value.detach() for name, value in model.named_parameters()}),
        BASE_CONFIG: model.config.to_json_string(use_diff=False).encode(),
    }


FOLLOWED = ("auto_map", "custom_pipelines", "_attn_implementation", "attn_implementation", "_experts_implementation")
"""Configuration fields that name code to import. They are dropped, because checkpoints are untrusted."""

LABELS = ("num_labels", "id2label", "label2id")
"""Configuration fields of classifiers, dropped because transformers expands each label."""

MOST_PARTS, MOST_OF_ANYTHING = 1024, 2**24


def check_base(record: Mapping[str, Any], actual: str, where: object) -> None:
    """Raise CheckpointError if the base model's fingerprint is not the recorded one."""
    if record["fingerprint"] != actual:
        raise CheckpointError(
            f"{where} was trained on the base model {record['source']!r} with fingerprint {record['fingerprint']}, but "
            f"the model passed has {actual}. Pass the same base model."
        )


def named_base(record: Mapping[str, Any]) -> "PreTrainedModel":
    """Load the base model that a record names. Paths in checkpoints are never followed.

    Raises:
        ValueError: If the name is a path or cannot be loaded.
    """
    source = str(record["source"])
    remedy = "Pass the base model as actor_network=, loaded with evogrpo.load_base"
    if is_path(source):
        raise ValueError(f"The base model was saved from path {source!r}, which is not opened. {remedy}.")
    try:
        return load_base(source).model
    except ValueError as error:
        raise ValueError(f"The checkpoint's base model {source!r} cannot be loaded. {remedy}. {error}") from error


def saved_base(folder: Path) -> "PreTrainedModel | None":
    """Load the base model saved inside a validated checkpoint; None if there is none."""
    if not (folder / BASE_WEIGHTS).is_file():
        return None
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = load_file(folder / BASE_WEIGHTS)
    try:
        values = _harmless(json.loads((folder / BASE_CONFIG).read_text()))
        _refuse_huge(values)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):  # without memory first: sizes in the file are untrusted
            outline: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        unmatched = _unmatched(outline, weights)
        if not unmatched:
            dtype = next(iter(weights.values())).dtype
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{folder / BASE_CONFIG} is not the configuration of a transformers model ({reason:.300})"
        ) from error
    if unmatched:
        raise CheckpointError(f"{folder / BASE_WEIGHTS} does not match its config; unmatched weights: {unmatched[:3]}")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def _unmatched(outline: "PreTrainedModel", weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters that are missing, unexpected or of another shape, and refuse large buffers.

    Args:
        outline: Model of the stored configuration on the meta device, to compare before a model takes memory.
        weights: The stored weights.

    Raises:
        ValueError: If the model's buffers are out of proportion to its weights.
    """
    declared = {name: tuple(value.shape) for name, value in outline.named_parameters()}
    stored = {name: tuple(value.shape) for name, value in weights.items()}
    # Buffers are not stored, so a forged configuration could ask for huge ones although all parameters match.
    buffers = sum(buffer.nbytes for buffer in outline.buffers())
    check_stored_size(buffers, sum(value.nbytes for value in weights.values()))
    return sorted(name for name in declared.keys() | stored.keys() if declared.get(name) != stored.get(name))


def _refuse_huge(values: Any, name: str = "") -> None:
    """Raise ValueError for sizes that no model has, before transformers loops over them."""
    if isinstance(values, dict):
        for key, value in values.items():
            _refuse_huge(value, str(key))
    elif isinstance(values, int):
        most = MOST_PARTS if any(word in name for word in ("layer", "expert", "block", "depth")) else MOST_OF_ANYTHING
        if values > most:
            raise ValueError(f"{name} must be at most {most:,}, got {values:,}")


def _harmless(values: Any) -> Any:
    """Return a configuration without code, kernels and paths that transformers would follow, at any depth."""
    if isinstance(values, list):
        return [_harmless(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {
        name: _harmless(value)
        for name, value in values.items()
        if name not in (*FOLLOWED, *LABELS) and not (name == "_name_or_path" and is_path(str(value)))
    }
