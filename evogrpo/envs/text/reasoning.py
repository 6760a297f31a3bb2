"""Questions and rewards of reasoning-gym tasks (optional extra `reasoning`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from evogrpo.envs.protocol import SPLITS, Split
from evogrpo.envs.text.datasets import DEFAULT_SIZES
from evogrpo.extras import require
from evogrpo.validation import refuse_unknown

TRAIN_SIZE = 2000  # questions generated for training by default


@dataclass(frozen=True, kw_only=True)
class ReasoningReward:
    """Reward function of a task in TRL's form.

    A class, so that it can be pickled for worker processes.

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
        rewards = []
        for number, completion in enumerate(completions):
            # The prompt has messages, so the completion is one message.
            given = completion[0]["content"].strip()
            if self.answer_tag is not None:
                extract_answer = import_module("reasoning_gym.utils").extract_answer
                given = extract_answer(completion[0]["content"], tag_name=self.answer_tag)
            entry = {
                "question": question[number],
                "answer": answer[number],
                "metadata": metadata[number],
            }
            rewards.append(float(self.task.score_answer(given, entry=entry)))
        return rewards


def reasoning_questions(
    name: str,
    sizes: Mapping[Split, int],
    seed: int,
    system_prompt: str | None,
    answer_tag: str | None,
    task_options: Mapping[str, Any],
) -> tuple[dict[Split, list[dict[str, Any]]], ReasoningReward]:
    """Return the questions of a task by split, and its reward.

    See `HuggingFaceGym.from_reasoning_gym`.
    """
    require(f"Task {name!r}", "reasoning_gym")
    refuse_unknown("split in sizes", sizes, SPLITS)
    refuse_unknown("reasoning-gym task", [name], import_module("reasoning_gym.factory").DATASETS)
    # One dataset for all splits, so that they have different questions.
    counts: dict[Split, int] = {"train": TRAIN_SIZE, **DEFAULT_SIZES, **sizes}
    total = sum(counts.values())
    create_dataset = import_module("reasoning_gym").create_dataset
    try:
        task = create_dataset(name, size=total, seed=seed, **task_options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"Invalid settings of task {name!r}, {task_options}: {error}") from error
    system = []
    if system_prompt is not None:
        system = [{"role": "system", "content": system_prompt}]
    tables: dict[Split, list[dict[str, Any]]] = {}
    number = 0
    for split in SPLITS:
        tables[split] = []
        for _ in range(counts[split]):
            entry = task[number]
            # The reward reads the other columns: question, answer and metadata.
            prompt = [*system, {"role": "user", "content": entry["question"]}]
            tables[split].append({"prompt": prompt, **entry})
            number += 1
    return tables, ReasoningReward(__name__=name, task=task, answer_tag=answer_tag)
