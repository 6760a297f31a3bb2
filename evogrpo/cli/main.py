"""Command line: arguments, dispatch, error messages and exit codes.

torch is imported by commands only, for speed.
"""

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import evogrpo
from evogrpo.synonyms import advice, answer_elsewhere, close_match
from evogrpo.text import expand_user, printable, shorten, shown

OK = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
MAX_EXIT_CODE = 255
_EXIT_CODES = (
    "Exit codes: 0 success, 1 failure, 2 invalid arguments or settings, 130 Ctrl-C. A run stopped"
    " by signal N exits with 128 + N."
)
_LIBRARY_VARIABLES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that turn off progress bars and advice of libraries, which read them on
import.
"""
_EXAMPLE = "schedule.generations=8 hyperparameters.lr=1e-4; `evogrpo schema` prints all of them"
_OVERRIDES = f"settings, e.g. {_EXAMPLE}"
_WRONG_CHOICE = re.compile(
    r"argument COMMAND: invalid choice: '?(.*?)'? \(choose from (.*)\)$", re.DOTALL
)
# Commands that accept any setting.
_CONFIGURABLE = (
    "evogrpo.cli.train:train",
    "evogrpo.cli.train:demo",
)
_NAME = re.compile(r"[\w-]+")
_OPTION = re.compile(r"(?<!\w)--[\w-]+")

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: Without the program's name; `sys.argv[1:]` by default.
    """
    # 1. Parse the arguments.
    parser = make_parser()
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments and arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    args, rest = parser.parse_known_args(arguments)
    # argparse reads positional arguments in one block. Overrides after an option are left in
    # `rest`.
    if "overrides" not in args:
        unknown = rest
    else:
        unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        _reject(args, unknown[0])
    if rest:
        args.overrides = [*args.overrides, *rest]
    # 2. Prepare output and environment variables. The import is here so that `--help` stays fast.
    from evogrpo.training.console import ignore_output_errors

    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # replace characters that its encoding cannot represent
            stream.reconfigure(errors="replace")
    for name, value in _LIBRARY_VARIABLES.items():
        os.environ.setdefault(name, value)
    # 3. Run the command. Warn of a closed pipe, as after `| head`, only if it runs user code.
    with ignore_output_errors(quiet_pipe=not args.runs_user_code) as lost:
        code = _run(args)
        # Training succeeds without its output; other commands fail if their output is lost.
        if code == OK and lost() and not getattr(args, "training", False):
            return FAILED
        return code


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams.

    Otherwise files of a run would get their descriptors, and contain what is written to stderr.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _run(args: argparse.Namespace) -> int:
    """Run a command and return its exit code; errors become a message."""
    from evogrpo.training.console import clean_warnings, print_error

    module, name = args.command.split(":")
    try:
        if args.runs_user_code:
            # Last, so that modules of the user do not shadow installed ones.
            sys.path.append(str(Path.cwd()))
        if args.opens_run:
            check_folder(args.run_dir)
        with clean_warnings():
            return int(getattr(importlib.import_module(module), name)(args))
    except (ValueError, OSError, SystemExit) as error:
        if args.traceback:
            raise
        if isinstance(error, ValueError):
            print_error(str(error))
            # `cli.running` sets `args.training` when training starts. A later ValueError is not
            # a wrong setting.
            if getattr(args, "training", False):
                return FAILED
            return USAGE
        if isinstance(error, OSError):
            message = str(error.strerror or error)
            if error.filename:
                message += f": {error.filename}"
            elif error.errno == errno.ENOENT:  # only os.getcwd raises it without a file name
                message += ": the working directory was removed. Change into another one"
            print_error(message)
        else:  # SystemExit, which only user code raises
            print_error(f"User code ended the program: SystemExit({shown(error.code)}) was raised")
        return FAILED
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Argument parser with short error messages."""

    def error(self, message: str) -> NoReturn:
        """Exit with a short message; for an unknown command, with the most similar one."""
        match = _WRONG_CHOICE.match(message)
        if match is not None:
            names = _NAME.findall(match[2])
            hint = _did_you_mean(match[1], names)
            if not hint:
                hint = f"; choose from {', '.join(names)}"
            message = f"there is no command {shorten(match[1], 80)!r}{hint}"
        super().error(printable(shorten(message, 500)))


def _reject(args: argparse.Namespace, argument: str) -> NoReturn:
    """Exit with an error about an unknown argument, naming the closest valid option or setting."""
    # 1. A word that is no option, and a misspelt option.
    parser: argparse.ArgumentParser = args.parser
    if not argument.startswith("-"):
        parser.error(f"unexpected argument {argument!r}; see `{parser.prog} --help`")
    option, _, value = argument.partition("=")
    hint = _did_you_mean(option, _OPTION.findall(parser.format_help()))
    # 2. A setting that was written as an option, as `--lr=1e-4`.
    if not hint and args.command in _CONFIGURABLE:
        from evogrpo.training.configuration.reading import setting_called

        name = option.strip("-").replace("-", "_")
        if name in ("c", "config", "cfg", "config_file"):
            parser.error(
                f"there is no option {option}; give the YAML file itself, as in `{parser.prog}"
                " mine.yaml`"
            )
        setting: str | None = name
        if "." not in name:
            setting = setting_called(name)
        if setting is not None:
            example = value or "VALUE"
            hint = f"; write {setting}={example}"
        else:
            # Another library's setting without counterpart has an explanation.
            instead = answer_elsewhere(name, (), setting_called)
            if instead is None:
                instead = advice(name, setting_called, patterns=True)
            if instead is not None:
                hint = f": {instead}"
    if not hint:
        hint = f"; see `{parser.prog} --help`"
    parser.error(f"there is no option {option}{hint}")


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return a hint at the most similar name; empty if none is similar."""
    match = close_match(name, names)
    if match is None:
        return ""
    return f"; did you mean {match}?"


