"""EnvironmentGym: tools and environments in TRL's form, in conversations of several turns."""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

from evogrpo.chat_templates import QUESTION, render_chat
from evogrpo.config.task_settings import SettingValue, TaskSettings
from evogrpo.envs.fingerprint import code_hash
from evogrpo.envs.protocol import Split
from evogrpo.envs.text.datasets import AnyTable, check_table
from evogrpo.envs.text.environment_batch import EnvironmentBatch, Opening, failure_reason
from evogrpo.envs.text.environment_pool import EnvironmentFactory, EnvironmentPool
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.envs.text.prompt_settings import PromptOptions
from evogrpo.envs.text.reward_functions import (
    ENVIRONMENTS,
    Reward,
    RewardFunc,
    Weights,
    make_rewards,
)
from evogrpo.envs.text.templates import (
    Options,
    Tokenizer,
    check_messages,
    numbered,
    render_reply,
    row_options,
)
from evogrpo.envs.text.tools import (
    Schema,
    Tool,
    parse_completion,
    tool_call,
    tool_methods,
    tool_schema,
)
from evogrpo.text import short_repr, shown
from evogrpo.validation import finite_number, lists_options, names_unknown, whole_between

ENVIRONMENT_COLUMN = "environment"
"""Column with the name of a row's environment, if there are several, as in TRL."""
DEFAULT_ENVIRONMENT_TIMEOUT = 60.0
"""Default time limit of the calls to an environment in one turn, in seconds."""
DEFAULT_ENVIRONMENT_WORKERS = 8
"""Default number of threads that call environments."""
_TEMPLATE_WITH_TOOLS = (
    "Set task.chat_template to tools, or to a file with one that does (in Python"
    " tokenizer.chat_template = evogrpo.TOOLS_TEMPLATE)."
)
"""Advice for models whose chat template has no tools."""


@dataclass(frozen=True, kw_only=True)
class ObservedTable:
    """A dataset whose prompts end with the observation of their environment's reset.

    Attributes:
        table: The dataset.
        observations: Text for each row; None = no observation.
    """

    table: AnyTable
    observations: Sequence[str | None]

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row, whose prompt ends with its observation."""
        return self.observed(number, self.observations[number])

    def observed(self, number: int, observation: str | None) -> dict[str, Any]:
        """Return a row; as in TRL an observation is appended to its last message."""
        row = dict(self.table[number])
        # Without a prompt, the observation is the whole message of the user.
        prompt = row.get("prompt", [{"role": "user", "content": ""}])
        messages = check_messages(prompt, "prompt")
        if observation is not None:
            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + observation}
        return {**row, "prompt": messages}


def _named_tools(tools: Any) -> dict[str, Tool]:
    """Return tools by name.

    Raises:
        ValueError: If they are not a list of functions with different names.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools must be a list of functions, got {shown(tools, 200)}.")
    named: dict[str, Tool] = {}
    for tool in tools:
        # A partial function has no name and no docstring of its own.
        name = getattr(tool, "__name__", None)
        if not callable(tool) or name is None:
            raise ValueError(
                f"tools must be functions that were defined with def, got {shown(tool, 200)}."
            )
        if name in named:
            raise ValueError(f"tools must have different names, got {name!r} twice. Rename one.")
        named[name] = tool
    return named


def _named_factories(factory: Any) -> dict[str | None, EnvironmentFactory]:
    """Return environment factories by name; a single one has the name None."""
    factories: dict[str | None, EnvironmentFactory] = {}
    if isinstance(factory, Mapping):
        factories = dict(factory)
    elif factory is not None:
        factories = {None: factory}
    for each in factories.values():
        if not callable(each):
            raise ValueError(
                f"environment_factory must be a class or a function, got {shown(each, 200)}."
            )
    return factories


async def _own_reward(completions: Sequence[Any]) -> list[float | None]:
    """Stand for the reward of an environment in the list of rewards; never called.

    `EnvironmentBatch.score` gets the value from the environment. Async, because other functions are
    sent to worker processes.
    """
    raise AssertionError


