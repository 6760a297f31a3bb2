"""Trainer: collect, learn, evaluate, select and record; a run can be stopped anywhere and resumed exactly."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.requests import RolloutBatch
from evogrpo.data import LearnReport
from evogrpo.envs.fingerprint import fingerprint_of
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.evolution.fitness import ROLLOUTS, FitnessConfig, paired_difference
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.shared_experience import SharedExperience, samples_by_rank
from evogrpo.evolution.strategies import Strategy
from evogrpo.interruption import Interrupted, raise_exit_error
from evogrpo.reporting.records import GenerationReport, Report, TestReport
from evogrpo.reporting.results import Result
from evogrpo.reporting.step_records import Estimate, EvaluationCost, StepReport
from evogrpo.text import pluralize
from evogrpo.training.configuration.user_code import check_resumable, check_strategy, strategy_record
from evogrpo.training.loop.best_tracker import BestTracker
from evogrpo.training.loop.evaluation import (
    GreedyGapCheck,
    LearningSignalCheck,
    TooFewStartsError,
    check_starts,
    first_step_fitness,
)
from evogrpo.training.loop.run_logger import RunLogger
from evogrpo.training.loop.run_records import (
    baseline_report,
    estimate,
    generation_record,
    generation_report,
    make_result,
    step_report,
)
from evogrpo.training.loop.run_state import RunState
from evogrpo.training.loop.stages import OutOfTime, Stages
from evogrpo.training.loop.stopping import STOPPED, RunStop
from evogrpo.training.run_dir import RunDir
from evogrpo.training.schedule import Schedule
from evogrpo.warnings import warn


class AllFailedError(RuntimeError):
    """All members failed."""


class StrategyError(RuntimeError):
    """A strategy raised an error, or its plan cannot be applied."""


class Trainer:
    """Training loop of a population.

    Args:
        population: The members; changed in place.
        env: Environment they act in.
        schedule: Length and limits of the run.
        strategy: Rule of selection and mutation.
        fitness: Measure of fitness; the default settings if None.
        run_dir: Directory for records; None = keep no records.
        run_state: State of a resumed run; a new one by default.
        description: Further facts for the journal's first event, such as task and model.
        changed_data: Differences between this environment and the one the run began in, for the journal.
        experience: Rule for learning from samples of other members; None = each from its own.

    Attributes:
        population: As given.
        env: As given.
        strategy: As given.
        fitness: As given.
        run_state: Counters, best member and history.
        changed_data: As given.
        experience: As given.
        stages: Stages of the run: collect, learn, evaluate, test.
        shared_run_dir: Directory for records, on every rank.
        run_dir: Directory that this rank writes to; None on ranks other than 0.
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
        # 1. Check that population, environment, schedule and strategy fit together.
        if not isinstance(population, Population):
            raise ValueError(
                f"evolve needs a Population, got {type(population).__name__}. For one agent, make GRPO.population(1)."
            )
        population.check(env)
        schedule.check_held_out(env)
        if experience is not None:
            _check_shared_experience(population)
        schedule.check_counted(plays=population.plays)
        self.fitness = fitness or FitnessConfig()
        if self.fitness.selection_measure == ROLLOUTS:
            check_starts(population, schedule, experience)
        size, second = env.size("validation"), self.fitness.second_set
        if second and size - second < 2:
            raise ValueError(
                f"second_set must leave at least 2 of the {size} validation questions to selection, got {second}. "
                "Lower it, or raise validation_size."
            )
        # 2. Assemble the parts of the loop.
        self.population, self.env, self.strategy, self.experience = population, env, strategy, experience
        self.run_state = run_state or RunState(members=len(population))
        self.stages = Stages(population, env, schedule, self.run_state, self.fitness, experience)
        self._data, self.changed_data = fingerprint_of(env), tuple(changed_data)
        self._description = description or {}
        self._logger = RunLogger(run_dir, self.stages, strategy, self._data, experience)
        self.shared_run_dir, self.run_dir = run_dir, self._logger.run_dir
        self._best_tracker = BestTracker(population, self.run_state, self.fitness, self.run_dir)
        self._greedy_gap = GreedyGapCheck()
        generations = schedule.generations
        steps = generations and generations * schedule.steps_per_generation
        self._learning_signal = LearningSignalCheck(steps, taken=self.run_state.step)
        self._set_budgets(None, None)
        # 3. State of the loop itself.
        self._ended: str | None = None
        self._complete = self._given_up = False
        self._tested: TestReport | None = None
        check_strategy(strategy)
        if run_state is None:
            schedule.warn_neutral(population, shared=experience is not None)
            if run_dir is not None:
                check_resumable(strategy)
            self._logger.create()

    @property
    def schedule(self) -> Schedule:
        """The schedule, perhaps with fewer validation questions; see `Stages`."""
        return self.stages.schedule

    @property
    def stopping(self) -> RunStop:
        """Stop request."""
        return self.stages.stop

    def stop(self, reason: str = STOPPED) -> None:
        """Stop now: abandon the work under way and keep the state after the last learning step.

        With a run directory this state is saved, and the run resumes exactly. May be called from another thread.
        """
        self.stopping.request(reason)

    def reports(self) -> Iterator[Report]:
        """Run to the end of the schedule; yield a report after every step, every generation and the test."""
        clock = self.stages.clock
        clock.start()
        try:
            for report in self._run():
                clock.tick()
                yield report
                clock.start()
        except Interrupted:
            clock.tick()
            self._ended = self.stopping.reason or STOPPED
            self._logger.save(self._ended)
        except SystemExit as error:
            raise_exit_error(error)
        finally:
            self._logger.close()

    def _run(self) -> Iterator[Report]:
        # 1. Record the start, or that the run was resumed.
        self._open()
        # 2. Train generation by generation.
        while not self.finished():
            self.stopping.check_all_ranks()
            if self.run_state.unplanned:  # stopped between an evaluation and its plan
                self._apply(self._plan())
            yield from self._steps()
            if self.run_state.step_in_generation:
                yield from self._evaluation()
        if self.stages.clock.left() <= 0:  # the limit may have passed since the last checkpoint
            self.stages.clock.expire()
        self.stopping.check_all_ranks()
        # 3. Choose the best member among the finalists, then test it.
        if self.run_state.finalists and self.run_state.finalists_generation < self.run_state.generation:
            self._finals()
        if self.schedule.test_questions != 0 and self.run_state.best is not None:
            yield from self._test()
        # 4. Record the end.
        self.stages.clock.tick()
        self._ended, self._complete = self.ended(), True
        if self.stages.clock.expired or self._given_up:
            self._logger.save()
            if not self.run_state.step:
                warn(
                    "No learning step fitted into max_seconds. Raise max_seconds, or use fewer members (now "
                    f"{len(self.population)}) or a smaller samples_per_step (now {self.run_state.samples_per_step})."
                )
        self._logger.event("stopped", reason=self._ended)

    def _steps(self) -> Iterator[StepReport]:
        """Take the learning steps of the generation under way, as far as limits allow."""
        state, stages, clock = self.run_state, self.stages, self.stages.clock
        while state.step_in_generation < state.steps_per_generation:
            spent = self.schedule.spent(
                **state.spent(evaluations=self.schedule.count_evaluations), seconds=state.seconds
            )
            # Without a best member, steps go on until training rewards suffice for an evaluation.
            can_stop = state.step_in_generation and (state.best or stages.can_evaluate())
            if can_stop and (spent or stages.exceeded_limit()):
                return
            if state.step and clock.left() - stages.reserved_seconds() - clock.closing_seconds < clock.step_seconds:
                clock.expire()
                return
            began = clock.now()
            try:
                collected = self._collect()  # 1. Sample and score.
                reports = stages.learn(collected, collecting=clock.now() - began)  # 2. Learn.
            except OutOfTime:
                clock.expire()
                return
            report = self._record_step(collected, reports, began)  # 3. Record.
            clock.step_seconds = clock.now() - began  # without the time that the caller takes for the report
            yield report
            every = None if self.shared_run_dir is None else self.shared_run_dir.logging.checkpoint_steps
            if every is not None and state.step_in_generation % every == 0:
                self._logger.save()  # 4. A checkpoint within the generation, if set.
            self.stopping.check_all_ranks()

    def _collect(self) -> RolloutBatch:
        """Sample one training batch; on an error, save what was learnt so far."""
        self._require_healthy()
        try:
            return self.stages.collect()
        except (Exception, SystemExit) as error:
            # Most often the user's reward function raised. The state is that after the last step, so it can be resumed.
            self._logger.save(f"{type(error).__name__} while collecting step {self.run_state.step}")
            raise

    def _record_step(self, collected: RolloutBatch, reports: Mapping[int, LearnReport], began: float) -> StepReport:
        """Count a learning step and record it."""
        self.stages.clock.tick()
        seconds, most = self.stages.clock.now() - began, self._logger.completions
        report, completions = step_report(self.population, self.run_state, collected, reports, seconds, most)
        if report.step == 0 and not self.fitness.uses_validation:
            self.run_state.baseline = first_step_fitness(self.run_state)
            if self.run_state.baseline is not None:
                baseline = baseline_report(self.run_state.baseline, measure=ROLLOUTS, cost=EvaluationCost())
                self._logger.event(baseline.event, **baseline.to_json())
        self._logger.step(report, completions)
        self._learning_signal.update(reports)
        return report

    def _evaluation(self) -> Iterator[GenerationReport]:
        """Close the generation under way, unless time runs out before all members are evaluated."""
        clock, began = self.stages.clock, self.stages.clock.now()
        try:
            report = self._close_generation()
        except OutOfTime:
            clock.expire()
            self._give_up("no time was left")
        except TooFewStartsError:
            if self.run_state.step_in_generation >= self.run_state.steps_per_generation:
                raise
            self._give_up("the budget ended before every member had played from two starts")
        else:
            clock.closing_seconds = clock.now() - began - self.stages.evaluation_seconds
            yield report

    def _give_up(self, reason: str) -> None:
        """End the run within a generation, without its evaluation."""
        self._given_up = True
        steps = pluralize(self.run_state.step_in_generation, "learning step")
        warn(f"The last {steps} were not evaluated: {reason}.")

    def _close_generation(self) -> GenerationReport:
        """Evaluate, plan, record and checkpoint."""
        state, population = self.run_state, self.population
        # 1. Measure fitness.
        self._require_healthy()
        try:
            measured = self.stages.evaluate()
        except (Exception, SystemExit) as error:
            self._logger.save(f"{type(error).__name__} while evaluating generation {state.generation + 1}")
            raise
        self.stages.clock.tick()
        self._greedy_gap.update(measured)
        state.generation += 1
        report = generation_report(population, state, measured, best=self._best_tracker.update(measured))
        state.step_in_generation = 0
        state.unplanned = True
        state.history.append(generation_record(population, state, measured))
        # 2. Plan the next generation.
        try:
            plan = None if self.finished() else self._plan()
        except StrategyError:
            self._logger.event(report.event, **report.to_json())
            state.start_generation()
            self._logger.save(f"the strategy failed after generation {state.generation}")
            raise
        # 3. Record, then clone and mutate.
        report = replace(report, plan=plan)
        self._logger.generation(report)
        state.start_generation()
        if plan is not None:
            self._apply(plan)
        self._logger.save()
        return report

    def _plan(self) -> Plan:
        """Ask the strategy for a plan; on an error, restore the state of the strategy."""
        remembered = self.strategy.state()
        try:
            plan = self.population.plan(self.strategy, self.run_state.history)
            if self.experience is None:
                idle = [slot for slot, count in enumerate(plan.samples or ()) if not count and slot not in plan.vacant]
                if idle:
                    raise ValueError(
                        f"samples must be positive in every occupied slot, got {plan.samples} with 0 in slots {idle}. "
                        "Set experience='shared' to let members learn from others' samples."
                    )
            elif self.experience.samplers == "rank":
                plan = samples_by_rank(plan, self.population.history(self.run_state.history))
        except (Exception, SystemExit) as error:
            self.strategy.load_state(remembered)
            name = type(self.strategy).__name__
            raise StrategyError(f"{name} cannot plan: {type(error).__name__}: {error}") from error
        return plan

    def _apply(self, plan: Plan) -> None:
        """Clone and mutate members, and set the budgets of the next generation."""
        state = self.run_state
        self.population.apply(plan)
        self._set_budgets(plan.samples_per_step, plan.steps_per_generation)
        state.samples = None if plan.samples is None else list(plan.samples)
        for agent, count in zip(self.population.agents, plan.samples or (), strict=False):
            state.block = max(state.block, count // agent.hyperparameters.group_size)
        state.unplanned = False

    def _set_budgets(self, samples_per_step: int | None, steps_per_generation: int | None) -> None:
        """Set the budgets of the next generations; None = as before, at first as scheduled."""
        state, schedule = self.run_state, self.schedule
        state.samples_per_step = samples_per_step or state.samples_per_step or schedule.samples_per_step
        state.steps_per_generation = steps_per_generation or state.steps_per_generation or schedule.steps_per_generation
        # The block never shrinks, even when the members with the smallest groups are gone: it fixes the question order.
        needed = replace(schedule, samples_per_step=state.samples_per_step).block(self.population)
        state.block = max(state.block, needed)

    def __iter__(self) -> Iterator[GenerationReport]:
        """Run to the end of the schedule; yield the reports of generations only."""
        return filter(_is_generation, self.reports())

    @property
    def over(self) -> bool:
        """True if the run has ended or was stopped: then it has a result."""
        return self._ended is not None

    @property
    def result(self) -> Result:
        """Result of the run.

        Raises:
            RuntimeError: If it has not ended.
        """
        if self._ended is None:
            raise RuntimeError(
                "The run has not ended, so it has no result. Iterate over it to its end, or call stop()."
            )
        return make_result(
            self.run_state,
            reason=self._ended,
            complete=self._complete,
            timesteps=self.run_state.timesteps if self.population.plays else None,
            test=self._tested,
            run_dir=None if self.shared_run_dir is None else self.shared_run_dir.path,
        )

    def _open(self) -> None:
        """Record the start, with the untrained base's fitness and a checkpoint of the founders, or that it resumed."""
        state = self.run_state
        before, state.threads = state.threads, torch.get_num_threads()
        if state.begun:
            if before != state.threads:
                warn(
                    f"The run began with {pluralize(before, 'thread')} and goes on with {state.threads}, so results "
                    f"are not bit-equal. Set OMP_NUM_THREADS={before} to make them so."
                )
            changed = {"changed_data": self.changed_data} if self.changed_data else {}
            threads = {"threads": state.threads} if before != state.threads else {}
            if self.run_dir is not None and not self.run_dir.described:
                self._record_run()
            self._logger.event("resumed", generation=state.generation, step=state.step, **threads, **changed)
            return
        self._logger.save()
        self._record_run()
        if not self.fitness.uses_validation:  # the baseline is then the mean reward of the first learning step
            return
        try:
            state.baseline = self.stages.baseline()
        except OutOfTime:
            self.stages.clock.expire()
            return
        self.stages.clock.tick()
        report = baseline_report(state.baseline, measure=self.fitness.validation_measure, cost=state.evaluation)
        self._logger.event(report.event, **report.to_json())
        self._logger.save()

    def _record_run(self) -> None:
        """Write the event that describes the run."""
        population, schedule = self.population, self.schedule
        settings = population.members.settings
        tokens = settings.to_json().get("micro_batch_tokens")  # networks have none
        self._logger.event(
            "run",
            **self._description,
            kind=population.members.kind,
            seed=settings.seed,
            **({} if tokens is None else {"micro_batch_tokens": tokens}),
            population_size=len(population),
            samples_per_step=schedule.samples_per_step,
            steps_per_generation=schedule.steps_per_generation,
            schedule=schedule.to_json(),
            fitness=self.fitness.to_json(),
            evolvable=population.space.to_json(),
            algorithm=population.algorithm.__qualname__,
            members=[
                {"slot": a.slot, "index": a.index, "parent": a.parent, "hyperparameters": a.hyperparameters.to_json()}
                for a in population.agents
            ],
            strategy=strategy_record(self.strategy),
            experience="own" if self.experience is None else self.experience.to_json(),
            data=self._data,
            threads=self.run_state.threads,
        )

    def finished(self) -> bool:
        """Return True if no further generation will start; the test may still follow."""
        state = self.run_state
        if self._given_up:
            return True
        if self.stages.clock.expired:
            return not state.step_in_generation
        if self._finished_untrained():
            return True
        if state.generation == 0 or state.step_in_generation:
            return False
        return self.ended() is not None

    def _finished_untrained(self) -> bool:
        """Return True if the target fitness was reached before training."""
        target, baseline = self.schedule.target_fitness, self.run_state.baseline
        return self.run_state.step == 0 and target is not None and baseline is not None and baseline.mean >= target

    def ended(self) -> str | None:
        """Return the limit of the schedule that was reached, in words; None if none was."""
        state = self.run_state
        untrained = state.baseline if state.step == 0 else None
        fitness = untrained if state.best is None else state.best.fitness
        reached = self.schedule.ended_by(
            **state.spent(evaluations=self.schedule.count_evaluations),
            generation=state.generation,
            seconds=max(state.seconds, state.out_of_time),
            fitness=None if fitness is None else fitness.mean,
        )
        if reached is not None and self._finished_untrained():
            return f"{reached} before training"
        return self.stages.exceeded_limit() if reached is None else reached

    def _require_healthy(self) -> None:
        """Stop the run if all members have failed, as none is left to clone."""
        if not self.population.healthy:
            members = [agent for agent in self.population.agents if not agent.retired]
            reasons = "; ".join(f"member {agent.index}: {agent.failed}" for agent in members)
            self._logger.event("stopped", reason=f"all members failed ({reasons})")
            raise AllFailedError(
                f"All members failed ({reasons}). Start a new run with a lower lr, max_grad_norm or temperature, or "
                "with a network that returns finite numbers."
            )

    def _finals(self) -> None:
        """Evaluate the finalists on the second set, if there is time, and keep the best of them."""
        finalists = self.run_state.finalists
        try:
            second, cost = self.stages.evaluate_finalists([finalists.state(each.key) for each in finalists.seen])
        except OutOfTime:
            warn("The second set is left out, as no time was left. Raise max_seconds.")
            return
        report = self._best_tracker.choose_finalist(second, cost)
        self._logger.event(report.event, **report.to_json())
        self._logger.save()

    def _test(self) -> Iterator[TestReport]:
        """Test the best member and the untrained base, if there is time."""
        best = self.run_state.best
        assert best is not None  # checked by the caller
        try:
            before, after, cost = self.stages.test(best.state)
        except OutOfTime:
            warn("The test is left out, as no time was left. Raise max_seconds.")
            return
        gain, standard_error = paired_difference(after, before)
        self._tested = TestReport(
            questions=len(after.scores),
            index=best.index,
            before=estimate(before),
            after=estimate(after),
            gain=Estimate(mean=gain, standard_error=standard_error),
            scores=after.scores,
            measure=self.fitness.validation_measure,
            cost=cost,
        )
        self._logger.event(self._tested.event, **self._tested.to_json())
        yield self._tested


def _is_generation(report: Report) -> TypeGuard[GenerationReport]:
    return isinstance(report, GenerationReport)


def _check_shared_experience(population: Population) -> None:
    """Raise ValueError if members cannot learn from each other's samples."""
    SharedExperience.check_size(len(population))
    if getattr(population.members.settings, "normalise_observations", False):
        raise ValueError(
            "normalise_observations must be False with shared experience, as each member would normalise by its own "
            "statistics. Set it to False, or experience='own'."
        )
    if "objective" in population.algorithm.unused_options:
        raise ValueError(
            f"Shared experience needs the learning rule of GRPO, but {population.algorithm.__name__} has its own. Set "
            "experience='own'."
        )
