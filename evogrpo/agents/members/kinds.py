"""The kinds of members, by the word that checkpoints name them by."""

from collections.abc import Mapping

from evogrpo.agents.members.language import LanguageMembers
from evogrpo.agents.members.networks import NetworkMembers
from evogrpo.agents.members.team import TeamMembers

KINDS: Mapping[str, type[LanguageMembers | NetworkMembers | TeamMembers]] = {
    kind.kind: kind for kind in (LanguageMembers, NetworkMembers, TeamMembers)
}
