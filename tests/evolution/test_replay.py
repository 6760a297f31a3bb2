"""Replay of a hyperparameter schedule."""

import pytest

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution import Replay, ScheduleStage
from evogrpo.testing.strategies import (
    GENERATIONS,
    SAMPLES_PER_STEP,
    STEPS_PER_GENERATION,
    SimulatedPopulation,
    StrategyTestCase,
)

RATES = [1e-4 * 1.4**number for number in range(GENERATIONS + 1)]
STAGES = tuple(
    ScheduleStage(
        hyperparameters=Hyperparameters(lr=rate, group_size=4),
        generations=(STEPS_PER_GENERATION + number % 3,),
        samples_per_step=SAMPLES_PER_STEP // (1 + number % 2),
    )
    for number, rate in enumerate(RATES)
)


class TestReplay(StrategyTestCase):
    keeps_elite = False

    def make_strategy(self):
        return Replay(stages=STAGES)

    def test_healthy_members_follow_the_schedule_without_selection(self):
        for size, failures in ((1, 0.0), (4, 0.3)):
            population = SimulatedPopulation(size, failures=failures)
            for history, plan in self.follow(self.make_strategy(), population):
                due = STAGES[history.last.number]
                assert all(parent in (slot, None) for slot, parent in enumerate(plan.parents))
                assert all(child.hyperparameters == due.hyperparameters for child in plan.children)
                assert set(plan.vacant) == {*history.last.failed, *history.last.empty}
                samples = plan.samples_per_step or history.last.samples_per_step
                steps = plan.steps_per_generation or history.last.steps_per_generation
                assert (samples, (steps,)) == (due.samples_per_step, due.generations)

    def test_nothing_changes_after_the_last_stage(self):
        short = Replay(stages=STAGES[:2])
        plans = [plan for _, plan in self.follow(short, SimulatedPopulation(1))]
        assert [len(plan.children) for plan in plans] == [1] + [0] * (GENERATIONS - 1)
        assert short.stage_of(99) == (STAGES[1], STAGES[1].generations[0])


class TestRepeatedStages(StrategyTestCase):
    """Members change in some generations only, the best one too."""

    keeps_elite = False
    no_twins = False

    def make_strategy(self):
        stages = [STAGES[number // 2] for number in range(len(STAGES))]
        return Replay(stages=tuple(stages))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages"),
        ([{"hyperparameters": {}}], "samples_per_step"),
        ([{"hyperparameters": {}, "generations": [], "samples_per_step": 8}], "generations"),
        (
            [{"hyperparameters": {}, "generations": [2], "samples_per_step": 9}],
            "group_size must divide",
        ),
        (
            [{"hyperparameters": {"lr": -1}, "generations": [2], "samples_per_step": 8}],
            "lr must be above 0",
        ),
        ([{"hyperparameters": {}, "generations": [2], "samples_per_step": 8, "stepz": 1}], "stepz"),
    ],
)
def test_invalid_stages_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        Replay(stages=stages)
