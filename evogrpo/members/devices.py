"""Devices: availability, memory and threads."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evogrpo.extras import require
from evogrpo.text import shown

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

BASE_ALLOWANCE = 2**26
"""Bytes that a checkpoint's settings may need, however small its tensors are."""
ALLOWANCE_FACTOR = 100
"""Multiple of the size of its tensors that a checkpoint's settings may need in addition to
`BASE_ALLOWANCE`.
"""

Precision = Literal["auto", "float32", "bfloat16", "int8", "nf4"]
"""Precisions of a base model; see `evogrpo.members.language.loading.choose_precision`."""
DEFAULT_MICRO_BATCH_TOKENS = 1024
"""Default size of a micro-batch. On CUDA, the default follows from the memory estimate."""
_GROUPS = Path("/sys/fs/cgroup")


def checked_device(device: "str | torch.device") -> str:
    """Return the name of a device after a check that tensors can be created on it.

    A launcher numbers the processes of a machine in LOCAL_RANK. A device without a number, such as
    "cuda", becomes the accelerator with this process's number, so that processes use different
    ones.

    Raises:
        ValueError: If the device does not exist here.
    """
    import torch

    # The type itself: an object such as a mock may claim another class.
    if not issubclass(type(device), str | torch.device):
        raise ValueError(f"device must be a name such as 'cpu' or 'cuda', got {shown(device)}.")
    if device == "auto":
        raise ValueError("device 'auto' is the default. Leave device out.")
    rank = os.environ.get("LOCAL_RANK", "")
    try:
        chosen = torch.device(device)
        if chosen.type != "cpu" and chosen.index is None and rank.isdigit():
            count = torch.get_device_module(chosen.type).device_count()
            chosen = torch.device(chosen.type, int(rank) % max(1, count))
        # Copied back, because a tensor on the meta device has no data.
        torch.empty(1, device=chosen).cpu()
    # A torch built without CUDA raises AssertionError.
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device {shown(device, 40)} is not available. Use 'cpu', or 'cuda' if"
            " torch.cuda.is_available()."
        ) from error
    return str(chosen)


def available_device(device: str | None) -> str:
    """Return the given device, or by default a GPU if there is one; see `checked_device`.

    Raises:
        ValueError: If the device does not exist here.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return checked_device(device)


def choose_device(
    accelerator: "Accelerator | None", device: "str | torch.device | None"
) -> str | None:
    """Return the requested device, or that of the accelerator; None = not specified.

    See `checked_device`.

    Raises:
        ValueError: If both are given, or the device is not available.
    """
    if accelerator is None:
        return None if device is None else checked_device(device)
    require("accelerator", "accelerate")
    from accelerate import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"accelerator must be an accelerate.Accelerator, got {shown(accelerator)}."
        )
    if device is not None:
        raise ValueError(f"The accelerator sets the device. Leave out device={str(device)!r}.")
    return str(accelerator.device)


def autocast_context(
    accelerator: "Accelerator | None",
) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of the autocast context of forward passes."""
    if accelerator is None or accelerator.mixed_precision == "no":
        return nullcontext
    autocast: Callable[[], AbstractContextManager[None]] = accelerator.autocast
    return autocast


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise torch.OutOfMemoryError also where cuBLAS cannot allocate its workspace."""
    import torch

    try:
        yield
    except RuntimeError as error:
        if "CUBLAS_STATUS_ALLOC_FAILED" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


@contextmanager
def single_threaded(*, enabled: bool) -> Iterator[None]:
    """Run torch on one thread inside the block, unless OMP_NUM_THREADS is set.

    Measured with 8 members on CartPole: a second thread is 5 % faster on an idle machine and nine
    times slower on a busy one. Results are bit-equal.

    Args:
        enabled: False changes nothing. Set it for small networks.
    """
    import torch

    before = torch.get_num_threads()
    if enabled and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_stored_size(needed: int, stored: int) -> None:
    """Reject a checkpoint whose record needs much more memory than its tensors.

    The record may name huge widths or ranks.

    Args:
        needed: Bytes that the record asks for.
        stored: Bytes of the tensors in the checkpoint.

    Raises:
        ValueError: If `needed` is more than BASE_ALLOWANCE plus ALLOWANCE_FACTOR times `stored`.
    """
    if needed > BASE_ALLOWANCE + ALLOWANCE_FACTOR * stored:
        raise ValueError(
            f"The settings in the checkpoint need {needed / 1e9:.1f} GB, over {ALLOWANCE_FACTOR}"
            " times the size of its tensors. It is damaged or was changed. Load another"
            " checkpoint."
        )


def check_allocation(needed: int, device: "torch.device", what: str) -> None:
    """Reject allocations larger than a device's whole memory, before the system kills the process.

    Args:
        needed: Bytes.
        device: Device of the allocation.
        what: What is allocated and how to make it smaller, for the message: "the weights of 8
            members. Use fewer members."

    Raises:
        ValueError: If the device has less memory.
    """
    available, _ = device_memory(str(device))
    if available is not None and needed > available:
        raise ValueError(
            f"{device} has {available / 1e9:.0f} GB, but {needed / 1e9:.0f} GB are needed for"
            f" {what}"
        )


def device_memory(device: str) -> tuple[int | None, str]:
    """Return a device's memory in bytes (None if unknown) and its name in messages."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory), "GPU memory"
    if not device.startswith("cpu"):
        return None, f"memory on {device}"
    return process_memory(), "memory"


def free_memory(device: "torch.device") -> int | None:
    """Return the bytes that this process can still allocate on an accelerator; None if unknown.

    Memory that torch has reserved but does not use counts as free. Ranks of a machine that share
    an accelerator get equal parts of the rest.
    """
    import torch

    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(free // ranks_per_device(module.device_count()) + unused)


def ranks_per_device(devices: int) -> int:
    """Return the number of ranks of this machine that share one of its devices.

    Args:
        devices: Number of devices that the ranks use.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not ranks.isdigit():
        return 1
    return max(1, math.ceil(int(ranks) / devices))


def process_memory(
    groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Return the bytes that this process may use: the machine's memory, or less in a container.

    Args:
        groups: Mount point of the control groups (version 2).
        membership: File that names the group of the process, as "0::/path".
    """
    sizes = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # 1. The control group of this process: "" is the root.
    inner = Path()
    if membership.is_file():
        for line in membership.read_text().splitlines():
            if line.startswith("0::"):
                inner = Path(line.removeprefix("0::").strip("/"))
                break
    # 2. Its limit and those of all groups around it. Inside a container the path may be the host's
    #    and not exist; the root is then the container's own group.
    for folder in (inner, *inner.parents):
        try:
            sizes.append(int((groups / folder / "memory.max").read_text()))
        except (OSError, ValueError):  # no such folder, or "max"
            continue
    return min(sizes, default=None)
