"""Members that several ranks share: each rank holds a copy and does part of the work."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evogrpo.algorithms.policies.language import LanguagePolicySet
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.rollout.collect import concatenate_batches, merge_ranks, with_unique_groups
from evogrpo.algorithms.rollout.requests import EvaluationRequest, EvaluationResult, RolloutBatch, SamplingRequest
from evogrpo.data import Batch
from evogrpo.distributed import Processes
from evogrpo.envs.protocol import GroupEnvironment
from evogrpo.models.bank import LossFunction, PolicyVersion
from evogrpo.models.language.forward import ForwardPasses, MicroBatch

Scores = tuple[Tensor, Tensor]
"""Log-probabilities and entropies `[k, t]` of a micro-batch, on the CPU."""


class _Share(NamedTuple):
    """Results of one rank's micro-batches.

    Attributes:
        scores: By the number of the micro-batch.
        losses: By slot.
        short: Message of an out-of-memory error; None = no error.
    """

    scores: dict[int, Scores]
    losses: Mapping[int, float]
    short: str | None


class ReplicatedPasses(ForwardPasses):
    """Divides scoring and gradients of the same members among ranks.

    All ranks call with the same batch, plan the same micro-batches and compute them round robin. Results are bit-equal
    on all ranks, because gradients are summed in rank order.

    Args:
        passes: Passes of a single rank.
        squad: The ranks that share the work.
    """

    def __init__(self, passes: ForwardPasses, squad: Processes) -> None:
        super().__init__(
            passes.model,
            passes.weights,
            passes.end_ids,
            micro_batch_tokens=passes.micro_batch_tokens,
            logits_rows=passes.logits_rows,
        )
        self._squad = squad

    def _scored(self, batch: Batch, parts: Sequence[MicroBatch], policy: PolicyVersion) -> Iterator[Scores]:
        """Yield the scores of every micro-batch, each computed on one rank."""

        def share() -> _Share:
            found: dict[int, Scores] = {}
            try:
                for number in self._own(parts):
                    found[number] = _kept(self._forward(batch, parts[number], policy))
            except torch.OutOfMemoryError as error:
                return _Share({}, {}, str(error))
            return _Share(found, {}, None)

        scores = _all_scores(self._squad.run_section(share))
        yield from (scores[number] for number in range(len(parts)))

    def gradients(
        self, batch: Batch, slots: Sequence[int], loss_fn: LossFunction, scores: Scores, *, entropy_gradient: bool
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield each member's slot, gradient `[k]` and loss, summed over all ranks; write the scores of all ranks."""
        parts = self._plan_update(batch, slots)
        gradients = {slot: self.weights.new_gradient() for slot in slots}
        found = self._squad.run_section(lambda: self._share(batch, parts, loss_fn, scores, entropy_gradient, gradients))
        for number, own in _all_scores(found).items():
            for values, part in zip(scores, own, strict=True):
                values[parts[number].rows] = part.to(values.device)
        for slot in slots:
            yield slot, self._squad.all_reduce(gradients.pop(slot)), sum(share.losses[slot] for share in found)

    def _own(self, parts: Sequence[MicroBatch]) -> range:
        """Return the numbers of this rank's micro-batches."""
        return range(self._squad.rank, len(parts), self._squad.size)

    def _share(
        self,
        batch: Batch,
        parts: Sequence[MicroBatch],
        loss_fn: LossFunction,
        scores: Scores,
        entropy_gradient: bool,
        gradients: dict[int, Tensor],
    ) -> _Share:
        """Add the gradients of this rank's micro-batches."""
        losses = dict.fromkeys(gradients, 0.0)
        for slot, gradient in gradients.items():
            self.weights.gather_gradient(slot, gradient)
        try:
            for number in self._own(parts):
                self._backward(batch, parts[number], loss_fn, scores, entropy_gradient, losses, gradients)
        except torch.OutOfMemoryError as error:
            return _Share({}, losses, str(error))
        finally:
            for slot in gradients:
                self.weights.gather_gradient(slot, None)
        log_probs, entropies = scores
        own = {number: parts[number].rows for number in self._own(parts)}
        return _Share({number: _kept((log_probs[rows], entropies[rows])) for number, rows in own.items()}, losses, None)


def _kept(scores: Scores) -> Scores:
    log_probs, entropies = scores
    return log_probs.detach().cpu(), entropies.detach().cpu()


def _all_scores(shares: Sequence[_Share]) -> dict[int, Scores]:
    """Merge the scores of all ranks.

    Raises:
        torch.OutOfMemoryError: On all ranks, if memory ran out on any.
    """
    for share in shares:
        if share.short is not None:
            raise torch.OutOfMemoryError(share.short)
    return {number: scores for share in shares for number, scores in share.scores.items()}


