"""Check by random play that episodes are functions of reset seed and actions."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from evogrpo.envs.control.conversion import mask_sizes, masks_of_parts, to_environment
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.envs.control.rollout import check_finite, check_finite_rewards
from evogrpo.envs.control.single_env import NO_OPTIONS, RESET_RESULTS, STEP_RESULTS, Options
from evogrpo.envs.control.vector_env import PolicyInput, VectorEnv, VectorStep
from evogrpo.randomness import generator
from evogrpo.spaces import action_form, leaf_spaces
from evogrpo.text import class_name, pluralize, shown, user_line
from evogrpo.warnings import warn

MakeTrialEnv = Callable[[bool, bool], VectorEnv]
"""(create a new environment for every episode, replace the noise after reset) -> a vector
environment.
"""

Values = dict[str, Any]
"""Numbers by name: observations, masks, rewards and ends after a reset or a step."""

ReplayStep = tuple[int, int, Values]
"""Reset seed, number of steps so far, and the values after them."""

_SEEDS = range(1, 9)  # several, since randomness may not show in a single short episode
_STEPS = 64  # of all episodes of a replay together, since environments may be slow
# State carried over may depend on the previous start, and settle after a few resets.
_SHORT_SEEDS = (
    1,
    9,
    1,
    9,
    1,
)
_SHORT_STEPS = 4
_MASK = "action mask"  # name of a mask among the values
_COMPONENT = "component "  # names of reward components among the values begin with it
_USABLE_BOUND = 1e6  # bounds beyond this are treated as no bounds


# ---- random play


def play_randomly(
    env: VectorEnv,
    mapping: PolicyMapping,
    seed: int,
    rng: np.random.Generator,
    max_steps: int,
    options: Options,
) -> Iterator[Values]:
    """Play an episode with random legal actions.

    Yield the values after the reset and after each step.

    Args:
        env: Vector environment without running episodes.
        mapping: Maps agents to policies.
        seed: Reset seed.
        rng: Generator of the actions.
        max_steps: Maximum number of steps.
        options: Options of the reset.

    Raises:
        ValueError: If an observation or a reward is not finite.
    """
    env.add([seed], [0], [options])
    step: VectorStep | None = None
    for steps in range(max_steps + 1):  # 0 is the reset
        # 1. Results of the last step.
        finished = bool(env.finished()[0])
        values = Values()
        actions = dict[str, NDArray[Any]]()
        if step is not None:
            seeds = np.array([seed])
            check_finite_rewards(step, seeds, np.array([steps - 1]))
            columns = [
                ("reward", step.rewards),
                ("terminated", step.terminated),
                ("truncated", step.truncated),
            ]
            if env.components is not None:
                terms = env.components.terms(step, seeds, np.array([steps - 1]))
                # The first term is the reward of the environment.
                for component, column in zip(env.components.components, terms.T[1:], strict=True):
                    columns.append((f"{_COMPONENT}{component}", column))
            for row, agent in enumerate(step.agents or ("",)):
                for name, column in columns:
                    values[_name(name, agent)] = column[row]
        # 2. Observations, and a random action for each agent. The last observation of an episode,
        #    which no action follows, is not compared.
        inputs_by_policy: Mapping[str, PolicyInput] = {}
        if not finished:
            inputs_by_policy = env.inputs(mapping)
        for policy, inputs in inputs_by_policy.items():
            space = mapping.specs[policy].action_space
            rows = len(inputs.observations[0])
            masks = inputs.action_masks
            check_finite(inputs, np.full(rows, seed), np.full(rows, steps))
            for row, agent in enumerate(inputs.agents or ("",)):
                for number, leaf in enumerate(inputs.observations, 1):
                    part = f" (part {number})" if len(inputs.observations) > 1 else ""
                    values[_name(f"observation{part}", agent)] = leaf[row]
                if masks is not None:
                    values[_name(_MASK, agent)] = masks[row]
            drawn = []
            for row in range(rows):
                mask = None if masks is None else masks[row]
                drawn.append(random_action(space, mask, rng))
            actions[policy] = to_environment(space, np.stack(drawn))
        # 3. Yield the values and step the environment.
        yield values
        if finished or steps == max_steps:
            break
        step = env.step(actions)
    env.select(np.empty(0, dtype=np.int64))  # remove the episode


def _name(what: str, agent: str) -> str:
    return f"{what} of {agent}" if agent else what


def random_action(
    space: spaces.Space[Any], mask: NDArray[Any] | None, rng: np.random.Generator
) -> NDArray[Any]:
    """Return a random action in a policy's form, uniform over legal values or within the bounds.

    Args:
        space: Action space.
        mask: `[k]` legal actions, from `legal_actions`; None = all are legal.
        rng: Random generator. Entries of a Box without usable bounds are standard normal.
    """
    match space:
        case spaces.Box():
            # Within the bounds of an entry, or around 0 where it has none.
            low = np.float64(space.low)
            high = np.float64(space.high)
            bounded = (np.abs(low) < _USABLE_BOUND) & (np.abs(high) < _USABLE_BOUND)
            least = np.where(bounded, low, 0.0)
            most = np.where(bounded, high, 1.0)
            within = rng.uniform(least, most)
            chosen = np.where(bounded, within, rng.standard_normal(low.shape))
        case spaces.Dict() | spaces.Tuple():
            pairs = zip(leaf_spaces(space), masks_of_parts(space, mask), strict=True)
            drawn = [random_action(leaf, flags, rng).ravel() for leaf, flags in pairs]
            chosen = np.concatenate(drawn)
        case spaces.MultiBinary():
            chosen = rng.integers(2, size=(space.shape or ()))
        case _:  # Discrete and MultiDiscrete: one legal value of each choice
            sizes = mask_sizes(space)
            flags = np.ones(sum(sizes), np.bool_) if mask is None else mask
            parts = np.split(flags, np.cumsum(sizes)[:-1])
            values = [rng.choice(np.flatnonzero(part)) for part in parts]
            chosen = np.reshape(np.array(values), (space.shape or ()))
    return chosen.astype(action_form(space).dtype)


# ---- determinism


def check_determinism(
    name: str,
    make: MakeTrialEnv,
    mapping: PolicyMapping,
    *,
    recreate_env: bool | None,
    interleaved: bool = True,
) -> tuple[bool, bool]:
    """Replay a few episodes.

    Return the value of `recreate_env` to use, and True if resets leave noise.

    Takes at most 212 steps, and twice as many if replays differ. The result is the same each time.
    If replays differ, warn with the first difference, and the chosen `recreate_env` or a remedy.
    Warn also if only reward components differ.

    Args:
        name: Name of the environment.
        make: Creates environments.
        mapping: Maps agents to policies.
        recreate_env: Value set by the caller; None = True if only a new environment per episode
            makes replays equal.
        interleaved: Several environments will be stepped alternately in one process.

    Raises:
        ValueError: If results have another form than Gymnasium's or PettingZoo's, do not fit the
            spaces or are not finite.
    """
    # 1. Replay with the caller's setting.
    chosen = bool(recreate_env)
    try:
        difference, noisy, unmasked, impure = _compare_replays(make, mapping, chosen, interleaved)
    except Exception as error:  # user code may raise any
        raise _failure(name, error) from error
    if unmasked is not None:
        warn(
            f"{name} has action masks, but none {unmasked}, where all actions count as legal."
            " Return a mask from reset and every step."
        )
    if difference is None:
        if impure is not None:
            warn(
                f"{name}: with equal reset seed and actions, {impure}. A component must follow from"
                " its arguments alone. It may keep nothing between calls, as episodes are played"
                " side by side, and draw no random numbers."
            )
        return chosen, noisy
    # 2. Replay with a new environment per episode, unless that is the setting.
    again: str | None = difference
    noisy_again = noisy
    if not recreate_env:
        again, noisy_again, _, _ = _compare_replays(make, mapping, True, interleaved)
    # 3. Warn with a remedy.
    fix = (
        "Let reset(seed=...) seed all of its randomness and discard the previous episode: draw from"
        " self.np_random, not from a global generator. If other environments in the same process"
        ' disturb it, set vectorization="processes".'
    )
    if again is None and recreate_env is None:
        chosen = True
        noisy = noisy_again
        fix = (
            "A new environment per episode avoids this. Set recreate_env=True to confirm, or fix"
            " its reset()."
        )
    elif again is None:
        fix = (
            "State is carried over between episodes. Leave out recreate_env=False, or fix its"
            " reset()."
        )
    warn(f"{name} is not deterministic: with equal reset seed and actions, {difference}. {fix}")
    return chosen, noisy


def warn_if_options_are_equal(
    name: str, env: VectorEnv, mapping: PolicyMapping, one: Options, other: Options
) -> bool:
    """Warn if episodes of equal seeds and actions are equal with different options of reset.

    Return True if they are. Takes at most 128 steps.

    Args:
        name: Name of the environment.
        env: Vector environment without running episodes.
        mapping: Maps agents to policies.
        one: Options.
        other: Other values of the same options.

    Raises:
        ValueError: If an episode fails.
    """
    try:
        first = list(_replay(env, mapping, _SEEDS, _STEPS, one))
        second = list(_replay(env, mapping, _SEEDS, _STEPS, other))
    except Exception as error:  # user code may raise any
        raise _failure(name, error) from error
    equal = _first_difference(first, second) is None
    if equal:
        warn(
            f"{name}: the reset options {shown(dict(one))} and {shown(dict(other))} make no"
            f" difference in {len(first)} observations of random play. Check that the"
            " environment uses them."
        )
    return equal


def _failure(name: str, error: Exception) -> ValueError:
    """Return the error for an environment that failed."""
    reason = f"{class_name(error)}: {error}"
    # Checks of this library end with a period and name their own fix. Errors of Python may come
    # from results in another form.
    if not reason.endswith((".", "?")):
        reason += user_line(error)
        if isinstance(error, TypeError | ValueError | AttributeError | LookupError):
            reason += f". {RESET_RESULTS}, {STEP_RESULTS}."
    return ValueError(f"{name} failed in a few steps of random play: {reason}")


def _compare_replays(
    make: MakeTrialEnv, mapping: PolicyMapping, recreate_env: bool, interleaved: bool
) -> tuple[str | None, bool, str | None, str | None]:
    """Play episodes of the same seeds and actions several times, and compare them.

    Args:
        make: Creates environments.
        mapping: Maps agents to policies.
        recreate_env: Create a new environment for every episode.
        interleaved: Step two environments alternately, to find state that they share.

    Returns:
        The first difference between replays, or None; True if replays are equal, but differ once
        the noise after reset is replaced; the first time at which an environment with action masks
        has none, or None; and the first difference between reward components, or None.
    """
    with (
        closing(make(recreate_env, False)) as plain,
        closing(make(recreate_env, True)) as noisy,
        _global_generators() as reseed,
    ):

        def run(*replays: Iterator[ReplayStep]) -> list[list[ReplayStep]]:
            """Run replays alternately, step by step; return the steps of each."""
            reseed()
            played: list[list[ReplayStep]] = [[] for _ in replays]
            for steps in zip_longest(*replays):
                for number, step in enumerate(steps):
                    if step is not None:  # None after the end of a replay
                        played[number].append(step)
            return played

        # 1. Play `_SEEDS`, then short episodes, which may leave state behind.
        (first,) = run(_replay(plain, mapping, _SEEDS, _STEPS))
        (short,) = run(_replay(plain, mapping, _SHORT_SEEDS, _SHORT_STEPS))
        # 2. Play `_SEEDS` again, once with the same and once with replaced noise after reset.
        same = _replay(plain, mapping, _SEEDS, _STEPS)
        replaced = _replay(noisy, mapping, _SEEDS, _STEPS)
        if interleaved:
            again, with_noise = run(same, replaced)
        else:
            (again,) = run(same)
            (with_noise,) = run(replaced)
    difference = _first_difference(first, short, again)
    noise = difference is None and _first_difference(first, with_noise) is not None
    impure = _first_difference(first, short, again, of_components=True)
    return difference, noise, _first_without_mask(first), impure


def _replay(
    env: VectorEnv,
    mapping: PolicyMapping,
    seeds: Sequence[int],
    max_steps: int,
    options: Options = NO_OPTIONS,
) -> Iterator[ReplayStep]:
    """Play one episode per seed, each of at most `max_steps` and together at most `_STEPS`."""
    steps_left = _STEPS
    for seed in seeds:
        rng = generator(0, "actions of replays", seed)
        episode = play_randomly(env, mapping, seed, rng, min(steps_left, max_steps), options)
        for step, values in enumerate(episode):
            if step > 0:  # step 0 is the reset
                steps_left -= 1
            yield seed, step, values
        if not steps_left:
            return


def _first_difference(*replays: Iterable[ReplayStep], of_components: bool = False) -> str | None:
    """Describe the first difference between episodes with the same seed; None if there is none.

    Either the values of the environment or those of reward components are compared.
    """
    earlier: dict[tuple[int, int], Values] = {}
    for seed, steps, values in chain(*replays):
        when = _when(steps)
        # The values of the first replay; those of later ones are compared with them.
        for name, value in earlier.setdefault((seed, steps), values).items():
            if name.startswith(_COMPONENT) != of_components:
                continue
            again = values.get(name)
            if again is None:
                return f"{name} {when} was present and then missing"
            if not np.array_equal(value, again):
                first_value = shown(np.asarray(value).tolist(), 60)
                second_value = shown(np.asarray(again).tolist(), 60)
                return f"{name} {when} was {first_value} and then {second_value}"
    return None


def _first_without_mask(replay: Iterable[ReplayStep]) -> str | None:
    """Describe when a single agent first has no action mask; None if it has all or none.

    Several agents may have masks at their own turns only.
    """
    without = []
    masked = False
    for _, steps, values in replay:
        # No action follows the end of an episode, so it has neither observation nor mask.
        observed = any(name.startswith("observation") for name in values)
        if _MASK in values:
            masked = True
        elif observed:
            without.append(steps)
    if masked and without:
        return _when(without[0])
    return None


def _when(steps: int) -> str:
    """Return text for a time in an episode."""
    if steps:
        return f"after {pluralize(steps, 'step')}"
    return "right after reset"


@contextmanager
def _global_generators() -> Iterator[Callable[[], None]]:
    """Yield a function that reseeds the global generators of Python and numpy at each call.

    Environments that draw from these generators then differ between replays. The caller's states
    are restored.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  # nothing is drawn here
    calls = 0

    def reseed() -> None:
        """Seed the global generators differently at each call."""
        nonlocal calls
        calls += 1
        random.seed(calls)
        np.random.seed(calls)  # noqa: NPY002

    try:
        yield reseed
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
