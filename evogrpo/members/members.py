"""Parts that both kinds of policy sets share: the banks of all policies, requests for samples, and their results."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.protocol import Scores, Split
from evogrpo.extras import require
from evogrpo.interruption import NEVER, Stop
from evogrpo.members.bank import PolicyBank, TrainState
from evogrpo.members.devices import check_device, check_stored_size
from evogrpo.records import DEFAULT_POLICY, Experience
from evogrpo.text import short_repr, shown

if TYPE_CHECKING:
    from accelerate import Accelerator

CheckpointFiles = dict[str, bytes | Callable[[], bytes]]
"""Additional files of a checkpoint: bytes, or a function that is called when the file is written.
"""


class Banks(dict[str, PolicyBank]):
    """Banks of all policies of the same members, by policy.

    Selection, cloning and checkpoints use all policies of a member; acting and learning use one
    bank at a time.

    Args:
        banks: Bank of each policy, all with the same number of slots.

    Attributes:
        changed: Slots whose train states have changed since the sampler last loaded them; initially
            all.

    Raises:
        ValueError: If there is no bank, or they differ in size.
    """

    def __init__(self, banks: Mapping[str, PolicyBank]) -> None:
        sizes = {bank.size for bank in banks.values()}
        if len(sizes) != 1:
            raise ValueError(
                "banks must contain at least one bank, all of the same size, got sizes"
                f" {sorted(sizes)}."
            )
        super().__init__(banks)
        self.changed = set(range(self.size))

    @property
    def size(self) -> int:
        """Number of slots."""
        return next(iter(self.values())).size

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, for every policy.

        None = fresh initialisation.
        """
        for bank in self.values():
            # banks have equal sizes, so invalid parents raise at the first, before any change
            bank.inherit(parents)
        self.changed.update(slot for slot, parent in enumerate(parents) if parent != slot)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state, the same for all members."""
        return tuple(
            state_key(policy, name) for policy, bank in self.items() for name in bank.state_keys
        )

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a train state."""
        policy, _, key = name.rpartition("/")
        return self[policy or DEFAULT_POLICY].state_tensor(slot, key)

    def state(self, slot: int) -> TrainState:
        """Return a copy of the train state of a slot.

        With several policies the keys are "policy/name".
        """
        return {
            state_key(policy, name): value
            for policy, bank in self.items()
            for name, value in bank.state(slot).items()
        }

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If it has other policies, or does not fit one of them; nothing is changed
                then.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            policy, _, name = key.rpartition("/")
            parts.setdefault(policy or DEFAULT_POLICY, {})[name] = value
        if set(parts) != set(self):
            raise ValueError(
                f"The train state must have policies {sorted(self)}, got {sorted(parts)}."
            )
        before = {policy: bank.state(slot) for policy, bank in self.items() if len(self) > 1}
        for policy, bank in self.items():
            try:
                bank.load_state(slot, parts[policy])
            except ValueError as error:
                for loaded, previous in before.items():
                    self[loaded].load_state(slot, previous)
                raise ValueError(
                    str(error) if policy == DEFAULT_POLICY else f"policy {policy!r}: {error}"
                ) from error
        self.changed.add(slot)

    def snapshot(self, slots: Collection[int]) -> dict[int, TrainState]:
        """Return copies of train states by slot, in CPU memory, for `load_state`."""
        return {
            slot: {name: value.cpu() for name, value in self.state(slot).items()} for slot in slots
        }

    def keep_reference(self, slot: int) -> None:
        """Make a member's current policies its references; ValueError without own references."""
        for bank in self.values():
            bank.mix_reference(slot, 1.0)


def state_key(policy: str, name: str) -> str:
    """Return the key of a policy's tensor in the member's train state: without a prefix for the default policy."""
    if policy == DEFAULT_POLICY:
        return name
    return f"{policy}/{name}"


