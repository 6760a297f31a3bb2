"""Public names and the modules that define them, read by type checkers and by `__init__.py`."""

from evogrpo.algorithms.grpo import GRPO as GRPO
from evogrpo.algorithms.grpo import EvolvableAlgorithm as EvolvableAlgorithm
from evogrpo.algorithms.multi_agent import MultiAgentGRPO as MultiAgentGRPO
from evogrpo.algorithms.population import Population as Population
from evogrpo.chat_templates import TOOLS_TEMPLATE as TOOLS_TEMPLATE
from evogrpo.compat.roll import from_roll as from_roll
from evogrpo.compat.trl import from_trl as from_trl
from evogrpo.config.hyperparameters import Hyperparameters as Hyperparameters
from evogrpo.config.network import ArchitectureLimits as ArchitectureLimits
from evogrpo.config.network import NetworkConfig as NetworkConfig
from evogrpo.config.objective import Objective as Objective
from evogrpo.config.optimizer import Optimizer as Optimizer
from evogrpo.config.search_space import HyperparameterConfig as HyperparameterConfig
from evogrpo.config.search_space import RLParameter as RLParameter
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups as GymnasiumGroups
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups as PettingZooGroups
from evogrpo.envs.text.environment_gym import EnvironmentGym as EnvironmentGym
from evogrpo.envs.text.huggingface_gym import HuggingFaceGym as HuggingFaceGym
from evogrpo.envs.text.multi_turn_gym import MultiTurnGym as MultiTurnGym
from evogrpo.envs.text.reward_functions import StepRewards as StepRewards
from evogrpo.evolution.fitness import FitnessConfig as FitnessConfig
from evogrpo.evolution.plan import Strategy as Strategy
from evogrpo.evolution.strategies.baselines import Fixed as Fixed
from evogrpo.evolution.strategies.baselines import MutationOnly as MutationOnly
from evogrpo.evolution.strategies.baselines import RandomSearch as RandomSearch
from evogrpo.evolution.strategies.baselines import SelectionOnly as SelectionOnly
from evogrpo.evolution.strategies.narrowing import Narrowing as Narrowing
from evogrpo.evolution.strategies.replay import Replay as Replay
from evogrpo.evolution.strategies.successive_halving import SuccessiveHalving as SuccessiveHalving
from evogrpo.evolution.strategies.tournament import Tournament as Tournament
from evogrpo.evolution.strategies.truncation_pbt import TruncationPBT as TruncationPBT
from evogrpo.members.language.loading import load_base as load_base
from evogrpo.members.language.vllm_colocate import ColocatedVLLMSampler as ColocatedVLLMSampler
from evogrpo.members.language.vllm_sampler import VLLMSampler as VLLMSampler
from evogrpo.reporting.data_frames import read_run as read_run
from evogrpo.reporting.lineage import best_hyperparameters as best_hyperparameters
from evogrpo.reporting.report import report as report
from evogrpo.training.callbacks import Callback as Callback
from evogrpo.training.evolve import evolve as evolve
from evogrpo.training.evolve import resume as resume
from evogrpo.training.replay import replay as replay
from evogrpo.training.train import train as train
from evogrpo.training.video import record_video as record_video

__version__: str
