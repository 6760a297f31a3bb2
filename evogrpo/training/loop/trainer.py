"""The loop: collect, learn, evaluate, select, record; a run that can be stopped anywhere and resumed exactly."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import Collected
from evogrpo.data import LearnReport
from evogrpo.envs.fingerprint import fingerprint_of
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import ROLLOUTS, FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.interruption import Interrupted, refuse_end
from evogrpo.reporting.records import GenerationReport, Report, TestReport
from evogrpo.reporting.results import Result
from evogrpo.reporting.step_records import EvaluationCost, StepReport
from evogrpo.text import counted
from evogrpo.training.configuration.user_code import check_resumable, check_strategy, strategy_record
from evogrpo.training.loop.acting import Acting
from evogrpo.training.loop.best import Crown, check_second_set
from evogrpo.training.loop.evaluation import EqualRewards, GreedyBlindness, TooFewStartsError, check_starts, first_step
from evogrpo.training.loop.limits import OutOfTime
from evogrpo.training.loop.observing import (
    baseline_report,
    description_of,
    generation_of,
    generation_report,
    result_of,
    test_report,
)
from evogrpo.training.loop.planning import Planning, StrategyError, check_shared
from evogrpo.training.loop.run_logger import Book, close_step
from evogrpo.training.loop.run_state import Progress
from evogrpo.training.loop.stopping import STOPPED, Stopping
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn


class AllFailedError(RuntimeError):
    """Every member failed, so there is nobody to clone."""


class Evolution:
    """A run, step by step.

    Args:
        population: The members; changed in place.
        env: Where they act.
        schedule: How long and at what cost.
        strategy: The rule of selection and mutation.
        fitness: How fitness is measured; by the default settings if None.
        run_dir: Where records go; None = nowhere.
        progress: Where the run stands; a fresh start by default.
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
        progress: Progress | None = None,
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
        self.progress = progress or Progress(members=len(population))
        schedule.check_counted(plays=population.plays)
        self.experience = experience
        if self.fitness.selecting == ROLLOUTS:
            check_starts(population, schedule, experience)
        self.acting = Acting(population, env, schedule, self.progress, self.fitness, experience)
        check_second_set(env, self.fitness)
        self._data, self.changed_data = fingerprint_of(env), tuple(changed_data)
        self._book = Book(run_dir, self.acting, strategy, self._data, experience)
        self._crown = Crown(population, self.progress, self.fitness, self.run_dir)
        self._given_up = False
        self._planning = Planning(population, strategy, schedule, self.progress, experience)
        self._description = description or {}
        self._ended: str | None = None
        self._complete = False
        self._tested: TestReport | None = None
        generations = schedule.generations
        every = generations and generations * schedule.steps_per_generation
        self._blindness = GreedyBlindness()
        self._equal_rewards = EqualRewards(every, taken=self.progress.step)
        check_strategy(strategy)
        if progress is None:
            schedule.warn_neutral(population, shared=experience is not None)
            if run_dir is not None:
                check_resumable(strategy)
            self._book.create()

    @property
    def run_dir(self) -> RunDir | None:
        """Where this process writes records; None = nowhere."""
        return self._book.folder

    @property
    def recorded_in(self) -> RunDir | None:
        """Where records of the run are, in all processes alike; None = nowhere."""
        return self._book.known

    @property
    def schedule(self) -> Schedule:
        """How long and at what cost: as given, but for what `Acting.schedule` says."""
        return self.acting.schedule

    @property
    def stopping(self) -> Stopping:
        """Whether a stop has been asked for, and why."""
        return self.acting.stopping

    def stop(self, reason: str = STOPPED) -> None:
        """Stop now: what is being done is abandoned, and the run is left as it was after its last learning step.

        With a run directory that state is saved, so the run resumes exactly. May be called from another thread.
        """
        self.stopping.ask(reason)

    def reports(self) -> Iterator[Report]:
        """Run to the end of the schedule, yielding a report after every step, every generation and the test."""
        clock = self.acting.clock
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
            refuse_end(error)
        finally:
            self._book.close()

    def _reports(self) -> Iterator[Report]:
        self._open()
        while not self.finished():
            self.stopping.check()
            self._planning.catch_up()
            yield from self._steps()
            if self.progress.step_in_generation:
                yield from self._evaluation()
        if self.acting.clock.left() <= 0:  # perhaps only since the last checkpoint
            self.acting.clock.end()
        self.stopping.check()
        if self._crown.awaits_finals:
            self._finals()
        if self.schedule.test_questions != 0 and self.progress.best is not None:
            yield from self._test()
        self.acting.clock.tick()
        self._ended, self._complete = self.ended(), True
        if self.acting.clock.is_up or self._given_up:
            self._book.save()
            if not self.progress.step:
                warn(
                    "not one learning step fitted into max_seconds: give it more, or take fewer members or a smaller "
                    f"samples_per_step, now {len(self.population)} and {self.progress.samples_per_step}"
                )
        self._book.event("stopped", reason=self._ended)

    def _steps(self) -> Iterator[StepReport]:
        """Take the learning steps of the generation under way, or as many as there is time for."""
        progress, clock = self.progress, self.acting.clock
        while progress.step_in_generation < progress.steps_per_generation:
            so_far = progress.spent(evaluations=self.schedule.count_evaluations)
            spent = self.schedule.spent(**so_far, seconds=progress.seconds)
            # A first best member is worth another step where training rewards say too little yet.
            ready = progress.step_in_generation and (progress.best or self.acting.can_evaluate())
            if ready and (spent or self.acting.overstepped()):
                return
            if progress.step and not clock.step_fits(self.acting.closing()):
                clock.end()
                return
            began = self.acting.clock.now()
            try:
                collected = self._collect()
                learned = self.acting.learn(collected, collecting=self.acting.clock.now() - began)
            except OutOfTime:  # what was sampled is dropped
                clock.end()
                return
            report = self._close_step(collected, learned, began)
            clock.took_step(self.acting.clock.now() - began)  # not what whoever has the report does with it
            yield report
            self._book.save_between()
            self.stopping.check()

    def _evaluation(self) -> Iterator[GenerationReport]:
        """Close the generation under way, unless time runs out before everybody was evaluated."""
        clock, began = self.acting.clock, self.acting.clock.now()
        try:
            report = self._close_generation()
        except OutOfTime:
            clock.end()
            self._give_up("no time was left")
        except TooFewStartsError:
            if self.progress.step_in_generation >= self.progress.steps_per_generation:
                raise
            self._give_up("the budget ended before everybody had played from two starts")
        else:
            clock.took_closing(self.acting.clock.now() - began - self.acting.evaluation_seconds)
            yield report

    def _give_up(self, why: str) -> None:
        """End the run amid a generation, without its evaluation."""
        self._given_up = True
        steps = self.progress.step_in_generation
        warn(f"what the last {counted(steps, 'learning step')} taught was not evaluated, as {why}")

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
            self.progress,
            reason=self._ended,
            complete=self._complete,
            timesteps=self._timesteps,
            test=self._tested,
            run_dir=None if self.recorded_in is None else self.recorded_in.path,
        )

    @property
    def _timesteps(self) -> int | None:
        return self.progress.timesteps if self.population.plays else None

    # ---- the parts of a run

    def _open(self) -> None:
        """Record the start: the untrained base's fitness and a checkpoint of the founders, or that the run resumed."""
        progress = self.progress
        before, progress.threads = progress.threads, torch.get_num_threads()
        if progress.begun:
            if before != progress.threads:
                warn(
                    f"The run began with {counted(before, 'thread')} and goes on with {progress.threads}, so results "
                    f"are not bit-equal. Set OMP_NUM_THREADS={before} to make them so."
                )
            changed = {"changed_data": self.changed_data} if self.changed_data else {}
            threads = {"threads": progress.threads} if before != progress.threads else {}
            if not self._book.begun:
                self._begin()
            self._book.event("resumed", generation=progress.generation, step=progress.step, **threads, **changed)
            return
        self._book.save()
        self._begin()
        if not self.fitness.asks:  # the first learning step will tell
            return
        try:
            progress.baseline = self.acting.baseline()
        except OutOfTime:
            self.acting.clock.end()
            return
        self.acting.clock.tick()
        self._book.report(baseline_report(progress.baseline, measure=self.fitness.asking, cost=progress.evaluation))
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
            threads=self.progress.threads,
        )

    def finished(self) -> bool:
        """Tell whether no further generation is to be started; the test split may still wait for its answers."""
        progress = self.progress
        if self._given_up:
            return True
        if self.acting.clock.is_up:
            return not progress.step_in_generation
        if self.finished_untrained():
            return True
        if progress.generation == 0 or progress.step_in_generation:
            return False
        return self.ended() is not None

    def finished_untrained(self) -> bool:
        """Tell whether the target was reached before training."""
        target, baseline = self.schedule.target_fitness, self.progress.baseline
        return self.progress.step == 0 and target is not None and baseline is not None and baseline.mean >= target

    def ended(self) -> str | None:
        """Return in words which limit of the schedule has been reached; None if none has."""
        progress = self.progress
        untrained = progress.baseline if progress.step == 0 else None
        fitness = untrained if progress.best is None else progress.best.fitness
        reached = self.schedule.ended_by(
            **progress.spent(evaluations=self.schedule.count_evaluations),
            generation=progress.generation,
            seconds=max(progress.seconds, progress.out_of_time),
            fitness=None if fitness is None else fitness.mean,
        )
        if reached is not None and self.finished_untrained():
            return f"{reached} before training"
        return self.acting.overstepped() if reached is None else reached

    def _collect(self) -> Collected:
        """Let the members act; if that fails, what they have learnt so far is kept."""
        self._require_healthy()
        try:
            return self.acting.collect()
        except (Exception, SystemExit) as error:
            # Nothing has been learnt since the last step, so this state is worth keeping: most often the user's own
            # reward function raised, and the run goes on once it is mended.
            self._book.save(f"{type(error).__name__} while collecting step {self.progress.step}")
            raise

    def _close_step(self, collected: Collected, learned: Mapping[int, LearnReport], began: float) -> StepReport:
        """Count a learning step and record it."""
        self.acting.clock.tick()
        seconds, most = self.acting.clock.now() - began, self._book.completions
        closed = close_step(self.population, self.progress, collected, learned, seconds, most)
        if closed.report.step == 0 and not self.fitness.asks:
            self.progress.baseline = first_step(self.progress)
            if self.progress.baseline is not None:
                self._book.report(baseline_report(self.progress.baseline, measure=ROLLOUTS, cost=EvaluationCost()))
        self._book.step(closed)
        self._equal_rewards.look_at(learned)
        return closed.report

    def _close_generation(self) -> GenerationReport:
        """Evaluate, plan, record and checkpoint."""
        progress, population = self.progress, self.population
        self._require_healthy()
        try:
            measured = self.acting.evaluate()
        except (Exception, SystemExit) as error:
            self._book.save(f"{type(error).__name__} while evaluating generation {progress.generation + 1}")
            raise
        self.acting.clock.tick()
        self._blindness.look_at(measured)
        progress.generation += 1
        report = generation_report(population, progress, measured, best=self._crown.contest(measured))
        progress.step_in_generation = 0
        progress.unplanned = True
        progress.history.append(generation_of(population, progress, measured))
        try:
            plan = None if self.finished() else self._planning.plan()
        except StrategyError:
            self._book.report(report)
            progress.start_generation()
            self._book.save(f"the strategy failed after generation {progress.generation}")
            raise
        report = replace(report, plan=plan)
        self._book.generation(report)
        progress.start_generation()
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
        finalists = self.progress.finalists
        try:
            second, cost = self.acting.final([finalists.state(each.key) for each in finalists.seen])
        except OutOfTime:
            warn("the second set is left out, as no time was left for it: give max_seconds more")
            return
        report = self._crown.decide(second, cost)
        self._book.event(report.event, **report.to_json())
        self._book.save()

    def _test(self) -> Iterator[TestReport]:
        """Let the best member ever and the base answer the test split, if there is time."""
        best = self.progress.best
        assert best is not None  # the caller asks for it
        try:
            before, after, cost = self.acting.compare(best.state)
        except OutOfTime:
            warn("the test is left out, as no time was left for it: give max_seconds more")
            return
        self._tested = test_report(best.index, before, after, measure=self.fitness.asking, cost=cost)
        self._book.test(self._tested)
        yield self._tested


def _closes_a_generation(report: Report) -> TypeGuard[GenerationReport]:
    return isinstance(report, GenerationReport)
