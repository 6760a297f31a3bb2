"""Records that sampling, learning and evaluation exchange."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from evogrpo.arrays import Float32Array, IntArray
from evogrpo.interruption import NEVER, Stop
from evogrpo.stop_strings import StopStrings
from evogrpo.text import short_repr
from evogrpo.validation import REAL, NonNegativeInt, PositiveFloat, PositiveShare, settings

__all__ = [
    "DEFAULT_POLICY", "Actor", "Batch", "Conversation", "Experience", "ObservationInputs",
    "Rollout", "SampledActions", "SamplingBatch", "SamplingOptions", "TokenInputs",
    "map_tensors", "positions_in_turn", "select_rows",
]  # fmt: skip

R = TypeVar("R")

# ---- sampling


@settings
class SamplingOptions:
    """Truncation of the distribution that completions are sampled from.

    See `evogrpo.functional.log_probs`.

    Members learn the whole distribution: log-probabilities of a truncated one differ from the
    trainer's.

    Attributes:
        top_k: Sample from this many of the most likely tokens; 0 = all.
        top_p: Sample from the most likely tokens that together have this probability; in (0, 1], 1
            = all.
        min_p: Sample from tokens at least this many times as likely as the most likely one; in [0,
            1), 0 = all.
        repetition_penalty: Divides positive logits, and multiplies others, of tokens that occur
            already; above 0, 1 = none. Affects greedy rows as well.

    Raises:
        ValueError: If a number is out of range.
    """

    top_k: NonNegativeInt = 0
    top_p: PositiveShare = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1), REAL] = 0.0
    repetition_penalty: PositiveFloat = 1.0


UNTRUNCATED = SamplingOptions()
"""The whole distribution."""


def changed_options(options: SamplingOptions) -> dict[str, float]:
    """Return the options that change the distribution, by name."""
    return {
        name: value for name, value in vars(options).items() if value != getattr(UNTRUNCATED, name)
    }


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """Rows to sample, in any order: one completion of a prompt by a member each.

    Conversations are sampled turn by turn: `history` holds the tokens after the prompt so far.
    `uniforms` and the numbers of new tokens count from 0 in each turn.

    Attributes:
        prompts: Token ids of each distinct prompt.
        prompt_ids: `[n]` index of each row's prompt.
        member_ids: `[n]` slot of the member that samples each row.
        temperature: `[n]` at least 0; 0 means the most likely token.
        uniforms: `[n, t]` random numbers in [0, 1): row i samples token j with `uniforms[i, j]`.
            None = the sampler draws its own.
        max_new_tokens: Maximum number of tokens sampled per row: the width of `uniforms` if there
            are any.
        min_new_tokens: Number of first tokens that cannot be an end of sequence.
        options: Truncation of the distribution.
        stop_strings: Texts that end a completion, of which their tokens are a part; None = none.
        history: Token ids after each row's prompt, completions and replies alike; None = nothing
            yet.
        keep: Return the state needed to continue these rows (their KV cache) as `Rollout.kept`.
        kept: State that an earlier rollout kept for these rows. Only saves work: a sampler may
            recompute it.
        kept_rows: `[n]` index of each row in the rollout that `kept` is from; None = the same rows
            in that order.
        stop: Checked between tokens; a sampler may ignore it.

    Raises:
        ValueError: If `max_new_tokens` is below 1, as without `uniforms` if it is not given.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    member_ids: Tensor
    temperature: Tensor
    uniforms: Tensor | None = None
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    options: SamplingOptions = UNTRUNCATED
    stop_strings: StopStrings | None = None
    history: tuple[tuple[int, ...], ...] | None = None
    keep: bool = False
    kept: object | None = None
    kept_rows: Tensor | None = None
    stop: Stop = field(default=NEVER, repr=False)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.uniforms is not None:
            object.__setattr__(self, "max_new_tokens", int(self.uniforms.shape[1]))
        if self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, got {self.max_new_tokens}. Give it, or give"
                " uniforms, whose width it is."
            )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def select(self, rows: Tensor) -> "SamplingBatch":
        """Return rows by index; all prompts stay."""
        fields: dict[str, Any] = {
            name: values[rows] for name, values in vars(self).items() if isinstance(values, Tensor)
        }
        if self.kept is not None:  # without `kept_rows`, row i continues row i of the kept state
            fields.setdefault("kept_rows", rows)
        if self.history is not None:
            fields["history"] = tuple(self.history[row] for row in rows.tolist())
        return replace(self, **fields)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sampled completions, one row for each row of a `SamplingBatch`.

    Attributes:
        actions: `[n, t]` token ids; the padding id after the end.
        present: `[n, t]` True for tokens of completions (the end of sequence included) and of
            replies.
        log_probs: `[n, t]` log-probabilities in nats under the distribution after
            `SamplingBatch.options`; 0 where not present.
        truncated: `[n]` True if the row reached its maximum length without an end of sequence or a
            stop string.
        exact: The log-probabilities equal the trainer's, up to rounding in float32. Always False
            with truncating options.
        action_mask: `[n, t]` True for tokens sampled by the member, a subset of `present`, which is
            the default.
        kept: State to continue the rows from, if `SamplingBatch.keep` was set and the sampler
            supports it. Opaque.

    Raises:
        ValueError: If a field is no tensor of this shape and type.
    """

    actions: Tensor
    present: Tensor
    log_probs: Tensor
    truncated: Tensor
    exact: bool = False
    action_mask: Tensor = None  # type: ignore[assignment]  # set below
    kept: object | None = None

    __repr__ = short_repr

    def to(self, device: torch.device) -> "Rollout":
        """Return this rollout on a device."""
        names = ("actions", "present", "log_probs", "truncated", "action_mask")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def __post_init__(self) -> None:
        if self.action_mask is None:
            object.__setattr__(self, "action_mask", self.present)
        # Samplers of users return rollouts.
        if not isinstance(self.actions, Tensor) or self.actions.dim() != 2:
            raise ValueError("actions of a Rollout must be a tensor [n, t] of token ids.")
        shape = tuple(self.actions.shape)
        fields = {
            "present": (shape, torch.bool),
            "action_mask": (shape, torch.bool),
            "log_probs": (shape, torch.float32),
            "truncated": (shape[:1], torch.bool),
        }
        for name, expected in fields.items():
            value = getattr(self, name)
            found: object = type(value).__name__
            if isinstance(value, Tensor):
                found = tuple(value.shape), value.dtype
            if found != expected:
                raise ValueError(
                    f"{name} of a Rollout must have the shape and type {expected}, got {found}."
                )


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Completions of a member and replies of the environment so far, without the prompt.

    Attributes:
        row: Number of the conversation in its batch of prompts. An environment may keep state
            between turns under it.
        start: Position of its prompt in the batch of prompts.
        member: Slot of the member that samples it. Conversations of one member from one prompt are
            a group.
        completions: Sampled token ids of each completion, without padding and with a final EOS.
        replies: Token ids of the reply to each completion; one fewer than completions until the
            last is replied to.
        truncated: True if the last completion reached its maximum length, or a further one would
            exceed a limit.
    """

    row: int
    start: int
    completions: tuple[tuple[int, ...], ...]
    replies: tuple[tuple[int, ...], ...] = ()
    truncated: bool = False
    member: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        difference = len(self.completions) - len(self.replies)
        assert difference in (0, 1), "completions and replies alternate"

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens after the prompt, in order."""
        return tuple(chain.from_iterable(self.turns))

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each of `tokens`, True if it belongs to a completion, False for a reply."""
        sampled: list[bool] = []
        for number, part in enumerate(self.turns):
            is_completion = number % 2 == 0
            sampled += [is_completion] * len(part)
        return tuple(sampled)

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Completions and replies in order."""
        count = len(self.completions) + len(self.replies)
        turns: list[tuple[int, ...]] = [()] * count
        turns[::2] = self.completions
        turns[1::2] = self.replies
        return tuple(turns)


def single_turn_conversations(
    starts: Sequence[int],
    completions: Sequence[Sequence[int]],
    members: Sequence[int] | None = None,
) -> tuple[Conversation, ...]:
    """Return conversations of one completion each, numbered in order.

    Args:
        starts: Position of each conversation's prompt in the batch of prompts.
        completions: Token ids of each completion.
        members: Slot of the member that sampled each completion; None = one member sampled all.
    """
    slots = [0] * len(starts) if members is None else members
    conversations = []
    for row, (start, completion, slot) in enumerate(zip(starts, completions, slots, strict=True)):
        tokens = tuple(map(int, completion))
        conversations.append(
            Conversation(row=row, start=int(start), completions=(tokens,), member=int(slot))
        )
    return tuple(conversations)


def unpadded(actions: Tensor, present: Tensor) -> list[list[int]]:
    """Return the token ids `[n, t]` of each row up to its number of present tokens."""
    lengths = present.sum(1).tolist()
    tokens = []
    for row, length in zip(actions.tolist(), lengths, strict=True):
        tokens.append(row[:length])
    return tokens


def positions_in_turn(sampled: Tensor) -> Tensor:
    """Return the index of each sampled token within its turn, `[n, t]`; undefined at other tokens.

    Args:
        sampled: `[n, t]` True for sampled tokens. Turns are separated by the tokens of replies.
    """
    column = torch.arange(sampled.shape[1], device=sampled.device)
    # A turn begins where the token before was not sampled.
    before = torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    begins = sampled & ~before
    # The first column of the current turn is the largest one of the turns so far.
    first = torch.where(begins, column, 0).cummax(1).values
    return column - first


@dataclass(frozen=True, kw_only=True)
class SampledActions:
    """Actions of small networks, one per observation.

    Attributes:
        actions: `[m, ...]` in the dtype of the action space. Discrete and MultiDiscrete values
            count from 0; Box values are not clipped.
        log_probs: `[m]` float32 log-probabilities in nats of the policy sampled from; at
            temperature 1 for greedy actions.
    """

    actions: NDArray[Any]
    log_probs: Float32Array

    __repr__ = short_repr


class Actor(Protocol):
    """Sampler of members' actions, one step at a time; implemented by banks of small networks."""

    def act(
        self,
        observations: Any,
        member_ids: IntArray,
        *,
        uniforms: Float32Array | None,
        temperature: Float32Array | None,
        action_mask: Any,
        base: bool,
    ) -> SampledActions:
        """Choose one action for each observation.

        Args:
            observations: `[m, ...]` in the form of the observation space; dicts and tuples for Dict
                and Tuple spaces.
            member_ids: `[m]` slots, in ascending order.
            uniforms: `[m, d]` random numbers in [0, 1); None = the most likely actions.
            temperature: `[m]` at least 0; 0 means the most likely action. None = 1.
            action_mask: `[m, values]` True for legal values of Discrete actions; for MultiDiscrete
                concatenated, or a tuple with one mask per component. None = all are legal.
            base: Act with the untrained base.

        Returns:
            Actions and their log-probabilities, in arrays that are never modified later.
        """


