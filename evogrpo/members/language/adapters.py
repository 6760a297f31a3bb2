"""Train states of all members, and products of each row with its own member's LoRA matrices.

Letters in shapes: `p` members, `s` segments of rows of one member, `m` tokens, `r` rank, `in` and
`out` widths of a layer, `k` parameters of a member.
"""

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
from evogrpo.learn_reports import UpdateReport
from evogrpo.members.bank import (
    INITIAL_RUNNING_STATS,
    NO_REFERENCES,
    PolicyVersion,
    TrainState,
    check_parents,
    check_train_state,
)
from evogrpo.members.devices import check_allocation
from evogrpo.members.language.full_finetuning import AllWeights, MemberModels
from evogrpo.members.language.lora import Target, initial_weights, scaling
from evogrpo.members.language.lora_targets import LoraTargets
from evogrpo.members.language.peft_files import StoredAdapter
from evogrpo.warnings import warn

Run = tuple[slice, slice, int]
"""Adjacent segments of equal length: their tokens, their slots, and the number of segments."""


def runs_of(sizes: Sequence[int], begin: int = 0) -> list[Run]:
    """Group adjacent segments of equal length, so that one batched product covers each group.

    Args:
        sizes: Tokens of each slot's segment.
        begin: Offset of the first token.
    """
    runs = list[Run]()
    # Number of the first segment of a run, and its first token.
    first = 0
    start = begin
    # `groupby` joins adjacent equal sizes.
    for size, group in groupby(sizes):
        count = len(list(group))
        end = start + size * count
        tokens = slice(start, end)
        segments = slice(first, first + count)
        runs.append((tokens, segments, count))
        first += count
        start = end
    return runs


