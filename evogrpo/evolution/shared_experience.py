"""Shared experience: members learn from the samples of other members."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from evogrpo.config.checks import finite_number, names_unknown, refuse_unknown, unknown_name_error
from evogrpo.evolution.fitness import Fitness
from evogrpo.evolution.history import History
from evogrpo.evolution.plan import Plan

LearnFrom = Literal["all", "better", "leader"]
Samplers = Literal["equal", "rank"]


@names_unknown
@dataclass(frozen=True, kw_only=True)
class SharedExperience:
    """Members learn from each other's samples, so that a population needs fewer of each.

    A row is learnt from by the ratio of the learner's policy to the policy that acted, at the temperature that it was
    sampled at and under the learner's own loss, clip and coefficients; it is compared within the group that it was
    sampled in. A member takes as many optimizer steps as it would on its own samples: what it learns from others makes
    each of them larger. Steps in the environment are those played, whoever learns from them.

    Others' advantages say what was good to do under *their* policies, and the clip holds a member to the policies it
    learns from. So a source counts only while its samples are such as the member could have taken itself.

    It pays where each member samples little, such as one group a step, and nobody knows the hyperparameters: members
    that learn from all come out alike, about as good as one agent with all of the samples and a fair learning rate. It
    does not find what a well-tuned agent finds, and costs learning time. In the study of unknown hyperparameters
    (docs/results.md) it lifted narrowing from 0.66 to 0.77 of what counts as solved, and the tournament from 0.59 to
    0.77, at equal steps in the environment, most of it on Pendulum-v1; not on LunarLander-v3, and not at equal time.

    Attributes:
        learn_from: Whose samples a member learns from beside its own: those of "all"; of all that earned no less than
            its own in the learning step ("better"); or of the one that earned most ("leader"). With n members "all"
            makes learning n times as much work, sampling no more.
        min_ess: What the effective sample size of a source must be for a member that learns from it, as a share of
            the source's actions, in [0, 1): 1 where both have the same policy, near 0 where few actions carry all the
            weight. Where weights are close to log-normal it is exp(-2 KL): 0.5 leaves out sources that are further
            than some 0.35 nats an action away. It is a safety net, as stricter ones did not pay: 0.9 was as good for
            "all" and worse for "leader", 0.98 worse. 0 lets every source count and saves the pass that measures it.
        samplers: Who samples how much: all members alike ("equal"), or better members more and the worst perhaps
            nothing ("rank"), by fitness. As many in all.

    Raises:
        ValueError: If a value is out of range.

    Source: SEAC (arXiv:2006.07169) for learning from others by importance ratios; SAPG (arXiv:2407.20230) for one
    member that leads; Kish, Survey Sampling (1965), for the effective sample size.
    """

    learn_from: LearnFrom = "all"
    min_ess: float = 0.5
    samplers: Samplers = "equal"

    def __post_init__(self) -> None:
        for name, kind in (("learn_from", LearnFrom), ("samplers", Samplers)):
            if getattr(self, name) not in get_args(kind):
                raise unknown_name_error(f"value of {name}:", getattr(self, name), get_args(kind))
        object.__setattr__(self, "min_ess", finite_number("min_ess", self.min_ess))
        if not 0 <= self.min_ess < 1:
            raise ValueError(
                f"min_ess must lie in [0, 1), got {self.min_ess:g}: 0 lets every source count, and only a source "
                "with the very same policy has 1"
            )

    @staticmethod
    def check_size(members: int) -> None:
        """Refuse a population in which there is nobody to learn from.

        Raises:
            ValueError: If there is one member only.
        """
        if members < 2:
            raise ValueError(
                f"shared experience is for at least 2 members, got {members}: take more, or give experience='own'"
            )

    def sources(self, rewards: Mapping[int, float], members: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return the slots each member learns from, by slot.

        Args:
            rewards: The mean reward of the samples of each member that sampled, by slot; NaN = none applied.
            members: Slots of those who learn, whether they sampled or not.

        Source: of "better", nothing published: the advantage of a worse policy's action says what improves that one.
        """
        known = {slot: reward for slot, reward in rewards.items() if reward == reward} or dict(rewards)
        leader = max(known, key=lambda slot: (known[slot], -slot))
        chosen = {}
        for member in members:
            others = {"leader": {leader}, "all": set(rewards)}.get(self.learn_from)
            if others is None:
                own = rewards.get(member, known[leader])
                others = {slot for slot, reward in known.items() if reward >= own} or {leader}
            chosen[member] = tuple(sorted(others | ({member} & set(rewards))))
        return chosen

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return asdict(self)


