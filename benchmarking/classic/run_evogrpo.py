"""Train GRPO on one task: one agent with hand-tuned hyperparameters, or a population of 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from recording import Job, Recorder

from evogrpo import (
    GRPO,
    GymnasiumGroups,
    HyperparameterConfig,
    NetworkConfig,
    Population,
    RLParameter,
    evolve,
)
from evogrpo.envs.control.episodes import Episodes

SIZES = {"grpo": 1, "grpo-8": 8}
NETWORK = NetworkConfig(hidden=(64,))
VALIDATION_STARTS = 32
STEPS_PER_GENERATION = 5


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of one task.

    Attributes:
        hyperparameters: Hyperparameters of the single agent and of the first member of a
            population.
        samples_per_step: Episodes per member and learning step.
        normalise_observations: Normalise observations by running statistics.
        evolving: Search space of a population.
    """

    hyperparameters: Mapping[str, Any]
    samples_per_step: int = 32
    normalise_observations: bool = False
    evolving: HyperparameterConfig = field(
        default_factory=lambda: HyperparameterConfig(
            lr=RLParameter(min=1e-3, max=2e-2, scale="log"),
            update_epochs=RLParameter(min=1, max=4),
            clip_coef=RLParameter(min=0.1, max=0.4),
        )
    )


RECIPES: dict[str, Recipe] = {
    "CartPole-v1": Recipe(
        hyperparameters={
            "lr": 5e-3,
            "gamma": 1.0,
            "group_size": 8,
            "batch_size": 1024,
            "update_epochs": 1,
        },
        samples_per_step=16,
        evolving=HyperparameterConfig(
            lr=RLParameter(min=2e-3, max=1e-2, scale="log"),
            gamma=RLParameter(min=0.98, max=1.0),
            clip_coef=RLParameter(min=0.1, max=0.4),
        ),
    ),
    "Acrobot-v1": Recipe(
        hyperparameters={
            "lr": 5e-3,
            "gamma": 0.99,
            "group_size": 8,
            "batch_size": 2048,
            "update_epochs": 2,
        }
    ),
    "Pendulum-v1": Recipe(
        hyperparameters={
            "lr": 5e-3,
            "gamma": 0.95,
            "group_size": 8,
            "batch_size": 1024,
            "update_epochs": 4,
        }
    ),
    "MountainCar-v0": Recipe(
        hyperparameters={
            "lr": 5e-3,
            "gamma": 0.99,
            "group_size": 8,
            "batch_size": 2048,
            "update_epochs": 2,
        },
        normalise_observations=True,
    ),
    "LunarLander-v3": Recipe(
        hyperparameters={
            "lr": 3e-3,
            "gamma": 0.99,
            "group_size": 8,
            "batch_size": 2048,
            "update_epochs": 4,
        }
    ),
}


class CountedGroups(GymnasiumGroups):
    """Count all environment steps, those of validation included.

    Attributes:
        steps: Environment steps so far.
    """

    steps = 0

    def play_request(self, *arguments: Any) -> Episodes:
        """Play episodes and count their steps."""
        played = super().play_request(*arguments)
        self.steps += int(played.lengths.sum())
        return played


def make_population(size: int, env: GymnasiumGroups, recipe: Recipe, seed: int) -> Population:
    """Return one agent with the hyperparameters of the recipe, or several around them."""
    return GRPO.population(
        size,
        env.observation_space,
        env.action_space,
        network=NETWORK,
        normalise_observations=recipe.normalise_observations,
        hp_config=recipe.evolving if size > 1 else None,
        samples_per_step=recipe.samples_per_step,
        seed=seed,
        **recipe.hyperparameters,
    )


def train_alone(
    env: CountedGroups, population: Population, samples: int, recorder: Recorder
) -> None:
    """Train one agent until both budgets are spent; its current policy is evaluated."""
    (agent,) = population

    def act(observations: np.ndarray) -> np.ndarray:
        return agent.predict(observations, deterministic=True)[0]

    step = 0
    while not recorder.offer(env.steps, act):
        block = samples // agent.group_size
        collected = population.collect(
            env, step=step, samples_per_step=samples, starts_per_step=block
        )
        population.learn(collected.experience, step=step)
        if agent.failed:
            raise SystemExit(agent.failed)
        step += 1


def train_population(
    env: CountedGroups, population: Population, samples: int, recorder: Recorder
) -> None:
    """Train a population until both budgets are spent.

    The best member of the last validation is evaluated.
    """

    def act(observations: np.ndarray) -> np.ndarray:
        evaluated = any(agent.fitness is not None for agent in population)
        return (population.best if evaluated else population[0]).predict(
            observations, deterministic=True
        )[0]

    recorder.offer(env.steps, act)
    for _ in evolve(
        population,
        env,
        strategy="tournament",
        progress=False,
        samples_per_step=samples,
        steps_per_generation=STEPS_PER_GENERATION,
        validation_questions=VALIDATION_STARTS,
        test_questions=0,
        max_seconds=1e9,
    ):
        if recorder.offer(env.steps, act):
            break


def main() -> None:
    job = Job.from_arguments(__doc__)
    recorder = Recorder(job, "torch", "gymnasium")
    recipe = RECIPES[job.task.name]
    size = SIZES[job.contestant]
    env = CountedGroups(job.task.name, validation_size=VALIDATION_STARTS, seed=job.seed)
    population = make_population(size, env, recipe, job.seed)
    (train_alone if size == 1 else train_population)(
        env, population, recipe.samples_per_step, recorder
    )
    recorder.write({**recipe.hyperparameters, "hidden": NETWORK.hidden})


if __name__ == "__main__":
    main()
