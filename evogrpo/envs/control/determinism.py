"""Determinism check: an episode must be a function of its reset seed and its actions."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.data import DEFAULT_POLICY
from evogrpo.envs.control.actions import mask_sizes, policy_action_shape, to_environment
from evogrpo.envs.control.making import MakeEnv
from evogrpo.envs.control.rollout import check_finite, check_finite_rewards
from evogrpo.envs.control.vector_env import PolicyInput, SerialVectorEnv, SingleAgentVectorEnv
from evogrpo.randomness import generator
from evogrpo.warnings import warn

MakeTrialEnv = Callable[[bool], "gymnasium.Env[Any, Any]"]
"""(whether to replace the noise after reset) -> a new environment."""
Spaces = tuple["gymnasium.Space[Any]", "gymnasium.Space[Any]"]
"""Observation space and action space."""

_SEEDS = range(1, 9)  # several, since randomness may not show in a single short episode
_STEPS = 64  # of all these episodes together, since environments may be slow
_SHORT_SEEDS = (1, 9, 1, 9, 1)  # state carried over may depend on the previous start, and settle after a few resets
_SHORT = 4
_MOST = 3 * _STEPS + _SHORT * len(_SHORT_SEEDS)
_USABLE_BOUND = 1e6  # bounds beyond this are treated as no bounds
_SLOW = 0.1  # seconds per step above which the duration of the check is announced


class Moment(NamedTuple):
    """Result of a reset or a step.

    Attributes:
        seed: Reset seed of the episode.
        steps: Steps since the reset.
        parts: Values by name, each `[1, ...]`.
    """

    seed: int
    steps: int
    parts: dict[str, NDArray[Any]]


def _api_error(name: str, make: MakeEnv) -> ValueError | None:
    """Return the error of an environment whose `reset` or `step` has another form than Gymnasium's; None if none has.

    Called after a failure, because wrappers fail on such results with unclear errors.

    Args:
        name: Name of the environment.
        make: Creates it.
    """
    with closing(make()) as made:
        env: Any = made.unwrapped
        try:
            result = env.reset(seed=1)
        except TypeError as error:
            return ValueError(f"{name} must accept reset(seed=...): {error}")
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            return ValueError(f"{name} must return (observation, info) from reset(), got {_form(result)}")
        env.action_space.seed(0)
        result = env.step(env.action_space.sample())
        if isinstance(result, tuple) and len(result) == 5:
            return None
        old = ". Replace the done flag of old Gym by terminated and truncated."
        return ValueError(
            f"{name} must return (observation, reward, terminated, truncated, info) from step(), got {_form(result)}"
            f"{old if isinstance(result, tuple) and len(result) == 4 else ''}"
        )


def _form(result: object) -> str:
    if not isinstance(result, tuple):
        return type(result).__name__
    return f"a tuple of {len(result)} ({', '.join(type(part).__name__ for part in result)})"


def check_determinism(
    name: str,
    make: MakeTrialEnv,
    spaces: Spaces,
    *,
    recreate_env: bool | None,
    reseed_noise: bool | None,
    interleaved: bool,
) -> tuple[bool, bool]:
    """Replay a few episodes; return the values of `recreate_env` and `reseed_noise` to use.

    Takes at most 212 steps, and twice as many more if replays differ. The result is the same each time. If replays
    differ, one warning says how, and what was chosen or would help.

    Args:
        name: Name of the environment.
        make: Creates environments.
        spaces: Spaces of one environment.
        recreate_env: Value set by the caller; None = True if only a new environment per episode makes replays equal.
        reseed_noise: Value set by the caller; None = True if the environment is random after reset.
        interleaved: Whether several environments will be stepped alternately in one process.

    Raises:
        ValueError: If the environment returns another form than Gymnasium's, or values that do not fit its spaces or
            are not finite.
    """
    chosen = bool(recreate_env)
    try:
        difference, noisy, disturbed = _compare_replays(name, make, spaces, chosen, interleaved)
    except Exception as error:
        form_error = None
        with suppress(Exception):  # the first error is the one to report
            form_error = _api_error(name, lambda: make(False))
        if form_error is None:
            raise
        raise form_error from error
    if difference is not None:
        fixed = False
        if not recreate_env:
            again, noisy_again, _ = _compare_replays(name, make, spaces, True, interleaved)
            fixed = again is None
            if fixed and recreate_env is None:
                chosen, noisy = True, noisy_again
        if chosen and not recreate_env:
            fix = "A new environment per episode avoids this. Set recreate_env=True to confirm, or fix its reset()."
        elif fixed:
            fix = "State is carried over between episodes. Leave out recreate_env=False, or fix its reset()."
        elif disturbed:
            fix = (
                "This occurs only while another one runs in the same process. Draw random numbers from "
                'self.np_random, or set vectorization="processes".'
            )
        else:
            fix = (
                "Let reset(seed=...) seed all of its randomness: draw from self.np_random, not from a global generator."
            )
        warn(f"{name} is not deterministic: with equal reset seed and actions, {difference}. {fix}")
    return chosen, noisy if reseed_noise is None else reseed_noise


def _compare_replays(
    name: str, make: MakeTrialEnv, spaces: Spaces, recreate_env: bool, interleaved: bool
) -> tuple[str | None, bool, bool]:
    """Return the first difference between replays, whether noise matters, and whether other environments disturb."""

    def create(noisy: bool) -> SerialVectorEnv:
        space, action_space = spaces
        options = {"observation_space": space, "action_space": action_space}
        return SerialVectorEnv(partial(make, noisy), recreate_env=recreate_env, reseed=False, **options)

    with closing(create(False)) as plain, closing(create(True)) as noisy, _global_generators() as reseed:

        def played(env: SerialVectorEnv) -> Iterator[Moment]:
            return _replay(env, spaces[1], _SEEDS, most_steps=_STEPS, steps_each=_STEPS)

        def run(*replays: Iterator[Moment]) -> list[list[Moment]]:
            """Run replays alternately, step by step."""
            reseed()
            return [[moment for moment in each if moment] for each in zip(*zip_longest(*replays), strict=True)]

        short = _replay(plain, spaces[1], _SHORT_SEEDS, most_steps=_STEPS, steps_each=_SHORT)
        start = time.monotonic()
        (first,) = run(played(plain))
        seconds = (time.monotonic() - start) / len(first)
        if seconds >= _SLOW:
            warn(
                f"{name} takes {seconds:.2g} s per step. Checking that it is deterministic takes {_MOST} steps, "
                f"{seconds * (_MOST - len(first)):.0f} s more; they do not count for max_seconds."
            )
        (later,) = run(short)
        if interleaved:
            again, other = run(played(plain), played(noisy))
        else:
            (again,), (other,) = run(played(plain)), run(played(noisy))
        difference = _first_difference(first, later, again)
        if difference is None:
            return None, _first_difference(first, other) is not None, False
        alone = interleaved and _first_difference(first, later, *run(played(plain))) is None
        return difference, False, alone


def _replay(
    env: SingleAgentVectorEnv,
    action_space: "gymnasium.Space[Any]",
    seeds: Sequence[int],
    *,
    most_steps: int,
    steps_each: int,
) -> Iterator[Moment]:
    """Play one episode after another with actions named by the seed, `most_steps` in all, `steps_each` per episode."""
    left = most_steps
    for seed in seeds:
        rng = generator(0, "actions of replays", seed)
        env.add([seed], [0])
        inputs, steps, over = env.latest, 0, False
        yield Moment(seed, steps, _values(inputs, seed, steps))
        while left and steps < steps_each and not over:
            action = random_action(action_space, inputs.action_masks, rng)
            step = env.step({DEFAULT_POLICY: to_environment(action_space, action)})
            check_finite_rewards(step, np.array([seed]), np.array([steps]))
            inputs, steps, left, over = env.latest, steps + 1, left - 1, bool(env.finished()[0])
            parts = {"reward": step.rewards, "terminated": step.terminated, "truncated": step.truncated}
            # No action depends on the last observation.
            yield Moment(seed, steps, parts if over else {**parts, **_values(inputs, seed, steps)})
        env.select(np.empty(0, dtype=np.int64))
        if not left:
            return


def _values(inputs: PolicyInput, seed: int, steps: int) -> dict[str, NDArray[Any]]:
    check_finite(inputs, np.array([seed]), np.array([steps]))
    several = len(inputs.observations) > 1
    leaves = enumerate(inputs.observations, 1)
    parts = {f"observation (part {number})" if several else "observation": leaf for number, leaf in leaves}
    return parts if inputs.action_masks is None else {**parts, "action mask": inputs.action_masks}


def _first_difference(*replays: Iterable[Moment]) -> str | None:
    """Describe the first difference between episodes with the same seed; None if there is none."""
    known: dict[tuple[int, int], dict[str, NDArray[Any]]] = {}
    for seed, steps, parts in chain(*replays):
        when = f"after {steps} step{'' if steps == 1 else 's'}" if steps else "right after reset"
        for name, value in known.setdefault((seed, steps), parts).items():
            again = parts.get(name)
            if again is None:
                return f"{name} {when} was present and then missing"
            differs = value != again
            if differs.any():
                place = tuple(np.argwhere(differs)[0])
                entry = f"[{', '.join(map(str, place[1:]))}]" if len(place) > 1 else ""
                return f"{name}{entry} {when} was {float(value[place]):.9g} and then {float(again[place]):.9g}"
    return None


@contextmanager
def _global_generators() -> Iterator[Callable[[], None]]:
    """Yield a function that puts the global generators of Python and numpy into another known state at each call.

    Environments that draw from them are so detected reliably. The caller's states are restored.
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


