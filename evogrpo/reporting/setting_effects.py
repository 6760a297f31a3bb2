"""Effect of each setting on fitness: which values helped, and how sure that is."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from evogrpo.config.hyperparameters import Value
from evogrpo.config.search_space import RLParameter
from evogrpo.evolution.founders import changed_together
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import number_text, score_text

MIN_LINEAGES = 3
"""Number of lineages behind each side of a comparison from which on it is more than a hint."""
INTERVALS = 3
"""Number of intervals of a range, equally wide on its scale."""
FINDINGS_TITLE = "Effect of task settings on fitness, relative to the mean of each generation"
"""Title of the findings in a terminal."""


@dataclass(frozen=True, kw_only=True)
class ValueEffect:
    """Fitness of the members with one value of a setting, relative to their generations.

    A lineage is a founder with all of its descendants. Its members share weights, and their
    generations follow each other, so it counts once: as the mean of its results with this value.

    Attributes:
        value: The value as text; for a range, one of `INTERVALS` intervals.
        label: The value as short text.
        members: Number of members with this value.
        lineage_means: For each lineage, its mean difference from the mean fitness of all healthy
            members of the generation, without what was inherited with another value, in reward
            units.
    """

    value: str
    label: str
    members: int
    lineage_means: tuple[float, ...]

    @property
    def lineages(self) -> int:
        """Number of lineages with this value."""
        return len(self.lineage_means)

    @property
    def fitness(self) -> float:
        """Mean over lineages, in reward units."""
        return fmean(self.lineage_means)

    @property
    def standard_error(self) -> float | None:
        """Standard error of `fitness` over lineages; None for a single one."""
        if self.lineages < 2:
            return None
        return stdev(self.lineage_means) / math.sqrt(self.lineages)


@dataclass(frozen=True, kw_only=True)
class SettingEffect:
    """Effect of a setting on fitness.

    Attributes:
        name: Name of the setting.
        values: Its values with results, in order; fewer than two if members were never compared.
        finding: The result in words, such as `1 is better than 0 by 0.110 ± 0.030 (4 and 5
            members)`.
        better: The value that is better than all others together: at least `MIN_LINEAGES` lineages
            on each side differ by more than two standard errors. None if there is none.
    """

    name: str
    values: tuple[ValueEffect, ...]
    finding: str = "not compared: all members of a generation had the same value"
    better: ValueEffect | None = None


def findings(summary: RunSummary) -> dict[str, str]:
    """Return the finding on each task setting of a run, by its name as short text."""
    effects = setting_effects(summary, summary.task_settings)
    return {short_name(effect.name): effect.finding for effect in effects}


def setting_effects(summary: RunSummary, names: Sequence[str]) -> tuple[SettingEffect, ...]:
    """Return the effects of settings on fitness, over all members and generations of a run.

    Fitness is relative to the mean of the healthy members of its generation, so the rise over
    generations does not count. Nor does the relative fitness that a clone with a new value inherits
    from its parent. Generations in which all members have the same value are left out.

    Args:
        summary: The run.
        names: Names of task settings or hyperparameters.
    """
    # Relative fitness by member and generation.
    relative = {}
    for generation in summary.generations:
        fitness = {member.index: member.fitness for member in generation.members}
        healthy = [value for value in fitness.values() if value is not None]
        for index, value in fitness.items():
            if value is not None:
                relative[index, generation.generation] = value - fmean(healthy)
    compared = {index for index, _ in relative}
    columns = {}
    effects = []
    for name in names:
        texts = _value_texts(name, summary)
        own = {}
        for index, history in summary.histories.items():
            own[index] = texts[history.results[0].hyperparameters.get(name)]
        columns[name] = [own[index] for index in sorted(compared)]
        effects.append(_setting_effect(summary, name, texts, own, relative))
    # Settings whose effects cannot be separated.
    for name, others in changed_together(columns).items():
        number = list(names).index(name)
        labels = ", ".join(map(summary.labels.name, others))
        finding = f"{effects[number].finding}, always changed together with {labels}"
        effects[number] = replace(effects[number], finding=finding)
    return tuple(effects)


def _setting_effect(
    summary: RunSummary,
    name: str,
    texts: Mapping[Value, str],
    own: Mapping[int, str],
    relative: Mapping[tuple[int, int], float],
) -> SettingEffect:
    """Return the effect of one setting.

    Args:
        summary: The run.
        name: Name of the setting.
        texts: Its values in order, each as text.
        own: Value of each member as text.
        relative: Relative fitness by member and generation.
    """
    # 1. What each member, or its first ancestor with its value, inherited with another value.
    #    Parents come before their children.
    inherited: dict[int, float] = {}
    for index, history in summary.histories.items():
        inherited[index] = 0.0
        origin = history.origin
        if origin is not None and own[origin.index] == own[index]:
            inherited[index] = inherited[origin.index]
        elif origin is not None:
            inherited[index] = relative.get((origin.index, origin.generation), 0.0)
    # 2. Results of all generations in which members can be compared, by value and member.
    results: dict[str, list[tuple[int, float]]] = {}
    for generation in summary.generations:
        found = {}
        for member in generation.members:
            fitness = relative.get((member.index, generation.generation))
            if fitness is not None:
                found[member.index] = fitness - inherited[member.index]
        if len({own[index] for index in found}) > 1:
            for index, fitness in found.items():
                results.setdefault(own[index], []).append((index, fitness))
    # 3. Means by lineage.
    labels = summary.labels.by_setting.get(name, {})
    effects = {}
    for text in dict.fromkeys(texts.values()):
        if text in results:
            effects[text] = _effect(summary, text, labels.get(text, text), results[text])
    values = tuple(effects.values())
    if len(values) < 2:
        return SettingEffect(name=name, values=values)
    # 4. The best value against all others.
    best = max(values, key=lambda value: value.fitness)
    rest = [value for value in values if value is not best]
    label = "the others"
    if len(rest) == 1:
        label = rest[0].label
    pooled = []
    for value in rest:
        pooled += results[value.value]
    others = _effect(summary, label, label, pooled)
    better, finding = _compared(best, others)
    return SettingEffect(name=name, values=values, finding=finding, better=better)


def _effect(
    summary: RunSummary, value: str, label: str, results: Sequence[tuple[int, float]]
) -> ValueEffect:
    """Return the effect of a value from results of members: pairs of index and fitness."""
    by_founder: dict[int, list[float]] = {}
    for index, fitness in results:
        by_founder.setdefault(summary.founders[index], []).append(fitness)
    return ValueEffect(
        value=value,
        label=label,
        members=len({index for index, _ in results}),
        lineage_means=tuple(fmean(each) for each in by_founder.values()),
    )


def _compared(best: ValueEffect, others: ValueEffect) -> tuple[ValueEffect | None, str]:
    """Return the best value, or None if it is not clearly better than the others, and why."""
    # 1. The difference of two independent means.
    difference = best.fitness - others.fitness
    error = None
    if best.standard_error is not None and others.standard_error is not None:
        error = math.hypot(best.standard_error, others.standard_error)
    # 2. The evidence. Members count if each has a lineage of its own.
    counts = (best.lineages, others.lineages)
    unit = "lineages"
    if counts == (best.members, others.members):
        unit = "members"
    evidence = f"{score_text(difference, error)} ({counts[0]} and {counts[1]} {unit})"
    # 3. The words.
    if error is None or min(counts) < MIN_LINEAGES:
        return None, f"too few members to tell: {best.label} above {others.label} by {evidence}"
    if difference <= 2 * error:
        return None, f"no clear difference: {best.label} above {others.label} by {evidence}"
    return best, f"{best.label} is better than {others.label} by {evidence}"


def _value_texts(name: str, summary: RunSummary) -> dict[Value, str]:
    """Return the values of a setting in order, each as text; numbers of a range by interval."""
    values = {member.hyperparameters.get(name) for member in summary.members}
    numbers = sorted(value for value in values if isinstance(value, int | float))
    space = summary.evolvable.get(name, {})
    texts: dict[Value, str] = {}
    if "choices" in space or len(numbers) <= INTERVALS:
        texts.update({number: number_text(number) for number in numbers})
    else:
        texts.update(_intervals(numbers, space))
    # Texts in the order of choices, which that of their labels is; then those without labels.
    names = sorted(value for value in values if isinstance(value, str))
    order = [*summary.labels.by_setting.get(name, ()), *names]
    texts.update({text: text for text in order if text in values})
    return {**texts, None: "not set"}


def _intervals(numbers: Sequence[float], space: Mapping[str, Any]) -> dict[Value, str]:
    """Return the interval of each number of a range, as text. Numbers are ascending."""
    low = numbers[0]
    high = numbers[-1]
    log = False
    try:
        # The search space in a journal is untrusted.
        parameter = RLParameter(**space)
    except (TypeError, ValueError):
        pass
    else:
        low = min(low, parameter.bounds[0])
        high = max(high, parameter.bounds[1])
        log = parameter.scale == "log" and low > 0
    # A number at an inner end belongs to the interval above it.
    if log:
        factor = math.log(high / low)
        ends = [low * math.exp(factor * part / INTERVALS) for part in range(INTERVALS + 1)]
    else:
        ends = [low + (high - low) * part / INTERVALS for part in range(INTERVALS + 1)]
    texts = [f"{number_text(start)} to {number_text(end)}" for start, end in pairwise(ends)]
    return {number: texts[bisect_right(ends[1:-1], number)] for number in numbers}
