"""What all members of one population share: the bank, the settings that do not evolve, and where the base came from."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from accelerate import Accelerator
from gymnasium import spaces
from peft import LoraConfig
from transformers import PreTrainedModel

from evogrpo.hyperparameters import HyperparameterConfig, refuse_unknown
from evogrpo.objective import Objective, Optimizer
from evogrpo.policies.adapters import AdapterBank
from evogrpo.policies.models import fingerprint


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a language-model population that do not evolve and that a checkpoint stores.

    Attributes:
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion.
        max_output_tokens: Most tokens of a completion.
        min_output_tokens: Ends of sequence are ruled out for that many first tokens, while sampling and learning.
        objective: The loss.
        optimizer: AdamW settings.
        seed: Root of every random stream.
        calc_position_embeddings: Whether positions, counted without padding, are passed to the model.
        reduce_memory_peak: Whether log-probabilities are computed over a few hundred tokens' logits at a time.
        micro_batch_tokens: Most tokens in one forward pass with gradients.
    """

    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    max_output_tokens: int = 128
    min_output_tokens: int = 0
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0
    calc_position_embeddings: bool = True
    reduce_memory_peak: bool = True
    micro_batch_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.max_output_tokens < 1:
            raise ValueError(f"max_output_tokens must be at least 1, got {self.max_output_tokens}")
        if not 0 <= self.min_output_tokens <= self.max_output_tokens:
            raise ValueError(
                f"min_output_tokens must lie in [0, max_output_tokens = {self.max_output_tokens}], "
                f"got {self.min_output_tokens}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {self.micro_batch_tokens}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Build from what `to_json` returned; raises ValueError for an unknown name or a refused value."""
        refuse_unknown("setting", values, cls.__dataclass_fields__)
        plain = dict(values)
        plain["eos_token_ids"] = tuple(plain["eos_token_ids"])
        plain["objective"] = Objective(**plain["objective"])
        plain["optimizer"] = Optimizer(**plain["optimizer"])
        return cls(**plain)


@dataclass(kw_only=True)
class Shared:
    """What the members of one population share.

    Attributes:
        bank: Their weights and optimisers.
        settings: What does not evolve.
        hp_config: What evolves and between which values; None = nothing.
        source: Where the base model came from, as the user named it.
        fingerprint: Recognises the base model.
        observation_space: What members read; None for language models unless given.
        action_space: What members do; None for language models unless given.
    """

    bank: AdapterBank
    settings: Settings
    hp_config: HyperparameterConfig | None
    source: str
    fingerprint: str
    observation_space: spaces.Space[Any] | None = None
    action_space: spaces.Space[Any] | None = None

    def alone(self, *, wrap: bool = True) -> "Shared":
        """Return the same with a new bank of one member over the same base.

        Args:
            wrap: Whether the new bank runs under the same accelerator's precision.
        """
        return Shared(
            bank=make_bank(
                self.bank.base.model,
                1,
                self.settings,
                self.bank.lora_config,
                self.bank.autocast if wrap else nullcontext,
            ),
            settings=self.settings,
            hp_config=self.hp_config,
            source=self.source,
            fingerprint=self.fingerprint,
            observation_space=self.observation_space,
            action_space=self.action_space,
        )


def make_shared(
    model: PreTrainedModel,
    size: int,
    settings: Settings,
    *,
    lora_config: LoraConfig | None = None,
    hp_config: HyperparameterConfig | None = None,
    source: str | None = None,
    accelerator: Accelerator | None = None,
    device: str | torch.device | None = None,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
) -> Shared:
    """Place the base model and build a bank of `size` members over it.

    Raises:
        ValueError: If both an accelerator and a device are given, or the accelerator runs several processes.
    """
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext
    if accelerator is not None:
        if device is not None:
            raise ValueError(f"an accelerator chooses the device: leave out device={str(device)!r}")
        if accelerator.num_processes != 1:
            raise ValueError(
                f"one process trains a whole population, got an accelerator with {accelerator.num_processes}: "
                "start the program without a multi-process launcher"
            )
        device, autocast = accelerator.device, accelerator.autocast
    if device is not None:
        model.to(device)  # type: ignore[arg-type]  # torch accepts a device or its name
    return Shared(
        bank=make_bank(model, size, settings, lora_config, autocast),
        settings=settings,
        hp_config=hp_config,
        source=source or str(getattr(model, "name_or_path", "") or type(model).__name__),
        fingerprint=fingerprint(model),
        observation_space=observation_space,
        action_space=action_space,
    )


def make_bank(
    model: PreTrainedModel,
    size: int,
    settings: Settings,
    lora_config: LoraConfig | None,
    autocast: Callable[[], AbstractContextManager[None]],
) -> AdapterBank:
    """Build the bank that the settings describe."""
    return AdapterBank(
        model,
        size=size,
        pad_token_id=settings.pad_token_id,
        eos_token_ids=settings.eos_token_ids,
        lora_config=lora_config,
        optimizer=settings.optimizer,
        seed=settings.seed,
        micro_batch_tokens=settings.micro_batch_tokens,
        reduce_memory_peak=settings.reduce_memory_peak,
        explicit_positions=settings.calc_position_embeddings,
        autocast=autocast,
    )
