"""Trackers of a run: TensorBoard, and those of accelerate, such as Weights & Biases or MLflow."""

import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from evogrpo.extras import MissingPackageError, install_hint, package_command, require
from evogrpo.safe_parsing import dump_json
from evogrpo.text import one_line, shorten, shown
from evogrpo.training.configuration.sections import TENSORBOARD, check_tracker_names
from evogrpo.warnings import warn

POPULATION_METRICS = ("fitness", "reward")
"""Metrics with further scalars, the best and the mean of all members; each has one chart in
TensorBoard.
"""
PROJECT = "evogrpo"
"""Project of accelerate's trackers, unless a variable such as WANDB_PROJECT names another."""


MAX_TEXT = 500
"""Maximum number of characters of a value of the configuration, a limit of MLflow."""


def check_trackers(trackers: object) -> list[Any]:
    """Return trackers as a list.

    Args:
        trackers: Names of trackers, and objects with the methods of accelerate's `GeneralTracker`.

    Raises:
        ValueError: If a name is unknown, its package is not installed, or an object is no tracker.
    """
    listed = trackers
    if isinstance(trackers, str):
        listed = [trackers]
    if not isinstance(listed, list | tuple):
        raise ValueError(f"trackers must be a list of names and trackers, got {shown(trackers)}.")
    for each in listed:
        if not isinstance(each, str):
            if isinstance(each, type) or not callable(getattr(each, "log", None)):
                raise ValueError(
                    "trackers must be names, or objects with the methods of"
                    f" accelerate.tracking.GeneralTracker, got {shown(each)}."
                )
            continue
        check_tracker_names([each])
        if each != TENSORBOARD:
            require(f"The tracker {each}", "accelerate")
            # Looked up without importing it, which may take seconds.
            if find_spec(each) is None:
                package = each.replace("_", "-")
                raise MissingPackageError(
                    f"The tracker {each} is not installed. Run: {package_command(package)}"
                )
    return list(listed)


def tracker_names(trackers: Sequence[Any]) -> tuple[str, ...]:
    """Return the trackers that are names."""
    return tuple(each for each in trackers if isinstance(each, str))


class TensorBoard:
    """Writes scalars for TensorBoard. It has the methods of accelerate's `GeneralTracker`.

    Args:
        folder: Folder of the files, created with the first scalar.
        step: Number of learning steps so far. Scalars of later ones are hidden: a resumed run
            repeats these steps.
    """

    name = TENSORBOARD

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._step = step
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars by tag."""
        if self._writer is not None and not self._folder.is_dir():
            self._writer = None  # another program removed the folder: begin new files
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._step)
            charts: dict[str, list[object]] = {
                name: ["Multiline", [f"^{name}/"]] for name in POPULATION_METRICS
            }
            self._writer.add_custom_scalars({"population": charts})
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the files."""
        if self._writer is not None:
            with suppress(Exception):  # everything was flushed
                self._writer.close()


