"""The commands that look and copy: report, export, video and tasks."""

import argparse
import importlib
import json
from pathlib import Path

from rich.columns import Columns
from rich.text import Text

from evogrpo.cli.arguments import OK
from evogrpo.history.text import number_text, printable
from evogrpo.installing import extra_command
from evogrpo.training.display.console import make_console, working

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")


def report(chosen: argparse.Namespace) -> int:
    """Draw the figure and the page of a run."""
    console = make_console()
    with working(console, "drawing"):
        from evogrpo.report.html import write_html

        page = write_html(chosen.run_dir)
    for path in (page.with_name("report.png"), page):
        console.print(str(path), soft_wrap=True, markup=False)
    return OK


def tasks(chosen: argparse.Namespace) -> int:
    """List the tasks."""
    from evogrpo.envs.control.classic import native_ids
    from evogrpo.envs.prompts.builtin import TASKS
    from evogrpo.envs.prompts.reasoning import is_installed
    from evogrpo.training.front.presets import preset_ids

    console = make_console()
    console.print(Text.assemble(("Built in", "bold"), "   task: {name: NAME}"))
    for name, task in TASKS.items():
        console.print(Text.assemble(("  " + name, "cyan"), f"  {task.description}"))
    console.print()
    console.print(Text.assemble(("reasoning-gym", "bold"), "   task: {reasoning_gym: NAME, options: {...}}"))
    if not is_installed():
        line = f"  100+ more tasks are one extra away (it needs a C compiler): {extra_command('reasoning')}"
        console.print(Text(line), soft_wrap=True)
    else:
        names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
        console.print(Columns([Text(name, "cyan") for name in names], padding=(0, 2), equal=True))
    console.print()
    console.print(Text.assemble(("Gymnasium", "bold"), "   task: {env: ID}, or evogrpo train --env ID"))
    console.print(Text(f"  {', '.join(native_ids())} vectorised natively; any other environment as it is"))
    console.print(Text(f"  with --preset, hyperparameters tuned for it: {', '.join(preset_ids())}"))
    console.print()
    console.print(
        Text.assemble(("PettingZoo", "bold"), "   task: {parallel_env: MODULE}, or evogrpo train --parallel-env MODULE")
    )
    console.print(Text("  a module with parallel_env, such as mpe2.simple_spread_v3, or MODULE:FUNCTION"))
    console.print()
    own = "   task: {dataset: {train: FILE}, reward: FILE.py:FUNCTION, form: agilerl}"
    console.print(Text.assemble(("Your own", "bold"), own))
    return OK


def video(chosen: argparse.Namespace) -> int:
    """Record the run's best member from the first starts of the test split."""
    from evogrpo.training.configuration.reading import CONFIG_FILE, load_config

    folder: Path = chosen.folder or chosen.run_dir / "videos"
    if chosen.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {chosen.episodes}")
    if not (chosen.run_dir / CONFIG_FILE).is_file():
        raise ValueError(
            f"{chosen.run_dir} holds no {CONFIG_FILE}: name the folder of a run of `evogrpo train`; one started "
            "by evolve() in Python is recorded with evogrpo.record_video()"
        )
    if not (chosen.run_dir / "best").is_dir():
        raise ValueError(f"{chosen.run_dir} has no best member yet: it appears after a run's first generation")
    console = make_console()
    with working(console, "recording"):
        from evogrpo.training.kinds.registry import kind_of

        config = load_config(chosen.run_dir / CONFIG_FILE)
        try:
            recorded = kind_of(config.task).film(config, chosen.run_dir / "best", folder, chosen.episodes)
        except ImportError as error:
            raise ValueError(str(error)) from error
    for each in recorded:
        own = ", ".join(f"{agent} {number_text(earned)}" for agent, earned in each.returns.items())
        facts = f"  return {number_text(each.episode_return)}{f' ({own})' if own else ''}, {each.length} steps"
        console.print(Text.assemble(printable(str(each.path)), (facts, "dim")), soft_wrap=True)
    return OK


def export(chosen: argparse.Namespace) -> int:
    """Copy the two files that PEFT needs, after checking that they are whole."""
    from evogrpo.persistence.placement import stored_at

    best = stored_at(chosen.run_dir / "best")
    folder: Path = chosen.folder
    if not best.is_dir():
        raise ValueError(f"{chosen.run_dir} has no best member yet: it appears after a run's first generation")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: name a new one, so that nothing is mixed up")
    console = make_console()
    with working(console, "reading and checking the adapter"):
        from evogrpo.agents.members.by_kind import MEMBERS
        from evogrpo.persistence.checkpoint import read_checkpoint
        from evogrpo.persistence.durable import make_folder, write_synced

        _, record = read_checkpoint(chosen.run_dir / "best", kind="agent")
        if not (best / PEFT_FILES[0]).is_file():
            loading = f"{MEMBERS[record['shared']['kind']].agent_class}.load({str(best)!r})"
            raise ValueError(f"{best} holds small networks, no adapter: load them with {loading}")
        checked = _checked(chosen.run_dir, best, str(record["shared"]["source"]))
    make_folder(folder)
    for name in PEFT_FILES:
        write_synced(folder / name, (best / name).read_bytes())
    member, base = record["member"], record["shared"]["source"]
    console.print(Text(f"member #{member['index']} is in {folder}, an adapter of {base}; {checked}"), soft_wrap=True)
    loading = f"peft.PeftModel.from_pretrained(base_model, {str(folder)!r})"
    if json.loads((best / PEFT_FILES[0]).read_text())["base_model_name_or_path"]:
        loading = f"peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"
    console.print(Text.assemble(("load it with ", "dim"), (loading, "cyan")), soft_wrap=True)
    return OK


def _checked(run_dir: Path, best: Path, source: str) -> str:
    """Let PEFT load an adapter's names and shapes onto the outline of its base model, and say what came of it.

    Raises:
        ValueError: If PEFT does not load it.
    """
    from evogrpo.agents.checkpoints.stored_base import is_path
    from evogrpo.policies.tokens.exports import check_export
    from evogrpo.policies.tokens.models import load_outline
    from evogrpo.training.configuration.reading import CONFIG_FILE, load_config

    if (run_dir / CONFIG_FILE).is_file():
        source = load_config(run_dir / CONFIG_FILE).model or source
    elif is_path(source):  # found in a checkpoint, so it is not followed
        return "not tried with PEFT, as its base model came from a folder"
    try:
        outline = load_outline(source).model
    except ValueError:
        return f"not tried with PEFT, as {source} cannot be loaded here"
    return f"PEFT loads all {check_export(best, outline)} tensors"
