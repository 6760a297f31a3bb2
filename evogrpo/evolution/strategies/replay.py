"""Replay: train with the schedule that an earlier run found, without search (arXiv:1711.09846)."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import MAX_SAMPLES, check_group_size
from evogrpo.evolution.history import History
from evogrpo.evolution.plan import Choice, Plan, Stateless
from evogrpo.validation import WHOLE, PositiveInt, dump, settings


@settings
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
    generations: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    samples_per_step: Annotated[int, Field(ge=2, le=MAX_SAMPLES), WHOLE]

    def __post_init__(self) -> None:
        check_group_size(self.hyperparameters.group_size, self.samples_per_step)

    @property
    def steps(self) -> int:
        """Total number of learning steps."""
        return sum(self.generations)


@settings
class Replay(Stateless):
    """Train members with a fixed hyperparameter schedule, without selection or mutation.

    Every member follows the schedule separately. A run of a single member shows the value of the
    schedule without the search that found it. Hyperparameters change between generations. Failed
    members are retired.

    Attributes:
        stages: `ScheduleStage` records, or mappings of their fields, in order. The run starts with
            the first one; the last one lasts until the end.

    Raises:
        ValueError: If there is no stage, or a stage is invalid.

    Source: Jaderberg et al., 2017 (arXiv:1711.09846);
    ray.tune.schedulers.PopulationBasedTrainingReplay.
    """

    mutates = False

    stages: Annotated[tuple[ScheduleStage, ...], Field(min_length=1)]

    @property
    def generations(self) -> int:
        """Number of generations of the whole schedule."""
        return sum(len(stage.generations) for stage in self.stages)

    def stage_of(self, generation: int) -> tuple[ScheduleStage, int]:
        """Return the stage and learning steps of a generation, counted from 1.

        The last one repeats after the end.
        """
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
        healthy = last.ranked
        for slot in range(history.capacity):
            if slot in last.empty:
                choices.append(Choice(parent=None, reason="empty"))
            elif slot not in healthy:
                choices.append(Choice(parent=None, reason="retired: failed"))
            elif last.member(slot).hyperparameters == stage.hyperparameters:
                choices.append(
                    Choice(parent=slot, reason=f"kept: stage of {stage.steps} learning steps")
                )
            else:
                choices.append(
                    Choice(parent=slot, reason="next stage", hyperparameters=stage.hyperparameters)
                )
        # None = as before.
        new_samples = None
        if stage.samples_per_step != last.samples_per_step:
            new_samples = stage.samples_per_step
        new_steps = None
        if steps != last.steps_per_generation:
            new_steps = steps
        return Plan.from_choices(
            history, choices, samples_per_step=new_samples, steps_per_generation=new_steps
        )

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return dump(self)
