"""Display of a run: a live progress bar on a terminal, plain lines in a log, and the tables of a generation."""

import time
from collections.abc import Collection, Sequence
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
from evogrpo.text import (
    count_text,
    duration_text,
    number_text,
    origin_text,
    pluralize,
    printable,
    score_text,
)
from evogrpo.training.trainer import Callback, Trainer

SECONDS_BETWEEN_LINES = 1.0  # in a log


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
        self._work: ProgressUpdate | None = None  # progress of the step or evaluation under way
        self.terms = terms_of(trainer.population.members.kind)
        self._spinner = Spinner("dots")
        self._step: StepReport | None = None
        self._last_line_at = -SECONDS_BETWEEN_LINES  # by time.monotonic()
        self._entered = False
        self._baseline_shown = trainer.run_state.baseline is not None
        self._live: Live | None = None
        # a notebook shows generations only
        self._is_log = not (console.is_terminal or console.is_jupyter)

    def __enter__(self) -> Self:
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
        self._show_baseline()  # no hook is called for it
        self._work = work

    def fraction(self) -> float:
        """Return the fraction of the run that is done, by the nearest limit.

        An evaluation counts as a step.
        """
        schedule = self._trainer.schedule
        state = self._trainer.run_state
        amounts = state.spent(evaluations=schedule.count_evaluations) | {"seconds": state.seconds}
        limits = {name: getattr(schedule, f"max_{name}") for name in amounts}
        parts = [amounts[name] / limit for name, limit in limits.items() if limit is not None]
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
        begun = self._trainer.run_state.step and fraction
        if begun:
            return f"{_about(self._elapsed() * (1 / fraction - 1))} left"
        return ""

    def on_step(self, report: StepReport) -> None:
        """Show a learning step."""
        self._show_baseline()
        self._step = report
        self._work = None
        for member in report.learned.values():
            if "calibrated_lr" in member.metrics:
                trials = pluralize(int(member.metrics["step_passes"] or 0), "trial")
                lr = number_text(member.metrics["calibrated_lr"])
                self._console.print(
                    f"#{member.index}: learning rate calibrated to {lr} after {trials}"
                )
        # A log gets at most one line a second, and always the last step of a generation.
        state = self._trainer.run_state
        schedule = self._trainer.schedule
        last = state.step_in_generation == state.steps_per_generation
        if self._is_log and (
            last or time.monotonic() - self._last_line_at >= SECONDS_BETWEEN_LINES
        ):
            if schedule.generations is None:
                total = ""
            else:
                total = f"/{state.step + self._steps_left()}"
            line = Text.assemble(
                ("step ", "dim"), f"{report.step + 1}{total}", ("  mean reward ", "dim")
            )
            line.append_text(rewards_text(report)).append(
                f"  {report.seconds:.1f} s  {self._left_text()}", "dim"
            )
            self._console.print(line, soft_wrap=True)
            self._last_line_at = time.monotonic()

    def on_generation(self, report: GenerationReport) -> None:
        """Show a generation."""
        self._work = None
        width = self._console.width
        total = self._trainer.schedule.generations
        head = f"Generation {report.generation}{'' if total is None else f' of {total}'}"
        spent = f"{duration_text(report.seconds)} · {processed(report, self.terms)}"
        facts = f" · step {report.step} · {spent}"
        if len(head) + len(facts) > width:  # avoid a line with a single word
            facts = facts.removesuffix(" processed")
        shown: list[RenderableType] = [Text.assemble((head, "bold"), (facts, "dim"))]
        population = self._trainer.population
        if population[0].hyperparameters.target_kl is None:
            step_size = "lr"
        else:
            step_size = "target_kl"
        evolving = list(population.space) or (step_size, "clip_coef", "group_size")
        best = self._trainer.run_state.best
        best_so_far = best is None or best.generation == report.generation
        # `born` does not tell new members: it may be a generation of an earlier run of this
        # population.
        before = [
            slot.member
            for each in self._trainer.run_state.history[-2:-1]
            for slot in each.slots
            if slot.member
        ]
        if before:
            new = {each.index for each in report.members} - {each.index for each in before}
        else:
            new = set()
        if self._trainer.fitness.uses_validation:
            measure = "fitness"
        else:
            measure = "training"
        shown.append(
            generation_table(
                report,
                evolving,
                width,
                self.terms,
                best_so_far=best_so_far,
                new=new,
                measure=measure,
            )
        )
        if best is not None and not best_so_far:
            score = score_text(best.fitness.mean, best.fitness.standard_error)
            shown.append(
                f"★ best so far: #{best.index} of generation {best.generation}, fitness {score}"
            )
        shown += plan_lines(report)
        table = completions_table(report.examples, report.best.index, width)
        if table is not None:
            shown += ["", table]
        # in one call, because a notebook shows each print as a separate output
        self._console.print(Group(*shown, ""))

    def on_run_end(self, result: Result) -> None:
        """Print the result."""
        console = self._console
        if not result.complete:
            if result.run_dir is None:
                saved = "no run directory, so nothing was saved"
            else:
                saved = "the run is saved"
            console.print(
                Text(f"{result.reason} after learning step {result.steps}; {saved}", "yellow")
            )
            return
        cost = result.evaluation
        terms = self.terms
        if result.test:
            lines: list[RenderableType] = [*outcome_lines(result.test, terms), ""]
        else:
            lines = []
        if cost.tokens:
            learned, what = (
                (result.tokens, terms.tokens)
                if result.timesteps is None
                else (result.timesteps, "steps")
            )
            if learned:
                share = f" ({cost.tokens / (cost.tokens + learned):.0%} of all {what})"
            else:
                share = ""
            lines.append(
                f"Evaluations: {duration_text(cost.seconds)}, {count_text(cost.tokens)}"
                f" {what}{share}"
            )
        console.print(Group(*lines, f"Finished: {result.reason}."))

    def _show_baseline(self) -> None:
        """Print the fitness of the untrained base, once it is measured."""
        baseline = self._trainer.run_state.baseline
        if self._baseline_shown or baseline is None:
            return
        config = self._trainer.fitness
        terms = self.terms
        count = len(baseline.scores)
        score = score_text(baseline.mean, baseline.standard_error)
        text = (
            f"before training: mean reward {score} on the {count} {terms.questions} of the first"
            " learning step"
        )
        if config.uses_validation:
            sampled = ", sampled" if config.sampled else ""
            text = (
                f"{terms.untrained}: fitness {score} on {count} validation"
                f" {terms.questions}{sampled}"
            )
        self._console.print(f"{text}\n")
        self._baseline_shown = True

    # ---- the live region

    def __rich__(self) -> RenderableType:
        """Return the live region: progress bar, work under way, and rewards of the last step."""
        row = Table.grid(padding=(0, 1, 0, 0), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1, min_width=8)
        row.add_column(no_wrap=True, justify="right")
        if self._trainer.stop_request.reason:
            self._spinner.style = "yellow"
        else:
            self._spinner.style = "cyan"
        bar = ProgressBar(
            total=1.0, completed=self.fraction(), complete_style="cyan", finished_style="green"
        )
        times = ", ".join(filter(None, (duration_text(self._elapsed()), self._left_text())))
        row.add_row(self._spinner, self._phase(), bar, Text(times, "dim"))
        lines: list[RenderableType] = [row]
        if (work := self._work) is not None:
            # rewards report no progress
            if work.activity == "rewarding":
                part = ""
            else:
                part = f" · {work.fraction:.0%}"
            if work.activity == "learning":
                doing = "learning from"
            else:
                doing = work.activity
            lines.append(Text(f"  {doing} {count_text(work.count)} {work.noun}{part}", "dim"))
        if self._step is not None:
            head = f"  mean reward in step {self._step.step + 1}"
            rewards = Text.assemble((head, "dim"), rewards_text(self._step))
            lines.append(rewards.append(f"   {self._step.seconds:.1f} s per step", "dim"))
        if self._trainer.stop_request.reason:
            saving = self._trainer.shared_run_dir is not None
            verb, rest = ("Stopping and saving", " without saving") if saving else ("Stopping", "")
            lines.append(Text(f"  {verb}. Press Ctrl-C again to abort{rest}.", "yellow"))
        return Group(*lines)

    def _phase(self) -> Text:
        """Return the current phase of the run."""
        trainer = self._trainer
        schedule = self._trainer.schedule
        state = trainer.run_state
        if schedule.generations is None:
            total = ""
        else:
            total = f"/{schedule.generations}"
        if not state.begun and trainer.fitness.uses_validation:
            return Text(f"measuring the {self.terms.untrained}")
        if trainer.limits.finished():
            return Text(
                f"testing on {schedule.questions('test', trainer.env)} {self.terms.questions}"
            )
        if state.step_in_generation >= state.steps_per_generation:
            # `generation` counts evaluated ones
            number = state.generation + (0 if state.unplanned else 1)
            return Text(f"generation {number}{total} · validating")
        where = f"generation {state.generation + 1}{total}"
        return Text(f"{where} · step {state.step_in_generation + 1}/{state.steps_per_generation}")