# ---- learning


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Experience of one or more members, in a form common to all environments.

    Attributes:
        inputs: Inputs of the policy (prompts or observations), read by the bank only. None where
            advantages, losses and metrics are computed, which must not depend on them.
        actions: `[n, t]` token ids or actions, or `[n, t, ...]` where an action is a vector.
        present: `[n, t]` True where attention sees the token.
        action_mask: `[n, t]` True where the action counts in the loss, a subset of `present`.
        chosen: `[n, t]` True where the member chose the action, even if it is left out of the loss.
            Defaults to `present`. In conversations, consecutive chosen tokens are a turn; see
            `positions_in_turn`.
        rewards: `[n]` total reward; NaN = no reward applies.
        group_ids: `[n]` group of each row: one member, one prompt (or reset seed).
        member_ids: `[n]` slots of the members that sampled the rows and learn from them.
        sampler_log_probs: `[n, t]` log-probabilities in nats at sampling time; None = unknown.
        exact: `sampler_log_probs` equal the trainer's, up to rounding in float32.
        step_rewards: `[n, t]` reward of each action, for advantages within an episode; NaN = none
            given. None = only totals are known.
        reward_components: `[n, f]` unweighted value of each reward function; NaN where it does not
            apply. None = unknown.
        component_weights: `[n, f]` weights of the reward functions for each row; None = all 1.
        component_names: Their `f` names, for metrics.
        truncated: `[n]` True if the episode was ended by a limit; None = unknown.
        stop: Checked before each pass over rows of the batch.
    """

    inputs: Any
    actions: Tensor
    present: Tensor
    action_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    member_ids: Tensor
    chosen: Tensor = None  # type: ignore[assignment]  # set below
    sampler_log_probs: Tensor | None = None
    exact: bool = True
    step_rewards: Tensor | None = None
    reward_components: Tensor | None = None
    component_weights: Tensor | None = None
    component_names: tuple[str, ...] = ()
    truncated: Tensor | None = None
    stop: Stop = field(default=NEVER, repr=False)

    __repr__ = short_repr

    def __len__(self) -> int:
        return int(self.actions.shape[0])

    def __post_init__(self) -> None:
        if self.chosen is None:
            object.__setattr__(self, "chosen", self.present)

    def select(self, rows: Tensor) -> "Batch":
        """Return rows by index."""
        fields: dict[str, Any] = {
            name: select_rows(value, rows)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        inputs = None if self.inputs is None else self.inputs.select(rows)
        return replace(self, inputs=inputs, **fields)

    def select_members(self, slots: Sequence[int]) -> "Batch":
        """Return the rows of these members, in the order of the batch."""
        wanted = torch.tensor(
            list(slots), device=self.member_ids.device, dtype=self.member_ids.dtype
        )
        return self.select(torch.isin(self.member_ids, wanted).nonzero()[:, 0])

    def counted_actions(self) -> tuple[Tensor, Tensor]:
        """Return the flat indices (into `[n * t]`) of actions in the loss, and the row of each."""
        indices = self.action_mask.flatten().nonzero()[:, 0]
        return indices, indices // self.action_mask.shape[1]

    def flatten_actions(self) -> "Batch":
        """Return a batch with one row of a single action for each action that counts in the loss.

        Groups, members and rewards are repeated. Other values that advantages are computed from
        are dropped. Only for small networks, whose inputs can be split by action.
        """
        indices, row = self.counted_actions()
        counted = torch.ones(len(row), 1, dtype=torch.bool, device=row.device)
        # 1. Drop what advantages have been computed from, and repeat the values of rows.
        dropped = ("step_rewards", "reward_components", "component_weights", "truncated")
        fields: dict[str, Any] = dict.fromkeys(dropped)
        for name in ("rewards", "group_ids", "member_ids"):
            fields[name] = select_rows(getattr(self, name), row)
        # 2. Select the values of the counted actions, each as one row.
        for name in ("actions", "sampler_log_probs"):
            value = getattr(self, name)
            if value is not None:
                value = value.flatten(0, 1).index_select(0, indices)[:, None]
            fields[name] = value
        return replace(
            self,
            inputs=self.inputs.flatten_actions(indices, row),
            present=counted,
            action_mask=counted,
            chosen=counted,
            **fields,
        )

    def concatenate(self, other: "Batch") -> "Batch":
        """Return these rows followed by the other's, padded to the longer of both.

        Both must have the same fields.
        """
        width = max(self.actions.shape[1], other.actions.shape[1])
        fields: dict[str, Any] = {}
        for field_of_rows in dataclasses.fields(self):
            name = field_of_rows.name
            if name in _NOT_ROWS:
                continue
            parts = [getattr(self, name), getattr(other, name)]
            if parts[0] is None:
                assert parts[1] is None, f"only one batch has {name}"
                fields[name] = None
                continue
            if name in _WITHOUT_TIME:
                fields[name] = torch.cat(parts)
                continue
            fill = torch.nan if name == "step_rewards" else 0  # NaN = no reward was given
            fields[name] = torch.cat([padded(part, width, fill) for part in parts])
        inputs = self.inputs.concatenate(other.inputs, width)
        return replace(self, exact=self.exact and other.exact, inputs=inputs, **fields)

    def to(self, device: torch.device | str) -> "Batch":
        """Return this batch with all tensors, those of its inputs included, on a device."""

        def on_device(record: R) -> R:
            """Return a record with its tensors on the device."""
            values = {
                name: map_tensors(value, lambda leaf: leaf.to(device))
                for name, value in vars(record).items()
            }
            return replace(record, **values)  # type: ignore[type-var]  # records are dataclasses

        return replace(on_device(self), inputs=on_device(self.inputs))


# Fields of `Batch` that have no row for each sample, and fields of rows without an axis of actions.
_NOT_ROWS = ("inputs", "exact", "component_names", "stop")
_WITHOUT_TIME = (
    "rewards",
    "group_ids",
    "member_ids",
    "reward_components",
    "component_weights",
    "truncated",
)

DEFAULT_POLICY = "default"
"""Name of the policy of a single agent; its keys of a train state have no prefix."""

Experience = Mapping[str, Batch]
"""Batch by name of the policy that learns from it."""


# ---- inputs


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """Prompts of a language-model batch.

    Attributes:
        prompts: Token ids of each distinct prompt, without padding.
        prompt_ids: `[n]` index of each row's prompt.
        temperature: `[n]` sampling temperature T; the policy is softmax(logits / T).
        min_new_tokens: Number of first tokens of every turn that could not be an end of sequence.
    """

    prompts: tuple[tuple[int, ...], ...]
    prompt_ids: Tensor
    temperature: Tensor
    min_new_tokens: int = 0

    __repr__ = short_repr

    def select(self, rows: Tensor) -> "TokenInputs":
        """Return the inputs of rows by index; all prompts stay."""
        ids = select_rows(self.prompt_ids, rows)
        temperature = select_rows(self.temperature, rows)
        return replace(self, prompt_ids=ids, temperature=temperature)

    def concatenate(self, other: "TokenInputs", width: int) -> "TokenInputs":
        """Return the inputs of both batches in order.

        The prompts of one must be the first prompts of the other.
        """
        return replace(
            self,
            prompts=max(self.prompts, other.prompts, key=len),
            prompt_ids=torch.cat([self.prompt_ids, other.prompt_ids]),
            temperature=torch.cat([self.temperature, other.temperature]),
        )


@dataclass(frozen=True, kw_only=True)
class ObservationInputs:
    """Observations that small networks act on, one per action.

    Attributes:
        observations: `[n, t, ...]` tensor, or dicts and tuples of tensors for composite spaces.
        temperature: `[n]` sampling temperature.
        action_masks: `[n, t, ...]` True for legal actions, or dicts and tuples of such tensors;
            None = all.
    """

    observations: Any
    temperature: Tensor
    action_masks: Any = None

    __repr__ = short_repr

    def select(self, rows: Tensor) -> "ObservationInputs":
        """Return the inputs of rows by index."""
        return ObservationInputs(
            observations=map_tensors(self.observations, lambda leaf: select_rows(leaf, rows)),
            temperature=select_rows(self.temperature, rows),
            action_masks=map_tensors(self.action_masks, lambda leaf: select_rows(leaf, rows)),
        )

    def flatten_actions(self, indices: Tensor, row: Tensor) -> "ObservationInputs":
        """Return one row `[1, ...]` for each of the given actions.

        Args:
            indices: Flat indices of the actions, into `[n * t]`.
            row: Row of each action.
        """

        def single(leaf: Tensor) -> Tensor:
            return leaf.flatten(0, 1).index_select(0, indices)[:, None]

        return ObservationInputs(
            observations=map_tensors(self.observations, single),
            temperature=select_rows(self.temperature, row),
            action_masks=map_tensors(self.action_masks, single),
        )

    def concatenate(self, other: "ObservationInputs", width: int) -> "ObservationInputs":
        """Return the inputs of these rows followed by the other's, padded to `width` actions."""
        if self.action_masks is None:
            known = other.action_masks
        else:
            known = self.action_masks

        def masks_of(inputs: ObservationInputs) -> Any:
            """Return the masks of legal actions of a batch."""
            if inputs.action_masks is not None:
                return inputs.action_masks
            # If only one batch has masks, all actions of the other are legal.
            rows = len(inputs.temperature)
            return map_tensors(known, lambda leaf: leaf.new_ones(rows, width, *leaf.shape[2:]))

        masks = None
        if known is not None:
            masks = join_trees(masks_of(self), masks_of(other), width)
        return ObservationInputs(
            observations=join_trees(self.observations, other.observations, width),
            temperature=torch.cat([self.temperature, other.temperature]),
            action_masks=masks,
        )


