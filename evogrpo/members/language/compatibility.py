"""Compatibility checks of causal language models: causality, head, padding, context, caches."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from evogrpo.distributed import ProcessError
from evogrpo.text import class_name, one_line
from evogrpo.validation import whole_number


@contextmanager
def frozen_model(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients for its weights.

    Restore all flags on exit.
    """
    # Flags may differ between modules and between parameters, so each is kept.
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


def check_causal_class(model: PreTrainedModel) -> None:
    """Check the structure of a model, without a forward pass.

    Raises:
        ValueError: If it is an encoder-decoder, has no vocabulary head, or has adapters already.
    """
    reason = ""
    # 1. A decoder with a vocabulary head.
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder"
    elif not model.can_generate() or model.get_output_embeddings() is None:
        reason = "it has no head that predicts the next token"
    if reason:
        raise ValueError(
            f"{class_name(model)} is not a causal language model: {reason}. Load one with"
            " evogrpo.load_base or AutoModelForCausalLM.from_pretrained."
        )
    # 2. Without adapters: members bring their own.
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"{class_name(model)} already has PEFT adapters. Pass the plain base model with"
            " adapter='FOLDER', or merge the adapters first (merge_and_unload)."
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of input token ids."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # of any module, for mypy
    return len(weight)


def context_of(model: PreTrainedModel) -> int | None:
    """Return the maximum sequence length in tokens that the model's config sets; None = no limit.

    With longrope embeddings it is the pretraining length: if one row is longer, the frequencies of
    all rows change.
    """
    text = model.config.get_text_config()
    name = "original_max_position_embeddings"
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # Settings of all layers, or by type of layer.
    for settings in (rope, *rope.values()):
        if not isinstance(settings, dict):
            continue
        if settings.get("rope_type", settings.get("type")) == "longrope":
            limits += [settings.get(name), getattr(text, name, None)]
    # Some configs have -1 for no limit.
    return min((int(limit) for limit in limits if limit and limit > 0), default=None)


def check_context(context: int | None, width: int) -> None:
    """Raise a ValueError if sequences of `width` tokens exceed the model's context.

    None = no limit.
    """
    if context is not None and width > context:
        raise ValueError(
            f"The longest prompt and its completion take {width} tokens, but the model's context is"
            f" {context}. Lower max_output_tokens, or set max_prompt_length to leave long prompts"
            " out."
        )


def end_ids_of(model: PreTrainedModel) -> set[int]:
    """Return the tokens that end a completion in any of the model's configurations."""
    config = model.config
    size = vocabulary_of(model)
    ends: set[int] = set()
    # Configs name no token, one token or a list.
    for part in (model.generation_config, config, config.get_text_config()):
        named = getattr(part, "eos_token_id", None)
        if isinstance(named, list | tuple):
            listed = named
        else:
            listed = [named]
        for token in listed:
            if isinstance(token, int) and 0 <= token < size:
                ends.add(token)
    return ends


def check_token_ids(model: PreTrainedModel, ids: Sequence[int], name: str) -> None:
    """Raise a ValueError if a token id is not in the model's vocabulary."""
    size = vocabulary_of(model)
    for token in ids:
        whole_number(name, token)
    # Types first: a float would pass the comparison.
    beyond = [token for token in ids if not 0 <= token < size]
    if beyond:
        raise ValueError(
            f"{name} must be in the vocabulary of {class_name(model)} (0 to {size - 1}), got"
            f" {beyond[0]!r}. Use the model's own tokenizer, or call"
            " model.resize_token_embeddings(len(tokenizer))."
        )


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the model's own logits `[n, t, v]` of token ids `[n, t]`.

    Raises:
        ValueError: If the model does not run on token ids alone, or its logits contain NaN.
    """
    if any(weights.is_meta for weights in model.parameters()):
        raise ValueError(
            f"{class_name(model)} has no weights (meta device). Load it with from_pretrained."
        )
    # Models that need images or other inputs raise errors of any kind.
    try:
        logits: Tensor = model(input_ids=ids).logits
    except ProcessError:  # from another rank of a sharded base
        raise
    except Exception as error:
        raise ValueError(
            f"{class_name(model)} must run on token ids alone, but raised {class_name(error)}:"
            f" {one_line(error)}. Use a causal language model that needs no other inputs."
        ) from error
    if bool(logits.isnan().any()):
        raise ValueError(
            f"The logits of {class_name(model)} contain NaN. Its weights are damaged: load another"
            " copy."
        )
    return logits


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the inner model that computes the hidden states before the vocabulary head.

    Raises:
        ValueError: If there is none.
    """
    if model.base_model is not model:
        return model.base_model
    # The attribute may have another name than the class declares.
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(inner) != 1:
        raise ValueError(
            f"{class_name(model)} has no inner model with hidden states. Use another architecture."
        )
    return inner[0]


