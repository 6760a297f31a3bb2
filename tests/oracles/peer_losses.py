"""Losses of Liger and TRL on log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from torch import Tensor
from trl import GRPOTrainer

# Ours -> (their loss_type, importance_sampling_level)
NAMES = {
    "grpo": ("grpo", "token"),
    "dapo": ("dapo", "token"),
    "bnpo": ("bnpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "gspo": ("grpo", "sequence"),
    "luspo": ("luspo", "sequence"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "token"),
}


def liger(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    **options: Any,
) -> Tensor:
    """Return Liger's loss.

    `advantages` are `[n]`, `options` are beta, delta and max_completion_length.
    """
    name, level = NAMES[loss_type]
    counts = mask.to(log_probs.dtype)
    loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        log_probs,
        counts,
        advantages,
        counts,
        ref_per_token_logps=ref_log_probs,
        old_per_token_logps=old_log_probs,
        epsilon_low=clip_low,
        # TRL caps the ratio at epsilon_high itself.
        epsilon_high=(1 + clip_high if loss_type == "cispo" else clip_high),
        loss_type=name,
        importance_sampling_level=level,
        **options,
    )
    return loss


def trl(
    loss_type: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    beta: float,
    delta: float | None,
    max_completion_length: int,
    entropies: Tensor | None = None,
    top_entropy_quantile: float = 1.0,
    importance_ratio: Tensor | None = None,
    bias_correction: bool = False,
) -> Tensor:
    """Return TRL's loss of one step on one process; `advantages` are `[n]` or `[n, t]`."""
    name, level = NAMES[loss_type]
    entropies = torch.zeros_like(log_probs) if entropies is None else entropies
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
        get_high_entropy_mask=lambda *arguments: GRPOTrainer.get_high_entropy_mask(
            trainer, *arguments
        ),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, **_: tensor,
            pad_across_processes=lambda tensor, **_: tensor,
        ),
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=bias_correction,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=clip_low,
        epsilon_high=1 + clip_high if loss_type == "cispo" else clip_high,
        importance_sampling_level=level,
        loss_type=name,
        max_completion_length=max_completion_length,
        off_policy_mask_threshold=None,
        top_entropy_quantile=top_entropy_quantile,
        use_vllm=importance_ratio is not None,
        vllm_importance_sampling_correction=importance_ratio is not None,
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask.to(log_probs.dtype),
        "advantages": advantages,
        "old_per_token_logps": old_log_probs,
        "ref_per_token_logps": ref_log_probs,
        "importance_sampling_ratio": importance_ratio,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)
