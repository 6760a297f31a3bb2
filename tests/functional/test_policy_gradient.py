"""Expected gradients over all trajectories of a small MDP equal exact policy gradients."""

import itertools

import pytest
import torch

from evogrpo.functional.advantages import advantages, returns_to_go
from evogrpo.functional.loss_types import LOSS_TYPES
from evogrpo.functional.losses import loss_weights, policy_loss

# Three states, two actions, at most three steps: (next state, reward), None = the end.
MOVES = {
    (0, 0): (1, 1.0),
    (0, 1): (2, 0.0),
    (1, 0): (None, -2.0),
    (1, 1): (2, 0.5),
    (2, 0): (0, -1.0),
    (2, 1): (None, 3.0),
}
STEPS = 3
OPEN = {"clip_low": 0.999, "clip_high": 1e6}  # clips that never bind


def trajectories():
    """Return states, actions and rewards of every trajectory, padded, and the mask."""
    found = []
    front = [((), 0)]
    while front:
        path, state = front.pop()
        for action in (0, 1):
            following, reward = MOVES[state, action]
            longer = (*path, (state, action, reward))
            if following is None or len(longer) == STEPS:
                found.append(longer)
            else:
                front.append((longer, following))
    padded = [[*path, *[(0, 0, 0.0)] * (STEPS - len(path))] for path in found]
    columns = torch.tensor(padded)
    mask = torch.arange(STEPS) < torch.tensor([len(path) for path in found])[:, None]
    return columns[..., 0].long(), columns[..., 1].long(), columns[..., 2].double(), mask


STATES, ACTIONS, REWARDS, MASK = trajectories()
PAIRS = torch.tensor(list(itertools.product(range(len(MASK)), repeat=2)))


def policy(seed):
    """Return logits `[state, action]`, with gradient unless they serve as a reference."""
    return torch.randn(
        3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def log_probs_of(logits):
    """Return `[trajectory, step]` log-probs of the actions taken, 0 in the padding."""
    return torch.where(MASK, logits.log_softmax(1)[STATES, ACTIONS], 0.0)


def chances_of(logits):
    """Return the probability of every trajectory."""
    return log_probs_of(logits).sum(1).exp()


def every_group_of_two(logits, **options):
    """Return chances `[pairs]`, trajectories `[2 pairs]` and advantages of every ordered pair."""
    rows = PAIRS.flatten()
    groups = torch.arange(len(PAIRS)).repeat_interleave(2)
    estimated = advantages(
        rewards=REWARDS.sum(1)[rows],
        step_rewards=torch.where(MASK, REWARDS, torch.nan)[rows],
        group_ids=groups,
        member_ids=torch.zeros_like(groups),
        mask=MASK[rows],
        **options,
    )
    return chances_of(logits).detach()[PAIRS].prod(1), rows, estimated


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["rloo", "mean_only"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo"])
def test_group_advantages_give_the_policy_gradient(seed, kind, loss_type):
    """Leaving one out is unbiased.

    The mean includes the completion itself and shrinks the gradient by (g - 1) / g.
    """
    logits = policy(seed)
    (gradient_of_reward,) = torch.autograd.grad((chances_of(logits) * REWARDS.sum(1)).sum(), logits)
    chances, rows, estimated = every_group_of_two(logits, kind=kind)
    new = log_probs_of(logits)[rows]
    losses = policy_loss(loss_type, new, new.detach(), estimated, MASK[rows], **OPEN)
    # `loss_weights` averages within members, so each pair counts as a separate member.
    weights = loss_weights(
        loss_type, "seq-mean-token-sum", MASK[rows], torch.arange(len(PAIRS)).repeat_interleave(2)
    )
    expectation = (chances.repeat_interleave(2)[:, None] * weights * losses).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    share = {"rloo": 1.0, "mean_only": 0.5}[kind]
    torch.testing.assert_close(gradient, -share * gradient_of_reward, rtol=1e-6, atol=1e-9)
    assert float(gradient.abs().max()) > 1e-3


@pytest.mark.parametrize("seed", range(2))
def test_returns_to_go_give_the_policy_gradient(seed):
    logits = policy(seed)
    (expected,) = torch.autograd.grad((chances_of(logits) * REWARDS.sum(1)).sum(), logits)
    new = log_probs_of(logits)
    losses = policy_loss("grpo", new, new.detach(), returns_to_go(REWARDS, MASK), MASK, **OPEN)
    (gradient,) = torch.autograd.grad((chances_of(logits).detach()[:, None] * losses).sum(), logits)
    torch.testing.assert_close(gradient, -expected, rtol=1e-6, atol=1e-9)


PRIZES = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)  # of a bandit with three actions
DUELS = torch.tensor(list(itertools.product(range(3), repeat=2)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loss_type", [kind for kind in LOSS_TYPES if kind not in ("sapo", "gmpo")])
def test_ratios_correct_for_an_older_policy(seed, loss_type):
    """With open clips and one action each, the loss is minus the reward of the *new* policy."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, generator=random, dtype=torch.float64).requires_grad_()
    old = torch.randn(3, generator=random, dtype=torch.float64).log_softmax(0)
    (expected,) = torch.autograd.grad((logits.softmax(0) * PRIZES).sum(), logits)
    rows = DUELS.flatten()
    groups = torch.arange(len(DUELS)).repeat_interleave(2)
    mask = torch.ones(len(rows), 1, dtype=torch.bool)
    estimated = advantages(
        "rloo", rewards=PRIZES[rows], group_ids=groups, member_ids=groups, mask=mask
    )
    new = logits.log_softmax(0)[rows][:, None]
    losses = policy_loss(loss_type, new, old[rows][:, None], estimated, mask, **OPEN)
    chances = old.exp()[DUELS].prod(1).repeat_interleave(2)[:, None]
    (gradient,) = torch.autograd.grad((chances * losses / 2).sum(), logits)
    torch.testing.assert_close(gradient, -expected, rtol=1e-6, atol=1e-9)
