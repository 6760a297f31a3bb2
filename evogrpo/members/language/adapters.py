"""Train states of all members, and products in which each row uses its own member's LoRA matrices."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple
from weakref import WeakSet

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.functional.optim import clipped_adamw_steps_
from evogrpo.members.bank import (
    INITIAL_RUNNING_STATS,
    PolicyVersion,
    check_parents,
    check_train_state,
)
from evogrpo.members.devices import check_allocation
from evogrpo.members.language.full_finetuning import AllWeights, MemberModels
from evogrpo.members.language.lora import (
    LoraTargets,
    StoredAdapter,
    Target,
    initial_weights,
    scaling,
)
from evogrpo.records import UpdateReport
from evogrpo.warnings import warn

Run = tuple[slice, slice, int]
"""Adjacent segments of equal length: their tokens, their slots, and the number of segments."""


def runs_of(sizes: Sequence[int], begin: int = 0) -> list[Run]:
    """Group adjacent segments of equal length, so that one batched product covers each group.

    Args:
        sizes: Tokens of each slot's segment.
        begin: Offset of the first token.
    """
    found = list[Run]()
    first = 0
    at = begin
    while first < len(sizes):
        last = first
        while last < len(sizes) and sizes[last] == sizes[first]:
            last += 1
        end = at + sizes[first] * (last - first)
        found.append((slice(at, end), slice(first, last), last - first))
        first = last
        at = end
    return found


class StackedAdapters(NamedTuple):
    """Adapters of modules with the same input for adjacent segments of equal length, stacked for batched products.

    Attributes:
        tokens: Tokens of the segments.
        slots: Places of the segments' slots among the slots of the pass.
        a: `[s, modules * r, in]` of the modules with an adapter.
        b: Number, columns in x A^T, and B `[s, out, r]` of each of these modules.
        scale: Factor on B A x.
    """

    tokens: slice
    slots: slice
    a: Tensor
    b: list[tuple[int, slice, Tensor]]
    scale: float


class LoraAdapters:
    """LoRA matrices of all members.

    Args:
        targets: The adapted modules.
        weights: `[p, k]` adapters of all members; the matrices are views of it.
        scale: Factor on B A x.

    Attributes:
        leaves: A and B of every slot as autograd leaves, by module.
    """

    def __init__(self, targets: Sequence[Target], weights: Tensor, scale: float) -> None:
        self.targets = {target.name: target for target in targets}
        self.weights = weights
        self.scale = scale
        self.leaves = {
            target.name: [
                tuple(m.detach().requires_grad_() for m in target.matrices(row)) for row in weights
            ]
            for target in targets
        }

    def hook(self, slots: Tensor) -> "LoraHook":
        """Return the hook for rows of these slots, which are sorted."""
        values, counts = torch.unique_consecutive(slots, return_counts=True)
        return LoraHook(self, values.tolist(), counts.tolist())

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Accumulate a member's gradient into `buffer` `[k]` in the following backward passes.

        None stops it.
        """
        for name, target in self.targets.items():
            parts = (None, None) if buffer is None else target.matrices(buffer)
            for leaf, part in zip(self.leaves[name][slot], parts, strict=True):
                leaf.grad = part


