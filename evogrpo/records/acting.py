"""What acts for members step by step."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evogrpo.records.rollouts import Acted


class Actor(Protocol):
    """Whatever can act for members step by step, as environments ask; a bank of small networks does."""

    @property
    def uniforms_per_action(self) -> int:
        """How many uniform numbers one action is drawn with."""
        ...

    def act(
        self,
        observations: Any,
        member_ids: NDArray[np.int64],
        *,
        uniforms: NDArray[np.float32] | None,
        temperature: NDArray[np.float32] | None = None,
        action_mask: Any = None,
        base: bool = False,
    ) -> Acted:
        """Choose one action for each observation.

        Args:
            observations: `[m, ...]` as the observation space has them; for Dict and Tuple dicts and tuples of such.
            member_ids: `[m]` slots, in ascending order.
            uniforms: `[m, uniforms_per_action]` in [0, 1); None = the most likely actions.
            temperature: `[m]` at least 0; 0 means the most likely action. None = 1.
            action_mask: Legal values (True) of Discrete actions `[m, values]`; of MultiDiscrete ones side by side, or a
                tuple of one per component. None = all.
            base: Act from the untrained base instead.
        """
        ...
