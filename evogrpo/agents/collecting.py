"""Acting in an environment: collecting a learning step's batch, and evaluating on held-out starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from evogrpo.agents.learning import Learner
from evogrpo.agents.shared import Shared
from evogrpo.envs.groups import GroupEnvironment, Scores, Split
from evogrpo.randomness import generator
from evogrpo.records import Batch, Rollout, Rows, TokenInputs


@dataclass(frozen=True, kw_only=True)
class Collected:
    """One learning step's experience of some members.

    Attributes:
        batch: What they learn from.
        scores: What the environment said, row by row.
        truncated: `[n]` which completions ran out of length.
        tokens: Tokens processed while sampling, by slot.
        starts: Training starts that the rows' prompt numbers point into.
    """

    batch: Batch
    scores: Scores
    truncated: Tensor
    tokens: dict[int, int]
    starts: tuple[int, ...]


def collect(
    shared: Shared, learners: Sequence[Learner], env: GroupEnvironment, *, samples_per_step: int, block: int
) -> Collected:
    """Let every member answer its share of the step's questions, all in one batch.

    Each member spends `samples_per_step` completions: `samples_per_step / group_size` groups, on a prefix of the
    step's block of starts. Row r, token t of member i is drawn with number `[r, t]` of the stream
    (seed, "sample", step, index), so nobody's draws depend on who else is in the batch.

    Args:
        shared: The bank and its settings.
        learners: Members, all at the same learning step.
        env: Where to act.
        samples_per_step: Completions per member; every group size divides it.
        block: Length of the step's block of starts, the same for all members of a run.

    Raises:
        ValueError: If a group size does not divide `samples_per_step`.
    """
    step = learners[0].step
    for learner in learners:
        if samples_per_step % learner.hyperparameters.group_size:
            raise ValueError(
                f"group_size must divide samples_per_step = {samples_per_step}, so that every member spends the same; "
                f"got {learner.hyperparameters.group_size} (member {learner.index})"
            )
    groups = [samples_per_step // learner.hyperparameters.group_size for learner in learners]
    starts = env.deal(step, max(groups), block)
    episodes = env.open("train", starts)
    prompt_ids = torch.cat([torch.arange(n).repeat_interleave(samples_per_step // n) for n in groups])
    group_ids = torch.cat(
        [
            number * max(groups) + torch.arange(n).repeat_interleave(samples_per_step // n)
            for number, n in enumerate(groups)
        ]
    )
    rows = _rows(shared, learners, [tuple(map(int, p)) for p in episodes.prompts], prompt_ids, samples_per_step)
    rollout = shared.bank.sample(rows)
    scores = episodes.score(prompt_ids.tolist(), _completions(rollout))
    device = rollout.actions.device
    mask = rollout.present
    if shared.settings.objective.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]
    batch = Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=prompt_ids.to(device),
            temperature=rows.temperature.to(device),
            min_new_tokens=rows.min_new_tokens,
        ),
        actions=rollout.actions,
        present=rollout.present,
        action_mask=mask,
        rewards=torch.from_numpy(scores.rewards).float().to(device),
        group_ids=group_ids.to(device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
    )
    return Collected(
        batch=batch, scores=scores, truncated=rollout.truncated, tokens=shared.bank.cost(batch), starts=starts
    )


def evaluate(
    shared: Shared,
    slots: Sequence[int],
    env: GroupEnvironment,
    split: Split,
    *,
    questions: int | None = None,
    reference: bool = False,
) -> np.ndarray:
    """Answer held-out questions greedily, all members in one batch; training streams and cursors stay where they are.

    Args:
        shared: The bank and its settings.
        slots: Members to evaluate; one entry, of any value, for the reference.
        env: Where the questions come from.
        split: "validation" for selection, "test" for the final report.
        questions: Use only the first so many; None = all.
        reference: Evaluate the reference policy rather than members.

    Returns:
        `[members, questions]` raw task rewards, float64.

    Raises:
        ValueError: If the split is empty, or the environment says that no reward applies to a completion.
    """
    available = env.size(split)
    count = available if questions is None else min(questions, available)
    if count < 1:
        raise ValueError(f"the {split} split holds no questions, so nothing can be evaluated on it")
    episodes = env.open(split, range(count))
    prompt_ids = torch.arange(count).repeat(len(slots))
    rows = Rows(
        prompts=tuple(tuple(map(int, prompt)) for prompt in episodes.prompts),
        prompt_ids=prompt_ids,
        member_ids=torch.tensor(list(slots)).repeat_interleave(count),
        temperature=torch.zeros(len(prompt_ids)),
        uniforms=torch.zeros(len(prompt_ids), shared.settings.max_output_tokens),
        min_new_tokens=shared.settings.min_output_tokens,
    )
    rollout = shared.bank.sample(rows, reference=reference)
    rewards = episodes.score(prompt_ids.tolist(), _completions(rollout)).rewards.reshape(len(slots), count)
    if not np.isfinite(rewards).all():
        missing = int((~np.isfinite(rewards)).sum())
        raise ValueError(
            f"fitness needs a reward for every {split} completion, but none applied to {missing} of {rewards.size}: "
            "let at least one reward function return a number for every question of the held-out splits "
            "(on_reward_error='exclude' leaves completions out of training only)"
        )
    return rewards


def _rows(
    shared: Shared,
    learners: Sequence[Learner],
    prompts: "list[tuple[int, ...]]",
    prompt_ids: Tensor,
    samples: int,
) -> Rows:
    settings = shared.settings
    shape = (samples, settings.max_output_tokens)
    draws = [
        generator(settings.seed, "sample", learner.step, learner.index).random(shape, dtype=np.float32)
        for learner in learners
    ]
    temperature = torch.tensor([learner.hyperparameters.temperature for learner in learners])
    return Rows(
        prompts=tuple(prompts),
        prompt_ids=prompt_ids,
        member_ids=torch.tensor([learner.slot for learner in learners]).repeat_interleave(samples),
        temperature=temperature.repeat_interleave(samples),
        uniforms=torch.from_numpy(np.concatenate(draws)),
        min_new_tokens=settings.min_output_tokens,
    )


def _completions(rollout: Rollout) -> "list[list[int]]":
    lengths = rollout.present.sum(1).tolist()
    return [row[:length] for row, length in zip(rollout.actions.tolist(), lengths, strict=True)]
