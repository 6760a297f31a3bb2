"""Ranks of a distributed program: shared errors, and collectives.

Every rank holds all members, and equal bits lead to equal decisions. Only forward and backward
passes are divided. Local work that may fail or be interrupted on one rank runs inside
`Processes.shared_errors`, after which ranks exchange their outcomes.
"""

import atexit
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from evogrpo.interruption import Interrupted, Stop
from evogrpo.text import class_name, one_line, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

TIMEOUT_MINUTES = 60
"""Timeout of collectives: a rank may take at most this long for its share of a step. The
environment variable EVOGRPO_TIMEOUT_MINUTES replaces it.
"""


def timeout_minutes() -> float:
    """Return the timeout of collectives in minutes.

    Raises:
        ValueError: If EVOGRPO_TIMEOUT_MINUTES is not a positive number.
    """
    given = os.environ.get("EVOGRPO_TIMEOUT_MINUTES", "")
    try:
        minutes = float(given) if given else float(TIMEOUT_MINUTES)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e6:
        raise ValueError(
            "EVOGRPO_TIMEOUT_MINUTES must be a number of minutes above 0 and below 1e6, got"
            f" {shown(given, 40)}."
        )
    return minutes


class ProcessError(RuntimeError):
    """Another rank of the run has failed, or ranks have come to different results."""


