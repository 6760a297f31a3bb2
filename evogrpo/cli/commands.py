"""Commands of the command line, their arguments and exit codes; nothing heavy is imported here."""

import argparse
import re
from pathlib import Path
from typing import TypeAlias

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
MAX_EXIT_CODE = 255

EXIT_CODES = (
    "Exit codes: 0 finished; 1 failed; 2 wrong arguments or settings; 130 stopped by Ctrl-C; 128 + N stopped or killed "
    "by signal N, e.g. 143 by SIGTERM (see --exit-code-on-stop)."
)


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_OVERRIDES = "key=value with dots between nested keys, e.g. schedule.generations=8 hyperparameters.lr=1e-4"


def add_commands(commands: Commands) -> None:
    """Declare all of them."""
    _add_runs(commands)
    _add_further_runs(commands)
    _add_others(commands)


def _add_runs(commands: Commands) -> None:
    """Declare the commands that start a run."""
    demo = _command(
        commands, "demo", "evogrpo.cli.train:demo", "evolve four agents on a small language model, in minutes"
    )
    demo.add_argument(
        "--fixed", action="store_true", help="the control: all members keep the poor start, nothing evolves, same cost"
    )
    demo.add_argument("--generations", type=int, metavar="N", help="number of generations (schedule.generations)")
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
        "evogrpo train [-h] [--seed N] [--generations N] [--run-dir DIR]\n"
        "                     [--resume-if-exists] [--dry-run] [--skip-memory-check]\n"
        "                     [--exit-code-on-stop N] [--preset] [--wrapper MODULE:CLASS]\n"
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
        help="instead of CONFIG, for several agents: a module with parallel_env, e.g. mpe2.simple_spread_v3, or "
        "MODULE:FUNCTION",
    )
    train.add_argument(
        "--preset",
        action="store_true",
        help="with --env: start with hyperparameters tuned there; `evogrpo tasks` lists where",
    )
    train.add_argument(
        "--wrapper",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="with --env: put this gymnasium.Wrapper around it, those of gymnasium.wrappers named by the class alone; "
        "give it again for another one around that",
    )
    train.add_argument("--generations", type=int, metavar="N", help="number of generations (schedule.generations)")
    _starting(train)
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="CONFIG KEY=VALUE", help=f"a YAML file; {_OVERRIDES}"
    )


def _add_further_runs(commands: Commands) -> None:
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
    resume.set_defaults(runs_user_code=True)
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
    parser.set_defaults(runs_user_code=True)
    parser.add_argument("--seed", type=int, metavar="N", help="seed of every random stream, the same as seed=N")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where records go (default: a new folder under runs/)"
    )
    parser.add_argument(
        "--resume-if-exists",
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


def _running(parser: argparse.ArgumentParser) -> None:
    """Declare what every run takes, whether it begins or goes on."""
    parser.add_argument(
        "--skip-memory-check",
        action="store_true",
        help="start even if the run is estimated not to fit in memory",
    )
    parser.add_argument(
        "--exit-code-on-stop",
        type=_status,
        metavar="N",
        help="exit code after a stop by SIGTERM, SIGHUP or SIGUSR1 "
        "(default: 128 + the signal's number, 143 for SIGTERM)",
    )


def _status(text: str) -> int:
    """Read an exit code."""
    if not re.fullmatch(r"\d{1,3}", text) or int(text) > MAX_EXIT_CODE:
        raise argparse.ArgumentTypeError(f"an exit code must be an integer from 0 to {MAX_EXIT_CODE}, got {text!r:.40}")
    return int(text)


def _add_others(commands: Commands) -> None:
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
    video.set_defaults(runs_user_code=True)
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


def _add_readers(commands: Commands) -> None:
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
    commands: Commands,
    name: str,
    command: str,
    summary: str,
    details: str = "",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {details}".strip()
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    parser.set_defaults(command=command, parser=parser, opens=False, runs_user_code=False)
    return parser
