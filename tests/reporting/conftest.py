"""A synthetic journal: the worst member is replaced by a mutated child of the best one."""

import numpy as np
import pytest

from tests.reporting.journals import baseline, estimate, generation, member, outcome, step, written

EVOLVABLE = {
    "lr": {"min": 1e-6, "max": 1e-3, "scale": "log", "factor": 1.5},
    "clip_coef": {"min": 0.05, "max": 0.4, "scale": "linear", "factor": 1.2},
    "group_size": {"choices": [4, 8, 16]},
    "beta": {"min": 0.0, "max": 0.2, "scale": "linear", "factor": 1.2},
    "temperature": {"min": 0.5, "max": 1.5, "scale": "log", "factor": 1.2},
    "update_epochs": {"choices": [1, 2, 3, 4]},
    "max_grad_norm": {"min": 0.1, "max": 2.0, "scale": "log", "factor": 1.2},
    "loss_type": {"choices": ["grpo", "dapo", "cispo"]},
}
EXAMPLE = {
    "reward": None,
    "index": 0,
    "step": 0,
    "rewards": {},
    "advantage": None,
    "truncated": False,
}


def draw(name, rng, but=None):
    parameter = EVOLVABLE[name]
    if "choices" in parameter:
        return rng.choice([value for value in parameter["choices"] if value != but]).item()
    return float(rng.uniform(max(parameter["min"], 1e-6), parameter["max"]))


def write_fake_run(
    run_dir,
    *,
    size=4,
    generations=5,
    evolve=("lr", "clip_coef", "group_size"),
    seed=0,
    failures=(),
    test=True,
    examples=(),
    task="chain sums",
    by="validation",
    reason="replaced slot {slot}: #{parent} is better by 1.7 SE",
):
    """Write a journal; `failures` are (generation, slot) pairs.

    Fitness rises, and children are better.
    """
    rng = np.random.default_rng(seed)
    founder = {"parent": None, "born": 0, "changes": {}, "reason": "founder"}
    members = []
    for slot in range(size):
        drawn = {name: draw(name, rng) for name in evolve}
        members.append({"slot": slot, "index": slot, **founder, "hyperparameters": drawn})
    begin = {
        "event": "run",
        "seed": seed,
        "evolvable": {name: EVOLVABLE[name] for name in evolve},
        "task": task,
    }
    begin |= {"model": "smollm2-135m", "samples_per_step": 64, "fitness": {"by": by}}
    events = [begin, baseline(0.05)]
    best_ever = None
    highest = 0.0
    for number in range(1, generations + 1):
        results = []
        for each in members:
            failed = (number, each["slot"]) in failures
            level = (0.4 * number + 0.2 * each["born"]) / generations
            fitness = None if failed else level + 0.3 * rng.random()
            results.append(
                member(
                    **each, fitness=fitness, failed="loss became NaN in step 12" if failed else None
                )
            )
        ranked = sorted(
            results, key=lambda each: -1.0 if each["fitness"] is None else each["fitness"]
        )
        best = ranked[-1]
        worst = ranked[0]
        if best["fitness"] is not None and best["fitness"] > highest:
            best_ever = [best["index"], number]
            highest = best["fitness"]
        shown = {"examples": [EXAMPLE | example for example in examples], "best_ever": best_ever}
        events += [step(5 * number, generation=number, seconds=40.0)]
        events += [
            generation(
                number,
                *results,
                best=best["index"],
                step=5 * number,
                seconds=97.3 * number,
                **shown,
            )
        ]
        members = [each | {"reason": "kept: within noise"} for each in members]
        if number < generations and size > 1:
            parent = members[best["slot"]]
            slot = worst["slot"]
            changes = {}
            if evolve:
                name = str(rng.choice(evolve))
                changes[name] = [old := parent["hyperparameters"][name], draw(name, rng, but=old)]
            values = parent["hyperparameters"] | {name: new for name, (_, new) in changes.items()}
            members[slot] = {
                "slot": slot, "index": size + number - 1, "parent": parent["index"], "born": number,
                "changes": changes, "reason": reason.format(slot=slot, parent=parent["index"]),
                "hyperparameters": values,
            }  # fmt: skip
    if test and best_ever is not None:
        events.append(outcome(best["index"]) | {"questions": 256, "after": estimate(0.75)})
    return written(run_dir, *events, {"event": "stopped", "reason": "all generations done"})


@pytest.fixture(scope="session")
def fake_run():
    """Return the writer; tests call it with a folder."""
    return write_fake_run
