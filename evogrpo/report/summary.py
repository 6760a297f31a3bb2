"""The story of a run as plain records, read from its journal: results, lineage lines and a member's ancestors.

A journal is untrusted input here: every value is checked for its type, and a wrong one is named in the error.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evogrpo.evolution.lineage import NETWORK
from evogrpo.hyperparameters import CATEGORIES
from evogrpo.persistence.journal import latest_generations
from evogrpo.report.words import Words, words_of


@dataclass(frozen=True, kw_only=True)
class Score:
    """A fitness with its uncertainty.

    Attributes:
        fitness: Mean raw reward over the questions; higher is better.
        standard_error: Of that mean, in reward units, or None if it was not recorded.
        questions: How many questions it was measured on, or None likewise.
    """

    fitness: float
    standard_error: float | None
    questions: int | None


@dataclass(frozen=True, kw_only=True)
class MemberResult:
    """One member at the end of one generation.

    Attributes:
        generation: The generation's number.
        slot: Its storage place.
        index: Its identity, never reused.
        parent: The index it descends from, or None for a founder.
        hyperparameters: What it learned with in this generation; those that are None are left out.
        fitness: On the validation questions, or None if it failed.
        standard_error: Of the fitness, or None.
        failed: Why it failed, or None.
        tokens: Processed by this member in this generation, or None if not recorded.
        seconds: Spent on it in this generation, or None if not recorded.
        changes: Old and new value of every hyperparameter that changed at its birth.
        reason: Why it was born or kept.
    """

    generation: int
    slot: int
    index: int
    parent: int | None
    hyperparameters: Mapping[str, float | str]
    fitness: float | None
    standard_error: float | None
    failed: str | None
    tokens: float | None
    seconds: float | None
    changes: Mapping[str, tuple[float | str | None, float | str | None]]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """One completion, as a sample to look at."""

    prompt: str
    completion: str
    reward: float | None
    advantage: float | None


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One generation of the whole population.

    Attributes:
        generation: Its number.
        step: Learning steps so far, or None if not recorded.
        seconds: Since the run began, or None likewise.
        tokens: Since the run began, or None likewise.
        best: Index of its best member, or None if there is none.
        members: One result per slot.
        examples: Completions to look at; may be empty.
    """

    generation: int
    step: float | None
    seconds: float | None
    tokens: float | None
    best: int | None
    members: tuple[MemberResult, ...]
    examples: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """The untrained base and the chosen member on questions that neither training nor selection saw."""

    index: int
    before: Score
    after: Score


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What a journal tells.

    Attributes:
        facts: The fields of the run event: version, seed, model, task and so on, unchecked.
        evolvable: The fields of every evolvable hyperparameter's range or ladder, by name.
        baseline: The untrained base on the validation questions, or None if not measured yet.
        generations: In order; may be empty.
        test: Or None if the run has not reached it.
        resumes: How often the run was resumed.
        stopped: Why the run stopped, or None if it did not say.
    """

    facts: Mapping[str, Any]
    evolvable: Mapping[str, Mapping[str, Any]]
    baseline: Score | None
    generations: tuple[GenerationResult, ...]
    test: TestResult | None
    resumes: int
    stopped: str | None

    @property
    def words(self) -> Words:
        """What things are called in it."""
        return words_of(self.facts.get("kind"))

    @property
    def title(self) -> str:
        """The task and, where there is one, the model; untrusted."""
        return " · ".join(str(self.facts[name]) for name in ("task", "model") if self.facts.get(name)) or "run"


def summarise(events: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Read the story of a run out of its journal.

    Args:
        events: What `read_journal` returned.

    Returns:
        The run, with the generations that count (see `latest_generations`).

    Raises:
        ValueError: If the run event is missing, or a value is of the wrong type.
    """
    last = {event["event"]: event for event in events}
    runs = [event for event in events if event["event"] == "run"]
    if not runs:
        raise ValueError("the journal has no run event: this run was stopped before it began, start it again")
    evolvable = _mapping(runs[0], "evolvable", "the run event")
    resumed_last = max((place for place, event in enumerate(events) if event["event"] == "resumed"), default=-1)
    # What a run said before it was resumed about its end no longer holds.
    ending = {event["event"]: event for event in events[resumed_last + 1 :]}
    return RunSummary(
        facts={name: value for name, value in runs[0].items() if name != "event"},
        evolvable={name: _mapping(evolvable, name, "evolvable") for name in evolvable},
        baseline=_score(last["baseline"], "the baseline event") if "baseline" in last else None,
        generations=tuple(_generation(event) for event in latest_generations(events)),
        test=_test(ending["test"]) if "test" in ending else None,
        resumes=sum(event["event"] == "resumed" for event in events),
        stopped=_text(ending["stopped"], "reason") if "stopped" in ending else None,
    )


