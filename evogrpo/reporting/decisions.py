"""What was decided after every generation: why every slot keeps its member or not, and budgets, from the journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.history.checked_fields import REMEDY, JournalFields
from evogrpo.persistence.journal import latest_generations


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One plan, as the event of its generation holds it.

    Attributes:
        generation: The generation that it was made from.
        reasons: Why, by slot; untrusted.
        retired: Members that were retired, by slot: their index.
        samples_per_step: Samples each member collects from then on; None = as before.
        steps_per_generation: Learning steps from then on; None = as before.
        samples: How many samples each slot collects instead, until the next plan; None = all as many.
    """

    generation: int
    reasons: tuple[str, ...] = ()
    retired: Mapping[int, int]
    samples_per_step: int | None = None
    steps_per_generation: int | None = None
    samples: tuple[int, ...] | None = None

    @property
    def budgets(self) -> str:
        """What it changed of the budgets, in words; empty where nothing changed."""
        changed = {
            "samples per step": self.samples_per_step,
            "steps per generation": self.steps_per_generation,
        }
        told = [f"{value} {name}" for name, value in changed.items() if value is not None]
        if self.samples is not None:
            told.append(f"samples by slot: {', '.join(map(str, self.samples))}")
        return ", ".join(told)


def read_decisions(events: Sequence[Mapping[str, Any]]) -> tuple[Decision, ...]:
    """Return the plans of the generations that count, oldest first.

    Args:
        events: A journal's events, oldest first; untrusted input.

    Raises:
        ValueError: If a value is not what it must be.
    """
    decisions = []
    for event in latest_generations(events):
        if event.get("plan") is not None:
            number = JournalFields(event, "a generation event").whole("generation")
            where = f"generation {number}"
            plan = JournalFields(event, where).inner("plan")
            members = JournalFields(event, where).each("members", f"a member of {where}")
            decisions.append(_decision(number, plan, {each.whole("slot"): each.whole("index") for each in members}))
    return tuple(decisions)


def _decision(generation: int, plan: JournalFields, living: Mapping[int, int]) -> Decision:
    parents, reasons = plan.values.get("parents", []), plan.values.get("reasons", [])
    if not isinstance(reasons, list) or not all(isinstance(each, str) for each in reasons):
        raise ValueError(f"'reasons' of {plan.where} must be a list of texts, got {reasons!r:.80}: {REMEDY}")
    if not isinstance(parents, list):
        raise ValueError(f"'parents' of {plan.where} must be a list, got {parents!r:.80}: {REMEDY}")
    samples = plan.values.get("samples")
    if samples is not None and (not isinstance(samples, list) or not all(type(each) is int for each in samples)):
        raise ValueError(f"'samples' of {plan.where} must be a list of whole numbers, got {samples!r:.80}: {REMEDY}")
    children = plan.each("children", f"a child of {plan.where}") if "children" in plan.values else []
    filled = {child.whole("slot") for child in children}
    vacant = [slot for slot, parent in enumerate(parents) if parent is None and slot not in filled]
    return Decision(
        generation=generation,
        reasons=tuple(reasons),
        retired={slot: living[slot] for slot in vacant if slot in living},
        samples_per_step=plan.whole_or_none("samples_per_step"),
        steps_per_generation=plan.whole_or_none("steps_per_generation"),
        samples=None if samples is None else tuple(samples),
    )
