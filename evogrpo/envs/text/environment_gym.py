"""EnvironmentGym: tools and environments in TRL's form, which a model calls in conversations of several turns."""

import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Unpack

import numpy as np

from evogrpo.envs.fingerprint import code_hash
from evogrpo.envs.protocol import Scores, Split
from evogrpo.envs.text.datasets import AnyTable, check_table
from evogrpo.envs.text.huggingface_gym import PromptEnvironment, PromptOptions
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.reward_functions import (
    ENVIRONMENTS,
    Reward,
    RewardError,
    RewardFunc,
    RewardInputs,
    StepRewards,
    make_rewards,
    own_row,
)
from evogrpo.envs.text.templates import (
    Message,
    Options,
    Tokenizer,
    check_messages,
    numbered,
    reply_tokens,
    row_options,
)
from evogrpo.envs.text.tools import (
    UNKNOWN_TOOL,
    Schema,
    Tool,
    ToolTurn,
    call_tool,
    check_tool_template,
    finished,
    parse_completion,
    run_calls,
    tool_call,
    tool_methods,
    tool_schema,
)
from evogrpo.envs.text.user_functions import CallFailedError, timeout_error
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Conversation
from evogrpo.text import (
    class_name,
    escaped_prints,
    one_line,
    pluralize,
    printable,
    short_repr,
    shown,
)
from evogrpo.validation import finite_number, lists_options, names_unknown, whole_between
from evogrpo.warnings import warn

EnvironmentFactory = Callable[[], Any]
"""A class or function without arguments that returns an environment: `reset`, tools and
`get_reward`, as in TRL.
"""
ENVIRONMENT_COLUMN = "environment"
"""Column with the name of a row's environment, if there are several, as in TRL."""
DEFAULT_ENVIRONMENT_TIMEOUT = 60.0
"""Default time limit of the calls to an environment in one turn, in seconds."""
DEFAULT_ENVIRONMENT_WORKERS = 8
"""Default number of threads that call environments."""


@dataclass(kw_only=True, eq=False)
class EnvironmentPool:
    """Environments that are made once and reset for each conversation.

    Attributes:
        factories: Functions that return an environment, by name; None is the name of the only one.
        seeded: Seed Python's and NumPy's global random numbers by the argument `seed` of each
            reset.
        workers: Number of threads; 0 = the calling thread, without a time limit.
        timeout: Time limit of one call, in seconds; None = no limit.
    """

    factories: Mapping[str | None, EnvironmentFactory]
    seeded: bool
    workers: int
    timeout: float | None
    _free: list[tuple[str | None, Any]] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _seeding: threading.Lock = field(default_factory=threading.Lock, init=False)

    __repr__ = short_repr

    def take(self, name: str | None) -> Any:
        """Return an unused environment of a name, or a new one."""
        with self._lock:
            for position, (free_name, environment) in enumerate(self._free):
                if free_name == name:
                    del self._free[position]
                    return environment
        return self.factories[name]()

    def give(self, name: str | None, environment: Any) -> None:
        """Take an environment back for further conversations."""
        with self._lock:
            self._free.append((name, environment))

    def reset(self, environment: Any, arguments: Mapping[str, Any]) -> Any:
        """Reset an environment for a row of the dataset; return its observation."""
        arguments = own_row(arguments)
        if not self.seeded:
            return finished(environment.reset(**arguments))
        limit = min(self.timeout or threading.TIMEOUT_MAX, threading.TIMEOUT_MAX)
        seeding = self._seeding  # global states belong to one reset at a time
        if not seeding.acquire(timeout=limit):
            with self._lock:
                if self._seeding is seeding:
                    self._seeding = threading.Lock()  # the reset that holds the previous one hangs
            raise timeout_error(limit)
        numpy_state = np.random.get_state()  # noqa: NPY002 (what environments draw from)
        python_state = random.getstate()
        try:
            random.seed(arguments["seed"])
            np.random.seed(arguments["seed"])  # noqa: NPY002
            return finished(environment.reset(**arguments))
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            seeding.release()

    def start(self, name: str | None, arguments: Mapping[str, Any]) -> tuple[Any, Any]:
        """Take an environment and reset it, once more in a new one on a ConnectionError.

        Return it and the observation.

        An environment whose reset fails is closed.
        """
        environment = self.take(name)
        try:
            try:
                return environment, self.reset(environment, arguments)
            except ConnectionError:  # a server may have restarted
                close_environment(environment)
                environment = self.factories[name]()
                return environment, self.reset(environment, arguments)
        except BaseException:
            close_environment(environment)
            raise

    def run(self, calls: Sequence[Callable[[], Any]], stop: Stop = NEVER) -> list[Any]:
        """Make calls to environments in threads; return a value or exception for each."""
        with escaped_prints():
            outcomes = run_calls(calls, workers=self.workers, timeout=self.timeout, stop=stop)
        if any(isinstance(outcome, CallFailedError) for outcome in outcomes):
            self._seeding = (
                threading.Lock()
            )  # an abandoned reset may never release the previous one
        return outcomes

    def close(self) -> None:
        """Close all unused environments. Further conversations make new ones."""
        with self._lock:
            unused = self._free
            self._free = []
        for _, environment in unused:
            close_environment(environment)


