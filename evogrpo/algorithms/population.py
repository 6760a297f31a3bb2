"""Population: agents that share one bank, learn in the same batches and evolve."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from evogrpo.algorithms.collect import (
    check_groups,
    distinct_settings,
    resample_groups,
    sample_groups,
)
from evogrpo.algorithms.evaluation import measure_fitness
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig, check_group_size
from evogrpo.config.task_settings import SettingValue, TaskSettings
from evogrpo.distributed import ProcessError, Processes
from evogrpo.envs.protocol import GroupEnvironment, Split, require_task_settings
from evogrpo.evolution.fitness import GREEDY_EVALUATION, Fitness
from evogrpo.evolution.history import NETWORK, Generation, History, MemberRecord
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.strategies import Strategy
from evogrpo.interruption import NEVER, Stop
from evogrpo.learn_reports import LearnReport
from evogrpo.members.bank import Sampler
from evogrpo.members.members import Members, optional_method
from evogrpo.members.requests import RolloutBatch
from evogrpo.randomness import generator
from evogrpo.records import Experience
from evogrpo.safe_parsing import dump_json, load_json
from evogrpo.synonyms import NamesMissing
from evogrpo.text import class_name, shown
from evogrpo.validation import dump, validate, whole_between
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from evogrpo.algorithms.agent import Agent


class Population(NamesMissing, Sequence[Any]):
    """Sequence of agents over one bank: `population[i]` is the agent in slot i, retired or not.

    Create populations with `GRPO.population`.

    Attributes:
        agents: The agents in slot order, without wrappers.
        members: Weights of the agents, and how they sample, act and learn.
        lineage: All members so far, in order of birth.
        next_index: First unused index.
    """

    __slots__ = (
        "__weakref__",
        "_handed_out",
        "_learned_step",
        "agents",
        "lineage",
        "members",
        "next_index",
    )

    def __init__(
        self,
        agents: "Sequence[Agent]",
        members: Members,
        *,
        wrapper_cls: type[Any] | None = None,
        wrapper_kwargs: Mapping[str, Any] | None = None,
        lineage: Sequence[MemberRecord] | None = None,
    ) -> None:
        self.agents = list(agents)
        self.members = members
        founders = [replace(agent.record(), reason="founder") for agent in self.agents]
        self.lineage = tuple(founders if lineage is None else lineage)
        self.next_index = 1 + max(agent.index for agent in self.agents)
        self._learned_step: int | None = None  # number of the latest learning step
        # What users get by indexing: the agents, or their wrappers.
        self._handed_out: list[Any] = list(agents)
        if wrapper_cls is not None:
            if not callable(wrapper_cls) or isinstance(wrapper_cls, nn.Module):
                raise ValueError(
                    f"wrapper_cls must be a class that takes an agent, got {shown(wrapper_cls)}."
                    " Pass a network as actor_network=."
                )
            if wrapper_kwargs is not None and not isinstance(wrapper_kwargs, Mapping):
                raise ValueError(
                    "wrapper_kwargs must be a mapping of keyword arguments, got"
                    f" {shown(wrapper_kwargs)}."
                )
            self._handed_out = [wrapper_cls(agent, **(wrapper_kwargs or {})) for agent in agents]

    def __len__(self) -> int:
        return len(self.agents)

    def __repr__(self) -> str:
        members = []
        for agent in self.agents:
            score = f" {agent.fitness.mean:.3g}" if agent.fitness else ""
            members.append(f"#{agent.index}{score}")
        kind = class_name(self.agents[0])
        return f"Population({len(self)} {kind} members: {', '.join(members)})"

    def __getitem__(self, slot: Any) -> Any:
        return self._handed_out[slot]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._handed_out)

    @property
    def processes(self) -> Processes:
        """Ranks that train this population; each holds all members."""
        return self.members.processes

    @property
    def space(self) -> HyperparameterConfig:
        """Search space; empty if nothing evolves."""
        return self.members.hp_config or HyperparameterConfig()

    @property
    def algorithm(self) -> "type[Agent]":
        """Class of the agents; it defines how they learn."""
        return type(self.agents[0])

    @property
    def best(self) -> Any:
        """Agent with the highest fitness at the last evaluation; among equals the oldest.

        Raises:
            ValueError: If no member has been evaluated.
        """
        ranks = [
            (agent.fitness.mean, -agent.index, agent.slot)
            for agent in self.agents
            if agent.fitness is not None
        ]
        if not ranks:
            raise ValueError("No member has a fitness yet. Call evaluate or evolve first.")
        _, _, slot = max(ranks)
        return self._handed_out[slot]

    @property
    def healthy(self) -> "list[Agent]":
        """Agents that have neither failed nor been retired."""
        return [agent for agent in self.agents if agent.failed is None and not agent.retired]

    def collect(
        self,
        env: GroupEnvironment,
        *,
        step: int,
        samples_per_step: int,
        starts_per_step: int,
        stop: Stop = NEVER,
    ) -> RolloutBatch:
        """Sample and reward the groups of one learning step of all healthy members.

        Each member samples `samples_per_step / group_size` groups. Each group has a start, which is
        a prompt or a reset seed; members use the first starts of the step. With
        `Objective.dynamic_sampling`, groups without learning signal are replaced by groups on the
        following starts; see `resample_groups`.

        Args:
            env: Provides starts and rewards.
            step: Number of the learning step.
            samples_per_step: Completions (or episodes) per member; every group size divides it.
            starts_per_step: Number of starts that a step uses without refills, the same for all
                steps of a run.
            stop: Checked between tokens or steps, and between reward calls.

        Raises:
            ValueError: If a group size does not divide `samples_per_step`, a group has no start,
                no member is healthy, or `env` has no groups.
        """
        check_groups(env)
        if whole_between("step", step, 0) == self._learned_step:
            warn(
                f"The members have learned from step {step}, whose starts and random numbers are"
                " repeated. Count step up in a loop of your own; evogrpo.resume continues a run."
            )
        acting = self.healthy
        if not acting:
            raise ValueError(
                "collect needs a healthy member, but all have failed or retired. Load a checkpoint."
            )
        # 1. Give each member the starts of its groups.
        learners = [agent.learner(step) for agent in acting]
        groups = list[range]()
        for agent in acting:
            check_group_size(agent.group_size, samples_per_step, owner=f"member {agent.index}")
            groups.append(range(samples_per_step // agent.group_size))
        needed = max(len(positions) for positions in groups)
        whole_between("starts_per_step", starts_per_step, needed)
        # 2. Sample and reward. Refills would prefer groups of medium difficulty, so they do not
        #    enter `group_rewards`.
        max_refills = self.members.settings.objective.dynamic_sampling
        starts_with_refills = starts_per_step * (1 + max_refills)
        sampled = sample_groups(
            self.members,
            env,
            learners,
            groups,
            starts_per_step=starts_with_refills,
            purpose="sample",
            stop=stop,
        )
        group_rewards = _mean_group_rewards(sampled, len(distinct_settings(learners)))
        # 3. Replace groups without learning signal (dynamic sampling).
        if max_refills:
            used = {
                each.slot: positions.stop for each, positions in zip(acting, groups, strict=True)
            }
            sampled = resample_groups(
                self.members,
                env,
                learners,
                sampled,
                used=used,
                starts_per_step=starts_with_refills,
                max_rounds=max_refills,
                stop=stop,
            )
        # 4. Observation statistics change only now: an interrupted rollout leaves them as they
        #    were.
        self.members.update_statistics(sampled.observed)
        return replace(sampled, group_rewards=group_rewards)

    def learn(
        self, experience: Experience, *, step: int, stop: Stop = NEVER
    ) -> dict[int, LearnReport]:
        """Take one learning step of the healthy members, and mark those that fail.

        Args:
            experience: Rows of every healthy member, by policy.
            step: Number of the learning step; part of the name of the random streams.
            stop: Checked before each forward pass. After an interruption, members may have learned
                in part.

        Returns:
            One report per member, by slot.

        Raises:
            ValueError: If the experience does not fit, or a custom algorithm returns a report with
                wrong types.
        """
        if not isinstance(experience, Mapping):
            raise ValueError(
                f"learn needs the experience of collect(...), got {class_name(experience)}."
            )
        learners = [agent.learner(step) for agent in self.healthy]
        healthy = [learner.slot for learner in learners]
        experience = {policy: replace(batch, stop=stop) for policy, batch in experience.items()}
        # If one rank fails, all raise. Language models divide their passes inside of this block.
        with self.processes.shared_errors():
            learned = self.algorithm.learn_together(self.members, learners, experience)
            reports = {slot: _checked(report) for slot, report in learned.items()}
        self.members.match_ranks(healthy)
        for slot, report in reports.items():
            self.agents[slot].failed = report.failed
        self._learned_step = step
        return reports

    def evaluate(
        self, env: GroupEnvironment, split: Split = "validation", *, questions: int | None = None
    ) -> None:
        """Set the fitness of all healthy members, on the same questions.

        Failed and retired members get None.

        Args:
            env: Provides questions and rewards.
            split: "validation" for selection.
            questions: Number of questions, from the first on; None = all.
        """
        self.check(env)
        healthy = [agent.slot for agent in self.healthy]
        fitness: Mapping[int, Fitness] = {}
        if healthy:
            fitness, _ = measure_fitness(
                self.members,
                healthy,
                env,
                split,
                config=GREEDY_EVALUATION,
                questions=questions,
                settings=self.task_settings,
            )
        # Last, so that an interrupted evaluation changes nothing.
        for agent in self.agents:
            agent.fitness = fitness.get(agent.slot)

    def check_replicas(self) -> None:
        """Compare a checksum of all train states over all ranks.

        Raises:
            ProcessError: If they differ.
        """
        if self.processes.size == 1:
            return
        digests = self.processes.all_gather(self.members.checksum())
        differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if differing:
            raise ProcessError(
                f"Train states of members differ between rank 0 and ranks {differing}. All ranks"
                " must run the same program on the same kind of device. Start all processes again"
                " to resume from the last checkpoint."
            )

    def sample_with(self, sampler: Sampler) -> None:
        """Set an external engine that generates completions from now on.

        With several ranks, call this on each of them, with a sampler of its own; each samples its
        share of the groups. `sampler.sync` is called with changed slots, on all ranks, before
        sampling. If the engine's log-probabilities differ from the trainer's, set the objective's
        `importance_correction`.

        Raises:
            ValueError: If the members do not generate completions.
        """
        optional_method(self.members, "sample_with")(sampler)

    def check(self, env: Any) -> None:
        """Check that the members can act in an environment.

        Raises:
            ValueError: If they cannot.
        """
        check_groups(env)
        check_settings(env, self.space, [agent.hyperparameters for agent in self.agents])
        self.members.check(env)

    @property
    def task_settings(self) -> dict[int, TaskSettings]:
        """Task settings of all members, by slot."""
        return {agent.slot: agent.hyperparameters.task_settings for agent in self.agents}

    def plan(self, strategy: Strategy, generations: Sequence[Generation]) -> Plan:
        """Return a strategy's plan for the next generation.

        If architectures evolve, children may get new ones.

        Args:
            strategy: The strategy.
            generations: All generations so far; the last one describes the current members.

        Raises:
            ValueError: If all members failed, or the plan is invalid.
        """
        seed = self.members.settings.seed
        # 1. Ask the strategy.
        history = History(
            space=self.space, next_index=self.next_index, generations=tuple(generations)
        )
        plan = strategy.plan(history, generator(seed, "plan", history.last.number))
        if not isinstance(plan, Plan):
            raise ValueError(
                f"Strategy.plan must return an evogrpo.evolution.Plan, got {class_name(plan)}."
            )
        # 2. Use the plan as the journal returns it to a resumed run, which refuses values of other
        # types.
        plan = validate(Plan, load_json(dump_json(dump(plan), what="plan")))
        plan.check(history)
        for child in plan.children:
            self.members.check_hyperparameters(child.hyperparameters)
        # 3. Draw changes of architectures. Each child has a random stream of its own.
        if not self.members.evolves or not strategy.mutates:
            return plan
        children = []
        for planned in plan.children:
            child = planned
            parent = plan.parents[planned.slot]
            rng = generator(seed, "change of network", child.index)
            # A new member has the configured network.
            if parent is None:
                drawn = None
            else:
                drawn = self.members.propose_architecture(parent, rng)
            if drawn is not None:
                changes = {**child.changes, NETWORK: (drawn.old, drawn.new)}
                child = replace(child, changes=changes, architecture=drawn.architecture)
            children.append(child)
        return replace(plan, children=tuple(children))

    def apply(self, plan: Plan) -> None:
        """Apply a plan: copy train states, retire members, and set up children.

        Raises:
            ValueError: If the plan has another number of slots, or the index of a child is not new.
        """
        if len(plan.parents) != len(self):
            raise ValueError(
                f"A plan must have one entry per slot: got {len(plan.parents)} for {len(self)}"
                " slots."
            )
        if any(child.index < self.next_index for child in plan.children):
            raise ValueError(
                f"The indices of children must be new, from {self.next_index} on, got"
                f" {[child.index for child in plan.children]}."
            )
        # 1. Record the births.
        self.lineage += plan.children
        # 2. Copy all train states before any architecture changes: a parent's slot may itself get a
        # child.
        self.members.inherit(plan.parents)
        # 3. Retire the members of empty slots.
        for slot in plan.vacant:
            agent = self.agents[slot]
            agent.fitness = None
            agent.failed = None
            agent.retired = True
        # 4. Turn the agents of replaced members into their children.
        for child in plan.children:
            agent = self.agents[child.slot]
            agent.index = child.index
            agent.parent = child.parent
            agent.born = child.born
            agent.hyperparameters = child.hyperparameters
            agent.fitness = None
            agent.failed = None
            agent.retired = False
            agent.steps = 0
            if child.architecture is not None:
                # Drawn from seed and index alone, so that a resumed run draws the same.
                rng = generator(self.members.settings.seed, "weights of a new network", child.index)
                self.members.change_architecture(child.slot, child.architecture, rng)
            self.next_index = max(self.next_index, child.index + 1)
            if child.changes:
                agent.mutated()


def _checked(report: LearnReport) -> LearnReport:
    """Return a report with plain numbers.

    Raise ValueError for types that a resumed run would refuse.
    """
    if not isinstance(report.failed, str | None):
        raise ValueError(f"LearnReport.failed must be text or None, got {shown(report.failed)}.")
    return replace(
        report,
        optimizer_steps=whole_between("LearnReport.optimizer_steps", report.optimizer_steps, 0),
        tokens=whole_between("LearnReport.tokens", report.tokens, 0),
    )


def check_settings(
    env: Any, space: HyperparameterConfig, members: Sequence[Hyperparameters]
) -> None:
    """Check that the environment reads the task settings that members have or may get.

    Args:
        env: The environment.
        space: Search space, which has the values that they may get.
        members: Hyperparameters of the members.

    Raises:
        ValueError: If it has no task settings, does not read one, or cannot use a value.
    """
    values: dict[str, dict[SettingValue, None]] = {}
    for name, parameter in space.task_settings.items():
        values[name] = dict.fromkeys(parameter.choices or parameter.bounds)
    for member in members:
        for name, value in member.task_settings.items():
            values.setdefault(name, {})[value] = None
    if not values:
        return
    listed = {name: tuple(each) for name, each in values.items()}
    require_task_settings(env, values).check_settings(listed)


def _mean_group_rewards(sampled: RolloutBatch, settings: int) -> dict[int, dict[int, float]]:
    """Return the mean raw reward of each group, by slot and position of its start.

    Args:
        sampled: The samples.
        settings: Number of distinct task settings of the step.
    """
    groups: dict[tuple[int, int], list[float]] = {}
    slots = sampled.member_ids.tolist()
    # The starts of one position, one for each of the settings, follow each other.
    positions = (sampled.start_ids // settings).tolist()
    rewards_of_rows = sampled.scores.rewards.tolist()
    for slot, position, reward in zip(slots, positions, rewards_of_rows, strict=True):
        if math.isfinite(reward):  # NaN = no reward applies
            groups.setdefault((slot, position), []).append(reward)
    means: dict[int, dict[int, float]] = {}
    for (slot, position), rewards in groups.items():
        mean = math.fsum(rewards) / len(rewards)
        means.setdefault(slot, {})[position] = mean
    return means
