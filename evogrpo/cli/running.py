"""Commands `train`, `demo`, `replay` and `resume` once torch is imported: show plan and cost, train, show the end."""

import argparse
import dataclasses
import json
import os
import shlex
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console
from rich.text import Text

from evogrpo.cli.main import FAILED, INTERRUPTED, OK
from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import RLParameter
from evogrpo.distributed import ProcessError, processes
from evogrpo.envs.control.env_process import EnvProcessError
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.evolution.strategies import BUILT_IN
from evogrpo.extras import install_hint
from evogrpo.interruption import stopping_on_signals
from evogrpo.members.bank import SamplerError
from evogrpo.members.devices import single_threaded
from evogrpo.reporting.lineage import ancestors, birth_text, selection_score
from evogrpo.reporting.records import terms_of
from evogrpo.reporting.report import report
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.storage.checkpoint import CheckpointError, latest_checkpoint, read_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.storage.lock import LockLostError
from evogrpo.text import (
    count_text,
    duration_text,
    expand_user,
    number_text,
    pluralize,
    printable,
    relative_path,
    user_line,
)
from evogrpo.training.configuration.reading import load_config
from evogrpo.training.configuration.sections import CONFIG_FILE, Config
from evogrpo.training.configuration.user_code import VLLM, strategy_record
from evogrpo.training.console import (
    clean_warnings,
    command,
    make_console,
    print_error,
    print_rows,
    print_warning,
    show_command,
    spinner,
)
from evogrpo.training.display import RunDisplay
from evogrpo.training.forecast import check_memory, gigabytes
from evogrpo.training.launch import (
    ignored_settings,
    new_run_dir,
    read_resumable,
    resumable_overrides,
    resume,
    start,
)
from evogrpo.training.run_dir import BEST, JOURNAL
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.task_types import TASK_TYPES, PreparedRun, task_type_of
from evogrpo.training.timing import time_rows
from evogrpo.training.trainer import AllFailedError, StrategyError, Trainer


def start_run(config: Config, args: argparse.Namespace, name: str) -> int:
    """Start a run; with `--dry-run`, make the same checks and print its plan and cost."""
    # 1. Resume an existing run, after --resume-if-exists or a restart by the launcher.
    console = make_console()
    requested_dir = args.run_dir or (
        None if config.run_dir is None else expand_user(config.run_dir)
    )
    if requested_dir is None and args.resume_if_exists:
        raise ValueError("--resume-if-exists needs the run directory. Add --run-dir DIR.")
    # Each machine's launcher counts its own restarts after a failure, so the counts of all ranks
    # are compared.
    restarts = processes().all_gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or "0")
    may_resume = not args.dry_run and (args.resume_if_exists or set(restarts) != {"0"})
    # Rank 0 looks for a checkpoint, because other hosts may not see the folder.
    if (
        requested_dir
        and may_resume
        and processes().broadcast(latest_checkpoint(requested_dir) is not None)
    ):
        if args.resume_if_exists:
            reason = ""
        else:
            reason = "Restarted by the launcher. "
        console.print(f"{reason}Resuming the run in {requested_dir}", soft_wrap=True)
        args.run_dir = requested_dir
        args.allow_changed_data = False
        args.overrides = resumable_overrides(args.overrides)
        return resume_run(args, config)
    # 2. Create the run directory.
    with ExitStack() as stack:

        def claim_folder() -> Path | None:
            if processes().is_rank_zero:
                return stack.enter_context(new_run_dir(name, requested_dir))
            return None

        run_dir = processes().run_section(claim_folder)[0]
        assert run_dir is not None  # the result of rank 0
        config = dataclasses.replace(config, run_dir=str(run_dir))
        # 3. Check the configuration and show the plan.
        with spinner(console, "checking the configuration"):
            prepared = task_type_of(config.task).prepare(config)
        stack.enter_context(closing(prepared.env))
        show_plan(console, prepared, run_dir, preset=getattr(args, "preset", False))
        # 4. Dry run: show the costs, start without a run directory, and stop before the first step.
        if args.dry_run:
            show_forecast(console, prepared, skip_memory_check=args.skip_memory_check)
            with spinner(console, "creating the population"):
                trainer = start(prepared, run_dir, dry_run=True)
            if config.sampler is not None and config.sampler["name"] == VLLM:
                for line in _vllm_commands(prepared):
                    show_command(console, "vLLM server", line)
                console.print("The vLLM servers were not checked, and the time was not measured.")
            elif processes().size == 1:
                with spinner(console, "measuring a learning step"), clean_warnings(console):
                    times = time_rows(prepared, trainer)
                print_rows(console, times)
            console.print("Dry run: nothing was trained or written. Remove --dry-run to start.")
            return OK
        # 5. Create the population and train.
        check_memory(
            prepared.forecast().memory, allowed=args.skip_memory_check, remedy="--skip-memory-check"
        )
        with spinner(console, "creating the population"):
            trainer = start(prepared, run_dir)
        with single_threaded(enabled=prepared.one_thread):
            return _train(console, trainer, run_dir, args)


