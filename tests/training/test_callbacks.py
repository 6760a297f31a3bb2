"""Callbacks: order of hooks, stops and errors from a hook, and the documented fields of events."""

import re
from pathlib import Path

import pytest

from evogrpo import Callback, evolve, resume
from tests.tiny_steps import QUICK, cart_pole, step_population

ROOT = Path(__file__).parents[2]


class Recorder(Callback):
    def __init__(self):
        self.calls = []

    def on_run_start(self, trainer):
        self.trainer = trainer
        self.calls.append("start")

    def on_step(self, report):
        self.calls.append(f"step {report.step}")

    def on_generation(self, report):
        self.calls.append(f"generation {report.generation}")

    def on_test(self, report):
        self.calls.append("test")

    def on_run_end(self, result):
        self.calls.append(f"end {result.complete}")


def test_hooks_are_called_in_order_also_of_a_resumed_run(tmp_path):
    first = Recorder()
    again = Recorder()
    env = cart_pole()
    schedule = {**QUICK, "generations": 1, "strategy": "fixed", "run_dir": tmp_path / "run"}
    list(evolve(step_population(2), env, callbacks=[first], **schedule))
    assert first.calls == ["start", "step 0", "step 1", "generation 1", "test", "end True"]
    list(resume(tmp_path / "run", env, generations=2, callbacks=[again]))
    assert again.calls == ["start", "step 2", "step 3", "generation 2", "test", "end True"]


def test_a_hook_that_returns_false_is_named():
    class Ends(Callback):
        def on_generation(self, report):
            return False

    with pytest.warns(UserWarning, match="on_generation of Ends returned False"):
        run = evolve(step_population(2), cart_pole(), callbacks=[Ends()], **QUICK).finish()
    assert run.result.complete


def test_hooks_with_other_arguments_are_refused_before_training():
    """They would fail when they are called: the last one at the end of the run."""

    class Bare(Callback):
        def on_run_end(self):
            pass

    class Two(Callback):
        def on_step(self, report, trainer):
            pass

    for wrong, name in ((Bare(), "on_run_end"), (Two(), "on_step")):
        with pytest.raises(ValueError, match=name):
            evolve(step_population(2), cart_pole(), callbacks=[wrong], **QUICK)


@pytest.mark.parametrize("wrong", [Recorder(), Recorder, [Recorder], [print]])
def test_what_is_no_list_of_callbacks_is_refused_before_training(tmp_path, wrong):
    with pytest.raises(ValueError, match="callbacks must be"):
        evolve(step_population(2), cart_pole(), callbacks=wrong, run_dir=tmp_path / "run", **QUICK)
    assert not (tmp_path / "run").exists()


def test_hooks_that_would_never_run_are_refused():
    class Generator(Callback):
        def on_step(self, report):
            yield report

    class Async(Callback):
        async def on_generation(self, report):
            pass

    for wrong in (Generator(), Async()):
        with pytest.raises(ValueError, match="plain function"):
            evolve(step_population(2), cart_pole(), callbacks=[wrong], **QUICK)


def test_a_hook_that_raises_stopiteration_does_not_end_the_run_as_complete():
    class Broken(Callback):
        def on_step(self, report):
            next(iter(()))

    run = evolve(step_population(2), cart_pole(), callbacks=[Broken()], **QUICK)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(run)


def test_a_hook_stops_the_run():
    class Stopper(Recorder):
        def on_step(self, report):
            super().on_step(report)
            self.trainer.stop("enough")

    stopper = Stopper()
    run = evolve(step_population(2), cart_pole(), callbacks=[stopper], **QUICK).finish()
    assert stopper.calls == ["start", "step 0", "end False"]
    assert run.result.reason == "enough"


def test_an_error_in_a_hook_ends_a_run_that_can_be_resumed(tmp_path):
    class Broken(Callback):
        def on_generation(self, report):
            raise LookupError

    env = cart_pole()
    with pytest.raises(LookupError):
        list(
            evolve(step_population(2), env, callbacks=[Broken()], run_dir=tmp_path / "run", **QUICK)
        )
    assert [report.generation for report in resume(tmp_path / "run", env, generations=2)] == [2]


def test_every_field_of_an_event_is_documented(stored_language_run):
    table = (
        (ROOT / "docs" / "howto" / "callbacks.md").read_text(encoding="utf-8").split("## Events")[1]
    )
    fields = {
        row.split("`")[1]: set(re.findall(r"`(\w+)`", row))
        for row in table.splitlines()
        if row.startswith("| `")
    }
    for event in stored_language_run.events():
        missing = event.keys() - fields[event["event"]] - {"event", "time"}
        assert missing <= {"micro_batch_tokens"}, event["event"]


@pytest.mark.parametrize(
    ("name", "hook"),
    [("on_steps", "on_step"), ("on_train_end", "on_run_end"), ("_on_step", "on_step")],
)
def test_a_misspelt_hook_is_refused(name, hook):
    with pytest.raises(ValueError, match=rf"'{hook}'"):
        type("Mine", (Callback,), {name: lambda self, report: None})
