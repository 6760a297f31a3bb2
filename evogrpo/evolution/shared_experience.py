"""Shared experience: members learn from the samples of other members."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import History
from evogrpo.evolution.plan import Plan
from evogrpo.synonyms import unknown_name_error
from evogrpo.validation import REAL, settings

LearnFrom = Literal["all", "better", "leader"]
Samplers = Literal["equal", "rank"]


@settings
class SharedExperience:
    """Members learn from each other's samples, so that each member needs fewer samples of its own.

    A sample of another member enters the loss with the ratio of the learner's policy to the policy that sampled it, at
    the temperature of sampling. Loss, clipping and coefficients are the learner's own. Advantages are relative to the
    group in which it was sampled. A member takes as many optimizer steps as on its own samples alone, on larger
    minibatches. Environment steps are counted once.

    Advantages of other members measure actions under *their* policies, and clipping keeps a member close to the
    policies it learns from. A source is therefore used only while its policy is close to the learner's (`min_ess`).

    Shared experience helps if each member samples little, such as one group per step, and good hyperparameters are
    unknown. Members that learn from all become similar: about as good as one agent with all samples and a reasonable
    learning rate, but not as good as a well-tuned agent. It costs learning time. In the study of unknown
    hyperparameters (docs/results.md), at equal environment steps, it raised the normalised score (1 = solved) of
    narrowing from 0.66 to 0.77 and of the tournament from 0.59 to 0.77. Most of the gain is on Pendulum-v1. There is
    none on LunarLander-v3, and none at equal time.

    Attributes:
        learn_from: Sources of a member besides its own samples: "all" members; "better", those with at least its own
            mean reward in the learning step; or "leader", the one with the highest mean reward. With n members, "all"
            makes learning n times as expensive; sampling costs the same.
        min_ess: Minimum effective sample size of a source for a learner, as a share of the source's actions, in [0, 1).
            1 means equal policies; near 0, few actions carry all the weight. For log-normal weights it is
            exp(-2 KL): 0.5 leaves out sources more than about 0.35 nats per action away. Stricter values did not help:
            0.9 was equal for "all" and worse for "leader", 0.98 was worse. 0 uses every source and saves the pass that
            measures it.
        samplers: Division of samples among members: "equal", or "rank", by which fitter members sample more and the
            worst may sample nothing. The total is the same.

    Raises:
        ValueError: If a value is out of range.

    Source: SEAC (arXiv:2006.07169) for importance ratios between members; SAPG (arXiv:2407.20230) for one leader; Kish,
    Survey Sampling (1965), for the effective sample size.
    """

    learn_from: LearnFrom = "all"
    min_ess: Annotated[float, Field(ge=0, lt=1), REAL] = 0.5
    samplers: Samplers = "equal"

    @staticmethod
    def check_size(members: int) -> None:
        """Raise ValueError for a population of one member."""
        if members < 2:
            raise ValueError(
                f"Shared experience needs at least 2 members, got {members}. Use more, or experience='own'."
            )

    def sources(self, rewards: Mapping[int, float], members: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the slots each member learns from, by slot.

        Args:
            rewards: Mean reward of the samples of each member that sampled, by slot; NaN if it has no reward.
            members: Slots of members that learn, including those that did not sample.

        "better" is not from the literature: advantages of a worse policy's actions show how to improve that policy.
        """
        # If no reward is finite, all are kept, and max chooses any leader.
        finite_rewards = {slot: reward for slot, reward in rewards.items() if reward == reward} or dict(rewards)
        leader = max(finite_rewards, key=lambda slot: (finite_rewards[slot], -slot))
        sources = {}
        for member in members:
            others = {"leader": {leader}, "all": set(rewards)}.get(self.learn_from)
            if others is None:
                own_reward = rewards.get(member, finite_rewards[leader])
                others = {slot for slot, reward in finite_rewards.items() if reward >= own_reward} or {leader}
            sources[member] = tuple(sorted(others | ({member} & set(rewards))))
        return sources


def shared_experience(value: object) -> SharedExperience | None:
    """Return the settings that a value of `experience` stands for; None if members learn from their own samples only.

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
        raise ValueError(f"experience must be 'own', 'shared' or settings of SharedExperience, got {value!r:.80}")
    if value not in ("own", "shared"):
        raise unknown_name_error("value of experience:", value, ("own", "shared"))
    return SharedExperience() if value == "shared" else None


def max_sources(experience: SharedExperience | None, size: int) -> int:
    """Return the maximum number of other members a member learns from."""
    if experience is None:
        return 0
    return min(size - 1, 1) if experience.learn_from == "leader" else size - 1


def samples_by_rank(plan: Plan, history: History) -> Plan:
    """Return a plan in which fitter members sample more, with the same total.

    The shares of n members are proportional to n, n - 1, ..., 1. Whole groups are dealt out one at a time, each to the
    member that is furthest below its share and whose group still fits. A plan with `samples` is returned as it is.

    Args:
        plan: Plan for the next generation. A member ranks by the fitness of the state that it takes.
        history: History with the fitness of these states.
    """
    if plan.samples is not None:
        return plan
    fitness, sizes = _state_fitness(plan, history), _group_sizes(plan, history)
    ranked = sorted(sizes, key=lambda slot: (-fitness[slot], slot))
    total = remaining = len(ranked) * (plan.samples_per_step or history.last.samples_per_step)
    rank_sum = len(ranked) * (len(ranked) + 1) / 2
    deficits = {slot: total * (len(ranked) - rank) / rank_sum for rank, slot in enumerate(ranked)}
    samples = [0] * len(plan.parents)
    while affordable := [slot for slot in ranked if sizes[slot] <= remaining]:
        slot = max(affordable, key=lambda candidate: deficits[candidate])
        samples[slot] += sizes[slot]
        deficits[slot] -= sizes[slot]
        remaining -= sizes[slot]
    return replace(plan, samples=tuple(samples))


def _state_fitness(plan: Plan, history: History) -> list[float]:
    """Return the fitness of the state that each slot takes; -inf for a new one."""
    last = history.last.fitness
    return [-math.inf if parent is None else _mean(last[parent]) for parent in plan.parents]


def _mean(fitness: Fitness | None) -> float:
    return -math.inf if fitness is None else fitness.mean


def _group_sizes(plan: Plan, history: History) -> dict[int, int]:
    """Return the group size of the next member of each occupied slot."""
    children = {child.slot: child.hyperparameters.group_size for child in plan.children}
    parents = {
        slot: history.last.member(parent).hyperparameters.group_size
        for slot, parent in enumerate(plan.parents)
        if parent is not None and slot not in children
    }
    return parents | children
