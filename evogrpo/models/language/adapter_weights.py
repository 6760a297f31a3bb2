"""LoRA adapters and AdamW states of all members, stored as rows of matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.data import UpdateReport
from evogrpo.functional.optim import adamw_step_, clip_by_norm_
from evogrpo.models.bank import INITIAL_RUNNING_STATS, PolicyVersion
from evogrpo.models.devices import check_allocation
from evogrpo.models.language.adapter_files import StoredAdapter, peft_files
from evogrpo.models.language.lora import initial_weights, scaling
from evogrpo.models.language.low_rank import LoraAdapters
from evogrpo.models.language.protocols import AdapterHook, HookFactory
from evogrpo.models.language.targets import LoraTargets, choose_targets
from evogrpo.warnings import warn

_WARNED: WeakSet[PreTrainedModel] = WeakSet()


class TrainStates:
    """Train states of all members of a bank.

    Args:
        first: `[k]` initial weights of every member.
        size: Number of members.
        optimizer: AdamW settings shared by all members.
        own_reference: Store one reference per member, initially `first`.

    Attributes:
        weights: `[p, k]`, one row per slot.
        running_stats: `[p, 6]` float64 on the CPU; see `evogrpo.models.bank.RUNNING_STATS`.
        reference: `[p, k]`, or None without own references.
    """

    def __init__(self, first: Tensor, size: int, optimizer: Optimizer, *, own_reference: bool = False) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._optimizer = optimizer
        at_birth = torch.tensor(INITIAL_RUNNING_STATS, dtype=torch.float64)
        self._first = {"adapter": first, "exp_avg": None, "exp_avg_sq": None, "running_stats": at_birth}
        self.weights = first.repeat(size, 1)
        self._exp_avg = torch.zeros_like(self.weights)
        self._exp_avg_sq = torch.zeros_like(self.weights)
        self.running_stats = at_birth.repeat(size, 1)
        self._matrices = {
            "adapter": self.weights,
            "exp_avg": self._exp_avg,
            "exp_avg_sq": self._exp_avg_sq,
            "running_stats": self.running_stats,
        }
        self.reference = self.weights.clone() if own_reference else None
        if self.reference is not None:
            self._matrices["reference"], self._first["reference"] = self.reference, first
        self._steps, self._changes = [0] * size, [0] * size

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._steps)

    @property
    def own_reference(self) -> bool:
        """True if every member stores its own reference."""
        return self.reference is not None

    def changes(self, slot: int) -> int:
        """Return the number of changes of a member's weights."""
        return self._changes[slot]

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, all at once; None = a new member.

        Raises:
            ValueError: If `parents` is not one existing slot (or None) per slot.
        """
        if len(parents) != self.size or any(p is not None and not 0 <= p < self.size for p in parents):
            raise ValueError(
                f"parents must contain a slot from 0 to {self.size - 1} or None for each slot, got {parents}"
            )
        copies = {slot: parent for slot, parent in enumerate(parents) if parent is not None and parent != slot}
        new = [slot for slot, parent in enumerate(parents) if parent is None]
        for name, matrix in self._matrices.items():
            # The right-hand side is a copy, so parents may be overwritten as well.
            matrix[list(copies)] = matrix[list(copies.values())]
            first = self._first[name]
            matrix[new] = matrix.new_zeros(()) if first is None else first
        self._steps = [0 if parent is None else self._steps[parent] for parent in parents]
        for slot in (*copies, *new):
            self._changes[slot] += 1

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Copy the current weights of these members to their own references; ValueError without own references."""
        for slot in slots:
            self.mix_reference(slot, 1.0)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * weights + (1 - mixing) * reference; ValueError without own references.

        Source: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), the soft update.
        """
        if self.reference is None:
            raise ValueError("Members have no references of their own. Set reference='snapshot'.")
        self.reference[slot].lerp_(self.weights[slot], mixing)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state."""
        return *self._matrices, "step"

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a member's train state."""
        return torch.tensor(self._steps[slot]) if name == "step" else self._matrices[name][slot].clone()

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If keys, shapes or dtypes do not match; the slot is then unchanged.
        """
        expected = set(self.state_keys)
        if set(state) != expected:
            hint = ""
            if set(state) ^ expected == {"reference"}:
                hint = ". Its objective has the other reference ('base' or 'snapshot')."
            raise ValueError(f"A train state must have the keys {sorted(expected)}, got {sorted(state)}{hint}")
        for name, matrix in self._matrices.items():
            if state[name].shape != matrix[slot].shape:
                raise ValueError(
                    f"Train state {name!r} must have the shape {tuple(matrix[slot].shape)}, got "
                    f"{tuple(state[name].shape)}. Use the base model and lora_config it was saved with."
                )
            if state[name].dtype != matrix.dtype:
                raise ValueError(f"Train state {name!r} must be {matrix.dtype}, got {state[name].dtype}.")
        step = state["step"]
        if step.shape != () or step.dtype != torch.int64 or step < 0:
            raise ValueError(f"Train state 'step' must be one int64 of at least 0, got {step}.")
        for name, matrix in self._matrices.items():
            matrix[slot] = state[name]
        self._steps[slot] = int(step)
        self._changes[slot] += 1

    @torch.no_grad()
    def step(self, slot: int, gradient: Tensor, hyperparameters: Hyperparameters, loss: float) -> UpdateReport:
        """Clip one member's gradient and take its AdamW step; no step if the gradient is not finite.

        Args:
            slot: Slot of the member.
            gradient: `[k]`; used as scratch space.
            hyperparameters: `lr` and `max_grad_norm` are used.
            loss: For the report.

        Returns:
            The report; its norm is NaN if the gradient, or the weights after the step, are not finite.
        """
        settings = self._optimizer
        lr = hyperparameters.lr * settings.factor(self._steps[slot])
        norm = clip_by_norm_(gradient, hyperparameters.max_grad_norm)
        if not norm < float("inf"):
            return UpdateReport(grad_norm=float("nan"), lr=lr, loss=loss, step=self._steps[slot])
        # `adamw_step_` corrects the bias of the moments by the number of this step, from 1.
        self._steps[slot] += 1
        self._changes[slot] += 1
        adamw_step_(
            self.weights[slot],
            gradient,
            self._exp_avg[slot],
            self._exp_avg_sq[slot],
            self._steps[slot],
            lr=lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # One sum finds any NaN or infinity, without a mask as large as the weights.
        healthy = bool(self.weights[slot].sum().isfinite())
        norm = norm if healthy else float("nan")
        return UpdateReport(grad_norm=norm, lr=lr, loss=loss, step=self._steps[slot])


class AdapterWeights(TrainStates):
    """One LoRA adapter per member; see `evogrpo.models.language.protocols.Weights`.

    Args:
        model: The base model.
        size: Number of members.
        lora_config: LoRA configuration; rank 16 on all linear layers by default.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        own_reference: Store one reference per member.
        start: Adapter that every member starts from; new adapters by default.
        trained: Targets of `lora_config` in the model, if already known.

    Attributes:
        lora_config: As passed, or the default.
        targets: The adapted modules.
        trained: The targets and the modules that are left out.
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
        trained: LoraTargets | None = None,
    ) -> None:
        # 1. Choose the layers to adapt; warn once per model about those left out.
        if start is not None:
            self.lora_config = start.lora_config
        else:
            self.lora_config = lora_config or LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
            )
        self.trained = trained or choose_targets(model, self.lora_config)
        if (summary := self.trained.summary(model)) and model not in _WARNED:
            _WARNED.add(model)
            warn(f"Adapters train {summary}")
        self.targets = self.trained.targets
        # 2. Allocate weights and moments, one row per member.
        device = next(model.parameters()).device
        check_allocation(
            4 * self.targets[-1].end * (size * (3 + own_reference) + 2),  # weights, moments; one gradient, the start
            device,
            f"the adapters of {size} members with lora_config.r={self.lora_config.r}. Use fewer members or lower r.",
        )
        first = initial_weights(self.targets, self.lora_config, seed) if start is None else start.flat(self.targets)
        super().__init__(first.to(device), size, optimizer, own_reference=own_reference)
        # 3. Views of A and B for the passes.
        scale = scaling(self.lora_config)
        self._adapters = {"weights": LoraAdapters(self.targets, self.weights, scale)}
        if self.reference is not None:
            self._adapters["reference"] = LoraAdapters(self.targets, self.reference, scale)

    @property
    def modules(self) -> Sequence[str]:
        """Dotted names of the adapted modules."""
        return [target.name for target in self.targets]

    def hook_factory(self, policy: PolicyVersion) -> HookFactory:
        """Return the hooks of a policy version; none for the base."""
        return _base_only if policy == "base" else self._adapters[policy].hook

    def new_gradient(self) -> Tensor:
        """Return zeros `[k]`."""
        return torch.zeros_like(self.weights[0])

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Accumulate a member's gradient into `buffer` `[k]` in the following backward passes; None stops it."""
        self._adapters["weights"].gather_gradient(slot, buffer)

    def files(self, slot: int, base: str | None) -> tuple[dict[str, Tensor], bytes]:
        """Return a member in PEFT's format: tensors of adapter_model.safetensors, bytes of adapter_config.json."""
        config = replace(self.lora_config, base_model_name_or_path=base)
        return peft_files(self.targets, config, self.weights[slot])


def _base_only(slots: Tensor) -> AdapterHook | None:
    """Return no hook."""
    return None