def check_folder(folder: Path) -> None:
    """Raise ValueError if a folder does not exist, with the folder of the most similar name."""
    if folder.is_dir():
        return
    folders: dict[str, Path] = {}
    for parent in (folder.parent, Path("runs")):
        if parent.is_dir():
            folders |= {path.name: path for path in parent.iterdir() if path.is_dir()}
    remedy = "Give a run directory."
    match = close_match(folder.name, folders)
    if match is not None:
        remedy = f"Did you mean {folders[match]}?"
    raise ValueError(f"{folder} is not a folder. {remedy}")


def _path(text: str) -> Path:
    """Return the path that an argument names; shells leave `~` as it is in `--run-dir=~/run`."""
    try:
        return expand_user(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="evogrpo",
        description="Train a population of GRPO agents and evolve their hyperparameters.",
        epilog=f"`evogrpo help COMMAND` describes a command. {_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"evogrpo {evogrpo.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_training_commands(commands)
    _add_other_running_commands(commands)
    _add_reading_commands(commands)
    _add_other_commands(commands)
    return parser


def _add_command(
    commands: Commands,
    name: str,
    command: str,
    summary: str,
    details: str = "",
    *,
    runs_user_code: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that runs the function `command`.

    It is given as MODULE:FUNCTION, and imported only when it runs.
    """
    sentence = f"{summary[0].upper()}{summary[1:]}."
    description = f"{sentence} {details}".strip()
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(
        command=command, parser=parser, opens_run=False, runs_user_code=runs_user_code
    )
    return parser


def _add_training_commands(commands: Commands) -> None:
    """Declare `demo` and `train`."""
    # 1. `demo`: the packaged configuration.
    demo = _add_command(
        commands,
        "demo",
        "evogrpo.cli.train:demo",
        "find out which prompt and rewards teach a small language model to add, in minutes",
        runs_user_code=True,
    )
    demo.add_argument(
        "--plain",
        action="store_true",
        help="for comparison: one agent with the prompt and rewards of the first member, and as"
        " many samples as all members together",
    )
    demo.add_argument(
        "--generations", type=int, metavar="N", help="number of generations (schedule.generations)"
    )
    _add_start_options(demo)
    _add_overrides(demo, _OVERRIDES)

    # 2. `train`: a configuration of the user, or an environment.
    train = _add_command(
        commands,
        "train",
        "evogrpo.cli.train:train",
        "train from a YAML configuration, or in an environment",
        "Paths in CONFIG are relative to its folder. Other paths and run_dir are relative to the"
        " working directory. Code named in CONFIG is executed.",
        runs_user_code=True,
    )
    # Either of the two replaces CONFIG.
    environment = train.add_mutually_exclusive_group()
    environment.add_argument(
        "--env",
        metavar="ID",
        help="train small networks in this environment, e.g. CartPole-v1; no CONFIG is needed",
    )
    environment.add_argument(
        "--parallel-env",
        metavar="MODULE",
        help=(
            "train several agents: a module with a parallel_env function (mpe2.simple_spread_v3),"
            " or MODULE:FUNCTION"
        ),
    )
    train.add_argument(
        "--preset",
        action="store_true",
        help=(
            "with --env: start from the tuned hyperparameters of this environment; `evogrpo tasks`"
            " lists them"
        ),
    )
    train.add_argument(
        "--wrapper",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help=(
            "with --env: apply this wrapper (CLASS alone: from gymnasium.wrappers). Repeat it for"
            " several, innermost first"
        ),
    )
    train.add_argument(
        "--generations", type=int, metavar="N", help="number of generations (schedule.generations)"
    )
    _add_start_options(train)
    # A separate positional CONFIG would take the first KEY=VALUE after --env, so the command splits
    # the words itself.
    _add_overrides(
        train,
        f"a YAML file, then settings that override it, e.g. {_EXAMPLE}",
        metavar="CONFIG KEY=VALUE",
    )


def _add_other_running_commands(commands: Commands) -> None:
    """Declare `resume`, `replay` and `vllm-command`."""
    # 1. `resume` changes limits only, so it has no options of a start.
    resume = _add_command(
        commands,
        "resume",
        "evogrpo.cli.train:resume",
        "resume a stopped run, or train a finished one further",
        "Continues from the newest complete checkpoint with the same results as an uninterrupted"
        " run. Code named in the run's config.yaml is executed: resume only runs that you trust.",
        runs_user_code=True,
    )
    _add_run_dir(resume)
    resume.add_argument(
        "--generations",
        type=int,
        metavar="N",
        help="total number of generations, including those already done",
    )
    _add_run_options(resume)
    resume.add_argument(
        "--allow-changed-data",
        action="store_true",
        help="resume even if questions, rewards or the environment have changed",
    )
    _add_overrides(
        resume,
        "generations, max_timesteps, max_tokens, max_seconds, target_fitness, test_questions,"
        " model, device or base_parts",
    )

    # 2. `replay` starts a new run.
    replay = _add_command(
        commands,
        "replay",
        "evogrpo.cli.train:replay",
        "train one new agent with the hyperparameter schedule that a run has found",
        "All other settings are taken from the run. Code named in its configuration is executed:"
        " replay only runs and schedules that you trust.",
        runs_user_code=True,
    )
    replay.add_argument(
        "source",
        type=_path,
        metavar="RUN|SCHEDULE",
        help="a run directory, or a file written by `evogrpo export --schedule`",
    )
    _add_start_options(replay)
    _add_overrides(replay, "such as seed=1")

    # 3. `vllm-command` reads a configuration and starts nothing.
    vllm = _add_command(
        commands,
        "vllm-command",
        "evogrpo.cli.running:print_vllm_commands",
        "print the commands that start the vLLM servers of a configuration",
        "One line for each address in `sampler`. Reward functions named in CONFIG are executed.",
        runs_user_code=True,
    )
    vllm.add_argument("config", type=_path, metavar="CONFIG", help="a YAML file")
    _add_overrides(vllm, "settings by dotted name, e.g. population.size=8")


def _add_start_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of commands that start a run."""
    parser.add_argument("--seed", type=int, metavar="N", help="random seed (key: seed)")
    parser.add_argument(
        "--run-dir",
        type=_path,
        metavar="DIR",
        help="run directory (default: a new folder below runs/)",
    )
    parser.add_argument(
        "--resume-if-exists",
        action="store_true",
        help=(
            "resume the run in --run-dir, if it exists, with the limits given here; for schedulers"
            " that restart jobs"
        ),
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="make all checks, and print the plan and its cost"
    )
    _add_run_options(parser)


def _add_overrides(parser: argparse.ArgumentParser, about: str, metavar: str = "KEY=VALUE") -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=about)


def _add_run_dir(parser: argparse.ArgumentParser, about: str = "run directory") -> None:
    parser.add_argument("run_dir", type=_path, metavar="RUN_DIR", help=about)
    parser.set_defaults(opens_run=True)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of all commands that train."""
    parser.add_argument(
        "--skip-memory-check",
        action="store_true",
        help="train even if the run is estimated not to fit in memory",
    )
    parser.add_argument(
        "--exit-code-on-stop",
        type=_exit_code,
        metavar="N",
        help="exit code after SIGTERM, SIGHUP or SIGUSR1 (default: 128 + signal number)",
    )


def _exit_code(text: str) -> int:
    """Return an exit code that was given as text."""
    if not re.fullmatch(r"\d{1,3}", text) or int(text) > MAX_EXIT_CODE:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to {MAX_EXIT_CODE}, got {shown(text, 40)}."
        )
    return int(text)


def _add_reading_commands(commands: Commands) -> None:
    """Declare the commands that print what runs have recorded; the runs may still be active."""
    lineage = _add_command(
        commands,
        "lineage",
        "evogrpo.cli.records:lineage",
        "show the family tree of a run's members and the hyperparameters that changed",
        "A star marks the best member and its ancestors.",
    )
    _add_run_dir(lineage)
    best = _add_command(
        commands,
        "best",
        "evogrpo.cli.records:best",
        "show a run's best member: fitness, hyperparameters and test result",
    )
    _add_run_dir(best)
    compare = _add_command(
        commands,
        "compare",
        "evogrpo.cli.records:compare",
        "compare runs: settings that differ, costs and test results",
        "Each run is compared with the first, question by question where the test questions are the"
        " same.",
    )
    compare.add_argument(
        "run_dirs", type=_path, nargs="+", metavar="RUN_DIR", help="at least two run directories"
    )


def _add_other_commands(commands: Commands) -> None:
    """Declare `video`, `report`, `tasks`, `schema`, `doctor` and `export`."""
    # 1. Pictures of a run.
    video = _add_command(
        commands,
        "video",
        "evogrpo.cli.records:video",
        "record episodes of a run's best member as MP4 files",
        "For Gymnasium and PettingZoo environments that can be rendered; needs the extra `video`."
        " Code named in the run's config.yaml is executed: use it only for runs that you trust.",
        runs_user_code=True,
    )
    _add_run_dir(video)
    video.add_argument(
        "--episodes", type=int, default=1, metavar="N", help="number of test episodes (default 1)"
    )
    video.add_argument("--folder", type=_path, help="output folder (default: RUN_DIR/videos)")
    report = _add_command(
        commands,
        "report",
        "evogrpo.cli.records:report",
        "write report.png and report.html of a run",
    )
    _add_run_dir(report, "run directory; the run may still be active")
    # 2. What is installed, and what a configuration may contain.
    _add_command(
        commands,
        "tasks",
        "evogrpo.cli.doctor:tasks",
        "list the tasks that come with evogrpo and its extras",
    )
    _add_command(
        commands, "schema", "evogrpo.cli.doctor:schema", "print the JSON schema of configurations"
    )
    _add_command(
        commands,
        "doctor",
        "evogrpo.cli.doctor:doctor",
        "check this machine and suggest a fix for each problem",
    )
    # 3. Results for other programs.
    export = _add_command(
        commands,
        "export",
        "evogrpo.cli.records:export",
        "export a run's best member, or its hyperparameter schedule",
        "Existing files are not overwritten.",
    )
    _add_run_dir(export)
    export.add_argument(
        "folder",
        type=_path,
        nargs="?",
        metavar="FOLDER",
        help="write the best member for PEFT or transformers to this new folder",
    )
    export.add_argument(
        "--schedule",
        type=_path,
        metavar="FILE",
        help=(
            "write the hyperparameter schedule of the best member's lineage to this new YAML file,"
            " for `evogrpo replay`"
        ),
    )
