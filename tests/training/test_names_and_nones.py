"""Names and None as hyperparameters in mutation, journal, checkpoint and report."""

import dataclasses
import json

import pytest

from evogrpo import GRPO, HyperparameterConfig, Hyperparameters, Objective, RLParameter, Tournament, evolve
from evogrpo import report as run_report
from evogrpo.evolution.mutation import Mutation
from evogrpo.reporting.records import LANGUAGE
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import read_journal
from evogrpo.text import changes_text
from evogrpo.training.display import generation_table, member_note
from tests.tiny_training import shared_model, tiny_agent, tiny_env, tiny_population

SPACE = HyperparameterConfig(
    loss_type=RLParameter(choices=["grpo", "dapo", "cispo"]),
    advantage=RLParameter(choices=["outcome", "rloo"]),
    clip_low=RLParameter(min=0.1, max=0.3),
    advantage_clip=RLParameter(choices=[0.5, 1.0]),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder and the reports of a run in which every child has a changed value."""
    folder = tmp_path_factory.mktemp("names") / "run"
    population = tiny_population(
        4, hp_config=SPACE, update_epochs=2, batch_size=4, objective=Objective(loss_type="cispo", cispo_clip_low=True)
    )
    strategy = Tournament(z=0.0, mutation=Mutation(probability=1.0))
    reports = list(
        evolve(
            population, tiny_env(), run_dir=folder, generations=3, strategy=strategy, steps_per_generation=1,
            samples_per_step=8,
        )
    )  # fmt: skip
    assert any(report.plan.children for report in reports[:-1])
    return folder, reports


def test_the_first_founder_has_the_objectives_names(run):
    members = run[1][0].members
    assert (members[0].hyperparameters.loss_type, members[0].hyperparameters.advantage) == ("cispo", "outcome")
    assert (members[0].hyperparameters.clip_low, members[0].hyperparameters.advantage_clip) == (None, None)
    assert {member.hyperparameters.loss_type for member in members[1:]} == {"grpo", "dapo", "cispo"}


def test_changes_are_different_values_of_the_space(run):
    for report in run[1][:-1]:
        for child in report.plan.children:
            assert set(child.changes) == set(SPACE)
            for name, (old, new) in child.changes.items():
                assert old != new
                parameter = SPACE[name]
                assert new in parameter.choices if parameter.choices else 0.1 <= new <= 0.3


def test_the_journal_holds_names_and_nulls(run):
    folder, reports = run
    events = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "generation"]
    for event, report in zip(events, reports, strict=True):
        written = [Hyperparameters(**member["hyperparameters"]) for member in event["members"]]
        assert written == [member.hyperparameters for member in report.members]
    assert events[0]["members"][0]["hyperparameters"]["clip_low"] is None


def test_page_and_tables_show_names(run):
    folder, reports = run
    page = run_report(folder).write().read_text()
    assert ">cispo</td>" in page
    assert len(summarise(read_journal(folder / "journal.jsonl")).generations) == 3
    table = generation_table(reports[0], list(SPACE), 200, LANGUAGE)
    column = next(each for each in table.columns if "loss" in str(each.header))
    assert str(next(iter(column.cells))) == "cispo"
    child = next(child for report in reports[:-1] for child in report.plan.children)
    old, new = child.changes["loss_type"]
    assert f"loss_type {old} → {new}" in changes_text(child.changes)
    report = next(report for report in reports if any(member.index == child.index for member in report.members))
    member = next(member for member in report.members if member.index == child.index)
    assert f"loss_type → {new}" in str(member_note(member, report, short=False))
    born_of_none = dataclasses.replace(member, changes={"clip_low": (None, 0.2), "advantage_clip": (0.5, 1.0)})
    assert "clip_low → 0.2, advantage_clip ↑" in str(member_note(born_of_none, report, short=False))


def test_an_agent_round_trips_with_names_and_none(tmp_path):
    agent = tiny_agent(
        hp_config=SPACE, loss_type="dapo", advantage="rloo", clip_high=0.4, objective=Objective(mask_truncated=True)
    )
    agent.save_checkpoint(tmp_path / "agent")
    stored = json.loads((tmp_path / "agent" / "agent.json").read_text())
    assert stored["member"]["hyperparameters"]["loss_type"] == "dapo"
    loaded = GRPO.load(tmp_path / "agent", actor_network=shared_model())
    assert loaded.hyperparameters == agent.hyperparameters
    assert (loaded.loss_type, loaded.advantage, loaded.clip_low, loaded.clip_high) == ("dapo", "rloo", None, 0.4)
    assert loaded.hp_config == SPACE


def test_attributes_accept_names_and_none():
    agent = tiny_agent()
    agent.loss_type, agent.clip_low, agent.gamma = "dapo", 0.1, 0.9
    assert agent.hyperparameters == dataclasses.replace(
        tiny_agent().hyperparameters, loss_type="dapo", clip_low=0.1, gamma=0.9
    )
    agent.loss_type = agent.clip_low = None
    assert agent.hyperparameters.clip_bounds == (0.2, 0.2)
    with pytest.raises(ValueError, match="loss_type must be one of"):
        agent.loss_type = "ppo"


@pytest.mark.parametrize("make", [tiny_agent, lambda **options: tiny_population(2, **options)])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"objective": Objective(kl_target=0.1)}, "kl_target.*beta"),
        ({"objective": Objective(dual_clip=2.0), "hp_config": SPACE}, "dual_clip"),
        ({"objective": Objective(loss_type="gspo"), "gamma": 0.5}, "gamma"),
        ({"objective": Objective(overlong_buffer=7)}, "overlong_buffer must be at most max_output_tokens = 6, got 7"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
    ],
)
def test_an_incompatible_objective_is_refused_first(make, options, rule):
    with pytest.raises(ValueError, match=rule):
        make(**options)