def _generation(event: Mapping[str, Any]) -> GenerationResult:
    number = _whole(event, "generation", "a generation event")
    assert number is not None  # latest_generations checked that it is a whole number
    where = f"generation {number}"
    examples = [
        Example(
            prompt=_text(example, "prompt"),
            completion=_text(example, "completion"),
            reward=_number(example, "reward", f"an example of {where}"),
            advantage=_number(example, "advantage", f"an example of {where}"),
        )
        for example in _mappings(event, "examples", where)
    ]
    members = [_member(member, number) for member in _mappings(event, "members", where)]
    return GenerationResult(
        generation=number,
        step=_number(event, "step", where),
        seconds=_number(event, "seconds", where),
        tokens=_number(event, "tokens", where),
        best=_whole(event, "best", where),
        members=tuple(members),
        examples=tuple(examples),
    )


def _member(member: Mapping[str, Any], generation: int) -> MemberResult:
    where = f"a member of generation {generation}"
    slot, index = _whole(member, "slot", where), _whole(member, "index", where)
    if slot is None or index is None:
        raise ValueError(f"{where} must have a slot and an index, got {slot} and {index}: {_REMEDY}")
    values = _mapping(member, "hyperparameters", where)
    changes = _mapping(member, "changes", where)
    for name, change in changes.items():
        if not isinstance(change, list) or len(change) != 2:
            raise ValueError(f"the change of {name!r:.80} in {where} must be [old, new], got {change!r:.80}: {_REMEDY}")
    known = {name: _value(values, name, where) for name in values}
    return MemberResult(
        generation=generation,
        slot=slot,
        index=index,
        parent=_whole(member, "parent", where),
        hyperparameters={name: value for name, value in known.items() if value is not None},
        fitness=_number(member, "fitness", where),
        standard_error=_number(member, "standard_error", where),
        failed=None if member.get("failed") is None else _text(member, "failed"),
        tokens=_number(member, "tokens", where),
        seconds=_number(member, "seconds", where),
        changes={
            name: (_value({name: old}, name, where), _value({name: new}, name, where))
            for name, (old, new) in changes.items()
        },
        reason=_text(member, "reason"),
    )


def _test(event: Mapping[str, Any]) -> TestResult:
    index = _whole(event, "index", "the test event")
    if index is None:
        raise ValueError(f"the test event must name the index that was tested: {_REMEDY}")
    before, after = (
        _score({"questions": event.get("questions"), **_mapping(event, name, "the test event")}, f"{name} of the test")
        for name in ("before", "after")
    )
    return TestResult(index=index, before=before, after=after)


# --- checked values --------------------------------------------------------------------------------------------------

_REMEDY = "the journal was not written by evogrpo, or was changed"


def _score(values: Mapping[str, Any], where: str) -> Score:
    fitness = _number(values, "fitness", where)
    if fitness is None:
        raise ValueError(f"{where} must have a fitness: {_REMEDY}")
    return Score(
        fitness=fitness,
        standard_error=_number(values, "standard_error", where),
        questions=_whole(values, "questions", where),
    )


def _number(values: Mapping[str, Any], name: str, where: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    # No run measures anything near 1e300; beyond it, integers and plots overflow.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise ValueError(f"{name!r:.80} of {where} must be a finite number or null, got {value!r:.80}: {_REMEDY}")
    return value


def _value(values: Mapping[str, Any], name: str, where: str) -> float | str | None:
    """Return a hyperparameter: a finite number, a name where names are legal, or None; or a network in words."""
    value = values.get(name)
    return value if isinstance(value, str) and name in (*CATEGORIES, NETWORK) else _number(values, name, where)


def _whole(values: Mapping[str, Any], name: str, where: str) -> int | None:
    value = _number(values, name, where)
    if value is not None and not isinstance(value, int):
        raise ValueError(f"{name!r} of {where} must be a whole number or null, got {value}: {_REMEDY}")
    return value


def _text(values: Mapping[str, Any], name: str) -> str:
    """Return a text; other values, such as a prompt given as a list of messages, as their JSON."""
    value = values.get(name)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _mapping(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = values.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name!r:.80} of {where} must be an object, got {value!r:.80}: {_REMEDY}")
    return value


def _mappings(values: Mapping[str, Any], name: str, where: str) -> Iterable[Mapping[str, Any]]:
    value = values.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{name!r} of {where} must be a list of objects, got {value!r:.80}: {_REMEDY}")
    return value
