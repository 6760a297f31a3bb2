"""Comparison of runs: best members, settings, costs and tests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from evogrpo.evolution.fitness import Fitness, paired_difference
from evogrpo.reporting.records import Estimate
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
        settings: All settings by dotted name.
    """

    path: Path
    summary: RunSummary
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

    # Pytest must not collect it.
    __test__ = False

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
    # Two spellings of a path are one run.
    different = {folder.resolve() for folder in folders}
    if len(folders) < 2 or len(different) < len(folders):
        names = ", ".join(map(str, folders))
        raise ValueError(f"compare needs at least two different run directories, got {names}.")
    summaries = [read_summary(folder) for folder in folders]
    # 1. Settings are those of the configurations. If any run has none, those of the run events are
    #    used for all runs, because configurations and run events name settings differently.
    runs = []
    for folder, summary, configuration in zip(folders, summaries, configurations, strict=True):
        settings = dict(summary.facts)
        if configuration is not None and None not in configurations:
            settings = dict(configuration)
            # Limits are those of the last resume.
            settings["schedule"] = summary.facts.get("schedule", settings.get("schedule"))
        for name in _NO_SETTINGS:
            settings.pop(name, None)
        # Each range or list of choices is one value.
        space = settings.pop("search_space", None) or {}
        ranges = _parameters(space, "search_space") if isinstance(space, Mapping) else {}
        all_settings = {**flat(settings), **ranges}
        runs.append(ComparedRun(path=folder, summary=summary, settings=all_settings))
    # 2. Keep the settings that differ.
    differing = {}
    all_names = dict.fromkeys(chain.from_iterable(run.settings for run in runs))
    for name in all_names:
        values = tuple(run.settings.get(name) for run in runs)
        if any(value != values[0] for value in values):
            differing[name] = values
    return Comparison(
        runs=tuple(runs),
        settings=differing,
        differences=tuple(difference_of_tests(each, summaries[0]) for each in summaries[1:]),
    )


def _parameters(space: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the parameters of a search space, which may be in groups, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in space.items():
        # The keys of a group are names of settings; those of a parameter are its fields.
        if isinstance(value, Mapping) and not value.keys() & {"min", "max", "choices"}:
            found |= _parameters(value, f"{path}.{name}")
        else:
            found[f"{path}.{name}"] = value
    return found


_TRAINING_ONLY = ("rewards", "reward_weights", "data_column")
"""Entries of a fingerprint that have no effect on a test: it has an environment's own reward, and
all of its questions.
"""


def _of_test(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a fingerprint that its test depends on.

    With a metric, rewards count in training only. Without one they are the metric.
    """
    names = [str(name) for name in data]
    has_metric = any(name.startswith("metric ") for name in names)
    entries = {}
    for name in names:
        in_training = name.startswith("reward ") and has_metric
        # A setting of prompts belongs to the policy, one of rewards alone to training.
        in_training = in_training or name.startswith("unmeasured setting ")
        if name not in _TRAINING_ONLY and not in_training:
            entries[name.replace("metric ", "reward ", 1)] = data[name]
    return entries


def difference_of_tests(run: RunSummary, first: RunSummary) -> TestDifference:
    """Compare the tests of two runs: paired if their questions are the same, otherwise by means.

    Runs with different environments, rewards or measures are not comparable.
    """
    test = run.test
    first_test = first.test
    if test is None or first_test is None:
        return TestDifference(gain=None, why="one of the runs has no test yet")
    if test.measure != first_test.measure:
        why = f"measured differently: {test.measure} and {first_test.measure}"
        return TestDifference(gain=None, why=why)
    data = run.facts.get("data")
    reference = first.facts.get("data")
    if not isinstance(data, Mapping) or not isinstance(reference, Mapping):
        return TestDifference(gain=None, why="a journal has no fingerprint of its test")
    # 1. Different tasks: fingerprints, named such as "test questions" or "reward score", differ in
    #    more than questions.
    data = _of_test(data)
    reference = _of_test(reference)
    differs = set()
    for name in (*data, *reference):
        if data.get(name) != reference.get(name):
            differs.add(name)
    about_questions = ("seed", "prompts", "date", "package")
    endings = (" starts", " questions")
    other_task = [each for each in differs if each not in about_questions]
    other_task = sorted(each for each in other_task if not each.endswith(endings))
    if other_task or run.changed_data or first.changed_data:
        reason = ", ".join(other_task) or "data changed when a run was resumed"
        return TestDifference(gain=None, why=f"not the same task: {reason}")
    # 2. Different test questions: compare the means. A dataset has a fingerprint per split, so its
    #    test questions can be the same with another seed. Reset seeds depend on the seed, and a
    #    smaller test set is the beginning of a larger one.
    irrelevant = {"train starts", "validation starts", "test starts"}
    if "test questions" in data:
        irrelevant = {*about_questions, "train questions", "validation questions"}
    if differs - irrelevant:
        # The variances of independent means add up.
        error = math.hypot(test.after.standard_error, first_test.after.standard_error)
        gain = Estimate(mean=test.after.mean - first_test.after.mean, standard_error=error)
        why = f"different test questions: {', '.join(sorted(differs - irrelevant))}"
        return TestDifference(gain=gain, why=why)
    # 3. Equal test questions, of which one run may have used fewer: compare question by question.
    count = min(len(test.scores), len(first_test.scores))
    scores = Fitness.from_scores(test.scores[:count])
    first_scores = Fitness.from_scores(first_test.scores[:count])
    mean, error = paired_difference(scores, first_scores)
    gain = Estimate(mean=mean, standard_error=error)
    return TestDifference(gain=gain, paired=True, questions=count)
