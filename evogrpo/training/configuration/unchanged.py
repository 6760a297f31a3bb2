"""Stored configuration of a run, and the check that it was not changed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
"""Name of the file in a run directory."""
HEAD = "# The resolved configuration of this run, written by evogrpo"
"""Its first line."""
_FREE = ("run_dir", "model", "device", "base_parts", "logging", "run_id")
"""Keys that may change when a run is resumed."""


def is_stored(path: Path) -> bool:
    """Return True if a configuration file was written by a run."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(200).startswith(HEAD)
    except OSError:
        return False


def check_unchanged(
    began: Mapping[str, Any] | None, run_id: str | None, now: Mapping[str, Any], path: Path, *, allow_changed_data: bool
) -> tuple[str, ...]:
    """Check that a stored configuration still describes the same experiment.

    Args:
        began: Configuration in the checkpoint; None for a run that was started in Python.
        run_id: Identity of the run.
        now: Configuration in the file.
        path: The file.
        allow_changed_data: The task may differ; the environment is compared separately.

    Returns:
        Texts on changes without effect, as the schedule comes from the checkpoint.

    Raises:
        ValueError: With every name that differs.
    """
    if run_id is not None and now.get("run_id") not in (None, run_id):
        raise ValueError(f"{path} is the configuration of another run. Restore the file of this run.")
    if began is None:
        return ()
    found = {name: change for name, *change in _differences(began, now) if name.split(".")[0] not in _FREE}
    ignored = {name: change for name, change in found.items() if name.startswith("schedule.")}
    refused = {
        name: change
        for name, change in found.items()
        if name not in ignored and not (allow_changed_data and name.startswith("task."))
    }
    if refused:
        raise ValueError(
            f"{path} was changed since the run began: {_words(refused)}. Restore these values, or start a new run with "
            "`evogrpo train`."
        )
    return tuple(
        f"The change of {name} in {path} has no effect ({_words({name: change})}). Pass limits to `evogrpo resume`."
        for name, change in ignored.items()
    )


def _differences(began: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, old and new value of every difference."""
    if isinstance(began, Mapping) and isinstance(now, Mapping):
        for key in began:
            yield from _differences(began[key], now.get(key), f"{name}.{key}" if name else str(key))
    elif _plain(began) != _plain(now):
        yield name, began, now


def _plain(value: Any) -> Any:
    """Convert tuples to lists, as in JSON."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {old!r} -> {new!r}"[:200] for name, (old, new) in changes.items())
