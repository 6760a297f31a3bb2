"""User-defined strategies and mutations: conformance, storage, retired members, budgets."""

import dataclasses
import sys
from typing import ClassVar

import pytest
import yaml

from evogrpo import Hyperparameters, Objective, Tournament, evolve, resume
from evogrpo.evolution import Choice, Fixed, MutationOnly, Plan, Stateless
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.reporting.summary import summarise
from evogrpo.storage.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.storage.journal import read_journal
from evogrpo.testing.strategies import SPACE
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.configuration.user_code import check_resumable
from evogrpo.training.display import plan_lines
from evogrpo.training.run_dir import open_run
from evogrpo.training.trainer import StrategyError
from tests.evolution.simulated_training import Simulation, Surface, wrong_founders
from tests.strategies.user_defined import Gaussian, Halving, halved
from tests.tiny_steps import cart_pole, step_population, step_run
from tests.tiny_training import (
    equal_states,
    final_states,
    finish,
    resumed_run,
    state_of,
    tiny_population,
    tiny_run,
)

STEPS = {"steps_per_generation": 1, "samples_per_step": 8, "test_questions": 0}


def test_children_have_the_returned_hyperparameters():
    arm = Simulation(
        Tournament(z=0.0, mutation=halved), Surface(), wrong_founders(6, lr=1e-3), seed=0
    ).run(4)
    changes = []
    for plan in arm.plans:
        for child in plan.children:
            if "nothing" not in child.reason:
                changes.append(child.changes["lr"])
    # The first two children of a parent; later ones find both values taken and get any other.
    ratios = [new / old for old, new in changes]
    assert {0.5, 2.0} <= {round(ratio, 6) for ratio in ratios}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda values, space, rng: values.to_json(), "must return Hyperparameters, got {'lr'"),
        (lambda values, space, rng: None, "must return Hyperparameters, got None"),
        (lambda values, space, rng: Hyperparameters(lr=0.5), r"lr must be in its range .* got 0.5"),
        (
            lambda values, space, rng: dataclasses.replace(values, beta=0.5),
            "may only change lr, got beta=0.5",
        ),
    ],
)
def test_invalid_results_are_refused(wrong, message):
    arm = Simulation(MutationOnly(mutation=wrong), Surface(), wrong_founders(2, lr=1e-3), seed=0)
    with pytest.raises(ValueError, match=message):
        arm.run(2)


class Sealed:
    """Does not expose its settings."""

    def __init__(self, width):
        self.width = width

    def __call__(self, hyperparameters, space, rng):
        return hyperparameters


def test_mutations_with_other_arguments_are_refused_first():
    with pytest.raises(ValueError, match=r"mutation .*\(hyperparameters, space, rng\)"):
        MutationOnly(mutation=lambda values, space: values)


def test_mutations_that_cannot_be_found_again_are_refused_first():
    def local(hyperparameters, space, rng):
        return hyperparameters

    for strategy in (
        Tournament(mutation=local),
        MutationOnly(mutation=lambda values, space, rng: values),
    ):
        with pytest.raises(ValueError, match="mutation of its strategy"):
            check_resumable(strategy)
    with pytest.raises(ValueError, match=r"settings of .*:Sealed.*width"):
        check_resumable(Tournament(mutation=Sealed(0.1)))
    for mutation in (halved, Gaussian(width=0.3)):
        check_resumable(Tournament(mutation=mutation))


@pytest.fixture(scope="module")
def halving(tmp_path_factory):
    """Return a finished run of five generations, its reports, and the states after each."""
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
    _, run, reports, states = halving
    generations = [report for report in reports if isinstance(report, GenerationReport)]
    assert [len(report.members) for report in generations] == [4, 2, 1, 4, 2]
    assert [each.samples_per_step for each in run.run_state.history] == [8, 16, 32, 8, 16]
    for report in reports:
        if isinstance(report, StepReport):
            assert sorted(report.learned) == [
                member.slot for member in generations[report.generation - 1].members
            ]
            samples = run.run_state.history[report.generation - 1].samples_per_step
            assert {learned.samples for learned in report.learned.values()} == {samples}
    newcomers = [birth for birth in run.population.lineage if birth.born == 3]
    assert [birth.index for birth in newcomers] == [4, 5, 6]
    assert [birth.parent is None for birth in newcomers] == [True, False, False]
    # Retired slots do not learn.
    living = {member.slot for member in generations[1].members}
    fresh = state_of(tiny_population(1)[0])
    for slot in range(4):
        assert equal_states(states[0][slot], states[1][slot]) == (slot not in living)
        assert slot in living or equal_states(states[1][slot], fresh)


