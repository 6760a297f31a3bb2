"""HuggingFaceGym: a prompt dataset and reward functions as a group environment."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from evogrpo.config.checks import names_unknown
from evogrpo.envs.groups import Split
from evogrpo.envs.prompts.facade import Facade, PromptTensors, StepResult
from evogrpo.envs.prompts.opened import OpenedPrompts
from evogrpo.envs.prompts.questions import QuestionGroups
from evogrpo.envs.prompts.reasoning import reasoning_tables
from evogrpo.envs.prompts.rewards.reward_functions import OnRewardError, RewardFn, RewardFunc, make_rewards
from evogrpo.envs.prompts.tables import AnyTable, split_tables
from evogrpo.envs.prompts.templates import Message, Options, Tokenizer, check_template


class HuggingFaceGym(QuestionGroups):
    """A prompt dataset and reward functions as an environment: one completion answers one prompt.

    Rewards come in exactly one of two forms. AgileRL's: columns `question` and `answer`, and
    `reward_fn(completion, answer, question) -> float`; `conversation_template` turns a question into messages. TRL's:
    a column `prompt` (text, or a list of messages) and `reward_funcs`, each called with all completions at once as
    `f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`, where None means not applicable.
    Functions are given what they name: AgileRL's by these three names in any order, or by place; see
    `evogrpo.envs.prompts.rewards.signatures`.
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
        test_dataset: Questions for the final report; None draws them from the training dataset.
        tokenizer: A transformers tokenizer; with a chat template where prompts are messages.
        reward_fn: Reward in AgileRL's form.
        reward_funcs: One or several rewards in TRL's form.
        reward_weights: Factor of each of `reward_funcs` in the sum; None means 1 each.
        conversation_template: Messages with the fields {question} and {answer}, for AgileRL's form. None asks the
            question as the one user message, or as plain text where the tokenizer has no chat template.
        validation_dataset: Questions for selection; None draws them from the training dataset.
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
            split_tables(train_dataset, validation_dataset, test_dataset),
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
            sizes: Questions generated per split, before duplicates are left out: 2000 train, 64 validation and 256
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
        tables, reward = reasoning_tables(
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

    def open(self, split: Split, starts: Sequence[int]) -> OpenedPrompts:
        """Open questions of a split, each in [0, size(split)).

        Raises:
            ValueError: If the split or a start does not exist.
        """
        return OpenedPrompts(**self._opened(split, starts))

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
