"""PromptEnvironment: base class of environments with a prompt dataset and reward functions."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, ClassVar

import gymnasium

from evogrpo.chat_templates import end_of_turn_ids
from evogrpo.config.task_settings import (
    NO_SETTINGS,
    SettingValue,
    TaskSettings,
    configured_values,
    without_groups,
)
from evogrpo.envs.fingerprint import canonical, code_hash, short_hash
from evogrpo.envs.protocol import SPLITS, Split, check_starts, shuffled_starts
from evogrpo.envs.text.datasets import (
    DEFAULT_SIZES,
    AnyTable,
    Filtered,
    PromptSplit,
    RowHashes,
    check_row,
    check_table,
    extend_train,
    is_stream,
    make_splits,
    tables_by_split,
)
from evogrpo.envs.text.preflight import Preflight, sample_rewards
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.prompt_settings import (
    check_data_weights,
    check_full_names,
    check_names,
    select_by_weights,
    starts_by_value,
)
from evogrpo.envs.text.reward_functions import (
    DEFAULT_REWARD_TIMEOUT,
    OnRewardError,
    Reward,
    RewardFn,
    RewardFunc,
    Weights,
    weighted_rewards,
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
    check_prompt,
    dated_template,
    fill_template,
    inserts_date,
    literal_names,
    numbered,
    row_options,
    system_message,
    template_fields,
    tokenize,
)
from evogrpo.spaces import CompletionSpace
from evogrpo.synonyms import close_match
from evogrpo.text import shown
from evogrpo.validation import flag, refuse_unknown, whole_between, whole_number
from evogrpo.warnings import warn

STREAM_ROWS = 1000
"""Rows of a stream that are read at once."""


class PromptEnvironment:
    """Base class of environments with a prompt dataset and reward functions.

    The other arguments are those of `PromptOptions`.

    Args:
        train_dataset: A dataset, or a mapping of splits to datasets. A dataset without a length,
            such as a `datasets.IterableDataset`, is read as far as it is used, in its order; its
            first rows become the held-out splits that are not given.
        test_dataset: Questions for the final report; None = draw them from the training dataset.
        tokenizer: A transformers tokenizer.
        rewards: The reward functions.
        template: Messages with fields; None if rows have a `prompt` or questions are plain text.
        columns: Required columns; the first is the question or prompt.

    Raises:
        ValueError: If an argument, a column or a split is invalid.
    """

    # True if rows with equal prompts and different other columns are different questions.
    whole_rows: ClassVar[bool] = False
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
        system_prompt: str | None = None,
        settings: Mapping[str, SettingValue] | None = None,
        metric: RewardFn | RewardFunc | Sequence[RewardFn] | Sequence[RewardFunc] | None = None,
        metric_weights: Weights | None = None,
        data_column: str | None = None,
        chat_template_kwargs: Options | None = None,
        skip_special_tokens: bool = True,
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
        self._skip_special_tokens = flag("skip_special_tokens", skip_special_tokens)
        self._rewards = rewards
        self._columns = tuple(columns)
        # The system message precedes the template, or the messages of a column prompt.
        self._settings = configured_values(settings)
        check_names(self._settings)
        self._system: list[Message] = []
        if system_prompt is not None:
            if not isinstance(system_prompt, str):
                raise ValueError(
                    f"system_prompt must be a text, got {shown(system_prompt)}. For several, write"
                    ' "{style}" and make style a task setting.'
                )
            self._system.append(system_message(system_prompt, self._settings))
        self._template = None if template is None else [*self._system, *template]
        self._fields = template_fields(self._template or self._system)
        self._prompt_settings = [name for name in self._settings if name in self._fields]
        # Number of tokens of the longest prompt, and largest token id, with texts of members.
        self.longest_of_members = 0
        self._largest = 0
        self._data_column = data_column
        self._by_value: dict[str, list[int]] = {}
        # `_options` are these with a dated template; the fingerprint has the given ones.
        self._given_options = check_options(chat_template_kwargs, TEMPLATE_OPTIONS)
        own_template = getattr(tokenizer, "chat_template", None)
        self._chat_template: Any = self._given_options.get("chat_template", own_template)
        self._runner = RewardRunner(rewards, reward_timeout, reward_workers)
        self._metric = rewards
        self._metric_runner = self._runner
        if metric is not None:
            batched = rewards[0].batched
            self._metric = weighted_rewards("metric", metric, metric_weights, batched=batched)
            self._metric_runner = RewardRunner(self._metric, reward_timeout, reward_workers)
        elif metric_weights is not None:
            raise ValueError(f"metric_weights requires metric, got {shown(metric_weights)} alone.")
        self._progress = (0, 0)
        # Weight and code of each function, for the fingerprint. Hashed before the first call, which
        # may change variables that the function refers to.
        self._code: dict[str, str] = {}
        for kind, functions in (("metric", self._metric), ("reward", rewards)):
            for reward in functions:
                code = f"weight {reward.weight:g}, code {code_hash(reward.function)}"
                if kind == "reward" or functions is not rewards:
                    self._code[f"{kind} {reward.name}"] = code
        # 2. Columns of each dataset.
        self._datasets: dict[Split, AnyTable] = {}
        given_tables = tables_by_split(train_dataset, validation_dataset, test_dataset)
        self._train_name = "train_dataset"
        self._stream: Iterator[Any] | None = None
        self.is_stream = is_stream(given_tables["train"])
        if self.is_stream:
            given_tables = self._head_of_stream(given_tables)
        for split, given in given_tables.items():
            if given is None:
                continue
            where = self._train_name if split == "train" else f"{split}_dataset"
            if self._sizes.get(split) is not None:
                raise ValueError(
                    f"{split}_size and {where} exclude each other. Remove one of them."
                )
            table = self._prepare(given, where)
            # Reward functions are checked against the columns of every dataset.
            self._check_columns(check_table(table, self._columns, where), where)
            # Kept for `set_date`, which renders the prompts again.
            self._datasets[split] = table
        # 3. Tokenized, deduplicated splits.
        self._build_splits(datetime.now().isoformat(timespec="seconds"))
        vocabulary = gymnasium.spaces.Discrete(len(tokenizer))
        self.observation_space = gymnasium.spaces.Sequence(vocabulary)
        end_ids = end_of_turn_ids(tokenizer, self._options)
        self.action_space = CompletionSpace(len(tokenizer), end_ids, tokenizer)
        # Number of train questions in the fingerprint: of a stream, those known at the start.
        self._first_questions = self.size("train")

    def _head_of_stream(self, tables: Mapping[Split, AnyTable]) -> dict[Split, AnyTable]:
        """Begin to read a training dataset of unknown length.

        Its first rows become the held-out splits that are not given. The next ones are the first
        training questions; `_read_stream` adds more when they are selected.

        Raises:
            ValueError: If a setting needs to know all rows.
        """
        reason = "train_dataset is streamed, so its rows are not known at the start"
        if self.whole_rows:
            raise ValueError(
                f"{reason}: environments are reset for all of them. Pass"
                " list(train_dataset.take(1000))."
            )
        if self._data_column is not None:
            raise ValueError(f"data_column cannot be used: {reason}. Remove it.")
        if self._max_prompt_length is None:
            raise ValueError(f"max_prompt_length is required: {reason}.")
        self.longest_of_members = self._max_prompt_length
        self._stream = iter(tables["train"])
        heads = dict(tables)
        held_out = 0
        for split in SPLITS[1:]:
            if heads[split] is None:
                size = self._sizes[split] or DEFAULT_SIZES[split]
                heads[split] = list(islice(self._stream, size))
                held_out += len(heads[split])
                # The size has been used. Beside a dataset, the constructor refuses one.
                self._sizes[split] = None
        heads["train"] = list(islice(self._stream, STREAM_ROWS))
        if held_out:
            self._train_name += f" without its first {held_out:,} rows"
        if held_out and not heads["train"]:
            raise ValueError(
                f"train_dataset must have more rows than the held-out ones, got {held_out:,}. Lower"
                " validation_size and test_size, or add rows."
            )
        return heads

    def _read_stream(self, count: int) -> None:
        """Read a streamed training dataset until `count` questions are known, or to its end."""
        table = self._datasets["train"]
        while self._stream is not None and self.size("train") < count:
            rows = list(islice(self._stream, STREAM_ROWS))
            if len(rows) < STREAM_ROWS:
                self._stream = None
            known = self.size("train")
            first = len(table)
            if rows:
                check_table(rows, self._columns, f"{self._train_name} from row {first} on")
            table += self._prepare(rows, self._train_name)
            new = self._read_table(table, self._train_name, first=first)
            extended, left_out = extend_train(self._splits, new, self._max_prompt_length)
            self._splits["train"] = extended
            self.filtered["train"] += left_out
            if self._stream is not None and self.size("train") == known:
                # A stream without an end may repeat its rows.
                self._stream = None
                warn(
                    f"train_dataset: {STREAM_ROWS:,} rows from row {first:,} on have no new"
                    f" question that fits ({left_out}). It is not read further; its {known:,}"
                    " questions repeat."
                )
            elif left_out != Filtered():
                warn(f"{self._train_name}: rows were left out from row {first:,} on ({left_out})")

    def _check_columns(self, columns: Sequence[str], where: str) -> None:
        """Check the fields, arguments and settings that are columns of a dataset.

        Raises:
            ValueError: If a column or a setting does not exist, or nothing reads a setting.
        """
        if self._template is not None:
            valid = [*columns, *self._settings]
            refuse_unknown("field of conversation_template", self._fields, valid)
        if self._data_column is not None and where == "train_dataset":
            refuse_unknown("data_column", [self._data_column], columns)
        self._present = list(dict.fromkeys([*columns, *self._settings, *self.extra_arguments]))
        functions = [(self._runner, self._rewards), (self._metric_runner, self._metric)]
        for runner, rewards in functions:
            for reward in rewards:
                reward.check(self._present, where, in_worker=runner.in_worker(reward.name))
        for name in self._settings:
            self._check_read(name, [*self._rewards, *self._metric])

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
            self._build_splits(date)

    def _build_splits(self, date: str) -> None:
        """Build all splits.

        Chat templates that insert the current date insert `date`, so that a resumed run has the
        same prompts.
        """
        self._date = date
        self._options = self._given_options
        if inserts_date(self._chat_template):
            dated = dated_template(self._chat_template, datetime.fromisoformat(date))
            self._options = {**self._given_options, "chat_template": dated}
        tables = {}
        for split, table in self._datasets.items():
            where = self._train_name if split == "train" else f"{split}_dataset"
            tables[split] = self._read_table(table, where)
        self._splits, self.filtered = make_splits(
            tables, max_prompt_length=self._max_prompt_length, sizes=self._sizes, seed=self.seed
        )
        if self._data_column is not None:
            train = self._splits["train"]
            rows = [train.table[number] for number in train.rows]
            self._by_value = starts_by_value(rows, self._data_column)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.size(split)}" for split in SPLITS)
        names = ", ".join(reward.name for reward in self._rewards)
        return f"{type(self).__name__}({sizes} questions, {names})"

    @property
    def configured_settings(self) -> dict[str, SettingValue]:
        """Values that were given for task settings, by full name, without weights of 1."""
        weights = {reward.name: reward.weight for reward in self._rewards if reward.weight != 1}
        return without_groups({"reward_weights": weights, "task": self._settings})

    def size(self, split: Split) -> int:
        """Return the number of questions of a split: its rows without duplicates."""
        refuse_unknown("split", [split], SPLITS)
        return len(self._splits[split].rows)

    def select_starts(
        self, step: int, count: int, starts_per_step: int, settings: TaskSettings = NO_SETTINGS
    ) -> tuple[int, ...]:
        """Return the first `count` training prompts of learning step `step`.

        See `shuffled_starts`, and `select_by_weights` for members with data weights.
        """
        weights = settings.weights("data_weights")
        positions = range(step * starts_per_step, step * starts_per_step + count)
        if self.is_stream and not weights:
            # In the order of the stream, and from its head again after its end.
            self._read_stream(positions.stop)
            size = self.size("train")
            return tuple(position % size for position in positions)
        if not weights:
            return shuffled_starts(self.seed, self.size("train"), step, count, starts_per_step)
        return select_by_weights(self.seed, self._by_value, weights, positions)

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of questions, prompts and reward functions; see `SupportsFingerprint`."""
        fingerprint = {}
        for split in SPLITS:
            hashes = [each.row for each in self._splits[split].hashes]
            if split == "train":
                hashes = hashes[: self._first_questions]
            fingerprint[f"{split} questions"] = f"{len(hashes)}, content {short_hash(*hashes)}"
        fingerprint |= self._code
        for name, value in self._settings.items():
            # Tests with other prompts can be compared; `compare` knows these names.
            kind = "setting" if self._measures(name) else "unmeasured setting"
            fingerprint[f"{kind} {name}"] = short_hash(repr(value))
        if not self._skip_special_tokens:
            fingerprint["skip_special_tokens"] = "False"
        if self._data_column is not None:
            fingerprint["data_column"] = self._data_column
        if self.date is not None:
            fingerprint["date"] = self.date
        # Token ids, as tokenizer and template decide about them too.
        prompts = [ids.tobytes() for ids in self._prompts()]
        # Train comes first. Questions that were read from a stream later are left out.
        del prompts[self._first_questions : self.size("train")]
        fingerprint["prompts"] = short_hash(*prompts)
        fingerprint[TEMPLATE_OPTIONS] = short_hash(canonical(self._given_options))
        fingerprint["seed"] = str(self.seed)
        return fingerprint

    @property
    def largest_token(self) -> int:
        """Largest token id of all prompts."""
        return max(self._largest, *map(max, self._prompts()))

    @property
    def longest_prompt(self) -> int:
        """Number of tokens of the longest prompt, with the longest checked texts of members."""
        return max(self.longest_of_members, *map(len, self._prompts()))

    def _prompts(self) -> list["array[int]"]:
        """Return the token ids of the prompts of all splits."""
        prompts: list[array[int]] = []
        for split in SPLITS:
            prompts += self._splits[split].prompts
        return prompts

    # ---- batches and rewards

    def make_batch(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings] = ()
    ) -> SingleTurnBatch:
        """Return a batch of prompts of a split, each index in [0, size(split)).

        Held-out prompts are scored by the metric, and take only settings that the prompt reads.

        Raises:
            ValueError: If the split or an index does not exist.
        """
        return SingleTurnBatch(**self._batch_fields(split, starts, settings))

    def _batch_fields(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings]
    ) -> dict[str, Any]:
        """Return the fields of `SingleTurnBatch` for prompts of a split."""
        self._check_names(set().union(*settings))
        values = self._values(split, starts, settings)
        rows = self._rows(split, starts, values)
        held_out = split != "train"
        rewards = self._metric if held_out else self._rewards
        weights = []
        for settings_of_start in settings or [NO_SETTINGS] * len(starts):
            by_name = {} if held_out else settings_of_start.weights("reward_weights")
            weights.append([by_name.get(reward.name, reward.weight) for reward in rewards])
        return {
            "prompts": self._token_ids(split, starts, rows, values),
            "rows": rows,
            "rewards": rewards,
            "weights": weights,
            "runner": self._metric_runner if held_out else self._runner,
            "tokenizer": self.tokenizer,
            "skip_special_tokens": self._skip_special_tokens,
            "on_reward_error": self.on_reward_error,
            "held_out": held_out,
            "progress": self._progress,
        }

    def _values(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings]
    ) -> list[dict[str, SettingValue]]:
        """Return, for each start, the settings `task.NAME` of its member that are used, by NAME.

        Raises:
            ValueError: If the split or an index does not exist.
        """
        check_starts(split, starts, self.size(split))
        values = []
        for settings_of_start in settings or [NO_SETTINGS] * len(starts):
            used = settings_of_start.group("task")
            if split != "train":  # only what belongs to the policy: texts of prompts
                used = {name: used[name] for name in used if name in self._prompt_settings}
            values.append(used)
        return values

    def _rows(
        self, split: Split, starts: Sequence[int], values: Sequence[Mapping[str, SettingValue]]
    ) -> list[Mapping[str, Any]]:
        """Return the row of each start, with a member's values of task settings."""
        questions = self._splits[split]
        rows = [questions.table[questions.rows[start]] for start in starts]
        pairs = zip(rows, values, strict=True)
        return [self._with_settings(row, values_of_row) for row, values_of_row in pairs]

    def _with_settings(
        self, row: Mapping[str, Any], values: Mapping[str, SettingValue]
    ) -> Mapping[str, Any]:
        """Return a row with task settings as columns, and with the system message in its prompt."""
        if self._settings:
            row = {**self._settings, **row, **values}
        if self._system and self._template is None:
            system = fill_template(self._system, row)
            row = {**row, "prompt": [*system, *check_messages(row["prompt"], "prompt")]}
        return row

    def _changes_prompt(self, name: str) -> bool:
        """Return True if the prompt depends on a task setting."""
        return name in self._prompt_settings

    def _token_ids(
        self,
        split: Split,
        starts: Sequence[int],
        rows: Sequence[Mapping[str, Any]],
        values: Sequence[Mapping[str, SettingValue]],
    ) -> tuple[list[int], ...]:
        """Return the prompts of starts. Those that a member's values change are rendered again."""
        prompts = [self._splits[split].prompts[start] for start in starts]
        changed = {}
        for position, names in enumerate(values):
            if any(map(self._changes_prompt, names)):
                changed[position] = self._render(rows[position], f"A row of {split}")
        if changed:
            ids = tokenize(list(changed.values()), self.tokenizer, split, check=False)
            for position, prompt in zip(changed, ids, strict=True):
                prompts[position] = prompt
        return tuple(prompt.tolist() for prompt in prompts)

    # ---- check of task settings

    @property
    def policy_settings(self) -> frozenset[str]:
        """Task settings that belong to the policy, because the prompt reads them."""
        return frozenset(f"task.{name}" for name in self._prompt_settings)

    @property
    def rewards_are_metric(self) -> bool:
        """True if held-out questions are scored by the rewards of training."""
        return self._metric is self._rewards

    def check_settings(self, values: Mapping[str, Sequence[SettingValue]]) -> None:
        """Check that task settings are read, and measure the longest prompts with them.

        See `SupportsTaskSettings`.

        Raises:
            ValueError: If a setting is not declared or not read, there is no such reward function
                or value of `data_column`, or a prompt cannot be rendered.
        """
        # 1. Names, and data weights.
        self._check_names(values)
        groups: dict[str, dict[str, Sequence[SettingValue]]] = {}
        for full_name, possible in values.items():
            group, _, name = full_name.partition(".")
            groups.setdefault(group, {})[name] = possible
        check_data_weights(groups.get("data_weights", {}), self._by_value, self._data_column)
        task_values = groups.get("task", {})
        # The metric gets the configured values, never those of a member.
        for name in task_values:
            self._check_read(name, self._rewards)
        # 2. Texts of prompts: render the first question with each, and all with the longest.
        names_in_prompt = [name for name in task_values if name in self._prompt_settings]
        in_prompt = {name: task_values[name] for name in names_in_prompt}
        longest = {}
        self.longest_of_members = 0
        if self.is_stream and self._max_prompt_length is not None:
            self.longest_of_members = self._max_prompt_length
        self._largest = 0
        for name, possible in in_prompt.items():
            values_of_name = [{name: value} for value in possible]
            first_rows = self._rows("train", [0] * len(possible), values_of_name)
            where = f"The first row with task.{name}"
            prompts = [self._render(row, where) for row in first_rows]
            ids = tokenize(prompts, self.tokenizer, f"the values of task.{name}")
            lengths = [len(each) for each in ids]
            longest[name] = possible[lengths.index(max(lengths))]
            self._largest = max(self._largest, *map(max, ids))
        if not longest:
            return
        for split in SPLITS:
            starts = range(self.size(split))
            settings = [TaskSettings({"task": longest})] * len(starts)
            prompts_of_split = self.make_batch(split, starts, settings).prompts
            self.longest_of_members = max(self.longest_of_members, *map(len, prompts_of_split))
        limit = self._max_prompt_length
        if limit is not None and self.longest_of_members > limit:
            warn(
                f"With the longest values of {', '.join(f'task.{name}' for name in longest)},"
                f" prompts have up to {self.longest_of_members} tokens. max_prompt_length={limit}"
                " leaves out prompts by the configured values only. Shorten the texts, or configure"
                " the longest one."
            )

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise ValueError for task settings that this environment does not have."""
        functions = [reward.name for reward in self._rewards]
        check_full_names(names, functions, self._by_value, self._data_column, self._settings)

    def _check_read(self, name: str, functions: Sequence[Reward]) -> None:
        """Raise ValueError unless a prompt or one of these functions reads a task setting."""
        read = any(function.reads(name, self._present) for function in functions)
        if not read and not self._changes_prompt(name):
            similar = close_match(name, literal_names(self._system))
            found = "" if similar is None else f" The prompt has {{{similar}}}."
            raise ValueError(
                f"No prompt and no reward function reads the setting task.{name}.{found} Write"
                f" {{{name}}} into the system_prompt or the template, or add an argument {name} to"
                " a reward function."
            )

    def _measures(self, name: str) -> bool:
        """Return True if scores of held-out questions depend on a setting beside the prompt."""
        return any(function.reads(name, self._present) for function in self._metric)

    def set_progress(self, step: int, total_steps: int) -> None:
        """Set the training progress, for reward functions that take the `trainer_state`."""
        self._progress = (step, total_steps)

    def close(self) -> None:
        """End the worker processes of reward functions. The next score starts new ones."""
        self._runner.close()
        self._metric_runner.close()

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

    def preflight(self, settings: TaskSettings | None = None) -> Preflight:
        """Call the user's functions on made-up completions of the first training prompt.

        These are reward functions, reply functions and environments.
        Two completions reveal a wrong number of rewards. Functions in TRL's form are also called
        with one completion alone, as for a greedy answer. With on_reward_error "exclude" a failure
        is a warning.

        Args:
            settings: Task settings of the member that gets the prompt; None = configured values.

        Raises:
            RewardError: If a function fails.
        """
        settings_of_starts = [] if settings is None else [settings]
        batch = self.make_batch("train", [0], settings_of_starts)
        rewards = sample_rewards(batch, self.completion_form())
        if self._metric is not self._rewards:
            held_out = self.make_batch("validation", [0])
            for name, value in sample_rewards(held_out, self.completion_form()).items():
                rewards[f"metric {name}"] = value
        (prompt,) = batch.prompts
        text = str(self.tokenizer.decode(prompt))
        return Preflight(prompt=text, tokens=tuple(prompt), rewards=rewards)

    # ---- rows of a dataset

    def _prepare(self, table: AnyTable, where: str) -> AnyTable:
        """Return the dataset of a split with the required columns."""
        return table

    def _row_options(self, row: Mapping[str, Any]) -> Options:
        """Return the keyword arguments of the chat template that the environment sets for a row."""
        return {}

    def _read_table(self, table: AnyTable, where: str, *, first: int = 0) -> PromptSplit:
        """Return the rows of a table from row `first` on, tokenized and hashed."""
        prompts: list[tuple[Prompt, Options]] = []
        hashes = []
        numbers = range(first, len(table))
        for number in numbers:
            row = table[number]
            row_name = numbered(number, where)
            self._check_row(row, row_name)
            question = row[self._columns[0]]
            # The question alone decides about the split, so a changed answer does not move it.
            hashes.append(RowHashes.of(dict(row) if self.whole_rows else question, row))
            prompts.append(self._render(self._with_settings(row, {}), row_name))
        return PromptSplit(
            table=table,
            rows=numbers,
            # Of a stream, only the first rows are checked for changes by the chat template.
            prompts=tokenize(prompts, self.tokenizer, where, check=first == 0),
            hashes=hashes,
            whole_rows=self.whole_rows,
        )

    def _check_row(self, row: Mapping[str, Any], row_name: str) -> None:
        """Raise ValueError if a row has no value in a column, or a prompt that does not fit."""
        check_row(row, self._columns, row_name)
        if not self._system or self._template is not None:
            return
        prompt = row["prompt"]
        if isinstance(prompt, str):
            raise ValueError(
                f"system_prompt requires prompts that are lists of messages, but {row_name} has the"
                f" text {shown(prompt, 80)}. Remove system_prompt, or write prompts as messages."
            )
        messages = check_messages(prompt, f"{row_name}: prompt")
        if messages[0]["role"] == "system":
            raise ValueError(
                f"system_prompt requires prompts without a system message, but {row_name} has"
                f" {shown(prompt, 80)}. Remove one of them."
            )

    def _render(self, row: Mapping[str, Any], row_name: str) -> tuple[Prompt, Options]:
        """Return the prompt of a row, and the keyword arguments of the chat template for it.

        Args:
            row: The row, with task settings.
            row_name: Its name in messages.

        Raises:
            ValueError: If the prompt or the keyword arguments are invalid.
        """
        # 1. Keyword arguments: those of the constructor, replaced by those of the row, and then by
        #    those that the environment sets itself.
        options = self._options
        if row.get(TEMPLATE_OPTIONS) is not None:
            check_options(row[TEMPLATE_OPTIONS], f"{row_name}: {TEMPLATE_OPTIONS}")
            options = {**options, **row_options(row)}
        options = {**options, **self._row_options(row)}
        # 2. AgileRL's form: a question in a template, or as plain text.
        question = row[self._columns[0]]
        if self._template is not None:
            return fill_template(self._template, row), options
        if self._columns[0] != "prompt":
            return str(question), options
        # 3. TRL's form: messages, or text.
        return check_prompt(question, row_name), options
