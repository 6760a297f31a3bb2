"""User-defined strategies: storage of their state, resumption, retired members and changed budgets."""

import dataclasses
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from evogrpo import Tournament, evolve, resume
from evogrpo import report as run_report
from evogrpo.evolution import Fixed
from evogrpo.reporting.lineage import ancestors, best_member
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.reporting.summary import summarise
from evogrpo.storage.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.display import plan_lines
from evogrpo.training.launch import read_resumable, start
from evogrpo.training.launch import resume as resume_configured
from evogrpo.training.loop.trainer import StrategyError
from evogrpo.training.run_dir import open_run
from tests.cli.project import prepare, write_project
from tests.forking import start_process
from tests.strategies.gaussian_process import GaussianProcess
from tests.strategies.halving import Halving
from tests.tiny_models import tiny_model
from tests.tiny_training import (
    equal_states,
    events_of,
    final_states,
    finish,
    resumed_run,
    start_or_resume,
    state_of,
    tiny_env,
    tiny_population,
    tiny_run,
)

STEPS = {"steps_per_generation": 2, "samples_per_step": 8}
LONG = {"generations": 4}


def same_run(folder, other):
    assert events_of(folder) == events_of(other)
    assert open_run(folder).record.strategy_state == open_run(other).record.strategy_state
    return equal_states(final_states(folder), final_states(other))


def stop_after(run, steps):
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    """Return the folder of a finished run with the Gaussian process."""
    folder = tmp_path_factory.mktemp("bandit") / "run"
    finish(tiny_run(folder, strategy=GaussianProcess(), **LONG))
    return folder


def test_a_run_killed_repeatedly_ends_as_if_never_killed(bandit, tmp_path):
    """Real kills, -9, each at another moment after another generation."""
    folder, journal = tmp_path / "run", tmp_path / "run" / "journal.jsonl"

    def generations():
        events = read_journal(journal) if journal.exists() else []
        return sum(event["event"] == "generation" for event in events)

    for kill, delay in enumerate((0.0, 0.05)):
        process = start_process(start_or_resume, str(folder), GaussianProcess, **LONG)
        seen = generations()
        while process.is_alive() and generations() == seen:
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"it ended before kill {kill}"
    finish(resumed_run(folder, strategy=GaussianProcess))
    assert same_run(folder, bandit)
    state = open_run(folder).record.strategy_state
    assert len(state["observed"]) + state["failures"] == 3 * 3  # the last generation is not used for a plan


@pytest.mark.parametrize("steps", [2, 5])
def test_a_stopped_run_resumes_equal(bandit, tmp_path, steps):
    stop_after(tiny_run(tmp_path / "run", strategy=GaussianProcess(), **LONG), steps)
    finish(resumed_run(tmp_path / "run", strategy=GaussianProcess()))
    assert same_run(tmp_path / "run", bandit)


def test_the_history_equals_the_reports(tmp_path):
    run = tiny_run(tmp_path / "run", generations=4)
    reports = [report for report in run.reports() if isinstance(report, GenerationReport)]
    stop_after(tiny_run(tmp_path / "parts", generations=4), 5)
    parts = resumed_run(tmp_path / "parts")
    reports_of_parts = [report for report in parts.reports() if isinstance(report, GenerationReport)]
    assert len(reports_of_parts) == 2
    for each in (run, parts):
        assert [generation.number for generation in each.run_state.history] == [1, 2, 3, 4]
    for generation, twin, report in zip(run.run_state.history, parts.run_state.history, reports, strict=True):
        assert (generation.samples_per_step, generation.steps_per_generation) == (8, 2)
        assert [record.fitness for record in generation.slots] == [record.fitness for record in twin.slots]
        for record, member in zip(generation.slots, report.members, strict=True):
            expected = (record.member.index, record.member.parent, record.member.born, record.member.hyperparameters)
            assert expected == (member.index, member.parent, member.born, member.hyperparameters)
            assert record.fitness.mean == member.fitness
            assert (record.tokens, record.seconds) == (member.tokens, member.seconds)
            assert len(record.fitness.scores) == 8


