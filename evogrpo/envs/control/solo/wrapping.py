"""Wrappers around environments: checked before anything is made, put on in order, and told apart by what they do."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium

from evogrpo.config.checks import unknown_name_error
from evogrpo.envs.control.solo.refusals import refuse_made
from evogrpo.envs.identity import canonical, code_hash

Wrap = Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]
"""A class of `gymnasium.Wrapper`, or anything else that takes an environment and returns it wrapped."""


def check_wrappers(wrappers: object) -> None:
    """Raise ValueError unless these are wrappers in a sequence, each of which needs an environment and no more."""
    if isinstance(wrappers, str) or not isinstance(wrappers, Sequence):
        raise ValueError(f"wrappers must be a list of wrappers, got {wrappers!r:.80}: write [...] around it")
    for wrap in wrappers:
        check_wrapper(wrap, repr(wrap) if isinstance(wrap, str) else name_of(wrap))


def check_wrapper(wrap: object, name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError for what is no wrapper, or cannot be called with an environment and these options alone.

    Args:
        wrap: A class, or a callable that takes an environment.
        name: What it is called in messages.
        options: Its further keyword arguments.
    """
    if not callable(wrap) or (isinstance(wrap, type) and not issubclass(wrap, gymnasium.Wrapper)):
        what = "a class that is none" if isinstance(wrap, type) else type(wrap).__name__
        instead = ": in Python give the class itself, such as gymnasium.wrappers.FlattenObservation"
        raise ValueError(
            f"wrapper {name} must be a class of gymnasium.Wrapper, got {what}{instead if isinstance(wrap, str) else ''}"
        )
    try:
        parameters = inspect.signature(wrap).parameters
    except (TypeError, ValueError):  # written in C
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {key: each for key, each in parameters.items() if each.kind in kinds}
    own = list(named)[1:]  # the first is the environment
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for option in options or {}:
            if option not in own:
                raise unknown_name_error(f"option of wrapper {name}:", option, own)
    missing = [key for key in own if named[key].default is inspect.Parameter.empty and key not in (options or {})]
    if missing:
        given = ", ".join(f"{key}: ..." for key in missing)
        raise ValueError(
            f"wrapper {name} needs {' and '.join(missing)}: in a configuration, or behind the command, write "
            f"task.wrappers=[{{name: {name}, options: {{{given}}}}}], in Python functools.partial(...)"
        )


def put_on(env: "gymnasium.Env[Any, Any]", wrappers: Sequence[Wrap]) -> "gymnasium.Env[Any, Any]":
    """Return an environment in its wrappers, the first one innermost.

    Raises:
        ValueError: If one does not take what it is put around, or returns no environment.
    """
    for wrap in wrappers:
        try:
            wrapped = wrap(env)
        except Exception as error:  # whatever strangers' wrappers raise, often without words
            env.close()
            raise ValueError(
                f"wrapper {name_of(wrap)} does not take {env}: {type(error).__name__}: {str(error) or 'without words'}"
            ) from error
        refuse_made(wrapped)
        env = wrapped
    return env


def name_of(wrap: object) -> str:
    """Return what a wrapper is called."""
    inner = wrap.func if isinstance(wrap, functools.partial) else wrap
    return str(getattr(inner, "__name__", type(inner).__name__))


def identity_of(wrappers: Sequence[Wrap]) -> str:
    """Return which wrappers these are and what they do, in a short text."""
    return "; ".join(
        f"{name_of(wrap)}{f' {canonical(wrap.keywords)}' if isinstance(wrap, functools.partial) else ''}, "
        f"code {code_hash(wrap)}"
        for wrap in wrappers
    )