def check_causal(model: PreTrainedModel) -> None:
    """Raise a ValueError if another last token changes earlier logits."""
    device = next(model.parameters()).device
    sequences = [[3, 1, 2, 1, 3], [3, 1, 2, 1, 5]]
    ids = torch.tensor(sequences, device=device) % vocabulary_of(model)
    one, other = logits_of(model, ids).float()
    # Changes of earlier logits below 2 % of the last change are rounding.
    change = (one - other).abs().amax(1)
    earlier = float(change[:-1].max())
    if earlier > 0.02 * float(change[-1]):
        raise ValueError(
            f"{class_name(model)} is not causal: its prediction of a token depends on later tokens."
            " Use a causal language model."
        )


def check_differentiable(model: PreTrainedModel, decoder: nn.Module, names: Iterable[str]) -> None:
    """Check that gradients flow from the hidden states to the adapted modules.

    Args:
        model: The model, frozen.
        decoder: Inner model with the hidden states.
        names: Dotted names of the modules.

    Raises:
        ValueError: If they do not, as in models with a backward pass of their own.
    """

    def begin(module: nn.Module, args: object, output: Tensor) -> Tensor:
        """Hook: let gradients begin at the output of a module."""
        # Clone, because the model may modify outputs in place.
        if output.requires_grad:
            return output
        return output.detach().requires_grad_().clone()

    handles = [model.get_submodule(name).register_forward_hook(begin) for name in names]
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    try:
        with torch.enable_grad():
            hidden = decoder(input_ids=ids).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    if handles and not hidden.requires_grad:
        raise ValueError(
            f"No gradient reaches the adapted layers of {class_name(model)}. Use another"
            " architecture."
        )


Head = Callable[[Tensor], Tensor]
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
# Names in Gemma 2 and RecurrentGemma.
CAPS = ("final_logit_softcapping", "logits_soft_cap")
# Magnitudes of the compared logits: a soft cap only shows in large ones.
PROBED = (
    1.0,
    10.0,
    30.0,
    100.0,
)