@pytest.fixture(scope="module")
def halving(tmp_path_factory):
    """Return a finished run of five generations with four slots, its reports, and its states after each generation."""
    folder = tmp_path_factory.mktemp("halving") / "run"
    run = tiny_run(folder, size=4, strategy=Halving(), generations=5)
    states = []
    reports = []
    for report in run.reports():
        reports.append(report)
        if isinstance(report, GenerationReport):
            states.append([state_of(agent) for agent in run.population])
    return folder, run, reports, states


def test_half_retires_at_doubled_cost_until_all_slots_fill(halving):
    _, run, reports, _ = halving
    generations = [report for report in reports if isinstance(report, GenerationReport)]
    assert [len(report.members) for report in generations] == [4, 2, 1, 4, 2]
    assert [each.samples_per_step for each in run.run_state.history] == [8, 16, 32, 8, 16]
    assert [len(each.empty) for each in run.run_state.history] == [0, 2, 3, 0, 2]
    assert len({agent.index for agent in run.population}) == 4
    steps = [report for report in reports if isinstance(report, StepReport)]
    for report in steps:
        members = generations[report.generation - 1].members
        assert sorted(report.learned) == [member.slot for member in members]
        samples = run.run_state.history[report.generation - 1].samples_per_step
        assert {learned.samples for learned in report.learned.values()} == {samples}
    births = {birth.index: birth for birth in run.population.lineage}
    newcomers = [birth for birth in births.values() if birth.born == 3]
    assert [birth.index for birth in newcomers] == [4, 5, 6]
    assert [birth.parent is None for birth in newcomers] == [True, False, False]
    assert sum(agent.retired for agent in run.population) == 2


def test_retired_slots_do_not_learn(halving):
    _, _, reports, states = halving
    second = [report for report in reports if isinstance(report, GenerationReport)][1]
    living = {member.slot for member in second.members}
    assert len(living) == 2
    fresh = state_of(tiny_population(1)[0])
    for slot in set(range(4)) - living:
        assert equal_states(states[0][slot], fresh)
        assert equal_states(states[1][slot], fresh)
    assert all(not equal_states(states[0][slot], states[1][slot]) for slot in living)


@pytest.mark.parametrize("steps", [2, 4, 7])
def test_retired_slots_and_budgets_are_resumed(halving, tmp_path, steps):
    stop_after(tiny_run(tmp_path / "run", size=4, strategy=Halving(), generations=5), steps)
    finish(resumed_run(tmp_path / "run", strategy=Halving))
    assert same_run(tmp_path / "run", halving[0])


def winners(summary):
    return ancestors(summary, best_member(summary.generations))


def test_the_journal_shows_retirements_and_costs(halving, tmp_path):
    folder, _, reports, _ = halving
    events = read_journal(folder / "journal.jsonl")
    assert events[0]["strategy"] == {"name": "tests.strategies.halving:Halving", "survivors": 1}
    generations = [event for event in events if event["event"] == "generation"]
    plans = [event["plan"] for event in generations[:-1]]
    assert [plan["samples_per_step"] for plan in plans] == [16, 32, 8, 16]
    assert [plan["parents"].count(None) for plan in plans] == [2, 3, 1, 2]
    assert [len(plan["children"]) for plan in plans] == [0, 0, 3, 0]
    summary = summarise(events)
    assert [len(each.members) for each in summary.generations] == [4, 2, 1, 4, 2]
    page = run_report(shutil.copytree(folder, tmp_path / "copy")).write().read_text(encoding="utf-8")
    newcomers = [sum(m.reason == "a new round" for m in each.members) for each in summary.generations]
    assert newcomers[:4] == [0, 0, 0, 3]
    assert newcomers[4] >= 1
    told = sum(newcomers) + sum(a.reason == "a new round" for a in winners(summary))
    assert page.count("<td>a new round</td>") >= told  # other tables may show it as well
    shown = [[str(line) for line in plan_lines(r)] for r in reports if isinstance(r, GenerationReport)]
    budgets = [[line for line in lines if "samples per step" in line] for lines in shown]
    assert budgets[:2] == [
        ["selection: 16 samples per step from here on"],
        ["selection: 32 samples per step from here on"],
    ]
    members = [[line for line in lines if "samples per step" not in line] for lines in shown]
    assert [len(lines) for lines in members] == [2, 1, 3, 2, 0]
    assert all("is retired, " in line for line in members[0])
    assert ["a founder" in line for line in members[2]] == [True, False, False]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fails(Halving):
    """Raises or returns no plan while configured to."""

    how = "raises"

    def plan(self, history, rng):
        if Fails.how == "raises":
            raise KeyError("no such thing")
        return super().plan(history, rng) if Fails.how == "works" else None


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "KeyError: 'no such thing'"), ("nothing", "Plan, got NoneType")]
)
def test_a_failing_strategy_loses_no_training(tmp_path, monkeypatch, how, message):
    monkeypatch.setattr(Fails, "how", how)
    run = tiny_run(tmp_path / "run", size=4, strategy=Fails(), generations=2)
    with pytest.raises(StrategyError, match=f"Fails cannot plan: .*{message}"):
        finish(run)
    assert [event["event"] for event in read_journal(tmp_path / "run" / "journal.jsonl")][-2:] == [
        "generation",
        "stopped",
    ]
    again = resumed_run(tmp_path / "run", strategy=Fails)
    assert (again.run_state.generation, again.run_state.step) == (1, 2)
    monkeypatch.setattr(Fails, "how", "works")
    finish(again)
    plain = tmp_path / "plain"
    finish(tiny_run(plain, size=4, strategy=Fails(), generations=2))
    for name, value in open_run(plain).tensors.items():
        assert torch.equal(value, open_run(tmp_path / "run").tensors[name])


