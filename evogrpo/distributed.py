"""Ranks of a distributed program and their collectives."""

import atexit
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from evogrpo.interruption import Interrupted

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = -1
"""Sent by a rank that cannot predict the errand it needs next."""

FOR_ALL, FOR_SOME = -1, -2
"""Sent by a rank that needs no errand: it waits for all ranks, or for those that share a part of its work."""


class Errand(Protocol):
    """Collective that any of the ranks can trigger, such as gathering the weights of a layer."""

    def begin(self) -> None:
        """Start the asynchronous part."""

    def finish(self, needed: bool) -> None:
        """Complete the collective; `needed` is True on the ranks that asked for it."""


class Errands:
    """Collectives that any rank can trigger, each with a number.

    A rank that needs one sends its number in `need`; a rank that waits takes part in `wait`. In each round, all ranks
    execute all requested collectives in rank order. Ranks may therefore be at different places of their work. If all
    of them predict the same next collective, it starts ahead of time.

    Args:
        ranks: Ranks in the program.
        all_gather: Gathers the integers of each rank, in rank order.
        in_section: Returns True while the waiting ranks take part.

    Attributes:
        ranks: As given.
        broken: Error raised in the middle of a collective on this rank, after which the others cannot follow.
    """

    def __init__(
        self,
        ranks: Collection[int],
        all_gather: Callable[[int, int], Sequence[tuple[int, ...]]],
        in_section: Callable[[], bool],
    ) -> None:
        self.ranks, self._all_gather, self._in_section = tuple(ranks), all_gather, in_section
        self.broken: BaseException | None = None
        self._errands: list[Errand] = []
        self._begun: int | None = None

    def add(self, errand: Errand) -> int:
        """Register a collective on all ranks and return its number."""
        self._errands.append(errand)
        return len(self._errands) - 1

    def need(self, number: int, then: int = NOTHING) -> None:
        """Execute a collective with the other ranks.

        Args:
            number: Number of the collective.
            then: Number of the one that this rank will most likely need next.

        Raises:
            ValueError: If called outside of `Processes.run_section`.
            ProcessError: If another rank has ended.
        """
        if not self._in_section():
            raise ValueError(
                f"The base model is sharded over {len(self.ranks)} processes, so one process cannot run it alone. Load "
                "the saved agent in a program of one process."
            )
        self._round(number, then)

    def wait(self, ranks: Collection[int], *, among: int) -> None:
        """Take part in the collectives of others until all of `ranks` wait, too.

        Args:
            ranks: Ranks to wait for.
            among: `FOR_ALL`, or `FOR_SOME`: ranks that already wait for all count as waiting.
        """
        awaited = [place for place, rank in enumerate(self.ranks) if rank in ranks]
        needs: list[int] = []
        while not needs or not all(among <= needs[place] < 0 for place in awaited):
            needs = self._round(among)

    def _round(self, own: int, then: int = NOTHING) -> list[int]:
        """Execute all requested collectives, start the predicted one, and return the request of each rank."""
        requests = self._all_gather(own, then)
        needed = list(dict.fromkeys(need for need, _ in requests if need >= 0))
        try:
            if self._begun is not None and self._begun not in needed:
                self._errands[self._begun].finish(False)
            for number in needed:
                self._errands[number].finish(number == own)
            expected = {next_ for need, next_ in requests if need >= 0}
            self._begun = expected.pop() if len(expected) == 1 else None
            if self._begun in (NOTHING, *needed):  # what is in use now cannot be begun again
                self._begun = None
            if self._begun is not None:
                self._errands[self._begun].begin()
        except BaseException as error:
            self.broken = error
            raise
        return [need for need, _ in requests]


T = TypeVar("T")

TIMEOUT_MINUTES = 60
"""Timeout of collectives, and so the longest that one rank may take for its share of a step. The environment variable
EVOGRPO_TIMEOUT_MINUTES overrides it."""


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
        raise ValueError(f"EVOGRPO_TIMEOUT_MINUTES must be a number of minutes above 0, got {given!r:.40}")
    return minutes


@dataclass(frozen=True)
class _End:
    """Reason why a rank did not complete its share of a section.

    Attributes:
        rank: The rank.
        words: Text of its error; empty if it was interrupted.
        lost: It lost the connection to another rank, whose own error is the cause.
    """

    rank: int
    words: str = ""
    lost: bool = False


