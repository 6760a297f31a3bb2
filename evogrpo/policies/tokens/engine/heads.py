"""From hidden states to logits: which function of a model's output embeddings is its own."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

Head = Callable[[Tensor], Tensor]


def find_head(model: PreTrainedModel) -> Head:
    """Find the function from hidden states to logits that equals the model's own, by trying it.

    Raises:
        ValueError: If it is none of those known.
    """
    config = model.config.get_text_config()
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % config.vocab_size
    expected = model(input_ids=ids).logits
    hidden = model.base_model(input_ids=ids).last_hidden_state
    bare: Head = model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    heads: list[Head] = [bare]
    if cap:
        heads.append(lambda x: cap * torch.tanh(bare(x) / cap))
    if factor:  # Cohere
        heads.append(lambda x: factor * bare(x))
    if divisor:  # Granite
        heads.append(lambda x: bare(x) / divisor)
    for head in heads:
        if close(head(hidden), expected):
            return head
    raise ValueError(
        f"the logits of {type(model).__name__} are not its output embeddings applied to its final hidden "
        "states (soft-capped, scaled or bare), so log-probabilities cannot be computed: use another architecture"
    )


def close(got: Tensor, expected: Tensor) -> bool:
    """Tell whether two computations of the same numbers agree, in the precision they were made in."""
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(expected.float().abs().max()) or 1.0
    return got.shape == expected.shape and float((got - expected).float().abs().max()) <= tolerance * scale
