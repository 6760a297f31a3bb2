"""What members learn in the study, between which values their hyperparameters are looked for, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evogrpo.config.search_space import HyperparameterConfig, RLParameter


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of the study.

    Attributes:
        name: Environment id, or name of a built-in reasoning task.
        words: Whether members are language models.
        budget: Steps in the environment (tokens for language models) of everything but the test: learning, baseline
            and validation.
        seconds: Processor time at which arms are compared as well.
        random: Mean return of the untrained network or base; 0 on the normalised scale.
        solved: 1 on the normalised scale: what the hand-tuned agent reaches with more than the budget, or what
            Gymnasium calls solved.
        oracle: The hand-tuned agent's hyperparameters; they were found on seeds that the study does not count.
        oracle_samples: Its samples per learning step.
        members: Of a population.
        samples: Samples of each of its members per learning step.
        steps: Learning steps of its generations; a single agent's are twice as long, as nothing is decided then.
        validation: Held-out starts for choosing.
        test: Held-out starts for the table.
        space: What is looked for, three decades of learning rate.
        fixed: Hyperparameters that every arm has.
        needs: A module that the task has to have beside the package; None = nothing.
    """

    name: str
    words: bool = False
    budget: int
    seconds: float
    random: float
    solved: float
    oracle: Mapping[str, Any]
    oracle_samples: int = 32
    members: int = 8
    samples: int = 8
    steps: int = 4
    validation: int = 32
    test: int = 100
    space: HyperparameterConfig
    fixed: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None

    def normalised(self, score: float) -> float:
        """Return a score on the scale where random play is 0 and solved is 1."""
        return (score - self.random) / (self.solved - self.random)


PLAY_SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-4, max=1e-1, scale="log"),
    clip_coef=RLParameter(min=0.1, max=0.4, scale="log"),
    group_size=RLParameter(choices=[4, 8]),
    update_epochs=RLParameter(min=1, max=8, scale="log"),
)
WORDS_SPACE = HyperparameterConfig(
    lr=RLParameter(min=1e-6, max=1e-3, scale="log"),
    clip_coef=RLParameter(min=0.1, max=0.4, scale="log"),
    group_size=RLParameter(choices=[4, 8]),
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="CartPole-v1",
            budget=200_000,
            seconds=4.0,
            random=23.0,
            solved=500.0,
            oracle={"lr": 5e-3, "update_epochs": 2},
            space=PLAY_SPACE,
            fixed={"batch_size": 256},
        ),
        Task(
            name="Acrobot-v1",
            budget=300_000,
            seconds=8.0,
            random=-498.0,
            solved=-80.0,
            oracle={"lr": 1e-3, "update_epochs": 2},
            space=PLAY_SPACE,
            fixed={"batch_size": 256},
        ),
        Task(
            name="Pendulum-v1",
            budget=500_000,
            seconds=12.0,
            random=-1230.0,
            solved=-150.0,
            oracle={"lr": 3e-3, "update_epochs": 4},
            space=PLAY_SPACE,
            fixed={"batch_size": 256},
        ),
        Task(
            name="LunarLander-v3",
            budget=200_000,
            seconds=25.0,
            random=-184.0,
            solved=200.0,
            oracle={"lr": 1e-3, "update_epochs": 4},
            oracle_samples=16,
            space=PLAY_SPACE,
            fixed={"batch_size": 256},
            needs="Box2D",
        ),
        Task(
            name="FrozenLake-v1",
            budget=200_000,
            seconds=12.0,
            random=0.015,
            solved=0.74,
            oracle={"lr": 3e-3, "update_epochs": 2},
            oracle_samples=64,
            validation=100,
            test=1000,
            space=PLAY_SPACE,
            fixed={"batch_size": 256},
        ),
        Task(
            name="two_digit_sums",
            words=True,
            budget=60_000,
            seconds=80.0,
            random=0.05,
            solved=0.6,
            oracle={"lr": 3e-4},
            oracle_samples=64,
            members=4,
            samples=16,
            test=128,
            space=WORDS_SPACE,
            fixed={"batch_size": 32, "max_grad_norm": 1.0},
        ),
        Task(
            name="number_sequences",
            words=True,
            budget=60_000,
            seconds=80.0,
            random=0.0,
            solved=0.8,
            oracle={"lr": 3e-4},
            oracle_samples=64,
            members=4,
            samples=16,
            test=128,
            space=WORDS_SPACE,
            fixed={"batch_size": 32, "max_grad_norm": 1.0},
        ),
    )
}
