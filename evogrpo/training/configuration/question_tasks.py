"""Sections of tasks with questions: built-in, of reasoning-gym, and the user's own datasets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal

from evogrpo.chat_templates import TOOLS_TEMPLATE
from evogrpo.envs.protocol import SPLITS, TEST_SIZE, VALIDATION_SIZE, Split
from evogrpo.envs.text.environment_gym import (
    DEFAULT_ENVIRONMENT_TIMEOUT,
    DEFAULT_ENVIRONMENT_WORKERS,
    EnvironmentGym,
)
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.envs.text.reward_functions import DEFAULT_REWARD_TIMEOUT, OnRewardError
from evogrpo.envs.text.reward_runner import check_worker_limits
from evogrpo.envs.text.tasks import TASKS
from evogrpo.envs.text.templates import Tokenizer
from evogrpo.safe_parsing import read_regular
from evogrpo.text import shown
from evogrpo.training.configuration.dataset_files import DatasetFiles, parse_json
from evogrpo.training.configuration.sections import BUILT_IN_TEMPLATE, TaskSection
from evogrpo.training.configuration.user_code import load_named, load_plugin, plugin_names
from evogrpo.validation import (
    Float,
    Int,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Text,
    refuse_unknown,
    settings,
)


@settings
class QuestionTask(TaskSection, ABC):
    """Settings that all tasks with questions share.

    Attributes:
        seed: Seed of the splits and of the order of questions; null = the run's seed.
        chat_template: File with a Jinja template that replaces the chat template of the tokenizer;
            "tools" = one with tools that comes with evogrpo, for models without one.
        chat_template_kwargs: Keyword arguments of the chat template, such as {enable_thinking:
            false}.
        skip_special_tokens: Leave special tokens, such as <|im_end|>, out of the completions that
            reward functions and tables get.
        response_template: JSON file with a response template of transformers, which parses tool
            calls.
        max_prompt_length: Maximum length of a prompt in tokens; null = the model's context minus a
            completion.
        on_reward_error: "raise" stops the run; "exclude" excludes the completion and warns.
        reward_timeout: Time limit of one call of a reward function, in seconds; null = no limit.
        reward_workers: Number of processes for reward functions that are not async; 0 = the process
            of the run. null = one per core, at most 8; without `reward_timeout` 0.
        system_prompt: System message before each question; null = that of the chat template. Fields
            {NAME} of `settings` are replaced by their values; all other braces stay.
        metric: "path.py:function" or "module:function", or several, in the form of the rewards.
            They score held-out questions: fitness, baseline and test. null = the rewards with their
            configured weights.
        metric_weights: Weight of each function of `metric`, as a list or by name.
        data_column: Column with the values that `data_weights.VALUE` in the search space is about.
    """

    key: ClassVar[str]
    description: ClassVar[str]

    seed: Seed | None = None
    chat_template: Text | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    response_template: Text | None = None
    max_prompt_length: PositiveInt | None = None
    on_reward_error: OnRewardError = "raise"
    reward_timeout: PositiveFloat | None = DEFAULT_REWARD_TIMEOUT
    reward_workers: NonNegativeInt | None = None
    system_prompt: Text | None = None
    metric: Text | tuple[Text, ...] | None = None
    metric_weights: tuple[Float, ...] | Mapping[Text, Float] | None = None
    data_column: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_worker_limits(self.reward_timeout, self.reward_workers)
        if self.metric_weights is not None and self.metric is None:
            raise ValueError(
                "metric_weights requires metric. Add metric, or remove metric_weights."
            )

    @property
    @abstractmethod
    def label(self) -> str:
        """Short description of the task."""

    @abstractmethod
    def environment(
        self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None
    ) -> PromptEnvironment:
        """Build the environment of the task, without prompts longer than `max_prompt_length`."""

    def set_templates(self, tokenizer: Tokenizer) -> None:
        """Set the templates of a tokenizer from the files of this section.

        Raises:
            ValueError: If a file cannot be read.
        """
        if self.chat_template == BUILT_IN_TEMPLATE:
            tokenizer.chat_template = TOOLS_TEMPLATE
            # A parser of the model's own calls does not read those of this template.
            tokenizer.response_template = None
        elif self.chat_template is not None:
            what = f"chat_template must be {BUILT_IN_TEMPLATE!r} or"
            tokenizer.chat_template = _read_text(self.chat_template, what)
        if self.response_template is not None:
            text = _read_text(self.response_template, "response_template must be")
            tokenizer.response_template = parse_json(text, self.response_template)

    def facts(self) -> dict[str, str]:
        """Return rows of the printed plan: user code that is executed."""
        return {"your code": ", ".join(dict.fromkeys(self.codes))} if self.codes else {}

    @property
    def codes(self) -> tuple[str, ...]:
        """References to the user's code."""
        return references(self.metric)

    def gym_options(self, max_prompt_length: int | None) -> dict[str, Any]:
        """Return the arguments of HuggingFaceGym that all tasks share."""
        others = ("seed", "chat_template", "response_template", "metric")
        options = {
            each.name: getattr(self, each.name)
            for each in fields(QuestionTask)
            # The function of a plugin need not take arguments that are not set.
            if each.name not in others and getattr(self, each.name) != each.default
        }
        if self.metric is not None:
            metric = [load_named(name, "metric") for name in references(self.metric)]
            options["metric"] = metric
        return {**options, "max_prompt_length": max_prompt_length}


