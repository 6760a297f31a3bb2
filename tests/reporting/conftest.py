"""A synthetic journal: members learn at rates set by their hyperparameters."""

import math

import numpy as np
import pytest

from evogrpo.storage.journal import Journal

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


FOUNDER_FIELDS = ("slot", "index", "parent", "hyperparameters")
COST = {"tokens": 12_800, "seconds": 3.0}
EXAMPLE = {"reward": None, "index": 0, "step": 0, "rewards": {}, "advantage": None, "truncated": False}


def score(skill, rng):
    """Return the mean of 128 zero-one rewards and its standard error."""
    mean = rng.binomial(128, min(max(skill, 0.01), 0.99)) / 128
    return mean, math.sqrt(max(mean * (1 - mean), 1e-3) / 127)


def mutated(name, value, parameter, rng):
    if "choices" in parameter:
        rungs = parameter["choices"]
        return rungs[min(max(rungs.index(value) + rng.choice([-1, 1]), 0), len(rungs) - 1)]
    low, high, factor = parameter["min"], parameter["max"], parameter["factor"]
    up = rng.random() < 0.5
    step = (
        value * (factor if up else 1 / factor)
        if parameter["scale"] == "log"
        else value + (0.2 if up else -0.2) * (high - low)
    )
    return float(min(max(step, low), high))


def first_values(parameter, rng):
    if "choices" in parameter:
        return rng.choice(parameter["choices"]).item()
    low, high = parameter["min"], parameter["max"]
    if parameter["scale"] == "log":
        return float(math.exp(rng.uniform(math.log(low), math.log(high))))
    return float(rng.uniform(low, high))


def next_members(members, results, space, next_index, generation, reason, rng):
    """Replace members that are clearly worse than a random other member by that member's mutated child."""
    healthy = [result for result in results if result["fitness"] is not None]
    best = max(healthy, key=lambda result: result["fitness"]) if healthy else None
    children = []
    for member, result in zip(members, results, strict=True):
        rival = healthy[rng.integers(len(healthy))] if healthy else result
        worse = result["fitness"] is None or rival["fitness"] > result["fitness"] + result["standard_error"]
        if not worse or result is best:
            children.append({**member, "reason": "kept: within noise"})
            continue
        parent = members[rival["slot"]]
        values, changes = dict(parent["hyperparameters"]), {}
        if space:
            name = str(rng.choice(list(space)))
            values[name] = mutated(name, values[name], space[name], rng)
            changes = {name: [parent["hyperparameters"][name], values[name]]}
        children.append(
            {"slot": member["slot"], "index": next_index, "parent": parent["index"], "born": generation,
             "skill": parent["skill"], "hyperparameters": values, "changes": changes,
             "reason": reason.format(slot=member["slot"], parent=parent["index"])}
        )  # fmt: skip
        next_index += 1
    return children, next_index


def write_fake_run(
    run_dir, *, size=4, generations=5, evolve=("lr", "clip_coef", "group_size"), seed=0, failures=(), test=True,
    resume_at=None, examples=(), task="chain sums", reason="replaced slot {slot}: #{parent} is better by 1.7 SE",
):  # fmt: skip
    """Write a journal; `failures` are (generation, slot) pairs, `resume_at` writes that generation twice."""
    rng = np.random.default_rng(seed)
    space = {name: EVOLVABLE[name] for name in evolve}
    members = [
        {"slot": slot, "index": slot, "parent": None, "born": 0, "skill": 0.05, "changes": {}, "reason": "founder",
         "hyperparameters": {name: first_values(parameter, rng) for name, parameter in space.items()}}
        for slot in range(size)
    ]  # fmt: skip
    next_index, best, best_ever, highest = size, None, None, 0.0
    with Journal(run_dir / "journal.jsonl") as journal:
        journal.append(
            "run", version="0.1.0", seed=seed, population_size=size, samples_per_step=64, steps_per_generation=5,
            evolvable=space, strategy={"name": "Tournament", "size": 2, "z": 1.0}, task=task, model="smollm2-135m",
            members=[{name: member[name] for name in FOUNDER_FIELDS} for member in members],
        )  # fmt: skip
        base, base_error = score(0.05, rng)
        journal.append("baseline", split="validation", fitness=base, standard_error=base_error, questions=128,
                       measure="greedy", cost=COST)  # fmt: skip
        for generation in range(1, generations + 1):
            phases = {"sampling": 10.0, "scoring": 0.0, "learning": 30.0}
            journal.append(
                "step",
                step=5 * generation,
                generation=generation,
                seconds=40.0,
                phases=phases,
                waiting=[],
                members=[],
            )
            results = []
            for member in members:
                rate = 0.16 * math.exp(-(math.log10(member["hyperparameters"].get("lr", 3e-4) / 3e-4) ** 2) / 0.8)
                member["skill"] += rate * (0.85 - member["skill"]) * rng.uniform(0.6, 1.4)
                mean, error = score(member["skill"], rng)
                failed = (generation, member["slot"]) in failures
                results.append(
                    {**{name: member[name] for name in member if name != "skill"}, "generation": generation,
                     "fitness": None if failed else mean, "standard_error": None if failed else error,
                     "failed": "loss became NaN in step 12" if failed else None, "tokens": 51_200,
                     "seconds": 21.5, "metrics": {}, "questions": 128, "evaluation": COST,
                     "measured": {} if failed else {"greedy": {"fitness": mean, "standard_error": error}}}
                )  # fmt: skip
            healthy = [result for result in results if result["fitness"] is not None]
            best = max(healthy, key=lambda result: result["fitness"]) if healthy else None
            if best is not None and (best_ever is None or best["fitness"] > highest):
                best_ever, highest = [best["index"], generation], best["fitness"]
            last = generation == generations
            event = {
                "generation": generation, "step": 5 * generation, "seconds": 97.3 * generation,
                "tokens": 51_200 * size * generation, "members": results,
                "best_index": (best or members[0])["index"], "samples_per_step": 64,
                "plan": None,
                "examples": [EXAMPLE | example for example in examples],
                "timesteps": None, "questions": 128, "evaluation": COST, "best_ever": best_ever,
            }  # fmt: skip
            offset = journal.size
            journal.append("generation", **event)
            if generation == resume_at:
                journal.append("resumed", generation=generation - 1, offset=offset)
                journal.append("generation", **event)
            if not last:
                members, next_index = next_members(members, results, space, next_index, generation, reason, rng)
        if test and best is not None:
            before, after = score(0.05, rng), score(members[best["slot"]]["skill"], rng)
            journal.append(
                "test", split="test", questions=256, index=best["index"],
                before={"fitness": before[0], "standard_error": before[1]},
                after={"fitness": after[0], "standard_error": after[1]},
                gain={"fitness": after[0] - before[0], "standard_error": math.hypot(before[1], after[1])},
                measure="greedy", cost=COST, scores=[after[0], after[0]],
            )  # fmt: skip
        journal.append("stopped", reason="all generations done")
    return run_dir


@pytest.fixture(scope="session")
def fake_run():
    """Return the writer; tests call it with a folder."""
    return write_fake_run
