"""What actions are conditioned on: prompts of a language model, observations of small networks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from evogrpo.outline import outline


class Inputs(Protocol):
    """What a bank conditions actions on; only the bank that made it reads it."""

    def select(self, rows: Tensor) -> Self:
        """Return the inputs of the given rows, in that order."""
        ...

    def joined(self, other: Self, width: int) -> Self:
        """Return the inputs of these rows, then of the other's, for `width` actions each."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Prompts of a language-model batch.

    Attributes:
        prompts: Token ids of each distinct prompt, without padding.
        prompt_ids: `[n]` which prompt each row answers.
        temperature: `[n]` at which the rows were (or are taken to be) sampled; the policy is softmax(logits / T).
        min_new_tokens: Ends of sequence were ruled out for that many first tokens of every turn.
        turn_places: `[n, t]` place of each token within its turn, counted from 0; None = one turn, so the column.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    temperature: Tensor
    min_new_tokens: int = 0
    turn_places: Tensor | None = None

    __repr__ = outline

    def select(self, rows: Tensor) -> "TokenInputs":
        """Return the inputs of the given rows, in that order; all prompts stay."""
        return replace(
            self,
            prompt_ids=some_rows(self.prompt_ids, rows),
            temperature=some_rows(self.temperature, rows),
            turn_places=None if self.turn_places is None else some_rows(self.turn_places, rows),
        )

    def places(self, width: int) -> Tensor:
        """Return the place within its turn of each of the first `width` tokens, `[n, width]`."""
        if self.turn_places is None:
            return torch.arange(width, device=self.prompt_ids.device).expand(len(self.prompt_ids), width)
        return self.turn_places[:, :width]

    def joined(self, other: "TokenInputs", width: int) -> "TokenInputs":
        """Return the inputs of both; the prompts of one must be the first of the other's."""
        turn_places = None
        if self.turn_places is not None or other.turn_places is not None:
            turn_places = torch.cat([padded(inputs.places(width), width) for inputs in (self, other)])
        return replace(
            self,
            prompts=max(self.prompts, other.prompts, key=len),
            prompt_ids=torch.cat([self.prompt_ids, other.prompt_ids]),
            temperature=torch.cat([self.temperature, other.temperature]),
            turn_places=turn_places,
        )


@dataclass(frozen=True, kw_only=True)
class ObservationInputs:
    """What small networks act on: one observation per action.

    Attributes:
        observations: A tensor `[n, t, ...]`, or dicts and tuples of such tensors for composite spaces.
        temperature: `[n]` at which the rows were sampled.
        action_masks: Legal actions, a tensor `[n, t, ...]` of booleans or dicts and tuples of them; None = all.
    """

    observations: Any
    temperature: Tensor
    action_masks: Any = None

    __repr__ = outline

    def select(self, rows: Tensor) -> "ObservationInputs":
        """Return the inputs of the given rows, in that order."""
        return ObservationInputs(
            observations=map_tensors(self.observations, lambda leaf: some_rows(leaf, rows)),
            temperature=some_rows(self.temperature, rows),
            action_masks=map_tensors(self.action_masks, lambda leaf: some_rows(leaf, rows)),
        )

    def flattened(self, places: Tensor, row: Tensor) -> "ObservationInputs":
        """Return one row `[1, ...]` for each of some actions.

        Args:
            places: Their places of `[n * t]`.
            row: The row that each belongs to.
        """

        def single(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 1).index_select(0, places)[:, None]

        return ObservationInputs(
            observations=map_tensors(self.observations, single),
            temperature=some_rows(self.temperature, row),
            action_masks=map_tensors(self.action_masks, single),
        )

    def joined(self, other: "ObservationInputs", width: int) -> "ObservationInputs":
        """Return the inputs of these rows, then of the other's, padded to `width` actions."""
        known = other.action_masks if self.action_masks is None else self.action_masks

        def masks_of(inputs: ObservationInputs) -> Any:
            # An environment may rule something out only now and then.
            rows = len(inputs.temperature)
            all_legal = map_tensors(known, lambda leaf: leaf.new_ones(rows, width, *leaf.shape[2:]))
            return all_legal if inputs.action_masks is None else inputs.action_masks

        return ObservationInputs(
            observations=join_trees(self.observations, other.observations, width),
            temperature=torch.cat([self.temperature, other.temperature]),
            action_masks=None if known is None else join_trees(masks_of(self), masks_of(other), width),
        )


def some_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of the given numbers, from 0: `values[rows]`, in a third of the time for thousands of them."""
    rows = rows.to(values.device)
    if values.dim() == 2 and values.shape[1] == 1:
        return values[:, 0].index_select(0, rows)[:, None]
    return values.index_select(0, rows)


def padded(values: Tensor, width: int, fill: float = 0) -> Tensor:
    """Return `[n, t, ...]` with as many places as `width` along t, the new ones filled."""
    missing = width - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_full((len(values), missing, *values.shape[2:]), fill)], 1)


def join_trees(one: Any, other: Any, width: int) -> Any:
    """Return two trees of one form, of tensors `[n, t, ...]`, joined along n and padded with 0 along t."""
    if isinstance(one, Mapping):
        return {name: join_trees(value, other[name], width) for name, value in one.items()}
    if isinstance(one, tuple | list):
        return type(one)(join_trees(*pair, width) for pair in zip(one, other, strict=True))
    return torch.cat([padded(one, width), padded(other, width)])


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return dicts, tuples and lists of tensors, however nested, with every tensor changed; None stays None."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tensors(value, change) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


@dataclass(frozen=True)
class NoInputs:
    """Stands where a batch's inputs have been left out."""

    def select(self, rows: Tensor) -> "NoInputs":
        """Return nothing, for any rows."""
        return self

    def joined(self, other: "NoInputs", width: int) -> "NoInputs":
        """Return nothing."""
        return self
