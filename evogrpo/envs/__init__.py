"""Environments: what agents act in; each name is imported on first use, so that verifiers' workers stay light."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "SPLITS",
    "TASKS",
    "Conversations",
    "Filtered",
    "GroupEnvironment",
    "HuggingFaceGym",
    "MultiTurnGym",
    "RewardError",
    "Scores",
    "Split",
    "StepRewards",
    "Task",
    "deal_starts",
]

_HOMES = {
    "SPLITS": "groups",
    "TASKS": "prompts.builtin",
    "Conversations": "groups",
    "Filtered": "prompts.splits",
    "GroupEnvironment": "groups",
    "HuggingFaceGym": "prompts.huggingface",
    "MultiTurnGym": "prompts.conversations",
    "RewardError": "prompts.rewards.reward_functions",
    "Scores": "groups",
    "Split": "groups",
    "StepRewards": "prompts.rewards.step_rewards",
    "Task": "prompts.builtin",
    "deal_starts": "groups",
}

if TYPE_CHECKING:
    from evogrpo.envs.groups import SPLITS, Conversations, GroupEnvironment, Scores, Split, deal_starts
    from evogrpo.envs.prompts.builtin import TASKS, Task
    from evogrpo.envs.prompts.conversations import MultiTurnGym
    from evogrpo.envs.prompts.huggingface import HuggingFaceGym
    from evogrpo.envs.prompts.rewards.reward_functions import RewardError
    from evogrpo.envs.prompts.rewards.step_rewards import StepRewards
    from evogrpo.envs.prompts.splits import Filtered
else:  # hidden from type checkers, which would otherwise accept any misspelt name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
