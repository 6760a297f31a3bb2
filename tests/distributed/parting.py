"""What processes do that hold a base together, beside what one does that has all of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from evogrpo.algorithms.rollout.collect import collect
from evogrpo.distributed import Errands, processes
from evogrpo.models.language.fsdp import layers_of, sharded_layers, sharded_over
from evogrpo.models.language.loading import fingerprint, load_base
from evogrpo.testing.policy_banks import assert_states_agree
from tests.tiny_models import tiny_model, tiny_tokenizer
from tests.tiny_training import finish, tiny_agent, tiny_env, tiny_population, tiny_run, variety

LR = 1e-2


def store(model: PreTrainedModel, folder: Path) -> None:
    """Write a base and its tokenizer, to be loaded from there."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def parted_and_whole(folder: str, *architectures: str) -> None:
    """Let members of many architectures sample and learn over a base in parts, as agents do that have it whole."""
    for architecture in architectures:
        base = load_base(Path(folder) / architecture, parts=processes().size).model
        whole = tiny_model(architecture)
        assert sharded_over(base) == processes().size
        assert fingerprint(base) == fingerprint(whole)
        kept = sum(getattr(weights, "_local_tensor", weights).numel() for weights in layers_of(base).parameters())
        assert kept <= 0.6 * sum(weights.numel() for weights in layers_of(whole).parameters())
        learn_both_ways(base, whole, fail=False)
    learn_both_ways(base, whole, fail=True)
    refuse(base, Path(folder))


def errands_of(base: PreTrainedModel) -> Errands:
    """Return what the processes that hold a base do together."""
    layers = sharded_layers(base)
    assert layers is not None
    return layers._errands


def learn_both_ways(base: PreTrainedModel, whole: PreTrainedModel, *, fail: bool) -> None:
    """Take a learning step with members of all processes, and one with those of this process in an agent each.

    Args:
        base: In parts.
        whole: The same, whole.
        fail: Whether one process runs out of memory in the middle of a pass, now and then, and takes smaller ones.
    """
    options: dict[str, Any] = {"lr": LR, "beta": 0.05, "group_size": 2, "update_epochs": 2, "micro_batch_tokens": 48}
    together = tiny_population(processes().size + 1, actor_network=base, **options)
    model = together.members.bank.base
    with model.working():
        assert model.uses_fast_llama == (base.config.model_type in ("qwen3", "llama"))
    env, samples, short = tiny_env(), 6, list[int]()

    def run_short(*_: object) -> None:
        if fail and processes().rank == 1 and torch.is_grad_enabled() and len(short) < 2:
            short.append(1)
            raise torch.OutOfMemoryError("no memory left")

    begun = list[bool]()
    ahead = layers_of(base)[0].register_forward_hook(lambda *_: begun.append(errands_of(base)._begun is not None))
    found = together.collect(env, step=0, samples_per_step=samples, block=samples // 2)
    ahead.remove()
    assert sum(begun) >= len(begun) / 2 > 0  # the second layer is on its way while the first one computes
    handle = layers_of(base)[-1].register_forward_pre_hook(run_short)
    reports = together.learn(found.experience, step=0)
    handle.remove()
    assert len(short) == 2 * (fail and processes().rank == 1)
    for agent in together:
        if agent.slot not in together.members.places.own:
            continue
        own = tiny_agent(actor_network=whole, **options)
        own.index = agent.index
        alone = collect(own.members, [own.learner(0)], env, samples_per_step=samples, block=samples // 2)
        rows = found.experience["default"].select_members([together.members.places.place(agent.slot)])
        assert torch.equal(rows.actions, alone.experience["default"].actions)
        report = own.learn_together(own.members, [own.learner(0)], alone.experience)[0]
        assert report.optimizer_steps == reports[agent.slot].optimizer_steps
        assert_states_agree(together.members.banks.state(agent.slot), own.members.banks.state(0), lr=LR)


def refuse(base: PreTrainedModel, folder: Path) -> None:
    """Ask a base in parts for what one process alone cannot do."""
    population = tiny_population(2, actor_network=base)
    own = population[processes().rank]
    with pytest.raises(ValueError, match="2 processes"):
        population.members.policy(own.slot)(torch.ones((1, 3), dtype=torch.long))
    with pytest.raises(ValueError, match="include_base"):
        own.save_checkpoint(folder / f"saved-{processes().rank}", include_base=True)
    with pytest.raises(ValueError, match="load_base"):
        tiny_population(2, actor_network=base, device="meta")
    with pytest.raises(ValueError, match="model object"):
        load_base(tiny_model(), parts=2)


def failing(folder: str) -> None:
    """Let the reward function of one process fail, while the other goes on to run the base."""
    calls = list[str]()

    def reward(completion: str, answer: str, question: str) -> float:
        calls.append(completion)
        if processes().rank == 1 and len(calls) > 20:
            raise LookupError("the verifier is gone")
        return variety(completion, answer, question)

    base = load_base(Path(folder) / "base", parts=2).model
    options = {"actor_network": base}
    finish(tiny_run(Path(folder) / "run", size=3, env=tiny_env(reward_fn=reward), options=options))
