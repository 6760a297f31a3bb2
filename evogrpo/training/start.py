"""Start of a run: build the task, check the memory, build the members, make the trainer.

Command line and Python read a configuration first (`configuration/reading.py`), and then both call
`start`. A resumed run begins with `read_run`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import evogrpo
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.safe_parsing import dump_json, dump_yaml, load_json, read_yaml_file
from evogrpo.storage.atomic_files import replace_file
from evogrpo.synonyms import counterpart
from evogrpo.training.callbacks import Callback
from evogrpo.training.configuration.reading import override, parse_config
from evogrpo.training.configuration.sections import (
    CONFIG_FILE,
    CONFIG_HEAD,
    Config,
    check_run_id,
)
from evogrpo.training.configuration.user_code import (
    BUILT_IN_SAMPLERS,
    check_resumable,
    make_proposer,
    make_sampler,
)
from evogrpo.training.forecast import check_memory
from evogrpo.training.proposals import check_proposer
from evogrpo.training.run_dir import RunDir, StoredRun, open_run
from evogrpo.training.run_state import RunState
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.task_types import Task, task_type_of
from evogrpo.training.trackers import check_trackers
from evogrpo.training.trainer import Trainer
from evogrpo.validation import flat

LOCATION_KEYS = ("model", "device", "base_parts")
"""Keys that an override may change when a run is resumed, besides the limits of the schedule."""
_RESUMABLE_KEYS = (*LOCATION_KEYS, "run_dir", "sampler", "logging", "run_id")
"""Keys of the stored configuration that may differ when a run is resumed."""


def start(
    config: Config,
    run_dir: Path | None = None,
    *,
    env: GymnasiumGroups | None = None,
    stored: StoredRun | None = None,
    allow_changed_data: bool = False,
    skip_memory_check: bool = False,
    dry_run: bool = False,
    callbacks: Sequence[Callback] = (),
    show: Callable[[Task], None] | None = None,
    progress: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Task, Trainer]:
    """Build the task and the trainer of a configuration, for a new run or a resumed one.

    Args:
        config: The configuration.
        run_dir: Directory of the run; None = keep no records.
        env: Environment to use instead of the configured one. Such a run has no `config.yaml`, so
            it can be resumed in Python only.
        stored: The run to resume; see `read_run`.
        allow_changed_data: Resume even if questions, rewards or environment have changed.
        skip_memory_check: Start even if the run is estimated not to fit in memory.
        dry_run: Make all checks, but write nothing and neither start vLLM nor connect to it.
        callbacks: Hooks of the run.
        show: If given, called with the task once it is checked, before the members are built.
        progress: Context manager to be active during each slow phase, called with its name.

    Returns:
        The task and the trainer. The caller closes the environment of the task.

    Raises:
        ValueError: If a part of the configuration fits neither machine nor task, a value cannot be
            stored, the run does not fit in memory, the weights cannot be loaded, or the directory
            already holds a run or cannot be used.
    """
    with ExitStack() as stack:
        # 1. Build the task: check trackers, device, base model, environment and reward functions.
        check_trackers(config.logging.trackers)
        with progress("checking the configuration"):
            task = task_type_of(config.task).build(config, env)
        stack.callback(task.env.close)
        # 2. Check data, strategy and proposer, and open the run directory. Nothing is written yet.
        config = task.config
        values = {**config.to_json(), "run_dir": None if run_dir is None else str(run_dir)}
        changed: tuple[str, ...] = ()
        folder = None
        if stored is not None:
            changed = stored.check_data(task.env, allowed=allow_changed_data)
            assert run_dir is not None
            folder = stored.run_dir(run_dir, config.logging)
        elif run_dir is not None:
            # Raises an error now, before weights are loaded, if it cannot be stored.
            dump_json(values, what="configuration")
            check_resumable(config.strategy)
            folder = RunDir(run_dir, config.logging, config=values if env is None else None)
        proposer = None if config.proposer is None else make_proposer(config.proposer)
        check_proposer(config.search_space, proposer)
        # 3. Show the plan, and check the memory before the weights are loaded.
        if show is not None:
            show(task)
        if not skip_memory_check:
            check_memory(task.forecast.memory)
        # 4. Build the members, or restore them from the checkpoint.
        run_state: RunState | None = None
        if stored is None:
            with progress("creating the population"):
                population = task.population()
        else:
            with progress("loading the members"):
                population, run_state = task.restore(stored)
        # The settings of vLLM were checked with the configuration.
        sampler = config.sampler
        if sampler is not None and not (dry_run and sampler["name"] in BUILT_IN_SAMPLERS):
            population.sample_with(make_sampler(sampler, population))
        # 5. Make the trainer, which creates the directory of a new run and locks it.
        description = {"task": config.task.label}
        if config.model is not None:
            description["model"] = config.model
        trainer = Trainer(
            population,
            task.env,
            schedule=config.schedule,
            strategy=config.strategy if stored is None else stored.strategy(config.strategy),
            fitness=config.fitness,
            run_dir=None if dry_run else folder,
            run_state=run_state,
            description=description,
            changed_data=changed,
            callbacks=callbacks,
            proposer=proposer,
            trackers=config.logging.trackers,
        )
        # 6. Write the configuration.
        if trainer.run_dir is not None and stored is None and env is None:
            write_config({**values, "run_id": trainer.run_dir.run_id}, trainer.run_dir.path)
        stack.pop_all()
    return task, trainer


def write_config(values: Mapping[str, Any], run_dir: Path) -> None:
    """Write the plain values of a resolved configuration to a run directory, atomically."""
    head = f"{CONFIG_HEAD} {evogrpo.__version__} for `evogrpo resume`.\n"
    # YAML cannot hold subclasses of text and numbers, which JSON makes plain.
    text = dump_yaml(load_json(dump_json(values)))
    replace_file(run_dir / CONFIG_FILE, (head + text).encode("utf-8"))


# ---- resuming


def read_run(
    run_dir: Path, overrides: Sequence[str] = (), *, allow_changed_data: bool = False
) -> tuple[StoredRun, Config]:
    """Lock the directory of a run, and read its newest complete checkpoint and its configuration.

    Args:
        run_dir: Directory of the run.
        overrides: `key=value` for a limit of the schedule, such as `generations=8`, or for `model`,
            `device` or `base_parts`.
        allow_changed_data: Accept a `config.yaml` whose section `task` was changed.

    Returns:
        The run, and its configuration with the overrides.

    Raises:
        ValueError: If the directory holds no run or is locked, its configuration is damaged or was
            changed, or an override is refused.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{run_dir} has no {CONFIG_FILE}. Restore the file, or give the directory of a run that"
            " `evogrpo demo` or `evogrpo train` started. Resume a run of evolve() in Python with"
            " evogrpo.resume()."
        )
    # 1. Divide the overrides into limits of the schedule and settings of the configuration.
    limits = {}
    settings = {}
    for name, value in flat(override({}, overrides)).items():
        limit = name.removeprefix("schedule.")
        if limit in LIMITS:
            limits[limit] = value
        elif name in LOCATION_KEYS:
            settings[name] = value
        else:
            similar = counterpart(name, LIMITS)
            advice = f"Use {similar}" if similar else "Start a new run with `evogrpo train`"
            raise ValueError(
                f"A resumed run may only change {', '.join(LIMITS + LOCATION_KEYS)}, got {name!r}."
                f" {advice}."
            )
    # 2. Read the configuration, and the newest complete checkpoint.
    values = read_yaml_file(path)
    stored = open_run(run_dir, writable=True)
    # 3. Check that the configuration still describes the same run.
    check_run_id(path, values.get("run_id"), stored.record.run_id)
    config = parse_config({**values, **settings})
    if stored.record.config is not None:
        ignored = ("task.",) if allow_changed_data else ()
        changed = _differences(stored.record.config, config, ignored)
        if changed:
            raise ValueError(
                f"{path} was changed since the run began: {', '.join(changed)}. Restore these"
                " values, or start a new run with `evogrpo train`. Pass new limits to `evogrpo"
                " resume`."
            )
    schedule = replace(stored.record.schedule, **limits)
    return stored, replace(config, schedule=schedule)


