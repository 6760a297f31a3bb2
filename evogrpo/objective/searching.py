"""What evolves where nobody says what: the widely searched hyperparameters that can matter to a run."""

from collections.abc import Collection, Mapping

from evogrpo.hyperparameters import SEARCHED, HyperparameterConfig, Hyperparameters, RLParameter, feasible_group_sizes
from evogrpo.objective.neutral import neutral
from evogrpo.objective.objective import Objective


def space_to_search(
    ranges: Mapping[str, RLParameter],
    objective: Objective,
    first: Hyperparameters,
    *,
    fixed: Collection[str],
    samples_per_step: int | None,
    rows_are_samples: bool,
    shared: bool = False,
) -> HyperparameterConfig:
    """Return the space to search: everything of `SEARCHED` that the caller has not fixed and that changes something.

    Args:
        ranges: Those of the members' kind.
        objective: What members minimise.
        first: The first member's.
        fixed: Names that the caller has given a value.
        samples_per_step: Samples of every member per learning step; None = unknown, so that group sizes stay.
        rows_are_samples: See `neutral`.
        shared: Likewise.
    """
    space = HyperparameterConfig(**{name: ranges[name] for name in SEARCHED if name not in fixed})
    space = fitting_groups(space, samples_per_step)
    samples = samples_per_step or 2
    idle = neutral(
        objective, [first], space, samples_per_step=samples, rows_are_samples=rows_are_samples, shared=shared
    )
    return HyperparameterConfig(**{name: parameter for name, parameter in space.items() if name not in idle})


def fitting_groups(space: HyperparameterConfig, samples_per_step: int | None) -> HyperparameterConfig:
    """Return a space without group_size where that leaves it no choice: its range holds one divisor at most."""
    if "group_size" not in space:
        return space
    low, high = space["group_size"].bounds
    sizes = () if samples_per_step is None else feasible_group_sizes(samples_per_step)
    if sum(low <= size <= high for size in sizes) > 1:
        return space
    return HyperparameterConfig(**{name: parameter for name, parameter in space.items() if name != "group_size"})
