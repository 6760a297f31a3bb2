"""Memory that a run needs, compared with the available memory."""

import socket
from collections import Counter
from dataclasses import dataclass, replace
from typing import Self

from evogrpo.algorithms.policies.placement import Placement
from evogrpo.distributed import processes
from evogrpo.evolution.strategies import Strategy
from evogrpo.models.devices import device_memory


@dataclass(frozen=True, kw_only=True)
class Need:
    """Estimated peak memory of a run.

    Attributes:
        size: Bytes per process.
        device: Device of the memory.
        savings: Settings that reduce it, for messages.
        processes: Number of processes that need this much of the same device.
    """

    size: int
    device: str
    savings: str
    processes: int = 1

    @property
    def total(self) -> int:
        """Bytes of all processes on the device."""
        return self.processes * self.size

    def with_kept(self, size: int) -> Self:
        """Return the memory with earlier train states of so many bytes, which are kept in CPU memory."""
        return self if self.device != "cpu" else replace(self, size=self.size + size)


def kept_size(strategy: Strategy, members: int, state: int) -> int:
    """Return the bytes of the train states that a strategy may keep: at most one per member.

    Args:
        strategy: Keeps states if its attribute `backtrack` is True.
        members: Number of members.
        state: Bytes of one train state.
    """
    return members * state if getattr(strategy, "backtrack", False) is True else 0


def largest_share(members: int) -> int:
    """Return the largest number of members of any rank, at least 1."""
    return max(1, len(Placement(members, processes().size, 0).shares[0]))


def sharing(device: str) -> int:
    """Return the largest number of processes that share one device's memory. A collective.

    Args:
        device: Device of this process, such as "cpu" or "cuda:1".
    """
    place = (socket.gethostname(), "cuda:0" if device == "cuda" else device)
    return max(Counter(processes().all_gather(place)).values())


def state_size(parameters: int) -> int:
    """Return the bytes of a member's weights and of AdamW's two moments, in float32."""
    return 3 * 4 * parameters


def check_memory(need: Need, *, allowed: bool = False, remedy: str = "skip_memory_check=True") -> str:
    """Compare the memory that a run needs with the available memory.

    Args:
        need: The estimate.
        allowed: Do not raise.
        remedy: Option that sets `allowed`, for the message.

    Returns:
        The available memory, in words.

    Raises:
        ValueError: If the run needs more memory than is available, unless `allowed`.
    """
    there, what = device_memory(need.device)
    if there is None:
        return f"the amount of {what} is unknown"
    found = f"{gigabytes(there)} of {what}"
    if need.total > there and not allowed:
        together = need.processes > 1
        each = f" ({need.processes} processes, each with its own base and members)" if together else ""
        raise ValueError(
            f"The run needs about {gigabytes(need.total)}{each}, but only {found} is available. Lower {need.savings}, "
            f"{'start fewer processes, ' if together else ''}or set {remedy} if the estimate is too high."
        )
    return found


def gigabytes(size: float) -> str:
    """Return a number of bytes as text, such as `12.3 GB`."""
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"


def bytes_text(size: int) -> str:
    """Return a number of bytes as text with a suitable unit, such as `12.3 MB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
