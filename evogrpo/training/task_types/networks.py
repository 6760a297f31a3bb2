"""Runs of small networks in a Gymnasium environment."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from gymnasium import spaces

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.policies.settings import NETWORK_DEFAULTS, STEPWISE
from evogrpo.algorithms.policies.stacked_policy import PolicyDescription, StackedPolicy
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
from evogrpo.training.forecast import Rounds, limited, possible, samples_row, sizes_text
from evogrpo.training.load_run import StoredRun
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.memory import Need, gigabytes, kept_size, largest_share, sharing, state_size
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.auto_size import choose_sizes
from evogrpo.training.task_types.task_type import choose_device, founder_options
from evogrpo.training.video import Recorded, record_video

HELD = 3.5
"""How many times over observations are held at the peak: as they were seen, by episode, by action, and by optimizer
step. Measured with images of 64 and 120 pixels a side; evaluations do without the last."""
BESIDES = 64  # bytes of an action, its log-probability, reward and place
TAUGHT = 250  # bytes of an action that another member learns from: its place, advantage and coefficients; measured
SAVINGS = "schedule.samples_per_step, population.size, schedule.validation_questions or task.max_episode_steps"


def playing_need(
    observations: Iterable[spaces.Space[Any]],
    *,
    longest: int,
    members: int,
    samples: int,
    validation: int,
    parameters: int,
    others: int = 0,
) -> Need:
    """Estimate the most memory that a run of small networks takes.

    Args:
        observations: What each acting agent sees in a step.
        longest: Most steps of an episode.
        members: How many there are.
        samples: Episodes of each in a learning step.
        validation: Episodes of each in an evaluation.
        parameters: Of one of them.
        others: From how many others' samples each of them learns as well.
    """
    spaces_seen = list(observations)
    seen = sum(map(bytes_of, spaces_seen))
    share = largest_share(members)
    borrowed = others * share * samples * longest * len(spaces_seen) * TAUGHT
    # Those that come from members in other processes are not played here.
    episodes = share * max(HELD * samples, (HELD - 1) * validation) + (HELD - 1) * samples * min(
        others, members - share
    )
    # Weights, a gradient, two moments, and the copy of the best.
    return Need(
        size=int(episodes * longest * (seen + BESIDES)) + 5 * 4 * share * parameters + borrowed,
        device="cpu",
        savings=SAVINGS,
        processes=sharing("cpu"),
    )


def memory_row(need: Need) -> str:
    """Write the estimate."""
    return (
        f"at most {gigabytes(need.size)} (an estimate, where all episodes are as long as can be): what is seen in a "
        "learning step or an evaluation, a few times over; Python and its libraries come on top"
    )


def bytes_of(space: spaces.Space[Any]) -> int:
    """Return the bytes of what lies in a space."""
    return sum(_leaf_bytes(leaf) for leaf in leaf_spaces(space))


def _leaf_bytes(leaf: spaces.Space[Any]) -> int:
    dtype = leaf.dtype
    assert dtype is not None  # of every space that members can see
    return int(dtype.itemsize) * math.prod(leaf.shape or ())


ONE_THREAD = 1 << 15
"""Parameters of a member up to which a second thread gains little: measured for 8 members, 9 % at 4,500 and 5 % at
17,000 (two layers of 64 and 128), but 25 % at 67,000."""


@dataclass(frozen=True, kw_only=True)
class NetworkForecast:
    """The numbers of a run of small networks; upper bounds where episodes may end early or evolution may choose.

    Attributes:
        rounds: How often what happens.
        episode_steps: Most steps of an episode.
        environment_steps: Most of one learning step, all members.
        optimizer_steps: Most per learning step and member.
        parameters: Of one member's network as it starts.
        need: The memory that the run takes at most.
    """

    rounds: Rounds
    episode_steps: int
    environment_steps: int
    optimizer_steps: int
    parameters: int
    need: Need

    def rows(self, config: AnyConfig) -> dict[str, str]:
        """Return the numbers in words."""
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
class PreparedNetworks:
    """Everything about a run of small networks but the networks themselves.

    Attributes:
        config: The configuration.
        env: Where members act.
        device: Where they will live.
        parameters: Of one member's network, as it starts.
        words: What that is made of.
        sizes: Which sizes were chosen and why, in words; None where the configuration gives all.
    """

    loads_weights: ClassVar[bool] = False

    config: Config[EnvironmentTask, NetworkAgent]
    env: GymnasiumGroups
    device: str
    parameters: int
    words: PolicyDescription
    sizes: str | None

    @property
    def one_thread(self) -> bool:
        """Whether the products are so small that further threads of torch mostly wait: short vectors, on the CPU."""
        return small(self.device, self.parameters, [self.env.observation_space])

    @property
    def networks_evolve(self) -> bool:
        """Whether members' architectures change as well as their hyperparameters."""
        return self.config.agent.evolve_network is not None

    def facts(self) -> dict[str, str]:
        """Name the environment and the members."""
        config, env = self.config, self.env
        each = "episode" if env.recreate_env else "lane"
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
        """Do the arithmetic of the run."""
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

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Make the members of a stored run."""
        return saved.restore(device=self.device)


class NetworkTask:
    """See `evogrpo.training.task_types.task_type.TaskType`."""

    word = "networks"
    tasks: Sequence[type[EnvironmentTask]] = (EnvironmentTask,)
    agent = NetworkAgent
    model = None
    objective = STEPWISE
    hyperparameters: Mapping[str, Any] = NETWORK_DEFAULTS
    ranges: Mapping[str, RLParameter] = NETWORK_RANGES
    rows_are_samples = False
    completions = 0
    chooses_sizes = True

    def check(self, config: Config[EnvironmentTask, NetworkAgent]) -> None:
        """Refuse what belongs to language models."""
        refuse_words(config)

    def prepare(self, config: Config[EnvironmentTask, NetworkAgent]) -> PreparedNetworks:
        """Check a configuration against the environment and the device."""
        return prepared_in(config, config.task.environment(seed=config.task_seed))

    def need(self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None) -> Need:
        """Estimate from the environment's spaces and its longest episode."""
        return _need(
            schedule, env, len(population), parameters_of(population.executor.members.banks.state(0)), experience
        )

    def film(
        self, config: Config[EnvironmentTask, NetworkAgent], best: Path, folder: Path, episodes: int
    ) -> tuple[Recorded, ...]:
        """Record the best member from the first test starts."""
        with closing(config.task.environment(seed=config.task_seed)) as env:
            seeds = [env.reset_seed("test", start) for start in range(min(episodes, env.size("test")))]
            agent = GRPO.load(best)
            return record_video(agent, env, folder / f"member-{agent.index}.mp4", seeds=seeds)

    def uses(self, best: Path) -> dict[str, str]:
        """Return how the best member acts."""
        return {"use it": f"evogrpo.GRPO.load({str(best)!r}).predict(observation)"}

    def commands(self, run_dir: Path) -> dict[str, tuple[str | Path, ...]]:
        """Return how to watch the best member."""
        return {"watch it": ("video", run_dir)}


