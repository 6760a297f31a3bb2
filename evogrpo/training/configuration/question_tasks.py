"""The task section of a run of language models: a built-in task, one of reasoning-gym, or the user's own."""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Literal

from evogrpo.config.checks import refuse_unknown
from evogrpo.config.synonyms import close_match
from evogrpo.envs.protocol import SPLITS, Split
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.reward_functions import OnRewardError, check_worker_limits
from evogrpo.envs.text.tasks import TASKS
from evogrpo.envs.text.templates import Tokenizer
from evogrpo.text import extra_command, number_text, pluralize
from evogrpo.training.configuration.sections import DATASET_SUFFIXES
from evogrpo.training.configuration.user_code import load_named

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class QuestionTask(ABC):
    """Settings of all tasks with questions.

    Attributes:
        seed: Of the splits and the order of questions; null = the run's seed.
        chat_template_kwargs: Keyword arguments of the tokenizer's chat template, such as {enable_thinking: false}.
        max_prompt_length: Longest prompt used, in tokens; null = what the model's context leaves beside a completion.
        on_reward_error: "raise" stops the run; "exclude" leaves the completion out and warns.
        reward_timeout: Seconds that one call of a reward function may take; null = no limit.
        reward_workers: Processes in which rewards are computed; 0 = in the run's own; null = that, or, where a timeout
            is given for functions that are not async, one per core up to 8.
    """

    key: ClassVar[str]
    what: ClassVar[str]

    seed: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_prompt_length: int | None = None
    on_reward_error: OnRewardError = "raise"
    reward_timeout: float | None = None
    reward_workers: int | None = None

    def __post_init__(self) -> None:
        check_worker_limits(self.reward_timeout, self.reward_workers)

    @property
    @abstractmethod
    def label(self) -> str:
        """The task in a few words."""

    @abstractmethod
    def environment(self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None) -> HuggingFaceGym:
        """Build the task's environment, in which questions are at most so many tokens long."""

    def facts(self) -> dict[str, str]:
        """Return where rewards are computed and what stops them, where that has been set."""
        parts = []
        if self.reward_workers is not None:
            parts.append(pluralize(self.reward_workers, "worker process", "es"))
        if self.reward_timeout is not None:
            parts.append(f"at most {number_text(self.reward_timeout)} s a call")
        if self.on_reward_error == "exclude":
            parts.append("completions whose reward fails are left out")
        return {"rewards": ", ".join(parts)} if parts else {}

    def gym_options(self, max_prompt_length: int | None) -> dict[str, Any]:
        """Return what every kind of task passes on to HuggingFaceGym."""
        return {
            "chat_template_kwargs": self.chat_template_kwargs,
            "max_prompt_length": max_prompt_length,
            "on_reward_error": self.on_reward_error,
            "reward_timeout": self.reward_timeout,
            "reward_workers": self.reward_workers,
        }


@dataclass(frozen=True, kw_only=True)
class BuiltinTask(QuestionTask):
    """A task that comes with evogrpo.

    Attributes:
        name: Which; `evogrpo tasks` lists them.
        validation_size: Questions for selection.
        test_size: Questions for the final report.
        system_prompt: A system message before each question; null = the chat template's own.
    """

    key: ClassVar[str] = "name"
    what: ClassVar[str] = "a built-in task"

    name: str
    validation_size: int = 64
    test_size: int = 256
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("task", [self.name], TASKS)

    @property
    def label(self) -> str:
        """The task in a few words."""
        return self.name

    def environment(self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None) -> HuggingFaceGym:
        """Build the task's environment."""
        return TASKS[self.name].build(
            tokenizer,
            seed=seed,
            validation_size=self.validation_size,
            test_size=self.test_size,
            conversation_template=_asked(self.system_prompt, None),
            **self.gym_options(max_prompt_length),
        )


