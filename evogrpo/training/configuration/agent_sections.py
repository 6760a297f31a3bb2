"""Agent sections of a configuration: settings that all members share."""

from dataclasses import dataclass, field, fields
from typing import Any

from evogrpo.algorithms.policies.settings import STEPWISE, LanguageSettings, NetworkSettings
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters, with the names of peft.

    Attributes:
        r: Rank.
        lora_alpha: Scale, times the rank.
        target_modules: What is adapted: "all-linear", a regular expression, or module names.
        exclude_modules: What is left out of that.
        use_rslora: Divide by the root of the rank rather than by the rank.
        init_lora_weights: true, or "gaussian".
    """

    r: int = 16
    lora_alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: str | tuple[str, ...] | None = None
    use_rslora: bool = False
    init_lora_weights: bool | str = True


@dataclass(frozen=True, kw_only=True)
class LanguageAgent:
    """Settings of language models; see `evogrpo.algorithms.factory.Options`.

    Attributes:
        lora: Initial adapters; replaced by `adapter`.
    """

    max_output_tokens: int = 128
    min_output_tokens: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] | None = None
    micro_batch_tokens: int | None = None
    reduce_memory_peak: bool = True
    calc_position_embeddings: bool = True
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: LoraSettings = field(default_factory=LoraSettings)
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None and self.lora != LoraSettings():
            raise ValueError(f"lora must be left out where adapter is given, got adapter={self.adapter!r}")
        ends = (0,) if self.eos_token_ids is None else self.eos_token_ids
        LanguageSettings(pad_token_id=0, eos_token_ids=ends, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `GRPO.population` among the fields, apart from those in `_NOT_SETTINGS`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_SETTINGS}


_NOT_SETTINGS = ("lora", "adapter", "eos_token_ids")


@dataclass(frozen=True, kw_only=True)
class NetworkAgent:
    """Settings of small networks, one per policy; see `evogrpo.algorithms.factory.Options`.

    An objective given in part keeps the rest of the networks' own default, `STEPWISE`.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    evolve_network: ArchitectureLimits | None = None
    normalise_observations: bool = False
    objective: Objective = STEPWISE
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        NetworkSettings(**self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `GRPO.population` and `MultiAgentGRPO.population`."""
        return {each.name: getattr(self, each.name) for each in fields(self)}
