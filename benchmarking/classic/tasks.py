"""Tasks of the comparison with PPO.

Imports nothing, so that runners in any environment can read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Task:
    """One Gymnasium environment and its two budgets.

    Attributes:
        name: Environment id.
        steps: Budget of environment steps; PPO's schedules end there.
        seconds: Budget of training time.
        random: Mean return of random actions; 0 on the normalised scale.
        solved: Return that counts as solved; 1 on the normalised scale. Gymnasium's reward
            threshold, and -150 for Pendulum, which has none.
        needs: Module that the environment needs besides gymnasium; None = none.
    """

    name: str
    steps: int
    seconds: float
    random: float
    solved: float
    needs: str | None = None

    def normalised(self, score: float) -> float:
        """Return a score on the scale from random (0) to solved (1)."""
        return (score - self.random) / (self.solved - self.random)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="CartPole-v1", steps=100_000, seconds=8.0, random=23.0, solved=475.0),
        Task(name="Acrobot-v1", steps=200_000, seconds=30.0, random=-498.0, solved=-100.0),
        Task(name="Pendulum-v1", steps=100_000, seconds=30.0, random=-1230.0, solved=-150.0),
        Task(name="MountainCar-v0", steps=200_000, seconds=30.0, random=-200.0, solved=-110.0),
        Task(
            name="LunarLander-v3",
            steps=200_000,
            seconds=40.0,
            random=-184.0,
            solved=200.0,
            needs="Box2D",
        ),
    )
}