class StackedAdapters(NamedTuple):
    """Adapters of modules with the same input, stacked for adjacent segments of equal length.

    Attributes:
        tokens: Tokens of the segments.
        slots: Positions of the segments' slots among the slots of the pass.
        a: `[s, modules * r, in]` of the modules with an adapter.
        b: Position in the list of modules, columns in x A^T, and B `[s, out, r]`, of each of these
            modules.
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
        self.leaves: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for target in targets:
            # Detached views: autograd writes gradients to them, optimizer steps to the weights.
            pairs = []
            for row in weights:
                a, b = target.matrices(row)
                pairs.append((a.detach().requires_grad_(), b.detach().requires_grad_()))
            self.leaves[target.name] = pairs

    def hook(self, slots: Tensor) -> "LoraHook":
        """Return the hook for rows of these slots, which are sorted."""
        values, counts = torch.unique_consecutive(slots, return_counts=True)
        return LoraHook(self, values.tolist(), counts.tolist())

    def gather_gradient(self, slot: int, buffer: Tensor | None) -> None:
        """Accumulate a member's gradient into `buffer` `[k]` in the following backward passes.

        None stops it.
        """
        for name, target in self.targets.items():
            a, b = self.leaves[name][slot]
            if buffer is None:
                a.grad = None
                b.grad = None
            else:
                a.grad, b.grad = target.matrices(buffer)


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
        """Return a hook for the tokens of these rows, then of later rows, as one row per token.

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
        # 1. Matrices of each module with adapters: A `[s, r, in]`, B `[s, out, r]`. Those of
        #    adjacent slots are a slice of the bank's matrices, which needs no copy.
        first_slot = self.slots[0]
        last_slot = self.slots[-1]
        chosen: slice | Sequence[int] = self.slots
        if last_slot - first_slot + 1 == len(self.slots):
            chosen = slice(first_slot, last_slot + 1)
        numbers = []
        every_a = []
        every_b = []
        for number, name in enumerate(modules):
            if name in self.adapters.targets:
                a, b = self.adapters.targets[name].matrices(self.adapters.weights)
                numbers.append(number)
                every_a.append(a[chosen])
                every_b.append(b[chosen].to(dtype))
        if not numbers:
            return []
        rank = every_a[0].shape[1]
        # One A for all modules, `[s, modules * r, in]`.
        a = every_a[0]
        if len(every_a) > 1:
            a = torch.cat(every_a, 1)
        a = a.to(dtype)
        if transposed:
            a = a.mT.contiguous().mT
            every_b = [b.mT.contiguous().mT for b in every_b]
        # 2. One product for each run of segments with equally many tokens. The segments are the
        #    slots' tokens. Rows of `by_token` are tokens, which may be followed by more padding
        #    tokens than there are rows.
        per_row = tokens // self._all_rows
        if self._later:
            per_row = 1
        first = [per_row * count for count in self._rows]
        later = [per_row * count for count in self._later]
        stacked = list[StackedAdapters]()
        for segment, slot_range, _ in runs_of(first) + runs_of(later, sum(first)):
            of_modules = []
            for position, number in enumerate(numbers):
                columns = slice(rank * position, rank * (position + 1))
                of_modules.append((number, columns, every_b[position][slot_range]))
            stacked.append(
                StackedAdapters(segment, slot_range, a[slot_range], of_modules, self.adapters.scale)
            )
        return stacked

    def __call__(self, module: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return output + scale * B A x of a module, computed in the output's dtype.

        Args:
            module: Dotted name.
            inputs: Input of the module, row by row.
            output: Output of the base's module.
        """
        # 1. Rows of tokens, and the number of them in each slot's segment.
        target = self.adapters.targets[module]
        scale = self.adapters.scale
        dtype = output.dtype
        x = inputs.reshape(-1, target.width_in).to(dtype)  # [m, in]
        out = output.reshape(-1, target.width_out)  # [m, out]
        # Not output.shape[0]: some architectures flatten rows and positions.
        per_row = len(out) // self._all_rows
        sizes = [count * per_row for count in self._rows]
        members = len(self.adapters.weights)
        # 2. Without gradients, all members with equally many rows: one batched product.
        equal = len(sizes) == members > 1 and len(set(sizes)) == 1
        if equal and not torch.is_grad_enabled():
            a, b = target.matrices(self.adapters.weights)  # [p, r, in], [p, out, r]
            segments = x.unflatten(0, (members, -1))
            low = torch.bmm(segments, a.to(dtype).mT)
            wide = out.unflatten(0, (members, -1))
            adapted = torch.baddbmm(wide, low, b.to(dtype).mT, alpha=scale)
            return adapted.view(output.shape)
        # 3. Otherwise, one product per slot.
        parts = []
        by_slot = zip(self.slots, x.split(sizes), out.split(sizes), strict=True)
        for slot, rows, base in by_slot:
            # The leaves, not views of the matrix: backward passes write to their gradients.
            a, b = self.adapters.leaves[module][slot]
            low = rows @ a.to(dtype).mT
            parts.append(torch.addmm(base, low, b.to(dtype).mT, alpha=scale))
        return torch.cat(parts).view_as(output)


HookFactory = Callable[[Tensor], LoraHook | None]
"""Sorted slots of a pass's rows -> hook that applies their adapters; None = base only."""


_WARNED: WeakSet[PreTrainedModel] = WeakSet()
"""Models for which a warning has named the modules without adapters."""


class AdapterStates:
    """Train states of all members: a LoRA adapter or all weights, and AdamW moments, of each.

    Args:
        model: The base model.
        size: Number of members.
        trained: The modules with adapters, or all weights.
        lora_config: LoRA configuration; None if members train all weights.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        own_reference: Store one reference per member, initially its first adapter.
        initial_adapter: Adapter that every member starts from; None = new adapters.

    Attributes:
        lora_config: As passed.
        trained: As passed.
        weights: `[p, k]`, one row per slot.
        running_stats: `[p, 7]` float64 on the CPU; see `evogrpo.members.bank.RUNNING_STATS`.
        reference: `[p, k]`, or None without own references.
        changes: Counters by slot that increase whenever the weights change.
        size: Number of slots.
        weights_key: Key of the weights in a train state.
        state_keys: Keys of a train state.
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
        initial_adapter: StoredAdapter | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}.")
        # 1. Warn once per model about layers left out.
        self.seed = seed
        self.size = size
        self.lora_config = lora_config
        self.trained = trained
        summary = trained.summary(model)
        if summary and model not in _WARNED:
            _WARNED.add(model)
            warn(f"Adapters train {summary}")
        # 2. Check the memory: float32 weights, two moments and reference of each member; one
        #    gradient, and the initial weights.
        device = next(model.parameters()).device
        rows = size * (3 + own_reference) + 2
        remedy = "or a lower r"
        if lora_config is None:
            remedy = "or train adapters"
        what = f"the weights of {size} members. Use fewer members, {remedy}."
        check_allocation(4 * trained.size * rows, device, what)
        # 3. State of a new member. A scalar fills a whole row.
        if isinstance(trained, AllWeights):
            initial = trained.flat(model)
        elif initial_adapter is None:
            initial = initial_weights(trained.targets, seed)
        else:
            initial = initial_adapter.flat(trained.targets)
        initial = initial.to(device)
        zero = initial.new_zeros(())
        stats = torch.tensor(INITIAL_RUNNING_STATS, dtype=torch.float64)
        self.weights_key = "adapter"
        if lora_config is None:
            self.weights_key = "weights"
        self._initial_state = {
            self.weights_key: initial,
            "exp_avg": zero,
            "exp_avg_sq": zero,
            "running_stats": stats,
            "reference": initial,
        }
        # 4. Allocate the matrices, one row per member.
        self._optimizer = optimizer
        self.weights = initial.repeat(size, 1)
        self.running_stats = stats.repeat(size, 1)
        self._matrices = {
            self.weights_key: self.weights,
            "exp_avg": torch.zeros_like(self.weights),
            "exp_avg_sq": torch.zeros_like(self.weights),
            "running_stats": self.running_stats,
        }
        self.reference = None
        if own_reference:
            # The first reference is the start of all members.
            self.reference = self.weights.clone()
            self._matrices["reference"] = self.reference
        self.state_keys = (*self._matrices, "step")
        self._steps = [0] * size
        self.changes = [0] * size
        # 5. Views of the weights for the passes.
        self._views = dict[PolicyVersion, LoraAdapters | MemberModels]()
        self._views["weights"] = self._view(model, self.weights)
        # References are fixed weights, which passes read in the same way.
        if self.reference is not None:
            self._views["reference"] = self._view(model, self.reference)

    def _view(self, model: PreTrainedModel, matrix: Tensor) -> LoraAdapters | MemberModels:
        """Return a matrix `[p, k]` in the form that passes use: adapters or whole models."""
        if self.lora_config is None:
            return MemberModels(model, matrix)
        return LoraAdapters(self.targets, matrix, scaling(self.lora_config))

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

    # ---- forward and backward passes

    def hook_factory(self, policy: PolicyVersion) -> HookFactory:
        """Return the hooks of a policy version; "reference" requires own references."""
        if policy == "base":
            return lambda slots: None
        return self._views[policy].hook

    def split_passes(
        self, policy: PolicyVersion, rows: Sequence[int], slots: Sequence[int]
    ) -> list[list[int]]:
        """Split rows, sorted by slot, into those that can run in one pass.

        If each member has its own model, these are the rows of one member.

        Args:
            policy: Policy that computes the rows.
            rows: Row numbers.
            slots: Slot of each row, by row number.
        """
        if policy == "base" or self.lora_config is not None:
            return [list(rows)]
        return [list(group) for _, group in groupby(rows, key=slots.__getitem__)]

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
        # 1. Learning rate. One that `target_kl` calibrates was measured in AdamW's first step, so
        #    it needs the factor of `momentum_warmup`.
        lr = hyperparameters.lr * settings.factor(self._steps[slot])
        if hyperparameters.target_kl is not None:
            lr *= settings.momentum_warmup(self._steps[slot])
        # 2. Clip the gradient and take the step.
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
        # 3. Count it, and check the weights.
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

        Source: Learn Your Reference Model for Real Good Alignment (arXiv:2404.09656), the soft
        update.

        Raises:
            ValueError: If members have no references of their own.
        """
        if self.reference is None:
            raise ValueError(NO_REFERENCES)
        self.reference[slot].lerp_(self.weights[slot], mixing)

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Copy the train state of slot `parents[i]` to slot i, all at once; None = a new member.

        Raises:
            ValueError: If `parents` is not one existing slot (or None) per slot.
        """
        check_parents(parents, self.size)
        # 1. Slots with a new member, and slots with a copy of another one.
        new = []
        copied = []
        sources = []
        for slot, parent in enumerate(parents):
            if parent is None:
                new.append(slot)
            elif parent != slot:
                copied.append(slot)
                sources.append(parent)
        # 2. Copy rows of all matrices at once.
        for name, matrix in self._matrices.items():
            # The right-hand side is a copy, so parents may be overwritten as well.
            matrix[copied] = matrix[sources]
            matrix[new] = self._initial_state[name]
        # 3. Step counts, and counters of changes, by which external samplers reload the weights.
        self._steps = [0 if parent is None else self._steps[parent] for parent in parents]
        for slot in copied + new:
            self.changes[slot] += 1

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one tensor of a member's train state."""
        if name == "step":
            return torch.tensor(self._steps[slot])
        return self._matrices[name][slot].clone()

    def state(self, slot: int) -> TrainState:
        """Return a copy of a member's train state."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Load a train state into a slot.

        Raises:
            ValueError: If keys, shapes or dtypes do not match; the slot is then unchanged.
        """
        check_train_state(state, self.state(slot), "base model, lora_config")
        for name, matrix in self._matrices.items():
            matrix[slot] = state[name]
        self._steps[slot] = int(state["step"])
        self.changes[slot] += 1
