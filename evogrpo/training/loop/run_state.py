"""Where a run stands: everything a checkpoint must hold besides the members themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from evogrpo.algorithms.population import KeptStates
from evogrpo.config.checks import declared_fields, whole_between
from evogrpo.config.search_space import MOST_SAMPLES
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import Generation
from evogrpo.reporting.step_records import EvaluationCost, Example
from evogrpo.training.schedule import MOST_STEPS


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best member ever, as it was when it earned its fitness.

    Attributes:
        index: Who it was.
        generation: When.
        fitness: What it earned.
        state: Its learner state.
        digest: Of the folder it was saved in; None where nothing is recorded.
        second: What it earned on the second set; None before the finalists are evaluated.
    """

    index: int
    generation: int
    fitness: Fitness
    state: Mapping[str, Tensor]
    digest: str | None = None
    second: Fitness | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint knows of it, beside the folder of its own that it is stored in."""
        return {
            "index": self.index,
            "generation": self.generation,
            "fitness": self.fitness.mean,
            "digest": self.digest,
        }


@dataclass(frozen=True, kw_only=True)
class KnownBest:
    """What a checkpoint of a run knows of the best member, which lies in a folder of its own.

    Attributes:
        index: Who it was.
        generation: When it earned its fitness.
        fitness: The mean of that.
        digest: Of the folder.
    """

    index: int
    generation: int
    fitness: float
    digest: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self | None:
        """Read it from a checkpoint's record; None where there was none yet."""
        known = record["best"]
        return None if known is None else cls(**declared_fields(cls, known))