def resume_run(args: argparse.Namespace, given: Config | None = None) -> int:
    """Resume a stored run.

    Adopt the limits of the configuration `given`, and warn of its other changes.
    """
    # 1. Read the newest usable checkpoint.
    console = make_console()
    run_dir: Path = args.run_dir.absolute()
    overrides = list(args.overrides)
    # adopt limits that its file has changed
    if given is not None and (run_dir / CONFIG_FILE).is_file():
        stored = load_config(run_dir / CONFIG_FILE).schedule
        changed = [
            name for name in LIMITS if getattr(given.schedule, name) != getattr(stored, name)
        ]
        overrides = [
            *(f"{name}={json.dumps(getattr(given.schedule, name))}" for name in changed),
            *overrides,
        ]
    if getattr(args, "generations", None) is not None:  # `evogrpo replay` has no such option
        overrides.append(f"generations={args.generations}")
    resumable = read_resumable(run_dir, overrides, allow_changed_data=args.allow_changed_data)
    saved = resumable.saved
    state = resumable.saved.record.run_state
    for error in saved.skipped:
        print_warning(f"Skipped an unusable checkpoint: {error}")
    if given is not None and (ignored := ignored_settings(resumable.config, given)):
        print_warning(
            f"A resumed run keeps its settings. Ignored: {', '.join(ignored)}. For them, start a"
            " new run."
        )
    if resumable.ended is not None and _has_best(run_dir):
        console.print(f"This run is finished ({resumable.ended}).", soft_wrap=True)
        if processes().is_rank_zero:
            show_ending(console, run_dir, state.generation, resumable.schedule)
        return OK
    # 2. Prepare the task and load the members.
    with spinner(console, "checking the configuration"):
        prepared = task_type_of(resumable.config.task).prepare(resumable.config)
    where = f"after generation {state.generation}, learning step {state.step}"
    console.print(f"Resuming {relative_path(run_dir)} {where}", soft_wrap=True)
    with closing(prepared.env):
        check_memory(
            prepared.forecast().memory, allowed=args.skip_memory_check, remedy="--skip-memory-check"
        )
        with spinner(console, "loading the members"):
            trainer = resume(
                prepared, resumable, run_dir, allow_changed_data=args.allow_changed_data
            )
        if read_journal(run_dir / JOURNAL)[-1]["event"] not in ("stopped", "ended"):
            console.print(
                "The previous process of this run did not stop cleanly. Resuming from the last"
                " checkpoint."
            )
        for change in trainer.changed_data:
            print_warning(f"Changed since the run began: {change}")
        # 3. Train.
        with single_threaded(enabled=prepared.one_thread):
            return _train(console, trainer, run_dir, args)


def _has_best(run_dir: Path) -> bool:
    """Return True if the exported best member is complete.

    Otherwise resuming a finished run writes it again.
    """
    try:
        read_checkpoint(run_dir / BEST, kind="agent")
    except CheckpointError:
        return False
    return True


def print_vllm_commands(args: argparse.Namespace) -> int:
    """Print the command of each vLLM server of a configuration, and nothing else."""
    config = load_config(args.config, args.overrides)
    if config.model is None:
        raise ValueError(f"{args.config} trains small networks. vLLM serves language models.")
    prepared = task_type_of(config.task).prepare(config)
    with closing(prepared.env):
        for line in _vllm_commands(prepared):
            print(line)
    return OK


