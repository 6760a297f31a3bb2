"""Commands `train`, `demo`, `replay` and `resume` once torch is imported: show the plan, train."""

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from evogrpo.cli.main import FAILED, INTERRUPTED, OK
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import RLParameter
from evogrpo.distributed import ProcessError, processes
from evogrpo.envs.control.env_process import EnvProcessError
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.evolution.strategies import BUILT_IN
from evogrpo.extras import install_hint
from evogrpo.interruption import stopping_on_signals, write_to_stderr
from evogrpo.members.bank import SamplerError
from evogrpo.members.devices import single_threaded
from evogrpo.reporting.lineage import ancestors, birth_text, selection_score
from evogrpo.reporting.records import terms_of
from evogrpo.reporting.report import report
from evogrpo.reporting.setting_labels import SettingLabels
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.storage.checkpoint import CheckpointError, latest_checkpoint, read_checkpoint
from evogrpo.storage.journal import JournalError
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
from evogrpo.training.configuration.user_code import (
    BUILT_IN_SAMPLERS,
    VLLM,
    strategy_record,
)
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
from evogrpo.training.forecast import available_memory, gigabytes, selection_row, time_rows
from evogrpo.training.run_dir import BEST, JOURNAL, RunDir
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.start import LOCATION_KEYS, ended, ignored_settings, read_run, start
from evogrpo.training.task_types import TASK_TYPES, Task, task_type_of
from evogrpo.training.trainer import AllFailedError, StrategyError, Trainer


def start_run(config: Config, args: argparse.Namespace, name: str) -> int:
    """Start a run; with `--dry-run`, make the same checks and print its plan and cost."""
    # 1. Resume an existing run, after --resume-if-exists or a restart by the launcher.
    console = make_console()
    requested = args.run_dir
    if requested is None and config.run_dir is not None:
        requested = expand_user(config.run_dir)
    if requested is None and args.resume_if_exists:
        raise ValueError("--resume-if-exists needs the run directory. Add --run-dir DIR.")
    # Each machine's launcher counts its own restarts after a failure, so the counts of all ranks
    # are compared.
    restarts = processes().all_gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or "0")
    may_resume = args.resume_if_exists or set(restarts) != {"0"}
    # Rank 0 looks for a checkpoint, because other hosts may not see the folder.
    if (
        requested is not None
        and may_resume
        and not args.dry_run
        and processes().broadcast(latest_checkpoint(requested) is not None)
    ):
        reason = "" if args.resume_if_exists else "Restarted by the launcher. "
        console.print(f"{reason}Resuming the run in {requested}", soft_wrap=True)
        return resume_run(requested, _adopted(config, requested), args, given=config)
    with ExitStack() as stack:
        # 2. Create the run directory; a dry run only chooses its name.
        def choose_folder() -> Path | None:
            if not processes().is_rank_zero:
                return None
            if args.dry_run:
                return _unused_folder(name, requested)
            return stack.enter_context(_new_folder(name, requested))

        run_dir = processes().gather_results(choose_folder)[0]
        assert run_dir is not None  # the result of rank 0

        # 3. Check the configuration, show the plan, and create the population.
        def show(task: Task) -> None:
            show_plan(console, task, run_dir, preset=getattr(args, "preset", False))
            if args.dry_run:
                show_forecast(console, task)

        task, trainer = start(
            config,
            run_dir,
            dry_run=args.dry_run,
            skip_memory_check=args.skip_memory_check,
            show=show,
            progress=partial(spinner, console),
        )
        stack.enter_context(closing(task.env))
        # 4. Dry run: measure one learning step.
        if args.dry_run:
            if config.sampler is not None and config.sampler["name"] in BUILT_IN_SAMPLERS:
                if config.sampler["name"] == VLLM:
                    for line in _vllm_commands(task):
                        show_command(console, "vLLM server", line)
                console.print("vLLM was not checked, and the time was not measured.")
            elif processes().size == 1:
                with spinner(console, "measuring a learning step"), clean_warnings(console):
                    times = time_rows(task, trainer)
                print_rows(console, times)
            console.print("Dry run: nothing was trained or written. Remove --dry-run to start.")
            return OK
        # 5. Train.
        with single_threaded(enabled=task.one_thread):
            return _train(console, trainer, run_dir, args)


@contextmanager
def _new_folder(name: str, requested: Path | None) -> Iterator[Path]:
    """Create the directory of a new run, and return its absolute path; see `_unused_folder`.

    It is removed afterwards if nothing was written.
    """
    while True:
        folder = _unused_folder(name, requested)
        # Innermost first.
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=requested is not None)
            break
        except FileExistsError:  # created by another process
            if requested is not None:
                raise
    try:
        yield folder
    finally:
        with suppress(OSError):  # raised by the first folder that is not empty
            for path in missing:
                path.rmdir()


