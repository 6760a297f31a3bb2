"""Runs with the same result in one process and in several, and runs in which one rank fails."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.algorithms.population import Population
from evogrpo.cli import main
from evogrpo.config.network import NetworkConfig
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.distributed import is_rank_zero, processes
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.evolution import FitnessConfig, Tournament
from evogrpo.members.bank import Sampler
from evogrpo.members.language import vllm_sampler
from evogrpo.members.language.loading import load_base
from evogrpo.members.language.vllm_colocate import ColocatedVLLMSampler
from evogrpo.members.language.vllm_sampler import VLLMSampler
from evogrpo.training.evolve import Run
from evogrpo.training.proposals import Proposer
from evogrpo.training.trainer import Trainer
from tests import vllm_stub
from tests.distributed.whole_sampler import WholeSampler
from tests.envs import joint_probes
from tests.forking import CHARTS
from tests.strategies.user_defined import Halving
from tests.tiny_models import tiny_model
from tests.tiny_steps import QUICK, STEP_SPACE, cart_pole, start_run, step_run
from tests.tiny_training import (
    SPACE,
    TASK_SPACE,
    finish,
    resumed_run,
    settings_env,
    shared_model,
    tiny_env,
    tiny_run,
    variety,
)


def networks(folder: Path) -> Trainer:
    """Small networks whose architectures evolve."""
    return step_run(folder, size=5, generations=2, strategy=Tournament(z=0.0))


PARTS = 6
"""Shards requested: the greatest common divisor with the number of ranks, so two of two and three
of three.
"""


def base_of(folder: Path) -> PreTrainedModel:
    """Return the base model of a scenario, sharded if `parts` is in its path."""
    if "parts" not in folder.parts:
        return shared_model()
    stored = next(parent / "base" for parent in folder.parents if (parent / "base").is_dir())
    return load_base(stored, parts=PARTS).model


def sampler_of(folder: Path) -> Callable[[Population], Sampler] | None:
    """Return a sampler for a sharded base; None = members sample themselves."""
    return WholeSampler if "parts" in folder.parts else None


def language(
    folder: Path, size: int, objective: Objective | None = None, **options: Any
) -> Trainer:
    """Language models; `options` are those of members and of the schedule."""
    of_run = ("env", "generations", "steps_per_generation", "strategy", "proposer")
    run = {"generations": 2, "test_questions": 4} | {
        name: options.pop(name) for name in of_run if name in options
    }
    options = {"beta": 0.02, "actor_network": base_of(folder), "source": "tiny", **options}
    if objective is not None:
        options["objective"] = objective
    return tiny_run(folder, size=size, options=options, make_sampler=sampler_of(folder), **run)


def words(folder: Path) -> Trainer:
    """Language models with dynamic sampling and own references."""
    objective = Objective(dynamic_sampling=1, reference="snapshot", reference_sync_steps=2)
    return language(folder, 3, objective, generations=3)


def longer(candidate: Any, dataset: Any, names: Any) -> dict[str, str]:
    """Propose longer texts; only rank 0 asks."""
    assert is_rank_zero()
    return {name: candidate[name] + str(len(dataset[name]) % 10) for name in names}


def pair(folder: Path) -> Trainer:
    """Two language models: dynamic sampling, entropy bonus, KL to the base, controlled steps.

    Their task settings evolve, and rank 0 asks for new texts.
    """
    objective = Objective(dynamic_sampling=1, overlong_buffer=2)
    options = {"target_kl": 0.01, "entropy_coef": 0.01, "micro_batch_tokens": 48}
    texts = {"task": {"style": {"choices": ["", "12+", "3"], "proposed": True}}}
    space = {**SPACE, **TASK_SPACE, **texts}
    return language(
        folder,
        2,
        objective,
        steps_per_generation=1,
        env=settings_env(),
        proposer=Proposer(function=longer),
        hp_config=HyperparameterConfig(**space),
        **options,
    )


def team(folder: Path) -> Trainer:
    """Members with several policies."""
    env = PettingZooGroups(joint_probes.Favours, validation_size=6, test_size=4, score="sum")
    population = MultiAgentGRPO.population(
        2,
        env.observation_spaces,
        env.action_spaces,
        policies="prefix",
        hp_config=STEP_SPACE,
        group_size=4,
        batch_size=8,
        update_epochs=2,
        network=NetworkConfig(hidden=(6,)),
    )
    return start_run(population, env, folder, **QUICK | {"generations": 2})


def raced(folder: Path) -> Trainer:
    """Small networks with racing, importance correction and calibrated learning rates."""
    return step_run(
        folder,
        size=4,
        fitness=FitnessConfig(racing=True),
        options={
            "objective": Objective(loss_type="dapo", importance_correction="token_truncate"),
            "hp_config": HyperparameterConfig(target_kl=(0.0025, 0.04)),
        },
        generations=2,
        steps_per_generation=1,
        samples_per_step=16,
    )


def divergent(folder: Path) -> Trainer:
    """Small networks with the full KL."""
    return step_run(
        folder,
        size=6,
        options={
            "objective": Objective(loss_type="dapo", kl_estimator="full", reference="old"),
            "beta": 0.05,
        },
        generations=2,
    )


def served(folder: str, url: str) -> None:
    """Let a vLLM server sample for language models."""
    where = Path(folder)
    vllm_sampler.REQUESTS_PER_SERVER = 2  # faster with the server of the tests
    finish(
        tiny_run(
            where / "run",
            size=3,
            options={"actor_network": base_of(where)},
            make_sampler=lambda population: VLLMSampler(url, where / "adapters", timeout=30.0),
            generations=2,
        )
    )


def colocated(folder: str) -> None:
    """Let vLLM in each process sample for language models."""
    where = Path(folder)
    model = shared_model()
    model.config.name_or_path = "tiny"
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = vllm_stub.install(monkeypatch, lambda name, dtype: tiny_model())
        finish(
            tiny_run(
                where / "run",
                size=3,
                make_sampler=lambda population: ColocatedVLLMSampler(adapters_dir=where),
                generations=1,
            )
        )
    (llm,) = engine.engines
    rank = processes().rank
    assert llm.variables == {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    (where / f"engine-{rank}.json").write_text(json.dumps([llm.settings["seed"], llm.rows]))


def thinned(folder: Path) -> Trainer:
    """Language models that retire."""
    return language(
        folder,
        3,
        strategy=Halving(survivors=2),
        beta=0.0,
        micro_batch_tokens=48,
        steps_per_generation=1,
    )


def full(folder: Path) -> Trainer:
    """Language models that train all weights."""
    options = {
        "lora_config": None,
        "full_finetuning": True,
        "hp_config": None,
        "lr": 1e-3,
        "micro_batch_tokens": 48,
    }
    return language(folder, 2, steps_per_generation=1, **options)


SCENARIOS: dict[str, Callable[[Path], Trainer]] = {
    scenario.__name__: scenario
    for scenario in (networks, words, pair, team, raced, divergent, thinned, full)
}


def go_on(folder: Path, generations: int) -> Trainer:
    """Resume a finished run with more generations."""
    if folder.name in ("words", "pair", "thinned"):
        return resumed_run(
            folder,
            env=settings_env() if folder.name == "pair" else None,
            model=base_of(folder),
            make_sampler=sampler_of(folder),
            proposer=Proposer(function=longer) if folder.name == "pair" else None,
            generations=generations,
        )
    return resumed_run(folder, generations=generations)


def perform(folder: str, *names: str) -> None:
    """Run scenarios, each in its own folder; "name+3" resumes one up to generation 3."""
    for name in names:
        scenario, _, generations = name.partition("+")
        where = Path(folder) / scenario
        if generations:
            run = go_on(where, int(generations))
        else:
            run = SCENARIOS[where.name](where)
        finish(run)


def quantised(folder: str) -> None:
    """Train language models on a base in 8 bits."""
    base = load_base(Path(folder).parent / "base", dtype="int8").model
    finish(language(Path(folder), 3, actor_network=base, micro_batch_tokens=24))


def failing(folder: str) -> None:
    """Let the reward function of one rank raise an error in the second learning step."""
    calls = []

    def reward(completion: str, answer: str, question: str) -> float:
        calls.append(completion)
        if processes().rank == 1 and len(calls) > 11:
            raise LookupError("the verifier is gone")
        return variety(completion, answer, question)

    finish(tiny_run(Path(folder), size=1, env=tiny_env(reward_fn=reward)))


def stopped(folder: str, step: int) -> None:
    """Request a stop on one rank after a learning step.

    Also try to test members on that rank alone.
    """
    run = networks(Path(folder))
    for report in run.reports():
        if processes().rank == 1 and getattr(report, "step", None) == step:
            for agent in run.population:
                with suppress(ValueError):
                    agent.test(run.env)
                    print("a member alone was tested")
            run.stop("enough")
    print(f"ended by {run.result.reason!r} after step {run.run_state.step}")


def killed(folder: str, step: int) -> None:
    """Kill one rank in the middle of a run."""
    for report in networks(Path(folder)).reports():
        if processes().rank == 1 and getattr(report, "step", None) == step:
            os.kill(os.getpid(), signal.SIGKILL)


def looped(folder: str, number: int) -> None:
    """Iterate over a run until one rank gets a signal after a learning step."""
    trainer = networks(Path(folder))
    record: Any = trainer._record_step

    def signalled(*step: Any) -> Any:
        report = record(*step)
        if processes().rank == 1 and report.step == 3:
            signal.raise_signal(number)
        return report

    trainer._record_step = signalled  # type: ignore[method-assign]
    for _ in Run(trainer):
        pass
    print("after the loop")


def limited(folder: str) -> None:
    """Train up to a time limit, with clocks that differ between ranks."""
    if processes().rank == 1:
        read = time.monotonic
        time.monotonic = lambda: 2.5 * read()  # type: ignore[assignment]
    env = cart_pole(max_episode_steps=200, validation_size=8)
    run = step_run(Path(folder), size=3, env=env, generations=None, max_seconds=1.0)
    finish(run)
    print(f"ended by {run.result.reason!r} after step {run.run_state.step}")


def commanded(folder: str, restarts: int, *words: str) -> None:
    """Run a command of `evogrpo` in a folder, as a launcher does after this many restarts.

    The last process is on a machine of its own, whose launcher counts for itself.
    """
    os.chdir(folder)
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts if last else 0)
    sys.modules.update(dict.fromkeys(CHARTS))  # drawing takes longer than the run
    sys.exit(main(words))
