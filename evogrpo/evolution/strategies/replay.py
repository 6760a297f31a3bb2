"""Replay: train with the hyperparameter schedule that an earlier run found, without search (arXiv:1711.09846)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from evogrpo.config.checks import refuse_unknown, whole_between
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import check_group_size
from evogrpo.evolution.history import History
from evogrpo.evolution.plan import Choice, Plan
from evogrpo.evolution.strategies.strategy import Stateless


@dataclass(frozen=True, kw_only=True)
class ScheduleStage:
    """Part of a hyperparameter schedule with constant hyperparameters.

    Attributes:
        hyperparameters: Hyperparameters of this stage.
        generations: Learning steps of each generation; an evaluation follows each generation.
        samples_per_step: Samples of a learning step.

    Raises:
        ValueError: If a number is out of range, or `group_size` does not divide `samples_per_step`.
    """

    hyperparameters: Hyperparameters
    generations: tuple[int, ...]
    samples_per_step: int

    def __post_init__(self) -> None:
        if not isinstance(self.generations, Sequence) or isinstance(self.generations, str) or not self.generations:
            raise ValueError(f"generations must list the learning steps of each generation, got {self.generations!r}")
        counts = tuple(whole_between("each of generations", each, 1) for each in self.generations)
        object.__setattr__(self, "generations", counts)
        object.__setattr__(self, "samples_per_step", whole_between("samples_per_step", self.samples_per_step, 2))
        check_group_size(self.hyperparameters.group_size, self.samples_per_step)

    @property
    def steps(self) -> int:
        """Total number of learning steps."""
        return sum(self.generations)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "generations": list(self.generations),
            "samples_per_step": self.samples_per_step,
            "hyperparameters": self.hyperparameters.to_json(),
        }

    @classmethod
    def from_json(cls, values: object) -> Self:
        """Build from what `to_json` returned.

        Raises:
            ValueError: If a field is unknown, missing or invalid.
        """
        names = tuple(cls.__dataclass_fields__)
        if not isinstance(values, Mapping) or not isinstance(values.get("hyperparameters"), Mapping):
            raise ValueError(f"a stage must be a mapping with hyperparameters, got {values!r:.80}")
        refuse_unknown("field of a stage", values, names)
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"a stage must have {', '.join(names)}, missing {', '.join(missing)}")
        return cls(**{**values, "hyperparameters": Hyperparameters.from_json(values["hyperparameters"])})


@dataclass(frozen=True, kw_only=True)
class Replay(Stateless):
    """Train members with a fixed hyperparameter schedule, without selection or mutation.

    Every member follows the schedule separately. A run of a single member shows the value of the schedule without the
    search that found it. Hyperparameters change between generations. Failed members are retired.

    Attributes:
        stages: `ScheduleStage` records, or mappings of their fields, in order. The run starts with the first one; the
            last one lasts until the end.

    Raises:
        ValueError: If there is no stage, or a stage is invalid.

    Source: Jaderberg et al., 2017 (arXiv:1711.09846); ray.tune.schedulers.PopulationBasedTrainingReplay.
    """

    stages: tuple[ScheduleStage, ...]

    mutates = False

    def __post_init__(self) -> None:
        if not isinstance(self.stages, Sequence) or isinstance(self.stages, str) or not self.stages:
            raise ValueError(f"stages must list at least one stage of a schedule, got {self.stages!r:.80}")
        stages = tuple(
            each if isinstance(each, ScheduleStage) else ScheduleStage.from_json(each) for each in self.stages
        )
        object.__setattr__(self, "stages", stages)

    @property
    def generations(self) -> int:
        """Number of generations of the whole schedule."""
        return sum(len(stage.generations) for stage in self.stages)

    def stage_of(self, generation: int) -> tuple[ScheduleStage, int]:
        """Return the stage and learning steps of a generation, counted from 1; the last one repeats after the end."""
        flat = [(stage, steps) for stage in self.stages for steps in stage.generations]
        return flat[min(generation, len(flat)) - 1]

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Give every member the hyperparameters of the next generation.

        Raises:
            ValueError: If all members failed.
        """
        last = history.last
        stage, steps = self.stage_of(last.number + 1)
        choices = []
        for slot, record in enumerate(last.slots):
            if record.member is None or record.fitness is None:
                choices.append(Choice(parent=None, reason="empty" if record.member is None else "retired: failed"))
            elif record.member.hyperparameters == stage.hyperparameters:
                choices.append(Choice(parent=slot, reason=f"kept: stage of {stage.steps} learning steps"))
            else:
                choices.append(Choice(parent=slot, reason="next stage", hyperparameters=stage.hyperparameters))
        new_samples = None if stage.samples_per_step == last.samples_per_step else stage.samples_per_step
        new_steps = None if steps == last.steps_per_generation else steps
        return Plan.from_choices(history, choices, samples_per_step=new_samples, steps_per_generation=new_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return {"stages": [stage.to_json() for stage in self.stages]}
