"""Task types of small networks: one agent in a Gymnasium environment, or several in a PettingZoo environment."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from evogrpo.algorithms.grpo import GRPO, MultiAgentGRPO
from evogrpo.algorithms.population import Population
from evogrpo.config.agent import NETWORK_DEFAULTS, NetworkOptions, TeamOptions
from evogrpo.config.search_space import NETWORK_RANGES
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.members.devices import available_device
from evogrpo.members.networks.networks import ObservationEncoder
from evogrpo.members.requests import RolloutBatch
from evogrpo.records import DEFAULT_POLICY
from evogrpo.spaces import leaf_spaces
from evogrpo.text import count_text, pluralize, shown
from evogrpo.training.configuration.environment_tasks import (
    EnvironmentTask,
    ParallelTask,
)
from evogrpo.training.configuration.sections import Config
from evogrpo.training.forecast import (
    Forecast,
    MemoryNeed,
    gigabytes,
    possible_values,
    processes_per_device,
    samples_text,
    schedule_rows,
    sizes_text,
)
from evogrpo.training.run_dir import StoredRun
from evogrpo.training.run_state import RunState
from evogrpo.training.schedule import Schedule
from evogrpo.training.video import RecordedEpisode, record_video

COPIES = 3.5
"""Copies of each observation at the peak: while acting, by episode, by action, and by optimizer
step. Measured with images of 64 and 120 pixels a side. Evaluations do not make the last copy.
"""
ACTION_BYTES = 64  # an action, its log-probability, reward and position
SAVINGS = (
    "schedule.samples_per_step, population.size, schedule.validation_questions or"
    " task.max_episode_steps"
)

ONE_THREAD_PARAMETERS = 1 << 15
"""Maximum parameters of a member with which one thread is used. With 8 members a second thread
saves 9 % of the time at 4,500 parameters, 5 % at 17,000 and 25 % at 67,000.
"""


@dataclass(frozen=True, kw_only=True)
class PreparedNetworks:
    """Prepared run of small networks, for one agent or several.

    Attributes:
        config: The configuration.
        env: The environment.
        mapping: Maps agents to policies.
        device: Device of the members.
        parameters: Parameters of one founder.
        networks: Descriptions of its networks, without repetition.
    """

    config: Config
    env: GymnasiumGroups | PettingZooGroups
    mapping: PolicyMapping
    device: str
    parameters: int
    networks: tuple[str, ...]

    @property
    def one_thread(self) -> bool:
        """True if the networks are so small that a second thread is not worth its core."""
        images = any(
            ObservationEncoder(spec.observation_space).images
            for spec in self.mapping.specs.values()
        )
        return (
            torch.device(self.device).type == "cpu"
            and self.parameters <= ONE_THREAD_PARAMETERS
            and not images
        )

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Restore the members of a stored run."""
        return saved.restore(device=self.device)

    def facts(self) -> dict[str, str]:
        """Return facts about environment, agents, policies and members."""
        config = self.config
        env = self.env
        task = self.config.task
        specs = self.mapping.specs
        time_limit = ""
        in_all = ""
        if config.agent.normalise_observations:
            normalised = ", normalised"
        else:
            normalised = ""
        if env.uses_default_limit:
            time_limit = "; the environment sets no time limit; episodes are truncated after "
            time_limit += f"{env.max_episode_steps:,} steps (task.max_episode_steps)"
        if isinstance(env, PettingZooGroups):
            in_all = " in all"
            facts = {
                "environment": f"{task.label}: {sizes_text(env)} starts{time_limit}",
                "fitness": env.score_label,
                "agents": (
                    f"{len(env.agents)}; each learns from "
                    f"{'the sum of all rewards' if task.credit == 'team' else 'its own reward'}"
                    f"{'; its id is part of the observation' if task.agent_ids else ''}"
                ),
                "policies": "; ".join(
                    f"{policy} for {', '.join(spec.agents)} (observations"
                    f" {_space(spec.observation_space)}{normalised}, actions"
                    f" {_space(spec.action_space)})"
                    for policy, spec in specs.items()
                ),
            }
        else:
            each = "episode" if env.recreate_env else "parallel episode"
            if env.native:
                native = "vectorised natively"
            else:
                native = f"one environment per {each}"
            facts = {
                "environment": f"{task.label}, {native}: {sizes_text(env)} starts{time_limit}",
                "observations": f"{_space(env.observation_space)}{normalised}",
                "actions": _space(env.action_space),
            }
            if env.reseed_noise:
                facts["noise"] = "random after reset; each episode of a group has its own seed"
        if len(specs) == 1:
            networks = "a network"
        else:
            networks = f"{len(specs)} networks"
        return {
            **facts,
            "population": (
                f"{pluralize(config.population.size, 'member')}, each {networks}"
                f" ({'; '.join(self.networks)}, {count_text(self.parameters)} parameters{in_all})"
                f" on {self.device}"
            ),
        }

    def forecast(self) -> Forecast:
        """Return the costs of the run: upper bounds where episodes may end early or hyperparameters evolve."""
        # 1. Work: environment steps, and optimizer steps of each policy.
        config = self.config
        members = self.config.population.size
        longest = self.env.max_episode_steps
        per_member = longest * config.schedule.samples_per_step
        smallest = min(possible_values(config, "batch_size"))
        epochs = max(possible_values(config, "update_epochs"))
        optimizer = {
            policy: epochs * math.ceil(per_member * len(spec.agents) / smallest)
            for policy, spec in self.mapping.specs.items()
        }
        # 2. Words for one agent or for several.
        joint = networks = by_agent = ""
        steps = [f"at most {pluralize(most, 'step')}" for most in optimizer.values()]
        if DEFAULT_POLICY not in optimizer:
            actions = per_member * members * len(self.mapping.observation_spaces)
            joint = "joint "
            networks = "s"
            by_agent = f", {count_text(actions)} actions of single agents"
            steps = [
                f"at most {pluralize(most, 'step')} of {policy}"
                for policy, most in optimizer.items()
            ]
        # 3. Memory, and rows of the plan.
        need = _memory_need(self.mapping, self.env, config.schedule, members, self.parameters)
        rounds = schedule_rows(config, self.env, f"{joint}episodes")
        rows = {
            "samples": samples_text(config, f"{joint}episodes"),
            "groups": rounds["groups"],
            "environment": (
                f"at most {count_text(per_member * members)} {joint}steps per learning step for all"
                f" members (episodes of {longest} steps{by_agent})"
            ),
            "optimizer": f"{', '.join(steps)} per member and learning step",
            "steps": rounds["steps"],
            "parameters": (
                f"{count_text(self.parameters)} in each member's network{networks} at the start"
            ),
            "memory": (
                f"at most {gigabytes(need.size)} (an estimate, for episodes of full length): copies"
                " of the observations of a learning step or an evaluation; Python and its"
                " libraries come on top"
            ),
        }
        return Forecast(rows=rows, memory=need)

    @property
    def longest_sample(self) -> int:
        """Maximum number of steps of an episode."""
        return self.env.max_episode_steps

    def mean_length(self, sampled: RolloutBatch) -> float:
        """Return the mean number of steps of the sampled episodes."""
        return sum(sampled.tokens.values()) / len(sampled.member_ids)

    def population(self) -> Population:
        """Make the founders."""
        return _population(self.config, self.env, self.config.population.size, self.device)


