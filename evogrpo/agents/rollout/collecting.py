"""Acting in an environment: collecting a learning step's experience, and evaluating on held-out starts."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.members.members import Members
from evogrpo.agents.rollout.refilling import refill
from evogrpo.agents.rollout.rounds import Groups, sample_groups
from evogrpo.agents.rollout.wanted import Collected
from evogrpo.envs.groups import Excluding, GroupEnvironment, Split
from evogrpo.hyperparameters import check_group_size


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
    if refills:
        sampled = refill(members, env, learners, sampled, block=whole, most=refills)
    members.absorb(sampled.observed)
    return sampled


def evaluate(
    members: Members,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    questions: int | None = None,
    base: bool = False,
) -> np.ndarray:
    """Act greedily from held-out starts, all members in one batch; training streams and cursors stay where they are.

    Args:
        members: Who acts.
        slots: Those to evaluate; one entry, of any value, for the base.
        env: Where the questions come from.
        split: "validation" for selection, "test" for the final report.
        questions: Use only the first so many; None = all.
        base: Evaluate the untrained base rather than members.

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
    rewards = members.evaluate(env, split, count, slots, base=base).reshape(len(slots), count)
    missing = int((~np.isfinite(rewards)).sum())
    if missing and not (isinstance(env, Excluding) and env.excludes_failures):
        raise ValueError(
            f"fitness needs a reward for every {split} completion, but none applied to {missing} of {rewards.size}: "
            "let at least one reward function return a number for every question of the held-out splits, or leave out "
            "those that have none (on_reward_error='exclude')"
        )
    return rewards


def commonly_scored(rewards: np.ndarray, split: Split) -> np.ndarray:
    """Return `[members, k]` the rewards for the questions that have one for everybody, so that all are compared alike.

    Raises:
        ValueError: If these are less than half of the questions.
    """
    kept = np.isfinite(rewards).all(0)
    asked, left = len(kept), int(kept.sum())
    if left < asked:
        if 2 * left < asked:
            raise ValueError(
                f"members are compared by the {split} questions that all of them have a reward for, but these are only "
                f"{left} of {asked}: mend the reward function, or let it return a number where it fails"
            )
        warnings.warn(
            f"{asked - left} of {asked} {split} questions are left out: not everybody's completion could be rewarded",
            stacklevel=3,
        )
    return rewards[:, kept]
