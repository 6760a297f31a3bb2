"""Task type of small networks for the agents of a parallel PettingZoo environment, one per policy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium import spaces

from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.algorithms.population import Population
from evogrpo.distributed import processes
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.envs.control.policy_mapping import PolicyMapping, map_policies
from evogrpo.evolution.shared_experience import SharedExperience, max_sources
from evogrpo.text import count_text, pluralize
from evogrpo.training.configuration.agent_sections import NetworkAgent
from evogrpo.training.configuration.environment_tasks import ParallelTask
from evogrpo.training.configuration.sections import AnyConfig, Config
from evogrpo.training.forecast import Need, Rounds, kept_size, limited, possible, samples_row, sizes_text, state_size
from evogrpo.training.schedule import Schedule
from evogrpo.training.task_types.networks import (
    PolicyTask,
    PreparedPolicies,
    device_of,
    memory_row,
    network_memory,
    normalised_text,
    parameters_of,
    words_of_policies,
)
from evogrpo.training.task_types.task_type import founder_options


@dataclass(frozen=True, kw_only=True)
class MultiAgentForecast:
    """Costs of a multi-agent run; upper bounds where episodes may end early or values may evolve.

    Attributes:
        rounds: Numbers of groups, steps and evaluations.
        episode_steps: Most steps of a joint episode.
        joint_steps: Most joint steps of one learning step, all members.
        transitions: Most actions of single agents in one learning step, all members.
        optimizer_steps: Most optimizer steps per learning step and member, by policy.
        parameters: Parameters of one founder.
        need: Peak memory.
    """

    rounds: Rounds
    episode_steps: int
    joint_steps: int
    transitions: int
    optimizer_steps: Mapping[str, int]
    parameters: int
    need: Need

    def rows(self, config: AnyConfig) -> dict[str, str]:
        """Return the rows of the plan."""
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
class PreparedMultiAgent(PreparedPolicies):
    """Prepared multi-agent run.

    Attributes:
        env: The environment.
        mapping: Agents of each policy.
    """

    env: PettingZooGroups
    mapping: PolicyMapping

    @property
    def one_thread(self) -> bool:
        """True if one thread is faster than several."""
        return self.small([spec.observation_space for spec in self.mapping.specs.values()])

    def facts(self) -> dict[str, str]:
        """Return facts about environment, agents, policies and members."""
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

    def forecast(self) -> MultiAgentForecast:
        """Compute the costs of the run for the agents that are known in advance."""
        config, longest, specs = self.config, self.env.max_episode_steps, self.mapping.specs
        steps = longest * config.schedule.samples_per_step
        smallest, epochs = min(possible(config, "batch_size")), max(possible(config, "update_epochs"))
        rounds = Rounds.of(config, self.env)
        return MultiAgentForecast(
            rounds=rounds,
            episode_steps=longest,
            joint_steps=steps * config.population.size,
            transitions=steps * config.population.size * len(self.env.agents),
            optimizer_steps={
                policy: epochs * math.ceil(steps * len(spec.agents) / smallest) for policy, spec in specs.items()
            },
            parameters=self.parameters,
            need=network_memory(
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


class MultiAgentTask(PolicyTask):
    """Task type of multi-agent runs; see `TaskType`."""

    word = "joint"
    tasks: Sequence[type[ParallelTask]] = (ParallelTask,)
    chooses_sizes = False
    algorithm = MultiAgentGRPO

    def prepare(self, config: Config[ParallelTask, NetworkAgent]) -> PreparedMultiAgent:
        """Check a configuration against the agents, their spaces and the device."""
        task, env = config.task, config.task.environment(seed=config.task_seed)
        example: Any = _members(config, env, processes().size, "cpu").executor.members  # one per rank
        return PreparedMultiAgent(
            config=config,
            env=env,
            mapping=map_policies(env.observation_spaces, env.action_spaces, task.policies, agent_ids=task.agent_ids),
            device=device_of(config),
            parameters=parameters_of(example.banks.state(0)),
            words=words_of_policies(example.policies),
        )

    def need(self, population: Population, env: Any, schedule: Schedule, experience: SharedExperience | None) -> Need:
        """Estimate from the environment's spaces and its longest episode."""
        return network_memory(
            env.observation_spaces.values(),
            longest=env.max_episode_steps,
            members=len(population),
            samples=schedule.samples_per_step,
            validation=limited(env.size("validation"), schedule.validation_questions),
            parameters=parameters_of(population.executor.members.banks.state(0)),
            others=max_sources(experience, len(population)),
        )

    def uses(self, best: Path) -> dict[str, str]:
        """Return the expression by which the best member acts."""
        return {"use it": f"evogrpo.MultiAgentGRPO.load({str(best)!r}).get_action(observations, training=False)"}


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
