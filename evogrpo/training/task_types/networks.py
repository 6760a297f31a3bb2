"""Task types of small networks: a single agent in a Gymnasium environment, or several in a PettingZoo environment."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.algorithms.policies.network_policy import PolicyDescription
from evogrpo.algorithms.policies.settings import NETWORK_DEFAULTS, STEPWISE
from evogrpo.algorithms.population import Population
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import NETWORK_RANGES, RLParameter
from evogrpo.data import DEFAULT_POLICY
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.observations import leaf_spaces
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import PolicyMapping
from evogrpo.evolution.shared_experience import SharedExperience, max_sources
from evogrpo.models.networks.networks import ObservationEncoder
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.agent_sections import NetworkAgent
from evogrpo.training.configuration.environment_tasks import EnvironmentTask, ParallelTask
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.forecast import (
    Need,
    Rounds,
    gigabytes,
    limited,
    possible,
    samples_row,
    sharing,
    sizes_text,
)
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.run_dir import StoredRun
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.auto_size import choose_sizes
from evogrpo.training.task_types.task_type import choose_device, founder_options
from evogrpo.training.video import RecordedEpisode, record_video

COPIES = 3.5
"""Copies of observations at the peak: as seen, by episode, by action, and by optimizer step. Measured with images of 64
and 120 pixels a side; evaluations lack the last copy."""
ACTION_BYTES = 64  # an action, its log-probability, reward and position
SHARED_ACTION_BYTES = 250  # an action that another member learns from; measured
SAVINGS = "schedule.samples_per_step, population.size, schedule.validation_questions or task.max_episode_steps"


def network_memory(
    observations: Iterable[spaces.Space[Any]],
    *,
    longest: int,
    members: int,
    samples: int,
    validation: int,
    parameters: int,
    others: int = 0,
) -> Need:
    """Estimate the peak memory of a run of small networks.

    Args:
        observations: Observation space of each acting agent.
        longest: Most steps of an episode.
        members: Number of members.
        samples: Episodes per member and learning step.
        validation: Episodes per member and evaluation.
        parameters: Parameters per member.
        others: Number of other members whose samples each member also learns from.
    """
    observation_spaces = list(observations)
    observation_bytes = sum(
        np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape or ())
        for space in observation_spaces
        for leaf in leaf_spaces(space)
    )
    shared = others * members * samples * longest * len(observation_spaces) * SHARED_ACTION_BYTES
    episodes = members * max(COPIES * samples, (COPIES - 1) * validation)
    # Weights, a gradient, two moments, the copy of the best, and a copy of weights and moments before a learning step.
    return Need(
        size=int(episodes * longest * (observation_bytes + ACTION_BYTES)) + 8 * 4 * members * parameters + shared,
        device="cpu",
        savings=SAVINGS,
        processes=sharing("cpu"),
    )


ONE_THREAD = 1 << 15
"""Parameters of a member up to which one thread is used. A second one gains, for 8 members, 9 % at 4,500 parameters,
5 % at 17,000 and 25 % at 67,000."""


@dataclass(frozen=True, kw_only=True)
class NetworkForecast:
    """Costs of a run of small networks; upper bounds where episodes may end early or values may evolve.

    Attributes:
        rounds: Numbers of groups, steps and evaluations.
        episode_steps: Most steps of an episode.
        environment_steps: Most environment steps of one learning step, all members.
        actions: Most actions of single agents in one learning step, all members.
        optimizer_steps: Most optimizer steps per learning step and member, by policy.
        parameters: Parameters of one founder.
        need: Peak memory.
    """

    rounds: Rounds
    episode_steps: int
    environment_steps: int
    actions: int
    optimizer_steps: Mapping[str, int]
    parameters: int
    need: Need

    def rows(self, config: AnyConfig) -> dict[str, str]:
        """Return the rows of the plan."""
        steps, longest = count_text(self.environment_steps), self.episode_steps
        joint = networks = by_agent = ""
        optimizer = {policy: f"at most {pluralize(most, 'step')}" for policy, most in self.optimizer_steps.items()}
        if DEFAULT_POLICY not in optimizer:
            joint, networks, by_agent = "joint ", "s", f": {count_text(self.actions)} actions of single agents"
            optimizer = {policy: f"{most} of {policy}" for policy, most in optimizer.items()}
        return {
            "samples": samples_row(config, f"{joint}episodes"),
            "groups": self.rounds.groups_row(),
            "environment": f"at most {steps} {joint}steps a learning step, all members, for episodes of "
            f"{longest}{by_agent}",
            "optimizer": f"{', '.join(optimizer.values())} per member and learning step",
            "steps": self.rounds.steps_row(config, f"{joint}episodes from held-out starts"),
            "parameters": f"{count_text(self.parameters)} in each member's network{networks} at the start",
            "memory": f"at most {gigabytes(self.need.size)} (an estimate, for episodes of full length): copies of the "
            "observations of a learning step or an evaluation; Python and its libraries come on top",
        }


@dataclass(frozen=True, kw_only=True)
class PreparedNetworks:
    """Prepared run of small networks, for one agent or several.

    Attributes:
        config: The configuration.
        env: The environment.
        mapping: Maps agents to policies.
        device: Device of the members.
        parameters: Parameters of one founder.
        words: Description of its networks.
        sizes: Text on sizes that were chosen; None if the configuration gives all.
    """

    loads_weights: ClassVar[bool] = False

    config: AnyConfig
    env: GymnasiumGroups | PettingZooGroups
    mapping: PolicyMapping
    device: str
    parameters: int
    words: PolicyDescription
    sizes: str | None

    @property
    def one_thread(self) -> bool:
        """True if the networks are so small that one thread is fastest."""
        images = any(ObservationEncoder(spec.observation_space).images for spec in self.mapping.specs.values())
        return torch.device(self.device).type == "cpu" and self.parameters <= ONE_THREAD and not images

    @property
    def networks_evolve(self) -> bool:
        """True if evolution also changes architectures."""
        return self.config.agent.evolve_network is not None

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Restore the members of a stored run."""
        return saved.restore(device=self.device)

    def facts(self) -> dict[str, str]:
        """Return facts about environment, agents, policies and members."""
        config, env, task, specs = self.config, self.env, self.config.task, self.mapping.specs
        cut, in_all = "", ""
        if env.uses_default_limit:
            cut = f"; episodes have no limit and are cut off after {env.max_episode_steps:,} steps "
            cut += "(task.max_episode_steps)"
        if isinstance(env, PettingZooGroups):
            env.warn_opposed_rewards(team_credit=task.credit == "team")
            in_all = " in all"
            facts = {
                "environment": f"{task.label}: {sizes_text(env)} starts{cut}",
                "fitness": env.scoring.label,
                "agents": f"{len(env.agents)}, each learning from what "
                f"{'all agents earn' if task.credit == 'team' else 'it earns itself'}"
                f"{', told who it is' if task.agent_ids else ''}",
                "policies": "; ".join(
                    f"{policy} for {', '.join(spec.agents)} "
                    f"(sees {_space(spec.observation_space)}, acts in {_space(spec.action_space)})"
                    for policy, spec in specs.items()
                ),
            }
        else:
            each = "episode" if env.recreate_env else "parallel episode"
            native = "vectorised natively" if env.native else f"one environment per {each}"
            facts = {"environment": f"{task.label}, {native}: {sizes_text(env)} starts{cut}"}
            if env.reseed_noise:
                facts["noise"] = "random after reset: every place in a group gets its own"
        networks = "a network" if len(specs) == 1 else f"{len(specs)} networks"
        return {
            **facts,
            "population": f"{pluralize(config.population.size, 'member')}, each {networks} "
            f"({self.words.network}, {count_text(self.parameters)} parameters{in_all}) on {self.device}",
            "observations": f"{self.words.observations}{', normalised' if config.agent.normalise_observations else ''}",
            "actions": self.words.actions,
            **({} if self.sizes is None else {"sizes": self.sizes}),
        }

    def forecast(self) -> NetworkForecast:
        """Compute the costs of the run for the agents that are known in advance."""
        config, members, longest = self.config, self.config.population.size, self.env.max_episode_steps
        steps = longest * config.schedule.samples_per_step
        smallest, epochs = min(possible(config, "batch_size")), max(possible(config, "update_epochs"))
        need = _need(self.mapping, self.env, config.schedule, members, self.parameters, config.experience)
        return NetworkForecast(
            rounds=Rounds.of(config, self.env),
            episode_steps=longest,
            environment_steps=steps * members,
            actions=steps * members * len(self.mapping.observation_spaces),
            optimizer_steps={
                policy: epochs * math.ceil(steps * len(spec.agents) / smallest)
                for policy, spec in self.mapping.specs.items()
            },
            parameters=self.parameters,
            need=need,
        )

    def population(self) -> Population:
        """Make the founders."""
        return _population(self.config, self.env, self.config.population.size, self.device)