@dataclass(frozen=True, kw_only=True)
class ReasoningTask(QuestionTask):
    """A task of reasoning-gym.

    Attributes:
        reasoning_gym: Its name.
        sizes: Questions generated per split.
        system_prompt: A system message before each question, or null.
        answer_tag: Scores what stands in the last `<tag>...</tag>` of a completion; null scores all of it.
        options: Settings of the task itself.
    """

    key: ClassVar[str] = "reasoning_gym"
    what: ClassVar[str] = "a task of reasoning-gym"

    reasoning_gym: str
    sizes: Mapping[str, int] | None = None
    system_prompt: str | None = None
    answer_tag: str | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("split in sizes", self.sizes or (), SPLITS)

    @property
    def label(self) -> str:
        """The task in a few words."""
        return f"reasoning-gym {self.reasoning_gym}"

    def environment(self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None) -> HuggingFaceGym:
        """Build the task's environment."""
        sizes: dict[Split, int] = {split: self.sizes[split] for split in SPLITS if self.sizes and split in self.sizes}
        try:
            return HuggingFaceGym.from_reasoning_gym(
                self.reasoning_gym,
                tokenizer=tokenizer,
                sizes=sizes,
                seed=seed,
                system_prompt=self.system_prompt,
                answer_tag=self.answer_tag,
                gym_options=self.gym_options(max_prompt_length),
                **(self.options or {}),
            )
        except ImportError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class DatasetFiles:
    """Source of questions: a file per split, or a dataset of the Hugging Face hub.

    A held-out split that is not named is drawn from train.

    Attributes:
        train: A file; with `hub` the name of a split, "train" unless given.
        validation: Validation split, or null.
        test: Test split, or null.
        hub: A dataset's id, such as openai/gsm8k, or a local folder that `datasets.load_dataset` reads.
        subset: Its configuration, such as main.
        revision: A branch, tag or commit of it.
    """

    train: str | None = None
    validation: str | None = None
    test: str | None = None
    hub: str | None = None
    subset: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.hub is None and self.train is None:
            raise ValueError("train must be given: a file, or hub and a dataset's id")
        if self.hub is None and (self.subset or self.revision):
            raise ValueError("subset and revision go with hub, a dataset's id: leave them out for files")

    @property
    def label(self) -> str:
        """Short description of the source."""
        if self.hub is None:
            return Path(self.train or "").name
        return f"{self.hub}{f' {self.subset}' if self.subset else ''}"

    def tables(self) -> dict[Split, Any]:
        """Read every split that is named; raises ValueError for one that cannot be read."""
        names = {split: getattr(self, split) for split in SPLITS}
        if self.hub is None:
            return {split: None if name is None else read_rows(Path(name)) for split, name in names.items()}
        names["train"] = self.train or "train"
        return {
            split: None if name is None else read_hub(self.hub, self.subset, name, self.revision)
            for split, name in names.items()
        }