def _unused_folder(name: str, requested: Path | None) -> Path:
    """Return the absolute path of a directory for a new run, without creating it.

    Args:
        name: Name of the run: the first of `runs/NAME`, `runs/NAME-2`, ... that does not exist is
            chosen.
        requested: Directory to use instead, which may exist; None = choose one by `name`.

    Raises:
        ValueError: If the directory holds a run or cannot be used.
    """
    folder = requested or Path("runs", name)
    if requested is None:
        for number in itertools.count(2):
            if not folder.exists():
                break
            folder = Path("runs", f"{name}-{number}")
    RunDir(folder).check_unused()
    # Absolute, because user code may change the working directory.
    return folder.absolute()


def _adopted(config: Config, run_dir: Path) -> list[str]:
    """Return the settings that a resumed run adopts from a configuration, as overrides.

    These are the limits that differ from the stored configuration, and the keys that say where the
    run computes.
    """
    if not (run_dir / CONFIG_FILE).is_file():
        return []
    stored = load_config(run_dir / CONFIG_FILE)
    values = {name: getattr(config, name) for name in LOCATION_KEYS}
    for name in LIMITS:
        limit = getattr(config.schedule, name)
        if limit != getattr(stored.schedule, name):
            values[name] = limit
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def resume_run(
    run_dir: Path, overrides: Sequence[str], args: argparse.Namespace, given: Config | None = None
) -> int:
    """Resume a stored run.

    Args:
        run_dir: Directory of the run.
        overrides: Settings that change; see `read_run`.
        args: Options of the command.
        given: Configuration of the command. A warning lists its settings that are not adopted.
    """
    # 1. Read the newest usable checkpoint.
    console = make_console()
    run_dir = run_dir.absolute()
    allow_changed_data = getattr(args, "allow_changed_data", False)  # an option of `resume` only
    stored, config = read_run(run_dir, overrides, allow_changed_data=allow_changed_data)
    state = stored.record.run_state
    for error in stored.skipped:
        print_warning(f"Skipped an unusable checkpoint: {error}")
    ignored = [] if given is None else ignored_settings(config, given)
    if ignored:
        print_warning(
            f"A resumed run keeps its settings. Ignored: {', '.join(ignored)}. For them, start a"
            " new run."
        )
    limit = ended(stored, config.schedule)
    if limit is not None and _has_best(run_dir):
        console.print(
            f"This run is finished ({limit}). To train further, raise the limit.", soft_wrap=True
        )
        if processes().is_rank_zero:
            show_ending(console, run_dir, state.generation, config.schedule)
        return OK

    # 2. Check the configuration, and load the members.
    def show(task: Task) -> None:
        where = f"after generation {state.generation}, learning step {state.step}"
        console.print(f"Resuming {relative_path(run_dir)} {where}", soft_wrap=True)

    task, trainer = start(
        config,
        run_dir,
        stored=stored,
        allow_changed_data=allow_changed_data,
        skip_memory_check=args.skip_memory_check,
        show=show,
        progress=partial(spinner, console),
    )
    # 3. Train.
    with closing(task.env):
        if (run_dir / JOURNAL).stat().st_size > stored.record.journal.bytes:
            console.print(
                "The previous process of this run did not stop cleanly, or newer checkpoints are"
                " missing. Resuming from the last checkpoint."
            )
        for change in trainer.changed_data:
            print_warning(f"Changed since the run began: {change}")
        with single_threaded(enabled=task.one_thread):
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
        raise ValueError(
            f"{args.config} trains small networks, but vLLM serves"
            " language models. Give the configuration of a language model."
        )
    task = task_type_of(config.task).build(config)
    with closing(task.env):
        for line in _vllm_commands(task):
            print(line)
    return OK


def _vllm_commands(task: Task) -> list[str]:
    """Return the command of each vLLM server of a run of language models."""
    from evogrpo.members.language.loading import PACKAGES, loadable_name
    from evogrpo.members.language.vllm_sampler import vllm_command
    from evogrpo.training.task_types.language import LanguageTask

    assert isinstance(task, LanguageTask)
    config = task.config
    urls: Any = "http://127.0.0.1:8000"
    if config.sampler is not None and config.sampler["name"] == VLLM:
        urls = config.sampler["url"]
    if isinstance(urls, str):
        urls = [urls]
    lines = []
    for url in urls:
        line = vllm_command(
            loadable_name(task.outline.model) or task.model,
            members=config.population.size,
            rank=task.trained.rank,
            dtype="bfloat16" if config.precision in PACKAGES else config.precision,
            url=url,
        )
        lines.append(line)
    return lines


