"""State of a run: all that a checkpoint holds besides the members; its clock and limits."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from torch import Tensor

from evogrpo.algorithms.population import Population
from evogrpo.config.search_space import MAX_SAMPLES
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import Generation, MemberRecord, SlotRecord
from evogrpo.members.members import Members
from evogrpo.reporting.records import EvaluationCost, Example, GenerationReport, TestReport
from evogrpo.training.schedule import Schedule
from evogrpo.validation import MAX_STEPS, Real, Whole

if TYPE_CHECKING:
    from evogrpo.training.trainer import Trainer

Count = Annotated[int, Field(ge=0, lt=2**63)]
Samples = Annotated[int, Field(ge=0, le=MAX_SAMPLES)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Best:
    """Best member of a generation or of the run, as it was when it earned its fitness.

    Attributes:
        member: The member, with its hyperparameters at that time.
        generation: Generation whose evaluation gave the fitness.
        fitness: Its fitness.
        state: Its train state, in CPU memory; stored among the tensors of a checkpoint.
    """

    member: MemberRecord
    generation: Whole
    fitness: Fitness
    state: Annotated[Mapping[str, Any], Field(exclude=True)] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Index of the member."""
        return self.member.index


def best_agent(population: Population, best: Best) -> Any:
    """Return the best member as an agent, with the train state that earned its fitness."""
    member = best.member
    agent = population.agents[0].copy_with_state(best.state, index=member.index)
    agent.parent = member.parent
    agent.born = member.born
    agent.hyperparameters = member.hyperparameters
    agent.fitness = best.fitness
    agent.failed = None
    agent.retired = False
    agent.steps = 0
    return agent


