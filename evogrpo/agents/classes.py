"""Which class the agents of a checkpoint are of."""

from evogrpo.agents.grpo import GRPO
from evogrpo.agents.members.by_kind import MEMBERS
from evogrpo.agents.multi_agent import MultiAgentGRPO

_CLASSES: dict[str, type[GRPO]] = {each.__name__: each for each in (GRPO, MultiAgentGRPO)}


def agent_class(kind: str) -> type[GRPO]:
    """Return the class of agents whose members are of a kind; KeyError for none of ours."""
    return _CLASSES[MEMBERS[kind].agent_class]
