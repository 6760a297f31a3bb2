"""The tables of loss types and advantages agree with the formulas."""

import math
from typing import get_args

import pytest
import torch

from evogrpo.functional.advantages import advantages
from evogrpo.functional.loss_types import (
    ADVANTAGES,
    LOSS_TYPES,
    STEP_ADVANTAGES,
    AdvantageType,
    LossType,
)
from evogrpo.functional.losses import clipped_actions, policy_loss

MASK = torch.tensor([[True, True, False], [True, True, True]])
OLD = torch.full(MASK.shape, -2.0)
NEAR = OLD + torch.tensor([[0.02, -0.01, 0.0], [0.03, 0.01, -0.02]])
CLIPS = {"clip_low": 0.1, "clip_high": 0.1}


def losses(loss_type, log_probs, sign=1.0, **switches):
    return policy_loss(
        loss_type, log_probs, OLD, torch.full((2, 1), sign), MASK, **{**CLIPS, **switches}
    )


def test_tables_list_all_names():
    assert tuple(LOSS_TYPES) == get_args(LossType)
    assert tuple(ADVANTAGES) == get_args(AdvantageType)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_of_actions_are_independent_with_a_ratio_per_action(loss_type):
    log_probs = NEAR.clone().requires_grad_()
    values = losses(loss_type, log_probs)
    (gradient,) = torch.autograd.grad(values[1, 0], log_probs)
    assert gradient[1, 0] != 0
    assert (gradient[0] == 0).all()
    assert bool((gradient[1, 1:] == 0).all()) == LOSS_TYPES[loss_type].per_action


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("name", ["dual_clip", "delta"])
def test_dual_clip_and_delta_need_a_clipped_ratio(loss_type, name):
    if LOSS_TYPES[loss_type].bounded:
        far = losses(loss_type, OLD + 3.0, sign=-1.0)
        bound = losses(loss_type, OLD + 3.0, sign=-1.0, **{name: 2.0})
        assert torch.allclose(bound[MASK], torch.tensor(2.0))
        assert torch.allclose(far[MASK], torch.tensor(math.exp(3.0)))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    ("name", "moved", "sign"), [("clip_low", -1.0, -1.0), ("clip_high", 1.0, 1.0)]
)
def test_listed_clips_are_those_that_bind(loss_type, name, moved, sign):
    flags = clipped_actions(loss_type, OLD + moved, OLD, torch.full((2, 1), sign), MASK, **CLIPS)
    bound = dict(zip(("clip_low", "clip_high"), flags, strict=True))
    assert torch.equal(bound[name], MASK & (name in LOSS_TYPES[loss_type].clips))
    pair = losses(loss_type, OLD + moved, sign), losses(loss_type, OLD + moved, sign, **{name: 0.2})
    assert torch.equal(*pair) == (name not in LOSS_TYPES[loss_type].clips)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_read_only_the_listed_quantity(kind):
    group = torch.zeros(4, dtype=torch.long)
    mask = torch.ones(4, 3, dtype=torch.bool)

    def options(changed=None):
        draw = torch.Generator().manual_seed(0)
        inputs = {
            "rewards": torch.rand(4, generator=draw),
            "step_rewards": torch.rand(4, 3, generator=draw),
            "components": torch.rand(4, 2, generator=draw),
        }
        if changed is not None:
            inputs[changed] = inputs[changed] ** 3
        return advantages(kind, **inputs, group_ids=group, member_ids=group, mask=mask)

    read = {
        name
        for name in ("rewards", "step_rewards", "components")
        if not torch.equal(options(name), options())
    }
    names = {"reward": "rewards", "step rewards": "step_rewards", "reward functions": "components"}
    assert read == {names[ADVANTAGES[kind]]}
    assert ("step_rewards" in read) == (kind in STEP_ADVANTAGES)
