"""The protocol of a strategy: from the history of a run to a plan of plain data, the next generation."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from evogrpo.evolution.history import History
from evogrpo.evolution.plan import Plan


class Strategy(Protocol):
    """A rule of evolution: settings, the arguments of its class, and perhaps a state that plans change.

    One that remembers nothing inherits from `Stateless`.
    """

    @property
    def mutates(self) -> bool:
        """Whether children may differ from their parents; asked only where networks evolve."""
        ...

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Decide what every slot holds next, and what the next generations spend.

        A failed member is never kept: it is replaced by a healthy one's child, or retired.

        Args:
            history: Every generation up to the one just evaluated.
            rng: The generator of this plan's draws, named by the run's seed and the generation.

        Returns:
            The plan, such as `Plan.from_choices` makes. It depends on the arguments, the settings and the state alone.

        Raises:
            ValueError: If every member failed.
        """
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values: keyword arguments with which the class builds an equal strategy."""
        ...

    def state(self) -> dict[str, Any]:
        """Return as plain JSON values all that earlier plans have left behind and later ones depend on."""
        ...

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Put back what `state` returned, read from JSON: from here on plans are those that would have followed."""
        ...


class Stateless:
    """What a strategy inherits that remembers nothing from one plan to the next."""

    def state(self) -> dict[str, Any]:
        """Return the empty state."""
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Take the empty state.

        Raises:
            ValueError: If it is not empty.
        """
        if values:
            raise ValueError(
                f"{type(self).__name__} remembers nothing, got a state with {', '.join(values)}: another strategy's"
            )
