"""Comparison of runs: best members, settings, costs and tests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evogrpo.evolution.fitness import Fitness, paired_difference
from evogrpo.reporting.lineage import best_member
from evogrpo.reporting.records import Estimate, MemberReport
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.validation import flat

Z_95 = 1.96
"""Half-width of a 95 % confidence interval in standard errors, for normal errors."""


def interval(estimate: Estimate) -> tuple[float, float]:
    """Return the bounds of a mean's 95 % confidence interval."""
    half_width = Z_95 * estimate.standard_error
    return estimate.mean - half_width, estimate.mean + half_width


_NO_SETTINGS = ("run_id", "time", "members", "lineage", "data", "run_dir", "logging")
"""Keys of a run event or configuration that are not settings."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of several compared runs.

    Attributes:
        path: Run directory.
        summary: Content of its journal.
        best: Its best member; None before the first evaluation.
        settings: All settings by dotted name.
    """

    path: Path
    summary: RunSummary
    best: MemberReport | None
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TestDifference:
    """Difference between the tests of a run and of the first run.

    Attributes:
        gain: Difference of the best members' mean rewards; None if not comparable.
        paired: True if computed question by question, False if from the two means.
        questions: Number of common questions, if paired.
        why: Reason for no comparison or an unpaired one; empty if paired.
    """

    gain: Estimate | None
    paired: bool = False
    questions: int | None = None
    why: str = ""

    __test__ = False  # pytest must not collect it

    @property
    def beyond_noise(self) -> bool | None:
        """True if the gain exceeds two standard errors; None if not comparable."""
        if self.gain is None:
            return None
        return abs(self.gain.mean) > 2 * self.gain.standard_error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, each compared with the first.

    Attributes:
        runs: The runs.
        settings: Values per run of settings that differ, by dotted name; None where a run does not
            have one.
        differences: Test difference of every run but the first.
    """

    runs: tuple[ComparedRun, ...]
    settings: Mapping[str, tuple[Any, ...]]
    differences: tuple[TestDifference, ...]


def compare_runs(
    folders: Sequence[Path], configurations: Sequence[Mapping[str, Any] | None]
) -> Comparison:
    """Compare runs: their settings, best members and tests.

    Args:
        folders: At least two run directories; the runs may still be active.
        configurations: Plain values of each run's configuration; None for a run started in Python.

    Raises:
        ValueError: If there are fewer than two runs, one repeats or is no run, or a value is
            invalid.
    """
    if len(folders) < 2 or len({folder.resolve() for folder in folders}) != len(folders):
        names = ", ".join(map(str, folders))
        raise ValueError(f"compare needs at least two different run directories, got {names}.")
    summaries = [read_summary(folder) for folder in folders]
    # Settings are those of the configurations. If a run has none, they are those of all run events,
    # because configurations and run events have different names for settings. Limits are those of
    # the last resume.
    configured = [
        {**values, "schedule": summary.facts.get("schedule", values.get("schedule"))}
        for values, summary in zip(configurations, summaries, strict=True)
        if values is not None
    ]
    settings_of_runs = (
        configured if len(configured) == len(folders) else [summary.facts for summary in summaries]
    )
    runs = tuple(
        ComparedRun(
            path=folder,
            summary=summary,
            best=best_member(summary.generations),
            settings=flat(
                {name: value for name, value in values.items() if name not in _NO_SETTINGS}
            ),
        )
        for folder, summary, values in zip(folders, summaries, settings_of_runs, strict=True)
    )
    settings = dict.fromkeys(name for run in runs for name in run.settings)
    rows = {name: tuple(run.settings.get(name) for run in runs) for name in settings}
    return Comparison(
        runs=runs,
        settings={
            name: values
            for name, values in rows.items()
            if any(value != values[0] for value in values)
        },
        differences=tuple(difference_of_tests(run.summary, runs[0].summary) for run in runs[1:]),
    )


def difference_of_tests(run: RunSummary, first: RunSummary) -> TestDifference:
    """Compare the tests of two runs: paired if their questions are the same, by means if only the questions differ.

    Runs with different environments, rewards or measures are not comparable.
    """
    test = run.test
    first_test = first.test
    if test is None or first_test is None:
        return TestDifference(gain=None, why="one of the runs has no test yet")
    if test.measure != first_test.measure:
        return TestDifference(
            gain=None, why=f"measured differently: {test.measure} and {first_test.measure}"
        )
    data = run.facts.get("data")
    reference = first.facts.get("data")
    if not isinstance(data, Mapping) or not isinstance(reference, Mapping):
        return TestDifference(gain=None, why="a journal has no fingerprint of its test")
    # 1. Different tasks: fingerprints, named such as "test questions" or "reward score", differ in
    #    more than questions.
    differs = {str(name) for name in (*data, *reference) if data.get(name) != reference.get(name)}
    other_task = sorted(
        name
        for name in differs
        if not (name in ("seed", "prompts", "date") or name.endswith((" starts", " questions")))
    )
    if other_task or run.changed_data or first.changed_data:
        reason = ", ".join(other_task) or "data changed when a run was resumed"
        return TestDifference(gain=None, why=f"not the same task: {reason}")
    # 2. Different test questions: compare the means. A dataset has a fingerprint per split, so its
    # test questions can be the same with another seed. Reset seeds depend on the seed and on the
    # sizes of all splits.
    irrelevant = set()
    if "test questions" in data:
        irrelevant = {"seed", "prompts", "date", "train questions", "validation questions"}
    if differs - irrelevant:
        standard_error = math.hypot(test.after.standard_error, first_test.after.standard_error)
        gain = Estimate(mean=test.after.mean - first_test.after.mean, standard_error=standard_error)
        return TestDifference(
            gain=gain, why=f"different test questions: {', '.join(sorted(differs))}"
        )
    # 3. Equal test questions, of which one run may have used fewer: compare question by question.
    count = min(len(test.scores), len(first_test.scores))
    pairs = Fitness.from_scores(test.scores[:count]), Fitness.from_scores(first_test.scores[:count])
    mean, standard_error = paired_difference(*pairs)
    return TestDifference(
        gain=Estimate(mean=mean, standard_error=standard_error), paired=True, questions=count
    )
