"""Environments. Names are imported on first use, so that verifier workers load no more than they need."""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "SPLITS", "TASKS", "EnvironmentGym", "Filtered", "GroupEnvironment", "HuggingFaceGym", "MultiTurnGym",
    "PromptBatch", "RewardError", "Scores", "Split", "StepRewards", "Task", "deal_starts",
]  # fmt: skip

# Public names by the module that defines them.
_MODULES = {
    "protocol": ("SPLITS", "GroupEnvironment", "PromptBatch", "Scores", "Split", "deal_starts"),
    "text.datasets": ("Filtered",),
    "text.environment_gym": ("EnvironmentGym",),
    "text.huggingface_gym": ("HuggingFaceGym",),
    "text.multi_turn_gym": ("MultiTurnGym",),
    "text.reward_functions": ("RewardError", "StepRewards"),
    "text.tasks": ("TASKS", "Task"),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from evogrpo.envs.protocol import SPLITS, GroupEnvironment, PromptBatch, Scores, Split, deal_starts
    from evogrpo.envs.text.datasets import Filtered
    from evogrpo.envs.text.environment_gym import EnvironmentGym
    from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
    from evogrpo.envs.text.multi_turn_gym import MultiTurnGym
    from evogrpo.envs.text.reward_functions import RewardError, StepRewards
    from evogrpo.envs.text.tasks import TASKS, Task
else:  # hidden from type checkers, so that they report misspelt names

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
