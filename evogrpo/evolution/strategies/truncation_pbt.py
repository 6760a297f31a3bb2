"""Population-based training with truncation selection, as in Ray Tune (arXiv:1711.09846)."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from evogrpo.config.hyperparameters import Hyperparameters, is_integer
from evogrpo.config.search_space import HyperparameterConfig, RLParameter
from evogrpo.evolution.history import History
from evogrpo.evolution.mutation import (
    CheckedPerturbation,
    neighbour,
    other_choice,
    uniform_value,
)
from evogrpo.evolution.plan import Plan, Stateless
from evogrpo.evolution.selection import ranked_by_chance, truncation_selection
from evogrpo.validation import REAL, PositiveFloat, Share, settings


@settings
class TruncationPBT(Stateless):
    """Replace the worst members by clones of the best, with all hyperparameters perturbed.

    Matches Ray Tune's synchronous PopulationBasedTraining: every evolving hyperparameter of a clone
    is resampled or multiplied by one of `factors`; a value from a list moves to a neighbour. Unlike
    in Ray, values never leave their range and always change. Prefer `Tournament` if fitness is
    noisy or learning rates may be far off.

    Attributes:
        quantile: Share of members, in (0, 0.5], that is replaced after each generation by clones of
            as many of the best; rounded up.
        resample: Probability, in [0, 1], that a hyperparameter is resampled from its range instead
            of multiplied.
        factors: Two factors for numbers, chosen with equal probability: one above 1, one between 0
            and 1. The `factor` of an `RLParameter` takes precedence.
        mutation: Replaces resampling and factors: a `Mutation`, or your own callable.

    Raises:
        ValueError: If a setting is out of range.

    Source: Jaderberg et al., 2017 (arXiv:1711.09846); ray.tune.schedulers.PopulationBasedTraining.
    """

    mutates = True

    quantile: Annotated[float, Field(gt=0, le=0.5), REAL] = 0.25
    resample: Share = 0.25
    factors: tuple[PositiveFloat, PositiveFloat] = (1.2, 0.8)
    mutation: CheckedPerturbation | None = None

    def __post_init__(self) -> None:
        if not min(self.factors) < 1 < max(self.factors):
            raise ValueError(
                f"factors must be one above 1 and one between 0 and 1, got {list(self.factors)}."
            )

    def plan(self, history: History, rng: np.random.Generator) -> Plan:
        """Replace the worst and all failed members; an empty slot stays empty."""
        ranked = ranked_by_chance(history.last, rng)
        choices = truncation_selection(history.last, ranked, self.quantile, rng)
        mutation = self.mutation or self._explore
        return Plan.from_choices(history, choices, mutation=mutation, rng=rng)

    def _explore(
        self,
        hyperparameters: Hyperparameters,
        space: HyperparameterConfig,
        rng: np.random.Generator,
    ) -> Hyperparameters:
        """Perturb every hyperparameter, as Ray's `explore` does."""
        choose, direction, fraction = rng.random((3, len(space)))

        def new_value(column: int, name: str) -> Any:
            """Return the child's value of the hyperparameter with these random numbers."""
            quantile = float(fraction[column])
            if space[name].names:
                return other_choice(space[name], hyperparameters[name], quantile)
            value = hyperparameters.number(name)
            if choose[column] < self.resample:
                resampled = uniform_value(name, space[name], quantile)
                if resampled != value:  # otherwise multiply, as every value must change
                    return resampled
            factor = self.factors[int(direction[column] < 0.5)]
            return self._multiplied(space[name], value, factor, integer=is_integer(name))

        values: dict[str, Any] = {
            name: new_value(column, name) for column, name in enumerate(sorted(space))
        }
        return hyperparameters.with_values(values)

    def _multiplied(
        self, parameter: RLParameter, value: float, factor: float, *, integer: bool
    ) -> float:
        """Return the value multiplied by a factor, clipped to its range.

        A step away if that changes nothing.
        """
        low, high = parameter.bounds
        product = value * factor
        if parameter.choices is None and parameter.factor is None and low <= value <= high:
            bounded = min(max(product, low), high)
            if integer:
                bounded = round(bounded)
            if bounded != value:
                return bounded
        # A value in a list moves by one entry, an integer by 1. A value at 0 or at a bound moves
        # back into the range.
        if parameter.choices is not None or integer:
            size = 1e-9
        else:
            size = abs(factor - 1)
        return neighbour(parameter, value, upward=factor > 1, integer=integer, size=size)
