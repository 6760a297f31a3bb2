"""A frozen causal language model as the bank uses it: prefix-shared forward passes that leave the model as it was."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

Head = Callable[[Tensor], Tensor]

Route = Callable[[Tensor], None]
"""Tells the adapters which slot each row of the coming forward passes belongs to; slots are sorted."""

SHORTEST_ROOT = 8  # tokens that prompts must have in common before running them apart pays


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
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


class _PrefixLayer(CacheLayerMixin):
    """Key/values of one attention layer: a prefix of other rows, gathered per row, followed by what comes in.

    Every position is kept, for sliding-window layers too: their window is applied by the model's own mask.

    Args:
        prefix: Keys and values `[m, heads, P, width]` to continue.
        rows: `[n]` which prefix each row continues.
        order: `[n, P + t]` where each position of prefix and new tokens together is taken from.
    """

    is_sliding = False

    def __init__(
        self,
        prefix: "tuple[Tensor, Tensor] | None" = None,
        rows: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.rows = rows
        self.order = order
        self.is_initialized = True
        self.whole: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: shapes come from the prefix."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.whole = (key_states, value_states)
        if self.prefix is not None:
            keys, values = (past if self.rows is None else past[self.rows] for past in self.prefix)
            self.whole = torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)
        if self.order is not None:
            order = self.order[:, None, :, None]
            keys, values = (part.gather(2, order.expand(part.shape)) for part in self.whole)
            self.whole = keys, values
        return self.whole

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values that the last pass attended to."""
        assert self.whole is not None, "the model left this layer of the cache unused"
        return self.whole

    def get_seq_length(self) -> int:
        return 0 if self.prefix is None else int(self.prefix[0].shape[-2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class _GrowingLayer(_PrefixLayer):
    """Key/values that grow by one token a step inside storage allocated once."""

    def __init__(self, prefix: tuple[Tensor, Tensor], rows: Tensor, room: int) -> None:
        super().__init__()
        self.length = int(prefix[0].shape[-2])
        self.storage = tuple(self._expand(part, rows, room) for part in prefix)

    def _expand(self, part: Tensor, rows: Tensor, room: int) -> Tensor:
        heads, width = part.shape[1], part.shape[3]
        storage = part.new_empty((len(rows), heads, self.length + room, width))
        values, counts = torch.unique_consecutive(rows, return_counts=True)
        for value, own in zip(values.tolist(), storage[:, :, : self.length].split(counts.tolist()), strict=True):
            own.copy_(part[value])
        return storage

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        for storage, states in zip(self.storage, (key_states, value_states), strict=True):
            storage[:, :, self.length : end] = states
        self.length = end
        keys, values = (storage[:, :, :end] for storage in self.storage)
        return keys, values

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but the given ones."""
        self.storage = tuple(storage[rows] for storage in self.storage)


class GrowingCache(Cache):
    """Key/values of rows that are being decoded."""

    def __init__(self, prefix: "Prefix", rows: Tensor, room: int) -> None:
        self.growing = [_GrowingLayer(layer, rows, room) for layer in prefix.layers]
        super().__init__(layers=list(self.growing))

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but the given ones, in every layer."""
        for layer in self.growing:
            layer.keep(rows)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Prompts that have been run: what rows that share them continue from.

    Attributes:
        layers: Keys and values `[m, heads, P, width]` of every attention layer.
        mask: `[m, P]` booleans, False on the padding, which is on the left.
        last_hidden: `[m, h]` final hidden state of each prompt's last token.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor
    last_hidden: Tensor


def pad_left(sequences: "list[tuple[int, ...]]", pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids `[m, P]` padded on the left, and the mask of real tokens `[m, P]`."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(sequences), width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = True
    return ids.to(device), mask.to(device)


def _common_length(prompts: "list[tuple[int, ...]]") -> int:
    """Return how many tokens all prompts begin with, at least one of each prompt's left over."""
    shortest = min(map(len, prompts)) - 1
    first = min(prompts), max(prompts)  # what the extremes share, all in between share
    differing = (place for place in range(shortest) if first[0][place] != first[1][place])
    return next(differing, shortest)


class CausalModel:
    """A base language model, used by calling its modules only.

    At construction a probe compares the prefix-shared pass and the bare vocabulary head with the model's own
    `forward`; whatever differs is not used (`shares_prefix`, `head`).

    Args:
        model: A causal language model of transformers; never changed.
        pad_id: Token id used as padding.
        explicit_positions: Whether to pass positions, counted without padding; only models whose attention knows
            nothing but distances can do without.

    Raises:
        ValueError: If the logits cannot be computed from the hidden states, or padding changes them.
    """

    def __init__(self, model: PreTrainedModel, pad_id: int, *, explicit_positions: bool = True) -> None:
        self.model = model
        self.pad_id = pad_id
        self.explicit_positions = explicit_positions
        self.decoder: nn.Module = model.base_model
        self.device = next(model.parameters()).device
        self.layers = int(model.config.get_text_config().num_hidden_layers)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        with frozen(model), torch.no_grad():
            self.head = self._find_head()
            self._probe_padding()
            self.shares_prefix = self._probe_prefix()
        if not self.shares_prefix:
            warnings.warn(
                f"{type(model).__name__} keeps a cache that cannot be shared between completions: prompts are run "
                "again for every completion, and sampling recomputes the whole sequence for every token",
                stacklevel=3,
            )

    def run(self, ids: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        """Return final hidden states `[n, t, h]` of tokens `[n, t]` that continue `cache`.

        Args:
            ids: `[n, t]` token ids.
            mask: `[n, P + t]` booleans over cached and new tokens; positions are counted from the first True.
            cache: What the tokens continue, or None.
        """
        positions = {}
        if self.explicit_positions:
            positions["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        # A model without a cache of keys and values has no such argument: it is named only when there is one.
        cached = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        output = self.decoder(input_ids=ids, attention_mask=mask.long(), **positions, **cached)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def run_prefix(
        self, prompts: "list[tuple[int, ...]]", slots: "list[int]", route: Route, shortest_root: int = SHORTEST_ROOT
    ) -> Prefix:
        """Run prompts once each, keeping what completions need to continue from them, gradients included.

        What all prompts begin with, a system prompt for instance, runs only once per slot.

        Args:
            prompts: Token ids of each.
            slots: Whose adapters run each prompt, sorted.
            route: Directs the adapters.
            shortest_root: Fewest common tokens that are worth a pass of their own.
        """
        owners, rows = torch.unique_consecutive(torch.tensor(slots), return_inverse=True)
        common = _common_length(prompts)
        if common < shortest_root or len(owners) == len(prompts):
            route(torch.tensor(slots))
            return self._run_on(None, torch.arange(len(prompts)), prompts)
        route(owners)
        root = self._run_on(None, torch.arange(len(owners)), [prompts[0][:common]] * len(owners))
        route(torch.tensor(slots))
        return self._run_on(root, rows.to(self.device), [prompt[common:] for prompt in prompts])

    def _run_on(self, root: Prefix | None, rows: Tensor, prompts: "list[tuple[int, ...]]") -> Prefix:
        """Run prompts that continue row number `rows[i]` of `root`, or nothing."""
        ids, mask = pad_left(prompts, self.pad_id, self.device)
        layers = [_PrefixLayer() for _ in range(self.layers)]
        if root is not None:
            # Root, padding, prompt -> padding, root, prompt: distances between tokens are then what they seem to be.
            place = torch.arange(root.mask.shape[1] + mask.shape[1], device=self.device)
            padding, end = (~mask).sum(1)[:, None], root.mask.shape[1] + (~mask).sum(1)[:, None]
            order = torch.where(
                place < padding, root.mask.shape[1] + place, torch.where(place < end, place - padding, place)
            )
            mask = torch.cat([root.mask[rows], mask], dim=1).gather(1, order)
            layers = [_PrefixLayer(layer, rows, order) for layer in root.layers]
        hidden = self.run(ids, mask, Cache(layers=list(layers)))
        return Prefix(layers=tuple(layer.taken() for layer in layers), mask=mask, last_hidden=hidden[:, -1])

    def run_completions(self, prefix: Prefix, rows: Tensor, ids: Tensor, present: Tensor) -> Tensor:
        """Return hidden states `[n, t, h]` of completions that continue prompt number `rows[i]` of `prefix`."""
        cache = Cache(layers=[_PrefixLayer(layer, rows) for layer in prefix.layers])
        return self.run(ids, torch.cat([prefix.mask[rows], present], dim=1), cache)

    def _find_head(self) -> Head:
        """Find the function from hidden states to logits that equals the model's own."""
        ids = torch.arange(4, device=self.device)[None] % self.model.config.get_text_config().vocab_size
        expected = self.model(input_ids=ids).logits
        hidden = self.decoder(input_ids=ids).last_hidden_state
        bare: Head = self.model.get_output_embeddings()
        config = self.model.config.get_text_config()
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
            if self._close(head(hidden), expected):
                return head
        raise ValueError(
            f"the logits of {type(self.model).__name__} are not its output embeddings applied to its final hidden "
            "states (soft-capped, scaled or bare), so log-probabilities cannot be computed: use another architecture"
        )

    def _probe_padding(self) -> None:
        """Refuse a model for which padding on the left changes the hidden states."""
        ids = torch.tensor([[3, 1, 2]], device=self.device) % self.model.config.get_text_config().vocab_size
        padded = torch.cat([torch.full_like(ids[:, :2], self.pad_id), ids], dim=1)
        mask = torch.ones_like(padded, dtype=torch.bool)
        mask[:, :2] = False
        try:
            shifted = self.run(padded, mask, None)[:, 2:]
        except TypeError as error:
            remedy = " and position_ids; pass calc_position_embeddings=False" if self.explicit_positions else ""
            raise ValueError(
                f"{type(self.model).__name__} cannot be run with attention_mask{remedy}: {error}"
            ) from error
        if not self._close(shifted, self.decoder(input_ids=ids).last_hidden_state):
            raise ValueError(
                f"padding on the left changes what {type(self.model).__name__} computes"
                f"{'' if self.explicit_positions else ': it needs positions, leave calc_position_embeddings at True'}"
            )

    def _probe_prefix(self) -> bool:
        """Tell whether completions on top of a shared, padded prefix give the logits of the plain forward pass."""
        vocabulary = self.model.config.get_text_config().vocab_size
        prompts = [(3, 1, 2, 3), (3, 1, 1)]
        rows = torch.tensor([0, 0, 1], device=self.device)
        ids = torch.tensor([[2, 1, 3], [3, 3, 1], [1, 2, 2]], device=self.device) % vocabulary
        present = torch.ones_like(ids, dtype=torch.bool)
        try:
            prompts = [tuple(token % vocabulary for token in prompt) for prompt in prompts]
            prefix = self.run_prefix(prompts, [0, 0], lambda slots: None, shortest_root=1)
            shared = self.run_completions(prefix, rows, ids, present)
        except Exception:  # noqa: BLE001  # an architecture's cache may fail in any way; the plain path is always right
            return False
        for row, own in enumerate(rows.tolist()):
            whole = torch.tensor([*prompts[own], *ids[row].tolist()], device=self.device)[None]
            plain = self.decoder(input_ids=whole).last_hidden_state[0, len(prompts[own]) :]
            if not self._close(shared[row], plain):
                return False
        return True

    @staticmethod
    def _close(got: Tensor, expected: Tensor) -> bool:
        tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        scale = float(expected.float().abs().max()) or 1.0
        return got.shape == expected.shape and float((got - expected).float().abs().max()) <= tolerance * scale
