"""The arguments of every command, and what becomes of errors: one clean line and an exit code."""

import argparse
import difflib
import importlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import evogrpo
from evogrpo.text import printable, shorten

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
MOST_STATUS = 255

_OVERRIDES = "key=value with dots between nested keys, e.g. schedule.generations=8 hyperparameters.lr=1e-4"
_EXIT_CODES = (
    "exit codes: 0 done, or a run was stopped by SIGTERM, SIGHUP or SIGUSR1 and saved (--stopped-status is another "
    "one); 1 the run or the command failed; 2 the request was refused; 130 stopped by Ctrl-C; 128 + N ended at once by "
    "signal N, e.g. 143 by SIGTERM"
)


_WRONG_CHOICE = re.compile(r"argument COMMAND: invalid choice: '?(.*?)'? \(choose from (.*)\)$", re.DOTALL)
_NAME, _OPTION = re.compile(r"[\w-]+"), re.compile(r"(?<!\w)--[\w-]+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        arguments: Without the program's name; those of the process by default.
    """
    parser = make_parser()
    chosen, rest = parser.parse_known_args(arguments)
    # argparse takes positional arguments in one go; overrides may also follow options.
    unknown = rest if "overrides" not in chosen else [text for text in rest if text.startswith("-")]
    if unknown:
        _refuse(chosen, unknown[0])
    if rest:
        chosen.overrides = [*chosen.overrides, *rest]
    _sleep_when_waiting()
    # Only now: help needs none of it.
    from evogrpo.training.display.console import enduring_output, quieten_libraries, tolerate_old_encodings

    tolerate_old_encodings()
    quieten_libraries()
    if chosen.own_code:
        sys.path.append(str(Path.cwd()))  # behind everything else: for environments in modules of the user's
    module, name = chosen.command.split(":")
    with enduring_output():
        return _carry_out(chosen, module, name)


def _sleep_when_waiting() -> None:
    """Let OpenMP's threads sleep soon when they wait for each other, unless the user has said how they shall.

    By default they spin for so long that beside other processes they take the cores from whom they wait for
    (`benchmarking/busy_machine.py`). This is read once, when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _carry_out(chosen: argparse.Namespace, module: str, name: str) -> int:
    from evogrpo.exits import ExitCalled, exits_answered
    from evogrpo.training.display.console import clean_warnings, say_error

    try:
        if chosen.opens:
            check_folder(chosen.run_dir)
        with clean_warnings(), exits_answered():
            return int(getattr(importlib.import_module(module), name)(chosen))
    except ValueError as error:
        if chosen.traceback:
            raise
        say_error(str(error))
        return USAGE
    except OSError as error:
        if chosen.traceback:
            raise
        say_error(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        return FAILED
    except SystemExit as error:  # nothing of ours raises it here
        if chosen.traceback:
            raise
        said = str(error) if isinstance(error, ExitCalled) else f"SystemExit({error.code!r:.80}) was raised"
        say_error(f"code of yours asked for the program's end: {said}")
        return FAILED
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Answers with what was typed in view, short, and on a terminal within its width."""

    def error(self, message: str) -> NoReturn:
        if typed := _WRONG_CHOICE.match(message):
            names = _NAME.findall(typed[2])
            near = _meant(typed[1], names) or f"; there are {', '.join(names)}"
            message = f"there is no command {shorten(typed[1], 80)!r}{near}"
        message = printable(shorten(message, 500))
        if sys.stderr.isatty():
            message = textwrap.fill(message, shutil.get_terminal_size().columns - len(f"{self.prog}: error: "))
        super().error(message)


def _refuse(chosen: argparse.Namespace, typed: str) -> NoReturn:
    """Refuse an argument that a command does not take, with the option that is meant perhaps."""
    parser: argparse.ArgumentParser = chosen.parser
    if not typed.startswith("-"):
        parser.error(f"one argument too many: {typed!r}")
    option, _, value = typed.partition("=")
    near = _meant(option, _OPTION.findall(parser.format_help()))
    if not near and "overrides" in chosen:
        near = f"; settings are written without dashes, such as {option.strip('-') or 'seed'}={value or 'VALUE'}"
    parser.error(f"there is no option {option}{near or f'; `{parser.prog} --help` lists them'}")


def _meant(typed: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def make_parser() -> argparse.ArgumentParser:
    """Declare every command; nothing heavy is imported before one is chosen."""
    parser: argparse.ArgumentParser = _Parser(
        prog="evogrpo",
        description="Evolve a population of GRPO agents that share one base model.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"evogrpo {evogrpo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_runs(commands)
    _add_further_runs(commands)
    _add_others(commands)
    return parser


def _add_runs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the commands that begin a run."""
    demo = _command(
        commands, "demo", "evogrpo.cli.train:demo", "evolve four agents on a small language model, in minutes"
    )
    demo.add_argument("--seed", type=int, help="root of every random stream (default 0)")
    demo.add_argument(
        "--fixed", action="store_true", help="the control: all members keep the poor start, nothing evolves, same cost"
    )
    _starting(demo)
    demo.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES)

    train = _command(
        commands,
        "train",
        "evogrpo.cli.train:train",
        "train from a YAML configuration, or on an environment",
        "Relative paths in CONFIG are relative to CONFIG, those in overrides and --run-dir to the working directory. "
        "Reward functions and environments named in CONFIG are your code, and are run.",
    )
    train.usage = (
        "evogrpo train [-h] [--run-dir DIR] [--go-on] [--dry-run] [--allow-memory]\n"
        "                     [--stopped-status N] [--preset] [--wrapper MODULE:CLASS]\n"
        "                     [--traceback]\n"
        "                     (CONFIG | --env ID | --parallel-env MODULE) [KEY=VALUE ...]"
    )
    instead = train.add_mutually_exclusive_group()
    instead.add_argument(
        "--env", metavar="ID", help="instead of CONFIG: small networks learn this environment, e.g. CartPole-v1"
    )
    instead.add_argument(
        "--parallel-env",
        metavar="MODULE",
        help="likewise for several agents: a module with parallel_env, e.g. mpe2.simple_spread_v3, or MODULE:FUNCTION",
    )
    train.add_argument(
        "--preset",
        action="store_true",
        help="with --env: begin with hyperparameters tuned there; `evogrpo tasks` lists where",
    )
    train.add_argument(
        "--wrapper",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="with --env: put this gymnasium.Wrapper around it, those of gymnasium.wrappers named by the class alone; "
        "give it again for another one around that",
    )
    _starting(train)
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="CONFIG KEY=VALUE", help=f"a YAML file; {_OVERRIDES}"
    )


