"""The learner states that a population keeps beside those of its living members."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from evogrpo.agents.members.banks import Banks
from evogrpo.evolution.kept import Kept, KeptKey

State = Mapping[str, Tensor]


class KeptStates:
    """Learner states by whose they are and after which generation, in the order in which they were kept.

    They lie in the CPU's memory, wherever members live, and in every checkpoint of the population.
    """

    def __init__(self) -> None:
        self._states: dict[KeptKey, tuple[Kept, State]] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def seen(self) -> tuple[Kept, ...]:
        """What strategies see of them."""
        return tuple(kept for kept, _ in self._states.values())

    def keep(self, kept: Kept, state: State) -> None:
        """Keep a state; it is not copied where it lies in the CPU's memory already."""
        self._states[kept.key] = kept, {name: tensor.cpu() for name, tensor in state.items()}

    def drop(self, keys: Sequence[KeptKey]) -> None:
        """Forget states.

        Raises:
            ValueError: If one is not kept; none is forgotten then.
        """
        for key in keys:
            self.state(key)
        for key in keys:
            del self._states[key]

    def state(self, key: KeptKey) -> State:
        """Return a state.

        Raises:
            ValueError: If it is not kept.
        """
        if key not in self._states:
            raise ValueError(f"the state of #{key[0]} after generation {key[1]} is not kept, only {list(self._states)}")
        return self._states[key][1]

    # ---- checkpoints

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor under its name in a checkpoint."""
        for key, (_, state) in self._states.items():
            yield from ((f"{_prefix(key)}{part}", tensor) for part, tensor in state.items())

    def to_json(self) -> list[dict[str, Any]]:
        """Return all but the tensors as plain JSON values."""
        return [kept.to_json() for kept in self.seen]

    @classmethod
    def restored(cls, record: list[Mapping[str, Any]], tensors: State, banks: Banks) -> Self:
        """Build from what `to_json` returned and the tensors of a checkpoint.

        Args:
            record: As returned.
            tensors: By name, others among them.
            banks: Where members could go back to the states; they are as before afterwards.

        Raises:
            KeyError: If a tensor is missing.
            ValueError: If a state is none that a member could have.
        """
        states = cls()
        for kept in map(Kept.from_json, record):
            states.keep(kept, {part: tensors[f"{_prefix(kept.key)}{part}"] for part in banks.parts})
        if states:
            held = banks.state(0)
            for key in states._states:
                banks.load_state(0, states.state(key))
            banks.load_state(0, held)
        return states


def _prefix(key: KeptKey) -> str:
    return f"kept of {key[0]} after {key[1]}."
