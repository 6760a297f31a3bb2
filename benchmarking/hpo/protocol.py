"""Which arms run on which tasks, from which starts and with how many seeds; PROTOCOL.md says why."""

from __future__ import annotations

PLAYED = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "LunarLander-v3", "FrozenLake-v1")
WRITTEN = ("two_digit_sums", "number_sequences")

SEEDS: dict[str, int] = dict.fromkeys(PLAYED, 10) | dict.fromkeys(WRITTEN, 3)

STARTS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*PLAYED, *WRITTEN), ("unknown",)),
    **dict.fromkeys(("CartPole-v1", "Acrobot-v1"), ("unknown", "wrong", "right")),
}

SEARCHES = (
    "truncation-pbt",
    "multi-frequency",
    "tournament-before",
    "tournament",
    "tournament-shared",
    "narrowing",
    "narrowing-shared",
)
ARMS_OF: dict[str, tuple[str, ...]] = {
    "unknown": (
        "oracle",
        "defaults",
        "one-drawn",
        "random-search",
        "halving",
        "selection-only",
        "mutation-only",
        *SEARCHES,
        "optuna",
        "ray-pbt",
    ),
    # From here random search, halving and selection have nothing to choose from: all members start alike.
    "wrong": ("one-drawn", "mutation-only", *SEARCHES),
    "right": ("random-search", "halving", "selection-only", *SEARCHES),
}
ONLY: dict[str, tuple[str, ...]] = {"ray-pbt": ("CartPole-v1", "Pendulum-v1")}
"""The tasks of an arm that does not run on all: starting Ray's processes takes longer than what they learn."""
FORMER = ("pb2", "restarts")
"""Arms whose runs are recorded, and whose strategies the package no longer includes."""
CONTROLS = ("random-search", "halving", "selection-only")
"""What the default has to beat."""
