"""Records of runs in the terminal: lineage, best, compare and exported schedules."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from evogrpo import best_hyperparameters, read_run
from evogrpo.cli import main
from evogrpo.reporting.lineage import ancestors
from evogrpo.reporting.summary import summarise
from evogrpo.storage.journal import Journal, read_journal
from evogrpo.training.replay import HyperparameterSchedule
from tests.reporting.journals import estimate, generation, member, outcome, step, written
from tests.tiny_steps import step_run
from tests.tiny_training import finish, resumed_run

HOSTILE = "\x1b[2Jboo\u202e [bold]x[/bold]"


@pytest.fixture
def run_dir(stored_network_run):
    return stored_network_run.folder


def hostile_run(folder):
    """Write a run whose journal has terminal control characters in every text."""
    named = member(0, 0, reason=HOSTILE), member(1, 1, fitness=None, failed=HOSTILE)
    with closing(Journal(folder / "journal.jsonl")) as journal:
        for event in (
            {"event": "run", "evolvable": {}, "samples_per_step": 8, "task": HOSTILE,
            HOSTILE: HOSTILE,
             "data": {HOSTILE: folder.name}},
            generation(1, *named),
            outcome(0),
            {"event": "stopped", "reason": HOSTILE},
        ):  # fmt: skip
            journal.append(
                event["event"], **{name: value for name, value in event.items() if name != "event"}
            )
    return folder


@pytest.mark.parametrize("command", ["lineage", "best", "compare"])
def test_texts_of_a_journal_are_escaped(tmp_path, capsys, command):
    folders = [hostile_run(tmp_path / name) for name in ("one", "other")][
        : 2 if command == "compare" else 1
    ]
    assert main([command, *map(str, folders)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "boo" in output
    assert "\\x1b[2Jboo" in " ".join(output.split())
    assert "[bold]x[/bold]" in output


@pytest.fixture
def copied(run_dir, tmp_path, monkeypatch):
    """Return the path of a copy of the run, which tests may change."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(run_dir, "run"))


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: shutil.rmtree(run / "best"),
        lambda run: (run / "best" / "agent.json").write_text("{"),
        lambda run: edit(run / "best" / "agent.json", '"run_id": "', '"run_id": "0'),
        lambda run: edit(
            run / "best" / "agent.json", '"note": {"generation": ', '"note": {"generation": 9'
        ),
    ],
    ids=["missing", "damaged", "another run", "another generation"],
)
@pytest.mark.parametrize("arguments", [["best"], ["export", "elsewhere"]])
def test_a_folder_that_is_not_the_best_member_is_named_with_the_remedy(
    copied, capsys, arguments, damage
):
    damage(copied)
    main([arguments[0], "run", *arguments[1:]])
    printed = capsys.readouterr()
    assert "evogrpo resume" in " ".join((printed.out + printed.err).split())
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:-1],
        lambda lines: [*lines[:3], *lines[4:]],
        lambda lines: [lines[0], lines[1].replace('"seconds": ', '"seconds": 1'), *lines[2:]],
    ],
    ids=["older", "a line less", "edited"],
)
def test_a_journal_that_does_not_fit_the_newest_checkpoint_is_named(copied, damage):
    journal = copied / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    changed = damage(lines)
    assert changed != lines
    journal.write_text("".join(changed))
    with pytest.warns(UserWarning, match="journal.jsonl"):
        read_run(copied)


