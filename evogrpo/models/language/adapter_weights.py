"""LoRA adapters and AdamW states of all members, as rows of matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from evogrpo.models.language.lora import default_lora_config, initial_weights, scaling
from evogrpo.models.language.low_rank import LoraAdapters
from evogrpo.models.language.targets import Trained, choose_targets, warn_left_out
from evogrpo.models.language.token_model import AdapterHook, HookFactory


class TrainStates:
    """The learner states of all members of a bank.

    Args:
        first: `[k]` weights that every member starts from.
        size: Number of members.
        optimizer: AdamW settings shared by all members.
        own_reference: Whether every member keeps weights of its own to be compared with, `first` to begin with.

    Attributes:
        weights: `[p, k]`, one row per slot.
        running_stats: `[p, 4]` float64 on the CPU; see `evogrpo.models.bank.RUNNING_STATS`.
        reference: `[p, k]`, or None without own references.
    """

    def __init__(self, first: Tensor, size: int, optimizer: Optimizer, *, own_reference: bool = False) -> None:
        if size < 1:
            raise ValueError(f"a bank needs at least 1 member, got size={size}")
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
        """Whether every member has a reference of its own."""
        return self.reference is not None

    def changes(self, slot: int) -> int:
        """Return how often the member's weights have changed."""
        return self._changes[slot]

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt, all at once; None = a fresh initialisation.

        Raises:
            ValueError: If `parents` does not name one existing slot (or None) per slot.
        """
        if len(parents) != self.size or any(p is not None and not 0 <= p < self.size for p in parents):
            raise ValueError(
                f"parents must name one of the slots 0 to {self.size - 1} (or None) per slot, got {parents}"
            )
        changed = {slot: parent for slot, parent in enumerate(parents) if parent != slot}
        # A parent whose own slot is overwritten as well must be read before anything is written.
        saved = {
            parent: {name: self.state_tensor(parent, name) for name in self.state_keys}
            for parent in changed.values()
            if parent is not None and parent in changed
        }
        for slot, parent in changed.items():
            self._changes[slot] += 1
            if parent is None:
                for name, matrix in self._matrices.items():
                    first = self._first[name]
                    matrix[slot] = 0.0 if first is None else first
                self._steps[slot] = 0
            elif parent in saved:
                self.load_state(slot, saved[parent])
            else:
                for matrix in self._matrices.values():
                    matrix[slot] = matrix[parent]
                self._steps[slot] = self._steps[parent]

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current weights of these members their own references; ValueError without own references."""
        for slot in slots:
            self.mix_reference(slot, 1.0)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * weights + (1 - mixing) * reference; ValueError without own references.

        Source: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), the soft update.
        """
        if self.reference is None:
            raise ValueError("members have no references of their own to change: make them with reference='snapshot'")
        self.reference[slot].lerp_(self.weights[slot], mixing)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What a learner state consists of, by name."""
        return *self._matrices, "step"

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of a member's learner state: a vector `[k]`, its statistics or its step count."""
        return torch.tensor(self._steps[slot]) if name == "step" else self._matrices[name][slot].clone()

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put the parts of a learner state into a slot.

        Raises:
            ValueError: If names, shapes or types differ from this bank's; nothing is changed then.
        """
        expected = set(self.state_keys)
        if set(state) != expected:
            hint = ""
            if set(state) ^ expected == {"reference"}:
                hint = ": it belongs to an objective whose reference is the other one of 'base' and 'snapshot'"
            raise ValueError(f"a learner state holds {sorted(expected)}, got {sorted(state)}{hint}")
        for name, matrix in self._matrices.items():
            if state[name].shape != matrix[slot].shape:
                raise ValueError(
                    f"learner state {name!r} has {tuple(state[name].shape)} values, this bank's members have "
                    f"{tuple(matrix[slot].shape)}: base model and lora_config must be those it was saved with"
                )
            if state[name].dtype != matrix.dtype:
                raise ValueError(f"learner state {name!r} must be {matrix.dtype}, got {state[name].dtype}")
        step = state["step"]
        if step.shape != () or step.dtype != torch.int64 or step < 0:
            raise ValueError(f"learner state 'step' must be one int64 number of at least 0, got {step}")
        for name, matrix in self._matrices.items():
            matrix[slot] = state[name]
        self._steps[slot] = int(step)
        self._changes[slot] += 1

    @torch.no_grad()
    def step(self, slot: int, gradient: Tensor, hyperparameters: Hyperparameters, loss: float) -> UpdateReport:
        """Clip one member's gradient and take its AdamW step; no step when the gradient is not finite.

        Args:
            slot: Which member.
            gradient: `[k]`; used as scratch space.
            hyperparameters: `lr` and `max_grad_norm` are used.
            loss: For the report.

        Returns:
            The report; its norm is NaN when the gradient, or the weights after the step, are not finite.
        """
        settings = self._optimizer
        lr = hyperparameters.lr * settings.factor(self._steps[slot])
        norm = clip_by_norm_(gradient, hyperparameters.max_grad_norm)
        if not norm < float("inf"):
            return UpdateReport(grad_norm=float("nan"), lr=lr, loss=loss, step=self._steps[slot])
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
        healthy = bool(self.weights[slot].sum().isfinite())
        norm = norm if healthy else float("nan")
        return UpdateReport(grad_norm=norm, lr=lr, loss=loss, step=self._steps[slot])


class AdapterWeights(TrainStates):
    """One LoRA adapter per member; see `evogrpo.models.language.token_model.Weights`.

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
        self.trained = trained or choose_targets(model, self.lora_config)
        warn_left_out(self.trained, model)
        self.targets = self.trained.targets
        device = next(model.parameters()).device
        check_allocation(
            4 * self.targets[-1].end * (size * (3 + own_reference) + 2),  # weights, moments; one gradient, the start
            device,
            f"the adapters of {size} members with lora_config.r={self.lora_config.r}: choose fewer, or a lower rank",
        )
        first = initial_weights(self.targets, self.lora_config, seed) if start is None else start.flat(self.targets)
        super().__init__(first.to(device), size, optimizer, own_reference=own_reference)
        scale = scaling(self.lora_config)
        self._adapters = {"weights": LoraAdapters(self.targets, self.weights, scale)}
        if self.reference is not None:
            self._adapters["reference"] = LoraAdapters(self.targets, self.reference, scale)

    @property
    def modules(self) -> Sequence[str]:
        """Dotted names of the adapted modules."""
        return [target.name for target in self.targets]

    def hook_factory(self, policy: PolicyVersion) -> HookFactory:
        """Return what directs rows to their members' adapters, or to none for the base."""
        return _no_adapters if policy == "base" else self._adapters[policy].hook

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


def _no_adapters(slots: Tensor) -> AdapterHook | None:
    """Let all rows act as the base."""
    return None
