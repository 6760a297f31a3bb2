"""Whether an environment's episodes are functions of their reset seeds and actions, and whether it is random after."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import gymnasium
import numpy as np

from evogrpo.envs.control.solo.refusals import misshapen
from evogrpo.envs.control.solo.replays import Difference, Moment, first_difference, replay
from evogrpo.envs.control.solo_lanes import SerialLanes
from evogrpo.warnings import warn

MakeToTry = Callable[[bool], "gymnasium.Env[Any, Any]"]
"""(whether it gets other noise after reset) -> a new environment."""
Spaces = tuple["gymnasium.Space[Any]", "gymnasium.Space[Any]"]
"""Of observations and of actions."""

_STARTS = range(1, 9)  # reset seeds: several, since episodes may be too short for chance to show in one
_STEPS = 64  # of all their episodes together: slow environments must not take long
_SHORT_STARTS = (1, 9, 1, 9, 1)  # what is carried over may come from another start, and settle after a few resets
_SHORT = 4
_MOST = 3 * _STEPS + _SHORT * len(_SHORT_STARTS)
_SLOW = 0.1  # seconds a step from which on whoever waits is told for what


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """How an environment is to be played.

    Attributes:
        remake: Every episode gets an environment made anew.
        reseed_noise: Every place in a group gets its own noise after reset.
    """

    remake: bool
    reseed_noise: bool


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What an environment was seen to do.

    Attributes:
        difference: Between two replays of the same starts and actions; None if there was none.
        disturbed: There is none while no other environment runs in this process.
        noisy: Other noise after reset changes what happens; false where replays differ anyway.
    """

    difference: Difference | None
    disturbed: bool
    noisy: bool


def choose_conduct(
    name: str,
    make: MakeToTry,
    spaces: Spaces,
    *,
    remake: bool | None,
    reseed_noise: bool | None,
    by_turns: bool,
) -> Conduct:
    """Try what an environment does, and choose how it is to be played where the caller has not.

    At most 212 steps tell, and twice as many more where two replays of the same differ; what they tell is the same each
    time. Where two differ, one warning says in what, and what was chosen or would help.

    Args:
        name: Of the environment, for the warning.
        make: Makes environments to try.
        spaces: Of one environment.
        remake: What the caller wants; None = true if that makes replays equal, and nothing less does.
        reseed_noise: What the caller wants; None = true if the environment is random after reset.
        by_turns: Whether several environments are going to run in one process, step by step in turns.

    Raises:
        ValueError: If what the environment returns is not of the form that Gymnasium has, does not fit its spaces or is
            not finite.
    """
    try:
        chosen, seen = bool(remake), _try(make, spaces, bool(remake), by_turns, name)
    except Exception as error:
        wrong = None
        with suppress(Exception):  # it fails likewise
            wrong = misshapen(name, lambda: make(False))
        if wrong is None:
            raise
        raise wrong from error
    if seen.difference is not None:
        anew = None if remake else _try(make, spaces, True, by_turns, name)
        mended = anew is not None and anew.difference is None
        warn(_warning(name, seen, mended=mended, given=remake is not None))
        if anew is not None and mended and remake is None:
            chosen, seen = True, anew
    return Conduct(remake=chosen, reseed_noise=seen.noisy if reseed_noise is None else reseed_noise)


def _try(make: MakeToTry, spaces: Spaces, remake: bool, by_turns: bool, name: str) -> _Seen:
    def lanes(noisy: bool) -> SerialLanes:
        seen, acted = spaces
        made = partial(make, noisy)
        return SerialLanes(made, remake=remake, reseed=False, observation_space=seen, action_space=acted)

    with closing(lanes(False)) as plain, closing(lanes(True)) as noisy, _global_generators() as reseed:

        def played(lane: SerialLanes) -> Iterator[Moment]:
            return replay(lane, spaces[1], _STARTS, most_steps=_STEPS, each=_STEPS)

        def run(*replays: Iterator[Moment]) -> list[list[Moment]]:
            reseed()
            return [[moment for moment in each if moment] for each in zip(*zip_longest(*replays), strict=True)]

        short = replay(plain, spaces[1], _SHORT_STARTS, most_steps=_STEPS, each=_SHORT)
        began = time.monotonic()
        (first,) = run(played(plain))
        each = (time.monotonic() - began) / len(first)
        if each >= _SLOW:
            left = each * (_MOST - len(first))
            warn(
                f"{name} takes {each:.2g} s a step: before a run {_MOST} steps are tried, to see whether episodes are "
                f"functions of seeds and actions, which takes {left:.0f} s more; max_seconds counts from then on"
            )
        (later,) = run(short)
        if by_turns:
            again, other = run(played(plain), played(noisy))
        else:
            (again,), (other,) = run(played(plain)), run(played(noisy))
        difference = first_difference(first, later, again)
        if difference is None:
            return _Seen(difference=None, disturbed=False, noisy=first_difference(first, other) is not None)
        alone = by_turns and first_difference(first, later, *run(played(plain))) is None
        return _Seen(difference=difference, disturbed=alone, noisy=False)


@contextmanager
def _global_generators() -> Iterator[Callable[[], None]]:
    """Yield what puts the global generators of Python and numpy into another known state at each call.

    An environment that draws from them is so found out whenever it is tried, and the caller's own numbers stay what
    they were going to be.
    """
    states, calls = (random.getstate(), np.random.get_state()), 0  # noqa: NPY002  # nothing is drawn here

    def reseed() -> None:
        nonlocal calls
        calls += 1
        random.seed(calls)
        np.random.seed(calls)  # noqa: NPY002

    try:
        yield reseed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _warning(name: str, seen: _Seen, *, mended: bool, given: bool) -> str:
    assert seen.difference is not None
    if not seen.difference.steps and not mended:
        what = f"{name} starts differently from one reset seed"
    else:
        what = f"{name} plays differently from one reset seed with the same actions"
    if mended and not given:
        remedy = (
            "every episode gets an environment made anew, where that does not happen. Say remake=True to go on so, or "
            "mend what its reset or a wrapper carries over; remake=False keeps one environment, which a run's numbers "
            "then depend on"
        )
    elif mended:
        remedy = "it carries something over from one episode to the next: leave out remake=False, or mend its reset"
    elif seen.disturbed:
        remedy = (
            "that happens while another one runs in the same process, so they share something: let it draw from its "
            'own self.np_random instead of global generators, or give each its process, vectorization="processes"'
        )
    else:
        remedy = (
            "episodes of a group are compared as if they began alike and met the same, so let reset(seed=...) seed "
            "everything that is random in it: draw from self.np_random, not from numpy's or Python's global generator"
        )
    return f"{what} ({seen.difference}): {remedy}"
