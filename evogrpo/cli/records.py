"""Commands on a recorded run: `lineage`, `best`, `compare`, `report`, `video` and `export`."""

import argparse
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from evogrpo.cli.main import OK, check_folder
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.config.task_settings import TaskSettings
from evogrpo.envs.text.templates import fill_template, system_message
from evogrpo.evolution.history import MemberRecord
from evogrpo.extras import install_hint
from evogrpo.reporting.compare import ComparedRun, TestDifference, compare_runs, interval
from evogrpo.reporting.lineage import (
    BestSchedule,
    ancestors,
    best_schedule,
    birth_text,
    selection_score,
)
from evogrpo.reporting.records import Estimate
from evogrpo.reporting.report import report as run_report
from evogrpo.reporting.setting_effects import FINDINGS_TITLE, findings
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.safe_parsing import load_json, read_regular, read_yaml_file
from evogrpo.text import (
    count_text,
    duration_text,
    number_text,
    one_line,
    pluralize,
    printable,
    value_text,
)
from evogrpo.training.configuration.reading import read_stored
from evogrpo.training.configuration.sections import CONFIG_FILE, check_run_id
from evogrpo.training.console import command, make_console, print_rows, show_command, spinner

_MAX_VALUE_WIDTH = 60
"""Maximum width of a setting's value in a table, in characters."""
_MAX_TEXT = 400
"""Maximum number of characters of a text of the best member."""


def lineage(args: argparse.Namespace) -> int:
    """Print the tree of a run's members."""
    console = make_console()
    summary = read_summary(args.run_dir)
    path = {report.index for report in ancestors(summary, summary.best)}
    # A star and bold letters mark the best member and its ancestors.
    for indent, birth in tree_lines(summary.births, path):
        member = Text.assemble(("· ", "dim"), f"#{birth.index}")
        if birth.index in path:
            member = Text(f"★ #{birth.index}", "bold")
        line = Text.assemble(
            ("│ " * indent, "dim"),
            member,
            f"  {printable(birth_text(birth, summary))}",
            (f"  {_lifetime(birth, summary)}", "dim"),
        )
        console.print(line, soft_wrap=not console.is_terminal)
    if summary.best is None:
        console.print("No member has been evaluated yet.")
    print_rows(console, summary.labels.rows)
    return OK


def best(args: argparse.Namespace) -> int:
    """Print a run's best member: fitness, test and hyperparameters."""
    console = make_console()
    summary = read_summary(args.run_dir)
    schedule = best_schedule(summary)
    member = schedule.member
    # 1. Facts about the member. It may have further fitness measures, such as training rewards.
    fitness = [f"{member.estimate or '–'}, {summary.fitness_text}"]
    for name, estimate in member.measured.items():
        if estimate != member.estimate:
            fitness.append(f"{name} {estimate}")
    rows = {
        "run": summary.title,
        "best member": f"#{member.index}, as it was after generation {member.generation}",
        "fitness": "; ".join(fitness),
    }
    if summary.start is not None:
        rows[summary.terms.untrained] = str(summary.start)
    rows["test"] = _test_text(summary)
    rows["stored in"] = str(args.run_dir / "best")
    problem = _problem_of_best(args.run_dir, summary)
    if problem is not None:
        rows["stored in"] = problem
    rows["ended"] = summary.ending
    # 2. Its hyperparameters, and how they changed in its lineage.
    rows["hyperparameters"] = _hyperparameters_text(schedule)
    for name, setting in member.hyperparameters.task_settings.items():
        rows[short_name(name)] = one_line(number_text(setting), _MAX_TEXT)
    print_rows(console, rows)
    console.print(Text("\nHyperparameters of its lineage", "bold"))
    console.print(_stages_table(schedule, summary, console.width))
    print_rows(console, summary.labels.rows)
    # 3. Which values of task settings helped, and what may be wrong.
    effects = findings(summary)
    if effects:
        console.print(Text(f"\n{FINDINGS_TITLE}", "bold"))
        print_rows(console, effects)
    if summary.warnings:
        console.print(Text("\nWarnings during the run", "bold"))
        for warning in summary.warnings:
            console.print(Text(one_line(warning)))
    console.print()
    # 4. Commands that use these hyperparameters.
    export = command("export", args.run_dir, "--schedule", "schedule.yaml")
    show_command(console, "export schedule", export)
    show_command(console, "train again", command("replay", args.run_dir))
    return OK