def _add_further_runs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the commands that train on from what a run has left."""
    resume = _command(
        commands,
        "resume",
        "evogrpo.cli.train:resume",
        "go on with a stopped run, or train a finished one further",
        "Goes on from the newest complete checkpoint, exactly as if it had never stopped. The reward functions and "
        "the strategy named in the run's config.yaml are run: resume only runs whose config.yaml you trust.",
    )
    _existing_run(resume)
    resume.set_defaults(own_code=True)
    resume.add_argument("--generations", type=int, metavar="N", help="generations in all, those already done included")
    _running(resume)
    resume.add_argument(
        "--allow-changed-data",
        action="store_true",
        help="go on although questions, rewards or environment have changed since the run began",
    )
    resume.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="generations, max_timesteps, max_tokens, max_seconds, target_fitness, test_questions, model, device or "
        "base_parts",
    )

    replay = _command(
        commands,
        "replay",
        "evogrpo.cli.train:replay",
        "train one fresh agent under the hyperparameter schedule that a run has found",
        "A run of its own, with everything else as it was there. The code that the configuration names is run: replay "
        "only runs and schedules that you trust.",
    )
    replay.add_argument(
        "source", type=Path, metavar="RUN|SCHEDULE", help="a run's folder, or what `evogrpo export --schedule` wrote"
    )
    _starting(replay)
    replay.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="such as seed=1")


def _starting(parser: argparse.ArgumentParser) -> None:
    """Declare what a run that begins takes, whatever it is of."""
    parser.set_defaults(own_code=True)
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where records go (default: a new folder under runs/)"
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="where --run-dir holds a run already, resume it as it is: one command for a scheduler, however often it "
        "has to start",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained and at what cost")
    _running(parser)


def _existing_run(parser: argparse.ArgumentParser, about: str = "the folder of a run") -> None:
    """Declare the run that a command opens."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=about)
    parser.set_defaults(opens=True)


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not there, with one that is meant perhaps."""
    if folder.is_dir():
        return
    places = [place for place in (folder.parent, Path("runs")) if place.is_dir()]
    known = {path.name: path for place in places for path in place.iterdir() if path.is_dir()}
    near = difflib.get_close_matches(folder.name, known, n=1)
    meant = f": did you mean {known[near[0]]}?" if near else ": name the folder of a run"
    raise ValueError(f"{folder} is no folder{meant}")


def _running(parser: argparse.ArgumentParser) -> None:
    """Declare what every run takes, whether it begins or goes on."""
    parser.add_argument(
        "--allow-memory", action="store_true", help="go on although more memory is estimated to be needed than is there"
    )
    parser.add_argument(
        "--stopped-status",
        type=_status,
        default=OK,
        metavar="N",
        help="exit code of a run that SIGTERM, SIGHUP or SIGUSR1 has stopped, once it is saved (default 0): another "
        "one, such as 143, tells a scheduler that it is not done",
    )


def _status(text: str) -> int:
    """Read an exit code."""
    if not re.fullmatch(r"\d{1,3}", text) or int(text) > MOST_STATUS:
        raise argparse.ArgumentTypeError(
            f"an exit code is a whole number from 0 to {MOST_STATUS}, got {text!r:.40}: 143, say, is that of a program "
            "which SIGTERM has ended"
        )
    return int(text)


def _add_others(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the commands that only look or copy."""
    video = _command(
        commands,
        "video",
        "evogrpo.cli.inspect:video",
        "record episodes of a run's best member as MP4 files",
        "For runs in a Gymnasium or PettingZoo environment that can be drawn; needs the extra `video`; `evogrpo "
        "doctor` says how to install it. Code that the run's config.yaml names is run: only for runs whose config.yaml "
        "you trust.",
    )
    _existing_run(video)
    video.set_defaults(own_code=True)
    video.add_argument("--episodes", type=int, default=1, metavar="N", help="how many test starts to play (default 1)")
    video.add_argument("--folder", type=Path, help="where the files go (default: RUN_DIR/videos)")
    _add_readers(commands)
    report = _command(commands, "report", "evogrpo.cli.inspect:report", "draw report.png and report.html of a run")
    _existing_run(report, "the folder of a run; it may still be running")
    _command(commands, "tasks", "evogrpo.cli.inspect:tasks", "list the tasks that come with evogrpo and its extras")
    _command(commands, "doctor", "evogrpo.cli.doctor:doctor", "check this machine, with a remedy for each problem")
    export = _command(
        commands,
        "export",
        "evogrpo.cli.exporting:export",
        "write out of a run its best adapter, the schedule that led to its best member, or a study of Optuna",
        "Any of these; nothing is overwritten.",
    )
    _existing_run(export)
    export.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="a new or empty folder, for the best adapter as PEFT loads it",
    )
    export.add_argument(
        "--schedule",
        type=Path,
        metavar="FILE",
        help="a new YAML file, for what the best member's whole line of descent learnt with: see `evogrpo replay`",
    )
    export.add_argument(
        "--optuna",
        metavar="STORAGE",
        help="a storage of Optuna, sqlite:///FILE.db or the path of a journal file, for a study with a trial for every "
        "member; needs the extra `optuna`",
    )
    export.add_argument("--study", metavar="NAME", help="with --optuna: what the study is called (default: as the run)")


def _add_readers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the commands that tell in the terminal what runs have recorded; these may still be running."""
    lineage = _command(
        commands,
        "lineage",
        "evogrpo.cli.records:lineage",
        "show who descends from whom in a run, and which hyperparameters changed",
        "The winner's path is marked with a star.",
    )
    _existing_run(lineage)
    lineage.add_argument("--all", action="store_true", dest="every", help="a line for every member")
    best = _command(
        commands,
        "best",
        "evogrpo.cli.records:best",
        "show a run's best member: what it earned, what it learnt with, and what the test says",
    )
    _existing_run(best)
    compare = _command(
        commands,
        "compare",
        "evogrpo.cli.records:compare",
        "put runs side by side: settings that differ, costs, and whether the tests differ beyond noise",
        "Each run is compared with the first, question by question where their tests asked the same.",
    )
    compare.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the folders of at least two runs")
    for parser in (lineage, best, compare):
        parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object instead")


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: str,
    summary: str,
    details: str = "",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}".strip(), epilog=_EXIT_CODES
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.set_defaults(command=command, parser=parser, opens=False, own_code=False)
    return parser