class ProcessError(RuntimeError):
    """Another rank of the run has failed.

    Attributes:
        end: Its own report, if known.
    """

    def __init__(self, words: str, end: _End | None = None) -> None:
        super().__init__(words)
        self.end = end


class Processes:
    """Ranks that a launcher such as `torchrun` or `accelerate launch` started, or this process alone.

    Args:
        rank: Rank of this process.
        size: World size.
        group: Process group of torch; None for a single process.
        program: All ranks of the program, if these are some of them; None = these are all.
        ranks: Ranks within the program; None = all.

    Attributes:
        rank: As given.
        size: As given.
        program: As given, or self.
        ranks: As given.
        interruptible: The work under way may be abandoned on this rank alone; `run_section` tells the others.
        waiting_seconds: Time spent in exchanges, mostly waiting for other ranks.
        in_section: The work under way is inside `run_section`, so the other ranks take part in collectives.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        program: "Processes | None" = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.program = program or self
        self.ranks = tuple(range(size)) if ranks is None else tuple(ranks)
        self.interruptible, self.in_section = size == 1, False
        self._errands: dict[int, Errands] = {}
        self._squads: dict[tuple[Sequence[int], ...], Processes] = {}
        self._agreed: BaseException | None = None
        self.waiting_seconds = 0.0

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    # ---- collectives of plain values

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order: plain values and arrays."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        self._wait(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def run_section(self, work: Callable[[], T], *, divided: bool = False) -> list[T]:
        """Run local work on every rank, exchange the outcomes, and return the results in rank order.

        Args:
            work: Work of this rank.
            divided: The work itself contains sections of a squad. Interruptions are then allowed inside those only, as
                the rest of the squad would wait between them.

        Raises:
            Interrupted: If any rank was interrupted.
            ProcessError: If another rank failed. An error of this rank is raised unchanged.
        """
        if self.size == 1:
            return [work()]
        # 1. Local work. Errors are kept until all ranks know of them.
        found: T | None = None
        failure: BaseException | None = None
        outermost = not self.program.in_section
        try:
            self.program.interruptible, self.program.in_section = not divided, True
            found = work()
        except (Interrupted, Exception) as error:  # noqa: BLE001  # raised again below
            failure = error
        finally:
            self.program.interruptible, self.program.in_section = False, not outermost
        if failure is not None and divided:
            self._leave_squads(failure)
        # 2. Take part in collectives of the others until all have finished.
        try:
            for errands in self.program._errands.values():
                if errands.broken is not None:
                    raise errands.broken
                errands.wait(self.ranks, among=FOR_ALL if self is self.program else FOR_SOME)
        except Exception as error:
            if failure is None:
                raise
            raise failure from error
        # 3. Exchange outcomes; all ranks raise if one failed.
        outcomes = self.all_gather((found, None if failure is None else _end_of(failure, self.program.rank)))
        ends = [end for _, end in outcomes if end is not None]
        if ends:
            self._agreed = self._failure_of(ends, failure)
            raise self._agreed
        return [value for value, _ in outcomes]  # type: ignore[misc]  # all ranks succeeded

    def _failure_of(self, ends: Sequence[_End], own: BaseException | None) -> BaseException:
        """Return the error that this rank raises: its own unless another one is the cause."""
        failed = sorted((end for end in ends if end.words), key=lambda end: end.lost)
        if not failed:
            return own or Interrupted()
        self._squads.clear()  # a rank may have left them
        if own is not None and not isinstance(own, Interrupted) and (not _lost(own) or failed[0].lost):
            return own
        first, size = failed[0], self.program.size
        error = ProcessError(f"Process {first.rank} of {size} failed: {first.words}", first)
        error.__cause__ = own
        return error

    def _leave_squads(self, failure: BaseException) -> None:
        """Close the process groups of the squads if this rank failed alone between two sections."""
        import torch.distributed as dist

        for squad in self._squads.values():
            if squad.size > 1 and failure is not squad._agreed:
                dist.destroy_process_group(squad._group)
                squad._group = None  # drops the last reference, which closes the connections

    def squad(self, squads: Sequence[Sequence[int]]) -> "Processes":
        """Return the group of ranks that shares a member with this one. A collective of all ranks.

        Args:
            squads: Groups of ranks; each rank is in exactly one.
        """
        key = tuple(map(tuple, squads))
        if key not in self._squads:
            import torch.distributed as dist

            timeout = timedelta(minutes=timeout_minutes())
            for ranks in squads:  # torch requires every rank to create every group
                group = dist.new_group(list(ranks), backend="gloo", timeout=timeout) if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._squads[key] = Processes(list(ranks).index(self.rank), len(ranks), group, self, ranks)
        return self._squads[key]

    def errands(self, size: int) -> Errands:
        """Return the triggered collectives of this rank and its neighbours. A collective of all ranks.

        Args:
            size: Ranks per group; divides the world size.
        """
        if size not in self._errands:
            import torch.distributed as dist

            timeout = timedelta(minutes=timeout_minutes())
            for first in range(0, self.size, size):  # as above
                ranks = range(first, first + size)
                group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
                if self.rank in ranks:
                    crew = Processes(self.rank - first, size, group, self, ranks)
                    self._errands[size] = Errands(ranks, crew.all_gather_ints, lambda: self.in_section)
        return self._errands[size]

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return the value of rank `source` on every rank: plain values, arrays and tensors."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        held = [value]
        self._wait(lambda: dist.broadcast_object_list(held, src=source, group=self._group))
        return held[0]

    def now(self) -> float:
        """Return `time.monotonic()` of rank 0, so that all ranks decide alike."""
        return self.broadcast(time.monotonic())

    def all_gather_ints(self, *values: int) -> list[tuple[int, ...]]:
        """Return the integers of all ranks in rank order; faster than `all_gather`."""
        import torch
        import torch.distributed as dist

        found = torch.zeros((self.size, len(values)), dtype=torch.int64)
        self._wait(lambda: dist.all_gather(list(found.unbind()), torch.tensor(values), group=self._group))
        return [tuple(row) for row in found.tolist()]

    # ---- tensors

    def all_reduce(self, values: "Tensor") -> "Tensor":
        """Return the sum `[k]` over all ranks, added in rank order, so that all ranks get equal bits.

        Each rank sums one part and sends it to the others. Traffic is twice the tensor for any world size.
        """
        if self.size == 1:
            return values
        import torch
        import torch.distributed as dist

        part = -(-len(values) // self.size)
        given = torch.zeros(self.size * part, dtype=values.dtype)
        given[: len(values)] = values.detach()
        received = torch.empty_like(given)
        self._wait(lambda: dist.all_to_all_single(received, given, group=self._group))
        total, *others = received.view(self.size, part).unbind()
        for other in others:
            total += other
        self._wait(lambda: dist.all_gather(list(given.view(self.size, part).unbind()), total, group=self._group))
        return given[: len(values)].to(values.device)

    def broadcast_tensors(self, tensors: "Mapping[str, Tensor] | None", *, source: int) -> "dict[str, Tensor]":
        """Return the tensors of rank `source` on the CPU; the other ranks pass None."""
        if self.size == 1:
            assert tensors is not None
            return dict(tensors)
        import torch
        import torch.distributed as dist

        own = None if tensors is None else {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        shapes = [None if own is None else {name: (value.shape, value.dtype) for name, value in own.items()}]
        self._wait(lambda: dist.broadcast_object_list(shapes, src=source, group=self._group))
        found = own or {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in (shapes[0] or {}).items()}
        for value in found.values():
            self._wait(lambda value=value: dist.broadcast(value, src=source, group=self._group))  # type: ignore[misc]
        return found

    def send_tensors(
        self, tensors: "Mapping[str, Tensor] | None", *, source: int, target: int
    ) -> "dict[str, Tensor] | None":
        """Send tensors from rank `source` to rank `target`, which gets them on the CPU; other ranks return None."""
        import torch
        import torch.distributed as dist

        if self.rank == source:
            assert tensors is not None
            own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            shapes = [{name: (value.shape, value.dtype) for name, value in own.items()}]
            self._wait(lambda: dist.send_object_list(shapes, dst=target, group=self._group))
            for value in own.values():
                self._wait(lambda value=value: dist.send(value, dst=target, group=self._group))  # type: ignore[misc]
        elif self.rank == target:
            held: list[Any] = [None]
            self._wait(lambda: dist.recv_object_list(held, src=source, group=self._group))
            found = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in held[0].items()}
            for value in found.values():
                self._wait(lambda value=value: dist.recv(value, src=source, group=self._group))  # type: ignore[misc]
            return found
        return None

    def _wait(self, exchange: Callable[[], object]) -> None:
        """Run a blocking exchange; raise ProcessError if the connection was lost."""
        began = time.monotonic()
        try:
            exchange()
            self.program.waiting_seconds += time.monotonic() - began
        except RuntimeError as error:  # gloo's: a connection was closed, or nothing came for too long
            raise ProcessError(
                f"Process {self.program.rank} of {self.program.size} lost the connection: another process ended (see "
                f"its output), or did not answer for {timeout_minutes():g} minutes (EVOGRPO_TIMEOUT_MINUTES). "
                f"Start all processes again to resume from the last checkpoint ({error})."
            ) from error


def _end_of(failure: BaseException, rank: int) -> _End:
    """Return the record of a failure that is sent to the other ranks."""
    if isinstance(failure, Interrupted):
        return _End(rank)
    if isinstance(failure, ProcessError) and failure.end is not None:
        return failure.end
    return _End(rank, f"{type(failure).__name__}: {failure}", _lost(failure))


def _lost(failure: BaseException) -> bool:
    return isinstance(failure, ProcessError) and failure.end is None


SETTLING_SECONDS = 0.2
"""Seconds that a connected process waits before it exits."""


def was_restarted() -> bool:
    """Return True if the launcher restarted this program after a failure. A collective.

    The launcher of each machine counts only its own restarts, so the ranks combine theirs.
    """
    return any(processes().all_gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")))


@cache
def processes() -> Processes:
    """Return the ranks of this program; the first call connects them.

    Raises:
        ValueError: If WORLD_SIZE names several processes but the rest of torchrun's environment is missing.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    begun = "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()
    if not begun and launched.isdigit() and int(launched) <= 1:
        return Processes()
    import torch.distributed as dist

    timeout = timedelta(minutes=timeout_minutes())
    if not begun:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing or not launched.isdigit():
            raise ValueError(
                f"WORLD_SIZE={launched!r:.20} names several processes, but {', '.join(missing) or 'their number'} is "
                "missing from the environment. Start them with torchrun or accelerate launch, or unset WORLD_SIZE."
            )
        _connect(timeout)
        atexit.register(_disconnect)
    if dist.get_world_size() == 1:
        return Processes()
    # A group of its own, as records and train states are exchanged on the CPU and the default group may use NCCL.
    return Processes(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))


