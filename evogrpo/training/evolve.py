"""Starting a run from Python, and opening one again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.population import Population
from evogrpo.config.checks import lists_options, refuse_unknown
from evogrpo.envs.protocol import GroupEnvironment, SupportsPreflight
from evogrpo.evolution.fitness import FitnessBy, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
from evogrpo.evolution.strategies import Strategy, Tournament
from evogrpo.training.completions import CompletionsFormat
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.configuration.user_code import chosen_strategy
from evogrpo.training.display.console import console_for
from evogrpo.training.display.live import RunDisplay
from evogrpo.training.load_run import open_run
from evogrpo.training.loop.run import Run
from evogrpo.training.loop.trainer import Trainer
from evogrpo.training.memory import check_memory, kept_size
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.task_types.registry import TASK_TYPES
from evogrpo.warnings import warn

_RECORDS = ("run_dir", "keep_checkpoints", "checkpoint_steps", "completions", "completions_format")
_SHOWN = ("strategy", "progress", "skip_memory_check")
_EVOLVE = ("population", "env", "experience", "fitness", *_SHOWN, *_RECORDS)
_RESUME = ("run_dir", "env", *_SHOWN, "actor_network", "algorithm", "allow_changed_data")


@lists_options(Schedule.__dataclass_fields__, Schedule)
def evolve(
    population: Population,
    env: GroupEnvironment,
    *,
    strategy: Strategy | type[Strategy] | str | None = None,
    experience: SharedExperience | str = "own",
    fitness: FitnessConfig | FitnessBy | Mapping[str, Any] = "validation",
    run_dir: str | Path | None = None,
    keep_checkpoints: int = 2,
    checkpoint_steps: int | None = None,
    completions: int = 16,
    completions_format: CompletionsFormat = "jsonl",
    progress: bool | None = None,
    skip_memory_check: bool = False,
    **schedule: Any,
) -> Run:
    """Train a population generation by generation; whatever the caller wants to do in between goes in the loop body.

    Each generation trains every member for `steps_per_generation` learning steps on the same questions, measures
    fitness on the validation split, and lets the strategy plan who is copied and mutated. After the last generation
    the best member ever and the untrained base answer the test split.

    Args:
        population: The members; changed in place.
        env: Where they act.
        strategy: The rule of selection and mutation: a strategy, its class, or the name of a built-in one such as
            "narrowing"; `Tournament()` by default. With a `run_dir`, one of your own must
            be of a class that a module other than the program itself defines, so that the run can be resumed.
        experience: "own" lets every member learn from its own samples; "shared", or a `SharedExperience` with settings,
            from those of others as well.
        fitness: How fitness is measured: "validation", "rollouts" or "both", or a mapping of the settings of
            `evogrpo.evolution.FitnessConfig`.
        run_dir: Where the journal, the checkpoints, the best member and TensorBoard logs go; None keeps no record.
        keep_checkpoints: See `evogrpo.training.configuration.sections.LoggingConfig`.
        checkpoint_steps: Likewise.
        completions: Likewise.
        completions_format: Likewise.
        progress: Whether the run is shown while it goes on, as on the command line; None = where somebody looks: if
            stdout is a terminal, and in a notebook.
        skip_memory_check: Go on although more memory is estimated to be needed than is there.
        schedule: The fields of `evogrpo.training.schedule.Schedule`: generations, steps_per_generation, ...

    Returns:
        The run, to be iterated over: one `GenerationReport` per generation. At its end `result` holds the test, before
        and after, and where everything lies; `stop()` ends it early.

    Raises:
        ValueError: If a setting is unknown or out of range, the run directory is no place for a run, more memory is
            needed than is there, or a reward function does not serve for a made-up completion.
    """
    if isinstance(env, Population):
        raise ValueError("evolve takes the population first: evolve(population, env, ...).")
    refuse_unknown("argument of evolve", schedule, [*_EVOLVE, *Schedule.__dataclass_fields__])
    console = console_for(progress)
    logging = LoggingConfig(
        keep_checkpoints=keep_checkpoints,
        checkpoint_steps=checkpoint_steps,
        completions=completions,
        completions_format=completions_format,
    )
    planned, shared = Schedule(**schedule), shared_experience(experience)
    measured = FitnessConfig.of(fitness)
    chosen = Tournament() if strategy is None else chosen_strategy(strategy)
    _check_memory(population, env, planned, chosen, shared, allowed=skip_memory_check)
    if isinstance(env, SupportsPreflight):
        env.preflight()
    run = Trainer(
        population,
        env,
        schedule=planned,
        strategy=chosen,
        experience=shared,
        fitness=measured,
        run_dir=None if run_dir is None else RunDir(run_dir, logging),
    )
    return _shown(run, console)


@lists_options(LIMITS)
def resume(
    run_dir: str | Path,
    env: GroupEnvironment,
    *,
    actor_network: nn.Module | None = None,
    strategy: Strategy | type[Strategy] | None = None,
    algorithm: type[Agent] | None = None,
    allow_changed_data: bool = False,
    progress: bool | None = None,
    skip_memory_check: bool = False,
    **limits: Any,
) -> Run:
    """Open a run that `evolve` began, where its newest complete checkpoint left it.

    `for generation in resume(...)` then goes on as if the run had never stopped; the members are its
    `population`.

    Args:
        run_dir: The run's folder.
        env: Where members act; it must be built as it was for the run: the same questions, prompts, rewards and
            arguments.
        actor_network: The base model the run was trained on; for small networks only a module of your own.
        strategy: For a strategy of your own its class, or one with the same settings: a name that is found in a
            checkpoint is never imported.
        algorithm: For agents of a class of your own that class, for the same reason.
        allow_changed_data: Go on although the environment differs; the journal and the report say how. Fitness before
            and after cannot be compared then.
        progress: Whether the run is shown while it goes on; see `evolve`.
        skip_memory_check: Likewise.
        limits: Fields of `Schedule` to change: generations, max_timesteps, max_tokens, max_seconds,
            target_fitness, test_questions.

    Raises:
        CheckpointError: If the folder holds no complete checkpoint, or the base model is another one.
        ValueError: If a limit is unknown or out of range, the strategy or the algorithm is missing or another one, or
            the environment is another one.
    """
    refuse_unknown("limit of a resumed run", limits, [*LIMITS, *_RESUME])
    if not isinstance(run_dir, str | Path):
        raise ValueError(f"resume takes the run directory first: resume(run_dir, env), got {type(run_dir).__name__}.")
    console = console_for(progress)
    saved = open_run(run_dir, go_on=True)
    for error in saved.skipped:
        warn(f"skipped what cannot be used: {error}")
    schedule, chosen = replace(saved.schedule, **limits), saved.strategy(strategy)
    changed = saved.check_data(env, allowed=allow_changed_data)
    population, so_far = saved.restore(actor_network, algorithm=algorithm)
    _check_memory(population, env, schedule, chosen, saved.experience, allowed=skip_memory_check)
    run = Trainer(
        population,
        env,
        schedule=schedule,
        strategy=chosen,
        fitness=saved.fitness,
        run_dir=saved.run_dir(run_dir),
        run_state=so_far,
        changed_data=changed,
        experience=saved.experience,
    )
    if run.finished():
        warn(f"The run in {run_dir} has finished ({run.ended()}). To train further, pass a higher limit.")
    return _shown(run, console)


def _check_memory(
    population: Population,
    env: GroupEnvironment,
    schedule: Schedule,
    strategy: Strategy,
    experience: SharedExperience | None,
    *,
    allowed: bool,
) -> None:
    """Refuse with a ValueError a run that needs more memory than there is."""
    if not isinstance(population, Population) or population.members.kind not in TASK_TYPES:
        return  # `Trainer` refuses the one, and nobody here knows the other
    population.check(env)
    need = TASK_TYPES[population.members.kind].need(population, env, schedule, experience)
    if need is not None:
        banks = population.executor.members.banks
        state = sum(banks.state_tensor(0, name).nbytes for name in banks.state_keys)
        check_memory(need.with_kept(kept_size(strategy, len(population), state)), allowed=allowed)


def _shown(run: Trainer, console: Console | None) -> Run:
    return Run(run, None if console is None else RunDisplay(console, run))
