"""Replay: train a new agent with the hyperparameter schedule that a run found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

import evogrpo
from evogrpo.algorithms.population import Population
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.strategies import Replay, ScheduleStage
from evogrpo.reporting.lineage import best_schedule
from evogrpo.reporting.summary import read_summary
from evogrpo.safe_parsing import dump_json, dump_yaml, read_yaml_file
from evogrpo.storage.atomic_files import make_folder, replace_file
from evogrpo.text import expand_user, shown
from evogrpo.training.configuration.reading import (
    override,
    parse_config,
    parse_override,
    read_stored,
)
from evogrpo.training.configuration.sections import CONFIG_FILE, Config
from evogrpo.training.console import console_for
from evogrpo.training.evolve import Run, evolve
from evogrpo.training.schedule import LIMITS
from evogrpo.training.start import start
from evogrpo.validation import build, dump, validate
from evogrpo.warnings import warn

VERSION: Literal[1] = 1
"""Version of the file format; only this one is read."""

_HEAD = """\
# The hyperparameter schedule that led to member #{member} of {run}, written by evogrpo {version}.
# generations lists the learning steps of each generation, which an evaluation follows.
# `evogrpo replay {name}` trains one new agent with it, and runs code that the configuration names.
"""
_OF_SCHEDULE = ("hyperparameters", "search_space", "strategy")
"""Sections of the configuration that a schedule replaces."""
_OTHER_LIMITS = tuple(name for name in LIMITS if name not in ("generations", "test_questions"))


@dataclass(frozen=True, kw_only=True)
class HyperparameterSchedule:
    """Hyperparameter schedule of a run.

    Attributes:
        stages: Stages with their hyperparameters, in order.
        origin: Facts about the run that found the schedule and about its best member; untrusted.
        configuration: Configuration of the run as plain values; None if it was started in Python.
        version: Version of the file format.
    """

    stages: Annotated[tuple[ScheduleStage, ...], Field(min_length=1)]
    origin: Mapping[str, Any]
    configuration: Mapping[str, Any] | None = None
    version: Literal[1] = VERSION

    @property
    def strategy(self) -> Replay:
        """Strategy that applies the schedule."""
        return Replay(stages=self.stages)

    @property
    def limits(self) -> dict[str, Any]:
        """Fields of `Schedule` that a replay needs."""
        first = self.stages[0]
        return {
            "generations": self.strategy.generations,
            "steps_per_generation": first.generations[0],
            "samples_per_step": first.samples_per_step,
            **dict.fromkeys(_OTHER_LIMITS),
            "count_evaluations": False,
        }

    @classmethod
    def read(cls, source: str | Path) -> Self:
        """Read the schedule from a run directory, or from a file written by `write`.

        Raises:
            ValueError: If it is neither, no member has been evaluated, or a value is invalid.
        """
        # 1. Read a schedule file.
        path = expand_user(source, "source")
        if not path.is_dir():
            stored = read_yaml_file(path)
            if "stages" not in stored:
                raise ValueError(
                    f"{path} is not a hyperparameter schedule. Pass a run directory, or a file that"
                    " `evogrpo export --schedule` wrote."
                )
            # Raises an error for values of YAML that JSON does not have, such as dates.
            dump_json(stored, what=str(path))
            return validate(cls, stored, str(path), extra="forbid")
        # 2. Of a run directory, read the schedule of its best member.
        summary = read_summary(path)
        schedule = best_schedule(summary)
        member = schedule.member
        fitness = member.estimate
        if schedule.networks:
            warn(
                f"The network of member #{member.index} changed ({'; '.join(schedule.networks)}). A"
                " schedule contains hyperparameters only, so a replay keeps the first network."
            )
        # 3. Read the configuration of the run, and facts about it. A run that was started in Python
        #    has no configuration.
        values = read_stored(path, summary.facts.get("run_id"))
        tokens = summary.facts.get("micro_batch_tokens")  # the default depends on the device
        # Rounding depends on the size of micro-batches.
        if values is not None and tokens is not None:
            values["agent"] = {**(values.get("agent") or {}), "micro_batch_tokens": tokens}
        facts = {}
        for name in ("run_id", "version", "task", "model", "seed"):
            if summary.facts.get(name) is not None:
                facts[name] = summary.facts[name]
        facts |= {"member": member.index, "generation": member.generation}
        if fitness is not None:
            facts |= fitness.to_json()
        return cls(
            stages=schedule.stages,
            origin=facts,
            configuration=None if values is None else _without_location(values),
        )

    def write(self, file: str | Path) -> None:
        """Write the schedule to a new YAML file, which `read` reads.

        Raises:
            ValueError: If the file exists already.
        """
        path = expand_user(file, "file")
        if path.exists():
            raise ValueError(f"{path} already exists. Choose another file.")
        # `ascii` escapes newlines in untrusted names, which would end the comment.
        names = {
            "member": self.origin.get("member"),
            "run": ascii(str(self.origin.get("task") or "a run")),
            "name": ascii(path.name),
        }
        text = _HEAD.format(**names, version=evogrpo.__version__)
        values = dump(self)
        for stage in values["stages"]:
            # Leave out an empty mapping.
            if not stage["hyperparameters"]["task_settings"]:
                del stage["hyperparameters"]["task_settings"]
        text += dump_yaml(values, width=120, default_flow_style=None)
        make_folder(path.absolute().parent)
        replace_file(path, text.encode("utf-8"))

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """Return the configuration of a run of one agent with this schedule.

        Other settings are the earlier run's.

        Args:
            overrides: `key=value` with dots between nested keys, such as `seed=1`.

        Raises:
            ValueError: If the run was started in Python, or a value is invalid.
        """
        if self.configuration is None:
            raise ValueError(
                f"The run of this schedule has no {CONFIG_FILE}, so its task is unknown. Restore"
                " the file, or for a run that was started in Python, pass population and env to"
                " evogrpo.replay."
            )
        self._check_overrides(overrides)
        # 1. Keep the ranges that contain the first value of the schedule; others would be refused.
        values = _without_location(self.configuration)
        first = self.stages[0].hyperparameters
        space = build(HyperparameterConfig, values.get("search_space") or {}, "search_space")
        evolving = {}
        for name, parameter in space.items():
            value = first.get(name)
            if value is None or parameter.contains(value):
                evolving[name] = parameter
        # 2. Replace the settings that evolve a population by those of one agent.
        values |= {
            "hyperparameters": first.to_json(),
            "search_space": {name: parameter.to_json() for name, parameter in evolving.items()},
            "population": {"size": 1, "spread": False},
            "strategy": {"name": "replay", **self.strategy.to_json()},
            "schedule": {**(values.get("schedule") or {}), **self.limits},
        }
        return parse_config(override(values, overrides))

    def _check_overrides(self, overrides: Sequence[str]) -> None:
        """Raise ValueError for an override of a value that the schedule sets."""
        settings: set[str] = set()
        for stage in self.stages:
            settings.update(stage.hyperparameters.task_settings)
        for text in overrides:
            keys, _ = parse_override(text)
            name = ".".join(keys)
            # Task settings are written as task.settings.NAME and task.reward_weights.NAME.
            setting = name.removeprefix("task.").replace("settings.", "task.", 1)
            if keys[0] in _OF_SCHEDULE or setting in settings:
                raise ValueError(
                    f"{name} cannot be changed: a replay takes it from the schedule. Remove it, or"
                    " change the file that `evogrpo export --schedule` writes."
                )


def replay(
    source: str | Path,
    population: Population | None = None,
    env: GroupEnvironment | None = None,
    *,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    progress: bool | None = None,
    skip_memory_check: bool = False,
) -> Run:
    """Train a new agent with the hyperparameter schedule that an earlier run found.

    Args:
        source: Run directory of that run, or a file written by
            `evogrpo export RUN --schedule FILE`.
        population: New members that follow the schedule, for a run that was started in Python.
        env: Environment of `population`.
        run_dir: Run directory of the new run; None = keep no records.
        overrides: Changes of the configuration as on the command line, such as "seed=1"; not with
            `population`.
        progress: Show the progress of the run; see `evogrpo.evolve`.
        skip_memory_check: See `evogrpo.evolve`.

    Returns:
        The run. Iterate over it, or call `finish()`; it can be resumed like any other run.

    Raises:
        ValueError: If there is no such schedule, it is incompatible with the population, or the run
            was started in Python and `population` or `env` is missing.
    """
    # 1. Read the schedule.
    schedule = HyperparameterSchedule.read(source)
    if (population is None) != (env is None):
        raise ValueError(
            "population and env must be given together. Leave out both for a run with a"
            " configuration."
        )
    # 2. Train the given population.
    if population is not None and env is not None:
        if overrides:
            raise ValueError(
                f"overrides cannot be used with population, got {shown(overrides)}. Remove one of"
                " them."
            )
        for agent in population.agents:
            agent.hyperparameters = schedule.stages[0].hyperparameters
        return evolve(
            population,
            env,
            strategy=schedule.strategy,
            run_dir=run_dir,
            progress=progress,
            skip_memory_check=skip_memory_check,
            **schedule.limits,
        )
    # 3. Train an agent of the stored configuration.
    folder = None
    if run_dir is not None:
        folder = expand_user(run_dir, "run_dir")
    config = schedule.config(overrides)
    task, trainer = start(config, folder, skip_memory_check=skip_memory_check)
    return Run(trainer, console_for(progress), one_thread=task.one_thread)


def _without_location(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without run directory and run id."""
    return {name: value for name, value in values.items() if name not in ("run_dir", "run_id")}