@dataclass(kw_only=True)
class RunState:
    """Counters, sums and results of a run.

    Attributes:
        members: Number of members.
        generation: Generations evaluated.
        step: Learning steps taken.
        step_in_generation: Learning steps of the generation under way.
        samples_per_step: Current completions per member and learning step; 0 before the run began.
        steps_per_generation: Current learning steps per generation; 0 before the run began.
        starts_per_step: Number of starts (prompts or reset seeds) that each step takes from their
            order, which never shrinks; 0 before the run began.
        unplanned: The last generation was evaluated, but its plan was not applied.
        threads: Threads of torch, which affect rounding; 0 before the run began.
        seconds: Wall-clock time spent, over all parts of the run.
        out_of_time: The longest time limit that has ended a part of the run; 0 = none has.
        tokens: Tokens processed by all members.
        slot_tokens: Tokens of each slot since the run began.
        timesteps: Environment steps of all members' training samples; for language models, tokens
            of one pass over the samples, prompts and discarded groups included.
        member_tokens: Tokens of each slot in the generation under way.
        member_seconds: Share of each slot in that generation's time, by tokens.
        metrics: Sums of each slot's metrics in that generation: name -> (sum, count).
        latest_tokens: Tokens of the latest learning step, updates included.
        latest_timesteps: `timesteps` of the latest learning step.
        evaluation_tokens: Tokens (or environment steps) that evaluations took so far, those of the
            untrained base and of tests included.
        evaluation_seconds: Their wall-clock time.
        test_tokens: Those of `evaluation_tokens` that tests took.
        longest_step: Seconds of the longest learning step so far.
        longest_evaluation: Seconds of the longest evaluation after a generation so far; before the
            first one, an estimate from that of the untrained base.
        rollouts: Rewards of each slot in the generation under way: step, position of the
            start among those of the step, and mean raw reward of the group.
        examples: Completions of each member in the last learning step, as in `StepReport`.
        reflections: Completions of each slot in the generation under way that proposers see; empty
            without a proposer.
        baseline: Fitness of the untrained base; None before it was measured.
        best: Best member so far; None before the first evaluation.
        tested: Test of the best member; None before the test.
        test_questions: Number of its questions, including those without a reward; 0 before the
            test.
        ended: Reason of the run's end; None before it ended.
        trackers: Id of the run in each tracker, by name.
        history: Every generation that was evaluated. A resumed run reads them from the journal.
    """

    members: Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
    generation: Count = 0
    step: Count = 0
    step_in_generation: Count = 0
    samples_per_step: Samples = 0
    steps_per_generation: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    starts_per_step: Samples = 0
    unplanned: bool = False
    threads: Count = 0
    seconds: Real = 0.0
    out_of_time: Real = 0.0
    tokens: Count = 0
    timesteps: Count = 0
    slot_tokens: list[Count] = field(default_factory=list)
    member_tokens: list[Count] = field(default_factory=list)
    member_seconds: list[Real] = field(default_factory=list)
    metrics: list[dict[str, tuple[Real, Count]]] = field(default_factory=list)
    latest_tokens: Count = 0
    latest_timesteps: Count = 0
    evaluation_tokens: Count = 0
    evaluation_seconds: Real = 0.0
    test_tokens: Count = 0
    longest_step: Real = 0.0
    longest_evaluation: Real = 0.0
    rollouts: list[list[tuple[Count, Count, Real]]] = field(default_factory=list)
    examples: tuple[Example, ...] = ()
    reflections: list[tuple[Example, ...]] = field(default_factory=list)
    baseline: Fitness | None = None
    best: Best | None = None
    tested: TestReport | None = None
    test_questions: Count = 0
    ended: str | None = None
    trackers: dict[str, str] = field(default_factory=dict)
    history: Annotated[list[Generation], Field(exclude=True)] = field(
        default_factory=list, init=False
    )

    def __post_init__(self) -> None:
        if not self.member_tokens:  # a new run; one from a checkpoint has them
            self.slot_tokens = [0] * self.members
            self.reflections = [()] * self.members
            self.start_generation()
        for name in (
            "slot_tokens", "member_tokens", "member_seconds", "metrics", "rollouts", "reflections"
        ):  # fmt: skip
            by_slot = getattr(self, name)
            if len(by_slot) != self.members:
                raise ValueError(
                    f"{name} must hold a value for each of {self.members} slots, got"
                    f" {len(by_slot)}."
                )

    @property
    def begun(self) -> bool:
        """True once the baseline was measured or a step was taken."""
        return self.baseline is not None or self.step > 0

    @property
    def evaluation(self) -> EvaluationCost:
        """Cost of all evaluations so far."""
        return EvaluationCost(tokens=self.evaluation_tokens, seconds=self.evaluation_seconds)

    def add_evaluation(self, cost: EvaluationCost) -> None:
        """Add the cost of an evaluation."""
        self.evaluation_tokens += cost.tokens
        self.evaluation_seconds += cost.seconds

    def spent(self, *, evaluations: bool) -> dict[str, int]:
        """Return timesteps and tokens so far, by name, with or without those of evaluations.

        Tests never count.
        """
        if evaluations:
            extra = self.evaluation_tokens - self.test_tokens
        else:
            extra = 0
        return {"timesteps": self.timesteps + extra, "tokens": self.tokens + extra}

    def reached_limit(self, schedule: Schedule) -> str | None:
        """Return the limit of a schedule that was reached, as text; None if none was."""
        fitness = None
        if self.best is not None:
            fitness = self.best.fitness.mean
        elif self.step == 0 and self.baseline is not None:
            # Before the first step, the baseline may reach the target fitness.
            fitness = self.baseline.mean
        return schedule.reached_limit(
            **self.spent(evaluations=schedule.count_evaluations),
            generation=self.generation,
            # A limit that has ended the run early, because nothing more fitted, counts as reached.
            seconds=max(self.seconds, self.out_of_time),
            fitness=fitness,
        )

    def set_budgets(
        self,
        schedule: Schedule,
        population: Population,
        *,
        samples_per_step: int | None = None,
        steps_per_generation: int | None = None,
    ) -> None:
        """Set the budgets of the next generations; None = as before."""
        # 1. Before the first generation, the budgets are 0: take those of the schedule.
        if self.samples_per_step == 0:
            self.samples_per_step = schedule.samples_per_step
        if self.steps_per_generation == 0:
            self.steps_per_generation = schedule.steps_per_generation
        # 2. Those of the plan.
        if samples_per_step is not None:
            self.samples_per_step = samples_per_step
        if steps_per_generation is not None:
            self.steps_per_generation = steps_per_generation
        # 3. `starts_per_step` never shrinks, even after the members with the smallest groups are
        #    replaced: it determines which questions a step takes.
        budget = replace(schedule, samples_per_step=self.samples_per_step)
        needed = budget.starts_per_step(population)
        self.starts_per_step = max(self.starts_per_step, needed)

    def start_generation(self) -> None:
        """Reset the sums of a generation."""
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
        """Count one learning step; members share its time in proportion to their tokens.

        Args:
            seconds: Wall-clock time.
            tokens: Tokens processed, by slot.
            metrics: Metrics, by slot.
            timesteps: Part of `RunState.timesteps`, by slot.
            earned: By slot, the rewards to add to `rollouts`, by position of the start.
        """
        # 1. Add rewards. They have the number of this step, so they come before the counters.
        for slot, groups in earned.items():
            for position, score in groups.items():
                self.rollouts[slot].append((self.step, position, score))
        # 2. Count for the run and for each slot.
        total = max(1, sum(tokens.values()))
        self.step += 1
        self.step_in_generation += 1
        self.latest_tokens = sum(tokens.values())
        self.latest_timesteps = sum(timesteps.values())
        self.tokens += self.latest_tokens
        self.timesteps += self.latest_timesteps
        for slot, amount in tokens.items():
            self.slot_tokens[slot] += amount
            self.member_tokens[slot] += amount
            self.member_seconds[slot] += seconds * amount / total
        # 3. Add metrics, as sums and counts; a value of None does not count.
        for slot, values in metrics.items():
            sums = self.metrics[slot]
            for name, value in values.items():
                if value is not None:
                    so_far, count = sums.get(name, (0.0, 0))
                    sums[name] = (so_far + value, count + 1)

    def training_fitness(self, slot: int) -> Fitness | None:
        """Return the training rewards of a slot in the last half of its generation; see `rollouts`.

        If the last half has fewer than two scores, as in a generation that a budget cut short, all
        steps count.

        Returns:
            The fitness; None if the generation has fewer than two scores.
        """
        for counted_steps in (math.ceil(self.step_in_generation / 2), self.step_in_generation):
            since = self.step - counted_steps
            scores = {}
            for step, position, score in self.rollouts[slot]:
                if step >= since:
                    # One number for each step and position, the same for all members, so that they
                    # can be compared question by question.
                    scores[step * MAX_SAMPLES + position] = score
            if len(scores) > 1:
                return Fitness.from_scores(list(scores.values()), keys=list(scores))
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the best member, with their names in a checkpoint."""
        if self.best is None:
            return {}
        return {f"best: {part}": tensor for part, tensor in self.best.state.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], members: Members) -> None:
        """Load what `tensors` returned.

        Args:
            tensors: All tensors of the checkpoint, by name.
            members: Members that validate the state; unchanged afterwards.

        Raises:
            KeyError: If a tensor is missing.
            ValueError: If the state does not fit them.
        """
        if self.best is not None:
            state = {part: tensors[f"best: {part}"] for part in members.state_keys}
            # Loading it into a member raises ValueError if it does not fit.
            current = members.state(0)
            members.load_state(0, state)
            members.load_state(0, current)
            self.best = replace(self.best, state=state)


def as_generation(report: GenerationReport, *, slots: int, measure: str) -> Generation:
    """Return a generation as strategies see it.

    Args:
        report: Its report.
        slots: Number of slots of the bank.
        measure: Measure that selection uses; see `MemberReport.measured`.
    """
    # Slots without a report are empty.
    records = [SlotRecord()] * slots
    for member in report.members:
        records[member.slot] = SlotRecord(
            member=member.record(),
            fitness=member.scores.get(measure),
            tokens=member.tokens,
            seconds=member.seconds,
        )
    assert report.samples_per_step is not None and report.steps_per_generation is not None
    return Generation(
        number=report.generation,
        samples_per_step=report.samples_per_step,
        steps_per_generation=report.steps_per_generation,
        slots=tuple(records),
    )


class Clock:
    """Seconds of a run, and its time limit.

    Args:
        limit: Seconds that the whole run may take; None = no limit.
        run_state: Its `seconds` are counted up; those of earlier parts of a resumed run are
            included.
        now: Clock that all ranks share.

    Attributes:
        now: As given.
    """

    def __init__(self, limit: float | None, run_state: RunState, now: Callable[[], float]) -> None:
        self._limit = limit
        self._run_state = run_state
        self.now = now
        self._since = now()

    def start(self) -> None:
        """Count from now on."""
        self._since = self.now()

    def tick(self) -> None:
        """Add the time since the last call of `start` or `tick` to the seconds of the run."""
        now = self.now()
        self._run_state.seconds += now - self._since
        self._since = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block, which is the time of the caller of the run."""
        self.tick()
        yield
        self.start()

    def left(self) -> float:
        """Return the seconds left; infinity without a limit."""
        if self._limit is None:
            return math.inf
        uncounted = self.now() - self._since
        return self._limit - self._run_state.seconds - uncounted

    @property
    def expired(self) -> bool:
        """True if this limit has ended the run."""
        return self._limit is not None and self._run_state.out_of_time >= self._limit

    def expire(self) -> None:
        """End the run by this limit; only an evaluation and the test follow."""
        if self._limit is not None:
            self._run_state.out_of_time = max(self._run_state.out_of_time, self._limit)


