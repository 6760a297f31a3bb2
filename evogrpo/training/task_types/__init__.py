"""Task types: the parts of a run that depend on its members, by name and by task section."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from evogrpo.algorithms.checkpointing import TASK_SETTINGS
from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.algorithms.population import Population
from evogrpo.config.agent import LanguageAgent
from evogrpo.config.search_space import LANGUAGE_RANGES, RLParameter
from evogrpo.storage.checkpoint import CheckpointError, is_path, read_record
from evogrpo.text import shown
from evogrpo.training.configuration.environment_tasks import EnvironmentTask, ParallelTask
from evogrpo.training.configuration.question_tasks import (
    BuiltinTask,
    DatasetTask,
    QuestionTask,
    ReasoningTask,
)
from evogrpo.training.configuration.sections import Config
from evogrpo.training.configuration.user_code import BUILT_IN_SAMPLERS
from evogrpo.training.forecast import MemoryNeed
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.networks import NetworkTask, NetworkTaskType
from evogrpo.training.video import RecordedEpisode
from evogrpo.validation import refuse_unknown

if TYPE_CHECKING:
    from evogrpo.training.task_types.language import LanguageTask


class LanguageTaskType:
    """Task type of language models, whose packages are imported on use.

    Attributes:
        word: Name in journals and checkpoints; see `evogrpo.reporting.records`.
        tasks: Task sections of this type: settings with `key` (that selects the section),
            `description` (of the key), `seed` (None = the run's), `label` (a short description of
            the task) and `facts()` (rows of the printed plan: user code that is executed).
        agent: Type of the section `agent`: settings that all members share.
        model: Default base model; None if members have none.
        hyperparameters: Defaults of the first member that differ from those of `Hyperparameters`.
        ranges: Default range of every hyperparameter for evolution.
        rows_are_samples: Members learn from whole samples; False = from single transitions.
        completions: Default number of completions written per learning step.
    """

    word = "language"
    tasks: Sequence[type[QuestionTask]] = (BuiltinTask, ReasoningTask, DatasetTask)
    agent = LanguageAgent
    model: str | None = "smollm2-135m"
    hyperparameters: Mapping[str, Any] = {}
    ranges: Mapping[str, RLParameter] = LANGUAGE_RANGES
    rows_are_samples = True
    completions = 16

    def check(self, config: Config) -> None:
        """Raise ValueError for sharding or vLLM with full fine-tuning."""
        if not config.agent.full_finetuning:
            return
        if config.base_parts > 1:
            raise ValueError(
                "agent.full_finetuning excludes base_parts, got base_parts:"
                f" {config.base_parts}. Remove one of them."
            )
        if config.sampler is not None and config.sampler["name"] in BUILT_IN_SAMPLERS:
            raise ValueError(
                f"agent.full_finetuning excludes vLLM, got sampler {config.sampler['name']!r}."
                " Remove one of them."
            )

    def build(self, config: Config, env: Any = None) -> "LanguageTask":
        """Check a configuration against device, architecture, tokenizer and task.

        Args:
            config: The configuration.
            env: Environment to use instead of the configured one.

        Raises:
            ValueError: If one of them does not fit.
        """
        from evogrpo.training.task_types.language import build

        return build(config, env)

    def memory_need(self, population: Population, env: Any, schedule: Schedule) -> MemoryNeed:
        """Estimate the memory from the base model, the members and the longest prompt."""
        from evogrpo.training.task_types.language import memory_need

        return memory_need(population, env, schedule)

    def record_videos(
        self, config: Config, best: Path, folder: Path, episodes: int
    ) -> tuple[RecordedEpisode, ...]:
        """Raise ValueError: language models have no videos."""
        raise ValueError(
            "Videos show an environment, but this run trains a language model. Its completions are"
            " in the report."
        )

    def usage(self, best: Path) -> str:
        """Return the expression that generates with the best member.

        A base model in a folder is loaded explicitly.
        """
        base_argument = ""
        note = ""
        with suppress(CheckpointError):  # its folder may be gone
            record = read_record(best, kind="agent")
            source = str(record["shared"]["source"])
            if is_path(source):
                base_argument = f", actor_network=evogrpo.load_base({source!r}).model"
            settings = record["member"]["hyperparameters"]["task_settings"]
            if any(isinstance(value, str) for value in settings.values()):
                note = f"  # with the texts of {best / TASK_SETTINGS} in the prompts"
        return f"evogrpo.GRPO.load({str(best)!r}{base_argument}).generate(prompts){note}"

    def next_command(self, run_dir: Path) -> tuple[str, tuple[str | Path, ...]]:
        """Return purpose and words of the command to print after a run: export of the best."""
        return "export member", ("export", run_dir, "FOLDER")


TaskType: TypeAlias = LanguageTaskType | NetworkTaskType
Task: TypeAlias = "LanguageTask | NetworkTask"
"""Configured task that was checked against the machine and the environment."""
_NETWORKS = NetworkTaskType(word="networks", tasks=(EnvironmentTask,), algorithm=GRPO)
_TEAMS = NetworkTaskType(word="joint", tasks=(ParallelTask,), algorithm=MultiAgentGRPO)
TASK_TYPES: Mapping[str, TaskType] = {
    each.word: each for each in (LanguageTaskType(), _NETWORKS, _TEAMS)
}
_TYPE_OF: Mapping[type[Any], TaskType] = {
    task: each for each in TASK_TYPES.values() for task in each.tasks
}
_TASKS: Mapping[str, type[Any]] = {task.key: task for task in _TYPE_OF}


def task_type_of(task: object) -> TaskType:
    """Return the type of a task section."""
    return _TYPE_OF[type(task)]


def select_task(section: object) -> tuple[type[Any], TaskType]:
    """Return class and task type of a task section, by the one key of `_TASKS` that it sets.

    Raises:
        ValueError: If the section sets no such key or several.
    """
    if not isinstance(section, Mapping):
        raise ValueError(
            f"task must be a mapping with one of the keys {', '.join(_TASKS)}, got"
            f" {shown(section)}."
        )
    chosen = [key for key in _TASKS if section.get(key) is not None]
    if len(chosen) != 1:
        # A misspelt key is a better answer than a missing one.
        known = {field.name for task in _TASKS.values() for field in fields(task)}
        refuse_unknown("key in task", section, sorted(known))
        named = " and ".join(chosen) or "none"
        raise ValueError(
            f"task must have exactly one of the keys {', '.join(_TASKS)}, got {named}."
        )
    task = _TASKS[chosen[0]]
    return task, _TYPE_OF[task]
