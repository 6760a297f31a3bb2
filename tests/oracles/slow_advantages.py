"""Every advantage estimator in Python floats, one completion and one action at a time."""

import math
import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample deviation."""
    if len(values) > 1 and len(set(values)) > 1:
        deviation = statistics.stdev(values)
    else:
        deviation = 0.0
    return statistics.fmean(values), deviation


def of_completions(
    kind: str, rewards: Sequence[float], groups: Sequence[int], members: Sequence[int], eps: float
) -> list[float]:
    """Return one advantage per completion."""
    result = []
    for reward, group, member in zip(rewards, groups, members, strict=True):
        if kind == "reinforce":
            result.append(0.0 if math.isnan(reward) else reward)
            continue
        peers = [
            r for r, g in zip(rewards, groups, strict=True) if g == group and not math.isnan(r)
        ]
        if math.isnan(reward) or len(set(peers)) == 1:
            result.append(0.0)
            continue
        mean, deviation = spread(peers)
        if kind == "outcome":
            result.append((reward - mean) / (deviation + eps))
        elif kind == "mean_only":
            result.append(reward - mean)
        elif kind == "rloo":
            result.append(reward - (sum(peers) - reward) / (len(peers) - 1))
        else:
            assert kind == "batch_std"
            batch = [
                r
                for r, m in zip(rewards, members, strict=True)
                if m == member and not math.isnan(r)
            ]
            result.append((reward - mean) / (spread(batch)[1] + eps))
    return result


def outcome(rewards: Sequence[float], groups: Sequence[int], eps: float) -> list[float]:
    """Return GRPO's advantage per completion."""
    return of_completions("outcome", rewards, groups, groups, eps)


def gdpo(
    components: Sequence[Sequence[float]],
    weights: Sequence[float],
    groups: Sequence[int],
    members: Sequence[int],
    eps: float,
) -> list[float]:
    """Return one advantage per completion from several rewards, as TRL's normalize_then_sum."""
    scores = [
        of_completions("outcome", column, groups, members, eps)
        for column in zip(*components, strict=True)
    ]
    sums = []
    for row in zip(*scores, strict=True):
        sums.append(sum(w * s for w, s in zip(weights, row, strict=True)))
    unscorable = [all(map(math.isnan, row)) for row in components]
    result = []
    for total, member, bad in zip(sums, members, unscorable, strict=True):
        batch = [
            t for t, m, b in zip(sums, members, unscorable, strict=True) if m == member and not b
        ]
        mean, deviation = spread(batch) if batch else (0.0, 0.0)
        result.append(0.0 if bad else (total - mean) / (deviation + eps))
    return result


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return the discounted sum from each step to the end."""
    result = []
    for step in range(len(rewards)):
        result.append(
            sum(gamma ** (later - step) * rewards[later] for later in range(step, len(rewards)))
        )
    return result


def of_actions(
    kind: str, episodes: Sequence[Sequence[float]], groups: Sequence[int], gamma: float, eps: float
) -> list[list[float]]:
    """Return one advantage per step; every step of every episode has a reward."""
    returns = [returns_to_go(episode, gamma) for episode in episodes]
    result = []
    for index, (episode, group) in enumerate(zip(episodes, groups, strict=True)):
        peers = [number for number, g in enumerate(groups) if g == group]
        if kind == "process":
            mean, deviation = spread([r for number in peers for r in episodes[number]])
            result.append(returns_to_go([(r - mean) / (deviation + eps) for r in episode], gamma))
        elif kind == "return_to_go_group":
            mean, deviation = spread([value for number in peers for value in returns[number]])
            result.append([(value - mean) / (deviation + eps) for value in returns[index]])
        else:
            assert kind == "return_to_go_timestep"
            row = []
            for step, value in enumerate(returns[index]):
                now = [
                    returns[number][step] if step < len(returns[number]) else 0.0
                    for number in peers
                ]
                mean, deviation = spread(now)
                row.append((value - mean) / (deviation + eps))
            result.append(row)
    return result