# ---- requests for samples and evaluations, and their results


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One member that takes part in a learning step.

    Attributes:
        slot: Its slot in the bank.
        index: Its identity; part of the name of its random streams.
        step: Number of the learning step; part of the name as well.
        hyperparameters: Its hyperparameters in this step.
    """

    slot: int
    index: int
    step: int
    hyperparameters: Hyperparameters


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingRequest:
    """Rows to sample; the rows of a member are next to each other.

    Attributes:
        learners: The members that act, all at the same learning step.
        counts: Number of rows of each member, on all ranks.
        row_ids: `[k]` numbers of the rows among those of all ranks; they select the random numbers.
        member_ids: `[k]` slots.
        start_ids: `[k]` position of each row's start among the opened ones.
        group_ids: `[k]` one number per member and start.
        temperature: `[k]` sampling temperatures.
        purpose: Name of the random stream, with step and index.
        number: Distinguishes streams of one purpose within a step.
        stop: Checked between tokens or steps, and between reward calls.
    """

    learners: tuple[Learner, ...]
    counts: tuple[int, ...]
    row_ids: Tensor
    member_ids: Tensor
    start_ids: Tensor
    group_ids: Tensor
    temperature: Tensor
    purpose: str
    number: int = 0
    stop: Stop = NEVER

    __repr__ = short_repr

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Numbers of each member's random stream."""
        further = [self.number] if self.number else []
        return [(learner.step, learner.index, *further) for learner in self.learners]

    def select(self, rows: Tensor) -> "SamplingRequest":
        """Return the request for some of its rows."""
        names = ("row_ids", "member_ids", "start_ids", "group_ids", "temperature")
        chosen: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **chosen)


ObservedStatistics = Mapping[str, ObservationStatistics]
"""Observation statistics of a rollout, by policy."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Rewarded samples; the rows of a member, and within them of a group, are next to each other.

    Attributes:
        experience: The samples as batches to learn from, by policy.
        scores: Rewards and texts of the environment, row by row, without penalties and step
            rewards.
        member_ids: `[n]` slots of the members that acted.
        start_ids: `[n]` positions in `starts`.
        truncated: `[n]` completions that ran out of length, or episodes in which an agent was
            truncated.
        tokens: Tokens (or environment steps) processed, by slot, discarded groups included.
        starts: Training starts that were opened.
        questions: Texts of the starts, for display; untrusted. Empty for environments without
            texts.
        observed: Observation statistics to add to the running ones; one entry per sampling.
        earned: Mean raw reward of each group that has rewards, by slot and position of the start,
            before dynamic sampling.
        scoring_seconds: Time that reward functions took; 0 for environments that are played.
    """

    experience: Experience
    scores: Scores
    member_ids: Tensor
    start_ids: Tensor
    truncated: Tensor
    tokens: dict[int, int]
    starts: tuple[int, ...] = ()
    questions: tuple[str, ...] = ()
    observed: tuple[ObservedStatistics, ...] = field(default=())
    earned: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    scoring_seconds: float = 0.0

    __repr__ = short_repr

    def mean_group_rewards(self) -> dict[int, dict[int, float]]:
        """Return the mean raw reward of each group, by slot and position of its start."""
        groups: dict[int, dict[int, list[float]]] = {}
        rows = zip(
            self.member_ids.tolist(),
            self.start_ids.tolist(),
            self.scores.rewards.tolist(),
            strict=True,
        )
        for slot, start, reward in rows:
            if math.isfinite(reward):
                groups.setdefault(slot, {}).setdefault(start, []).append(reward)
        return {
            slot: {start: math.fsum(rewards) / len(rewards) for start, rewards in each.items()}
            for slot, each in groups.items()
        }


HELD_OUT = "held-out answers"
"""Purpose of the random stream of sampled evaluations, the same for all members and evaluations."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Held-out questions to evaluate members on; every slot answers every question.

    Attributes:
        split: Name of the split.
        questions: Positions of the questions in the split.
        slots: Slots to evaluate. With `base`, a single slot, whose value has no effect.
        base: Evaluate the untrained base.
        answers: Number of answers per question, sampled at temperature 1; None = one greedy answer.
        stop: As in `SamplingRequest`.
    """

    split: Split
    questions: tuple[int, ...]
    slots: tuple[int, ...]
    base: bool = False
    answers: int | None = None
    stop: Stop = NEVER

    @property
    def answers_per_question(self) -> int:
        """Number of answers of each slot to each question."""
        return self.answers or 1

    @property
    def start_ids(self) -> Tensor:
        """`[n]` position in `questions` of each row, ordered by slot, then question."""
        return (
            torch.arange(len(self.questions))
            .repeat_interleave(self.answers_per_question)
            .repeat(len(self.slots))
        )

    @property
    def member_ids(self) -> Tensor:
        """`[n]` slots."""
        return torch.tensor(self.slots).repeat_interleave(self.rows_per_slot)

    @property
    def rows_per_slot(self) -> int:
        """Number of rows of a slot."""
        return len(self.questions) * self.answers_per_question

    @property
    def temperature(self) -> Tensor:
        """`[n]` 1 for sampled answers, 0 for greedy ones."""
        return torch.full(
            (len(self.slots) * self.rows_per_slot,), 0.0 if self.answers is None else 1.0
        )

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Numbers of each question's random stream."""
        return [(number,) for number in self.questions]