def ended(stored: StoredRun, schedule: Schedule) -> str | None:
    """Return the limit that a stored run has reached, as text; None if it can continue.

    `Limits` decides about runs that stopped within a generation or before the end of the first.
    """
    state = stored.record.run_state
    # The test may have had fewer questions than were requested.
    questions = (stored.record.schedule.test_questions, state.test_questions)
    was_tested = schedule.test_questions == 0 or (
        state.tested is not None and schedule.test_questions in questions
    )
    between_generations = state.generation > 0 and state.step_in_generation == 0
    if state.ended is None or not was_tested or not between_generations:
        return None
    return state.reached_limit(schedule)


def ignored_settings(stored: Config, config: Config) -> list[str]:
    """Return the settings of `config` that a resumed run does not adopt: "name stored -> given"."""
    ignored = [f"schedule.{name}" for name in LIMITS]
    if config.precision == "auto":  # the stored one was chosen
        ignored.append("precision")
    return _differences(stored.to_json(), config, tuple(ignored))


def _differences(stored: Mapping[str, Any], config: Config, ignored: tuple[str, ...]) -> list[str]:
    """Return the settings that differ and must not, as text.

    Names that start with a prefix in `ignored` may differ.
    """
    # In JSON, tuples become lists.
    old = flat(json.loads(json.dumps(stored)))
    new = flat(json.loads(json.dumps(config.to_json())))
    found = []
    for name in {**old, **new}:
        before = old.get(name)
        after = new.get(name)
        may_differ = name.split(".")[0] in _RESUMABLE_KEYS or name.startswith(ignored)
        if before != after and not may_differ:
            found.append(f"{name} {before!r} -> {after!r}"[:200])
    return found
