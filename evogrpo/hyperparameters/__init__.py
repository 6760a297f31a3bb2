"""The hyperparameters of one member and the space that evolution searches; numbers and names only."""

from evogrpo.hyperparameters.checks import finite_number, refuse_unknown, unknown_name_error, whole_number
from evogrpo.hyperparameters.space import (
    DEFAULT_FACTOR,
    HyperparameterConfig,
    RLParameter,
    Scale,
    check_group_size,
    common_samples,
    feasible_group_sizes,
)
from evogrpo.hyperparameters.values import (
    CATEGORIES,
    HYPERPARAMETER_NAMES,
    AdvantageType,
    Hyperparameters,
    LossType,
    Value,
    checked_value,
    is_categorical,
    is_integer,
)

__all__ = [
    "CATEGORIES",
    "DEFAULT_FACTOR",
    "HYPERPARAMETER_NAMES",
    "AdvantageType",
    "HyperparameterConfig",
    "Hyperparameters",
    "LossType",
    "RLParameter",
    "Scale",
    "Value",
    "check_group_size",
    "checked_value",
    "common_samples",
    "feasible_group_sizes",
    "finite_number",
    "is_categorical",
    "is_integer",
    "refuse_unknown",
    "unknown_name_error",
    "whole_number",
]
