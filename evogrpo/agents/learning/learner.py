"""Who takes part in a learning step."""

from dataclasses import dataclass

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.evolution.shared_experience import SharedExperience


@dataclass(frozen=True, kw_only=True)
class Learner:
    """One member that takes part in a learning step.

    Attributes:
        slot: Where it lives.
        index: Who it is; names its random stream.
        step: Which learning step of its this is; names the stream as well.
        hyperparameters: Read here and nowhere else.
        sources: Slots of the members whose samples it learns from, each at the temperature it was sampled at; None =
            its own only.
        shared: Which of these sources count, and how; None = all of them, each row like one of its own.
    """

    slot: int
    index: int
    step: int
    hyperparameters: Hyperparameters
    sources: tuple[int, ...] | None = None
    shared: SharedExperience | None = None

    @property
    def taught_by(self) -> tuple[int, ...]:
        """Slots of the members whose samples it learns from."""
        return (self.slot,) if self.sources is None else self.sources
