"""Comparison of two runs up to rounding and clock readings."""

import json
from pathlib import Path

import pytest
from torch import Tensor

from evogrpo.storage.checkpoint import read_checkpoint
from tests.policy_banks import assert_states_agree
from tests.tiny_training import events_of, final_states, without_run_id

LARGEST_LR = 3e-2


def by_slot(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    slots: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        slot, _, part = name.partition(".")
        slots.setdefault(slot, {})[part] = value
    return {slot: parts for slot, parts in slots.items() if slot.isdigit()}


def assert_same(one: Path, other: Path) -> None:
    """Check that two runs have the same story, checkpoint and best member, up to rounding."""
    events = json.loads(json.dumps(events_of(one)))
    other_events = json.loads(json.dumps(events_of(other)))
    assert len(events) == len(other_events)
    for event, same in zip(events, other_events, strict=True):
        assert_alike(event, same, where=event["event"])
    states = by_slot(final_states(one))
    others = by_slot(final_states(other))
    assert states.keys() == others.keys()
    for slot, state in states.items():
        assert_states_agree(others[slot], state, lr=LARGEST_LR)
    records = [read_checkpoint(folder / "best", kind="agent")[1] for folder in (one, other)]
    assert_alike(*map(without_run_id, records), where="best")


def assert_alike(one: object, other: object, *, where: str) -> None:
    """Check that plain values are equal, numbers up to rounding."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5), where
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for name, value in one.items():
            if name not in ("seconds", "time", "slot"):  # an agent of its own is in slot 0
                assert_alike(value, other[name], where=f"{where}.{name}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other), where
        for number, (value, same) in enumerate(zip(one, other, strict=True)):
            assert_alike(value, same, where=f"{where}[{number}]")
    else:
        assert one == other, where
