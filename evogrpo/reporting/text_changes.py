"""Changes of texts of task settings from parent to child, word by word."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from evogrpo.config.task_settings import is_task_setting
from evogrpo.reporting.summary import RunSummary
from evogrpo.text import shorten

MAX_COMPARED = 2000
"""Maximum number of characters of a text that is compared; the rest is left out."""
MAX_CHANGES = 100
"""Maximum number of changes that are shown: the last ones."""
# The space before a word belongs to it, so that a text with further words has the same words.
_WORDS = re.compile(r"\s*\S+|\s+")


@dataclass(frozen=True, kw_only=True)
class TextChange:
    """A text of a task setting that a member has in place of its parent's.

    Attributes:
        name: Full name of the setting; untrusted, as all texts.
        index: The member.
        parent: Its parent.
        before: Last fitness of the parent before the birth, as text; "–" if there is none.
        after: Last fitness of the member, as text.
        parts: Pieces of both texts in order: of both, of the parent's only ("del"), or of the
            member's only ("ins").
    """

    name: str
    index: int
    parent: int
    before: str
    after: str
    parts: tuple[tuple[Literal["same", "ins", "del"], str], ...]


def text_changes(summary: RunSummary) -> Iterator[TextChange]:
    """Yield the text changes of a run, in the order of births."""
    for birth in summary.births:
        for name, (old, new) in birth.changes.items():
            texts = isinstance(old, str) and isinstance(new, str)
            if not texts or not is_task_setting(name) or birth.parent is None:
                continue
            history = summary.histories.get(birth.index)
            before = after = "–"
            if history is not None:
                after = str(history.results[-1].estimate or "failed")
                if history.origin is not None:
                    before = str(history.origin.estimate or "–")
            yield TextChange(
                name=name,
                index=birth.index,
                parent=birth.parent,
                before=before,
                after=after,
                parts=tuple(differences(str(old), str(new))),
            )


def differences(old: str, new: str) -> Iterator[tuple[Literal["same", "ins", "del"], str]]:
    """Yield the pieces of two texts: those of both, and those of one only."""
    before = _WORDS.findall(shorten(old, MAX_COMPARED))
    after = _WORDS.findall(shorten(new, MAX_COMPARED))
    # In texts of 200 words or more it ignores frequent words, without which it could take minutes.
    matcher = SequenceMatcher(None, before, after)
    for kind, i, j, k, n in matcher.get_opcodes():
        if kind == "equal":
            yield "same", "".join(before[i:j])
            continue
        if j > i:
            yield "del", "".join(before[i:j])
        if n > k:
            yield "ins", "".join(after[k:n])
