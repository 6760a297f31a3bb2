"""Changed checkpoints with valid hashes, for tests of loading."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evogrpo.storage.checkpoint import MANIFEST_NAME

KeyPath = tuple[str | int, ...]

VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, "", "x", "../../etc/passwd", "\x1b[2J", "nan", -1, 0, 1, 1.5,
    2**31, 2**63, 10**299, 1e308, -1e308, [None], ["x"], [2**31], [2**40, 2**40], {"x": 1},
    [[[[[[]]]]]], {"a": {"a": {"a": {}}}},
)  # fmt: skip
"""Values that replace others: other types, other sizes, extreme numbers."""


def key_paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the key paths of all values in a record; of lists the first four items."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:4])
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from key_paths(item, (*path, key))


def forged(record: dict[str, Any], rng: np.random.Generator) -> tuple[Any, str]:
    """Return a copy of a record with one value replaced, removed or moved, and a description."""
    copy = json.loads(json.dumps(record))
    known = list(key_paths(copy))
    path = known[int(rng.integers(len(known)))]
    parent = copy
    key = path[-1]
    for step in path[:-1]:
        parent = parent[step]
    act = ("set", "set", "set", "removed", "doubled", "wrapped")[int(rng.integers(6))]
    change = f"{'.'.join(map(str, path))} {act}"
    if act == "set":
        parent[key] = VALUES[int(rng.integers(len(VALUES)))]
        change += f" to {str(parent[key])[:40]!r}"
    elif act == "removed":
        del parent[key]
    elif act == "wrapped":
        parent[key] = [parent[key]]
    elif isinstance(parent, list):
        parent.insert(int(key), parent[key])
    else:
        parent[f"{key}2"] = parent[key]
    return copy, change


def put_in(folder: Path, name: str, record: Any) -> None:
    """Write a record into a checkpoint, with a valid hash."""
    put_bytes(folder, name, json.dumps(record).encode())


def put_bytes(folder: Path, name: str, content: bytes) -> None:
    """Write a file into a checkpoint, with a valid hash."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
