"""User-defined mutations."""

import dataclasses
import sys

import pytest
import yaml

from evogrpo import Hyperparameters, Tournament, resume
from evogrpo.evolution import MutationOnly, TruncationPBT
from evogrpo.reporting.records import StepReport
from evogrpo.storage.checkpoint import read_checkpoint, write_checkpoint
from evogrpo.testing.strategies import SPACE, StrategyTestCase
from evogrpo.training.configuration.reading import load_config, parse_config
from evogrpo.training.configuration.user_code import check_resumable
from evogrpo.training.run_dir import open_run
from tests.cli.project import write_project
from tests.evolution.simulated_training import Simulation, Surface, wrong_founders
from tests.strategies.halved import Gaussian, halved
from tests.tiny_models import tiny_model
from tests.tiny_training import events_of, finish, resumed_run, tiny_env, tiny_run


def stop_after(run, steps):
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()


class OwnMutationTestCase(StrategyTestCase):
    """Conformance of strategies with a user-defined mutation."""

    def rebuilt(self, strategy):
        return dataclasses.replace(strategy)


class TestTournamentWithAFunction(OwnMutationTestCase):
    no_twins = False  # a parent has two different children at most

    def make_strategy(self):
        return Tournament(mutation=halved)


class TestTruncationWithAnObject(OwnMutationTestCase):
    def make_strategy(self):
        return TruncationPBT(mutation=Gaussian(width=0.05))


def test_children_have_the_returned_hyperparameters():
    arm = Simulation(Tournament(z=0.0, mutation=halved), Surface(), wrong_founders(6, lr=1e-3), seed=0).run(4)
    changes = [child.changes["lr"] for plan in arm.plans for child in plan.children if "nothing" not in child.reason]
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


def test_mutations_that_cannot_be_found_again_are_refused_first():
    def local(hyperparameters, space, rng):
        return hyperparameters

    for own in (local, lambda values, space, rng: values):
        for strategy in (Tournament(mutation=own), TruncationPBT(mutation=own), MutationOnly(mutation=own)):
            with pytest.raises(ValueError, match="mutation of a strategy"):
                check_resumable(strategy)
    with pytest.raises(ValueError, match=r"settings of .*:Sealed.*width"):
        check_resumable(Tournament(mutation=Sealed(0.1)))
    for own in (halved, Gaussian(width=0.3)):
        check_resumable(Tournament(mutation=own))


@pytest.mark.parametrize(
    ("own", "others"), [(halved, (Gaussian(), None)), (Gaussian(width=0.3), (Gaussian(), halved))], ids=["def", "class"]
)
def test_a_stopped_run_resumes_equal(tmp_path, own, others):
    strategy = Tournament(z=0.0, mutation=own)
    finish(tiny_run(tmp_path / "whole", strategy=strategy))
    stop_after(tiny_run(tmp_path / "run", strategy=strategy), 3)
    with pytest.raises(ValueError, match=r"is not imported from a file"):
        resume(tmp_path / "run", tiny_env(), actor_network=tiny_model())
    for other in others:
        with pytest.raises(ValueError, match=r"strategy must be the one|not imported|unknown setting"):
            resumed_run(tmp_path / "run", strategy=dataclasses.replace(strategy, mutation=other))
    finish(resumed_run(tmp_path / "run", strategy=dataclasses.replace(strategy)))
    assert events_of(tmp_path / "run") == events_of(tmp_path / "whole")


def test_a_name_in_a_checkpoint_is_never_imported(tmp_path, monkeypatch):
    stop_after(tiny_run(tmp_path / "run", strategy=Tournament(z=0.0, mutation=halved)), 2)
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = open_run(tmp_path / "run").folder
    tensors, record = read_checkpoint(checkpoint)
    record["strategy"]["mutation"]["name"] = "trap:halved"
    write_checkpoint(checkpoint, tensors, record, replace=True)
    with pytest.raises(ValueError, match="mutation trap:halved is not imported"):
        resume(tmp_path / "run", tiny_env(), actor_network=tiny_model())
    strategy = Tournament(z=0.0, mutation=halved)
    run = resume(tmp_path / "run", tiny_env(), actor_network=tiny_model(), strategy=strategy)
    assert run.trainer.strategy == strategy
    assert "trap" not in sys.modules


OWN = """
import dataclasses

class Times:
    def __init__(self, factor=2.0):
        self.factor = factor
    def __call__(self, hyperparameters, space, rng):
        return dataclasses.replace(hyperparameters, lr=space["lr"].closest(hyperparameters.lr * self.factor))
    def to_json(self):
        return {"factor": self.factor}

def doubled(hyperparameters, space, rng):
    return Times()(hyperparameters, space, rng)
"""


def test_a_configuration_names_a_mutation_in_a_file(tmp_path):
    path = write_project(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    values = yaml.safe_load(path.read_text())
    for name, given, stored in (
        ("tournament", "mine.py:doubled", {"name": f"{tmp_path}/mine.py:doubled"}),
        ("truncation_pbt", {"name": "mine.py:doubled"}, {"name": f"{tmp_path}/mine.py:doubled"}),
        (
            "mutation_only",
            {"name": "mine.py:Times", "factor": 3.0},
            {"name": f"{tmp_path}/mine.py:Times", "factor": 3.0},
        ),
    ):
        values["strategy"] = {"name": name, "mutation": given}
        path.write_text(yaml.safe_dump(values))
        config = load_config(path)
        assert config.to_json()["strategy"]["mutation"] == stored
        again = parse_config(config.to_json())
        assert again.to_json() == config.to_json()
        start = Hyperparameters(lr=1e-4)
        assert again.strategy.mutation(start, SPACE, None).lr == pytest.approx(stored.get("factor", 2.0) * 1e-4)
        check_resumable(config.strategy)
    for wrong, message in (
        ("mine.py:dobled", "has no .*'dobled': did you mean 'doubled'"),
        ("nowhere.py:doubled", "there is no file .*nowhere.py"),
        ({"name": "mine.py:Times", "fator": 1}, "did you mean 'factor'"),
        ({"name": "mine.py:doubled", "factor": 1}, "unknown setting of .*mine.py:doubled 'factor'"),
    ):
        values["strategy"] = {"name": "tournament", "mutation": wrong}
        path.write_text(yaml.safe_dump(values))
        with pytest.raises(ValueError, match=message):
            load_config(path)
