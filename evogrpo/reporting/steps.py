"""What was measured in every learning step, member by member, read from the journal's step events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.history.checked_fields import JournalFields

MEASURES: Mapping[str, tuple[str, str]] = {
    "reward": ("reward", "mean of the samples"),
    "kl": ("KL to the reference", "nats per action"),
    "entropy": ("entropy", "nats per action"),
    "completions/mean_length": ("length", "actions per sample"),
}
"""What is drawn of every step: the metric's name -> its title and what it is."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One measure of one member over the learning steps of its life.

    Attributes:
        index: The member.
        slot: Where it lived.
        points: (number of the step, from 1; the generation it belongs to; the value), in order.
    """

    index: int
    slot: int
    points: tuple[tuple[int, int, float], ...]


def read_curves(events: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Curve, ...]]:
    """Return the curves of every measure that was ever taken, by the metric's name.

    A resumed run may write a step twice: the later one counts, and steps after the one that it resumed from do not
    until they are written again.

    Args:
        events: A journal's events, oldest first; untrusted input.

    Raises:
        ValueError: If a value is not what it must be.
    """
    found: dict[str, dict[tuple[int, int], list[tuple[int, int, float]]]] = {}
    for step, event in sorted(counted_steps(events).items()):
        generation = event.whole("generation")
        for member in event.each("members", f"a member of step {step}"):
            who = member.whole("index"), member.whole("slot")
            for name in MEASURES:
                value = member.number_or_none(name)
                if value is not None:
                    found.setdefault(name, {}).setdefault(who, []).append((step + 1, generation, value))
    return {
        name: tuple(Curve(index=who[0], slot=who[1], points=tuple(points)) for who, points in sorted(curves.items()))
        for name, curves in sorted(found.items(), key=lambda item: list(MEASURES).index(item[0]))
    }


def counted_steps(events: Sequence[Mapping[str, Any]]) -> dict[int, JournalFields]:
    """Return the step events that count, by the step's number; those that a resumed run took again, as taken last."""
    latest: dict[int, JournalFields] = {}
    for event in events:
        if event["event"] == "step":
            fields = JournalFields(event, "a step event")
            latest[fields.whole("step")] = fields
        elif event["event"] == "resumed":
            begin = JournalFields(event, "a resumed event").whole_or_none("step")
            if begin is not None:
                latest = {step: kept for step, kept in latest.items() if step < begin}
    return latest