def test_journal_and_display_show_retirements_and_costs(halving):
    folder, _, reports, _ = halving
    events = read_journal(folder / "journal.jsonl")
    assert events[0]["strategy"] == {
        "name": "tests.strategies.user_defined:Halving",
        "survivors": 1,
    }
    plans = [event["plan"] for event in events if event["event"] == "generation"][:-1]
    assert [plan["samples_per_step"] for plan in plans] == [16, 32, 8, 16]
    assert [plan["parents"].count(None) for plan in plans] == [2, 3, 1, 2]
    assert [len(plan["children"]) for plan in plans] == [0, 0, 3, 0]
    assert [len(each.members) for each in summarise(events).generations] == [4, 2, 1, 4, 2]
    shown = []
    for r in reports:
        if isinstance(r, GenerationReport):
            shown.append([str(line) for line in plan_lines(r)])
    assert [lines[-1] for lines in shown[:2]] == [
        f"selection: {samples} samples per step from the next generation" for samples in (16, 32)
    ]
    assert all(" removed (" in line for line in shown[0][:2])
    assert ["a founder" in line for line in shown[2] if "samples" not in line] == [
        True,
        False,
        False,
    ]


def test_evaluation_and_best_ignore_retired_slots(halving):
    _, run, _, _ = halving
    population = run.population
    population.evaluate(run.env)
    assert [agent.fitness is None for agent in population] == [
        agent.retired for agent in population
    ]
    assert sum(agent.retired for agent in population) == 2
    assert not population.best.retired
    assert [agent.slot for agent in population.healthy] == [
        agent.slot for agent in population if not agent.retired
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fails(Halving):
    """Raises while configured to."""

    works = False

    def plan(self, history, rng):
        if not Fails.works:
            raise KeyError("no such thing")
        return super().plan(history, rng)


def test_a_failing_strategy_loses_no_training(tmp_path, monkeypatch):
    run = step_run(tmp_path / "run", size=4, strategy=Fails(), generations=2)
    with pytest.raises(StrategyError, match=r"Fails cannot plan: .*KeyError: 'no such thing'"):
        finish(run)
    events = [event["event"] for event in read_journal(tmp_path / "run" / "journal.jsonl")]
    assert events[-2:] == ["generation", "stopped"]
    again = resumed_run(tmp_path / "run", strategy=Fails)
    assert (again.run_state.generation, again.run_state.step) == (1, 2)
    monkeypatch.setattr(Fails, "works", True)
    finish(again)
    finish(step_run(tmp_path / "plain", size=4, strategy=Fails(), generations=2))
    assert equal_states(final_states(tmp_path / "run"), final_states(tmp_path / "plain"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invents(Fixed):
    """Gives a child a task setting that its environment does not have."""

    def plan(self, history, rng):
        first = history.last.slots[0].member.hyperparameters
        child = first.with_values({"reward_weights.rewards": 2.0})
        return Plan.from_choices(history, [Choice(parent=0, hyperparameters=child, reason="")] * 2)


def test_settings_that_a_strategy_invents_are_refused_before_sampling():
    run = step_run(None, size=2, strategy=Invents(), generations=2)
    with pytest.raises(StrategyError, match=r"Invents cannot plan.*'reward_weights\.reward'"):
        finish(run)
    assert run.run_state.step == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numpy(Fixed):
    """Replaces the last member by a clone of a random one, and has the given value in its plan."""

    reason: str | None = "drawn"
    steps: float | None = None

    def plan(self, history, rng):
        parents = [*range(history.capacity - 1), rng.choice(history.capacity - 1)]
        choices = [Choice(parent=parent, reason=self.reason) for parent in parents]
        return Plan.from_choices(history, choices, steps_per_generation=self.steps)


def test_integers_of_numpy_may_be_parents(tmp_path):
    finish(step_run(tmp_path / "run", strategy=Numpy(), generations=2))
    finish(resumed_run(tmp_path / "run", strategy=Numpy, generations=3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reason": None}, "reason must be text"),
        ({"steps": 2.0}, "steps_per_generation"),
        ({"steps": 10**7}, "steps"),
    ],
)
def test_plans_that_a_journal_cannot_hold_are_refused(tmp_path, wrong, message):
    run = step_run(tmp_path / "run", strategy=Numpy(**wrong), generations=2)
    with pytest.raises(StrategyError, match=message):
        finish(run)
    assert resumed_run(tmp_path / "run", strategy=Numpy).run_state.generation == 1


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


class Later(Opaque):
    """Its state is no plain data after its first plan."""

    seen: ClassVar[object] = 0

    def plan(self, history, rng):
        Later.seen = {1, 2}
        return super().plan(history, rng)

    def state(self):
        return {"seen": Later.seen}

    def load_state(self, values):
        Later.seen = values["seen"]


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    with pytest.raises(StrategyError, match="seen is a set"):
        finish(step_run(tmp_path / "run", strategy=Later(), generations=2))
    assert resumed_run(tmp_path / "run", strategy=Later).run_state.generation == 1


class Relative(Tournament):
    """A tournament with another class name."""


class WithoutRandomNumbers(Fixed):
    """Its plan lacks an argument."""

    def plan(self, history):
        return super().plan(history, None)


LOCAL = type("Local", (Fixed,), {})


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (object(), "lacks plan, mutates, to_json, state, load_state"),
        ("tournement", "did you mean 'tournament'"),
        ({"z": 2}, "strategy must have a name"),
        (LOCAL(), "strategy .*Local"),
        (WithoutRandomNumbers(), r"plan must take \(history, rng\)"),
        (Forgetful(), "to_json must return arguments"),
        (Opaque(), "is a set, which JSON cannot hold"),
    ],
)
def test_strategies_that_cannot_be_used_or_restored_are_refused_before_training(
    tmp_path, strategy, message
):
    with pytest.raises(ValueError, match=message):
        evolve(
            step_population(2),
            cart_pole(),
            strategy=strategy,
            run_dir=tmp_path / "run",
            generations=1,
            **STEPS,
        )
    assert not (tmp_path / "run").exists()


def test_a_strategy_that_cannot_be_restored_may_run_without_a_folder():
    assert (
        len(list(evolve(step_population(2), cart_pole(), strategy=LOCAL(), generations=1, **STEPS)))
        == 1
    )


def begun(folder, strategy):
    finish(step_run(folder, size=2, strategy=strategy, generations=1, steps_per_generation=1))
    return folder


@pytest.mark.parametrize(
    ("strategy", "rename", "message"),
    [
        (
            Halving(survivors=2),
            lambda record: record.update(name="trap:Halving"),
            r"custom class trap:Halving, which is not imported.*strategy=ItsClass",
        ),
        (
            Tournament(mutation=halved),
            lambda record: record["mutation"].update(name="trap:halved"),
            "mutation trap:halved was saved by its name only",
        ),
    ],
    ids=["strategy", "mutation"],
)
def test_a_name_in_a_checkpoint_is_never_imported(tmp_path, monkeypatch, strategy, rename, message):
    folder = begun(tmp_path / "run", strategy)
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = open_run(folder).folder
    tensors, record = read_checkpoint(checkpoint)
    rename(record["strategy"])
    write_checkpoint(checkpoint, tensors, record, replace=True)
    with pytest.raises(ValueError, match=message):
        resume(folder, cart_pole())
    assert resume(folder, cart_pole(), strategy=strategy).trainer.strategy == strategy
    assert "trap" not in sys.modules


MUTATED = Tournament(mutation=Gaussian(width=0.3))


@pytest.mark.parametrize(
    ("begin", "wrong", "right"),
    [
        (Halving(survivors=2), [Halving(), None], [Halving]),
        (Tournament(z=0.5), [Fixed(), Fixed, Relative, Tournament(z=1.0)], [None, Tournament]),
        (Relative(z=0.5), [Tournament, None], [Relative]),
        (
            MUTATED,
            [Tournament(mutation=Gaussian()), Tournament(), Tournament(mutation=halved), None],
            [MUTATED],
        ),
    ],
)
def test_a_resumed_run_keeps_its_strategy(tmp_path, begin, wrong, right):
    folder = begun(tmp_path / "run", begin)
    for given in wrong:
        with pytest.raises(
            ValueError, match=r"strategy must be the one|unknown setting|not imported"
        ):
            resume(folder, cart_pole(), strategy=given, generations=2)
    for given in (begin, *right):
        assert resume(folder, cart_pole(), strategy=given, generations=2).trainer.strategy == begin


CONFIG = {
    "task": {"env": "CartPole-v1", "max_episode_steps": 10, "validation_size": 2, "test_size": 2},
    "population": {"size": 3},
    "schedule": {"generations": 3, "steps_per_generation": 2, "samples_per_step": 8},
    "logging": {"trackers": []},
}
OWN = """
import dataclasses
from evogrpo.evolution import Choice, Plan, Stateless

@dataclasses.dataclass(frozen=True, kw_only=True)
class Clones(Stateless):
    share: float = 0.5
    mutates = False

    def plan(self, history, rng):
        parents = [0 if rng.random() < self.share else slot for slot in range(history.capacity)]
        choices = [Choice(parent=parent, reason="drawn") for parent in parents]
        return Plan.from_choices(history, choices)

    def to_json(self):
        return {"share": self.share}

class Times:
    def __init__(self, factor=2.0):
        self.factor = factor
    def __call__(self, hyperparameters, space, rng):
        lr = space["lr"].closest(hyperparameters.lr * self.factor)
        return dataclasses.replace(hyperparameters, lr=lr)
    def to_json(self):
        return {"factor": self.factor}

def doubled(hyperparameters, space, rng):
    return Times()(hyperparameters, space, rng)
"""


@pytest.fixture
def configured(tmp_path):
    """Return a function that reads a configuration with a strategy, beside a file of them."""
    (tmp_path / "mine.py").write_text(OWN)

    def read(strategy, *overrides):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "strategy": strategy}))
        return load_config(tmp_path / "c.yaml", overrides)

    return read


