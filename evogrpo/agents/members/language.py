"""Members that are language models: their settings, and a base model with one adapter for each of them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from accelerate import Accelerator
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.agents.checkpoints.stored_base import base_files, check_base, named_base, saved_base, tensors_file
from evogrpo.agents.members.shared import Files
from evogrpo.hyperparameters import refuse_unknown
from evogrpo.objective import Objective, Optimizer
from evogrpo.persistence.manifest import CheckpointError
from evogrpo.policies.tokens.adapters import AdapterBank
from evogrpo.policies.tokens.lora import lora_from_json, lora_to_json
from evogrpo.policies.tokens.models import fingerprint


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
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
        buffer = self.objective.overlong_buffer
        if buffer is not None and buffer > self.max_output_tokens:
            raise ValueError(
                f"overlong_buffer must be at most max_output_tokens = {self.max_output_tokens}, got {buffer}"
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


class LanguageBody:
    """Adapters over one frozen base model; see `evogrpo.agents.members.shared.Body`.

    Args:
        model: The base.
        size: Number of members.
        settings: What does not evolve.
        lora_config: What to adapt.
        source: Where the base came from, as the user named it; the model's own name by default.
        autocast: Makes the context of forward passes.
        recognised_by: The base's fingerprint, where it is known already.

    Attributes:
        bank: The members.
        source: As given.
        fingerprint: Recognises the base.
    """

    kind = "language"
    weights = ("adapter",)
    evolves = False

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        settings: LanguageSettings,
        *,
        lora_config: LoraConfig | None = None,
        source: str | None = None,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        recognised_by: str | None = None,
    ) -> None:
        self._settings = settings
        self.bank = AdapterBank(
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
            own_reference=settings.objective.reference == "snapshot",
        )
        self.source = source or str(getattr(model, "name_or_path", "") or type(model).__name__)
        self.fingerprint = recognised_by or fingerprint(model)

    @classmethod
    def placed(
        cls,
        model: PreTrainedModel,
        size: int,
        settings: LanguageSettings,
        *,
        accelerator: Accelerator | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> "LanguageBody":
        """Place the base model, then build the bank.

        Raises:
            ValueError: If both an accelerator and a device are given, or the accelerator runs several processes.
        """
        if accelerator is not None:
            device, options["autocast"] = device_of(accelerator, device), accelerator.autocast
        if device is not None:
            model.to(device)  # type: ignore[arg-type]  # torch accepts a device or its name
        return cls(model, size, settings, **options)

    @property
    def device(self) -> torch.device:
        """Where the base model is."""
        return self.bank.base.device

    def alone(self, *, wrap: bool) -> "LanguageBody":
        """Return a bank of one member over the same base."""
        return LanguageBody(
            self.bank.base.model,
            1,
            self._settings,
            lora_config=self.bank.lora_config,
            source=self.source,
            autocast=self.bank.autocast if wrap else nullcontext,
            recognised_by=self.fingerprint,
        )

    def arguments(self) -> dict[str, Any]:
        """Return the constructor arguments that are not among the settings."""
        return {"lora_config": self.bank.lora_config}

    def policy(self, slot: int) -> nn.Module:
        """Return a module `policy(input_ids, attention_mask)` that gives logits `[n, t, v]`."""
        return self.bank.policy(slot)

    def recompile(self) -> None:
        """Forget what torch.compile made of the base model."""
        self.bank.recompile()

    def unwrap(self) -> None:
        """Stop computing under the accelerator's precision."""
        self.bank.autocast = nullcontext

    def proposal(self, slot: int, rng: np.random.Generator) -> None:
        """Return None: the architecture of a language model does not change."""

    def reshape(self, slot: int, words: str, rng: np.random.Generator) -> None:
        """Refuse: the architecture of a language model does not change."""
        raise ValueError(f"the architecture of a language model does not change, so it cannot become {words!r}")

    # ---- checkpoints

    def record(self) -> dict[str, Any]:
        """Return the base's source and fingerprint, and the adapters' settings."""
        return {
            "lora_config": lora_to_json(self.bank.lora_config),
            "source": self.source,
            "fingerprint": self.fingerprint,
            "micro_batch_tokens": self.bank.micro_batch_tokens,
        }

    def check(self, record: Mapping[str, Any], where: object) -> None:
        """Refuse adapters of another base model, or of another shape."""
        check_base(record, self.fingerprint, where)
        saved, own = record["lora_config"], lora_to_json(self.bank.lora_config)
        if saved != own:
            raise CheckpointError(
                f"{where} holds an adapter of lora_config {saved}, but this agent has {own}: make the agent with the "
                "same lora_config, or bring the saved one back with GRPO.load"
            )

    def constants(self) -> dict[str, Tensor]:
        """Return nothing: the base model is not saved with its members, but told by its fingerprint."""
        return {}

    def files(self, slot: int, *, include_base: bool) -> Files:
        """Return the member as a PEFT adapter, and the base model if wanted."""
        adapters, config = self.bank.peft_files(slot)
        # Functions, so that only the file that is being written is in memory as bytes.
        files: Files = {"adapter_model.safetensors": lambda: tensors_file(adapters), "adapter_config.json": config}
        return files | base_files(self.bank.base.model) if include_base else files


def stored_body(
    record: Mapping[str, Any],
    settings: LanguageSettings,
    size: int,
    where: Path,
    *,
    actor_network: PreTrainedModel | None,
    **placement: Any,
) -> LanguageBody:
    """Build the body that a checkpoint's record describes.

    Args:
        record: From `LanguageBody.record`.
        settings: From the same checkpoint.
        size: Number of members.
        where: The checkpoint's folder.
        actor_network: The base model; by default the saved one, or the one named in the record.
        placement: See `LanguageBody.placed`.

    Raises:
        CheckpointError: If the base model is another one.
        ValueError: If it cannot be found.
    """
    model = actor_network or saved_base(where) or named_base(record)
    actual = fingerprint(model)
    check_base(record, actual, where)
    body = LanguageBody.placed(
        model,
        size,
        settings,
        recognised_by=actual,
        lora_config=lora_from_json(record["lora_config"]),
        source=record["source"],
        **placement,
    )
    body.bank.micro_batch_tokens = record["micro_batch_tokens"]
    return body


def device_of(accelerator: Accelerator, device: str | torch.device | None) -> torch.device:
    """Return the device that an accelerator chooses.

    Raises:
        ValueError: If a device is given as well, or the accelerator runs several processes.
    """
    if device is not None:
        raise ValueError(f"an accelerator chooses the device: leave out device={str(device)!r}")
    if accelerator.num_processes != 1:
        raise ValueError(
            f"one process trains a whole population, got an accelerator with {accelerator.num_processes}: "
            "start the program without a multi-process launcher"
        )
    chosen: torch.device = accelerator.device
    return chosen