def _hyperparameters_text(schedule: BestSchedule) -> str:
    """Return the hyperparameters of the best member as one text."""
    texts = []
    for name in HYPERPARAMETER_NAMES:
        value = schedule.member.hyperparameters[name]
        # A calibrated rate changes within a generation; `lr` is only the first guess.
        if name == "lr" and schedule.calibrated is not None:
            first, last = map(number_text, schedule.calibrated)
            text = f"lr {first} to {last} (calibrated, first and last)"
            kl = schedule.member.metrics.get("step_kl")
            if kl is not None:
                text += f" with a KL of {number_text(kl)} per step"
            texts.append(text)
        elif value is not None:
            texts.append(f"{name} {number_text(value)}")
    return ", ".join(texts)


def _stages_table(schedule: BestSchedule, summary: RunSummary, width: int) -> Table:
    """Return the stages of a lineage with hyperparameters that evolve or differ between them."""
    # 1. Choose the columns. A member need not have the task settings of another one.
    values = [stage.hyperparameters for stage in schedule.stages]
    shown = []
    for name in dict.fromkeys([*HYPERPARAMETER_NAMES, *summary.task_settings]):
        differs = len({stage.get(name) for stage in values}) > 1
        if differs or name in summary.evolvable:
            shown.append(name)
    # 2. A column per quantity, a row per stage.
    columns: list[list[str | Text]] = [["from step"], ["steps"], ["samples per step"]]
    first_step = 0
    for stage in schedule.stages:
        counts = [first_step, stage.steps, stage.samples_per_step]
        for column, count in zip(columns, counts, strict=True):
            column.append(str(count))
        first_step += stage.steps
    for name in shown:
        texts = [summary.labels.name(name)]
        texts += [summary.labels.text(name, stage.get(name)) for stage in values]
        columns.append([printable(text) for text in texts])
    # 3. Leave out the last columns that do not fit.
    count = len(columns)
    while count > 1 and _fitted_table(columns[:count], width) is None:
        count -= 1
    kept = columns[:count]
    table = _fitted_table(kept, width) or _table(kept, [None] * count)
    if count < len(columns):
        left_out = ", ".join(str(column[0]) for column in columns[count:])
        table.caption = Text(f"not shown: {left_out}", "dim")
        table.caption_justify = "left"
    return table


