"""A frozen causal language model as the bank uses it: prefix-shared forward passes that leave the model as it was."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from evogrpo.policies.tokens.cache import Prefix, PrefixLayer

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
        layers = [PrefixLayer() for _ in range(self.layers)]
        if root is not None:
            # Root, padding, prompt -> padding, root, prompt: distances between tokens are then what they seem to be.
            place = torch.arange(root.mask.shape[1] + mask.shape[1], device=self.device)
            padding, end = (~mask).sum(1)[:, None], root.mask.shape[1] + (~mask).sum(1)[:, None]
            order = torch.where(
                place < padding, root.mask.shape[1] + place, torch.where(place < end, place - padding, place)
            )
            mask = torch.cat([root.mask[rows], mask], dim=1).gather(1, order)
            layers = [PrefixLayer(layer, rows, order) for layer in root.layers]
        hidden = self.run(ids, mask, Cache(layers=list(layers)))
        return Prefix(layers=tuple(layer.taken() for layer in layers), mask=mask, last_hidden=hidden[:, -1])

    def run_completions(self, prefix: Prefix, rows: Tensor, ids: Tensor, present: Tensor) -> Tensor:
        """Return hidden states `[n, t, h]` of completions that continue prompt number `rows[i]` of `prefix`."""
        cache = Cache(layers=[PrefixLayer(layer, rows) for layer in prefix.layers])
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