def _vllm_commands(prepared: PreparedRun) -> list[str]:
    """Return the command of each vLLM server of a run of language models."""
    from evogrpo.members.language.loading import PACKAGES, loadable_name
    from evogrpo.members.language.vllm_sampler import vllm_command
    from evogrpo.training.task_types.language import PreparedLanguage

    assert isinstance(prepared, PreparedLanguage)
    size = prepared.config.population.size
    precision = prepared.config.precision
    sampler = prepared.config.sampler
    if sampler and sampler["name"] == VLLM:
        urls = sampler["url"]
    else:
        urls = "http://127.0.0.1:8000"
    urls = [urls] if isinstance(urls, str) else list(urls)
    return [
        vllm_command(
            loadable_name(prepared.outline.model) or prepared.model,
            # VLLMSampler assigns members round robin
            members=max(1, len(range(number, size, len(urls)))),
            rank=prepared.trained.rank,
            dtype="bfloat16" if precision in PACKAGES else precision,
            url=url,
        )
        for number, url in enumerate(urls)
    ]


def _train(console: Console, trainer: Trainer, run_dir: Path, args: argparse.Namespace) -> int:
    """Train until the end, a signal or an error, and print how to resume."""
    args.training = (
        True  # `main` reports errors from here on as a failed run, not as wrong settings
    )
    display = RunDisplay(console, trainer)
    trainer.callbacks.append(display)
    # set by a shell that starts the run in the background
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def announce_stop() -> None:
        if not sys.stdout.isatty():  # on a terminal, the live display announces it
            # A signal handler must not use the console, because it may have interrupted a write of
            # the console.
            os.write(2, b"Stopping and saving. Press Ctrl-C again to abort without saving.\n")

    # 1. Train; after an error, print how to continue.
    try:
        with (
            stopping_on_signals(trainer.stop_request, announce_stop),
            display,
            clean_warnings(console),
        ):
            deque(trainer.reports(), maxlen=0)
    except KeyboardInterrupt:
        print_error("Aborted. Training since the last checkpoint is lost.")
        _show_resume(console, run_dir)
        return INTERRUPTED
    except (
        RewardError,
        StrategyError,
        AllFailedError,
        ProcessError,
        SamplerError,
        EnvProcessError,
    ) as error:
        console.print()
        print_error(f"{error}{user_line(error.__cause__) if error.__cause__ else ''}")
        # A corrected reward function or environment counts as changed data.
        if isinstance(error, RewardError):
            show_command(
                console, "after the fix", command("resume", run_dir, "--allow-changed-data")
            )
        elif not isinstance(
            error, AllFailedError
        ):  # a resumed run would fail again with the same settings
            resumes_as_is = isinstance(error, ProcessError | SamplerError | EnvProcessError)
            _show_resume(console, run_dir, "resume" if resumes_as_is else "after the fix")
        return FAILED
    except Exception as error:
        if isinstance(error, LockLostError):  # its message says where the run is intact
            pass
        elif latest_checkpoint(run_dir) is None:
            print_error(
                "This run has no checkpoint. Fix the error, and start again in another run"
                " directory."
            )
        elif isinstance(error, OSError):  # such as a full disk, after which the data is the same
            _show_resume(console, run_dir)
        else:  # usually an error in user code; corrected code counts as changed data
            show_command(
                console, "after the fix", command("resume", run_dir, "--allow-changed-data")
            )
        raise
    # 2. Report the end; a stopped run can be resumed.
    if not trainer.result.complete:
        _show_resume(console, run_dir)
        number = trainer.stop_request.signal
        if number is None:
            return OK
        on_stop: int | None = args.exit_code_on_stop
        if number == signal.SIGINT or on_stop is None:
            return 128 + number
        return on_stop
    if not processes().is_rank_zero:
        return OK
    console.print()
    show_ending(console, run_dir, trainer.run_state.generation, trainer.schedule)
    return OK


def _show_resume(console: Console, run_dir: Path, when: str = "resume") -> None:
    """Print the command that resumes the run, if it has a checkpoint."""
    if latest_checkpoint(run_dir) is not None:
        show_command(console, when, command("resume", run_dir))


