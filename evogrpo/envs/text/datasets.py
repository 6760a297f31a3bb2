"""Prompt datasets: checked tables with their splits and reward functions, as a base class of environments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import gymnasium

from evogrpo.config.checks import refuse_unknown, whole_between, whole_number
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import SPLITS, Split, deal_starts
from evogrpo.envs.text.prompt_batch import SingleTurnBatch, TrainingProgress
from evogrpo.envs.text.reward_functions import OnRewardError, Reward, RewardError, RewardInputs, make_reward_runner
from evogrpo.envs.text.scoring import compute_rewards
from evogrpo.envs.text.splits import PromptSplit, RowHashes, Table, make_splits
from evogrpo.envs.text.templates import (
    Message,
    Options,
    Prompt,
    Tokenizer,
    check_messages,
    check_options,
    fill_template,
    tokenize,
)

AnyTable = Any
"""A `datasets.Dataset`, a pandas or polars data frame, a pyarrow table, or any sequence of mappings."""
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""Column with keyword arguments of the chat template for one row, as in TRL."""
SAMPLE_COMPLETIONS = ("This is a made-up completion: 42.", "This is another made-up completion.")


def tables_by_split(train: Any, validation: Any, test: Any) -> dict[Split, Any]:
    """Return the dataset of each split as a sequence of rows; None where there is none.

    Args:
        train: A dataset, or a mapping of splits to datasets, such as a `datasets.DatasetDict`.
        validation: A dataset or None.
        test: A dataset or None.

    Raises:
        ValueError: If a split is passed twice, or there is no training dataset.
    """
    tables: dict[Split, Any] = {"train": train, "validation": validation, "test": test}
    if isinstance(train, Mapping) and "train" in train:
        for split in SPLITS[1:]:
            if split in train and tables[split] is not None:
                raise ValueError(f"train_dataset contains a {split} split, and {split}_dataset is set. Remove one.")
        tables |= {split: train[split] for split in SPLITS if split in train}
    if tables["train"] is None:
        raise ValueError("train_dataset must be given: rows such as [{'question': ..., 'answer': ...}], got None.")
    return {split: _rows(table) for split, table in tables.items()}