@dataclass(kw_only=True)
class NetworkTask:
    """Task type of small networks; see `TaskType`.

    Attributes:
        word: See `TaskType`.
        tasks: See `TaskType`.
        algorithm: Class of the agents.
        chooses_sizes: See `TaskType`.
    """

    word: str
    tasks: Sequence[type[EnvironmentTask | ParallelTask]]
    algorithm: type[GRPO]
    chooses_sizes: bool
    agent: type[NetworkAgent] = NetworkAgent
    model: str | None = None
    objective: Objective = STEPWISE
    hyperparameters: Mapping[str, Any] = field(default_factory=lambda: NETWORK_DEFAULTS)
    ranges: Mapping[str, RLParameter] = field(default_factory=lambda: NETWORK_RANGES)
    rows_are_samples: bool = False
    completions: int = 0

    def check(self, config: AnyConfig) -> None:
        """Raise ValueError for settings of language models."""
        key, none = f"where task.{config.task.key} is given", "small networks have no base model"
        if config.model is not None:
            raise ValueError(f"model must be left out {key}, got {config.model!r}")
        if config.base_parts != 1:
            raise ValueError(f"base_parts must be left out {key}, as {none}, got {config.base_parts}")
        if config.precision != "auto":
            raise ValueError(f"precision must be left out {key}, as {none}, got {config.precision!r}")
        if config.logging.completions:
            raise ValueError(f"logging.completions must be 0 {key}, got {config.logging.completions}")

    def prepare(self, config: AnyConfig) -> PreparedNetworks:
        """Check a configuration against the environment and the device."""
        return prepare_in(config, config.task.environment(seed=config.task_seed))

    def need(self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None) -> Need:
        """Estimate from the environment's spaces and its longest episode."""
        members: Any = population.members
        parameters = _parameters(members.banks.state(0))
        return _need(members.mapping, env, schedule, len(population), parameters, experience)

    def record(self, config: AnyConfig, best: Path, folder: Path, episodes: int) -> tuple[RecordedEpisode, ...]:
        """Record videos of the best member on the first test episodes."""
        with closing(config.task.environment(seed=config.task_seed)) as env:
            seeds = [env.reset_seed("test", start) for start in range(min(episodes, env.size("test")))]
            agent = self.algorithm.load(best)
            return record_video(agent, env, folder / f"member-{agent.index}.mp4", seeds=seeds)

    def uses(self, best: Path) -> dict[str, str]:
        """Return the expression by which the best member acts."""
        seen = "observation" if self.algorithm is GRPO else "observations"
        return {"use it": f"evogrpo.{self.algorithm.__name__}.load({str(best)!r}).predict({seen})"}

    def commands(self, run_dir: Path) -> dict[str, tuple[str | Path, ...]]:
        """Return the command that shows the best member."""
        return {"watch it": ("video", run_dir)}


