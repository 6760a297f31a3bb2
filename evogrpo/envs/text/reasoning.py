"""Tasks of reasoning-gym as prompt datasets with a reward function (optional extra `reasoning`)."""

import importlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.config.checks import refuse_unknown
from evogrpo.envs.protocol import SPLITS, Split
from evogrpo.envs.text.reward_functions import RewardFunc
from evogrpo.text import extra_command

DEFAULT_SIZES: Mapping[Split, int] = {"train": 2000, "validation": 64, "test": 256}


def is_installed() -> bool:
    """Return True if reasoning-gym is installed, not merely a folder of that name in the working directory."""
    try:
        importlib.metadata.distribution("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def reasoning_gym_tables(
    name: str,
    *,
    sizes: Mapping[Split, int] | None,
    seed: int,
    system_prompt: str | None,
    answer_tag: str | None,
    task_options: Mapping[str, Any],
) -> tuple[dict[Split, list[dict[str, Any]]], RewardFunc]:
    """Generate the questions of one task per split, and its reward function.

    Args:
        name: Name of the task.
        sizes: Questions per split; missing splits get their default size.
        seed: Seed of the questions.
        system_prompt: System message before each question, or None.
        answer_tag: Tag with the answer to score; None = the whole completion.
        task_options: Settings of the task.

    Returns:
        Rows with the columns prompt (messages), question, answer and metadata, per split; and a reward function in
        TRL's form.

    Raises:
        ValueError: If a split, the task, or a setting is unknown.
        ImportError: If reasoning-gym is not installed.
    """
    # 1. Check the arguments.
    if not is_installed():
        raise ImportError(f"Task {name!r} needs reasoning-gym, which is not installed: {extra_command('reasoning')}")
    reasoning_gym: Any = importlib.import_module("reasoning_gym")
    refuse_unknown("split in sizes", sizes or {}, SPLITS)
    refuse_unknown("reasoning-gym task", [name], importlib.import_module("reasoning_gym.factory").DATASETS)
    # 2. Generate one dataset and cut it into splits.
    counts = {**DEFAULT_SIZES, **(sizes or {})}
    try:
        task = reasoning_gym.create_dataset(name, size=sum(counts.values()), seed=seed, **task_options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"Invalid settings of task {name!r}, {dict(task_options)}: {error}") from error
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    tables: dict[Split, list[dict[str, Any]]] = {}
    first = 0
    for split in SPLITS:
        entries = [task[number] for number in range(first, first + counts[split])]
        tables[split] = [
            {"prompt": [*system, {"role": "user", "content": entry["question"]}], **entry} for entry in entries
        ]
        first += counts[split]
    return tables, ReasoningReward(__name__=name, task=task, answer_tag=answer_tag)


@dataclass(frozen=True, kw_only=True)
class ReasoningReward:
    """Reward function of a task in TRL's form; a class, so that it can be pickled for worker processes.

    Attributes:
        __name__: Name of the task.
        task: The reasoning-gym dataset.
        answer_tag: Tag with the answer to score; None = the whole completion.
    """

    __name__: str
    task: Any
    answer_tag: str | None

    def __call__(
        self,
        *,
        completions: Sequence[Sequence[Mapping[str, str]]],
        question: Sequence[str],
        answer: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
        **_: object,
    ) -> list[float]:
        """Return the score of each completion."""
        texts = [completion[0]["content"] for completion in completions]
        if self.answer_tag is None:
            answers = [text.strip() for text in texts]
        else:
            extract_answer = importlib.import_module("reasoning_gym.utils").extract_answer
            answers = [extract_answer(text, tag_name=self.answer_tag) for text in texts]
        entries = [
            {"question": q, "answer": a, "metadata": m} for q, a, m in zip(question, answer, metadata, strict=True)
        ]
        return [float(self.task.score_answer(a, entry=entry)) for a, entry in zip(answers, entries, strict=True)]