def select_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Return `values[rows]`: rows `[k]` of a tensor `[n, ...]`.

    For thousands of rows, index_select takes a third of the time of indexing.
    """
    rows = rows.to(values.device)
    # Selecting from a vector takes half the time of selecting from a matrix of one column.
    if values.dim() == 2 and values.shape[1] == 1:
        return values[:, 0].index_select(0, rows)[:, None]
    return values.index_select(0, rows)


def padded(values: Tensor, width: int, fill: float = 0) -> Tensor:
    """Return `[n, t, ...]` padded with `fill` to `width` along t."""
    missing = width - values.shape[1]
    # From the last dimension to t: two zeros for each dimension behind t.
    behind = [0, 0] * (values.dim() - 2)
    return torch.nn.functional.pad(values, (*behind, 0, missing), value=fill)


def join_trees(one: Any, other: Any, width: int) -> Any:
    """Concatenate two trees of tensors `[n, t, ...]` along n, padded with 0 along t."""
    if isinstance(one, Mapping):
        return {name: join_trees(value, other[name], width) for name, value in one.items()}
    if isinstance(one, tuple | list):
        return type(one)(join_trees(*pair, width) for pair in zip(one, other, strict=True))
    return torch.cat([padded(one, width), padded(other, width)])


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of nested dicts, tuples and lists; None stays None."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tensors(value, change) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree
