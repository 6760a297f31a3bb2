"""KL of calibrated learning steps, measured by forward passes of its own on fresh samples.

    python benchmarking/calibration.py                          # all cases, ten seeds
    python benchmarking/calibration.py --cases cartpole --seeds 0 1 --steps 1    # a short trial

For each case and seed one agent takes learning steps with a calibrated learning rate. Before and
after each step, this script runs the agent's network or language model on samples that the step did
not learn from, drawn by the policy before it. It computes the exact KL(before || after) per action
over the whole vocabulary or distribution. The tables show this KL as a multiple of `target_kl` and
of the metric `step_target`, and its ratio to the metric `step_kl`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarking.records import write_record  # the path is set above
from evogrpo import GRPO, GymnasiumGroups, Population
from tests.tiny_models import tiny_model
from tests.tiny_training import tiny_env, tiny_population

FRESH = 10**6
"""Number of the learning step whose samples are the fresh ones of step 0."""
FRESH_SAMPLES = 128
"""Number of fresh samples: the KL of a policy differs between starting states."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of run.

    Attributes:
        kind: "cartpole", "pendulum" or "language".
        target_kl: KL of a learning step at first.
        options: Further options of the agent.
        then: `target_kl` after the first step, as after a mutation; None = the same.
    """

    kind: str
    target_kl: float = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)
    then: float | None = None


CASES: dict[str, Case] = {}
for _kind in ("cartpole", "pendulum", "language"):
    CASES[_kind] = Case(kind=_kind)
    for _target in (0.0025, 0.005, 0.02, 0.04):
        CASES[f"{_kind} target {_target}"] = Case(kind=_kind, target_kl=_target)
    CASES[f"{_kind} 0.01 then 0.04"] = Case(kind=_kind, then=0.04)
    CASES[f"{_kind} 0.04 then 0.01"] = Case(kind=_kind, target_kl=0.04, then=0.01)
    CASES[f"{_kind} cispo"] = Case(kind=_kind, options={"loss_type": "cispo"})
    CASES[f"{_kind} beta 0.3"] = Case(kind=_kind, options={"beta": 0.3})
    _epochs = {"update_epochs": 1 if _kind != "language" else 4}
    CASES[f"{_kind} epochs {_epochs['update_epochs']}"] = Case(kind=_kind, options=_epochs)
CASES["language sapo"] = Case(kind="language", options={"loss_type": "sapo"})
CASES["language gspo"] = Case(kind="language", options={"loss_type": "gspo"})
CASES["language bfloat16"] = Case(kind="language", options={"dtype": torch.bfloat16})
CASES["language minibatches"] = Case(
    kind="language", options={"update_epochs": 4, "batch_size": 16, "loss_type": "dapo"}
)


# ---- agents and their environments


def make_run(case: Case, seed: int) -> tuple[Population, Any, int]:
    """Return a population of one agent, its environment and its samples per learning step."""
    options = dict(case.options)
    if case.kind == "language":
        dtype = options.pop("dtype", torch.float32)
        model = tiny_model(seed=seed).to(dtype)
        shared: dict[str, Any] = {"actor_network": model, "max_output_tokens": 12, "group_size": 8}
        # The learning rate that tiny_population sets is only the first guess.
        population = tiny_population(1, **shared, seed=seed, target_kl=case.target_kl, **options)
        return population, tiny_env(data_batch_size=8, seed=seed), 64
    name, samples = {"cartpole": ("CartPole-v1", 128), "pendulum": ("Pendulum-v1", 16)}[case.kind]
    env = GymnasiumGroups(name, seed=seed)
    population = GRPO.population(
        1,
        observation_space=env.observation_space,
        action_space=env.action_space,
        group_size=8,
        seed=seed,
        target_kl=case.target_kl,
        **options,
    )
    return population, env, samples


# ---- own forward passes


def distributions(population: Population, batch: Any) -> Any:
    """Return the agent's action distributions at all counted actions of a batch."""
    bank = next(iter(population.members.banks.values()))
    mask = batch.action_mask
    if bank.rows_are_transitions:
        observations = batch.inputs.observations.flatten(0, 1)[mask.flatten()]
        outputs = bank.outputs(0, observations)
        if bank.distribution.free_parameters:
            mean, log_std = outputs.split(outputs.shape[1] // 2, 1)
            return Normal(mean.double(), log_std.double().exp())
        return Categorical(logits=outputs.double())
    # All prompts of this task have the same length, so rows are padded on the right only.
    prompts = torch.tensor(batch.inputs.prompts)[batch.inputs.prompt_ids]
    ids = torch.cat([prompts, batch.actions], 1)
    seen = torch.cat([torch.ones_like(prompts, dtype=torch.bool), batch.present], 1)
    logits = bank.policy(0)(ids, seen)[:, prompts.shape[1] - 1 : -1]
    return Categorical(logits=logits[mask].double())


def divergence(before: Any, after: Any) -> float:
    """Return the mean KL(before || after) per action, in nats."""
    values: Tensor = kl_divergence(before, after)
    return float(values.reshape(len(values), -1).sum(1).mean())


def measure_run(case: Case, seed: int, steps: int) -> list[dict[str, float]]:
    """Return for each learning step its KL in multiples of the target, and the reported one."""
    population, env, samples = make_run(case, seed)
    results = []
    for step in range(steps):
        if step == 1 and case.then is not None:
            population[0].target_kl = case.then
        rollout = population.collect(
            env, step=step, samples_per_step=samples, starts_per_step=samples // 8
        )
        fresh = population.collect(
            env,
            step=FRESH + step,
            samples_per_step=FRESH_SAMPLES,
            starts_per_step=FRESH_SAMPLES // 8,
        )
        batch = next(iter(fresh.experience.values()))
        trained = next(iter(rollout.experience.values()))
        before = distributions(population, batch)
        before_trained = distributions(population, trained)
        report = population.learn(rollout.experience, step=step)[0]
        target = float(population[0].target_kl)
        metrics = report.metrics
        own = divergence(before, distributions(population, batch))
        # Steps of language models that are not measured aim for target_kl, as all of theirs do.
        aim = metrics.get("step_target", target)
        results.append(
            {
                "ratio": own / target,
                "of_aim": own / aim,
                "trained": divergence(before_trained, distributions(population, trained)) / target,
                "reported": metrics.get("step_kl", math.nan) / target,
                "passes": metrics.get("step_passes", math.nan),
                "lr": metrics.get("learning_rate", math.nan),
            }
        )
    return results


# ---- tables


def within(values: Sequence[float], factor: float) -> int:
    """Count the values within a factor of 1."""
    return sum(1 / factor <= value <= factor for value in values)


def row(name: str, runs: Sequence[Sequence[Mapping[str, float]]], number: int) -> str:
    """Return one line of the table, for the first step or all later ones."""
    chosen = [run[:1] if number == 0 else run[1:] for run in runs]
    steps = [step for run in chosen for step in run]
    ratios = [step["ratio"] for step in steps]
    of_aim = [step["of_aim"] for step in steps]
    agreement = [step["reported"] / step["ratio"] for step in steps if step["reported"] > 0]
    trained = [step["trained"] / step["ratio"] for step in steps]
    cells = [
        name,
        "first" if number == 0 else "later",
        f"{within(ratios, 1.5)} of {len(ratios)}",
        f"{within(of_aim, 1.5)} of {len(of_aim)}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{statistics.median(ratios):.2f}",
        f"{statistics.median(of_aim):.2f}",
        f"{statistics.median(agreement):.2f}" if agreement else "-",
        f"{statistics.median(trained):.2f}",
        f"{statistics.median(step['lr'] for step in steps):.2g}",
    ]
    return " | ".join(cells)


HEADER = (
    "case | step | within 1.5 of target_kl | of step_target | range | median | median of"
    " step_target | step_kl / own | trained / fresh | lr"
)


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--cases", nargs="*", default=list(CASES), help="names, or patterns such as pendulum*"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(10)))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADER, flush=True)
    found = {}
    for name, case in CASES.items():
        if not any(fnmatch(name, pattern) for pattern in given.cases):
            continue
        runs = [measure_run(case, seed, given.steps) for seed in given.seeds]
        found[name] = runs
        for number in range(min(2, given.steps)):
            print(row(name, runs, number), flush=True)
    if given.out is not None:
        write_record(given.out, {"runs": found})


if __name__ == "__main__":
    main()
