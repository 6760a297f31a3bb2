"""The task section of a run whose members act for several agents: a parallel PettingZoo environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from evogrpo.agents.members.control.team_settings import Credit
from evogrpo.envs.control.joint.assignment import Policies
from evogrpo.envs.control.joint.pettingzoo import PettingZooGroups
from evogrpo.envs.control.joint.scores import Score, summed
from evogrpo.training.configuration.sources import load_module, load_named


@dataclass(frozen=True, kw_only=True)
class ParallelTask:
    """A parallel environment of several agents; see `evogrpo.envs.control.joint.pettingzoo.PettingZooGroups`.

    Attributes:
        parallel_env: What makes it: a module with a function `parallel_env`, such as "mpe2.simple_spread_v3", or
            "module:function" or "path.py:function". Its code is run.
        policies: "shared": one policy for all agents; "prefix": one for all agents whose names agree before the last
            underscore; "independent": one for each agent.
        credit: What an agent's action is worth: "team" = what all agents earn from then on, "agent" = what it earns
            itself.
        agent_ids: Whether a policy that acts for several agents is told which of them it acts for.
        env_kwargs: Keyword arguments of the environment.
        max_episode_steps: Steps after which all living agents are truncated; null = the environment's own limit, or
            1,000 where it has none.
        score: What fitness is: sum (the default), min or mean of what all agents earn; the name of an agent, of a group
            of agents named alike but for their number, or a list of these, whose returns are added up; or
            "module:function" or "path.py:function", of what each agent earned. Its code is run.
        remake: Whether every episode gets an environment made anew; null = where that is found to matter.
        lanes: Most joint episodes at a time.
        train_size: Training starts.
        validation_size: Starts for selection.
        test_size: Starts for the final report.
        seed: Of the starts and their order; null = the run's seed.
    """

    key: ClassVar[str] = "parallel_env"
    what: ClassVar[str] = "a parallel PettingZoo environment"

    parallel_env: str
    policies: Policies = "shared"
    credit: Credit = "team"
    agent_ids: bool = False
    env_kwargs: Mapping[str, Any] | None = None
    max_episode_steps: int | None = None
    score: str | tuple[str, ...] | None = None
    remake: bool | None = None
    lanes: int = 64
    train_size: int = 100_000
    validation_size: int = 64
    test_size: int = 256
    seed: int | None = None

    @property
    def label(self) -> str:
        """The task in a few words."""
        return self.parallel_env

    def facts(self) -> dict[str, str]:
        """Return whose code makes the environment, and whose says what fitness is."""
        scored = f"; {self.score}, fitness" if isinstance(self.score, str) and ":" in self.score else ""
        return {"your code": f"{self.parallel_env}, which makes the environment{scored}"}

    def environment(self, *, seed: int) -> PettingZooGroups:
        """Make one environment to look at its agents and their spaces, and be ready to make the others.

        Args:
            seed: Of the starts and their order.

        Raises:
            ValueError: If there is no such environment here, or an argument does not fit.
        """
        make = self._maker()
        try:
            return PettingZooGroups(
                make,
                env_kwargs=self.env_kwargs,
                max_episode_steps=self.max_episode_steps,
                lanes=self.lanes,
                score=self._score(),
                remake=self.remake,
                train_size=self.train_size,
                validation_size=self.validation_size,
                test_size=self.test_size,
                seed=seed,
            )
        except (ImportError, TypeError, AssertionError) as error:
            raise ValueError(f"task.parallel_env: {self.parallel_env!r} cannot be made: {error}") from error

    def _score(self) -> Score:
        if self.score is None:
            return summed
        return load_named(self.score, "score") if isinstance(self.score, str) and ":" in self.score else self.score

    def _maker(self) -> Callable[..., Any]:
        if ":" in self.parallel_env:
            return load_named(self.parallel_env, "parallel environment")
        if self.parallel_env.endswith(".py"):
            raise ValueError(
                f"task.parallel_env names a file with what it takes from it, got {self.parallel_env!r}: write "
                f'"{self.parallel_env}:parallel_env"'
            )
        make = getattr(load_module(self.parallel_env), "parallel_env", None)
        if not callable(make):
            raise ValueError(
                f"{self.parallel_env} has no function parallel_env: name a module that has one, such as "
                'mpe2.simple_spread_v3, or "module:function"'
            )
        return make  # type: ignore[no-any-return]  # callable, as just checked
