"""A run's stored configuration: what its file is, and whether it still says what the run began with."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"
"""The file in a run's folder."""
HEAD = "# The resolved configuration of this run, written by evogrpo"
"""What it begins with."""
_FREE = ("run_dir", "model", "device", "base_parts", "logging", "run_id")
"""May change between the parts of a run: where it lies and computes, and what it writes."""


def is_stored(path: Path) -> bool:
    """Whether a file is one that a run wrote, rather than a configuration of the user's."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(200).startswith(HEAD)
    except OSError:
        return False


def check_unchanged(
    began: Mapping[str, Any] | None, run_id: str | None, now: Mapping[str, Any], path: Path, *, allow_changed_data: bool
) -> tuple[str, ...]:
    """Refuse a stored configuration that would make a resumed run another experiment.

    Args:
        began: What the run's checkpoint knows of its configuration; None in a run that was begun in Python.
        run_id: Of the run.
        now: What its file says.
        path: That file.
        allow_changed_data: Whether the task may differ: the environment is compared by itself.

    Returns:
        What was changed to no effect, in words: the schedule comes from the checkpoint.

    Raises:
        ValueError: With every name that differs.
    """
    if run_id is not None and now.get("run_id") not in (None, run_id):
        raise ValueError(f"{path} is the configuration of another run than the one in its folder: put its own back")
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
            f"{path} was changed since the run began, which would make it another experiment: {_words(refused)}. Put "
            "back what it was, or start a new run with `evogrpo train`"
        )
    return tuple(
        f"{name} in {path} was changed to no effect, {_words({name: change})}: give limits to `evogrpo resume`"
        for name, change in ignored.items()
    )


def _differences(began: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, the old and the new value of whatever differs; what only a later version has is new."""
    if isinstance(began, Mapping) and isinstance(now, Mapping):
        for key in began:
            yield from _differences(began[key], now.get(key), f"{name}.{key}" if name else str(key))
    elif _plain(began) != _plain(now):
        yield name, began, now


def _plain(value: Any) -> Any:
    """Return lists where there are tuples, as JSON has them."""
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {old!r} -> {new!r}"[:200] for name, (old, new) in changes.items())
