"""Probes of a model before it is used: whether it is a causal language model, and how it is run."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.processes import ProcessError


def check_causal_class(model: PreTrainedModel) -> None:
    """Refuse, by what it is made of, a model that does not predict the next token, or is no plain base: nothing runs.

    Raises:
        ValueError: If it encodes what it reads before it writes, has no vocabulary head, or carries adapters already.
    """
    reason = ""
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder"
    elif not model.can_generate() or model.get_output_embeddings() is None:
        reason = "it has no head that predicts the next token"
    if reason:
        raise ValueError(
            f"{type(model).__name__} is not a causal language model: {reason}. Load one with evogrpo.load_base or "
            "AutoModelForCausalLM.from_pretrained."
        )
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} already has PEFT adapters. Pass the plain base model with adapter='FOLDER', "
            "or merge the adapters first (merge_and_unload)."
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return how many token ids a model can read."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # of any module, for mypy
    return len(weight)


def context_of(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a sequence that the model's config allows; None = no limit.

    Beyond some lengths whom a member is computed with would change it. With rotary embeddings of type longrope that is
    the length a model was pretrained on: the frequencies of all sequences of a pass change as soon as one of them is
    longer. With Llama 4's temperature tuning it is `floor_scale`: from that place on queries are scaled by a token's
    place, and padding counts there.
    """
    text, name = model.config.get_text_config(), "original_max_position_embeddings"
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for own in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # layers may differ in it
        if own.get("rope_type", own.get("type")) == "longrope":
            limits += [own.get(name), getattr(text, name, None)]
    placed = 0 in (getattr(text, "no_rope_layers", None) or ())  # layers without rotary embeddings
    if placed and getattr(text, "attn_temperature_tuning", False) and (scale := getattr(text, "floor_scale", None)):
        limits.append(math.ceil(scale) - 1)
    return min((int(limit) for limit in limits if limit and limit > 0), default=None)  # -1 where there is no limit


def check_token_ids(model: PreTrainedModel, ids: Sequence[int], name: str) -> None:
    """Refuse token ids that the model's vocabulary does not have.

    Raises:
        ValueError: If one is negative or too large.
    """
    size = vocabulary_of(model)
    beyond = [token for token in ids if not (isinstance(token, Integral) and 0 <= token < size)]
    if beyond:
        raise ValueError(
            f"{name} must lie in the vocabulary of {type(model).__name__}, ids 0 to {size - 1}, got {beyond[0]!r}: the "
            "tokenizer has more tokens than the model, or is another's. Use the model's own, or "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the model's own logits `[n, t, v]` of token ids `[n, t]`.

    Raises:
        ValueError: If it cannot be run on token ids alone, or its logits are not numbers.
    """
    if any(weights.is_meta for weights in model.parameters()):
        raise ValueError(f"{type(model).__name__} is an outline without weights: load it whole, with from_pretrained")
    try:
        logits: Tensor = model(input_ids=ids).logits
    except ProcessError:  # of a base in parts; says enough
        raise
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be run on token ids alone, as a causal language model is: "
            f"{type(error).__name__}: {error}"
        ) from error
    if bool(logits.isnan().any()):
        raise ValueError(f"{type(model).__name__} computes logits that are not numbers: its weights are damaged")
    return logits


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that gives the hidden states which its head turns into logits.

    Raises:
        ValueError: If there is none.
    """
    if model.base_model is not model:
        return model.base_model
    # Where the inner model has another name than the class declares, it is still the one model inside.
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(inner) != 1:
        raise ValueError(f"{type(model).__name__} has no inner model that gives hidden states: use another one")
    return inner[0]


def check_causal(model: PreTrainedModel) -> None:
    """Refuse a model whose logits depend on tokens that come later.

    Another last token must change the last logits alone; the shapes are the same, so that only rounding remains.

    Raises:
        ValueError: If earlier logits change as well.
    """
    device = next(model.parameters()).device
    ids = torch.tensor([[3, 1, 2, 1, 3], [3, 1, 2, 1, 5]], device=device) % vocabulary_of(model)
    one, other = logits_of(model, ids).float()
    change = (one - other).abs().amax(1)
    if float(change[:-1].max()) > 0.02 * float(change[-1]):
        raise ValueError(
            f"{type(model).__name__} is not causal: its prediction of a token depends on later tokens. "
            "Use a causal language model."
        )


def check_differentiable(model: PreTrainedModel, decoder: nn.Module, names: Iterable[str]) -> None:
    """Refuse a model in which no gradient reaches the modules that are to be changed.

    Args:
        model: The model, frozen.
        decoder: What gives its hidden states.
        names: Dotted names of the modules.

    Raises:
        ValueError: If gradients end inside, as in models that write their own backward pass.
    """

    def begin(module: nn.Module, args: object, output: Tensor) -> Tensor:
        # A copy, as a model may write into what a layer put out.
        return output if output.requires_grad else output.detach().requires_grad_().clone()

    handles = [model.get_submodule(name).register_forward_hook(begin) for name in names]
    try:
        with torch.enable_grad():
            hidden = decoder(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device)).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    if handles and not hidden.requires_grad:
        raise ValueError(
            f"no gradient reaches what is to be trained inside {type(model).__name__}: use another architecture"
        )
