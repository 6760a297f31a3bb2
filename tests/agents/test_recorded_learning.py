"""Agents with `reduce_memory_peak=False` learn from what was computed while they wrote."""

import pytest
import torch

from evogrpo import evolve
from evogrpo.evolution import Fixed
from evogrpo.policies.tokens.engine.recording import PassRecording
from tests.rounding import assert_gradients_agree
from tests.tiny_training import (
    final_states,
    finish,
    resumed_run,
    scatter,
    shared_tokenizer,
    state_of,
    tiny_agent,
    tiny_env,
    tiny_population,
    tiny_run,
)
from tests.two_turns import GuessTwice


@pytest.fixture
def seen(monkeypatch):
    """Note how many rows are recorded, and of how many passes what was recorded is found."""
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)
    counts, begin, recall = {"rows": 0, "found": 0, "missing": 0}, PassRecording.begin, PassRecording.recall

    def beginning(self, rows, *rest):
        counts["rows"] += rows
        begin(self, rows, *rest)

    def recalling(self, *given):
        found = recall(self, *given)
        counts["missing" if found is None else "found"] += 1
        return found

    monkeypatch.setattr(PassRecording, "begin", beginning)
    monkeypatch.setattr(PassRecording, "recall", recalling)
    return counts


def run(population, env, **options):
    """Train for two steps."""
    for _ in evolve(
        population,
        env,
        strategy=Fixed(),
        generations=1,
        steps_per_generation=2,
        samples_per_step=8,
        progress=False,
        **options,
    ):
        pass


def test_a_run_reads_what_every_step_has_written(seen):
    populations = [tiny_population(3, reduce_memory_peak=reduced, beta=0.04) for reduced in (False, True)]
    for population in populations:
        for agent in population:
            scatter(agent, seed=agent.index)
        run(population, tiny_env())
    assert seen["rows"] == 2 * 3 * 8, "two steps of three members, no evaluation and nobody who reduces memory"
    assert seen["found"]
    assert not seen["missing"]


def test_what_is_learnt_in_a_step_of_a_run_is_the_same(seen):
    moments = []
    for reduced in (False, True):
        population = tiny_population(2, reduce_memory_peak=reduced, beta=0.04, lr=1e-6)
        for agent in population:
            scatter(agent, seed=agent.index)
        run(population, tiny_env())
        moments.append([state_of(agent)["exp_avg"] for agent in population])
    assert seen["found"]
    for one, other in zip(*moments, strict=True):
        assert_gradients_agree(one, other, steps=2)


def test_only_the_first_of_several_optimizer_steps_finds_the_weights_that_wrote(seen):
    population = tiny_population(2, reduce_memory_peak=False, batch_size=4)
    for agent in population:
        scatter(agent, seed=agent.index)
    run(population, tiny_env())
    assert seen["found"]
    assert seen["missing"]


def test_an_agent_that_is_asked_by_hand_learns_from_what_it_wrote_once(seen):
    agent = tiny_agent(reduce_memory_peak=False)
    scatter(agent)
    ids, masks = agent.get_action(tiny_env().reset()[0])
    rewards = torch.arange(float(sum(map(len, ids)))).view(len(ids), -1)
    agent.learn((ids, masks, rewards))
    assert (seen["found"], seen["missing"]) == (1, 0)
    agent.learn((ids, masks, rewards))
    assert (seen["found"], seen["missing"]) == (1, 1)
    before = seen["rows"]
    agent.get_action(tiny_env().reset()[0], training=False)
    assert seen["rows"] == before, "nobody learns from greedy answers"


def test_a_run_that_is_stopped_and_resumed_ends_as_if_never_stopped(seen, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = {"options": {"reduce_memory_peak": False}, "generations": 2, "steps_per_generation": 2}
    finish(tiny_run(whole, size=2, **given))
    run = tiny_run(parts, size=2, **given)
    reports = run.reports()
    next(reports)
    run.stop()
    list(reports)
    before = dict(seen)
    finish(resumed_run(parts))
    assert seen["found"] > before["found"] > 0, "the resumed run records as well"
    one, other = final_states(parts), final_states(whole)
    assert one.keys() == other.keys()
    assert all(torch.equal(values, other[name]) for name, values in one.items())


def test_conversations_of_several_turns_are_computed_again(seen):
    population = tiny_population(2, reduce_memory_peak=False, max_output_tokens=3)
    run(population, GuessTwice(tokenizer=shared_tokenizer()))
    assert seen["rows"] == 0
