"""HuggingFaceGym: a prompt dataset and reward functions as an environment."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.config.checks import names_unknown, whole_between, whole_number
from evogrpo.data.rollout import single_turn_conversations
from evogrpo.envs.protocol import SPLITS, GroupEnvironment, PromptBatch, Split, SupportsProgress, deal_starts
from evogrpo.envs.text.datasets import AnyTable, PromptEnvironment, tables_by_split
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.reasoning import reasoning_gym_tables
from evogrpo.envs.text.reward_functions import OnRewardError, RewardFn, RewardFunc, make_rewards
from evogrpo.envs.text.templates import Message, Options, Tokenizer, check_template

PromptTensors = dict[str, Tensor]
StepResult = tuple[list[PromptTensors], Tensor, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a caller stands: which split, which seed orders it, how many batches were answered, what is open."""

    split: Split
    seed: int
    step: int = 0
    starts: tuple[int, ...] = ()
    opened: PromptBatch | None = None


class Facade:
    """Serves `batch_size` prompts at a time and rewards their completions.

    Args:
        environment: Where the prompts come from.
        batch_size: Prompts per step.
        group_size: Completions per prompt that training steps must bring; None takes any number from 2.
        seed: Seed of the training order.
        eos_token_id: Ends a completion; None if the tokenizer has none.
        pad_token_id: Fills up completions on the right; None if the tokenizer has none.
    """

    def __init__(
        self,
        environment: GroupEnvironment,
        *,
        batch_size: int,
        group_size: int | None,
        seed: int,
        eos_token_id: int | None,
        pad_token_id: int | None,
    ) -> None:
        batch_size = whole_between("data_batch_size", batch_size, 1)
        if group_size is not None and whole_number("group_size", group_size) < 2:
            raise ValueError(
                f"group_size must be at least 2, got {group_size}: a lone completion has no group to be compared with"
            )
        self._environment = environment
        self._batch_size = batch_size
        self._group_size = group_size
        self._eos, self._pad = eos_token_id, pad_token_id
        self._place = _Place(split="train", seed=seed)

    @property
    def split(self) -> Split:
        """The split that is being served."""
        return self._place.split

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[list[PromptTensors], dict[str, Any]]:
        """Serve the batch of prompts at the cursor.

        Args:
            seed: Starts a new training order from its beginning; None goes on where the cursor stands.
            options: {"step": k} moves the cursor to the k-th batch.

        Returns:
            Per prompt {"input_ids", "attention_mask"}, each a LongTensor [1, prompt]; and which rows they are.

        Raises:
            ValueError: If an option is unknown or out of range.
        """
        place = self._place if seed is None else replace(self._place, seed=seed, step=0)
        for option, value in (options or {}).items():
            if option != "step" or not isinstance(value, int) or value < 0:
                raise ValueError(f'reset takes the option {{"step": int >= 0}}, got {{{option!r}: {value!r}}}')
            place = replace(place, step=value)
        self._place = self._opened(place)
        return self._observation(), {"split": place.split, "starts": self._place.starts}

    def step(self, completion_ids: Sequence[Tensor]) -> StepResult:
        """Reward one group of completions per served prompt, and serve the next batch.

        Args:
            completion_ids: Per served prompt a LongTensor [group_size, prompt + completion] whose rows repeat the
                prompt and are padded on the right after their EOS; the same group_size for all.

        Returns:
            The next prompts; rewards [prompts, group_size] (float32, NaN = not applicable); terminated, all True, and
            truncated, all False, both [prompts, group_size]; and a dict with "rewards/<function>" values
            [prompts, group_size], "completions" (texts per prompt), and the "split" and "starts" of the next prompts.

        Raises:
            ValueError: If nothing was served, or a shape or a prompt does not fit what was served.
            RewardError: If a reward function fails.
        """
        opened = self._place.opened
        if opened is None:
            raise ValueError("step answers the prompts that reset served, but nothing was served: call reset first")
        group_size = self._check_groups(completion_ids, len(opened.prompts))
        rows = [
            self._completion(row, prompt)
            for group, prompt in zip(completion_ids, opened.prompts, strict=True)
            for row in group.tolist()
        ]
        shape = (len(opened.prompts), group_size)
        if isinstance(self._environment, SupportsProgress) and self.split == "train":
            self._environment.set_progress(self._place.step, 0)
        scores = opened.score(single_turn_conversations([n // group_size for n in range(len(rows))], rows))
        texts = [list(scores.completions[i * group_size : (i + 1) * group_size]) for i in range(shape[0])]
        self._place = self._opened(replace(self._place, step=self._place.step + 1))
        report: dict[str, Any] = {
            f"rewards/{name}": values.reshape(shape) for name, values in scores.components.items()
        }
        report |= scores.metrics
        report |= {"completions": texts, "split": self.split, "starts": self._place.starts}
        rewards = torch.as_tensor(scores.rewards.reshape(shape), dtype=torch.float32)
        return self._observation(), rewards, np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool), report

    @contextmanager
    def eval_mode(self, split: Split) -> Iterator[None]:
        """Serve a held-out split from its first row inside a `with`; training goes on afterwards as if it never was."""
        if split not in SPLITS or split == "train":
            raise ValueError(f'eval_mode serves "validation" or "test", got {split!r}')
        before = self._place
        self._place = _Place(split=split, seed=before.seed)
        try:
            yield
        finally:
            self._place = before

    def _opened(self, place: _Place) -> _Place:
        size = self._environment.size(place.split)
        if place.split == "train":
            starts = deal_starts(place.seed, size, place.step, self._batch_size, self._batch_size)
        else:
            first = place.step % -(-size // self._batch_size) * self._batch_size
            starts = tuple(range(first, min(first + self._batch_size, size)))
        return replace(place, starts=starts, opened=self._environment.open(place.split, starts))

    def _observation(self) -> list[PromptTensors]:
        assert self._place.opened is not None
        ids = [torch.tensor([list(prompt)], dtype=torch.long) for prompt in self._place.opened.prompts]
        return [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in ids]

    def _check_groups(self, completion_ids: Sequence[Tensor], prompts: int) -> int:
        if len(completion_ids) != prompts:
            raise ValueError(f"step takes one group per served prompt, got {len(completion_ids)} for {prompts}")
        shapes = [tuple(group.shape) for group in completion_ids]
        if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(f"step takes tensors [group_size, prompt + completion] of one group_size, got {shapes}")
        group_size = int(shapes[0][0])
        smallest = 2 if self.split == "train" else 1
        if group_size < smallest:
            raise ValueError(f"group_size must be at least {smallest}, got {group_size}: sample more completions")
        if self.split == "train" and self._group_size not in (None, group_size):
            raise ValueError(f"step takes groups of group_size {self._group_size} as declared, got {group_size}")
        return group_size

    def _completion(self, row: list[int], prompt: Sequence[int]) -> list[int]:
        """Return what follows the prompt: up to the first EOS, else without trailing padding."""
        if row[: len(prompt)] != list(prompt):
            raise ValueError("every row must begin with the token ids of the prompt it answers: keep the served order")
        completion = row[len(prompt) :]
        if self._eos is not None and self._eos in completion:
            return completion[: completion.index(self._eos) + 1]
        while completion and completion[-1] == self._pad:
            completion.pop()
        return completion


class HuggingFaceGym(PromptEnvironment):
    """A prompt dataset and reward functions as an environment: one completion answers one prompt.

    Rewards come in exactly one of two forms. AgileRL's: columns `question` and `answer`, and
    `reward_fn(completion, answer, question) -> float`; `conversation_template` turns a question into messages. TRL's:
    a column `prompt` (text, or a list of messages) and `reward_funcs`, each called with all completions at once as
    `f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`, where None means not applicable.
    Functions are given what they name: AgileRL's by these three names in any order, or by place; see
    `evogrpo.envs.text.reward_functions`.
    A prompt that ends with an assistant message is continued; completions hold only what was sampled.

    Either form may be `async def`: such functions run concurrently, of AgileRL's form the calls for all completions.
    Instead of a number, `StepRewards` gives rewards inside a completion. With `reward_workers` the functions run in
    worker processes, and each call in TRL's form takes one group (of held-out questions and longer conversations one
    worker's share of the completions); a call that exceeds `reward_timeout` is killed, and repeated completion by
    completion to find the one to blame. Async functions, and others in worker processes, begin with whole groups while
    completions of others are still being written.

    Train, validation (selection) and test (reported once) are disjoint and deduplicated: two rows are the same
    question when the model reads the same tokens. What is not given is drawn from the training dataset, so neither
    selection nor the final report ever sees a training question, and selection never sees the test split.

    Args:
        train_dataset: A `datasets.Dataset`, a data frame (pandas, polars) or any sequence of mappings with the same
            keys; or several by split, "train" and perhaps "validation" and "test", such as a `datasets.DatasetDict`.
        test_dataset: PromptSplit for the final report; None draws them from the training dataset.
        tokenizer: A transformers tokenizer; with a chat template where prompts are messages.
        reward_fn: Reward in AgileRL's form.
        reward_funcs: One or several rewards in TRL's form.
        reward_weights: Factor of each of `reward_funcs` in the sum; None means 1 each.
        conversation_template: Messages with the fields {question} and {answer}, for AgileRL's form. None asks the
            question as the one user message, or as plain text where the tokenizer has no chat template.
        validation_dataset: PromptSplit for selection; None draws them from the training dataset.
        validation_size: How many to draw; None means 64, or a fifth of the training questions if that is fewer.
        test_size: How many to draw; None means 256, or a fifth of the training questions if that is fewer.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template, such as {"enable_thinking": False}; a
            column of that name says otherwise for its row.
        max_prompt_length: Longest prompt used, in tokens: the model's context minus the longest completion. Longer
            ones are left out and counted in `filtered`; None keeps all.
        data_batch_size: Prompts that `reset` and `step` serve; 8 unless given.
        data_batch_size_per_gpu: AgileRL's name for `data_batch_size`.
        group_size: Completions per prompt that training `step`s must bring; None takes any number from 2.
        on_reward_error: "raise" stops with a `RewardError`; "exclude" gives the completion a NaN reward and warns.
        reward_timeout: Seconds that one call of a reward function may take; None = no limit.
        reward_workers: Processes in which rewards are computed, for functions that are slow or crash; 0 = in this one.
            None = none, or, where a timeout is given for functions that are not async, one per core up to 8.
        seed: Seed of the training order and of drawn splits.

    Attributes:
        tokenizer: As given.
        seed: As given.
        filtered: How many rows each split left out, and why: `Filtered` counts by split.
        observation_space: One prompt, as a sequence of token ids.
        action_space: One completion, as a sequence of token ids.

    Raises:
        ValueError: If an argument, a column or a split does not fit, with the rule, what was found and what to do.
    """

    @names_unknown
    def __init__(
        self,
        train_dataset: AnyTable,
        test_dataset: AnyTable | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        reward_fn: RewardFn | None = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        reward_weights: Sequence[float] | None = None,
        conversation_template: Sequence[Mapping[str, str]] | None = None,
        validation_dataset: AnyTable | None = None,
        validation_size: int | None = None,
        test_size: int | None = None,
        chat_template_kwargs: Options | None = None,
        max_prompt_length: int | None = None,
        data_batch_size: int | None = None,
        data_batch_size_per_gpu: int | None = None,
        group_size: int | None = None,
        on_reward_error: OnRewardError = "raise",
        reward_timeout: float | None = None,
        reward_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        if data_batch_size is not None and data_batch_size_per_gpu is not None:
            raise ValueError(
                "data_batch_size_per_gpu is another name for data_batch_size, "
                f"got both ({data_batch_size_per_gpu} and {data_batch_size}): give one of the two"
            )
        asked = reward_fn is not None
        super().__init__(
            tables_by_split(train_dataset, validation_dataset, test_dataset),
            tokenizer,
            rewards=make_rewards(reward_fn, reward_funcs, reward_weights),
            template=_template(conversation_template, tokenizer, asked=asked),
            columns=("question", "answer") if asked else ("prompt",),
            sizes={"validation": validation_size, "test": test_size},
            chat_template_kwargs=chat_template_kwargs,
            max_prompt_length=max_prompt_length,
            on_reward_error=on_reward_error,
            reward_timeout=reward_timeout,
            reward_workers=reward_workers,
            seed=seed,
        )
        self._facade = Facade(
            self,
            batch_size=next((size for size in (data_batch_size, data_batch_size_per_gpu) if size is not None), 8),
            group_size=group_size,
            seed=seed,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

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
        """Return a reasoning-gym task as an environment; its own `score_answer` is the reward.

        Args:
            name: A task of reasoning-gym, e.g. "chain_sum".
            tokenizer: A transformers tokenizer with a chat template.
            sizes: PromptSplit generated per split, before duplicates are left out: 2000 train, 64 validation and 256
                test unless given.
            seed: Seed of the questions and of the training order.
            system_prompt: Text of a system message before each question.
            answer_tag: Scores what stands in the last <tag>...</tag> of a completion; None scores all of it, stripped.
            gym_options: Further arguments of HuggingFaceGym, e.g. {"max_prompt_length": 512}.
            task_options: Settings of the task, e.g. min_terms=2.

        Raises:
            ValueError: If the task or one of its settings is unknown.
            ImportError: If reasoning-gym is not installed.
        """
        tables, reward = reasoning_gym_tables(
            name, sizes=sizes, seed=seed, system_prompt=system_prompt, answer_tag=answer_tag, task_options=task_options
        )
        return cls(
            tables["train"],
            tables["test"],
            tokenizer,
            validation_dataset=tables["validation"],
            reward_funcs=reward,
            seed=seed,
            **(gym_options or {}),
        )

    def __len__(self) -> int:
        """Return the number of questions of the split being served: train, unless inside `eval_mode`."""
        return self.size(self._facade.split)

    def open(self, split: Split, starts: Sequence[int]) -> SingleTurnBatch:
        """Open questions of a split, each in [0, size(split)).

        Raises:
            ValueError: If the split or a start does not exist.
        """
        return SingleTurnBatch(**self._opened(split, starts))

    def reset(
        self,
        reset_dataloaders: bool = False,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[list[PromptTensors], dict[str, Any]]:
        """Serve the prompts at the cursor, or with AgileRL's `reset_dataloaders` those at the beginning.

        See `Facade.reset`.
        """
        if reset_dataloaders:
            options = {"step": 0, **(options or {})}
        return self._facade.reset(seed, options)

    def step(self, completion_ids: Sequence[Tensor]) -> StepResult:
        """Reward the served prompts' completions and serve the next prompts; see `Facade.step`."""
        return self._facade.step(completion_ids)

    def eval_mode(self, split: Split = "validation") -> AbstractContextManager[None]:
        """Serve a held-out split from its first question inside a `with`; the training cursor does not move."""
        return self._facade.eval_mode(split)


def _template(
    template: Sequence[Mapping[str, str]] | None, tokenizer: Tokenizer | None, *, asked: bool
) -> tuple[Message, ...] | None:
    """Return the checked conversation template, or None where questions are plain texts or prompts are given."""
    if template is not None and not asked:
        raise ValueError("conversation_template goes with reward_fn: with reward_funcs, put messages into prompt")
    if template is None and getattr(tokenizer, "chat_template", None) is not None:
        template = [{"role": "user", "content": "{question}"}]
    return None if template is None else check_template(template)
