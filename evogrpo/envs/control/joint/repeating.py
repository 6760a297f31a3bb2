"""Whether an episode of a joint environment is a function of its reset seed and its actions: seen by playing twice."""

import reprlib
from collections.abc import Callable, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from evogrpo.envs.control.joint.chance import played_by_chance
from evogrpo.envs.control.joint.joint_lanes import JointLane, JointSeen


@dataclass(frozen=True, kw_only=True)
class Repeating:
    """What came of playing one start twice.

    Attributes:
        remake: Whether every episode is to get an environment made anew.
        words: What differed, and what to do; None if nothing did.
    """

    remake: bool
    words: str | None = None


def repeating(make: Callable[[bool], JointLane], seeds: tuple[int, int], seed: int, remake: bool | None) -> Repeating:
    """Play one start twice and find out whether environments have to be made anew for each episode.

    Args:
        make: Makes a lane, whose environment is made anew for each episode or not.
        seeds: Reset seeds of the start, and of another one that is played in between.
        seed: Names the actions.
        remake: What the caller says; None = nothing.
    """
    found = _difference(make, seeds, seed, remake=bool(remake))
    if found is None:
        return Repeating(remake=bool(remake))
    said = f"is not a function of its reset seed and its actions: of one start played twice, {found}"
    if remake is None and _difference(make, seeds, seed, remake=True) is None:
        return Repeating(
            remake=True,
            words=f"{said}. Where it is made anew nothing differs, so every episode gets one made anew (remake=True)",
        )
    return Repeating(
        remake=bool(remake),
        words=f"{said}. Members are compared by episodes from one start: let the environment draw from a generator "
        "that reset(seed=...) makes, and forget at reset what came before",
    )


def _difference(make: Callable[[bool], JointLane], seeds: tuple[int, int], seed: int, *, remake: bool) -> str | None:
    with closing(make(remake)) as lane:
        first, _, again = (
            [_noted(seen) for seen in played_by_chance(lane, start, seed, replica)]
            for start, replica in ((seeds[0], 0), (seeds[1], 1), (seeds[0], 0))
        )
    for step, (one, other) in enumerate(zip(first, again, strict=False)):
        for what in one:
            for agent in {**one[what], **other[what]}:
                values = one[what].get(agent), other[what].get(agent)
                if not _equal(*values):
                    steps = "at its start" if step == 0 else f"after {step} steps"
                    return f"{what} of {agent} {steps} was {_short(values[0])} and then {_short(values[1])}"
    return None


def _noted(seen: JointSeen) -> dict[str, Mapping[str, Any]]:
    ends = dict.fromkeys(seen.terminated, "terminated") | dict.fromkeys(seen.truncated, "truncated")
    # Copied: an environment may go on writing into what it has shown.
    return {"the observation": deepcopy(dict(seen.observations)), "the reward": dict(seen.rewards), "the end": ends}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if one is None or other is None:
        return one is other
    numbers = np.asarray(one), np.asarray(other)
    return np.array_equal(*numbers, equal_nan=all(each.dtype.kind in "fc" for each in numbers))


def _short(value: Any) -> str:
    return "none" if value is None else reprlib.repr(value.tolist() if isinstance(value, np.ndarray) else value)
