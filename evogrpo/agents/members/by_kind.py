"""The kinds of members, by the word that checkpoints name them by."""

from collections.abc import Mapping

from evogrpo.agents.members.control.network_members import NetworkMembers
from evogrpo.agents.members.control.team_members import TeamMembers
from evogrpo.agents.members.tokens.language_members import LanguageMembers

MEMBERS: Mapping[str, type[LanguageMembers | NetworkMembers | TeamMembers]] = {
    kind.kind: kind for kind in (LanguageMembers, NetworkMembers, TeamMembers)
}