def show_plan(
    console: Console, prepared: PreparedRun, run_dir: Path, *, preset: bool = False
) -> None:
    """Print the plan of a run.

    With `preset`, say that it starts from the preset of its environment.
    """
    config = prepared.config
    start = ", ".join(
        f"{name} {number_text(value)}" for name, value in _starting_values(config).items()
    )
    if config.search_space and config.population.spread and config.population.size > 1:
        start += "; other members start at random values in the ranges below"
    rows = {
        **prepared.facts(),
        **(
            {"preset": f"tuned values for {config.task.label}; KEY=VALUE overrides them"}
            if preset
            else {}
        ),
        "start": start,
        "evolving": _evolution_text(prepared),
        "objective": _objective_text(config.agent.objective),
        "schedule": _schedule_text(config),
        "run directory": relative_path(run_dir),
        **config.task.facts(),
    }
    print_rows(console, rows)
    console.print()


def show_forecast(console: Console, prepared: PreparedRun, *, skip_memory_check: bool) -> None:
    """Print the estimated cost of a run.

    Raises:
        ValueError: If the run does not fit in memory, unless `skip_memory_check` is set.
    """
    console.print(Text("Estimated cost", "bold"))
    forecast = prepared.forecast()
    rows = dict(forecast.rows)
    need = forecast.memory
    if need.processes > 1:
        rows["all processes"] = (
            f"{gigabytes(need.total)} for {need.processes} processes that share memory"
        )
    rows["available"] = check_memory(need, allowed=True)
    print_rows(console, rows)
    console.print()
    check_memory(need, allowed=skip_memory_check, remedy="--skip-memory-check")


def _starting_values(config: Config) -> dict[str, Value]:
    """Return the starting values of evolving and non-default hyperparameters."""
    names = list(config.search_space) or ["lr", "clip_coef", "group_size"]
    values = config.hyperparameters.to_json()
    defaults = Hyperparameters(**task_type_of(config.task).hyperparameters).to_json()
    # Resolve loss types and advantages that are None, which means the objective's.
    start = config.agent.objective.resolved(config.hyperparameters, config.search_space).to_json()
    if start["target_kl"] is not None:
        calibrated = {"lr": "calibrated on the first batch"}
    else:
        calibrated = {}
    return {
        name: start[name] for name in values if name in names or values[name] != defaults[name]
    } | calibrated


def _objective_text(objective: Objective) -> str:
    """Describe the loss type, the advantage and every non-default setting of the objective."""
    defaults = vars(Objective())
    values = vars(objective)
    switches = [
        f"{name} {str(value).lower() if isinstance(value, bool) else number_text(value)}"
        for name, value in values.items()
        if name not in ("loss_type", "advantage") and value != defaults[name]
    ]
    return ", ".join(
        [f"loss {objective.loss_type}", f"{objective.advantage} advantages", *switches]
    )


def _evolution_text(prepared: PreparedRun) -> str:
    """Describe what evolves, and the strategy."""
    config = prepared.config
    strategy = strategy_record(config.strategy)
    if strategy["name"] == "fixed":
        return "nothing: strategy fixed, no selection or mutation"
    if strategy["name"] == "replay":
        return f"nothing; replays a schedule of {pluralize(len(strategy['stages']), 'stage')}"
    if config.population.size == 1 and strategy["name"] in BUILT_IN:
        return "nothing (one member)"
    spaces = ", ".join(
        f"{name} in {_range_text(parameter)}" for name, parameter in config.search_space.items()
    )
    if getattr(config.agent, "evolve_network", None) is not None:
        spaces = f"{spaces}{', ' if spaces else ''}network architecture"
    # Of a tournament, print the settings of its selection pressure; of other strategies, all
    # settings.
    shown_settings = (
        ("size", "z") if strategy["name"] == "tournament" else config.strategy.to_json()
    )
    details = ", ".join(
        f"{key} {strategy[key]}" for key in shown_settings if not isinstance(strategy[key], Mapping)
    )
    return (
        f"{spaces or 'no hyperparameters (selection only)'};"
        f" {strategy['name']}{details and f' ({details})'}"
    )


