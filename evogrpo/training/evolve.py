"""Runs in Python: `evolve`, `resume`, and `Run`, the iterator over the generations of a run."""

import inspect
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from torch import nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.population import Population
from evogrpo.distributed import is_rank_zero
from evogrpo.envs.protocol import GroupEnvironment, SupportsPreflight
from evogrpo.evolution.fitness import FitnessBy, FitnessConfig
from evogrpo.evolution.strategies import Strategy, default_strategy
from evogrpo.interruption import STOPPED, stopping_on_signals
from evogrpo.members.devices import single_threaded
from evogrpo.reporting.records import GenerationReport, Result
from evogrpo.synonyms import NamesMissing
from evogrpo.text import class_name, relative_path
from evogrpo.training.callbacks import Callback
from evogrpo.training.configuration.sections import TENSORBOARD, LoggingConfig
from evogrpo.training.configuration.user_code import check_resumable, chosen_strategy
from evogrpo.training.console import console_for
from evogrpo.training.display import RunDisplay
from evogrpo.training.forecast import check_memory
from evogrpo.training.proposals import ProposalFunction, Proposer
from evogrpo.training.run_dir import RunDir, open_run
from evogrpo.training.run_state import best_agent
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.task_types import TASK_TYPES
from evogrpo.training.trackers import check_trackers, tracker_names
from evogrpo.training.trainer import Trainer
from evogrpo.validation import lists_options, names_unknown, plain_value, whole_between
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class Run(NamesMissing, Iterator[GenerationReport]):
    """Run of a trainer: iterating over it trains, and yields a report after every generation.

    A new loop over a run continues where the last one was left. Ctrl-C, SIGTERM and similar signals
    save the run and end the program, on all ranks, except for signals that the program handles
    itself.

    Args:
        trainer: The training loop.
        console: Console that shows the progress while the run has control; None = no display.
        one_thread: Use one thread of torch while the run has control; see `single_threaded`.

    Attributes:
        trainer: As given.
    """

    def __init__(
        self, trainer: Trainer, console: Console | None = None, *, one_thread: bool = False
    ) -> None:
        self._console = console
        self._one_thread = one_thread
        self._start(trainer)

    def __repr__(self) -> str:
        run_state = self.trainer.run_state
        run_dir = self.trainer.shared_run_dir
        if run_dir is None:
            where = ""
        else:
            where = f", in {relative_path(run_dir.path)!r}"
        return (
            f"Run(after generation {run_state.generation}, learning step {run_state.step}{where})"
        )

    def _start(self, trainer: Trainer) -> None:
        """Run this trainer from now on, with the display of this run."""
        self.trainer = trainer
        self._generations = iter(trainer)
        # A run that never began has no threads yet. A resumed one may have been opened for its best
        # member only.
        new = trainer.run_state.threads == 0
        # At exit, Python unloads modules before it closes generators, which then cannot close the
        # run directory.
        self._closing = weakref.finalize(self, _close, self._generations, new=new)
        if self._console is None:
            self._display = None
        else:
            self._display = RunDisplay(self._console, trainer)
        if self._display is not None:
            trainer.callbacks.append(self._display)

    @property
    def population(self) -> Population:
        """The members."""
        return self.trainer.population

    @property
    def result(self) -> Result:
        """Result of the run: test before and after training, best member, run directory.

        Raises:
            RuntimeError: If it has not ended.
        """
        return self.trainer.result

    @property
    def best(self) -> Any:
        """Best member so far, as an agent of its own with the train state that earned its fitness.

        `best.predict(observation)` returns its action, `best.save_checkpoint(folder)` saves it, and
        its class's `load(folder)` loads it.

        Raises:
            ValueError: If no member has been evaluated yet.
        """
        best = self.trainer.run_state.best
        population = self.population
        if best is None:
            raise ValueError("There is no best member before the end of the first generation.")
        return best_agent(population, best)

    @names_unknown
    def finish(self, callback: "AfterGeneration | None" = None) -> Self:
        """Run to the end of the schedule.

        Args:
            callback: Called with the run after every generation; if it returns False, the run is
                stopped.

        Returns:
            The run itself.
        """
        for _ in self:
            # Comparisons of numpy or torch values give scalars that are not False itself.
            if callback is not None and plain_value(callback(self)) is False:
                self.stop("stopped by the callback")
        return self

    @names_unknown
    def learn(self, total_timesteps: int, callback: "AfterGeneration | None" = None) -> Self:
        """Continue a run that has ended, for more steps in the environment.

        Args:
            total_timesteps: Further steps of all members together; they replace the limits of the
                run. They include evaluations if the run's schedule has `count_evaluations`.
            callback: As for `finish`.

        Returns:
            The run itself.

        Raises:
            ValueError: If the members are language models, which take no steps, or the run ended by
                an error after its last checkpoint; `evogrpo.resume` continues such a run.
        """
        whole_between("total_timesteps", total_timesteps, 1)
        trainer = self.trainer
        limits: dict[str, Any] = dict.fromkeys(
            ("generations", "max_tokens", "max_seconds", "target_fitness")
        )
        spent = trainer.run_state.spent(evaluations=trainer.schedule.count_evaluations)
        limits["max_timesteps"] = spent["timesteps"] + total_timesteps
        # On rank 0, the run directory may raise an error.
        with trainer.population.processes.shared_errors():
            if trainer.shared_run_dir is None:
                run_dir = None
            else:
                run_dir = trainer.shared_run_dir.reopened()
        # The trainer records changed data when it begins.
        recorded = inspect.getgeneratorstate(self._generations) != inspect.GEN_CREATED
        # 0 threads: the run has not begun.
        run_state = trainer.run_state if trainer.run_state.threads else None
        continued = Trainer(
            trainer.population,
            trainer.env,
            schedule=replace(trainer.schedule, **limits),
            strategy=trainer.strategy,
            fitness=trainer.fitness,
            run_dir=run_dir,
            run_state=run_state,
            description=trainer.description,
            changed_data=() if recorded else trainer.changed_data,
            callbacks=[each for each in trainer.callbacks if each is not self._display],
            proposer=trainer.proposer,
            trackers=trainer.trackers.given,
        )
        self._closing.detach()
        self._start(continued)
        return self.finish(callback)

    def stop(self, reason: str = STOPPED) -> None:
        """Stop the run now; see `Trainer.stop`."""
        self.trainer.stop(reason)

    def __next__(self) -> GenerationReport:
        """Run to the end of the next generation, and return its report.

        Raises:
            StopIteration: If the run has finished or was stopped.
            KeyboardInterrupt: After Ctrl-C, once everything is saved.
            SystemExit: After SIGTERM, SIGHUP or SIGUSR1, once everything is saved; with status 128
                + signal.
        """
        # 1. Run to the end of the generation. Signals are handled outermost, as one may arrive
        # while the display starts or stops.
        with (
            stopping_on_signals(self.trainer.stop_request) as received,
            single_threaded(enabled=self._one_thread),
            self._display or nullcontext(),
        ):
            report = next(self._generations, None)
            # The signal may have arrived after the generation ended: continue, so that the trainer
            # saves and stops.
            if received:
                next(self._generations, None)
        # 2. After a signal, raise KeyboardInterrupt or SystemExit. If another rank has received it,
        #    the stop request has its number.
        number = received[0] if received else self.trainer.stop_request.signal
        if number is not None:
            run_dir = self.trainer.shared_run_dir
            step = self.trainer.run_state.step
            if run_dir is None:
                where = "There is no run directory, so nothing was saved."
            else:
                where = f"Continue with evogrpo.resume({relative_path(run_dir.path)!r}, ...)."
            message = f"Stopped after learning step {step}. {where}"
            if number == signal.SIGINT:
                # torch imports tabulate at exit. The import executes strings, after which Python
                # does not end by SIGINT. Imported here, it has no effect on the exit.
                with suppress(ImportError):
                    import_module("tabulate")
                raise KeyboardInterrupt(message)
            if is_rank_zero() and sys.stderr is not None:
                with suppress(OSError):  # the terminal is closed
                    sys.stderr.write(f"{message}\n")
            raise SystemExit(128 + number)
        # 3. Return the report.
        if report is None:
            raise StopIteration
        return report


