"""Calls and bytes of the collectives of a run with several processes, counted exactly, by calling function.

    python benchmarking/scale_bytes.py                             # small networks, two processes
    python benchmarking/scale_bytes.py --kind words --processes 2 --members 2 --samples 16

Rank 0 counts every tensor of torch's collectives, by the function of evogrpo that called them. Objects are sent as
bytes, padded to the longest of all processes. The counts do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarking.scale import launch_program, networks, words

CARRIERS = ("all_gather", "all_to_all_single")
OWN = ("torch/", "evogrpo/distributed.py", "scale_bytes.py", "contextlib.py", "functools.py")
"""Files that are skipped when looking for the caller of a collective."""


def counted(calls: Counter[str], sizes: Counter[str]) -> None:
    """Make torch's collectives count their tensors in this process."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in CARRIERS:
        carry = getattr(distributed_c10d, name)

        def counting(*given: Any, _carry: Callable[..., Any] = carry, _name: str = name, **named: Any) -> Any:
            tensor = given[1] if _name == "all_gather" else given[0]
            size = dist.get_world_size()
            others = (size - 1) / size if _name == "all_to_all_single" else size - 1
            asked = who_asked()
            calls[asked] += 1
            sizes[asked] += round(others * tensor.numel() * tensor.element_size())
            return _carry(*given, **named)

        for module in (dist, distributed_c10d):
            setattr(module, name, counting)


def who_asked() -> str:
    """Return the name of the function of evogrpo that called the collective."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in OWN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def work(kind: str, folder: str, sizes_of: str) -> None:
    """Train in one of the processes; rank 0 writes the counts."""
    from evogrpo.distributed import processes

    calls, sizes = Counter[str](), Counter[str]()
    is_rank_zero = processes().is_rank_zero
    counted(calls, sizes)
    {"words": words, "networks": networks}[kind](folder=folder, **json.loads(sizes_of))
    if is_rank_zero:
        found = {asked: (calls[asked], sizes[asked]) for asked, _ in sizes.most_common()}
        Path(folder, "counted.json").write_text(json.dumps(found))


def main(given: Sequence[str]) -> None:
    """Count, or do the work of one process."""
    if given[:1] == ["work"]:
        work(*given[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["words", "networks"], default="networks")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--experience", choices=["own", "shared"], default="own")
    chosen = parser.parse_args(given)
    sizes = {name: getattr(chosen, name) for name in ("members", "samples", "steps", "experience")}
    if chosen.kind == "words":
        sizes["tokens"] = chosen.tokens
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "work", chosen.kind, folder, json.dumps(sizes)]
        launch_program(command, chosen.processes, 1)
        print(f"{chosen.kind}, {chosen.processes} processes, {sizes}: by the leading process")
        print("| asked by | calls | bytes |\n|---|---|---|")
        for asked, (calls, size) in json.loads(Path(folder, "counted.json").read_text()).items():
            print(f"| {asked} | {calls} | {size:,} |")


if __name__ == "__main__":
    main(sys.argv[1:])
