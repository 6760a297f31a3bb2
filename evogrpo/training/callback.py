"""Callback: hooks of a run, for loggers such as Weights & Biases and for rules that end a run early."""

from typing import TYPE_CHECKING

from evogrpo.reporting.records import GenerationReport, TestReport
from evogrpo.reporting.results import Result
from evogrpo.reporting.step_records import StepReport

if TYPE_CHECKING:
    from evogrpo.training.loop.trainer import Trainer


class Callback:
    """Hooks of a run: subclass it, override what you need, and pass it to `evolve(callbacks=[...])`.

    With several ranks, hooks are called on rank 0 only. An error in a hook ends the run, which can be resumed.
    """

    def on_run_start(self, trainer: "Trainer") -> None:
        """Called when the run begins or is resumed; `trainer.stop()` ends it at any time."""

    def on_step(self, report: StepReport) -> None:
        """Called after every learning step, once it is in the journal."""

    def on_generation(self, report: GenerationReport) -> None:
        """Called after every generation, once it is saved and its plan is applied."""

    def on_test(self, report: TestReport) -> None:
        """Called after the test."""

    def on_run_end(self, result: Result) -> None:
        """Called when the run is complete or was stopped, once everything is saved; not after an error."""