def test_lineage_marks_the_winner_and_lists_all_members(run_dir, capsys):
    assert main(["lineage", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = summarise(read_journal(run_dir / "journal.jsonl"))
    starred = {int(line.partition("#")[2].split()[0]) for line in lines if "★" in line}
    assert starred == {report.index for report in ancestors(summary, summary.best)}
    assert len(lines) == len(summary.births)


@pytest.mark.parametrize(
    ("by", "measure"),
    [("validation", "validation"), ("rollouts", "training")],
)
def test_fitness_is_named(tmp_path, capsys, by, measure):
    begin = {
        "event": "run",
        "evolvable": {},
        "samples_per_step": 8,
        "kind": "networks",
        "fitness": {"by": by},
    }
    training = by != "validation"
    measured = {"rollouts" if training else "greedy": estimate(0.25)}
    best = member(0, 0, fitness=0.25, measured=measured)
    written(tmp_path / "run", begin, generation(1, best, member(1, 1, fitness=0.5, measured={})))
    assert main(["lineage", str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    label = "training fitness " * training
    assert f"  {label}0.250 ± 0.100 in generation 1, the best member" in output
    assert f"  {label}0.500 ± 0.100 after generation 1" in output
    assert main(["best", str(tmp_path / "run")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"fitness 0.250 ± 0.100, mean return per {measure} start" in output


def test_a_comparison_shows_settings_and_the_difference_of_the_tests(run_dir, tmp_path, capsys):
    finish(
        step_run(
            tmp_path / "other", options={"normalise_observations": True, "seed": 1}, generations=1
        )
    )
    assert main(["compare", str(run_dir), str(tmp_path / "other")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "seed 0 1" in output
    assert "paired on" in output  # the test starts are equal


def test_a_comparison_shows_the_limits_of_the_last_resume(tmp_path, capsys):
    for name in ("one", "other"):
        finish(step_run(tmp_path / name, generations=1, test_questions=0))
    finish(resumed_run(tmp_path / "other", generations=2))
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "schedule generations 1 2" in output
    assert "lineage" not in output


def test_runs_without_generations_are_shown(tmp_path, capsys):
    for name in ("one", "other"):
        with closing(Journal(tmp_path / name / "journal.jsonl")) as journal:
            journal.append("run", evolvable={}, samples_per_step=8)
    assert main(["lineage", str(tmp_path / "one")]) == 0
    assert "No member" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    assert main(["best", str(tmp_path / "one")]) == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [([], "Wait"), ([{"event": "ended", "reason": "max_seconds reached"}], "max_seconds")],
)
def test_an_export_without_a_best_member_says_why(tmp_path, capsys, more, message):
    written(tmp_path / "run", {"event": "run", "evolvable": {}, "samples_per_step": 8}, *more)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_a_calibrated_learning_rate_is_shown_instead_of_the_first_guess(tmp_path, capsys):
    """The best member is a child: only the rates of its lineage count."""
    guess = {"lr": 0.005, "target_kl": 0.01}
    run = {"event": "run", "evolvable": {}, "samples_per_step": 8}
    other = {"slot": 1, "index": 1, "calibrated_lr": 0.5, "learning_rate": 0.5}
    founder = {"slot": 0, "index": 0}
    found = member(0, 0, hyperparameters=guess, metrics={"learning_rate": 0.0015})
    child = member(
        1, 2, parent=0, fitness=0.9, hyperparameters=guess, metrics={"learning_rate": 0.003}
    )
    written(
        tmp_path,
        run,
        step(0, founder | {"calibrated_lr": 0.00125, "learning_rate": 0.00125}, other),
        step(1, founder | {"learning_rate": 0.00175}, other),
        generation(1, found, member(1, 1, hyperparameters=guess), step=2),
        step(
            2,
            founder | {"learning_rate": 0.25},
            {"slot": 1, "index": 2, "learning_rate": 0.003},
            generation=2,
        ),
        generation(2, member(0, 0, hyperparameters=guess), child, best=2, step=3),
    )
    assert main(["best", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "lr 0.00125 to 0.003" in shown
    assert "0.005" not in shown
    assert main(["export", str(tmp_path), "--schedule", str(tmp_path / "schedule.yaml")]) == 0
    assert {
        stage.hyperparameters.lr
        for stage in HyperparameterSchedule.read(tmp_path / "schedule.yaml").stages
    } == {0.00125}
    assert [each.lr for each in best_hyperparameters(tmp_path)] == [0.003]
    assert read_run(tmp_path).members["lr"].tolist() == [0.0015, 0.005, 0.005, 0.003]
