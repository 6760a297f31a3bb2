"""Tiny agents, populations, environments and runs, and references computed separately."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo import GRPO, HuggingFaceGym, HyperparameterConfig, Population, RLParameter
from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.config.optimizer import Optimizer
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.envs.text.templates import Tokenizer
from evogrpo.evolution import Strategy
from evogrpo.learn_reports import LearnReport
from evogrpo.members.bank import Sampler
from evogrpo.members.fast_llama.weight_layout import fast_paths_disabled
from evogrpo.members.language import bank as language_bank
from evogrpo.members.language.causal_model import CausalModel
from evogrpo.members.language.full_finetuning import choose_trained
from evogrpo.members.language.own_loop import as_batch
from evogrpo.members.requests import RolloutBatch
from evogrpo.randomness import generator
from evogrpo.records import Batch
from evogrpo.reporting.records import StepReport
from evogrpo.storage.checkpoint import CheckpointError, read_checkpoint
from evogrpo.storage.journal import latest_generations, read_journal
from evogrpo.training.proposals import Proposer
from evogrpo.training.run_dir import open_run
from evogrpo.training.trainer import Trainer
from tests.oracles.peft_members import PeftMember
from tests.tiny_batches import lora
from tests.tiny_models import EOS, PAD, tiny_model, tiny_tokenizer
from tests.tiny_steps import cart_pole, start_run
from tests.tiny_teams import team_env

QUESTIONS = [
    {"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in product(range(10), range(10))
]
SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-4, max=3e-2, scale="log"),
    clip_coef=RLParameter(min=0.1, max=0.4),
    group_size=RLParameter(choices=[2, 4, 8]),
)
DAMPED = Optimizer(eps=1e-5)  # Adam divides rounding errors of vanishing gradients by eps
# The second group has no signal.
REWARDS = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, 0.2, 0.7, 0.3]])
HOLES = torch.tensor([[0.1, 0.4, 0.2, 0.9], [0.1, 0.1, 0.1, 0.1], [1.0, torch.nan, 0.7, 0.3]])


@cache
def shared_model() -> PreTrainedModel:
    """Return one tiny base for the whole test process; tests do not change it."""
    return tiny_model()


@cache
def equal_model() -> PreTrainedModel:
    """Return another object with the weights of `shared_model`, as in another process."""
    return tiny_model()


_known: dict[tuple[object, ...], Any] = {}


def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks shared models once: it is slower than a learning step."""

    def once(model: PreTrainedModel, *given: Any, **options: Any) -> Any:
        if model not in (shared_model(), equal_model()):
            return make(model, *given, **options)
        key = make, model, fast_paths_disabled(), repr(given), repr(options)
        if key not in _known:
            _known[key] = make(model, *given, **options)
        return copy(_known[key])

    return once


language_bank.CausalModel = _once(CausalModel)  # type: ignore[assignment,misc]  # a function that builds it
language_bank.choose_trained = _once(choose_trained)


@cache
def shared_tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def variety(completion: str, answer: str, question: str) -> float:
    """Reward the number of different characters."""
    return len(set(completion)) / 8


def tiny_env(**options: Any) -> HuggingFaceGym:
    """Return 54 training, 8 validation and 36 test questions; every prompt has the same length."""
    defaults: dict[str, Any] = {"reward_fn": variety, "data_batch_size": 3, "validation_size": 8}
    if "reward_funcs" in options:
        del defaults["reward_fn"]
    train = QUESTIONS[:64]
    test = QUESTIONS[64:]
    if "reward_funcs" in options:
        train = [{"prompt": row["question"], "answer": row["answer"]} for row in train]
        test = [{"prompt": row["question"], "answer": row["answer"]} for row in test]
    return HuggingFaceGym(train, test, shared_tokenizer(), **(defaults | options))