@settings
class BuiltinTask(QuestionTask):
    """A task that comes with evogrpo.

    Attributes:
        name: Name of the task, or of a plugin: a function as `Task.build`. `evogrpo tasks` lists
            them.
        validation_size: Number of questions for selection.
        test_size: Number of questions for the final test.
        reward_weights: Weight of each reward of the task by name. null = 1 for accuracy, 0 for the
            others.
        conversation_template: Messages with {question} and `settings` as fields, instead of
            system_prompt. null = the question alone.
    """

    key: ClassVar[str] = "name"
    description: ClassVar[str] = "a built-in task"

    name: Text
    validation_size: PositiveInt = VALIDATION_SIZE
    test_size: PositiveInt = TEST_SIZE
    reward_weights: Mapping[Text, Float] | None = None
    conversation_template: tuple[Mapping[str, str], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._builder()  # raises ValueError for an unknown name

    @property
    def given_weights(self) -> Mapping[str, float]:
        """Weights of rewards that this section gives, by name."""
        return self.reward_weights or {}

    @property
    def label(self) -> str:
        """Short description of the task."""
        return self.name

    def environment(
        self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None
    ) -> HuggingFaceGym:
        """Build the task's environment."""
        options = self.gym_options(max_prompt_length)
        # The function of a plugin need not take arguments that are not set.
        if self.reward_weights is not None:
            options["reward_weights"] = self.reward_weights
        if self.conversation_template is not None:
            options["conversation_template"] = self.conversation_template
        sizes = {"validation_size": self.validation_size, "test_size": self.test_size}
        return self._builder()(tokenizer, seed=seed, **sizes, **options)

    def _builder(self) -> Callable[..., HuggingFaceGym]:
        """Return the function that builds the environment."""
        plugin = load_plugin(self.name, "task", TASKS)
        if plugin is not None:
            return plugin
        refuse_unknown("task", [self.name], [*TASKS, *plugin_names()])
        return TASKS[self.name].build


@settings
class ReasoningTask(QuestionTask):
    """A task of reasoning-gym.

    Attributes:
        reasoning_gym: Name of the task.
        sizes: Number of generated questions per split.
        answer_tag: Score only the text in the last `<tag>...</tag>` of a completion; null scores
            all of it.
        options: Settings of the task.
    """

    key: ClassVar[str] = "reasoning_gym"
    description: ClassVar[str] = "a task of reasoning-gym"

    reasoning_gym: Text
    sizes: Mapping[Text, Int] | None = None
    answer_tag: Text | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("split in sizes", self.sizes or (), SPLITS)
        arguments = signature(HuggingFaceGym.from_reasoning_gym).parameters
        taken = arguments.keys() & (self.options or {}).keys()
        if taken:
            raise ValueError(
                f"options must not contain {min(taken)}, which the section task sets. Remove it."
            )

    @property
    def label(self) -> str:
        """Short description of the task."""
        return f"reasoning-gym {self.reasoning_gym}"

    def environment(
        self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None
    ) -> HuggingFaceGym:
        """Build the task's environment."""
        given = self.sizes or {}
        # Names of splits were checked when the section was read.
        sizes: dict[Split, int] = {}
        for split in SPLITS:
            if split in given:
                sizes[split] = given[split]
        return HuggingFaceGym.from_reasoning_gym(
            self.reasoning_gym,
            tokenizer=tokenizer,
            sizes=sizes,
            seed=seed,
            answer_tag=self.answer_tag,
            gym_options=self.gym_options(max_prompt_length),
            **(self.options or {}),
        )


@settings
class DatasetTask(QuestionTask):
    """The user's own questions and rewards, with tools and environments if there are any.

    Attributes:
        dataset: Files (.jsonl, .json, .csv, .tsv or .parquet), a dataset of the hub, or a number of
            starts.
        reward: "path.py:function" or "module:function", or several. The code is executed. null if
            an environment has `get_reward`.
        form: "agilerl": columns question and answer, `f(completion, answer, question) -> float`;
            "trl": column prompt, `f(prompts=, completions=, **columns) -> list`. Default: "trl" if
            there is a column prompt.
        reward_weights: Weight of each reward function, as a list or by name; 1 if not given.
        conversation_template: Messages with {question} and other columns or `settings` as fields,
            agilerl form only, instead of system_prompt.
        validation_size: Number of questions to draw if no validation split is given.
        test_size: Number of questions to draw if no test split is given.
        environment_factory: "path.py:Class" or "module:Class" of an environment in TRL's form, or
            several by the names in the column environment.
        tools: "path.py:function" or "module:function" of functions that the model can call.
        max_turns: Maximum number of completions in a conversation, with tools or environments.
        environment_timeout: Time limit of the calls to an environment in one turn, in seconds; null
            = no limit.
        environment_workers: Number of threads that call environments; 0 = the main thread without
            time limit.
    """

    key: ClassVar[str] = "dataset"
    description: ClassVar[str] = "dataset files, or a dataset of the hub"

    dataset: DatasetFiles
    reward: Text | tuple[Text, ...] | None = None
    form: Literal["agilerl", "trl"] | None = None
    reward_weights: tuple[Float, ...] | Mapping[Text, Float] | None = None
    conversation_template: tuple[Mapping[str, str], ...] | None = None
    validation_size: PositiveInt | None = None
    test_size: PositiveInt | None = None
    environment_factory: Text | Mapping[Text, Text] | None = None
    tools: tuple[Text, ...] = ()
    max_turns: PositiveInt | None = None
    environment_timeout: PositiveFloat | None = DEFAULT_ENVIRONMENT_TIMEOUT
    environment_workers: NonNegativeInt = DEFAULT_ENVIRONMENT_WORKERS

    def __post_init__(self) -> None:
        super().__post_init__()
        # 1. Environments and tools need a limit of turns. Settings of their calls need one of them.
        has_calls = bool(self.factories or self.tools)
        if has_calls and self.max_turns is None:
            raise ValueError(
                "environment_factory and tools require max_turns, such as max_turns: 4."
            )
        for_calls = ("max_turns", "environment_timeout", "environment_workers", "response_template")
        for each in fields(self):
            changed = getattr(self, each.name) != each.default
            if each.name in for_calls and changed and not has_calls:
                raise ValueError(
                    f"{each.name} requires environment_factory or tools. Give one of them, or"
                    f" remove {each.name}."
                )
        if has_calls and self.form == "agilerl":
            raise ValueError("environment_factory and tools require form: trl.")
        if self.dataset.streaming and has_calls:
            raise ValueError(
                "dataset.streaming excludes environment_factory and tools. Remove one of them."
            )
        if self.dataset.streaming and self.max_prompt_length is None:
            raise ValueError("dataset.streaming requires max_prompt_length. Set it.")
        # 2. Something gives starts, and something rewards.
        if self.dataset.starts is not None and not isinstance(self.environment_factory, str):
            raise ValueError("dataset.starts requires environment_factory with one class.")
        if not self.functions and not self.factories:
            raise ValueError(
                "reward must be given, or environment_factory with a class that has get_reward."
            )
        # 3. Templates belong to AgileRL's form.
        if (self.form == "trl" or has_calls) and self.conversation_template is not None:
            raise ValueError(
                "conversation_template requires form: agilerl. With form: trl, put messages into"
                " the column prompt."
            )
        if self.system_prompt is not None and self.conversation_template is not None:
            raise ValueError(
                "system_prompt and conversation_template exclude each other. Remove one of them."
            )

    @property
    def given_weights(self) -> Mapping[str, float]:
        """Weights of reward functions that this section gives, by name of the function."""
        names = [name.rpartition(":")[2] for name in self.functions]
        weights = self.reward_weights or {}
        if not isinstance(weights, Mapping):
            weights = dict(zip(names, weights, strict=False))
        # Names without a function are refused when the environment is built.
        return {name: weights[name] for name in names if name in weights}

    @property
    def codes(self) -> tuple[str, ...]:
        """References to the user's code."""
        return (*self.factories.values(), *self.tools, *self.functions, *super().codes)

    @property
    def functions(self) -> tuple[str, ...]:
        """The reward functions."""
        return references(self.reward)

    @property
    def factories(self) -> Mapping[str, str]:
        """The environments by name; a single one has an empty name."""
        given = self.environment_factory
        if isinstance(given, str):
            return {"": given}
        return given or {}

    @property
    def label(self) -> str:
        """Short description of the task."""
        file, colon, name = self.codes[0].rpartition(":")
        return f"{self.dataset.label}, {Path(file).name}{colon}{name}"

    def environment(
        self, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int | None
    ) -> PromptEnvironment:
        """Read the files, load the user's code and build the environment."""
        # 1. Read the tables and load the reward functions.
        tables = self.dataset.tables()
        functions = [load_named(name, "reward function") for name in self.functions]
        options = {
            "validation_dataset": tables["validation"],
            "reward_weights": self.reward_weights,
            "validation_size": self.validation_size,
            "test_size": self.test_size,
            "seed": seed,
            **self.gym_options(max_prompt_length),
        }
        # 2. Conversations with tools.
        if self.max_turns is not None:
            factories = {
                name: load_named(each, "environment", "class")
                for name, each in self.factories.items()
            }
            return EnvironmentGym(
                tables["train"],
                tables["test"],
                tokenizer,
                # A class, several classes by name, or None if there are only tools.
                environment_factory=factories.get("", factories or None),
                tools=[load_named(name, "tool") for name in self.tools],
                max_turns=self.max_turns,
                reward_funcs=functions or None,
                environment_timeout=self.environment_timeout,
                environment_workers=self.environment_workers,
                **options,
            )
        # 3. Single turns. Without `form`, a dataset without the column prompt has AgileRL's form.
        first: Any = next(iter(tables["train"] or []), {})
        agilerl = self.form == "agilerl"
        if self.form is None:
            names = [_parameters(function) for function in functions]
            # Functions of verl take one completion of a prompt.
            agilerl = "prompt" not in first or any("solution_str" in each for each in names)
            for each in names:
                if not agilerl and "completion" in each and "completions" not in each:
                    raise ValueError(
                        f"reward takes {', '.join(each)}, as with form: agilerl, which needs the"
                        f" columns question and answer, got {shown(list(first), 200)}. Rename the"
                        " column prompt to question."
                    )
        return HuggingFaceGym(
            tables["train"],
            tables["test"],
            tokenizer,
            reward_fn=functions if agilerl else None,
            reward_funcs=None if agilerl else functions,
            conversation_template=self.conversation_template,
            **options,
        )


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters; none for a built-in without a signature."""
    try:
        return list(signature(function).parameters)
    except (TypeError, ValueError):
        return []


def references(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return one or several references to functions as a tuple."""
    return (given,) if isinstance(given, str) else given or ()


def _read_text(path: str, what: str) -> str:
    """Return the text of a file, or raise ValueError."""
    try:
        return read_regular(Path(path)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} a text file, but {path} cannot be read: {error}") from error
