"""Response of fitness to a hyperparameter: gains by value, and explained share of their variance."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evogrpo.config.hyperparameters import Value
from evogrpo.randomness import generator
from evogrpo.reporting.lineage import fitness_before, member_histories
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.summary import RunSummary

MIN_MEMBERS, MIN_GAINS = 6, 12
"""Minimum numbers for estimating an explained share."""
_MAX_LEVELS = 8
_SHUFFLES = 200
_MAX_JACKKNIFE = 200  # with more members, the jackknife leaves out several at a time


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Gain of one member in one generation, relative to the generation's mean.

    Attributes:
        index: Index of the member.
        generation: The generation.
        value: Its value of the hyperparameter.
        gain: Rise of its fitness in the generation, minus the mean rise of all members.
    """

    index: int
    generation: int
    value: float | str
    gain: float


@dataclass(frozen=True, kw_only=True)
class Level:
    """Gains of a group of close values.

    Attributes:
        low: Smallest value, or the name.
        high: Largest value, or the same name.
        mean: Mean gain, in the unit of fitness.
        standard_error: Standard error of the mean, clustered by member; None for one member.
        members: Number of members.
    """

    low: float | str
    high: float | str
    mean: float
    standard_error: float | None
    members: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """Share of the variance of gains that a hyperparameter explains.

    Attributes:
        share: Fraction; unbiased, so it may be slightly negative.
        standard_error: Jackknife standard error over members.
        chance: 95 % quantile over permutations of the members' values.
    """

    share: float
    standard_error: float
    chance: float

    @property
    def significant(self) -> bool:
        """True if the share exceeds its 95 % permutation quantile."""
        return self.share > self.chance


@dataclass(frozen=True, kw_only=True)
class Response:
    """Dependence of gains on one hyperparameter.

    Attributes:
        name: The hyperparameter.
        gains: All gains, by generation and index.
        levels: Ascending by value; names in order of their first member.
        share: Explained share; None with too few gains or equal values.
    """

    name: str
    gains: tuple[Gain, ...]
    levels: tuple[Level, ...]
    share: Share | None

    @property
    def members(self) -> int:
        """Number of members with a gain."""
        return len({gain.index for gain in self.gains})


def responses(summary: RunSummary) -> tuple[Response, ...]:
    """Return the response to every evolving hyperparameter.

    A founder starts with the fitness of the untrained baseline, a child with its parent's before its birth. Generations
    with fewer than two gains are left out.

    Returns:
        One response per hyperparameter, in descending order of explained share; those without a share last.
    """
    gains = _gains(summary)
    unordered = [response(name, _with_values(gains, name)) for name in summary.evolvable]
    return tuple(
        sorted(unordered, key=lambda item: -math.inf if item.share is None else item.share.share, reverse=True)
    )


def response(name: str, gains: Sequence[Gain]) -> Response:
    """Fit gains by one mean per level of values, and estimate the explained share.

    The share is epsilon squared, 1 - (S_w / (n - k)) / (S_t / (n - 1)): S_t is the sum of squares of all n gains about
    their mean and S_w that about the means of their k levels. Gains of one member are dependent, so the jackknife and
    the permutations act on whole members. Effects of hyperparameters that change together cannot be separated.

    Args:
        name: The hyperparameter.
        gains: Gains relative to the generation's mean.

    Returns:
        The response.

    Source: Kelley, An unbiased correlation ratio measure (PNAS 21, 1935); the jackknife of clusters.
    """
    ordered = tuple(sorted(gains, key=lambda gain: (gain.generation, gain.index)))
    levels = _levels(ordered)
    if not levels:
        return Response(name=name, gains=ordered, levels=(), share=None)
    # A member whose value changed counts as two.
    owners: dict[Hashable, int] = {}
    owner = np.array([owners.setdefault((gain.index, gain.value), len(owners)) for gain in ordered])
    level_of_member = np.empty(len(owners), dtype=np.int64)
    level_of_member[owner] = [levels[gain.value] for gain in ordered]
    sums = _MemberSums.of(np.array([gain.gain for gain in ordered]), owner)
    share = None
    if (
        len(owners) >= MIN_MEMBERS
        and len(ordered) >= max(MIN_GAINS, level_of_member.max() + 3)
        and level_of_member.max() > 0
    ):
        share = _share(sums, level_of_member)
    return Response(
        name=name, gains=ordered, levels=_describe_levels(ordered, levels, sums, level_of_member), share=share
    )


