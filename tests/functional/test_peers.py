"""Losses and gradients match Liger and TRL on random ragged batches."""

import itertools

import pytest
import torch

from evogrpo.functional.loss_types import IMPORTANCE_CORRECTIONS
from evogrpo.functional.losses import (
    bias_corrected_kl,
    high_entropy_mask,
    importance_weights,
    kl_estimate,
    loss_weights,
    policy_loss,
)

peer_losses = pytest.importorskip("tests.oracles.peer_losses", reason="needs trl and liger-kernel")
OPTIONS = {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.1, "delta": None}
OPTIONS["max_completion_length"] = 9  # longer than the padded width
SETTINGS = [
    (loss_type, {"clip_low": low, "clip_high": high, "beta": beta, "delta": delta})
    for loss_type, (low, high), beta, delta in itertools.product(
        peer_losses.NAMES, ((0.1, 0.4),), (0.0, 0.3), (None, 1.6)
    )
    if delta is None or loss_type not in ("cispo", "sapo")
]


def random_batch(seed, per_action=False):
    """Return three log-probs, advantages and a ragged mask with holes and an empty row."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    old = -2 + normal(6, 7)
    lengths = torch.randint(1, 8, (6,), generator=random)
    mask = torch.arange(7) < lengths[:, None]
    mask &= torch.rand(6, 7, generator=random) < 0.85
    mask[seed % 6] = False
    advantages = normal(6, 7) if per_action else normal(6)
    log_probs = (old + 0.4 * normal(6, 7)).requires_grad_()
    return log_probs, old, old + 0.5 * normal(6, 7), advantages, mask


def ours(loss_type, batch, *, kept=1.0, factor=1.0, bias_correction=False, **options):
    """Return our loss of the same batch."""
    log_probs, old, reference, advantages, mask = batch
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    settings = OPTIONS | options
    clips = {name: settings[name] for name in ("clip_low", "clip_high", "delta")}
    losses = policy_loss(loss_type, log_probs, old, advantages, mask, **clips) * kept * factor
    if settings["beta"]:
        kl = torch.where(mask, kl_estimate("k3", log_probs, reference), 0.0)
        if bias_correction:
            kl = bias_corrected_kl(kl, loss_type, log_probs, old, mask)
        losses = losses + settings["beta"] * kl
    member = torch.zeros(len(mask), dtype=torch.long)
    return (
        loss_weights(loss_type, None, mask, member, settings["max_completion_length"]) * losses
    ).sum()


def assert_same(one, other, log_probs):
    """Compare losses and gradients at 1e-5, relative to their largest entry."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)
    (first,) = torch.autograd.grad(one, log_probs, retain_graph=True)
    (second,) = torch.autograd.grad(other, log_probs)
    assert float(second.abs().max()) > 1e-3
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5 * float(second.abs().max()))


@pytest.mark.parametrize(("loss_type", "settings"), SETTINGS)
@pytest.mark.parametrize("per_action", [False, True])
def test_losses_match_liger_and_trl(loss_type, settings, per_action):
    options = OPTIONS | settings
    for seed in range(5):
        batch = random_batch(seed, per_action)
        loss = ours(loss_type, batch, **settings)
        assert_same(loss, peer_losses.trl(loss_type, *batch, **options), batch[0])
        # Liger's luspo scales KL by the length and averages it over padding.
        if not per_action and (loss_type != "luspo" or not settings["beta"]):
            assert_same(loss, peer_losses.liger(loss_type, *batch, **options), batch[0])


@pytest.mark.parametrize("loss_type", peer_losses.NAMES)
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_high_entropy_mask_matches_trl(loss_type, quantile):
    for seed in range(5):
        batch = random_batch(seed)
        entropies = torch.rand(6, 7, generator=torch.Generator().manual_seed(seed))
        kept = high_entropy_mask(entropies, batch[4], torch.zeros(6, dtype=torch.long), quantile)
        assert 0 < int(kept.sum()) < int(batch[4].sum())
        trl_loss = peer_losses.trl(
            loss_type, *batch, **OPTIONS, entropies=entropies, top_entropy_quantile=quantile
        )
        assert_same(ours(loss_type, batch, kept=kept), trl_loss, batch[0])


@pytest.mark.parametrize("kind", IMPORTANCE_CORRECTIONS)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "gspo"])
def test_importance_weights_match_trl(kind, loss_type):
    for seed in range(5):
        batch = random_batch(seed)
        noise = torch.randn(
            6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        factor = importance_weights(kind, batch[1], batch[1] + 0.3 * noise, batch[4], cap=1.2)
        trl_loss = peer_losses.trl(loss_type, *batch, **OPTIONS, importance_ratio=factor)
        assert_same(ours(loss_type, batch, factor=factor), trl_loss, batch[0])


@pytest.mark.parametrize("loss_type", peer_losses.NAMES)
def test_bias_corrected_kl_matches_trl(loss_type):
    for seed in range(5):
        batch = random_batch(seed)
        trl_loss = peer_losses.trl(loss_type, *batch, **OPTIONS, bias_correction=True)
        assert_same(ours(loss_type, batch, bias_correction=True), trl_loss, batch[0])
