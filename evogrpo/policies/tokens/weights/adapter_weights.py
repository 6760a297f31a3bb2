"""LoRA adapters of all members as weights: rows of matrices, routed to the rows of forward passes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.config.optimizer import Optimizer
from evogrpo.policies.bank import PolicyVersion
from evogrpo.policies.devices import check_room
from evogrpo.policies.tokens.exports import peft_files
from evogrpo.policies.tokens.lora import default_lora_config, initial_weights, scaling
from evogrpo.policies.tokens.stored_adapters import StoredAdapter
from evogrpo.policies.tokens.targets import Trained, tell_left_out, trained_by
from evogrpo.policies.tokens.weights.low_rank import LowRankAdapters
from evogrpo.policies.tokens.weights.states import LearnerStates
from evogrpo.policies.tokens.weights.weights import Route, View


class AdapterWeights(LearnerStates):
    """One LoRA adapter per member; see `evogrpo.policies.tokens.weights.weights.Weights`.

    Args:
        model: The base model; only its modules' names and shapes are read.
        size: Number of members.
        lora_config: What to adapt and how; rank 16 on all linear layers by default.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        own_reference: Whether every member keeps a reference of its own.
        start: What every member starts from; fresh adapters by default.
        trained: What `lora_config` trains of the model, where that is known already.

    Attributes:
        lora_config: As given, or the default.
        targets: The adapted modules.
        trained: As given, or found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        lora_config: LoraConfig | None,
        optimizer: Optimizer,
        *,
        seed: int,
        own_reference: bool,
        start: StoredAdapter | None = None,
        trained: Trained | None = None,
    ) -> None:
        if start is not None:
            self.lora_config = start.lora_config
        else:
            self.lora_config = lora_config or default_lora_config()
        self.trained = trained or trained_by(model, self.lora_config)
        tell_left_out(self.trained, model)
        self.targets = self.trained.targets
        device = next(model.parameters()).device
        check_room(
            4 * self.targets[-1].end * (size * (3 + own_reference) + 2),  # weights, moments; one gradient, the start
            device,
            f"the adapters of {size} members with lora_config.r={self.lora_config.r}: choose fewer, or a lower rank",
        )
        first = initial_weights(self.targets, self.lora_config, seed) if start is None else start.flat(self.targets)
        super().__init__(first.to(device), size, optimizer, own_reference=own_reference)
        scale = scaling(self.lora_config)
        self._adapters = {"weights": LowRankAdapters(self.targets, self.weights, scale)}
        if self.reference is not None:
            self._adapters["reference"] = LowRankAdapters(self.targets, self.reference, scale)

    @property
    def modules(self) -> Sequence[str]:
        """Dotted names of the adapted modules."""
        return [target.name for target in self.targets]

    def route(self, policy: PolicyVersion) -> Route:
        """Return what directs rows to their members' adapters, or to none for the base."""
        return _no_adapters if policy == "base" else self._adapters[policy].route

    def new_gradient(self) -> Tensor:
        """Return zeros `[k]`."""
        return torch.zeros_like(self.weights[0])

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Let backward passes add a member's gradient into `buffer` `[k]`; None ends that."""
        self._adapters["weights"].gather_gradient(slot, buffer)

    def files(self, slot: int, base: str | None) -> tuple[dict[str, Tensor], bytes]:
        """Return a member as PEFT stores it: tensors of adapter_model.safetensors, bytes of adapter_config.json."""
        config = replace(self.lora_config, base_model_name_or_path=base)
        return peft_files(self.targets, config, self.weights[slot])


def _no_adapters(slots: Tensor) -> View | None:
    """Let all rows act as the base."""
    return None
