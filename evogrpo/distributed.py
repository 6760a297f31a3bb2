"""Ranks of one program: how they meet, and their collectives."""

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
"""What a process says that does not know what it will need next."""

FOR_ALL, FOR_SOME = -1, -2
"""What a process says that needs nothing: it waits for all of the program, or for those that share a part of its work
and go on with it then."""


class Errand(Protocol):
    """Something that processes can only do together."""

    def begin(self) -> None:
        """Do what can be done while everybody goes on with something else."""

    def finish(self, needed: bool) -> None:
        """Do it, or what is left of it; `needed` says whether this process is one of those that need it."""


class Errands:
    """What some processes of a program can only do together, each thing under a number.

    A process that needs one says so; those that are at work come to a point where they need one too, and those that
    wait for others listen in `wait`. Everybody then does all that are needed, in the order of the processes that asked.
    So no two of them need to be at the same place of their work, or to do equally much of it. Where all of them expect
    to need the same next, it is begun ahead.

    Args:
        ranks: Their numbers in the program.
        numbers: Tells all of them some numbers, and returns those of each, in their order.
        listened: Whether those that wait for this process listen.

    Attributes:
        ranks: As given.
        broken: What went wrong in this process in the middle of an errand, so that no other can follow.
    """

    def __init__(
        self,
        ranks: Collection[int],
        numbers: Callable[[int, int], Sequence[tuple[int, ...]]],
        listened: Callable[[], bool],
    ) -> None:
        self.ranks, self._numbers, self._listened = tuple(ranks), numbers, listened
        self.broken: BaseException | None = None
        self._errands: list[Errand] = []
        self._begun: int | None = None

    def add(self, errand: Errand) -> int:
        """Return the number of a new errand; all of them add the same."""
        self._errands.append(errand)
        return len(self._errands) - 1

    def need(self, number: int, then: int = NOTHING) -> None:
        """Do an errand with the others.

        Args:
            number: Which.
            then: Which this process will most likely need after it.

        Raises:
            ValueError: If the others will not listen: outside of `Processes.run_section`.
            ProcessError: If one of them has ended.
        """
        if not self._listened():
            raise ValueError(
                f"the base is held by {len(self.ranks)} processes together, so one alone cannot run it: ask the agent "
                "that the run has saved, in a program of one process"
            )
        self._round(number, then)

    def wait(self, ranks: Collection[int], *, among: int) -> None:
        """Do what the others need, until those of them that are among `ranks` wait, too.

        Args:
            ranks: For whom this process waits.
            among: `FOR_ALL`, or `FOR_SOME`; these do not come any more where they have begun to wait for all.
        """
        awaited = [place for place, rank in enumerate(self.ranks) if rank in ranks]
        needs: list[int] = []
        while not needs or not all(among <= needs[place] < 0 for place in awaited):
            needs = self._round(among)

    def _round(self, own: int, then: int = NOTHING) -> list[int]:
        """Do all errands that are needed now, begin the next one, and return what each process needed."""
        told = self._numbers(own, then)
        needed = list(dict.fromkeys(need for need, _ in told if need >= 0))
        try:
            if self._begun is not None and self._begun not in needed:
                self._errands[self._begun].finish(False)
            for number in needed:
                self._errands[number].finish(number == own)
            expected = {next_ for need, next_ in told if need >= 0}
            self._begun = expected.pop() if len(expected) == 1 else None
            if self._begun in (NOTHING, *needed):  # what is in use now cannot be begun again
                self._begun = None
            if self._begun is not None:
                self._errands[self._begun].begin()
        except BaseException as error:
            self.broken = error
            raise
        return [need for need, _ in told]


def listening(errands: Collection[Errands], ranks: Collection[int], *, among: int) -> None:
    """Let a process that has done its share do what others need that have not.

    Args:
        errands: What they may need.
        ranks: For whom it waits.
        among: Whether that is all of the program; see `Errands.wait`.

    Raises:
        ProcessError: If one of them has ended.
    """
    for each in errands:
        if each.broken is not None:
            raise each.broken
        each.wait(ranks, among=among)


T = TypeVar("T")

TIMEOUT_MINUTES = 60
"""How long a process waits for the others before it ends: the longest that one of them may take for its share of a
step. `EVOGRPO_TIMEOUT_MINUTES` in the environment is another number."""


