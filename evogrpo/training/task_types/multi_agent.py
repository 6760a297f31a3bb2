"""Runs of members that act for several agents of a parallel PettingZoo environment, a small network per policy."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gymnasium import spaces

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.algorithms.policies.settings import NETWORK_DEFAULTS, STEPWISE
from evogrpo.algorithms.policies.stacked_policy import PolicyDescription
from evogrpo.algorithms.population import Population
from evogrpo.config.search_space import NETWORK_RANGES, RLParameter
from evogrpo.distributed import processes
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import PolicyMapping, map_policies
from evogrpo.evolution.shared_experience import SharedExperience, max_sources
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.agent_sections import NetworkAgent
from evogrpo.training.configuration.environment_tasks import ParallelTask
from evogrpo.training.configuration.sections import AnyConfig, Config
from evogrpo.training.forecast import Rounds, limited, possible, samples_row, sizes_text
from evogrpo.training.load_run import StoredRun
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.memory import Need, kept_size, state_size
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.networks import (
    device_of,
    memory_row,
    normalised_text,
    parameters_of,
    playing_need,
    refuse_words,
    small,
    words_of_policies,
)
from evogrpo.training.task_types.task_type import founder_options
from evogrpo.training.video import Recorded, record_video


@dataclass(frozen=True, kw_only=True)
class TeamForecast:
    """The numbers of a run of several agents; upper bounds where episodes may end early or evolution may choose.

    Attributes:
        rounds: How often what happens.
        episode_steps: Most steps of a joint episode.
        joint_steps: Most joint steps of one learning step, all members.
        transitions: Most actions of single agents in one learning step, all members.
        optimizer_steps: Most per learning step and member, by policy.
        parameters: Of one member's networks as they start.
        need: The memory that the run takes at most.
    """

    rounds: Rounds
    episode_steps: int
    joint_steps: int
    transitions: int
    optimizer_steps: Mapping[str, int]
    parameters: int
    need: Need

    def rows(self, config: AnyConfig) -> dict[str, str]:
        """Return the numbers in words."""
        optimizer = ", ".join(f"at most {most} of {policy}" for policy, most in self.optimizer_steps.items())
        return {
            "samples": samples_row(config, "joint episodes"),
            "groups": self.rounds.groups_row(),
            "environment": f"at most {count_text(self.joint_steps)} joint steps a learning step, all members, for "
            f"episodes of {self.episode_steps}: {count_text(self.transitions)} actions of single agents",
            "optimizer": f"{optimizer} per member and learning step",
            "steps": self.rounds.steps_row(config, "joint episodes from held-out starts"),
            "parameters": f"{count_text(self.parameters)} in each member's networks as they start",
            "memory": memory_row(self.need),
        }


@dataclass(frozen=True, kw_only=True)
class PreparedTeam:
    """Everything about a run of several agents but the networks themselves.

    Attributes:
        config: The configuration.
        env: Where members act.
        mapping: Which policy acts for which agent.
        device: Where members will live.
        parameters: Of one member's networks, as they start.
        words: What these are made of.
    """

    loads_weights: ClassVar[bool] = False

    config: Config[ParallelTask, NetworkAgent]
    env: PettingZooGroups
    mapping: PolicyMapping
    device: str
    parameters: int
    words: PolicyDescription

    @property
    def one_thread(self) -> bool:
        """Whether the products are so small that further threads of torch mostly wait: short vectors, on the CPU."""
        return small(self.device, self.parameters, [spec.observation_space for spec in self.mapping.specs.values()])

    @property
    def networks_evolve(self) -> bool:
        """Whether members' architectures change as well as their hyperparameters."""
        return self.config.agent.evolve_network is not None

    def facts(self) -> dict[str, str]:
        """Name the environment, its agents, the policies with their spaces, and the members."""
        config, env, specs = self.config, self.env, self.mapping.specs
        env.warn_opposed_rewards(team_credit=config.task.credit == "team")
        cut = f"; episodes have no limit and are cut off after {env.max_episode_steps:,} steps (task.max_episode_steps)"
        policies = (
            f"{policy} for {', '.join(spec.agents)} "
            f"(sees {_space(spec.observation_space)}, acts in {_space(spec.action_space)})"
            for policy, spec in specs.items()
        )
        return {
            "environment": f"{config.task.label}: {sizes_text(env)} starts{cut if env.uses_default_limit else ''}",
            "fitness": env.scoring.label,
            "agents": f"{len(env.agents)}, each learning from what "
            f"{'all agents earn' if config.task.credit == 'team' else 'it earns itself'}"
            f"{', told who it is' if config.task.agent_ids else ''}",
            "policies": "; ".join(policies),
            "population": f"{pluralize(config.population.size, 'member')}, each "
            f"{'a network' if len(specs) == 1 else f'{len(specs)} networks'} "
            f"({self.words.network}, {count_text(self.parameters)} parameters in all) on {self.device}",
            "observations": f"{self.words.observations}{normalised_text(config.agent)}",
            "actions": self.words.actions,
        }

    def forecast(self) -> TeamForecast:
        """Do the arithmetic of the run, for the agents that are known beforehand."""
        config, longest, specs = self.config, self.env.max_episode_steps, self.mapping.specs
        steps = longest * config.schedule.samples_per_step
        smallest, epochs = min(possible(config, "batch_size")), max(possible(config, "update_epochs"))
        rounds = Rounds.of(config, self.env)
        return TeamForecast(
            rounds=rounds,
            episode_steps=longest,
            joint_steps=steps * config.population.size,
            transitions=steps * config.population.size * len(self.env.agents),
            optimizer_steps={
                policy: epochs * math.ceil(steps * len(spec.agents) / smallest) for policy, spec in specs.items()
            },
            parameters=self.parameters,
            need=playing_need(
                self.env.observation_spaces.values(),
                longest=longest,
                members=config.population.size,
                samples=config.schedule.samples_per_step,
                validation=rounds.validation,
                parameters=self.parameters,
                others=max_sources(config.experience, config.population.size),
            ).with_kept(kept_size(config.strategy, config.population.size, state_size(self.parameters))),
        )

    def population(self) -> Population:
        """Make the founders."""
        return _members(self.config, self.env, self.config.population.size, self.device)

    def restore(self, saved: StoredRun) -> tuple[Population, RunState]:
        """Make the members of a stored run."""
        return saved.restore(device=self.device)


