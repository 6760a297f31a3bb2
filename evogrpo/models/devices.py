"""Devices: whether one can be used, the memory it has, and how many threads compute."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

LEAST_ROOM, MOST_TIMES = 2**26, 100
"""What a stored record may ask for: so many bytes, and so many times what its tensors take."""

Precision = Literal["auto", "float32", "bfloat16", "int8", "nf4"]
"""In what a frozen base may be held; see `evogrpo.models.language.loading.choose_precision`."""
DEFAULT_MICRO_BATCH_TOKENS = 1024
"""Default size of a micro-batch. On CUDA the default follows the memory estimate."""
_GROUPS = Path("/sys/fs/cgroup")
_LIMIT_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # by controller, as /proc/self/cgroup names it


def check_device(device: "str | torch.device") -> None:
    """Refuse a device that is not there.

    Raises:
        ValueError: If nothing can be put on it.
    """
    import torch

    if device == "auto":
        raise ValueError("device 'auto' is the default. Leave device out.")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch asserts that it was built with CUDA
        raise ValueError(
            f"device {str(device)!r:.40} is not available. Use 'cpu', or 'cuda' if torch.cuda.is_available()."
        ) from error


def local_gpu() -> str:
    """Return the GPU of this process: one of its own where a launcher has started several on a machine."""
    import torch

    place = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{int(place) % torch.cuda.device_count()}" if place.isdigit() and place != "0" else "cuda"


@contextmanager
def single_threaded(*, enabled: bool) -> Iterator[None]:
    """Let torch compute in one thread meanwhile, unless OMP_NUM_THREADS names a number.

    Measured with 8 members on CartPole: a second thread gains a twentieth on an idle machine, and takes nine times as
    long on a busy one, where every product waits for the slower of the two. What was learnt was the same, bit for bit.

    Args:
        enabled: Whether the products are so small that this pays; False changes nothing.
    """
    import torch

    before = torch.get_num_threads()
    if enabled and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_most: ContextVar[int | None] = ContextVar("most", default=None)


@contextmanager
def limit_memory(stored: int) -> Iterator[None]:
    """Let `check_allocation` refuse, in the block, what is out of all proportion to what was stored.

    What a record says of widths and ranks is anybody's word: the tensors beside it are what there is.

    Args:
        stored: Bytes of these.
    """
    token = _most.set(LEAST_ROOM + MOST_TIMES * stored)
    try:
        yield
    finally:
        _most.reset(token)


def check_allocation(needed: int, device: "torch.device", what: str) -> None:
    """Refuse what is larger than all the memory of a device, rather than let the system end the process.

    Args:
        needed: Bytes.
        device: Where.
        what: What needs them, and how it could need less, for the message: "the adapters of 8 members: use fewer".

    Raises:
        ValueError: If there is less memory.
    """
    most = _most.get()
    if most is not None and needed > most:
        raise ValueError(
            f"its record asks for {needed / 1e9:.1f} GB, hundreds of times what its tensors take, for {what}"
        )
    there, _ = device_memory(str(device))
    if there is not None and needed > there:
        raise ValueError(f"{needed / 1e9:.0f} GB would be needed, and {device} has {there / 1e9:.0f} GB, for {what}")


def device_memory(device: str) -> tuple[int | None, str]:
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
