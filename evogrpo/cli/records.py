"""Commands on a recorded run: `lineage`, `best`, `compare`, `report`, `video` and `export`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from evogrpo.cli.main import OK, check_folder
from evogrpo.evolution.history import MemberRecord
from evogrpo.extras import install_hint
from evogrpo.reporting.compare import ComparedRun, TestDifference, compare_runs, interval
from evogrpo.reporting.lineage import (
    ancestors,
    best_member,
    best_schedule,
    birth_text,
    fitness_estimate,
    reports_by_member,
    selection_score,
    tree_lines,
)
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.report import report as run_report
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.safe_parsing import read_yaml_file
from evogrpo.text import count_text, duration_text, number_text, pluralize, printable, shorten
from evogrpo.training.configuration.sections import CONFIG_FILE
from evogrpo.training.console import command, make_console, print_rows, show_command, spinner

_MAX_VALUE_WIDTH = 60
"""Maximum width of a setting's value in a table, in characters."""


def lineage(args: argparse.Namespace) -> int:
    """Print the tree of a run's members."""
    console = make_console()
    summary = read_summary(args.run_dir)
    winner = best_member(summary.generations)
    reports = reports_by_member(summary.generations)
    path = {report.index for report in ancestors(summary, winner)}
    for indent, birth in tree_lines(summary.births, path):
        origin = birth_text(birth, summary.evolvable)
        lifetime = _lifetime(birth, reports.get(birth.index, ()), winner, summary)
        on_path = birth.index in path
        line = Text.assemble(
            ("│ " * indent, "dim"),
            ("★ ", "bold") if on_path else ("· ", "dim"),
            (f"#{birth.index}", "bold" if on_path else ""),
            f"  {printable(origin)}",
            (f"  {lifetime}", "dim"),
        )
        console.print(line, soft_wrap=not console.is_terminal)
    if winner is None:
        console.print("No member has been evaluated yet.")
    return OK


def best(args: argparse.Namespace) -> int:
    """Print a run's best member: fitness, test and hyperparameters."""
    console = make_console()
    summary = read_summary(args.run_dir)
    schedule = best_schedule(summary)
    member = schedule.member
    stages = schedule.stages
    stored = args.run_dir / "best"
    values = member.hyperparameters.to_json()
    shown = {name: number_text(value) for name, value in values.items() if value is not None}
    if schedule.calibrated is not None:
        first, last = schedule.calibrated
        shown["lr"] = f"{number_text(first)} to {number_text(last)} (calibrated, first and last)"
    # 1. Facts about the member. It may have further fitness measures, such as training rewards.
    fitness = fitness_estimate(member)
    untrained = summary.baseline and {summary.terms.untrained: summary.baseline}
    measure = summary.fitness_text
    others = [
        f"{name} {estimate}" for name, estimate in member.measured.items() if estimate != fitness
    ]
    rows = {
        "run": summary.title,
        "best member": f"#{member.index}, as it was after generation {member.generation}",
        "fitness": "; ".join([f"{_fitness_score(member)}, {measure}", *others]),
        **{name: str(baseline.fitness) for name, baseline in (untrained or {}).items()},
        "test": _test_text(summary),
        "stored in": (
            str(stored) if stored.is_dir() else f"missing. {_remedy_for_best(args.run_dir)}"
        ),
        "ended": summary.ending,
        "hyperparameters": ", ".join(f"{name} {text}" for name, text in shown.items()),
    }
    print_rows(console, rows)
    # 2. The stages of its lineage, with the hyperparameters that evolve or differ between stages.
    stage_values = [stage.hyperparameters.to_json() for stage in stages]
    changing = [
        name
        for name in values
        if name in summary.evolvable or len({own[name] for own in stage_values}) > 1
    ]
    table = _table("from step", "steps", "samples per step", *changing)
    first_step = 0
    for stage, own in zip(stages, stage_values, strict=True):
        numbers = (Text(number_text(own[name])) for name in changing)
        table.add_row(str(first_step), str(stage.steps), str(stage.samples_per_step), *numbers)
        first_step += stage.steps
    console.print(Text("\nHyperparameters of its lineage", "bold"))
    console.print(table)
    console.print()
    show_command(
        console, "export schedule", command("export", args.run_dir, "--schedule", "schedule.yaml")
    )
    show_command(console, "train again", command("replay", args.run_dir))
    return OK


