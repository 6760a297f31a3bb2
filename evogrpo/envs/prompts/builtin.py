"""The built-in tasks, declared: name, one line for the reader, and how to build the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from evogrpo.envs.prompts.arithmetic import number_sequences, two_digit_sums
from evogrpo.envs.prompts.huggingface import HuggingFaceGym
from evogrpo.envs.prompts.templates import Tokenizer


class TaskBuilder(Protocol):
    """Builds a task's environment."""

    def __call__(self, tokenizer: Tokenizer, *, seed: int = 0, **options: Any) -> HuggingFaceGym:
        """Return the environment; options are the task's own settings, then HuggingFaceGym's."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A built-in task.

    Attributes:
        description: One line that says what is asked and rewarded.
        build: Returns its environment.
    """

    description: str
    build: TaskBuilder


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "two_digit_sums": Task(
            description="sums and differences of two two-digit numbers; reward 1 if the last number is right",
            build=two_digit_sums,
        ),
        "number_sequences": Task(
            description="the next of four numbers that rise by the same step; reward 1 if the last number is right",
            build=number_sequences,
        ),
    }
)
"""Built-in tasks by name."""
