"""Lanes: places in which episodes run side by side, and what passes between them and whoever acts there."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from evogrpo.config.checks import LARGEST
from evogrpo.envs.control.trees import Leaves


class Seen(NamedTuple):
    """What a policy may act on next, one entry for each agent of its own that has a choice.

    A named tuple, as one is made at every step: frozen dataclasses cost CartPole 2 % of its throughput.

    Attributes:
        observations: Leaves `[m, ...]`, never written to again.
        action_masks: `[m, k]` booleans, True = legal; None = all.
        lanes: `[m]` in which lane each entry's episode runs, ascending; None = one entry per lane.
        agents: `[m]` who acts; empty where every lane has one agent.
    """

    observations: Leaves
    action_masks: NDArray[np.bool_] | None
    lanes: NDArray[np.int64] | None = None
    agents: Sequence[str] = ()


class Brought(Protocol):
    """What one step of every lane brought, as far as a player needs to know."""

    @property
    def ended(self) -> NDArray[np.bool_] | None:
        """`[m]` the episodes that ended with this step; None = `EpisodeLanes.deserted` will tell."""

    def not_finite(self) -> Iterable[tuple[int, str, float]]:
        """Return (lane, agent or "", reward) of rewards that are not finite, or that float32 does not hold."""


class Stepped(NamedTuple):
    """What one step of every lane brought where each has one agent.

    Attributes:
        seen: What may be acted on next.
        rewards: `[m]` float64.
        terminated: `[m]` the episode has come to its own end.
        truncated: `[m]` it has been cut off; both may hold.
    """

    seen: Seen
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    @property
    def ended(self) -> NDArray[np.bool_]:
        """`[m]` the episodes that ended with this step."""
        return self.terminated | self.truncated

    def not_finite(self) -> Iterable[tuple[int, str, float]]:
        """See `Brought`."""
        held = np.abs(self.rewards) <= LARGEST
        if held.all():
            return ()
        return [(lane, "", float(self.rewards[lane])) for lane in np.flatnonzero(~held).tolist()]


Step_co = TypeVar("Step_co", covariant=True)


class EpisodeLanes(Protocol[Step_co]):
    """Episodes side by side, addressed by their position; positions change with `add` and `select` only."""

    def add(self, seeds: Sequence[int], replicas: Sequence[int]) -> None:
        """Open one episode per reset seed, behind the lanes there are; replicas name their noise."""

    def select(self, positions: NDArray[np.int64]) -> None:
        """Keep the lanes at these positions, in this order; the others are free again."""

    def deserted(self) -> NDArray[np.bool_] | None:
        """Return the lanes `[m]` in which no agent lives; None = that cannot be, since ended ones are not kept."""

    def seen(self) -> Mapping[str, Seen]:
        """Return what each policy may act on; policies that have nothing to do are missing."""

    def step(self, actions: Mapping[str, NDArray[Any]]) -> Step_co:
        """Step every lane with the environment's own actions `[m, ...]` for the entries seen; none may have ended."""
