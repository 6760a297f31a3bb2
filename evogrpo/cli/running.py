"""What the commands that train do once their configuration is read: from the plan to the end, or to Ctrl-C."""

import argparse
import dataclasses
import os
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rich.console import Console

from evogrpo.cli.commands import FAILED, INTERRUPTED, OK
from evogrpo.cli.dry_run import show_forecast, show_plan
from evogrpo.cli.ending import command, show_command, show_ending
from evogrpo.distributed import ProcessError, processes, was_restarted
from evogrpo.envs.text.reward_functions import RewardError
from evogrpo.interruption import ProgramEndError
from evogrpo.models.devices import single_threaded
from evogrpo.storage.checkpoint import latest_checkpoint
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.configuration.user_code import user_line
from evogrpo.training.display.console import clean_warnings, make_console, say_error, say_warning, working
from evogrpo.training.display.live import RunDisplay
from evogrpo.training.forecast import check_memory
from evogrpo.training.launch import claimed, free_run_dirs, read_resumable, rehearse, resume, start
from evogrpo.training.loop.stopping import stopping_on_signals
from evogrpo.training.loop.trainer import AllFailedError, StrategyError, Trainer
from evogrpo.training.run_dir import RunDir
from evogrpo.training.task_types.registry import task_type_of
from evogrpo.training.task_types.task_type import PreparedRun


def start_run(config: AnyConfig, args: argparse.Namespace, name: str) -> int:
    """Start a run, or only say what it would be."""
    console = make_console()
    wanted = args.run_dir or (None if config.run_dir is None else Path(config.run_dir).expanduser())
    if wanted is None and args.resume_if_exists:
        raise ValueError("--resume-if-exists goes on with the run in a folder, if there is one: name it with --run-dir")
    may_go_on = wanted is not None and not args.dry_run and (args.resume_if_exists or was_restarted())
    if wanted is not None and may_go_on and processes().broadcast(latest_checkpoint(wanted).folder is not None):
        why = "there is one already" if args.resume_if_exists else "started again by the launcher"
        console.print(f"{why}, so the run in {wanted} goes on", soft_wrap=True)
        again: dict[str, Any] = {"run_dir": wanted, "overrides": [], "generations": None, "allow_changed_data": False}
        return resume_run(argparse.Namespace(**{**vars(args), **again}))
    with ExitStack() as stack:

        def free_folder() -> Path | None:
            if not processes().is_rank_zero:
                return None
            if args.dry_run:
                return wanted or next(free_run_dirs(name))
            return stack.enter_context(claimed(name, wanted)).folder

        run_dir = processes().run_section(free_folder)[0]
        assert run_dir is not None  # the leading process's
        config = dataclasses.replace(config, run_dir=str(run_dir))
        if processes().is_rank_zero:
            RunDir(run_dir).check_unused()
        with working(console, "checking the task and who is to learn it"):
            prepared = task_type_of(config.task).prepare(config)
        stack.enter_context(closing(prepared.env))
        show_plan(console, prepared, run_dir, preset=getattr(args, "preset", False))
        if args.dry_run:
            show_forecast(console, prepared, skip_memory_check=args.skip_memory_check)
            with working(console, "making every check that the run makes"):
                rehearse(prepared)
            console.print("nothing was trained: leave out --dry-run to start")
            return OK
        _check_memory(prepared, args)
        with working(console, "making the population"):
            trainer = start(prepared, run_dir)
        with single_threaded(enabled=prepared.one_thread):
            return _train(console, trainer, run_dir, args)