class Processes:
    """Ranks started by a launcher such as `torchrun` or `accelerate launch`, or this process alone.

    Args:
        rank: Rank of this process.
        size: World size.
        group: Process group of torch; None for a single process.

    Attributes:
        rank: As given.
        size: As given.
        interruptible: True while this rank may abandon its work alone, because `shared_errors`
            informs the others.
        waiting_seconds: Time spent in exchanges, mostly waiting for other ranks.
        sharing_errors: True inside `shared_errors`.
        lockstep_error: Error inside a pass of a sharded base, after which ranks cannot exchange
            outcomes; None = no error.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        # Process group that exchanges tensors on GPUs, chosen by the first `all_reduce` of one.
        # Without NCCL, or if ranks share a GPU, it is the group of the CPUs.
        self._gpu_group: Any = None
        self.interruptible = size == 1
        self.sharing_errors = False
        self.waiting_seconds = 0.0
        self.lockstep_error: BaseException | None = None

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    # ---- shared errors

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Run a block on every rank and exchange errors, so that all ranks raise if one fails.

        Blocks may be nested. A failure between inner blocks is raised on other ranks at the end of
        their next block, or in their next sum.

        Raises:
            Interrupted: If a rank was interrupted, and none failed.
            torch.OutOfMemoryError: If a rank was out of memory, and none failed or was interrupted.
            ProcessError: If another rank failed. If this one failed, its error is raised unchanged.
        """
        if self.size == 1:
            yield
            return
        # 1. Local work. An error is kept until the exchange, unless it was raised on all ranks or
        #    ranks can no longer exchange outcomes.
        outer = self.sharing_errors
        failure = None
        try:
            self.interruptible = True
            self.sharing_errors = True
            yield
        except (Interrupted, Exception, SystemExit) as error:  # raised again below
            if self.raised_on_all_ranks(error) or error is self.lockstep_error:
                raise
            failure = error
        finally:
            self.interruptible = False
            self.sharing_errors = outer
        # 2. Exchange outcomes; all ranks raise if one failed.
        self._exchange(failure)

    def gather_results(self, work: Callable[[], T]) -> list[T]:
        """Run local work with `shared_errors`; return the results of all ranks in rank order."""
        with self.shared_errors():
            result = work()
        return self.all_gather(result)

    def check_stop(self, stop: Stop) -> None:
        """Raise an error on all ranks if one has a stop request or has failed.

        Called before each pass of a sharded base, which cannot be interrupted.
        """
        if self.size == 1:
            return
        before = self.interruptible
        failure = None
        self.interruptible = True
        try:
            stop.check()
        except Interrupted as error:
            failure = error
        finally:
            self.interruptible = before
        self._exchange(failure)

    def raised_on_all_ranks(self, error: BaseException) -> bool:
        """Return True if an exchange of outcomes has raised this error on all ranks."""
        return _ON_ALL_RANKS in vars(error)

    def _exchange(self, failure: BaseException | None) -> None:
        """Raise an error on all ranks if one has failed."""
        import torch
        import torch.distributed as dist

        # 1. Exchange whether each rank has failed; after a failure, also kinds and messages. The
        #    lowest kind of failure counts.
        try:
            failed = torch.zeros((self.size, 1), dtype=torch.int64)  # one row for each rank
            rows = list(failed.unbind())
            outcome = torch.tensor([failure is not None], dtype=torch.int64)
            self.wait(lambda: dist.all_gather(rows, outcome, group=self._group))
            if not failed.any():
                return
            report = None
            if failure is not None:
                message = f"{class_name(failure)}: {one_line(failure)}"
                report = (_kind_of(failure), self.rank, message)
            failures = [each for each in self.all_gather(report) if each is not None]
            kind, rank, text = min(failures)
        except ProcessError as error:
            # The connection was lost. An error of this rank says more.
            if failure is None or isinstance(failure, Interrupted):
                raise
            raise failure from error
        # 2. Raise the error of this rank unchanged, unless another rank's kind of failure is the
        #    cause.
        text = f"Process {rank} of {self.size} failed: {text}"
        if failure is not None and kind == _kind_of(failure):
            raise _on_all_ranks(failure)
        if kind == INTERRUPTED:
            raise _on_all_ranks(Interrupted())
        error_class: type[RuntimeError] = ProcessError
        if kind == OUT_OF_MEMORY:
            error_class = torch.OutOfMemoryError
        raise _on_all_ranks(error_class(text)) from failure

    # ---- collectives of plain values

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order: plain values, arrays and tensors."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        self.wait(lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 on every rank: plain values, arrays and tensors."""
        return self.all_gather(value if self.is_rank_zero else None)[0]  # type: ignore[return-value]

    def now(self) -> float:
        """Return `time.monotonic()` of rank 0, so that all ranks decide alike."""
        return self.broadcast(time.monotonic())

    # ---- tensors

    def all_reduce(self, values: "Tensor") -> "Tensor":
        """Return the sum `[k]` over all ranks, in rank order, so that all ranks get equal bits.

        Each rank sums one part and sends it to the others. Traffic is twice the tensor for any
        world size. Tensors on GPUs are exchanged by NCCL, unless ranks share a GPU.
        """
        if self.size == 1:
            return values
        import torch
        import torch.distributed as dist

        group, device = self._transport(values)
        part = math.ceil(len(values) / self.size)
        padded = torch.zeros(self.size * part, dtype=values.dtype, device=device)
        padded[: len(values)] = values.detach()
        received = torch.empty_like(padded)
        # Raises an error if a rank failed since the last exchange and cannot take part.
        self._exchange(None)
        # 1. Get the part of this rank from all ranks, and sum it in rank order: no operation of
        #    NCCL adds.
        self.wait(lambda: dist.all_to_all_single(received, padded, group=group))
        total, *others = received.view(self.size, part).unbind()
        for other in others:
            total += other
        # 2. Get the sums of all parts.
        self.wait(
            lambda: dist.all_gather(list(padded.view(self.size, part).unbind()), total, group=group)
        )
        return padded[: len(values)].to(values.device)

    def _transport(self, values: "Tensor") -> "tuple[Any, torch.device]":
        """Return the process group that exchanges a tensor, and the device on which it does.

        A collective at the first tensor on a GPU.
        """
        import torch
        import torch.distributed as dist

        if self._gpu_group is None and values.device.type == "cuda":
            self._exchange(None)
            # NCCL needs a GPU for each rank.
            card = str(torch.cuda.get_device_properties(values.device).uuid)
            cards = set(self.all_gather(card))
            self._gpu_group = self._group
            if len(cards) == self.size and dist.is_nccl_available():
                timeout = timedelta(minutes=timeout_minutes())
                self._gpu_group = dist.new_group(backend="nccl", timeout=timeout)
        if values.device.type != "cuda" or self._gpu_group is self._group:
            return self._group, torch.device("cpu")
        return self._gpu_group, values.device

    def wait(self, exchange: Callable[[], object]) -> None:
        """Run a blocking exchange; raise ProcessError if the connection was lost."""
        began = time.monotonic()
        try:
            exchange()
            self.waiting_seconds += time.monotonic() - began
        except RuntimeError as error:  # of gloo: a connection was closed or timed out
            raise ProcessError(
                f"Process {self.rank} of {self.size} lost the connection: another process ended"
                f" (see its output), or did not answer for {timeout_minutes():g} minutes"
                f" (EVOGRPO_TIMEOUT_MINUTES): {error}. Start all processes again to resume from the"
                " last checkpoint."
            ) from error