@dataclass(kw_only=True)
class RunState:
    """Counters and sums of a run.

    Attributes:
        members: Number of members.
        generation: Generations evaluated.
        step: Learning steps taken.
        step_in_generation: Learning steps of the generation under way.
        samples_per_step: Completions of every member per learning step, now; 0 before the run began.
        steps_per_generation: Learning steps before an evaluation, now; likewise.
        samples: How many samples each slot collects instead; None = samples_per_step each.
        block: Length of a step's block of starts, which never shrinks; likewise.
        unplanned: Whether the last generation has been evaluated but its plan has not been carried out.
        threads: Threads that torch computes with, which decide how sums round; 0 before the run began.
        seconds: Wall-clock time spent, over all parts of the run.
        out_of_time: The longest time limit that has ended a part of the run; 0 = none has.
        tokens: Tokens processed by all members.
        slot_tokens: Tokens of each slot since the run began, whoever lived there.
        timesteps: Tokens of all members that were sampled to learn from; for small networks steps in the environment.
        member_tokens: Tokens of each slot in the generation under way.
        member_seconds: Share of each slot in that generation's time, by tokens.
        metrics: Sums of each slot's metrics in that generation: name -> (sum, count).
        latest_tokens: Tokens of the latest learning step, updates included.
        latest_timesteps: Those of them that were sampled.
        evaluation_tokens: Tokens (or environment steps) that evaluations took so far, the untrained base's included.
        evaluation_seconds: Their wall-clock time.
        rollouts: What each slot earned in the generation under way: step, place of the start in that step's block, and
            the mean raw reward of the group.
        finalists: The best of generations, as they were then, for the second set; none where there is none.
        finalists_generation: After which generation the finalists have answered it; 0 = not yet.
        examples: One completion of each member, from the last learning step.
        baseline: Fitness of the untrained base; None before it was measured.
        best: The best member ever; None before the first evaluation.
        history: Every generation that was evaluated.
    """

    members: int
    generation: int = 0
    step: int = 0
    step_in_generation: int = 0
    samples_per_step: int = 0
    steps_per_generation: int = 0
    samples: list[int] | None = None
    block: int = 0
    unplanned: bool = False
    threads: int = 0
    seconds: float = 0.0
    out_of_time: float = 0.0
    tokens: int = 0
    timesteps: int = 0
    slot_tokens: list[int] = field(default_factory=list)
    member_tokens: list[int] = field(default_factory=list)
    member_seconds: list[float] = field(default_factory=list)
    metrics: list[dict[str, tuple[float, int]]] = field(default_factory=list)
    latest_tokens: int = 0
    latest_timesteps: int = 0
    evaluation_tokens: int = 0
    evaluation_seconds: float = 0.0
    rollouts: list[list[tuple[int, int, float]]] = field(default_factory=list)
    finalists: KeptStates = field(default_factory=KeptStates)
    finalists_generation: int = 0
    examples: tuple[Example, ...] = ()
    baseline: Fitness | None = None
    best: Best | None = None
    history: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.member_tokens:
            self.slot_tokens = [0] * self.members
            self.start_generation()

    @property
    def begun(self) -> bool:
        """Whether anything was measured or learnt yet."""
        return self.baseline is not None or self.step > 0

    @property
    def evaluation(self) -> EvaluationCost:
        """What evaluations took so far."""
        return EvaluationCost(tokens=self.evaluation_tokens, seconds=self.evaluation_seconds)

    def add_evaluation(self, cost: EvaluationCost) -> None:
        """Count an evaluation."""
        self.evaluation_tokens += cost.tokens
        self.evaluation_seconds += cost.seconds

    def spent(self, *, evaluations: bool) -> dict[str, int]:
        """Return timesteps and tokens so far, as limits count them: with or without those of evaluations."""
        extra = self.evaluation_tokens if evaluations else 0
        return {"timesteps": self.timesteps + extra, "tokens": self.tokens + extra}

    def start_generation(self) -> None:
        """Forget the sums of the generation that has ended."""
        self.step_in_generation = 0
        self.member_tokens = [0] * self.members
        self.member_seconds = [0.0] * self.members
        self.metrics = [{} for _ in range(self.members)]
        self.rollouts = [[] for _ in range(self.members)]

    def add_step(
        self,
        seconds: float,
        tokens: Mapping[int, int],
        metrics: Mapping[int, Mapping[str, float | None]],
        *,
        timesteps: Mapping[int, int],
        earned: Mapping[int, Mapping[int, float]],
    ) -> None:
        """Count one learning step; its time is shared out among members by their tokens.

        Args:
            seconds: Wall-clock time.
            tokens: Processed, by slot.
            metrics: By slot.
            timesteps: Those of the tokens that were sampled, by slot; of those who sampled.
            earned: Mean raw reward of each group, by slot and place of its start in the step's block.
        """
        for slot, groups in earned.items():
            self.rollouts[slot] += [(self.step, place, score) for place, score in groups.items()]
        total = max(1, sum(tokens.values()))
        self.step += 1
        self.step_in_generation += 1
        self.latest_tokens, self.latest_timesteps = sum(tokens.values()), sum(timesteps.values())
        self.tokens += self.latest_tokens
        self.timesteps += sum(timesteps.get(slot, 0) for slot in tokens)
        for slot, amount in tokens.items():
            self.slot_tokens[slot] += amount
            self.member_tokens[slot] += amount
            self.member_seconds[slot] += seconds * amount / total
        for slot, values in metrics.items():
            sums = self.metrics[slot]
            for name, value in values.items():
                if value is not None:
                    so_far, count = sums.get(name, (0.0, 0))
                    sums[name] = (so_far + value, count + 1)

    def mean_metrics(self, slot: int) -> dict[str, float | None]:
        """Return the means of a slot's metrics over the generation under way."""
        return {name: total / count for name, (total, count) in self.metrics[slot].items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; the best member itself is stored in a folder of its own."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("best", "baseline")}
        values["metrics"] = [{name: list(pair) for name, pair in slot.items()} for slot in self.metrics]
        values["finalists"] = self.finalists.to_json()
        values["examples"] = [example.to_json() for example in self.examples]
        values["baseline"] = None if self.baseline is None else self.baseline.to_json()
        values["history"] = [generation.to_json() for generation in self.history]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned, without the best member and the finalists."""
        plain = {name: value for name, value in values.items() if name != "finalists"}
        plain["metrics"] = [{name: (pair[0], pair[1]) for name, pair in slot.items()} for slot in plain["metrics"]]
        plain["rollouts"] = [[(step, place, score) for step, place, score in slot] for slot in plain["rollouts"]]
        plain["examples"] = tuple(Example(**declared_fields(Example, example)) for example in plain["examples"])
        plain["baseline"] = None if plain["baseline"] is None else Fitness.from_json(plain["baseline"])
        plain["history"] = [Generation.from_json(generation) for generation in plain["history"]]
        run_state = cls(**declared_fields(cls, plain))
        run_state.check_stored()
        return run_state

    def check_stored(self) -> None:
        """Refuse counts that cannot be, or that are not of all slots.

        Raises:
            ValueError: If there are any.
        """
        whole_between("members", self.members, 1, MOST_SAMPLES)
        for name in (
            "generation",
            "step",
            "step_in_generation",
            "tokens",
            "timesteps",
            "evaluation_tokens",
            "finalists_generation",
        ):
            whole_between(name, getattr(self, name), 0)
        if any(len(each.slots) != self.members for each in self.history):
            raise ValueError(f"each generation must have one entry for each of {self.members} slots")
        numbers = [each.number for each in self.history]
        if numbers != list(range(self.generation - len(numbers) + 1, self.generation + 1)):
            raise ValueError(f"generations must follow each other up to {self.generation}, got {numbers}")
        for name in ("samples_per_step", "block"):
            whole_between(name, getattr(self, name), 0, MOST_SAMPLES)
        whole_between("steps_per_generation", self.steps_per_generation, 0, MOST_STEPS)
        by_slot = [name for name in self.__dataclass_fields__ if name.startswith(("slot_", "member_"))]
        for name in (*by_slot, "metrics", "rollouts", "samples"):
            each = getattr(self, name)
            if each and len(each) != self.members:
                raise ValueError(f"{name} must hold a value for each of {self.members} slots, got {len(each)}")