def is_rank_zero() -> bool:
    """Return True on rank 0. Unlike `processes`, this does not connect the ranks."""
    if processes.cache_info().currsize:
        return processes().is_rank_zero
    begun = sys.modules.get("torch.distributed")
    if begun is not None and begun.is_available() and begun.is_initialized():
        return bool(begun.get_rank() == 0)
    return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("RANK", "0") == "0"


def _connect(timeout: timedelta) -> None:
    """Initialise torch's default process group from the environment."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo", timeout=timeout)
        return
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    part = agree_on_prefix(store, rank, size, until=time.monotonic() + timeout.total_seconds())
    dist.init_process_group("gloo", store=PrefixStore(part, store), rank=rank, world_size=size, timeout=timeout)


def agree_on_prefix(store: Any, rank: int, size: int, until: float) -> str:
    """Return a prefix of the launcher's store that is new for this start.

    torchrun keeps one store over restarts, which still holds addresses of killed processes. A rank that reads one of
    them waits forever. Rank 0 therefore names a new prefix and sends it to each rank under that rank's own random name.

    Args:
        store: The launcher's store.
        rank: Rank of this process.
        size: World size.
        until: Deadline by `time.monotonic()`.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"greeting of {rank}", own)
        try:
            part = str(store.get(f"part for {own}").decode())  # waits for it
        except RuntimeError as error:
            raise ProcessError(f"Rank 0 did not connect. See its output ({error}).") from error
        store.set(f"{part}: {rank} has come", "")
        return part
    missing = list(range(1, size))
    while missing := [other for other in missing if not store.check([f"{own}: {other} has come"])]:
        for other in missing:
            if store.check([f"greeting of {other}"]):
                store.set(f"part for {store.get(f'greeting of {other}').decode()}", own)
        if time.monotonic() > until:
            raise ProcessError(f"Process {missing[0]} of {size} did not connect. See its output.")
        time.sleep(0.02)
    return own


def _disconnect() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    # torch's threads release Python objects shortly after the last exchange. If the interpreter ends first, such a
    # thread aborts the process.
    time.sleep(SETTLING_SECONDS)