@dataclass(frozen=True, kw_only=True)
class NetworkTask:
    """Task type of small networks.

    See `evogrpo.training.task_types.LanguageTask` for the attributes.

    Attributes:
        algorithm: Class of the agents.
    """

    agent = NetworkOptions
    model = None
    hyperparameters = NETWORK_DEFAULTS
    ranges = NETWORK_RANGES
    rows_are_samples = False
    completions = 0

    word: str
    tasks: Sequence[type[EnvironmentTask | ParallelTask]]
    algorithm: type[GRPO]

    def check(self, config: Config) -> None:
        """Raise ValueError for settings of language models."""
        key = f"where task.{config.task.key} is given"
        for name, default in {
            "model": None,
            "base_parts": 1,
            "precision": "auto",
            "sampler": None,
        }.items():
            if getattr(config, name) != default:
                raise ValueError(
                    f"{name} must be left out {key}, as small networks have no base model, got "
                    f"{shown(getattr(config, name))}."
                )
        if config.logging.completions:
            raise ValueError(
                f"logging.completions must be 0 {key}, got {config.logging.completions}."
            )

    def prepare(self, config: Config) -> PreparedNetworks:
        """Check a configuration against the environment and the device."""
        return prepare_in(config, config.task.environment(seed=config.task_seed))

    def memory_need(self, population: Population, env: Any, schedule: Schedule) -> MemoryNeed:
        """Estimate the memory from the environment's spaces and its maximum number of steps."""
        members: Any = population.members
        parameters = _parameters(members.state(0))
        return _memory_need(members.mapping, env, schedule, len(population), parameters)

    def record_videos(
        self, config: Config, best: Path, folder: Path, episodes: int
    ) -> tuple[RecordedEpisode, ...]:
        """Record videos of the best member on the first test episodes."""
        with closing(config.task.environment(seed=config.task_seed)) as env:
            if episodes > (size := env.size("test")):
                raise ValueError(
                    f"episodes must be at most {size}, the size of the test split, got {episodes}."
                )
            seeds = [env.reset_seed("test", start) for start in range(episodes)]
            agent = self.algorithm.load(best)
            return record_video(agent, env, folder / f"member-{agent.index}.mp4", seeds=seeds)

    def usage(self, best: Path) -> str:
        """Return the expression that acts with the best member."""
        if self.algorithm is GRPO:
            seen = "observation"
        else:
            seen = "observations"
        return f"evogrpo.{self.algorithm.__name__}.load({str(best)!r}).predict({seen})"

    def next_command(self, run_dir: Path) -> tuple[str, tuple[str | Path, ...]]:
        """Return the purpose and the words of the command to print after a run: a video of the best member."""
        return "watch it", ("video", run_dir)