def test_a_configuration_names_a_strategy_in_a_file(configured, tmp_path, monkeypatch):
    given = {"name": "mine.py:Clones", "share": 0.7}
    config = configured(given)
    assert config.to_json()["strategy"] == {"name": f"{tmp_path}/mine.py:Clones", "share": 0.7}
    assert parse_config(config.to_json()).strategy == config.strategy
    for override, message in (
        (
            "strategy.shrae=1",
            "strategy: unknown setting of .*mine.py:Clones 'shrae': did you mean 'share'",
        ),
        ("strategy.name=tornament", "did you mean 'tournament'"),
        (
            f"strategy.name={tmp_path}/mine.py:Clone",
            r"has no class 'Clone'\. Did you mean 'Clones'\? It has",
        ),
        ("strategy.name=nowhere.py:Clones", "there is no file .*nowhere.py"),
    ):
        with pytest.raises(ValueError, match=message):
            configured(given, override)
    (tmp_path / "module_of_clones.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    name = "module_of_clones:Clones"
    assert configured(given, f"strategy.name={name}").to_json()["strategy"]["name"] == name


@pytest.mark.parametrize(
    ("strategy", "given", "stored"),
    [
        ("tournament", "mine.py:doubled", {"name": "mine.py:doubled"}),
        (
            "mutation_only",
            {"name": "mine.py:Times", "factor": 3.0},
            {"name": "mine.py:Times", "factor": 3.0},
        ),
    ],
)
def test_a_configuration_names_a_mutation_in_a_file(configured, tmp_path, strategy, given, stored):
    config = configured({"name": strategy, "mutation": given})
    assert config.to_json()["strategy"]["mutation"] == stored | {
        "name": f"{tmp_path}/{stored['name']}"
    }
    again = parse_config(config.to_json())
    assert again.to_json() == config.to_json()
    start = Hyperparameters(lr=1e-4)
    assert again.strategy.mutation(start, SPACE, None).lr == pytest.approx(
        stored.get("factor", 2.0) * 1e-4
    )
    check_resumable(config.strategy)


class Wide(Stateless):
    """Gives the members a clip coefficient that `Objective.delta` excludes."""

    mutates = True

    def plan(self, history, rng):
        wide = dataclasses.replace(history.last.member(0).hyperparameters, clip_high=0.5)
        choices = [
            Choice(parent=0, reason="wide", hyperparameters=wide) for _ in history.last.slots
        ]
        return Plan.from_choices(history, choices)


def test_children_that_the_objective_refuses_change_nothing(tmp_path):
    options = {
        "hp_config": None,
        "evolve_network": None,
        "objective": Objective(loss_type="dapo", delta=1.4),
    }
    run = step_run(tmp_path / "run", size=2, options=options, strategy=Wide(), generations=2)
    with pytest.raises(StrategyError, match=r"delta .* got 1\.4"):
        finish(run)
    assert [member.index for member in run.population.lineage] == [0, 1]
    assert all(
        event.get("plan") is None for event in read_journal(tmp_path / "run" / "journal.jsonl")
    )
