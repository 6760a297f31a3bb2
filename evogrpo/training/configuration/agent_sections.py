"""Agent sections of a configuration: settings that all members share."""

from dataclasses import dataclass, field, fields
from typing import Any

from evogrpo.algorithms.policies.settings import STEPWISE, LanguageSettings, NetworkSettings
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters, with the names and defaults of `peft.LoraConfig`.

    Attributes:
        r: Rank.
        lora_alpha: The update is scaled by lora_alpha / r.
        target_modules: Adapted modules: "all-linear", a regular expression, or module names.
        exclude_modules: Modules that are not adapted: a regular expression or module names.
        use_rslora: Scale by lora_alpha / sqrt(r) instead.
        init_lora_weights: true for B = 0 and uniform A, or "gaussian" for normal A.
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
        lora: Shape of the adapters.
        adapter: Folder of a PEFT adapter that all members start from, instead of `lora`.
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
            raise ValueError(f"adapter {self.adapter!r} has its own LoRA settings. Remove lora.")
        # Validate; the real token ids are known once the tokenizer is loaded.
        eos_token_ids = (0,) if self.eos_token_ids is None else self.eos_token_ids
        LanguageSettings(pad_token_id=0, eos_token_ids=eos_token_ids, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Return the fields that are passed to `GRPO.population` unchanged."""
        others = ("lora", "adapter", "eos_token_ids")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}


@dataclass(frozen=True, kw_only=True)
class NetworkAgent:
    """Settings of small networks, one per policy; see `evogrpo.algorithms.factory.Options`.

    Settings that `objective` does not name are those of `STEPWISE`.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    evolve_network: ArchitectureLimits | None = None
    normalise_observations: bool = False
    objective: Objective = STEPWISE
    optimizer: Optimizer = field(default_factory=Optimizer)

    def __post_init__(self) -> None:
        NetworkSettings(**self.settings())  # validates

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `GRPO.population` and `MultiAgentGRPO.population`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