def prepare_in(config: Config, env: GymnasiumGroups | PettingZooGroups) -> PreparedNetworks:
    """Check a configuration against the device and an environment.

    Raises:
        ValueError: If the device is not available, or a setting is incompatible with the
            environment.
    """
    if config.device is None:
        device = "cpu"
    else:
        device = available_device(config.device)
    example: Any = _population(config, env, 1, "cpu").members
    return PreparedNetworks(
        config=config,
        env=env,
        mapping=example.mapping,
        device=device,
        parameters=_parameters(example.state(0)),
        networks=tuple(
            dict.fromkeys(policy.bank.description(0) for policy in example.policies.values())
        ),
    )


def _memory_need(
    mapping: PolicyMapping,
    env: GymnasiumGroups | PettingZooGroups,
    schedule: Schedule,
    members: int,
    parameters: int,
) -> MemoryNeed:
    """Estimate the peak memory, for episodes of full length; `parameters` are those of one member."""
    longest = env.max_episode_steps
    samples = schedule.samples_per_step
    observation_bytes = sum(
        np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape or ())
        for space in mapping.observation_spaces.values()
        for leaf in leaf_spaces(space)
    )
    validation = schedule.questions("validation", env)
    episodes = members * max(COPIES * samples, (COPIES - 1) * validation)
    # Weights, a gradient, two moments, the copy of the best, and a copy of weights and moments
    # before a learning step.
    return MemoryNeed(
        size=int(episodes * longest * (observation_bytes + ACTION_BYTES))
        + 8 * 4 * members * parameters,
        device="cpu",
        savings=SAVINGS,
        processes=processes_per_device("cpu"),
    )


def _population(
    config: Config, env: GymnasiumGroups | PettingZooGroups, size: int, device: str
) -> Population:
    """Create the founders: agents for a Gymnasium environment, or teams for a PettingZoo environment."""
    options = {"device": device, **vars(config.agent), **config.founder_options()}
    if isinstance(env, GymnasiumGroups):
        return GRPO.population(size, env.observation_space, env.action_space, **options)
    own = {each.name: getattr(config.task, each.name) for each in fields(TeamOptions)}
    return MultiAgentGRPO.population(
        size, env.observation_spaces, env.action_spaces, **own, **options
    )


def _parameters(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of parameters of all networks of a member."""
    return sum(part.numel() for name, part in state.items() if name.rpartition("/")[2] == "weights")


def _space(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Box):
        return f"Box{space.shape}"
    return str(space)