def prepare_in(config: AnyConfig, env: GymnasiumGroups | PettingZooGroups) -> PreparedNetworks:
    """Check a configuration against the device and an environment, and choose the sizes it leaves open.

    Raises:
        ValueError: If something does not fit.
    """
    device = "cpu" if config.device is None else choose_device(config.device)
    example: Any = _population(config, env, 1, "cpu").members
    parameters, mapping = _parameters(example.banks.state(0)), example.mapping
    sized, sizes = choose_sizes(
        config,
        env,
        longest=None if env.uses_default_limit else env.max_episode_steps,
        members=lambda sized: _population(sized, env, sized.population.size, device),
        need=lambda sized: _need(mapping, env, sized.schedule, sized.population.size, parameters, sized.experience),
    )
    # Descriptions once if all policies are alike, else by policy.
    own = {name: policy.words for name, policy in example.policies.items()}
    words = {}
    for part in ("observations", "network", "actions"):
        texts = {name: getattr(each, part) for name, each in own.items()}
        alike = len(set(texts.values())) == 1
        words[part] = (
            next(iter(texts.values())) if alike else "; ".join(f"{name}: {text}" for name, text in texts.items())
        )
    return PreparedNetworks(
        config=sized,
        env=env,
        mapping=mapping,
        device=device,
        parameters=parameters,
        words=PolicyDescription(**words),
        sizes=sizes,
    )


def _need(
    mapping: PolicyMapping,
    env: GymnasiumGroups | PettingZooGroups,
    schedule: Schedule,
    members: int,
    parameters: int,
    experience: SharedExperience | None,
) -> Need:
    return network_memory(
        mapping.observation_spaces.values(),
        longest=env.max_episode_steps,
        members=members,
        samples=schedule.samples_per_step,
        validation=limited(env.size("validation"), schedule.validation_questions),
        parameters=parameters,
        others=max_sources(experience, members),
    )


def _population(config: AnyConfig, env: GymnasiumGroups | PettingZooGroups, size: int, device: str) -> Population:
    options = {"device": device, **config.agent.settings(), **founder_options(config)}
    if isinstance(env, GymnasiumGroups):
        return GRPO.population(size, env.observation_space, env.action_space, **options)
    own = {name: getattr(config.task, name) for name in ("policies", "credit", "agent_ids")}
    return MultiAgentGRPO.population(size, env.observation_spaces, env.action_spaces, **own, **options)


def _parameters(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of parameters of all networks of a member."""
    return sum(part.numel() for name, part in state.items() if name.rpartition("/")[2] == "weights")


def _space(space: spaces.Space[Any]) -> str:
    return f"Box{space.shape}" if isinstance(space, spaces.Box) else str(space)
