"""Resumption of runs with the package's strategies."""

import pytest

from evogrpo.evolution import MultiFrequency, Narrowing, SuccessiveHalving, Tournament
from evogrpo.reporting.records import StepReport
from evogrpo.training.run_dir import open_run
from tests.tiny_steps import resumed_step_run, step_run
from tests.tiny_training import equal_states, events_of, final_states, finish


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tournament(z=0.0),
        lambda: MultiFrequency(intervals=(1, 2)),
        SuccessiveHalving,
        lambda: Narrowing(every=1, z=0.0),
    ],
    ids=["tournament", "multi_frequency", "successive_halving", "narrowing"],
)
def test_a_stopped_run_resumes_equal(make, tmp_path):
    def run(name):
        return step_run(tmp_path / name, size=4, strategy=make(), generations=4, steps_per_generation=1)

    finish(run("whole"))
    parts = run("parts")
    for report in parts.reports():
        if isinstance(report, StepReport) and report.generation == 3:
            parts.stop()
    finish(resumed_step_run(tmp_path / "parts"))
    assert events_of(tmp_path / "parts") == events_of(tmp_path / "whole")
    assert equal_states(final_states(tmp_path / "parts"), final_states(tmp_path / "whole"))
    stored = [open_run(tmp_path / name).record.strategy_state for name in ("parts", "whole")]
    assert stored[0] == stored[1]
