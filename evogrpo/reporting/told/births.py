"""Every birth that a journal tells of, those of members included that were never evaluated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.history.checked_fields import JournalFields
from evogrpo.history.records import GenerationReport
from evogrpo.persistence.journal import latest_generations


@dataclass(frozen=True, kw_only=True)
class ToldBirth:
    """One birth, as a journal tells it.

    Attributes:
        index: The member.
        parent: Whom it was cloned from; None for a founder.
        born: The generation whose plan gave birth to it; 0 for the first founders.
        slot: Where it lived.
        hyperparameters: Its own.
        changes: How they differ from its parent's, by name: (old, new).
        reason: Why it was born; untrusted.
        back_to: The generation after which its parent's state was kept that it began with; None = that of its birth.
    """

    index: int
    parent: int | None
    born: int
    slot: int
    hyperparameters: Hyperparameters
    changes: Mapping[str, tuple[Value, Value]] = field(default_factory=dict)
    reason: str = "founder"
    back_to: int | None = None


def told_births(events: Sequence[Mapping[str, Any]]) -> tuple[ToldBirth, ...]:
    """Return every birth, by index; those of generations that were given up when the run was resumed do not count.

    Raises:
        ValueError: If a value is not what it must be.
    """
    births: dict[int, ToldBirth] = {}
    for birth in _all(events):
        births.setdefault(birth.index, birth)
    return tuple(births[index] for index in sorted(births))


def _all(events: Sequence[Mapping[str, Any]]) -> Iterator[ToldBirth]:
    began = next((event for event in events if event["event"] == "run"), {})
    if "members" in began:
        for founder in JournalFields(began, "the run event").each("members", "a founder of the run event"):
            yield _birth(founder, born=0, reason="founder")
    for event in latest_generations(events):
        report = GenerationReport.from_json(event)
        for member in report.members:
            names = ("index", "parent", "born", "slot", "hyperparameters", "changes", "reason", "back_to")
            yield ToldBirth(**{name: getattr(member, name) for name in names})
        plan = event.get("plan")
        if isinstance(plan, Mapping) and "children" in plan:
            where = f"a child of the plan of generation {report.generation}"
            for child in JournalFields(plan, where).each("children", where):
                changes = child.changes("changes")
                told = {"reason": child.text("reason"), "back_to": child.whole_or_none("back_to")}
                yield _birth(child, born=report.generation, changes=changes, **told)


def _birth(fields: JournalFields, **others: Any) -> ToldBirth:
    return ToldBirth(
        index=fields.whole("index"),
        parent=fields.whole_or_none("parent"),
        slot=fields.whole("slot"),
        hyperparameters=fields.hyperparameters("hyperparameters"),
        **others,
    )
