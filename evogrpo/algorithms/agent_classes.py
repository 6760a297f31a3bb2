"""Class of the agents of a stored population."""

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.grpo import GRPO
from evogrpo.algorithms.multi_agent import MultiAgentGRPO
from evogrpo.text import shown

# The built-in class of agents of each kind of members.
_CLASSES: dict[str, type[GRPO]] = {
    **dict.fromkeys(GRPO.kinds, GRPO),
    **dict.fromkeys(MultiAgentGRPO.kinds, MultiAgentGRPO),
}


def own_algorithm(algorithm: type[Agent]) -> str | None:
    """Return the name of a user's own algorithm for checkpoints; None for built-in ones."""
    if algorithm in _CLASSES.values():
        return None
    return algorithm.__qualname__


def algorithm_class(kind: str, stored: str | None, given: type[Agent] | None) -> type[Agent]:
    """Return the class of a stored population's agents; a name in a checkpoint is never imported.

    Args:
        kind: Kind of their members.
        stored: Name of the algorithm in the checkpoint; None = built-in.
        given: The user's class; None = the built-in class of this kind.

    Raises:
        ValueError: If the user's class is missing or does not match.
        KeyError: If no built-in class has this kind.
    """
    if given is None and stored is None:
        found: type[Agent] | None = _CLASSES[kind]
    else:
        found = given
    # A class of the user cannot be found by its name, so it must be given.
    if found is None:
        raise ValueError(
            f"The run's agents have a class of your own, {stored!r}. Pass algorithm={stored}."
        )
    if own_algorithm(found) != stored or kind not in found.kinds:
        ours = stored or _CLASSES[kind].__name__
        raise ValueError(
            f"The run's agents have the class {ours!r}, got {shown(found.__qualname__)}. Pass"
            f" algorithm={ours}."
        )
    return found
