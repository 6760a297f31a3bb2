"""EnvironmentBatch: conversations in which completions call tools of an environment."""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from evogrpo.envs.protocol import Scores
from evogrpo.envs.text.compute_rewards import KnownValues
from evogrpo.envs.text.environment_pool import EnvironmentPool, close_environment
from evogrpo.envs.text.prompt_batch import SingleTurnBatch
from evogrpo.envs.text.reward_functions import RewardError, RewardInputs, StepRewards
from evogrpo.envs.text.templates import Message, Options, reply_tokens, row_options
from evogrpo.envs.text.tools import (
    UNKNOWN_TOOL,
    Schema,
    Tool,
    ToolTurn,
    finished,
    parse_completion,
    tool_call,
    tool_methods,
)
from evogrpo.envs.text.user_functions import CallFailedError
from evogrpo.interruption import NEVER, Stop
from evogrpo.records import Conversation
from evogrpo.text import class_name, one_line, pluralize, printable, shown
from evogrpo.validation import finite_number, plain_value
from evogrpo.warnings import warn

_MANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
"""Kinds of parameters that take any arguments, which the schema of a tool does not describe."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The beginning of the conversations of one prompt.

    Attributes:
        name: Name of the environment in the pool.
        arguments: Arguments of its reset.
        observation: The observation that the reset must return.
    """

    name: str | None
    arguments: Mapping[str, Any]
    observation: str | None


