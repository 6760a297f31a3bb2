"""From hidden states to logits: which function of a model's output embeddings is its own."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.policies.tokens.engine.probes import logits_of, vocabulary_of

Head = Callable[[Tensor], Tensor]
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2, RecurrentGemma
PROBED = (1.0, 10.0, 30.0, 100.0)  # sizes of the logits that are compared: a soft cap shows where they are large


def find_head(model: PreTrainedModel, decoder: nn.Module) -> Head:
    """Find the function from hidden states to logits that equals the model's own, by trying it.

    What enters the output embeddings is enlarged, at one position more than at the other, because a soft cap is no more
    than rounding where logits are small. What the config names is tried before the bare head.

    Args:
        model: The model.
        decoder: What gives its hidden states.

    Raises:
        ValueError: If it is none of those known.
    """
    ids = torch.arange(len(PROBED), device=next(model.parameters()).device)[None] % vocabulary_of(model)
    bare: nn.Module = model.get_output_embeddings()
    entered: list[Tensor] = []

    def enlarge(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sizes = module.forward(args[0]).float().abs().amax(-1, keepdim=True).clamp(min=1e-2)
        factors = torch.tensor(PROBED, device=sizes.device)[:, None] / sizes
        entered.extend((args[0], args[0] * factors.to(args[0].dtype)))
        return (entered[1],)

    handle = bare.register_forward_pre_hook(enlarge)
    try:
        expected = logits_of(model, ids)[0]
    finally:
        handle.remove()
    if entered:
        hidden = decoder(input_ids=ids).last_hidden_state
    if entered and hidden.shape == entered[0].shape:
        natural, enlarged = (x.float() for x in entered)
        # Some models scale hidden states, and not logits, which comes to the same.
        ratio = (hidden.float() * natural).sum() / natural.square().sum().clamp(min=1e-30)
        if close((ratio * natural).to(entered[0].dtype), hidden):
            probe = (ratio * enlarged).to(hidden.dtype)[0]
            for head in _heads(_in_own_precision(bare, hidden.dtype), model.config.get_text_config()):
                if all(close(*rows) for rows in zip(head(probe), expected, strict=True)):
                    return head
    raise ValueError(
        f"the logits of {type(model).__name__} are not its output embeddings applied to its final hidden "
        "states (soft-capped, scaled or bare), so log-probabilities cannot be computed: use another architecture"
    )


def _heads(bare: Head, config: Any) -> Iterator[Head]:
    """Yield the functions that a config's names may mean: scaled, then capped, where it names that; the bare head last.

    `logits_scaling` divides in Granite and multiplies in HyperCLOVA X.
    """
    named = {name: float(value) for name in SCALES if (value := getattr(config, name, None))}
    scales = [1.0 / value for value in named.values()] + list(named.values()) + [1.0]
    caps = [float(value) for name in CAPS if (value := getattr(config, name, None))]
    for cap in caps:
        yield from (_head(bare, scale, cap) for scale in scales)
    yield from (bare if scale == 1.0 else _head(bare, scale, None) for scale in scales)


def _in_own_precision(bare: nn.Module, given: torch.dtype) -> Head:
    """Cast hidden states to the output embeddings' precision where a model does, such as Mamba."""
    own: torch.dtype = next(bare.parameters()).dtype
    return bare if own == given else lambda hidden: bare(hidden.to(own))


def _head(bare: Head, scale: float, cap: float | None) -> Head:
    def head(hidden: Tensor) -> Tensor:
        logits = scale * bare(hidden)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head


def close(got: Tensor, expected: Tensor) -> bool:
    """Tell whether two computations of the same numbers agree, in the coarser precision of the two."""
    tolerance = 1e-3 if {got.dtype, expected.dtype} <= {torch.float32, torch.float64} else 5e-2
    scale = float(expected.float().abs().max()) or 1.0
    return got.shape == expected.shape and float((got - expected).float().abs().max()) <= tolerance * scale
