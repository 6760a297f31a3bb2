"""Train evogrpo's GRPO on one task: one agent with good fixed hyperparameters, or a population of 8 that evolves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from recipes import RECIPES, Recipe
from recording import Recorder
from runners import Job
from tasks import Task

from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.population import Population
from evogrpo.envs.control.gymnasium_groups import GymnasiumGroups
from evogrpo.envs.control.rollout import Episodes
from evogrpo.training.evolve import evolve

SIZES = {"grpo": 1, "grpo-8": 8}


class CountedGroups(GymnasiumGroups):
    """Counts every environment step, those of validation included.

    Attributes:
        steps: So far.
    """

    steps = 0

    def _play(self, *arguments: Any) -> Episodes:
        played = super()._play(*arguments)
        self.steps += int(played.lengths.sum())
        return played


def make_population(size: int, env: GymnasiumGroups, recipe: Recipe, seed: int) -> Population:
    """Return agents for a task; one alone has the recipe's hyperparameters, several are spread over the ranges."""
    return GRPO.population(
        size,
        env.observation_space,
        env.action_space,
        network=recipe.network,
        normalise_observations=recipe.normalise_observations,
        hp_config=recipe.evolving if size > 1 else None,
        samples_per_step=recipe.samples_per_step,
        seed=seed,
        **recipe.hyperparameters,
    )


def train_alone(env: CountedGroups, population: Population, recipe: Recipe, recorder: Recorder) -> None:
    """Train one agent until both budgets are spent; it is worth what it is after its last learning step."""
    (agent,) = population

    def act(observations: np.ndarray) -> np.ndarray:
        return agent.predict(observations, deterministic=True)[0]

    samples, step = recipe.samples_per_step, 0
    while not recorder.offer(env.steps, act):
        block = samples // agent.group_size
        collected = population.collect(env, step=step, samples_per_step=samples, block=block)
        population.learn(collected.experience, step=step)
        if agent.failed:
            raise SystemExit(agent.failed)
        step += 1


def train_population(env: CountedGroups, population: Population, recipe: Recipe, recorder: Recorder) -> None:
    """Train several until both budgets are spent; they are worth what the best at the last validation is worth."""

    def act(observations: np.ndarray) -> np.ndarray:
        evaluated = any(agent.fitness is not None for agent in population)
        return (population.best if evaluated else population[0]).predict(observations, deterministic=True)[0]

    recorder.offer(env.steps, act)
    for _ in evolve(
        population,
        env,
        progress=False,
        samples_per_step=recipe.samples_per_step,
        steps_per_generation=recipe.steps_per_generation,
        validation_questions=recipe.validation_starts,
        test_questions=0,
        max_seconds=1e9,
    ):
        if recorder.offer(env.steps, act):
            break


def train(task: Task, contestant: str, seed: int, recorder: Recorder) -> None:
    """Train one contestant on one task."""
    recipe, size = RECIPES[task.name], SIZES[contestant]
    env = CountedGroups(task.name, validation_size=recipe.validation_starts, seed=seed)
    population = make_population(size, env, recipe, seed)
    (train_alone if size == 1 else train_population)(env, population, recipe, recorder)


def main() -> None:
    job = Job.from_arguments(__doc__)
    torch.set_num_threads(job.threads)
    recorder = job.recorder("torch", "gymnasium")
    train(job.task, job.contestant, job.seed, recorder)
    recipe = RECIPES[job.task.name]
    recorder.write(settings={**recipe.hyperparameters, "network": asdict(recipe.network)})


if __name__ == "__main__":
    main()
