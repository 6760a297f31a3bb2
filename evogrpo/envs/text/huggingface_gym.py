"""HuggingFaceGym: single-turn prompts of a dataset, with Gymnasium's reset and step for hand-written loops."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from typing import Any, ClassVar, TypedDict, Unpack

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.chat_templates import end_of_turn_ids
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import SPLITS, Split, deal_starts
from evogrpo.envs.text.datasets import (
    DEFAULT_SIZES,
    AnyTable,
    PromptSplit,
    ReasoningReward,
    RowHashes,
    check_table,
    make_splits,
    tables_by_split,
)
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.reward_functions import (
    DEFAULT_REWARD_TIMEOUT,
    OnRewardError,
    Reward,
    RewardError,
    RewardFn,
    RewardFunc,
    make_rewards,
)
from evogrpo.envs.text.reward_runner import RewardRunner
from evogrpo.envs.text.templates import (
    TEMPLATE_OPTIONS,
    Message,
    Options,
    Prompt,
    Tokenizer,
    check_messages,
    check_options,
    check_template,
    dated_template,
    fill_template,
    inserts_date,
    is_written_messages,
    numbered,
    row_options,
    tokenize,
)
from evogrpo.extras import require
from evogrpo.records import single_turn_conversations
from evogrpo.spaces import CompletionSpace
from evogrpo.text import class_name, one_line, shown
from evogrpo.validation import (
    lists_options,
    names_unknown,
    refuse_unknown,
    whole_between,
    whole_number,
)

SAMPLE_COMPLETIONS = ("This is a made-up completion: 42.", "This is another made-up completion.")
PromptTensors = dict[str, Tensor]
StepResult = tuple[
    list[PromptTensors], Tensor, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]
]


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Results of testing the reward functions before a run.

    Attributes:
        prompt: First training prompt, rendered; untrusted text.
        tokens: Token ids of the prompt.
        rewards: Reward of the first sample completion by function; None where it does not apply or
            failed.
    """

    prompt: str
    tokens: tuple[int, ...]
    rewards: dict[str, float | None]


class PromptOptions(TypedDict, total=False):
    """Optional arguments of all environments with a prompt dataset.

    Attributes:
        validation_dataset: Questions for fitness; by default they are drawn from the training
            dataset.
        validation_size: Number of questions to draw; by default `VALIDATION_SIZE`, or a fifth of
            the training questions if fewer.
        test_size: Number of questions to draw; by default `TEST_SIZE`, or a fifth of the training
            questions if fewer.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template, such as
            {"enable_thinking": False}. A column of this name overrides them for its row.
        max_prompt_length: Maximum number of prompt tokens: the model's context minus the longest
            completion. Longer prompts are left out and counted in `filtered`; by default there is
            no limit.
        on_reward_error: "raise" (default) stops with a `RewardError`; "exclude" gives the
            completion or conversation a NaN reward and warns.
        reward_timeout: Time limit of one call of a reward function, in seconds; None (default) = no
            limit.
        reward_workers: Worker processes for reward functions that are slow or may crash, except
            async ones; 0 = run in this process. None (default) = 0, or one per core up to 8 if a
            timeout is set.
        seed: Seed of the training order and of drawn splits; 0 by default.
    """

    validation_dataset: AnyTable | None
    validation_size: int | None
    test_size: int | None
    chat_template_kwargs: Options | None
    max_prompt_length: int | None
    on_reward_error: OnRewardError
    reward_timeout: float | None
    reward_workers: int | None
    seed: int


