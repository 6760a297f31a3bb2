"""Display of a run: terminal and log."""

import dataclasses
import io
import re
import sys
from itertools import product

import pytest
from rich.console import Console

from evogrpo import HyperparameterConfig, evolve, resume
from evogrpo.evolution import SuccessiveHalving
from evogrpo.reporting.records import LANGUAGE, GenerationReport, MemberStep, StepReport
from evogrpo.reporting.setting_effects import FINDINGS_TITLE
from evogrpo.training.display import RunDisplay, generation_table, rewards_text
from tests.cli.project import CONTROL, Terminal
from tests.tiny_models import tiny_model
from tests.tiny_steps import QUICK as SHORT
from tests.tiny_steps import STEP_SPACE, cart_pole, start_run, step_population
from tests.tiny_training import QUICK, SPACE, finish, tiny_env, tiny_population, tiny_run


def on_a_terminal(monkeypatch):
    """Redirect stdout to a terminal of 80 columns and return it."""
    stream = Terminal()  # in the test: pytest changes stdout after fixtures
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return stream


def quick_run(**options):
    return evolve(
        tiny_population(2, hp_config=SPACE, update_epochs=2),
        tiny_env(),
        **{**QUICK, "generations": 2} | options,
    )


def drawn(shown, width=80):
    """Return the text on the terminal."""
    console = Console(file=io.StringIO(), force_terminal=False, width=width)
    console.print(shown)
    return console.file.getvalue()


def test_nothing_is_shown_without_a_terminal_or_if_not_wanted(monkeypatch, capfd):
    assert len(list(quick_run(generations=1))) == 1
    assert capfd.readouterr() == ("", "")
    terminal = on_a_terminal(monkeypatch)
    list(quick_run(progress=False, generations=1))
    assert terminal.getvalue() == ""
    with pytest.raises(ValueError, match="progress must be True, False or None"):
        quick_run(progress="yes")


def floor(completion, answer, question):
    return 0.0