def digits(completion: str, answer: str, question: str) -> float:
    """Reward the share of digits."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


TASK_SPACE: dict[str, Any] = {
    "reward_weights": {"digits": [0, 1, 2], "variety": (-1, 1)},
    "task": {"style": ["", "12+", "3"]},
    "data_weights": {"5": (0.5, 8.0)},
}


def settings_env() -> HuggingFaceGym:
    """Return an environment with a prompt, two rewards, data weights and a metric."""
    rows = [{**row, "first": row["question"][0]} for row in QUESTIONS]
    return HuggingFaceGym(
        rows[:64],
        rows[64:],
        shared_tokenizer(),
        reward_fn=[digits, variety],
        metric=variety,
        settings={"style": ""},
        conversation_template=[{"role": "user", "content": "{style}{question}"}],
        data_column="first",
        validation_size=8,
    )


def tiny_options(**options: Any) -> dict[str, Any]:
    defaults = {
        "pad_token_id": PAD,
        "max_output_tokens": 6,
        "group_size": 4,
        "lr": 1e-3,
        "lora_config": lora(),
    }
    return defaults | options


def tiny_agent(**options: Any) -> GRPO:
    return GRPO(**{"actor_network": shared_model()} | tiny_options(**options))


def tiny_population(size: int, kind: type[GRPO] = GRPO, **options: Any) -> Population:
    return kind.population(size, **{"actor_network": shared_model()} | tiny_options(**options))


def randomise_adapter(agent: Agent, seed: int = 0, std: float = 0.2) -> None:
    """Give an agent random adapters, far from the base, and a new optimiser."""
    bank = agent.members.banks["default"]
    state = bank.state(agent.slot)
    for name in ("exp_avg", "exp_avg_sq", "step"):
        state[name].zero_()
    values = generator(seed, "test adapter").standard_normal(
        state["adapter"].shape, dtype=np.float32
    )
    bank.load_state(agent.slot, state | {"adapter": std * torch.from_numpy(values)})


def random_agent(seed: int = 0, **options: Any) -> GRPO:
    """Return an agent with random adapters."""
    agent = tiny_agent(**options)
    randomise_adapter(agent, seed)
    return agent


def random_population(size: int, **options: Any) -> Population:
    """Return members with different random adapters."""
    population = tiny_population(size, **options)
    for agent in population:
        randomise_adapter(agent, agent.slot)
    return population


def state_of(agent: Agent) -> dict[str, Tensor]:
    return agent.state()


def equal_states(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def peft_twin(agent: Agent) -> PeftMember:
    """Return the agent's policy as a separate PEFT model over a copy of the base."""
    bank = agent.members.banks["default"]
    adapter, _ = bank.peft_files(agent.slot)
    return PeftMember(shared_model(), bank.lora_config, adapter, [EOS])