class ReplicatedPolicySet:
    """Policy set that several ranks hold; see `evogrpo.algorithms.policies.policy_set.PolicySet`.

    All ranks call the same methods. Each rank samples and rewards whole groups, and evaluates part of the held-out
    questions; results are shared and learning is replicated.

    Args:
        local: Members of this rank.
        squad: The ranks that hold the same members at first.

    Attributes:
        shares_learning: True if ranks also divide learning.
    """

    shares_learning: ClassVar[bool] = False

    def __init__(self, local: PolicySet, squad: Processes) -> None:
        self._local, self._squad = local, squad

    def regroup(self, squad: Processes) -> None:
        """Set the ranks that share the work. Collective."""
        self._squad = squad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def sample(self, env: GroupEnvironment, starts: Sequence[int], wanted: SamplingRequest) -> RolloutBatch:
        """Sample whole groups on each rank, and merge."""
        if self._squad.size == 1:
            return self._local.sample(env, starts, wanted)
        own = _groups_dealt(wanted.group_ids, self._squad.size)[self._squad.rank]

        def share() -> RolloutBatch | None:
            return _moved(self._local.sample(env, starts, wanted, own), "cpu") if len(own) else None

        parts = [part for part in self._squad.run_section(share) if part is not None]
        rows = {name: [each.experience[name] for each in parts if name in each.experience] for name in self.policies}
        experience = {
            name: concatenate_batches(with_unique_groups(batches)) for name, batches in rows.items() if batches
        }
        observed = tuple(each for part in parts for each in part.observed)
        return _moved(replace(merge_ranks(parts), experience=experience, observed=observed), self._local.device)

    def evaluate(self, env: GroupEnvironment, asked: EvaluationRequest) -> EvaluationResult:
        """Evaluate part of the questions on each rank; the base is not divided."""
        if asked.base or self._squad.size == 1:
            return self._local.evaluate(env, asked)
        return evaluate_split(self._local, self._squad, env, asked)


class ReplicatedLanguagePolicySet(ReplicatedPolicySet):
    """Language models that several ranks hold, with micro-batches divided among them.

    All ranks take the same optimizer steps. Small networks are not divided: exchanging gradients would take longer than
    a step.

    Args:
        local: Members of this rank.
        squad: The ranks that hold the same members at first.
    """

    shares_learning = True

    def __init__(self, local: LanguagePolicySet, squad: Processes) -> None:
        self._bank, self._alone = local.bank, local.bank.passes
        super().__init__(local, Processes())
        self.regroup(squad)

    def regroup(self, squad: Processes) -> None:
        """Set the ranks that share the work. Collective."""
        if squad is self._squad:
            return
        super().regroup(squad)
        # All ranks must plan the same micro-batches, but memory may have run out on one only.
        self._alone.micro_batch_tokens = min(squad.all_gather(self._bank.micro_batch_tokens))
        self._bank.passes = self._alone if squad.size == 1 else ReplicatedPasses(self._alone, squad)


def evaluate_split(
    members: PolicySet, processes: Processes, env: GroupEnvironment, asked: EvaluationRequest
) -> EvaluationResult:
    """Evaluate one member that all ranks hold, each rank on part of the questions."""
    parts = np.array_split(np.asarray(asked.questions), processes.size)
    own = tuple(parts[processes.rank].tolist())
    found = processes.run_section(lambda: members.evaluate(env, replace(asked, questions=own)) if own else None)
    answers = [part for part in found if part is not None]
    return EvaluationResult(
        rewards=np.concatenate([part.rewards for part in answers]),
        tokens=(sum(part.tokens[0] for part in answers),),
    )


def _groups_dealt(group_ids: Tensor, parts: int) -> list[Tensor]:
    """Split rows in order into parts of whole groups."""
    ends = group_ids.unique_consecutive(return_counts=True)[1].cumsum(0)
    shares = np.array_split(np.asarray([0, *ends.tolist()])[1:], parts)
    bounds = [0]
    for share in shares:
        bounds.append(int(share[-1]) if len(share) else bounds[-1])
    return [torch.arange(begin, end) for begin, end in pairwise(bounds)]


def _moved(collected: RolloutBatch, device: torch.device | str) -> RolloutBatch:
    """Move a rollout to a device."""
    experience = {policy: batch.to(device) for policy, batch in collected.experience.items()}
    return replace(collected, experience=experience, truncated=collected.truncated.to(device))
