"""Samples per member in plans."""

import dataclasses

import pytest

from evogrpo import HyperparameterConfig, RLParameter
from evogrpo.evolution import Fixed
from evogrpo.reporting.records import GenerationReport, StepReport
from evogrpo.storage.journal import read_journal
from evogrpo.training.display import plan_lines
from evogrpo.training.loop.trainer import StrategyError
from tests.tiny_steps import resumed_step_run, step_run
from tests.tiny_training import equal_states, events_of, final_states, finish, tiny_run

OPTIONS = {
    "hp_config": HyperparameterConfig(lr=RLParameter(min=1e-3, max=3e-2, scale="log")),
    "evolve_network": None,
    "group_size": 4,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns(Fixed):
    """Other members sample most after each generation; after the third all sample equally."""

    shares: tuple[tuple[int, ...], ...] = ((12, 8, 4), (4, 4, 16))

    def plan(self, history, rng):
        number = history.last.number - 1
        samples = tuple(self.shares[number]) if number < len(self.shares) else None
        return dataclasses.replace(super().plan(history, rng), samples=samples)

    def to_json(self):
        return {"shares": [list(each) for each in self.shares]}


def turns(folder, **schedule):
    return step_run(folder, strategy=Turns(), options=OPTIONS, **({"generations": 4} | schedule))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns") / "run"
    run = turns(folder)
    return folder, run, list(run.reports())


def test_members_sample_as_planned(whole):
    folder, run, reports = whole
    samples = [[m.samples for m in r.learned.values()] for r in reports if isinstance(r, StepReport)]
    assert samples[::2] == samples[1::2] == [[8, 8, 8], [12, 8, 4], [4, 4, 16], [8, 8, 8]]
    assert run.run_state.block == 4  # groups of the largest number of samples
    plans = [event["plan"] for event in read_journal(folder / "journal.jsonl") if event["event"] == "generation"]
    assert [plan and plan.get("samples") for plan in plans] == [[12, 8, 4], [4, 4, 16], None, None]
    lines = [str(line) for r in reports if isinstance(r, GenerationReport) for line in plan_lines(r)]
    assert "selection: 4 4 16 samples per step by slot from here on" in lines


@pytest.mark.parametrize("steps", [3, 4])
def test_a_stopped_run_resumes_equal(whole, tmp_path, steps):
    run = turns(tmp_path / "run")
    for report in run.reports():
        if isinstance(report, StepReport) and report.step + 1 == steps:
            run.stop()
    finish(resumed_step_run(tmp_path / "run", strategy=Turns))
    assert events_of(tmp_path / "run") == events_of(whole[0])
    assert equal_states(final_states(tmp_path / "run"), final_states(whole[0]))


def test_every_member_has_samples_to_learn_from():
    run = tiny_run(None, size=3, strategy=Turns(shares=((8, 0, 8),)), generations=2)
    with pytest.raises(StrategyError, match=r"samples must be positive"):
        finish(run)
