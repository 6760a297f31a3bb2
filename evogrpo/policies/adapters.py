"""AdapterBank: one frozen language model and one LoRA adapter per member, sampled and trained together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from evogrpo.functional.log_probs import chunked_log_probs
from evogrpo.functional.optim import adamw_step_, clip_by_norm_, schedule_factor
from evogrpo.hyperparameters import Hyperparameters
from evogrpo.objective import Optimizer
from evogrpo.policies.bank import LossFunction
from evogrpo.policies.causal import CausalModel, frozen, pad_left
from evogrpo.policies.generation import generate
from evogrpo.policies.lora import Target, default_lora_config, find_targets, initial_weights, peft_files, scaling
from evogrpo.policies.planning import micro_batches, share_prefixes
from evogrpo.records import Batch, Rollout, Rows, TokenInputs, UpdateReport

NO_GRAD_FACTOR = 4  # a pass without gradients keeps no activations, so its parts may be larger
CACHED_TOKENS = 32_768  # tokens whose keys and values are held at once while sampling


@dataclass(frozen=True)
class _Segment:
    """Neighbouring rows of one forward pass that belong to one slot."""

    slot: int
    rows: int


class AdapterBank:
    """A population of language models that share one frozen base.

    Every member's adapters are one row of a flat matrix `[p, k]`, and so are its gradient and its AdamW moments:
    cloning a member copies a row, clipping takes the norm of a row. The adapters act through forward hooks that exist
    only while the bank computes, so the base is never changed and may be shared with other banks.

    Args:
        model: A causal language model of transformers, on its device and in its dtype.
        size: Number of members.
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion.
        lora_config: What to adapt and how; rank 16 on all linear layers by default.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        micro_batch_tokens: Most tokens, padding included, in one forward pass with gradients. Halved when memory
            runs out.
        reduce_memory_peak: Hold the logits of a few hundred tokens at a time, rather than of a whole micro-batch.
            Same results.
        explicit_positions: Whether positions, counted without padding, are passed to the model.
        autocast: Makes the context that forward passes run in, for mixed precision.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        size: int,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        lora_config: LoraConfig | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        micro_batch_tokens: int = 1024,
        reduce_memory_peak: bool = True,
        explicit_positions: bool = True,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if size < 1:
            raise ValueError(f"a bank needs at least 1 member, got size={size}")
        if not eos_token_ids:
            raise ValueError("eos_token_ids must name at least one token: otherwise no completion can end")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
        self.lora_config = lora_config or default_lora_config()
        self.targets: tuple[Target, ...] = find_targets(model, self.lora_config)
        self.optimizer = optimizer or Optimizer()
        self.base = CausalModel(model, pad_token_id, explicit_positions=explicit_positions)
        self.end_ids = torch.tensor(sorted(set(eos_token_ids)), device=self.base.device)
        self.micro_batch_tokens = micro_batch_tokens
        self.logits_rows = 256 if reduce_memory_peak else 1 << 30
        self.autocast = autocast
        self._scale = scaling(self.lora_config)
        self._first = initial_weights(self.targets, self.lora_config, seed).to(self.base.device)
        self._weights = self._first.repeat(size, 1)
        self._gradient = torch.zeros_like(self._weights)
        self._exp_avg = torch.zeros_like(self._weights)
        self._exp_avg_sq = torch.zeros_like(self._weights)
        self._steps = [0] * size
        self._leaves = {target.name: [self._leaf(target, slot) for slot in range(size)] for target in self.targets}
        self._segments: tuple[_Segment, ...] = ()

    @property
    def size(self) -> int:
        """Number of slots."""
        return len(self._steps)

    def sample(self, rows: Rows, *, reference: bool = False) -> Rollout:
        """Sample one completion per row; rows may come in any order.

        Args:
            rows: Which member completes which prompt; see `Rows`.
            reference: Sample from the reference policy, whatever `rows.member_ids` says.

        Returns:
            Completions in the order of `rows`, at most `rows.uniforms.shape[1]` tokens each.

        Raises:
            ValueError: If a prompt is empty or there are no rows.
        """
        if not len(rows.prompt_ids):
            raise ValueError("there is nothing to sample: rows is empty")
        if any(not prompt for prompt in rows.prompts):
            raise ValueError("a prompt must hold at least one token, got an empty one")
        order = torch.from_numpy(_lexsort(rows.prompt_ids, rows.member_ids))
        width = max(len(prompt) for prompt in rows.prompts) + rows.uniforms.shape[1]
        device = self.base.device
        parts = []
        with torch.no_grad(), self._running():
            for part in order.split(max(1, CACHED_TOKENS // width)):
                wave = replace(
                    rows,
                    prompt_ids=rows.prompt_ids[part].to(device),
                    member_ids=rows.member_ids[part].to(device),
                    temperature=rows.temperature[part].to(device),
                    uniforms=rows.uniforms[part].to(device),
                )
                route = _adapters_off if reference else self._route
                parts.append(generate(self.base, route, wave, self.end_ids))
        back = torch.argsort(order).to(device)
        return Rollout(
            actions=torch.cat([part.actions for part in parts])[back],
            present=torch.cat([part.present for part in parts])[back],
            log_probs=torch.cat([part.log_probs for part in parts])[back],
            truncated=torch.cat([part.truncated for part in parts])[back],
        )

    def log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions, in nats, without gradient; 0 where masked."""
        return self._score(batch, adapted=True)

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the base without adapters; members share each prompt's pass."""
        return self._score(batch, adapted=False)

    def update(
        self, batch: Batch, loss_fn: LossFunction, hyperparameters: Mapping[int, Hyperparameters]
    ) -> dict[int, UpdateReport]:
        """Take one AdamW step for every member named in `hyperparameters`.

        The batch runs in micro-batches whose gradients add up. A member without rows steps with a zero gradient; one
        whose gradient or weights are not finite, or whose single completion does not fit into memory, is reported with
        a norm of NaN and takes no step.

        Args:
            batch: Rows of these members.
            loss_fn: Weighted losses of rows, given their numbers and log_probs; their sum is minimised.
            hyperparameters: By slot; `lr` and `max_grad_norm` are used.

        Returns:
            One report per member, by slot.
        """
        slots = sorted(hyperparameters)
        while True:
            for slot in slots:
                self._gradient[slot].zero_()
            try:
                losses = self._accumulate(batch, loss_fn)
                break
            except torch.OutOfMemoryError:  # never from a micro-batch of one row, so this ends
                self.micro_batch_tokens = max(1, self.micro_batch_tokens // 2)
        return {slot: self._step(slot, hyperparameters[slot], losses[slot]) for slot in slots}

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return how many tokens one pass over the batch processes for each of its members, prompts counted once."""
        inputs: TokenInputs = batch.inputs
        tokens: dict[int, int] = {}
        pairs, _ = share_prefixes(batch.member_ids.cpu(), inputs.prompt_ids.cpu())
        for slot, prompt in pairs:
            tokens[slot] = tokens.get(slot, 0) + len(inputs.prompts[prompt])
        for slot, length in zip(batch.member_ids.tolist(), batch.present.sum(1).tolist(), strict=True):
            tokens[slot] += length
        return tokens

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
                self._weights[slot] = self._first
                self._exp_avg[slot] = self._exp_avg_sq[slot] = 0.0
                self._steps[slot] = 0
            elif parent in saved:
                self.load_state(slot, saved[parent])
            else:
                for matrix in (self._weights, self._exp_avg, self._exp_avg_sq):
                    matrix[slot] = matrix[parent]
                self._steps[slot] = self._steps[parent]

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of a member's adapters, AdamW moments `[k]` and step count."""
        return {
            "adapter": self._weights[slot].clone(),
            "exp_avg": self._exp_avg[slot].clone(),
            "exp_avg_sq": self._exp_avg_sq[slot].clone(),
            "step": torch.tensor(self._steps[slot]),
        }

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot.

        Raises:
            ValueError: If names, shapes or types differ from this bank's; nothing is changed then.
        """
        expected = {"adapter": self._weights, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
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

    def peft_files(self, slot: int) -> tuple[dict[str, Tensor], bytes]:
        """Return a member as PEFT stores it: tensors of adapter_model.safetensors, bytes of adapter_config.json."""
        return peft_files(self.targets, self.lora_config, self._weights[slot])

    def policy(self, slot: int) -> nn.Module:
        """Return a module whose call gives one member's logits; it reads the bank, and holds no weights of its own."""
        return MemberPolicy(self, slot)

    def recompile(self) -> None:
        """Forget what torch.compile made of the base model, so that the next call compiles it again."""
        torch.compiler.reset()

    # ---- forward passes

    def _leaf(self, target: Target, slot: int) -> tuple[Tensor, Tensor]:
        """Make the autograd leaves of one adapter: views of the matrices, so gradients add up in place."""
        leaves = []
        for view in (target.a, target.b):
            leaf = view(self._weights[slot]).detach().requires_grad_()
            leaf.grad = view(self._gradient[slot])
            leaves.append(leaf)
        return leaves[0], leaves[1]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Freeze the base and hook the adapters in, for as long as the bank computes."""
        modules = dict(self.base.model.named_modules())
        handles: list[RemovableHandle] = []
        try:
            handles.extend(modules[target.name].register_forward_hook(self._hook(target)) for target in self.targets)
            with frozen(self.base.model), self.autocast():
                yield
        finally:
            self._segments = ()
            for handle in handles:
                handle.remove()

    def _route(self, slots: Tensor | None) -> None:
        """Set which slot each row of the next forward passes belongs to (sorted); None = adapters off."""
        self._segments = ()
        if slots is None:
            return
        values, counts = torch.unique_consecutive(slots, return_counts=True)
        self._segments = tuple(map(_Segment, values.tolist(), counts.tolist()))

    def _hook(self, target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]:
        leaves = self._leaves[target.name]

        def add_adapters(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not self._segments:
                return None
            x = args[0].reshape(-1, target.width_in).to(self._weights.dtype)
            out = output.view(-1, target.width_out)
            # Not output.shape[0]: some architectures flatten rows and positions before their linear layers.
            per_row = len(out) // sum(segment.rows for segment in self._segments)
            sizes = [segment.rows * per_row for segment in self._segments]
            if torch.is_grad_enabled():
                pieces = zip(self._segments, x.split(sizes), out.split(sizes), strict=True)
                added = [self._adapted(part, base, *leaves[segment.slot]) for segment, part, base in pieces]
                return (added[0] if len(added) == 1 else torch.cat(added)).view(output.shape)
            if self._whole_bank(sizes):
                low = torch.bmm(x.view(self.size, -1, target.width_in), target.a(self._weights).mT)
                delta = torch.bmm(low, target.b(self._weights).mT).view(out.shape)
                return out.add_(delta.to(out.dtype), alpha=self._scale).view(output.shape)
            for segment, part, base in zip(self._segments, x.split(sizes), out.split(sizes), strict=True):
                base.copy_(self._adapted(part, base, *leaves[segment.slot]))
            return output

        return add_adapters

    def _adapted(self, x: Tensor, out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return out + scale * (x A^T) B^T."""
        if out.dtype == x.dtype:
            return torch.addmm(out, x @ a.mT, b.mT, alpha=self._scale)
        return out + (self._scale * (x @ a.mT) @ b.mT).to(out.dtype)

    def _whole_bank(self, sizes: Sequence[int]) -> bool:
        """Tell whether the rows are every member's, equally many each: then one batched product serves all."""
        return len(sizes) == self.size > 1 and len(set(sizes)) == 1

    def _parts(self, batch: Batch, budget: int, adapted: bool) -> list[Tensor]:
        """Plan the micro-batches: rows sorted by member and prompt, each with at least one action."""
        inputs: TokenInputs = batch.inputs
        members = batch.member_ids if adapted else torch.zeros_like(batch.member_ids)
        order = _lexsort(inputs.prompt_ids, members).tolist()
        lengths = _lengths(batch.action_mask).tolist()
        _, prefixes = share_prefixes(members.cpu(), inputs.prompt_ids.cpu())
        widths = [len(inputs.prompts[prompt]) for prompt in inputs.prompt_ids.tolist()]
        rows = [row for row in order if lengths[row]]
        parts = micro_batches(rows, prefixes.tolist(), widths, lengths, budget)
        return [part.to(batch.actions.device) for part in parts]

    def _score(self, batch: Batch, *, adapted: bool) -> Tensor:
        result = torch.zeros(batch.actions.shape, device=batch.actions.device)
        with torch.no_grad(), self._running():
            for part in self._parts(batch, NO_GRAD_FACTOR * self.micro_batch_tokens, adapted):
                result[part] = self._forward(batch.select(part), adapted=adapted)
        return result

    def _accumulate(self, batch: Batch, loss_fn: LossFunction) -> list[float]:
        """Add the batch's gradients up and return the loss of each slot."""
        losses = torch.zeros(self.size, dtype=torch.float64, device=batch.actions.device)
        for part in self._parts(batch, self.micro_batch_tokens, adapted=True):
            try:
                with self._running():
                    log_probs = self._forward(batch.select(part), adapted=True)
                    self._route(None)  # what a loss might run on this model is not ours
                    loss = loss_fn(part, log_probs)
                    loss.sum().backward()
            except torch.OutOfMemoryError:
                if len(part) > 1:
                    raise
                self._gradient[batch.member_ids[part]] = float("nan")  # fails this member alone
                continue
            losses.index_add_(0, batch.member_ids[part], loss.detach().double())
        return [float(loss) for loss in losses]

    def _forward(self, batch: Batch, *, adapted: bool) -> Tensor:
        """Return `[n, t]` log-probabilities of rows sorted by member and prompt, in one forward pass."""
        inputs: TokenInputs = batch.inputs
        used = int(_lengths(batch.action_mask).max())
        mask = batch.action_mask[:, :used]
        hidden = self._hidden(batch, used, adapted)
        early = torch.arange(used, device=mask.device) < inputs.min_new_tokens
        values = chunked_log_probs(
            hidden[mask],
            self.base.head,
            batch.actions[:, :used][mask],
            inputs.temperature.to(mask.device)[:, None].expand(mask.shape)[mask],
            early.expand(mask.shape)[mask],
            self.end_ids,
            self.logits_rows,
        )
        result = torch.zeros(batch.actions.shape, device=mask.device)
        result[:, :used][mask] = values
        return result

    def _hidden(self, batch: Batch, used: int, adapted: bool) -> Tensor:
        """Return the hidden states `[n, used, h]` from which each of the first `used` actions is predicted."""
        inputs: TokenInputs = batch.inputs
        members = batch.member_ids if adapted else torch.zeros_like(batch.member_ids)
        fed, present = batch.actions[:, : used - 1], batch.present[:, : used - 1]
        if self.base.shares_prefix:
            pairs, rows = share_prefixes(members, inputs.prompt_ids.to(members.device))
            self._route(torch.tensor([slot for slot, _ in pairs]) if adapted else None)
            prefix = self.base.run_prefix([inputs.prompts[prompt] for _, prompt in pairs])
            first = prefix.last_hidden[rows][:, None]
            if used == 1:
                return first
            self._route(members if adapted else None)
            return torch.cat([first, self.base.run_completions(prefix, rows, fed, present)], dim=1)
        prompts = [inputs.prompts[prompt] for prompt in inputs.prompt_ids.tolist()]
        ids, mask = pad_left(prompts, self.base.pad_id, self.base.device)
        self._route(members if adapted else None)
        hidden = self.base.run(torch.cat([ids, fed], dim=1), torch.cat([mask, present], dim=1), None)
        return hidden[:, ids.shape[1] - 1 :]

    def _step(self, slot: int, hyperparameters: Hyperparameters, loss: float) -> UpdateReport:
        """Clip one member's gradient and take its AdamW step."""
        settings = self.optimizer
        lr = hyperparameters.lr * schedule_factor(
            self._steps[slot],
            kind=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
        )
        gradient = self._gradient[slot]
        norm = clip_by_norm_(gradient, hyperparameters.max_grad_norm)
        if not norm < float("inf"):
            return UpdateReport(grad_norm=float("nan"), lr=lr, loss=loss)
        self._steps[slot] += 1
        with torch.no_grad():
            adamw_step_(
                self._weights[slot],
                gradient,
                self._exp_avg[slot],
                self._exp_avg_sq[slot],
                self._steps[slot],
                lr=lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
        healthy = bool(self._weights[slot].sum().isfinite())
        return UpdateReport(grad_norm=norm if healthy else float("nan"), lr=lr, loss=loss)


class MemberPolicy(nn.Module):
    """One member of a bank as a module: token ids in, logits out.

    Args:
        bank: Where the member's weights live.
        slot: Which member.
    """

    def __init__(self, bank: AdapterBank, slot: int) -> None:
        super().__init__()
        self._bank = (bank,)  # in a tuple, so that the base does not become a submodule
        self.slot = slot

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits `[n, t, v]` of tokens `[n, t]`, without gradient.

        Args:
            input_ids: `[n, t]` token ids.
            attention_mask: `[n, t]`, True or 1 on real tokens; all are real by default.
        """
        (bank,) = self._bank
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with torch.no_grad(), bank._running():
            bank._route(torch.full((len(input_ids),), self.slot))
            return bank.base.head(bank.base.run(input_ids, mask.bool(), None))


def _adapters_off(slots: Tensor) -> None:
    """Route no row to any adapter."""


def _lexsort(minor: Tensor, major: Tensor) -> "np.typing.NDArray[np.intp]":
    """Return the order that sorts by `major`, then `minor`, ties in their given order."""
    return np.lexsort((minor.cpu().numpy(), major.cpu().numpy()))


def _lengths(mask: Tensor) -> Tensor:
    """Return how many leading columns of each row are needed to reach its last True."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(1)
