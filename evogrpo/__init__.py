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
    "ArchitectureLimits": "evogrpo.policies.control.architecture",
    "EvalCallback": "evogrpo.training.front.eval_callback",
    "EvolvableAlgorithm": "evogrpo.agents.algorithm",
    "FitnessConfig": "evogrpo.evolution.fitness_config",
    "Fixed": "evogrpo.evolution.strategies.controls.fixed",
    "GRPO": "evogrpo.agents.grpo",
    "GymnasiumGroups": "evogrpo.envs.control.gymnasium",
    "HuggingFaceGym": "evogrpo.envs.prompts.huggingface",
    "HyperparameterConfig": "evogrpo.config.search_space",
    "Hyperparameters": "evogrpo.config.hyperparameters",
    "MultiAgentGRPO": "evogrpo.agents.multi_agent",
    "MultiFrequency": "evogrpo.evolution.strategies.multi_frequency",
    "MultiTurnGym": "evogrpo.envs.prompts.conversations",
    "MutationOnly": "evogrpo.evolution.strategies.controls.mutation_only",
    "Narrowing": "evogrpo.evolution.strategies.narrowing",
    "NetworkConfig": "evogrpo.policies.control.architecture",
    "Objective": "evogrpo.config.objective",
    "Optimizer": "evogrpo.config.optimizer",
    "PettingZooGroups": "evogrpo.envs.control.joint.pettingzoo",
    "Population": "evogrpo.agents.population",
    "RLParameter": "evogrpo.config.search_space",
    "RandomSearch": "evogrpo.evolution.strategies.controls.random_search",
    "Replay": "evogrpo.evolution.strategies.replay",
    "SelectionOnly": "evogrpo.evolution.strategies.controls.selection_only",
    "SharedExperience": "evogrpo.evolution.shared_experience",
    "StepRewards": "evogrpo.envs.prompts.rewards.step_rewards",
    "Strategy": "evogrpo.evolution.strategies.strategy",
    "SuccessiveHalving": "evogrpo.evolution.strategies.successive_halving",
    "Tournament": "evogrpo.evolution.strategies.tournament",
    "TruncationPBT": "evogrpo.evolution.strategies.truncation_pbt",
    "best_hyperparameters": "evogrpo.history.survivors",
    "evolve": "evogrpo.training.evolve",
    "load_base": "evogrpo.policies.tokens.models",
    "read_run": "evogrpo.reporting.told.frames",
    "record_video": "evogrpo.training.video",
    "replay": "evogrpo.training.front.replaying",
    "report": "evogrpo.reporting.shown",
    "resume": "evogrpo.training.evolve",
    "train": "evogrpo.training.front.train",
}

if TYPE_CHECKING:
    from evogrpo.agents.algorithm import EvolvableAlgorithm
    from evogrpo.agents.grpo import GRPO
    from evogrpo.agents.multi_agent import MultiAgentGRPO
    from evogrpo.agents.population import Population
    from evogrpo.config.hyperparameters import Hyperparameters
    from evogrpo.config.objective import Objective
    from evogrpo.config.optimizer import Optimizer
    from evogrpo.config.search_space import HyperparameterConfig, RLParameter
    from evogrpo.envs.control.gymnasium import GymnasiumGroups
    from evogrpo.envs.control.joint.pettingzoo import PettingZooGroups
    from evogrpo.envs.prompts.conversations import MultiTurnGym
    from evogrpo.envs.prompts.huggingface import HuggingFaceGym
    from evogrpo.envs.prompts.rewards.step_rewards import StepRewards
    from evogrpo.evolution.fitness_config import FitnessConfig
    from evogrpo.evolution.shared_experience import SharedExperience
    from evogrpo.evolution.strategies.controls.fixed import Fixed
    from evogrpo.evolution.strategies.controls.mutation_only import MutationOnly
    from evogrpo.evolution.strategies.controls.random_search import RandomSearch
    from evogrpo.evolution.strategies.controls.selection_only import SelectionOnly
    from evogrpo.evolution.strategies.multi_frequency import MultiFrequency
    from evogrpo.evolution.strategies.narrowing import Narrowing
    from evogrpo.evolution.strategies.replay import Replay
    from evogrpo.evolution.strategies.strategy import Strategy
    from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving
    from evogrpo.evolution.strategies.tournament import Tournament
    from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT
    from evogrpo.history.survivors import best_hyperparameters
    from evogrpo.policies.control.architecture import ArchitectureLimits, NetworkConfig
    from evogrpo.policies.tokens.models import load_base
    from evogrpo.reporting.shown import report
    from evogrpo.reporting.told.frames import read_run
    from evogrpo.training.evolve import evolve, resume
    from evogrpo.training.front.eval_callback import EvalCallback
    from evogrpo.training.front.replaying import replay
    from evogrpo.training.front.train import train
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
