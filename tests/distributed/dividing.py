"""Work divided among ranks, compared with the same work in one process."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from evogrpo import GRPO
from evogrpo.config.objective import Objective
from evogrpo.distributed import ProcessError, processes
from evogrpo.interruption import Interrupted
from evogrpo.records import Batch
from tests.policy_banks import assert_states_agree
from tests.rounding import assert_metrics_agree
from tests.tiny_models import EOS
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import (
    collect_alone,
    finish,
    shared_tokenizer,
    tiny_agent,
    tiny_env,
    tiny_population,
    tiny_run,
    variety,
)
from tests.two_turns import GuessTwice

LR = 1e-2
OBJECTIVES: tuple[tuple[Objective, dict[str, Any]], ...] = (
    (
        Objective(loss_type="grpo", top_entropy_quantile=0.5, kl_target=0.01),
        {"beta": 0.05, "entropy_coef": 0.01},
    ),
    (
        Objective(
            loss_type="dapo", whiten_advantages=True, kl_estimator="k1", kl_placement="reward"
        ),
        {"beta": 0.05},
    ),
    (
        Objective(loss_type="gspo", advantage="rloo", reference="snapshot", reference_sync_steps=2),
        {"beta": 0.05},
    ),
    (
        Objective(
            loss_type="gmpo", advantage="reinforce", reward_norm="running", overlong_buffer=3
        ),
        {"reduce_memory_peak": False},
    ),
)
"""Means over tokens, completions and batches; one and two forward passes; with and without
reference passes.
"""


SAMPLES = 10
TALK = {"max_output_tokens": 3, "temperature": 2.0, "eos_token_ids": (EOS, 5, 9, 17, 33)}
"""Conversations whose turns end early."""


def divided() -> None:
    """Sample and learn on all ranks together and on each alone, with many objectives."""
    for objective, options in OBJECTIVES:
        rewarded = list[str]()

        def reward(
            completion: str, answer: str, question: str, rewarded: list[str] = rewarded
        ) -> float:
            rewarded.append(completion)
            return variety(completion, answer, question)

        compare_learning_steps(
            tiny_env(reward_fn=reward), {"objective": objective, **options}, rewarded
        )
    sum_in_rank_order()
    compare_learning_steps(GuessTwice(tokenizer=shared_tokenizer()), TALK)
    play_together()
    differ()
    fail_between_exchanges()
    free_a_failed_pass()
    run_out_of_memory(beta=0.0)  # nothing is scored
    run_out_of_memory(beta=0.05)  # scored first


def compare_learning_steps(
    env: Any, options: Mapping[str, Any], rewarded: list[str] | None = None
) -> None:
    """Take one learning step on all ranks together, and one on this rank alone."""
    given = {
        "lr": LR,
        "group_size": 2,
        "batch_size": 10,
        "update_epochs": 2,
        "micro_batch_tokens": 24,
        **options,
    }
    together = tiny_population(1, **given)
    alone = tiny_agent(**given)
    passed = rows_passed(together.members)
    own_passed = rows_passed(alone.members)
    found = together.collect(env, step=0, samples_per_step=SAMPLES, starts_per_step=SAMPLES // 2)
    if rewarded is not None:
        assert sum(processes().all_gather(len(rewarded))) == SAMPLES  # each completion once
    learner = alone.learner(0)
    same = collect_alone(alone, env, samples=SAMPLES, starts_per_step=SAMPLES // 2)
    assert found.scores.completions == same.scores.completions
    assert found.scores.rewards.tolist() == same.scores.rewards.tolist()
    assert found.tokens == same.tokens
    batch = found.experience["default"]
    own_batch = same.experience["default"]
    for name in (
        "actions",
        "present",
        "action_mask",
        "rewards",
        "group_ids",
        "member_ids",
        "truncated",
    ):
        assert torch.equal(getattr(batch, name), getattr(own_batch, name)), name
    experience = {"default": repeating(batch)}
    passed.clear(), own_passed.clear()
    report = together.learn(experience, step=0)[0]
    single = alone.learn_together(alone.members, [learner], experience)[0]
    assert_metrics_agree(dict(report.metrics), dict(single.metrics))
    assert (report.tokens, report.optimizer_steps) == (single.tokens, single.optimizer_steps)
    assert len(report.advantages) == SAMPLES
    counts = processes().all_gather(sum(passed))
    assert sum(counts) == sum(own_passed)  # each row once
    assert max(counts) < sum(own_passed), options
    state = together.members.state(0)
    assert_states_agree(state, alone.members.state(0), lr=LR)
    assert_equal_everywhere(state)


def repeating(batch: Batch) -> Batch:
    """Return a batch with two equal completions that have different rewards."""
    assert batch.group_ids[0] == batch.group_ids[1]
    rows = torch.arange(len(batch))
    rows[1] = 0
    return replace(batch.select(rows), rewards=batch.rewards)


class Counting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Counts the episodes of this rank."""

    played = 0

    def reset(self, **options: Any) -> Any:
        """Count, and reset."""
        Counting.played += 1
        return super().reset(**options)


