"""The hyperparameters of one member and the space that evolution searches; numbers and names only."""

from evogrpo.config.loss_types import AdvantageType, LossType
from evogrpo.hyperparameters.checks import (
    MOST_COUNTED,
    MOST_SEED,
    finite_number,
    flag,
    instance,
    refuse_unknown,
    single_number,
    unknown_name_error,
    whole_between,
    whole_number,
)
from evogrpo.hyperparameters.named import answering
from evogrpo.hyperparameters.parameter import RLParameter, Scale
from evogrpo.hyperparameters.ranges import LANGUAGE_RANGES, NETWORK_RANGES, SEARCHED
from evogrpo.hyperparameters.space import (
    MOST_MEMBERS,
    MOST_SAMPLES,
    HyperparameterConfig,
    check_group_size,
    common_samples,
    feasible_group_sizes,
)
from evogrpo.hyperparameters.values import (
    CATEGORIES,
    HYPERPARAMETER_NAMES,
    Hyperparameters,
    Value,
    is_categorical,
    is_integer,
)

__all__ = [
    "CATEGORIES",
    "HYPERPARAMETER_NAMES",
    "LANGUAGE_RANGES",
    "MOST_COUNTED",
    "MOST_MEMBERS",
    "MOST_SAMPLES",
    "MOST_SEED",
    "NETWORK_RANGES",
    "SEARCHED",
    "AdvantageType",
    "HyperparameterConfig",
    "Hyperparameters",
    "LossType",
    "RLParameter",
    "Scale",
    "Value",
    "answering",
    "check_group_size",
    "common_samples",
    "feasible_group_sizes",
    "finite_number",
    "flag",
    "instance",
    "is_categorical",
    "is_integer",
    "refuse_unknown",
    "single_number",
    "unknown_name_error",
    "whole_between",
    "whole_number",
]