_EXPECTED = (
    AllFailedError,
    EnvProcessError,
    ProcessError,
    RewardError,
    SamplerError,
    StrategyError,
)
"""Errors whose message explains them; others are raised, for `main` to report."""


_OUTSIDE = (
    EnvProcessError,
    JournalError,
    MemoryError,
    OSError,
    ProcessError,
    SamplerError,
    torch.OutOfMemoryError,
)
"""Errors after which the same code can be resumed, such as a full disk."""


def _train(console: Console, trainer: Trainer, run_dir: Path, args: argparse.Namespace) -> int:
    """Train until the end, a signal or an error, and print how to continue."""
    # `main` reports errors from here on as a failed run, not as wrong settings.
    args.training = True
    display = RunDisplay(console, trainer)
    trainer.callbacks.append(display)
    # A shell that starts the run in the background makes it ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def announce_stop() -> None:
        if not sys.stdout.isatty():  # on a terminal, the live display announces it
            # A signal handler must not use the console, because it may have interrupted a write of
            # the console.
            write_to_stderr("Stopping and saving. Press Ctrl-C again to abort without saving.\n")

    # 1. Train.
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
    except Exception as error:
        expected = isinstance(error, _EXPECTED)
        if expected:
            console.print()
            line = ""
            if error.__cause__ is not None:
                line = user_line(error.__cause__)
            print_error(f"{error}{line}")
        _show_after_error(console, run_dir, error)
        if expected:
            return FAILED
        raise
    # 2. A stopped run can be resumed.
    if not trainer.result.complete:
        _show_resume(console, run_dir)
        number = trainer.stop_request.signal
        if number is None:
            return OK
        on_stop: int | None = args.exit_code_on_stop
        if number == signal.SIGINT or on_stop is None:
            return 128 + number
        return on_stop
    # 3. Show the results.
    if processes().is_rank_zero:
        console.print()
        show_ending(console, run_dir, trainer.run_state.generation, trainer.schedule)
    return OK


def _show_after_error(console: Console, run_dir: Path, error: Exception) -> None:
    """Print the command that continues a run after an error."""
    # A run of failed members fails again. The message of a lost lock says where the run is intact.
    if isinstance(error, AllFailedError | LockLostError):
        return
    if latest_checkpoint(run_dir) is None:
        print_error("This run has no checkpoint. Fix the error, and start again.")
    elif isinstance(error, _OUTSIDE):
        _show_resume(console, run_dir)
    elif isinstance(error, StrategyError):
        _show_resume(console, run_dir, "after the fix")
    else:  # corrected user code counts as changed data
        line = command("resume", run_dir, "--allow-changed-data")
        show_command(console, "after the fix", line)


def _show_resume(console: Console, run_dir: Path, when: str = "resume") -> None:
    """Print the command that resumes the run, if it has a checkpoint."""
    if latest_checkpoint(run_dir) is not None:
        show_command(console, when, command("resume", run_dir))


def show_plan(console: Console, task: Task, run_dir: Path, *, preset: bool = False) -> None:
    """Print the plan of a run.

    With `preset`, say that it starts from the preset of its environment.
    """
    config = task.config
    rows = task.facts()
    if preset:
        rows["preset"] = f"tuned values for {config.task.label}; KEY=VALUE overrides them"
    labels = SettingLabels.of(config.search_space.to_json(), [config.hyperparameters])
    rows["start"] = _start_text(config, labels)
    rows["evolving"] = _evolution_text(config, labels)
    if config.proposer is not None:
        rows["proposer"] = f"{config.proposer['name']}, which writes new texts"
    rows |= labels.rows
    rows["objective"] = _objective_text(config.agent.objective)
    rows["schedule"] = _schedule_text(config)
    step = task.forecast.step
    rows |= selection_row(config, step, " if all samples have the maximum length")
    rows["run directory"] = relative_path(run_dir)
    rows |= config.task.facts()
    print_rows(console, rows)
    console.print()


def show_forecast(console: Console, task: Task) -> None:
    """Print the estimated cost of a run."""
    console.print(Text("Estimated cost", "bold"))
    forecast = task.forecast
    rows = dict(forecast.rows)
    need = forecast.memory
    if need.processes > 1:
        total = gigabytes(need.total)
        rows["all processes"] = f"{total} for {need.processes} processes that share memory"
    rows["available"] = available_memory(need.device)
    print_rows(console, rows)
    console.print()