def compare(args: argparse.Namespace) -> int:
    """Print several runs side by side."""
    folders: Sequence[Path] = args.run_dirs
    for folder in folders:
        check_folder(folder)
    configured = [folder / CONFIG_FILE for folder in folders]
    # 1. Compare the runs; those started in Python have no configuration.
    compared = compare_runs(
        folders, [read_yaml_file(path) if path.is_file() else None for path in configured]
    )
    # 2. Print one column per run: settings that differ, results, and the difference of the tests.
    console = make_console()
    table = _table("", *(str(run.path) for run in compared.runs))
    for name, values in compared.settings.items():
        table.add_row(
            Text(printable(name), "dim"), *(Text(_setting_text(value)) for value in values)
        )
    if not compared.settings:
        table.add_row(Text("settings", "dim"), *(Text("the same") for _ in compared.runs))
    table.add_section()
    columns = [_run_rows(run) for run in compared.runs]
    for name in columns[0]:
        table.add_row(Text(name, "dim"), *(Text(column[name]) for column in columns))
    differences = [Text("the first"), *map(_difference_text, compared.differences)]
    table.add_row(Text("test, difference to first run", "dim"), *differences)
    console.print(table)
    console.print(
        "± is one standard error; intervals are 95 %. Best fitness is the maximum over members and"
        " biased upwards. Compare runs by their tests.",
        style="dim",
    )
    return OK


def report(args: argparse.Namespace) -> int:
    """Write the figure and the HTML report of a run."""
    console = make_console()
    with spinner(console, "drawing"):
        page = run_report(args.run_dir).write()
    for line in (install_hint("report.png", "matplotlib") or page.with_name("report.png"), page):
        console.print(str(line), soft_wrap=True, markup=False)
    return OK


def video(args: argparse.Namespace) -> int:
    """Record test episodes of a run's best member."""
    from evogrpo.training.configuration.reading import load_config

    folder: Path = args.folder or args.run_dir / "videos"
    if args.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {args.episodes}.")
    if not (args.run_dir / CONFIG_FILE).is_file():
        raise ValueError(
            f"{args.run_dir} has no {CONFIG_FILE}, because the run was started in Python. Use"
            " evogrpo.record_video()."
        )
    if not (args.run_dir / "best").is_dir():
        raise _no_best(args.run_dir)
    console = make_console()
    with spinner(console, "recording"):
        from evogrpo.training.task_types import task_type_of

        config = load_config(args.run_dir / CONFIG_FILE)
        try:
            episodes = task_type_of(config.task).record_videos(
                config, args.run_dir / "best", folder, args.episodes
            )
        except ImportError as error:
            raise ValueError(str(error)) from error
    for episode in episodes:
        per_agent = ", ".join(
            f"{agent} {number_text(value)}" for agent, value in episode.returns.items()
        )
        result = (
            f"return {number_text(episode.episode_return)}{f' ({per_agent})' if per_agent else ''}"
        )
        console.print(
            Text.assemble(
                printable(str(episode.path)), (f"  {result}, {episode.length} steps", "dim")
            ),
            soft_wrap=True,
        )
    return OK


def _no_best(run_dir: Path) -> ValueError:
    """Return the error for a run directory without the folder `best`."""
    if read_summary(run_dir).generations:
        return ValueError(f"{run_dir / 'best'} is missing. {_remedy_for_best(run_dir)}")
    return ValueError(f"{run_dir} has no best member yet. Wait for the first generation.")