def random_action(space: spaces.Space[Any], mask: NDArray[Any] | None, rng: np.random.Generator) -> NDArray[Any]:
    """Return one random action `[1, ...]` in a policy's form, uniform over the legal values or within the bounds.

    Args:
        space: Action space of one environment.
        mask: `[1, k]` from `legal_actions`; None = all are legal.
        rng: Random generator. Entries of a Box without usable bounds are standard normal.
    """
    match space:
        case spaces.Box():
            low, high = np.float64(space.low), np.float64(space.high)
            bounded = (np.abs(low) < _USABLE_BOUND) & (np.abs(high) < _USABLE_BOUND)
            within = rng.uniform(np.where(bounded, low, 0.0), np.where(bounded, high, 1.0))
            chosen = np.where(bounded, within, rng.standard_normal(low.shape))
        case spaces.MultiBinary():
            chosen = rng.integers(2, size=policy_action_shape(space))
        case _:
            sizes = mask_sizes(space)
            flags = np.ones(sum(sizes), np.bool_) if mask is None else mask[0]
            parts = np.split(flags, np.cumsum(sizes)[:-1])
            values = [rng.choice(np.flatnonzero(part)) for part in parts]
            chosen = np.reshape(np.array(values), policy_action_shape(space))
    return chosen[None].astype(space.dtype)
