"""Start and resume of a configured run, with its run directory."""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evogrpo
from evogrpo.distributed import processes
from evogrpo.safe_parsing import dump_json, dump_yaml, load_json, read_yaml_file
from evogrpo.storage.atomic_files import replace_file
from evogrpo.synonyms import counterpart
from evogrpo.training.configuration.reading import override, parse_config, parse_override
from evogrpo.training.configuration.sections import CONFIG_FILE, CONFIG_HEAD, Config
from evogrpo.training.configuration.user_code import VLLM, check_resumable, make_sampler
from evogrpo.training.run_dir import RunDir, StoredRun, open_run
from evogrpo.training.schedule import LIMITS, Schedule
from evogrpo.training.task_types import PreparedRun
from evogrpo.training.trainer import Trainer
from evogrpo.validation import flat

_RESUMABLE_KEYS = ("run_dir", "model", "device", "base_parts", "sampler", "logging", "run_id")
"""Keys that may change when a run is resumed."""
_RESUMABLE_OVERRIDES = (("model",), ("device",), ("base_parts",))
"""Keys that an override may change when a run is resumed, besides the limits of the schedule."""


@contextmanager
def new_run_dir(name: str, requested: Path | None = None) -> Iterator[Path]:
    """Create the directory of a new run, an absolute path.

    Remove it afterwards if nothing was written.

    Args:
        name: Name of the run: the first of `runs/NAME`, `runs/NAME-2`, ... that does not exist is
            created.
        requested: Directory to create instead, which may exist; None = choose one by `name`.

    Raises:
        ValueError: If the given directory holds a run or cannot be used.
    """
    if requested is not None:
        RunDir(requested).check_unused()
    for number in itertools.count(1):
        # Absolute, because user code may change the working directory.
        folder = (requested or Path("runs", name if number == 1 else f"{name}-{number}")).absolute()
        # innermost first
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


def make_trainer(
    prepared: PreparedRun,
    run_dir: RunDir | None = None,
    *,
    with_servers: bool = True,
    **resumed: Any,
) -> Trainer:
    """Make the trainer of a configured run.

    Args:
        prepared: The prepared configuration.
        run_dir: Run directory; None = no records.
        with_servers: Connect to vLLM servers; False = only check their settings, and sample with
            the bank.
        resumed: Arguments of `Trainer` for a stored run, such as population and run_state; they
            replace those of the configuration.
    """
    config = prepared.config
    options = {
        "schedule": config.schedule,
        "strategy": config.strategy,
        "fitness": config.fitness,
        "description": {
            "task": config.task.label,
            **({"model": config.model} if config.model else {}),
        },
    }
    if "population" in resumed:
        population = resumed["population"]
    else:
        population = prepared.population()
    if config.sampler is not None:
        sampler = make_sampler(config.sampler, population)
        if with_servers or config.sampler["name"] != VLLM:
            population.sample_with(sampler)
    return Trainer(
        env=prepared.env, run_dir=run_dir, **{**options, **resumed, "population": population}
    )


def start(prepared: PreparedRun, run_dir: Path, *, dry_run: bool = False) -> Trainer:
    """Make the population and create the run directory.

    Args:
        prepared: The prepared configuration.
        run_dir: Directory of the run.
        dry_run: Make the same checks, but write nothing and connect to no vLLM server.

    Raises:
        ValueError: If a value cannot be stored, the weights cannot be loaded, or the directory
            already holds a run or cannot be used.
    """
    config = prepared.config
    dump_json(config.to_json(), what="configuration")
    check_resumable(config.strategy)
    folder = RunDir(run_dir, config.logging, config=config.to_json())
    if dry_run:
        folder.check_unused()
        if run_dir.is_dir() and not os.access(run_dir, os.W_OK | os.X_OK):
            raise ValueError(
                f"Files in {run_dir} cannot be written. Change its permissions, or choose another"
                " folder."
            )
        return make_trainer(prepared, with_servers=False)
    trainer = make_trainer(prepared, folder)
    if processes().is_rank_zero:
        write_config(dataclasses.replace(config, run_id=folder.run_id), run_dir)
    return trainer


def write_config(config: Config, run_dir: Path) -> None:
    """Write a resolved configuration to a run directory, atomically."""
    head = f"{CONFIG_HEAD} {evogrpo.__version__} for `evogrpo resume`.\n"
    # YAML cannot hold subclasses of text and numbers
    values = load_json(dump_json(config.to_json()))
    replace_file(run_dir / CONFIG_FILE, (head + dump_yaml(values)).encode("utf-8"))


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """Stored run that can be resumed.

    Attributes:
        saved: Its newest complete checkpoint.
        config: Its configuration, with overrides.
        schedule: Its schedule, with overrides.
        ended: Limit that is reached already, as text; None if the run can continue.
    """

    saved: StoredRun
    config: Config
    schedule: Schedule
    ended: str | None


def resumable_overrides(overrides: Sequence[str]) -> list[str]:
    """Return those overrides of a new run that `read_resumable` accepts."""
    accepted = {*_RESUMABLE_OVERRIDES, *(("schedule", name) for name in LIMITS)}
    return [text for text in overrides if "=" in text and parse_override(text)[0] in accepted]


