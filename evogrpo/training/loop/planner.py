"""Plans of the strategy, carried out after each generation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.shared_experience import SharedExperience, samples_by_rank
from evogrpo.evolution.strategies import Strategy
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.schedule import Schedule


def check_shared(population: Population) -> None:
    """Refuse members that cannot learn from each other's samples.

    Raises:
        ValueError: If there is one member only, members see observations each in its own way, or their
            algorithm has a learning rule of its own.
    """
    SharedExperience.check_size(len(population))
    remedy = "give experience='own'"
    if getattr(population.members.settings, "normalise_observations", False):
        raise ValueError(
            "shared experience needs members that see alike, but with normalise_observations=True each sees by the "
            f"running statistics of its own episodes: leave that out, or {remedy}"
        )
    if "objective" in population.algorithm.unused_options:
        own = population.algorithm.__name__
        raise ValueError(
            f"shared experience is learnt from by GRPO's ratio to the policy that acted, but {own} has a learning rule "
            f"of its own: {remedy}"
        )


def sources_of(
    experience: SharedExperience, population: Population, collected: RolloutBatch
) -> Mapping[int, tuple[int, ...]]:
    """Return from whose samples each healthy member learns, by slot."""
    rewards, acted = collected.scores.rewards, collected.member_ids.numpy()
    return experience.sources(
        {int(slot): _mean(rewards[acted == slot]) for slot in np.unique(acted)},
        [agent.slot for agent in population.healthy],
    )


def _mean(rewards: np.ndarray) -> float:
    """Return the mean of the rewards that apply; NaN where none does."""
    known = rewards[~np.isnan(rewards)]
    return float(known.mean()) if len(known) else float("nan")


class StrategyError(RuntimeError):
    """A strategy raised, or its plan cannot be carried out."""


class Planner:
    """Asks the strategy of a run, and does as it says.

    Args:
        population: The members; changed in place.
        strategy: Who decides.
        schedule: What a learning step and a generation are at first.
        run_state: Where the run stands; its budgets are set.
        experience: How members learn from each other's samples; None = each from its own.
    """

    def __init__(
        self,
        population: Population,
        strategy: Strategy,
        schedule: Schedule,
        run_state: RunState,
        experience: SharedExperience | None = None,
    ) -> None:
        self._population, self._strategy, self._experience = population, strategy, experience
        self._schedule, self._run_state = schedule, run_state
        self._set_budgets(None, None)

    def plan(self) -> Plan:
        """Let the strategy plan what follows the generation that was evaluated.

        Raises:
            StrategyError: If it cannot; it remembers nothing of that, and a run that goes on asks again.
        """
        remembered = self._strategy.state()
        try:
            plan = self._population.plan(self._strategy, self._run_state.history)
            if self._experience is None:
                _check_samples(plan)
            elif self._experience.samplers == "rank":
                plan = samples_by_rank(plan, self._population.history(self._run_state.history))
        except (Exception, SystemExit) as error:
            self._strategy.load_state(remembered)  # what it noted half-way is forgotten
            name = type(self._strategy).__name__
            raise StrategyError(f"{name} cannot plan: {type(error).__name__}: {error}") from error
        return plan

    def carry_out(self, plan: Plan) -> None:
        """Do what a plan says."""
        self._population.apply(plan)
        self._set_budgets(plan.samples_per_step, plan.steps_per_generation)
        self._set_samples(plan.samples)
        self._run_state.unplanned = False

    def catch_up(self) -> None:
        """Carry out the plan that the last generation is still waiting for, if there is one to make."""
        if self._run_state.unplanned:
            self.carry_out(self.plan())

    def _set_samples(self, samples: Sequence[int] | None) -> None:
        """Set who collects how many samples in the next generation; None = all as many."""
        run_state = self._run_state
        run_state.samples = None if samples is None else list(samples)
        for agent, count in zip(self._population.agents, samples or (), strict=False):
            run_state.block = max(run_state.block, count // agent.hyperparameters.group_size)

    def _set_budgets(self, samples_per_step: int | None, steps_per_generation: int | None) -> None:
        """Set what the next generations spend; None = as before, at first as scheduled."""
        run_state, schedule = self._run_state, self._schedule
        run_state.samples_per_step = samples_per_step or run_state.samples_per_step or schedule.samples_per_step
        run_state.steps_per_generation = (
            steps_per_generation or run_state.steps_per_generation or schedule.steps_per_generation
        )
        # Kept when members with the smallest groups are gone: it decides the order of questions.
        needed = replace(schedule, samples_per_step=run_state.samples_per_step).block(self._population)
        run_state.block = max(run_state.block, needed)


def _check_samples(plan: Plan) -> None:
    """Refuse a plan that leaves somebody with nothing to learn from."""
    idle = [slot for slot, count in enumerate(plan.samples or ()) if not count and slot not in plan.vacant]
    if idle:
        raise ValueError(
            f"members learn from their own samples, so each collects some, got none in slots {idle} of {plan.samples}: "
            "give experience='shared' to let them learn from others'"
        )
