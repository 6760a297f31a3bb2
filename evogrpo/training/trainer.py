"""Trainer: the loop of a run."""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from evogrpo.algorithms.population import Population, check_settings
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.distributed import RunStop
from evogrpo.envs.control.reward_components import OWN_REWARD
from evogrpo.envs.fingerprint import fingerprint_of
from evogrpo.envs.protocol import GroupEnvironment, SupportsDate, SupportsProgress
from evogrpo.envs.text.prompt_environment import PromptEnvironment
from evogrpo.evolution.fitness import FitnessConfig
from evogrpo.evolution.plan import Plan
from evogrpo.evolution.strategies import Strategy
from evogrpo.functional.rewards import PENALTY
from evogrpo.interruption import STOPPED, Interrupted
from evogrpo.learn_reports import LearnReport
from evogrpo.members.requests import RolloutBatch
from evogrpo.reporting.records import (
    BaselineReport,
    BestMember,
    GenerationReport,
    Report,
    Result,
    StepReport,
    TestReport,
)
from evogrpo.safe_parsing import dump_json
from evogrpo.storage.journal import read_bytes
from evogrpo.text import class_name, one_line, pluralize, shown, user_line
from evogrpo.training.callbacks import Callback, check_callbacks
from evogrpo.training.configuration.user_code import check_strategy, strategy_record
from evogrpo.training.evaluation import (
    ConstantRewardCheck,
    EqualScoresCheck,
    GreedyGapCheck,
    LearningSignalCheck,
    SamplerCheck,
    ToolCallCheck,
    estimate,
    first_step_baseline,
    measure,
    measure_baseline,
    run_test,
    update_best,
)
from evogrpo.training.proposals import (
    Proposal,
    Proposer,
    check_proposer,
    propose_texts,
    stored_proposals,
)
from evogrpo.training.reports import (
    count_step,
    generation_curves,
    generation_report,
    member_rows,
    provenance,
    run_facts,
    step_curves,
    tracked_configuration,
)
from evogrpo.training.run_dir import JOURNAL, RunDir, completion_row
from evogrpo.training.run_state import Clock, Limits, RunState, as_generation
from evogrpo.training.schedule import (
    Schedule,
    check_run,
    early_end,
    warn_of_task,
    warn_without_effect,
)
from evogrpo.training.trackers import Trackers
from evogrpo.validation import dump
from evogrpo.warnings import recorded_by, warn


class AllFailedError(RuntimeError):
    """All members failed."""


