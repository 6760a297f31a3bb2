"""What processes can only do together, done as soon as one of them needs it, whatever the others are at."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

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
            ValueError: If the others will not listen: outside of `Processes.together`.
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
