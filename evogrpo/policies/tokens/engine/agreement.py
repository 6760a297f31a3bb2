"""Whether a model gives, of sequences that are padded or run in parts, what it gives of whole ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.policies.tokens.engine.heads import close
from evogrpo.policies.tokens.engine.probes import vocabulary_of

PROMPTS, CONTINUED = ((3, 1, 2, 3), (3, 1, 1)), (0, 0, 1)
FOLLOWING = ((2, 1, 3), (3, 3, 1), (1, 2, 2))


def check_padding(
    run: Callable[[Tensor, Tensor], Tensor],
    model: PreTrainedModel,
    decoder: nn.Module,
    pad_id: int,
    *,
    explicit_positions: bool,
) -> None:
    """Refuse a model for which padding on the left changes the hidden states.

    Args:
        run: Returns the hidden states `[1, t, h]` of token ids `[1, t]`, given which positions count, `[1, t]`.
        model: The model.
        decoder: What gives its hidden states.
        pad_id: Token id used as padding.
        explicit_positions: Whether `run` tells the model its positions.

    Raises:
        ValueError: If it changes them, or the model cannot be told what is padding.
    """
    ids = torch.tensor([[3, 1, 2]], device=next(model.parameters()).device) % vocabulary_of(model)
    padded = torch.cat([torch.full_like(ids[:, :2], pad_id), ids], dim=1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, :2] = False
    try:
        shifted = run(padded, mask)[:, 2:]
    except TypeError as error:
        remedy = " and position_ids; pass calc_position_embeddings=False" if explicit_positions else ""
        raise ValueError(f"{type(model).__name__} cannot be run with attention_mask{remedy}: {error}") from error
    if not close(shifted, decoder(input_ids=ids).last_hidden_state):
        raise ValueError(
            f"padding on the left changes what {type(model).__name__} computes"
            f"{'' if explicit_positions else ': it needs positions, leave calc_position_embeddings at True'}"
        )


def continues(
    continued: Callable[[Sequence[tuple[int, ...]], Tensor, Tensor], Tensor], model: PreTrainedModel, decoder: nn.Module
) -> bool:
    """Tell whether what continues shared prompts gets the hidden states that the plain forward pass gives.

    Args:
        continued: Returns those `[n, t, h]` of tokens `[n, t]`, given prompts and which of them each row continues.
        model: The model.
        decoder: What gives its hidden states.
    """
    vocabulary, device = vocabulary_of(model), next(model.parameters()).device
    prompts = [tuple(token % vocabulary for token in prompt) for prompt in PROMPTS]
    ids = torch.tensor(FOLLOWING, device=device) % vocabulary
    try:
        shared = continued(prompts, torch.tensor(CONTINUED, device=device), ids)
    except Exception:  # noqa: BLE001  # an architecture's cache may fail in any way; the plain path is always right
        return False
    wholes = (
        torch.tensor([*prompts[own], *row.tolist()], device=device)[None]
        for own, row in zip(CONTINUED, ids, strict=True)
    )
    return all(
        close(row, decoder(input_ids=whole).last_hidden_state[0, -len(row) :])
        for row, whole in zip(shared, wholes, strict=True)
    )
