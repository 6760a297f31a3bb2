"""The kinds of members, by the word that checkpoints name them by."""

from collections.abc import Mapping

from evogrpo.agents.members.control.networks import NetworkMembers
from evogrpo.agents.members.control.team import TeamMembers
from evogrpo.agents.members.tokens.language import LanguageMembers

KINDS: Mapping[str, type[LanguageMembers | NetworkMembers | TeamMembers]] = {
    kind.kind: kind for kind in (LanguageMembers, NetworkMembers, TeamMembers)
}
