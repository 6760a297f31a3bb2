"""Stopping and going on: a real Ctrl-C, a kill, a reward that raises; resuming equals never having stopped."""

import signal
import time
from pathlib import Path

import pytest

from evogrpo.cli import main
from evogrpo.storage.checkpoint import generation_folder, latest_checkpoint
from evogrpo.storage.journal import read_journal
from tests.cli.project import command

SHORT = ("schedule.steps_per_generation=3", "schedule.generations=3")


def story(run_dir: Path) -> list:
    """Return the events that make up a run, without its times; what was done again counts once."""
    told = {}
    for event in read_journal(run_dir / "journal.jsonl"):
        if event["event"] in ("step", "generation", "test", "baseline"):
            told[event["event"], event.get("step")] = _timeless(event)
    return sorted(told.items(), key=str)


def _timeless(value):
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in ("time", "seconds", "step_time")}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def uninterrupted(project, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", str(run_dir), *SHORT]) == 0
    return story(run_dir)


@pytest.fixture
def slow(project, here):
    """Return overrides with the same rewards, given slowly enough to be interrupted, until there is a file `hurry`."""
    text = (project / "rewards.py").read_text()
    wait = "os.path.exists('hurry') or time.sleep(0.004)"
    Path("slow.py").write_text(f"import os, time\n{text.replace('return', f'{wait}; return')}")
    return (*SHORT, "task.reward=slow.py:score")


def wait_for_step(run_dir: Path, step: int) -> None:
    for _ in range(2400):
        time.sleep(0.05)
        path = run_dir / "journal.jsonl"
        if path.exists() and any(e["event"] == "step" and e["step"] >= step for e in read_journal(path)):
            return
    raise AssertionError("the run did not get there")


@pytest.mark.parametrize(
    ("number", "options", "code"), [(signal.SIGINT, ("--exit-code-on-stop", "9"), 130), (signal.SIGTERM, (), 143)]
)
def test_a_signal_stops_the_run_and_resuming_equals_never_stopping(
    project, here, slow, uninterrupted, number, options, code, capsys
):
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *options, *slow, cwd=here)
    wait_for_step(here / "run", 1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "stopping..." in errors
    assert "Traceback" not in errors
    assert "evogrpo resume run" in output
    events = read_journal(here / "run" / "journal.jsonl")
    assert events[-1]["reason"] == ("stopped by SIGTERM" if number == signal.SIGTERM else "stopped by the user")
    assert sum(event["event"] == "step" for event in events) < 9

    Path("hurry").touch()
    words = (
        ("resume", "run")
        if number == signal.SIGINT
        else ("train", str(project / "tiny.yaml"), "--run-dir", "run", "--resume-if-exists")
    )
    assert main(words) == 0
    assert "resuming run after generation" in capsys.readouterr().out
    assert story(here / "run") == uninterrupted


def test_a_second_signal_aborts_at_once_and_the_run_still_resumes(project, here, slow, uninterrupted):
    # Once the file is there a completion takes so long that its step cannot end between the two signals.
    patient = "30 if os.path.exists('hang') else 0.004"
    Path("slow.py").write_text(Path("slow.py").read_text().replace("0.004", patient))
    process = command("train", project / "tiny.yaml", "--run-dir", "run", *slow, cwd=here)
    wait_for_step(here / "run", 1)
    (here / "hang").touch()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "aborted" in errors
    assert read_journal(here / "run" / "journal.jsonl")[-1]["event"] == "step"  # nobody wrote an orderly end

    Path("slow.py").write_text((project / "rewards.py").read_text())
    assert main(["resume", "run", "--allow-changed-data"]) == 0
    assert story(here / "run") == uninterrupted


def test_a_reward_that_raises_stops_the_run_which_goes_on_once_mended(project, here, uninterrupted, capsys):
    good = (project / "rewards.py").read_text()
    Path("mine.py").write_text(
        good.replace("    return", "    global calls\n    calls += 1\n    assert calls < 300, 'oh'\n    return")
        + "\ncalls = 0\n"
    )
    arguments = ["train", str(project / "tiny.yaml"), "--run-dir", "run", *SHORT, "task.reward=mine.py:score"]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "AssertionError" in printed.err
    assert "mine.py, line 5" in printed.err
    assert "evogrpo resume run --allow-changed-data" in printed.out

    Path("mine.py").write_text(good)
    assert main(["resume", "run"]) == 2
    assert "reward score: weight 1, code" in capsys.readouterr().err
    assert main(["resume", "run", "--allow-changed-data"]) == 0
    assert "warning: changed since the run began: reward score: weight 1, code" in capsys.readouterr().err
    assert story(here / "run") == uninterrupted


def test_a_reward_that_raises_at_once_leaves_a_run_that_can_go_on(project, here, uninterrupted, capsys):
    body = "    if 'made-up' not in completion:\n        raise KeyError(answer)\n    return 0.0\n"
    Path("mine.py").write_text(f"def score(completion, answer, question):\n{body}")
    arguments = ["train", str(project / "tiny.yaml"), "--run-dir", "run", *SHORT, "task.reward=mine.py:score"]
    assert main(arguments) == 1
    assert "Reward function 'score' raised KeyError" in capsys.readouterr().err
    Path("mine.py").write_text((project / "rewards.py").read_text())
    assert main(["resume", "run"]) == 0
    assert story(here / "run") == uninterrupted


def test_training_further_equals_having_planned_it(project, here, uninterrupted, capsys):
    tiny = str(project / "tiny.yaml")
    assert main(["train", tiny, "--run-dir", "run", SHORT[0], "schedule.generations=2"]) == 0
    assert main(["resume", "run", "--generations", "3"]) == 0
    kept = [entry for entry in uninterrupted if entry[1]["event"] in ("step", "test")]
    assert [entry for entry in story(here / "run") if entry[1]["event"] in ("step", "test")] == kept


def test_a_damaged_newest_checkpoint_is_skipped_and_named(project, here, uninterrupted, capsys):
    tiny = str(project / "tiny.yaml")
    assert main(["train", tiny, "--run-dir", "run", SHORT[0], "schedule.generations=2"]) == 0
    newest = latest_checkpoint("run").generation
    assert newest == 2
    tensors = generation_folder("run", newest) / "population.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    capsys.readouterr()
    assert main(["resume", "run", "generations=3"]) == 0
    printed = capsys.readouterr()
    assert "Skipped an unusable checkpoint" in printed.err
    assert "generation-0002" in printed.err
    assert "resuming run after generation 1" in printed.out
    assert story(here / "run")[-1] == uninterrupted[-1]


def test_what_would_make_it_another_run_is_refused(project, here, capsys):
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", "run", "schedule.generations=1"]) == 0
    for override in ("hyperparameters.lr=1", "samples_per_step=32", "schedule.steps_per_generation=9"):
        assert main(["resume", "run", override]) == 2
        assert "A resumed run may only change generations" in capsys.readouterr().err


def test_resuming_with_another_model_is_refused(project, here, capsys):
    from tests.tiny_models import tiny_model, tiny_tokenizer

    assert main(["train", str(project / "tiny.yaml"), "--run-dir", "run", "schedule.generations=1"]) == 0
    tiny_model(seed=1).save_pretrained("other")
    tiny_tokenizer().save_pretrained("other")
    assert main(["resume", "run", "--generations", "2", "model=other"]) == 2
    assert "fingerprint" in capsys.readouterr().err


def test_a_run_whose_members_have_all_failed_is_not_offered_to_go_on(project, here, capsys):
    Path("mine.py").write_text("def score(completion, answer, question):\n    return len(set(completion)) / 8\n")
    deadly = ("search_space.lr=null", "hyperparameters.lr=1e37", "schedule.generations=2", "task.reward=mine.py:score")
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", "run", *deadly]) == 1
    printed = capsys.readouterr()
    assert "All members failed" in printed.err
    assert "Start a new run" in printed.err
    assert "evogrpo resume" not in printed.out.partition("run directory")[2]