def shared_experience(value: object) -> SharedExperience | None:
    """Return what `experience` stands for: None where every member learns from its own samples alone.

    Args:
        value: "own", "shared" for the defaults of `SharedExperience`, its settings as a mapping, or one of it.

    Raises:
        ValueError: If it is something else, or a setting is unknown or out of range.
    """
    if value is None or isinstance(value, SharedExperience):
        return value
    if isinstance(value, Mapping):
        refuse_unknown("setting of experience", value, SharedExperience.__dataclass_fields__)
        return SharedExperience(**value)
    if not isinstance(value, str):
        raise ValueError(f"experience must be 'own', 'shared' or the settings of the latter, got {value!r:.80}")
    if value not in ("own", "shared"):
        raise unknown_name_error("value of experience:", value, ("own", "shared"))
    return SharedExperience() if value == "shared" else None


def max_sources(experience: SharedExperience | None, size: int) -> int:
    """Return the maximum number of other members a member learns from."""
    if experience is None:
        return 0
    return min(size - 1, 1) if experience.learn_from == "leader" else size - 1


def samples_by_rank(plan: Plan, history: History) -> Plan:
    """Return a plan in which better members sample more, as many in all; one that says who samples stays as it is.

    Of n members the best is to sample n parts of all samples, the next n - 1 and the last one part. Groups are dealt
    out whole, each to the member that lacks most of its part and whose group still fits.

    Args:
        plan: What is planned; a member stands where the state that it takes stood.
        history: With their fitness.
    """
    if plan.samples is not None:
        return plan
    standing, sizes = _standing(plan, history), _group_sizes(plan, history)
    ranked = sorted(sizes, key=lambda slot: (-standing[slot], slot))
    whole = left = len(ranked) * (plan.samples_per_step or history.last.samples_per_step)
    parts = len(ranked) * (len(ranked) + 1) / 2
    lacks = {slot: whole * (len(ranked) - rank) / parts for rank, slot in enumerate(ranked)}
    samples = [0] * len(plan.parents)
    while fitting := [slot for slot in ranked if sizes[slot] <= left]:
        slot = max(fitting, key=lambda each: lacks[each])
        samples[slot] += sizes[slot]
        lacks[slot] -= sizes[slot]
        left -= sizes[slot]
    return replace(plan, samples=tuple(samples))


def _standing(plan: Plan, history: History) -> list[float]:
    """Return the fitness of the state that each slot takes; -inf where it is a fresh one."""
    last = history.last.fitness
    found = [-math.inf if parent is None else _mean(last[parent]) for parent in plan.parents]
    for child in plan.children:
        if child.parent is not None and child.back_to is not None:
            found[child.slot] = history.find_kept_state((child.parent, child.back_to)).fitness.mean
    return found


def _mean(fitness: Fitness | None) -> float:
    return -math.inf if fitness is None else fitness.mean


def _group_sizes(plan: Plan, history: History) -> dict[int, int]:
    """Return the group size of the next member of each occupied slot."""
    born = {child.slot: child.hyperparameters.group_size for child in plan.children}
    kept = {
        slot: history.last.member(parent).hyperparameters.group_size
        for slot, parent in enumerate(plan.parents)
        if parent is not None and slot not in born
    }
    return kept | born
