"""Task types of small networks: one agent in Gymnasium, or several in PettingZoo environments."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
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
    sizes_text,
    work_rows,
)
from evogrpo.training.run_dir import StoredRun
from evogrpo.training.run_state import RunState
from evogrpo.training.schedule import Schedule, check_task
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
"""Largest number of parameters per member for which torch uses one thread.

With 8 members a second thread saves 9 % of the time at 4,500 parameters, 5 % at 17,000 and 25 % at
67,000.
"""


@dataclass(frozen=True, kw_only=True)
class NetworkTask:
    """Checked task of small networks, for one agent or several.

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
        if torch.device(self.device).type != "cpu" or self.parameters > ONE_THREAD_PARAMETERS:
            return False
        specs = self.mapping.specs.values()
        return not any(ObservationEncoder(spec.observation_space).images for spec in specs)

    def facts(self) -> dict[str, str]:
        """Return facts about environment, agents, policies and members."""
        config = self.config
        env = self.env
        specs = self.mapping.specs
        normalised = ", normalised" if config.agent.normalise_observations else ""
        starts = f"{sizes_text(env)} starts"
        if env.uses_default_limit:
            starts += (
                "; the environment sets no time limit; episodes are truncated after"
                f" {env.max_episode_steps:,} steps (task.max_episode_steps)"
            )
        facts = {}
        in_all = ""
        # 1. The environment of several agents, or of one.
        if isinstance(env, PettingZooGroups):
            in_all = " in all"
            team = config.task.credit == "team"
            agents = "the sum of all rewards" if team else "its own reward"
            if config.task.agent_ids:
                agents += "; its id is part of the observation"
            # Several agents: rows on the agents and on their policies.
            policies = []
            for policy, spec in specs.items():
                observed = f"observations {_space(spec.observation_space)}{normalised}"
                acted = f"actions {_space(spec.action_space)}"
                policies.append(f"{policy} for {', '.join(spec.agents)} ({observed}, {acted})")
            facts["environment"] = f"{config.task.label}: {starts}"
            facts["fitness"] = env.score_label
            facts["agents"] = f"{len(env.agents)}; each learns from {agents}"
            facts["policies"] = "; ".join(policies)
        else:
            # A single agent.
            played = "one environment per parallel episode"
            if env.native:
                played = "vectorised natively"
            elif env.recreate_env:
                played = "one environment per episode"
            facts["environment"] = f"{config.task.label}, {played}: {starts}"
            facts["observations"] = f"{_space(env.observation_space)}{normalised}"
            facts["actions"] = _space(env.action_space)
            if env.reseed_noise:
                facts["noise"] = "random after reset; each episode of a group has its own seed"
        # 2. Training rewards and options of reset, where they are configured.
        if not env.components.is_default:
            terms = [f"{weight:g} {name}" for name, weight in env.components.weights.items()]
            facts["training reward"] = (
                f"{' + '.join(terms)}; held-out episodes have the environment's reward alone"
            )
        if env.settings:
            options = [f"{name} {shown(value)}" for name, value in env.settings.items()]
            facts["settings"] = f"{', '.join(options)}, passed to reset"
        # 3. The members.
        networks = "a network" if len(specs) == 1 else f"{len(specs)} networks"
        facts["population"] = (
            f"{pluralize(config.population.size, 'member')}, each {networks}"
            f" ({'; '.join(self.networks)}, {count_text(self.parameters)} parameters{in_all})"
            f" on {self.device}"
        )
        return facts

    @cached_property
    def forecast(self) -> Forecast:
        """Costs of the run.

        They are upper bounds where episodes may end early or hyperparameters evolve.
        """
        config = self.config
        members = config.population.size
        longest = self.env.max_episode_steps
        # 1. Environment steps, and optimizer steps of each policy.
        per_member = longest * config.schedule.samples_per_step
        # The smallest batches and the most epochs give the most optimizer steps.
        smallest = min(possible_values(config, "batch_size"))
        epochs = max(possible_values(config, "update_epochs"))
        one_agent = DEFAULT_POLICY in self.mapping.specs
        optimizer = []
        for policy, spec in self.mapping.specs.items():
            updates = math.ceil(per_member * len(spec.agents) / smallest)
            most = epochs * updates
            of_policy = "" if one_agent else f" of {policy}"
            optimizer.append(f"at most {pluralize(most, 'step')}{of_policy}")
        joint = by_agent = ""
        if not one_agent:
            actions = per_member * members * len(self.mapping.observation_spaces)
            joint = "joint "
            by_agent = f", {count_text(actions)} actions of single agents"
        # 2. Memory, and rows of the plan.
        need = _memory_need(self.mapping, self.env, config.schedule, members, self.parameters)
        rows = {
            **work_rows(config, self.env, f"{joint}episodes"),
            "environment": (
                f"at most {count_text(per_member * members)} {joint}steps per learning step for all"
                f" members (episodes of {longest} steps{by_agent})"
            ),
            "optimizer": f"{', '.join(optimizer)} per member and learning step",
            "memory": (
                f"at most {gigabytes(need.size)} (an estimate, for episodes of full length): copies"
                " of the observations of a learning step or an evaluation; Python and its"
                " libraries come on top"
            ),
        }
        steps = per_member * members
        return Forecast(
            rows=rows, memory=need, step={"timesteps": steps, "tokens": (1 + epochs) * steps}
        )

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

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Restore the members of a stored run."""
        return saved.restore(device=self.device)


@dataclass(frozen=True, kw_only=True)
class NetworkTaskType:
    """Task type of small networks.

    See `evogrpo.training.task_types.LanguageTaskType` for the attributes.

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
        unused = {"model": None, "base_parts": 1, "precision": "auto", "sampler": None}
        for name, default in unused.items():
            value = getattr(config, name)
            if value != default:
                raise ValueError(
                    f"{name} must be left out {key}, as small networks have no base model, got"
                    f" {shown(value)}."
                )
        if config.logging.completions:
            raise ValueError(
                f"logging.completions must be 0 {key}, got {config.logging.completions}."
            )

    def build(
        self, config: Config, env: GymnasiumGroups | PettingZooGroups | None = None
    ) -> NetworkTask:
        """Check a configuration against the device and the environment.

        Args:
            config: The configuration.
            env: Environment to use instead of the configured one.

        Raises:
            ValueError: If the device is not available, the environment cannot be created, or a
                setting is incompatible with it.
        """
        if env is None:
            env = config.task.environment(seed=config.task_seed)
        assert env is not None
        check_task(config, env)
        device = "cpu" if config.device is None else available_device(config.device)
        # A population of one member shows whether the settings fit, and the size of a network.
        example: Any = _population(config, env, 1, "cpu").members
        networks = [policy.bank.description(0) for policy in example.policies.values()]
        return NetworkTask(
            config=config,
            env=env,
            mapping=example.mapping,
            device=device,
            parameters=_parameters(example.state(0)),
            networks=tuple(dict.fromkeys(networks)),
        )

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
            size = env.size("test")
            if episodes > size:
                raise ValueError(
                    f"episodes must be at most {size}, the size of the test split, got {episodes}."
                )
            seeds = [env.reset_seed("test", start) for start in range(episodes)]
            agent = self.algorithm.load(best)
            path = folder / f"member-{agent.index}.mp4"
            return record_video(agent, env, path, seeds=seeds)

    def usage(self, best: Path) -> str:
        """Return the expression that acts with the best member."""
        seen = "observation" if self.algorithm is GRPO else "observations"
        return f"evogrpo.{self.algorithm.__name__}.load({str(best)!r}).predict({seen})"

    def next_command(self, run_dir: Path) -> tuple[str, tuple[str | Path, ...]]:
        """Return purpose and words of the command to print after a run: a video of the best."""
        return "watch it", ("video", run_dir)


