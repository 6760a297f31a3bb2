"""Whether a run goes on in the environment that it began in: the same questions, prompts, rewards and arguments."""

from collections.abc import Mapping

from evogrpo.envs.groups import Fingerprinted, GroupEnvironment
from evogrpo.warnings import warn


def fingerprint_of(env: GroupEnvironment) -> dict[str, str] | None:
    """Return what an environment says it is; None where it cannot say."""
    if not isinstance(env, Fingerprinted):
        return None
    return {str(name): str(value) for name, value in env.fingerprint().items()}


def check_same_data(stored: Mapping[str, str] | None, env: GroupEnvironment, *, allowed: bool) -> tuple[str, ...]:
    """Refuse to go on in another environment than the run began in, or say how it differs.

    Args:
        stored: What the environment was when the checkpoint was written; None where that is unknown.
        env: Where the run is to go on.
        allowed: Whether it may differ.

    Returns:
        The differences, in words.

    Raises:
        ValueError: If there are any and they are not allowed.
    """
    found = fingerprint_of(env)
    if stored is None or found is None:
        reason = (
            f"{type(env).__name__} has no fingerprint()" if found is None else "the checkpoint does not say what it was"
        )
        warn(
            f"whether the run goes on with the questions and rewards (or the environment) that it began with is not "
            f"checked: {reason}"
        )
        return ()
    differences = tuple(
        f"{name}: {stored.get(name, 'none')} -> {found.get(name, 'none')}"
        for name in dict.fromkeys((*stored, *found))
        if stored.get(name) != found.get(name)
    )
    if differences and not allowed:
        raise ValueError(
            "a run goes on with the questions, rewards and environment that it began with, because fitness before and "
            f"after could not be compared otherwise, but these differ: {'; '.join(differences)}. Give it what it had, "
            "start a new run, or go on knowingly with --allow-changed-data (in Python: allow_changed_data=True)"
        )
    return differences
