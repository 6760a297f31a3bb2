"""Which class the agents of a checkpoint are of."""

from evogrpo.agents.agent import Agent
from evogrpo.agents.grpo import GRPO
from evogrpo.agents.multi_agent import MultiAgentGRPO

_CLASSES: dict[str, type[GRPO]] = {kind: each for each in (GRPO, MultiAgentGRPO) for kind in each.kinds}


def own_algorithm(algorithm: type[Agent]) -> str | None:
    """Return what a checkpoint calls an algorithm of the user's own; None for ours."""
    return None if algorithm in _CLASSES.values() else algorithm.__qualname__


def algorithm_class(kind: str, stored: str | None, given: type[Agent] | None = None) -> type[Agent]:
    """Return the class of a stored population's agents; a name in a checkpoint is never imported.

    Args:
        kind: Of their members.
        stored: What the checkpoint calls the algorithm; None = one of ours.
        given: The class, if the caller has one of its own.

    Raises:
        ValueError: If a class of the user's own is needed, or another one was given.
        KeyError: If nothing of ours has members of that kind.
    """
    found = _CLASSES[kind] if given is None and stored is None else given
    if found is None:
        raise ValueError(f"this run's agents are of a class of your own, {stored!r}: give it as algorithm={stored}")
    if own_algorithm(found) != stored or kind not in found.kinds:
        ours = stored or _CLASSES[kind].__name__
        raise ValueError(
            f"this run's agents are of the class {ours!r}, got {found.__qualname__!r}: give algorithm={ours}"
        )
    return found
