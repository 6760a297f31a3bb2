"""Strategy protocol: maps the history of a run to the plan of the next generation."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import perturbation_to_json
from evogrpo.evolution.plan import Plan


class Strategy(Protocol):
    """A rule of selection and mutation, with settings and optionally a state that plans change.

    Strategies without state inherit from `Stateless`.
    """

    @property
    def mutates(self) -> bool:
        """True if children may differ from their parents; read only where network architectures evolve."""
        ...

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Decide the member of every slot and the budget of the next generation.

        A failed member is never kept: it is replaced by a child of a healthy member, or retired.

        Args:
            history: All generations up to the one just evaluated.
            rng: Random generator of this plan, named by the run's seed and the generation.

        Returns:
            The plan, usually made by `Plan.from_choices`. It depends on the arguments, settings and state alone.

        Raises:
            ValueError: If all members failed.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: keyword arguments that build an equal strategy."""
        ...

    def state(self) -> dict[str, Any]:
        """Return everything later plans depend on as plain JSON values."""
        ...

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Restore the value of `state`; later plans equal those of an uninterrupted run."""
        ...


class Stateless:
    """Base class of strategies without state, usually frozen dataclasses whose fields are the settings."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; a perturbation is one under the name `mutation`."""
        return {
            name: perturbation_to_json(value)
            if name == "mutation"
            else list(value)
            if isinstance(value, tuple)
            else value
            for name, value in vars(self).items()
        }

    def state(self) -> dict[str, Any]:
        """Return the empty state."""
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Accept the empty state.

        Raises:
            ValueError: If it is not empty.
        """
        if values:
            raise ValueError(
                f"{type(self).__name__} has no state, got {', '.join(values)}. The state is of another strategy."
            )
