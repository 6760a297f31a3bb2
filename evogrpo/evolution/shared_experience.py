"""Shared experience: members learn from the samples of other members."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from evogrpo.synonyms import unknown_name_error
from evogrpo.validation import REAL, settings


@settings
class SharedExperience:
    """Members learn from the samples of all members, so that each member needs fewer samples of its own.

    A sample of another member enters the loss with the ratio of the learner's policy to the policy that sampled it, at
    the temperature of sampling. Loss, clipping and coefficients are the learner's own. Advantages are relative to the
    group in which it was sampled. A member takes as many optimizer steps as on its own samples alone, on larger
    minibatches. Environment steps are counted once. Members sample on different starts, so that a step covers as many
    as one agent with all samples would.

    Advantages of other members measure actions under *their* policies, and clipping keeps a member close to the
    policies it learns from. A source is therefore used only while its policy is close to the learner's (`min_ess`).

    With n members, learning costs n times as much and sampling the same. Members become similar, and each is about as
    good as one agent with all samples and average hyperparameters. Their training rewards therefore hardly differ;
    `FitnessConfig` describes how members are compared on the same samples.

    Attributes:
        min_ess: Minimum effective sample size of a source for a learner, as a share of the source's actions, in [0, 1).
            1 means equal policies; near 0, few actions carry all the weight. For log-normal weights it is
            exp(-2 KL): 0.5 leaves out sources more than about 0.35 nats per action away. A member without any source
            has failed. 0 uses every source and saves the pass that measures it.

    Raises:
        ValueError: If a value is out of range.

    Source: SEAC (arXiv:2006.07169) for importance ratios between members; Kish, Survey Sampling (1965), for the
    effective sample size.
    """

    min_ess: Annotated[float, Field(ge=0, lt=1), REAL] = 0.5

    @staticmethod
    def check_size(members: int) -> None:
        """Raise ValueError for a population of one member."""
        if members < 2:
            raise ValueError(
                f"Shared experience needs at least 2 members, got {members}. Use more, or experience='own'."
            )


def shared_experience(value: object) -> SharedExperience | None:
    """Return the settings for a value of `experience`; None if members learn from their own samples only.

    Args:
        value: "own", "shared" for the defaults, a mapping of settings, or a `SharedExperience`.

    Raises:
        ValueError: If it is none of these, or a setting is unknown or out of range.
    """
    if value is None or isinstance(value, SharedExperience):
        return value
    if isinstance(value, Mapping):
        return SharedExperience(**value)
    if not isinstance(value, str):
        raise ValueError(f"experience must be 'own', 'shared' or settings of SharedExperience, got {value!r:.80}.")
    if value not in ("own", "shared"):
        raise unknown_name_error("value of experience:", value, ("own", "shared"))
    return SharedExperience() if value == "shared" else None