class RunStop(Stop):
    """Stop request of a run; a request on one rank stops all of them.

    Args:
        processes: Ranks of the run.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__(lambda: processes.interruptible)
        self._processes = processes

    def agree(self) -> bool:
        """Return True if any rank has a stop request, and adopt its reason. A collective."""
        if self._processes.size > 1:
            requests = self._processes.all_gather(
                None if self.reason is None else (self.reason, self.signal)
            )
            first = next((each for each in requests if each is not None), None)
            if first is None:  # a request during the exchange is seen by the next one
                return False
            self.reason, self.signal = first
        return self.reason is not None

    def check_all_ranks(self) -> None:
        """Raise `Interrupted` on all ranks if a stop was requested on any. A collective."""
        if self.agree():
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Check on all ranks, then let a signal handler interrupt the block."""
        self.check_all_ranks()
        with super().interruptible():
            yield


FAILED, INTERRUPTED, OUT_OF_MEMORY = range(3)
"""Kinds of failure. If ranks fail in different ways, the lowest kind counts as the cause."""


_ON_ALL_RANKS = "_evogrpo_on_all_ranks"


def _on_all_ranks(error: BaseException) -> BaseException:
    """Mark an error as raised on all ranks.

    The error itself is stored nowhere: its traceback refers to the tensors of the failed pass,
    which must be freed before the pass is repeated.
    """
    vars(error)[_ON_ALL_RANKS] = True
    return error


