"""Display of a run: a live progress bar on a terminal, lines in a log, tables of generations."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from evogrpo.interruption import ProgressUpdate
from evogrpo.reporting.records import (
    Example,
    GenerationReport,
    MemberReport,
    Result,
    StepReport,
    Terms,
    processed,
    terms_of,
    verdict,
)
from evogrpo.reporting.records import TestReport as TestOutcome
from evogrpo.reporting.setting_effects import FINDINGS_TITLE, findings
from evogrpo.reporting.setting_labels import NO_LABELS, SettingLabels, differing_settings
from evogrpo.reporting.summary import read_summary
from evogrpo.text import (
    count_text,
    duration_text,
    number_text,
    origin_text,
    pluralize,
    printable,
    score_text,
)
from evogrpo.training.callbacks import Callback
from evogrpo.training.trainer import Trainer

# Minimum time between two lines of a log.
SECONDS_BETWEEN_LINES = 1.0


class RunDisplay(Callback):
    """Display of a run; a context manager that may be entered repeatedly.

    Args:
        console: Console of the display.
        trainer: The run.
    """

    def __init__(self, console: Console, trainer: Trainer) -> None:
        self._console = console
        self._trainer = trainer
        self._began = time.monotonic() - trainer.run_state.seconds
        # Progress of the step or evaluation under way.
        self._work: ProgressUpdate | None = None
        self.terms = terms_of(trainer.population.members.kind)
        self._spinner = Spinner("dots")
        self._step: StepReport | None = None
        # By time.monotonic().
        self._last_line_at = -SECONDS_BETWEEN_LINES
        self._entered = False
        # Labels of texts of task settings.
        self._texts_shown: set[str] = set()
        self._baseline_shown = trainer.run_state.baseline is not None
        self._live: Live | None = None
        # A notebook shows generations only.
        self._is_log = not (console.is_terminal or console.is_jupyter)

    def __enter__(self) -> Self:
        # A terminal shows a live table, a log begins with one line.
        if self._console.is_terminal:
            # A new Live each time, because a stopped one would erase the lines at its last
            # position.
            self._live = Live(self, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        elif self._is_log and not self._entered:
            self._console.print(self._phase())
        self._entered = True
        self._trainer.stop_request.listener = self._on_progress
        return self

    def __exit__(self, *error: object) -> None:
        self._trainer.stop_request.listener = None
        if self._live is not None:
            self._live.stop()

    def _on_progress(self, work: ProgressUpdate) -> None:
        """Show the progress of work that takes long."""
        # No hook is called when the baseline is measured.
        self._show_baseline()
        self._work = work

    def fraction(self) -> float:
        """Return the fraction of the run that is done, by the nearest limit.

        An evaluation counts as a step.
        """
        schedule = self._trainer.schedule
        state = self._trainer.run_state
        # 1. Limits on steps, tokens and time.
        amounts = state.spent(evaluations=schedule.count_evaluations) | {"seconds": state.seconds}
        limits = {name: getattr(schedule, f"max_{name}") for name in amounts}
        parts = []
        for name, limit in limits.items():
            if limit is not None:
                parts.append(amounts[name] / limit)
        # 2. The number of generations.
        if schedule.generations is not None:
            done = state.step + state.generation
            left = self._steps_left() + max(0, schedule.generations - state.generation)
            parts.append(done / (done + left))
        return min(max(parts, default=0.0), 1.0)

    def _steps_left(self) -> int:
        """Return the learning steps left, assuming generations as long as the current one."""
        state = self._trainer.run_state
        generations = (self._trainer.schedule.generations or 0) - state.generation
        return max(0, generations * state.steps_per_generation - state.step_in_generation)

    def _elapsed(self) -> float:
        """Return the seconds since the run began, without the time between a stop and a resume."""
        return time.monotonic() - self._began

    def _left_text(self) -> str:
        """Return an estimate of the time left at the average speed so far.

        Empty before the first step.
        """
        fraction = self.fraction()
        if fraction == 0 or self._trainer.run_state.step == 0:
            return ""
        return f"{_about(self._elapsed() * (1 / fraction - 1))} left"

    def on_step(self, report: StepReport) -> None:
        """Show a learning step."""
        self._show_baseline()
        self._step = report
        self._work = None
        # 1. Calibrated learning rates.
        for member in report.learned.values():
            if "calibrated_lr" in member.metrics:
                trials = pluralize(int(member.metrics["step_passes"] or 0), "trial")
                lr = number_text(member.metrics["calibrated_lr"])
                kl = number_text(member.metrics["step_kl"])
                target = number_text(member.metrics["step_target"])
                self._console.print(
                    f"#{member.index}: learning rate calibrated to {lr} after {trials},"
                    f" KL {kl} (target {target})"
                )
        # 2. A log gets at most one line a second, and always the last step of a generation.
        state = self._trainer.run_state
        last = state.step_in_generation == state.steps_per_generation
        due = time.monotonic() - self._last_line_at >= SECONDS_BETWEEN_LINES
        if not self._is_log or not (last or due):
            return
        number = f"{report.step + 1}"
        if self._trainer.schedule.generations is not None:
            number += f"/{state.step + self._steps_left()}"
        line = Text.assemble(("step ", "dim"), number, ("  mean reward ", "dim"))
        line.append_text(rewards_text(report))
        line.append(f"  {report.seconds:.1f} s  {self._left_text()}", "dim")
        self._console.print(line, soft_wrap=True)
        self._last_line_at = time.monotonic()

    def on_generation(self, report: GenerationReport) -> None:
        """Show a generation."""
        self._work = None
        width = self._console.width
        trainer = self._trainer
        # 1. Heading.
        head = f"Generation {report.generation}"
        if trainer.schedule.generations is not None:
            head += f" of {trainer.schedule.generations}"
        done = f"{duration_text(report.seconds)} · {processed(report, self.terms)}"
        facts = f" · step {report.step} · {done}"
        # Avoid a line with a single word.
        if len(head) + len(facts) > width:
            facts = facts.removesuffix(" processed")
        shown: list[RenderableType] = [Text.assemble((head, "bold"), (facts, "dim"))]
        # 2. Members. `born` does not tell new ones: it may be a generation of an earlier run of
        #    this population.
        population = trainer.population
        step_size = "target_kl"
        if population[0].hyperparameters.target_kl is None:
            step_size = "lr"
        measure = "training"
        if trainer.fitness.uses_validation:
            measure = "fitness"
        # The last of the history is this generation; members that the one before lacked are new.
        new: set[int] = set()
        for generation in trainer.run_state.history[-2:-1]:
            before = {member.index for member in generation.members}
            new = {member.index for member in report.members} - before
        best = trainer.run_state.best
        births = [birth.hyperparameters for birth in population.lineage]
        labels = SettingLabels.of(population.space.to_json(), births)
        evolving = [*population.space, *differing_settings(births)]
        # Without evolving hyperparameters, show the size of steps and of groups.
        table = generation_table(
            report,
            list(dict.fromkeys(evolving)) or [step_size, "group_size"],
            width,
            self.terms,
            labels=labels,
            best_so_far=best is None or best.generation == report.generation,
            new=new,
            measure=measure,
        )
        shown.append(table)
        # The best member may have been replaced since.
        if best is not None and best.generation != report.generation:
            score = score_text(best.fitness.mean, best.fitness.standard_error)
            whose = f"#{best.index} of generation {best.generation}"
            shown.append(f"★ best so far: {whose}, fitness {score}")
        # 3. Texts that have a number in tables, once each.
        texts = labels.numbered
        for label in texts:
            if label not in self._texts_shown:
                text = shortened(one_line(texts[label]), max(2 * width, 80))
                shown.append(Text.assemble((f"{label}: ", "dim"), text))
        self._texts_shown.update(texts)
        # 4. Selection and completions.
        shown += plan_lines(report, labels)
        if report.plan is None and len(report.members) > 1:
            reason = trainer.limits.reached()
            shown.append(Text(f"selection: none, as the run ends: {reason}", "dim"))
        completions = completions_table(report.examples, report.best_index, width)
        if completions is not None:
            shown += ["", completions]
        # In one call, because a notebook shows each print as a separate output.
        self._console.print(Group(*shown, ""))

    def on_run_end(self, result: Result) -> None:
        """Print the result."""
        if not result.complete:
            saved = "the run is saved"
            if result.run_dir is None:
                saved = "no run directory, so nothing was saved"
            line = f"{result.reason} after learning step {result.steps}; {saved}"
            self._console.print(Text(line, "yellow"))
            return
        # 1. The test.
        lines: list[RenderableType] = []
        if result.test:
            lines += [*outcome_lines(result.test, self.terms), ""]
        # 2. The share of evaluations in all environment steps, or in all tokens.
        cost = result.evaluation
        if cost.tokens:
            learned = result.tokens
            unit = self.terms.tokens
            if result.timesteps is not None:
                learned = result.timesteps
                unit = "environment steps"
            line = f"{duration_text(cost.seconds)}, {count_text(cost.tokens)} {unit}"
            if learned:
                share = cost.tokens / (cost.tokens + learned)
                line += f" ({share:.0%} of all {unit})"
            lines.append(f"Evaluations: {line}")
        # 3. Which values of task settings helped.
        effects = {}
        if result.run_dir is not None:
            effects = findings(read_summary(result.run_dir))
        if effects:
            rows = Table.grid(padding=(0, 2, 0, 0))
            for name, finding in effects.items():
                rows.add_row(Text(f"  {name}", "dim"), Text(finding))
            lines += ["", Text(FINDINGS_TITLE, "bold"), rows]
        self._console.print(Group(*lines, f"Finished: {result.reason}."))

    def _show_baseline(self) -> None:
        """Print the fitness of the untrained base, once it is measured."""
        baseline = self._trainer.run_state.baseline
        if self._baseline_shown or baseline is None:
            return
        terms = self.terms
        score = score_text(baseline.mean, baseline.standard_error)
        count = len(baseline.scores)
        config = self._trainer.fitness
        # Without validation, the first learning step gives the baseline.
        if config.uses_validation:
            line = f"{terms.untrained}: fitness {score} on {count} validation {terms.questions}"
            if config.sampled:
                line += ", sampled"
        else:
            questions = f"the {count} {terms.questions} of the first learning step"
            line = f"before training: mean reward {score} on {questions}"
        self._console.print(f"{line}\n")
        self._baseline_shown = True

    # ---- the live region

    def __rich__(self) -> RenderableType:
        """Return the live region: progress bar, work under way, and rewards of the last step."""
        stopping = bool(self._trainer.stop_request.reason)
        # 1. Progress of the run.
        self._spinner.style = "cyan"
        if stopping:
            self._spinner.style = "yellow"
        bar = ProgressBar(
            total=1.0, completed=self.fraction(), complete_style="cyan", finished_style="green"
        )
        times = duration_text(self._elapsed())
        left = self._left_text()
        if left:
            times += f", {left}"
        row = Table.grid(padding=(0, 1, 0, 0), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1, min_width=8)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(self._spinner, self._phase(), bar, Text(times, "dim"))
        lines: list[RenderableType] = [row]
        # 2. Progress of the step or evaluation; rewards report none.
        work = self._work
        if work is not None:
            activity = work.activity.replace("learning", "learning from")
            line = f"  {activity} {count_text(work.count)} {work.noun}"
            if work.activity != "rewarding":
                line += f" · {work.fraction:.0%}"
            lines.append(Text(line, "dim"))
        # 3. Rewards of the last step.
        if self._step is not None:
            head = Text(f"  mean reward in step {self._step.step + 1}", "dim")
            width = self._console.width - head.cell_len
            rewards = Text.assemble(head, rewards_text(self._step, width))
            speed = f"   {self._step.seconds:.1f} s per step"
            if rewards.cell_len + len(speed) <= self._console.width:
                rewards.append(speed, "dim")
            lines.append(rewards)
        if stopping:
            line = "Stopping. Press Ctrl-C again to abort."
            if self._trainer.shared_run_dir is not None:
                line = "Stopping and saving. Press Ctrl-C again to abort without saving."
            lines.append(Text(f"  {line}", "yellow"))
        return Group(*lines)

    def _phase(self) -> Text:
        """Return the current phase of the run."""
        trainer = self._trainer
        schedule = trainer.schedule
        state = trainer.run_state
        if not state.begun and trainer.fitness.uses_validation:
            return Text(f"measuring the {self.terms.untrained}")
        if trainer.limits.finished():
            count = schedule.questions("test", trainer.env)
            return Text(f"testing on {count} {self.terms.questions}")
        validating = state.step_in_generation >= state.steps_per_generation
        # `generation` counts evaluated generations. The last of them is current until its plan has
        # been applied.
        number = f"{state.generation + 1}"
        if validating and state.unplanned:
            number = f"{state.generation}"
        if schedule.generations is not None:
            number += f"/{schedule.generations}"
        if validating:
            return Text(f"generation {number} · validating")
        step = f"{state.step_in_generation + 1}/{state.steps_per_generation}"
        return Text(f"generation {number} · step {step}")


def _about(seconds: float) -> str:
    """Return a rounded estimate of time."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min"
    return f"about {duration_text(60 * round(seconds / 60))}"


