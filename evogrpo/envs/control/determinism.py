"""Determinism check: is an episode a function of its reset seed and its actions?"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.actions import random_action, to_environment
from evogrpo.envs.control.making import api_error
from evogrpo.envs.control.rollout import check_finite, not_finite
from evogrpo.envs.control.vector_env import DEFAULT_POLICY, PolicyInput, SerialVectorEnv, SingleAgentVectorEnv
from evogrpo.randomness import generator
from evogrpo.warnings import warn


class Moment(NamedTuple):
    """What a reset or a step brought.

    Attributes:
        seed: The episode's reset seed.
        steps: Steps from the reset.
        parts: Arrays by what they are, each of one lane.
    """

    seed: int
    steps: int
    parts: dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two replays first part.

    Attributes:
        what: Which number differs, such as "reward" or "observation[3]".
        steps: Steps from the reset.
        values: What it was in either.
    """

    what: str
    steps: int
    values: tuple[float, float]

    def __str__(self) -> str:
        when = "right after reset" if not self.steps else f"after {self.steps} step{'' if self.steps == 1 else 's'}"
        return f"{self.what} {when} was {self.values[0]:.9g} and then {self.values[1]:.9g}"


def replay(
    lanes: SingleAgentVectorEnv,
    action_space: "gymnasium.Space[Any]",
    seeds: Sequence[int],
    *,
    most_steps: int,
    each: int,
) -> Iterator[Moment]:
    """Play an episode from each reset seed, one after the other in one lane, until there were enough steps in all.

    Args:
        lanes: Where they run; all free.
        action_space: Of one environment. The actions of an episode are drawn from the legal ones and named by its seed,
            so from one seed the same ones are taken as long as the same is seen.
        seeds: Reset seeds.
        most_steps: Of all episodes together.
        each: Steps after which an episode is left.

    Raises:
        ValueError: If what the environment gives does not fit its spaces or is not finite.
    """
    left = most_steps
    for seed in seeds:
        rng = generator(0, "actions of replays", seed)
        lanes.add([seed], [0])
        seen, steps, over = lanes.seen()[DEFAULT_POLICY], 0, False
        yield Moment(seed, steps, _shown(seen, seed, steps))
        while left and steps < each and not over:
            action = random_action(action_space, seen.action_masks, rng)
            stepped = lanes.step({DEFAULT_POLICY: to_environment(action_space, action)})
            for _, _, reward in stepped.not_finite():
                raise not_finite("reward", reward, "", seed, steps)
            seen, steps, left, over = stepped.seen, steps + 1, left - 1, bool(stepped.ended[0])
            parts = {"reward": stepped.rewards, "terminated": stepped.terminated, "truncated": stepped.truncated}
            # Nobody acts on the last observation.
            yield Moment(seed, steps, parts if over else {**parts, **_shown(seen, seed, steps)})
        lanes.select(np.empty(0, dtype=np.int64))
        if not left:
            return


def first_difference(*replays: Iterable[Moment]) -> Difference | None:
    """Return where an episode first differs from the first one with its seed; None if none does."""
    known: dict[tuple[int, int], dict[str, NDArray[Any]]] = {}
    for seed, steps, parts in chain(*replays):
        for what, value in known.setdefault((seed, steps), parts).items():
            again = parts.get(what)
            if again is None:  # one that was masked is not
                return Difference(what=f"whether there is an {what}", steps=steps, values=(1.0, 0.0))
            apart = value != again
            if apart.any():
                place = tuple(np.argwhere(apart)[0])
                entry = f"[{', '.join(map(str, place[1:]))}]" if len(place) > 1 else ""
                values = (float(value[place]), float(again[place]))
                return Difference(what=f"{what}{entry}", steps=steps, values=values)
    return None


def _shown(seen: PolicyInput, seed: int, steps: int) -> dict[str, NDArray[Any]]:
    check_finite(seen, np.array([seed]), np.array([steps]))
    several = len(seen.observations) > 1
    leaves = enumerate(seen.observations, 1)
    parts = {f"observation (part {number})" if several else "observation": leaf for number, leaf in leaves}
    return parts if seen.action_masks is None else {**parts, "action mask": seen.action_masks}


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
        recreate_env: Every episode gets an environment made anew.
        reseed_noise: Every place in a group gets its own noise after reset.
    """

    recreate_env: bool
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
    recreate_env: bool | None,
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
        recreate_env: What the caller wants; None = true if that makes replays equal, and nothing less does.
        reseed_noise: What the caller wants; None = true if the environment is random after reset.
        by_turns: Whether several environments are going to run in one process, step by step in turns.

    Raises:
        ValueError: If what the environment returns is not of the form that Gymnasium has, does not fit its spaces or is
            not finite.
    """
    try:
        chosen, seen = bool(recreate_env), _try(make, spaces, bool(recreate_env), by_turns, name)
    except Exception as error:
        wrong = None
        with suppress(Exception):  # it fails likewise
            wrong = api_error(name, lambda: make(False))
        if wrong is None:
            raise
        raise wrong from error
    if seen.difference is not None:
        anew = None if recreate_env else _try(make, spaces, True, by_turns, name)
        mended = anew is not None and anew.difference is None
        warn(_warning(name, seen, mended=mended, given=recreate_env is not None))
        if anew is not None and mended and recreate_env is None:
            chosen, seen = True, anew
    return Conduct(recreate_env=chosen, reseed_noise=seen.noisy if reseed_noise is None else reseed_noise)


def _try(make: MakeToTry, spaces: Spaces, recreate_env: bool, by_turns: bool, name: str) -> _Seen:
    def lanes(noisy: bool) -> SerialVectorEnv:
        seen, acted = spaces
        made = partial(make, noisy)
        return SerialVectorEnv(
            made, recreate_env=recreate_env, reseed=False, observation_space=seen, action_space=acted
        )

    with closing(lanes(False)) as plain, closing(lanes(True)) as noisy, _global_generators() as reseed:

        def played(lane: SerialVectorEnv) -> Iterator[Moment]:
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
            "every episode gets a new environment, where that does not happen. Say recreate_env=True to go on so, or "
            "mend what its reset or a wrapper carries over; recreate_env=False keeps one environment"
        )
    elif mended:
        remedy = "it carries something over between episodes: leave out recreate_env=False, or mend its reset"
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
