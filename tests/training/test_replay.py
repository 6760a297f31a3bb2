"""Replay of the best member's hyperparameter schedule."""

from dataclasses import replace as with_fields
from datetime import date

import pytest
import yaml

from evogrpo import replay, train
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.evolution import ScheduleStage, Tournament
from evogrpo.reporting.lineage import best_schedule
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import latest_generations, read_journal
from evogrpo.training.configuration.environment_tasks import merge_sections, packaged_values
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.configuration.sections import CONFIG_FILE
from evogrpo.training.replay import HyperparameterSchedule
from evogrpo.validation import dump
from tests.reporting.journals import generation, member, plan
from tests.tiny_steps import cart_pole, step_population, step_run
from tests.tiny_training import finish, tiny_run

SPREAD = {"evolve_network": None, "spread": True, "samples_per_step": 8}
EVENTFUL = Tournament(z=0.0, size=3, elitism=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the folder of a run whose best member's hyperparameters changed."""
    folder = tmp_path_factory.mktemp("found") / "run"
    finish(step_run(folder, strategy=EVENTFUL, options=SPREAD, generations=5))
    return folder


def learnt_with(folder, line):
    """Return the hyperparameters of every learning step of a lineage of indices."""
    events = read_journal(folder / "journal.jsonl")
    members = {event["generation"]: event["members"] for event in latest_generations(events)}
    rows = []
    for event in events:
        if event["event"] == "step" and event["generation"] in line:
            index = line[event["generation"]]
            (member,) = [each for each in event["members"] if each["index"] == index]
            (known,) = [each for each in members[event["generation"]] if each["index"] == index]
            rows.append((member["learning_rate"], known["hyperparameters"]))
    return rows


def line_by_hand(folder):
    """Slow oracle: follow parents and births from the tested member."""
    events = read_journal(folder / "journal.jsonl")
    generations = {event["generation"]: event["members"] for event in latest_generations(events)}
    index = next(event["index"] for event in reversed(events) if event["event"] == "test")
    results = []
    for number, members in generations.items():
        for each in members:
            if each["index"] == index:
                results.append((each["fitness"], -number))
    line = {}
    number = -max(results)[1]
    while number:
        member = next((each for each in generations[number] if each["index"] == index), None)
        if member is None:
            after = next(each for each in generations[number + 1] if each["index"] == index)
            index = after["parent"]
            continue
        line[number] = index
        number -= 1
    return line


def test_a_replay_uses_the_hyperparameters_of_the_winners_lineage(found, tmp_path):
    HyperparameterSchedule.read(found).write(tmp_path / "found.yaml")
    population = step_population(1, update_epochs=2)
    replay(tmp_path / "found.yaml", population, cart_pole(), run_dir=tmp_path / "run").finish()
    line = line_by_hand(found)
    expected = learnt_with(found, line)
    assert len({str(values) for _, values in expected}) > 1  # the schedule has changes
    events = latest_generations(read_journal(tmp_path / "run" / "journal.jsonl"))
    indices = {number: event["members"][0]["index"] for number, event in enumerate(events, start=1)}
    assert learnt_with(tmp_path / "run", indices) == expected


def test_a_replay_uses_the_same_micro_batches(tmp_path):
    folder = tmp_path / "run"
    finish(
        tiny_run(
            folder,
            size=1,
            options={"micro_batch_tokens": 32},
            generations=1,
            steps_per_generation=1,
        )
    )
    run_id = read_journal(folder / "journal.jsonl")[0]["run_id"]
    text = f"task: {{name: two_digit_sums}}\nagent: {{top_k: 9}}\nrun_id: {run_id}\n"
    (folder / CONFIG_FILE).write_text(text)
    agent = HyperparameterSchedule.read(folder).config().agent
    assert (agent.micro_batch_tokens, agent.top_k) == (32, 9)


def test_the_file_is_plain_yaml_and_round_trips(found, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    schedule = HyperparameterSchedule.read(found)
    schedule.write("~/new/schedule.yaml")
    assert HyperparameterSchedule.read(tmp_path / "new" / "schedule.yaml") == schedule
    values = yaml.safe_load((tmp_path / "new" / "schedule.yaml").read_text())
    assert [each["generations"] for each in values["stages"]] == [
        list(each.generations) for each in schedule.stages
    ]
    assert set(values["stages"][0]["hyperparameters"]) == set(HYPERPARAMETER_NAMES)
    with pytest.raises(ValueError, match="already exists"):
        schedule.write(tmp_path / "new" / "schedule.yaml")


SECTIONS = {
    "schedule": {"generations": 2, "steps_per_generation": 1, "samples_per_step": 16,
    "test_questions": 0,
                 "total_timesteps": 100_000, "count_evaluations": True},
    "population": {"size": 3},
    "hyperparameters": {"group_size": 8},
    "task": {"validation_size": 4, "max_episode_steps": 20},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:No learning signal")
def test_a_configured_run_is_replayed_with_its_settings(tmp_path):
    settings = {}
    for part in SECTIONS.values():
        settings.update(part)
    settings |= {"strategy": EVENTFUL, "fitness": {"racing": True}}
    train("CartPole-v1", run_dir=tmp_path / "run", progress=False, **settings)
    stored = HyperparameterSchedule.read(tmp_path / "run")
    stored.write(tmp_path / "found.yaml")
    run = replay(
        tmp_path / "found.yaml", run_dir=tmp_path / "again", overrides=["seed=3"], progress=False
    ).finish()
    assert run.result.generations == sum(len(stage.generations) for stage in stored.stages)
    config = load_config(tmp_path / "again" / "config.yaml")
    original = load_config(tmp_path / "run" / "config.yaml")
    assert (config.seed, config.population.size) == (3, 1)
    assert (config.task, config.agent, config.fitness) == (
        original.task,
        original.agent,
        original.fitness,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stagess": 1}, "did you mean 'stages'"),
        ({"version": 2}, "version must"),
        ({"stages": "x"}, "stages must be a list"),
        *(
            ({"origin": {"run": value}}, r"origin\.run is")
            for value in (date(2026, 1, 1), b"x", {"a"}, float("inf"))
        ),
        (
            {
                "stages": [
                    {"hyperparameters": {"lr": -1.0}, "generations": [1], "samples_per_step": 8}
                ]
            },
            "lr must be above 0",
        ),
    ],
)
def test_an_invalid_schedule_is_refused(found, tmp_path, change, message):
    HyperparameterSchedule.read(found).write(tmp_path / "good.yaml")
    values = yaml.safe_load((tmp_path / "good.yaml").read_text()) | change
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=message):
        HyperparameterSchedule.read(tmp_path / "bad.yaml")
    (tmp_path / "config.yaml").write_text("task: {env: CartPole-v1}")
    with pytest.raises(ValueError, match="is not a hyperparameter schedule"):
        HyperparameterSchedule.read(tmp_path / "config.yaml")


RUN = {"event": "run", "samples_per_step": 8, "evolvable": {}}


def at(rate):
    return {"hyperparameters": {"lr": rate, "group_size": 4}}


def test_later_training_of_an_ancestor_is_excluded():
    one = generation(1, member(0, 0, **at(1e-3)), member(1, 1, **at(1e-4)), step=5)
    two = generation(2, member(0, 0, **at(1e-3)), member(1, 2, parent=0, **at(2e-3)), step=9)
    three = generation(
        3,
        member(0, 0, **at(1e-3)),
        member(1, 2, parent=0, fitness=0.9, **at(2e-3)),
        best=2,
        step=12,
    )
    found = best_schedule(summarise([RUN, one, two, three]))
    assert found.member.index == 2
    assert [(stage.hyperparameters.lr, stage.generations) for stage in found.stages] == [
        (1e-3, (5,)),
        (2e-3, (4, 3)),
    ]


def test_changed_budgets_are_part_of_the_schedule():
    other = member(1, 1, **at(1e-4))
    events = [
        RUN,
        generation(
            1, member(0, 0, **at(1e-3)), other, step=2, plan=plan(1, [0, 1], samples_per_step=4)
        ),
        generation(
            2,
            member(0, 0, **at(1e-3)),
            other,
            step=4,
            samples_per_step=4,
            plan=plan(2, [0, 1], samples_per_step=16),
        ),
        generation(3, member(0, 0, fitness=0.9, **at(1e-3)), other, step=6, samples_per_step=16),
    ]
    assert [stage.samples_per_step for stage in best_schedule(summarise(events)).stages] == [
        8,
        4,
        16,
    ]


def test_a_stage_must_match_its_run():
    values = packaged_values("CartPole-v1", with_preset=False)
    hyperparameters = parse_config(values).hyperparameters
    stage = ScheduleStage(hyperparameters=hyperparameters, generations=(5,), samples_per_step=32)
    other = with_fields(stage, hyperparameters=with_fields(hyperparameters, lr=1e-3))
    values = merge_sections(
        values, {"schedule": {"samples_per_step": 32}, "hyperparameters": hyperparameters.to_json()}
    )
    strategy = {"name": "replay", "stages": [dump(stage)]}
    assert parse_config(values | {"strategy": strategy}).strategy.stages == (stage,)
    with pytest.raises(ValueError, match=r"hyperparameters\.lr must be 0\.001"):
        parse_config(values | {"strategy": strategy | {"stages": [dump(other)]}})
