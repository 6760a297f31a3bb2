"""`evolve` and `resume`: start a run from Python, or continue one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.population import Population
from evogrpo.envs.protocol import GroupEnvironment, SupportsPreflight
from evogrpo.evolution.fitness import FitnessBy, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience, shared_experience
from evogrpo.evolution.strategies import Strategy, Tournament, default_measures
from evogrpo.training.configuration.sections import CompletionsFormat, LoggingConfig
from evogrpo.training.configuration.user_code import chosen_strategy
from evogrpo.training.console import console_for
from evogrpo.training.display import RunDisplay
from evogrpo.training.forecast import check_memory
from evogrpo.training.loop.run import Run
from evogrpo.training.loop.trainer import Callback, Trainer
from evogrpo.training.run_dir import RunDir, open_run
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.task_types import TASK_TYPES
from evogrpo.validation import lists_options, refuse_unknown
from evogrpo.warnings import warn

_RECORDS = ("run_dir", "keep_checkpoints", "checkpoint_steps", "completions", "completions_format")
_SHOWN = ("strategy", "callbacks", "progress", "skip_memory_check")
_EVOLVE = ("population", "env", "experience", "fitness", *_SHOWN, *_RECORDS)
_RESUME = ("run_dir", "env", *_SHOWN, "actor_network", "algorithm", "allow_changed_data")


@lists_options(Schedule.__dataclass_fields__, Schedule)
def evolve(
    population: Population,
    env: GroupEnvironment,
    *,
    strategy: Strategy | type[Strategy] | str | None = None,
    experience: SharedExperience | str | None = None,
    fitness: FitnessConfig | FitnessBy | Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    keep_checkpoints: int = 2,
    checkpoint_steps: int | None = None,
    completions: int = 16,
    completions_format: CompletionsFormat = "jsonl",
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    skip_memory_check: bool = False,
    **schedule: Any,
) -> Run:
    """Train a population generation by generation.

    Each generation trains every member for `steps_per_generation` learning steps on the same questions, measures
    fitness on the validation split, and clones and mutates members as the strategy plans. After the last generation
    the best member and the untrained base are evaluated on the test split.

    Args:
        population: The members; changed in place.
        env: Environment they act in.
        strategy: Rule of selection and mutation: a strategy, its class, or the name of a built-in one such as
            "narrowing"; `Tournament()` by default. With a `run_dir`, a custom class must be defined in an importable
            module other than the program itself, so that the run can be resumed.
        experience: "own" = every member learns from its own samples; "shared", or a `SharedExperience` with settings =
            from those of others as well. None = "shared" for the strategy `Leader`, otherwise "own".
        fitness: Measure of fitness: "validation", "rollouts" or "both", or a mapping of the settings of
            `evogrpo.evolution.FitnessConfig`. None = "both" for the strategy `Leader`, otherwise "validation".
        run_dir: Directory for journal, checkpoints, the best member and TensorBoard logs; None = keep no records.
        keep_checkpoints: See `evogrpo.training.configuration.sections.LoggingConfig`.
        checkpoint_steps: See `LoggingConfig`.
        completions: See `LoggingConfig`.
        completions_format: See `LoggingConfig`.
        callbacks: Hooks called after every learning step, generation and test; see `evogrpo.Callback`.
        progress: Show a live display; None = only on a terminal and in a notebook.
        skip_memory_check: Start although the estimated memory exceeds the available memory.
        schedule: The fields of `evogrpo.training.schedule.Schedule`: generations, steps_per_generation, ...

    Returns:
        The run, to be iterated over: one `GenerationReport` per generation. At its end `result` holds the test before
        and after training, and the run directory. `stop()` ends it early.

    Raises:
        ValueError: If a setting is unknown or out of range, the run directory cannot be used, there is too little
            memory, or a reward function fails on a trial completion.
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
    planned = Schedule(**schedule)
    chosen = Tournament() if strategy is None else chosen_strategy(strategy)
    shared, measured = default_measures(chosen)
    shared = shared if experience is None else shared_experience(experience)
    measured = measured if fitness is None else FitnessConfig.of(fitness)
    _check_memory(population, env, planned, shared, allowed=skip_memory_check)
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
        callbacks=callbacks,
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
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    skip_memory_check: bool = False,
    **limits: Any,
) -> Run:
    """Continue a run from its newest complete checkpoint.

    `for generation in resume(...)` continues as if the run had never stopped. Its members are in `population`.

    Args:
        run_dir: Directory of the run.
        env: Environment, with the same questions, prompts, rewards and arguments as before.
        actor_network: Base model of the run; for small networks only a custom module.
        strategy: Class or instance of a custom strategy, as names found in a checkpoint are never imported.
        algorithm: Class of custom agents, for the same reason.
        allow_changed_data: Continue although the environment differs. Journal and report list the differences; fitness
            before and after cannot be compared.
        callbacks: See `evolve`.
        progress: Show a live display; see `evolve`.
        skip_memory_check: See `evolve`.
        limits: Fields of `Schedule` to change: generations, max_timesteps, max_tokens, max_seconds,
            target_fitness, test_questions.

    Raises:
        CheckpointError: If there is no complete checkpoint, or the base model differs.
        ValueError: If a limit is unknown or out of range, or strategy, algorithm or environment differ or are missing.
    """
    refuse_unknown("limit of a resumed run", limits, [*LIMITS, *_RESUME])
    if not isinstance(run_dir, str | Path):
        raise ValueError(f"resume takes the run directory first: resume(run_dir, env), got {type(run_dir).__name__}.")
    console = console_for(progress)
    saved = open_run(run_dir, go_on=True)
    for error in saved.skipped:
        warn(f"Skipped an unusable checkpoint: {error}")
    schedule, chosen = replace(saved.record.schedule, **limits), saved.strategy(strategy)
    changed = saved.check_data(env, allowed=allow_changed_data)
    population, so_far = saved.restore(actor_network, algorithm=algorithm)
    _check_memory(population, env, schedule, saved.record.experience, allowed=skip_memory_check)
    run = Trainer(
        population,
        env,
        schedule=schedule,
        strategy=chosen,
        fitness=saved.record.fitness,
        run_dir=saved.run_dir(run_dir),
        run_state=so_far,
        changed_data=changed,
        experience=saved.record.experience,
        callbacks=callbacks,
    )
    if run.limits.finished():
        warn(f"The run in {run_dir} has finished ({run.limits.ended()}). To train further, pass a higher limit.")
    return _shown(run, console)


def _check_memory(
    population: Population,
    env: GroupEnvironment,
    schedule: Schedule,
    experience: SharedExperience | None,
    *,
    allowed: bool,
) -> None:
    """Raise ValueError if the run needs more memory than there is."""
    if not isinstance(population, Population) or population.members.kind not in TASK_TYPES:
        return  # `Trainer` raises for the first; memory of custom members is unknown
    population.check(env)
    need = TASK_TYPES[population.members.kind].need(population, env, schedule, experience)
    check_memory(need, allowed=allowed)


def _shown(run: Trainer, console: Console | None) -> Run:
    return Run(run, None if console is None else RunDisplay(console, run))
