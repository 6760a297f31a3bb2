"""Played episodes: the steps of many rows, noted as they are taken and returned as padded arrays."""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from evogrpo.envs.control.lanes import Stepped
from evogrpo.envs.control.normalisation import ObservationStatistics, normalised_leaves, observed
from evogrpo.envs.control.playing import Taken
from evogrpo.envs.control.trees import Leaves, unflatten
from evogrpo.text import short_repr

_STEPS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """Whole episodes, one per row, padded with zeros to the longest.

    Attributes:
        observations: `[n, t, ...]` what each action was chosen on, normalised where asked; dicts and tuples of such
            arrays for composite spaces.
        actions: `[n, t, ...]` as the policy chose them: boxes not clipped, discrete values counted from 0.
        action_masks: `[n, t, k]` legal actions, True in the padding; None where the environment has no masks.
        log_probs: `[n, t]` of the acting policy, in nats.
        step_rewards: `[n, t]` what each action earned, float64.
        present: `[n, t]` which actions were taken.
        terminated: `[n]` the episode came to its own end.
        truncated: `[n]` it was cut off, by a time limit or another one, without having come to its end.
        observed: Statistics of the raw observations of these episodes alone, where normalisation is on.
    """

    observations: Any
    actions: NDArray[Any]
    action_masks: NDArray[np.bool_] | None
    log_probs: NDArray[np.float32]
    step_rewards: NDArray[np.float64]
    present: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    observed: ObservationStatistics | None

    __repr__ = short_repr

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Return the undiscounted returns `[n]`."""
        # Summed in the order of the steps: a pairwise sum would depend on how far the longest episode pads the others.
        total: NDArray[np.float64] = self.step_rewards.cumsum(axis=1)[:, -1]
        return total

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the numbers of steps `[n]`."""
        steps: NDArray[np.int64] = self.present.sum(axis=1)
        return steps


class EpisodeRecord:
    """The steps of n rows of one agent each, in the order they were taken, and the arrays they make up in the end.

    Args:
        space: Of observations, to put composite ones together.
        member_ids: `[n]` slots.
        statistics: What the observations are normalised with, or None.
    """

    def __init__(
        self,
        space: "gymnasium.Space[Any]",
        member_ids: NDArray[np.int64],
        statistics: ObservationStatistics | None,
    ) -> None:
        self._space, self._member_ids, self._statistics = space, member_ids, statistics
        self._terminated = np.zeros(len(member_ids), dtype=np.bool_)
        self._truncated = np.zeros(len(member_ids), dtype=np.bool_)
        self._places: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._columns: dict[str, list[NDArray[Any] | None]] = {}

    def act(self, policy: str, taken: Taken) -> None:
        """See `Record`."""
        self._places.append((taken.rows, taken.t))
        self._note("actions", taken.actions)
        self._note("log_probs", taken.log_probs)
        self._note("masks", taken.seen.action_masks)
        for number, leaf in enumerate(taken.seen.observations):
            self._note(f"leaf {number}", leaf)

    def earn(self, rows: NDArray[np.int64], stepped: Stepped) -> None:
        """See `Record`."""
        self._note("rewards", stepped.rewards)
        ended = stepped.ended
        self._terminated[rows[ended]] = stepped.terminated[ended]
        self._truncated[rows[ended]] = ~stepped.terminated[ended]

    def _note(self, name: str, values: NDArray[Any] | None) -> None:
        self._columns.setdefault(name, []).append(values)

    def finish(self) -> Played:
        """See `Record`."""
        space, member_ids, statistics = self._space, self._member_ids, self._statistics
        n, t = len(self._terminated), 1 + max(int(steps.max()) for _, steps in self._places)
        self._shape = (n, t)
        self._cells = [rows * t + steps for rows, steps in self._places]
        present = self._table([np.ones(len(cells), dtype=np.bool_) for cells in self._cells])
        leaves: Leaves = [self._table(self._columns.pop(name)) for name in [*self._columns] if name.startswith("leaf ")]
        summary = None
        if statistics is not None:
            numbers = normalised_leaves(space)
            summary = observed(len(statistics.count), leaves, numbers, present, member_ids)
            flat = [leaf.reshape(n * t, *leaf.shape[2:]) for leaf in leaves]
            shown = statistics.normalise(flat, numbers, member_ids.repeat(t))
            for number in numbers:
                leaves[number] = shown[number].reshape(leaves[number].shape)
                leaves[number][~present] = 0
        masks = self._columns.pop("masks")
        return Played(
            observations=unflatten(space, leaves),
            actions=self._table(self._columns.pop("actions")),
            action_masks=None if all(mask is None for mask in masks) else self._table(masks, fill=True),
            log_probs=self._table(self._columns.pop("log_probs")),
            step_rewards=self._table(self._columns.pop("rewards")),
            present=present,
            terminated=self._terminated,
            truncated=self._truncated,
            observed=summary,
        )

    def _table(self, pieces: list[NDArray[Any] | None], fill: float = 0) -> NDArray[Any]:
        """Return what was noted step by step as one array `[n, t, ...]`, forgetting the pieces on the way."""
        example = next(piece for piece in pieces if piece is not None)
        table = np.full((self._shape[0] * self._shape[1], *example.shape[1:]), fill, dtype=example.dtype)
        # A few dozen steps at a time: one assignment each would be slow, one in all would hold everything twice.
        for first in range(0, len(pieces), _STEPS_AT_ONCE):
            numbers = range(first, min(first + _STEPS_AT_ONCE, len(pieces)))
            held = [(self._cells[number], piece) for number in numbers if (piece := pieces[number]) is not None]
            if held:
                table[np.concatenate([cells for cells, _ in held])] = np.concatenate([piece for _, piece in held])
            pieces[first : numbers.stop] = [None] * len(numbers)
        return table.reshape(*self._shape, *example.shape[1:])
