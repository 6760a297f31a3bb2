"""What processes can only do together, done as soon as one of them needs it, whatever the others are at."""

from collections.abc import Callable, Collection

FOR_ALL, FOR_SOME = -1, -2
"""What a process says that needs nothing: it waits for all of the program, or for those that share a part of its work
and go on with it then."""


class Errands:
    """What some processes of a program can only do together, each thing under a number.

    A process that needs one says so; those that are at work come to a point where they need one too, and those that
    wait for others listen in `wait`. Everybody then does all that are needed, in the order of the processes that asked.
    So no two of them need to be at the same place of their work, or to do equally much of it.

    Args:
        ranks: Their numbers in the program.
        numbers: Tells all of them a number, and returns those of all, in their order.
        listened: Whether those that wait for this process listen.

    Attributes:
        ranks: As given.
        broken: What went wrong in this process in the middle of an errand, so that no other can follow.
    """

    def __init__(
        self, ranks: Collection[int], numbers: Callable[[int], list[int]], listened: Callable[[], bool]
    ) -> None:
        self.ranks, self._numbers, self._listened = tuple(ranks), numbers, listened
        self.broken: BaseException | None = None
        self._errands: list[Callable[[bool], object]] = []

    def add(self, errand: Callable[[bool], object]) -> int:
        """Return the number of a new errand, which is told whether this process needs it; all of them add the same."""
        self._errands.append(errand)
        return len(self._errands) - 1

    def need(self, number: int) -> None:
        """Do an errand with the others.

        Raises:
            ValueError: If the others will not listen: outside of `Processes.together`.
            ProcessError: If one of them has ended.
        """
        if not self._listened():
            raise ValueError(
                f"the base is held by {len(self.ranks)} processes together, so one alone cannot run it: ask the agent "
                "that the run has saved, in a program of one process"
            )
        self._round(number)

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

    def _round(self, own: int) -> list[int]:
        """Do all errands that are needed now, and return what each process needed."""
        needs = self._numbers(own)
        try:
            for number in dict.fromkeys(needs):
                if number >= 0:
                    self._errands[number](number == own)
        except BaseException as error:
            self.broken = error
            raise
        return needs


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