class PromptEnvironment:
    """Base class of environments with a prompt dataset and reward functions.

    The other arguments are those of `PromptOptions`.

    Args:
        train_dataset: A dataset, or a mapping of splits to datasets.
        test_dataset: Questions for the final report; None = draw them from the training dataset.
        tokenizer: A transformers tokenizer.
        rewards: The reward functions.
        template: Messages with the fields {question} and {answer}; None if rows have a `prompt` or
            questions are plain text.
        columns: Required columns; the first is the question or prompt.

    Raises:
        ValueError: If an argument, a column or a split is invalid.
    """

    whole_rows: ClassVar[bool] = False  # rows with equal prompts may be different questions
    # arguments of reward functions in addition to the columns
    extra_arguments: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        train_dataset: AnyTable,
        test_dataset: AnyTable | None,
        tokenizer: Tokenizer | None,
        *,
        rewards: Sequence[Reward],
        template: Sequence[Message] | None = None,
        columns: Sequence[str] = ("prompt",),
        validation_dataset: AnyTable | None = None,
        validation_size: int | None = None,
        test_size: int | None = None,
        chat_template_kwargs: Options | None = None,
        max_prompt_length: int | None = None,
        on_reward_error: OnRewardError = "raise",
        reward_timeout: float | None = DEFAULT_REWARD_TIMEOUT,
        reward_workers: int | None = None,
        seed: int = 0,
    ) -> None:
        # 1. Arguments.
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise ValueError(f"tokenizer must be a transformers tokenizer, got {shown(tokenizer)}.")
        if not isinstance(on_reward_error, str) or on_reward_error not in ("raise", "exclude"):
            raise ValueError(
                f'on_reward_error must be "raise" or "exclude", got {shown(on_reward_error)}.'
            )
        if max_prompt_length is not None:
            max_prompt_length = whole_between("max_prompt_length", max_prompt_length, 1)
        sizes: dict[Split, int | None] = {
            "validation": (
                None
                if validation_size is None
                else whole_number("validation_size", validation_size)
            ),
            "test": None if test_size is None else whole_number("test_size", test_size),
        }
        self.tokenizer = tokenizer
        self.seed = whole_number("seed", seed)
        self.on_reward_error: OnRewardError = on_reward_error
        self._rewards = rewards
        self._template = template
        self._columns = tuple(columns)
        self._given_options = check_options(chat_template_kwargs, TEMPLATE_OPTIONS)
        own_template = getattr(tokenizer, "chat_template", None)
        self._chat_template: Any = self._given_options.get("chat_template", own_template)
        self._runner = RewardRunner(rewards, reward_timeout, reward_workers)
        self._progress = (0, 0)
        # before the first call
        self._code = {reward.name: code_hash(reward.function) for reward in rewards}
        # 2. Columns of each dataset.
        tables = tables_by_split(train_dataset, validation_dataset, test_dataset)
        datasets = {
            split: self._prepare(table, f"{split}_dataset")
            for split, table in tables.items()
            if table is not None
        }
        for split, table in datasets.items():
            where = f"{split}_dataset"
            present = check_table(table, self._columns, where)
            for reward in rewards:
                available = [*present, *self.extra_arguments]
                reward.check(available, where, in_worker=self._runner.in_worker(reward.name))
        for split, size in sizes.items():
            if size is not None and split in datasets:
                raise ValueError(
                    f"{split}_size requires that {split}_dataset is not set, got both."
                )
        # 3. Tokenized, deduplicated splits.
        self._datasets = datasets
        self._sizes = sizes
        self._max_prompt_length = max_prompt_length
        self._fix_date(datetime.now().isoformat(timespec="seconds"))
        vocabulary = gymnasium.spaces.Discrete(len(tokenizer))
        self.observation_space = gymnasium.spaces.Sequence(vocabulary)
        self.action_space = CompletionSpace(
            len(tokenizer), end_of_turn_ids(tokenizer, self._options)
        )

    @property
    def date(self) -> str | None:
        """Date and time that the chat template inserts into prompts, in ISO format.

        None if it inserts none.
        """
        if inserts_date(self._chat_template):
            return self._date
        return None

    def set_date(self, date: str) -> None:
        """Build the prompts again with another date; see `SupportsDate`."""
        if self.date not in (None, date):
            self._fix_date(date)

    def _fix_date(self, date: str) -> None:
        """Build all splits. The chat template inserts this date instead of the current one."""
        self._date = date
        self._options = self._given_options
        if inserts_date(self._chat_template):
            dated = dated_template(self._chat_template, datetime.fromisoformat(date))
            self._options = {**self._given_options, "chat_template": dated}
        tables = {
            split: self._read_table(table, f"{split}_dataset")
            for split, table in self._datasets.items()
        }
        self._splits, self.filtered = make_splits(
            tables, max_prompt_length=self._max_prompt_length, sizes=self._sizes, seed=self.seed
        )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.size(split)}" for split in SPLITS)
        return (
            f"{type(self).__name__}({sizes} questions,"
            f" {', '.join(reward.name for reward in self._rewards)})"
        )

    def size(self, split: Split) -> int:
        """Return the number of distinct prompts of a split."""
        refuse_unknown("split", [split], SPLITS)
        return len(self._splits[split].rows)

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` training prompts of learning step `step`; see `deal_starts`."""
        return deal_starts(self.seed, self.size("train"), step, count, block)

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of the questions, prompts and reward functions; see `SupportsFingerprint`."""
        fingerprint = {}
        for split in SPLITS:
            hashes = self._splits[split].hashes
            fingerprint[f"{split} questions"] = (
                f"{len(hashes)}, content {short_hash(*(each.row for each in hashes))}"
            )
        for reward in self._rewards:
            fingerprint[f"reward {reward.name}"] = (
                f"weight {reward.weight:g}, code {self._code[reward.name]}"
            )
        if self.date is not None:
            fingerprint["date"] = self.date
        prompts = [ids.tobytes() for split in SPLITS for ids in self._splits[split].prompts]
        return fingerprint | {
            "prompts": short_hash(*prompts),
            TEMPLATE_OPTIONS: short_hash(canonical(self._given_options)),
            "seed": str(self.seed),
        }

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return max(max(ids) for questions in self._splits.values() for ids in questions.prompts)

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(len(ids) for questions in self._splits.values() for ids in questions.prompts)

    def open(self, split: Split, starts: Sequence[int]) -> SingleTurnBatch:
        """Return a batch of prompts of a split, each index in [0, size(split)).

        Raises:
            ValueError: If the split or an index does not exist.
        """
        return SingleTurnBatch(**self._batch_fields(split, starts))

    def set_progress(self, step: int, total_steps: int) -> None:
        """Set the training progress, for reward functions that take the `trainer_state`."""
        self._progress = (step, total_steps)

    def completion_form(self) -> str:
        """Return a sentence for reward functions in TRL's form that get messages.

        Empty if they get texts.
        """
        batched = any(reward.batched for reward in self._rewards)
        if not batched or isinstance(self._datasets["train"][0]["prompt"], str):
            return ""
        return (
            "Completions are lists of messages, as the prompts are: the text is"
            ' completion[-1]["content"].'
        )

    def preflight(self) -> Preflight:
        """Test reward functions, reply functions and environments on sample completions of the first training prompt.

        Two completions reveal a wrong number of rewards. Functions in TRL's form are also called
        with one completion alone, as for a greedy answer. With on_reward_error "exclude" a failure
        is a warning.

        Raises:
            RewardError: If a function fails.
        """
        batch = self.open("train", [0])
        ids = self.tokenizer(list(SAMPLE_COMPLETIONS), add_special_tokens=False)["input_ids"]
        members = [0, 0]
        # another member's completion is a group of its own
        if any(reward.batched for reward in self._rewards):
            ids.append(ids[0])
            members.append(1)
        samples = single_turn_conversations([0] * len(ids), ids, members)
        try:
            batch.respond(samples)
            scores = batch.score(samples)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            reason = (
                error
                if isinstance(error, RewardError)
                else f"{class_name(error)}: {one_line(error)}"
            )
            message = f"Your functions are tested on sample completions before training: {reason}"
            # The function may take messages for text.
            form = self.completion_form()
            if form and isinstance(error.__cause__, AttributeError | LookupError | TypeError):
                message = f"{message.removesuffix('.')}. {form}"
            raise RewardError(message) from error.__cause__ or error
        for reward in self._rewards if self.on_reward_error == "raise" else ():
            if not reward.batched and np.isnan(scores.components[reward.name]).all():
                raise RewardError(
                    f"Reward function {reward.name!r} must return a number, got None for all"
                    " samples."
                )
        rewards = {
            name: None if np.isnan(values[0]) else float(values[0])
            for name, values in scores.components.items()
        }
        (prompt,) = batch.prompts
        return Preflight(
            prompt=str(self.tokenizer.decode(prompt)), tokens=tuple(prompt), rewards=rewards
        )

    def close(self) -> None:
        """End the worker processes of reward functions. The next score starts new ones."""
        self._runner.close()

    def _batch_fields(self, split: Split, starts: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `SingleTurnBatch` for prompts of a split."""
        size = self.size(split)
        if not all(0 <= start < size for start in starts):
            raise ValueError(f"starts of {split} must be in [0, {size - 1}], got {list(starts)}.")
        questions = self._splits[split]
        return {
            "prompts": tuple(questions.prompts[start].tolist() for start in starts),
            "rows": [questions.table[questions.rows[start]] for start in starts],
            "rewards": self._rewards,
            "runner": self._runner,
            "tokenizer": self.tokenizer,
            "on_reward_error": self.on_reward_error,
            "held_out": split != "train",
            "progress": self._progress,
        }

    def _prepare(self, table: AnyTable, where: str) -> AnyTable:
        """Return the dataset of a split with the required columns."""
        return table

    def _read_table(self, table: AnyTable, where: str) -> PromptSplit:
        """Return all rows of a table, tokenized and hashed."""
        prompts: list[tuple[Prompt, Options]] = []
        hashes = []
        for number in range(len(table)):
            # 1. Checks of the row.
            row = table[number]
            row_name = numbered(number, where)
            for name in self._columns:
                if isinstance(row[name], bytes | bytearray):
                    raise ValueError(
                        f"{row_name} must have text as {name}, got bytes. Decode it first."
                    )
                if _missing(row[name]) and not (name == "answer" and row[name] == ""):
                    raise ValueError(
                        f"{row_name} has no {name}, got {shown(row[name])}. Remove the row."
                    )
            question = row[self._columns[0]]
            hashes.append(RowHashes.of(dict(row) if self.whole_rows else question, row))
            # 2. The prompt.
            prompt: Prompt = str(question)
            if self._columns == ("prompt",):
                if not isinstance(question, str):
                    prompt = check_messages(question, f"{row_name}: prompt")
                elif is_written_messages(question):
                    raise ValueError(
                        f"{row_name} has messages that are written as text as prompt:"
                        f" {shown(question, 80)}. Read them with json.loads, so that they get the"
                        " chat template."
                    )
            elif self._template is not None:
                prompt = fill_template(self._template, question, row["answer"])
            # 3. Its template options.
            options = self._options
            if row.get(TEMPLATE_OPTIONS) is not None:
                check_options(row[TEMPLATE_OPTIONS], f"{row_name}: {TEMPLATE_OPTIONS}")
                options = {**options, **row_options(row)}
            prompts.append((prompt, {**options, **self._row_options(row)}))
        tokenized = tokenize(prompts, self.tokenizer, where)
        return PromptSplit(
            table=table,
            rows=range(len(table)),
            prompts=tokenized,
            hashes=hashes,
            whole_rows=self.whole_rows,
        )

    def _row_options(self, row: Mapping[str, Any]) -> Options:
        """Return the keyword arguments of the chat template that the environment sets for a row."""
        return {}


def _missing(value: object) -> bool:
    """Return True for None, NaN (a missing value in data frames) and blank text."""
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True, kw_only=True)
class _Cursor:
    """Position of `reset` and `step`: split, seed of its order, number of batches done, and the current batch."""

    split: Split
    seed: int
    step: int = 0
    starts: tuple[int, ...] = ()
    batch: SingleTurnBatch | None = None


class HuggingFaceGym(PromptEnvironment):
    """An environment with a prompt dataset and reward functions, where one completion answers one prompt.

    Rewards have exactly one of two forms. AgileRL's form needs the columns `question` and `answer`,
    and `reward_fn(completion, answer, question) -> float`; `conversation_template` renders a
    question as messages. TRL's form needs a column `prompt` (text, or a list of messages) and
    `reward_funcs`, each called with all completions of a group at once as `f(prompts=,
    completions=, completion_ids=, **columns) -> list[float | None]`, where None means not
    applicable. Functions get the arguments that they name; AgileRL's form accepts its three names
    and columns in any order, or other names in this order. If a prompt ends with an assistant
    message, the model continues it; completions contain only sampled text.

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
            `datasets.DatasetDict`.
        test_dataset: Questions for the final report; None = draw them from the training dataset.
        tokenizer: A transformers tokenizer; with a chat template if prompts are messages.
        reward_fn: Reward in AgileRL's form.
        reward_funcs: One or several rewards in TRL's form.
        reward_weights: Factor of each of `reward_funcs` in the sum; None means 1 each.
        conversation_template: Messages with the fields {question} and {answer}, for AgileRL's form.
            None = a single user message with the question, or plain text if the tokenizer has no
            chat template.
        data_batch_size: Prompts per batch of `reset` and `step`.
        options: Other options; see `evogrpo.envs.text.huggingface_gym.PromptOptions`.

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
        reward_fn: RewardFn | None = None,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        reward_weights: Sequence[float] | None = None,
        conversation_template: Sequence[Mapping[str, str]] | None = None,
        data_batch_size: int = 8,
        **options: Unpack[PromptOptions],
    ) -> None:
        agilerl = reward_fn is not None
        if conversation_template is not None and not agilerl:
            raise ValueError(
                "conversation_template requires reward_fn. With reward_funcs, put messages into"
                " prompt."
            )
        if (
            conversation_template is None
            and agilerl
            and getattr(tokenizer, "chat_template", None) is not None
        ):
            conversation_template = [{"role": "user", "content": "{question}"}]
        super().__init__(
            train_dataset,
            test_dataset,
            tokenizer,
            rewards=make_rewards(reward_fn, reward_funcs, reward_weights),
            template=(
                None if conversation_template is None else check_template(conversation_template)
            ),
            columns=("question", "answer") if agilerl else ("prompt",),
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
        require(f"Task {name!r}", "reasoning_gym")
        refuse_unknown("split in sizes", sizes or {}, SPLITS)
        refuse_unknown(
            "reasoning-gym task", [name], import_module("reasoning_gym.factory").DATASETS
        )
        counts = {"train": 2000, **DEFAULT_SIZES, **(sizes or {})}
        try:
            task = import_module("reasoning_gym").create_dataset(
                name, size=sum(counts.values()), seed=seed, **task_options
            )
        except (TypeError, AssertionError) as error:
            raise ValueError(
                f"Invalid settings of task {name!r}, {task_options}: {error}"
            ) from error
        if system_prompt is None:
            system = []
        else:
            system = [{"role": "system", "content": system_prompt}]
        entries = [task[number] for number in range(sum(counts.values()))]
        rows = [
            {"prompt": [*system, {"role": "user", "content": entry["question"]}], **entry}
            for entry in entries
        ]
        tables = {}
        first = 0
        for split in SPLITS:
            tables[split] = rows[first : first + counts[split]]
            first += counts[split]
        reward = ReasoningReward(__name__=name, task=task, answer_tag=answer_tag)
        return cls(tables, None, tokenizer, reward_funcs=reward, seed=seed, **(gym_options or {}))

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
        if reset_dataloaders or seed is not None:
            first = 0
        else:
            first = self._cursor.step
        step = whole_between("step in options", (options or {}).get("step", first), 0)
        cursor = replace(self._cursor, step=step, seed=self._cursor.seed if seed is None else seed)
        self._cursor = self._loaded(cursor)
        return self._observation(), {"split": cursor.split, "starts": self._cursor.starts}

    def step(self, completion_ids: Sequence[Tensor]) -> StepResult:
        """Reward one group of completions per prompt of the current batch, and return the next batch.

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
        batch = self._cursor.batch
        if batch is None:
            raise ValueError("step needs the prompts of reset. Call reset first.")
        # 1. Cut the completions out of the padded rows.
        if not isinstance(completion_ids, Sequence) or any(
            getattr(ids, "ndim", 0) != 2 for ids in completion_ids
        ):
            raise ValueError(
                "completion_ids must be a list of tensors [group, tokens], got"
                f" {shown(completion_ids)}."
            )
        sizes = {len(group) for group in completion_ids}
        smallest = 2 if cursor.split == "train" else 1
        if len(completion_ids) != len(batch.prompts) or len(sizes) != 1 or min(sizes) < smallest:
            raise ValueError(
                f"completion_ids must be {len(batch.prompts)} groups of equal size of at least"
                f" {smallest}, got shapes {[tuple(group.shape) for group in completion_ids]}."
            )
        (group_size,) = sizes
        rows = [
            self._completion(row, prompt)
            for group, prompt in zip(completion_ids, batch.prompts, strict=True)
            for row in group.tolist()
        ]
        # 2. Compute the rewards.
        shape = (len(batch.prompts), group_size)
        scores = batch.score(
            single_turn_conversations([n // group_size for n in range(len(rows))], rows)
        )
        texts = [
            list(scores.completions[i * group_size : (i + 1) * group_size]) for i in range(shape[0])
        ]
        # 3. Load the next batch.
        self._cursor = self._loaded(replace(cursor, step=cursor.step + 1))
        info: dict[str, Any] = {
            f"rewards/{name}": values.reshape(shape) for name, values in scores.components.items()
        }
        info |= scores.metrics
        info |= {"completions": texts, "split": cursor.split, "starts": self._cursor.starts}
        rewards = torch.as_tensor(scores.rewards.reshape(shape), dtype=torch.float32)
        return (
            self._observation(),
            rewards,
            np.ones(shape, dtype=bool),
            np.zeros(shape, dtype=bool),
            info,
        )

    @contextmanager
    def eval_mode(self, split: Split = "validation") -> Iterator[None]:
        """Use a held-out split from its first question inside a `with` block.

        The training position is kept.
        """
        refuse_unknown("split of eval_mode", [split], SPLITS[1:])
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
            starts = deal_starts(cursor.seed, size, cursor.step, self._batch_size, self._batch_size)
            self.set_progress(cursor.step, 0)
        else:
            first = cursor.step % -(-size // self._batch_size) * self._batch_size
            starts = tuple(range(first, min(first + self._batch_size, size)))
        return replace(cursor, starts=starts, batch=self.open(cursor.split, starts))

    def _observation(self) -> list[PromptTensors]:
        assert self._cursor.batch is not None
        ids = [
            torch.tensor([list(prompt)], dtype=torch.long) for prompt in self._cursor.batch.prompts
        ]
        return [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in ids]

    def _completion(self, row: list[int], prompt: Sequence[int]) -> list[int]:
        """Return the tokens after the prompt without trailing padding: those that the agent learns from."""
        if row[: len(prompt)] != list(prompt):
            raise ValueError(
                "Rows of completion_ids must start with their prompt. Keep the order of the"
                " prompts."
            )
        completion = row[len(prompt) :]
        pad = self.tokenizer.pad_token_id
        padded = bool(completion) and completion[-1] == pad
        while completion and completion[-1] == pad:
            completion.pop()
        if padded and pad in self.action_space.end_ids:
            completion.append(pad)  # the first of them has ended the completion
        return completion
