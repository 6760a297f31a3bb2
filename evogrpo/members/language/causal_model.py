"""CausalModel: forward passes of a frozen causal language model, with rows of several members and shared prefixes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy

import torch
from torch import Tensor, nn
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
    grouped_attention,
    prefix_cache_works,
)
from evogrpo.members.language.fsdp import sharded_layers
from evogrpo.members.language.kv_cache import (
    CachedDecoding,
    Decoding,
    KVCache,
    PlainDecoding,
    Prefix,
    PrefixLayer,
    Prompts,
    gather_rows,
)
from evogrpo.text import class_name
from evogrpo.warnings import warn

SHORTEST_ROOT = 8
"""Minimum common tokens of all prompts for which they run as a pass of their own."""


class CausalModel:
    """A base model of transformers whose forward passes contain rows of several members, each with its own weights.

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
        self._changed = {name: model.get_submodule(name) for name in changed}
        self._adapter_hook: LoraHook | None = None
        self._working = False
        self._active_fast_llama: FastLlama | None = None  # used now, inside `working`
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
            check_differentiable(model, self.decoder, self._changed)
            check_padding(
                lambda ids, mask: self.run(ids, mask, None, None),
                model,
                self.decoder,
                pad_id,
                explicit_positions=explicit_positions,
            )
            # `_check_prefix` sets the shortest root to 1, so the real value comes after it.
            self.shares_prefix = self._check_prefix()
            self._shortest_root = SHORTEST_ROOT
            self._usable_fast_llama = self._checked_fast_llama()  # passed its check
        if not self.shares_prefix:
            warn(
                f"The KV cache of {class_name(model)} cannot be shared between completions."
                " Sampling is slow: every token recomputes the whole sequence."
            )

    def with_model(self, model: PreTrainedModel) -> "CausalModel":
        """Return the passes of a model that differs in its weights only; checks are not repeated."""
        other = copy(self)
        other.model = model
        other.decoder = find_decoder(model)
        with torch.no_grad():
            other.head = find_head(model, other.decoder)
        if self._usable_fast_llama is None:
            layout = None
        else:
            layout = find_weight_layout(model, other.decoder)
        if layout is None:
            other._usable_fast_llama = None
        else:
            other._usable_fast_llama = FastLlama(layout)
        return other

    def with_settings_of(self, base: "CausalModel") -> "CausalModel":
        """Copy the current settings of `base` into this model, and return this model.

        fast_llama computes no gradients of weights, so passes with gradients use the model's own
        `forward`.
        """
        self.autocast = base.autocast
        self.shares_prefix = base.shares_prefix
        use_fast_llama = base.uses_fast_llama and not torch.is_grad_enabled()
        if use_fast_llama:
            self._active_fast_llama = self._usable_fast_llama
        else:
            self._active_fast_llama = None
        return self

    def _checked_fast_llama(self) -> FastLlama | None:
        """Return fast_llama if it supports the model and gives its results."""
        supported = self.explicit_positions and not fast_paths_disabled()
        if supported:
            layout = find_weight_layout(self.model, self.decoder)
        else:
            layout = None
        if layout is None:
            fast_llama = None
        else:
            fast_llama = FastLlama(layout, self._sharded_layers)
        if fast_llama is None or fast_llama.matches_model():
            return fast_llama
        warn(
            f"fast_llama gives other results for {class_name(self.model)}. The slower forward pass"
            " of transformers is used instead."
        )
        return None

    def _check_prefix(self) -> bool:
        """Return True if completions on top of shared prompts get the model's own hidden states."""

        def continued(prompts: Sequence[tuple[int, ...]], rows: Tensor, ids: Tensor) -> Tensor:
            present = torch.ones_like(ids, dtype=torch.bool)
            members = torch.zeros_like(rows)
            return self.hidden(
                prompts, [0] * len(prompts), rows, ids, present, members, lambda slots: None
            )[:, 1:]

        # so that the check uses a root
        self.shares_prefix = True
        self._shortest_root = 1
        return prefix_cache_works(continued, self.model, self.decoder)

    @property
    def exact(self) -> bool:
        """True in float32 and float64 without autocast: sampling and scoring agree up to rounding."""
        dtype = next(self.model.parameters()).dtype
        return dtype in (torch.float32, torch.float64) and self.autocast is nullcontext

    @property
    def uses_fast_llama(self) -> bool:
        """True inside `working` if fast_llama computes the passes instead of the model's own `forward`."""
        return self._active_fast_llama is not None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Freeze the model and register the adapter hooks. Nested calls do nothing."""
        if self._working:
            yield
            return
        handles: list[RemovableHandle] = []
        try:
            self._working = True
            with frozen_model(self.model), grouped_attention(self.device):
                mixed = self.autocast is not nullcontext or torch.is_autocast_enabled(
                    self.device.type
                )
                if mixed or not is_unmodified(self.decoder):
                    self._active_fast_llama = None
                else:
                    self._active_fast_llama = self._usable_fast_llama
                if self._active_fast_llama is None:
                    changed = self._changed
                else:
                    changed = {}
                handles.extend(
                    module.register_forward_hook(self._hook(name))
                    for name, module in changed.items()
                )
                yield
        finally:
            self._working = False
            self._active_fast_llama = None
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
        def change(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
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
        if self._active_fast_llama is not None:
            return self._active_fast_llama.run(ids, mask, cache, hook)
        positions = {}
        if self.explicit_positions:
            positions["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # Models without a KV cache have no such arguments, so pass them only with a cache.
        if cache is None:
            cached = {}
        else:
            cached = {"past_key_values": cache, "use_cache": True}
        try:
            self._adapter_hook = hook
            output = self.decoder(input_ids=ids, attention_mask=mask.long(), **positions, **cached)
        finally:
            self._adapter_hook = None
        hidden: Tensor = output.last_hidden_state
        return hidden

    def prefix(
        self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int], make_hook: HookFactory
    ) -> Prefix | Prompts:
        """Run each prompt once and return its KV cache, gradients included.

        The common beginning of all prompts, such as a system prompt, runs once per slot. If the
        cache cannot be shared, nothing runs yet.

        Args:
            prompts: Token ids of each prompt.
            slots: Slot of each prompt, sorted.
            make_hook: Hooks of the policy version.
        """
        if not self.shares_prefix:
            ids, mask = self._padded(prompts)
            return Prompts(ids=ids, mask=mask)
        root, rows, rest = self._run_root(prompts, slots, make_hook)
        return self._run_on(root, rows, rest, make_hook(torch.tensor(slots)))

    def _run_root(
        self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int], make_hook: HookFactory
    ) -> tuple[KVCache | None, Tensor, Sequence[tuple[int, ...]]]:
        """Run the common beginning of all prompts (the root) once per slot, if that saves work.

        Returns:
            The root's cache, or None; the cache row of each prompt; and the rest of each prompt.
        """
        owners, rows = torch.unique_consecutive(torch.tensor(slots), return_inverse=True)
        # The common beginning is at least one token shorter than each prompt. All prompts share
        # what the first and the last in alphabetical order share.
        shortest = min(map(len, prompts)) - 1
        low = min(prompts)
        high = max(prompts)
        common = next((place for place in range(shortest) if low[place] != high[place]), shortest)
        # In lockstep, the number of passes must not depend on the prompts of a rank.
        if self.lockstep or common < self._shortest_root or len(owners) == len(prompts):
            return None, torch.arange(len(prompts)), prompts
        beginnings = [prompts[0][:common]] * len(owners)
        prefix_of = torch.arange(len(owners))
        root = self._run_on(None, prefix_of, beginnings, make_hook(owners))
        return root, rows.to(self.device), [prompt[common:] for prompt in prompts]

    def hidden(
        self,
        prompts: Sequence[tuple[int, ...]],
        slots: Sequence[int],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        members: Tensor,
        make_hook: HookFactory,
    ) -> Tensor:
        """Return hidden states `[n, 1 + t, h]` of each prompt's last token and of the tokens that follow.

        Args:
            prompts: Token ids of each prompt.
            slots: Slot of each prompt, sorted.
            rows: `[n]` prompt of each row; prompt and row have the same slot.
            ids: `[n, t]` token ids after the prompt.
            present: `[n, t]` booleans: True for real tokens.
            members: `[n]` slot of each row, sorted.
            make_hook: Hooks of the policy version.
        """
        hook = make_hook(members)
        # 1. fast_llama: one pass for prompts and rows; only the root runs before.
        if self._active_fast_llama is not None and ids.shape[1]:
            root, root_rows, rest = self._run_root(prompts, slots, make_hook)
            prompt_ids, mask, layers = self._prepare(root, root_rows, rest)
            prompt_hook = make_hook(torch.tensor(slots))
            if prompt_hook is not None and hook is not None:
                hook = prompt_hook.by_token(prompt_ids.shape[1], hook, ids.shape[1])
            prepared = prompt_ids, mask, Cache(layers=list(layers))
            last, hidden = self._active_fast_llama.run_with_prompts(
                prepared, rows, ids, present, hook
            )
            return torch.cat([last[rows][:, None], hidden], dim=1)
        # 2. Without a cache that can be shared: whole sequences.
        prefix = self.prefix(prompts, slots, make_hook)
        if isinstance(prefix, Prompts):
            whole = (
                torch.cat([prefix.ids[rows], ids], dim=1),
                torch.cat([prefix.mask[rows], present], dim=1),
            )
            return self.run(*whole, None, hook)[:, prefix.ids.shape[1] - 1 :]
        # 3. With a cache: rows on top of the prompts' keys and values.
        first = prefix.last_hidden[rows][:, None]
        if not ids.shape[1]:
            return first
        cache = Cache(layers=[PrefixLayer(layer, rows) for layer in prefix.layers])
        hidden = self.run(ids, torch.cat([prefix.mask[rows], present], dim=1), cache, hook)
        return torch.cat([first, hidden], dim=1)

    def _padded(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Return token ids `[m, P]` padded on the left, and the mask of real tokens `[m, P]`."""
        check_token_ids(
            self.model, [max(map(max, prompts)), min(map(min, prompts))], "tokens of prompts"
        )
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = True
        return ids.to(self.device), mask.to(self.device)

    def resume(
        self,
        parts: Sequence[KVCache],
        part_of: Tensor,
        row_of: Tensor,
        tokens: Sequence[tuple[int, ...]],
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
            make_hook: Hooks of the policy version.
        """
        root = gather_rows(parts, part_of.to(self.device), row_of.to(self.device))
        return self._run_on(
            root, torch.arange(len(tokens), device=self.device), tokens, make_hook(slots)
        )

    def _run_on(
        self,
        root: KVCache | None,
        rows: Tensor,
        prompts: Sequence[tuple[int, ...]],
        hook: LoraHook | None,
    ) -> Prefix:
        """Run prompts on top of row number `rows[i]` of `root`, if any."""
        ids, mask, layers = self._prepare(root, rows, prompts)
        hidden = self.run(ids, mask, Cache(layers=list(layers)), hook)
        states = tuple(layer.whole for layer in layers if layer.whole is not None)
        assert len(states) == len(layers), "the model did not use a layer of the cache"
        return Prefix(layers=states, mask=mask, last_hidden=hidden[:, -1])

    def _prepare(
        self, root: KVCache | None, rows: Tensor, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, Tensor, list[PrefixLayer]]:
        """Return padded ids and mask of the prompts, and cache layers that start with the root.

        Args:
            root: Cache of what comes before the prompts, if anything.
            rows: `[m]` row of the root for each prompt.
            prompts: Token ids that follow the root.
        """
        ids, mask = self._padded(prompts)
        layers = [PrefixLayer() for _ in range(self.layers)]
        if root is not None:
            # Root, padding, prompt -> padding, root, prompt: token distances equal position
            # distances.
            length = root.mask.shape[1]
            place = torch.arange(length + mask.shape[1], device=self.device)
            padding = (~mask).sum(1)[:, None]
            order = torch.where(
                place < padding,
                length + place,
                torch.where(place < length + padding, place - padding, place),
            )
            mask = torch.cat([root.mask[rows], mask], dim=1).gather(1, order)
            layers = [PrefixLayer(layer, rows, order) for layer in root.layers]
        return ids, mask, layers

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
            make_hook: Hooks of the policy version.
        """
        if isinstance(prefix, Prompts):
            return PlainDecoding(self.run, prefix, prompt_of, slots, make_hook)
        if self._active_fast_llama is not None:
            passes = self._active_fast_llama

            def begin(numbers: Tensor) -> Decoding:
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
        """Return logits `[m, v]` of hidden states `[m, h]`, without gradient."""
        weight = self.head_matrix(hidden)
        if weight is None:
            return self.head(hidden)
        return frozen_linear(hidden, weight)

    def head_matrix(self, hidden: Tensor) -> Tensor | None:
        """Return the vocabulary matrix `[v, h]` if fast_llama is in use and the head is nothing but this product."""
        if self._active_fast_llama is None:
            return None
        return head_matrix(self.head, hidden)
