"""Callback: hooks of a run."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evogrpo.reporting.records import GenerationReport, Result, StepReport, TestReport
from evogrpo.synonyms import counterpart
from evogrpo.text import shown
from evogrpo.validation import check_call, refuse_unknown

if TYPE_CHECKING:
    from evogrpo.training.trainer import Trainer


class Callback:
    """Hooks of a run: override what you need, and pass an instance to `evolve(callbacks=[...])`.

    With several ranks, hooks are called on rank 0 only. An error in a hook ends the run, which can
    be resumed.

    Raises:
        ValueError: If a subclass defines a method `on_...` that is no hook, which would never be
            called.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") or counterpart(name, hooks) is not None:
                refuse_unknown("hook of Callback", [name], hooks)

    def on_run_start(self, trainer: "Trainer") -> None:
        """Called when the run begins or is resumed; `trainer.stop()` ends it at any time."""

    def on_step(self, report: StepReport) -> None:
        """Called after every learning step, once it is in the journal."""

    def on_generation(self, report: GenerationReport) -> None:
        """Called after every generation, once it is saved and its plan is applied."""

    def on_test(self, report: TestReport) -> None:
        """Called after the test."""

    def on_run_end(self, result: Result) -> None:
        """Called when the run is complete or was stopped, once everything is saved.

        Not after an error.
        """


def check_callbacks(callbacks: object) -> None:
    """Raise ValueError unless the value is a list of callbacks."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    # The type itself is checked: an object such as a mock may claim another class.
    if not issubclass(type(callbacks), Sequence) or isinstance(callbacks, str | bytes):
        raise ValueError(f"callbacks must be a list of callbacks, got {shown(callbacks)}.")
    assert isinstance(callbacks, Sequence)  # for mypy, which does not follow `issubclass`
    for each in callbacks:
        complete = all(callable(getattr(each, hook, None)) for hook in hooks)
        if isinstance(each, type) or not complete:
            raise ValueError(
                f"callbacks must be instances of subclasses of evogrpo.Callback, got {shown(each)}."
            )
        for hook in hooks:
            method = getattr(each, hook)
            if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
                raise ValueError(
                    f"callbacks: {hook} of {shown(each)} must be a plain function, without async"
                    " and yield. It would never run."
                )
            _, *arguments = inspect.signature(getattr(Callback, hook)).parameters
            check_call(f"callbacks: {hook} of {shown(each)} must take", method, *arguments)
