"""What the best members of an earlier run learnt with: where another run's members can begin."""

from pathlib import Path

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.history.descent import winner_of
from evogrpo.history.records import GenerationReport
from evogrpo.persistence.journal import latest_generations, read_journal


def best_hyperparameters(run_dir: str | Path) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a run's best members, for `GRPO.population(founders=)`; its weights play no part.

    Args:
        run_dir: The run's folder; it may be under way.

    Returns:
        Those of the best member as it won, then those of the members of the newest generation, the fittest first; none
        twice, and none of members that failed.

    Raises:
        ValueError: If there is no run, no member was evaluated, or a value in its journal is not what it must be.
    """
    events = read_journal(Path(run_dir) / "journal.jsonl")
    generations = [GenerationReport.from_json(event) for event in latest_generations(events)]
    winner = winner_of(generations)
    if winner is None:
        raise ValueError(f"no member of {run_dir} was evaluated yet, so there are no best ones: name another run")
    alive = [member for member in generations[-1].members if member.fitness is not None]
    ranked = sorted(alive, key=lambda member: (-(member.fitness or 0.0), member.slot))
    return tuple(dict.fromkeys(member.hyperparameters for member in (winner, *ranked)))
