"""Task settings in reports: effects on fitness, labels of texts, and hostile names and texts."""

import json
import math
from statistics import stdev

import pytest
from rich.console import Console

from evogrpo import GRPO, HyperparameterConfig, read_run, report
from evogrpo.cli import main
from evogrpo.config.task_settings import NO_SETTINGS
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.reporting.charts import run_charts
from evogrpo.reporting.page_charts import page_charts
from evogrpo.reporting.records import LANGUAGE, GenerationReport
from evogrpo.reporting.report import html_page
from evogrpo.reporting.setting_effects import findings, setting_effects
from evogrpo.reporting.setting_labels import MAX_LABEL
from evogrpo.reporting.summary import read_summary, summarise
from evogrpo.text import score_text
from evogrpo.training.console import make_console
from evogrpo.training.display import RunDisplay, generation_table
from evogrpo.training.replay import HyperparameterSchedule
from evogrpo.training.reports import generation_curves
from tests.reporting.journals import generation, member, written
from tests.reporting.test_html import Page
from tests.tiny_steps import step_run
from tests.tiny_training import finish

DIGITS = "reward_weights.digits"
STYLE = "task.style"
LONG = "Think step by step, then\nstate $x_{1}$ [bold]in[/bold] <script>alert(1)</script> {braces}."
HOSTILE_NAME = "task.<b>$x_{$[bold]{y}"


def run_event(**space):
    return {"event": "run", "evolvable": space, "samples_per_step": 8, "seed": 0}


def with_settings(slot, index, fitness, settings, parent=None, **others):
    values = {"lr": 1e-4, "task_settings": settings}
    return member(slot, index, parent, fitness, hyperparameters=values, **others)


def digits(slot, index, value, fitness, parent=None):
    return with_settings(slot, index, fitness, {DIGITS: value}, parent)


def effect_of(*generations, name=DIGITS, space=None):
    events = [run_event(**{name: space or {"choices": [0, 1]}}), *generations]
    (effect,) = setting_effects(summarise(events), [name])
    return effect


def founders(fitness_of_0, fitness_of_1):
    """Return a generation of founders."""
    rows = [(0, fitness) for fitness in fitness_of_0] + [(1, fitness) for fitness in fitness_of_1]
    return generation(1, *(digits(slot, slot, *row) for slot, row in enumerate(rows)))


def test_the_difference_of_founders_is_that_of_their_means_with_welchs_error():
    low = [0.1, 0.2, 0.15]
    high = [0.5, 0.7, 0.55, 0.6]
    effect = effect_of(founders(low, high))
    assert [value.value for value in effect.values] == ["0", "1"]
    assert [value.members for value in effect.values] == [3, 4]
    difference = sum(high) / 4 - sum(low) / 3
    error = math.hypot(stdev(low) / math.sqrt(3), stdev(high) / math.sqrt(4))
    score = score_text(difference, error)
    assert effect.finding == f"1 is better than 0 by {score} (4 and 3 members)"
    assert effect.better is effect.values[1]
    # Fitness is relative to the generation: weighted by members, the means add up to 0.
    assert 3 * effect.values[0].fitness + 4 * effect.values[1].fitness == pytest.approx(0)


def test_the_rise_over_generations_does_not_count():
    generations = []
    for number in (1, 2, 3):
        rows = [(0, number + 0.1), (0, number + 0.2), (1, number + 0.5), (1, number + 0.6)]
        members = [digits(slot, slot, *row) for slot, row in enumerate(rows)]
        generations.append(generation(number, *members))
    once = effect_of(generations[0])
    thrice = effect_of(*generations)
    # More generations of the same members are no further evidence.
    for before, after in zip(once.values, thrice.values, strict=True):
        assert after.lineage_means == pytest.approx(before.lineage_means)
    assert [value.members for value in thrice.values] == [2, 2]


def test_clones_that_inherit_a_value_are_one_lineage():
    first = generation(1, *(digits(n, n, n % 2, 0.4 * (n % 2)) for n in range(4)))
    # Members 4 to 6 descend from member 1.
    clones = [digits(slot, index, 1, 0.8, 1) for slot, index in ((0, 4), (2, 5), (3, 6))]
    effect = effect_of(first, generation(2, digits(1, 2, 0, 0.2), *clones, best=4))
    with_one = effect.values[1]
    assert (with_one.members, with_one.lineages) == (5, 2)
    assert effect.better is None
    assert "too few" in effect.finding
    assert "lineages" in effect.finding


def test_what_a_clone_inherits_does_not_count_for_its_new_value():
    first = generation(1, digits(0, 0, 1, 0.8), digits(1, 1, 0, 0.2), digits(2, 2, 0, 0.2))
    # Member 3 has the weights of member 0; the mean rises from 0.4 to 0.6.
    later = [digits(0, 0, 1, 0.8), digits(1, 3, 0, 0.8, 0), digits(2, 2, 0, 0.2)]
    without, with_one = effect_of(first, generation(2, *later)).values
    assert with_one.lineage_means == pytest.approx([(0.4 + 0.2) / 2])
    assert without.lineage_means == pytest.approx([-0.2, (-0.2 - 0.4) / 2, 0.2 - 0.4])