def close_environment(environment: Any) -> None:
    """Call the method `close` or `_close` of an environment, if it has one."""
    end = getattr(environment, "close", None) or getattr(environment, "_close", None)
    with suppress(Exception):  # it may be broken or closed already
        if end is not None:
            finished(end())


@dataclass(kw_only=True, eq=False)
class Episode:
    """State of one conversation.

    Attributes:
        name: Name of its environment in the pool.
        environment: The environment, from the first call on.
        results: Messages with the results of tools, after each completion that called some.
        replies: Token ids of these messages.
        failures: Number of calls that failed.
        error: Reason why it is excluded; None if it is not. Text, as a traceback would keep the
            batch in memory.
        abandoned: True if a call to its environment may still be running.
        rewarded: True once the environment has returned its reward.
        reward: That reward.
    """

    name: str | None
    environment: Any = None
    results: list[list[Message]] = field(default_factory=list)
    replies: list[tuple[int, ...]] = field(default_factory=list)
    failures: int = 0
    error: str | None = None
    abandoned: bool = False
    rewarded: bool = False
    reward: Any = None


def _release(pool: EnvironmentPool, episodes: Mapping[int, Episode]) -> None:
    """Take back the environments of a batch, except for broken ones."""
    for episode in episodes.values():
        if episode.environment is None:
            continue
        if episode.error is None:
            pool.give(episode.name, episode.environment)
        elif not episode.abandoned:  # closing one with a running call may block
            close_environment(episode.environment)


