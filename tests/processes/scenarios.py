"""Runs that one process and several have to come to the same end with; as a program it does those that it is told.

python -m tests.processes.scenarios FOLDER NAME...
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evogrpo import GRPO
from evogrpo.agents.rollout.collecting import collect
from evogrpo.cli import main
from evogrpo.evolution import FitnessConfig, SuccessiveHalving, Tournament
from evogrpo.interruption import Interrupted
from evogrpo.objective import Objective
from evogrpo.processes import processes
from evogrpo.training.loop.run import Evolution
from tests.rounding import assert_metrics_agree, assert_states_agree
from tests.tiny_steps import cart_pole, resumed_step_run, step_run
from tests.tiny_training import finish, resumed_run, tiny_agent, tiny_env, tiny_population, tiny_run, variety

LR = 1e-2


def networks(folder: Path) -> Evolution:
    """Small networks whose architectures evolve, with a second set for finalists."""
    fitness = FitnessConfig(second_set=2, finalists=2)
    return step_run(folder, size=5, generations=4, fitness=fitness, strategy=Tournament(z=0.0, backtrack=True))


def halving(folder: Path) -> Evolution:
    """Members that are stopped for good, so that a process has nobody left; training rewards decide."""
    return step_run(
        folder,
        size=4,
        strategy=SuccessiveHalving(),
        generations=4,
        samples_per_step=16,
        fitness=FitnessConfig(by="both", racing=True),
    )


def words(folder: Path) -> Evolution:
    """Language models whose groups are drawn again, held to their own snapshots."""
    objective = Objective(dynamic_sampling=1, reference="snapshot", reference_sync_steps=2)
    return tiny_run(folder, size=3, options={"objective": objective, "beta": 0.02}, generations=3)


def pair(folder: Path) -> Evolution:
    """Two language models, one of which several processes share: they drift, explore and are held to the base."""
    objective = Objective(dynamic_sampling=1, overlong_buffer=2)
    options = {"objective": objective, "beta": 0.02, "entropy_coef": 0.01, "micro_batch_tokens": 48}
    return tiny_run(folder, size=2, options=options, generations=2)


def lone(folder: Path) -> Evolution:
    """A small network, which one process has to itself while another helps to test it."""
    return step_run(folder, size=1, generations=2)


SCENARIOS: dict[str, Callable[[Path], Evolution]] = {
    "networks": networks,
    "halving": halving,
    "words": words,
    "pair": pair,
    "lone": lone,
}


def go_on(folder: Path, generations: int) -> Evolution:
    """Bring a run back that has ended, to go on up to so many generations."""
    resumed = resumed_run if folder.name in ("words", "pair") else resumed_step_run
    return resumed(folder, generations=generations)


def perform(folder: str, *names: str) -> None:
    """Do scenarios, each in a folder of its own; "name+6" goes on with one up to generation 6."""
    for name in names:
        scenario, _, generations = name.partition("+")
        where = Path(folder) / scenario
        finish(go_on(where, int(generations)) if generations else SCENARIOS[where.name](where))


def failing(folder: str) -> None:
    """Let the reward function of one process fail in the third learning step."""
    calls = []

    def reward(completion: str, answer: str, question: str) -> float:
        calls.append(completion)
        if processes().rank == 1 and len(calls) > 60:
            raise LookupError("the verifier is gone")
        return variety(completion, answer, question)

    finish(tiny_run(Path(folder), size=3, env=tiny_env(reward_fn=reward)))


def stopped(folder: str, step: int) -> None:
    """Ask one process for a stop after a learning step; the others are told. It also asks members alone."""
    run = networks(Path(folder))
    for report in run.reports():
        if processes().rank == 1 and getattr(report, "step", None) == step:
            for agent in run.population:
                with suppress(ValueError):
                    agent.test(run.env)
                    print("a member alone was tested")
            run.stop("enough")
    print(f"ended by {run.result.reason!r} after step {run.progress.step}")


def killed(folder: str, step: int) -> None:
    """Kill one process in the middle of a run."""
    for report in networks(Path(folder)).reports():
        if processes().rank == 1 and getattr(report, "step", None) == step:
            os.kill(os.getpid(), signal.SIGKILL)


def limited(folder: str) -> None:
    """Train until the time is up, by clocks that do not agree."""
    if processes().rank == 1:
        read = time.monotonic
        time.monotonic = lambda: 2.5 * read()  # type: ignore[assignment]
    env = cart_pole(max_episode_steps=200, validation_size=8)
    run = step_run(Path(folder), size=3, env=env, generations=None, max_seconds=3.0)
    finish(run)
    print(f"ended by {run.result.reason!r} after step {run.progress.step}")


OBJECTIVES: tuple[tuple[Objective, dict[str, Any]], ...] = (
    (Objective(loss_type="grpo", top_entropy_quantile=0.5), {"beta": 0.05, "entropy_coef": 0.01}),
    (Objective(loss_type="dapo", whiten_advantages=True, kl_estimator="k1", kl_placement="reward"), {"beta": 0.05}),
    (Objective(loss_type="bnpo", advantage="mean_only", reward_norm="running"), {}),
    (Objective(loss_type="dr_grpo", advantage="batch_std", kl_target=0.01), {"beta": 0.05}),
    (Objective(loss_type="gspo", advantage="rloo", reference="snapshot", reference_sync_steps=2), {"beta": 0.05}),
    (Objective(loss_type="luspo", advantage="gdpo"), {}),
    (Objective(loss_type="cispo", advantage="return_to_go_timestep"), {}),
    (Objective(loss_type="sapo", importance_correction="token_truncate"), {"entropy_coef": 0.01}),
    (Objective(loss_type="gmpo", advantage="reinforce", overlong_buffer=3), {"reduce_memory_peak": False}),
)
"""Every loss type, with switches of all kinds."""


def divided() -> None:
    """Let one member learn in all processes together, and again in each alone, from what they sampled together."""
    torch.set_num_threads(1)
    for objective, options in OBJECTIVES:
        scored = list[str]()

        def reward(completion: str, answer: str, question: str, scored: list[str] = scored) -> float:
            scored.append(completion)
            return variety(completion, answer, question)

        given = {"objective": objective, "lr": LR, "group_size": 2, "batch_size": 6, "update_epochs": 2} | options
        env, given = tiny_env(reward_fn=reward), given | {"micro_batch_tokens": 40}
        together, alone = tiny_population(1, **given), tiny_agent(**given)
        passes, own_passes = (passes_of(members) for members in (together.members, alone.members))
        for step in range(2):
            before = len(scored)
            found = together.collect(env, step=step, samples_per_step=10, block=5)
            assert sum(processes().all(len(scored) - before)) == 10  # each completion is rewarded once
            same = collect(alone.members, [alone.learner(step)], env, samples_per_step=10, block=5)
            assert found.scores.completions == same.scores.completions
            assert found.scores.rewards.tolist() == same.scores.rewards.tolist()
            assert torch.equal(found.experience["default"].actions, same.experience["default"].actions)
            assert found.tokens == same.tokens
            passes.clear(), own_passes.clear()
            report = together.learn(found.experience, step=step)[0]
            own = alone.learn_together(alone.members, [alone.learner(step)], found.experience)[0]
            assert_metrics_agree(dict(report.metrics), dict(own.metrics))
            assert (report.tokens, report.optimizer_steps, report.samples) == (own.tokens, own.optimizer_steps, 10)
            counts = processes().all(len(passes))
            assert sum(counts) == len(own_passes)  # each micro-batch is done once
            assert max(counts) < len(own_passes), objective
        state = together.members.banks.state(0)
        assert_states_agree(state, alone.members.banks.state(0), lr=LR)
        for other in processes().all({name: value.numpy() for name, value in state.items()}):
            assert all(np.array_equal(other[name], value.numpy()) for name, value in state.items())


def passes_of(members: Any) -> list[None]:
    """Return a list that grows by an entry with every forward pass."""
    passes = list[None]()

    @contextmanager
    def counted() -> Iterator[None]:
        passes.append(None)
        yield

    members.policies["default"].bank.autocast = counted
    return passes


class Fragile(GRPO):
    """An algorithm that fails in the leading process alone, while the others are learning."""

    @classmethod
    def learn_together(cls, members: Any, learners: Any, experience: Any) -> Any:
        """Learn, where that is possible."""
        if processes().leads:
            raise BlockingIOError("the disk is busy")
        return super().learn_together(members, learners, experience)


def troubled(folder: str) -> None:
    """Let things go wrong in one of the processes that share a member, and at last kill it."""
    calls, trouble = list[str](), dict[int, Callable[[], object]]()

    def reward(completion: str, answer: str, question: str) -> float:
        calls.append(completion)
        if processes().rank == 1 and len(calls) in trouble:
            trouble[len(calls)]()
        return variety(completion, answer, question)

    def run(name: str, **options: Any) -> Evolution:
        calls.clear()
        return tiny_run(Path(folder) / name, size=1, env=tiny_env(reward_fn=reward), **options)

    def fail() -> None:
        raise LookupError("the verifier is gone")

    def abandon() -> None:
        stopped.stop("enough")
        raise Interrupted

    trouble[10] = fail
    for name, kind in (("reward", GRPO), ("learning", Fragile)):
        try:
            finish(run(name, kind=kind))
        except Exception as error:  # noqa: BLE001  # the test looks at what it says
            print(f"{name}: {error}")
        trouble.clear()
    stopped = run("stopped")
    trouble[10] = abandon
    finish(stopped)
    print(f"stopped by {stopped.result.reason!r} after step {stopped.progress.step}")
    last = run("killed")
    trouble[10] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    finish(last)


def commanded(folder: str, restarts: int, *words: str) -> None:
    """Run a command of `evogrpo` in a folder, as a launcher does of whose processes so many have ended before.

    The last process is on a machine of its own, whose launcher counts for itself.
    """
    os.chdir(folder)
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts if last else 0)
    sys.exit(main(words))
