"""Checkpoints that somebody changed and hashed again: whatever they say, a load answers with a CheckpointError."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evogrpo.storage.checkpoint import MANIFEST_NAME

Place = tuple[str | int, ...]

VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, "", "x", "../../etc/passwd", "\x1b[2J", "nan", -1, 0, 1, 1.5, 2**31, 2**63, 10**299,
    1e308, -1e308, [None], ["x"], [2**31], [2**40, 2**40], {"x": 1}, [[[[[[]]]]]], {"a": {"a": {"a": {}}}},
)  # fmt: skip
"""What is put in the place of something: other types, other sizes, and what computers stumble over."""


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of everything in a record but itself; of long lists those at the beginning."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def forged(record: dict[str, Any], rng: np.random.Generator) -> tuple[Any, str]:
    """Return a copy of a record in which one thing is another one, missing, doubled or in a list, and what it is."""
    copy = json.loads(json.dumps(record))
    known = list(places(copy))
    place = known[int(rng.integers(len(known)))]
    parent, key = copy, place[-1]
    for step in place[:-1]:
        parent = parent[step]
    act = ("set", "set", "set", "removed", "doubled", "wrapped")[int(rng.integers(6))]
    said = f"{'.'.join(map(str, place))} {act}"
    if act == "set":
        parent[key] = VALUES[int(rng.integers(len(VALUES)))]
        said += f" to {str(parent[key])[:40]!r}"
    elif act == "removed":
        del parent[key]
    elif act == "wrapped":
        parent[key] = [parent[key]]
    elif isinstance(parent, list):
        parent.insert(int(key), parent[key])
    else:
        parent[f"{key}2"] = parent[key]
    return copy, said


def put_in(folder: Path, name: str, record: Any) -> None:
    """Put a record into a checkpoint in the place of its own, with the hash that makes it look like its own."""
    put_bytes(folder, name, json.dumps(record).encode())


def put_bytes(folder: Path, name: str, content: bytes) -> None:
    """Likewise for the content of any of its files."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