def _close(generations: Generator[GenerationReport, None, None], *, new: bool) -> None:
    """Close a run, and warn if a new one never began."""
    if new and inspect.getgeneratorstate(generations) == inspect.GEN_CREATED:
        warn("A run was made and never trained. Iterate over it, or call its method finish().")
    with suppress(ValueError):  # at exit, a thread still trains it
        generations.close()


AfterGeneration = Callable[[Run], object]
"""Function called with the run after every generation; returns False to stop the run."""


@names_unknown
@lists_options(Schedule.__dataclass_fields__, Schedule)
def evolve(
    population: Population,
    env: GroupEnvironment,
    *,
    strategy: Strategy | type[Strategy] | str | None = None,
    fitness: FitnessConfig | FitnessBy | Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    keep_checkpoints: int = 2,
    checkpoint_steps: int | None = None,
    completions: int = 16,
    trackers: "str | Sequence[str | GeneralTracker]" = (TENSORBOARD,),
    callbacks: Sequence[Callback] = (),
    proposer: Proposer | ProposalFunction | None = None,
    progress: bool | None = None,
    skip_memory_check: bool = False,
    **schedule: Any,
) -> Run:
    """Train a population generation by generation.

    Each generation trains every member for `steps_per_generation` learning steps on the same
    questions, measures fitness on the validation split, and clones and mutates members as the
    strategy plans. After the last generation the best member and the untrained base are evaluated
    on the test split.

    Args:
        population: The members; changed in place.
        env: Environment they act in.
        strategy: Rule of selection and mutation: a strategy, its class, or the name of a built-in
            one such as "tournament". None = `SuccessiveHalving()` for several members that are
            small networks or have evolving task settings, unless architectures or proposed texts
            evolve; otherwise `Tournament()`. With a `run_dir`, a custom class must be defined in an
            importable module other than the program itself, so that the run can be resumed.
        fitness: Measure of fitness: "validation" or "rollouts", or a mapping of the settings of
            `evogrpo.evolution.FitnessConfig`. None = "validation".
        run_dir: Directory for journal, checkpoints, the best member and TensorBoard logs; None =
            keep no records.
        keep_checkpoints: See `evogrpo.training.configuration.sections.LoggingConfig`.
        checkpoint_steps: See `LoggingConfig`.
        completions: See `LoggingConfig`.
        trackers: Names of trackers, such as "wandb" and "mlflow", and objects with the methods of
            `accelerate.tracking.GeneralTracker`. "tensorboard" needs a `run_dir`.
        callbacks: Hooks called after every learning step, generation and test; see
            `evogrpo.Callback`.
        proposer: Writes new texts of the task settings whose search space says `proposed`: a
            function in GEPA's form, or a `Proposer` with a time limit; see
            `evogrpo.training.proposals`.
        progress: Show the progress of the run; None = only on a terminal and in a notebook.
        skip_memory_check: Start even if the estimated memory exceeds the available memory.
        schedule: The fields of `evogrpo.training.schedule.Schedule`: generations,
            steps_per_generation, ...

    Returns:
        The run, to be iterated over: one `GenerationReport` per generation. At its end `result`
        holds the test before and after training, and the run directory. `stop()` ends it early.

    Raises:
        ValueError: If a setting is unknown or out of range, the run directory cannot be used, there
            is too little memory, or a reward function fails on a trial completion.
    """
    # 1. Check the arguments.
    if isinstance(env, Population):
        raise ValueError("evolve takes the population first: evolve(population, env, ...).")
    if not isinstance(population, Population):
        raise ValueError(
            f"evolve needs a Population, got {class_name(population)}. For one agent, make"
            " GRPO.population(1)."
        )
    console = console_for(progress)
    all_trackers = check_trackers(trackers)
    logging = LoggingConfig(
        trackers=tracker_names(all_trackers),
        keep_checkpoints=keep_checkpoints,
        checkpoint_steps=checkpoint_steps,
        completions=completions,
    )
    planned = Schedule(**schedule)
    if strategy is None:
        chosen = default_strategy(
            len(population),
            population.space,
            networks=population.members.step_based,
            evolve_network=population.members.evolves,
        )
    else:
        chosen = chosen_strategy(strategy)
    # 2. Check the memory and the user's code. The run trains when it is iterated over.
    population.check(env)
    _warn_of_unused_methods(population)
    if not skip_memory_check:
        _check_memory(population, env, planned)
    if isinstance(env, SupportsPreflight):
        env.preflight()
    if run_dir is not None:
        check_resumable(chosen)
    trainer = Trainer(
        population,
        env,
        schedule=planned,
        strategy=chosen,
        fitness=None if fitness is None else FitnessConfig.of(fitness),
        run_dir=None if run_dir is None else RunDir(run_dir, logging),
        callbacks=callbacks,
        proposer=_proposer(proposer),
        trackers=all_trackers,
    )
    return Run(trainer, console)


