"""Runs as pandas data frames."""

import pytest

from evogrpo import best_hyperparameters, read_run
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES
from evogrpo.reporting.data_frames import COLUMNS
from evogrpo.storage.journal import latest_generations, read_journal
from tests.reporting.journals import baseline, generation, member, plan, step, written

RUN = {"event": "run", "seed": 3, "evolvable": {}, "samples_per_step": 8}
STEP = step(0, {"slot": 0, "index": 0, "reward": 1.5, "kl": None})


@pytest.fixture
def run_dir(stored_network_run):
    return stored_network_run.folder


def test_frames_hold_the_journal(run_dir):
    run = read_run(run_dir)
    events = read_journal(run_dir / "journal.jsonl")
    reported = []
    for event in latest_generations(events):
        for each in event["members"]:
            reported.append((event["generation"], each))
    rows = run.members.to_dict("records")
    assert [(row["generation"], row["member"], row["fitness"], row["lr"]) for row in rows] == [
        (number, each["index"], each["fitness"], each["hyperparameters"]["lr"])
        for number, each in reported
    ]
    assert [row["mean/loss"] for row in rows] == pytest.approx(
        [each["metrics"]["loss"] for _, each in reported]
    )
    steps = []
    for event in events:
        if event["event"] == "step":
            for each in event["members"]:
                steps.append((event["step"], each))
    assert [
        (row["step"], row["member"], row["learning_rate"]) for row in run.steps.to_dict("records")
    ] == [(step, each["index"], each["learning_rate"]) for step, each in steps]
    born = []
    for event in latest_generations(events):
        if event["plan"]:
            born.extend(event["plan"]["children"])
    assert born
    assert list(run.births["member"]) == [0, 1, 2, *(child["index"] for child in born)]
    numbers = []
    for child in born:
        for name, (old, new) in child["changes"].items():
            if not isinstance(new, str):
                numbers.append((child["index"], name, old, new))
    unnamed = run.changes[run.changes["new_name"].isna()]
    assert (
        list(unnamed[["member", "name", "old", "new"]].itertuples(index=False, name=None))
        == numbers
    )
    assert run.births.loc[run.births["winner"], "member"].tolist() == [run.best]
    test = run.evaluations[run.evaluations["split"] == "test"]
    assert test["who"].tolist() == ["untrained", "member", "gain"]
    assert run.facts["seed"] == 0
    assert (run.stopped, run.resumes) == ("3 generations", 0)


def test_every_column_is_documented_and_typed(run_dir):
    run = read_run(run_dir)
    for name, columns in COLUMNS.items():
        frame = getattr(run, name)
        assert list(frame)[: len(columns)] == list(columns)
        assert {column: str(frame[column].dtype) for column in columns} == {
            c: kind for c, (kind, _) in columns.items()
        }
        others = set(frame) - set(columns)
        measured = {column for column in others if column.startswith("mean/") or name == "steps"}
        assert others - measured == (
            set(HYPERPARAMETER_NAMES) if name in ("members", "births") else set()
        )
        assert all(str(frame[column].dtype) == "float64" for column in measured)


def test_dtypes_do_not_depend_on_the_run(run_dir, tmp_path):
    ended = read_run(run_dir)
    for number, events in enumerate(
        (
            [],
            [STEP],
            [STEP, generation(1, member(0, 0, fitness=None, failed="NaN"), best_ever=None)],
        )
    ):
        early = read_run(written(tmp_path / str(number), RUN, *events))
        for name, columns in COLUMNS.items():
            kinds = []
            for run in (early, ended):
                kinds.append({column: str(getattr(run, name)[column].dtype) for column in columns})
            assert kinds[0] == kinds[1]
        assert (early.best, early.stopped) == (None, None)
        assert len(early.members) == (number == 2)


def test_generations_repeated_after_a_resume_count_once(tmp_path):
    lost = generation(2, member(0, 1, 0), best=1, plan=plan(2, [0], (0, 2, 1)))
    events = [
        RUN,
        STEP,
        generation(1, member(0, 0), plan=plan(1, [0], (0, 1, 0))),
        STEP | {"step": 1, "generation": 2},
        lost,
        {"event": "resumed", "generation": 1, "step": 1, "offset": 3},
    ]
    run = read_run(written(tmp_path / "run", *events))
    assert run.members["generation"].tolist() == [1]
    assert run.steps["step"].tolist() == [0]
    # The plan of the generation before the resume stays valid.
    assert run.births["member"].tolist() == [
        0,
        1,
    ]
    assert run.resumes == 1


def test_path_to_the_winner_and_initial_hyperparameters(tmp_path):
    family = [
        generation(1, member(0, 0, fitness=0.2), member(1, 1, fitness=0.3), best=1),
        generation(2, member(0, 0, fitness=None), member(1, 2, 0, fitness=0.6, born=1), best=2),
        generation(
            3,
            member(0, 3, 0, fitness=0.4, born=2),
            member(1, 2, 0, fitness=0.5, born=1),
            best=2,
            best_ever=[2, 2],
        ),
    ]
    members = read_run(written(tmp_path / "run", RUN, baseline(0.1), *family)).members.set_index(
        ["generation", "member"]
    )
    # What the winner learned afterwards does not count.
    assert members.index[members["in_best_lineage"]].tolist() == [
        (1, 0),
        (2, 2),
    ]
    before = (
        members["fitness_before"]
        .astype(object)
        .where(members["fitness_before"].notna(), None)
        .to_dict()
    )
    assert before == {(1, 0): 0.1, (1, 1): 0.1, (2, 0): 0.2, (2, 2): 0.2, (3, 3): None, (3, 2): 0.6}


def test_numbers_beyond_64_bits_are_refused(tmp_path):
    event = generation(1, member(0, 0, tokens=2**63))
    with pytest.raises(ValueError, match="tokens"):
        read_run(written(tmp_path / "run", RUN, event))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Give the directory of a run"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="start of the run"):
        read_run(written(tmp_path / "run", STEP))


@pytest.mark.parametrize("path", [7, b"run", "\0", "a" * 10_000])
@pytest.mark.parametrize("read", [read_run, best_hyperparameters])
def test_values_that_are_no_path_are_refused(read, path):
    with pytest.raises(ValueError, match="run_dir"):
        read(path)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "run", RUN, STEP)
    assert len(read_run("~/run").steps) == 1
