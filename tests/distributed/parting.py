"""Runs of a sharded base, compared with the whole base."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel

from evogrpo.algorithms.evaluation import evaluate
from evogrpo.algorithms.population import Population
from evogrpo.distributed import RunStop, processes, timeout_minutes
from evogrpo.interruption import Interrupted
from evogrpo.members.language.fsdp import layers_of, sharded_over
from evogrpo.members.language.loading import fingerprint, load_base
from tests.distributed.dividing import TALK
from tests.distributed.whole_sampler import WholeSampler
from tests.policy_banks import assert_states_agree
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.tiny_steps import start_run
from tests.tiny_training import (
    collect_alone,
    finish,
    shared_tokenizer,
    tiny_agent,
    tiny_env,
    tiny_population,
    tiny_run,
)
from tests.two_turns import GuessTwice

LR = 1e-2


def store(model: PreTrainedModel, folder: Path) -> None:
    """Write a base model and its tokenizer."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def compare_sharded(folder: str, *architectures: str) -> None:
    """Sample and learn with sharded bases of several architectures, and compare with whole ones."""
    for architecture in architectures:
        base = load_base(Path(folder) / architecture, parts=processes().size).model
        whole = tiny_model(architecture)
        assert sharded_over(base) == processes().size
        assert fingerprint(base) == fingerprint(whole)
        kept = sum(
            getattr(weights, "_local_tensor", weights).numel()
            for weights in layers_of(base).parameters()
        )
        for group in distributed_c10d._world.pg_map:
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(minutes=timeout_minutes())
        assert kept <= 0.6 * sum(weights.numel() for weights in layers_of(whole).parameters())
        for recompute in (False, True):
            options = {"micro_batch_tokens": 48, "gradient_checkpointing": recompute}
            compare_learning_steps(base, whole, architecture, **options)
            compare_with_idle_ranks(base, whole, architecture, gradient_checkpointing=recompute)
        stop_on_one_rank(base, architecture)
    check_refused_calls(base)


def sharded_population(
    size: int, base: PreTrainedModel, architecture: str, **options: Any
) -> Population:
    """Return members of a sharded base, whose completions another engine samples."""
    population = tiny_population(size, actor_network=base, **options)
    population.sample_with(WholeSampler(population, architecture))
    return population


def compare_learning_steps(
    base: PreTrainedModel, whole: PreTrainedModel, architecture: str, **more: Any
) -> None:
    """Compare a step of three members on one base with three agents that have a base each."""
    options: dict[str, Any] = {"lr": LR, "beta": 0.05, "group_size": 2, "update_epochs": 2, **more}
    together = sharded_population(3, base, architecture, **options)
    env = tiny_env()
    samples = 6
    found = together.collect(env, step=0, samples_per_step=samples, starts_per_step=samples // 2)
    reports = together.learn(found.experience, step=0)
    for agent in together:
        agent_of_whole = tiny_agent(actor_network=whole, **options)
        agent_of_whole.index = agent.index
        alone = collect_alone(agent_of_whole, env, samples=samples, starts_per_step=samples // 2)
        rows = found.experience["default"].select_members([agent.slot])
        assert torch.equal(rows.actions, alone.experience["default"].actions)
        report = agent_of_whole.learn_together(
            agent_of_whole.members, [agent_of_whole.learner(0)], alone.experience
        )[0]
        assert report.optimizer_steps == reports[agent.slot].optimizer_steps
        assert_states_agree(
            together.members.state(agent.slot), agent_of_whole.members.state(0), lr=LR
        )


def compare_with_idle_ranks(
    base: PreTrainedModel, whole: PreTrainedModel, architecture: str, **more: Any
) -> None:
    """Divide one group and one question: a rank without work joins the passes of others."""
    options: dict[str, Any] = {"group_size": 2, **TALK, **more}
    together = sharded_population(1, base, architecture, **options)
    agent_of_whole = tiny_agent(actor_network=whole, **options)
    env = GuessTwice(tokenizer=shared_tokenizer())
    found = together.collect(env, step=0, samples_per_step=2, starts_per_step=1)
    alone = collect_alone(agent_of_whole, env, samples=2, starts_per_step=1)
    assert found.scores.completions == alone.scores.completions
    together.learn(found.experience, step=0)
    agent_of_whole.learn_together(
        agent_of_whole.members, [agent_of_whole.learner(0)], alone.experience
    )
    assert_states_agree(together.members.state(0), agent_of_whole.members.state(0), lr=LR)
    answers = evaluate(together.members, [0], env, "validation", questions=1)
    same = evaluate(agent_of_whole.members, [0], env, "validation", questions=1)
    assert answers.tolist() == same.tolist()


def stop_on_one_rank(base: PreTrainedModel, architecture: str) -> None:
    """Request a stop of one rank before it samples or learns: all ranks stop and can continue."""
    together = sharded_population(2, base, architecture, micro_batch_tokens=24)
    env = tiny_env()
    stop = RunStop(processes())
    found = together.collect(env, step=0, samples_per_step=8, starts_per_step=2, stop=stop)
    if processes().rank == 1:
        stop.request("enough")
    for work in (
        lambda: together.collect(env, step=0, samples_per_step=8, starts_per_step=2, stop=stop),
        lambda: together.learn(found.experience, step=0, stop=stop),
    ):
        with pytest.raises(Interrupted):
            work()
    together.learn(found.experience, step=0)
    together.check_replicas()


def check_refused_calls(base: PreTrainedModel) -> None:
    """Check that calls which one rank makes alone are refused."""
    population = tiny_population(2, actor_network=base)
    agent = population[processes().rank]
    with pytest.raises(ValueError, match="2 processes"):
        population.members.policy(agent.slot)(torch.ones((1, 3), dtype=torch.long))
    with pytest.raises(ValueError, match="sampler"):
        start_run(population, tiny_env(), None, generations=1)  # before training
    with pytest.raises(ValueError, match="sampler"):
        population.collect(tiny_env(), step=0, samples_per_step=4, starts_per_step=1)
    with pytest.raises(ValueError, match="model object"):
        load_base(tiny_model(), parts=2)


def train_with_memory_error(folder: str) -> None:
    """Let one rank be out of memory in the middle of a pass of a sharded base."""
    base = load_base(Path(folder) / "base", parts=2).model

    def run_out_of_memory(*_: object) -> None:
        if processes().rank == 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no memory left")

    run = tiny_run(
        Path(folder) / "run", size=2, options={"actor_network": base}, make_sampler=WholeSampler
    )
    layers_of(base)[-1].register_forward_pre_hook(run_out_of_memory)
    finish(run)
