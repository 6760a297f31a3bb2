"""Compatibility checks: does a causal model compute what the bank needs?"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.config.checks import whole_number
from evogrpo.distributed import ProcessError


@contextmanager
def frozen_model(model: nn.Module) -> Iterator[None]:
    """Run `model` without dropout and without gradients for its own weights; put all its flags back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for module, _ in modes:
            module.training = False
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, required in flags:
            parameter.requires_grad_(required)


@contextmanager
def grouped_attention(device: torch.device) -> Iterator[None]:
    """Let transformers' attention read keys and values shared by several heads where they are, rather than copy them.

    By default it does so without a mask only, because other devices' kernels need that; the CPU's does not.
    """
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    try:
        if device.type == "cpu":
            os.environ[name] = "1"
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


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
    for token in ids:
        whole_number(name, token)
    beyond = [token for token in ids if not 0 <= token < size]
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


def prefix_cache_works(
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
