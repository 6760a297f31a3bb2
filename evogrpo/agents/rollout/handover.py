"""Completions as they are finished, handed over group by group to whoever rewards them."""

from collections import Counter
from collections.abc import Sequence

from evogrpo.data import Conversation, SamplingBatch
from evogrpo.envs.groups import Beforehand


class Handover:
    """Hands over groups as soon as all of their completions are finished.

    Args:
        opened: Who rewards.
        rows: All that are being written; those in which one member completes one prompt are a group.
    """

    def __init__(self, opened: Beforehand, rows: SamplingBatch) -> None:
        self._opened = opened
        self._groups = list(zip(rows.member_ids.tolist(), rows.prompt_ids.tolist(), strict=True))
        self._unfinished = Counter(self._groups)
        self._finished: dict[tuple[int, int], list[Conversation]] = {}

    def __call__(self, rows: Sequence[int], completions: Sequence[Sequence[int]]) -> None:
        """Take note of finished completions, none perhaps; see `evogrpo.finished.tell`."""
        for row, tokens in zip(rows, completions, strict=True):
            group = self._groups[row]
            told = Conversation(row=row, start=group[1], completions=(tuple(tokens),))
            self._finished.setdefault(group, []).append(told)
            self._unfinished[group] -= 1
            if not self._unfinished[group]:
                self._opened.begin(sorted(self._finished.pop(group), key=lambda each: each.row))
        self._opened.proceed()
