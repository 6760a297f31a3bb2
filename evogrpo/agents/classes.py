"""Which class the agents of a checkpoint are of."""

from evogrpo.agents.grpo import GRPO
from evogrpo.agents.multi_agent import MultiAgentGRPO

_CLASSES: dict[str, type[GRPO]] = {kind: each for each in (GRPO, MultiAgentGRPO) for kind in each.kinds}


def agent_class(kind: str) -> type[GRPO]:
    """Return the class of agents whose members are of a kind; KeyError for none of ours."""
    return _CLASSES[kind]
