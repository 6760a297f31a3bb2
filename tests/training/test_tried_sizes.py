"""A run whose micro-batches are tried records their size, and learns what it would with that size given."""

import shutil

import pytest

from evogrpo.history.steps import StepReport
from evogrpo.persistence.journal import read_journal
from evogrpo.training.configuration.unchanged import CONFIG_FILE
from evogrpo.training.front.replaying import HyperparameterSchedule
from tests.tiny_training import equal_states, final_states, finish, resumed_run, story, tiny_run
from tests.tried_sizes import room_for


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Return the folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("tried") / "run"
    with room_for(40):
        finish(run_of(folder, "auto"))
    return folder


def run_of(folder, tokens):
    return tiny_run(folder, size=2, options={"micro_batch_tokens": tokens}, generations=1)


def sizes(folder):
    return [event["micro_batch_tokens"] for event in read_journal(folder / "journal.jsonl") if event["event"] == "run"]


def test_it_is_what_it_would_be_with_that_size_given(tried, tmp_path):
    given, other = tmp_path / "given", tmp_path / "other"
    finish(run_of(given, 32))
    finish(run_of(other, 16))
    assert sizes(tried) == sizes(given) == [32]
    assert story(tried) == story(given)
    assert equal_states(final_states(tried), final_states(given))
    assert not equal_states(final_states(tried), final_states(other))  # sums are rounded in another order


def test_a_replay_learns_in_micro_batches_of_the_same_size(tried, tmp_path):
    folder = shutil.copytree(tried, tmp_path / "run")
    (folder / CONFIG_FILE).write_text("task: {name: two_digit_sums}\nagent: {micro_batch_tokens: auto, top_k: 9}\n")
    agent = HyperparameterSchedule.read(folder).config().agent
    assert (agent.micro_batch_tokens, agent.top_k) == (32, 9)


def test_stopped_and_resumed_where_another_would_be_tried_it_keeps_its_own(tried, tmp_path):
    folder = tmp_path / "run"
    with room_for(40):
        run = run_of(folder, "auto")
    for report in run.reports():
        if isinstance(report, StepReport):
            run.stop()
    with room_for(20):
        run = resumed_run(folder)
        assert run.population.members.bank.micro_batch_tokens == 32
        assert run.population.members.alone().bank.micro_batch_tokens == 32
        finish(run)
    assert story(folder) == story(tried)
    assert equal_states(final_states(folder), final_states(tried))
