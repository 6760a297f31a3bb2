"""Lineage of a run: best member, ancestors, births, hyperparameter schedule, changed texts."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.task_settings import is_task_setting
from evogrpo.evolution.history import NETWORK, MemberRecord
from evogrpo.evolution.strategies import ScheduleStage
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.summary import RunSummary, read_summary
from evogrpo.text import origin_text, shorten


def lineage_of(summary: RunSummary, member: MemberReport) -> tuple[MemberReport, ...]:
    """Return the reports of every generation in which a member's state was trained.

    Args:
        summary: The run.
        member: The member's report of one generation.

    Returns:
        In order, from the founder's first report to `member`. Training of an ancestor after its
        child's birth is left out.
    """
    line: list[MemberReport] = []
    current: MemberReport | None = member
    while current is not None:
        history = summary.histories[current.index]
        # After the birth of its child, a member trains its own state only.
        trained = [each for each in history.results if each.generation <= current.generation]
        line = trained + line
        current = history.origin
    return tuple(line)


def ancestors(summary: RunSummary, member: MemberReport | None) -> tuple[MemberReport, ...]:
    """Return the last report of each ancestor of a member: the one that its child started from.

    Args:
        summary: The run.
        member: The member's report of one generation, which is the last result; None returns ().
    """
    if member is None:
        return ()
    # Later reports of a member replace earlier ones.
    return tuple({report.index: report for report in lineage_of(summary, member)}.values())


def calibrated_rates(
    summary: RunSummary, line: Sequence[MemberReport]
) -> tuple[float, float] | None:
    """Return the first and the last calibrated learning rate of a lineage; None if it has none.

    Args:
        summary: The run.
        line: Result of `lineage_of`.
    """
    trained = set()
    for report in line:
        if report.hyperparameters.target_kl is not None:
            trained.add((report.index, report.generation))
    rates: list[float] = []
    for step in summary.steps:
        for member in step.members:
            # The first rate is the calibrated one, later ones are those that were used.
            name = "learning_rate" if rates else "calibrated_lr"
            rate = member.metrics.get(name)
            if rate and (member.index, step.generation) in trained:
                rates.append(rate)
    if not rates:
        return None
    return rates[0], rates[-1]


@dataclass(frozen=True, kw_only=True)
class BestSchedule:
    """Hyperparameter schedule of a run's best member.

    Attributes:
        stages: From its founder's first learning step to the evaluation that made it the best. They
            count the learning steps of its lineage. Where the learning rate was calibrated, `lr` is
            the first calibrated one: a replay searches from there.
        calibrated: First and last calibrated learning rate of its lineage; None if it has none.
        member: The best member's report of that evaluation.
        networks: Architecture changes in its lineage, as text; the schedule does not include them.
    """

    stages: tuple[ScheduleStage, ...]
    member: MemberReport
    calibrated: tuple[float, float] | None = None
    networks: tuple[str, ...] = ()


def best_schedule(summary: RunSummary) -> BestSchedule:
    """Return the hyperparameter schedule of a run's best member.

    Raises:
        ValueError: If no member was evaluated.
    """
    # 1. Find the best member.
    generations = summary.generations
    member = summary.best
    if member is None:
        raise ValueError(
            "The run has no evaluated member, so there is no best one. If its directory has a"
            " folder `best`, load that with evogrpo.GRPO.load."
        )
    # 2. Build one stage per sequence of generations with equal settings.
    line = lineage_of(summary, member)
    calibrated = calibrated_rates(summary, line)
    # Steps after each generation.
    ends = [0, *(generation.step for generation in generations)]
    stages: list[ScheduleStage] = []
    for report in line:
        number = report.generation
        hyperparameters = report.hyperparameters
        if calibrated is not None and hyperparameters.target_kl is not None:
            hyperparameters = replace(hyperparameters, lr=calibrated[0])
        samples = generations[number - 1].samples_per_step or 0
        steps: tuple[int, ...] = (ends[number] - ends[number - 1],)
        if stages:
            last = stages[-1]
            if last.hyperparameters == hyperparameters and last.samples_per_step == samples:
                steps = last.generations + steps
                stages.pop()
        stages.append(
            ScheduleStage(
                hyperparameters=hyperparameters, generations=steps, samples_per_step=samples
            )
        )
    # 3. List architecture changes. Every report of a member repeats the changes of its birth.
    born = {}
    for report in line:
        if NETWORK in report.changes:
            born[report.index] = report.changes[NETWORK]
    networks = tuple(f"{old} -> {new}" for old, new in born.values())
    return BestSchedule(
        stages=tuple(stages), member=member, calibrated=calibrated, networks=networks
    )


def best_hyperparameters(run_dir: str | Path) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a run's best members, for `GRPO.population(founders=)`.

    Args:
        run_dir: Run directory; the run may still be active.

    Returns:
        Those of the best member, then those of the newest generation's members in order of fitness,
        without duplicates and failed members. Where the learning rate was calibrated, `lr` is the
        last calibrated one.

    Raises:
        ValueError: If there is no run, no member was evaluated, or a journal value is invalid.
    """
    summary = read_summary(run_dir)
    best = summary.best
    if best is None:
        raise ValueError(
            f"{run_dir} has no evaluated member yet. Wait for its first generation, or give another"
            " run."
        )
    # The best member may have left the population; the newest generation follows it.
    newest = summary.generations[-1].members

    def rank(member: MemberReport) -> tuple[float, int]:
        """Sort the fittest first."""
        return -(member.fitness or 0.0), member.slot

    ranked = sorted(newest, key=rank)
    # Members with equal hyperparameters may have calibrated to different rates: those of the best
    # of them count.
    found: dict[Hyperparameters, Hyperparameters] = {}
    for member in (best, *ranked):
        first = member.hyperparameters
        if member.fitness is None or first in found:
            continue
        found[first] = first
        if first.target_kl is not None:
            rates = calibrated_rates(summary, lineage_of(summary, member))
            if rates is not None:
                found[first] = replace(first, lr=rates[1])
    return tuple(found.values())