def find_head(model: PreTrainedModel, decoder: nn.Module) -> Head:
    """Return the function from hidden states to logits that reproduces the model's own logits.

    Candidates are the output embeddings, scaled and soft-capped as the config says, then the bare
    output embeddings. A hook enlarges their inputs, because a soft cap does not show in small
    logits.

    Args:
        model: The model.
        decoder: Inner model with the hidden states.

    Raises:
        ValueError: If no candidate matches.
    """
    # 1. Run the model with enlarged inputs of the head; keep its natural and enlarged inputs.
    device = next(model.parameters()).device
    ids = torch.arange(len(PROBED), device=device)[None] % vocabulary_of(model)
    bare: nn.Module = model.get_output_embeddings()
    inputs: list[Tensor] = []

    def enlarge(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hook before the head: enlarge the logits of each token to the sizes that are probed."""
        (hidden,) = args
        # `forward` itself: calling the module would run this hook again.
        logits = module.forward(hidden).float()
        sizes = logits.abs().amax(-1, keepdim=True).clamp(min=1e-2)
        factors = torch.tensor(PROBED, device=sizes.device)[:, None] / sizes
        enlarged = hidden * factors.to(hidden.dtype)
        inputs.extend((hidden, enlarged))
        return (enlarged,)

    # The model then processes the enlarged logits as it does its own, such as by a cap.
    handle = bare.register_forward_pre_hook(enlarge)
    try:
        expected = logits_of(model, ids)[0]
    finally:
        handle.remove()
    # 2. Compare candidates on the enlarged hidden states.
    hidden = decoder(input_ids=ids).last_hidden_state
    if inputs and hidden.shape == inputs[0].shape:
        dtype = inputs[0].dtype
        natural = inputs[0].float()
        enlarged = inputs[1].float()
        # Some models scale hidden states instead of logits, with the same effect.
        # The ratio is the least-squares fit of hidden = ratio * natural.
        squares = natural.square().sum()
        ratio = (hidden.float() * natural).sum() / squares.clamp(min=1e-30)
        if close((ratio * natural).to(dtype), hidden):
            probe = (ratio * enlarged).to(hidden.dtype)[0]
            # In Mamba, the head has not the dtype of the hidden states.
            head_dtype: torch.dtype = next(bare.parameters()).dtype
            cast: Head = bare
            if head_dtype != hidden.dtype:
                cast = lambda hidden: bare(hidden.to(head_dtype))  # noqa: E731  # a short cast
            for head in _heads(cast, model.config.get_text_config()):
                if _all_close(head(probe), expected):
                    return head
    raise ValueError(
        f"The vocabulary head of {class_name(model)} is not supported: its logits are computed in"
        " an unknown way from the final hidden states. Use another architecture."
    )


def _heads(bare: Head, config: Any) -> Iterator[Head]:
    """Yield candidates: capped and scaled as the config says, the bare head last.

    Scales are tried as divisors and factors: `logits_scaling` divides in Granite and multiplies in
    HyperCLOVA X.
    """
    named = [float(getattr(config, name, None) or 0.0) for name in SCALES]
    # A config has None or no value where there is no scale.
    multipliers = [scale for scale in named if scale]
    scales = [*(1.0 / scale for scale in multipliers), *multipliers, 1.0]
    for name in CAPS:
        cap = getattr(config, name, None)
        if cap:
            for scale in scales:
                yield _head(bare, scale, float(cap))
    for scale in scales:
        if scale == 1.0:
            yield bare
        else:
            yield _head(bare, scale, None)


def _head(bare: Head, scale: float, cap: float | None) -> Head:
    """Return a head with scaled logits, and with soft capping unless `cap` is None."""

    def head(hidden: Tensor) -> Tensor:
        """Return the logits `[..., v]` of hidden states."""
        logits = scale * bare(hidden)
        if cap is None:
            return logits
        return cap * torch.tanh(logits / cap)

    return head


def _all_close(got: Tensor, expected: Tensor) -> bool:
    """Return True if every row agrees; see `close`."""
    return all(close(*rows) for rows in zip(got, expected, strict=True))


def close(got: Tensor, expected: Tensor) -> bool:
    """Return True if two results agree up to rounding in the lower precision of the two."""
    if {got.dtype, expected.dtype} <= {torch.float32, torch.float64}:
        tolerance = 1e-3
    else:
        tolerance = 5e-2
    if got.shape != expected.shape:
        return False
    scale = float(expected.float().abs().max()) or 1.0
    difference = float((got - expected).float().abs().max())
    return difference <= tolerance * scale


PROMPTS = ((3, 1, 2, 3), (3, 1, 1))
CONTINUED = (0, 0, 1)
FOLLOWING = ((2, 1, 3), (3, 3, 1), (1, 2, 2))
"""Token ids of `prefix_cache_works`: prompts, prompt of each row, and tokens of each row after its
prompt.
"""
# Names of settings in the configs of models: sizes of blocks and of sliding windows.
BLOCKS = re.compile(r"compress|block_size|stride|attention_chunk_size|attn_chunk_length")
WINDOWS = re.compile(r"window_size")
# DeepSeek-V4's compress_rope_theta is no number of tokens.
NOT_IN_TOKENS = re.compile(r"theta")
LONGEST_PROBE = 1024
"""Maximum length of the sequence that `check_padding` runs, in tokens."""


def check_padding(
    run: Callable[[Tensor, Tensor], Tensor],
    model: PreTrainedModel,
    decoder: nn.Module,
    pad_id: int,
    *,
    explicit_positions: bool,
) -> None:
    """Check that padding on the left does not change the hidden states.

    The sequence is longer than the blocks in the config: blockwise attention counts padding, which
    shows from the second block on. Sliding windows do not count padding, but are tried too if they
    are short.

    Args:
        run: (token ids `[1, t]`, mask `[1, t]`) -> hidden states `[1, t, h]`.
        model: The model.
        decoder: Inner model with the hidden states.
        pad_id: Token id used as padding.
        explicit_positions: `run` passes position ids.

    Raises:
        ValueError: If padding changes them, blocks are too long to find out, or the model accepts
            no attention mask.
    """
    # 1. Choose the length: blockwise attention must reach its second block, with and without
    #    padding.
    context = context_of(model)
    blocks = token_counts(model, BLOCKS)
    if context is not None:
        # Rows of a batch are shorter than twice the context, padding included. So they never reach
        # the second block of longer blocks.
        blocks = {name: size for name, size in blocks.items() if size < 2 * context}
    windows = [size for size in token_counts(model, WINDOWS).values() if size < LONGEST_PROBE]
    largest = max([0, *blocks.values(), *windows])
    width = min(6 + 3 * largest, LONGEST_PROBE, context or LONGEST_PROBE)
    # About a third is padding. An odd number is no multiple of an even size of blocks, so tokens
    # shift within them.
    padding = max(1, (width // 3 - 1) | 1)
    length = width - padding
    for name, size in blocks.items():
        # The second block would not begin.
        if size >= length:
            raise ValueError(
                f"{type(model).__name__} has blocks of {size} tokens ({name}), which are too long"
                " to check that padding on the left does not change its results. Use another"
                f" architecture, or set config.max_position_embeddings to at most {size // 2}."
            )
    # 2. Run a sequence of a few tokens, with and without padding.
    device = next(model.parameters()).device
    pattern = torch.tensor([3, 1, 2, 1, 0], device=device)
    repeated = pattern.repeat(length // len(pattern) + 1)
    ids = repeated[None, :length] % vocabulary_of(model)
    padded = pad(ids, (padding, 0), value=pad_id)
    mask = pad(torch.ones_like(ids, dtype=torch.bool), (padding, 0))
    try:
        shifted = run(padded, mask)[:, padding:]
    except TypeError as error:
        remedy = ""
        if explicit_positions:
            remedy = " and position_ids; pass calc_position_embeddings=False"
        raise ValueError(
            f"{class_name(model)} does not run with attention_mask{remedy}: {error}"
        ) from error
    whole = decoder(input_ids=ids).last_hidden_state
    # 3. Compare the hidden states of the real tokens.
    if not whole.isfinite().all():
        raise ValueError(
            f"The hidden states of {class_name(model)} are NaN or infinite in {model.dtype}. Check"
            " its weights, or load it in another dtype."
        )
    if not _all_close(shifted[0], whole[0]):
        # Attention may turn NaN into numbers.
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise ValueError(
                    f"{name} of {class_name(model)} has NaN or infinite weights. Load another copy."
                )
        if explicit_positions:
            remedy = "Use another architecture."
        else:
            remedy = "Set calc_position_embeddings=True."
        raise ValueError(
            f"Padding on the left changes the hidden states of {class_name(model)}. {remedy}"
        )


def token_counts(model: PreTrainedModel, names: re.Pattern[str]) -> dict[str, int]:
    """Return the numbers of tokens in a config whose names match, by name; the largest of each.

    A name also covers the numbers in a list or mapping below it.
    """
    # Configs differ in depth: some have settings by layer or by type of layer.
    found: dict[str, int] = {}

    def add(name: str, value: Any) -> None:
        """Add the settings in a value of the configuration, the largest of each name."""
        if isinstance(value, dict):
            for key, each in value.items():
                add(name if names.search(name) else str(key), each)
        elif isinstance(value, list | tuple):
            for each in value:
                add(name, each)
        # bool is a subclass of int, and no number of tokens.
        elif type(value) is int and names.search(name) and not NOT_IN_TOKENS.search(name):
            found[name] = max(value, found.get(name, 0))

    add("", model.config.get_text_config().to_dict())
    return found


def prefix_cache_works(
    continued: Callable[[Sequence[tuple[int, ...]], Tensor, Tensor], Tensor],
    model: PreTrainedModel,
    decoder: nn.Module,
) -> bool:
    """Return True if completions on shared prompts get the hidden states of whole sequences.

    Args:
        continued: (prompts, prompt of each row `[n]`, token ids `[n, t]`) -> hidden states
            `[n, t, h]`.
        model: The model.
        decoder: Inner model with the hidden states.
    """
    # 1. Run rows on top of shared prompts.
    vocabulary = vocabulary_of(model)
    device = next(model.parameters()).device
    prompts = [tuple(token % vocabulary for token in prompt) for prompt in PROMPTS]
    ids = torch.tensor(FOLLOWING, device=device) % vocabulary
    try:
        shared = continued(prompts, torch.tensor(CONTINUED, device=device), ids)
    except Exception:  # noqa: BLE001  # a cache can fail in any way; the path without it always works
        return False
    # 2. Compare each row with its whole sequence.
    for number, row, hidden in zip(CONTINUED, ids, shared, strict=True):
        sequence = [*prompts[number], *row.tolist()]
        whole = torch.tensor(sequence, device=device)
        hidden_states = decoder(input_ids=whole[None]).last_hidden_state
        expected = hidden_states[0, -len(row) :]
        if not close(hidden, expected):
            return False
    return True


def is_quantised(model: PreTrainedModel) -> bool:
    """Return True if a model is quantised."""
    return getattr(model, "hf_quantizer", None) is not None
