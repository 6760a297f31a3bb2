"""Banks of small networks in many spaces, and batches with independent rows per member."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from evogrpo.config.network import NetworkConfig
from evogrpo.config.objective import Objective
from evogrpo.envs.control.conversion import mask_sizes
from evogrpo.members.networks.bank import StackedBank
from evogrpo.randomness import generator
from evogrpo.records import DEFAULT_POLICY, UNTRUNCATED, Batch, ObservationInputs, SamplingOptions

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
MIXED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (7, 6, 2), np.uint8),
        "where": spaces.Tuple((spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3]))),
        "flags": spaces.MultiBinary(2),
        "speed": spaces.Box(-1, 1, (2,), np.float64),
    }
)
# Group sizes of the members, in turn.
GROUP_SIZES = (2, 3, 4)
TEMPERATURES = (1.0, 0.7, 1.3)
STARTS = 3
STEPS = 5


class Branching(torch.nn.Module):
    """A user-defined module with its own layers, a constant buffer and dropout."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(inputs, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.second = torch.nn.Linear(8, outputs)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("shift", torch.full((8,), 0.25))

    def forward(self, observations: Tensor) -> Tensor:
        hidden = self.norm(torch.nn.functional.silu(self.first(observations)) + self.shift)
        return self.second(self.drop(hidden))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of bank: its spaces, the architectures of its members in turn, and action masks."""

    observations: spaces.Space[Any] = field(default_factory=lambda: VECTOR)
    actions: spaces.Space[Any]
    network: NetworkConfig | torch.nn.Module = field(
        default_factory=lambda: NetworkConfig(hidden=(8, 6))
    )
    architectures: tuple[NetworkConfig, ...] = ()
    masked: bool = False
    own_reference: bool = False

    def bank(self, size: int, *, std: float = 0.5, **settings: Any) -> StackedBank:
        """Build a bank whose members and references all differ."""
        bank = StackedBank(
            self.observations,
            self.actions,
            size=size,
            network=self.network,
            own_reference=self.own_reference,
            **settings,
        )
        for slot in range(size):
            if self.architectures:
                config = self.architectures[slot % len(self.architectures)]
                bank.rebuild(slot, config, generator(0, "test architecture", slot))
            state = bank.state(slot)
            values = generator(0, "test weights", slot).standard_normal(
                state["weights"].shape, dtype=np.float32
            )
            bank.load_state(
                slot, state | {"weights": state["weights"] + std * torch.from_numpy(values)}
            )
        return bank


CASES = {
    "discrete": Case(actions=spaces.Discrete(4, start=3)),
    "architectures": Case(
        actions=spaces.MultiDiscrete([[3, 2], [2, 4]]),
        architectures=(
            NetworkConfig(hidden=(8, 6), activation="relu"),
            NetworkConfig(hidden=(5,)),
            NetworkConfig(hidden=(8, 6, 6), activation="elu"),
        ),
        masked=True,
    ),
    "some alike": Case(
        actions=spaces.Discrete(5),
        architectures=(
            NetworkConfig(hidden=(8, 6)),
            NetworkConfig(hidden=(9, 6)),
            NetworkConfig(hidden=(8, 6)),
        ),
        masked=True,
        own_reference=True,
    ),
    "box": Case(
        actions=spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, np.inf]), dtype=np.float64)
    ),
    "parts": Case(
        actions=spaces.Tuple(
            (
                spaces.Dict({"move": spaces.Discrete(3, start=-1), "keys": spaces.MultiBinary(2)}),
                spaces.Box(-2.0, 2.0, (2,)),
                spaces.MultiDiscrete([[2, 3]]),
            )
        ),
        architectures=(NetworkConfig(hidden=(8, 6)), NetworkConfig(hidden=(5,))),
        masked=True,
    ),
    "images": Case(observations=MIXED, actions=spaces.MultiBinary((2, 2))),
    "module": Case(actions=spaces.Discrete(4), network=Branching(3, 4), own_reference=True),
}


def observe(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    """Sample one observation; unbounded ones from a normal distribution."""
    if isinstance(space, spaces.Dict):
        return {key: observe(part, rng) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(observe(part, rng) for part in space.spaces)
    if isinstance(space, spaces.Box) and space.dtype != np.uint8:
        return rng.standard_normal(space.shape).astype(space.dtype)
    space.seed(int(rng.integers(1 << 31)))
    return space.sample()


def stacked(values: Sequence[Any]) -> Any:
    """Stack observations along a leading axis."""
    if isinstance(values[0], dict):
        result = {}
        for key in values[0]:
            result[key] = stacked([value[key] for value in values])
        return result
    if isinstance(values[0], tuple):
        return tuple(stacked(parts) for parts in zip(*values, strict=True))
    return np.stack([np.asarray(value) for value in values])


def tensors(tree: Any, lead: tuple[int, ...]) -> Any:
    """Turn arrays `[n * t, ...]` into tensors `[n, t, ...]`."""
    if isinstance(tree, dict):
        return {key: tensors(value, lead) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(tensors(value, lead) for value in tree)
    return torch.from_numpy(tree).unflatten(0, lead)


def acted_batch(
    case: Case,
    bank: StackedBank,
    members: Sequence[int],
    *,
    seed: int = 0,
    nudge: float = 0.0,
    equal_shapes: bool = False,
    groups: Sequence[int] = GROUP_SIZES,
    base: bool = False,
) -> Batch:
    """Act with slot i as member `members[i]`, with its observations, uniforms and settings."""
    work = []
    for slot, member in enumerate(members):
        for start in range(STARTS):
            for replica in range(groups[member % 3]):
                work.append((slot, member, start, replica))
    rngs = [
        generator(seed, "test steps", *address, step)
        for (_, *address), step in product(work, range(STEPS))
    ]
    seen = stacked([observe(case.observations, rng) for rng in rngs])
    uniforms = np.stack([rng.random(bank.distribution.uniforms_per_action) for rng in rngs])
    masks = None
    if case.masked:
        counts = mask_sizes(case.actions)
        masks = np.concatenate(
            [np.stack([rng.permutation(n) for rng in rngs]) < n - 1 for n in counts], axis=1
        )
    n = len(work)
    slots = np.array([slot for slot, *_ in work])
    temperature = np.array([TEMPERATURES[member % 3] for _, member, *_ in work], dtype=np.float32)
    acted = bank.act(
        seen,
        slots.repeat(STEPS),
        uniforms=(uniforms + nudge).clip(0, 1 - 1e-7).astype(np.float32),
        temperature=temperature.repeat(STEPS),
        action_mask=masks,
        base=base,
    )
    lengths = torch.tensor(
        [STEPS if equal_shapes else 1 + (start + replica) % STEPS for *_, start, replica in work]
    )
    present = torch.arange(STEPS) < lengths[:, None]
    actions = torch.from_numpy(acted.actions).unflatten(0, (n, STEPS))
    log_probs = torch.from_numpy(acted.log_probs).view(n, STEPS)
    value = torch.sin(
        3.0 * actions.double().flatten(2) if actions.ndim > 2 else 3.0 * actions.double()[..., None]
    )
    member_ids = torch.from_numpy(slots)
    return Batch(
        inputs=ObservationInputs(
            observations=tensors(seen, (n, STEPS)),
            temperature=torch.from_numpy(temperature),
            action_masks=None if masks is None else tensors(masks, (n, STEPS)),
        ),
        actions=actions,
        present=present,
        action_mask=present,
        rewards=(value.sum(2) * present).sum(1).float(),
        group_ids=member_ids * STARTS + torch.tensor([start for *_, start, _ in work]),
        member_ids=member_ids,
        sampler_log_probs=torch.where(present, log_probs, 0.0),
    )


@dataclass(frozen=True)
class Settings:
    """Fixed settings."""

    objective: Objective
    seed: int = 0
    max_actions: int = 1
    sampling_options: SamplingOptions = UNTRUNCATED


@dataclass(frozen=True)
class Together:
    """Members with one bank; see `evogrpo.algorithms.learning.learning_step`."""

    bank: StackedBank
    settings: Settings

    @property
    def banks(self) -> dict[str, StackedBank]:
        return {DEFAULT_POLICY: self.bank}


def together(size: int = 1, **objective: Any) -> Together:
    """Return the policy of a bank with two actions, for `learn`."""
    bank = replace(CASES["discrete"], own_reference="reference" in objective).bank(size)
    return Together(bank, Settings(Objective(**{"loss_type": "dapo"} | objective)))