# ---- devices


def choose_device(
    accelerator: "Accelerator | None", device: str | torch.device | None
) -> str | torch.device | None:
    """Return the requested device, or that of the accelerator; None = not specified.

    Raises:
        ValueError: If both are given, or the device is not available.
    """
    if accelerator is None:
        if device is not None:
            check_device(device)
        return device
    require("accelerator", "accelerate")
    from accelerate import Accelerator

    if not isinstance(accelerator, Accelerator):
        raise ValueError(
            f"accelerator must be an accelerate.Accelerator, got {shown(accelerator)}."
        )
    if device is not None:
        raise ValueError(f"The accelerator sets the device. Leave out device={str(device)!r}.")
    chosen: torch.device = accelerator.device
    return chosen


def autocast_context(
    accelerator: "Accelerator | None",
) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of the autocast context of forward passes."""
    if accelerator is None or accelerator.mixed_precision == "no":
        return nullcontext
    autocast: Callable[[], AbstractContextManager[None]] = accelerator.autocast
    return autocast


# ---- spaces in checkpoints


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return a space as plain JSON values.

    Raises:
        ValueError: If it is not a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict, Tuple or
            Sequence of these.
    """
    match space:
        case spaces.Sequence():  # of tokens; only language models have them
            return {
                "kind": "sequence",
                "part": space_to_json(space.feature_space),
                "stack": space.stack,
            }
        case spaces.Dict():
            return {
                "kind": "dict",
                "parts": [[key, space_to_json(part)] for key, part in space.spaces.items()],
            }
        case spaces.Tuple():
            return {"kind": "tuple", "parts": [space_to_json(part) for part in space.spaces]}
        case spaces.Box():
            bounds: dict[str, Any] = {}
            for name in ("low", "high"):  # one bound if all are equal; infinite ones as text
                flat = [
                    str(value) if np.isinf(value) else value.item()
                    for value in getattr(space, name).ravel()
                ]
                bounds[name] = flat[0] if flat and all(value == flat[0] for value in flat) else flat
            return {"kind": "box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {
                "kind": "discrete",
                "n": int(space.n),
                "start": int(space.start),
                "dtype": str(space.dtype),
            }
        case spaces.MultiDiscrete():
            values = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
            return {"kind": "multi_discrete", **values, "dtype": str(space.dtype)}
        case spaces.MultiBinary():
            return {
                "kind": "multi_binary",
                "n": space.n if isinstance(space.n, int) else list(space.shape),
            }
    raise ValueError(f"A checkpoint cannot store the space {space}.")


def space_from_json(values: Mapping[str, Any], stored_bytes: int = 0) -> spaces.Space[Any]:
    """Build a space from the result of `space_to_json`; ValueError or KeyError for anything else.

    Args:
        values: Result of `space_to_json`.
        stored_bytes: Bytes of the tensors in the checkpoint; see `check_stored_size`.
    """
    match values["kind"]:
        case "dict":
            # A list of pairs keeps the order of keys, which is the order of features.
            return spaces.Dict(
                [(key, space_from_json(part, stored_bytes)) for key, part in values["parts"]]
            )
        case "sequence":
            return spaces.Sequence(
                space_from_json(values["part"], stored_bytes), stack=values["stack"]
            )
        case "tuple":
            return spaces.Tuple([space_from_json(part, stored_bytes) for part in values["parts"]])
        case "box":
            dtype = np.dtype(values["dtype"])
            shape = tuple(values["shape"])
            check_stored_size(2 * math.prod(shape) * dtype.itemsize, stored_bytes)
            low, high = (_bounds_from_json(values[name], shape, dtype) for name in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "discrete":
            return spaces.Discrete(
                values["n"], start=values["start"], dtype=np.dtype(values["dtype"]).type
            )
        case "multi_discrete":
            dtype = np.dtype(values["dtype"])
            return spaces.MultiDiscrete(
                np.array(values["nvec"]),
                dtype=dtype.type,
                start=np.array(values["start"], dtype=dtype),
            )
        case "multi_binary":
            check_stored_size(math.prod(np.atleast_1d(values["n"]).tolist()), stored_bytes)
            return spaces.MultiBinary(values["n"])
    raise ValueError(f"unknown kind of space {values['kind']!r}")


def _bounds_from_json(values: Any, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
    if isinstance(values, list):
        return np.array(
            [float(value) if isinstance(value, str) else value for value in values], dtype
        ).reshape(shape)
    return np.full(shape, float(values) if isinstance(values, str) else values, dtype)
