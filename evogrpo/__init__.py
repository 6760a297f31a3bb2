"""Evolve a population of GRPO agents that share one base model: the public names, each imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "GRPO",
    "HuggingFaceGym",
    "HyperparameterConfig",
    "Hyperparameters",
    "Objective",
    "Population",
    "RLParameter",
    "Tournament",
    "evolve",
    "resume",
]

_HOMES = {
    "GRPO": "evogrpo.agents.grpo",
    "HuggingFaceGym": "evogrpo.envs.huggingface",
    "HyperparameterConfig": "evogrpo.hyperparameters",
    "Hyperparameters": "evogrpo.hyperparameters",
    "Objective": "evogrpo.objective",
    "Population": "evogrpo.agents.population",
    "RLParameter": "evogrpo.hyperparameters",
    "Tournament": "evogrpo.evolution.strategies",
    "evolve": "evogrpo.training.evolve",
    "resume": "evogrpo.training.evolve",
}

if TYPE_CHECKING:
    from evogrpo.agents.grpo import GRPO
    from evogrpo.agents.population import Population
    from evogrpo.envs.huggingface import HuggingFaceGym
    from evogrpo.evolution.strategies import Tournament
    from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, RLParameter
    from evogrpo.objective import Objective
    from evogrpo.training.evolve import evolve, resume
else:  # hidden from type checkers, which would otherwise accept any misspelt name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
