"""Names and None as hyperparameters in journal, tables and report."""

import dataclasses

import pytest

from evogrpo import HyperparameterConfig, Hyperparameters, Objective, RLParameter, Tournament, evolve
from evogrpo import report as run_report
from evogrpo.evolution.mutation import Mutation
from evogrpo.reporting.records import LANGUAGE
from evogrpo.storage.journal import read_journal
from evogrpo.text import changes_text
from evogrpo.training.display import generation_table, member_note
from tests.tiny_training import tiny_agent, tiny_env, tiny_population

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
            population, tiny_env(), run_dir=folder, generations=2, strategy=strategy, steps_per_generation=1,
            samples_per_step=8,
        )
    )  # fmt: skip
    assert any(report.plan.children for report in reports[:-1])
    return folder, reports


def test_founders_and_journal_have_names_and_nulls(run):
    folder, reports = run
    first, *others = [member.hyperparameters for member in reports[0].members]
    assert (first.loss_type, first.advantage, first.clip_low, first.advantage_clip) == ("cispo", "outcome", None, None)
    assert {each.loss_type for each in others} == {"grpo", "dapo", "cispo"}
    events = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "generation"]
    for event, report in zip(events, reports, strict=True):
        written = [Hyperparameters(**member["hyperparameters"]) for member in event["members"]]
        assert written == [member.hyperparameters for member in report.members]
    assert events[0]["members"][0]["hyperparameters"]["clip_low"] is None


def test_page_and_tables_show_names(run):
    folder, reports = run
    page = run_report(folder).write().read_text()
    assert ">cispo</td>" in page
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


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"objective": Objective(kl_target=0.1)}, "kl_target.*beta"),
        ({"objective": Objective(dual_clip=2.0), "hp_config": SPACE}, "dual_clip"),
        ({"objective": Objective(loss_type="gspo"), "gamma": 0.5}, "gamma"),
        ({"objective": Objective(overlong_buffer=7)}, "overlong_buffer must be at most max_output_tokens = 6, got 7"),
    ],
)
def test_an_incompatible_objective_is_refused_first(options, rule):
    with pytest.raises(ValueError, match=rule):
        tiny_agent(**options)
    with pytest.raises(ValueError, match=rule):
        tiny_population(2, **options)
