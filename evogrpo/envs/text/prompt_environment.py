"""PromptEnvironment: base class of environments with a prompt dataset and reward functions."""

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, TypedDict

import gymnasium
import numpy as np

from evogrpo.chat_templates import end_of_turn_ids
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import SPLITS, Scores, Split, deal_starts
from evogrpo.envs.text.datasets import (
    AnyTable,
    PromptSplit,
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
    dated_template,
    fill_template,
    inserts_date,
    numbered,
    row_options,
    tokenize,
)
from evogrpo.records import single_turn_conversations
from evogrpo.spaces import CompletionSpace
from evogrpo.text import class_name, one_line, shown, text_of
from evogrpo.validation import refuse_unknown, whole_between, whole_number

SAMPLE_COMPLETIONS = ("This is a made-up completion: 42.", "This is another made-up completion.")


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
    # Arguments of reward functions in addition to the columns.
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
        self._sizes: dict[Split, int | None] = {"validation": validation_size, "test": test_size}
        for split, size in self._sizes.items():
            if size is not None:
                self._sizes[split] = whole_number(f"{split}_size", size)
        self.tokenizer = tokenizer
        self.seed = whole_number("seed", seed)
        self.on_reward_error: OnRewardError = on_reward_error
        self._max_prompt_length = max_prompt_length
        self._rewards = rewards
        self._template = template
        self._columns = tuple(columns)
        # `_options` are these with a dated template; the fingerprint has the given ones.
        self._given_options = check_options(chat_template_kwargs, TEMPLATE_OPTIONS)
        own_template = getattr(tokenizer, "chat_template", None)
        self._chat_template: Any = self._given_options.get("chat_template", own_template)
        self._runner = RewardRunner(rewards, reward_timeout, reward_workers)
        self._progress = (0, 0)
        # Hashes of the code before the first call, which may change it.
        self._code = {reward.name: code_hash(reward.function) for reward in rewards}
        # 2. Columns of each dataset.
        self._datasets: dict[Split, AnyTable] = {}
        for split, given in tables_by_split(
            train_dataset, validation_dataset, test_dataset
        ).items():
            if given is None:
                continue
            where = f"{split}_dataset"
            if self._sizes.get(split) is not None:
                raise ValueError(f"{split}_size requires that {where} is not set, got both.")
            table = self._prepare(given, where)
            # Reward functions are checked against the columns of every dataset.
            present = [*check_table(table, self._columns, where), *self.extra_arguments]
            for reward in rewards:
                reward.check(present, where, in_worker=self._runner.in_worker(reward.name))
            # Kept for `set_date`, which renders the prompts again.
            self._datasets[split] = table
        # 3. Tokenized, deduplicated splits.
        self._fix_date(datetime.now().isoformat(timespec="seconds"))
        vocabulary = gymnasium.spaces.Discrete(len(tokenizer))
        self.observation_space = gymnasium.spaces.Sequence(vocabulary)
        end_ids = end_of_turn_ids(tokenizer, self._options)
        self.action_space = CompletionSpace(len(tokenizer), end_ids)

    # ---- date, splits and fingerprint

    @property
    def date(self) -> str | None:
        """Date and time that the chat template inserts into prompts, in ISO format.

        None if it inserts none.
        """
        return self._date if inserts_date(self._chat_template) else None

    def set_date(self, date: str) -> None:
        """Build the prompts again with another date; see `SupportsDate`."""
        # Templates without a date need no new prompts.
        if self.date not in (None, date):
            self._fix_date(date)

    def _fix_date(self, date: str) -> None:
        """Build all splits. The chat template inserts this date instead of the current one."""
        self._date = date
        self._options = self._given_options
        if inserts_date(self._chat_template):
            dated = dated_template(self._chat_template, datetime.fromisoformat(date))
            self._options = {**self._given_options, "chat_template": dated}
        tables = {}
        for split, table in self._datasets.items():
            tables[split] = self._read_table(table, f"{split}_dataset")
        self._splits, self.filtered = make_splits(
            tables, max_prompt_length=self._max_prompt_length, sizes=self._sizes, seed=self.seed
        )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.size(split)}" for split in SPLITS)
        names = ", ".join(reward.name for reward in self._rewards)
        return f"{type(self).__name__}({sizes} questions, {names})"

    def size(self, split: Split) -> int:
        """Return the number of distinct prompts of a split."""
        refuse_unknown("split", [split], SPLITS)
        return len(self._splits[split].rows)

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` training prompts of learning step `step`; see `deal_starts`."""
        return deal_starts(self.seed, self.size("train"), step, count, block)

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of questions, prompts and reward functions; see `SupportsFingerprint`."""
        fingerprint = {}
        for split in SPLITS:
            hashes = [each.row for each in self._splits[split].hashes]
            fingerprint[f"{split} questions"] = f"{len(hashes)}, content {short_hash(*hashes)}"
        for reward in self._rewards:
            # What decides about rewards: the weight and the function's code.
            code = f"weight {reward.weight:g}, code {self._code[reward.name]}"
            fingerprint[f"reward {reward.name}"] = code
        if self.date is not None:
            fingerprint["date"] = self.date
        # Token ids, as tokenizer and template decide about them too.
        prompts = [ids.tobytes() for ids in self._prompts()]
        fingerprint["prompts"] = short_hash(*prompts)
        fingerprint[TEMPLATE_OPTIONS] = short_hash(canonical(self._given_options))
        fingerprint["seed"] = str(self.seed)
        return fingerprint

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return max(map(max, self._prompts()))

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(map(len, self._prompts()))

    def _prompts(self) -> list["array[int]"]:
        """Return the token ids of the prompts of all splits."""
        prompts: list[array[int]] = []
        for split in SPLITS:
            prompts += self._splits[split].prompts
        return prompts

    # ---- batches and rewards

    def open(self, split: Split, starts: Sequence[int]) -> SingleTurnBatch:
        """Return a batch of prompts of a split, each index in [0, size(split)).

        Raises:
            ValueError: If the split or an index does not exist.
        """
        return SingleTurnBatch(**self._batch_fields(split, starts))

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

    def set_progress(self, step: int, total_steps: int) -> None:
        """Set the training progress, for reward functions that take the `trainer_state`."""
        self._progress = (step, total_steps)

    def close(self) -> None:
        """End the worker processes of reward functions. The next score starts new ones."""
        self._runner.close()

    # ---- test of the user's functions

    def completion_form(self) -> str:
        """Return a sentence for reward functions in TRL's form that get messages.

        Empty if they get texts.
        """
        batched = any(reward.batched for reward in self._rewards)
        # Only TRL's form passes messages, and only if prompts are messages.
        if not batched or isinstance(self._datasets["train"][0]["prompt"], str):
            return ""
        return (
            "Completions are lists of messages, as the prompts are: the text is"
            ' completion[-1]["content"].'
        )

    def preflight(self) -> Preflight:
        """Call the user's functions on made-up completions of the first training prompt.

        These are reward functions, reply functions and environments.
        Two completions reveal a wrong number of rewards. Functions in TRL's form are also called
        with one completion alone, as for a greedy answer. With on_reward_error "exclude" a failure
        is a warning.

        Raises:
            RewardError: If a function fails.
        """
        batch = self.open("train", [0])
        scores = self._score_samples(batch)
        rewards: dict[str, float | None] = {}
        for reward in self._rewards:
            values = scores.components[reward.name]
            # A function of one completion that returns nothing has no `return`.
            no_value = not reward.batched and bool(np.isnan(values).all())
            if no_value and self.on_reward_error == "raise":
                raise RewardError(
                    f"Reward function {reward.name!r} must return a number, got None for all"
                    " samples."
                )
            rewards[reward.name] = None if np.isnan(values[0]) else float(values[0])
        (prompt,) = batch.prompts
        text = str(self.tokenizer.decode(prompt))
        return Preflight(prompt=text, tokens=tuple(prompt), rewards=rewards)

    def _score_samples(self, batch: SingleTurnBatch) -> Scores:
        """Score sample completions of one prompt, to find errors of user code before training."""
        ids = self.tokenizer(list(SAMPLE_COMPLETIONS), add_special_tokens=False)["input_ids"]
        members = [0, 0]
        if any(reward.batched for reward in self._rewards):
            # Another member's completion is a group of its own.
            ids.append(ids[0])
            members.append(1)
        samples = single_turn_conversations([0] * len(ids), ids, members)
        try:
            # Replies and environments first, as in a run.
            batch.respond(samples)
            return batch.score(samples)
        except Exception as error:  # noqa: BLE001 (user code may raise anything)
            reason = text_of(error)
            if not isinstance(error, RewardError):
                reason = f"{class_name(error)}: {one_line(error)}"
            message = f"Your functions are tested on sample completions before training: {reason}"
            # The function may take messages for text.
            form = self.completion_form()
            if form and isinstance(error.__cause__, AttributeError | LookupError | TypeError):
                message = f"{message.removesuffix('.')}. {form}"
            raise RewardError(message) from error.__cause__ or error

    # ---- rows of a dataset

    def _prepare(self, table: AnyTable, where: str) -> AnyTable:
        """Return the dataset of a split with the required columns."""
        return table

    def _row_options(self, row: Mapping[str, Any]) -> Options:
        """Return the keyword arguments of the chat template that the environment sets for a row."""
        return {}

    def _read_table(self, table: AnyTable, where: str) -> PromptSplit:
        """Return all rows of a table, tokenized and hashed."""
        prompts: list[tuple[Prompt, Options]] = []
        hashes = []
        for number in range(len(table)):
            row = table[number]
            row_name = numbered(number, where)
            self._check_row(row, row_name)
            question = row[self._columns[0]]
            # The question alone decides about the split, so a changed answer does not move it.
            hashes.append(RowHashes.of(dict(row) if self.whole_rows else question, row))
            prompts.append(self._render(row, row_name, self._template))
        return PromptSplit(
            table=table,
            rows=range(len(table)),
            prompts=tokenize(prompts, self.tokenizer, where),
            hashes=hashes,
            whole_rows=self.whole_rows,
        )

    def _check_row(self, row: Mapping[str, Any], row_name: str) -> None:
        """Raise ValueError if a required column of a row has no value, or bytes."""
        for name in self._columns:
            value = row[name]
            if isinstance(value, bytes | bytearray):
                raise ValueError(
                    f"{row_name} must have text as {name}, got bytes. Decode it first."
                )
            # Data frames have NaN for missing values. Answers may be empty.
            missing = value is None or (isinstance(value, float) and math.isnan(value))
            blank = isinstance(value, str) and not value.strip()
            if missing or (blank and not (name == "answer" and value == "")):
                raise ValueError(f"{row_name} has no {name}, got {shown(value)}. Remove the row.")

    def _render(
        self, row: Mapping[str, Any], row_name: str, template: Sequence[Message] | None
    ) -> tuple[Prompt, Options]:
        """Return the prompt of a row, and the keyword arguments of the chat template for it.

        Args:
            row: The row.
            row_name: Its name in messages.
            template: Messages with the fields {question} and {answer}; None = without a template.

        Raises:
            ValueError: If the prompt or the keyword arguments are invalid.
        """
        # 1. Keyword arguments: of the environment, of the row, and those that the environment sets.
        options = self._options
        if row.get(TEMPLATE_OPTIONS) is not None:
            check_options(row[TEMPLATE_OPTIONS], f"{row_name}: {TEMPLATE_OPTIONS}")
            options = {**options, **row_options(row)}
        options = {**options, **self._row_options(row)}
        # 2. AgileRL's form: a question in a template, or as plain text.
        question = row[self._columns[0]]
        if template is not None:
            return fill_template(template, question, row["answer"]), options
        if self._columns != ("prompt",):
            return str(question), options
        # 3. TRL's form: messages, or text.
        if not isinstance(question, str):
            return check_messages(question, f"{row_name}: prompt"), options
        # CSV files contain messages as text, which the chat template would not see.
        if re.match(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""", question):
            raise ValueError(
                f"{row_name} has messages that are written as text as prompt:"
                f" {shown(question, 80)}. Read them with json.loads, so that they get the chat"
                " template."
            )
        return question, options