class EnvironmentGym(PromptEnvironment):
    """A prompt dataset with tools and environments in TRL's form.

    The model calls them between its completions.

    An environment is a class that also runs in TRL's `GRPOTrainer(environment_factory=)`.
    `reset(**row)` starts a conversation; text that it returns is appended to the last message of
    the prompt. All other public methods are tools and need type hints and a docstring with Args.
    `get_reward()` returns the reward at the end. It may also return a list with one number per
    completion, for advantages of single turns. If the environment has an attribute `truncated`, it
    is set before: True if the conversation ran out of tokens. `close` or `_close` is called at the
    end of the run.

    The chat template shows the tools to the model and renders their results, which are masked in
    the loss. Calls are parsed by the tokenizer's `response_template`; without one they are JSON in
    <tool_call> tags. The model reads errors of unknown tools, malformed calls and tools that raise.
    The metrics tools/call_frequency (per conversation) and tools/failure_frequency (per call) count
    them. `on_reward_error` applies if `reset` or `get_reward` raises, a call exceeds the time
    limit, or a tool raises ConnectionError, which means that its server is lost. A `reset` that
    raises ConnectionError is repeated once in a new environment.

    Environments are made once and reset for every conversation. `reset` is called for every row at
    the start, as prompts and splits depend on it; it must return the same text for the same row.
    Splits are those of `HuggingFaceGym`, but rows with equal prompts and other columns are
    different questions.

    Args:
        train_dataset: As for `HuggingFaceGym`; `prompt` is a list of messages. With environments it
            may be left out. For environments that choose their task in `reset`, a number of starts:
            each has a `seed`, with which Python's `random` and NumPy's global generator are seeded
            during `reset`.
        test_dataset: Questions for the final report; None = draw them from the training dataset.
        tokenizer: A transformers tokenizer with a chat template.
        environment_factory: Class or function that returns an environment, or several by the names
            in the column `environment`; None = tools only. Environments whose classes have the same
            name share one reward.
        tools: Functions that the model can call, with type hints and a docstring with Args.
        max_turns: Maximum number of completions in a conversation, at least 2.
        reward_funcs: One or several rewards in TRL's form, added to those of environments. A
            completion is the list of all messages after the prompt. The argument `environments` has
            the environment of each conversation.
        reward_weights: Factor of each of `reward_funcs` in the sum, in their order or by name; 1 if
            not given. Environments have 1.
        environment_timeout: Time limit of the calls to an environment in one turn, in seconds; None
            = no limit.
        environment_workers: Number of threads that call environments and tools; 0 = the main thread
            without time limit.
        options: Other options; see `evogrpo.envs.text.prompt_settings.PromptOptions`.

    Attributes:
        tokenizer: The tokenizer.
        seed: The seed.
        filtered: Number of rows left out by split and reason, as `Filtered`.
        observation_space: One prompt, as a sequence of token ids.
        action_space: One completion, as a sequence of token ids.

    Raises:
        ValueError: If an argument, a column, a split, a tool or the chat template is invalid, or an
            environment fails.
    """

    whole_rows: ClassVar[bool] = True
    extra_arguments: ClassVar[tuple[str, ...]] = (ENVIRONMENTS,)

    @names_unknown
    @lists_options(PromptOptions.__annotations__, PromptEnvironment.__init__)
    def __init__(
        self,
        train_dataset: AnyTable,
        test_dataset: AnyTable | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None,
        tools: Sequence[Tool] = (),
        max_turns: int,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None = None,
        reward_weights: Weights | None = None,
        environment_timeout: float | None = DEFAULT_ENVIRONMENT_TIMEOUT,
        environment_workers: int = DEFAULT_ENVIRONMENT_WORKERS,
        **options: Unpack[PromptOptions],
    ) -> None:
        # 1. Check the arguments. An integer is a number of reset seeds: one row for each.
        seeded = isinstance(train_dataset, int)
        if seeded:
            starts = whole_between("train_dataset", train_dataset, 1)
            train_dataset = [{"seed": number} for number in range(starts)]
        self._max_turns = whole_between("max_turns", max_turns, 2)
        timeout = environment_timeout
        if timeout is not None and finite_number("environment_timeout", timeout) <= 0:
            raise ValueError(
                f"environment_timeout must be above 0 seconds, or None, got {timeout}."
            )
        factories = _named_factories(environment_factory)
        # With several environments a column names that of each row.
        self._several = isinstance(environment_factory, Mapping)
        self._tools = _named_tools(tools)
        if not factories and not self._tools:
            raise ValueError(
                "environment_factory or tools must be given. Without tools use HuggingFaceGym."
            )
        # 2. Create one environment of each factory, to read its tools and whether it has
        #    `get_reward`.
        workers = whole_between("environment_workers", environment_workers, 0)
        self._pool = EnvironmentPool(
            factories=factories, seeded=seeded, workers=workers, timeout=timeout
        )
        # Closes environments when this object is deleted, or at the end of the program.
        weakref.finalize(self, self._pool.close)
        # By name of the environment: the name of its reward, and the parameters of its reset.
        self._own_rewards: dict[str | None, str] = {}
        self._resets: dict[str | None, Mapping[str, inspect.Parameter]] = {}
        # Observations of one batch with settings of members, by split, start and settings.
        self._observed: dict[tuple[Any, ...], str | None] = {}
        shared_schemas = [tool_schema(tool) for tool in self._tools.values()]
        self._schemas: dict[str | None, list[Schema]] = {None: shared_schemas}
        for name in factories:
            environment = self._first_environment(name)
            self._resets[name] = inspect.signature(environment.reset).parameters
            methods = [getattr(environment, each) for each in tool_methods(environment)]
            self._schemas[name] = [*shared_schemas, *map(tool_schema, methods)]
            if hasattr(environment, "get_reward"):
                # Environments of equal class names share one reward.
                self._own_rewards[name] = type(environment).__name__
        # 3. Build the prompts. Each ends with the first observation of its environment.
        rewards = self._make_rewards(reward_funcs, reward_weights)
        super().__init__(train_dataset, test_dataset, tokenizer, rewards=rewards, **options)

    def _first_environment(self, name: str | None) -> Any:
        """Return an environment of the pool that has been checked."""
        (environment,) = self._pool.run([partial(self._pool.take, name)])
        if isinstance(environment, BaseException):
            raise ValueError(f"environment_factory {failure_reason(environment)}") from environment
        # Given back at once: it is reset before its next use.
        self._pool.give(name, environment)
        if not callable(getattr(environment, "reset", None)):
            raise ValueError(
                f"An environment must have a method reset, got {shown(environment, 200)}."
            )
        for each in tool_methods(environment):
            if each in self._tools:
                raise ValueError(
                    f"tools must not have the name of a method of {type(environment).__name__},"
                    f" got {each!r}. Rename one."
                )
        return environment

    def _make_rewards(
        self,
        reward_funcs: RewardFunc | Sequence[RewardFunc] | None,
        reward_weights: Weights | None,
    ) -> list[Reward]:
        """Return the reward functions, and the rewards of environments."""
        if reward_weights is not None and reward_funcs is None:
            raise ValueError(
                "reward_weights requires reward_funcs. Remove it: environments have weight 1."
            )
        rewards: list[Reward] = []
        # Reward functions are optional if environments give rewards.
        if reward_funcs is not None or not self._own_rewards:
            rewards += make_rewards(None, reward_funcs, reward_weights)
        names = [reward.name for reward in rewards]
        for name in dict.fromkeys(self._own_rewards.values()):
            if name in names:
                raise ValueError(
                    f"reward_funcs must not have the name of an environment, got {name}. Rename it."
                )
            rewards.append(Reward(name=name, weight=1.0, batched=True, function=_own_reward))
        return rewards

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of questions, prompts, reward functions, tools and environments.

        See `SupportsFingerprint`.
        """
        fingerprint = super().fingerprint()
        for name, factory in self._pool.factories.items():
            fingerprint[f"environment {name or ''}".strip()] = code_hash(factory)
        for tool_name, tool in self._tools.items():
            fingerprint[f"tool {tool_name}"] = code_hash(tool)
        return {**fingerprint, "max_turns": str(self._max_turns)}

    def close(self) -> None:
        """Close all environments and end the worker processes of reward functions.

        Further use starts new ones.
        """
        super().close()
        self._pool.close()

    def make_batch(
        self, split: Split, starts: Sequence[int], settings: Sequence[TaskSettings] = ()
    ) -> EnvironmentBatch:
        """Return a batch of prompts of a split; see `PromptEnvironment.make_batch`.

        Raises:
            ValueError: If the split or an index does not exist.
        """
        self._observed.clear()
        fields = self._batch_fields(split, starts, settings)
        values = self._values(split, starts, settings)
        # `_batch_fields` has put these observations into the prompts. `_observed` still has them,
        # so no environment is reset again.
        observations = self._observations(split, starts, values)
        # Each conversation resets an environment with the same arguments.
        openings = []
        for start, values_of_start, observation in zip(starts, values, observations, strict=True):
            row = self._unobserved(split, start)
            arguments = self._reset_arguments(row, values_of_start)
            opening = Opening(name=self._name(row), arguments=arguments, observation=observation)
            openings.append(opening)
        return EnvironmentBatch(
            **fields,
            max_turns=self._max_turns,
            pool=self._pool,
            openings=openings,
            tools=self._tools,
            schemas=self._schemas,
            own_rewards=self._own_rewards,
            options=self._options,
        )

    def _row_options(self, row: Mapping[str, Any]) -> Options:
        if "tools" in self._options or "tools" in row_options(row):
            raise ValueError(
                "chat_template_kwargs must not contain tools, which the environment sets."
                " Remove it."
            )
        # Some templates show instructions for an empty list of tools.
        return {"tools": self._schemas[self._name(row)] or None}

    def _name(self, row: Mapping[str, Any]) -> str | None:
        return row[ENVIRONMENT_COLUMN] if self._several else None

    def _unobserved(self, split: Split, start: int) -> Mapping[str, Any]:
        """Return the row of a start as it is in the dataset."""
        questions = self._splits[split]
        number = questions.rows[start]
        row: Mapping[str, Any] = questions.table.table[number]
        return row

    def _observations(
        self, split: Split, starts: Sequence[int], values: Sequence[Mapping[str, SettingValue]]
    ) -> list[str | None]:
        """Return the observations of starts, with values of members that `reset` takes."""
        questions = self._splits[split]
        found = []
        missing = {}
        for start, values_of_start in zip(starts, values, strict=True):
            row = self._unobserved(split, start)
            taken = self._taken(self._name(row), values_of_start)
            key = (split, start, *taken.items())
            # An environment is reset once for each start and its values. Without values, the
            # observation is that of the table.
            if taken and key not in self._observed:
                missing[key] = partial(self._first_observation, row, taken)
            number = questions.rows[start]
            found.append((key, questions.table.observations[number]))
        observations = self._pool.run(list(missing.values()))
        for key, observation in zip(missing, observations, strict=True):
            _check_observation(observation, f"A row of {split} with {shown(key[2:])}")
            self._observed[key] = observation
        return [self._observed.get(key, configured) for key, configured in found]

    def _rows(
        self, split: Split, starts: Sequence[int], values: Sequence[Mapping[str, SettingValue]]
    ) -> list[Mapping[str, Any]]:
        """Return the row of each start, with its observation and the values of a member."""
        questions = self._splits[split]
        observations = self._observations(split, starts, values)
        rows = []
        for start, values_of_start, observation in zip(starts, values, observations, strict=True):
            row = questions.table.observed(questions.rows[start], observation)
            rows.append(self._with_settings(row, values_of_start))
        return rows

    def _changes_prompt(self, name: str) -> bool:
        """Return True if a template, or the reset of an environment, takes a task setting."""
        # Any value serves: only the name is looked up.
        resets = any(self._taken(environment, {name: 0}) for environment in self._resets)
        return resets or super()._changes_prompt(name)

    def _taken(
        self, environment: str | None, values: Mapping[str, SettingValue]
    ) -> dict[str, SettingValue]:
        """Return the task settings that the reset of an environment takes."""
        parameters = self._resets.get(environment, {})
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return {name: values[name] for name in values if takes_any or name in parameters}

    def _reset_arguments(
        self, row: Mapping[str, Any], values: Mapping[str, SettingValue]
    ) -> dict[str, Any]:
        """Return the arguments of `reset`: all columns and the task settings that it takes.

        The environment's name is left out.
        """
        name = self._name(row)
        configured = self._taken(name, self._settings)
        arguments = {**configured, **row, **self._taken(name, values)}
        if self._several:
            del arguments[ENVIRONMENT_COLUMN]
        return arguments

    def _prepare(self, table: AnyTable, where: str) -> ObservedTable:
        """Reset an environment for each row, and return the rows with their observations."""
        # 1. Check the template and the rows, before any environment is reset.
        if self._chat_template is None:
            raise ValueError(
                "The tokenizer has no chat_template, so it does not render tools."
                f" {_TEMPLATE_WITH_TOOLS}"
            )
        # Of any environment that has tools.
        some_schemas = next(filter(None, self._schemas.values()), [])
        _check_tool_template(self.tokenizer, self._given_options, some_schemas)
        # Environments may provide the whole prompt.
        required = [] if self._pool.factories else ["prompt"]
        if self._several:
            required = [ENVIRONMENT_COLUMN]
        check_table(table, required, where)
        rows = [table[number] for number in range(len(table))]
        for number, row in enumerate(rows):
            if self._several and self._name(row) not in self._pool.factories:
                raise ValueError(
                    f"{numbered(number, where)}: {ENVIRONMENT_COLUMN} must be one of"
                    f" {list(self._pool.factories)}, got {shown(self._name(row))}."
                )
            if isinstance(row.get("prompt"), str):
                raise ValueError(
                    f"{numbered(number, where)}: prompt must be a list of messages, got text."
                )
        if not self._pool.factories:
            return ObservedTable(table=table, observations=[None] * len(rows))
        # 2. Get the observations. Threads overlap, as environments may be servers.
        tasks = [partial(self._first_observation, row, {}) for row in rows]
        observations = self._pool.run(tasks)
        for number, observation in enumerate(observations):
            _check_observation(observation, numbered(number, where))
        return ObservedTable(table=table, observations=observations)

    def _first_observation(self, row: Mapping[str, Any], values: Mapping[str, SettingValue]) -> Any:
        """Reset an environment with a row, and return what it shows."""
        arguments = self._reset_arguments(row, values)
        environment, observation = self._pool.start(self._name(row), arguments)
        self._pool.give(self._name(row), environment)
        return observation


def _check_observation(observation: Any, row_name: str) -> None:
    """Raise ValueError if a reset failed, or returned neither text nor None."""
    if isinstance(observation, BaseException):
        raise ValueError(f"{row_name}: reset {failure_reason(observation)}") from observation
    if observation is not None and not isinstance(observation, str):
        raise ValueError(f"{row_name}: reset must return text or None, got {shown(observation)}.")


def _check_tool_template(tokenizer: Tokenizer, options: Options, schemas: Sequence[Schema]) -> None:
    """Raise ValueError if the chat template or the parser is not suitable for tools.

    Args:
        tokenizer: A transformers tokenizer.
        options: Keyword arguments of the template.
        schemas: Schemas of some tools.
    """
    # 1. The template must show tools, calls and results, and leave earlier turns unchanged once a
    #    result follows.
    name = "name_of_a_tool"
    content = "result_of_a_tool"
    result = {"role": "tool", "name": name, "content": content}
    conversation = [QUESTION, tool_call(name)]
    before, after = render_reply(conversation, [result], tokenizer, options)
    # Equal texts: the template ignores tools.
    without_tools = render_chat(tokenizer, [QUESTION], **{**options, "tools": None})
    with_tools = render_chat(tokenizer, [QUESTION], **{**options, "tools": schemas or None})
    if name not in before or content not in after or with_tools == without_tools:
        raise ValueError(
            "The tokenizer's chat_template does not render tools, calls and results."
            f" {_TEMPLATE_WITH_TOOLS}"
        )
    # 2. The parser must read the calls that the template writes.
    if getattr(tokenizer, "response_template", None) is None:
        written = before[before.rfind("<tool_call>") :]
        (call,) = tokenizer([written], add_special_tokens=False)["input_ids"]
        if parse_completion(tokenizer, call, (), ()).calls != ((name, {}),):
            raise ValueError(
                "The tokenizer has no response_template, and its chat_template does not write tool"
                " calls as JSON in <tool_call> tags. Set task.chat_template to tools, or"
                " task.response_template to a JSON file (in Python tokenizer.response_template);"
                " trl.chat_template_utils.add_response_schema(tokenizer) sets one for known models."
            )