def selection_score(member: MemberReport, summary: RunSummary) -> str:
    """Return the fitness that selection used of a member, such as `training fitness 41.2 ± 3.0`."""
    score = f"{member.estimate or '–'}"
    if summary.split == "training":
        return f"training fitness {score}"
    return score


def birth_text(member: MemberRecord | MemberReport, summary: RunSummary) -> str:
    """Describe the origin of a member, a founder with its hyperparameters, as one line."""
    labels = summary.labels
    if member.parent is not None:
        return origin_text(member.parent, labels.changes(member.changes))
    hyperparameters = member.hyperparameters
    step_size = "lr" if hyperparameters.target_kl is None else "target_kl"
    names = summary.shown_names or (step_size, "group_size")
    values = [labels.named(name, hyperparameters.get(name)) for name in names]
    return f"founder with {', '.join(values)}"


MAX_COMPARED = 2000
"""Maximum number of characters of a text that is compared; the rest is left out."""
MAX_CHANGES = 100
"""Maximum number of changes that are shown: the last ones."""
# The space before a word belongs to it, so that a text with further words has the same words.
_WORDS = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, kw_only=True)
class TextChange:
    """A text of a task setting that a member has in place of its parent's.

    Attributes:
        name: Full name of the setting; untrusted, as all texts.
        index: The member.
        parent: Its parent.
        before: Last fitness of the parent before the birth, as text; "–" if there is none.
        after: Last fitness of the member, as text.
        parts: Pieces of both texts in order: of both, of the parent's only ("del"), or of the
            member's only ("ins").
    """

    name: str
    index: int
    parent: int
    before: str
    after: str
    parts: tuple[tuple[Literal["same", "ins", "del"], str], ...]


def text_changes(summary: RunSummary) -> Iterator[TextChange]:
    """Yield the text changes of a run, in the order of births."""
    for birth in summary.births:
        for name, (old, new) in birth.changes.items():
            # Numbers and names of choices are no texts; founders change nothing.
            texts = isinstance(old, str) and isinstance(new, str)
            if not texts or not is_task_setting(name) or birth.parent is None:
                continue
            history = summary.histories.get(birth.index)
            before = "–"
            after = "–"
            if history is not None:
                after = str(history.results[-1].estimate or "failed")
                if history.origin is not None:
                    before = str(history.origin.estimate or "–")
            yield TextChange(
                name=name,
                index=birth.index,
                parent=birth.parent,
                before=before,
                after=after,
                parts=tuple(differences(str(old), str(new))),
            )


def differences(old: str, new: str) -> Iterator[tuple[Literal["same", "ins", "del"], str]]:
    """Yield the pieces of two texts: those of both, and those of one only."""
    before = _WORDS.findall(shorten(old, MAX_COMPARED))
    after = _WORDS.findall(shorten(new, MAX_COMPARED))
    # In texts of 200 words or more, SequenceMatcher ignores frequent words; otherwise it could take
    # minutes.
    matcher = SequenceMatcher(None, before, after)
    for kind, i, j, k, n in matcher.get_opcodes():
        if kind == "equal":
            yield "same", "".join(before[i:j])
            continue
        if j > i:
            yield "del", "".join(before[i:j])
        if n > k:
            yield "ins", "".join(after[k:n])
