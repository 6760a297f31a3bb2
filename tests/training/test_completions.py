"""Tables of completions."""

import json
import sys
from dataclasses import fields, replace

import pyarrow.parquet
import pytest

from evogrpo import Objective, evolve
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.envs.protocol import SPLITS
from evogrpo.reporting.records import Example
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.sections import LoggingConfig
from evogrpo.training.exports import CompletionsLog
from tests.tiny_training import SPACE, finish, resumed_run, tiny_env, tiny_population, tiny_run, variety

STEPS = {"steps_per_generation": 2, "samples_per_step": 8, "generations": 2, "test_questions": 0}


def rows_of(folder, step):
    path = folder / "completions" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


def sometimes(completions, answer, **columns):
    return [
        None if int(number) % 2 else variety(text, "", "") for text, number in zip(completions, answer, strict=True)
    ]


def test_every_step_writes_completions_rewards_and_advantages(tmp_path):
    env = tiny_env(reward_funcs=[lengths, sometimes], reward_weights=[0.1, 2.0])
    population = tiny_population(3, hp_config=SPACE, update_epochs=2)
    before = {slot: population[slot].clone() for slot in range(3)}
    reports = list(evolve(population, env, run_dir=tmp_path / "run", completions=10, **STEPS))
    assert sorted(path.name for path in (tmp_path / "run" / "completions").iterdir()) == [
        f"step-{step:06d}.jsonl" for step in range(4)
    ]
    questions = {
        row["prompt"]: row["answer"] for split in SPLITS for row in env.open(split, range(env.size(split))).rows
    }
    for step in range(4):
        rows = rows_of(tmp_path / "run", step)
        assert [row["index"] for row in rows] == sorted(row["index"] for row in rows)
        assert len(rows) == 10
        for row in rows:
            assert list(row) == [
                *("step", "index", "prompt", "completion", "reward", "advantage", "truncated"),
                *("rewards/lengths", "rewards/sometimes"),
            ]
            assert row["step"] == step
            assert row["rewards/lengths"] == len(row["completion"])
            odd = int(questions[row["prompt"]]) % 2
            assert row["rewards/sometimes"] == (None if odd else pytest.approx(len(set(row["completion"])) / 8))
            total = 0.1 * row["rewards/lengths"] + 2.0 * (row["rewards/sometimes"] or 0.0)
            assert row["reward"] == pytest.approx(total)
    # Replay the first step: the same rows with the members' advantages.
    first = rows_of(tmp_path / "run", 0)
    assert [sum(row["index"] == index for row in first) for index in range(3)] == [4, 3, 3]
    collected = population_batch(before, env)
    for slot, agent in before.items():
        own = collected.experience["default"].select_members([slot])
        report = learn(agent.members, [agent.learner(0)], {"default": moved(own)})[0]
        mine = [row for row in first if row["index"] == slot]
        assert [row["advantage"] for row in mine] == pytest.approx(report.advantages[: len(mine)], abs=1e-5)
    assert any(row["advantage"] for row in first)
    assert [example.index for example in reports[-1].examples] == [m.index for m in reports[-1].members]
    assert {example.step for example in reports[-1].examples} == {3}


def population_batch(agents, env):
    population = tiny_population(3, hp_config=SPACE, update_epochs=2)
    for slot, agent in agents.items():
        population[slot].hyperparameters = agent.hyperparameters
    return population.collect(env, step=0, samples_per_step=8, block=4)


def moved(batch):
    """Return one member's rows as those of the member in slot 0."""
    return replace(batch, member_ids=batch.member_ids * 0)


def test_nothing_is_written_if_disabled(tmp_path):
    list(evolve(tiny_population(2), tiny_env(), run_dir=tmp_path / "run", completions=0, **STEPS))
    assert not (tmp_path / "run" / "completions").exists()


def test_a_resumed_run_writes_the_same_tables(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(tiny_run(whole))
    run = tiny_run(parts)
    reports = run.reports()
    for _ in range(4):
        next(reports)
    run.stop()
    list(reports)
    (parts / "completions" / "step-000003.jsonl").write_text("torn")  # as if killed during a step that is repeated
    finish(resumed_run(parts))
    for step in (0, 1, 2, 4, 5):
        assert rows_of(whole, step) == rows_of(parts, step)


def hostile(text="\x1b[31m\x7f\u202e\u2028\n{}<script>"):
    return Example(
        prompt=text, completion=text, reward=None, index=3, step=12, rewards={"f": 0.5, "g": None}, advantage=-1.5
    )


def test_lines_are_json_without_control_characters(tmp_path):
    CompletionsLog(tmp_path / "new" / "completions").write(12, [hostile()])
    (path,) = (tmp_path / "new" / "completions").iterdir()
    content = path.read_bytes()
    assert path.name == "step-000012.jsonl"
    assert content.endswith(b"\n")
    assert content.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in content[:-1])
    row = json.loads(content)
    assert (row["step"], row["index"], row["reward"], row["advantage"], row["truncated"]) == (12, 3, None, -1.5, False)
    assert row["prompt"] == row["completion"] == hostile().prompt
    assert (row["rewards/f"], row["rewards/g"]) == (0.5, None)


