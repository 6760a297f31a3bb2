"""Effect of each setting on fitness: which values helped, and how sure that is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, NamedTuple

from evogrpo.config.hyperparameters import Value
from evogrpo.reporting.records import Estimate, MemberReport
from evogrpo.reporting.setting_labels import short_name
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import number_text, score_text
from evogrpo.validation import FLOAT32_LIMIT

MIN_LINEAGES = 3
"""Number of lineages behind each value from which on a difference is more than a hint."""
INTERVALS = 3
"""Number of intervals of a range, equally wide on its scale."""


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
        best: The value with the highest fitness; None without a comparison.
        others: All other values together; None without a comparison.
    """

    name: str
    values: tuple[ValueEffect, ...]
    best: ValueEffect | None = None
    others: ValueEffect | None = None

    @property
    def difference(self) -> Estimate | None:
        """Difference of the best value and the others; None if its error is unknown."""
        if self.best is None or self.others is None:
            return None
        own = self.best.standard_error
        other = self.others.standard_error
        if own is None or other is None:
            return None
        return Estimate(
            mean=self.best.fitness - self.others.fitness, standard_error=math.hypot(own, other)
        )

    @property
    def enough_lineages(self) -> bool:
        """True if at least `MIN_LINEAGES` lineages stand behind both sides of the comparison."""
        sides = [self.best, self.others]
        return all(side is not None and side.lineages >= MIN_LINEAGES for side in sides)

    @property
    def clear(self) -> bool:
        """True if enough lineages differ by more than two standard errors."""
        difference = self.difference
        if difference is None or not self.enough_lineages:
            return False
        return difference.mean > 2 * difference.standard_error

    @property
    def finding(self) -> str:
        """The result in words, such as `1 is better than 0 by 0.110 ± 0.030 (4 and 5 members)`."""
        best = self.best
        others = self.others
        if best is None or others is None:
            return "not compared: all members of a generation had the same value"
        # 1. The evidence. Members count if each has a lineage of its own.
        counts = [best.lineages, others.lineages]
        unit = "lineages"
        if counts == [best.members, others.members]:
            unit = "members"
        evidence = f"({counts[0]} and {counts[1]} {unit})"
        if counts[0] == counts[1]:
            each = unit if counts[0] != 1 else unit.removesuffix("s")
            evidence = f"({counts[0]} {each} each)"
        # 2. The difference.
        difference = self.difference
        if difference is None:
            size = score_text(best.fitness - others.fitness, None)
        else:
            size = str(difference)
        other = others.label
        if self.clear:
            return f"{best.label} is better than {other} by {size} {evidence}"
        start = "no clear difference"
        if not self.enough_lineages:
            start = "too few members to tell"
        return f"{start}: {best.label} above {other} by {size} {evidence}"


class _Result(NamedTuple):
    """Result of a member in a generation, with the number of its value's group."""

    group: int
    member: int
    founder: int
    fitness: float


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
    return tuple(_setting_effect(summary, name, relative) for name in names)


def _setting_effect(
    summary: RunSummary, name: str, relative: Mapping[tuple[int, int], float]
) -> SettingEffect:
    """Return the effect of one setting, from the relative fitness by member and generation."""
    # 1. Values, as groups in order.
    values = [member.hyperparameters.get(name) for member in summary.members]
    groups = _groups(name, values, summary)
    group_of: dict[Value, int] = {}
    for number, group in enumerate(groups):
        group_of.update(dict.fromkeys(group.values, number))

    def group_number(member: MemberReport) -> int:
        return group_of[member.hyperparameters.get(name)]

    # 2. Relative fitness that a member, or the first ancestor with its value, inherited with
    #    another value. Parents come before their children.
    inherited: dict[int, float] = {}
    for history in summary.histories.values():
        origin = history.origin
        if origin is None:
            inherited[history.index] = 0.0
        elif group_number(origin) == group_number(history.results[0]):
            inherited[history.index] = inherited[origin.index]
        else:
            inherited[history.index] = relative.get((origin.index, origin.generation), 0.0)
    # 3. Results of all generations in which members can be compared.
    results = []
    for generation in summary.generations:
        found = []
        for member in generation.members:
            fitness = relative.get((member.index, generation.generation))
            if fitness is not None:
                fitness -= inherited[member.index]
                founder = summary.founders[member.index]
                found.append(_Result(group_number(member), member.index, founder, fitness))
        if len({result.group for result in found}) > 1:
            results += found
    # 4. Means by lineage; then the best value against all others.
    effects = {}
    for number, group in enumerate(groups):
        own = [result for result in results if result.group == number]
        if own:
            effects[number] = _value_effect(group.value, group.label, own)
    if len(effects) < 2:
        return SettingEffect(name=name, values=tuple(effects.values()))
    best = max(effects, key=lambda number: effects[number].fitness)
    rest = [result for result in results if result.group != best]
    label = "the others"
    if len(effects) == 2:
        (label,) = (each.label for number, each in effects.items() if number != best)
    return SettingEffect(
        name=name,
        values=tuple(effects.values()),
        best=effects[best],
        others=_value_effect(label, label, rest),
    )