@dataclass(frozen=True)
class _MemberSums:
    """Number, sum and sum of squares of each member's gains."""

    counts: NDArray[np.float64]
    sums: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, gains: NDArray[np.float64], owner: NDArray[np.int64]) -> "_MemberSums":
        weights = (np.ones_like(gains), gains, gains * gains)
        return cls(*(np.bincount(owner, each).astype(np.float64) for each in weights))

    def explained(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return epsilon squared for every row of levels (one per member, -1 = left out); 0 if gains are constant."""
        included = places >= 0
        count, total_sum = included @ self.counts, included @ self.sums
        squares = included @ self.squares
        between, levels = np.zeros(len(places)), np.zeros(len(places))
        for level in range(int(places.max()) + 1):
            in_level = places == level
            counts = in_level @ self.counts
            between += np.where(counts > 0, (in_level @ self.sums) ** 2 / np.maximum(counts, 1), 0.0)
            levels += counts > 0
        total, degrees = squares - total_sum**2 / count, count - levels
        within = np.maximum(squares - between, 0.0)
        varies = (total > 1e-12 * squares) & (degrees > 0)
        share = 1 - (within / np.where(varies, degrees, 1)) * (count - 1) / np.where(varies, total, 1)
        return np.where(varies, share, 0.0)


def _share(sums: _MemberSums, levels: NDArray[np.int64]) -> Share:
    members = len(levels)
    rng = generator(0, "shuffled hyperparameters", members)
    shuffled = np.stack([rng.permutation(levels) for _ in range(_SHUFFLES)])
    groups = min(members, _MAX_JACKKNIFE)
    group = np.arange(members) % groups
    jackknife = sums.explained(np.where(group == np.arange(groups)[:, None], -1, levels))
    return Share(
        share=float(sums.explained(levels[None])[0]),
        standard_error=math.sqrt((groups - 1) / groups * float(((jackknife - jackknife.mean()) ** 2).sum())),
        chance=float(np.quantile(sums.explained(shuffled), 0.95)),
    )


def _levels(gains: Sequence[Gain]) -> Mapping[float | str, int]:
    """Return the level of every value: one each for few values, else quantile groups."""
    values = {(gain.index, gain.value): gain.value for gain in gains}.values()
    names = list(dict.fromkeys(value for value in values if isinstance(value, str)))
    numbers = sorted(value for value in values if not isinstance(value, str))
    distinct = list(dict.fromkeys(numbers))
    # Each level should have about two members.
    if len(distinct) > 1 and len(distinct) > min(_MAX_LEVELS, len(numbers) // 2):
        count = 2 if len(numbers) < 9 else 3 if len(numbers) < 20 else 4 if len(numbers) < 40 else 5
        edges = dict.fromkeys(numbers[len(numbers) * cut // count] for cut in range(1, count))
        starts = [edge for edge in edges if edge > distinct[0]]
        levels: dict[float | str, int] = {value: sum(value >= edge for edge in starts) for value in distinct}
    else:
        levels = {value: number for number, value in enumerate(distinct)}
    return levels | {name: len(set(levels.values())) + number for number, name in enumerate(names)}


def _describe_levels(
    gains: Sequence[Gain], levels: Mapping[float | str, int], sums: _MemberSums, level_of_member: NDArray[np.int64]
) -> tuple[Level, ...]:
    described = []
    for number in sorted(set(levels.values())):
        values = [value for value in dict.fromkeys(gain.value for gain in gains) if levels[value] == number]
        in_level = level_of_member == number
        count, total = float(sums.counts[in_level].sum()), float(sums.sums[in_level].sum())
        mean, members = total / count, int(in_level.sum())
        # Linearised error of a ratio of sums over members.
        residuals = sums.sums[in_level] - mean * sums.counts[in_level]
        error = math.sqrt(members / (members - 1) * float((residuals**2).sum())) / count if members > 1 else None
        described.append(
            Level(low=_least(values), high=_greatest(values), mean=mean, standard_error=error, members=members)
        )
    return tuple(described)


def _least(values: Sequence[float | str]) -> float | str:
    return values[0] if isinstance(values[0], str) else min(value for value in values if not isinstance(value, str))


def _greatest(values: Sequence[float | str]) -> float | str:
    return values[0] if isinstance(values[0], str) else max(value for value in values if not isinstance(value, str))


def _gains(summary: RunSummary) -> list[tuple[MemberReport, float]]:
    """Return every result with its gain relative to the generation's mean."""
    start_fitness = fitness_before(summary)
    by_generation: dict[int, list[tuple[MemberReport, float]]] = {}
    for history in member_histories(summary):
        for result in history.results:
            start = start_fitness[result.index, result.generation]
            if result.fitness is not None and start is not None:
                by_generation.setdefault(result.generation, []).append((result, result.fitness - start))
    gains = []
    for _, rows in sorted(by_generation.items()):
        mean = math.fsum(gain for _, gain in rows) / len(rows)
        gains += [(result, gain - mean) for result, gain in rows if len(rows) > 1]
    return gains


def _with_values(gains: Sequence[tuple[MemberReport, float]], name: str) -> list[Gain]:
    valued = []
    for result, gain in gains:
        value: Value = getattr(result.hyperparameters, name)
        if value is not None:
            valued.append(Gain(index=result.index, generation=result.generation, value=value, gain=gain))
    return valued
