"""Exchange of samples between ranks, for members that learn from samples of members on other ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evogrpo.algorithms.learning.training_rows import Learner, uses_sampler_log_probs
from evogrpo.algorithms.policies.placement import Placement
from evogrpo.algorithms.policies.policy_set import Policy, PolicySet
from evogrpo.algorithms.rollout.collect import concatenate_batches, with_unique_groups
from evogrpo.data import Batch, Experience
from evogrpo.functional.loss_types import FULL_KLS
from evogrpo.models.bank import FullDistributionBank


def lent_slots(places: Placement, learners: Sequence[Learner]) -> list[int]:
    """Return the slots whose samples are needed on other ranks.

    Args:
        places: Placement of slots.
        learners: All learners.
    """
    return sorted(
        {
            source
            for learner in learners
            for source in learner.source_slots
            if places.owner(source) != places.owner(learner.slot)
        }
    )


def lend(members: PolicySet, places: Placement, experience: Experience, lent: Sequence[int]) -> dict[str, Batch]:
    """Return the rows that other ranks need, on the CPU, with log-probabilities that only this bank can compute.

    Args:
        members: Members of this rank.
        places: Placement of slots.
        experience: Their samples, with local slots.
        lent: Slots whose samples are needed on other ranks.
    """
    own, slots = [places.place(slot) for slot in places.here(lent)], torch.tensor(places.own)
    found = {}
    for name, batch in experience.items():
        rows = batch.select_members(own)
        if len(rows):
            given = _as_acted(members.policies[name], rows).to("cpu")
            found[name] = replace(given, member_ids=slots[given.member_ids])
    return found


def borrow(
    members: PolicySet,
    places: Placement,
    experience: Experience,
    learners: Sequence[Learner],
    lent: Mapping[int, Mapping[str, Batch]],
) -> dict[str, Batch]:
    """Return the samples that members of this rank learn from, including those of other ranks.

    Rows are in the order of ranks, as if one process had sampled them all.

    Args:
        members: Members of this rank.
        places: Placement of slots.
        experience: Their samples, with local slots.
        learners: Learners of this rank; sources are numbered by `Placement.number`.
        lent: Rows received from other ranks, by rank.
    """
    wanted = {source for learner in learners for source in learner.source_slots}
    numbers = torch.tensor([places.number(slot) for slot in range(places.size)])
    speaker = places.owner(places.own[0]) if places.own else places.rank
    found = {}
    for name in members.policies:
        parts: list[Batch] = []
        for rank in sorted({*lent, speaker}):
            if rank == speaker:
                part = experience.get(name)
            else:
                part = _for_learners(lent[rank].get(name), numbers, wanted, members.device)
            if part is not None and len(part):
                parts.append(part)
        if parts:
            found[name] = concatenate_batches(with_unique_groups(parts))
    return found


def _for_learners(batch: Batch | None, numbers: Tensor, wanted: set[int], device: torch.device) -> Batch | None:
    """Return the rows of another rank that learners of this rank need, numbered by `Placement.number`."""
    if batch is None:
        return None
    here = replace(batch, member_ids=numbers[batch.member_ids])
    return here.select_members(sorted(wanted)).to(device)


def _as_acted(policy: Policy, rows: Batch) -> Batch:
    """Add log-probabilities and distributions of the behaviour policies, if the samples lack them."""
    objective = policy.settings.objective
    if not uses_sampler_log_probs(rows, objective):
        rows = replace(rows, behaviour_log_probs=policy.bank.log_probs(rows))
    if objective.kl_estimator in FULL_KLS and objective.reference == "old":
        assert isinstance(policy.bank, FullDistributionBank)  # others have no such objective
        rows = replace(rows, behaviour_distributions=policy.bank.distributions(rows, reference=False))
    return rows