@dataclass(frozen=True, kw_only=True)
class DatasetTask(QuestionTask):
    """The user's own questions and rewards.

    Attributes:
        dataset: Files: .jsonl, .json, .csv or .parquet; or a dataset of the hub.
        reward: "path.py:function" or "module:function"; the trl form takes a list as well. Its code is run.
        form: "agilerl": columns question and answer, `f(completion, answer, question) -> float`; "trl": column prompt,
            `f(prompts=, completions=, **columns) -> list`; by default the one that the columns fit.
        reward_weights: One factor per function, trl form only.
        system_prompt: A system message before each question, agilerl form only.
        conversation_template: Messages with {question}, agilerl form only, instead of a system_prompt.
        validation_size: Questions to draw where no validation file is given.
        test_size: Questions to draw where no test file is given.
    """

    key: ClassVar[str] = "dataset"
    what: ClassVar[str] = "dataset files, or a dataset of the hub"

    dataset: DatasetFiles
    reward: str | tuple[str, ...]
    form: Literal["agilerl", "trl"] | None = None
    reward_weights: tuple[float, ...] | None = None
    system_prompt: str | None = None
    conversation_template: Messages | None = None
    validation_size: int | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = self.system_prompt is not None or self.conversation_template is not None
        if self.form == "trl" and asked:
            raise ValueError("system_prompt and conversation_template go with form: agilerl; put messages into prompt")
        if self.system_prompt is not None and self.conversation_template is not None:
            raise ValueError("give system_prompt or conversation_template, not both")
        if self.form == "agilerl" and (not isinstance(self.reward, str) or self.reward_weights is not None):
            raise ValueError("form: agilerl takes one reward function and no reward_weights; several go with form: trl")

    def facts(self) -> dict[str, str]:
        """Return also the reward functions, which are the user's code."""
        return {"your code": ", ".join(self.functions), **super().facts()}

    @property
    def functions(self) -> tuple[str, ...]:
        """The reward functions."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward

    @property
    def label(self) -> str:
        """The task in a few words."""
        place, sign, name = self.functions[0].rpartition(":")
        return f"{self.dataset.label}, {Path(place).name}{sign}{name}"

    def environment(self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None) -> HuggingFaceGym:
        """Read the files, load the reward functions and build the environment."""
        tables = self.dataset.tables()
        functions = [load_named(name, "reward function") for name in self.functions]
        first: Any = next(iter(tables["train"] or []), {})
        agilerl = self.form == "agilerl" or (self.form is None and "prompt" not in first)
        return HuggingFaceGym(
            tables["train"],
            tables["test"],
            tokenizer,
            validation_dataset=tables["validation"],
            reward_fn=functions[0] if agilerl else None,
            reward_funcs=None if agilerl else functions,
            reward_weights=self.reward_weights,
            conversation_template=_asked(self.system_prompt, self.conversation_template),
            validation_size=self.validation_size,
            test_size=self.test_size,
            seed=seed,
            **self.gym_options(max_prompt_length),
        )


def read_rows(path: Path) -> Sequence[Any]:
    """Read a prompt dataset: one mapping of columns a row.

    Args:
        path: A .jsonl, .json (a list of objects) or .csv file (every value is text; values are separated as the names
            of the columns are); or a .parquet file, for which the extra `datasets` must be installed.

    Raises:
        ValueError: If the file is missing, of another kind or not what its name says.
    """
    if path.suffix not in DATASET_SUFFIXES:
        raise ValueError(f"a dataset file must end in {', '.join(DATASET_SUFFIXES)}, got {path}")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # with or without a byte order mark
            if path.suffix == ".csv":
                csv.field_size_limit(2**31 - 1)
                heading = file.readline()
                file.seek(0)
                rows: list[Any] = list(csv.DictReader(file, delimiter=_delimiter(heading)))
            elif path.suffix == ".json" or _holds_array(file):
                rows = _json(file.read(), str(path))
            else:
                rows = [_json(line, f"line {number} of {path}") for number, line in enumerate(file, 1) if line.strip()]
    except FileNotFoundError:
        raise _absent(path) from None
    except OSError as error:
        raise ValueError(f"cannot read the dataset {path} ({error.strerror or error})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a {path.suffix} file in UTF-8: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold a list of objects, one a row, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f"{path} must hold one object with the same columns a row, got {row!r:.80} in row {number}"
            )
        if None in row or (path.suffix == ".csv" and None in row.values()):
            raise ValueError(
                f"{path} must have as many values in every row as it names columns, but row {number} has not"
            )
    return rows


def _holds_array(file: IO[str]) -> bool:
    """Return whether a file of JSON lines holds one JSON array instead; the file is read from its start again."""
    first = file.readline().lstrip()[:1]
    file.seek(0)
    return first == "["


def _absent(path: Path) -> ValueError:
    there = sorted(each.name for each in path.parent.glob("*") if each.suffix in DATASET_SUFFIXES)
    near = close_match(path.name, there)
    remedy = "paths in a configuration are relative to it, those in overrides to the working directory"
    if near:
        remedy = f"did you mean {near}?"
    elif there:
        remedy = f"{path.parent} has {', '.join(there[:5])}{' and others' if len(there) > 5 else ''}"
    return ValueError(f"cannot read the dataset {path}, as there is no such file: {remedy}")


def _delimiter(heading: str) -> str:
    """Return the delimiter of a CSV file: comma, semicolon or tab."""
    return max(",;\t", key=lambda mark: len(next(csv.reader([heading], delimiter=mark), [])))


def read_hub(name: str, subset: str | None, split: str, revision: str | None) -> Sequence[Any]:
    """Read a split of a dataset of the Hugging Face hub, or of a local folder of data files.

    Raises:
        ValueError: If the package `datasets` is missing, or the dataset cannot be had.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"reading {name} from the hub needs the package datasets: {extra_command('datasets')}"
        ) from None
    try:
        rows: Sequence[Any] = load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # of the hub, the network or a file
        wanted = f"split {split!r} of the dataset {name!r}{f' ({subset})' if subset else ''}"
        raise ValueError(
            f"cannot read {wanted}: {type(error).__name__}: {error}. Check the names and the connection; without one, "
            "only what has been downloaded before can be read"
        ) from error
    return rows


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise ValueError(f"{what} is not JSON that can be read: {error}") from error


def _read_parquet(path: Path) -> Sequence[Any]:
    try:
        from datasets import Dataset
    except ImportError:
        raise ValueError(f"reading {path} needs the package datasets: {extra_command('datasets')}") from None
    if not path.is_file():
        raise _absent(path)
    try:
        rows: Sequence[Any] = Dataset.from_parquet(str(path))
    except Exception as error:  # of several libraries
        raise ValueError(f"{path} is not a .parquet file that can be read: {error}") from error
    return rows


def _asked(system_prompt: str | None, template: Messages | None) -> Messages | None:
    if system_prompt is None:
        return template
    # Braces would be read as fields of the template.
    text = system_prompt.replace("{", "{{").replace("}", "}}")
    return ({"role": "system", "content": text}, {"role": "user", "content": "{question}"})