def _value_effect(value: str, label: str, results: Sequence[_Result]) -> ValueEffect:
    """Return the effect of the members with these results."""
    by_founder: dict[int, list[float]] = {}
    for result in results:
        by_founder.setdefault(result.founder, []).append(result.fitness)
    return ValueEffect(
        value=value,
        label=label,
        members=len({result.member for result in results}),
        lineage_means=tuple(fmean(each) for each in by_founder.values()),
    )


class _Group(NamedTuple):
    """Values of a setting that are compared together."""

    value: str
    label: str
    values: tuple[Value, ...]


def _groups(name: str, values: Sequence[Value], summary: RunSummary) -> list[_Group]:
    """Return the distinct values of a setting in order, numbers of a range by interval."""
    space = summary.evolvable.get(name, {})
    numbers = [value for value in values if isinstance(value, int | float)]
    others = [value for value in values if value is None or isinstance(value, str)]
    choices = space.get("choices")
    groups = []
    # 1. Numbers: intervals of a range with many values, otherwise one group for each.
    if "choices" in space or len(set(numbers)) <= INTERVALS:
        for number in sorted(set(numbers)):
            text = number_text(number)
            groups.append(_Group(text, text, (number,)))
    else:
        groups = _intervals(numbers, space)
    # 2. Texts in the order of choices; the search space in a journal is untrusted.
    order = list(summary.labels.by_setting.get(name, ()))
    if not order and isinstance(choices, list):
        order = [choice for choice in choices if isinstance(choice, str)]
    for each in dict.fromkeys([*order, *others]):
        if each is None:
            groups.append(_Group("not set", "not set", (None,)))
        elif each in others:
            groups.append(_Group(each, summary.labels.text(name, each), (each,)))
    return groups


def _intervals(numbers: Sequence[float], space: Mapping[str, Any]) -> list[_Group]:
    """Return the numbers of a range by interval."""
    # 1. Bounds, which in a journal are untrusted.
    low = min(numbers)
    high = max(numbers)
    for bound in (space.get("min"), space.get("max")):
        if isinstance(bound, int | float) and -FLOAT32_LIMIT <= bound <= FLOAT32_LIMIT:
            low = min(low, bound)
            high = max(high, bound)
    # 2. Ends of the intervals, equally far apart on the scale.
    log = space.get("scale") == "log" and low > 0
    ends = [low]
    for number in range(1, INTERVALS):
        share = number / INTERVALS
        if log:
            end = math.exp((1 - share) * math.log(low) + share * math.log(high))
        else:
            end = low + share * (high - low)
            # Without the rounding error around 0, which would be shown.
            if abs(end) < 1e-9 * (high - low):
                end = 0.0
        ends.append(end)
    ends.append(high)
    # 3. A number at an inner end belongs to the interval above it.
    groups = []
    for start, end in pairwise(ends):
        inside = {each for each in numbers if start <= each < end or each == end == high}
        if inside:
            text = f"{number_text(float(start))} to {number_text(float(end))}"
            groups.append(_Group(text, text, tuple(sorted(inside))))
    return groups


FINDINGS_TITLE = "Effect of task settings on fitness, relative to the mean of each generation"
"""Title of the findings in a terminal."""


def findings(summary: RunSummary) -> dict[str, str]:
    """Return the finding on each task setting of a run, by its name as short text."""
    effects = setting_effects(summary, summary.task_settings)
    return {short_name(effect.name): effect.finding for effect in effects}