def prepared_in(config: Config[EnvironmentTask, NetworkAgent], env: GymnasiumGroups) -> PreparedNetworks:
    """Check a configuration against the device and an environment, whatever its task names; choose what it leaves open.

    Raises:
        ValueError: If something does not fit.
    """
    device = device_of(config)
    example: Any = _members(config, env, processes().size, "cpu").executor.members  # one in each process
    parameters = parameters_of(example.banks.state(0))
    sized = choose_sizes(
        config,
        env,
        longest=None if env.uses_default_limit else env.max_episode_steps,
        members=lambda sized: _members(sized, env, sized.population.size, device),
        need=lambda sized: _need(sized.schedule, env, sized.population.size, parameters, sized.experience),
    )
    return PreparedNetworks(
        config=sized.config,
        env=env,
        device=device,
        parameters=parameters,
        words=words_of_policies(example.policies),
        sizes=sized.remark,
    )


def _need(
    schedule: Schedule, env: GymnasiumGroups, members: int, parameters: int, experience: SharedExperience | None
) -> Need:
    return playing_need(
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


# ---- what one network per policy has in common with one network


def parameters_of(state: Mapping[str, torch.Tensor]) -> int:
    """Return the parameters of all of a member's networks."""
    return sum(part.numel() for name, part in state.items() if name.rpartition("/")[2] == "weights")


def refuse_words(config: AnyConfig) -> None:
    """Refuse with a ValueError a model, its precision and completions, where members play."""
    if config.model is not None:
        raise ValueError(f"model must be left out where task.{config.task.key} is given, got {config.model!r}")
    if config.base_parts != 1:
        raise ValueError(
            f"base_parts must be left out where task.{config.task.key} is given, as small networks have no base, got "
            f"{config.base_parts}"
        )
    if config.precision != "auto":
        raise ValueError(
            f"precision must be left out where task.{config.task.key} is given, as small networks are in float32, got "
            f"{config.precision!r}"
        )
    if config.logging.completions:
        raise ValueError(
            f"logging.completions must be 0 where task.{config.task.key} is given, as there are none, got "
            f"{config.logging.completions}"
        )


def device_of(config: AnyConfig) -> str:
    """Return where small networks learn: the CPU unless the configuration says so; see `choose_device`."""
    return "cpu" if config.device is None else choose_device(config.device)


def small(device: str, parameters: int, observations: Sequence[spaces.Space[Any]]) -> bool:
    """Tell whether a member's products are so small that one thread does them best."""
    images = any(ObservationEncoder(space).images for space in observations)
    return torch.device(device).type == "cpu" and parameters <= ONE_THREAD and not images


def words_of_policies(policies: Mapping[str, StackedPolicy]) -> PolicyDescription:
    """Say what the networks of a member are made of: once where its policies are alike, else policy by policy."""
    own = {name: policy.words for name, policy in policies.items()}

    def told(part: str) -> str:
        words = {name: getattr(each, part) for name, each in own.items()}
        alike = len(set(words.values())) == 1
        return next(iter(words.values())) if alike else "; ".join(f"{name}: {each}" for name, each in words.items())

    return PolicyDescription(observations=told("observations"), network=told("network"), actions=told("actions"))


def normalised_text(agent: NetworkAgent) -> str:
    """Say that observations are normalised, if they are."""
    return ", normalised" if agent.normalise_observations else ""
