"""Export of a run as an Optuna study with one trial per member."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evogrpo.config.hyperparameters import is_integer
from evogrpo.config.search_space import RLParameter
from evogrpo.evolution.history import MemberRecord
from evogrpo.extras import require
from evogrpo.reporting.lineage import LineageTree, lineage_tree
from evogrpo.reporting.records import MemberReport
from evogrpo.reporting.summary import RunSummary, summarise
from evogrpo.safe_parsing import dump_json
from evogrpo.storage.journal import read_journal
from evogrpo.text import changes_text, printable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, TrialState


def export_study(run_dir: Path, storage: str, name: str | None = None) -> tuple[str, int]:
    """Write a run to an Optuna storage as a new study.

    Each member is a trial: its value is its highest fitness, its intermediate values are its fitness per
    generation, and its parameters are the evolving hyperparameters. The best member and those of the newest
    generation are COMPLETE, replaced members PRUNED, failed ones FAIL, and members without an evaluation WAITING.

    Args:
        run_dir: Run directory; the run may still be active.
        storage: A URL such as "sqlite:///runs.db", or the path of a file, which becomes an Optuna journal.
        name: Name of the study; by default the folder's name and the start of the run id.

    Returns:
        The study's name and its number of trials.

    Raises:
        ImportError: If Optuna is not installed.
        ValueError: If the storage has a study of that name or cannot be opened, or the run's journal is damaged.
    """
    require("The export", "optuna")
    import optuna

    summary = summarise(read_journal(run_dir / "journal.jsonl"))
    tree = lineage_tree(summary)
    name = name or _default_name(run_dir, summary)
    distributions = {name: _distribution(name, fields, tree) for name, fields in summary.evolvable.items()}
    trials = [_trial(birth, tree, distributions) for birth in tree.births]
    opened_storage, verbosity = _storage(storage), optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # suppress "A new study created"
    try:
        study = optuna.create_study(storage=opened_storage, study_name=name, direction="maximize")
    except optuna.exceptions.DuplicatedStudyError as error:
        raise ValueError(f"{storage} already has a study {name}: choose another name with --study.") from error
    finally:
        optuna.logging.set_verbosity(verbosity)
    try:
        for key, value in _facts(summary, tree).items():
            study.set_user_attr(key, value)
        study.add_trials(trials)
    except BaseException:
        optuna.delete_study(study_name=name, storage=opened_storage)  # do not leave a partial study behind
        raise
    return name, len(trials)


def _storage(storage: str) -> "BaseStorage":
    """Open an Optuna storage."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    try:
        if "://" in storage:
            return optuna.storages.RDBStorage(storage)
        Path(storage).absolute().parent.mkdir(parents=True, exist_ok=True)
        return optuna.storages.JournalStorage(JournalFileBackend(storage))
    except Exception as error:  # depends on the database
        raise ValueError(
            f"Cannot open {storage} as an Optuna storage ({error}): use sqlite:///FILE or a file path."
        ) from error


def _default_name(run_dir: Path, summary: RunSummary) -> str:
    identity = summary.facts.get("run_id")
    suffix = f"-{identity[:8]}" if isinstance(identity, str) else ""
    return printable(f"{run_dir.resolve().name}{suffix}")


def _trial(
    birth: MemberRecord,
    tree: LineageTree,
    distributions: "Mapping[str, BaseDistribution]",
) -> "FrozenTrial":
    """Return the trial of a member."""
    from optuna.trial import create_trial

    reports = tree.results.get(birth.index, ())
    fitness = [report.fitness for report in reports if report.fitness is not None]
    state = _state(birth, tree)
    values = birth.hyperparameters.to_json()
    params = {name: values[name] for name in distributions if values[name] is not None}
    return create_trial(
        state=state,
        value=max(fitness) if state.name in ("COMPLETE", "PRUNED") else None,
        params=params,
        distributions={name: distributions[name] for name in params},
        intermediate_values={report.generation: report.fitness for report in reports if report.fitness is not None},
        user_attrs=_attributes(birth, reports),
    )


def _state(birth: MemberRecord, tree: LineageTree) -> "TrialState":
    """Return the state of a member's trial."""
    from optuna.trial import TrialState

    reports = tree.results.get(birth.index, ())
    if not reports:
        return TrialState.WAITING
    if reports[-1].failed is not None or all(report.fitness is None for report in reports):
        return TrialState.FAIL
    newest = max(report[-1].generation for report in tree.results.values())
    wins = tree.winner is not None and tree.winner.index == birth.index
    return TrialState.COMPLETE if wins or reports[-1].generation == newest else TrialState.PRUNED


def _distribution(name: str, fields: Mapping[str, Any], tree: LineageTree) -> "BaseDistribution":
    """Return the distribution of a hyperparameter, widened to include all members' values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    parameter = RLParameter(**fields)
    values = [value for birth in tree.births if (value := getattr(birth.hyperparameters, name)) is not None]
    if parameter.choices is not None:
        return CategoricalDistribution(list(dict.fromkeys([*parameter.choices, *values])))
    numbers = [*parameter.bounds, *values]
    log = parameter.scale == "log" and min(numbers) > 0
    if is_integer(name):
        return IntDistribution(int(min(numbers)), int(max(numbers)), log=log)
    return FloatDistribution(min(numbers), max(numbers), log=log)


def _attributes(birth: MemberRecord, reports: Sequence[MemberReport]) -> dict[str, Any]:
    """Return user attributes of a member's trial."""
    last = reports[-1] if reports else None
    hyperparameters = {name: value for name, value in birth.hyperparameters.to_json().items() if value is not None}
    return {
        "index": birth.index,
        "parent": birth.parent,
        "born": birth.born,
        "slot": birth.slot,
        "reason": printable(birth.reason),
        "changes": changes_text(birth.changes),
        "hyperparameters": hyperparameters,
        "standard_error": None if last is None else last.standard_error,
        "failed": None if last is None or last.failed is None else printable(last.failed),
        "tokens": sum(report.tokens for report in reports),
        "seconds": sum(report.seconds for report in reports),
    }


def _facts(summary: RunSummary, tree: LineageTree) -> dict[str, Any]:
    """Return user attributes of the study."""
    names = ("run_id", "version", "task", "model", "seed", "kind", "population_size")
    facts = {name: summary.facts[name] for name in names if summary.facts.get(name) is not None}
    test = None if summary.test is None else summary.test.after.mean
    results = {"winner": None if tree.winner is None else tree.winner.index, "test": test, "stopped": summary.stopped}
    dump_json(facts, what="the facts of the run event")
    return {name: printable(value) if isinstance(value, str) else value for name, value in (facts | results).items()}