@dataclass(kw_only=True, eq=False)
class Episode:
    """State of one conversation.

    Attributes:
        opening: Its beginning.
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

    opening: Opening
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
            pool.give(episode.opening.name, episode.environment)
        elif not episode.abandoned:  # closing one with a running call may block
            close_environment(episode.environment)


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentBatch(SingleTurnBatch):
    """A `PromptBatch` of conversations in which completions call tools.

    Attributes:
        pool: Makes environments and calls them.
        openings: Beginning of the conversations of each prompt.
        tools: Functions that all completions can call.
        schemas: Schemas of all tools, by name of the environment.
        own_rewards: Name of the reward of each environment with `get_reward`, by name of the
            environment.
        options: Keyword arguments of the chat template.
    """

    pool: EnvironmentPool
    openings: Sequence[Opening]
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
            RewardError: If an environment fails and `on_reward_error` is "raise".
            ValueError: If a reply of a conversation is not from this batch.
        """
        # 1. Parse the completions; those without calls end their conversation.
        playing = []
        calls = []
        for conversation in conversations:
            turn = self._parse(conversation, len(conversation.completions) - 1)
            if turn.calls or turn.error is not None:
                episode = self._episode(conversation)
                playing.append((conversation, episode))
                calls.append(partial(self._play, episode, turn))
        # 2. Call the tools.
        outcomes = self.pool.run(calls)
        failures = []
        for (_, episode), outcome in zip(playing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                failures.append(self._exclude(episode, outcome))
        # Excluded conversations get no reply, so they end here.
        self._raise_first(failures)
        # 3. Render the results.
        replies: dict[int, tuple[int, ...]] = {}
        for (conversation, episode), outcome in zip(playing, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                continue
            results, failed = outcome
            options = {**self.options, **row_options(self.rows[conversation.start])}
            # The markers around a result depend on the message before it, which calls a tool.
            caller = tool_call(results[0]["name"])
            completion = conversation.completions[-1]
            tokens = reply_tokens(caller, results, self.tokenizer, options, completion)
            replies[conversation.row] = tokens
            episode.results.append(results)
            episode.replies.append(tokens)
            episode.failures += failed
        return [replies.get(conversation.row) for conversation in conversations]

    def score(self, conversations: Sequence[Conversation], stop: Stop = NEVER) -> Scores:
        """Compute the rewards of environments and of reward functions; see `SingleTurnBatch.score`.

        Raises:
            RewardError: If an environment or a reward function fails.
            ValueError: If a reply of a conversation is not from this batch.
        """
        # 1. Get the rewards of the environments; a conversation without calls begins and ends here.
        episodes = [self._episode(conversation) for conversation in conversations]
        self._finish(list(zip(conversations, episodes, strict=True)), stop)
        known: KnownValues = {}
        for row, episode in enumerate(episodes):
            # Rewards of other environments do not apply.
            known |= {(name, row): None for name in self.own_rewards.values()}
            name = self.own_rewards.get(episode.opening.name)
            if name is not None:
                known[name, row] = episode.reward
        # 2. Compute the other rewards.
        scores = self._score(conversations, known, stop)
        # 3. Exclude failed conversations, and count calls.
        errors = [episode.error for episode in episodes]
        failed = np.array([error is not None for error in errors])
        # Their other rewards stay visible in `components`.
        scores.rewards[failed] = np.nan
        if scores.step_rewards is not None:
            scores.step_rewards[failed] = np.nan
        if failed.any():
            first = errors[int(failed.argmax())]
            warn(
                f"{failed.sum()} of {len(failed)} conversations excluded; the first: {first}",
                rank_zero_only=False,
            )
        calls = 0
        failures = 0
        for episode in episodes:
            calls += sum(map(len, episode.results))
            failures += episode.failures
        metrics = {**scores.metrics, "tools/call_frequency": calls / len(episodes)}
        if calls:
            metrics["tools/failure_frequency"] = failures / calls
        return replace(scores, metrics=metrics)

    def _finish(self, playing: Sequence[tuple[Conversation, Episode]], stop: Stop) -> None:
        """Get the rewards of environments, except for conversations that have one already."""
        waiting = []
        # A batch may be scored more than once, but an environment is asked once.
        for conversation, episode in playing:
            if not episode.rewarded and episode.error is None:
                waiting.append((conversation, episode))
        outcomes = self.pool.run(
            [partial(self._reward_of_environment, *pair) for pair in waiting], stop
        )
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
        self._raise_first(failures)

    def _raise_first(self, failures: Sequence[RewardError]) -> None:
        if failures and self.on_reward_error == "raise":
            raise failures[0]

    def _episode(self, conversation: Conversation) -> Episode:
        """Return the state of a conversation.

        Raises:
            ValueError: If a reply of it is not from this batch.
        """
        episode = self._episodes.get(conversation.row)
        if episode is None:
            episode = Episode(opening=self.openings[conversation.start])
            self._episodes[conversation.row] = episode
        # Results of calls are kept by row, so a row must not have another history.
        if tuple(episode.replies[: len(conversation.replies)]) != conversation.replies:
            raise ValueError("replies of conversations must come from `respond` of the same batch.")
        return episode

    def _parse(self, conversation: Conversation, number: int) -> ToolTurn:
        """Parse one completion of a conversation."""
        before = list(self.prompts[conversation.start])
        # Parsers of some models need to know how the turn began.
        for part in conversation.turns[: 2 * number]:
            before += part
        schemas = self.schemas[self.openings[conversation.start].name]
        return parse_completion(self.tokenizer, conversation.completions[number], before, schemas)

    def _begin(self, episode: Episode) -> Any:
        """Return the environment of a conversation; reset it at its first call."""
        if episode.environment is not None or not self.pool.factories:
            return episode.environment
        opening = episode.opening
        environment, observation = self.pool.start(opening.name, opening.arguments)
        # The prompt ends with the observation of the first reset.
        if observation != opening.observation:
            close_environment(environment)
            raise ValueError(
                f"reset must return the same text for the same row, got {shown(observation)} after "
                f"{shown(opening.observation)}. Draw random numbers from the column seed."
            )
        episode.environment = environment
        return environment

    def _play(self, episode: Episode, turn: ToolTurn) -> tuple[list[Message], int]:
        """Make the calls of a completion.

        Return messages with their results, and the number of failed calls.
        """
        if turn.error is not None:
            content = str({"error": turn.error})
            return [{"role": "tool", "name": UNKNOWN_TOOL, "content": content}], 1
        environment = self._begin(episode)
        tools = dict(self.tools)
        if environment is not None:
            # Methods of the environment cannot have the names of shared tools.
            tools |= {name: getattr(environment, name) for name in tool_methods(environment)}
        results = []
        failures = 0
        for name, arguments in turn.calls:
            content, failed = _call_tool(tools, name, arguments)
            results.append({"role": "tool", "name": name, "content": content})
            failures += failed
        return results, failures

    def _reward_of_environment(self, conversation: Conversation, episode: Episode) -> Any:
        """Return the reward of a conversation's environment, or None if it has none."""
        environment = self._begin(episode)
        if environment is None or not hasattr(environment, "get_reward"):
            return None
        # As in TRL, set only if the environment has this attribute.
        if hasattr(environment, "truncated"):
            environment.truncated = conversation.truncated
        return finished(environment.get_reward())

    def _exclude(self, episode: Episode, error: BaseException) -> RewardError:
        """Exclude a conversation whose environment failed; return the error."""
        name = "A tool"
        factory = self.pool.factories.get(episode.opening.name)
        if factory is not None:
            name = f"Environment {getattr(factory, '__name__', factory)}"
        # Messages of a server may be long.
        failure = RewardError(f"{name} {failure_reason(error)}"[:1000])
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
        texts = []
        results = self._episodes[conversation.row].results
        for number, part in enumerate(conversation.turns):
            text = self._text(list(part))
            if number % 2:
                messages = results[number // 2]
                text = "\n".join(message["content"] for message in messages)
            texts.append(text)
        return texts

    def _reward_inputs(self, conversations: Sequence[Conversation]) -> RewardInputs:
        inputs = super()._reward_inputs(conversations)
        environments = None
        if self.pool.factories:
            environments = [self._episodes[each.row].environment for each in conversations]
        messages = [self._messages(conversation) for conversation in conversations]
        return replace(inputs, environments=environments, messages=messages)


def failure_reason(error: BaseException) -> str:
    """Return why a call failed, as the end of a sentence."""
    if isinstance(error, CallFailedError):
        return printable(str(error))
    return f"raised {class_name(error)}: {one_line(error)}"


def _reward_value(value: Any, conversation: Conversation) -> Any:
    """Return the result of `get_reward`.

    A list of numbers becomes step rewards at the end of each completion.
    """
    value = plain_value(value)  # of arrays and tensors too
    if value is None or isinstance(value, StepRewards):
        return value
    if not isinstance(value, list | tuple):
        return finite_number("get_reward", _number(value))
    # Fewer values are allowed: later turns then have none.
    if len(value) > len(conversation.completions):
        completions = pluralize(len(conversation.completions), "completion")
        raise ValueError(
            f"get_reward must return at most one number per completion, got {len(value)} for"
            f" {completions}."
        )
    # Turns alternate completions and replies.
    ends = np.cumsum([len(part) for part in conversation.turns])
    ends_of_completions = ends[::2]
    positions = [max(0, int(end) - 1) for end in ends_of_completions[: len(value)]]
    return StepRewards([_number(each) for each in value], positions)


def _number(value: Any) -> Any:
    """Return a boolean reward as 0 or 1, which checks of numbers refuse; others unchanged."""
    return float(value) if isinstance(value, bool) else value


def _call_tool(tools: Mapping[str, Tool], name: str, arguments: Any) -> tuple[str, bool]:
    """Return the result of a call as text, or the text of its error, and True if there was one.

    The tool is not called if it or one of the arguments does not exist.

    Raises:
        ConnectionError: If the tool raises it: the server of the environment is lost.
    """
    try:
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        if not isinstance(arguments, Mapping):
            raise ValueError(f"The arguments of {name} must be an object, got {shown(arguments)}.")
        parameters = inspect.signature(tools[name]).parameters
        # The schema describes no other arguments, so the model has made them up.
        described = [each for each in parameters if parameters[each].kind not in _MANY]
        unknown = [each for each in arguments if each not in described]
        if unknown:
            raise ValueError(
                f"Tool {name} has no argument {unknown[0]}. Its arguments are:"
                f" {', '.join(described)}."
            )
        result = str(finished(tools[name](**arguments)))
        failed = False
    # A lost server is not the model's fault, so the conversation is excluded.
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 (the model reads it)
        result = str({"error": str(error)})
        failed = True
    return result.encode("utf-8", "replace").decode(), failed
