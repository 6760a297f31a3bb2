"""The TokenModel protocol: what sampling and learning need of a base model, whatever its weights and its insides."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from evogrpo.policies.tokens.weights.weights import Route, View

P = TypeVar("P")


class Decoding(Protocol):
    """Rows that are written token by token."""

    def start(self) -> Tensor:
        """Return the hidden states `[n, h]` from which the first token of each row is predicted."""
        ...

    def advance(self, tokens: Tensor) -> Tensor:
        """Return the hidden states `[n, h]` after one more token `[n]` of each row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with the given rows alone, in that order; one that is there several times goes on as so many."""
        ...

    def set_aside(self, rows: Tensor, real: Tensor) -> Any:
        """Return what `TokenModel.resume` lets the given rows go on from, or None where there is no such thing.

        Args:
            rows: Which.
            real: `[k, t]` booleans: which of the t tokens they have been advanced by are theirs.
        """
        ...


class TokenModel(Protocol[P]):
    """A base model that rows of several members run through, each with its own weights, given as a view or a route.

    `P` is what the model makes of prompts, for its own `extend` and `decode`.

    Attributes:
        pad_id: Token id used as padding.
        device: Where it runs.
        context: Most tokens of a sequence; None = no limit.
        shares_prefix: Whether rows that continue one prompt share its pass.
        autocast: Makes the context, for mixed precision, that passes run in; losses are outside.
    """

    pad_id: int
    device: torch.device
    context: int | None
    shares_prefix: bool
    autocast: Callable[[], AbstractContextManager[None]]

    @property
    def exact(self) -> bool:
        """Whether sampling and scoring agree up to rounding in float32."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Make the model ready; all calls below happen inside, and leaving it puts everything back."""
        ...

    def prefix(self, prompts: Sequence[tuple[int, ...]], slots: Sequence[int], route: Route) -> P:
        """Prepare prompts for what continues them, gradients included.

        Args:
            prompts: Token ids of each.
            slots: Whose weights run each prompt, sorted.
            route: Directs rows to weights.
        """
        ...

    def resume(
        self,
        parts: Sequence[Any],
        part_of: Tensor,
        row_of: Tensor,
        tokens: Sequence[tuple[int, ...]],
        slots: Tensor,
        route: Route,
    ) -> P:
        """Return prompts `[n]`: rows that were set aside, each continued by some tokens.

        Args:
            parts: What `Decoding.set_aside` returned.
            part_of: `[n]` which part each row is in.
            row_of: `[n]` which of the rows set aside in that part it is.
            tokens: Of each row, those that follow, at least one.
            slots: `[n]` whose weights run each row, sorted.
            route: Directs rows to weights.
        """
        ...

    def extend(self, prefix: P, rows: Tensor, ids: Tensor, present: Tensor, view: View | None) -> Tensor:
        """Return hidden states `[n, 1 + t, h]`, from which the token after each prompt and each token is predicted.

        Args:
            prefix: The prompts.
            rows: `[n]` which prompt each row continues.
            ids: `[n, t]` its tokens.
            present: `[n, t]` booleans: real tokens.
            view: The weights that each row acts with.
        """
        ...

    def continued(
        self,
        prompts: Sequence[tuple[int, ...]],
        slots: Sequence[int],
        rows: Tensor,
        ids: Tensor,
        present: Tensor,
        members: Tensor,
        route: Route,
    ) -> Tensor:
        """Return what `extend` does of rows that continue prompts not run yet; all at once where that takes less time.

        Args:
            prompts: Token ids of each.
            slots: Whose weights run each prompt, sorted.
            rows: `[n]` which prompt each row continues, one whose slot is the row's own.
            ids: `[n, t]` its tokens.
            present: `[n, t]` booleans: real tokens.
            members: `[n]` whose weights run each row, sorted.
            route: Directs rows to weights.
        """
        ...

    def decode(self, prefix: P, rows: Tensor, slots: Tensor, room: int, route: Route) -> Decoding:
        """Begin to write rows that continue prompt number `rows[i]`, by up to `room` tokens that are fed back.

        Args:
            prefix: The prompts.
            rows: `[n]` which prompt each row continues.
            slots: `[n]` whose weights each row acts with, sorted.
            room: Most calls of `Decoding.advance`.
            route: Directs rows to weights.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[m, v]`, given hidden states `[m, h]`, without gradients."""
        ...

    def score(
        self,
        hidden: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        forbidden: Tensor,
        forbidden_ids: Tensor,
        chunk: int,
        *,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return `[k]` log-probabilities of tokens and `[k]` entropies in nats, given hidden states `[k, h]`.

        The arguments are those of `evogrpo.functional.log_probs.chunked_log_probs`.
        """
        ...


def check_context(context: int | None, width: int) -> None:
    """Refuse with a ValueError sequences of more tokens than the model's context; None = no limit."""
    if context is not None and width > context:
        raise ValueError(
            f"The longest prompt and completion take {width} tokens, but the model's context is {context}. Lower "
            "max_output_tokens, or set max_prompt_length to leave long prompts out. The config sets the context: "
            "max_position_embeddings, or original_max_position_embeddings (longrope), or floor_scale (Llama 4)."
        )
