"""Commands `report`, `tasks` and `video`."""

import argparse
import importlib
from pathlib import Path

from rich.columns import Columns
from rich.text import Text

from evogrpo.cli.main import OK
from evogrpo.text import extra_command, number_text, printable
from evogrpo.training.display.console import HangingIndent, make_console, working


def report(args: argparse.Namespace) -> int:
    """Write the figure and the HTML report of a run."""
    console = make_console()
    with working(console, "drawing"):
        from evogrpo.reporting.report import report as run_report

        page = run_report(args.run_dir).write()
    for path in (page.with_name("report.png"), page):
        console.print(str(path), soft_wrap=True)
    return OK


def tasks(args: argparse.Namespace) -> int:
    """List the available tasks."""
    from evogrpo.envs.control.classic import native_ids
    from evogrpo.envs.text.reasoning import is_installed
    from evogrpo.envs.text.tasks import TASKS
    from evogrpo.training.presets import preset_ids

    console = make_console()
    console.print(Text.assemble(("Built in", "bold"), "   task: {name: NAME}"))
    width = max(map(len, TASKS))
    for name, task in TASKS.items():
        console.print(HangingIndent(Text.assemble((f"  {name:{width}}", "cyan"), f"  {task.description}"), width + 4))
    console.print()
    console.print(Text.assemble(("reasoning-gym", "bold"), "   task: {reasoning_gym: NAME, options: {...}}"))
    if not is_installed():
        line = f"  100+ more tasks (the extra needs a C compiler): {extra_command('reasoning')}"
        console.print(Text(line), soft_wrap=True)
    else:
        names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
        console.print(Columns([Text(name, "cyan") for name in names], padding=(0, 2), equal=True))
    console.print()
    console.print(Text.assemble(("Gymnasium", "bold"), "   task: {env: ID}, or evogrpo train --env ID"))
    console.print(
        HangingIndent(Text(f"  {', '.join(native_ids())} are vectorised; other environments run as they are"))
    )
    console.print(HangingIndent(Text(f"  tuned hyperparameters with --preset: {', '.join(preset_ids())}")))
    console.print()
    games = "   task: {parallel_env: MODULE}, or evogrpo train --parallel-env MODULE"
    console.print(HangingIndent(Text.assemble(("PettingZoo", "bold"), games)))
    console.print(Text("  MODULE has parallel_env, e.g. mpe2.simple_spread_v3; or MODULE:FUNCTION"))
    console.print()
    dataset = "   task: {dataset: {train: FILE}, reward: FILE.py:FUNCTION, form: agilerl}"
    console.print(HangingIndent(Text.assemble(("Your own", "bold"), dataset)))
    return OK


def video(args: argparse.Namespace) -> int:
    """Record test episodes of a run's best member."""
    from evogrpo.training.configuration.reading import load_config
    from evogrpo.training.configuration.sections import CONFIG_FILE

    folder: Path = args.folder or args.run_dir / "videos"
    if args.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {args.episodes}.")
    if not (args.run_dir / CONFIG_FILE).is_file():
        raise ValueError(
            f"{args.run_dir} has no {CONFIG_FILE}: the run was started in Python. Use evogrpo.record_video() there."
        )
    if not (args.run_dir / "best").is_dir():
        raise ValueError(f"{args.run_dir} has no best member yet. Wait for the first generation.")
    console = make_console()
    with working(console, "recording"):
        from evogrpo.training.task_types import task_type_of

        config = load_config(args.run_dir / CONFIG_FILE)
        try:
            episodes = task_type_of(config.task).record(config, args.run_dir / "best", folder, args.episodes)
        except ImportError as error:
            raise ValueError(str(error)) from error
    for episode in episodes:
        per_agent = ", ".join(f"{agent} {number_text(value)}" for agent, value in episode.returns.items())
        result = f"return {number_text(episode.episode_return)}{f' ({per_agent})' if per_agent else ''}"
        console.print(
            Text.assemble(printable(str(episode.path)), (f"  {result}, {episode.length} steps", "dim")), soft_wrap=True
        )
    return OK
