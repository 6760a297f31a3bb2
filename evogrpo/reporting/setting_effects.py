"""Effect of each setting on fitness: which values helped, and how sure that is."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from evogrpo.config.hyperparameters import Value
from evogrpo.config.search_space import RLParameter
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import distinct_number_texts, number_text, score_text

MIN_LINEAGES = 3
"""Minimum number of lineages on each side of a comparison that calls a value better."""
FINDINGS_TITLE = "Effect of task settings on fitness, relative to the mean of each generation"
"""Title of the findings in a terminal."""


@dataclass(frozen=True, kw_only=True)
class ValueEffect:
    """Fitness of the members with one value of a setting, relative to their generations.

    A lineage is a founder with all of its descendants. Its members share weights, and their
    generations follow each other, so it counts once: as the mean of its results with this value.

    Attributes:
        value: The value as short text; for a range, one of its halves.
        members: Number of members with this value.
        lineage_means: For each lineage, its mean difference from the mean fitness of all healthy
            members of the generation, without what was inherited with another value, in reward
            units.
    """

    value: str
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
        mean = fmean(healthy) if healthy else 0.0
        for index, value in fitness.items():
            if value is not None:
                # Compared with the others of its generation, as all members improve. The mean of
                # equal values may differ from them by rounding, which would look like an effect.
                equal = math.isclose(value, mean, rel_tol=1e-12)
                relative[index, generation.generation] = 0.0 if equal else value - mean
    compared = {index for index, _ in relative}
    divisions = {}
    effects = []
    for name in names:
        texts = _value_texts(name, summary)
        value_of = {}
        for index, history in summary.histories.items():
            value_of[index] = texts[history.results[0].hyperparameters.get(name)]
        column = [value_of[index] for index in sorted(compared)]
        # For each member the position of the first one with its value.
        divisions[name] = [column.index(text) for text in column]
        effects.append(_setting_effect(summary, name, texts, value_of, relative))
    # Effects of settings that divide the members alike cannot be separated.
    for number, effect in enumerate(effects):
        division = divisions[effect.name]
        together = []
        if any(division):
            together = [name for name in names if divisions[name] == division]
        others = [summary.labels.name(name) for name in together if name != effect.name]
        if others:
            finding = f"{effect.finding}, always changed together with {', '.join(others)}"
            effects[number] = replace(effect, finding=finding)
    return tuple(effects)


def _setting_effect(
    summary: RunSummary,
    name: str,
    texts: Mapping[Value, str],
    value_of: Mapping[int, str],
    relative: Mapping[tuple[int, int], float],
) -> SettingEffect:
    """Return the effect of one setting.

    Args:
        summary: The run.
        name: Name of the setting.
        texts: Its values in order, each as text.
        value_of: Value of each member as text.
        relative: Relative fitness by member and generation.
    """
    # 1. Relative fitness that each member, or its first ancestor with the same value, inherited
    #    from a parent with another value. Parents come before their children.
    inherited: dict[int, float] = {}
    for index, history in summary.histories.items():
        inherited[index] = 0.0
        origin = history.origin
        if origin is not None and value_of[origin.index] == value_of[index]:
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
        # Fitness of different generations cannot be compared.
        if len({value_of[index] for index in found}) > 1:
            for index, fitness in found.items():
                results.setdefault(value_of[index], []).append((index, fitness))
    # 3. Means by lineage.
    present = [text for text in dict.fromkeys(texts.values()) if text in results]
    values = tuple(_effect(summary, text, results[text]) for text in present)
    if len(values) < 2:
        return SettingEffect(name=name, values=values)
    # 4. The best value against all others.
    best = max(values, key=lambda value: value.fitness)
    rest = [value for value in values if value is not best]
    label = "the others"
    if len(rest) == 1:
        label = rest[0].value
    pooled = []
    for value in rest:
        pooled += results[value.value]
    others = _effect(summary, label, pooled)
    better, finding = _compared(best, others)
    return SettingEffect(name=name, values=values, finding=finding, better=better)


def _effect(summary: RunSummary, value: str, results: Sequence[tuple[int, float]]) -> ValueEffect:
    """Return the effect of a value from results of members: pairs of index and fitness."""
    by_founder: dict[int, list[float]] = {}
    for index, fitness in results:
        by_founder.setdefault(summary.founders[index], []).append(fitness)
    return ValueEffect(
        value=value,
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
    unit = "lineages"
    if (best.lineages, others.lineages) == (best.members, others.members):
        unit = "members"
    counts = f"{best.lineages} and {others.lineages} {unit}"
    evidence = f"{score_text(difference, error)} ({counts})"
    # 3. The words.
    if difference == 0:
        return None, f"no difference between {best.value} and {others.value} ({counts})"
    if error is None or min(best.lineages, others.lineages) < MIN_LINEAGES:
        return None, f"too few members to tell: {best.value} above {others.value} by {evidence}"
    if difference <= 2 * error:
        return None, f"no clear difference: {best.value} above {others.value} by {evidence}"
    return best, f"{best.value} is better than {others.value} by {evidence}"


def _value_texts(name: str, summary: RunSummary) -> dict[Value, str]:
    """Return the values of a setting in order, each as text; numbers of a range by its halves."""
    values = {member.hyperparameters.get(name) for member in summary.members}
    numbers = sorted(value for value in values if isinstance(value, int | float))
    space = summary.evolvable.get(name, {})
    number_texts = distinct_number_texts(numbers)
    texts: dict[Value, str] = dict(zip(numbers, number_texts, strict=True))
    if "choices" not in space and len(numbers) > 2:
        middle: Any = fmean([numbers[0], numbers[-1]])
        # The search space in a journal is untrusted.
        with suppress(TypeError, ValueError):
            middle = RLParameter(**space).first
        for number in numbers:
            half = "below" if number < middle else "at least"
            texts[number] = f"{half} {number_text(middle)}"
    # Texts in the order of their labels, which is that of the choices; then texts without labels.
    labels = summary.labels.by_setting.get(name, {})
    names = sorted(value for value in values if isinstance(value, str))
    for text in [*labels, *names]:
        if text in values:
            texts[text] = labels.get(text, text)
    return {**texts, None: "not set"}