def test_invalid_strategies_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"lacks plan, mutates, to_json, state, load_state"):
        tiny_run(tmp_path / "run", strategy=object())
    with pytest.raises(ValueError, match="did you mean 'tournament'"):
        evolve(tiny_population(4), tiny_env(), run_dir=tmp_path / "run", generations=1, strategy="tournement")
    with pytest.raises(ValueError, match="lacks an instance"):
        tiny_run(tmp_path / "run", strategy=Halving)
    assert not (tmp_path / "run").exists()


def test_evaluation_and_best_ignore_retired_slots(halving):
    _, run, _, _ = halving
    population = run.population
    population.evaluate(run.env)
    assert [agent.fitness is None for agent in population] == [agent.retired for agent in population]
    assert not population.best.retired
    assert [agent.slot for agent in population.healthy] == [agent.slot for agent in population if not agent.retired]


def test_a_local_class_is_refused_first(tmp_path):
    class Local(Fixed):
        pass

    with pytest.raises(ValueError, match=r"strategy .*Local"):
        evolve(tiny_population(2), tiny_env(), strategy=Local(), run_dir=tmp_path / "run", generations=1, **STEPS)
    assert not (tmp_path / "run").exists()
    (report,) = evolve(tiny_population(2), tiny_env(), strategy=Local(), generations=1, **STEPS)
    assert report.generation == 1


class Forgetful(Fixed):
    """Its settings do not restore its arguments."""

    def __init__(self, width=1.0):
        object.__setattr__(self, "width", width)

    def to_json(self):
        return {"width": 2 * self.width}


class Opaque(Fixed):
    """Its state is no plain data."""

    def state(self):
        return {"seen": {1, 2}}


class Named(Fixed):
    """One of its settings has a reserved name."""

    def __init__(self, name="mine"):
        object.__setattr__(self, "name", name)

    def to_json(self):
        return {"name": self.name}


class Relative(Tournament):
    """A tournament with another class name."""


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Forgetful(), "to_json must return arguments"),
        (Opaque(), "is a set, which JSON cannot hold"),
        (Named(), "setting called name"),
    ],
)
def test_strategies_that_cannot_be_restored_are_refused(tmp_path, strategy, message):
    with pytest.raises(ValueError, match=message):
        evolve(tiny_population(2), tiny_env(), strategy=strategy, run_dir=tmp_path / "run", generations=1, **STEPS)
    assert not (tmp_path / "run").exists()


