"""The memory that a run needs, and the memory that is there."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # by controller, as /proc/self/cgroup names it


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a run takes at its peak, estimated before it starts.

    Attributes:
        size: Bytes.
        device: Where.
        savings: What to lower for it to be less.
    """

    size: int
    device: str
    savings: str


def check_memory(need: Need, *, allowed: bool = False, remedy: str = "allow_memory=True") -> str:
    """Compare what a run needs with what is there.

    Args:
        need: The estimate.
        allowed: Whether to go on all the same.
        remedy: How the caller is told to do so.

    Returns:
        What was found, in words.

    Raises:
        ValueError: If the run needs more than there is, unless that is allowed.
    """
    there, what = memory_of(need.device)
    if there is None:
        return f"how much {what} is there cannot be told"
    found = f"{gigabytes(there)} of {what} are there"
    if need.size > there and not allowed:
        raise ValueError(
            f"the run needs about {gigabytes(need.size)}, but {found}: lower {need.savings}, or give {remedy} if the "
            "estimate is too high"
        )
    return found


def memory_of(device: str) -> tuple[int | None, str]:
    """Return how much memory a device has, in bytes, and what it is called; None if that cannot be told."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory), "GPU memory"
    if not device.startswith("cpu"):
        return None, f"memory on {device}"
    return process_memory(), "memory"


def process_memory(groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the machine's memory in bytes, or the process's share of it: a container's, or a control group's.

    Args:
        groups: Where control groups are, of either version.
        membership: Which of them the process is in.
    """
    sizes = list(_limits(groups, membership))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(sizes, default=None)


def _limits(groups: Path, membership: Path) -> Iterator[int]:
    """Yield the limits of the process's control groups and of those they are in."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controller, _, path = rest.partition(":")
        file = _LIMIT_FILES.get(controller)
        if file is None:
            continue
        root = groups / controller
        inner = Path(path.strip("/"))
        # Inside a container the path may be that of the machine, which is not there; its root is the container's.
        for folder in (inner, *inner.parents):
            try:
                yield int((root / folder / file).read_text())
            except (OSError, ValueError):  # no such folder, or "max"
                continue


def gigabytes(size: float) -> str:
    """Write a number of bytes, such as `12.3 GB`."""
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"
