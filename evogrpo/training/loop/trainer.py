"""The loop: collect, learn, evaluate, select, record; a run that can be stopped anywhere and resumed exactly."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.data import LearnReport
from evogrpo.envs.fingerprint import fingerprint_of
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import ROLLOUTS, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.interruption import Interrupted, raise_exit_error
from evogrpo.reporting.records import GenerationReport, Report, TestReport
from evogrpo.reporting.results import Result
from evogrpo.reporting.step_records import EvaluationCost, StepReport
from evogrpo.text import pluralize
from evogrpo.training.configuration.user_code import check_resumable, check_strategy, strategy_record
from evogrpo.training.loop.best_tracker import BestTracker, check_second_set
from evogrpo.training.loop.evaluation import (
    GreedyGapCheck,
    LearningSignalCheck,
    TooFewStartsError,
    check_starts,
    first_step,
)
from evogrpo.training.loop.limits import OutOfTime
from evogrpo.training.loop.planner import Planner, StrategyError, check_shared
from evogrpo.training.loop.run_logger import RunLogger, close_step
from evogrpo.training.loop.run_records import (
    baseline_report,
    description_of,
    generation_of,
    generation_report,
    result_of,
    test_report,
)
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.loop.stages import Stages
from evogrpo.training.loop.stopping import STOPPED, Stopping
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn


class AllFailedError(RuntimeError):
    """Every member failed, so there is nobody to clone."""


class Trainer:
    """A run, step by step.

    Args:
        population: The members; changed in place.
        env: Where they act.
        schedule: How long and at what cost.
        strategy: The rule of selection and mutation.
        fitness: How fitness is measured; by the default settings if None.
        run_dir: Where records go; None = nowhere.
        run_state: Where the run stands; a fresh start by default.
        description: Further facts for the journal's first event, such as task and model.
        changed_data: How the environment differs from the one that the run began in, for the journal.
        experience: How members learn from each other's samples; None = each from its own.

    Attributes:
        acting: What the members do.
        changed_data: As given.
        experience: As given.
    """

    def __init__(
        self,
        population: Population,
        env: GroupEnvironment,
        *,
        schedule: Schedule,
        strategy: Strategy,
        fitness: FitnessConfig | None = None,
        run_dir: RunDir | None = None,
        run_state: RunState | None = None,
        description: dict[str, Any] | None = None,
        changed_data: Sequence[str] = (),
        experience: SharedExperience | None = None,
    ) -> None:
        if not isinstance(population, Population):
            raise ValueError(
                f"evolve needs a Population, got {type(population).__name__}. For one agent, make GRPO.population(1)."
            )
        population.check(env)
        schedule.check_held_out(env)
        if experience is not None:
            check_shared(population)
        self.population, self.env = population, env
        self.strategy, self.fitness = strategy, fitness or FitnessConfig()
        self.run_state = run_state or RunState(members=len(population))
        schedule.check_counted(plays=population.plays)
        self.experience = experience
        if self.fitness.selection_measure == ROLLOUTS:
            check_starts(population, schedule, experience)
        self.stages = Stages(population, env, schedule, self.run_state, self.fitness, experience)
        check_second_set(env, self.fitness)
        self._data, self.changed_data = fingerprint_of(env), tuple(changed_data)
        self._book = RunLogger(run_dir, self.stages, strategy, self._data, experience)
        self._crown = BestTracker(population, self.run_state, self.fitness, self.run_dir)
        self._given_up = False
        self._planning = Planner(population, strategy, schedule, self.run_state, experience)
        self._description = description or {}
        self._ended: str | None = None
        self._complete = False
        self._tested: TestReport | None = None
        generations = schedule.generations
        every = generations and generations * schedule.steps_per_generation
        self._blindness = GreedyGapCheck()
        self._equal_rewards = LearningSignalCheck(every, taken=self.run_state.step)
        check_strategy(strategy)
        if run_state is None:
            schedule.warn_neutral(population, shared=experience is not None)
            if run_dir is not None:
                check_resumable(strategy)
            self._book.create()

    @property
    def run_dir(self) -> RunDir | None:
        """Where this process writes records; None = nowhere."""
        return self._book.folder

    @property
    def shared_run_dir(self) -> RunDir | None:
        """Where records of the run are, in all processes alike; None = nowhere."""
        return self._book.known

    @property
    def schedule(self) -> Schedule:
        """How long and at what cost: as given, but for what `Acting.schedule` says."""
        return self.stages.schedule

    @property
    def stopping(self) -> Stopping:
        """Whether a stop has been asked for, and why."""
        return self.stages.stopping

    def stop(self, reason: str = STOPPED) -> None:
        """Stop now: what is being done is abandoned, and the run is left as it was after its last learning step.

        With a run directory that state is saved, so the run resumes exactly. May be called from another thread.
        """
        self.stopping.ask(reason)

    def reports(self) -> Iterator[Report]:
        """Run to the end of the schedule, yielding a report after every step, every generation and the test."""
        clock = self.stages.clock
        clock.start()
        try:
            for report in self._reports():
                clock.tick()
                yield report
                clock.start()
        except Interrupted:
            clock.tick()
            self._ended = self.stopping.reason or STOPPED
            self._book.save(self._ended)
        except SystemExit as error:
            raise_exit_error(error)
        finally:
            self._book.close()

    def _reports(self) -> Iterator[Report]:
        self._open()
        while not self.finished():
            self.stopping.check()
            self._planning.catch_up()
            yield from self._steps()
            if self.run_state.step_in_generation:
                yield from self._evaluation()
        if self.stages.clock.left() <= 0:  # perhaps only since the last checkpoint
            self.stages.clock.end()
        self.stopping.check()
        if self._crown.awaits_finals:
            self._finals()
        if self.schedule.test_questions != 0 and self.run_state.best is not None:
            yield from self._test()
        self.stages.clock.tick()
        self._ended, self._complete = self.ended(), True
        if self.stages.clock.is_up or self._given_up:
            self._book.save()
            if not self.run_state.step:
                warn(
                    "not one learning step fitted into max_seconds: give it more, or take fewer members or a smaller "
                    f"samples_per_step, now {len(self.population)} and {self.run_state.samples_per_step}"
                )
        self._book.event("stopped", reason=self._ended)

    def _steps(self) -> Iterator[StepReport]:
        """Take the learning steps of the generation under way, or as many as there is time for."""
        run_state, clock = self.run_state, self.stages.clock
        while run_state.step_in_generation < run_state.steps_per_generation:
            so_far = run_state.spent(evaluations=self.schedule.count_evaluations)
            spent = self.schedule.spent(**so_far, seconds=run_state.seconds)
            # A first best member is worth another step where training rewards say too little yet.
            ready = run_state.step_in_generation and (run_state.best or self.stages.can_evaluate())
            if ready and (spent or self.stages.overstepped()):
                return
            if run_state.step and not clock.step_fits(self.stages.closing()):
                clock.end()
                return
            began = self.stages.clock.now()
            try:
                collected = self._collect()
                learned = self.stages.learn(collected, collecting=self.stages.clock.now() - began)
            except OutOfTime:  # what was sampled is dropped
                clock.end()
                return
            report = self._close_step(collected, learned, began)
            clock.took_step(self.stages.clock.now() - began)  # not what whoever has the report does with it
            yield report
            self._book.save_between()
            self.stopping.check()

    def _evaluation(self) -> Iterator[GenerationReport]:
        """Close the generation under way, unless time runs out before everybody was evaluated."""
        clock, began = self.stages.clock, self.stages.clock.now()
        try:
            report = self._close_generation()
        except OutOfTime:
            clock.end()
            self._give_up("no time was left")
        except TooFewStartsError:
            if self.run_state.step_in_generation >= self.run_state.steps_per_generation:
                raise
            self._give_up("the budget ended before everybody had played from two starts")
        else:
            clock.took_closing(self.stages.clock.now() - began - self.stages.evaluation_seconds)
            yield report

    def _give_up(self, why: str) -> None:
        """End the run amid a generation, without its evaluation."""
        self._given_up = True
        steps = self.run_state.step_in_generation
        warn(f"what the last {pluralize(steps, 'learning step')} taught was not evaluated, as {why}")

    def __iter__(self) -> Iterator[GenerationReport]:
        """Run to the end of the schedule, yielding the generations' reports only."""
        return filter(_closes_a_generation, self.reports())

    @property
    def over(self) -> bool:
        """Whether the run has come to its end, or was stopped: then it has a result."""
        return self._ended is not None

    @property
    def result(self) -> Result:
        """What the run came to.

        Raises:
            RuntimeError: If it has not ended.
        """
        if self._ended is None:
            raise RuntimeError(
                "a run has a result once it has ended, and this one has not: iterate over it to its end, or call its "
                "stop() in the loop"
            )
        return result_of(
            self.run_state,
            reason=self._ended,
            complete=self._complete,
            timesteps=self._timesteps,
            test=self._tested,
            run_dir=None if self.shared_run_dir is None else self.shared_run_dir.path,
        )

    @property
    def _timesteps(self) -> int | None:
        return self.run_state.timesteps if self.population.plays else None

    # ---- the parts of a run

    def _open(self) -> None:
        """Record the start: the untrained base's fitness and a checkpoint of the founders, or that the run resumed."""
        run_state = self.run_state
        before, run_state.threads = run_state.threads, torch.get_num_threads()
        if run_state.begun:
            if before != run_state.threads:
                warn(
                    f"The run began with {pluralize(before, 'thread')} and goes on with {run_state.threads}, so "
                    f"results are not bit-equal. Set OMP_NUM_THREADS={before} to make them so."
                )
            changed = {"changed_data": self.changed_data} if self.changed_data else {}
            threads = {"threads": run_state.threads} if before != run_state.threads else {}
            if not self._book.begun:
                self._begin()
            self._book.event("resumed", generation=run_state.generation, step=run_state.step, **threads, **changed)
            return
        self._book.save()
        self._begin()
        if not self.fitness.uses_validation:  # the first learning step will tell
            return
        try:
            run_state.baseline = self.stages.baseline()
        except OutOfTime:
            self.stages.clock.end()
            return
        self.stages.clock.tick()
        self._book.report(
            baseline_report(run_state.baseline, measure=self.fitness.validation_measure, cost=run_state.evaluation)
        )
        self._book.save()

    def _begin(self) -> None:
        """Write the event that describes the run."""
        self._book.event(
            "run",
            **self._description,
            **description_of(self.population, self.schedule, self.fitness),
            strategy=strategy_record(self.strategy),
            experience="own" if self.experience is None else self.experience.to_json(),
            data=self._data,
            threads=self.run_state.threads,
        )

    def finished(self) -> bool:
        """Tell whether no further generation is to be started; the test split may still wait for its answers."""
        run_state = self.run_state
        if self._given_up:
            return True
        if self.stages.clock.is_up:
            return not run_state.step_in_generation
        if self.finished_untrained():
            return True
        if run_state.generation == 0 or run_state.step_in_generation:
            return False
        return self.ended() is not None

    def finished_untrained(self) -> bool:
        """Tell whether the target was reached before training."""
        target, baseline = self.schedule.target_fitness, self.run_state.baseline
        return self.run_state.step == 0 and target is not None and baseline is not None and baseline.mean >= target

    def ended(self) -> str | None:
        """Return in words which limit of the schedule has been reached; None if none has."""
        run_state = self.run_state
        untrained = run_state.baseline if run_state.step == 0 else None
        fitness = untrained if run_state.best is None else run_state.best.fitness
        reached = self.schedule.ended_by(
            **run_state.spent(evaluations=self.schedule.count_evaluations),
            generation=run_state.generation,
            seconds=max(run_state.seconds, run_state.out_of_time),
            fitness=None if fitness is None else fitness.mean,
        )
        if reached is not None and self.finished_untrained():
            return f"{reached} before training"
        return self.stages.overstepped() if reached is None else reached

    def _collect(self) -> RolloutBatch:
        """Let the members act; if that fails, what they have learnt so far is kept."""
        self._require_healthy()
        try:
            return self.stages.collect()
        except (Exception, SystemExit) as error:
            # Nothing has been learnt since the last step, so this state is worth keeping: most often the user's own
            # reward function raised, and the run goes on once it is mended.
            self._book.save(f"{type(error).__name__} while collecting step {self.run_state.step}")
            raise

    def _close_step(self, collected: RolloutBatch, learned: Mapping[int, LearnReport], began: float) -> StepReport:
        """Count a learning step and record it."""
        self.stages.clock.tick()
        seconds, most = self.stages.clock.now() - began, self._book.completions
        closed = close_step(self.population, self.run_state, collected, learned, seconds, most)
        if closed.report.step == 0 and not self.fitness.uses_validation:
            self.run_state.baseline = first_step(self.run_state)
            if self.run_state.baseline is not None:
                self._book.report(baseline_report(self.run_state.baseline, measure=ROLLOUTS, cost=EvaluationCost()))
        self._book.step(closed)
        self._equal_rewards.look_at(learned)
        return closed.report

    def _close_generation(self) -> GenerationReport:
        """Evaluate, plan, record and checkpoint."""
        run_state, population = self.run_state, self.population
        self._require_healthy()
        try:
            measured = self.stages.evaluate()
        except (Exception, SystemExit) as error:
            self._book.save(f"{type(error).__name__} while evaluating generation {run_state.generation + 1}")
            raise
        self.stages.clock.tick()
        self._blindness.look_at(measured)
        run_state.generation += 1
        report = generation_report(population, run_state, measured, best=self._crown.contest(measured))
        run_state.step_in_generation = 0
        run_state.unplanned = True
        run_state.history.append(generation_of(population, run_state, measured))
        try:
            plan = None if self.finished() else self._planning.plan()
        except StrategyError:
            self._book.report(report)
            run_state.start_generation()
            self._book.save(f"the strategy failed after generation {run_state.generation}")
            raise
        report = replace(report, plan=plan)
        self._book.generation(report)
        run_state.start_generation()
        if plan is not None:
            self._planning.carry_out(plan)
        self._book.save()
        return report

    def _require_healthy(self) -> None:
        """Stop the run if no member is left that others could be cloned from."""
        if not self.population.healthy:
            members = [agent for agent in self.population.agents if not agent.retired]
            reasons = "; ".join(f"member {agent.index}: {agent.failed}" for agent in members)
            self._book.event("stopped", reason=f"every member failed ({reasons})")
            raise AllFailedError(
                f"every member failed, so there is nobody to clone ({reasons}). Start a new run "
                "with lower learning rates or temperatures, or with a network of your own that gives numbers for "
                "whatever it sees: resuming this one would only repeat it"
            )

    def _finals(self) -> None:
        """Let the finalists answer the second set, if there is time, and crown the best of them."""
        finalists = self.run_state.finalists
        try:
            second, cost = self.stages.final([finalists.state(each.key) for each in finalists.seen])
        except OutOfTime:
            warn("the second set is left out, as no time was left for it: give max_seconds more")
            return
        report = self._crown.decide(second, cost)
        self._book.event(report.event, **report.to_json())
        self._book.save()

    def _test(self) -> Iterator[TestReport]:
        """Let the best member ever and the base answer the test split, if there is time."""
        best = self.run_state.best
        assert best is not None  # the caller asks for it
        try:
            before, after, cost = self.stages.compare(best.state)
        except OutOfTime:
            warn("the test is left out, as no time was left for it: give max_seconds more")
            return
        self._tested = test_report(best.index, before, after, measure=self.fitness.validation_measure, cost=cost)
        self._book.test(self._tested)
        yield self._tested


def _closes_a_generation(report: Report) -> TypeGuard[GenerationReport]:
    return isinstance(report, GenerationReport)