def timeout_minutes() -> float:
    """Return how long a process waits for the others, as its environment says.

    Raises:
        ValueError: If that is not a number of minutes.
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
    """Why a process did not get through its share of some work.

    Attributes:
        rank: Which process.
        words: How it failed; none if it was asked to stop.
        lost: Whether another one had left it alone, which knows better why.
    """

    rank: int
    words: str = ""
    lost: bool = False


class ProcessError(RuntimeError):
    """Another process of the run has failed; that process says how.

    Attributes:
        end: What it said, once it is known.
    """

    def __init__(self, words: str, end: _End | None = None) -> None:
        super().__init__(words)
        self.end = end


class Processes:
    """The processes that a launcher such as `torchrun` or `accelerate launch` has started together, or just this one.

    Args:
        rank: The number of this process.
        size: How many there are.
        group: How they talk; None where there is one.
        program: All processes of the program, of which these are some; None = these are all.
        ranks: Their numbers in the program; None = as these are all.

    Attributes:
        rank: As given.
        size: As given.
        program: As given, or these.
        ranks: As given.
        interruptible: Whether what is being done may be abandoned without the others, as `run_section` will tell them.
        together_now: Whether it is done in `run_section`, so that the others will listen.
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

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and talks to people."""
        return self.rank == 0

    # ---- everybody at once

    def all_gather(self, value: T) -> list[T]:
        """Return what every process gave, in their order; plain values and arrays."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        self._wait(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def run_section(self, work: Callable[[], T], *, divided: bool = False) -> list[T]:
        """Let every process do its share of some work, and return what each came to, in their order.

        Args:
            work: This process's share.
            divided: Whether shares are divided further, by `run_section` of a squad: then parts of it may be abandoned
                there, and nothing between them, as the rest of the squad would wait.

        Raises:
            Interrupted: If any of them abandoned its share.
            ProcessError: If another one failed; what fails here is raised as it is.
        """
        if self.size == 1:
            return [work()]
        found: T | None = None
        failure: BaseException | None = None
        outermost = not self.program.in_section
        try:
            self.program.interruptible, self.program.in_section = not divided, True
            found = work()
        except (Interrupted, Exception) as error:  # noqa: BLE001  # raised again, once the others have been told
            failure = error
        finally:
            self.program.interruptible, self.program.in_section = False, not outermost
        if failure is not None and divided:
            self._leave_squads(failure)
        try:
            among = FOR_ALL if self is self.program else FOR_SOME
            listening(self.program._errands.values(), self.ranks, among=among)
        except Exception as error:
            if failure is None:
                raise
            raise failure from error
        outcomes = self.all_gather((found, None if failure is None else _end_of(failure, self.program.rank)))
        ends = [end for _, end in outcomes if end is not None]
        if ends:
            self._agreed = self._failure_of(ends, failure)
            raise self._agreed
        return [value for value, _ in outcomes]  # type: ignore[misc]  # nobody failed, so everybody has one

    def _failure_of(self, ends: Sequence[_End], own: BaseException | None) -> BaseException:
        """Return what this process raises, where some did not get through: its own failure if it knows why."""
        failed = sorted((end for end in ends if end.words), key=lambda end: end.lost)
        if not failed:
            return own or Interrupted()
        self._squads.clear()  # somebody may have left them
        if own is not None and not isinstance(own, Interrupted) and (not _lost(own) or failed[0].lost):
            return own
        first, size = failed[0], self.program.size
        error = ProcessError(f"process {first.rank} of {size} failed, and so does the run: {first.words}", first)
        error.__cause__ = own
        return error

    def _leave_squads(self, failure: BaseException) -> None:
        """Let nobody wait for this process where it failed between two parts of divided work, and alone."""
        import torch.distributed as dist

        for squad in self._squads.values():
            if squad.size > 1 and failure is not squad._agreed:
                dist.destroy_process_group(squad._group)
                squad._group = None  # the last that held it: its connections are closed, which the rest notices at once

    def squad(self, squads: Sequence[Sequence[int]]) -> "Processes":
        """Return those processes of the program that work together with this one; all of the program call this.

        Args:
            squads: Ranks that work together, in their order; each rank is in one squad.
        """
        key = tuple(map(tuple, squads))
        if key not in self._squads:
            import torch.distributed as dist

            timeout = timedelta(minutes=timeout_minutes())
            for ranks in squads:  # everybody makes all groups, as torch asks
                group = dist.new_group(list(ranks), backend="gloo", timeout=timeout) if len(ranks) > 1 else None
                if self.rank in ranks:
                    self._squads[key] = Processes(list(ranks).index(self.rank), len(ranks), group, self, ranks)
        return self._squads[key]

    def errands(self, size: int) -> Errands:
        """Return what this process and those next to it can only do together; all of the program call this.

        Args:
            size: How many they are, which divides the number of all.
        """
        if size not in self._errands:
            import torch.distributed as dist

            timeout = timedelta(minutes=timeout_minutes())
            for first in range(0, self.size, size):  # everybody makes all groups, as torch asks
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
        """Return the seconds on the leading process's clock, `time.monotonic()`: all processes decide by the same."""
        return self.broadcast(time.monotonic())

    def all_gather_ints(self, *values: int) -> list[tuple[int, ...]]:
        """Return the whole numbers that every process gave, in their order: quicker than `all_gather`."""
        import torch
        import torch.distributed as dist

        found = torch.zeros((self.size, len(values)), dtype=torch.int64)
        self._wait(lambda: dist.all_gather(list(found.unbind()), torch.tensor(values), group=self._group))
        return [tuple(row) for row in found.tolist()]

    # ---- tensors

    def all_reduce(self, values: "Tensor") -> "Tensor":
        """Return the sum `[k]` of what all processes gave, one after the other in their order: equal bits everywhere.

        Each process adds up a part of it and tells the others, so that what it sends and gets does not grow with their
        number: twice the tensor.
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
        """Return tensors of the process `source`, on the CPU; the others give None."""
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
        """Let one process hand tensors to one other, which gets them on the CPU; everybody else gets None."""
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
        """Go through with an exchange."""
        try:
            exchange()
        except RuntimeError as error:  # gloo's: a connection was closed, or nothing came for too long
            raise ProcessError(
                f"process {self.program.rank} of {self.program.size} has lost the others: one of them has ended, or "
                f"did not answer for {timeout_minutes():g} minutes (EVOGRPO_TIMEOUT_MINUTES): its own output says "
                f"why. Every checkpoint so far is whole: start all processes again to resume ({error})"
            ) from error


def _end_of(failure: BaseException, rank: int) -> _End:
    """Return what a process says of how it ended, or what it has been told of how another did."""
    if isinstance(failure, Interrupted):
        return _End(rank)
    if isinstance(failure, ProcessError) and failure.end is not None:
        return failure.end
    return _End(rank, f"{type(failure).__name__}: {failure}", _lost(failure))


def _lost(failure: BaseException) -> bool:
    return isinstance(failure, ProcessError) and failure.end is None


SETTLING_SECONDS = 0.2
"""How long a process that connected to others waits at its very end."""


def was_restarted() -> bool:
    """Return whether the launcher has started this program again, because a process of it had ended; all ask.

    Each machine's launcher counts the ends of its own processes only.
    """
    return any(processes().all_gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")))


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

    timeout = timedelta(minutes=timeout_minutes())
    if not begun:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing or not launched.isdigit():
            raise ValueError(
                f"WORLD_SIZE is {launched!r:.20}, so several processes train together, but "
                f"{', '.join(missing) or 'a number of them'} is missing from the environment: start them with torchrun "
                "or accelerate launch, or unset WORLD_SIZE for a run in one process"
            )
        _connect(timeout)
        atexit.register(_disconnect)
    if dist.get_world_size() == 1:
        return Processes()
    # Records and learner states travel through the CPU, whatever else the program's own group is for.
    return Processes(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))


def is_rank_zero() -> bool:
    """Return whether this process is the one to tell what all come to; asked at any time, as it connects nobody."""
    if processes.cache_info().currsize:
        return processes().is_rank_zero
    begun = sys.modules.get("torch.distributed")
    if begun is not None and begun.is_available() and begun.is_initialized():
        return bool(begun.get_rank() == 0)
    return os.environ.get("WORLD_SIZE", "1") in ("", "1") or os.environ.get("RANK", "0") == "0"


def _connect(timeout: timedelta) -> None:
    """Meet the other processes where the environment says."""
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