class LoraHook:
    """Adapters of the rows of one forward pass, which are sorted by slot.

    Args:
        adapters: Adapters of all members.
        slots: Slots of the rows.
        rows: Number of rows of each slot.
        later: Number of rows of each slot that follow after the rows of all slots.
    """

    def __init__(
        self,
        adapters: LoraAdapters,
        slots: Sequence[int],
        rows: Sequence[int],
        later: Sequence[int] = (),
    ) -> None:
        self.adapters = adapters
        self.slots = slots
        self._rows = rows
        self._later = later
        self._all_rows = sum(rows) + sum(later)

    def by_token(self, tokens: int, later: "LoraHook", later_tokens: int) -> "LoraHook":
        """Return a hook for the tokens of these rows and then the tokens of later rows, as one row per token.

        Args:
            tokens: Tokens of each of these rows.
            later: Hook of the later rows, which have the same slots.
            later_tokens: Tokens of each later row.
        """
        assert self.slots == later.slots
        rows = [n * tokens for n in self._rows]
        later_rows = [n * later_tokens for n in later._rows]
        return LoraHook(self.adapters, self.slots, rows, later_rows)

    def stacked(
        self, modules: tuple[str, ...], tokens: int, dtype: torch.dtype, *, transposed: bool = False
    ) -> list[StackedAdapters]:
        """Return the stacked adapters of modules by runs of segments, without gradient.

        Empty if no module has one.

        Args:
            modules: Names of modules with the same input.
            tokens: Number of tokens of all rows; with a hook of `by_token`, padding may follow
                them.
            dtype: Dtype of the products.
            transposed: Lay matrices out for products with their transposes. Otherwise they may be
                views of the weights, valid until the next optimizer step.
        """
        targets = self.adapters.targets
        acting = [(number, targets[name]) for number, name in enumerate(modules) if name in targets]
        if not acting:
            return []
        # 1. Matrices of all slots of the pass: views of the weights if slots are adjacent.
        weights = self.adapters.weights
        slots = self.slots
        if slots[-1] - slots[0] + 1 == len(slots):
            weights = weights[slots[0] : slots[-1] + 1]
        else:
            weights = weights[slots]
        every_a, every_b = zip(*(target.matrices(weights) for _, target in acting), strict=True)
        a = (every_a[0] if len(every_a) == 1 else torch.cat(every_a, 1)).to(dtype)
        b = [matrix.to(dtype) for matrix in every_b]
        if transposed:
            a = a.mT.contiguous().mT
            b = [matrices.mT.contiguous().mT for matrices in b]
        rank = acting[0][1].rank
        # 2. One product for each run of segments with equally many tokens. The segments are the
        # slots' tokens. Rows of `by_token` are tokens, which may be followed by more padding tokens
        # than there are rows.
        per_row = 1 if self._later else tokens // self._all_rows
        first, later = (
            [per_row * count for count in counts] for counts in (self._rows, self._later)
        )
        stacked = list[StackedAdapters]()
        for segment, places, _ in runs_of(first) + runs_of(later, sum(first)):
            of_modules = [
                (number, slice(rank * at, rank * (at + 1)), b[at][places])
                for at, (number, _) in enumerate(acting)
            ]
            stacked.append(
                StackedAdapters(segment, places, a[places], of_modules, self.adapters.scale)
            )
        return stacked

    def __call__(self, module: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return output + scale * B A x of a module, computed in the output's dtype.

        Args:
            module: Dotted name.
            inputs: Input of the module, row by row.
            output: Output of the base's module.
        """
        target = self.adapters.targets[module]
        scale = self.adapters.scale
        x = inputs.reshape(-1, target.width_in).to(output.dtype)
        out = output.reshape(-1, target.width_out)
        # Not output.shape[0]: some architectures flatten rows and positions.
        sizes = [count * (len(out) // self._all_rows) for count in self._rows]
        if (
            not torch.is_grad_enabled()
            and len(sizes) == len(self.adapters.weights) > 1
            and len(set(sizes)) == 1
        ):
            # All members with equally many rows: one batched product.
            a, b = (matrix.to(output.dtype) for matrix in target.matrices(self.adapters.weights))
            low = torch.bmm(x.unflatten(0, (len(a), -1)), a.mT)
            return torch.baddbmm(out.unflatten(0, (len(a), -1)), low, b.mT, alpha=scale).view(
                output.shape
            )
        matrices = [
            [leaf.to(output.dtype).mT for leaf in self.adapters.leaves[module][slot]]
            for slot in self.slots
        ]
        parts = zip(x.split(sizes), out.split(sizes), matrices, strict=True)
        return torch.cat(
            [torch.addmm(base, part @ a, b, alpha=scale) for part, base, (a, b) in parts]
        ).view_as(output)


HookFactory = Callable[[Tensor], LoraHook | None]
"""Sorted slots of the rows of a forward pass -> hook that applies their adapters; None = base only.
"""


_WARNED: WeakSet[PreTrainedModel] = WeakSet()


class AdapterStates:
    """Train states of all members: a LoRA adapter or all weights of a model, and AdamW moments, per member.

    Args:
        model: The base model.
        size: Number of members.
        trained: The modules with adapters, or all weights.
        lora_config: LoRA configuration; None if members train all weights.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        own_reference: Store one reference per member, initially its first adapter.
        start: Adapter that every member starts from; new adapters by default.

    Attributes:
        lora_config: As passed.
        trained: As passed.
        weights: `[p, k]`, one row per slot.
        running_stats: `[p, 6]` float64 on the CPU; see `evogrpo.members.bank.RUNNING_STATS`.
        reference: `[p, k]`, or None without own references.
        changes: Counters by slot that increase whenever the weights change.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        trained: LoraTargets | AllWeights,
        lora_config: LoraConfig | None,
        optimizer: Optimizer,
        *,
        seed: int,
        own_reference: bool,
        start: StoredAdapter | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}.")
        # 1. Warn once per model about layers left out.
        self.seed = seed
        self.lora_config = lora_config
        self.trained = trained
        if (summary := self.trained.summary(model)) and model not in _WARNED:
            _WARNED.add(model)
            warn(f"Adapters train {summary}")
        # 2. Allocate weights and moments, one row per member.
        device = next(model.parameters()).device
        if lora_config is None:
            remedy = "or train adapters"
        else:
            remedy = "or a lower r"
        check_allocation(
            4
            * trained.size
            * (size * (3 + own_reference) + 2),  # weights, moments; one gradient, the start
            device,
            f"the weights of {size} members. Use fewer members, {remedy}.",
        )
        if isinstance(trained, AllWeights):
            initial = trained.flat(model)
        else:
            if start is None:
                initial = initial_weights(trained.targets, seed)
            else:
                initial = start.flat(trained.targets)
        initial = initial.to(device)
        self._optimizer = optimizer
        self.weights = initial.repeat(size, 1)
        self.running_stats = torch.tensor([INITIAL_RUNNING_STATS] * size, dtype=torch.float64)
        self._matrices = {
            self.weights_key: self.weights,
            "exp_avg": torch.zeros_like(self.weights),
            "exp_avg_sq": torch.zeros_like(self.weights),
            "running_stats": self.running_stats,
        }
        self.reference = self.weights.clone() if own_reference else None
        if self.reference is not None:
            self._matrices["reference"] = self.reference
        # State of a new member. A scalar fills a whole row.
        zero = initial.new_zeros(())
        self._initial_state = {
            self.weights_key: initial,
            "reference": initial,
            "exp_avg": zero,
            "exp_avg_sq": zero,
        }
        self._initial_state["running_stats"] = self.running_stats[0].clone()
        self._steps = [0] * size
        self.changes = [0] * size
        # 3. Views of the weights for the passes.
        self._views = dict[PolicyVersion, LoraAdapters | MemberModels]()
        versions: dict[PolicyVersion, Tensor | None] = {
            "weights": self.weights,
            "reference": self.reference,
        }
        for version, matrix in versions.items():
            if matrix is not None and lora_config is not None:
                self._views[version] = LoraAdapters(self.targets, matrix, scaling(lora_config))
            elif matrix is not None:
                self._views[version] = MemberModels(model, matrix)

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._steps)

    @property
    def targets(self) -> tuple[Target, ...]:
        """The adapted modules, in the order of a member's flat vector."""
        assert isinstance(self.trained, LoraTargets)
        return self.trained.targets

    @property
    def member_models(self) -> dict[PolicyVersion, list[PreTrainedModel]]:
        """Models of all members by policy version; empty if members are adapters."""
        return {
            version: view.models
            for version, view in self._views.items()
            if isinstance(view, MemberModels)
        }

    @property
    def weights_key(self) -> str:
        """Key of the weights in a train state."""
        return "weights" if self.lora_config is None else "adapter"

    # ---- forward and backward passes

    def hook_factory(self, policy: PolicyVersion) -> HookFactory:
        """Return the hooks of a policy version; "reference" requires own references."""
        if policy == "base":
            return lambda slots: None
        return self._views[policy].hook

    def split_passes(
        self, policy: PolicyVersion, rows: Sequence[int], slots: Sequence[int]
    ) -> list[list[int]]:
        """Split rows, sorted by slot, into those that can run in one pass: of one member if each has its own model.

        Args:
            policy: Policy that computes the rows.
            rows: Row numbers.
            slots: Slot of each row, by row number.
        """
        if policy == "base" or self.lora_config is not None:
            return [list(rows)]
        return [list(group) for _, group in groupby(rows, key=lambda row: slots[row])]

    @torch.no_grad()
    def step(
        self, slot: int, gradient: Tensor, hyperparameters: Hyperparameters, loss: float
    ) -> UpdateReport:
        """Clip one member's gradient and take its AdamW step.

        No step if the gradient is not finite.

        Args:
            slot: Slot of the member.
            gradient: `[k]`; used as scratch space.
            hyperparameters: `lr` and `max_grad_norm` are used, and whether there is a `target_kl`.
            loss: For the report.

        Returns:
            The report; its norm is NaN if the gradient, or the weights after the step, are not
            finite.
        """
        settings = self._optimizer
        lr = hyperparameters.lr * settings.factor(self._steps[slot])
        # lr was measured in AdamW's first step, the largest one
        if hyperparameters.target_kl is not None:
            lr *= settings.momentum_warmup(self._steps[slot])
        (norm,) = clipped_adamw_steps_(
            self.weights[slot, None],
            gradient[None],
            self._matrices["exp_avg"][slot, None],
            self._matrices["exp_avg_sq"][slot, None],
            steps=[self._steps[slot] + 1],
            lrs=[lr],
            max_norms=[hyperparameters.max_grad_norm],
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if not math.isnan(norm):
            self._steps[slot] += 1
            self.changes[slot] += 1
            # One sum finds any NaN or infinity, without a mask as large as the weights.
            if not bool(self.weights[slot].sum().isfinite()):
                norm = math.nan
        return UpdateReport(grad_norm=norm, lr=lr, loss=loss, step=self._steps[slot])

    # ---- references and train states; see `evogrpo.members.bank.PolicyBank`

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Set a member's reference to mixing * weights + (1 - mixing) * reference.

        ValueError without own references.

        Source: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), the soft
        update.
        """
        if self.reference is None:
            raise ValueError("Members have no references of their own. Set reference='snapshot'.")
        self.reference[slot].lerp_(self.weights[slot], mixing)

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, all at once; None = a new member.

        Raises:
            ValueError: If `parents` is not one existing slot (or None) per slot.
        """
        check_parents(parents, self.size)
        copies = {
            slot: parent
            for slot, parent in enumerate(parents)
            if parent is not None and parent != slot
        }
        new = [slot for slot, parent in enumerate(parents) if parent is None]
        for name, matrix in self._matrices.items():
            # The right-hand side is a copy, so parents may be overwritten as well.
            matrix[list(copies)] = matrix[list(copies.values())]
            matrix[new] = self._initial_state[name]
        self._steps = [0 if parent is None else self._steps[parent] for parent in parents]
        for slot in (*copies, *new):
            self.changes[slot] += 1

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Keys of a train state."""
        return *self._matrices, "step"

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a member's train state."""
        if name == "step":
            return torch.tensor(self._steps[slot])
        return self._matrices[name][slot].clone()

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return a copy of a member's train state."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If keys, shapes or dtypes do not match; the slot is then unchanged.
        """
        expected = {
            name: (tuple(values.shape), values.dtype) for name, values in self.state(slot).items()
        }
        check_train_state(state, expected, "base model, lora_config")
        for name, matrix in self._matrices.items():
            matrix[slot] = state[name]
        self._steps[slot] = int(state["step"])
        self.changes[slot] += 1
