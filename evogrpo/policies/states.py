"""What members have learnt, as rows of matrices: weights, AdamW moments, step counts; and the AdamW step of one row."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evogrpo.functional.optim import adamw_step_, clip_by_norm_, schedule_factor
from evogrpo.hyperparameters import Hyperparameters
from evogrpo.objective import Optimizer
from evogrpo.records import UpdateReport


class LearnerStates:
    """The learner states of all members of a bank.

    Args:
        first: `[k]` weights that every member starts from.
        size: Number of members.
        optimizer: AdamW settings shared by all members.

    Attributes:
        weights: `[p, k]`, one row per slot.
    """

    def __init__(self, first: Tensor, size: int, optimizer: Optimizer) -> None:
        self._first = first
        self._optimizer = optimizer
        self.weights = first.repeat(size, 1)
        self._exp_avg = torch.zeros_like(self.weights)
        self._exp_avg_sq = torch.zeros_like(self.weights)
        self._steps = [0] * size

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._steps)

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
        saved = {parent: self.state(parent) for parent in changed.values() if parent is not None and parent in changed}
        for slot, parent in changed.items():
            if parent is None:
                self.weights[slot] = self._first
                self._exp_avg[slot] = self._exp_avg_sq[slot] = 0.0
                self._steps[slot] = 0
            elif parent in saved:
                self.load_state(slot, saved[parent])
            else:
                for matrix in (self.weights, self._exp_avg, self._exp_avg_sq):
                    matrix[slot] = matrix[parent]
                self._steps[slot] = self._steps[parent]

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of a member's weights, AdamW moments `[k]` and step count."""
        return {
            "adapter": self.weights[slot].clone(),
            "exp_avg": self._exp_avg[slot].clone(),
            "exp_avg_sq": self._exp_avg_sq[slot].clone(),
            "step": torch.tensor(self._steps[slot]),
        }

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot.

        Raises:
            ValueError: If names, shapes or types differ from this bank's; nothing is changed then.
        """
        expected = {"adapter": self.weights, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        if set(state) != {*expected, "step"}:
            raise ValueError(f"a learner state holds {sorted({*expected, 'step'})}, got {sorted(state)}")
        for name, matrix in expected.items():
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
        for name, matrix in expected.items():
            matrix[slot] = state[name]
        self._steps[slot] = int(step)

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
        lr = hyperparameters.lr * schedule_factor(
            self._steps[slot],
            kind=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
        )
        norm = clip_by_norm_(gradient, hyperparameters.max_grad_norm)
        if not norm < float("inf"):
            return UpdateReport(grad_norm=float("nan"), lr=lr, loss=loss)
        self._steps[slot] += 1
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
        return UpdateReport(grad_norm=norm if healthy else float("nan"), lr=lr, loss=loss)
