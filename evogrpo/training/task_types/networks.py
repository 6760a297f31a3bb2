"""Task type of small networks in a Gymnasium environment."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.policies.networks import PolicyDescription, StackedPolicy
from evogrpo.algorithms.policies.settings import NETWORK_DEFAULTS, STEPWISE
from evogrpo.algorithms.population import Population
from evogrpo.config.search_space import NETWORK_RANGES, RLParameter
from evogrpo.distributed import processes
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.observations import leaf_spaces
from evogrpo.evolution.shared_experience import SharedExperience, max_sources
from evogrpo.models.networks.networks import ObservationEncoder
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.agent_sections import NetworkAgent
from evogrpo.training.configuration.environment_tasks import EnvironmentTask
from evogrpo.training.configuration.sections import AnyConfig, Config
from evogrpo.training.forecast import (
    Need,
    Rounds,
    gigabytes,
    kept_size,
    largest_share,
    limited,
    possible,
    samples_row,
    sharing,
    sizes_text,
    state_size,
)
from evogrpo.training.load_run import StoredRun
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.auto_size import choose_sizes
from evogrpo.training.task_types.task_type import choose_device, founder_options
from evogrpo.training.video import Recorded, record_video

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
    share = largest_share(members)
    shared = others * share * samples * longest * len(observation_spaces) * SHARED_ACTION_BYTES
    # Episodes of members on other ranks are received, not played.
    received = (COPIES - 1) * samples * min(others, members - share)
    episodes = share * max(COPIES * samples, (COPIES - 1) * validation) + received
    # Weights, a gradient, two moments, and the copy of the best.
    return Need(
        size=int(episodes * longest * (observation_bytes + ACTION_BYTES)) + 5 * 4 * share * parameters + shared,
        device="cpu",
        savings=SAVINGS,
        processes=sharing("cpu"),
    )


def memory_row(need: Need) -> str:
    """Return the row of the plan."""
    return (
        f"at most {gigabytes(need.size)} (an estimate, for episodes of full length): copies of the observations of a "
        "learning step or an evaluation; Python and its libraries come on top"
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
        optimizer_steps: Most optimizer steps per learning step and member.
        parameters: Parameters of one founder.
        need: Peak memory.
    """

    rounds: Rounds
    episode_steps: int
    environment_steps: int
    optimizer_steps: int
    parameters: int
    need: Need

    def rows(self, config: AnyConfig) -> dict[str, str]:
        """Return the rows of the plan."""
        longest, steps, most = self.episode_steps, self.environment_steps, self.optimizer_steps
        return {
            "samples": samples_row(config, "episodes"),
            "groups": self.rounds.groups_row(),
            "environment": f"at most {count_text(steps)} steps a learning step, all members, for episodes of {longest}",
            "optimizer": f"at most {pluralize(most, 'step')} per member and learning step",
            "steps": self.rounds.steps_row(config, "episodes from held-out starts"),
            "parameters": f"{count_text(self.parameters)} in each member's network as it starts",
            "memory": memory_row(self.need),
        }


