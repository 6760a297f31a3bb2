"""Banks: one bank per policy; slot i of every bank is member i."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from evogrpo.data import DEFAULT_POLICY
from evogrpo.models.bank import PolicyBank, TrainState


class Banks(Mapping[str, PolicyBank]):
    """Banks of all policies of the same members.

    Selection, cloning and checkpoints use all policies of a member; acting and learning use one bank at a time.

    Args:
        banks: By policy, all with the same number of slots.

    Attributes:
        changed: Slots whose train states have changed since the sampler last loaded them; initially all.

    Raises:
        ValueError: If there is no bank, or they differ in size.
    """

    def __init__(self, banks: Mapping[str, PolicyBank]) -> None:
        sizes = {bank.size for bank in banks.values()}
        if len(sizes) != 1:
            raise ValueError(f"banks must be at least one, all of the same size, got sizes {sorted(sizes)}.")
        self._banks = dict(banks)
        self.changed = set(range(self.size))

    def __getitem__(self, policy: str) -> PolicyBank:
        return self._banks[policy]

    def __iter__(self) -> Iterator[str]:
        return iter(self._banks)

    def __len__(self) -> int:
        return len(self._banks)

    @property
    def size(self) -> int:
        """Number of slots."""
        return next(iter(self._banks.values())).size

    def touch(self, slots: Collection[int]) -> None:
        """Mark slots as changed. Call before changing them, because the change may raise half-way."""
        self.changed.update(slots)

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, for every policy; None = fresh initialisation."""
        for bank in self._banks.values():
            bank.inherit(parents)  # the banks are of one size, so that the first refuses what any would
        self.changed.update(slot for slot, parent in enumerate(parents) if parent != slot)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state, the same for all members."""
        return tuple(state_key(policy, name) for policy, bank in self._banks.items() for name in bank.state_keys)

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a train state."""
        policy, _, own = name.rpartition("/")
        return self._banks[policy or DEFAULT_POLICY].state_tensor(slot, own)

    def state(self, slot: int) -> TrainState:
        """Return a copy of the train state of a slot; with several policies the keys are "policy/name"."""
        return {
            state_key(policy, name): value
            for policy, bank in self._banks.items()
            for name, value in bank.state(slot).items()
        }

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If it has other policies, or does not fit one of them; nothing is changed then.
        """
        parts = _by_policy(state)
        if set(parts) != set(self._banks):
            raise ValueError(f"The train state must have policies {sorted(self._banks)}, got {sorted(parts)}.")
        before = {policy: bank.state(slot) for policy, bank in self._banks.items() if len(self._banks) > 1}
        for policy, bank in self._banks.items():
            try:
                bank.load_state(slot, parts[policy])
            except ValueError as error:
                for done, held in before.items():
                    self._banks[done].load_state(slot, held)
                raise ValueError(str(error) if policy == DEFAULT_POLICY else f"policy {policy!r}: {error}") from error
        self.changed.add(slot)

    def snapshot(self, slots: Collection[int]) -> dict[int, TrainState]:
        """Return copies of train states by slot, in CPU memory, for `load_state`."""
        return {slot: {name: value.cpu() for name, value in self.state(slot).items()} for slot in slots}

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their references; ValueError without own references."""
        for bank in self._banks.values():
            bank.keep_reference(slots)


def state_key(policy: str, name: str) -> str:
    """Return the key of a policy's tensor in the member's train state: without a prefix for the default policy."""
    return name if policy == DEFAULT_POLICY else f"{policy}/{name}"


def _by_policy(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        policy, _, name = key.rpartition("/")
        parts.setdefault(policy or DEFAULT_POLICY, {})[name] = value
    return parts