class MultiAgentTask:
    """See `evogrpo.training.task_types.task_type.TaskType`."""

    word = "joint"
    tasks: Sequence[type[ParallelTask]] = (ParallelTask,)
    agent = NetworkAgent
    model = None
    objective = STEPWISE
    hyperparameters: Mapping[str, Any] = NETWORK_DEFAULTS
    ranges: Mapping[str, RLParameter] = NETWORK_RANGES
    rows_are_samples = False
    completions = 0
    chooses_sizes = False

    def check(self, config: Config[ParallelTask, NetworkAgent]) -> None:
        """Refuse what belongs to language models."""
        refuse_words(config)

    def prepare(self, config: Config[ParallelTask, NetworkAgent]) -> PreparedTeam:
        """Check a configuration against the agents, their spaces and the device."""
        task, env = config.task, config.task.environment(seed=config.task_seed)
        example: Any = _members(config, env, processes().size, "cpu").executor.members  # one in each process
        return PreparedTeam(
            config=config,
            env=env,
            mapping=map_policies(env.observation_spaces, env.action_spaces, task.policies, agent_ids=task.agent_ids),
            device=device_of(config),
            parameters=parameters_of(example.banks.state(0)),
            words=words_of_policies(example.policies),
        )

    def need(self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None) -> Need:
        """Estimate from the environment's spaces and its longest episode."""
        return playing_need(
            env.observation_spaces.values(),
            longest=env.max_episode_steps,
            members=len(population),
            samples=schedule.samples_per_step,
            validation=limited(env.size("validation"), schedule.validation_questions),
            parameters=parameters_of(population.executor.members.banks.state(0)),
            others=max_sources(experience, len(population)),
        )

    def film(
        self, config: Config[ParallelTask, NetworkAgent], best: Path, folder: Path, episodes: int
    ) -> tuple[Recorded, ...]:
        """Record the best member from the first test starts."""
        with closing(config.task.environment(seed=config.task_seed)) as env:
            seeds = [env.reset_seed("test", start) for start in range(min(episodes, env.size("test")))]
            agent = MultiAgentGRPO.load(best)
            return record_video(agent, env, folder / f"member-{agent.index}.mp4", seeds=seeds)

    def uses(self, best: Path) -> dict[str, str]:
        """Return how the best member acts."""
        return {"use it": f"evogrpo.MultiAgentGRPO.load({str(best)!r}).get_action(observations, training=False)"}

    def commands(self, run_dir: Path) -> dict[str, tuple[str | Path, ...]]:
        """Return how to watch the best member."""
        return {"watch it": ("video", run_dir)}


def _members(config: Config[ParallelTask, NetworkAgent], env: PettingZooGroups, size: int, device: str) -> Population:
    task = config.task
    return MultiAgentGRPO.population(
        size,
        env.observation_spaces,
        env.action_spaces,
        policies=task.policies,
        credit=task.credit,
        agent_ids=task.agent_ids,
        device=device,
        **config.agent.settings(),
        **founder_options(config),
    )


def _space(space: spaces.Space[Any]) -> str:
    return f"Box{space.shape}" if isinstance(space, spaces.Box) else str(space)