def _remedy_for_best(run_dir: Path) -> str:
    """Say how to get the best member of a run without the folder `best`."""
    if any((run_dir / "checkpoints").glob("generation-*")):
        return "Its checkpoints have the best member: `evogrpo resume` writes the folder again."
    return (
        "So are its checkpoints. Restore one of the folders from a copy, or train again with"
        " `evogrpo replay`."
    )


# ---- texts of members


def _fitness_score(member: MemberReport) -> str:
    return str(fitness_estimate(member) or "–")


def _lifetime(
    birth: MemberRecord,
    reports: Sequence[MemberReport],
    winner: MemberReport | None,
    summary: RunSummary,
) -> str:
    """Describe a member's generations and last fitness.

    For the winner of the run, that with which it won.
    """
    if not reports:
        return "not evaluated"
    if winner is not None and winner.index == birth.index:
        return (
            f"{selection_score(winner, summary)} in generation {winner.generation}, the best member"
        )
    first = reports[0].generation
    last = reports[-1].generation
    if first == last:
        span = f"generation {first}"
    else:
        span = f"generations {first}–{last}"
    if failed := reports[-1].failed:
        return f"failed in {span}: {printable(failed)}"
    return f"{selection_score(reports[-1], summary)} after {span}"


def _test_text(summary: RunSummary) -> str:
    """Describe the test of the best member with its 95 % interval."""
    test = summary.test
    if test is None:
        return "none yet"
    low, high = interval(test.after)
    text = f"{test.after} [{number_text(low)}, {number_text(high)}]"
    if test.beyond_noise:
        noise = "beyond noise"
    else:
        noise = "within noise"
    questions = pluralize(test.questions, summary.terms.questions[:-1])
    return (
        f"{text} on {questions}; {test.gain} compared with the {summary.terms.untrained}, {noise}"
    )


# ---- the table of `compare`


def _run_rows(run: ComparedRun) -> dict[str, str]:
    """Return the values of one column of the comparison, by row."""
    summary = run.summary
    member = run.best
    test = run.summary.test
    if summary.generations:
        last = summary.generations[-1]
    else:
        last = None
    if last is None:
        done = {}
    else:
        done = {**vars(last), "evaluation": last.evaluation.tokens}
    low, high = (None, None) if test is None else interval(test.after)
    if member is None:
        best_text = "–"
    else:
        best_text = f"#{member.index} {_fitness_score(member)}"
    return {
        "generations": count_text(done.get("generation")),
        "learning steps": count_text(done.get("step")),
        "environment steps": count_text(done.get("timesteps")),
        "processed": f"{count_text(done.get('tokens'))} {summary.terms.tokens}",
        "evaluations": count_text(done.get("evaluation")),
        "time": duration_text(done.get("seconds")),
        "ended": printable(summary.ending),
        "best fitness": best_text,
        "test": "–" if test is None else str(test.after),
        "  interval": "–" if low is None else f"[{number_text(low)}, {number_text(high)}]",
        "  questions": "–" if test is None else count_text(test.questions),
    }


def _difference_text(difference: TestDifference) -> Text:
    """Describe the difference between the tests of a run and of the first run."""
    if difference.gain is None:
        return Text(f"not comparable: {printable(difference.why)}", "yellow")
    if difference.beyond_noise:
        noise = "beyond noise"
    else:
        noise = "within noise"
    gain = difference.gain
    if difference.paired:
        method = f"paired on {difference.questions}"
    else:
        method = f"unpaired, {printable(difference.why)}"
    return Text(f"{'+' if gain.mean > 0 else ''}{gain}, {noise} ({method})")


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    is_number = isinstance(value, int | float | None) and not isinstance(value, bool)
    return shorten(printable(number_text(value) if is_number else str(value)), _MAX_VALUE_WIDTH)


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(Text(printable(head)), overflow="fold")
    return table


