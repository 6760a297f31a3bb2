"""Events of a journal as a run writes them, with everything that a test does not care about filled in."""

HYPERPARAMETERS = {"lr": 1e-4}


def member(slot, index, parent=None, fitness=0.5, **others):
    return {
        "slot": slot,
        "index": index,
        "parent": parent,
        "born": 0,
        "hyperparameters": HYPERPARAMETERS,
        "fitness": fitness,
        "standard_error": None if fitness is None else 0.1,
        "failed": None,
        "tokens": 100,
        "seconds": 1.5,
        "changes": {},
        "reason": "kept",
        "metrics": {},
        **others,
    }


def generation(number, *members, best=0, **others):
    return {
        "event": "generation",
        "generation": number,
        "step": 4,
        "seconds": 9.0,
        "tokens": 800,
        "members": list(members),
        "best": best,
        "plan": None,
        "examples": [],
        **others,
    }


def outcome(index, fitness=0.5, gain=0.25):
    """Return a test event."""
    before, after, paired = ({"fitness": mean, "standard_error": 0.1} for mean in (fitness - gain, fitness, gain))
    return {
        "event": "test",
        "split": "test",
        "questions": 64,
        "index": index,
        "before": before,
        "after": after,
        "gain": paired,
    }
