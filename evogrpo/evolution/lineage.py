"""Lineage: the births of all members of a run, with their parents and hyperparameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from evogrpo.config.checks import declared_fields
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.mutation import Changes

NETWORK = "network"
"""Name of an architecture change among the changes of a birth; old and new values are text."""


@dataclass(frozen=True, kw_only=True)
class ArchitectureChange:
    """A change of a member's network.

    Attributes:
        architecture: New architecture as plain JSON values, in the format of the policy set that proposed it.
        old: Old architecture as text.
        new: New architecture as text.
    """

    architecture: Mapping[str, Any]
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """One member of the current population.

    Attributes:
        slot: Storage place in the bank.
        index: Identity, never reused.
        parent: Index of its parent; None for a founder.
        born: Generation whose plan created it.
        hyperparameters: Its hyperparameters.
    """

    slot: int
    index: int
    parent: int | None
    born: int
    hyperparameters: Hyperparameters

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**vars(self), "hyperparameters": self.hyperparameters.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        made = {"hyperparameters": Hyperparameters.from_json(values["hyperparameters"])}
        return cls(**declared_fields(cls, {**values, **made}))


@dataclass(frozen=True, kw_only=True)
class Child:
    """One birth: a train state copied into a slot under a new index.

    Attributes:
        slot: Its slot.
        index: Its index.
        parent: Index of the member whose train state it takes; None for a founder.
        hyperparameters: Its hyperparameters.
        changes: Differences from its parent's hyperparameters, by name: (old, new).
        reason: Reason for the birth, as text.
        architecture: Its network architecture as plain JSON values; None = its parent's.
    """

    slot: int
    index: int
    parent: int | None
    hyperparameters: Hyperparameters
    changes: Changes = field(default_factory=dict)
    reason: str = ""
    architecture: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; `architecture` only if set."""
        values: dict[str, Any] = {
            "slot": self.slot,
            "index": self.index,
            "parent": self.parent,
            "hyperparameters": self.hyperparameters.to_json(),
            "changes": {name: list(change) for name, change in self.changes.items()},
            "reason": self.reason,
        }
        return values if self.architecture is None else {**values, "architecture": dict(self.architecture)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned."""
        fields = dict(values)
        fields["hyperparameters"] = Hyperparameters.from_json(fields["hyperparameters"])
        fields["changes"] = {name: (old, new) for name, (old, new) in fields["changes"].items()}
        return cls(**declared_fields(cls, fields))


@dataclass(frozen=True, kw_only=True)
class Birth(Child):
    """A child as recorded in the lineage.

    Attributes:
        born: Generation whose plan created it.
    """

    born: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**super().to_json(), "born": self.born}


@dataclass(frozen=True)
class Lineage:
    """All births of a run in order; append-only, so parents come before their children.

    Attributes:
        births: All births, the founders first.

    Raises:
        ValueError: If an index repeats, or a parent was not born before its child.
    """

    births: tuple[Birth, ...]

    def __post_init__(self) -> None:
        known: set[int] = set()
        for birth in self.births:
            if birth.index in known:
                raise ValueError(f"indices must not repeat, got a second birth of index {birth.index}")
            if birth.parent is not None and birth.parent not in known:
                raise ValueError(f"parents must come before children, got parent {birth.parent} of {birth.index}")
            known.add(birth.index)

    @classmethod
    def from_founders(cls, members: Sequence[MemberRecord]) -> Self:
        """Build the lineage of a first generation.

        Raises:
            ValueError: If a member has a parent.
        """
        return cls(
            births=tuple(
                Birth(
                    slot=member.slot,
                    index=member.index,
                    parent=member.parent,
                    hyperparameters=member.hyperparameters,
                    reason="founder",
                    born=member.born,
                )
                for member in members
            )
        )

    def with_children(self, children: Iterable[Child], *, generation: int) -> Self:
        """Return the lineage with one generation's children appended.

        Raises:
            ValueError: If an index repeats, or a parent is unknown.
        """
        new = (Birth(**{**vars(child), "born": generation}) for child in children)
        return type(self)(births=(*self.births, *new))

    def path(self, index: int) -> tuple[Birth, ...]:
        """Return the births from a member's founder to the member itself.

        Raises:
            ValueError: If no member has this index.
        """
        births = {birth.index: birth for birth in self.births}
        line: list[Birth] = []
        current: int | None = index
        while current is not None:
            if current not in births:
                raise ValueError(f"no member has index {current}: known are {', '.join(map(str, births)) or '(none)'}")
            line.append(births[current])
            current = births[current].parent
        return tuple(reversed(line))

    def to_json(self) -> list[dict[str, Any]]:
        """Return all births as plain JSON values."""
        return [birth.to_json() for birth in self.births]

    @classmethod
    def from_json(cls, births: Sequence[Mapping[str, Any]]) -> Self:
        """Build from what `to_json` returned."""
        return cls(births=tuple(Birth.from_json(birth) for birth in births))