# ---- exports


def export(args: argparse.Namespace) -> int:
    """Write the best member or its hyperparameter schedule."""
    if args.folder is None and args.schedule is None:
        raise ValueError("Nothing to export. Give FOLDER for the best member, or --schedule FILE.")
    if args.folder is not None:
        _export_member(args.run_dir, args.folder)
    if args.schedule is not None:
        _export_schedule(args.run_dir, args.schedule)
    return OK


def _export_schedule(run_dir: Path, file: Path) -> None:
    """Write the hyperparameter schedule of the best member's lineage to a file."""
    from evogrpo.training.replay import HyperparameterSchedule

    console = make_console()
    schedule = HyperparameterSchedule.read(run_dir)
    schedule.write(file)
    stages = len(schedule.stages)
    steps = sum(stage.steps for stage in schedule.stages)
    words = f"wrote {file}: {pluralize(stages, 'stage')} over {pluralize(steps, 'learning step')}"
    console.print(Text(printable(words)), soft_wrap=True)
    show_command(console, "replay it", command("replay", file))


def _export_member(run_dir: Path, folder: Path) -> None:
    """Check the best member, and copy the files that PEFT or transformers needs to a new folder."""
    from evogrpo.storage.checkpoint import checkpoint_path

    # 1. Check both folders.
    best = checkpoint_path(run_dir / "best")
    if not best.is_dir():
        raise _no_best(run_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder. Choose a new folder.")
    # 2. Read and check the member.
    console = make_console()
    with spinner(console, "reading and checking the member"):
        # These imports include torch, which takes seconds.
        from evogrpo.algorithms.factory import AGENT_CLASSES
        from evogrpo.storage.atomic_files import make_folder, write_synced
        from evogrpo.storage.checkpoint import checkpoint_errors, read_checkpoint

        _, record = read_checkpoint(run_dir / "best", kind="agent")
        with checkpoint_errors(best):
            index = int(record["member"]["index"])
            agent_class = AGENT_CLASSES[record["shared"]["kind"]]
            kind = record["shared"]["kind"]
            base = str(record["shared"].get("source"))
        if kind != "language":
            loading = f"{agent_class}.load({str(best)!r})"
            raise ValueError(
                f"{best} contains small networks, not a language model. Load them with {loading}."
            )
        from evogrpo.members.language.full_finetuning import find_export

        with checkpoint_errors(best):
            exported = find_export(best)
        checked = _check_export(run_dir, best, base)
    # 3. Copy its files.
    make_folder(folder)
    for name in exported.files:
        write_synced(folder / name, (best / name).read_bytes())
    console.print(
        Text(f"wrote member #{index} to {folder}, {exported.what} {base}; {checked}"),
        soft_wrap=True,
    )
    loading = exported.loader.format(repr(str(folder)))
    console.print(Text.assemble(("load it with ", "dim"), (loading, "cyan")), soft_wrap=True)


def _check_export(run_dir: Path, member: Path, source: str) -> str:
    """Check that PEFT or transformers can load an exported member into the architecture of its base model.

    Args:
        run_dir: Run directory.
        member: Checkpoint folder of the member.
        source: Name of the base model in the checkpoint, which is not trusted.

    Returns:
        Result of the check, as text.

    Raises:
        ValueError: If the member cannot be loaded.
    """
    from evogrpo.members.language.full_finetuning import check_member
    from evogrpo.members.language.loading import load_outline
    from evogrpo.storage.checkpoint import is_path

    if (run_dir / CONFIG_FILE).is_file():
        source = str(read_yaml_file(run_dir / CONFIG_FILE).get("model") or source)
    elif is_path(source):  # an untrusted path is not opened
        return "not checked: the base model is a local folder"
    try:
        outline = load_outline(source).model  # without weights
    except ValueError:
        return f"not checked: {source} cannot be loaded here"
    return check_member(member, outline)
