"""Prompt datasets: tables of questions, their splits and their reward functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import gymnasium

from evogrpo.config.checks import refuse_unknown, whole_between, whole_number
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import SPLITS, Split, deal_starts
from evogrpo.envs.text.reward_functions import (
    OnRewardError,
    Reward,
    RewardInputs,
    RewardLog,
    TrainingProgress,
    make_reward_runner,
)
from evogrpo.envs.text.scoring import SAMPLE_COMPLETIONS, Preflight, try_rewards
from evogrpo.envs.text.splits import PromptSplit, RowHashes, Table, Tokenized, make_splits
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
from evogrpo.envs.text.verifier_pool import VerifierPool

AnyTable = Any
"""A `datasets.Dataset`, a data frame of pandas or polars, a table of pyarrow, or any sequence of mappings."""


def tables_by_split(train: Any, validation: Any, test: Any) -> dict[Split, Any]:
    """Return the dataset of each split, as rows by number; None where it is not given.

    Args:
        train: A dataset, or several by the name of their split, such as a `datasets.DatasetDict`.
        validation: A dataset or None.
        test: Likewise.

    Raises:
        ValueError: If a split is given twice, or there is no training dataset.
    """
    given: dict[Split, Any] = {"train": train, "validation": validation, "test": test}
    if isinstance(train, Mapping) and "train" in train:
        for split in SPLITS[1:]:
            if split in train and given[split] is not None:
                raise ValueError(
                    f"train_dataset holds a {split} split, and {split}_dataset is given as well: leave one of them out"
                )
        given |= {split: train[split] for split in SPLITS if split in train}
    if given["train"] is None:
        raise ValueError("train_dataset must be given: rows such as [{'question': ..., 'answer': ...}], got None.")
    return {split: _rows(table) for split, table in given.items()}


def _rows(table: Any) -> Any:
    """Return a data frame or an arrow table as rows with plain values; anything else as it is."""
    if hasattr(table, "iloc") and hasattr(table, "notna"):  # pandas, where what is missing is NaN
        return [_plain(row) for row in table.astype(object).where(table.notna(), None).to_dict("records")]
    if hasattr(table, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(table, "to_pylist"):  # pyarrow
        return table.to_pylist()
    form = getattr(table, "format", None)
    if isinstance(form, Mapping) and form.get("type") not in (None, "custom"):
        # A datasets.Dataset that hands out its rows as tensors, arrays or frames.
        return table.with_format(None, columns=form["columns"])
    return table


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def check_table(table: object, columns: Sequence[str], name: str) -> list[str]:
    """Refuse anything that is not a non-empty table with the given columns; return all that it has.

    Raises:
        ValueError: With the name of the argument, what was found and what to do.
    """
    if isinstance(table, str | bytes | PathLike):
        raise ValueError(
            f"{name} must be rows, got {table!r}: read a file first, JSON lines by [json.loads(line) for line in "
            "open(path)], a CSV file by list(csv.DictReader(open(path))) or pandas.read_csv(path)"
        )
    if isinstance(table, Mapping):
        if set(columns) <= set(table):
            remedy = "make rows of its columns, by datasets.Dataset.from_dict or pandas.DataFrame"
        else:
            remedy = "pass one of its values (train_dataset also takes a mapping of splits with the key train)"
        raise ValueError(f"{name} must be one split, row by row, got a mapping of {list(table)}: {remedy}")
    if not hasattr(table, "__len__") or not hasattr(table, "__getitem__"):
        raise ValueError(
            f"{name} must have a length and rows by number (a datasets.Dataset or a list of mappings), "
            f"got {type(table).__name__}: turn a streamed dataset into a list first"
        )
    if len(table) == 0:
        raise ValueError(f"{name} must hold at least one row, got none")
    names = getattr(table, "column_names", None)
    if names is None and not isinstance(table[0], Mapping):
        raise ValueError(
            f"{name} must have a mapping of columns in every row, got {table[0]!r:.80} in row 0: write "
            f"{{{', '.join(f'{column!r}: ...' for column in columns)}}}"
        )
    present = list(table[0]) if names is None else list(names)
    missing = [column for column in columns if column not in present]
    if missing:
        raise ValueError(
            f"{name} must have the columns {list(columns)}, got {present!s:.200}. Rename columns to provide "
            f"{missing}; the first line of a CSV file must name them."
        )
    return present


TEMPLATE_OPTIONS = "chat_template_kwargs"
"""The column in which a row may bring keyword arguments of the chat template of its own, as in TRL."""


class PromptEnvironment:
    """PromptSplit of a dataset and reward functions; subclasses say what is opened at them.

    Args:
        tables: The given datasets; "train" is required.
        tokenizer: A transformers tokenizer.
        rewards: The reward functions.
        template: Messages that ask a row's `question`; None where rows bring a `prompt`, or are asked as plain text.
        columns: What every row must have.
        sizes: How many questions to draw for a held-out split that is not given.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template; None = none.
        max_prompt_length: Longest prompt used, in tokens; None keeps all.
        on_reward_error: "raise" or "exclude".
        reward_timeout: Seconds that one call of a reward function may take; None = no limit.
        reward_workers: Processes in which rewards are computed; see `make_reward_runner`.
        seed: Seed of the training order and of drawn splits.

    Raises:
        ValueError: If an argument, a column or a split does not fit.
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
        if tokenizer is None:
            raise ValueError("tokenizer must be given: the environment turns prompts into token ids and back")
        if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise ValueError(
                f"tokenizer must be a tokenizer of transformers, got {tokenizer!r:.80} ({type(tokenizer).__name__}): "
                "load one with AutoTokenizer.from_pretrained"
            )
        if on_reward_error not in ("raise", "exclude"):
            raise ValueError(f'on_reward_error must be "raise" or "exclude", got {on_reward_error!r}')
        if max_prompt_length is not None:
            max_prompt_length = whole_between("max_prompt_length", max_prompt_length, 1)
        sizes = {split: None if size is None else whole_number(f"{split}_size", size) for split, size in sizes.items()}
        self.tokenizer = tokenizer
        self.seed = whole_number("seed", seed)
        self._on_reward_error: OnRewardError = on_reward_error
        self._rewards, self._template, self._columns = rewards, template, tuple(columns)
        self._options = check_options(chat_template_kwargs, TEMPLATE_OPTIONS)
        self._runner = make_reward_runner(rewards, reward_timeout, reward_workers)
        for reward in rewards:
            reward.check_here(here=self._runner.here)
        self._pace = TrainingProgress()
        given = {split: table for split, table in tables.items() if table is not None}
        for split, table in given.items():
            present = check_table(table, self._columns, f"{split}_dataset")
            for reward in rewards:
                reward.check(present, f"{split}_dataset")
        for split, size in sizes.items():
            if size is not None and split in given:
                raise ValueError(f"{split}_size says how many questions to draw where {split}_dataset is not given")
        self._splits, self.filtered = make_splits(
            given, self._tokens, max_prompt_length=max_prompt_length, sizes=sizes, seed=seed
        )
        vocabulary = gymnasium.spaces.Discrete(len(tokenizer))
        self.observation_space: gymnasium.Space[Any] = gymnasium.spaces.Sequence(vocabulary)
        self.action_space: gymnasium.Space[Any] = gymnasium.spaces.Sequence(vocabulary)
        if isinstance(self._runner, VerifierPool):
            self._runner.check()  # it has been starting since its making

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.size(split)}" for split in SPLITS)
        return f"{type(self).__name__}({sizes} questions, {', '.join(reward.name for reward in self._rewards)})"

    def size(self, split: Split) -> int:
        """Return the number of distinct questions of a split."""
        refuse_unknown("split", [split], SPLITS)
        return len(self._splits[split].rows)

    def deal(self, step: int, count: int, block: int) -> tuple[int, ...]:
        """Return the first `count` training questions of learning step `step`; see `deal_starts`."""
        return deal_starts(self.seed, self.size("train"), step, count, block)

    def fingerprint(self) -> dict[str, str]:
        """Return what the questions, the prompts and the reward functions are; see `SupportsFingerprint`."""
        told = {f"{split} questions": _identity(self._splits[split]) for split in SPLITS}
        for reward in self._rewards:
            told[f"reward {reward.name}"] = f"weight {reward.weight:g}, code {code_hash(reward.function)}"
        asked = [ids.tobytes() for split in SPLITS for ids in self._splits[split].prompts]
        return told | {
            "prompts": short_hash(*asked),
            TEMPLATE_OPTIONS: short_hash(canonical(self._options)),
            "seed": str(self.seed),
        }

    @property
    def excludes_failures(self) -> bool:
        """Whether completions whose reward fails are left out, rather than stop the run."""
        return self._on_reward_error == "exclude"

    @property
    def largest_token(self) -> int:
        """The largest token id of all prompts."""
        return max(max(ids) for questions in self._splits.values() for ids in questions.prompts)

    @property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt."""
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

    def set_progress(self, step: int, most: int) -> None:
        """Take note of how far training has come, for reward functions that ask for the `trainer_state`."""
        self._pace.step, self._pace.most = step, most

    def preflight(self) -> Preflight:
        """Try every reward function on two made-up completions of the first training question.

        Two, so that rewards of another number than completions are noticed.

        Raises:
            RewardError: If one fails, or returns something that is no reward.
        """
        questions = self._splits["train"]
        row, prompt = questions.table[questions.rows[0]], questions.prompts[0].tolist()
        answers = RewardInputs(
            rows=[row, row],
            texts=list(SAMPLE_COMPLETIONS),
            token_ids=self.tokenizer(list(SAMPLE_COMPLETIONS), add_special_tokens=False)["input_ids"],
            training=RewardLog().offered(self._pace, here=self._runner.here) if self._rewards[0].batched else {},
        )
        return Preflight(
            prompt=str(self.tokenizer.decode(prompt)),
            tokens=tuple(prompt),
            rewards=try_rewards(self._rewards, answers, self._on_reward_error, self._runner),
        )

    def close(self) -> None:
        """End the worker processes of reward functions; the next score would start new ones."""
        self._runner.close()

    def _opened(self, split: Split, starts: Sequence[int]) -> dict[str, Any]:
        """Return the fields of `SingleTurnBatch` for questions of a split, or say which does not exist."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}")
        questions = self._splits[split]
        if not all(0 <= start < len(questions.rows) for start in starts):
            raise ValueError(f"starts of {split} must lie in [0, {len(questions.rows) - 1}], got {list(starts)}")
        return {
            "prompts": tuple(questions.prompts[start].tolist() for start in starts),
            "rows": [questions.table[questions.rows[start]] for start in starts],
            "rewards": self._rewards,
            "runner": self._runner,
            "tokenizer": self.tokenizer,
            "on_reward_error": self._on_reward_error,
            "held_out": split != "train",
            "pace": self._pace,
        }

    def _tokens(self, split: Split, table: Table) -> Tokenized:
        contents: list[RowHashes] = []
        prompts = tokenize(self._prompts(table, f"{split}_dataset", contents), self.tokenizer, f"{split}_dataset")
        return Tokenized(prompts=prompts, contents=contents)

    def _prompts(self, table: Table, where: str, contents: list[RowHashes]) -> Iterator[tuple[Prompt, Options]]:
        """Yield the prompts of a table's rows and how to render them; notes what the rows hold on the way."""
        columns, asks = set(table[0]), self._columns[0]
        for number in range(len(table)):
            row = table[number]
            if set(row) != columns:
                raise ValueError(
                    f"every row of {where} must have the columns {sorted(columns)}, got {sorted(row)} in row {number}"
                )
            asked = row[asks]
            if _missing(asked):
                raise ValueError(f"row {number} of {where} must have a {asks}, got {asked!r}: leave the row out")
            for name in self._columns:
                if isinstance(row[name], bytes | bytearray):
                    raise ValueError(f"{name} in row {number} of {where} must be text, got bytes: decode it first")
                if name == "answer" and row[name] != "" and _missing(row[name]):
                    raise ValueError(
                        f"row {number} of {where} must have an answer, got {row[name]!r}: leave the row out"
                    )
            contents.append(RowHashes.of(asked, row))
            yield self._prompt(row, f"prompt {number} of {where}"), self._template_options(row, number, where)

    def _prompt(self, row: Mapping[str, Any], where: str) -> Prompt:
        if self._columns == ("prompt",):
            prompt = row["prompt"]
            return prompt if isinstance(prompt, str) else check_messages(prompt, where)
        if self._template is None:
            return str(row["question"])
        return fill_template(self._template, row["question"], row["answer"])

    def _template_options(self, row: Mapping[str, Any], number: int, where: str) -> Options:
        own = row.get(TEMPLATE_OPTIONS)
        if own is None:
            return self._options
        given = check_options(own, f"{TEMPLATE_OPTIONS} in row {number} of {where}")
        # Tables give every row all the keys that one of them has, as None where it has none.
        return {**self._options, **{name: value for name, value in given.items() if value is not None}}


def _missing(value: object) -> bool:
    """Tell whether a question says nothing: null, NaN as data frames have it, or blank text."""
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


def _identity(questions: PromptSplit) -> str:
    """Return how many questions there are and what they hold, in their order."""
    return f"{len(questions.rows)}, content {short_hash(*(content.row for content in questions.contents))}"
