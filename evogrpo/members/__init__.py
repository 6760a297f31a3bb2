"""Members of a population: their weights in one bank, and how they sample, act and learn."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from evogrpo.members.language.members import LanguageMembers
    from evogrpo.members.networks.members import NetworkMembers

    PolicySet: TypeAlias = LanguageMembers | NetworkMembers
    """Members that are language models or small networks."""
