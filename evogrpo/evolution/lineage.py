"""Lineage: the births of all members of a run, with their parents and hyperparameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from evogrpo.config.checks import declared_fields
from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.evolution.mutation import Changes

NETWORK = "network"
"""What a change of a network's architecture is called among a birth's changes; old and new are words."""


@dataclass(frozen=True, kw_only=True)
class ArchitectureChange:
    """A change of a member's network.

    Attributes:
        architecture: The new one, as plain JSON values that the members it was drawn from understand.
        old: The old one in words.
        new: The new one in words.
    """

    architecture: Mapping[str, Any]
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class MemberRecord:
    """One living member.

    Attributes:
        slot: Its storage place in the bank.
        index: Its identity, never reused.
        parent: Its parent's index; None for a founder.
        born: The generation whose plan gave birth to it.
        hyperparameters: Its own.
        back_to: The generation after which its parent's state was kept that it began with; None where it began with
            its parent's state at its birth, or has none.
    """

    slot: int
    index: int
    parent: int | None
    born: int
    hyperparameters: Hyperparameters
    back_to: int | None = None

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
    """One birth: a whole learner state copied into a slot under a new index.

    Attributes:
        slot: Where it lives.
        index: Its new identity.
        parent: The index of the member whose state it takes; None for a founder.
        hyperparameters: Its own.
        changes: Where they differ from its parent's, by name: (old, new).
        reason: Why it was born.
        architecture: The network it gets, as plain JSON values; None = its parent's.
        back_to: The generation after which its parent's state was kept that it takes; None = the state of now.

    Raises:
        ValueError: If it goes back to a state of nobody's.
    """

    slot: int
    index: int
    parent: int | None
    hyperparameters: Hyperparameters
    changes: Changes = field(default_factory=dict)
    reason: str = ""
    architecture: Mapping[str, Any] | None = None
    back_to: int | None = None

    def __post_init__(self) -> None:
        if self.back_to is not None and self.parent is None:
            raise ValueError(f"a founder goes back to nobody's state, got back_to={self.back_to}: name its parent")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; `architecture` and `back_to` where there are any."""
        values: dict[str, Any] = {
            "slot": self.slot,
            "index": self.index,
            "parent": self.parent,
            "hyperparameters": self.hyperparameters.to_json(),
            "changes": {name: list(change) for name, change in self.changes.items()},
            "reason": self.reason,
        }
        if self.back_to is not None:
            values["back_to"] = self.back_to
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
    """A child as the lineage keeps it.

    Attributes:
        born: The generation whose plan gave birth to it.
    """

    born: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {**super().to_json(), "born": self.born}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One hyperparameter change on a member's line of descent.

    Attributes:
        index: The member born with it.
        born: The generation of that birth.
        name: Which hyperparameter.
        old: Its parent's value.
        new: Its own.
    """

    index: int
    born: int
    name: str
    old: Value
    new: Value


@dataclass(frozen=True)
class Lineage:
    """Every birth of a run in order: append-only, so a parent always comes before its children.

    Attributes:
        births: The founders first.

    Raises:
        ValueError: If an index repeats, or a parent was not born before its child.
    """

    births: tuple[Birth, ...]

    def __post_init__(self) -> None:
        known: set[int] = set()
        for birth in self.births:
            if birth.index in known:
                raise ValueError(f"an index is never reused, got a second birth of index {birth.index}")
            if birth.parent is not None and birth.parent not in known:
                raise ValueError(f"a parent is born before its child, got parent {birth.parent} of {birth.index}")
            known.add(birth.index)

    @classmethod
    def from_founders(cls, members: Sequence[MemberRecord]) -> Self:
        """Start a lineage with members that have no parent.

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
        """Return the lineage with one generation's children appended; this one is unchanged.

        Raises:
            ValueError: If an index repeats, or a parent is unknown.
        """
        new = (Birth(**{**vars(child), "born": generation}) for child in children)
        return type(self)(births=(*self.births, *new))

    def path(self, index: int) -> tuple[Birth, ...]:
        """Return the births that lead to a member: its founder first, its own last.

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

    def ancestors(self, index: int) -> tuple[int, ...]:
        """Return the indices of a member's ancestors: its founder first, its parent last, itself left out.

        Raises:
            ValueError: If no member has this index.
        """
        return tuple(birth.index for birth in self.path(index)[:-1])

    def changes(self, index: int) -> tuple[Change, ...]:
        """Return every hyperparameter change on the path to a member, the oldest first.

        Raises:
            ValueError: If no member has this index.
        """
        return tuple(
            Change(index=birth.index, born=birth.born, name=name, old=old, new=new)
            for birth in self.path(index)
            for name, (old, new) in birth.changes.items()
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return every birth as plain JSON values."""
        return [birth.to_json() for birth in self.births]

    @classmethod
    def from_json(cls, births: Sequence[Mapping[str, Any]]) -> Self:
        """Build from what `to_json` returned."""
        return cls(births=tuple(Birth.from_json(birth) for birth in births))