def compare(args: argparse.Namespace) -> int:
    """Print several runs side by side."""
    # 1. Compare the runs; those started in Python have no configuration.
    folders: Sequence[Path] = args.run_dirs
    configurations = []
    for folder in folders:
        check_folder(folder)
        configuration = None
        if (folder / CONFIG_FILE).is_file():
            configuration = read_yaml_file(folder / CONFIG_FILE)
        configurations.append(configuration)
    compared = compare_runs(folders, configurations)
    for run, configuration in zip(compared.runs, configurations, strict=True):
        if configuration is not None:
            run_id = run.summary.facts.get("run_id")
            check_run_id(run.path / CONFIG_FILE, configuration.get("run_id"), run_id)
    # 2. One column per run: settings that differ, results, and the difference of the tests.
    count = len(folders)
    columns: list[list[str | Text]] = [[""]]
    columns += [[printable(str(run.path))] for run in compared.runs]

    def add_row(name: str, values: Iterable[str | Text]) -> None:
        cells = (Text(printable(name), "dim"), *values)
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)

    section = ""
    for name, values in compared.settings.items():
        new_section, _, key = name.rpartition(".")
        if new_section not in ("", section):
            add_row(new_section, [""] * count)
        section = new_section
        texts = [one_line(value_text(value), _MAX_VALUE_WIDTH) for value in values]
        if len(set(texts)) == 1:  # the values differ in further digits
            texts = [one_line(value, _MAX_VALUE_WIDTH) for value in values]
        add_row(f"  {key}" if section else key, texts)
    if not compared.settings:
        add_row("settings", ["the same"] * count)
    add_row("", [""] * count)
    results = [_run_rows(run) for run in compared.runs]
    for name in results[0]:
        add_row(name, [result[name] for result in results])
    differences = map(_difference_text, compared.differences)
    add_row("test, difference to first run", ["the first", *differences])
    # 3. Print as many runs beside each other as fit; a log has all of them in one table.
    console = make_console()
    if not console.is_terminal:
        console.width = max(console.width, 100 * len(columns))
    for table in _tables_side_by_side(columns, console.width):
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
    # Without matplotlib there is no figure: print how to install it instead.
    figure = install_hint("report.png", "matplotlib") or str(page.with_name("report.png"))
    for line in (figure, str(page)):
        console.print(line, soft_wrap=True, markup=False)
    return OK


def video(args: argparse.Namespace) -> int:
    """Record test episodes of a run's best member."""
    from evogrpo.training.configuration.reading import load_config

    # 1. Check the arguments and the run directory.
    folder: Path = args.folder or args.run_dir / "videos"
    if args.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {args.episodes}.")
    if not (args.run_dir / CONFIG_FILE).is_file():
        raise ValueError(
            f"{args.run_dir} has no {CONFIG_FILE}, because the run was started in Python. Use"
            " evogrpo.record_video()."
        )
    run_id = _check_best(args.run_dir)
    # 2. Record the episodes.
    console = make_console()
    with spinner(console, "recording"):
        from evogrpo.training.task_types import task_type_of

        config = load_config(args.run_dir / CONFIG_FILE)
        check_run_id(args.run_dir / CONFIG_FILE, config.run_id, run_id)
        task_type = task_type_of(config.task)
        best_dir = args.run_dir / "best"
        try:
            episodes = task_type.record_videos(config, best_dir, folder, args.episodes)
        except ImportError as error:
            raise ValueError(str(error)) from error
    # 3. Print one line per episode.
    for episode in episodes:
        returns = episode.returns.items()
        agents = [f"{agent} {number_text(value)}" for agent, value in returns]
        result = f"return {number_text(episode.episode_return)}"
        if agents:
            result += f" ({', '.join(agents)})"
        path = printable(str(episode.path))
        details = f"  {result}, {episode.length} steps"
        console.print(Text.assemble(path, (details, "dim")), soft_wrap=True)
    return OK


def _no_best(run_dir: Path) -> ValueError:
    """Return the error for a run directory without the folder `best`."""
    summary = read_summary(run_dir)
    if summary.generations:
        return ValueError(_problem_of_best(run_dir, summary))
    if summary.stopped is not None:
        return ValueError(
            f"{run_dir} has no best member: it ended before its first generation"
            f" ({one_line(summary.stopped)})."
        )
    return ValueError(f"{run_dir} has no best member yet. Wait for the first generation.")


def _check_best(run_dir: Path) -> object:
    """Return the run id of the folder `best`.

    Raises:
        ValueError: If it is not the best member of the run.
    """
    if not (run_dir / "best").is_dir():
        raise _no_best(run_dir)
    try:
        summary = read_summary(run_dir)
    except ValueError:  # a member can be used without its journal
        return _note_of_best(run_dir).get("run_id")
    problem = _problem_of_best(run_dir, summary)
    if problem is not None:
        raise ValueError(problem)
    return summary.facts.get("run_id")