class Limits:
    """Limits of a run, which decide whether another learning step or generation begins.

    Args:
        run: The run.
    """

    def __init__(self, run: "Trainer") -> None:
        self._run = run
        self._schedule = run.schedule
        self._run_state = run.run_state

    def step_fits(self) -> bool:
        """Return True if another learning step of this generation fits into the limits."""
        # 1. The generation is complete.
        run = self._run
        state = self._run_state
        if state.step_in_generation >= state.steps_per_generation:
            return False
        # 2. A limit on steps, tokens or seconds ends a generation early, but not before all healthy
        #    members have enough training rewards to be evaluated.
        if state.step_in_generation:
            if not run.fitness.uses_validation:
                slots = [agent.slot for agent in run.population.healthy]
                if not all(state.training_fitness(slot) for slot in slots):
                    return True
            spent = state.spent(evaluations=self._schedule.count_evaluations)
            reached = self._schedule.reached_budget(**spent, seconds=state.seconds)
            if reached or self._limit_of_next_step():
                return False
        # 3. Leave time for this step, the evaluation and the test. The test evaluates the best
        #    member and the base, at the cost per answer of the evaluation or, without validation,
        #    at most at the cost per sample of a learning step.
        clock = run.clock
        tested = 2 * self._schedule.questions("test", run.env)
        members = len(run.population)
        if run.fitness.uses_validation:
            answered = members * self._schedule.questions("validation", run.env)
            test = state.longest_evaluation * tested / answered
        else:
            samples = members * state.samples_per_step
            test = state.longest_step * tested * run.fitness.answers / samples
        if clock.left() >= state.longest_step + state.longest_evaluation + test:
            return True
        clock.expire()
        return False

    def finished(self) -> bool:
        """Return True if no further generation will start; the test may still follow."""
        state = self._run_state
        # Out of time: end, but first evaluate the learning steps of the generation under way.
        if self._run.clock.expired:
            return not state.step_in_generation
        # The untrained base has the target fitness already, so there is nothing to train.
        if self._finished_untrained():
            return True
        # Other limits end a run between generations only, and after the first one; `step_fits`
        # shortens the generation under way.
        if state.generation == 0 or state.step_in_generation:
            return False
        return self.reached() is not None

    def _finished_untrained(self) -> bool:
        """Return True if the target fitness was reached before training."""
        target = self._schedule.target_fitness
        baseline = self._run_state.baseline
        return (
            self._run_state.step == 0
            and target is not None
            and baseline is not None
            and baseline.mean >= target
        )

    def reached(self) -> str | None:
        """Return the limit that ends the run, as text; None if none does."""
        reached = self._run_state.reached_limit(self._schedule)
        if reached is not None and self._finished_untrained():
            return f"{reached} before training"
        if reached is None:
            return self._limit_of_next_step()
        return reached

    def _limit_of_next_step(self) -> str | None:
        """Return the limit that the next learning step and its evaluation would exceed, or None.

        Assumes that the next step costs as much as the last one. Only used with
        `count_evaluations`: otherwise a run ends with the learning step that reaches its limit.
        """
        # 1. Nothing to estimate from, or no further step.
        state = self._run_state
        schedule = self._schedule
        fitness = self._run.fitness
        healthy = len(self._run.population.healthy)
        if not (schedule.count_evaluations and state.latest_timesteps and healthy):
            return None
        # 2. Cost of an evaluation: an answer costs as much as a sample of the latest step, of which
        #    each member had `samples_per_step`.
        evaluation = 0.0
        if fitness.uses_validation:
            answers = schedule.questions("validation", self._run.env) * fitness.answers
            evaluation = answers * state.latest_timesteps / state.samples_per_step
        # 3. Compare both limits with what is spent and what is to come.
        spent = state.spent(evaluations=True)
        limits = {
            "timesteps": (schedule.max_timesteps, state.latest_timesteps),
            "tokens": (schedule.max_tokens, state.latest_tokens),
        }
        for name, (limit, step) in limits.items():
            if limit is not None and spent[name] + step + evaluation > limit:
                return (
                    f"stopped at {spent[name]:,} {name}: the next step would exceed"
                    f" max_{name}={limit:,}"
                )
        return None
