"""Acting in an environment: collecting a learning step's batch, and evaluating on held-out starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.members.shared import Shared
from evogrpo.agents.rollout.groups import Groups, sample_groups
from evogrpo.agents.rollout.refilling import refill
from evogrpo.envs.groups import GroupEnvironment, Scores, Split
from evogrpo.records import Batch


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One learning step's experience of some members.

    Attributes:
        batch: What they learn from.
        scores: What the environment said, row by row, without any penalty; step rewards are in the batch alone.
        truncated: `[n]` which completions ran out of length, or which episodes were cut off.
        tokens: Tokens (or environment steps) processed, by slot; groups that were sampled and discarded included.
        starts: Training starts that the rows' prompt numbers point into.
        questions: What these starts ask, in words for people; untrusted text. Empty where they ask nothing.
    """

    batch: Batch
    scores: Scores
    truncated: Tensor
    tokens: dict[int, int]
    starts: tuple[int, ...]
    questions: tuple[str, ...] = ()


def check_groups(env: object) -> None:
    """Refuse with a ValueError what deals no starts, such as a plain environment of Gymnasium."""
    if not hasattr(env, "deal"):
        raise ValueError(
            f"members learn from groups of episodes, got {type(env).__name__}: give evogrpo.GymnasiumGroups(...) of "
            "the environment's id or of a function that makes it, or evogrpo.HuggingFaceGym(...)"
        )


def collect(
    shared: Shared, learners: Sequence[Learner], env: GroupEnvironment, *, samples_per_step: int, block: int
) -> Collected:
    """Let every member act from its share of the step's starts, all in one batch.

    Each member spends `samples_per_step` completions (or episodes): `samples_per_step / group_size` groups, on a prefix
    of the step's block of starts. With `Objective.dynamic_sampling` the block is longer, and groups that teach nothing
    are replaced by groups on the starts that follow; see `refilling.refill`.

    Args:
        shared: The bank and its settings.
        learners: Members, all at the same learning step.
        env: Where to act.
        samples_per_step: Completions per member; every group size divides it.
        block: Most questions that any member asks at first, the same for all steps and members of a run.

    Raises:
        ValueError: If a group size does not divide `samples_per_step`.
    """
    for learner in learners:
        if samples_per_step % learner.hyperparameters.group_size:
            raise ValueError(
                f"group_size must divide samples_per_step = {samples_per_step}, so that every member spends the same; "
                f"got {learner.hyperparameters.group_size} (member {learner.index})"
            )
    refills = shared.settings.objective.dynamic_sampling
    whole = block * (1 + refills)
    groups = [
        Groups(learner=learner, first=0, count=samples_per_step // learner.hyperparameters.group_size)
        for learner in learners
    ]
    sampled = sample_groups(shared, env, groups, block=whole, purpose="sample")
    if refills:
        sampled = refill(shared, env, learners, sampled, block=whole, most=refills)
    shared.play.absorb(sampled.observed)
    assert sampled.batch.truncated is not None  # the sampler knows
    return Collected(
        batch=sampled.batch,
        scores=sampled.scores,
        truncated=sampled.batch.truncated,
        tokens=sampled.tokens,
        starts=sampled.starts,
        questions=sampled.questions,
    )


def evaluate(
    shared: Shared,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    questions: int | None = None,
    base: bool = False,
) -> np.ndarray:
    """Act greedily from held-out starts, all members in one batch; training streams and cursors stay where they are.

    Args:
        shared: The bank and its settings.
        slots: Members to evaluate; one entry, of any value, for the base.
        env: Where the questions come from.
        split: "validation" for selection, "test" for the final report.
        questions: Use only the first so many; None = all.
        base: Evaluate the untrained base rather than members.

    Returns:
        `[members, questions]` raw task rewards, float64.

    Raises:
        ValueError: If the split is empty, or the environment says that no reward applies to a completion.
    """
    available = env.size(split)
    count = available if questions is None else min(questions, available)
    if count < 1:
        raise ValueError(f"the {split} split holds no questions, so nothing can be evaluated on it")
    rewards = shared.play.evaluate(env, split, count, slots, base=base).reshape(len(slots), count)
    if not np.isfinite(rewards).all():
        missing = int((~np.isfinite(rewards)).sum())
        raise ValueError(
            f"fitness needs a reward for every {split} completion, but none applied to {missing} of {rewards.size}: "
            "let at least one reward function return a number for every question of the held-out splits "
            "(on_reward_error='exclude' leaves completions out of training only)"
        )
    return rewards