@dataclass(frozen=True, kw_only=True)
class ObservedTable:
    """A dataset whose prompts end with the observation that their environment returned at its reset.

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
        """Return a row; as in TRL the observation is appended to its last message."""
        row = dict(self.table[number])
        messages = check_messages(row.get("prompt", [{"role": "user", "content": ""}]), "prompt")
        observation = self.observations[number]
        if observation is not None:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + observation}
        return {**row, "prompt": messages}


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentBatch(SingleTurnBatch):
    """A `PromptBatch` of conversations in which completions call tools.

    Attributes:
        pool: Makes environments and calls them.
        names: Name of the environment of each prompt.
        sources: Arguments of `reset` and the observation that it must return, for each prompt.
        tools: Functions that all completions can call.
        schemas: Schemas of all tools, by name of the environment.
        own_rewards: Name of the reward of each environment with `get_reward`, by name of the
            environment.
        options: Keyword arguments of the chat template.
    """

    pool: EnvironmentPool
    names: Sequence[str | None]
    sources: Sequence[tuple[Mapping[str, Any], str | None]]
    tools: Mapping[str, Tool]
    schemas: Mapping[str | None, Sequence[Schema]]
    own_rewards: Mapping[str | None, str]
    options: Options
    _episodes: dict[int, Episode] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # Environments are free again when the batch is gone.
        weakref.finalize(self, _release, self.pool, self._episodes).atexit = False

    def respond(self, conversations: Sequence[Conversation]) -> list[tuple[int, ...] | None]:
        """Call the tools that completions ask for, and return their results.

        See `PromptBatch.respond`.

        Raises:
            RewardError: If an environment fails.
            ValueError: If a reply of a conversation is not from this batch.
        """
        # 1. Parse the completions; those without calls end their conversation.
        playing = []
        for conversation in conversations:
            turn = self._parse(conversation, len(conversation.completions) - 1)
            if turn.calls or turn.error is not None:
                playing.append((conversation, self._episode(conversation), turn))
        # 2. Call the tools.
        outcomes = self.pool.run(
            [partial(self._play, each.start, episode, turn) for each, episode, turn in playing]
        )
        failed = [
            self._exclude(episode, outcome)
            for (_, episode, _), outcome in zip(playing, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        ]
        if failed and self.on_reward_error == "raise":
            raise failed[0]
        # 3. Render the results.
        replies: dict[int, tuple[int, ...]] = {}
        for (conversation, episode, _), outcome in zip(playing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                continue
            results, failures = outcome
            options = {**self.options, **row_options(self.rows[conversation.start])}
            replies[conversation.row] = reply_tokens(
                tool_call(results[0]["name"]),
                results,
                self.tokenizer,
                options,
                conversation.completions[-1],
            )
            episode.results.append(results)
            episode.replies.append(replies[conversation.row])
            episode.failures += failures
        return [replies.get(conversation.row) for conversation in conversations]

    def score(self, conversations: Sequence[Conversation], stop: Stop = NEVER) -> Scores:
        """Compute the rewards of environments and of reward functions; see `SingleTurnBatch.score`.

        Raises:
            RewardError: If an environment or a reward function fails.
            ValueError: If a reply of a conversation is not from this batch.
        """
        # 1. Get the rewards of the environments; a conversation without calls begins and ends here.
        episodes = [self._episode(conversation) for conversation in conversations]
        waiting = [
            pair
            for pair in zip(conversations, episodes, strict=True)
            if not pair[1].rewarded and pair[1].error is None
        ]
        outcomes = self.pool.run([partial(self._finish, *pair) for pair in waiting], stop)
        failures = []
        for (conversation, episode), outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                failures.append(self._exclude(episode, outcome))
                continue
            episode.rewarded = True
            try:
                episode.reward = _reward_value(outcome, conversation)
            except ValueError as error:
                failures.append(self._exclude(episode, error))
        if failures and self.on_reward_error == "raise":
            raise failures[0]
        # 2. Compute the other rewards.
        known = {}
        for name in self.own_rewards.values():
            for row, episode in enumerate(episodes):
                own = self.own_rewards.get(episode.name) == name
                known[name, row] = episode.reward if own else None
        scores = self._score(conversations, known, stop)
        # 3. Exclude failed conversations, and count calls.
        failed = np.array([episode.error is not None for episode in episodes])
        scores.rewards[failed] = np.nan
        if scores.step_rewards is not None:
            scores.step_rewards[failed] = np.nan
        if failed.any():
            first = next(episode.error for episode in episodes if episode.error is not None)
            warn(
                f"{failed.sum()} of {len(failed)} conversations excluded; the first: {first}",
                rank_zero_only=False,
            )
        calls = sum(len(results) for episode in episodes for results in episode.results)
        metrics = {"tools/call_frequency": calls / len(episodes)}
        if calls:
            metrics["tools/failure_frequency"] = (
                sum(episode.failures for episode in episodes) / calls
            )
        return replace(scores, metrics={**scores.metrics, **metrics})

    def _episode(self, conversation: Conversation) -> Episode:
        episode = self._episodes.setdefault(
            conversation.row, Episode(name=self.names[conversation.start])
        )
        if tuple(episode.replies[: len(conversation.replies)]) != conversation.replies:
            raise ValueError("replies of conversations must come from `respond` of the same batch.")
        return episode

    def _parse(self, conversation: Conversation, number: int) -> ToolTurn:
        """Parse one completion of a conversation."""
        before = [token for part in conversation.turns[: 2 * number] for token in part]
        return parse_completion(
            self.tokenizer,
            conversation.completions[number],
            [*self.prompts[conversation.start], *before],
            self.schemas[self.names[conversation.start]],
        )

    def _begin(self, start: int, episode: Episode) -> None:
        """Reset the environment of a conversation at its first call."""
        if episode.environment is not None or not self.pool.factories:
            return
        arguments, expected = self.sources[start]
        environment, observation = self.pool.start(episode.name, arguments)
        if observation != expected:
            close_environment(environment)
            raise ValueError(
                f"reset must return the same text for the same row, got {shown(observation)} after "
                f"{shown(expected)}. Draw random numbers from the column seed."
            )
        episode.environment = environment

    def _play(self, start: int, episode: Episode, turn: ToolTurn) -> tuple[list[Message], int]:
        """Make the calls of a completion.

        Return messages with their results, and the number of failed calls.
        """
        if turn.error is not None:
            return [
                {"role": "tool", "name": UNKNOWN_TOOL, "content": str({"error": turn.error})}
            ], 1
        self._begin(start, episode)
        environment = episode.environment
        if environment is None:
            methods = {}
        else:
            methods = {name: getattr(environment, name) for name in tool_methods(environment)}
        made = [
            (name, *call_tool({**self.tools, **methods}, name, arguments))
            for name, arguments in turn.calls
        ]
        results = [{"role": "tool", "name": name, "content": content} for name, content, _ in made]
        return results, sum(failed for *_, failed in made)

    def _finish(self, conversation: Conversation, episode: Episode) -> Any:
        """Return the reward of a conversation's environment, or None if it has none."""
        self._begin(conversation.start, episode)
        environment = episode.environment
        if environment is None or not hasattr(environment, "get_reward"):
            return None
        if hasattr(environment, "truncated"):
            environment.truncated = conversation.truncated
        return finished(environment.get_reward())

    def _exclude(self, episode: Episode, error: BaseException) -> RewardError:
        """Exclude a conversation whose environment failed; return the error."""
        factory = self.pool.factories.get(episode.name)
        if factory is None:
            name = "A tool"
        else:
            name = f"Environment {getattr(factory, '__name__', factory)}"
        failure = RewardError(f"{name} {_reason(error)}"[:1000])
        failure.__cause__ = error
        episode.error = str(failure)
        episode.abandoned = isinstance(error, CallFailedError)
        return failure

    def _messages(self, conversation: Conversation) -> list[Message]:
        """Return all messages after the prompt: completions, and results of tools."""
        messages: list[Message] = []
        results = self._episodes[conversation.row].results
        for number in range(len(conversation.completions)):
            messages.append(self._parse(conversation, number).message)
            if number < len(conversation.replies):
                messages += results[number]
        return messages

    def _turn_texts(self, conversation: Conversation) -> list[str]:
        """Return the texts of completions and of tool results, in order."""
        results = self._episodes[conversation.row].results
        return [
            (
                "\n".join(message["content"] for message in results[number // 2])
                if number % 2
                else self._text(list(part))
            )
            for number, part in enumerate(conversation.turns)
        ]

    def _reward_inputs(self, conversations: Sequence[Conversation]) -> RewardInputs:
        inputs = super()._reward_inputs(conversations)
        environments = None
        if self.pool.factories:
            environments = [self._episodes[each.row].environment for each in conversations]
        messages = [self._messages(conversation) for conversation in conversations]
        return replace(inputs, environments=environments, messages=messages)


def _reason(error: BaseException) -> str:
    """Return why a call failed, as the end of a sentence."""
    if isinstance(error, CallFailedError):
        return printable(str(error))
    return f"raised {class_name(error)}: {one_line(error)}"


def _reward_value(value: Any, conversation: Conversation) -> Any:
    """Return the result of `get_reward`.

    A list of numbers becomes step rewards at the end of each completion.
    """
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        value = value.tolist()
    if value is None or isinstance(value, StepRewards):
        return value
    if not isinstance(value, list | tuple):
        return finite_number("get_reward", float(value) if isinstance(value, bool) else value)
    if len(value) > len(conversation.completions):
        completions = pluralize(len(conversation.completions), "completion")
        raise ValueError(
            f"get_reward must return at most one number per completion, got {len(value)} for"
            f" {completions}."
        )
    lengths = np.cumsum([len(part) for part in conversation.turns])
    values = [float(each) if isinstance(each, bool) else each for each in value]
    return StepRewards(values, [max(0, int(end) - 1) for end in lengths[::2][: len(value)]])


def _named_tools(tools: Any) -> dict[str, Tool]:
    """Return tools by name.

    Raises:
        ValueError: If they are not a list of functions with different names.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools must be a list of functions, got {shown(tools, 200)}.")
    named: dict[str, Tool] = {}
    for tool in tools:
        name = getattr(tool, "__name__", None)
        if (
            not callable(tool) or name is None
        ):  # a partial function has no name and no docstring of its own
            raise ValueError(
                f"tools must be functions that were defined with def, got {shown(tool, 200)}."
            )
        if name in named:
            raise ValueError(f"tools must have different names, got {name!r} twice. Rename one.")
        named[name] = tool
    return named


async def _own_reward(completions: Sequence[Any]) -> list[float | None]:
    """Stand for the reward of an environment, whose value `EnvironmentBatch.score` passes on itself."""
    raise AssertionError


class EnvironmentGym(PromptEnvironment):
    """A prompt dataset with tools and environments in TRL's form, which the model calls between completions.

    An environment is a class that also runs in TRL's `GRPOTrainer(environment_factory=)`.
    `reset(**row)` starts a conversation; text that it returns is appended to the last message of
    the prompt. All other public methods are tools and need type hints and a docstring with Args.
    `get_reward()` returns the reward at the end. It may also return a list with one number per
    completion, for advantages of single turns. If the class has an attribute `truncated`, it is set
    before: True if the conversation ran out of tokens. `close` or `_close` is called at the end of
    the run.

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
        reward_weights: Factor of each of `reward_funcs` in the sum; None means 1 each. Environments
            have 1.
        environment_timeout: Time limit of the calls to an environment in one turn, in seconds; None
            = no limit.
        environment_workers: Number of threads that call environments and tools; 0 = the main thread
            without time limit.
        options: Other options; see `evogrpo.envs.text.huggingface_gym.PromptOptions`.

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
        reward_weights: Sequence[float] | None = None,
        environment_timeout: float | None = DEFAULT_ENVIRONMENT_TIMEOUT,
        environment_workers: int = DEFAULT_ENVIRONMENT_WORKERS,
        **options: Unpack[PromptOptions],
    ) -> None:
        # 1. Check the arguments. An integer is a number of reset seeds: one row for each.
        if isinstance(train_dataset, int):
            starts = train_dataset
        else:
            starts = None
        if starts is not None:
            train_dataset = [
                {"seed": number} for number in range(whole_between("train_dataset", starts, 1))
            ]
        self._max_turns = whole_between("max_turns", max_turns, 2)
        if (
            environment_timeout is not None
            and finite_number("environment_timeout", environment_timeout) <= 0
        ):
            raise ValueError(
                f"environment_timeout must be above 0 seconds, or None, got {environment_timeout}."
            )
        # Factories by name; a single factory has the name None.
        self._several = isinstance(environment_factory, Mapping)
        if self._several:
            factories: Any = environment_factory
        else:
            factories = {None: environment_factory}
        if environment_factory is None:
            factories = {}
        for factory in factories.values():
            if not callable(factory):
                raise ValueError(
                    f"environment_factory must be a class or a function, got {shown(factory, 200)}."
                )
        self._tools = _named_tools(tools)
        if not factories and not self._tools:
            raise ValueError(
                "environment_factory or tools must be given. Without tools use HuggingFaceGym."
            )
        # 2. Create one environment of each factory, to read its tools and whether it has
        #    `get_reward`.
        self._pool = EnvironmentPool(
            factories=factories,
            seeded=starts is not None,
            workers=whole_between("environment_workers", environment_workers, 0),
            timeout=environment_timeout,
        )
        weakref.finalize(self, self._pool.close)
        self._own_rewards: dict[str | None, str] = {}
        self._schemas: dict[str | None, list[Schema]] = {
            None: [tool_schema(tool) for tool in self._tools.values()]
        }
        for name in factories:
            (environment,) = self._pool.run([partial(self._pool.take, name)])
            if isinstance(environment, BaseException):
                raise ValueError(f"environment_factory {_reason(environment)}") from environment
            self._pool.give(name, environment)
            if not callable(getattr(environment, "reset", None)):
                raise ValueError(
                    f"An environment must have a method reset, got {shown(environment, 200)}."
                )
            methods = [getattr(environment, each) for each in tool_methods(environment)]
            for each in tool_methods(environment):
                if each in self._tools:
                    raise ValueError(
                        f"tools must not have the name of a method of {type(environment).__name__},"
                        f" got {each!r}. Rename one."
                    )
            self._schemas[name] = [tool_schema(tool) for tool in (*self._tools.values(), *methods)]
            if hasattr(environment, "get_reward"):
                self._own_rewards[name] = type(environment).__name__
        # 3. Combine the reward functions with the rewards of environments.
        if reward_weights is not None and reward_funcs is None:
            raise ValueError(
                "reward_weights requires reward_funcs. Remove it: environments have weight 1."
            )
        rewards: tuple[Reward, ...] = ()
        if reward_funcs is not None or not self._own_rewards:
            rewards = make_rewards(None, reward_funcs, reward_weights)
        own_names = dict.fromkeys(
            self._own_rewards.values()
        )  # environments of equal class names share one reward
        repeated = own_names.keys() & {reward.name for reward in rewards}
        if repeated:
            raise ValueError(
                f"reward_funcs must not have the name of an environment, got {min(repeated)}."
                " Rename it."
            )
        env_rewards = [
            Reward(name=name, weight=1.0, batched=True, function=_own_reward) for name in own_names
        ]
        # 4. Build the prompts. Each ends with the first observation of its environment.
        super().__init__(
            train_dataset, test_dataset, tokenizer, rewards=(*rewards, *env_rewards), **options
        )
        # 5. Check that the chat template renders tools.
        check_tool_template(
            self.tokenizer, self._options, next(filter(None, self._schemas.values()), [])
        )

    def fingerprint(self) -> dict[str, str]:
        """Return hashes of questions, prompts, reward functions, tools and environments.

        See `SupportsFingerprint`.
        """
        code = {
            f"environment {name or ''}".strip(): code_hash(each)
            for name, each in self._pool.factories.items()
        }
        code |= {f"tool {name}": code_hash(tool) for name, tool in self._tools.items()}
        return {**super().fingerprint(), **code, "max_turns": str(self._max_turns)}

    def close(self) -> None:
        """Close all environments and end the worker processes of reward functions.

        Further use starts new ones.
        """
        super().close()
        self._pool.close()

    def open(self, split: Split, starts: Sequence[int]) -> EnvironmentBatch:
        """Return a batch of prompts of a split, each index in [0, size(split)).

        Raises:
            ValueError: If the split or an index does not exist.
        """
        fields = self._batch_fields(split, starts)
        questions = self._splits[split]
        numbers = [self._splits[split].rows[start] for start in starts]
        table: ObservedTable = questions.table
        return EnvironmentBatch(
            **fields,
            max_turns=self._max_turns,
            pool=self._pool,
            names=[self._name(row) for row in fields["rows"]],
            sources=[
                (self._reset_arguments(table.table[number]), table.observations[number])
                for number in numbers
            ],
            tools=self._tools,
            schemas=self._schemas,
            own_rewards=self._own_rewards,
            options=self._options,
        )

    def _row_options(self, row: Mapping[str, Any]) -> Options:
        if "tools" in {**self._options, **row_options(row)}:
            raise ValueError(
                "chat_template_kwargs must not contain tools, which the environment sets."
                " Remove it."
            )
        # Some templates show instructions for an empty list of tools.
        return {"tools": self._schemas[self._name(row)] or None}

    def _name(self, row: Mapping[str, Any]) -> str | None:
        return row[ENVIRONMENT_COLUMN] if self._several else None

    def _reset_arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that `reset` gets: as in TRL all, except for the environment's name."""
        return {
            key: value
            for key, value in row.items()
            if not (self._several and key == ENVIRONMENT_COLUMN)
        }

    def _prepare(self, table: AnyTable, where: str) -> ObservedTable:
        """Reset an environment for each row, and return the rows with their observations."""
        check_table(
            table,
            (ENVIRONMENT_COLUMN,) if self._several else () if self._pool.factories else ("prompt",),
            where,
        )
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
        observations: list[str | None] = [None] * len(rows)
        if self._pool.factories:
            outcomes = self._pool.run([partial(self._first_observation, row) for row in rows])
            for number, outcome in enumerate(outcomes):
                if isinstance(outcome, BaseException):
                    raise ValueError(
                        f"{numbered(number, where)}: reset {_reason(outcome)}"
                    ) from outcome
                if outcome is not None and not isinstance(outcome, str):
                    raise ValueError(
                        f"{numbered(number, where)}: reset must return text or None, got"
                        f" {shown(outcome)}."
                    )
            observations = outcomes
        return ObservedTable(table=table, observations=observations)

    def _first_observation(self, row: Mapping[str, Any]) -> Any:
        environment, observation = self._pool.start(self._name(row), self._reset_arguments(row))
        self._pool.give(self._name(row), environment)
        return observation
