"""What the parts of a run are called: a language model answers questions, a small network plays episodes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of one kind of members.

    Attributes:
        untrained: What members are compared with.
        questions: What they start from.
        tokens: What their work is counted in, updates included.
        fitness: What their fitness is.
    """

    untrained: str
    questions: str
    tokens: str
    fitness: str


LANGUAGE = Words(
    untrained="untrained base",
    questions="questions",
    tokens="tokens",
    fitness="mean reward per validation question",
)
NETWORKS = Words(
    untrained="untrained network",
    questions="starts",
    tokens="transitions",
    fitness="mean return per validation start",
)

_BY_KIND: Mapping[str, Words] = {"networks": NETWORKS, "joint": NETWORKS}


def words_of(kind: object) -> Words:
    """Return the words for a kind of members, as the run event of a journal names it; language models by default."""
    return _BY_KIND.get(kind, LANGUAGE) if isinstance(kind, str) else LANGUAGE
