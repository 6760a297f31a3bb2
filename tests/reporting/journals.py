"""Journal events with default values."""

import json

from evogrpo.storage.journal import VERSION

HYPERPARAMETERS = {"lr": 1e-4}
COST = {"tokens": 50, "seconds": 0.5}


def estimate(mean):
    return {"fitness": mean, "standard_error": None if mean is None else 0.1}


def member(slot, index, parent=None, fitness=0.5, **others):
    return {
        "slot": slot,
        "index": index,
        "parent": parent,
        "born": 0,
        "hyperparameters": HYPERPARAMETERS,
        **estimate(fitness),
        "failed": None,
        "tokens": 100,
        "seconds": 1.5,
        "changes": {},
        "reason": "kept",
        "metrics": {},
        "measured": {} if fitness is None else {"greedy": estimate(fitness)},
        "questions": 64,
        "evaluation": COST,
        **others,
    }


def generation(number, *members, best=0, **others):
    numbered = []
    for each in members:
        if isinstance(each, dict):
            numbered.append(each | {"generation": number})
        else:
            numbered.append(each)
    return {
        "event": "generation",
        "generation": number,
        "step": 4,
        "seconds": 9.0,
        "tokens": 800,
        "members": numbered,
        "best_index": best,
        "samples_per_step": 8,
        "plan": None,
        "timesteps": None,
        "examples": [],
        "questions": 64,
        "evaluation": COST,
        "best_ever": [best, number],
        **others,
    }


def plan(number, parents, *children, **others):
    """Return the plan of a generation.

    Children are (slot, index, parent) and maybe hyperparameters.
    """
    births = [
        {
            "slot": slot,
            "index": index,
            "parent": parent,
            "born": number,
            "changes": {},
            "reason": "better",
        }
        | {"hyperparameters": values[0] if values else HYPERPARAMETERS}
        for slot, index, parent, *values in children
    ]
    reasons = [f"why {slot}" for slot in range(len(parents))]
    return {
        "generation": number,
        "parents": parents,
        "children": births,
        "reasons": reasons,
        **others,
    }


def baseline(fitness=0.0):
    """Return a baseline event."""
    return {
        "event": "baseline",
        "split": "validation",
        "questions": 8,
        "measure": "greedy",
        "cost": COST,
        **estimate(fitness),
    }


def outcome(index, fitness=0.5, gain=0.25):
    """Return a test event."""
    return {
        "event": "test",
        "split": "test",
        "questions": 64,
        "index": index,
        "before": estimate(fitness - gain),
        "after": estimate(fitness),
        "gain": estimate(gain),
        "measure": "greedy",
        "cost": COST,
        "scores": [fitness, fitness],
    }


def step(number, *members, generation=1, seconds=1.0, **others):
    """Return the event of a learning step."""
    return {
        "event": "step",
        "step": number,
        "generation": generation,
        "seconds": seconds,
        "phases": {"learning": seconds},
        "waiting": [],
        "members": list(members),
        **others,
    }


def written(folder, *events):
    """Write a journal; a `resumed` event has the number of events to keep as its offset."""
    folder.mkdir(exist_ok=True)
    lines = []
    offsets = [0]
    for event in events:
        version = {} if lines else {"journal_version": VERSION}
        if event["event"] == "resumed":
            offset = {"offset": offsets[event["offset"]]}
        else:
            offset = {}
        lines.append(
            json.dumps({"event": event["event"], "time": 0.0} | version | event | offset) + "\n"
        )
        offsets.append(offsets[-1] + len(lines[-1]))
    (folder / "journal.jsonl").write_text("".join(lines))
    return folder
