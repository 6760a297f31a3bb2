"""Acting in an environment: collecting a learning step's experience, and evaluating on held-out starts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.members.members import Members
from evogrpo.agents.rollout.assessing import answered, commonly_answered
from evogrpo.agents.rollout.refilling import refill
from evogrpo.agents.rollout.rounds import Groups, sample_groups
from evogrpo.agents.rollout.wanted import Asked, Collected
from evogrpo.config.search_space import check_group_size
from evogrpo.envs.groups import GroupEnvironment, Split


def check_groups(env: object) -> None:
    """Refuse with a ValueError what deals no starts, such as a plain environment of Gymnasium."""
    if not hasattr(env, "deal"):
        raise ValueError(
            f"members learn from groups of episodes, got {type(env).__name__}: give evogrpo.GymnasiumGroups(...) of "
            "the environment's id or of a function that makes it, or evogrpo.HuggingFaceGym(...)"
        )


def collect(
    members: Members,
    learners: Sequence[Learner],
    env: GroupEnvironment,
    *,
    samples_per_step: int,
    block: int,
    samples: Mapping[int, int] | None = None,
) -> Collected:
    """Let every member act from its share of the step's starts, all in one batch.

    Each member spends `samples_per_step` completions (or episodes): `samples_per_step / group_size` groups, on a prefix
    of the step's block of starts. With `Objective.dynamic_sampling` the block is longer, and groups that teach nothing
    are replaced by groups on the starts that follow; see `refilling.refill`.

    Args:
        members: Who acts.
        learners: Those of them that do, all at the same learning step.
        env: Where to act.
        samples_per_step: Completions per member; every group size divides it.
        block: Most questions that any member asks at first, the same for all steps and members of a run.
        samples: By slot, how many completions a member spends instead.

    Raises:
        ValueError: If a group size does not divide a member's number of completions.
    """
    counts = {learner.slot: (samples or {}).get(learner.slot, samples_per_step) for learner in learners}
    for learner in learners:
        check_group_size(learner.hyperparameters.group_size, counts[learner.slot], whose=f"member {learner.index}")
    refills = members.settings.objective.dynamic_sampling
    whole = block * (1 + refills)
    groups = [
        Groups(learner=learner, first=0, count=counts[learner.slot] // learner.hyperparameters.group_size)
        for learner in learners
    ]
    sampled = sample_groups(members, env, groups, block=whole, purpose="sample")
    earned = sampled.by_start()
    if refills:
        sampled = refill(members, env, learners, sampled, block=whole, most=refills)
    members.absorb(sampled.observed)
    return replace(sampled, earned=earned)


def evaluate(
    members: Members,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    questions: int | None = None,
    base: bool = False,
    answers: int | None = None,
) -> np.ndarray:
    """Answer held-out questions, all members in one batch; training streams and cursors stay where they are.

    Args:
        members: Who acts.
        slots: Those to evaluate; one entry, of any value, for the base.
        env: Where the questions come from.
        split: "validation" for selection, "test" for the final report.
        questions: Use only the first so many; None = all.
        base: Evaluate the untrained base rather than members.
        answers: How many answers to each question are sampled, and averaged; None = one greedy answer.

    Returns:
        `[members, questions]` raw task rewards, float64; NaN where the environment leaves a completion out.

    Raises:
        ValueError: If the split is empty, or no reward applies to a completion and the environment is not to leave such
            ones out.
    """
    available = env.size(split)
    count = available if questions is None else min(questions, available)
    if count < 1:
        raise ValueError(f"the {split} split holds no questions, so nothing can be evaluated on it")
    asked = Asked(split=split, questions=tuple(range(count)), slots=tuple(slots), base=base, answers=answers)
    return answered(members, env, asked)[0]


def commonly_scored(rewards: np.ndarray, split: Split) -> np.ndarray:
    """Return `[members, k]` the rewards for the questions that have one for everybody; see `commonly_answered`."""
    return rewards[:, commonly_answered(rewards, np.ones(rewards.shape, dtype=np.bool_), split)]