@names_unknown
@lists_options(LIMITS)
def resume(
    run_dir: str | Path,
    env: GroupEnvironment,
    *,
    actor_network: nn.Module | None = None,
    strategy: Strategy | type[Strategy] | None = None,
    algorithm: type[Agent] | None = None,
    allow_changed_data: bool = False,
    trackers: "str | Sequence[str | GeneralTracker] | None" = None,
    callbacks: Sequence[Callback] = (),
    proposer: Proposer | ProposalFunction | None = None,
    progress: bool | None = None,
    skip_memory_check: bool = False,
    **limits: Any,
) -> Run:
    """Continue a run from its newest complete checkpoint.

    `for generation in resume(...)` continues as if the run had never stopped. The `population` of
    the returned run has the members.

    Args:
        run_dir: Directory of the run.
        env: Environment, with the same questions, prompts, rewards and arguments as before.
        actor_network: Base model of the run. Small networks need it only for a custom module.
        strategy: Class or instance of a custom strategy, as names found in a checkpoint are never
            imported.
        algorithm: Class of custom agents, for the same reason.
        allow_changed_data: Continue even if the environment differs. Journal and report list the
            differences; fitness before and after cannot be compared.
        trackers: See `evolve`. None = those of the run that have names, which continue their runs.
        callbacks: See `evolve`.
        proposer: See `evolve`. Texts that the run has asked for are not asked for again.
        progress: Show the progress of the run; see `evolve`.
        skip_memory_check: See `evolve`.
        limits: Fields of `Schedule` to change: generations, max_timesteps, max_tokens, max_seconds,
            target_fitness, test_questions.

    Raises:
        CheckpointError: If there is no complete checkpoint, or the base model differs.
        ValueError: If a limit is unknown or out of range, or strategy, algorithm or environment
            differ or are missing.
    """
    # 1. Check the arguments.
    if not isinstance(run_dir, str | Path):
        raise ValueError(
            "resume takes the run directory first: resume(run_dir, env), got"
            f" {class_name(run_dir)}."
        )
    # 2. Open the run and check the data.
    console = console_for(progress)
    saved = open_run(run_dir, writable=True)
    for error in saved.skipped:
        warn(f"Skipped an unusable checkpoint: {error}")
    schedule = replace(saved.record.schedule, **limits)
    logging = saved.record.logging
    all_trackers = check_trackers(logging.trackers if trackers is None else trackers)
    logging = replace(logging, trackers=tracker_names(all_trackers))
    chosen = saved.strategy(strategy)
    changed = saved.check_data(env, allowed=allow_changed_data)
    # 3. Restore members and state.
    population, run_state = saved.restore(actor_network, algorithm=algorithm)
    population.check(env)
    if not skip_memory_check:
        _check_memory(population, env, schedule)
    trainer = Trainer(
        population,
        env,
        schedule=schedule,
        strategy=chosen,
        fitness=saved.record.fitness,
        run_dir=saved.run_dir(run_dir, logging),
        run_state=run_state,
        changed_data=changed,
        callbacks=callbacks,
        proposer=_proposer(proposer),
        trackers=all_trackers,
    )
    if trainer.limits.finished():
        warn(
            f"The run in {run_dir} has finished ({trainer.limits.reached()}). Pass a higher limit"
            " to train further."
        )
    return Run(trainer, console)


