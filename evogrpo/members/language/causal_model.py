"""CausalModel: forward passes of a frozen language model, with rows of several members.

Letters in shapes: `n` rows, `t` new tokens, `m` prompts, `P` tokens of a prompt, `h` width of a
hidden state, `v` vocabulary.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from evogrpo.functional.matmul import frozen_linear
from evogrpo.members.fast_llama.decode import FastDecoding, shared_prefix_decoding
from evogrpo.members.fast_llama.forward import FastLlama
from evogrpo.members.fast_llama.weight_layout import (
    fast_paths_disabled,
    find_weight_layout,
    head_matrix,
    is_unmodified,
)
from evogrpo.members.language.adapters import HookFactory, LoraHook
from evogrpo.members.language.compatibility import (
    check_causal,
    check_differentiable,
    check_padding,
    check_token_ids,
    context_of,
    find_decoder,
    find_head,
    frozen_model,
    prefix_cache_works,
)
from evogrpo.members.language.fsdp import layers_of, sharded_layers
from evogrpo.members.language.kv_cache import (
    CachedDecoding,
    Decoding,
    KVCache,
    PlainDecoding,
    Prefix,
    PrefixLayer,
    Prompts,
)
from evogrpo.text import class_name
from evogrpo.warnings import warn

MIN_SHARED_TOKENS = 8
"""Minimum common tokens of all prompts for which they run as a pass of their own."""

Tokens = tuple[int, ...]
"""Token ids of a prompt."""


class CausalModel:
    """A base model of transformers whose passes contain rows of several members.

    Members' weights are applied by forward hooks, which are registered only inside `working`.

    The constructor compares the pass with shared prefixes, the vocabulary head alone and, for
    models like Llama, fast_llama with the model's own `forward`. A method that gives other results
    is not used (`shares_prefix`, `head`, `uses_fast_llama`). fast_llama is also not used under
    autocast or if the model has hooks of the user's.

    Args:
        model: A causal language model of transformers; never changed.
        pad_id: Token id used as padding.
        changed: Dotted names of the modules whose output the adapter hook changes.
        explicit_positions: Pass position ids, counted without padding. Only models with purely
            relative positions work without.

    Raises:
        ValueError: If the model is not causal, its logits are not a function of its hidden states,
            or padding changes them.

    Attributes:
        device: Device of the model.
        context: Maximum sequence length in tokens; None = no limit.
        shares_prefix: Rows that continue one prompt share its forward pass.
        autocast: Returns the context manager of forward passes, for mixed precision.
        recomputes_layers: Passes with gradients store the inputs of layers only, and compute the
            rest again in the backward pass, which must be inside `working` too.
        lockstep: True if all ranks run each learning pass together, because each holds a part of
            the base.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pad_id: int,
        *,
        changed: Sequence[str] = (),
        explicit_positions: bool = True,
    ) -> None:
        # 1. Settings, and the parts of the model.
        self.model = model
        self.pad_id = pad_id
        self.explicit_positions = explicit_positions
        self.autocast: Callable[[], AbstractContextManager[None]] = nullcontext
        self.recomputes_layers = False
        self._changed_modules = {name: model.get_submodule(name) for name in changed}
        self._adapter_hook: LoraHook | None = None
        self._working = False
        # The forward pass in use, inside `working`.
        self._active_fast_llama: FastLlama | None = None
        self._sharded_layers = sharded_layers(model)
        self.lockstep = self._sharded_layers is not None
        self.decoder = find_decoder(model)
        self.device = next(model.parameters()).device
        self.layers = int(model.config.get_text_config().num_hidden_layers)
        self.context = context_of(model)
        # 2. Check the model, and choose the methods that give its own results.
        with frozen_model(model), torch.no_grad():
            check_causal(model)
            self.head = find_head(model, self.decoder)
            check_differentiable(model, self.decoder, self._changed_modules)
            check_padding(
                lambda ids, mask: self.run(ids, mask, None, None),
                model,
                self.decoder,
                pad_id,
                explicit_positions=explicit_positions,
            )
            # `_check_prefix` sets `_min_shared_tokens` to 1, so its real value comes afterwards.
            self.shares_prefix = self._check_prefix()
            self._min_shared_tokens = MIN_SHARED_TOKENS
            # None if fast_llama does not support the model, or gives other results.
            self._usable_fast_llama = self._checked_fast_llama()
        if not self.shares_prefix:
            warn(
                f"The KV cache of {class_name(model)} cannot be shared between completions."
                " Sampling is slow: every token recomputes the whole sequence."
            )

    def with_model(self, model: PreTrainedModel) -> "CausalModel":
        """Return the passes of a model with other weights; checks are not repeated."""
        other = copy(self)
        other.model = model
        other.decoder = find_decoder(model)
        with torch.no_grad():
            other.head = find_head(model, other.decoder)
        # A layout refers to the weights, so that of the base cannot be shared.
        if self._usable_fast_llama is not None:
            layout = find_weight_layout(model, other.decoder)
            other._usable_fast_llama = None
            if layout is not None:
                other._usable_fast_llama = FastLlama(layout)
        return other

    def with_settings_of(self, base: "CausalModel") -> "CausalModel":
        """Copy the current settings of `base` into this model, and return this model.

        fast_llama computes no gradients of weights, so passes with gradients use the model's own
        `forward`.
        """
        self.autocast = base.autocast
        self.shares_prefix = base.shares_prefix
        self._active_fast_llama = None
        if base.uses_fast_llama and not torch.is_grad_enabled():
            self._active_fast_llama = self._usable_fast_llama
        return self

    def _checked_fast_llama(self) -> FastLlama | None:
        """Return fast_llama if it supports the model and gives its results."""
        if fast_paths_disabled() or not self.explicit_positions:
            return None
        # Only some architectures are supported, and their results are compared.
        layout = find_weight_layout(self.model, self.decoder)
        if layout is None:
            return None
        fast_llama = FastLlama(layout, self._sharded_layers)
        if fast_llama.matches_model():
            return fast_llama
        warn(
            f"fast_llama gives other results for {class_name(self.model)}. The slower forward pass"
            " of transformers is used instead."
        )
        return None

    def _check_prefix(self) -> bool:
        """Return True if completions on top of shared prompts get the model's own hidden states."""

        def continued(prompts: Sequence[Tokens], rows: Tensor, ids: Tensor) -> Tensor:
            """Return hidden states of rows that continue prompts, after their first token."""
            slots = [0] * len(prompts)
            members = torch.zeros_like(rows)
            present = torch.ones_like(ids, dtype=torch.bool)
            hidden = self.hidden(prompts, slots, rows, ids, present, members, lambda slots: None)
            return hidden[:, 1:]

        # The check shares the beginning of all prompts, however short it is.
        self.shares_prefix = True
        self._min_shared_tokens = 1
        return prefix_cache_works(continued, self.model, self.decoder)

    @property
    def exact(self) -> bool:
        """True in float32 and float64 without autocast: sampling and scoring agree.

        False in float32 where torch may round the factors of products, for example to TF32.
        """
        dtype = next(self.model.parameters()).dtype
        if self.autocast is not nullcontext:
            return False
        if dtype == torch.float32:
            return torch.get_float32_matmul_precision() == "highest"
        return dtype == torch.float64

    @property
    def uses_fast_llama(self) -> bool:
        """True inside `working` if fast_llama computes the passes, not the model's `forward`."""
        return self._active_fast_llama is not None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Freeze the model and register the adapter hooks. Nested calls do nothing."""
        if self._working:
            yield
            return
        handles: list[RemovableHandle] = []
        # Both kinds of autocast: that of the bank, and one around the caller's code.
        mixed = self.autocast is not nullcontext or torch.is_autocast_enabled(self.device.type)
        try:
            self._working = True
            with frozen_model(self.model), _grouped_attention(self.device):
                if is_unmodified(self.decoder) and not mixed:
                    self._active_fast_llama = self._usable_fast_llama
                # fast_llama adds the adapters itself.
                if self._active_fast_llama is None:
                    for name, module in self._changed_modules.items():
                        handles.append(module.register_forward_hook(self._hook(name)))
                yield
        finally:
            self._working = False
            self._active_fast_llama = None
            # Also after an error, so that the model is as it was.
            if self._sharded_layers is not None:
                self._sharded_layers.reshard()
            for handle in handles:
                handle.remove()

    def in_lockstep(self) -> AbstractContextManager[None]:
        """Return a context for passes; see `ShardedLayers.in_lockstep`."""
        if self._sharded_layers is None:
            return nullcontext()
        return self._sharded_layers.in_lockstep()

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]:
        """Return the forward hook of a module with adapters."""

        def change(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            """Return the output with adapters; None leaves it as it is."""
            if self._adapter_hook is None:
                return None
            return self._adapter_hook(name, args[0], output)

        return change

    def run(self, ids: Tensor, mask: Tensor, cache: Cache | None, hook: LoraHook | None) -> Tensor:
        """Return final hidden states `[n, t, h]` of tokens `[n, t]` that continue `cache`.

        Args:
            ids: `[n, t]` token ids.
            mask: `[n, P + t]` booleans over cached and new tokens; positions are counted from the
                first True.
            cache: KV cache of earlier tokens, if any.
            hook: Adapter hook; None = base only.
        """
        recompute = self.recomputes_layers and torch.is_grad_enabled()
        if self._active_fast_llama is not None:
            return self._active_fast_llama.run(ids, mask, cache, hook, recompute=recompute)
        # Models with relative positions, or without a KV cache, have no such arguments.
        options: dict[str, object] = {}
        if self.explicit_positions:
            # Padding has no position.
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            options["position_ids"] = positions[:, -ids.shape[1] :]
        if cache is not None:
            options["past_key_values"] = cache
            options["use_cache"] = True
        layers = self._recomputing_layers(hook) if recompute else nullcontext()
        with self._using(hook), layers:
            output = self.decoder(input_ids=ids, attention_mask=mask.long(), **options)
        hidden: Tensor = output.last_hidden_state
        return hidden

    @contextmanager
    def _using(self, hook: LoraHook | None) -> Iterator[None]:
        """Apply the adapters of a hook inside the block."""
        before = self._adapter_hook
        self._adapter_hook = hook
        try:
            yield
        finally:
            self._adapter_hook = before

    @contextmanager
    def _recomputing_layers(self, hook: LoraHook | None) -> Iterator[None]:
        """Let calls of layers compute their activations again in the backward pass."""

        def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
            def compute(*args: Any, **options: Any) -> Any:
                # The backward pass runs outside of `run`, so the hook is set here.
                with self._using(hook):
                    return forward(*args, **options)

            return partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)

        # A function in the layer's `__dict__` replaces `forward` of its class. Calls of the layer
        # still run its hooks, once.
        replaced = []
        try:
            for layer in layers_of(self.model):
                attributes = vars(layer)
                replaced.append((attributes, attributes.get("forward")))
                attributes["forward"] = recomputed(layer.forward)
            yield
        finally:
            for attributes, before in replaced:
                del attributes["forward"]
                if before is not None:
                    attributes["forward"] = before

    def prefix(
        self, prompts: Sequence[Tokens], slots: Sequence[int], make_hook: HookFactory
    ) -> Prefix | Prompts:
        """Run each prompt once and return its KV cache, gradients included.

        The common beginning of all prompts, such as a system prompt, runs once per slot. If the
        cache cannot be shared, nothing runs yet.

        Args:
            prompts: Token ids of each prompt.
            slots: Slot of each prompt, sorted.
            make_hook: Hooks of the weights, the reference or the base.
        """
        if not self.shares_prefix:
            ids, mask = self._padded(prompts)
            return Prompts(ids=ids, mask=mask)
        shared, rows, rest = self._run_shared_beginning(prompts, slots, make_hook)
        return self._run_on(shared, rows, rest, make_hook(torch.tensor(slots)))

    def _run_shared_beginning(
        self, prompts: Sequence[Tokens], slots: Sequence[int], make_hook: HookFactory
    ) -> tuple[KVCache | None, Tensor, Sequence[Tokens]]:
        """Run the beginning that all prompts share once per slot, if that saves work.

        Returns:
            Its cache, or None; the cache row of each prompt; and the rest of each prompt.
        """
        members, rows = torch.unique_consecutive(torch.tensor(slots), return_inverse=True)
        # 1. Length of the common beginning, at least one token shorter than each prompt. All
        #    prompts share what the first and the last in alphabetical order share.
        low = min(prompts)
        high = max(prompts)
        limit = min(map(len, prompts)) - 1
        common = 0
        while common < limit and low[common] == high[common]:
            common += 1
        # 2. In lockstep, the number of passes must not depend on the prompts of a rank.
        saves_work = common >= self._min_shared_tokens and len(members) < len(prompts)
        if self.lockstep or not saves_work:
            return None, torch.arange(len(prompts)), prompts
        # 3. Run it.
        beginnings = [prompts[0][:common]] * len(members)
        no_past = torch.arange(len(members))
        cache = self._run_on(None, no_past, beginnings, make_hook(members))
        rests = [prompt[common:] for prompt in prompts]
        return cache, rows.to(self.device), rests

    def hidden(
        self,
        prompts: Sequence[Tokens],
        slots: Sequence[int],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        members: Tensor,
        make_hook: HookFactory,
    ) -> Tensor:
        """Return hidden states `[n, 1 + t, h]` of each prompt's last token and those after it.

        Args:
            prompts: Token ids of each prompt.
            slots: Slot of each prompt, sorted.
            rows: `[n]` prompt of each row; prompt and row have the same slot.
            ids: `[n, t]` token ids after the prompt.
            present: `[n, t]` booleans: True for real tokens.
            members: `[n]` slot of each row, sorted.
            make_hook: Hooks of the weights, the reference or the base.
        """
        hook = make_hook(members)
        # 1. fast_llama: one pass for prompts and rows; only the shared beginning runs before.
        if self._active_fast_llama is not None and ids.shape[1]:
            shared, shared_rows, rest = self._run_shared_beginning(prompts, slots, make_hook)
            prompt_ids, mask, layers = self._prepare(shared, shared_rows, rest)
            prompt_hook = make_hook(torch.tensor(slots))
            if prompt_hook is not None and hook is not None:
                hook = prompt_hook.by_token(prompt_ids.shape[1], hook, ids.shape[1])
            prepared = (prompt_ids, mask, Cache(layers=list(layers)))
            last, hidden = self._active_fast_llama.run_with_prompts(
                prepared, rows, ids, present, hook, recompute=self.recomputes_layers
            )
            return torch.cat([last[rows][:, None], hidden], dim=1)
        prefix = self.prefix(prompts, slots, make_hook)
        mask = torch.cat([prefix.mask[rows], present], dim=1)  # [n, P + t]
        # 2. Without a cache that can be shared: whole sequences.
        if isinstance(prefix, Prompts):
            whole = torch.cat([prefix.ids[rows], ids], dim=1)
            hidden = self.run(whole, mask, None, hook)
            return hidden[:, prefix.ids.shape[1] - 1 :]
        # 3. With a cache: rows on top of the prompts' keys and values.
        first = prefix.last_hidden[rows][:, None]
        if not ids.shape[1]:
            return first
        cache = Cache(layers=[PrefixLayer(layer, rows) for layer in prefix.layers])
        hidden = self.run(ids, mask, cache, hook)
        return torch.cat([first, hidden], dim=1)

    def _padded(self, prompts: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Return token ids `[m, P]` padded on the left, and the mask of real tokens `[m, P]`."""
        # 1. Check the smallest and the largest id, which is fast.
        smallest = min(map(min, prompts))
        largest = max(map(max, prompts))
        check_token_ids(self.model, [largest, smallest], "tokens of prompts")
        # 2. Fill in the prompts from the right.
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            # On the left, so that the last column has the last token of each prompt.
            start = width - len(prompt)
            ids[row, start:] = torch.tensor(prompt)
            mask[row, start:] = True
        return ids.to(self.device), mask.to(self.device)

    def resume(
        self,
        parts: Sequence[KVCache],
        part_of: Tensor,
        row_of: Tensor,
        tokens: Sequence[Tokens],
        slots: Tensor,
        make_hook: HookFactory,
    ) -> Prefix:
        """Run new tokens on top of saved caches.

        Args:
            parts: Results of `Decoding.copy_cache`.
            part_of: `[n]` index into `parts` of each row.
            row_of: `[n]` row within that part.
            tokens: New tokens of each row, at least one.
            slots: `[n]` slot of each row, sorted.
            make_hook: Hooks of the weights, the reference or the base.
        """
        # Rows of different caches have different lengths; gathering pads them on the left.
        past = _gather_rows(parts, part_of.to(self.device), row_of.to(self.device))
        rows = torch.arange(len(tokens), device=self.device)
        return self._run_on(past, rows, tokens, make_hook(slots))

    def _run_on(
        self,
        past: KVCache | None,
        rows: Tensor,
        prompts: Sequence[Tokens],
        hook: LoraHook | None,
    ) -> Prefix:
        """Run prompts on top of row number `rows[i]` of `past`, if any."""
        ids, mask, layers = self._prepare(past, rows, prompts)
        hidden = self.run(ids, mask, Cache(layers=list(layers)), hook)
        # Keys and values of past and prompts, which the layers of the cache have kept.
        states = tuple(layer.whole for layer in layers if layer.whole is not None)
        assert len(states) == len(layers), "the model did not use a layer of the cache"
        return Prefix(layers=states, mask=mask, last_hidden=hidden[:, -1])

    def _prepare(
        self, past: KVCache | None, rows: Tensor, prompts: Sequence[Tokens]
    ) -> tuple[Tensor, Tensor, list[PrefixLayer]]:
        """Return padded ids and mask of the prompts, and cache layers that start with the past.

        Args:
            past: Cache of what comes before the prompts, if anything.
            rows: `[m]` row of the past for each prompt.
            prompts: Token ids that follow the past.
        """
        ids, mask = self._padded(prompts)
        if past is None:
            return ids, mask, [PrefixLayer() for _ in range(self.layers)]
        # Move padding to the left: past, padding, prompt -> padding, past, prompt. Distances of
        # tokens are then distances of positions. `order` is where each place is read from.
        length = past.mask.shape[1]
        padding = (~mask).sum(1)[:, None]  # [m, 1]
        place = torch.arange(length + mask.shape[1], device=self.device)
        past_or_prompt = torch.where(place < length + padding, place - padding, place)
        order = torch.where(place < padding, length + place, past_or_prompt)  # [m, P + t]
        whole_mask = torch.cat([past.mask[rows], mask], dim=1)
        mask = whole_mask.gather(1, order)
        return ids, mask, [PrefixLayer(layer, rows, order) for layer in past.layers]

    def decode(
        self,
        prefix: Prefix | Prompts,
        prompt_of: Tensor,
        slots: Tensor,
        room: int,
        make_hook: HookFactory,
    ) -> Decoding:
        """Start decoding.

        Args:
            prefix: Result of `prefix` or `resume`.
            prompt_of: `[n]` prompt of each row.
            slots: `[n]` slot of each row, sorted.
            room: Maximum number of calls of `Decoding.advance`.
            make_hook: Hooks of the weights, the reference or the base.
        """
        if isinstance(prefix, Prompts):
            return PlainDecoding(self.run, prefix, prompt_of, slots, make_hook)
        if self._active_fast_llama is not None:
            passes = self._active_fast_llama

            def begin(numbers: Tensor) -> Decoding:
                """Begin to decode the rows of these numbers."""
                return FastDecoding(
                    passes, prefix, prompt_of[numbers], slots[numbers], room, make_hook
                )

            # Run rows with equal tokens so far as one. On a GPU, finding them would synchronise at
            # every token.
            if self.device.type == "cpu":
                return shared_prefix_decoding(begin, prompt_of)
            return begin(torch.arange(len(prompt_of), device=self.device))
        return CachedDecoding(self.run, prefix, prompt_of, slots, make_hook)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[n, v]` of hidden states `[n, h]`, without gradient."""
        # fast_llama's product is faster; it is the same for a plain linear head.
        weight = self.head_matrix(hidden)
        if weight is None:
            return self.head(hidden)
        return frozen_linear(hidden, weight)

    def head_matrix(self, hidden: Tensor) -> Tensor | None:
        """Return the vocabulary matrix `[v, h]` if fast_llama is used and the head is linear."""
        if self._active_fast_llama is None:
            return None
        return head_matrix(self.head, hidden)


def _gather_rows(parts: Sequence[KVCache], part_of: Tensor, row_of: Tensor) -> KVCache:
    """Return rows of several caches: row i is row `row_of[i]` of part `part_of[i]`.

    They are padded on the left to the widest.
    """
    # 1. Rows of each part, part by part; `back` restores the caller's order.
    numbers = part_of.unique().tolist()
    used = [parts[number] for number in numbers]
    rows = [row_of[part_of == number] for number in numbers]
    back = torch.argsort(torch.argsort(part_of, stable=True))
    width = max(part.mask.shape[1] for part in used)

    # 2. Pad on the left along `dim`, concatenate, reorder.
    def joined(values: Sequence[Tensor], dim: int) -> Tensor:
        """Return one tensor of all parts, in the order of the rows."""
        padded = []
        for value, indices in zip(values, rows, strict=True):
            missing = width - value.shape[dim]
            # `pad` counts from the last axis: nothing to add to the axes after `dim`.
            after = [0, 0] * (value.dim() - 1 - dim)
            padded.append(pad(value[indices], (*after, missing, 0)))
        return torch.cat(padded)[back]

    layers = []
    for of_parts in zip(*(part.layers for part in used), strict=True):
        every_keys, every_values = zip(*of_parts, strict=True)
        layers.append((joined(every_keys, 2), joined(every_values, 2)))
    mask = joined([part.mask for part in used], 1)
    return KVCache(layers=tuple(layers), mask=mask)


@contextmanager
def _grouped_attention(device: torch.device) -> Iterator[None]:
    """On a CPU, make transformers use grouped-query attention without copies for each head.

    By default, transformers does so only without a mask, because kernels of other devices need
    that.
    """
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    try:
        if device.type == "cpu":
            os.environ[name] = "1"
        yield
    finally:
        # A variable that the user has set keeps its value.
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