def test_a_run_at_the_floor_says_why_no_member_was_stopped(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    options = {"strategy": "successive_halving", "test_questions": 0, "progress": True}
    finish(evolve(tiny_population(2), tiny_env(reward_fn=floor), **QUICK, **options).trainer)
    shown = " ".join(re.sub(CONTROL, "", terminal.getvalue()).split())
    assert shown.count("all have fitness 0") == 2
    assert "the run ends: 3 generations" in shown


def test_a_run_that_ends_before_its_first_selection_warns_after_the_first_step():
    limits = QUICK | {"max_tokens": 100}
    run = tiny_run(None, strategy=SuccessiveHalving(), **limits)
    with pytest.warns(UserWarning, match="max_tokens") as caught:
        finish(run)
    assert len(caught) == 1
    assert run.result.generations == 1


def test_a_terminal_shows_the_run(monkeypatch, tmp_path):
    terminal = on_a_terminal(monkeypatch)
    for generation in quick_run(run_dir=tmp_path / "run"):
        assert sys.stdout is terminal  # stdout is restored between reports
        assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h")
        print("mine", generation.generation)
    output = CONTROL.sub("", terminal.getvalue())
    for text in ("untrained base: fitness", "mine 1"):
        assert text in output, text
    assert (
        output.index("Generation 1 of 2")
        < output.index("mine 1")
        < output.index("Generation 2 of 2")
    )
    assert output.index("mine 2") < output.index("Test: ") < output.index("Finished: ")
    for _ in resume(tmp_path / "run", tiny_env(), actor_network=tiny_model(), generations=3):
        pass
    assert "Generation 3 of 3" in CONTROL.sub("", terminal.getvalue())


def test_printed_text_stays_above_the_display(monkeypatch):
    terminal = on_a_terminal(monkeypatch)

    def chatty(completion, answer, question):
        print("thinking of it")
        return 0.0

    for _ in evolve(tiny_population(2), tiny_env(reward_fn=chatty), **QUICK | {"generations": 1}):
        assert sys.stdout is terminal
    lines = terminal.getvalue().replace("\r", "\n").split("\n")
    assert all(
        CONTROL.sub("", line).strip() == "thinking of it" for line in lines if "thinking" in line
    )


def test_leaving_the_loop_cleans_the_terminal(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    run = quick_run()
    for _ in run:
        break
    before = terminal.getvalue()
    assert before.count("\x1b[?25l") == before.count("\x1b[?25h") > 0
    run.stop("enough")
    assert list(run) == []
    assert "enough after learning step 2; no run directory, so nothing was saved" in CONTROL.sub(
        "", terminal.getvalue()
    )


def test_an_error_of_user_code_cleans_the_terminal(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    calls = iter(range(100))

    def broken(completion, answer, question):
        if next(calls) > 4:  # the first call is the trial, before anything is shown
            raise KeyError("mine")
        return 0.0

    run = evolve(tiny_population(2), tiny_env(reward_fn=broken), **QUICK)
    with pytest.raises(Exception, match="mine"):
        next(run)
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") > 0
    assert sys.stdout is terminal
    assert list(run) == []


def test_a_log_gets_lines_if_requested(capfd):
    list(quick_run(progress=True, generations=1))
    output, errors = capfd.readouterr()
    assert not CONTROL.search(output)
    assert errors == ""
    assert "step 2/2  mean reward" in output
    assert "Finished: " in output


def test_the_bar_advances_and_names_every_part_of_a_run():
    console = Console(file=io.StringIO(), force_terminal=False)
    updates = []

    def looking(completion, answer, question):
        assert ("untrained base: fitness" in console.file.getvalue()) is (
            run.run_state.baseline is not None
        )
        updates.append((display._phase().plain, drawn(display)))
        return float(len(set(completion)))

    run = tiny_run(None, env=tiny_env(reward_fn=looking), generations=2)
    display = RunDisplay(console, run)
    run.callbacks.append(display)
    with display:
        fractions = [0.0, *(display.fraction() for _ in run.reports())]
    within = [phase for phase, _ in updates]
    parts = ["step 1/2", "step 2/2", "validating"]
    assert list(dict.fromkeys(within)) == [
        "measuring the untrained base",
        *(f"generation {number}/2 · {part}" for number, part in product((1, 2), parts)),
        "testing on 36 questions",
    ]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert all("rewarding" in shown for _, shown in updates)
    for _, shown in updates:
        assert max(len(line) for line in shown.split("\n")) <= 80


def test_a_stopping_run_without_a_directory_does_not_claim_to_save():
    run = tiny_run(None)
    run.stop()
    assert "Stopping. Press Ctrl-C again to abort." in drawn(RunDisplay(Console(), run))


@pytest.mark.parametrize(("size", "shown"), [(1, 0), (2, 1)])
def test_effects_of_settings_are_shown_if_members_differ_in_them(tmp_path, size, shown):
    env = cart_pole(settings={"high": 0.05})
    settings = {"task.high": 0.1}
    space = HyperparameterConfig(task={"high": {"min": 0.01, "max": 0.2}})
    space = space if size > 1 else None
    population = step_population(size, env, task_settings=settings, hp_config=space)
    run = start_run(population, env, tmp_path, **SHORT | {"generations": 1})
    finish(run)
    console = Console(file=io.StringIO(), width=100)
    RunDisplay(console, run).on_run_end(run.result)
    assert console.file.getvalue().count(FINDINGS_TITLE) == shown


def test_the_star_marks_the_best_member():
    falling = iter(range(10**6, 0, -1))
    console = Console(file=io.StringIO(), width=140)
    env = tiny_env(reward_fn=lambda completion, answer, question: float(next(falling)))
    run = tiny_run(None, env=env, generations=2)
    display = RunDisplay(console, run)
    run.callbacks.append(display)
    with display:
        list(run)
    tables = console.file.getvalue().split("Generation ")[1:]
    assert "★ best so far" in tables[0]
    for table in tables[1:]:
        assert re.search(r"  best\b", table)
        assert f"★ best so far: #{run.run_state.best.index} of generation 1" in table


@pytest.mark.parametrize(
    ("fitness", "head"), [("validation", "fitness ± SE"), ("rollouts", "training ± SE")]
)
def test_new_members_are_those_born_in_this_run(fitness, head):
    """The second run of a population begins with members that were born in the first one."""
    population = step_population(3, hp_config=STEP_SPACE)
    env = cart_pole()
    finish(start_run(population, env, None, **SHORT))
    console = Console(file=io.StringIO(), width=160)
    run = start_run(population, env, None, fitness=fitness, **SHORT | {"samples_per_step": 16})
    run.callbacks.append(RunDisplay(console, run))
    generations = [report for report in finish(run) if isinstance(report, GenerationReport)]
    tables = console.file.getvalue().split("Generation ")[1:]
    assert all(head in table for table in tables)
    noted = []
    for table in tables:
        noted.append(sum("new" in line.split() for line in table.split("\n")))
    assert any(member.born == 2 for member in generations[0].members)
    assert noted == [0, *(len(report.plan.children) for report in generations[:-1])]


@pytest.mark.parametrize(
    ("rewards", "shown"),
    [
        ((0.5, 0.004), "#0 0.50 #1 0.00"),
        ((2e-5, 0.0), "#0 2e-05 #1 0"),
        ((1e30, -1.5), "#0 1e+30 #1 -1.5"),
    ],
)
def test_rewards_of_every_size_are_short(stored_language_run, rewards, shown):
    report = next(each for each in stored_language_run.reports if isinstance(each, StepReport))
    learned = {slot: MemberStep(index=slot, metrics={"reward": reward}, samples=1, failed=None)
               for slot, reward in enumerate(rewards)}  # fmt: skip
    assert (
        " ".join(rewards_text(dataclasses.replace(report, learned=learned)).plain.split()) == shown
    )


@pytest.mark.parametrize("width", [140, 80])
def test_a_member_with_constant_rewards_is_marked(stored_language_run, width):
    report = next(
        each for each in stored_language_run.reports if isinstance(each, GenerationReport)
    )

    def with_zero_std(share):
        members = [
            dataclasses.replace(each, metrics={"frac_reward_zero_std": share})
            for each in report.members
        ]
        return drawn(
            generation_table(dataclasses.replace(report, members=members), [], width, LANGUAGE),
            width,
        )

    assert with_zero_std(1.0).count("no signal") == len(report.members)
    assert "no signal" not in with_zero_std(0.9)


def test_no_value_of_a_member_is_cut_in_80_columns(stored_language_run):
    report = next(
        each for each in stored_language_run.reports if isinstance(each, GenerationReport)
    )
    names = ["clip_coef", "group_size", "update_epochs", "max_grad_norm"]
    table = drawn(generation_table(report, names, 80, LANGUAGE))
    assert "…" not in table
    for member in report.members:
        assert str(member.estimate) in table
