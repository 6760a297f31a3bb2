"""HuggingFaceGym: single-turn prompts of a dataset, with `reset` and `step` for own loops."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from evogrpo.arrays import BoolArray
from evogrpo.envs.protocol import SPLITS, Split, shuffled_starts
from evogrpo.envs.text.datasets import DEFAULT_SIZES, AnyTable, check_table, first_row
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.envs.text.prompt_settings import PromptOptions
from evogrpo.envs.text.reward_functions import RewardFn, RewardFunc, Weights, make_rewards
from evogrpo.envs.text.templates import (
    Message,
    Tokenizer,
    check_template,
    numbered,
    question_of,
)
from evogrpo.extras import require
from evogrpo.records import single_turn_conversations
from evogrpo.text import shown
from evogrpo.validation import lists_options, names_unknown, refuse_unknown, whole_between

PromptTensors = dict[str, Tensor]
StepResult = tuple[list[PromptTensors], Tensor, BoolArray, BoolArray, dict[str, Any]]
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


@dataclass(frozen=True, kw_only=True)
class _Cursor:
    """Position of `reset` and `step`.

    Attributes:
        split: The split.
        seed: Seed of its order.
        step: Number of batches done.
        starts: Prompts of the current batch.
        batch: The current batch; None before `reset`.
    """

    split: Split
    seed: int
    step: int = 0
    starts: tuple[int, ...] = ()
    batch: SingleTurnBatch | None = None


class HuggingFaceGym(PromptEnvironment):
    """A prompt dataset with reward functions, where one completion answers one prompt.

    Rewards have exactly one of two forms. AgileRL's form needs the columns `question` and `answer`,
    and `reward_fn(completion, answer, question) -> float`; `conversation_template` renders a
    question as messages. TRL's form needs a column `prompt` (text, or a list of messages) and
    `reward_funcs`, each called with all completions of a group at once as `f(prompts=,
    completions=, completion_ids=, **columns) -> list[float | None]`, where None means not
    applicable. Rows in verl's layout (`prompt`, and `reward_model` with `ground_truth`) fit
    `reward_fn` too: `f(data_source, solution_str, ground_truth, extra_info)`. Functions get the
    arguments that they name; AgileRL's form accepts its three names and columns in any order, or
    other names in this order. If a prompt ends with an assistant message, the model continues it;
    completions contain only sampled text.

    Functions of both forms may be `async def`; they run concurrently (in AgileRL's form, for all
    completions). A function may return `StepRewards` instead of a number. Functions get copies of
    the columns: they may change them. Each call in TRL's form has one group: the completions of one
    member to one prompt, in order. Groups of held-out questions have a single greedy completion, or
    the sampled answers to a question. With `reward_workers` the functions run in worker processes.
    A call that exceeds `reward_timeout` is killed, then repeated completion by completion to find
    the cause. Async functions and those in worker processes start with whole groups while other
    groups are still being sampled.

    The train, validation (fitness) and test (final report) splits are disjoint and deduplicated:
    two rows are the same question if their prompts have the same tokens. Splits without a dataset
    are drawn from the training dataset. Neither fitness nor the final report uses a training
    question, and fitness never uses a test question.

    Args:
        train_dataset: A `datasets.Dataset`, a data frame (pandas, polars) or any sequence of
            mappings with the same keys; or a mapping of splits to these, such as a
            `datasets.DatasetDict`. A `datasets.IterableDataset` is read as far as it is needed, in
            its order, and needs `max_prompt_length`; held-out questions are its first rows.
        test_dataset: Questions for the final report; None = draw them from the training dataset.
        tokenizer: A transformers tokenizer; with a chat template if prompts are messages.
        reward_fn: One or several rewards in AgileRL's form.
        reward_funcs: One or several rewards in TRL's form.
        reward_weights: Factor of each reward function in the sum, in their order or by name; 1 if
            not given.
        conversation_template: Messages with fields, for AgileRL's form: {question}, {answer}, other
            columns and `settings`. None = a single user message with the question, or plain text if
            the tokenizer has no chat template.
        data_batch_size: Prompts per batch of `reset` and `step`.
        options: Other options; see `evogrpo.envs.text.prompt_settings.PromptOptions`.

    Attributes:
        tokenizer: The tokenizer.
        seed: The seed.
        on_reward_error: As in the constructor.
        filtered: Number of rows left out by split and reason, as `Filtered`.
        observation_space: One prompt, as a sequence of token ids.
        action_space: One completion, as a sequence of token ids; `end_ids` are the tokens that end
            a turn.

    Raises:
        ValueError: If an argument, a column or a split is invalid.
    """

    @names_unknown
    @lists_options(PromptOptions.__annotations__, PromptEnvironment.__init__)
    def __init__(
        self,
        train_dataset: AnyTable,
        test_dataset: AnyTable | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        reward_fn: RewardFn | Sequence[RewardFn] | None = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        reward_weights: Weights | None = None,
        conversation_template: Sequence[Mapping[str, str]] | None = None,
        data_batch_size: int = 8,
        **options: Unpack[PromptOptions],
    ) -> None:
        columns = ["prompt"]
        template: Sequence[Message] | None = None
        first: Mapping[str, Any] = {}
        if reward_fn is not None:
            first = first_row(train_dataset)
        # verl's layout: the prompt, and reward_model with the ground truth.
        if {"prompt", "reward_model"} <= first.keys() and "question" not in first:
            columns = list(_VERL_COLUMNS)
            if conversation_template is not None:
                raise ValueError(
                    "conversation_template requires a column question, but the dataset has prompt."
                    " Remove the template."
                )
        elif reward_fn is not None:
            # AgileRL's form: a question, rendered by a template of messages.
            columns = ["question", "answer"]
            system_prompt = options.get("system_prompt")
            if system_prompt is not None or getattr(tokenizer, "chat_template", None) is not None:
                template = [{"role": "user", "content": "{question}"}]
            if conversation_template is not None:
                if system_prompt is not None:
                    raise ValueError(
                        "system_prompt and conversation_template exclude each other. Remove one of"
                        " them."
                    )
                template = check_template(conversation_template)
        elif conversation_template is not None:
            raise ValueError(
                "conversation_template requires reward_fn. With reward_funcs, put messages into"
                " prompt."
            )
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            rewards=make_rewards(reward_fn, reward_funcs, reward_weights),
            template=template,
            columns=columns,
            **options,
        )
        self._batch_size = whole_between("data_batch_size", data_batch_size, 1)
        self._cursor = _Cursor(split="train", seed=self.seed)

    @classmethod
    def from_reasoning_gym(
        cls,
        name: str,
        *,
        tokenizer: Tokenizer,
        sizes: Mapping[Split, int] | None = None,
        seed: int = 0,
        system_prompt: str | None = None,
        answer_tag: str | None = None,
        gym_options: Mapping[str, Any] | None = None,
        **task_options: Any,
    ) -> "HuggingFaceGym":
        """Create an environment from a reasoning-gym task, with its `score_answer` as reward.

        Args:
            name: Name of the task, e.g. "chain_sum".
            tokenizer: A transformers tokenizer with a chat template.
            sizes: Questions generated per split, before duplicates are left out; by default
                2000 for train, and `DEFAULT_SIZES`.
            seed: Seed of the questions and of the training order.
            system_prompt: System message before each question.
            answer_tag: Score the last <tag>...</tag> of a completion; None = the whole completion,
                stripped.
            gym_options: Other arguments of HuggingFaceGym, e.g. {"max_prompt_length": 512}.
            task_options: Settings of the task, e.g. min_terms=2.

        Raises:
            ValueError: If the task or one of its settings is unknown.
            ImportError: If reasoning-gym is not installed.
        """
        tables, reward = _reasoning_questions(name, sizes or {}, seed, answer_tag, task_options)
        options = {"system_prompt": system_prompt, **(gym_options or {})}
        return cls(tables, None, tokenizer, reward_funcs=reward, seed=seed, **options)

    def _prepare(self, table: AnyTable, where: str) -> AnyTable:
        """Add the columns question and answer to the rows of a dataset in verl's layout."""
        if self._columns != _VERL_COLUMNS:
            return table
        check_table(table, ["prompt", "reward_model"], where)
        rows = []
        for number in range(len(table)):
            row = table[number]
            model = row["reward_model"]
            if not isinstance(model, Mapping) or "ground_truth" not in model:
                raise ValueError(
                    f"{numbered(number, where)}: reward_model must have a ground_truth, got"
                    f" {shown(model)}."
                )
            added = {"question": question_of(row["prompt"]), "answer": model["ground_truth"]}
            rows.append({**row, **added})
        return rows

    def __len__(self) -> int:
        """Return the number of questions of the current split: train, or that of `eval_mode`."""
        return self.size(self._cursor.split)

    def reset(
        self,
        reset_dataloaders: bool = False,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[PromptTensors], dict[str, Any]]:
        """Return the current batch of prompts.

        Args:
            reset_dataloaders: Return the first batch (AgileRL's argument).
            seed: Start a new training order; None = keep the order and position.
            options: {"step": k} moves to the k-th batch.

        Returns:
            Per prompt {"input_ids", "attention_mask"}, each a LongTensor `[1, prompt]`; and a dict
            with "split" and "starts".

        Raises:
            ValueError: If an option is unknown or out of range.
        """
        refuse_unknown("option of reset", options or {}, ("step",))
        cursor = self._cursor
        # A new order begins at its first batch.
        if reset_dataloaders or seed is not None:
            cursor = replace(cursor, step=0)
        if seed is not None:
            cursor = replace(cursor, seed=seed)
        step = (options or {}).get("step", cursor.step)
        cursor = replace(cursor, step=whole_between("step in options", step, 0))
        self._cursor = self._loaded(cursor)
        return self._observation(), {"split": cursor.split, "starts": self._cursor.starts}

    def step(self, completion_ids: Sequence[Tensor]) -> StepResult:
        """Reward one group of completions per prompt, and return the next batch.

        Args:
            completion_ids: Per prompt a LongTensor `[group_size, prompt + completion]` with rows
                that start with the prompt and are padded on the right after their end; the same
                group_size for all.

        Returns:
            The next prompts; rewards `[prompts, group_size]` (float32, NaN = not applicable);
            terminated (all True) and truncated (all False), both `[prompts, group_size]`; and a
            dict with "rewards/<function>" values `[prompts, group_size]`, "completions" (texts per
            prompt), and "split" and "starts" of the next prompts.

        Raises:
            ValueError: If there is no current batch, or a shape or prompt does not match it.
            RewardError: If a reward function fails.
        """
        cursor = self._cursor
        batch = cursor.batch
        if batch is None:
            raise ValueError("step needs the prompts of reset. Call reset first.")
        # 1. Cut the completions out of the padded rows.
        is_list = isinstance(completion_ids, Sequence)
        if not is_list or any(getattr(ids, "ndim", 0) != 2 for ids in completion_ids):
            raise ValueError(
                "completion_ids must be a list of tensors [group, tokens], got"
                f" {shown(completion_ids)}."
            )
        if len(completion_ids) != len(batch.prompts):
            raise ValueError(
                f"completion_ids must have {len(batch.prompts)} groups, one for each prompt, got"
                f" {len(completion_ids)}."
            )
        sizes = {len(group) for group in completion_ids}
        # Members learn from differences within a group; a greedy answer is alone.
        smallest = 2 if cursor.split == "train" else 1
        if len(sizes) != 1 or min(sizes) < smallest:
            shapes = [tuple(group.shape) for group in completion_ids]
            raise ValueError(
                f"completion_ids must be groups of equal size of at least {smallest}, got shapes"
                f" {shapes}."
            )
        (group_size,) = sizes
        rows = []
        starts = []
        for number, group in enumerate(completion_ids):
            for row in group.tolist():
                rows.append(self._completion(row, batch.prompts[number]))
                starts.append(number)
        # 2. Compute the rewards.
        scores = batch.score(single_turn_conversations(starts, rows))
        # Texts by prompt, as the rewards are.
        texts: list[list[str]] = [[] for _ in batch.prompts]
        for number, text in zip(starts, scores.completions, strict=True):
            texts[number].append(text)
        # 3. Load the next batch.
        self._cursor = self._loaded(replace(cursor, step=cursor.step + 1))
        shape = (len(batch.prompts), group_size)
        info: dict[str, Any] = {}
        for name, values in scores.components.items():
            info[f"rewards/{name}"] = values.reshape(shape)
        info |= scores.metrics
        info |= {"completions": texts, "split": cursor.split, "starts": self._cursor.starts}
        rewards = torch.as_tensor(scores.rewards.reshape(shape), dtype=torch.float32)
        terminated = np.ones(shape, dtype=bool)
        truncated = np.zeros(shape, dtype=bool)
        return self._observation(), rewards, terminated, truncated, info

    @contextmanager
    def eval_mode(self, split: Split = "validation") -> Iterator[None]:
        """Use a held-out split from its first question inside a `with` block.

        The training position is kept.
        """
        refuse_unknown("split of eval_mode", [split], SPLITS[1:])
        # The cursor is frozen, so the old one is still the training position.
        before = self._cursor
        self._cursor = _Cursor(split=split, seed=before.seed)
        try:
            yield
        finally:
            self._cursor = before

    def _loaded(self, cursor: _Cursor) -> _Cursor:
        """Return the cursor with the batch at its position."""
        size = self.size(cursor.split)
        if cursor.split == "train":
            if self.is_stream:
                starts = self.select_starts(cursor.step, self._batch_size, self._batch_size)
            else:
                starts = shuffled_starts(
                    cursor.seed, size, cursor.step, self._batch_size, self._batch_size
                )
            # The number of all steps of an own loop is unknown.
            self.set_progress(cursor.step, 0)
        else:
            # Held-out questions are visited in order, again and again; the last batch may be
            # smaller.
            num_batches = -(-size // self._batch_size)
            first = cursor.step % num_batches * self._batch_size
            starts = tuple(range(first, min(first + self._batch_size, size)))
        return replace(cursor, starts=starts, batch=self.make_batch(cursor.split, starts))

    def _observation(self) -> list[PromptTensors]:
        """Return the prompts of the batch as tensors."""
        assert self._cursor.batch is not None
        observation = []
        for prompt in self._cursor.batch.prompts:
            ids = torch.tensor([list(prompt)], dtype=torch.long)
            observation.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        return observation

    def _completion(self, row: list[int], prompt: Sequence[int]) -> list[int]:
        """Return the tokens that the agent learns from: after the prompt, without padding."""
        if row[: len(prompt)] != list(prompt):
            raise ValueError(
                "Rows of completion_ids must start with their prompt. Keep the order of the"
                " prompts."
            )
        completion = row[len(prompt) :]
        pad = self.tokenizer.pad_token_id
        # The padding token may also be the one that ends a turn.
        padded = bool(completion) and completion[-1] == pad
        while completion and completion[-1] == pad:
            completion.pop()
        if padded and pad in self.action_space.end_ids:
            completion.append(pad)  # the first of them has ended the completion
        return completion


_VERL_COLUMNS = ("prompt", "answer")
"""Required columns of a dataset in verl's layout, after `HuggingFaceGym._prepare`."""


def _reasoning_questions(
    name: str,
    sizes: Mapping[Split, int],
    seed: int,
    answer_tag: str | None,
    task_options: Mapping[str, Any],
) -> tuple[dict[Split, list[dict[str, Any]]], ReasoningReward]:
    """Return the questions of a task by split, and its reward.

    See `HuggingFaceGym.from_reasoning_gym`.
    """
    require(f"Task {name!r}", "reasoning_gym")
    refuse_unknown("split in sizes", sizes, SPLITS)
    known = import_module("reasoning_gym.factory").DATASETS
    refuse_unknown("reasoning-gym task", [name], known)
    # One dataset for all splits, so that they have different questions.
    counts: dict[Split, int] = {"train": TRAIN_SIZE, **DEFAULT_SIZES, **sizes}
    total = sum(counts.values())
    create_dataset = import_module("reasoning_gym").create_dataset
    try:
        task = create_dataset(name, size=total, seed=seed, **task_options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"Invalid settings of task {name!r}, {task_options}: {error}") from error
    tables: dict[Split, list[dict[str, Any]]] = {}
    number = 0
    for split in SPLITS:
        tables[split] = []
        for _ in range(counts[split]):
            entry = task[number]
            # The reward reads the other columns: question, answer and metadata.
            prompt = [{"role": "user", "content": entry["question"]}]
            tables[split].append({"prompt": prompt, **entry})
            number += 1
    return tables, ReasoningReward(__name__=name, task=task, answer_tag=answer_tag)
