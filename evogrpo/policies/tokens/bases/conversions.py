"""GGUF files as folders that transformers loads at once: converted the first time, and kept in the user's cache."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from evogrpo.installing import package_command
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
