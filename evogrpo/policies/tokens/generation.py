"""Sampling completions for all members at once: every prompt runs once per member, every draw has its own number."""

from typing import Protocol

import torch
from torch import Tensor

from evogrpo.functional.log_probs import invert_cumulative, scaled_logits
from evogrpo.policies.tokens.cache import GrowingCache
from evogrpo.policies.tokens.causal import CausalModel, Route, pad_left
from evogrpo.policies.tokens.micro_batches import share_prefixes
from evogrpo.records import Rollout, Rows

ROWS_OF_LOGITS = 128
COMPACT_BELOW = 0.75  # copying the cache pays when at least a quarter of its rows have ended


class _Decoding(Protocol):
    """Rows being decoded: hidden states of the newest position, one token at a time."""

    def start(self) -> Tensor: ...
    def advance(self, tokens: Tensor) -> Tensor: ...
    def keep(self, rows: Tensor) -> None: ...


class _SharedDecoding:
    """Decoding on top of prompts that ran once per (member, prompt)."""

    def __init__(self, base: CausalModel, route: Route, rows: Rows) -> None:
        pairs, self.prefix_of = share_prefixes(rows.member_ids, rows.prompt_ids)
        self.base, self.route, self.members = base, route, rows.member_ids
        prompts, slots = [rows.prompts[prompt] for _, prompt in pairs], [member for member, _ in pairs]
        prefix = base.run_prefix(prompts, slots, route)
        self.first = prefix.last_hidden
        self.mask = prefix.mask[self.prefix_of]
        self.cache = GrowingCache(prefix, self.prefix_of, rows.max_new_tokens - 1)

    def start(self) -> Tensor:
        self.route(self.members)
        return self.first[self.prefix_of]

    def advance(self, tokens: Tensor) -> Tensor:
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        return self.base.run(tokens[:, None], self.mask, self.cache)[:, 0]

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows)
        self.mask, self.members = self.mask[rows], self.members[rows]
        self.route(self.members)


class _PlainDecoding:
    """Decoding for models whose cache cannot be shared: the whole sequence runs again for every token."""

    def __init__(self, base: CausalModel, route: Route, rows: Rows) -> None:
        self.base, self.route, self.members = base, route, rows.member_ids
        self.ids, self.mask = pad_left([rows.prompts[i] for i in rows.prompt_ids.tolist()], base.pad_id, base.device)

    def start(self) -> Tensor:
        self.route(self.members)
        return self.base.run(self.ids, self.mask, None)[:, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        return self.base.run(self.ids, self.mask, None)[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.ids, self.mask, self.members = self.ids[rows], self.mask[rows], self.members[rows]
        self.route(self.members)


def generate(base: CausalModel, route: Route, rows: Rows, end_ids: Tensor) -> Rollout:
    """Sample one completion per row until an end of sequence or until the uniforms run out.

    Args:
        base: The base model, inside `frozen` and without gradients.
        route: Directs the adapters; called whenever the rows of the forward passes change.
        rows: Work, sorted by member and then prompt.
        end_ids: `[e]` token ids that end a completion.

    Returns:
        The completions, in the order of `rows`.
    """
    assert rows.uniforms is not None  # whoever calls has drawn them
    count, width = rows.uniforms.shape
    device = base.device
    actions = torch.full((count, width), base.pad_id, dtype=torch.long, device=device)
    present = torch.zeros((count, width), dtype=torch.bool, device=device)
    log_probs = torch.zeros((count, width), device=device)
    decoding: _Decoding = (_SharedDecoding if base.shares_prefix else _PlainDecoding)(base, route, rows)
    hidden = decoding.start()
    carried = torch.arange(count, device=device)  # rows that take part in the forward passes
    live = torch.ones(count, dtype=torch.bool, device=device)  # of those, the ones that have not ended
    for step in range(width):
        forbid = step < rows.min_new_tokens
        tokens, chosen = _choose(base, hidden, rows.temperature[carried], rows.uniforms[carried, step], end_ids, forbid)
        at = carried[live]
        actions[at, step], log_probs[at, step], present[at, step] = tokens[live], chosen[live], True
        live &= ~torch.isin(tokens, end_ids)
        alive = int(live.sum())
        if alive == 0 or step == width - 1:
            break
        if alive <= COMPACT_BELOW * len(carried):
            left = live.nonzero()[:, 0]
            decoding.keep(left)
            carried, tokens, live = carried[left], tokens[left], live[left]
        hidden = decoding.advance(tokens)
    ended = (present & torch.isin(actions, end_ids)).any(1)
    return Rollout(actions=actions, present=present, log_probs=log_probs, truncated=~ended)


def _choose(
    base: CausalModel, hidden: Tensor, temperature: Tensor, uniforms: Tensor, end_ids: Tensor, forbid: bool
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row and its log-probability under the sampling policy (0 for greedy rows)."""
    tokens = torch.empty(hidden.shape[0], dtype=torch.long, device=hidden.device)
    log_probs = torch.zeros(hidden.shape[0], device=hidden.device)
    for start in range(0, hidden.shape[0], ROWS_OF_LOGITS):
        part = slice(start, start + ROWS_OF_LOGITS)
        greedy = temperature[part] == 0
        heat = torch.where(greedy, 1.0, temperature[part])
        banned = torch.full_like(greedy, forbid)
        scaled = scaled_logits(base.head(hidden[part]), heat, banned, end_ids)
        best = scaled.max(1)
        if bool(greedy.all()):
            tokens[part] = best.indices
            continue
        weights = scaled.sub_(best.values[:, None]).exp_()
        drawn = invert_cumulative(weights, uniforms[part])
        drawn = drawn.clamp(max=weights.shape[1] - 1)  # a row of NaN points past the end
        tokens[part] = torch.where(greedy, best.indices, drawn)
        chance = weights.gather(1, drawn[:, None])[:, 0] / weights.sum(1)
        log_probs[part] = torch.where(greedy, 0.0, chance.log())
    return tokens, log_probs