MAX_WARNINGS = 200
"""Maximum number of different warnings that a trainer records."""


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
        description: Further facts for the journal's first event, such as task (by default the
            environment's name) and model.
        changed_data: Differences between this environment and the one the run began in, for the
            journal.
        callbacks: Hooks of the run.
        proposer: Writes new texts of task settings whose search space says `proposed`.
        trackers: Names and trackers; see `evogrpo.training.trackers`. None = those of `run_dir`.

    Attributes:
        population: As given.
        env: As given.
        description: As given.
        strategy: As given.
        fitness: As given.
        run_state: Counters, best member and history.
        data: Fingerprint of the environment.
        changed_data: As given.
        schedule: As given.
        callbacks: As given, as a list.
        proposer: As given.
        trackers: Trackers of the run.
        known_proposals: Proposals of this run by `Proposal.key`, on rank 0.
        warned_of_proposals: A warning about a refused proposal has been issued.
        stop_request: Stop request of the run.
        clock: Seconds of the run, and its time limit.
        limits: Decide whether another learning step or generation begins.
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
        callbacks: Sequence[Callback] = (),
        proposer: Proposer | None = None,
        trackers: Sequence[Any] | None = None,
    ) -> None:
        # 1. Check that population, environment, schedule and strategy fit together.
        self.fitness = fitness or FitnessConfig()
        check_run(population, env, schedule, self.fitness)
        check_strategy(strategy)
        check_callbacks(callbacks)
        check_proposer(population.space, proposer)
        # 2. Assemble the parts of the loop.
        self.population = population
        self.env = env
        self.strategy = strategy
        self.schedule = schedule
        self.run_state = run_state or RunState(members=len(population))
        self.callbacks = list(callbacks)
        self.proposer = proposer
        self.known_proposals: dict[tuple[int, int, str, str], Proposal] = {}
        self.warned_of_proposals = False
        processes = population.processes
        self.stop_request: RunStop = RunStop(processes)
        self.clock = Clock(schedule.max_seconds, self.run_state, processes.now)
        self.limits = Limits(self)
        if run_state is None and isinstance(env, SupportsDate) and env.date is not None:
            # Ranks may have made their environments on different days.
            env.set_date(processes.broadcast(env.date))
        self.data = fingerprint_of(env)
        self.changed_data = tuple(changed_data)
        self.description = description or {}
        self.shared_run_dir = run_dir
        self.run_dir = run_dir if processes.is_rank_zero else None
        if trackers is None:
            trackers = () if run_dir is None else run_dir.logging.trackers
        self.trackers = Trackers(trackers, None if run_dir is None else run_dir.path)
        self._greedy_gap = GreedyGapCheck()
        self._equal_scores = EqualScoresCheck(schedule.generations, taken=self.run_state.generation)
        self._sampler_check = SamplerCheck()
        steps = None
        if schedule.generations is not None:
            steps = schedule.generations * schedule.steps_per_generation
        self._tool_calls = ToolCallCheck(steps, taken=self.run_state.step)
        # These may be constant at first: the reward of an environment, which may be rare, and the
        # penalty on long completions.
        ignored = OWN_REWARD if population.members.step_based else PENALTY
        self._constant_rewards = ConstantRewardCheck(
            steps, taken=self.run_state.step, ignored=ignored
        )
        objective = population.members.settings.objective
        filters = ("mask_truncated", "min_group_reward", "max_group_reward")
        self._learning_signal = LearningSignalCheck(
            steps,
            taken=self.run_state.step,
            filters=[name for name in filters if getattr(objective, name) not in (None, False)],
            hint=env.completion_form() if isinstance(env, PromptEnvironment) else "",
        )
        self.run_state.set_budgets(schedule, population)
        # 3. State of the loop itself.
        self._ended: str | None = None
        self._complete = False
        self._resumed = run_state is not None
        if self._resumed and proposer is not None and self.run_dir is not None:
            self.known_proposals = stored_proposals(read_bytes(self.run_dir.path / JOURNAL))
        self._warnings: dict[str, int] = {}  # learning step of the first one, by text
        self._recorded_warnings = 0
        if run_state is None:
            with recorded_by(self._record_warning):
                warn_without_effect(population, schedule, strategy)
                warn_of_task(population, schedule, env)
            population.members.prepare_sampling()  # raises an error before there is a run directory
            # Create the directory and lock it; an error stops all ranks.
            processes.gather_results(
                lambda: None if self.run_dir is None else self.run_dir.create()
            )

    def stop(self, reason: str = STOPPED) -> None:
        """Stop now: abandon the work under way and keep the state after the last learning step.

        With a run directory this state is saved, and the run resumes exactly. May be called from
        another thread.
        """
        self.stop_request.request(reason)

    # ---- the loop

    def reports(self) -> Iterator[Report]:
        """Run to the end of the schedule.

        Yield a report after every step, every generation and the test.
        """
        reports = self._reports()
        try:
            while True:
                # Record the warnings of this block only: between two reports, the caller may train
                # another run.
                with recorded_by(self._record_warning):
                    report = next(reports, None)
                if report is None:
                    return
                yield report
        finally:
            reports.close()

    def _reports(self) -> Generator[Report, None, None]:
        """Run to the end of the schedule; see `reports`."""
        state = self.run_state
        population = self.population
        clock = self.clock
        stop = self.stop_request
        if self._resumed and self.run_dir is not None:
            self.run_dir.export_best(population, state.best)
        questions = self.schedule.questions("test", self.env)
        was_tested = questions == 0 or (
            state.tested is not None and state.test_questions == questions
        )
        if self._resumed and state.ended is not None and was_tested and self.limits.finished():
            self._ended = state.ended
            self._complete = True
            self._close()
            return
        clock.start()
        try:
            # 1. Record the start and the fitness before training, or that the run was resumed.
            self._call("on_run_start", self)
            self._begin()
            while not self.limits.finished():
                if state.unplanned:  # stopped between an evaluation and its plan
                    plan = self._plan()
                    self._event("plan", generation=plan.generation, plan=dump(plan))
                    self._apply(plan)
                while self.limits.step_fits():
                    self._require_healthy()
                    self._set_progress()
                    began = clock.now()
                    with self._restoring_on_error(), stop.interruptible():
                        # 2. Collect: sample and score one batch of groups for all members.
                        collected = population.collect(
                            self.env,
                            step=state.step,
                            samples_per_step=state.samples_per_step,
                            starts_per_step=state.starts_per_step,
                            stop=stop,
                        )
                        collected_at = clock.now()
                        # 3. Learn: one learning step of every member.
                        learned = population.learn(collected.experience, step=state.step, stop=stop)
                    # 4. Log.
                    phases = {
                        "sampling": collected_at - began - collected.scoring_seconds,
                        "scoring": collected.scoring_seconds,
                        "learning": clock.now() - collected_at,
                    }
                    step = self._record_step(collected, learned, phases)
                    with clock.paused():
                        self._call("on_step", step)
                        yield step
                    every = None
                    if self.shared_run_dir is not None:
                        every = self.shared_run_dir.logging.checkpoint_steps
                    if every is not None and state.step_in_generation % every == 0:
                        self._save()
                # 5. Evaluate, plan, apply, checkpoint.
                if state.step_in_generation:
                    generation = self._end_generation()
                    with clock.paused():
                        self._call("on_generation", generation)
                        yield generation
            if clock.left() <= 0:  # the limit may have passed while the last generation was saved
                clock.expire()
            stop.check_all_ranks()
            # 6. Test the best member.
            if self.schedule.test_questions != 0 and state.best is not None:
                self._set_progress()
                with stop.interruptible():
                    tested = run_test(self)
                self._report(tested)
                with clock.paused():
                    self._call("on_test", tested)
                    yield tested
            # 7. Record the end.
            self._record_end()
        except Interrupted:
            clock.tick()
            stop.agree()
            self._ended = stop.reason or STOPPED
            self._save(self._ended)
        except (SystemExit, StopIteration) as error:
            # Raised by user code. It would end the program, or end this generator as if the run
            # was complete.
            raise RuntimeError(
                f"Code that the run calls raised {shown(error)}{user_line(error)}. To end a run"
                " early, call its method stop()."
            ) from error
        finally:
            self._close()
        self._call("on_run_end", self.result)

    @contextmanager
    def _restoring_on_error(self) -> Iterator[None]:
        """If the block fails, restore the members after the last learning step.

        After an error the run is saved, so that it can be resumed.
        """
        members = self.population.members
        snapshot = members.snapshot([agent.slot for agent in self.population.healthy])
        try:
            yield
        except BaseException as error:
            for slot, train_state in snapshot.items():
                members.load_state(slot, train_state)
            # After an interruption, the caller saves.
            if isinstance(error, Exception | SystemExit):
                self._save(f"{class_name(error)} in learning step {self.run_state.step}")
            raise

    def __iter__(self) -> Generator[GenerationReport, None, None]:
        """Run to the end of the schedule; yield the reports of generations only."""
        return (report for report in self.reports() if isinstance(report, GenerationReport))

    def _begin(self) -> None:
        """Record the start or the resumption, with a checkpoint.

        Then measure the untrained base, if not yet done.
        """
        state = self.run_state
        population = self.population
        before = state.threads
        state.threads = torch.get_num_threads()
        # A run that continues has no end and no test yet.
        state.ended = state.tested = None
        if population.processes.is_rank_zero:
            self.trackers.start(state.trackers, state.step, tracked_configuration(self))
        if self._resumed:
            if before != state.threads:
                warn(
                    f"The run began with {pluralize(before, 'thread')} and continues with"
                    f" {state.threads}, so results can differ in rounding. Set"
                    f" OMP_NUM_THREADS={before} to avoid this."
                )
            facts: dict[str, Any] = {"generation": state.generation, "step": state.step}
            if self.changed_data:
                facts["changed_data"] = self.changed_data
            facts |= provenance(population)
            self._event("resumed", schedule=dump(self.schedule), **facts)
        else:
            self._record_start()
            self._save()
        # Without validation, the first step gives the baseline.
        if state.begun or not self.fitness.uses_validation:
            return
        self._set_progress()
        with self.stop_request.interruptible():
            report = measure_baseline(self)
        state.longest_evaluation = len(population) * report.cost.seconds  # an estimate
        self.clock.tick()
        self._report(report)
        self._save()

    def _record_start(self) -> None:
        """Write the event that describes the run."""
        population = self.population
        members: list[dict[str, Any]] = []
        for agent in population.agents:
            member = {name: getattr(agent, name) for name in ("slot", "index", "parent")}
            members.append({**member, "hyperparameters": agent.hyperparameters.to_json()})
        self._event(
            "run",
            **run_facts(self),
            members=members,
            strategy=strategy_record(self.strategy),
            data=self.data,
            lineage=[dump(member) for member in population.lineage],
            **provenance(population),
        )

    def _record_step(
        self,
        collected: RolloutBatch,
        learned: Mapping[int, LearnReport],
        phases: Mapping[str, float],
    ) -> StepReport:
        """Count a learning step and record it."""
        self.clock.tick()
        self.run_state.longest_step = max(self.run_state.longest_step, sum(phases.values()))
        completions = 0
        if self.run_dir is not None:
            completions = self.run_dir.logging.completions
        report, examples = count_step(self, collected, learned, phases, completions)
        # 1. Write the step, and its completions.
        if report.step == 0 and not self.fitness.uses_validation:
            baseline = first_step_baseline(self.run_state)
            if baseline is not None:
                self._report(baseline)
        self._report(report)
        if self.run_dir is not None:
            self.run_dir.write_completions(report.step, examples)
        self.trackers.log(step_curves(report), report.step)
        rows = [completion_row(each) for each in examples]
        self.trackers.log_table("completions", rows, report.step)
        # 2. Write the learning rates that a calibration has found.
        for slot, member in report.learned.items():
            metrics = member.metrics
            if "calibrated_lr" in metrics:
                self._event(
                    "calibrated",
                    step=report.step,
                    slot=slot,
                    index=member.index,
                    lr=metrics["calibrated_lr"],
                    passes=metrics["step_passes"],
                    kl=metrics["step_kl"],
                    target=metrics["step_target"],
                )
        # 3. Warn of what the first steps show.
        self._learning_signal.update(learned)
        self._sampler_check.update(learned)
        self._tool_calls.update(collected.scores.metrics)
        self._constant_rewards.update(collected.experience)
        if report.step == 0 and self.schedule.generations != 1:
            state = self.run_state
            cost = {
                "timesteps": state.latest_timesteps,
                "tokens": state.latest_tokens,
                "seconds": state.longest_step,
            }
            reason = early_end(self.schedule, self.strategy, len(self.population), cost)
            if reason is not None:
                warn(f"Members will not be selected: as measured in the first step, {reason}")
        return report

    def _end_generation(self) -> GenerationReport:
        """Evaluate, plan, apply and save."""
        state = self.run_state
        population = self.population
        clock = self.clock
        # 1. Evaluate.
        self._require_healthy()
        self._set_progress()
        began = clock.now()
        try:
            with self.stop_request.interruptible():
                measured = measure(self)
        except (Exception, SystemExit) as error:
            self._save(f"{class_name(error)} while evaluating generation {state.generation + 1}")
            raise
        state.longest_evaluation = max(state.longest_evaluation, clock.now() - began)
        clock.tick()
        self._greedy_gap.update(measured)
        if self.fitness.uses_validation:
            self._equal_scores.update(measured, state.baseline)
        state.generation += 1
        best = update_best(self, measured)
        report = generation_report(self, measured, best=best)
        state.step_in_generation = 0
        state.unplanned = True
        generation = as_generation(
            report, slots=len(population), measure=self.fitness.selection_measure
        )
        state.history.append(generation)
        # 2. Plan the next generation.
        try:
            plan = None if self.limits.finished() else self._plan()
        except (StrategyError, Interrupted) as error:
            self._report(report)
            state.start_generation()
            # After an interruption, the caller saves.
            if isinstance(error, StrategyError):
                self._save(f"the strategy failed after generation {state.generation}")
            raise
        # 3. Record, then clone and mutate.
        report = replace(report, plan=plan)
        self._report(report)
        # Logged at the last step, because a resumed run deletes the scalars of later steps.
        curves = generation_curves(report.members, population.space)
        self.trackers.log(curves, state.step - 1)
        self.trackers.log_table("members", member_rows(report.members), state.step - 1)
        lineage = [dump(member) for member in population.lineage]
        self.trackers.log_table("lineage", lineage, state.step - 1)
        state.start_generation()
        if plan is not None:
            self._apply(plan)
        # 4. Compare train states of all ranks, then checkpoint.
        self.population.check_replicas()
        self._save()
        return report

    def _plan(self) -> Plan:
        """Return the plan of the strategy, with proposed texts.

        On an error, restore the state of the strategy.
        """
        strategy_state = self.strategy.state()
        try:
            plan = self.population.plan(self.strategy, self.run_state.history)
            self._check_new_settings(plan)
            if self.shared_run_dir is not None:
                # Raises an error if it cannot be stored.
                dump_json(self.strategy.state(), what="the state of the strategy")
        except (Exception, SystemExit) as error:
            self.strategy.load_state(strategy_state)
            name = type(self.strategy).__name__
            raise StrategyError(
                f"{name} cannot plan: {class_name(error)}: {one_line(error)}"
            ) from error
        try:
            return propose_texts(self, plan)
        except BaseException:
            self.strategy.load_state(strategy_state)
            raise

    def _check_new_settings(self, plan: Plan) -> None:
        """Check the task settings of children that no member has had, such as misspelt ones."""
        known = set(self.population.space.task_settings)
        for settings in self.population.task_settings.values():
            known |= set(settings)
        children = [child.hyperparameters for child in plan.children]
        new = [each for each in children if not known.issuperset(each.task_settings)]
        check_settings(self.env, HyperparameterConfig(), new)

    def record_proposal(self, proposal: Proposal) -> None:
        """Write a proposal to the journal, before it is used."""
        self._event("proposal", **dump(proposal))
        self.known_proposals[proposal.key] = proposal

    def _apply(self, plan: Plan) -> None:
        """Clone and mutate members, and set the budgets of the next generation."""
        state = self.run_state
        self.population.apply(plan)
        state.set_budgets(
            self.schedule,
            self.population,
            samples_per_step=plan.samples_per_step,
            steps_per_generation=plan.steps_per_generation,
        )
        state.unplanned = False
        state.reflections = [()] * len(self.population)

    def _record_end(self) -> None:
        """Record why the run has ended, and by how much it exceeded its time limit."""
        self.clock.tick()
        over = self.run_state.seconds - (self.schedule.max_seconds or math.inf)
        note = f", exceeded by {over:.1f} s" if over >= 0.05 else ""
        self.run_state.ended = self._ended = f"{self.limits.reached()}{note}"
        self._complete = True
        self._event("ended", reason=self._ended)
        self._save()
        if self.clock.expired and not self.run_state.step:
            warn(
                "No learning step fitted into max_seconds. Raise max_seconds, or use fewer members"
                f" (now {len(self.population)}) or a smaller samples_per_step (now"
                f" {self.run_state.samples_per_step})."
            )

    @property
    def result(self) -> Result:
        """Result of the run.

        Raises:
            RuntimeError: If it has not ended.
        """
        if self._ended is None:
            raise RuntimeError(
                "The run has not ended, so it has no result. Iterate over the run to its end, or"
                " call stop()."
            )
        state = self.run_state
        best = None
        if state.best is not None:
            best = BestMember(
                index=state.best.index,
                generation=state.best.generation,
                fitness=estimate(state.best.fitness),
                hyperparameters=state.best.member.hyperparameters,
            )
        return Result(
            reason=self._ended,
            complete=self._complete,
            generations=state.generation,
            steps=state.step,
            timesteps=state.timesteps if self.population.members.step_based else None,
            tokens=state.tokens,
            seconds=state.seconds,
            evaluation=state.evaluation,
            baseline=None if state.baseline is None else estimate(state.baseline),
            best=best,
            test=state.tested,
            run_dir=None if self.shared_run_dir is None else self.shared_run_dir.path,
        )

    def _require_healthy(self) -> None:
        """Stop the run if all members have failed, as none is left to clone."""
        if not self.population.healthy:
            members = [agent for agent in self.population.agents if not agent.retired]
            reasons = "; ".join(f"member {agent.index}: {agent.failed}" for agent in members)
            self._event("stopped", reason=f"all members failed ({reasons})")
            raise AllFailedError(
                f"All members failed ({reasons}). Start a new run with a lower lr, max_grad_norm or"
                " temperature, or with a network that returns finite numbers."
            )

    def _set_progress(self) -> None:
        """Pass step number and total of learning steps to an environment with `set_progress`."""
        if isinstance(self.env, SupportsProgress):
            state = self.run_state
            total = 0  # unknown
            if self.schedule.generations is not None:
                # Assume that the generations left are as long as the current one.
                left = max(0, self.schedule.generations - state.generation)
                total = state.step - state.step_in_generation + left * state.steps_per_generation
            self.env.set_progress(state.step, total)

    # ---- files, which rank 0 writes

    def _event(self, event: str, **fields: Any) -> None:
        """Write an event to the journal, then the warnings that were not yet written."""
        if self.run_dir is None:
            return
        self.run_dir.journal(event, **fields)
        for message, step in list(self._warnings.items())[self._recorded_warnings :]:
            self.run_dir.journal("warning", step=step, message=message)
        self._recorded_warnings = len(self._warnings)

    def _record_warning(self, message: str) -> None:
        """Remember a warning for the journal: each text once, at most `MAX_WARNINGS` texts."""
        if len(self._warnings) < MAX_WARNINGS:
            self._warnings.setdefault(message, self.run_state.step)

    def _report(self, report: BaselineReport | StepReport | GenerationReport | TestReport) -> None:
        """Write a report to the journal."""
        self._event(report.event, **report.to_json())

    def _save(self, stopped: str | None = None) -> None:
        """Write a checkpoint, after a "stopped" event if a reason is given."""
        if stopped is not None:
            self._event("stopped", reason=stopped)
        if self.run_dir is not None:
            self.run_dir.save(self)

    def _close(self) -> None:
        """End the trackers, and release the run directory."""
        self.trackers.finish()
        if self.run_dir is not None:
            self.run_dir.close()

    def _call(self, hook: str, argument: Any) -> None:
        """Call a hook of all callbacks, on rank 0."""
        if self.population.processes.is_rank_zero:
            for callback in self.callbacks:
                result = getattr(callback, hook)(argument)
                # Callbacks of Stable-Baselines3 and the function of `train` end a run like this.
                if result is False:
                    warn(
                        f"{hook} of {class_name(callback)} returned False, which does not end the"
                        " run. Call stop() of the trainer that on_run_start gets."
                    )