def read_resumable(
    run_dir: Path, overrides: Sequence[str] = (), *, allow_changed_data: bool = False
) -> Resumable:
    """Lock the directory of a run and read what `resume` needs.

    Args:
        run_dir: Directory of the run.
        overrides: `key=value` for a limit of the schedule, such as `generations=8`, for `model`,
            `device` or `base_parts`.
        allow_changed_data: Accept a stored configuration that names another task.

    Raises:
        ValueError: If the directory holds no run or is locked, its configuration is damaged or was
            changed, or an override is refused.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(
            f"{run_dir} has no {CONFIG_FILE}. Give the directory of a run that `evogrpo demo` or"
            " `evogrpo train` started. Resume a run of evolve() in Python with evogrpo.resume()."
        )
    # 1. Divide the overrides into limits of the schedule and settings of the configuration.
    limits: dict[str, Any] = {}
    rest: list[str] = []
    for text in overrides:
        keys, value = parse_override(text)
        name = keys[-1]
        if name in LIMITS and keys[:-1] in ((), ("schedule",)):
            limits[name] = value
        elif keys in _RESUMABLE_OVERRIDES:
            rest.append(text)
        elif counterpart(name, LIMITS) is not None:
            raise ValueError(f"unknown limit {name!r}. Use {counterpart(name, LIMITS)}.")
        else:
            raise ValueError(
                f"A resumed run may only change {', '.join(LIMITS)}, model, device and base_parts,"
                f" got {'.'.join(keys)!r}. Start a new run with `evogrpo train` instead."
            )
    # 2. Open the run, and check that its configuration was not changed.
    config = parse_config(override(read_yaml_file(path), rest))
    saved = open_run(run_dir, writable=True)
    _check_unchanged(saved, config, path, allow_changed_data=allow_changed_data)
    schedule = dataclasses.replace(saved.record.schedule, **limits)
    run_state = saved.record.run_state
    # 3. A run is finished if it has ended, was tested (unless test_questions is 0), and has reached
    # a limit. Overrides count. `Limits` decides about runs that stopped within a generation or
    # before the end of the first.
    ended = None
    asked = run_state.test_questions
    was_tested = schedule.test_questions == 0 or (
        run_state.tested is not None and limits.get("test_questions", asked) == asked
    )
    if (
        run_state.ended is not None
        and was_tested
        and run_state.generation > 0
        and run_state.step_in_generation == 0
    ):
        ended = run_state.reached_limit(schedule)
    return Resumable(saved=saved, config=config, schedule=schedule, ended=ended)


def _check_unchanged(
    saved: StoredRun, config: Config, path: Path, *, allow_changed_data: bool
) -> None:
    """Check that a stored configuration still describes the same experiment.

    Args:
        saved: The run, with the configuration that it began with.
        config: Configuration in the file.
        path: The file.
        allow_changed_data: Accept another task; `resume` compares the environments.

    Raises:
        ValueError: With every name that differs.
    """
    if config.run_id not in (None, saved.record.run_id):
        raise ValueError(
            f"{path} is the configuration of another run. Restore the file of this run."
        )
    if saved.record.config is None:
        return
    refused = _differences(saved.record.config, config, "task." if allow_changed_data else ())
    if refused:
        raise ValueError(
            f"{path} was changed since the run began: {', '.join(refused)}. Restore these values,"
            " or start a new run with `evogrpo train`. Pass new limits to `evogrpo resume`."
        )


def _differences(
    stored: Mapping[str, Any], config: Config, ignored: str | tuple[str, ...]
) -> list[str]:
    """Return the settings that differ and must not, as text, except for names that start with a prefix in `ignored`."""
    # The stored configuration was JSON, in which tuples become lists.
    old = flat(stored)
    new = flat(json.loads(json.dumps(config.to_json())))
    return [
        f"{name} {old.get(name)!r} -> {new.get(name)!r}"[:200]
        for name in {**old, **new}
        if old.get(name) != new.get(name)
        and name.split(".")[0] not in _RESUMABLE_KEYS
        and not name.startswith(ignored)
    ]


def ignored_settings(stored: Config, config: Config) -> list[str]:
    """Return the settings of `config` that a resumed run does not adopt, as text: "name stored -> given"."""
    precision = ("precision",) if config.precision == "auto" else ()  # the stored one was chosen
    limits = tuple(f"schedule.{name}" for name in LIMITS)
    return _differences(json.loads(json.dumps(stored.to_json())), config, (*limits, *precision))


def resume(
    prepared: PreparedRun, resumable: Resumable, run_dir: Path, *, allow_changed_data: bool = False
) -> Trainer:
    """Restore a run from its newest complete checkpoint.

    Args:
        prepared: Its prepared configuration.
        resumable: Its stored state.
        run_dir: Directory of the run.
        allow_changed_data: Continue even if questions, rewards or environment differ from those at
            the start.

    Raises:
        ValueError: If these differ, the weights cannot be loaded, or they are not the ones the run
            was trained on.
    """
    saved = resumable.saved
    changed = saved.check_data(prepared.env, allowed=allow_changed_data)
    population, run_state = prepared.restore(saved)
    return make_trainer(
        prepared,
        saved.run_dir(run_dir, prepared.config.logging),
        population=population,
        schedule=resumable.schedule,
        strategy=saved.strategy(prepared.config.strategy),
        run_state=run_state,
        changed_data=changed,
    )
