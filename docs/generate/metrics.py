"""Reference of all recorded metrics, generated from the code that measures them."""

import re
from collections.abc import Iterable, Mapping

from evogrpo.algorithms.learning.metrics import NAMES, PER_POLICY
from evogrpo.reporting.exports import COLUMNS, FLAG, REAL, TEXT, WHOLE

CURVES: Mapping[str, str] = {
    "fitness": "fitness used for selection: mean raw reward per held-out question, or as `fitness:` sets",
    "measured_greedy": "mean reward of greedy answers to the validation questions",
    "measured_sampled": "mean reward of answers to them that are sampled at temperature 1",
    "measured_rollouts": "mean training reward of the last half of a generation's learning steps, start by start",
    "evaluation_cost": "tokens (small networks: steps) that the member's evaluation took",
}
"""TensorBoard scalars logged once per generation beside the hyperparameters, with their meaning."""
_TYPES = {WHOLE: "whole number", REAL: "number", TEXT: "text", FLAG: "true or false"}


def definition(name: str) -> str | None:
    """Return the description of a metric of a learning step by its name in the journal, or None."""
    own = re.sub(r"^rewards/.+/(mean|std)$", r"rewards/<function>/\1", name)
    if own in NAMES:
        return NAMES[own]
    policy, _, rest = own.rpartition("/")
    return f"{NAMES[rest]}, of this policy alone" if policy and rest in PER_POLICY else None


def page() -> str:
    """Return the Markdown of the metrics of a learning step."""
    apart = ", ".join(f"`{name}`" for name in PER_POLICY)
    return "\n\n".join(
        [
            "### Of every member",
            _list(NAMES.items()),
            f"Members with several policies have {apart} of each as `POLICY/NAME` as well.",
        ]
    )


def curves_page() -> str:
    """Return the Markdown of TensorBoard's scalars per generation."""
    return _list(CURVES.items())


def frames_page() -> str:
    """Return the Markdown of the columns of `read_run`'s data frames."""
    return "\n\n".join(f"### `{frame}`\n\n{_list(_typed(columns))}" for frame, columns in COLUMNS.items())


def _typed(columns: Mapping[str, tuple[str, str]]) -> Iterable[tuple[str, str]]:
    for name, (kind, meaning) in columns.items():
        yield name, f"{meaning} ({_TYPES[kind]})"


def _list(entries: Iterable[tuple[str, str]]) -> str:
    return "\n\n".join(f"`{name}`\n: {meaning[:1].upper()}{meaning[1:]}." for name, meaning in entries)
