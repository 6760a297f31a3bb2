"""The memory that a run needs, and the memory that is there."""

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
    """What a run takes at its peak, estimated before it starts.

    Attributes:
        size: Bytes.
        device: Where.
        savings: What to lower for it to be less.
        processes: How many need that much of the same device, together with this one.
    """

    size: int
    device: str
    savings: str
    processes: int = 1

    @property
    def total(self) -> int:
        """Bytes that all processes on the device take."""
        return self.processes * self.size

    def with_kept(self, size: int) -> Self:
        """Return what it takes if earlier learner states of so many bytes are kept, which lie in the CPU's memory."""
        return self if self.device != "cpu" else replace(self, size=self.size + size)


def kept_size(strategy: Strategy, members: int, state: int) -> int:
    """Return the bytes of the learner states that a strategy may keep: those of as many members as there are.

    Args:
        strategy: One that keeps states says so by a true attribute `backtrack`.
        members: How many there are.
        state: Bytes of what one has learnt.
    """
    return members * state if getattr(strategy, "backtrack", False) is True else 0


def largest_share(members: int) -> int:
    """Return the number of members of the process that holds most, at least 1."""
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
    there, what = device_memory(need.device)
    if there is None:
        return f"how much {what} there is cannot be told"
    found = f"{gigabytes(there)} of {what}"
    if need.total > there and not allowed:
        together = need.processes > 1
        each = f" ({need.processes} processes, each with its own base and members)" if together else ""
        raise ValueError(
            f"the run needs about {gigabytes(need.total)}{each}, but there are only {found}: lower {need.savings}, "
            f"{'start fewer processes, ' if together else ''}or give {remedy} if the estimate is too high"
        )
    return found


def gigabytes(size: float) -> str:
    """Write a number of bytes, such as `12.3 GB`."""
    return f"{size / 1e9:.2f} GB" if size < 1e10 else f"{size / 1e9:,.0f} GB"


def bytes_text(size: int) -> str:
    """Write a number of bytes in the unit that suits it, such as `12.3 MB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