def _note_of_best(run_dir: Path) -> Mapping[str, Any]:
    """Return generation and run id of the folder `best`; empty if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return dict(load_json(read_regular(run_dir / "best" / "agent.json"))["note"])
    return {}


def _problem_of_best(run_dir: Path, summary: RunSummary) -> str | None:
    """Say why the folder `best` is not the best member of a run, and what to do; None if it is."""
    best = run_dir / "best"
    member = summary.best
    if not best.is_dir():
        problem = "is missing"
    elif member is not None and _note_of_best(run_dir) != {
        "generation": member.generation,
        "run_id": summary.facts.get("run_id"),
    }:
        problem = "is damaged, or of another run or generation"
    else:
        return None
    if any((run_dir / "checkpoints").glob("generation-*")):
        remedy = "The checkpoints have the best member: `evogrpo resume` writes the folder again."
    else:
        remedy = "Restore it from a copy, or train again with `evogrpo replay`."
    return f"{best} {problem}. {remedy}"


# ---- texts of members


def _lifetime(birth: MemberRecord, summary: RunSummary) -> str:
    """Describe a member's generations and last fitness.

    For the best member of the run, the fitness that made it the best.
    """
    history = summary.histories.get(birth.index)
    if history is None:
        return "not evaluated"
    # 1. The winner.
    winner = summary.best
    if winner is not None and winner.index == birth.index:
        score = selection_score(winner, summary)
        return f"{score} in generation {winner.generation}, the best member"
    # 2. Other members.
    first = history.results[0].generation
    last = history.results[-1]
    span = f"generation {first}"
    if last.generation > first:
        span = f"generations {first}–{last.generation}"
    if last.failed:
        return f"failed in {span}: {printable(last.failed)}"
    return f"{selection_score(last, summary)} after {span}"


def _test_text(summary: RunSummary) -> str:
    """Describe the test of the best member with its 95 % interval."""
    test = summary.test
    if test is None:
        return "none yet"
    terms = summary.terms
    questions = pluralize(test.questions, terms.questions.removesuffix("s"))
    return (
        f"{test.after} {_interval_text(test.after)} on {questions}; {test.gain} compared with the"
        f" {terms.untrained}, {_noise_text(test.beyond_noise)}"
    )


def _interval_text(estimate: Estimate) -> str:
    low, high = interval(estimate)
    return f"[{number_text(low)}, {number_text(high)}]"


def _noise_text(beyond_noise: bool | None) -> str:
    if beyond_noise:
        return "beyond noise"
    return "within noise"


# ---- the table of `compare`


def _run_rows(run: ComparedRun) -> dict[str, str]:
    """Return the values of one column of the comparison, by row."""
    summary = run.summary
    rows = {
        "generations": "–",
        "learning steps": "–",
        "environment steps": "–",
        "processed": "–",
        "evaluations": "–",
        "time": "–",
        "ended": printable(summary.ending),
        "best fitness": "–",
        "test": "–",
        "  interval": "–",
        "  questions": "–",
    }
    if summary.generations:
        last = summary.generations[-1]
        rows |= {
            "generations": count_text(last.generation),
            "learning steps": count_text(last.step),
            "environment steps": count_text(last.timesteps),
            "processed": f"{count_text(last.tokens)} {summary.terms.tokens}",
            "evaluations": count_text(last.evaluation.tokens),
            "time": duration_text(last.seconds),
        }
    if summary.best is not None:
        rows["best fitness"] = f"#{summary.best.index} {summary.best.estimate or '–'}"
    if summary.test is not None:
        rows |= {
            "test": str(summary.test.after),
            "  interval": _interval_text(summary.test.after),
            "  questions": count_text(summary.test.questions),
        }
    return rows


def _difference_text(difference: TestDifference) -> Text:
    """Describe the difference between the tests of a run and of the first run."""
    if difference.gain is None:
        return Text(f"not comparable: {printable(difference.why)}", "yellow")
    method = f"unpaired, {printable(difference.why)}"
    if difference.paired:
        method = f"paired on {difference.questions}"
    noise = _noise_text(difference.beyond_noise)
    return Text(f"{difference.gain:+}, {noise} ({method})")


# ---- tables that fit into a terminal


# Spaces between columns.
_GAP = 2
# Words, the first one with its indentation.
_WORDS = re.compile(r"(?:^\s*)?\S+")


def _tables_side_by_side(columns: Sequence[Sequence[str | Text]], width: int) -> list[Table]:
    """Return tables with the first column and as many of the others as fit, without broken words.

    Args:
        columns: Cells of each column, its heading first.
        width: Columns of the terminal.
    """
    names, *runs = columns
    for count in range(len(runs), 0, -1):
        tables = []
        for start in range(0, len(runs), count):
            part = [names, *runs[start : start + count]]
            tables.append(_fitted_table(part, width))
        fitting = [table for table in tables if table is not None]
        if len(fitting) == len(tables):
            return fitting
    # A word is longer than the terminal is wide.
    return [_table(columns, [None] * len(columns))]


def _fitted_table(columns: Sequence[Sequence[str | Text]], width: int) -> Table | None:
    """Return a table that breaks lines between words only; None if it is too wide for that."""
    widths = []
    least = []
    for column in columns:
        texts = [str(cell) for cell in column]
        widths.append(max(map(cell_len, texts)))
        words = chain.from_iterable(map(_WORDS.findall, texts))
        least.append(max(map(cell_len, words), default=0))
    # Take from the widest column that is wider than its longest word.
    too_wide = sum(widths) + _GAP * len(columns) - width
    for _ in range(too_wide):
        wider = [number for number, current in enumerate(widths) if current > least[number]]
        if not wider:
            return None
        widest = max(wider, key=lambda number: widths[number])
        widths[widest] -= 1
    return _table(columns, widths)


def _table(columns: Sequence[Sequence[str | Text]], widths: Sequence[int | None]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
    heads = [column[0] for column in columns]
    cells = [column[1:] for column in columns]
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head, width=width, overflow="fold")
    for row in zip(*cells, strict=True):
        table.add_row(*row)
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
    stages = pluralize(len(schedule.stages), "stage")
    steps = pluralize(sum(stage.steps for stage in schedule.stages), "learning step")
    console.print(Text(f"wrote {file}: {stages} over {steps}"), soft_wrap=True)
    show_command(console, "replay it", command("replay", file))


def _export_member(run_dir: Path, folder: Path) -> None:
    """Check the best member, and copy the files that PEFT or transformers needs to a new folder."""
    # 1. Check both folders.
    best = run_dir / "best"
    run_id = _check_best(run_dir)
    configuration = read_stored(run_dir, run_id) or {}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder. Choose a new folder.")
    # 2. Read and check the member.
    console = make_console()
    with spinner(console, "reading and checking the member"):
        # These imports include torch, which takes seconds.
        from evogrpo.algorithms.checkpointing import TASK_SETTINGS
        from evogrpo.algorithms.factory import AGENT_CLASSES
        from evogrpo.storage.atomic_files import make_folder, write_synced
        from evogrpo.storage.checkpoint import checkpoint_errors, read_checkpoint

        _, record = read_checkpoint(best, kind="agent")
        with checkpoint_errors(best):
            index = int(record["member"]["index"])
            settings = TaskSettings(record["member"]["hyperparameters"].get("task_settings"))
            shared = record["shared"]
            kind = shared["kind"]
            agent_class = AGENT_CLASSES[kind]
            base = str(shared.get("source"))
        if kind != "language":
            loading = f"{agent_class}.load({str(best)!r})"
            raise ValueError(
                f"{best} contains small networks, not a language model. Load them with {loading}."
            )
        from evogrpo.members.language.full_finetuning import find_export

        with checkpoint_errors(best):
            exported = find_export(best)
        checked = _check_export(configuration.get("model"), best, base)
    # 3. Copy its files; after an error, such as a full disk, leave none of them.
    prompt = _system_prompt(configuration.get("task") or {}, settings)
    make_folder(folder)
    try:
        for name in (*exported.files, TASK_SETTINGS):
            if (best / name).is_file():
                write_synced(folder / name, (best / name).read_bytes())
        if prompt is not None:
            write_synced(folder / "system_prompt.txt", prompt.encode("utf-8"))
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        raise
    written = f"wrote member #{index} to {folder}, {exported.what} {base}"
    console.print(Text(f"{written}; {checked}"), soft_wrap=True)
    loading = exported.loader.format(repr(str(folder)))
    console.print(Text.assemble(("load it with ", "dim"), (loading, "cyan")), soft_wrap=True)
    if prompt is not None:
        line = f"its prompts begin with the system message of {folder / 'system_prompt.txt'}"
        console.print(Text(line), soft_wrap=True)


def _system_prompt(task: Mapping[str, Any], settings: TaskSettings) -> str | None:
    """Return the configured system prompt with the task settings of a member, if there is one."""
    prompt = task.get("system_prompt")
    if prompt is None:
        return None
    values = {**(task.get("settings") or {}), **settings.group("task")}
    (message,) = fill_template([system_message(prompt, values)], values)
    return str(message["content"])


def _check_export(model: str | None, member: Path, source: str) -> str:
    """Check that PEFT or transformers can load an exported member into its base model.

    Args:
        model: Base model in the configuration of the run; None without one.
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

    # The user's configuration is trusted, a name in a checkpoint is not.
    if model is not None:
        source = model
    elif is_path(source):  # an untrusted path is not opened
        return "not checked: the base model is a local folder"
    try:
        # Without weights.
        outline = load_outline(source).model
    except ValueError:
        return f"not checked: {source} cannot be loaded here"
    return check_member(member, outline)