def _range_text(parameter: RLParameter) -> str:
    """Describe the values that a hyperparameter may take."""
    if parameter.choices is not None:
        return "{" + ", ".join(number_text(choice) for choice in parameter.choices) + "}"
    low, high = parameter.bounds
    details = ["log"] if parameter.scale == "log" else []
    if parameter.founders is not None:
        details.append(
            f"founders {number_text(parameter.founders[0])} to {number_text(parameter.founders[1])}"
        )
    words = f" ({', '.join(details)})" if details else ""
    return f"[{number_text(low)}, {number_text(high)}]{words}"


def _schedule_text(config: Config) -> str:
    """Describe the limits that end the run."""
    schedule = config.schedule
    limits = {
        "generations": pluralize(schedule.generations or 0, "generation"),
        "max_timesteps": f"{count_text(schedule.max_timesteps)} environment steps",
        "max_tokens": (
            f"{count_text(schedule.max_tokens)} {terms_of(task_type_of(config.task).word).tokens}"
        ),
        "max_seconds": duration_text(schedule.max_seconds),
        "target_fitness": f"fitness {number_text(schedule.target_fitness)}",
    }
    ends = [text for name, text in limits.items() if getattr(schedule, name) is not None]
    return (
        f"until {' or '.join(ends)}, {pluralize(schedule.steps_per_generation, 'learning step')}"
        " per generation"
    )


# ---- end of a run


_OTHER_LIMITS = ("max_timesteps", "max_tokens", "max_seconds", "target_fitness")


def show_lineage(console: Console, summary: RunSummary) -> None:
    """Print the best member's ancestors: origin, changes, and the last fitness before the next birth."""
    best = summary.best
    if best is None:
        return
    console.print(Text(f"Lineage of member #{best.index}", "bold"))
    for ancestor in ancestors(summary, best):
        origin = birth_text(ancestor, summary.evolvable)
        score = f"{selection_score(ancestor, summary)} after generation {ancestor.generation}"
        head = (f"  #{ancestor.index}", "bold")
        console.print(Text.assemble(head, f" {printable(origin)}", (f"\n     {score}", "dim")))
    console.print()


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
        rows.append(("best member", best))
    try:
        page = report(run_dir).write()
        rows += [
            ("figure", install_hint("report.png", "matplotlib") or run_dir / "report.png"),
            ("report page", page),
        ]
    except Exception as error:  # noqa: BLE001 - a failed report must not fail the run
        rows.append(("report", f"not written: {error}"))
    for name, value in rows:
        console.print(Text.assemble((f"{name:<14} ", "dim"), printable(str(value))), soft_wrap=True)
    task_type = TASK_TYPES.get(str(kind))  # None for a kind that this version does not have
    if best.is_dir() and task_type is not None:
        show_command(console, "use it", task_type.usage(best))
        purpose, words = task_type.next_command(run_dir)
        show_command(console, purpose, command(*words))


def show_ending(console: Console, run_dir: Path, generations: int, schedule: Schedule) -> None:
    """Print lineage, result paths and next commands of a finished run.

    Args:
        console: Output.
        run_dir: Run directory.
        generations: Generations done, for the command that trains further.
        schedule: Schedule of the run; the printed command removes or doubles its other limits.
    """
    run_dir = Path(relative_path(run_dir))
    summary = read_summary(run_dir)
    show_lineage(console, summary)
    show_files(console, run_dir, summary.facts.get("kind"))
    if generations:
        # The limit that ended the run would end the resumed run too, so the command removes all
        # other limits. It doubles those that include evaluations: `count_evaluations` needs one,
        # and a resumed run keeps it.
        changed = []
        for name in _OTHER_LIMITS:
            if (limit := getattr(schedule, name)) is not None:
                counted = schedule.count_evaluations and name in ("max_timesteps", "max_tokens")
                changed.append(f"{name}={2 * limit if counted else 'null'}")
        words = ("--generations", str(2 * generations), *changed)
        show_command(console, "train further", command("resume", run_dir, *words))
    if (run_dir / "tensorboard").is_dir():
        line = f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))}"
        show_command(console, "curves", line)
