"""Acting step by step: what an environment asks of policies, and what they answer."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from evogrpo.outline import outline


@dataclass(frozen=True, kw_only=True)
class Acted:
    """What an actor chose, one action per observation.

    Attributes:
        actions: `[m, ...]` in the dtype of the action space; values of Discrete and MultiDiscrete count from 0, those
            of Box are not clipped.
        log_probs: `[m]` float32 of the policy acted from, in nats; at temperature 1 where the most likely action was
            taken.
    """

    actions: NDArray[Any]
    log_probs: NDArray[np.float32]

    __repr__ = outline


class Actor(Protocol):
    """Whatever can act for members step by step, as environments ask; a bank of small networks does."""

    def act(
        self,
        observations: Any,
        member_ids: NDArray[np.int64],
        *,
        uniforms: NDArray[np.float32] | None,
        temperature: NDArray[np.float32] | None,
        action_mask: Any,
        base: bool,
    ) -> Acted:
        """Choose one action for each observation.

        Args:
            observations: `[m, ...]` as the observation space has them; for Dict and Tuple dicts and tuples of such.
            member_ids: `[m]` slots, in ascending order.
            uniforms: `[m, d]` in [0, 1) to draw with; None = the most likely actions.
            temperature: `[m]` at least 0; 0 means the most likely action. None = 1.
            action_mask: Legal values (True) of Discrete actions `[m, values]`; of MultiDiscrete ones side by side, or a
                tuple of one per component. None = all.
            base: Act from the untrained base instead.

        Returns:
            Actions and their log-probabilities, in arrays that are not written to again.
        """
        ...