def test_generations_in_which_all_members_agree_are_left_out():
    first = founders([0.1, 0.2, 0.1], [0.5, 0.6, 0.5])
    later = generation(2, digits(3, 3, 1, 0.9), digits(4, 4, 1, 0.1), best=3)
    assert effect_of(first, later) == effect_of(first)
    alone = effect_of(later | {"generation": 1})
    assert (alone.values, alone.better) == ((), None)


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [
        ([0.1, 0.2, 0.1], [0.5, 0.6, 0.5], True),
        ([0.1, 0.2], [0.5, 0.6], False),  # few members
        ([0.1, 0.9, 0.5], [0.2, 0.9, 0.6], False),  # noise
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], False),  # the floor
        ([0.1], [0.5], False),  # no error
    ],
)
def test_thin_evidence_is_no_result(low, high, clear):
    effect = effect_of(founders(low, high))
    assert (effect.better is not None) is clear
    assert ("is better than" in effect.finding) is clear


@pytest.mark.parametrize("fitness", [0.1, 0.7, -30.1])
def test_members_that_are_all_equal_show_no_effect(fitness):
    """The mean of three or six of these numbers is not quite the number."""
    first = founders([fitness] * 3, [fitness] * 3)
    rest = [digits(0, 0, 0, fitness), *(digits(slot, slot, 1, fitness) for slot in (3, 4, 5))]
    effect = effect_of(first, generation(2, *rest))
    assert effect.better is None
    assert effect.finding == "no difference between 0 and 1 (3 and 3 members)"


def test_settings_that_always_changed_together_are_named():
    rows = []
    for slot in range(6):
        settings = {DIGITS: slot % 2, STYLE: "ab"[slot % 2], "task.level": slot // 3}
        rows.append(with_settings(slot, slot, 0.1 * slot, settings))
    summary = summarise([run_event(), generation(1, *rows, best=5)])
    results = findings(summary)
    assert results[DIGITS].endswith("always changed together with style")
    assert results[STYLE].endswith("always changed together with digits")
    assert "together" not in results["task.level"]


def test_failed_members_do_not_count():
    with_failure = generation(
        1,
        *(digits(n, n, n % 2, 0.5 * (n % 2)) for n in range(6)),
        with_settings(6, 6, None, {DIGITS: 1}, failed="NaN"),
    )
    assert [value.members for value in effect_of(with_failure).values] == [3, 3]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"min": -1.0, "max": 2.0, "scale": "linear"}, [("below 0.5", 4), ("at least 0.5", 1)]),
        ({"min": 0.04, "max": 1.0, "scale": "log"}, [("below 0.2", 1), ("at least 0.2", 4)]),
        ({"min": "x", "max": 10**400, "scale": 3}, [("below 0.5", 4), ("at least 0.5", 1)]),
    ],
)
def test_ranges_are_split_on_their_scale(space, expected):
    numbers = [0.2, 0.3, 0.4, 0.9, 0.1]
    rows = [digits(slot, slot, value, value) for slot, value in enumerate(numbers)]
    effect = effect_of(generation(1, *rows), space=space)
    assert [(value.value, value.members) for value in effect.values] == expected


def texts_run(folder=None):
    """Return the events of a run with long texts and a member without the setting."""
    choices = [LONG, "b", "a"]
    values = [LONG, "a", "b", LONG, "another\x1b long text that is no choice of the space"]
    rows = []
    for slot, value in enumerate(values):
        settings = {STYLE: value, HOSTILE_NAME: f"<i>{value}"[:10], DIGITS: 0.25 * slot}
        rows.append(with_settings(slot, slot, 0.1 * slot, settings))
    rows.append(member(5, 5, fitness=0.3))
    child = with_settings(0, 6, 0.9, {STYLE: "a", HOSTILE_NAME: "x"}, parent=3)
    child |= {"changes": {STYLE: [LONG, "a"], DIGITS: [0.75, None]}}
    events = [
        run_event(**{STYLE: {"choices": choices}, HOSTILE_NAME: {"choices": ["x", "<i>y"]}}),
        generation(1, *rows, best=4),
        generation(2, child, *rows[1:], best=6, step=8),
    ]
    if folder is not None:
        written(folder, *events)
    return events


