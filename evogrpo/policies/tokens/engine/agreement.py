"""Whether a model gives, of sequences that are padded or run in parts, what it gives of whole ones."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.policies.tokens.engine.heads import close
from evogrpo.policies.tokens.engine.probes import context_of, vocabulary_of

PROMPTS, CONTINUED = ((3, 1, 2, 3), (3, 1, 1)), (0, 0, 1)
BLOCKS = re.compile(r"compress|block_size|stride|attention_chunk_size|attn_chunk_length|window_size")
LONGEST_PROBE = 1024  # tokens
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

    The probe is longer than the blocks that the config names: attention that divides a sequence into blocks counts
    padding in, which shows from the second block on.

    Args:
        run: Returns the hidden states `[1, t, h]` of token ids `[1, t]`, given which positions count, `[1, t]`.
        model: The model.
        decoder: What gives its hidden states.
        pad_id: Token id used as padding.
        explicit_positions: Whether `run` tells the model its positions.

    Raises:
        ValueError: If it changes them, or the model cannot be told what is padding.
    """
    width = min(6 + 3 * largest_block(model), LONGEST_PROBE, context_of(model) or LONGEST_PROBE)
    padding = max(1, width // 3 - 1 | 1)  # odd, so that it shifts tokens within blocks of any size
    length = width - padding
    pattern = torch.tensor([3, 1, 2, 1, 0], device=next(model.parameters()).device).repeat(length // 5 + 1)
    ids = pattern[None, :length] % vocabulary_of(model)
    padded = torch.cat([torch.full_like(ids[:, :1], pad_id).expand(1, padding), ids], dim=1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, :padding] = False
    try:
        shifted = run(padded, mask)[:, padding:]
    except TypeError as error:
        remedy = " and position_ids; pass calc_position_embeddings=False" if explicit_positions else ""
        raise ValueError(f"{type(model).__name__} cannot be run with attention_mask{remedy}: {error}") from error
    whole = decoder(input_ids=ids).last_hidden_state
    if not all(close(*rows) for rows in zip(shifted[0], whole[0], strict=True)):
        raise ValueError(
            f"padding on the left changes what {type(model).__name__} computes"
            f"{'' if explicit_positions else ': it needs positions, leave calc_position_embeddings at True'}"
        )


def largest_block(model: PreTrainedModel) -> int:
    """Return the largest block, stride, chunk or compression rate that a config names, in tokens; 0 if none."""
    sizes = [0]
    for name, value in model.config.get_text_config().to_dict().items():
        if BLOCKS.search(name):
            values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            sizes += [size for size in values if type(size) is int and size < LONGEST_PROBE]
    return max(sizes)


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
