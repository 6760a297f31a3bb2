"""Task types, by their name in journals and by the task section of a configuration."""

from collections.abc import Mapping
from dataclasses import fields

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.config.checks import refuse_unknown
from evogrpo.training.configuration.environment_tasks import EnvironmentTask, ParallelTask
from evogrpo.training.configuration.sections import TaskSection
from evogrpo.training.task_types.language import LanguageTask
from evogrpo.training.task_types.networks import NetworkTask
from evogrpo.training.task_types.task_type import AnyTaskType

_NETWORKS = NetworkTask(word="networks", tasks=(EnvironmentTask,), algorithm=GRPO, chooses_sizes=True)
_TEAMS = NetworkTask(word="joint", tasks=(ParallelTask,), algorithm=MultiAgentGRPO, chooses_sizes=False)
TASK_TYPES: Mapping[str, AnyTaskType] = {kind.word: kind for kind in (LanguageTask(), _NETWORKS, _TEAMS)}
_TASKS: Mapping[str, type[TaskSection]] = {task.key: task for kind in TASK_TYPES.values() for task in kind.tasks}
_KIND_OF: Mapping[type[TaskSection], AnyTaskType] = {task: kind for kind in TASK_TYPES.values() for task in kind.tasks}


def task_type_of(task: TaskSection) -> AnyTaskType:
    """Return the type of a task section."""
    return _KIND_OF[type(task)]


def select_task(section: object) -> tuple[type[TaskSection], AnyTaskType]:
    """Return the class and the type of a task section, which follow from the key that is set.

    Raises:
        ValueError: If the section names no task or several.
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"task must be a mapping with one of the keys {', '.join(_TASKS)}, got {section!r:.80}")
    chosen = [key for key in _TASKS if section.get(key) is not None]
    if len(chosen) != 1:
        known = {field.name for task in _TASKS.values() for field in fields(task)}
        refuse_unknown("key in task", section, sorted(known))
        *others, last = (f"{task.description} (task.{key})" for key, task in _TASKS.items())
        raise ValueError(
            f"task must name {', '.join(others)} or {last}: exactly one of them, got {' and '.join(chosen) or 'none'}"
        )
    task = _TASKS[chosen[0]]
    return task, _KIND_OF[task]
