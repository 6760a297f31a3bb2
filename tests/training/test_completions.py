"""Tables of completions."""

import json
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from evogrpo import Objective, evolve
from evogrpo.envs.protocol import SPLITS
from evogrpo.reporting.records import Example
from evogrpo.storage.journal import read_journal
from evogrpo.training.run_dir import RunDir, open_run
from tests.tiny_training import (
    SPACE,
    resumed_run,
    stop_after,
    tiny_env,
    tiny_population,
    tiny_run,
    variety,
)

STEPS = {"steps_per_generation": 2, "samples_per_step": 8, "generations": 2, "test_questions": 0}


def rows_of(folder, step):
    path = folder / "completions" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


def sometimes(completions, answer, **columns):
    return [
        None if int(number) % 2 else variety(text, "", "")
        for text, number in zip(completions, answer, strict=True)
    ]


def test_every_step_writes_completions_rewards_and_advantages(tmp_path):
    env = tiny_env(reward_funcs=[lengths, sometimes], reward_weights=[0.1, 2.0])
    population = tiny_population(3, hp_config=SPACE, update_epochs=2)
    same = tiny_population(3, hp_config=SPACE, update_epochs=2)
    reports = list(evolve(population, env, run_dir=tmp_path / "run", completions=10, **STEPS))
    names = [f"step-{step:06d}.jsonl" for step in range(4)]
    assert sorted(path.name for path in (tmp_path / "run" / "completions").iterdir()) == names
    questions = {}
    for split in SPLITS:
        for row in env.make_batch(split, range(env.size(split))).rows:
            questions[row["prompt"]] = row["answer"]
    for step in range(4):
        rows = rows_of(tmp_path / "run", step)
        assert [row["index"] for row in rows] == sorted(row["index"] for row in rows)
        assert len(rows) == 10
        for row in rows:
            assert list(row) == [
                "step",
                "index",
                "prompt",
                "completion",
                "reward",
                "advantage",
                "truncated",
                "rewards/lengths",
                "rewards/sometimes",
            ]
            assert row["step"] == step
            assert row["rewards/lengths"] == len(row["completion"])
            is_odd = int(questions[row["prompt"]]) % 2
            assert row["rewards/sometimes"] == (
                None if is_odd else pytest.approx(len(set(row["completion"])) / 8)
            )
            total = 0.1 * row["rewards/lengths"] + 2.0 * (row["rewards/sometimes"] or 0.0)
            assert row["reward"] == pytest.approx(total)
    # Repeat the first step: the same rows with the members' advantages.
    first = rows_of(tmp_path / "run", 0)
    assert Counter(row["index"] for row in first) == {0: 4, 1: 3, 2: 3}
    learned = same.learn(
        same.collect(env, step=0, samples_per_step=8, starts_per_step=4).experience, step=0
    )
    for slot in range(3):
        advantages = [row["advantage"] for row in first if row["index"] == slot]
        assert advantages == pytest.approx(learned[slot].advantages[: len(advantages)], abs=1e-5)
    assert any(row["advantage"] for row in first)
    # Of each member, the best and the worst completion of a group with signal, or one completion.
    for member in reports[-1].members:
        own = [example for example in reports[-1].examples if example.index == member.index]
        assert {example.step for example in own} == {3}
        if member.metrics["frac_reward_zero_std"] < 1:
            best, worst = own
            assert best.prompt == worst.prompt
            assert best.reward > worst.reward
            assert best.advantage > worst.advantage
        else:
            assert len(own) == 1


def test_a_resumed_run_writes_the_same_tables(stored_language_run, tmp_path):
    stop_after(tiny_run(tmp_path), 3)
    # The run was killed during a step that is repeated.
    (tmp_path / "completions" / "step-000003.jsonl").write_text("torn")
    stop_after(resumed_run(tmp_path), 4)
    for step in range(4):
        assert rows_of(tmp_path, step) == rows_of(stored_language_run.folder, step)


def hostile(text="\x1b[31m\x7f\u202e\u2028\n{}<script>"):
    return Example(
        prompt=text,
        completion=text,
        reward=None,
        index=3,
        step=12,
        rewards={"f": 0.5, "g": None},
        advantage=-1.5,
    )


def test_lines_are_json_without_control_characters(tmp_path):
    RunDir(tmp_path / "new").write_completions(12, [hostile()])
    (path,) = (tmp_path / "new" / "completions").iterdir()
    content = path.read_bytes()
    assert path.name == "step-000012.jsonl"
    assert content.endswith(b"\n")
    assert content.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in content[:-1])
    row = json.loads(content)
    assert (row["step"], row["index"], row["reward"], row["advantage"], row["truncated"]) == (
        12,
        3,
        None,
        -1.5,
        False,
    )
    assert row["prompt"] == row["completion"] == hostile().prompt
    assert (row["rewards/f"], row["rewards/g"]) == (0.5, None)


def logging_reward(completions, trainer_state, log_extra, log_metric, **_):
    log_extra("length", [len(text) for text in completions])
    log_extra("kind", ["long" if len(text) > 3 else "short" for text in completions])
    log_extra("huge", [1e200] * len(completions))
    log_metric("longest", max(map(len, completions)))
    log_metric("step", trainer_state.global_step)
    return [len(set(text)) / 8 for text in completions]


def test_values_logged_by_reward_functions_are_in_tables_and_metrics(tmp_path):
    env = tiny_env(reward_funcs=logging_reward)
    options = {
        "generations": 1,
        "steps_per_generation": 2,
        "samples_per_step": 8,
        "test_questions": 0,
    }
    population = tiny_population(2, objective=Objective(dynamic_sampling=1))
    list(evolve(population, env, run_dir=tmp_path, **options))
    steps = [
        event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "step"
    ]
    members = list(chain.from_iterable(event["members"] for event in steps))
    assert [member["step"] for member in members] == [0, 0, 1, 1]
    assert all(member["longest"] >= 1 for member in members)
    first, *_ = sorted((tmp_path / "completions").iterdir())
    assert open_run(tmp_path).record.run_state.examples[0].columns["huge"] is None
    for row in map(json.loads, first.open()):
        assert row["length"] == len(row["completion"])
        assert row["huge"] is None
        assert row["kind"] == ("long" if len(row["completion"]) > 3 else "short")


def test_logged_values_replace_no_other_column(tmp_path):
    rows = [
        replace(hostile(), columns={"logged": value, "reward": 9, "rewards/f": 9})
        for value in (True, "x", None)
    ]
    RunDir(tmp_path).write_completions(0, rows)
    written = [json.loads(line) for line in (tmp_path / "completions" / "step-000000.jsonl").open()]
    assert [row["logged"] for row in written] == [True, "x", None]
    assert {(row["reward"], row["rewards/f"]) for row in written} == {(None, 0.5)}
