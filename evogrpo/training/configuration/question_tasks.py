"""The task section of a run of language models: a built-in task, one of reasoning-gym, or the user's own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from evogrpo.config.checks import refuse_unknown
from evogrpo.envs.protocol import SPLITS, Split
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.reward_functions import OnRewardError, check_worker_limits
from evogrpo.envs.text.tasks import TASKS
from evogrpo.envs.text.templates import Tokenizer
from evogrpo.text import number_text, pluralize
from evogrpo.training.configuration.user_code import load_named, read_hub, read_rows

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


def _asked(system_prompt: str | None, template: Messages | None) -> Messages | None:
    if system_prompt is None:
        return template
    # Braces would be read as fields of the template.
    text = system_prompt.replace("{", "{{").replace("}", "}}")
    return ({"role": "system", "content": text}, {"role": "user", "content": "{question}"})
