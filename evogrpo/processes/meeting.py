"""How the processes of a program meet: those that a launcher has started, also when it starts them again."""

import atexit
import os
import sys
import time
import uuid
from datetime import timedelta
from functools import cache
from typing import Any

from evogrpo.processes.exchange import ProcessError, Processes, patience_minutes

SETTLING_SECONDS = 0.2
"""How long a process that connected to others waits at its very end."""


def restarted() -> bool:
    """Return whether the launcher has started this program again, because a process of it had ended; all ask.

    Each machine's launcher counts the ends of its own processes only.
    """
    return any(processes().all(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")))


@cache
def processes() -> Processes:
    """Return the processes of this program: those that a launcher has started, else this one alone.

    The first call connects them.

    Raises:
        ValueError: If the environment names several processes, but not where they meet.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    begun = "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()
    if not begun and launched.isdigit() and int(launched) <= 1:
        return Processes()
    import torch.distributed as dist

    patience = timedelta(minutes=patience_minutes())
    if not begun:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing or not launched.isdigit():
            raise ValueError(
                f"WORLD_SIZE is {launched!r:.20}, so several processes train together, but "
                f"{', '.join(missing) or 'a number of them'} is missing from the environment: start them with torchrun "
                "or accelerate launch, or unset WORLD_SIZE for a run in one process"
            )
        _connect(patience)
        atexit.register(_disconnect)
    if dist.get_world_size() == 1:
        return Processes()
    # Records and learner states travel through the CPU, whatever else the program's own group is for.
    return Processes(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=patience))


def speaks() -> bool:
    """Return whether this process is the one to tell what all come to; asked at any time, as it connects nobody."""
    if processes.cache_info().currsize:
        return processes().leads
    begun = sys.modules.get("torch.distributed")
    if begun is not None and begun.is_available() and begun.is_initialized():
        return bool(begun.get_rank() == 0)
    return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("RANK", "0") == "0"


def _connect(patience: timedelta) -> None:
    """Meet the other processes where the environment says."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo", timeout=patience)
        return
    store, rank, size = next(rendezvous("env://", timeout=patience))
    part = agreed_part(store, rank, size, until=time.monotonic() + patience.total_seconds())
    dist.init_process_group("gloo", store=PrefixStore(part, store), rank=rank, world_size=size, timeout=patience)


def agreed_part(store: Any, rank: int, size: int, until: float) -> str:
    """Return the name of a part of a launcher's store that no process has written into before this start.

    torchrun keeps one store for all its restarts, in which the addresses of processes that were killed still stand:
    whoever reads one before it is replaced waits for nobody. So the leading process names a new part. Which greeting is
    of a process that still lives is not known either, so each is answered by its own name until all have come.

    Args:
        store: The launcher's.
        rank: The number of this process.
        size: How many there are.
        until: When to give up, by `time.monotonic()`.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"greeting of {rank}", own)
        try:
            part = str(store.get(f"part for {own}").decode())  # waits for it
        except RuntimeError as error:
            raise ProcessError(
                f"the leading process has not come: its own output, if any, says why ({error})"
            ) from error
        store.set(f"{part}: {rank} has come", "")
        return part
    missing = list(range(1, size))
    while missing := [other for other in missing if not store.check([f"{own}: {other} has come"])]:
        for other in missing:
            if store.check([f"greeting of {other}"]):
                store.set(f"part for {store.get(f'greeting of {other}').decode()}", own)
        if time.monotonic() > until:
            raise ProcessError(f"process {missing[0]} of {size} has not come: its own output, if any, says why")
        time.sleep(0.02)
    return own


def _disconnect() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # torch's threads let go of what they sent a moment after whoever waits is told, and some of it is Python's: a
    # thread that still waits for the interpreter when that ends aborts the process, after all its work is done.
    time.sleep(SETTLING_SECONDS)
