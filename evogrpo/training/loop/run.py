"""The loop: collect, learn, evaluate, select, record; a run that can be stopped anywhere and resumed exactly."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from evogrpo.agents.population import Population
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.envs.comparing import fingerprint_of
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.evolution.fitness import ROLLOUTS
from evogrpo.evolution.fitness_config import FitnessConfig
from evogrpo.evolution.shared_experience import SharedExperience
from evogrpo.evolution.strategies import Strategy
from evogrpo.exits import refuse_end
from evogrpo.history.estimates import EvaluationCost
from evogrpo.history.records import BaselineReport, GenerationReport, Report, StepReport, TestReport
from evogrpo.history.results import Result
from evogrpo.interruption import Interrupted
from evogrpo.records import LearnReport
from evogrpo.remarks import remark
from evogrpo.text import counted
from evogrpo.training.charts import generation_curves, step_curves
from evogrpo.training.configuration.own_strategies import check_resumable, check_strategy, strategy_record
from evogrpo.training.loop.acting import Acting
from evogrpo.training.loop.assessment.blindness import GreedyBlindness
from evogrpo.training.loop.assessment.crowning import Crown
from evogrpo.training.loop.assessment.finals import check_second_set
from evogrpo.training.loop.assessment.rollouts import TooFewStartsError, check_starts, first_step
from evogrpo.training.loop.clock import OutOfTime
from evogrpo.training.loop.equal_rewards import EqualRewards
from evogrpo.training.loop.planning import Planning, StrategyError
from evogrpo.training.loop.progress import Progress
from evogrpo.training.loop.reports.observing import (
    baseline_report,
    description_of,
    generation_of,
    generation_report,
    result_of,
    test_report,
)
from evogrpo.training.loop.reports.step_closing import close_step
from evogrpo.training.loop.shared import check_shared
from evogrpo.training.loop.stopping import STOPPED, Stopping
from evogrpo.training.rundir import RunDir
from evogrpo.training.schedule import Schedule


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
                f"a population is what evolves, got {type(population).__name__}: for one agent make "
                "GRPO.population(1, ...)"
            )
        population.check(env)
        schedule.check_held_out(env)
        if experience is not None:
            check_shared(population)
        self.population, self.env = population, env
        self.strategy, self.fitness = strategy, fitness or FitnessConfig()
        self.run_dir = run_dir if population.crew.processes.leads else None
        self.progress = progress or Progress(members=len(population))
        schedule.check_counted(plays=population.plays, counted=self.progress.timesteps is not None)
        self.experience = experience
        if self.fitness.selecting == ROLLOUTS:
            check_starts(population, schedule, experience)
        self.acting = Acting(population, env, schedule, self.progress, self.fitness, experience)
        check_second_set(env, self.fitness)
        self._crown = Crown(population, self.progress, self.fitness, self.run_dir)
        self._recorded = run_dir  # by the leading process, and known to all
        self._given_up = False
        self._planning = Planning(population, strategy, schedule, self.progress, experience)
        self._description = description or {}
        self._ended: str | None = None
        self._tested: TestReport | None = None
        generations = schedule.generations
        every = generations and generations * schedule.steps_per_generation
        self._blindness = GreedyBlindness()
        self._equal_rewards = EqualRewards(every, taken=self.progress.step)
        self._data, self.changed_data = fingerprint_of(env), tuple(changed_data)
        check_strategy(strategy)
        if progress is None:
            schedule.warn_neutral(population, shared=experience is not None)
            if run_dir is not None:
                check_resumable(strategy)
            population.crew.processes.together(self._create)  # where it is refused, all stop

    def _create(self) -> None:
        if self.run_dir is not None:
            self.run_dir.create()

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
            self._save(self._ended)
        except SystemExit as error:
            refuse_end(error)
        finally:
            if self.run_dir is not None:
                self.run_dir.close()

    def _reports(self) -> Iterator[Report]:
        self._open()
        while not self.finished():
            self.stopping.check()
            self._planning.catch_up()
            yield from self._steps()
            if self.progress.step_in_generation:
                yield from self._evaluation()
        self.stopping.check()
        if self._crown.awaits_finals:
            self._finals()
        if self.schedule.test_questions != 0 and self.progress.best is not None:
            yield from self._test()
        self.acting.clock.tick()
        self._ended = self.ended()
        if self.acting.clock.is_up or self._given_up:
            self._save()
            if not self.progress.step:
                remark(
                    "not one learning step fitted into max_seconds: give it more, or take fewer members or a smaller "
                    f"samples_per_step, now {len(self.population)} and {self.progress.samples_per_step}"
                )
        self._record("stopped", reason=self._ended)

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
            self._save_between()
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
        remark(f"what the last {counted(steps, 'learning step')} taught was not evaluated, as {why}")

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
            complete=self.stopping.reason is None,
            timesteps=self._timesteps,
            test=self._tested,
            run_dir=None if self.run_dir is None else self.run_dir.path,
        )

    @property
    def _timesteps(self) -> int | None:
        return self.progress.timesteps if self.population.plays else None

    # ---- the parts of a run

    def _open(self) -> None:
        """Record the start: the untrained base's fitness and a checkpoint of the founders, or that the run resumed."""
        progress = self.progress
        if progress.begun:
            changed = {"changed_data": self.changed_data} if self.changed_data else {}
            self._record("resumed", generation=progress.generation, step=progress.step, **changed)
            return
        self._save()
        self._record(
            "run",
            **self._description,
            **description_of(self.population, self.schedule, self.fitness),
            strategy=strategy_record(self.strategy),
            experience="own" if self.experience is None else self.experience.to_json(),
            data=self._data,
        )
        if not self.fitness.asks:  # the first learning step will tell
            return
        try:
            progress.baseline = self.acting.baseline()
        except OutOfTime:
            self.acting.clock.end()
            return
        self.acting.clock.tick()
        self._write(baseline_report(progress.baseline, measure=self.fitness.asking, cost=progress.evaluation))
        self._save()

    def finished(self) -> bool:
        """Tell whether no further generation is to be started; the test split may still wait for its answers."""
        progress = self.progress
        if self._given_up:
            return True
        if self.acting.clock.is_up:
            return not progress.step_in_generation
        if progress.generation == 0 or progress.step_in_generation:
            return False
        return self.ended() is not None

    def ended(self) -> str | None:
        """Return in words which limit of the schedule has been reached; None if none has."""
        progress = self.progress
        reached = self.schedule.ended_by(
            **progress.spent(evaluations=self.schedule.count_evaluations),
            generation=progress.generation,
            seconds=max(progress.seconds, progress.out_of_time),
            fitness=None if progress.best is None else progress.best.fitness.mean,
        )
        return self.acting.overstepped() if reached is None else reached

    def _collect(self) -> Collected:
        """Let the members act; if that fails, what they have learnt so far is kept."""
        self._require_healthy()
        try:
            return self.acting.collect()
        except (Exception, SystemExit) as error:
            # Nothing has been learnt since the last step, so this state is worth keeping: most often the user's own
            # reward function raised, and the run goes on once it is mended.
            self._save(f"{type(error).__name__} while collecting step {self.progress.step}")
            raise

    def _close_step(self, collected: Collected, learned: Mapping[int, LearnReport], began: float) -> StepReport:
        """Count a learning step and record it."""
        self.acting.clock.tick()
        most = 0 if self.run_dir is None else self.run_dir.completions.most
        closed = close_step(self.population, self.progress, collected, learned, self.acting.clock.now() - began, most)
        if closed.report.step == 0 and not self.fitness.asks:
            self.progress.baseline = first_step(self.progress)
            if self.progress.baseline is not None:
                self._write(baseline_report(self.progress.baseline, measure=ROLLOUTS, cost=EvaluationCost()))
        self._write(closed.report)
        self._equal_rewards.look_at(learned)
        if self.run_dir is not None:
            self.run_dir.completions.write(closed.report.step, closed.table)
            measured = {slot: member.metrics for slot, member in closed.report.learned.items()}
            self.run_dir.log_scalars(closed.report.step, step_curves(measured, plays=self.population.plays))
        return closed.report

    def _close_generation(self) -> GenerationReport:
        """Evaluate, plan, record and checkpoint."""
        progress, population = self.progress, self.population
        self._require_healthy()
        try:
            measured = self.acting.evaluate()
        except (Exception, SystemExit) as error:
            self._save(f"{type(error).__name__} while evaluating generation {progress.generation + 1}")
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
            self._write(report)
            progress.start_generation()
            self._save(f"the strategy failed after generation {progress.generation}")
            raise
        report = replace(report, plan=plan)
        self._write(report)
        if self.run_dir is not None:
            # Under the last learning step: a run that goes on from here purges what stands from the next one on.
            self.run_dir.log_scalars(progress.step - 1, generation_curves(report.members, self.population.space))
            self.run_dir.log_members(report, self.population.space)
        progress.start_generation()
        if plan is not None:
            self._planning.carry_out(plan)
        self._save()
        return report

    def _require_healthy(self) -> None:
        """Stop the run if no member is left that others could be cloned from."""
        if not self.population.healthy:
            members = [agent for agent in self.population.agents if not agent.retired]
            reasons = "; ".join(f"member {agent.index}: {agent.failed}" for agent in members)
            self._record("stopped", reason=f"every member failed ({reasons})")
            raise AllFailedError(
                f"every member failed, so there is nobody to clone ({reasons}). Start a new run "
                "with lower learning rates or temperatures: resuming this one would only repeat it"
            )

    def _finals(self) -> None:
        """Let the finalists answer the second set, if there is time, and crown the best of them."""
        finalists = self.progress.finalists
        try:
            second, cost = self.acting.final([finalists.state(each.key) for each in finalists.seen])
        except OutOfTime:
            remark("the second set is left out, as no time was left for it: give max_seconds more")
            return
        report = self._crown.decide(second, cost)
        self._record(report.event, **report.to_json())
        self._save()

    def _test(self) -> Iterator[TestReport]:
        """Let the best member ever and the base answer the test split, if there is time."""
        best = self.progress.best
        assert best is not None  # the caller asks for it
        try:
            before, after, cost = self.acting.compare(best.state)
        except OutOfTime:
            remark("the test is left out, as no time was left for it: give max_seconds more")
            return
        self._tested = test_report(best.index, before, after, measure=self.fitness.asking, cost=cost)
        self._write(self._tested)
        if self.run_dir is not None:
            self.run_dir.log_test(self._tested, self.progress.step, self.population.space)
        yield self._tested

    # ---- records

    def _write(self, report: BaselineReport | Report) -> None:
        self._record(report.event, **report.to_json())

    def _record(self, event: str, **fields: Any) -> None:
        if self.run_dir is not None:
            self.run_dir.journal(event, **fields)

    def _save_between(self) -> None:
        """Write a checkpoint amid a generation, where the run is to have them."""
        every = None if self._recorded is None else self._recorded.logging.checkpoint_steps
        if every is not None and self.progress.step_in_generation % every == 0:
            self._save()

    def _save(self, stopped: str | None = None) -> None:
        with self.population.members.banks.gathered(range(len(self.population))):
            if self.run_dir is not None:
                records = self.schedule, self.fitness, self._data, self.experience
                self.run_dir.save(self.population, self.progress, self.strategy, *records)
        if stopped is not None:
            self._record("stopped", reason=stopped)


def _closes_a_generation(report: Report) -> TypeGuard[GenerationReport]:
    return isinstance(report, GenerationReport)