def logging_reward(completions, trainer_state, log_extra, log_metric, **_):
    log_extra("length", [len(text) for text in completions])
    log_extra("kind", ["long" if len(text) > 3 else "short" for text in completions])
    log_metric("longest", max(map(len, completions)))
    log_metric("step", trainer_state.global_step)
    return [len(set(text)) / 8 for text in completions]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_values_logged_by_reward_functions_are_in_tables_and_metrics(tmp_path, form):
    env = tiny_env(reward_funcs=logging_reward)
    options = {"generations": 1, "steps_per_generation": 2, "samples_per_step": 8, "test_questions": 0}
    population = tiny_population(2, objective=Objective(dynamic_sampling=1))
    list(evolve(population, env, run_dir=tmp_path, completions_format=form, **options))
    steps = [event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "step"]
    assert [member["step"] for event in steps for member in event["members"]] == [0, 0, 1, 1]
    assert all(member["longest"] >= 1 for event in steps for member in event["members"])
    (first, *_) = sorted((tmp_path / "completions").iterdir())
    rows = pyarrow.parquet.read_table(first).to_pylist() if form == "parquet" else map(json.loads, first.open())
    for row in rows:
        assert row["length"] == len(row["completion"])
        assert row["kind"] == ("long" if len(row["completion"]) > 3 else "short")


def test_parquet_holds_the_same(tmp_path):
    rows = [hostile(), Example(prompt="\ud800", completion="ok", reward=1.0, index=4, step=12, rewards={"f": None})]
    log = CompletionsLog(tmp_path, form="parquet", limit=5)
    log.write(12, rows)
    log.write(12, rows)
    table = pyarrow.parquet.read_table(tmp_path / "step-000012.parquet")
    assert table.column("prompt").to_pylist() == [hostile().prompt, "?"]
    assert table.column("rewards/f").to_pylist() == [0.5, None]
    assert table.column("rewards/g").to_pylist() == [None, None]
    assert [str(table.schema.field(name).type) for name in ("step", "reward", "advantage", "rewards/g")] == [
        *("int64", "double", "double", "double")
    ]
    assert table.column("truncated").to_pylist() == [False, False]


@pytest.mark.parametrize(
    ("logged", "kind", "stored"),
    [
        ([True, None, False], "bool", [True, None, False]),
        ([2**60 + 1, None, -1], "int64", [2**60 + 1, None, -1]),
        ([0.5, 1, None], "double", [0.5, 1.0, None]),
        ([2**70, 1, None], "string", [str(2**70), "1", None]),
        ([1, True, "\ud800"], "string", ["1", "True", "?"]),
    ],
)
def test_the_size_of_a_table_is_bounded(tmp_path, logged, kind, stored):
    rows = [replace(hostile(), columns={"logged": value, "reward": 9, "rewards/f": 9}) for value in logged]
    CompletionsLog(tmp_path, form="parquet").write(0, rows)
    table = pyarrow.parquet.read_table(tmp_path / "step-000000.parquet")
    assert str(table.schema.field("logged").type) == kind
    assert table.column("logged").to_pylist() == stored
    assert table.column("reward").to_pylist() == [None] * 3
    assert table.column("rewards/f").to_pylist() == [0.5] * 3


def test_invalid_settings_are_refused(tmp_path):
    CompletionsLog(tmp_path).write(0, [hostile()])
    row = json.loads((tmp_path / "step-000000.jsonl").read_text())
    assert set(row) >= {each.name for each in fields(Example)} - {"rewards", "columns"}


def test_parquet_without_its_package_is_refused_first(tmp_path):
    CompletionsLog(tmp_path, limit=3).write(0, [hostile()] * 10)
    assert (tmp_path / "step-000000.jsonl").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"completions": -1}, "completions must be at least 0, got -1"),
        ({"completions_format": "csv"}, "completions_format must be one of jsonl, parquet, got 'csv'"),
    ],
)
def test_settings_that_cannot_be_written_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoggingConfig(**options)


def test_parquet_without_its_package_is_refused_up_front(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"requires pyarrow.*pip install .*\[datasets\]"):
        LoggingConfig(completions_format="parquet")
