"""Train and evolve populations of GRPO agents that share one base model. Public names are imported on first use."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Waiting OpenMP threads spin 300,000 times before they sleep, which blocks cores that other threads need on a busy
# machine. Beside 4 busy processes, a step took 3.6 s, with this limit 1.4 s. libgomp reads it when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__all__ = [
    "GRPO", "ArchitectureLimits", "Callback", "EnvironmentGym", "EvalCallback", "EvolvableAlgorithm", "FitnessConfig",
    "Fixed", "GymnasiumGroups", "HuggingFaceGym", "HyperparameterConfig", "Hyperparameters", "MultiAgentGRPO",
    "MultiFrequency", "MultiTurnGym", "MutationOnly", "Narrowing", "NetworkConfig", "Objective", "Optimizer",
    "PettingZooGroups", "Population", "RLParameter", "RandomSearch", "Replay", "SelectionOnly", "SharedExperience",
    "StepRewards", "Strategy", "SuccessiveHalving", "Tournament", "TruncationPBT", "VLLMSampler",
    "best_hyperparameters", "evolve", "load_base", "read_run", "record_video", "replay", "report", "resume", "train",
]  # fmt: skip

# Public names by the module that defines them.
_MODULES = {
    "algorithms.grpo": ("GRPO", "EvolvableAlgorithm", "MultiAgentGRPO"),
    "algorithms.population": ("Population",),
    "config.hyperparameters": ("Hyperparameters", "Optimizer"),
    "config.objective": ("Objective",),
    "config.search_space": ("HyperparameterConfig", "RLParameter"),
    "envs.control.gymnasium_groups": ("GymnasiumGroups",),
    "envs.control.pettingzoo_groups": ("PettingZooGroups",),
    "envs.text.environment_gym": ("EnvironmentGym",),
    "envs.text.huggingface_gym": ("HuggingFaceGym",),
    "envs.text.multi_turn_gym": ("MultiTurnGym",),
    "envs.text.reward_functions": ("StepRewards",),
    "evolution.fitness": ("FitnessConfig",),
    "evolution.shared_experience": ("SharedExperience",),
    "evolution.strategies.baselines": ("Fixed", "MutationOnly", "RandomSearch", "SelectionOnly"),
    "evolution.strategies.multi_frequency": ("MultiFrequency",),
    "evolution.strategies.narrowing": ("Narrowing",),
    "evolution.strategies.replay": ("Replay",),
    "evolution.plan": ("Strategy",),
    "evolution.strategies.successive_halving": ("SuccessiveHalving",),
    "evolution.strategies.tournament": ("Tournament",),
    "evolution.strategies.truncation_pbt": ("TruncationPBT",),
    "models.language.loading": ("load_base",),
    "models.language.vllm_sampler": ("VLLMSampler",),
    "models.networks.architecture": ("ArchitectureLimits", "NetworkConfig"),
    "reporting.exports": ("read_run",),
    "reporting.lineage": ("best_hyperparameters",),
    "reporting.report": ("report",),
    "training.trainer": ("Callback",),
    "training.evolve": ("evolve", "resume"),
    "training.replay": ("replay",),
    "training.train": ("EvalCallback", "train"),
    "training.video": ("record_video",),
}
_MODULE_OF = {name: f"evogrpo.{module}" for module, names in _MODULES.items() for name in names}

if TYPE_CHECKING:
    from evogrpo.algorithms.grpo import GRPO, EvolvableAlgorithm, MultiAgentGRPO
    from evogrpo.algorithms.population import Population
    from evogrpo.config.hyperparameters import Hyperparameters, Optimizer
    from evogrpo.config.objective import Objective
    from evogrpo.config.search_space import HyperparameterConfig, RLParameter
    from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
    from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
    from evogrpo.envs.text.environment_gym import EnvironmentGym
    from evogrpo.envs.text.huggingface_gym import HuggingFaceGym
    from evogrpo.envs.text.multi_turn_gym import MultiTurnGym
    from evogrpo.envs.text.reward_functions import StepRewards
    from evogrpo.evolution.fitness import FitnessConfig
    from evogrpo.evolution.plan import Strategy
    from evogrpo.evolution.shared_experience import SharedExperience
    from evogrpo.evolution.strategies.baselines import Fixed, MutationOnly, RandomSearch, SelectionOnly
    from evogrpo.evolution.strategies.multi_frequency import MultiFrequency
    from evogrpo.evolution.strategies.narrowing import Narrowing
    from evogrpo.evolution.strategies.replay import Replay
    from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
    from evogrpo.evolution.strategies.tournament import Tournament
    from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT
    from evogrpo.models.language.loading import load_base
    from evogrpo.models.language.vllm_sampler import VLLMSampler
    from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig
    from evogrpo.reporting.exports import read_run
    from evogrpo.reporting.lineage import best_hyperparameters
    from evogrpo.reporting.report import report
    from evogrpo.training.evolve import evolve, resume
    from evogrpo.training.replay import replay
    from evogrpo.training.train import EvalCallback, train
    from evogrpo.training.trainer import Callback
    from evogrpo.training.video import record_video
else:  # hidden from type checkers, which would otherwise accept any misspelt name

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