def flat(tensors: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector, in the bank's order."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    return torch.cat([value.detach().reshape(-1) for value in values])


def flat_gradient(member: PeftMember) -> Tensor:
    return flat([parameter.grad for parameter in member.parameters.values()])


Completion = tuple[tuple[int, ...], list[int]]


def completions(experiences: tuple[Sequence[Tensor], Sequence[Tensor], Any]) -> list[Completion]:
    """Return (prompt, sampled tokens) of every row of experiences without gaps."""
    result = []
    for ids, masks in zip(experiences[0], experiences[1], strict=True):
        start = int(masks.any(0).nonzero()[0]) + 1
        for row, mask in zip(ids.tolist(), masks, strict=True):
            result.append((tuple(row[:start]), row[start : start + int(mask.sum())]))
    return result


def graded(ids: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Return distinct rewards `[prompts, g]`."""
    values = generator(seed, "test rewards").random((len(ids), len(ids[0])), dtype=np.float32)
    return torch.from_numpy(values)


def sampled(agent: GRPO, rewards: Tensor) -> Batch:
    """Return an agent's completions as a batch with these rewards `[prompts, g]`."""
    ids, masks = agent.get_action(tiny_env(data_batch_size=len(rewards)).reset()[0], training=True)
    batch = as_batch((ids, masks, rewards), agent.slot, agent.hyperparameters, 0, agent.device)
    return replace(batch, sampler_log_probs=agent.members.banks["default"].log_probs(batch))


def learn_from(agent: Agent, batch: Batch, step: int | None = None) -> LearnReport:
    """Take a learning step with an agent alone; the batch holds its rows only."""
    return learn(agent.members, [agent.learner(step)], {"default": batch})[agent.slot]


def collect_alone(
    agent: Agent, env: Any, step: int = 0, *, samples: int = 16, starts_per_step: int = 8
) -> RolloutBatch:
    """Collect the samples of a learning step with an agent alone."""
    population = Population([agent], agent.members)
    return population.collect(
        env, step=step, samples_per_step=samples, starts_per_step=starts_per_step
    )


def own_rows(batch: Batch, slot: int) -> Batch:
    """Return a member's rows as the batch of an agent alone."""
    rows = batch.select_members([slot])
    return replace(rows, member_ids=torch.zeros_like(rows.member_ids))


def learn_fixed_batch(agent: GRPO, seed: int = 0) -> None:
    """Take one learning step on fixed prompts and rewards."""
    ids, masks = agent.get_action(tiny_env().reset()[0], training=True)
    agent.learn((ids, masks, graded(ids, seed)))


QUICK: dict[str, Any] = {"generations": 3, "steps_per_generation": 2, "samples_per_step": 8}


def tiny_run(
    folder: Path | None,
    *,
    size: int = 3,
    env: HuggingFaceGym | None = None,
    options: Mapping[str, Any] | None = None,
    first_group: int | None = None,
    kind: type[GRPO] = GRPO,
    make_sampler: Callable[[Population], Sampler] | None = None,
    **settings: Any,
) -> Trainer:
    """Return a small run that has not started: evolving members with different group sizes.

    `first_group` is the first member's group size; see `start_run` for the other settings.
    """
    population = tiny_population(
        size, kind, **({"hp_config": SPACE, "update_epochs": 2} | dict(options or {}))
    )
    if first_group is not None:
        population[0].group_size = first_group
    if make_sampler is not None:
        population.sample_with(make_sampler(population))
    return start_run(population, env or tiny_env(), folder, **(QUICK | settings))


def resumed_run(
    folder: Path,
    *,
    env: GroupEnvironment | None = None,
    strategy: Strategy | type[Strategy] | None = None,
    model: PreTrainedModel | None = None,
    make_sampler: Callable[[Population], Sampler] | None = None,
    proposer: Proposer | None = None,
    **schedule: Any,
) -> Trainer:
    """Return a run of any kind as another process would load it, with everything new."""
    saved = open_run(folder, writable=True)
    kind = saved.base["kind"]
    population, run_state = saved.restore(
        equal_model() if kind == "language" and model is None else model
    )
    if make_sampler is not None:
        population.sample_with(make_sampler(population))
    return Trainer(
        population,
        env or {"language": tiny_env, "networks": cart_pole, "joint": team_env}[kind](),
        schedule=replace(saved.record.schedule, **schedule),
        strategy=saved.strategy(strategy),
        fitness=saved.record.fitness,
        run_dir=saved.run_dir(folder),
        run_state=run_state,
        proposer=proposer,
    )


def finish(run: Trainer) -> list[Any]:
    return list(run.reports())


def start_or_resume(
    folder: str, strategy_class: type[Strategy] | None = None, **schedule: Any
) -> None:
    """Start or resume a run of three members and finish it."""
    torch.set_num_threads(1)
    try:
        run = resumed_run(Path(folder), strategy=strategy_class)
    except CheckpointError:
        run = tiny_run(Path(folder), strategy=strategy_class and strategy_class(), **schedule)
    finish(run)


def without_times(value: Any) -> Any:
    """Return a journal event without times."""
    clock = ("time", "seconds", "step_time", "phases", "waiting")
    if isinstance(value, Mapping):
        return {key: without_times(item) for key, item in value.items() if key not in clock}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def events_of(folder: Path) -> list[Any]:
    """Return a journal's events without times; the later of repeated events counts."""
    events = read_journal(folder / "journal.jsonl")
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    last = {event["event"]: event for event in events if event["event"] in ("baseline", "test")}
    return without_times(
        [*last.values(), *(steps[number] for number in sorted(steps)), *latest_generations(events)]
    )


def without_run_id(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a best member's record without the run id."""
    note = {name: value for name, value in record["note"].items() if name != "run_id"}
    return {**record, "note": note}


def final_states(folder: Path) -> dict[str, Tensor]:
    """Return all members' train states in the newest checkpoint."""
    return open_run(folder).tensors


def check_same_run(folder: Path, other: Path) -> None:
    """Check that two runs have equal events, train states, strategies and best members."""
    assert events_of(folder) == events_of(other)
    assert equal_states(final_states(folder), final_states(other))
    assert open_run(folder).record.strategy_state == open_run(other).record.strategy_state
    best = read_checkpoint(folder / "best", kind="agent")
    other_best = read_checkpoint(other / "best", kind="agent")
    assert without_run_id(best[1]) == without_run_id(other_best[1])
    assert equal_states(best[0], other_best[0])


def stop_after(run: Trainer, steps: int) -> None:
    """Run this many learning steps, then request a stop."""
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()