def _memory_need(
    mapping: PolicyMapping,
    env: GymnasiumGroups | PettingZooGroups,
    schedule: Schedule,
    members: int,
    parameters: int,
) -> MemoryNeed:
    """Estimate the peak memory for episodes of full length.

    `parameters` are those of one member.
    """
    observation_bytes = 0
    for space in mapping.observation_spaces.values():
        for leaf in leaf_spaces(space):
            entries = math.prod(leaf.shape or ())
            observation_bytes += np.dtype(leaf.dtype).itemsize * entries
    validation = schedule.questions("validation", env)
    training = COPIES * schedule.samples_per_step
    episodes = members * max(training, (COPIES - 1) * validation)
    steps = episodes * env.max_episode_steps
    # Weights, a gradient, two moments, the copy of the best, and a copy of weights and moments
    # before a learning step.
    train_states = 8 * 4 * members * parameters
    return MemoryNeed(
        size=int(steps * (observation_bytes + ACTION_BYTES)) + train_states,
        device="cpu",
        savings=SAVINGS,
        processes=processes_per_device("cpu"),
    )


def _population(
    config: Config, env: GymnasiumGroups | PettingZooGroups, size: int, device: str
) -> Population:
    """Create the founders: agents for Gymnasium, or teams for PettingZoo."""
    options = {"device": device, **vars(config.agent), **config.founder_options()}
    if isinstance(env, GymnasiumGroups):
        return GRPO.population(size, env.observation_space, env.action_space, **options)
    team = {}
    for option in fields(TeamOptions):
        team[option.name] = getattr(config.task, option.name)
    return MultiAgentGRPO.population(
        size, env.observation_spaces, env.action_spaces, **team, **options
    )


def _parameters(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of parameters of all networks of a member."""
    count = 0
    for name, part in state.items():
        # Names are "weights", or "POLICY/weights" in a team.
        if name.rpartition("/")[2] == "weights":
            count += part.numel()
    return count


def _space(space: spaces.Space[Any]) -> str:
    """Return a short text for a space."""
    if isinstance(space, spaces.Box):
        return f"Box{space.shape}"
    return str(space)
