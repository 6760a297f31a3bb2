"""A synthetic journal: after each generation the worst member is replaced by a mutated child of the best one."""

import numpy as np
import pytest

from evogrpo.storage.journal import Journal
from tests.reporting.journals import COST

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
EXAMPLE = {"reward": None, "index": 0, "step": 0, "rewards": {}, "advantage": None, "truncated": False}
PHASES = {"sampling": 10.0, "scoring": 0.0, "learning": 30.0}


def estimate(mean):
    return {"fitness": mean, "standard_error": 0.04}


def draw(name, rng, but=None):
    parameter = EVOLVABLE[name]
    if "choices" in parameter:
        return rng.choice([value for value in parameter["choices"] if value != but]).item()
    return float(rng.uniform(max(parameter["min"], 1e-6), parameter["max"]))


def member_result(member, generation, last, failed, rng):
    """Return a member's part of a generation's event; fitness rises with the generation, and children are better."""
    fitness = None if failed else (0.4 * generation + 0.2 * member["born"]) / last + 0.3 * rng.random()
    return member | {
        **({"fitness": None, "standard_error": None} if failed else estimate(fitness)),
        "generation": generation,
        "failed": "loss became NaN in step 12" if failed else None,
        "tokens": 51_200,
        "seconds": 21.5,
        "metrics": {},
        "questions": 128,
        "evaluation": COST,
        "measured": {} if failed else {"greedy": estimate(fitness)},
    }


def write_fake_run(
    run_dir, *, size=4, generations=5, evolve=("lr", "clip_coef", "group_size"), seed=0, failures=(), test=True,
    resume_at=None, examples=(), task="chain sums", reason="replaced slot {slot}: #{parent} is better by 1.7 SE",
):  # fmt: skip
    """Write a journal; `failures` are (generation, slot) pairs, `resume_at` writes that generation twice."""
    rng = np.random.default_rng(seed)
    members = [
        {"slot": slot, "index": slot, "parent": None, "born": 0, "changes": {}, "reason": "founder",
         "hyperparameters": {name: draw(name, rng) for name in evolve}}
        for slot in range(size)
    ]  # fmt: skip
    best_ever, highest = None, 0.0
    with Journal(run_dir / "journal.jsonl") as journal:
        founders = [
            {key: each[key] for key in ("slot", "index", "parent", "hyperparameters")} for each in members
        ]  # fmt: skip
        journal.append(
            "run", version="0.1.0", seed=seed, population_size=size, samples_per_step=64, steps_per_generation=5,
            evolvable={name: EVOLVABLE[name] for name in evolve}, strategy={"name": "Tournament", "size": 2, "z": 1.0},
            task=task, model="smollm2-135m", members=founders,
        )  # fmt: skip
        journal.append("baseline", split="validation", questions=128, measure="greedy", cost=COST, **estimate(0.05))
        for number in range(1, generations + 1):
            journal.append(
                "step", step=5 * number, generation=number, seconds=40.0, phases=PHASES, waiting=[], members=[]
            )  # fmt: skip
            results = [
                member_result(each, number, generations, (number, each["slot"]) in failures, rng) for each in members
            ]
            ranked = sorted(results, key=lambda each: -1.0 if each["fitness"] is None else each["fitness"])
            best, worst = ranked[-1], ranked[0]
            if best["fitness"] is not None and best["fitness"] > highest:
                best_ever, highest = [best["index"], number], best["fitness"]
            event = {
                "generation": number, "step": 5 * number, "seconds": 97.3 * number, "tokens": 51_200 * size * number,
                "members": results, "best_index": best["index"], "samples_per_step": 64, "plan": None,
                "examples": [EXAMPLE | example for example in examples], "timesteps": None, "questions": 128,
                "evaluation": COST, "best_ever": best_ever,
            }  # fmt: skip
            offset = journal.size
            journal.append("generation", **event)
            if number == resume_at:
                journal.append("resumed", generation=number - 1, offset=offset)
                journal.append("generation", **event)
            members = [each | {"reason": "kept: within noise"} for each in members]
            if number < generations and size > 1:
                parent, slot = members[best["slot"]], worst["slot"]
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
            journal.append(
                "test", split="test", questions=256, index=best["index"], before=estimate(0.05), after=estimate(0.75),
                gain=estimate(0.7), measure="greedy", cost=COST, scores=[0.75, 0.75],
            )  # fmt: skip
        journal.append("stopped", reason="all generations done")
    return run_dir


@pytest.fixture(scope="session")
def fake_run():
    """Return the writer; tests call it with a folder."""
    return write_fake_run