def test_long_texts_get_numbers_in_the_order_of_choices():
    summary = summarise(texts_run())
    labels = summary.labels.by_setting[STYLE]
    assert list(labels.values()) == ["style 1", '"b"', '"a"', "style 4"]
    assert summary.labels.numbered["style 1"] == LONG
    effects = {effect.name: effect for effect in setting_effects(summary, summary.task_settings)}
    assert [value.value for value in effects[STYLE].values] == [
        "style 1",
        '"b"',
        '"a"',
        "style 4",
        "not set",
    ]
    # Members differ in a setting that does not evolve.
    assert set(summary.task_settings) == {STYLE, HOSTILE_NAME, DIGITS}
    charts = {chart.title: chart for chart in run_charts(summary).hyperparameters}
    assert charts[STYLE].names == ("style 1", '"b"', '"a"', "style 4")


def test_hostile_names_and_texts_are_escaped_on_the_page_and_drawn(tmp_path):
    summary = summarise(texts_run(tmp_path))
    content = html_page(summary)
    page = Page(content)
    assert page.tags.count("script") == len(page.scripts) == 3
    assert not {"i", "b"} & set(page.tags)
    # Plotly interprets some tags.
    charts = page.scripts[0]
    assert "\\u003ci\\u003e" not in charts
    for plots in page_charts(summary).values():
        for plot in plots.values():
            assert "<b>$x" not in plot["layout"]["title"]["text"]
    # The whole text is shown once.
    assert [block for block in page.blocks if block == f"\n{LONG}"]
    figure = report(tmp_path).figure
    figure.draw_without_rendering()
    titles = {axes.get_title(loc="left") for axes in figure.axes}
    assert HOSTILE_NAME.replace("$", r"\$") in titles


@pytest.mark.parametrize("command", ["lineage", "best"])
def test_terminals_show_settings_in_short_lines(tmp_path, monkeypatch, capsys, command):
    texts_run(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "style 1" in output
    assert "[bold]in[/bold]" in " ".join(output.split())
    if command == "best":
        for name in findings(summarise(texts_run())):
            assert name in output


def test_tables_of_members_fit_into_80_columns():
    summary = summarise(texts_run())
    names = [f"reward_weights.number_{number}" for number in range(12)]
    values = dict.fromkeys(names, 0.5) | {STYLE: LONG}
    rows = [with_settings(0, 0, 0.5, values), with_settings(1, 1, 0.6, {**values, STYLE: "a"})]
    event = generation(1, *rows)
    table = generation_table(
        GenerationReport.from_json(event), [*names, STYLE], 80, LANGUAGE, labels=summary.labels
    )
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "style 1" in text  # members differ in it
    assert "…" not in text.partition("not shown")[0]


def test_curves_and_frames_allow_members_without_a_setting(tmp_path):
    summary = summarise(texts_run(tmp_path))
    curves = generation_curves(summary.generations[0].members, [STYLE])
    assert curves[f"{DIGITS}/slot_1"] == 0.25
    assert not [tag for tag in curves if tag.startswith((STYLE, f"{DIGITS}/slot_5"))]
    run = read_run(tmp_path)
    assert run.members[STYLE].isna().sum() == 2
    assert all(len(label) <= MAX_LABEL + 2 for label in summary.labels.by_setting[STYLE].values())


class SettingsCartPole(GymnasiumGroups):
    """CartPole that accepts any task setting."""

    def check_settings(self, values):
        """Accept all settings."""

    def select_starts(self, step, count, starts_per_step, settings=NO_SETTINGS):
        return super().select_starts(step, count, starts_per_step)

    def make_batch(self, split, starts, settings=()):
        return super().make_batch(split, starts)


def test_a_run_stores_and_shows_the_settings_of_its_members(tmp_path, capsys):
    env = SettingsCartPole("CartPole-v1", max_episode_steps=10, validation_size=6)
    space = HyperparameterConfig(reward_weights={"digits": [0, 1]}, task={"style": [LONG, "a"]})
    trainer = step_run(tmp_path / "run", env=env, size=3, options={"hp_config": space})
    with RunDisplay(make_console(), trainer) as display:
        trainer.callbacks.append(display)
        finish(trainer)
    output = capsys.readouterr().out
    assert output.count("style 1: Think step by step") == 1
    assert "state $x_{1}$ [bold]in[/bold]" in output
    summary = read_summary(tmp_path / "run")
    shown = " ".join(output.split())
    for name, finding in findings(summary).items():
        assert f" {name} {finding} " in shown
    # The settings of the best member lie beside its weights.
    stored = json.loads((tmp_path / "run" / "best" / "task_settings.json").read_text())
    assert stored == summary.best.hyperparameters.task_settings
    assert GRPO.load(tmp_path / "run" / "best").hyperparameters.task_settings == stored
    assert LONG in html_page(summary).replace("&lt;", "<").replace("&gt;", ">")
    schedule = HyperparameterSchedule.read(tmp_path / "run")
    schedule.write(tmp_path / "schedule.yaml")
    assert HyperparameterSchedule.read(tmp_path / "schedule.yaml").stages == schedule.stages