def play_together() -> None:
    """Play with a small network: each rank plays some episodes, and all ranks get all rows."""
    env = cart_pole(wrappers=[Counting])
    population = step_population(1, env)
    Counting.played = 0
    found = population.collect(env, step=0, samples_per_step=8, starts_per_step=2)
    assert processes().all_gather((Counting.played, len(found.experience["default"]))) == [
        (4, 8),
        (4, 8),
    ]


def differ() -> None:
    """Change a train state on one rank: all ranks learn which one differs."""
    population = step_population(2)
    population.check_replicas()
    if processes().rank == 1:
        state = population[1].state()
        population[1].load_state(state | {"weights": state["weights"] + 1})
    with pytest.raises(ProcessError, match=r"rank 0 and ranks \[1\]"):
        population.check_replicas()


def sum_in_rank_order() -> None:
    """Sum numbers whose sum depends on the order: all ranks get the bits of the order of ranks."""
    own = torch.randn(1001, generator=torch.Generator().manual_seed(processes().rank))
    total, *others = processes().all_gather(own)
    for other in others:
        total += other
    assert torch.equal(processes().all_reduce(own), total)


def fail_between_exchanges() -> None:
    """Fail on one rank while the other sums gradients: both raise an error and can continue."""

    def work() -> None:
        processes().gather_results(lambda: None)
        if processes().rank == 1:
            raise LookupError("the buffer is gone")
        processes().all_reduce(torch.ones(3))

    with pytest.raises(
        LookupError if processes().rank == 1 else ProcessError, match="the buffer is gone"
    ):
        processes().gather_results(work)
    assert processes().all_reduce(torch.ones(3)).tolist() == [processes().size] * 3


def free_a_failed_pass() -> None:
    """Free the tensors of a pass in which one rank ran out of memory, before it is repeated."""
    held = list[Any]()

    def work() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        if processes().rank == 1:
            raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        processes().gather_results(work)
    assert [reference() for reference in held] == [None]


def run_out_of_memory(beta: float) -> None:
    """Let one rank run out of memory while it scores or learns from several rows."""
    given = {
        "objective": Objective(),
        "lr": LR,
        "beta": beta,
        "group_size": 2,
        "micro_batch_tokens": 24,
    }
    together = tiny_population(1, **given)
    alone = tiny_agent(**given)
    found = together.collect(tiny_env(), step=0, samples_per_step=8, starts_per_step=4)
    bank = together.members.banks["default"]

    @contextmanager
    def small() -> Iterator[None]:
        if processes().rank == 1 and bank.micro_batch_tokens > 12:
            raise torch.OutOfMemoryError("no memory left")
        yield

    bank.base.autocast = small
    together.learn(found.experience, step=0)
    assert processes().all_gather(bank.micro_batch_tokens) == [12] * processes().size
    alone.learn_together(alone.members, [alone.learner(0)], found.experience)
    assert_states_agree(together.members.state(0), alone.members.state(0), lr=LR)
    assert_equal_everywhere(together.members.state(0))


def assert_equal_everywhere(state: Mapping[str, Tensor]) -> None:
    """Check that all ranks have equal bits."""
    for other in processes().all_gather({name: value.numpy() for name, value in state.items()}):
        assert all(np.array_equal(other[name], value.numpy()) for name, value in state.items())


def rows_passed(members: Any) -> list[int]:
    """Return a list that gets the number of rows of every forward pass."""
    passed = list[int]()
    base = members.banks["default"].base
    hidden = base.hidden

    def counted(prompts: Any, slots: Any, rows: Tensor, *rest: Any) -> Tensor:
        passed.append(len(rows))
        result: Tensor = hidden(prompts, slots, rows, *rest)
        return result

    base.hidden = counted
    return passed


class Fragile(GRPO):
    """An algorithm that fails on rank 0 while the other ranks learn."""

    @classmethod
    def learn_together(cls, members: Any, learners: Any, experience: Any) -> Any:
        """Raise an error on rank 0, and learn on the others."""
        if processes().is_rank_zero:
            raise BlockingIOError("the disk is busy")
        return super().learn_together(members, learners, experience)


def troubled(folder: str) -> None:
    """Let one rank fail while the other learns, and then stop one while it samples."""
    try:
        finish(tiny_run(Path(folder) / "learning", size=1, kind=Fragile))
    except Exception as error:  # noqa: BLE001  # the test looks at what it says
        print(f"learning: {error}")
    calls = list[str]()

    def reward(completion: str, answer: str, question: str) -> float:
        calls.append(completion)
        if processes().rank == 1 and len(calls) == 10:
            run.stop("enough")
            raise Interrupted
        return variety(completion, answer, question)

    run = tiny_run(Path(folder) / "stopped", size=1, env=tiny_env(reward_fn=reward))
    finish(run)
    print(f"stopped by {run.result.reason!r} after step {run.run_state.step}")
