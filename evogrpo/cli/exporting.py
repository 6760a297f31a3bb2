"""Command `export`: best adapter, hyperparameter schedule or Optuna study of a run."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from evogrpo.cli.ending import command, show_command
from evogrpo.cli.main import OK
from evogrpo.text import pluralize, printable
from evogrpo.training.display.console import make_console, working

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")


def export(args: argparse.Namespace) -> int:
    """Write every export that the arguments name."""
    targets = {name: getattr(args, name) for name in _EXPORTS if getattr(args, name) is not None}
    if not targets:
        raise ValueError("Nothing to export: give FOLDER for the best adapter, --schedule FILE or --optuna STORAGE.")
    if args.study is not None and args.optuna is None:
        raise ValueError(f"--study {args.study!r} needs --optuna STORAGE.")
    for name, target in targets.items():
        _EXPORTS[name](args, target)
    return OK


def _study(args: argparse.Namespace, storage: str) -> None:
    """Write the run to an Optuna storage."""
    from evogrpo.reporting.optuna_study import export_study

    console = make_console()
    try:
        with working(console, "writing the study"):
            name, trials = export_study(args.run_dir, storage, args.study)
    except ImportError as error:
        raise ValueError(str(error)) from error
    console.print(Text(printable(f"wrote study {name} to {storage}: {pluralize(trials, 'trial')}")), soft_wrap=True)


def _schedule(args: argparse.Namespace, file: Path) -> None:
    """Write the hyperparameter schedule of the best member's lineage to a file."""
    from evogrpo.training.replay import HyperparameterSchedule

    console = make_console()
    schedule = HyperparameterSchedule.read(args.run_dir)
    schedule.write(file)
    stages, steps = len(schedule.stages), sum(stage.steps for stage in schedule.stages)
    words = f"wrote {file}: {pluralize(stages, 'stage')} over {pluralize(steps, 'learning step')}"
    console.print(Text(printable(words)), soft_wrap=True)
    show_command(console, "replay it", command("replay", file))


def _adapter(args: argparse.Namespace, folder: Path) -> None:
    """Verify the best adapter and copy the two files that PEFT needs."""
    run_dir: Path = args.run_dir
    from evogrpo.storage.checkpoint import checkpoint_path

    best = checkpoint_path(run_dir / "best")
    if not best.is_dir():
        raise ValueError(f"{run_dir} has no best member yet. Wait for the first generation.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder. Choose a new folder.")
    console = make_console()
    with working(console, "reading and checking the adapter"):
        from evogrpo.algorithms.factory import AGENT_CLASSES
        from evogrpo.storage.atomic_files import make_folder, write_synced
        from evogrpo.storage.checkpoint import checkpoint_errors, read_checkpoint

        _, record = read_checkpoint(run_dir / "best", kind="agent")
        with checkpoint_errors(best):
            index, agent_class = int(record["member"]["index"]), AGENT_CLASSES[record["shared"]["kind"]]
            base = str(record["shared"].get("source"))
        if not (best / PEFT_FILES[0]).is_file():
            loading = f"{agent_class}.load({str(best)!r})"
            raise ValueError(f"{best} contains small networks, not an adapter. Load them with {loading}.")
        with checkpoint_errors(best / PEFT_FILES[0]):
            base_name = json.loads((best / PEFT_FILES[0]).read_text())["base_model_name_or_path"]
        checked = _check_with_peft(run_dir, best, base)
    make_folder(folder)
    for name in PEFT_FILES:
        write_synced(folder / name, (best / name).read_bytes())
    console.print(Text(f"wrote member #{index} to {folder}, an adapter of {base}; {checked}"), soft_wrap=True)
    loading = f"peft.PeftModel.from_pretrained(base_model, {str(folder)!r})"
    if base_name:
        loading = f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"
    console.print(Text.assemble(("load it with ", "dim"), (loading, "cyan")), soft_wrap=True)


def _check_with_peft(run_dir: Path, best: Path, source: str) -> str:
    """Raise ValueError if PEFT cannot load the adapter onto its base model; describe the check in words."""
    from evogrpo.algorithms.base_checkpoint import is_path
    from evogrpo.models.language.adapter_files import check_export
    from evogrpo.models.language.loading import load_outline
    from evogrpo.training.configuration.sections import CONFIG_FILE
    from evogrpo.training.configuration.strict_yaml import read_yaml_file

    if (run_dir / CONFIG_FILE).is_file():
        source = str(read_yaml_file(run_dir / CONFIG_FILE).get("model") or source)  # reads the path only; runs no code
    elif is_path(source):  # a path from a checkpoint is not trusted
        return "not checked with PEFT: the base model is a local folder"
    try:
        outline = load_outline(source).model
    except ValueError:
        return f"not checked with PEFT: {source} cannot be loaded here"
    return f"PEFT loads all {check_export(best, outline)} tensors"


_EXPORTS: Mapping[str, Callable[[argparse.Namespace, Any], None]] = {
    "folder": _adapter,
    "schedule": _schedule,
    "optuna": _study,
}
"""Export functions by argument name."""