def _rows(table: Any) -> Any:
    """Return data frames and arrow tables as rows of plain values, other tables unchanged."""
    if hasattr(table, "iloc") and hasattr(table, "notna"):  # pandas, with NaN for missing values
        return [_plain(row) for row in table.astype(object).where(table.notna(), None).to_dict("records")]
    if hasattr(table, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(table, "to_pylist"):  # pyarrow
        return table.to_pylist()
    form = getattr(table, "format", None)
    if isinstance(form, Mapping) and form.get("type") not in (None, "custom"):
        # A datasets.Dataset that returns tensors, arrays or frames.
        return table.with_format(None, columns=form["columns"])
    return table


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def check_table(table: object, columns: Sequence[str], name: str) -> list[str]:
    """Check that a dataset is a non-empty table with the required columns; return all its columns.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(table, str | bytes | PathLike):
        raise ValueError(
            f"{name} must be rows, got {table!r}. Read the file first: [json.loads(line) for line in open(path)] for "
            "JSON lines, list(csv.DictReader(open(path))) or pandas.read_csv(path) for CSV."
        )
    if isinstance(table, Mapping):
        if set(columns) <= set(table):
            fix = "Convert columns to rows with datasets.Dataset.from_dict or pandas.DataFrame."
        else:
            fix = "Pass one of its values (train_dataset also takes a mapping of splits with the key train)."
        raise ValueError(f"{name} must be the rows of one split, got a mapping of {list(table)}. {fix}")
    if not hasattr(table, "__len__") or not hasattr(table, "__getitem__"):
        raise ValueError(
            f"{name} must have a length and indexed rows (a datasets.Dataset or a list of mappings), "
            f"got {type(table).__name__}. Convert a streamed dataset to a list."
        )
    if len(table) == 0:
        raise ValueError(f"{name} must contain at least one row, got none.")
    names = getattr(table, "column_names", None)
    if names is None and not isinstance(table[0], Mapping):
        raise ValueError(
            f"{name} must contain a mapping of columns in every row, got {table[0]!r:.80} in row 0. Write "
            f"{{{', '.join(f'{column!r}: ...' for column in columns)}}}."
        )
    present = list(table[0]) if names is None else list(names)
    missing = [column for column in columns if column not in present]
    if missing:
        raise ValueError(
            f"{name} must have the columns {list(columns)}, got {present!s:.200}. Rename columns to provide "
            f"{missing}; the first line of a CSV file must name them."
        )
    return present


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Results of testing the reward functions before a run.

    Attributes:
        prompt: First training prompt, rendered; untrusted text.
        tokens: Its token ids.
        rewards: Reward of the first sample completion by function; None where it does not apply or failed.
    """

    prompt: str
    tokens: tuple[int, ...]
    rewards: dict[str, float | None]


class PromptEnvironment:
    """Base class of environments with a prompt dataset and reward functions.

    Args:
        tables: Datasets by split; "train" is required.
        tokenizer: A transformers tokenizer.
        rewards: The reward functions.
        template: Messages with the fields {question} and {answer}; None if rows have a `prompt` or questions are
            plain text.
        columns: Required columns; the first is the question or prompt.
        sizes: Number of prompts to draw for a held-out split without a dataset.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template, or None.
        max_prompt_length: Maximum number of prompt tokens; None = no limit.
        on_reward_error: "raise" or "exclude".
        reward_timeout: Time limit of one call of a reward function, in seconds; None = no limit.
        reward_workers: Number of worker processes for rewards; see `make_reward_runner`.
        seed: Seed of the training order and of drawn splits.

    Raises:
        ValueError: If an argument, a column or a split is invalid.
    """

    def __init__(
        self,
        tables: Mapping[Split, Table | None],
        tokenizer: Tokenizer | None,
        *,
        rewards: Sequence[Reward],
        template: Sequence[Message] | None,
        columns: Sequence[str],
        sizes: Mapping[Split, int | None],
        chat_template_kwargs: Options | None,
        max_prompt_length: int | None,
        on_reward_error: OnRewardError,
        reward_timeout: float | None,
        reward_workers: int | None,
        seed: int,
    ) -> None:
        # 1. Arguments.
        if tokenizer is None:
            raise ValueError("tokenizer must be given: the environment encodes prompts and decodes completions.")
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise ValueError(
                f"tokenizer must be a transformers tokenizer, got {tokenizer!r:.80} ({type(tokenizer).__name__}). "
                "Load one with AutoTokenizer.from_pretrained."
            )
        if on_reward_error not in ("raise", "exclude"):
            raise ValueError(f'on_reward_error must be "raise" or "exclude", got {on_reward_error!r}.')
        if max_prompt_length is not None:
            max_prompt_length = whole_between("max_prompt_length", max_prompt_length, 1)
        sizes = {split: None if size is None else whole_number(f"{split}_size", size) for split, size in sizes.items()}
        self.tokenizer = tokenizer
        self.seed = whole_number("seed", seed)
        self._on_reward_error: OnRewardError = on_reward_error
        self._rewards, self._template, self._columns = rewards, template, tuple(columns)
        self._options = check_options(chat_template_kwargs, TEMPLATE_OPTIONS)
        self._runner = make_reward_runner(rewards, reward_timeout, reward_workers)
        self._progress = TrainingProgress()
        # 2. Columns of each dataset.
        datasets = {split: table for split, table in tables.items() if table is not None}
        for split, table in datasets.items():
            present = check_table(table, self._columns, f"{split}_dataset")
            for reward in rewards:
                reward.check(present, f"{split}_dataset", in_process=self._runner.in_process)
        for split, size in sizes.items():
            if size is not None and split in datasets:
                raise ValueError(f"{split}_size requires that {split}_dataset is not set, got both.")
        # 3. Tokenized, deduplicated splits.
        self._splits, self.filtered = make_splits(
            datasets, self._read_table, max_prompt_length=max_prompt_length, sizes=sizes, seed=seed
        )
        vocabulary = gymnasium.spaces.Discrete(len(tokenizer))
        self.observation_space: gymnasium.Space[Any] = gymnasium.spaces.Sequence(vocabulary)
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Sequence(vocabulary)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.size(split)}" for split in SPLITS)
        return f"{type(self).__name__}({sizes} questions, {', '.join(reward.name for reward in self._rewards)})"

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
            fingerprint[f"{split} questions"] = f"{len(hashes)}, content {short_hash(*(each.row for each in hashes))}"
        for reward in self._rewards:
            fingerprint[f"reward {reward.name}"] = f"weight {reward.weight:g}, code {code_hash(reward.function)}"
        prompts = [ids.tobytes() for split in SPLITS for ids in self._splits[split].prompts]
        return fingerprint | {
            "prompts": short_hash(*prompts),
            TEMPLATE_OPTIONS: short_hash(canonical(self._options)),
            "seed": str(self.seed),
        }

    @property
    def excludes_failures(self) -> bool:
        """True if completions with a failed reward are excluded, rather than stop the run."""
        return self._on_reward_error == "exclude"

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return max(max(ids) for questions in self._splits.values() for ids in questions.prompts)

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt."""
        return self._longest[0]

    @property
    def longest_at(self) -> str:
        """The split and the row of its dataset that the longest prompt comes from."""
        _, split, row = self._longest
        return f"The prompt of row {row} ({split})"

    @property
    def _longest(self) -> tuple[int, str, int]:
        return max(
            (len(ids), split, row)
            for split, questions in self._splits.items()
            for ids, row in zip(questions.prompts, questions.rows, strict=True)
        )

    def set_progress(self, step: int, total_steps: int) -> None:
        """Set the training progress, for reward functions that take the `trainer_state`."""
        self._progress.step, self._progress.total_steps = step, total_steps

    def preflight(self) -> Preflight:
        """Test every reward function on two sample completions of the first training prompt.

        Two completions reveal a wrong number of rewards. With on_reward_error "exclude" a function may fail, but what
        it returns must be valid.

        Raises:
            RewardError: If a function fails or returns an invalid reward.
        """
        batch = SingleTurnBatch(**self._batch_fields("train", [0]))
        ids = self.tokenizer(list(SAMPLE_COMPLETIONS), add_special_tokens=False)["input_ids"]
        inputs = RewardInputs(
            rows=list(batch.rows) * 2,
            texts=SAMPLE_COMPLETIONS,
            token_ids=ids,
            trainer=batch.trainer_arguments(range(2)),
        )
        rewards: dict[str, float | None] = {}
        for reward in self._rewards:
            try:
                value = float(compute_rewards([reward], inputs, "raise", self._runner).rewards[0])
            except RewardError as error:
                if self._on_reward_error == "exclude" and error.__cause__ is not None:
                    rewards[reward.name] = None
                    continue
                message = f"Reward functions are tested on sample completions before training: {error}"
                raise RewardError(message) from error.__cause__
            rewards[reward.name] = None if math.isnan(value) else value
        (prompt,) = batch.prompts
        return Preflight(prompt=str(self.tokenizer.decode(prompt)), tokens=tuple(prompt), rewards=rewards)

    def close(self) -> None:
        """End the worker processes of reward functions. The next score starts new ones."""
        self._runner.close()

    def _batch_fields(self, split: Split, starts: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `SingleTurnBatch` for prompts of a split."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}.")
        questions = self._splits[split]
        if not all(0 <= start < len(questions.rows) for start in starts):
            raise ValueError(f"starts of {split} must be in [0, {len(questions.rows) - 1}], got {list(starts)}.")
        return {
            "prompts": tuple(questions.prompts[start].tolist() for start in starts),
            "rows": [questions.table[questions.rows[start]] for start in starts],
            "rewards": self._rewards,
            "runner": self._runner,
            "tokenizer": self.tokenizer,
            "on_reward_error": self._on_reward_error,
            "held_out": split != "train",
            "progress": self._progress,
        }

    def _read_table(self, split: Split, table: Table) -> PromptSplit:
        """Return all rows of a table, tokenized and hashed."""
        hashes: list[RowHashes] = []
        prompts = tokenize(self._prompts(table, f"{split}_dataset", hashes), self.tokenizer, f"{split}_dataset")
        return PromptSplit(table=table, rows=range(len(table)), prompts=prompts, hashes=hashes)

    def _prompts(self, table: Table, where: str, hashes: list[RowHashes]) -> Iterator[tuple[Prompt, Options]]:
        """Yield each row's prompt and chat template options; append the row's hashes."""
        columns, question_column = set(table[0]), self._columns[0]
        for number in range(len(table)):
            # 1. Checks of the row.
            row = table[number]
            if set(row) != columns:
                raise ValueError(
                    f"Every row of {where} must have the columns {sorted(columns)}, got {sorted(row)} in row {number}."
                )
            question = row[question_column]
            if _missing(question):
                raise ValueError(
                    f"Row {number} of {where} must have a {question_column}, got {question!r}. Remove the row."
                )
            for name in self._columns:
                if isinstance(row[name], bytes | bytearray):
                    raise ValueError(f"{name} in row {number} of {where} must be text, got bytes. Decode it first.")
                if name == "answer" and row[name] != "" and _missing(row[name]):
                    raise ValueError(f"Row {number} of {where} must have an answer, got {row[name]!r}. Remove the row.")
            hashes.append(RowHashes.of(question, row))
            # 2. The prompt.
            prompt: Prompt = str(question)
            if self._columns == ("prompt",):
                if not isinstance(question, str):
                    prompt = check_messages(question, f"prompt {number} of {where}")
            elif self._template is not None:
                prompt = fill_template(self._template, question, row["answer"])
            # 3. Its template options.
            options = self._options
            if row.get(TEMPLATE_OPTIONS) is not None:
                row_options = check_options(row[TEMPLATE_OPTIONS], f"{TEMPLATE_OPTIONS} in row {number} of {where}")
                # Arrow tables give every row the keys of all rows, with None for missing ones.
                options = {**options, **{name: value for name, value in row_options.items() if value is not None}}
            yield prompt, options


def _missing(value: object) -> bool:
    """Return True for None, NaN (a missing value in data frames) and blank text."""
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))