class Trackers:
    """Trackers of one run, on rank 0. One that fails is left out from then on, with a warning.

    Args:
        trackers: See `check_trackers`.
        folder: Run directory; None = none.

    Attributes:
        given: As given, without TensorBoard if it is not installed or there is no run directory.
    """

    def __init__(self, trackers: Sequence[Any], folder: Path | None) -> None:
        self.given = list(trackers)
        if folder is None or install_hint("TensorBoard", "tensorboard") is not None:
            self.given = [each for each in trackers if each != TENSORBOARD]
        self._folder = folder
        # Names and started trackers.
        self._active: list[tuple[str, Any]] = []

    def start(self, ids: dict[str, str], step: int, configuration: Mapping[str, Any]) -> None:
        """Start all trackers.

        Args:
            ids: Id of the run in each tracker, by name. A tracker that has one continues its run;
                the others are added.
            step: Number of learning steps so far.
            configuration: Plain values, which new trackers store.
        """
        for given in self.given:
            name = given
            if not isinstance(given, str):
                name = getattr(given, "name", type(given).__name__)
            is_new = name not in ids
            try:
                tracker = self._started(given, ids, step)
                store = getattr(tracker, "store_init_configuration", None)
                if is_new and store is not None:
                    store(_flat(configuration))
            except Exception as error:  # noqa: BLE001  # errors of trackers must not end a run
                _warn_stopped(name, error)
                continue
            ids.setdefault(name, "")
            self._active.append((name, tracker))

    def _started(self, given: Any, ids: dict[str, str], step: int) -> Any:
        """Return a started tracker."""
        # 1. TensorBoard, and objects of the user.
        if given == TENSORBOARD:
            assert self._folder is not None
            return TensorBoard(self._folder / TENSORBOARD, step)
        if not isinstance(given, str):
            start = getattr(given, "start", None)
            if start is not None:
                start()
            return given
        # 2. The loggers of accelerate need its state. It may set the number of threads, on which
        #    results depend.
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        threads = torch.get_num_threads()
        PartialState()
        torch.set_num_threads(threads)
        # 3. Name the run. With the id of a resumed run, the tracker continues its curves.
        run_id = ids.get(given) or uuid.uuid4().hex
        label = run_id[:8]
        if self._folder is not None:
            label = self._folder.name
        options: dict[str, Any] = {}
        if given == "wandb":
            options = {"id": run_id, "name": label, "resume": "allow"}
        elif given == "trackio":
            options = {"name": f"{label}-{run_id[:8]}", "resume": "allow"}
        elif given == "mlflow" and given in ids:
            options = {"run_id": run_id}
        elif given == "mlflow":
            options = {"run_name": label}
        kind = LOGGER_TYPE_TO_CLASS[given]
        if kind.requires_logging_directory:
            options["logging_dir"] = "."
        # 4. Start it. Before accelerate 1.8 its constructor did.
        project = os.environ.get(f"{given.upper()}_PROJECT", PROJECT)
        tracker = kind(project, **options)
        start = getattr(tracker, "start", None)
        if start is not None:
            start()
        if given == "mlflow":
            run_id = tracker.tracker.info.run_id
        ids[given] = run_id
        return tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars by name, at the number of a learning step."""
        self._call("log", dict(values), step=step)

    def log_table(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log a table to trackers that have tables.

        Args:
            name: Name of the table.
            rows: Values by column; columns may be missing.
            step: Number of the learning step.
        """
        if not rows:
            return
        # Rows of members with different task settings have different columns.
        columns = list(dict.fromkeys(chain.from_iterable(rows)))

        def cells(row: Mapping[str, Any]) -> list[Any]:
            """Return the values of a row, one for each column."""
            return [_scalar(row.get(column)) for column in columns]

        data = [cells(row) for row in rows]
        self._call("log_table", table_name=name, columns=columns, data=data, step=step)

    def finish(self) -> None:
        """End all trackers."""
        self._call("finish")
        self._active = []

    def _call(self, method: str, *values: Any, **options: Any) -> None:
        """Call a method of all trackers that have it."""
        for each in list(self._active):
            name, tracker = each
            action = getattr(tracker, method, None)
            if action is None:
                continue
            try:
                action(*values, **options)
            except Exception as error:  # noqa: BLE001  # errors of trackers must not end a run
                self._active.remove(each)
                _warn_stopped(name, error)


def _warn_stopped(name: str, error: Exception) -> None:
    reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
    warn(f"The tracker {name} stopped: {shorten(reason, 300)}", rank_zero_only=False)


def _scalar(value: Any) -> Any:
    """Return a number, text, bool or None as it is, and other plain values as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return dump_json(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain values by dotted name; long ones are cut."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        # An empty mapping stays a value, so that its name is shown.
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
            continue
        scalar = _scalar(value)
        if isinstance(scalar, str):
            scalar = shorten(scalar, MAX_TEXT)
        flat[f"{prefix}{name}"] = scalar
    return flat
