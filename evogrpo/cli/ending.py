"""End of a run: lineage of the best member, paths of the results, and next commands."""

import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from evogrpo.reporting.lineage import Ancestor, ancestors, best_member
from evogrpo.reporting.report import report
from evogrpo.reporting.results import terms_of
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.storage.journal import read_journal
from evogrpo.text import changes_text, number_text, origin_text, printable, relative_path, score_text
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types import TASK_TYPES

_OTHER_LIMITS = ("max_timesteps", "max_tokens", "max_seconds", "target_fitness")


def command(*words: str | Path) -> str:
    """Return an evogrpo command line, quoted for the shell."""
    # Without an activated virtual environment, the bare name is not on the path.
    program = "evogrpo" if shutil.which("evogrpo") else f"{sys.executable} -m evogrpo"
    return f"{program} {shlex.join(relative_path(word) if isinstance(word, Path) else word for word in words)}"


def show_lineage(console: Console, summary: RunSummary) -> None:
    """Print the best member's ancestors with the hyperparameters that changed at each birth."""
    best = best_member(summary.generations)
    if best is None:
        return
    console.print(Text(f"Lineage of member #{best.index}", "bold"))
    for ancestor in ancestors(summary, best):
        console.print(_ancestor_text(ancestor, summary))
    console.print()


def _ancestor_text(ancestor: Ancestor, summary: RunSummary) -> Text:
    """Describe an ancestor: its origin, its changes and its last fitness before the next birth."""
    if ancestor.parent is None:
        names = list(summary.evolvable) or ["lr", "clip_coef", "group_size"]
        values = ", ".join(f"{name} {number_text(getattr(ancestor.hyperparameters, name))}" for name in names)
        origin = f"founder with {values}"
    else:
        changes = changes_text(ancestor.changes)
        origin = origin_text(ancestor.parent) + (f" with {changes}" if changes else ", unchanged")
    result = ancestor.result
    score = f"{score_text(result.fitness, result.standard_error)} after generation {result.generation}"
    return Text.assemble((f"  #{ancestor.index}", "bold"), f" {printable(origin)}", (f"\n     {score}", "dim"))


def show_files(console: Console, run_dir: Path, kind: object) -> None:
    """Write the report; print the paths of the results and how to use them.

    Args:
        console: Output.
        run_dir: Run directory.
        kind: Kind of members, from the journal's run event.
    """
    rows: list[tuple[str, Path | str]] = [("run directory", run_dir)]
    best = run_dir / "best"
    if best.is_dir():
        rows.append((terms_of(kind).best, best))
    try:
        page = report(run_dir).write()
        rows += [("figure", run_dir / "report.png"), ("report page", page)]
    except (ValueError, OSError, ImportError) as error:  # a failed report must not fail the run
        rows.append(("report", f"not written: {error}"))
    for name, value in rows:
        console.print(Text.assemble((f"{name:<14} ", "dim"), printable(str(value))), soft_wrap=True)
    task_type = TASK_TYPES.get(str(kind))  # None for a kind that this version does not have
    if best.is_dir() and task_type is not None:
        for purpose, expression in task_type.uses(best).items():
            show_command(console, purpose, expression)
        for purpose, words in task_type.commands(run_dir).items():
            show_command(console, purpose, command(*words))


def show_command(console: Console, name: str, line: str) -> None:
    """Print a command and its purpose."""
    console.print(Text.assemble((f"{name:<14} ", "dim"), (printable(line), "cyan")), soft_wrap=True)


def show_ending(console: Console, run_dir: Path, generations: int, schedule: Schedule) -> None:
    """Print lineage, result paths and next commands of a finished run.

    Args:
        console: Output.
        run_dir: Run directory.
        generations: Generations done, for the command that trains further.
        schedule: Its limits, which that command removes.
    """
    run_dir = Path(relative_path(run_dir))
    summary = summarise(read_journal(run_dir / "journal.jsonl"))
    show_lineage(console, summary)
    show_files(console, run_dir, summary.facts.get("kind"))
    if generations:
        # The limit that ended the run would end it again, so the command removes all limits but the new one.
        no_limits = [f"{name}=null" for name in _OTHER_LIMITS if getattr(schedule, name) is not None]
        show_command(
            console, "train further", command("resume", run_dir, "--generations", str(2 * generations), *no_limits)
        )
    if (run_dir / "tensorboard").is_dir():
        line = f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))}"
        show_command(console, "curves", line)
