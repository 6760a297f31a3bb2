"""Base models of checkpoints: recognised by fingerprint, saved beside adapters, or named and loaded again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as tensor_bytes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from evogrpo.agents.members.members import CheckpointFiles
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.policies.tokens.models import load_base

BASE_CONFIG, BASE_WEIGHTS = "base_config.json", "base_model.safetensors"


def base_files(model: PreTrainedModel) -> CheckpointFiles:
    """Return the files that `saved_base` reads, made when they are written."""
    return {
        # Tied weights are one parameter, so nothing is stored twice.
        BASE_WEIGHTS: lambda: tensors_file({name: value.detach() for name, value in model.named_parameters()}),
        BASE_CONFIG: model.config.to_json_string(use_diff=False).encode(),
    }


FOLLOWED = ("auto_map", "custom_pipelines", "_attn_implementation", "attn_implementation", "_experts_implementation")
"""Fields of a model's configuration that name code to import; found in a checkpoint, nothing may follow them."""


def check_base(record: Mapping[str, Any], actual: str, where: object) -> None:
    """Refuse a base model whose fingerprint is not the recorded one."""
    if record["fingerprint"] != actual:
        raise CheckpointError(
            f"{where} was trained on the base model {record['source']!r} with fingerprint {record['fingerprint']}, but "
            f"the model given has {actual}: adapters mean nothing on another base, so give the same model"
        )


def named_base(record: Mapping[str, Any]) -> PreTrainedModel:
    """Load the base model that a record names, unless that name is a path: paths in checkpoints are never followed.

    Raises:
        ValueError: If it is a path or cannot be loaded; the message names the argument to give instead.
    """
    source = str(record["source"])
    remedy = "give the base model as actor_network=, loaded with evogrpo.policies.tokens.models.load_base"
    if is_path(source):
        raise ValueError(f"the checkpoint's base model came from the path {source!r}, which is not followed: {remedy}")
    try:
        return load_base(source).model
    except ValueError as error:
        raise ValueError(f"the checkpoint's base model {source!r} cannot be loaded: {remedy}. {error}") from error


def is_path(source: str) -> bool:
    """Tell whether a base model's name is, or may be, a place on this machine."""
    return source.startswith((".", "~", "/", "\\")) or Path(source).exists() or source.endswith(".gguf")


def saved_base(folder: Path) -> PreTrainedModel | None:
    """Load the base model saved inside a checked checkpoint, or return None."""
    if not (folder / BASE_WEIGHTS).is_file():
        return None
    values = _harmless(json.loads((folder / BASE_CONFIG).read_text()))
    weights = load_file(folder / BASE_WEIGHTS)
    dtype = next(iter(weights.values())).dtype
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{folder / BASE_CONFIG} describes no model of transformers ({reason:.300})") from error
    missing = set(dict(model.named_parameters())) ^ set(weights)
    if missing:
        raise CheckpointError(f"{folder / BASE_WEIGHTS} does not fit its config: {sorted(missing)[:3]} are unmatched")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def _harmless(values: Any) -> Any:
    """Return a configuration without what transformers would follow: code, kernels, and paths, wherever they stand."""
    if isinstance(values, list):
        return [_harmless(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {
        name: _harmless(value)
        for name, value in values.items()
        if name not in FOLLOWED and not (name == "_name_or_path" and is_path(str(value)))
    }


def tensors_file(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a safetensors file, as PEFT and transformers write them."""
    plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
    return tensor_bytes(plain, metadata={"format": "pt"})
