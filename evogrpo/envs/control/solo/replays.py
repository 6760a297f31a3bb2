"""Replays: the first steps of a few starts under drawn actions, and where two replays of the same differ."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.actions import random_action, to_environment
from evogrpo.envs.control.lanes import Seen
from evogrpo.envs.control.playing import not_finite, refuse_not_finite
from evogrpo.envs.control.solo_lanes import ONLY, SoloLanes
from evogrpo.randomness import generator


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
    lanes: SoloLanes, action_space: "gymnasium.Space[Any]", seeds: Sequence[int], *, most_steps: int, each: int
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
        seen, steps, over = lanes.seen()[ONLY], 0, False
        yield Moment(seed, steps, _shown(seen, seed, steps))
        while left and steps < each and not over:
            action = random_action(action_space, seen.action_masks, rng)
            stepped = lanes.step({ONLY: to_environment(action_space, action)})
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


def _shown(seen: Seen, seed: int, steps: int) -> dict[str, NDArray[Any]]:
    refuse_not_finite(seen, np.array([seed]), np.array([steps]))
    several = len(seen.observations) > 1
    leaves = enumerate(seen.observations, 1)
    parts = {f"observation (part {number})" if several else "observation": leaf for number, leaf in leaves}
    return parts if seen.action_masks is None else {**parts, "action mask": seen.action_masks}
