"""What the parts of a run are called: a language model answers questions, a small network plays episodes."""

from collections.abc import Mapping
from dataclasses import dataclass

from evogrpo.history.records import GenerationReport, TestReport
from evogrpo.history.results import Result
from evogrpo.text import count_text, duration_text, score_text


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of one kind of members.

    Attributes:
        untrained: What members are compared with.
        questions: What they start from.
        tokens: What their work is counted in, updates included.
        fitness: What their fitness is.
        best: What is kept of the best of them.
    """

    untrained: str
    questions: str
    tokens: str
    fitness: str
    best: str


LANGUAGE = Words(
    untrained="untrained base",
    questions="questions",
    tokens="tokens",
    fitness="mean reward per validation question",
    best="best adapter",
)
NETWORKS = Words(
    untrained="untrained network",
    questions="starts",
    tokens="transitions",
    fitness="mean return per validation start",
    best="best member",
)

TEAM = Words(
    untrained="untrained team",
    questions="starts",
    tokens="transitions",
    fitness="mean score per validation start",
    best="best member",
)

WORDS: Mapping[str, Words] = {"language": LANGUAGE, "networks": NETWORKS, "joint": TEAM}
"""By kind of members, as the run event of a journal names it."""


def words_of(kind: object) -> Words:
    """Return the words for a kind of members, as the run event of a journal names it; language models by default."""
    return WORDS.get(kind, LANGUAGE) if isinstance(kind, str) else LANGUAGE


def processed(report: GenerationReport, words: Words) -> str:
    """Say what a run has spent so far: the steps in the environment, where there are any, and all work."""
    played = "" if report.timesteps is None else f"{count_text(report.timesteps)} steps played, "
    return f"{played}{count_text(report.tokens)} {words.tokens} processed"


def evaluated(result: Result, words: Words) -> list[str]:
    """Say what all evaluations of a run took, beside what its members learnt from; nothing where none took any."""
    cost = result.evaluation
    if not cost.tokens:
        return []
    learnt = result.tokens if result.timesteps is None else result.timesteps
    what = words.tokens if result.timesteps is None else "steps"
    share = f", {cost.tokens / (cost.tokens + learnt):.0%} of all {what}" if learnt else ""
    return [f"evaluations took {duration_text(cost.seconds)} and {count_text(cost.tokens)} {what}{share}"]


def second_look(result: Result, words: Words) -> list[str]:
    """Say what the best member earned when it was chosen and on the second set; nothing where there was none."""
    best = result.best
    if best is None or best.second is None:
        return []
    chosen, second = (score_text(each.mean, each.standard_error) for each in (best.fitness, best.second))
    return [f"member #{best.index}: {chosen} when chosen, {second} on {words.questions} that selection never saw"]


def verdict(test: TestReport, words: Words) -> str | None:
    """Say what a test that shows no difference means; None where it shows one."""
    if test.beyond_noise:
        return None
    return (
        f"The best member cannot be told from the {words.untrained}: they differ by less than two standard errors of "
        f"the paired difference. Train longer, or test on more {words.questions}."
    )
