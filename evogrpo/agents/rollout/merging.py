"""Samples of one learning step that several processes have taken, put together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from evogrpo.agents.rollout.wanted import Collected
from evogrpo.envs.groups import Scores


def merged(parts: Sequence[Collected]) -> Collected:
    """Return what all processes sampled in a learning step, but for the experience, which stays where it is.

    Args:
        parts: Of processes in order of their slots, at least one; of one slot in order of its rows.
    """
    slots = dict.fromkeys(slot for part in parts for slot in part.tokens)
    longest = max(parts, key=lambda part: len(part.starts))
    return Collected(
        experience={},
        scores=_scores([part.scores for part in parts]),
        member_ids=torch.cat([part.member_ids for part in parts]),
        start_ids=torch.cat([part.start_ids for part in parts]),
        truncated=torch.cat([part.truncated.cpu() for part in parts]),
        tokens={slot: sum(part.tokens.get(slot, 0) for part in parts) for slot in slots},
        starts=longest.starts,
        questions=longest.questions,
        earned={slot: groups for part in parts for slot, groups in part.earned.items()},
    )


def _scores(parts: Sequence[Scores]) -> Scores:
    first = parts[0]
    counts = [len(part.rewards) for part in parts]
    names = [name for name in first.metrics if all(name in part.metrics for part in parts)]
    return replace(
        first,
        rewards=np.concatenate([part.rewards for part in parts]),
        components={name: np.concatenate([part.components[name] for part in parts]) for name in first.components},
        completions=tuple(text for part in parts for text in part.completions),
        columns={
            name: tuple(value for part in parts for value in part.columns[name])
            for name in first.columns
            if all(name in part.columns for part in parts)
        },
        metrics={name: float(np.average([part.metrics[name] for part in parts], weights=counts)) for name in names},
    )
