"""Evolve a population of GRPO agents that share one base model: the public names, each imported on first use."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# OpenMP threads that wait for each other spin 300,000 times before they sleep. On a busy machine they then keep cores
# that the other threads need (benchmarking/busy_machine.py). The variable is read when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__all__ = [
    "GRPO",
    "ArchitectureLimits",
    "EvalCallback",
    "EvolvableAlgorithm",
    "FitnessConfig",
    "Fixed",
    "GymnasiumGroups",
    "HuggingFaceGym",
    "HyperparameterConfig",
    "Hyperparameters",
    "MultiAgentGRPO",
    "MultiFrequency",
    "MultiTurnGym",
    "MutationOnly",
    "Narrowing",
    "NetworkConfig",
    "Objective",
    "Optimizer",
    "PettingZooGroups",
    "Population",
    "RLParameter",
    "RandomSearch",
    "Replay",
    "SelectionOnly",
    "SharedExperience",
    "StepRewards",
    "Strategy",
    "SuccessiveHalving",
    "Tournament",
    "TruncationPBT",
    "best_hyperparameters",
    "evolve",
    "load_base",
    "read_run",
    "record_video",
    "replay",
    "report",
    "resume",
    "train",
]

_HOMES = {
    "ArchitectureLimits": "evogrpo.models.networks.architecture",
    "EvalCallback": "evogrpo.training.eval_callback",
    "EvolvableAlgorithm": "evogrpo.algorithms.grpo",
    "FitnessConfig": "evogrpo.evolution.fitness",
    "Fixed": "evogrpo.evolution.strategies.baselines",
    "GRPO": "evogrpo.algorithms.grpo",
    "GymnasiumGroups": "evogrpo.envs.control.gymnasium_groups",
    "HuggingFaceGym": "evogrpo.envs.text.huggingface_gym",
    "HyperparameterConfig": "evogrpo.config.search_space",
    "Hyperparameters": "evogrpo.config.hyperparameters",
    "MultiAgentGRPO": "evogrpo.algorithms.multi_agent",
    "MultiFrequency": "evogrpo.evolution.strategies.multi_frequency",
    "MultiTurnGym": "evogrpo.envs.text.multi_turn_gym",
    "MutationOnly": "evogrpo.evolution.strategies.baselines",
    "Narrowing": "evogrpo.evolution.strategies.narrowing",
    "NetworkConfig": "evogrpo.models.networks.architecture",
    "Objective": "evogrpo.config.objective",
    "Optimizer": "evogrpo.config.optimizer",
    "PettingZooGroups": "evogrpo.envs.control.pettingzoo_groups",
    "Population": "evogrpo.algorithms.population",
    "RLParameter": "evogrpo.config.search_space",
    "RandomSearch": "evogrpo.evolution.strategies.baselines",
    "Replay": "evogrpo.evolution.strategies.replay",
    "SelectionOnly": "evogrpo.evolution.strategies.baselines",
    "SharedExperience": "evogrpo.evolution.shared_experience",
    "StepRewards": "evogrpo.envs.text.step_rewards",
    "Strategy": "evogrpo.evolution.strategies.strategy",
    "SuccessiveHalving": "evogrpo.evolution.strategies.successive_halving",
    "Tournament": "evogrpo.evolution.strategies.tournament",
    "TruncationPBT": "evogrpo.evolution.strategies.truncation_pbt",
    "best_hyperparameters": "evogrpo.reporting.descent",
    "evolve": "evogrpo.training.evolve",
    "load_base": "evogrpo.models.language.loading",
    "read_run": "evogrpo.reporting.data_frames",
    "record_video": "evogrpo.training.video",
    "replay": "evogrpo.training.replay",
    "report": "evogrpo.reporting.report",
    "resume": "evogrpo.training.evolve",
    "train": "evogrpo.training.train",
}

if TYPE_CHECKING:
    from evogrpo.algorithms.grpo import GRPO, EvolvableAlgorithm
    from evogrpo.algorithms.multi_agent import MultiAgentGRPO
    from evogrpo.algorithms.population import Population
    from evogrpo.config.hyperparameters import Hyperparameters
    from evogrpo.config.objective import Objective
    from evogrpo.config.optimizer import Optimizer
    from evogrpo.config.search_space import HyperparameterConfig, RLParameter
    from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
    from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
    from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
    from evogrpo.envs.text.multi_turn_gym import MultiTurnGym
    from evogrpo.envs.text.step_rewards import StepRewards
    from evogrpo.evolution.fitness import FitnessConfig
    from evogrpo.evolution.shared_experience import SharedExperience
    from evogrpo.evolution.strategies.baselines import Fixed, MutationOnly, RandomSearch, SelectionOnly
    from evogrpo.evolution.strategies.multi_frequency import MultiFrequency
    from evogrpo.evolution.strategies.narrowing import Narrowing
    from evogrpo.evolution.strategies.replay import Replay
    from evogrpo.evolution.strategies.strategy import Strategy
    from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
    from evogrpo.evolution.strategies.tournament import Tournament
    from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT
    from evogrpo.models.language.loading import load_base
    from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig
    from evogrpo.reporting.data_frames import read_run
    from evogrpo.reporting.descent import best_hyperparameters
    from evogrpo.reporting.report import report
    from evogrpo.training.eval_callback import EvalCallback
    from evogrpo.training.evolve import evolve, resume
    from evogrpo.training.replay import replay
    from evogrpo.training.train import train
    from evogrpo.training.video import record_video
else:  # hidden from type checkers, which would otherwise accept any misspelt name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