def _start_text(config: Config, labels: SettingLabels) -> str:
    """Describe the starting values of evolving and non-default hyperparameters."""
    values = config.hyperparameters.by_name()
    defaults = Hyperparameters(**task_type_of(config.task).hyperparameters).by_name()
    names = {*(config.search_space or ("lr", "group_size"))}
    names.update(name for name in values if values[name] != defaults.get(name))
    # Resolve loss types and advantages that are None, which means the objective's.
    start = config.agent.objective.resolved(config.hyperparameters, config.search_space).by_name()
    if start["target_kl"] is not None:
        start["lr"] = "calibrated on the first batch"
        names.add("lr")
    text = ", ".join(labels.named(name, start[name]) for name in values if name in names)
    if config.search_space and config.population.spread and config.population.size > 1:
        text += "; the values of other members are spread over the ranges below"
    return text


def _objective_text(objective: Objective) -> str:
    """Describe the loss type, the advantage and every non-default setting of the objective."""
    parts = [f"loss {objective.loss_type}", f"{objective.advantage} advantages"]
    defaults = vars(Objective())
    for name, value in vars(objective).items():
        if name not in ("loss_type", "advantage") and value != defaults[name]:
            text = str(value).lower() if isinstance(value, bool) else number_text(value)
            parts.append(f"{name} {text}")
    return ", ".join(parts)


def _evolution_text(config: Config, labels: SettingLabels) -> str:
    """Describe what evolves, and the strategy."""
    settings = config.strategy.to_json()
    name = strategy_record(config.strategy)["name"]
    if name == "fixed":
        return "nothing: strategy fixed, no selection or mutation"
    if name == "replay":
        return f"nothing; replays a schedule of {pluralize(len(settings['stages']), 'stage')}"
    if config.population.size == 1 and name in BUILT_IN:
        return "nothing (one member)"
    # 1. What evolves.
    evolving = []
    for key, parameter in config.search_space.items():
        evolving.append(f"{labels.name(key)} in {_range_text(key, parameter, labels)}")
    if getattr(config.agent, "evolve_network", None) is not None:
        evolving.append("network architecture")
    spaces = ", ".join(evolving) or "no hyperparameters (selection only)"
    # 2. The strategy. Of a tournament, print the settings of its selection pressure.
    keys = ("size", "z") if name == "tournament" else settings
    details = [f"{key} {settings[key]}" for key in keys if not isinstance(settings[key], Mapping)]
    text = f" ({', '.join(details)})" if details else ""
    return f"{spaces}; {name}{text}"


def _range_text(name: str, parameter: RLParameter, labels: SettingLabels) -> str:
    """Describe the values that a hyperparameter or a task setting may take."""
    if parameter.choices is not None:
        return "{" + ", ".join(labels.text(name, choice) for choice in parameter.choices) + "}"
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
    tokens = terms_of(task_type_of(config.task).word).tokens
    words = {
        "generations": pluralize(schedule.generations or 0, "generation"),
        "max_timesteps": f"{count_text(schedule.max_timesteps)} environment steps",
        "max_tokens": f"{count_text(schedule.max_tokens)} {tokens}",
        "max_seconds": duration_text(schedule.max_seconds),
        "target_fitness": f"fitness {number_text(schedule.target_fitness)}",
    }
    limits = [text for name, text in words.items() if getattr(schedule, name) is not None]
    steps = pluralize(schedule.steps_per_generation, "learning step")
    return f"until {' or '.join(limits)}, {steps} per generation"


# ---- end of a run


_OTHER_LIMITS = ("max_timesteps", "max_tokens", "max_seconds", "target_fitness")


def show_lineage(console: Console, summary: RunSummary) -> None:
    """Print origin, changes and last fitness of the best member's ancestors.

    A single member has none, and its fitness is in the table above.
    """
    best = summary.best
    if best is None or len(summary.histories) == 1:
        return
    console.print(Text(f"Lineage of member #{best.index}", "bold"))
    for ancestor in ancestors(summary, best):
        origin = birth_text(ancestor, summary)
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
            limit = getattr(schedule, name)
            if limit is None:
                continue
            if schedule.count_evaluations and name in ("max_timesteps", "max_tokens"):
                changed.append(f"{name}={2 * limit}")
            else:
                changed.append(f"{name}=null")
        words = ("--generations", str(2 * generations), *changed)
        show_command(console, "train further", command("resume", run_dir, *words))
    if (run_dir / "tensorboard").is_dir() and shutil.which("tensorboard"):
        line = f"tensorboard --logdir {shlex.quote(str(run_dir / 'tensorboard'))}"
        show_command(console, "curves", line)