def _proposer(given: Proposer | ProposalFunction | None) -> Proposer | None:
    """Return a proposer; a function gets the default time limit."""
    if given is None or isinstance(given, Proposer):
        return given
    try:
        return Proposer(function=given)
    except ValueError as error:
        raise ValueError(f"proposer: {error}") from error


_METHODS_OF_ONE_AGENT = (
    "get_action",
    "predict",
    "generate",
    "learn",
    "test",
    "mutate",
    "clone",
    "preprocess_observation",
    "get_policy",
)
"""Methods of agents that a run has no use for."""


def _warn_of_unused_methods(population: Population) -> None:
    """Warn if the user's algorithm, or wrapper of agents, defines methods that no run calls."""
    algorithm = population.algorithm
    wrapper = type(population[0])
    unused = _methods_of_user(algorithm, ("__init__", *_METHODS_OF_ONE_AGENT))
    # With a learning step of its own, an algorithm may define `learn` for loops of one agent.
    learn = f"{algorithm.__name__}.learn"
    if learn in unused and _methods_of_user(algorithm, ("learn_together",)):
        unused.remove(learn)
    if wrapper is not algorithm:
        unused += _methods_of_user(wrapper, _METHODS_OF_ONE_AGENT)
    if unused:
        warn(
            f"evolve does not call {', '.join(unused)}, as it creates, samples and trains all"
            " members together. Define the learning step in learn_together, and change observations"
            " and rewards in the environment."
        )


def _methods_of_user(owner: type, names: Sequence[str]) -> list[str]:
    """Return those of a class's methods that were defined outside of this package."""
    found = []
    for name in names:
        method = getattr(owner, name, None)
        if method is not None and not str(method.__module__).startswith("evogrpo."):
            found.append(f"{owner.__name__}.{name}")
    return found


def _check_memory(population: Population, env: GroupEnvironment, schedule: Schedule) -> None:
    """Raise ValueError if the run needs more memory than is available."""
    task_type = TASK_TYPES.get(population.members.kind)
    if task_type is not None:  # the memory of custom members is unknown
        check_memory(task_type.memory_need(population, env, schedule))
