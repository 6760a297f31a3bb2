"""A user's own kind of members, softmax policies in a table, through a whole run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo import EvolvableAlgorithm, HyperparameterConfig, RLParameter, evolve, resume
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.distributed import Processes
from evogrpo.envs.protocol import Scores, shuffled_starts
from evogrpo.evolution import Tournament
from evogrpo.learn_reports import LearnReport
from evogrpo.members.bank import check_parents, check_train_state
from evogrpo.members.members import Members
from evogrpo.members.requests import HELD_OUT, RolloutBatch
from evogrpo.randomness import generator
from evogrpo.records import Batch, ObservationInputs
from evogrpo.testing.members import MembersTestCase
from evogrpo.validation import validate
from tests.tiny_training import equal_states

CONTEXTS = 12
ARMS = 4
SPACE = HyperparameterConfig(lr=RLParameter(min=0.1, max=3.0, scale="log"), group_size=[2, 4])


class Bandit:
    """Contextual bandit: the reward of an arm is 1 minus its distance from the best arm."""

    observation_space = spaces.Discrete(CONTEXTS)
    action_space = spaces.Discrete(ARMS)

    def select_starts(self, step: int, count: int, starts_per_step: int) -> tuple[int, ...]:
        return shuffled_starts(0, CONTEXTS, step, count, starts_per_step)

    def size(self, split: str) -> int:
        return CONTEXTS

    def fingerprint(self) -> dict[str, str]:
        return {"task": "bandit"}

    def make_batch(self, split: str, starts: Sequence[int]) -> np.ndarray:
        return np.array(starts)


@dataclass(frozen=True)
class TableSettings:
    seed: int = 0
    objective: Objective = field(default_factory=Objective)


class TableMembers(Members):
    """Members with one table of logits each, `[contexts, arms]`."""

    kind = "table"
    step_based = True

    def __init__(self, size: int, settings: TableSettings, hp_config: HyperparameterConfig | None):
        self.size = size
        self.settings = settings
        self.hp_config = hp_config
        self.observation_space = Bandit.observation_space
        self.action_space = Bandit.action_space
        self.device = torch.device("cpu")
        self.processes = Processes()
        self.banks = {}
        self.logits = torch.zeros(size, CONTEXTS, ARMS)
        self.steps = torch.zeros(size, dtype=torch.int64)

    def check(self, env: Any) -> None:
        if getattr(env, "action_space", None) != self.action_space:
            raise ValueError(f"Tables act in a Bandit, got {type(env).__name__}.")

    def choose(self, slots, contexts, uniforms) -> torch.Tensor:
        """Choose arms by uniforms in [0, 1), or the most likely ones."""
        logits = self.logits[slots, contexts]
        if uniforms is None:
            return logits.argmax(1)
        return (logits.softmax(1).cumsum(1) < uniforms[:, None]).sum(1).clamp(max=ARMS - 1)

    def sample(self, env, starts, request) -> RolloutBatch:
        contexts = torch.from_numpy(env.make_batch("train", starts))[request.start_ids]
        drawn = [
            generator(self.settings.seed, request.purpose, *stream).random(count, dtype=np.float32)
            for stream, count in zip(request.streams, request.counts, strict=True)
        ]
        uniforms = torch.from_numpy(np.concatenate(drawn))[request.row_ids]
        arms = self.choose(request.member_ids, contexts, uniforms)
        rewards = rewards_of(contexts, arms)
        present = torch.ones(len(arms), 1, dtype=torch.bool)
        batch = Batch(
            inputs=ObservationInputs(
                observations=contexts[:, None], temperature=request.temperature
            ),
            actions=arms[:, None],
            present=present,
            action_mask=present,
            rewards=rewards.float(),
            group_ids=request.group_ids,
            member_ids=request.member_ids,
        )
        steps = request.member_ids.bincount(minlength=self.size)
        return RolloutBatch(
            experience={"default": batch},
            scores=Scores(
                rewards=rewards.numpy(),
                components={},
                completions=(),
                weights=np.empty((len(rewards), 0)),
            ),
            member_ids=request.member_ids,
            start_ids=request.start_ids,
            truncated=torch.zeros(len(arms), dtype=torch.bool),
            tokens={each.slot: int(steps[each.slot]) for each in request.learners},
        )

    def evaluate(self, env, request):
        contexts = torch.from_numpy(env.make_batch(request.split, request.starts))[
            request.start_ids
        ]
        uniforms = None
        if request.answers is not None:
            drawn = [
                generator(self.settings.seed, HELD_OUT, *stream).random(request.answers)
                for stream in request.streams
            ]
            uniforms = torch.from_numpy(np.concatenate(drawn)).repeat(len(request.slots))
        if request.base:
            untrained = TableMembers(self.size, self.settings, None)
            arms = untrained.choose(request.member_ids, contexts, uniforms)
        else:
            arms = self.choose(request.member_ids, contexts, uniforms)
        return rewards_of(contexts, arms).numpy(), (request.rows_per_slot,) * len(request.slots)

    @property
    def state_keys(self) -> tuple[str, ...]:
        return ("logits", "step")

    def state_tensor(self, slot: int, name: str) -> torch.Tensor:
        return {"logits": self.logits, "step": self.steps}[name][slot].clone()

    def load_state(self, slot: int, state: Mapping[str, torch.Tensor]) -> None:
        check_train_state(state, self.state(slot), "settings")
        self.logits[slot] = state["logits"]
        self.steps[slot] = state["step"]

    def inherit(self, parents: Sequence[int | None]) -> None:
        check_parents(parents, self.size)
        new = TableMembers(1, self.settings, None).state(0)
        states = [new if parent is None else self.state(parent) for parent in parents]
        for slot, state in enumerate(states):
            self.load_state(slot, state)

    def new_member(self, *, wrap: bool = True) -> "TableMembers":
        return TableMembers(1, self.settings, self.hp_config)

    def checkpoint_record(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_checkpoint(cls, saved, *, actor_network, device, accelerator) -> "TableMembers":
        settings = validate(TableSettings, saved.record["settings"])
        return cls(saved.size, settings, saved.hp_config)


def rewards_of(contexts: torch.Tensor, arms: torch.Tensor) -> torch.Tensor:
    return 1.0 - ((arms - contexts % ARMS).abs() / ARMS).double()


class TableAgent(EvolvableAlgorithm):
    """Policy gradient on the table, with the mean reward of the group as its baseline."""

    kinds = {"table": TableMembers}  # noqa: RUF012
    unused_options = ("objective", "target_kl")

    @classmethod
    def learn_together(cls, members, learners, experience):
        reports = {}
        for learner in learners:
            batch = experience["default"].select_members([learner.slot])
            groups = batch.group_ids.unique(return_inverse=True)[1]
            means = torch.bincount(groups, batch.rewards) / torch.bincount(groups)
            advantages = batch.rewards - means[groups].float()
            contexts = batch.inputs.observations[:, 0]
            table = members.logits[learner.slot]
            gradient = -table.softmax(1)[contexts]
            gradient[torch.arange(len(batch)), batch.actions[:, 0]] += 1.0
            step = learner.hyperparameters.lr * advantages[:, None] * gradient
            table.index_add_(0, contexts, step)
            members.steps[learner.slot] += 1
            reports[learner.slot] = LearnReport(
                metrics={"reward": float(batch.rewards.mean())},
                advantages=tuple(advantages.tolist()),
                optimizer_steps=1,
                tokens=len(batch),
            )
        return reports


def tables(size: int):
    members = TableMembers(size, TableSettings(seed=3), SPACE)
    first = Hyperparameters(lr=1.0, group_size=4, target_kl=None)
    return TableAgent.population_of(members, first)


class TestTableMembers(MembersTestCase):
    def make_population(self, size):
        return tables(size)

    def make_env(self):
        return Bandit()


SCHEDULE = {"steps_per_generation": 3, "samples_per_step": 8, "strategy": Tournament(z=0.0)}


def test_an_own_kind_of_members_evolves_saves_and_resumes(tmp_path):
    whole = evolve(tables(4), Bandit(), run_dir=tmp_path / "whole", generations=4, **SCHEDULE)
    reports = list(whole)
    assert len(reports) == 4
    assert whole.result.best.fitness.mean > whole.result.baseline.mean + 0.1
    assert any(each.plan.children for each in reports if each.plan is not None)
    # A run that was stopped and resumed equals it.
    list(evolve(tables(4), Bandit(), run_dir=tmp_path / "parts", generations=2, **SCHEDULE))
    with pytest.raises(ValueError, match="algorithm=TableAgent"):
        resume(tmp_path / "parts", Bandit())
    resumed = resume(tmp_path / "parts", Bandit(), algorithm=TableAgent, generations=4)
    list(resumed)
    for agent, expected in zip(resumed.population, whole.population, strict=True):
        assert agent.index == expected.index
        assert agent.hyperparameters == expected.hyperparameters
        assert equal_states(agent.state(), expected.state())
    best = TableAgent.load(tmp_path / "parts" / "best")
    assert equal_states(best.state(), whole.best.state())


def test_methods_that_tables_lack_are_refused():
    agent = tables(1)[0]
    for call in (
        lambda: agent.generate(["a"]),
        lambda: agent.predict(0),
        lambda: agent.get_action(0),
        agent.get_policy,
        lambda: agent.learn(()),
        lambda: tables(1).sample_with(object()),
    ):
        with pytest.raises(ValueError, match="table members"):
            call()
