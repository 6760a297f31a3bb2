"""Environments: what agents act in; each name is imported on first use, so that verifiers' workers stay light."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "SPLITS",
    "TASKS",
    "Episodes",
    "Filtered",
    "GroupEnvironment",
    "HuggingFaceGym",
    "RewardError",
    "Scores",
    "Split",
    "StepRewards",
    "Task",
    "deal_starts",
]

_HOMES = {
    "SPLITS": "groups",
    "TASKS": "tasks",
    "Episodes": "groups",
    "Filtered": "splits",
    "GroupEnvironment": "groups",
    "HuggingFaceGym": "huggingface",
    "RewardError": "rewards",
    "Scores": "groups",
    "Split": "groups",
    "StepRewards": "step_rewards",
    "Task": "tasks",
    "deal_starts": "groups",
}

if TYPE_CHECKING:
    from evogrpo.envs.groups import SPLITS, Episodes, GroupEnvironment, Scores, Split, deal_starts
    from evogrpo.envs.huggingface import HuggingFaceGym
    from evogrpo.envs.rewards import RewardError
    from evogrpo.envs.splits import Filtered
    from evogrpo.envs.step_rewards import StepRewards
    from evogrpo.envs.tasks import TASKS, Task
else:  # hidden from type checkers, which would otherwise accept any misspelt name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
