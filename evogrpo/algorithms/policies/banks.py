"""Banks: the policies of the same members, one bank each; slot i of every bank is member i."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from evogrpo.models.bank import PolicyBank, TrainState

DEFAULT = "default"
"""The name of the policy where a member has only one: its learner state carries no policy's name."""


class Banks(Mapping[str, PolicyBank]):
    """Several policies of the same members.

    Selection, cloning and checkpoints reach all policies of a member together; acting and learning go to one policy's
    bank at a time.

    Args:
        banks: By policy, all of one size.

    Attributes:
        changed: Slots whose learner states have changed since they were last taken out of it; all, to begin with.

    Raises:
        ValueError: If there is no bank, or they differ in size.
    """

    def __init__(self, banks: Mapping[str, PolicyBank]) -> None:
        sizes = {bank.size for bank in banks.values()}
        if len(sizes) != 1:
            raise ValueError(f"members need at least one bank, all of one size, got sizes {sorted(sizes)}")
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
        """Note that learner states of slots change; before it happens, as something may raise on the way."""
        self.changed.update(slots)

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt, in every policy; None = a fresh initialisation."""
        for bank in self._banks.values():
            bank.inherit(parents)  # the banks are of one size, so that the first refuses what any would
        self.changed.update(slot for slot, parent in enumerate(parents) if parent != slot)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What a learner state consists of, by name: the keys of `state`, the same for all members."""
        return tuple(state_key(policy, name) for policy, bank in self._banks.items() for name in bank.state_keys)

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of what the member in `slot` has learnt."""
        policy, _, own = name.rpartition("/")
        return self._banks[policy or DEFAULT].state_tensor(slot, own)

    def state(self, slot: int) -> TrainState:
        """Return copies of everything the member in `slot` has learnt; of several policies as "policy/name"."""
        return {
            state_key(policy, name): value
            for policy, bank in self._banks.items()
            for name, value in bank.state(slot).items()
        }

    def broadcast_state(self, slot: int) -> TrainState:
        """Return copies of what the member in `slot` has learnt in every process of the run; all of them call this."""
        return self.state(slot)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot.

        Raises:
            ValueError: If it is the state of other policies, or does not fit one of them; nothing is changed then.
        """
        parts = _by_policy(state)
        if set(parts) != set(self._banks):
            raise ValueError(f"a learner state of the policies {sorted(self._banks)} is needed, got {sorted(parts)}")
        before = {policy: bank.state(slot) for policy, bank in self._banks.items() if len(self._banks) > 1}
        for policy, bank in self._banks.items():
            try:
                bank.load_state(slot, parts[policy])
            except ValueError as error:
                for done, held in before.items():
                    self._banks[done].load_state(slot, held)
                raise ValueError(str(error) if policy == DEFAULT else f"policy {policy!r}: {error}") from error
        self.changed.add(slot)

    def snapshot(self, slots: Collection[int]) -> dict[int, TrainState]:
        """Return copies of what members have learnt, which `load_state` brings back."""
        return {slot: self.state(slot) for slot in slots}

    def gathered(self, slots: Collection[int]) -> AbstractContextManager[None]:
        """Let the process that writes files read these members' learner states in the block: here it always can."""
        return nullcontext()

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their own references; ValueError without own references."""
        for bank in self._banks.values():
            bank.keep_reference(slots)


def state_key(policy: str, name: str) -> str:
    """Return what a part of a policy's learner state is called in the member's."""
    return name if policy == DEFAULT else f"{policy}/{name}"


def _by_policy(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        policy, _, name = key.rpartition("/")
        parts.setdefault(policy or DEFAULT, {})[name] = value
    return parts
