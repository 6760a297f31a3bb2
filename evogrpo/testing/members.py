"""Conformance suite of `Members`: a kind of members must pass it to train in a population."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.checkpointing import (
    PopulationRecord,
    load_agent,
    population_state,
    restore_population,
    save_agent,
)
from evogrpo.algorithms.evaluation import evaluate
from evogrpo.algorithms.population import Population
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.members.bank import TrainState
from evogrpo.members.requests import RolloutBatch
from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.validation import dump, validate

SIZE = 3
SAMPLES_PER_STEP = 8
STARTS_PER_STEP = 4
"""Starts of a learning step: as many groups as fit into it with the smallest group size, 2."""


class MembersTestCase(ABC):
    """Tests of `Members`. Implement `make_population` and `make_env`.

    Attributes:
        tolerance: Maximum difference between learning together and alone, relative to the change
            that a member learned.
        actor_network: Base model or module that checkpoints are loaded with.
    """

    tolerance = 1e-3
    actor_network: Any = None

    @abstractmethod
    def make_population(self, size: int) -> Population:
        """Build members of different hyperparameters, with group sizes of 2, 4 or 8."""

    @abstractmethod
    def make_env(self) -> GroupEnvironment:
        """Build an environment whose rewards differ within groups."""

    # ---- building blocks

    def collect(self, population: Population, step: int = 0) -> RolloutBatch:
        """Collect the samples of one learning step."""
        return population.collect(
            self.make_env(),
            step=step,
            samples_per_step=SAMPLES_PER_STEP,
            starts_per_step=STARTS_PER_STEP,
        )

    def trained(self, size: int = SIZE) -> Population:
        """Return members that differ, because each has learned from its own samples."""
        population = self.make_population(size)
        population.learn(self.collect(population).experience, step=0)
        return population

    @staticmethod
    def alone(population: Population, slot: int) -> Population:
        """Return a population that holds a copy of one member only."""
        clone = population.agents[slot].clone()
        return Population([clone], clone.members)

    @staticmethod
    def states(population: Population) -> list[TrainState]:
        """Return copies of all train states."""
        return [population.members.state(slot) for slot in range(len(population))]

    @staticmethod
    def assert_equal(one: Sequence[TrainState], other: Sequence[TrainState]) -> None:
        """Require bit-equal train states."""
        assert len(one) == len(other)
        for state, expected in zip(one, other, strict=True):
            assert state.keys() == expected.keys()
            for name, value in state.items():
                assert torch.equal(value, expected[name]), name

    # ---- sampling

    def test_samples_are_whole_groups_member_by_member(self) -> None:
        population = self.make_population(SIZE)
        sampled = self.collect(population)
        expected = torch.arange(SIZE).repeat_interleave(SAMPLES_PER_STEP)
        assert torch.equal(sampled.member_ids.cpu(), expected)
        assert len(sampled.scores.rewards) == len(sampled.start_ids) == len(expected)
        assert set(sampled.tokens) == set(range(SIZE))
        assert all(tokens > 0 for tokens in sampled.tokens.values())
        for batch in sampled.experience.values():
            for slot in range(SIZE):
                groups = batch.group_ids[batch.member_ids == slot]
                sizes = groups.unique(return_counts=True)[1]
                assert bool((sizes == population.agents[slot].group_size).all())

    def test_samples_depend_on_the_step_alone(self) -> None:
        # New members each time: collecting updates running statistics of observations.
        first = self.collect(self.make_population(SIZE))
        again = self.collect(self.make_population(SIZE))
        later = self.collect(self.make_population(SIZE), step=1)
        np.testing.assert_array_equal(first.scores.rewards, again.scores.rewards)
        assert not np.array_equal(first.scores.rewards, later.scores.rewards)

    def test_sampling_together_equals_sampling_alone(self) -> None:
        population = self.trained()
        copies = [self.alone(population, slot) for slot in range(SIZE)]
        together = self.collect(population, step=1)
        for slot, copy in enumerate(copies):
            alone = self.collect(copy, step=1)
            rows = together.member_ids == slot
            rewards = together.scores.rewards[rows.numpy()]
            np.testing.assert_array_equal(rewards, alone.scores.rewards)
            assert torch.equal(together.start_ids[rows], alone.start_ids)
            assert together.tokens[slot] == alone.tokens[0]

    def test_an_environment_of_another_kind_is_refused(self) -> None:
        class NoEnvironment:
            def select_starts(self, step: int, count: int, starts_per_step: int) -> tuple[int, ...]:
                return tuple(range(count))

            def make_batch(self, split: str, starts: Sequence[int]) -> object:
                return self

        with pytest.raises(ValueError, match="NoEnvironment"):
            self.make_population(1).check(NoEnvironment())

    # ---- evaluation

    def test_evaluation_repeats_exactly_and_changes_nothing(self) -> None:
        population = self.trained()
        env = self.make_env()
        before = self.states(population)
        slots = list(range(SIZE))
        for answers in (None, 2):
            scores = evaluate(population.members, slots, env, "validation", answers=answers)
            again = evaluate(population.members, slots, env, "validation", answers=answers)
            assert scores.shape == (SIZE, env.size("validation"))
            np.testing.assert_array_equal(scores, again)
            # One member on the first two questions scores as together with the others.
            some = evaluate(
                population.members, [1], env, "validation", questions=2, answers=answers
            )
            np.testing.assert_array_equal(some[0], scores[1, :2])
        self.assert_equal(self.states(population), before)

    def test_a_new_member_is_the_base(self) -> None:
        members = self.trained().members.new_member()
        env = self.make_env()
        base = evaluate(members, [0], env, "validation", base=True)
        np.testing.assert_array_equal(evaluate(members, [0], env, "validation"), base)

    # ---- learning

    def test_learning_changes_members_and_fails_none(self) -> None:
        population = self.make_population(SIZE)
        before = self.states(population)
        reports = population.learn(self.collect(population).experience, step=0)
        assert set(reports) == set(range(SIZE))
        for slot, report in reports.items():
            assert report.failed is None
            assert len(report.advantages) >= SAMPLES_PER_STEP
            after = population.members.state(slot)
            state_before = before[slot]
            assert any(not torch.equal(after[name], state_before[name]) for name in after)

    def test_learning_together_equals_learning_alone(self) -> None:
        population = self.trained()
        copies = [self.alone(population, slot) for slot in range(SIZE)]
        before = self.states(population)
        population.learn(self.collect(population, step=1).experience, step=1)
        for slot, copy in enumerate(copies):
            copy.learn(self.collect(copy, step=1).experience, step=1)
            together = population.members.state(slot)
            for name, alone in copy.members.state(0).items():
                self.assert_close(together[name], alone, before[slot][name], name)

    def assert_close(self, value: Tensor, expected: Tensor, before: Tensor, name: str) -> None:
        """Require equal tensors, up to rounding relative to the change that was learned."""
        if not value.is_floating_point():
            assert torch.equal(value, expected), name
            return
        # Relative to the change: moments and log-probabilities have other magnitudes than weights.
        change = float((expected - before).double().norm())
        difference = float((value - expected).double().norm())
        assert difference <= self.tolerance * change, name

    # ---- train states

    def test_train_states_are_copies_with_fixed_keys(self) -> None:
        members = self.trained().members
        before = members.state(0)
        assert tuple(before) == members.state_keys
        for name, value in members.state(0).items():
            assert torch.equal(value, members.state_tensor(0, name)), name
            # Changing the copies must not change the member.
            value.zero_()
            members.state_tensor(0, name).zero_()
        self.assert_equal([members.state(0)], [before])

    def test_snapshots_restore_members(self) -> None:
        population = self.trained()
        before = self.states(population)
        snapshot = population.members.snapshot(range(SIZE))
        checksum = population.members.checksum()
        population.learn(self.collect(population, step=1).experience, step=1)
        assert population.members.checksum() != checksum
        for slot, state in snapshot.items():
            population.members.load_state(slot, state)
        self.assert_equal(self.states(population), before)
        assert population.members.checksum() == checksum

    def test_train_states_that_do_not_fit_change_nothing(self) -> None:
        members = self.trained().members
        before = members.state(0)
        name = members.state_keys[0]
        missing = dict(members.state(1))
        del missing[name]
        # One state without a tensor, and one with a tensor of another shape.
        flat = before[name].flatten()
        wider = members.state(1) | {name: torch.cat([flat, flat])}
        for wrong in (missing, wider):
            with pytest.raises(ValueError, match=name.rpartition("/")[2]):
                members.load_state(0, wrong)
        self.assert_equal([members.state(0)], [before])

    @pytest.mark.parametrize("parents", [(2, 0, 1), (1, 1, 1), (0, None, 0)])
    def test_inherit_copies_all_at_once(self, parents: tuple[int | None, ...]) -> None:
        population = self.trained()
        before = self.states(population)
        new = population.members.new_member().state(0)
        population.members.inherit(parents)
        expected = [new if parent is None else before[parent] for parent in parents]
        self.assert_equal(self.states(population), expected)

    @pytest.mark.parametrize("parents", [(0, 1), (0, 1, SIZE), (0, 1, -1)])
    def test_parents_that_do_not_exist_are_refused(self, parents: tuple[int, ...]) -> None:
        population = self.trained()
        before = self.states(population)
        with pytest.raises(ValueError, match="parents"):
            population.members.inherit(parents)
        self.assert_equal(self.states(population), before)

    # ---- copies and checkpoints

    def test_a_clone_is_independent(self) -> None:
        population = self.trained()
        copy = self.alone(population, 1)
        self.assert_equal(self.states(copy), [population.members.state(1)])
        before = self.states(population)
        copy.learn(self.collect(copy, step=1).experience, step=1)
        self.assert_equal(self.states(population), before)

    def test_a_population_round_trips_through_a_checkpoint(self, tmp_path: Path) -> None:
        population = self.trained()
        tensors, record = population_state(population)
        text = dump_json(dump(record), what="record")
        stored = validate(PopulationRecord, load_json(text))
        restored = restore_population(
            population.algorithm, dict(tensors), stored, self.actor_network, tmp_path
        )
        self.assert_equal(self.states(restored), self.states(population))
        for agent, expected in zip(restored.agents, population.agents, strict=True):
            assert agent.hyperparameters == expected.hyperparameters
        # Restored members sample as before.
        expected_rewards = self.collect(population, step=1).scores.rewards
        rewards = self.collect(restored, step=1).scores.rewards
        np.testing.assert_array_equal(rewards, expected_rewards)

    def test_a_member_round_trips_through_a_checkpoint(self, tmp_path: Path) -> None:
        agent: Agent = self.trained().agents[1]
        save_agent(agent, tmp_path / "member", replace=False)
        loaded = load_agent(
            type(agent),
            tmp_path / "member",
            device=None,
            accelerator=None,
            actor_network=self.actor_network,
        )
        self.assert_equal([loaded.state()], [agent.state()])
        assert loaded.hyperparameters == agent.hyperparameters
        assert loaded.index == agent.index
