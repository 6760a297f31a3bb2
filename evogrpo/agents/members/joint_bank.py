"""JointBank: the policies of multi-agent members, one stacked bank per policy; slot i of every bank is member i."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from evogrpo.policies.control.stacked import StackedBank


class JointBank:
    """Several policies of the same members.

    Selection, cloning and checkpoints reach all policies of a member together; acting and learning go to one policy's
    bank at a time.

    Args:
        banks: By policy, all of one size.

    Attributes:
        banks: As given.

    Raises:
        ValueError: If there is no bank, or they differ in size.
    """

    rows_are_transitions = True

    def __init__(self, banks: Mapping[str, StackedBank]) -> None:
        sizes = {bank.size for bank in banks.values()}
        if len(sizes) != 1:
            raise ValueError(f"a joint bank takes at least one bank, all of one size, got sizes {sorted(sizes)}")
        self.banks = dict(banks)

    @property
    def size(self) -> int:
        """Number of slots."""
        return next(iter(self.banks.values())).size

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt, in every policy; None = a fresh initialisation."""
        for bank in self.banks.values():
            bank.inherit(parents)  # the banks are of one size, so that the first refuses what any would

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of everything the member in `slot` has learnt, as "policy/name"."""
        return {
            f"{policy}/{name}": value for policy, bank in self.banks.items() for name, value in bank.state(slot).items()
        }

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot.

        Raises:
            ValueError: If it is the state of other policies, or does not fit one of them; nothing is changed then.
        """
        parts = by_policy(state)
        if set(parts) != set(self.banks):
            raise ValueError(f"a learner state of the policies {sorted(self.banks)} is needed, got {sorted(parts)}")
        before = {policy: bank.state(slot) for policy, bank in self.banks.items()}
        for policy, bank in self.banks.items():
            try:
                bank.load_state(slot, parts[policy])
            except ValueError as error:
                for done, held in before.items():
                    self.banks[done].load_state(slot, held)
                raise ValueError(f"policy {policy!r}: {error}") from error

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current policies of these members their own references; ValueError without own references."""
        for bank in self.banks.values():
            bank.keep_reference(slots)


def by_policy(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return a learner state's parts by policy and name."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        policy, _, name = key.rpartition("/")
        parts.setdefault(policy, {})[name] = value
    return parts