def tree_lines(
    births: Sequence[MemberRecord], path: Collection[int]
) -> list[tuple[int, MemberRecord]]:
    """Return the lines of a printed lineage: the indentation and the member of each.

    One child of a member, its heir, continues its line without indentation; other children are
    indented below it. The heir is the child on the best member's path, or the child with most
    descendants. Indentation therefore grows with the logarithm of the number of members.

    Args:
        births: All births in order of index; a parent comes before its children.
        path: Indices of the best member's ancestors and itself.

    Raises:
        ValueError: If a child is older than its parent.
    """
    # 1. List the children of each member. If its parent is missing from the journal, a member is
    #    the first of a tree.
    children: dict[int | None, list[MemberRecord]] = {birth.index: [] for birth in births}
    children[None] = []
    for birth in births:
        if birth.parent is not None and birth.parent >= birth.index:
            raise ValueError(
                f"A parent must be older than its child, got #{birth.parent} of #{birth.index}."
            )
        known = birth.parent if birth.parent in children else None
        children[known].append(birth)
    # 2. Count the descendants of each member and itself, children before their parents.
    sizes: dict[int, int] = {}
    for birth in reversed(births):
        below = [sizes[child.index] for child in children[birth.index]]
        sizes[birth.index] = 1 + sum(below)
    # 3. Add the lines of each founder. The recursion is as deep as the indentation.
    lines: list[tuple[int, MemberRecord]] = []

    def add_lines(member: MemberRecord, indent: int) -> None:
        """Add the lines of a member, of its other children indented by one, and of its heirs."""
        while True:
            lines.append((indent, member))
            below = children[member.index]
            if not below:
                return
            heir = max(below, key=lambda child: (child.index in path, sizes[child.index]))
            for child in below:
                if child is not heir:
                    add_lines(child, indent + 1)
            member = heir

    for founder in children[None]:
        add_lines(founder, 0)
    return lines