def outcome_lines(report: TestOutcome, terms: Terms) -> list[Text]:
    """Return the lines on the test: before training, after, and the difference."""
    # A difference within noise gets no colour.
    style = "bold"
    if report.beyond_noise:
        style = "bold green" if report.gain.mean > 0 else "bold red"
    title = f"Test: {report.questions} {terms.questions} that neither training nor selection saw"
    member = f"member #{report.index}"
    lines = [
        Text(title, "bold"),
        Text(f"  {terms.untrained:<17}  {report.before}"),
        Text.assemble(
            f"  {member:<17}  ",
            (str(report.after), "bold"),
            "   ",
            (f"{report.gain:+}", style),
        ),
    ]
    warning = verdict(report, terms)
    if warning is not None:
        lines.append(Text(warning, "yellow"))
    return lines


# Spaces between columns.
_COLUMN_GAP = 2
# Minimum columns of a question or a completion.
_MIN_TEXT_WIDTH = 12


def completions_table(examples: Sequence[Example], best: int, width: int) -> Table | None:
    """Return a table of a member's completions in the last learning step, with their rewards.

    Args:
        examples: Completions of all members.
        best: Index of the member; if it has none, the completions of another one are shown.
        width: Columns of the terminal.

    Returns:
        The table; None without examples.
    """
    # 1. Choose the completions.
    if not examples:
        return None
    if all(example.index != best for example in examples):
        best = examples[0].index
    shown = [example for example in examples if example.index == best]
    # 2. Columns of numbers, as pairs, because a reward function may be called `reward` too. With a
    #    single reward function its values are the rewards, unless it has a weight.
    numbers: list[tuple[str, list[str]]] = []
    if len(shown[0].rewards) > 1:
        for name in shown[0].rewards:
            values = [number_text(each.rewards.get(name)) for each in shown]
            numbers.append((printable(name), values))
    numbers.append(("reward", [number_text(each.reward) for each in shown]))
    advantages = []
    for each in shown:
        # With its sign, unless it is 0 or missing.
        text = f"{each.advantage:+.3g}" if each.advantage else number_text(each.advantage)
        advantages.append(text)
    numbers.append(("advantage", advantages))
    # 3. In a narrow terminal, leave out the columns of reward functions, then the advantage. Divide
    #    the width that is left; the question gets at most half of it.
    indices = [f"#{each.index}" for each in shown]
    members = (f"step {shown[0].step + 1}", indices)
    text_width = _width_left(width, [members, *numbers])
    while text_width < 2 * _MIN_TEXT_WIDTH and len(numbers) > 1:
        functions = len(numbers) - 2  # the last two columns are reward and advantage
        if functions > 0:
            numbers.pop(functions - 1)
        else:
            numbers.pop()
        text_width = _width_left(width, [members, *numbers])
    text_width = max(text_width, 2 * _MIN_TEXT_WIDTH)
    questions = [one_line(each.prompt) for each in shown]
    longest = max(map(cell_len, questions))
    question_width = max(min(longest, text_width // 2), _MIN_TEXT_WIDTH)
    completion_width = text_width - question_width
    # 4. Build the table.
    table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(members[0], style="dim", no_wrap=True)
    table.add_column("question", style="dim", no_wrap=True)
    table.add_column("completion", style="italic", no_wrap=True)
    for name, _ in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row, example in enumerate(shown):
        question = ""
        # Completions of one question follow each other, and show it once.
        if row == 0 or questions[row] != questions[row - 1]:
            question = shortened(questions[row], question_width)
        completion = shortened(one_line(example.completion), completion_width)
        values = [values[row] for _, values in numbers]
        texts = (Text(question), Text(completion or "(nothing)"))
        table.add_row(indices[row], *texts, *values)
        for name, reason in example.feedback.items():
            line = shortened(one_line(f"{name}: {reason}"), completion_width)
            table.add_row("", "", Text(line, "dim"))
    return table


def _width_left(width: int, columns: Sequence[tuple[str, Sequence[str]]]) -> int:
    """Return the width that columns, each a heading and its cells, leave for two texts."""
    for name, values in columns:
        widest = max(map(cell_len, (name, *values)))
        width -= widest + _COLUMN_GAP
    return width - 2 * _COLUMN_GAP


def one_line(text: str) -> str:
    """Return an untrusted text on one line, control characters escaped, empty lines removed."""
    lines = (line.strip() for line in printable(text.expandtabs(1)).split("\n"))
    return " ⏎ ".join(line for line in lines if line)


def shortened(text: str, limit: int) -> str:
    """Cut the middle out of a text wider than `limit` cells of a terminal.

    A Chinese character takes two.
    """
    if cell_len(text) <= limit:
        return text
    # The end of a completion, where answers are, gets a third of the width.
    tail = max(limit // 3, 4)
    first = text[: limit - tail - 1]
    last = text[-tail:]
    while cell_len(first) > limit - tail - 1:
        first = first[:-1]
    while cell_len(last) > tail:
        last = last[1:]
    return f"{first}…{last}"


# Metric that is 1 if all rewards within each group were equal.
EQUAL_GROUPS = "frac_reward_zero_std"
# Columns of a note in a table of members, without line breaks.
_NOTE_WIDTH = 26


def rewards_text(report: StepReport, width: int | None = None) -> Text:
    """Return the mean reward of each member in a step, or of those that fit into a width."""
    members = report.learned.values()
    healthy = [each for each in members if not each.failed]
    rewards = [each.reward for each in healthy if each.reward is not None]
    best = max(rewards, default=None)
    size = max(map(abs, rewards), default=0.0)
    # One form for all members: decimals, unless the rewards are tiny or huge.
    form = ".3g"
    if size == 0 or 0.01 <= size < 1e6:
        form = ".2f"
    text = Text()
    for member in members:
        part = Text.assemble((f" #{member.index} ", "dim"))
        if member.failed:
            part.append("failed", "red")
        elif member.reward is None:
            part.append("nan")
        elif member.reward == best:
            part.append(f"{member.reward:{form}}", "bold")
        else:
            part.append(f"{member.reward:{form}}")
        # Two columns for the ellipsis.
        if width is not None and text.cell_len + part.cell_len > width - 2:
            return text.append(" …", "dim")
        text.append_text(part)
    return text


def generation_table(
    report: GenerationReport,
    evolving: Sequence[str],
    width: int,
    terms: Terms,
    *,
    labels: SettingLabels = NO_LABELS,
    best_so_far: bool = True,
    new: Collection[int] = (),
    measure: str = "fitness",
) -> Table:
    """Return the table of a generation, one row per member.

    Args:
        report: The generation.
        evolving: The hyperparameters and task settings to show.
        width: Columns of the terminal.
        terms: Terms of the task type.
        labels: Labels of texts of task settings.
        best_so_far: The best member of this generation is the best of the run so far.
        new: Indices of the members that were born in the plan before this generation.
        measure: Name of the fitness that selection uses, for the heading.
    """
    # 1. Cells by heading. A run of one agent has neither slots nor parents.
    members = report.members
    columns: dict[str, list[str | Text]] = {}
    if len(members) > 1:
        columns["slot"] = [str(each.slot) for each in members]
    columns["member"] = [f"#{each.index}" for each in members]
    if any(each.parent is not None for each in members):
        columns["parent"] = ["–" if each.parent is None else f"#{each.parent}" for each in members]
    heads = {labels.name(name): name for name in evolving}
    for head, name in heads.items():
        columns[head] = [_value_text(each, name, labels) for each in members]
    if any("step_kl" in each.metrics for each in members):
        # Means over the generation's learning steps.
        columns["lr used"] = [number_text(each.metrics.get("learning_rate")) for each in members]
        columns["step KL"] = [number_text(each.metrics.get("step_kl")) for each in members]
    columns[f"{measure} ± SE"] = [str(each.estimate or "failed") for each in members]
    columns[terms.tokens] = [_short_count(each.tokens) for each in members]
    columns["time"] = [duration_text(each.seconds) for each in members]
    columns[""] = [member_note(each, report, best_so_far, each.index in new) for each in members]
    # 2. In a narrow terminal, break the headings, and leave out columns in the order of `optional`:
    #    first costs and origin, then hyperparameters in which members are equal, then the others,
    #    each from the last to the first.
    table = _member_table(report, columns)
    equal = []
    for head in heads:
        texts = set(map(str, columns[head]))
        if len(texts) == 1:
            equal.append(head)
    different = [head for head in heads if head not in equal]
    optional = ["time", terms.tokens, "step KL", "lr used", "parent", "slot"]
    optional += [*equal[::-1], *different[::-1]]
    left_out = []
    while optional and Console(width=1000).measure(table).maximum > width:
        head = optional.pop(0)
        if columns.pop(head, None) is not None and head in heads:
            left_out.append(head)
        table = _member_table(report, columns, broken_heads=True)
    if left_out:
        table.caption = Text(f"not shown: {', '.join(sorted(left_out))}", "dim")
        table.caption_justify = "left"
    return table


def _member_table(
    report: GenerationReport,
    columns: Mapping[str, Sequence[str | Text]],
    *,
    broken_heads: bool = False,
) -> Table:
    """Return a table of cells by heading, in which the best member is highlighted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        # The notes.
        if name == "":
            table.add_column(max_width=_NOTE_WIDTH)
        else:
            head = name
            if broken_heads:
                head = name.replace("_", "_\n").replace(".", ".\n")
            table.add_column(Text(head), justify="right", no_wrap=True)
    for row, member in enumerate(report.members):
        style = ""
        if member.index == report.best_index:
            style = "bold green"
        table.add_row(*(column[row] for column in columns.values()), style=style)
    return table


def _value_text(member: MemberReport, name: str, labels: SettingLabels) -> Text:
    """Return a hyperparameter of a member; it is highlighted if it changed at its birth."""
    value = labels.text(name, member.hyperparameters.get(name))
    return Text(value, "bold cyan" if name in member.changes else "")


def member_note(
    member: MemberReport, report: GenerationReport, best_so_far: bool, is_new: bool
) -> Text:
    """Return notes on a member: failed, best of the generation or so far, new, no signal."""
    if member.failed is not None:
        return Text(printable(member.failed), "red")
    notes = []
    if member.index == report.best_index:
        notes.append("★ best so far" if best_so_far else "best")
    if is_new and member.parent is not None:
        notes.append("new")
    if member.metrics.get(EQUAL_GROUPS) == 1.0:
        notes.append("no signal")
    return Text(" · ".join(notes))


def plan_lines(report: GenerationReport, labels: SettingLabels = NO_LABELS) -> list[Text]:
    """Return lines on the plan after a generation: one per retirement and birth."""
    plan = report.plan
    members = {member.slot: member.index for member in report.members}
    if plan is None or (len(members) == 1 and not plan.children):
        return []
    # 1. Members without a successor.
    lines = []
    for slot, index in report.retired.items():
        reason = printable(plan.reasons[slot].removeprefix("stopped: "))
        lines.append(Text.assemble((f"selection: #{index} removed", "cyan"), f" ({reason})"))
    # 2. Budgets.
    budgets = [f"selection: {each} from the next generation" for each in report.new_budgets]
    lines += [Text(line, "cyan") for line in budgets]
    # 3. Births.
    for child in plan.children:
        birth = f"#{child.index} added"
        if child.slot in members:
            birth = f"#{members[child.slot]} is replaced by #{child.index}"
        origin = origin_text(child.parent, labels.changes(child.changes))
        lines.append(Text.assemble((f"selection: {birth}", "cyan"), f", a {origin}"))
    # 4. Otherwise the reasons why members stay, without details; the best one always stays.
    if not lines:
        reasons: dict[str, None] = {}
        for member in report.members:
            if member.index != report.best_index:
                reason = plan.reasons[member.slot].removeprefix("kept: ")
                reasons[printable(reason.partition(",")[0])] = None
        if len({member.fitness for member in report.members}) == 1:
            reasons[f"all have fitness {number_text(report.members[0].fitness)}"] = None
        lines.append(Text(f"selection: no member replaced ({'; '.join(reasons)})", "dim"))
    return lines


def _short_count(count: int) -> str:
    """Return a short count: 940, 12.3k, 456k, 7.8M."""
    # 999,600 becomes 1M, not 1000k.
    rounded = float(f"{count:.3g}")
    if rounded >= 1e9:
        return f"{count_text(count / 1e6)}M"
    if rounded >= 1e6:
        return f"{rounded / 1e6:.3g}M"
    if rounded >= 1e3:
        return f"{rounded / 1e3:.3g}k"
    return str(count)
