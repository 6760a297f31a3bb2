"""Members of a run that learn from each other's samples: whether they can, and who learns from whom in a step."""

from collections.abc import Mapping

import numpy as np

from evogrpo.agents.population import Population
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.evolution.shared_experience import SharedExperience


def check_shared(population: Population) -> None:
    """Refuse members that cannot learn from each other's samples.

    Raises:
        ValueError: If there is one member only, members see observations each in its own way, or their
            algorithm has a learning rule of its own.
    """
    SharedExperience.check_size(len(population))
    remedy = "give experience='own'"
    if getattr(population.members.settings, "normalise_observations", False):
        raise ValueError(
            "shared experience needs members that see alike, but with normalise_observations=True each sees by the "
            f"running statistics of its own episodes: leave that out, or {remedy}"
        )
    if "objective" in population.algorithm.unused_options:
        own = population.algorithm.__name__
        raise ValueError(
            f"shared experience is learnt from by GRPO's ratio to the policy that acted, but {own} has a learning rule "
            f"of its own: {remedy}"
        )


def sources_of(
    experience: SharedExperience, population: Population, collected: Collected
) -> Mapping[int, tuple[int, ...]]:
    """Return from whose samples each healthy member learns, by slot."""
    rewards, acted = collected.scores.rewards, collected.member_ids.numpy()
    return experience.sources(
        {int(slot): _mean(rewards[acted == slot]) for slot in np.unique(acted)},
        [agent.slot for agent in population.healthy],
    )


def _mean(rewards: np.ndarray) -> float:
    """Return the mean of the rewards that apply; NaN where none does."""
    known = rewards[~np.isnan(rewards)]
    return float(known.mean()) if len(known) else float("nan")