def resume_run(args: argparse.Namespace) -> int:
    """Go on with a stored run."""
    console = make_console()
    run_dir: Path = args.run_dir
    overrides = list(args.overrides)
    if args.generations is not None:
        overrides.append(f"generations={args.generations}")
    resumable = read_resumable(run_dir, overrides, allow_changed_data=args.allow_changed_data)
    for error in resumable.skipped:
        say_warning(f"Skipped an unusable checkpoint: {error}")
    for remark in resumable.ignored:
        say_warning(remark)
    if resumable.ended is not None:
        done = f"{resumable.generation} generation{'' if resumable.generation == 1 else 's'}"
        console.print(f"nothing is left to do: this run has finished after {done} ({resumable.ended})", soft_wrap=True)
        if processes().is_rank_zero:
            show_ending(console, run_dir, resumable.generation, resumable.schedule)
        return OK
    with working(console, "checking the task and who is to learn it"):
        prepared = task_type_of(resumable.config.task).prepare(resumable.config)
    console.print(
        f"resuming {run_dir} after generation {resumable.generation}, learning step {resumable.step}", soft_wrap=True
    )
    with closing(prepared.env):
        _check_memory(prepared, args)
        with working(console, "reading the members"):
            trainer = resume(prepared, resumable, run_dir, allow_changed_data=args.allow_changed_data)
        if resumable.cut_off:  # and not at work, as the folder was free
            console.print("its last process ended without a word, as when it is killed")
        for change in trainer.changed_data:
            say_warning(f"changed since the run began: {change}")
        with single_threaded(enabled=prepared.one_thread):
            return _train(console, trainer, run_dir, args)


def _check_memory(prepared: PreparedRun, args: argparse.Namespace) -> None:
    """Refuse with a ValueError a run that needs more memory than there is."""
    need = prepared.forecast().need
    if need is not None:
        check_memory(need, allowed=args.skip_memory_check, remedy="--skip-memory-check")


def _train(console: Console, trainer: Trainer, run_dir: Path, args: argparse.Namespace) -> int:
    """Run to the end, to a signal or to an error, and say how to go on."""
    args.training = True  # from here on an error is a failed run, not a wrong setting
    run_dir = run_dir.absolute()  # user code may change the working directory
    display = RunDisplay(console, trainer)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stopping_on_signals(trainer.stopping, _announce), display, clean_warnings(console):
            for report in trainer.reports():
                display.show(report)
    except KeyboardInterrupt:
        say_error("aborted; what was learned since the newest checkpoint is lost")
        _show_way_on(console, run_dir)
        return INTERRUPTED
    except (RewardError, StrategyError, AllFailedError, ProgramEndError, ProcessError) as error:
        console.print()
        say_error(f"{error}{user_line(error.__cause__) if error.__cause__ else ''}")
        # A mended reward function, or environment, is another one.
        if isinstance(error, RewardError | ProgramEndError):
            show_command(console, "once mended", command("resume", run_dir, "--allow-changed-data"))
        elif not isinstance(error, AllFailedError):  # which would only fail again
            _show_way_on(console, run_dir, "go on" if isinstance(error, ProcessError) else "once mended")
        return FAILED
    except Exception as error:
        if latest_checkpoint(run_dir).folder is None:
            say_error(f"nothing of this run was saved yet: once that is mended, remove {run_dir} and start it again")
        elif isinstance(error, OSError):  # a full disk, say: the run is what it was
            _show_way_on(console, run_dir)
        else:  # most often what members act in, and once mended that is another one
            show_command(console, "once mended", command("resume", run_dir, "--allow-changed-data"))
        raise
    display.say_end()
    if not trainer.result.complete:
        _show_way_on(console, run_dir)
        number = trainer.stopping.signal
        if number is None:
            return OK
        on_stop: int | None = args.exit_code_on_stop
        return 128 + number if number == signal.SIGINT or on_stop is None else on_stop
    if not processes().is_rank_zero:
        return OK
    console.print()
    show_ending(console, run_dir, trainer.run_state.generation, trainer.schedule)
    return OK


def _show_way_on(console: Console, run_dir: Path, when: str = "go on") -> None:
    """Say how the run goes on from its newest checkpoint, if it has one."""
    if latest_checkpoint(run_dir).folder is not None:
        show_command(console, when, command("resume", run_dir))


def _announce() -> None:
    """Say that a stop has been asked for, where the display does not."""
    if not sys.stdout.isatty():
        # Not through the console, which may be in the middle of a line right now.
        os.write(2, b"stopping... (Ctrl-C again aborts at once)\n")