def test_a_strategy_in_a_script_must_move_to_a_module(tmp_path):
    script = """
from evogrpo.evolution import Fixed
from evogrpo.training.configuration.user_code import check_resumable
class Mine(Fixed):
    pass
check_resumable(Mine())
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "got __main__:Mine." in done.stderr


def begun(folder, strategy):
    list(evolve(tiny_population(2), tiny_env(), strategy=strategy, run_dir=folder, generations=1, **STEPS))
    return folder


def test_a_name_in_a_checkpoint_is_never_imported(tmp_path, monkeypatch):
    folder = begun(tmp_path / "run", Halving(survivors=2))
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = open_run(folder).folder
    tensors, record = read_checkpoint(checkpoint)
    record["strategy"]["name"] = "trap:Halving"
    write_checkpoint(checkpoint, tensors, record, replace=True)
    with pytest.raises(ValueError, match=r"custom class trap:Halving, which is not imported.*strategy=ItsClass"):
        resume(folder, tiny_env(), actor_network=tiny_model())
    run = resume(folder, tiny_env(), actor_network=tiny_model(), strategy=Halving)
    assert run.trainer.strategy == Halving(survivors=2)
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("begin", "given"),
    [
        (Halving(survivors=2), Halving()),
        (Halving(), Fixed),
        (Tournament(), Fixed()),
        (Tournament(), Fixed),
        (Tournament(), Relative),
        (Tournament(z=0.5), Tournament(z=1.0)),
    ],
)
def test_a_resumed_run_keeps_its_strategy(tmp_path, begin, given):
    folder = begun(tmp_path / "run", begin)
    with pytest.raises(ValueError, match=r"strategy must be the one|unknown setting of"):
        resume(folder, tiny_env(), actor_network=tiny_model(), strategy=given, generations=2)
    for right in (begin, type(begin)):
        run = resume(folder, tiny_env(), actor_network=tiny_model(), strategy=right, generations=2)
        assert run.trainer.strategy == begin


def test_strategies_of_the_package_are_restored_by_name(tmp_path):
    run = resume(begun(tmp_path / "one", Tournament(z=0.5)), tiny_env(), actor_network=tiny_model(), generations=2)
    assert run.trainer.strategy == Tournament(z=0.5)
    run = resume(begun(tmp_path / "other", Relative(z=0.5)), tiny_env(), actor_network=tiny_model(), strategy=Relative)
    assert run.trainer.strategy == Relative(z=0.5)


OWN = """
import dataclasses
from evogrpo.evolution import Choice, Plan, Stateless

@dataclasses.dataclass(frozen=True, kw_only=True)
class Clones(Stateless):
    share: float = 0.5
    mutates = False

    def plan(self, history, rng):
        parents = [0 if rng.random() < self.share else slot for slot in range(history.capacity)]
        return Plan.from_choices(history, [Choice(parent=parent, reason="drawn") for parent in parents])

    def to_json(self):
        return {"share": self.share}
"""


@pytest.fixture
def project(tmp_path):
    path = write_project(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    values = yaml.safe_load(path.read_text())
    values["strategy"] = {"name": "mine.py:Clones", "share": 0.7}
    values["population"] = {"size": 3}
    values["logging"] = {"tensorboard": False}
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_configuration_names_a_class_in_a_file(project, tmp_path, monkeypatch):
    config = load_config(project)
    stored = config.to_json()
    assert stored["strategy"] == {"name": f"{tmp_path}/mine.py:Clones", "share": 0.7}
    assert parse_config(stored).strategy == config.strategy
    for override, message in (
        ("strategy.shrae=1", "strategy: unknown setting of .*mine.py:Clones 'shrae': did you mean 'share'"),
        ("strategy.name=tornament", "did you mean 'tournament'"),
        (f"strategy.name={tmp_path}/mine.py:Clone", r"has no class 'Clone': did you mean 'Clones'\? It has"),
        ("strategy.name=nowhere.py:Clones", "there is no file .*nowhere.py"),
    ):
        with pytest.raises(ValueError, match=message):
            load_config(project, [override])
    monkeypatch.chdir(tmp_path)
    module = load_config(project, ["strategy.name=mine:Clones"])
    assert module.to_json()["strategy"]["name"] == "mine:Clones"


def test_a_configured_run_resumes_with_its_class(project, tmp_path):
    prepared = prepare(load_config(project))
    finish(start(prepared, tmp_path / "whole"))
    run = start(prepare(load_config(project)), tmp_path / "run")
    stop_after(run, 3)
    (tmp_path / "mine.py").write_text(f"{OWN}# touched\n")  # equal code, another module for Python
    resumable = read_resumable(tmp_path / "run")
    finish(resume_configured(prepare(resumable.config), resumable, tmp_path / "run"))
    assert same_run(tmp_path / "run", tmp_path / "whole")
    plans = [event["plan"] for event in events_of(tmp_path / "run") if event.get("plan")]
    assert any(plan["children"] for plan in plans)