def _about(seconds: float) -> str:
    """Return a rounded estimate of time."""
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min"
    return f"about {duration_text(60 * round(seconds / 60))}"


def outcome_lines(report: TestOutcome, terms: Terms) -> list[Text]:
    """Return the lines on the test: before training, after, and the difference."""
    before = report.before
    after = report.after
    gain = report.gain
    if not report.beyond_noise:
        colour = ""
    elif after.mean > before.mean:
        colour = " green"
    else:
        colour = " red"
    lines = [
        Text(
            f"Test: {report.questions} {terms.questions} that neither training nor selection saw",
            "bold",
        ),
        Text(f"  {terms.untrained:<17}  {before}"),
        Text.assemble(
            f"  {f'member #{report.index}':<17}  ",
            (str(after), "bold"),
            "   ",
            (f"{'+' if gain.mean > 0 else ''}{gain}", f"bold{colour}"),
        ),
    ]
    remark = verdict(report, terms)
    if remark is None:
        return lines
    return [*lines, Text(remark, "yellow")]


MAX_COMPLETIONS = 3
"""Maximum number of completions in the table."""
_COLUMN_GAP = 2  # spaces between columns
_MIN_TEXT_WIDTH = 12  # columns of a question or a completion


def completions_table(examples: Sequence[Example], best: int, width: int) -> Table | None:
    """Return a table of completions of the last learning step, with rewards, advantage and member.

    Args:
        examples: One completion of every member.
        best: Index of the member in the first row. Members with another reward than this one come
            before the others.
        width: Columns of the terminal.

    Returns:
        The table; None without examples.
    """
    # 1. Choose the completions.
    first = [example for example in examples if example.index == best] or list(examples[:1])
    if not first:
        return None
    others = [example for example in examples if example not in first]
    others.sort(key=lambda example: example.reward == first[0].reward)
    shown = [*first, *others][:MAX_COMPLETIONS]
    # 2. Format the numbers. With a single reward function its values are the rewards, unless it has
    #    a weight.
    if len(shown[0].rewards) > 1:
        names = list(shown[0].rewards)
    else:
        names = []
    advantages = [each.advantage for each in shown]
    numbers = [  # as pairs, because a reward function may be called `reward` or `advantage` too
        *(
            (printable(name), [number_text(each.rewards.get(name)) for each in shown])
            for name in names
        ),
        ("reward", [number_text(each.reward) for each in shown]),
        ("advantage", [f"{value:+.3g}" if value else number_text(value) for value in advantages]),
    ]
    members = [f"#{each.index}" for each in shown]
    head = f"step {shown[0].step + 1}"
    # 3. Divide the width that the other columns leave; the question gets at most half of it.
    columns = [(head, members), *numbers]
    number_width = sum(
        max(map(cell_len, (name, *values))) + _COLUMN_GAP for name, values in columns
    )
    text_width = max(width - number_width - 2 * _COLUMN_GAP, 2 * _MIN_TEXT_WIDTH)
    questions = [one_line(each.prompt) for each in shown]
    question_width = max(min(max(map(cell_len, questions)), text_width // 2), _MIN_TEXT_WIDTH)
    # 4. Build the table.
    table = Table(box=None, padding=(0, _COLUMN_GAP, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(head, style="dim", no_wrap=True)
    table.add_column("question", style="dim", no_wrap=True)
    table.add_column("completion", style="italic", no_wrap=True)
    for name, _ in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row, each in enumerate(shown):
        question = Text(shortened(questions[row], question_width))
        completion = Text(
            shortened(one_line(each.completion), text_width - question_width) or "(nothing)"
        )
        table.add_row(members[row], question, completion, *(values[row] for _, values in numbers))
    return table


def one_line(text: str) -> str:
    """Return an untrusted text on one line, with control characters escaped and empty lines removed."""
    lines = (line.strip() for line in printable(text.expandtabs(1)).split("\n"))
    return " ⏎ ".join(line for line in lines if line)


def shortened(text: str, limit: int) -> str:
    """Cut the middle out of a text wider than `limit` cells of a terminal.

    A Chinese character takes two.
    """
    if cell_len(text) <= limit:
        return text
    tail = max(limit // 3, 4)
    first = text[: limit - tail - 1]
    last = text[-tail:]
    while cell_len(first) > limit - tail - 1:
        first = first[:-1]
    while cell_len(last) > tail:
        last = last[1:]
    return f"{first}…{last}"


WIDE = 100  # characters; a narrower terminal gets a table with fewer columns
EQUAL_GROUPS = "frac_reward_zero_std"  # 1 if all rewards within each group were equal


def rewards_text(report: StepReport) -> Text:
    """Return the mean reward of each member in a step."""
    text = Text()
    rewards = [
        each.reward
        for each in report.learned.values()
        if not each.failed and each.reward is not None
    ]
    size = max(map(abs, rewards), default=0.0)
    form = ".2f" if size == 0 or 0.01 <= size < 1e6 else ".3g"
    for learned in report.learned.values():
        text.append(f" #{learned.index} ", "dim")
        if learned.failed:
            text.append("failed", "red")
        else:
            if learned.reward is None:
                reward = "nan"
            else:
                reward = f"{learned.reward:{form}}"
            text.append(reward, "bold" if learned.reward == max(rewards, default=None) else "")
    return text


def generation_table(
    report: GenerationReport,
    evolving: Sequence[str],
    width: int,
    terms: Terms,
    *,
    best_so_far: bool = True,
    new: Collection[int] = (),
    measure: str = "fitness",
) -> Table:
    """Return the table of a generation, one row per member.

    Args:
        report: The generation.
        evolving: The hyperparameters to show.
        width: Columns of the terminal.
        terms: Terms of the task type.
        best_so_far: The best member of this generation is the best of the run so far.
        new: Indices of the members that were born in the plan before this generation.
        measure: Name of the fitness that selection uses, for the heading.
    """
    # 1. Choose the columns for the width.
    wide = width >= WIDE
    heads = {
        "slot": "right",
        "member": "right",
        "parent": "right",
        **dict.fromkeys(evolving, "right"),
    }
    heads |= {
        f"{measure} ± SE": "left",
        terms.tokens: "right",
        **({"time": "right"} if wide else {}),
        "": "left",
    }
    gap = 2 if wide else 1
    # If the table would be too wide, the notes in the last column are abbreviated.
    short = not wide or sum(max(len(head), 6) + gap for head in heads) + 24 > width
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for head, justify in heads.items():
        table.add_column(head, justify="left" if justify == "left" else "right", no_wrap=bool(head))
    # 2. Add a row for each member.
    for member in report.members:
        best = member.index == report.best.index
        row = [
            str(member.slot),
            f"#{member.index}",
            "–" if member.parent is None else f"#{member.parent}",
            *(
                Text(
                    number_text(getattr(member.hyperparameters, name)),
                    "bold cyan" if name in member.changes else "",
                )
                for name in evolving
            ),
            (
                Text("failed", "red")
                if member.fitness is None
                else score_text(member.fitness, member.standard_error)
            ),
        ]
        if member.seconds < 100:
            seconds = f"{member.seconds:.0f} s"
        else:
            seconds = duration_text(member.seconds)
        costs = [_short_count(member.tokens), *([seconds] if wide else [])]
        note = member_note(
            member, report, short=short, best_so_far=best_so_far, is_new=member.index in new
        )
        table.add_row(*row, *costs, note, style="bold green" if best else "")
    return table


def member_note(
    member: MemberReport, report: GenerationReport, *, short: bool, best_so_far: bool, is_new: bool
) -> Text:
    """Return notes on a member: failed, new, best (with a star if it is the best so far), no learning signal."""
    if member.failed is not None:
        return Text(printable(member.failed), "red")
    notes = []
    if member.index == report.best.index:
        if best_so_far:
            note = "★ best so far"
        else:
            note = "best of this generation"
        notes.append(note.split(maxsplit=1)[0] if short else note)
    if is_new and member.parent is not None:
        moves = ", ".join(
            (
                f"{name} {'↑' if new > old else '↓'}"
                if isinstance(old, int | float) and isinstance(new, int | float)
                else f"{name} → {number_text(new)}"
            )
            for name, (old, new) in member.changes.items()
        )
        # A short note leaves out the changes, which the lines on selection below the table also
        # show.
        notes.append(
            "new" if short else f"clone of #{member.parent}{f': {moves}' if moves else ''}"
        )
    if member.metrics.get(EQUAL_GROUPS) == 1.0:
        notes.append("no signal" if short else "no learning signal")
    return Text((" " if short else " · ").join(notes))


def plan_lines(report: GenerationReport) -> list[Text]:
    """Return lines on the plan after a generation: one per retirement and birth."""
    plan = report.plan
    if plan is None:
        return []
    members = {member.slot: member.index for member in report.members}
    retired = report.retired
    budgets = report.new_budgets
    if len(members) == 1 and not plan.children:
        return []
    if not (plan.children or retired or budgets):
        close = any("within noise" in reason for reason in plan.reasons)
        why = ", all differences are within noise" if close else ""
        return [Text(f"selection: no member replaced{why}", "dim")]
    reasons = {
        index: printable(plan.reasons[slot].removeprefix("stopped: "))
        for slot, index in retired.items()
    }
    lines = [
        Text.assemble((f"selection: #{index} removed", "cyan"), f" ({why})")
        for index, why in reasons.items()
    ]
    lines += [Text(f"selection: {change} from the next generation", "cyan") for change in budgets]
    for child in plan.children:
        member = members.get(child.slot)
        if member is None:
            birth = f"#{child.index} added"
        else:
            birth = f"#{member} is replaced by #{child.index}"
        origin = origin_text(child.parent, child.changes)
        lines.append(Text.assemble((f"selection: {birth}", "cyan"), f", a {origin}"))
    return lines


def _short_count(count: int) -> str:
    """Return a short count: 940, 12.3k, 456k, 7.8M."""
    # rounded before the unit is chosen: 999,600 becomes 1M, not 1000k
    rounded = float(f"{count:.3g}")
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if rounded >= size:
            if rounded < 1000 * size:
                return f"{rounded / size:.3g}{unit}"
            return f"{count_text(count / size)}{unit}"
    return str(count)
