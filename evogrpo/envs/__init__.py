"""Environments: what agents act in."""

from evogrpo.envs.groups import SPLITS, Episodes, GroupEnvironment, Scores, Split, deal_starts
from evogrpo.envs.huggingface import HuggingFaceGym
from evogrpo.envs.rewards import RewardError
from evogrpo.envs.splits import Filtered
from evogrpo.envs.tasks import TASKS, Task

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
    "Task",
    "deal_starts",
]