def _kind_of(failure: BaseException) -> int:
    """Return INTERRUPTED, OUT_OF_MEMORY or FAILED."""
    import torch

    if isinstance(failure, Interrupted):
        return INTERRUPTED
    if isinstance(failure, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    return FAILED


def cores_per_rank() -> int:
    """Return the number of processor cores per rank on this machine, at least 1."""
    ranks = 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit():
        ranks = max(1, int(local))
    cores = os.cpu_count()
    if cores is None:  # unknown
        return 1
    return max(1, cores // ranks)


SETTLING_SECONDS = 0.2
"""Seconds that a process waits after it disconnects, before it exits."""
NOTICE_SECONDS = 15
"""Seconds after which a process that still waits for the others says so."""


@cache
def processes() -> Processes:
    """Return the ranks of this program; the first call connects them.

    Raises:
        ValueError: If WORLD_SIZE is not a number, or names several processes but the rest of
            torchrun's environment is missing.
    """
    # 1. Without a launcher, this process is alone. `begun` = the program has connected the ranks
    #    itself.
    launched = os.environ.get("WORLD_SIZE") or "1"
    loaded = sys.modules.get("torch.distributed")
    begun = loaded is not None and loaded.is_available() and loaded.is_initialized()
    if not begun and launched.isdigit() and int(launched) <= 1:
        return Processes()
    import torch.distributed as dist

    # 2. Connect the ranks.
    timeout = timedelta(minutes=timeout_minutes())
    if not begun:
        missing = [
            name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
        ]
        fix = "Use torchrun or accelerate launch, or unset WORLD_SIZE."
        if not launched.isdigit():
            raise ValueError(f"WORLD_SIZE must be a number, got {shown(launched, 40)}. {fix}")
        if missing:
            raise ValueError(f"WORLD_SIZE={launched} needs {', '.join(missing)} as well. {fix}")
        notice = threading.Timer(NOTICE_SECONDS, _tell_of_waiting)
        notice.daemon = True
        notice.start()
        try:
            _connect(timeout)
        finally:
            notice.cancel()
        atexit.register(_disconnect)
    if dist.get_world_size() == 1:
        return Processes()
    # Not the default group, which may use NCCL: records and train states are exchanged on the CPU.
    return Processes(
        dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout)
    )


def _tell_of_waiting() -> None:
    """Write to stderr that this process waits for others, and how it was launched."""
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = ", ".join(f"{name}={shown(os.environ[name], 40)}" for name in variables)
    if sys.stderr is not None:
        sys.stderr.write(
            f"Waiting for the other processes of this program ({given}). If there are none, stop it"
            " and unset WORLD_SIZE.\n"
        )


def is_rank_zero() -> bool:
    """Return True on rank 0. Unlike `processes`, this does not connect the ranks."""
    if processes.cache_info().currsize:
        return processes().is_rank_zero
    begun = sys.modules.get("torch.distributed")
    if begun is not None and begun.is_available() and begun.is_initialized():
        return bool(begun.get_rank() == 0)
    world_size = os.environ.get("WORLD_SIZE") or "1"
    return world_size == "1" or os.environ.get("RANK", "0") == "0"


def _connect(timeout: timedelta) -> None:
    """Initialise torch's default process group from the environment.

    Under torchrun, use a store prefix that is new for this start.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo", timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    until = time.monotonic() + timeout.total_seconds()
    prefix = agree_on_prefix(store, rank, size, until)
    dist.init_process_group(
        "gloo", store=PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timeout
    )


def agree_on_prefix(store: Any, rank: int, size: int, until: float) -> str:
    """Return a prefix of the launcher's store that is new for this start.

    torchrun keeps one store over restarts, which then has addresses of killed processes. A rank
    that reads one of them waits forever. Rank 0 therefore chooses a new prefix, and sends it to
    each rank under a random key of that rank.

    Args:
        store: The launcher's store.
        rank: Rank of this process.
        size: World size.
        until: Deadline by `time.monotonic()`.
    """
    # 1. Other ranks: send a random key, and wait for the prefix under it.
    if rank != 0:
        key = uuid.uuid4().hex
        store.set(f"greeting of {rank}", key)
        try:
            prefix = str(store.get(f"prefix for {key}").decode())
        except RuntimeError as error:
            raise ProcessError(f"Rank 0 did not connect. See its output ({error}).") from error
        store.set(f"{prefix}: {rank} joined", "")
        return prefix

    # 2. Rank 0: answer until all have joined. A key may be of a killed process until the new one
    #    replaces it.
    prefix = uuid.uuid4().hex

    def joined(other: int) -> bool:
        return bool(store.check([f"{prefix}: {other} joined"]))

    missing = list(range(1, size))
    while missing := [other for other in missing if not joined(other)]:
        for other in missing:
            greeting = f"greeting of {other}"
            if store.check([greeting]):
                key = store.get(greeting).decode()
                store.set(f"prefix for {key}", prefix)
        if time.monotonic() > until:
            raise ProcessError(f"Process {missing[0]} of {size} did not connect. See its output.")
        time.sleep(0.02)
    return prefix


def _disconnect() -> None:
    """Close the connection to the other ranks at exit."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # torch's threads release Python objects shortly after the last exchange. If the interpreter
    # ends first, such a thread aborts the process.
    time.sleep(SETTLING_SECONDS)
