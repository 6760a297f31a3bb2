"""The study of prompts and rewards of unknown use: settings and tables."""

import json

from benchmarking import language_study


def test_settings_of_the_first_member():
    plain = language_study.first_settings("plain", 0)
    weights = [plain[name] for name in plain if name.startswith("reward_weights.")]
    assert weights == [0, 0, 0, 0]
    assert plain["task.before"] == ""
    everything = language_study.first_settings("all rewards", 0)
    assert everything == {**dict.fromkeys(plain, 1), "task.before": ""}


def test_drawn_settings_depend_on_the_seed_alone():
    drawn = [language_study.first_settings("drawn", seed) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({json.dumps(each, sort_keys=True) for each in drawn}) > 2
    assert {each["task.before"] for each in drawn} <= set(language_study.PROMPTS)


def test_recorded_runs_are_not_repeated_and_make_tables(tmp_path, capsys):
    for seed, score in ((0, 0.25), (1, 0.5)):
        run = {
            "task": "sums",
            "arm": "halving",
            "seed": seed,
            "scores": [0.0, 0.125, score],
            "learning_steps": [4, 8, 16],
            "seconds": [1.0, 2.0, 4.0],
        }
        with (tmp_path / "sums.jsonl").open("a") as file:
            file.write(json.dumps(run) + "\n")
    words = ["--tasks", "sums", "--arms", "halving", "--seeds", "0", "1"]
    language_study.main(["run", *words, "--results", str(tmp_path)])
    assert capsys.readouterr().out == ""
    language_study.main(["table", *words, "--results", str(tmp_path)])
    output = capsys.readouterr().out
    assert "| halving | 0.000, 0.000 | 0.125, 0.125 | 0.250, 0.500 | 16 | 4 s |" in output