@dataclass(frozen=True, kw_only=True)
class PreparedPolicies:
    """Prepared run of small networks, for one agent or several.

    Attributes:
        config: The configuration.
        device: Device of the members.
        parameters: Parameters of one founder.
        words: Description of its networks.
    """

    loads_weights: ClassVar[bool] = False

    config: AnyConfig
    device: str
    parameters: int
    words: PolicyDescription

    def small(self, observations: Iterable[spaces.Space[Any]]) -> bool:
        """Return True if the networks are so small that one thread is fastest."""
        images = any(ObservationEncoder(space).images for space in observations)
        return torch.device(self.device).type == "cpu" and self.parameters <= ONE_THREAD and not images

    @property
    def networks_evolve(self) -> bool:
        """True if evolution also changes architectures."""
        return self.config.agent.evolve_network is not None

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Restore the members of a stored run."""
        return saved.restore(device=self.device)


@dataclass(frozen=True, kw_only=True)
class PreparedNetworks(PreparedPolicies):
    """Prepared run of small networks in a Gymnasium environment.

    Attributes:
        env: The environment.
        sizes: Text on sizes that were chosen; None if the configuration gives all.
    """

    env: GymnasiumGroups
    sizes: str | None

    @property
    def one_thread(self) -> bool:
        """True if one thread is faster than several."""
        return self.small([self.env.observation_space])

    def facts(self) -> dict[str, str]:
        """Return facts about environment and members."""
        config, env = self.config, self.env
        each = "episode" if env.recreate_env else "parallel episode"
        native = "vectorised natively" if env.native else f"one environment per {each}"
        noise = {"noise": "random after reset: every place in a group gets its own"} if env.reseed_noise else {}
        cut = ""
        if env.uses_default_limit:
            cut = f"; episodes have no limit and are cut off after {env.max_episode_steps:,} steps "
            cut += "(task.max_episode_steps)"
        return {
            "environment": f"{config.task.label}, {native}: {sizes_text(env)} starts{cut}",
            **noise,
            "population": f"{pluralize(config.population.size, 'member')}, each a network "
            f"({self.words.network}, {count_text(self.parameters)} parameters) on {self.device}",
            "observations": f"{self.words.observations}{normalised_text(config.agent)}",
            "actions": self.words.actions,
            **({} if self.sizes is None else {"sizes": self.sizes}),
        }

    def forecast(self) -> NetworkForecast:
        """Compute the costs of the run."""
        config, longest = self.config, self.env.max_episode_steps
        steps = longest * config.schedule.samples_per_step
        smallest, epochs = min(possible(config, "batch_size")), max(possible(config, "update_epochs"))
        rounds = Rounds.of(config, self.env)
        return NetworkForecast(
            rounds=rounds,
            episode_steps=longest,
            environment_steps=steps * config.population.size,
            optimizer_steps=epochs * math.ceil(steps / smallest),
            parameters=self.parameters,
            need=_need(config.schedule, self.env, config.population.size, self.parameters, config.experience).with_kept(
                kept_size(config.strategy, config.population.size, state_size(self.parameters))
            ),
        )

    def population(self) -> Population:
        """Make the founders."""
        return _members(self.config, self.env, self.config.population.size, self.device)


class PolicyTask:
    """Common part of the task types of small networks."""

    agent: type[NetworkAgent] = NetworkAgent
    model: str | None = None
    objective = STEPWISE
    hyperparameters: Mapping[str, Any] = NETWORK_DEFAULTS
    ranges: Mapping[str, RLParameter] = NETWORK_RANGES
    rows_are_samples = False
    completions = 0
    algorithm: ClassVar[Any]

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

    def record(self, config: AnyConfig, best: Path, folder: Path, episodes: int) -> tuple[Recorded, ...]:
        """Record videos of the best member on the first test episodes."""
        with closing(config.task.environment(seed=config.task_seed)) as env:
            seeds = [env.reset_seed("test", start) for start in range(min(episodes, env.size("test")))]
            agent = self.algorithm.load(best)
            return record_video(agent, env, folder / f"member-{agent.index}.mp4", seeds=seeds)

    def commands(self, run_dir: Path) -> dict[str, tuple[str | Path, ...]]:
        """Return the command that shows the best member."""
        return {"watch it": ("video", run_dir)}


class NetworkTask(PolicyTask):
    """Task type of small networks in a Gymnasium environment; see `TaskType`."""

    word = "networks"
    tasks: Sequence[type[EnvironmentTask]] = (EnvironmentTask,)
    chooses_sizes = True
    algorithm = GRPO

    def prepare(self, config: Config[EnvironmentTask, NetworkAgent]) -> PreparedNetworks:
        """Check a configuration against the environment and the device."""
        return prepare_in(config, config.task.environment(seed=config.task_seed))

    def need(self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None) -> Need:
        """Estimate from the environment's spaces and its longest episode."""
        return _need(
            schedule, env, len(population), parameters_of(population.executor.members.banks.state(0)), experience
        )

    def uses(self, best: Path) -> dict[str, str]:
        """Return the expression by which the best member acts."""
        return {"use it": f"evogrpo.GRPO.load({str(best)!r}).predict(observation)"}


def prepare_in(config: Config[EnvironmentTask, NetworkAgent], env: GymnasiumGroups) -> PreparedNetworks:
    """Check a configuration against the device and an environment, and choose the sizes it leaves open.

    Raises:
        ValueError: If something does not fit.
    """
    device = device_of(config)
    example: Any = _members(config, env, processes().size, "cpu").executor.members  # one per rank
    parameters = parameters_of(example.banks.state(0))
    sized, sizes = choose_sizes(
        config,
        env,
        longest=None if env.uses_default_limit else env.max_episode_steps,
        members=lambda sized: _members(sized, env, sized.population.size, device),
        need=lambda sized: _need(sized.schedule, env, sized.population.size, parameters, sized.experience),
    )
    return PreparedNetworks(
        config=sized,
        env=env,
        device=device,
        parameters=parameters,
        words=words_of_policies(example.policies),
        sizes=sizes,
    )


def _need(
    schedule: Schedule, env: GymnasiumGroups, members: int, parameters: int, experience: SharedExperience | None
) -> Need:
    return network_memory(
        [env.observation_space],
        longest=env.max_episode_steps,
        members=members,
        samples=schedule.samples_per_step,
        validation=limited(env.size("validation"), schedule.validation_questions),
        parameters=parameters,
        others=max_sources(experience, members),
    )


def _members(config: Config[EnvironmentTask, NetworkAgent], env: GymnasiumGroups, size: int, device: str) -> Population:
    return GRPO.population(
        size,
        env.observation_space,
        env.action_space,
        device=device,
        **config.agent.settings(),
        **founder_options(config),
    )


def parameters_of(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of parameters of all networks of a member."""
    return sum(part.numel() for name, part in state.items() if name.rpartition("/")[2] == "weights")


def device_of(config: AnyConfig) -> str:
    """Return the device of small networks: the CPU unless the configuration names one."""
    return "cpu" if config.device is None else choose_device(config.device)


def words_of_policies(policies: Mapping[str, StackedPolicy]) -> PolicyDescription:
    """Return the description of a member's networks: once if all policies are alike, else by policy."""
    own = {name: policy.words for name, policy in policies.items()}

    def text(part: str) -> str:
        words = {name: getattr(each, part) for name, each in own.items()}
        alike = len(set(words.values())) == 1
        return next(iter(words.values())) if alike else "; ".join(f"{name}: {each}" for name, each in words.items())

    return PolicyDescription(observations=text("observations"), network=text("network"), actions=text("actions"))


def normalised_text(agent: NetworkAgent) -> str:
    """Return a note if observations are normalised."""
    return ", normalised" if agent.normalise_observations else ""
