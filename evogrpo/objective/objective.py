"""How members learn: the frozen record of loss, advantages, KL, reference and reward switches."""

import dataclasses
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters, answering
from evogrpo.interop.foreign_fields import Reading
from evogrpo.interop.roll import read_roll
from evogrpo.interop.trl import read_trl
from evogrpo.objective.compatibility import check_combination, check_effect, check_member
from evogrpo.objective.optimizer import Optimizer
from evogrpo.objective.switches import Switches


@answering
@dataclass(frozen=True, kw_only=True)
class Objective(Switches):
    """Which loss is minimised; its coefficients live in `Hyperparameters`, its fields are those of `Switches`.

    The order in which the switches act on rewards is ROLL's: weighted sum and overlong penalty; `reward_norm`; the
    advantage's own statistics; `reward_clip`; in-reward KL; `reward_clip` again; the return, discounted by
    `Hyperparameters.gamma`; `whiten_advantages`; the action mask; `Hyperparameters.advantage_clip`.

    Raises:
        ValueError: If a value is out of range, or has no effect or no meaning beside the others.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_combination(self)

    def of(self, hyperparameters: Hyperparameters) -> Self:
        """Return the member's own objective: this one with its `loss_type` and `advantage`, where it has them.

        Raises:
            ValueError: If another switch is incompatible with them; `check` says so before anything runs.
        """
        return self.with_types(hyperparameters.loss_type, hyperparameters.advantage)

    def resolved(self, hyperparameters: Hyperparameters, space: Container[str]) -> Hyperparameters:
        """Return hyperparameters whose evolving names are written out: mutation has to know what they are."""
        names = {name: getattr(self, name) for name in ("loss_type", "advantage") if name in space}
        missing = {name: value for name, value in names.items() if getattr(hyperparameters, name) is None}
        return dataclasses.replace(hyperparameters, **missing) if missing else hyperparameters

    def check(self, hyperparameters: Hyperparameters, space: HyperparameterConfig | None = None) -> None:
        """Refuse what no member of a population could use, or what one of them could not.

        Args:
            hyperparameters: The first member's; those that do not evolve are everyone's.
            space: What evolves; None = nothing.

        Raises:
            ValueError: If this objective is incompatible with a loss type, an advantage or a coefficient that a member
                has or can come to have.
        """
        space = HyperparameterConfig() if space is None else space
        check_member(self, hyperparameters, space)
        check_effect(self, hyperparameters, space)

    def check_member(self, hyperparameters: Hyperparameters, space: HyperparameterConfig | None = None) -> None:
        """Refuse what one member could not use, or what evolution could make of it; others may differ.

        Args:
            hyperparameters: The member's.
            space: What evolves; None = nothing.

        Raises:
            ValueError: As `check`.
        """
        check_member(self, hyperparameters, HyperparameterConfig() if space is None else space)

    @classmethod
    def from_roll(cls, source: Mapping[str, Any] | str | Path) -> "Imported":
        """Translate the settings of a ROLL pipeline; see `evogrpo.interop.roll.read_roll`."""
        return Imported.of(read_roll(source))

    @classmethod
    def from_trl(cls, source: object) -> "Imported":
        """Translate a TRL `GRPOConfig`, or a mapping of its fields; see `evogrpo.interop.trl.read_trl`."""
        return Imported.of(read_trl(source))


T = TypeVar("T")


def _made(make: Callable[[], T], refused: list[str]) -> T | None:
    """Return what `make` makes, or None where it refuses, which is noted."""
    try:
        return make()
    except ValueError as error:
        refused.append(str(error))
        return None


SETTINGS = {
    "samples_per_step": "schedule",
    "max_output_tokens": "agent",
    "top_k": "agent",
    "top_p": "agent",
    "min_p": "agent",
    "repetition_penalty": "agent",
    "max_prompt_length": "task",
    "reward_weights": "task",
    "seed": "run",
}
"""The settings that `Imported.settings` can hold, and the section of a configuration that each belongs to."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What the settings of another library mean here. Nothing is dropped in silence: see `ignored`.

    Attributes:
        objective: The loss, advantages, KL, reference and reward switches.
        hyperparameters: Those the settings give, by name: `Hyperparameters(**imported.hyperparameters)`.
        optimizer: AdamW's settings.
        settings: What belongs elsewhere, by name; see `SETTINGS`.
        ignored: Fields that were given and have no counterpart here, with the reason: look them through.

    Raises:
        ValueError: If the objective and the hyperparameters do not go together.
    """

    objective: Objective
    hyperparameters: Mapping[str, Any]
    optimizer: Optimizer
    settings: Mapping[str, Any]
    ignored: Mapping[str, str]

    @classmethod
    def of(cls, reading: Reading) -> "Imported":
        """Build the records that the keyword arguments read are of.

        Raises:
            ValueError: With everything that cannot be honoured or is out of range, one line each.
        """
        from evogrpo.records import SamplingOptions  # needs torch, which settings do without

        refused = list(reading.refused)
        objective = _made(lambda: Objective(**reading.objective), refused)
        optimizer = _made(lambda: Optimizer(**reading.optimizer), refused)
        drawn = [each.name for each in dataclasses.fields(SamplingOptions) if each.name in reading.settings]
        _made(lambda: SamplingOptions(**{name: reading.settings[name] for name in drawn}), refused)
        for name, value in reading.hyperparameters.items():
            _made(partial(Hyperparameters.from_json, {name: value}), refused)
        if objective is None or optimizer is None or refused:
            count = f"{len(refused)} things cannot be taken over:\n- " if len(refused) > 1 else ""
            raise ValueError(count + "\n- ".join(refused))
        return cls(
            objective=objective,
            hyperparameters=reading.hyperparameters,
            optimizer=optimizer,
            settings=reading.settings,
            ignored=reading.ignored,
        )

    def __post_init__(self) -> None:
        self.objective.check(Hyperparameters(**self.hyperparameters))

    def to_config(self) -> dict[str, Any]:
        """Return these settings as sections of a configuration of `evogrpo train`, without model, task and end."""
        sections: dict[str, dict[str, Any]] = {"agent": {"objective": vars(self.objective).copy()}}
        sections["agent"]["optimizer"] = {**vars(self.optimizer), "betas": list(self.optimizer.betas)}
        top: dict[str, Any] = {"hyperparameters": dict(self.hyperparameters)}
        for name, value in self.settings.items():
            section = SETTINGS[name]
            if section == "run":
                top[name] = value
            else:
                sections.setdefault(section, {})[name] = value
        return {**top, **sections}
