"""What is no single environment of one agent, as Gymnasium has them, is refused with what to give instead."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any

import gymnasium

_STEP = "(observation, reward, terminated, truncated, info)"


def refuse_given(env: object) -> None:
    """Raise ValueError unless a caller's environment is an id or a callable."""
    _refuse_several(env)
    if isinstance(env, str) or (callable(env) and not isinstance(env, gymnasium.Env)):
        return
    known = _id_of(env)
    instead = f"give {known!r}, the class or a function instead" if known else "give the class or a function instead"
    raise ValueError(
        f"env must be the id of an environment or a callable that makes one, got {type(env).__name__}: {instead}"
    )


def refuse_made(made: object) -> None:
    """Raise ValueError unless what a callable returned is one environment with spaces."""
    try:
        _refuse_several(made)
    except ValueError:
        with suppress(Exception):  # nobody else will, and it may have processes
            made.close()  # type: ignore[attr-defined]  # whatever it is
        raise
    name = type(made).__name__
    if not isinstance(made, gymnasium.Env):
        remedy = ""
        if hasattr(made, "possible_agents") or hasattr(made, "agents"):
            remedy = ": environments of several agents are played through evogrpo.PettingZooGroups"
        elif hasattr(made, "step") and hasattr(made, "reset"):
            remedy = (
                ": let its class inherit from gymnasium.Env, or wrap one of the old Gym with the package shimmy, as "
                'gymnasium.make("GymV21Environment-v0", env=...)'
            )
        raise ValueError(f"an environment factory must return a gymnasium.Env, got {name}{remedy}")
    for kind in ("observation_space", "action_space"):
        space = getattr(made, kind, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(f"{name}.{kind} must be a space of gymnasium.spaces, got {type(space).__name__}: set it")


def misshapen(name: str, make: Callable[[], "gymnasium.Env[Any, Any]"]) -> ValueError | None:
    """Return what is wrong with the form of what an environment returns; None if it is as Gymnasium has it.

    Asked once something went wrong, as wrappers fail over such returns before anybody else sees them.

    Args:
        name: Of the environment.
        make: Makes one.
    """
    with closing(make()) as made:
        env: Any = made.unwrapped
        try:
            given = env.reset(seed=1)
        except TypeError as error:
            return ValueError(
                f"{name} must take its seed as reset(seed=...), as gymnasium.Env.reset does, but: {error}"
            )
        if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
            return ValueError(f"{name} must return (observation, info) from reset(), {_got(given)}")
        env.action_space.seed(0)
        given = env.step(env.action_space.sample())
        if isinstance(given, tuple) and len(given) == 5:
            return None
        old = " as in the old Gym: say whether an episode came to its own end or was cut off, instead of done" * (
            isinstance(given, tuple) and len(given) == 4
        )
        return ValueError(f"{name} must return {_STEP} from step(), {_got(given)}{old}")


def _got(given: object) -> str:
    if not isinstance(given, tuple):
        return f"got {type(given).__name__}"
    return f"got a tuple of {len(given)} ({', '.join(type(part).__name__ for part in given)})"


def _refuse_several(env: object) -> None:
    """Refuse environments that step several episodes at a time, of Gymnasium, Stable-Baselines3 or others."""
    if isinstance(env, type):
        return
    count = getattr(env, "num_envs", None)
    vector = isinstance(env, gymnasium.vector.VectorEnv) or (count is not None and hasattr(env, "step_async"))
    if not vector and not (isinstance(env, gymnasium.Env) and isinstance(count, int) and count > 1):
        return
    known = _id_of(env)
    raise ValueError(
        f"env must be one environment, got a vector of {count} ({type(env).__name__}): give "
        f"{repr(known) if known else 'the id'} or a callable that makes one, and lanes= for how many are "
        "played at a time"
    )


def _id_of(env: Any) -> str | None:
    """Return the id that an environment, or the first of several, was registered under."""
    with suppress(Exception):  # strangers' attributes
        spec = getattr(env, "spec", None) or env.envs[0].spec
        return str(spec.id)
    return None
