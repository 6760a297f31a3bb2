"""AdapterBank: one frozen language model and one LoRA adapter per member, sampled and trained together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.functional.log_probs import chunked_log_probs
from evogrpo.hyperparameters import Hyperparameters
from evogrpo.objective import Optimizer
from evogrpo.policies.bank import LossFunction
from evogrpo.policies.tokens.causal import CausalModel, Route, frozen, grouped_attention, pad_left
from evogrpo.policies.tokens.generation import generate
from evogrpo.policies.tokens.lora import Target, default_lora_config, find_targets, initial_weights, peft_files, scaling
from evogrpo.policies.tokens.low_rank import LowRankAdapters
from evogrpo.policies.tokens.micro_batches import micro_batches, share_prefixes
from evogrpo.policies.tokens.states import LearnerStates
from evogrpo.records import Batch, Rollout, Rows, TokenInputs, UpdateReport

NO_GRAD_FACTOR = 4  # a pass without gradients keeps no activations, so its parts may be larger
CACHED_TOKENS = 32_768  # tokens whose keys and values are held at once while sampling


class AdapterBank:
    """A population of language models that share one frozen base.

    Every member's adapters are one row of a flat matrix `[p, k]`, and so are its AdamW moments: cloning a member copies
    a row. Gradients live only while they are needed. The adapters act through forward hooks that exist
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
        own_reference: Whether every member is compared with a reference of its own, kept by `keep_reference` and moved
            by `mix_reference`, rather than with the base. It costs as much memory as the adapters.
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
        own_reference: bool = False,
    ) -> None:
        if size < 1:
            raise ValueError(f"a bank needs at least 1 member, got size={size}")
        if not eos_token_ids:
            raise ValueError("eos_token_ids must name at least one token: otherwise no completion can end")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
        self.lora_config = lora_config or default_lora_config()
        self.targets: tuple[Target, ...] = find_targets(model, self.lora_config)
        self.base = CausalModel(model, pad_token_id, explicit_positions=explicit_positions)
        self.end_ids = torch.tensor(sorted(set(eos_token_ids)), device=self.base.device)
        self.micro_batch_tokens = micro_batch_tokens
        self.logits_rows = 256 if reduce_memory_peak else 1 << 30
        self.autocast = autocast
        first = initial_weights(self.targets, self.lora_config, seed).to(self.base.device)
        self._states = LearnerStates(first, size, optimizer or Optimizer(), own_reference=own_reference)
        self._adapters = LowRankAdapters(model, self.targets, self._states.weights, scaling(self.lora_config))

    @property
    def size(self) -> int:
        """Number of slots."""
        return self._states.size

    @property
    def sampler_is_exact(self) -> bool:
        """Whether sampling and scoring agree to rounding: in float32, but not in half precision."""
        dtype = next(self.base.model.parameters()).dtype
        return dtype in (torch.float32, torch.float64) and self.autocast is nullcontext

    def sample(self, rows: Rows, *, base: bool = False) -> Rollout:
        """Sample one completion per row; rows may come in any order.

        Args:
            rows: Which member completes which prompt; see `Rows`.
            base: Sample from the untrained base, whatever `rows.member_ids` says.

        Returns:
            Completions in the order of `rows`, at most `rows.uniforms.shape[1]` tokens each.

        Raises:
            ValueError: If a prompt is empty or too long for the model's context, or there are no rows.
        """
        if not len(rows.prompt_ids):
            raise ValueError("there is nothing to sample: rows is empty")
        if any(not prompt for prompt in rows.prompts):
            raise ValueError("a prompt must hold at least one token, got an empty one")
        order = torch.from_numpy(_lexsort(rows.prompt_ids, rows.member_ids))
        width = max(len(prompt) for prompt in rows.prompts) + rows.uniforms.shape[1]
        if self.base.context is not None and width > self.base.context:
            raise ValueError(
                f"the longest prompt and completion together must fit the model's context of {self.base.context} "
                f"tokens, got {width}: lower max_output_tokens, or leave long prompts out (max_prompt_length)"
            )
        route = _adapters_off if base else self._adapters.route
        with torch.no_grad(), self._running():
            waves = order.split(max(1, CACHED_TOKENS // width))
            parts = [part for wave in waves for part in self._sample_wave(rows, wave, route)]
        back = torch.argsort(order).to(self.base.device)
        return Rollout(
            actions=torch.cat([part.actions for part in parts])[back],
            present=torch.cat([part.present for part in parts])[back],
            log_probs=torch.cat([part.log_probs for part in parts])[back],
            truncated=torch.cat([part.truncated for part in parts])[back],
        )

    def sync(self, changed: Sequence[int]) -> None:
        """Do nothing: the bank samples from the weights themselves."""

    def log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions, in nats, without gradient; 0 where masked."""
        return self._score(batch, adapted=True)[0]

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the distributions sampled from, in nats, without gradient; 0 where masked."""
        return self._score(batch, adapted=True)[1]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the base without adapters, or under members' own references.

        Without own references, members share each prompt's pass.
        """
        if self._states.reference is None:
            return self._score(batch, adapted=False)[0]
        own = self._adapters
        self._adapters = LowRankAdapters(
            self.base.model, self.targets, self._states.reference, scaling(self.lora_config)
        )
        try:
            return self._score(batch, adapted=True)[0]
        finally:
            self._adapters = own

    @property
    def rows_are_transitions(self) -> bool:
        """False: a token depends on those before it."""
        return False

    @property
    def carried(self) -> Tensor:
        """`[p, 4]` running statistics; see `evogrpo.policies.bank.CARRIED`."""
        return self._states.carried

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current adapters of these members their own references; see `LearnerStates.keep_reference`."""
        self._states.keep_reference(slots)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Move a member's own reference towards its adapters; see `LearnerStates.mix_reference`."""
        self._states.mix_reference(slot, mixing)

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
    ) -> dict[int, UpdateReport]:
        """Take one AdamW step for every member named in `hyperparameters`.

        The batch runs in micro-batches whose gradients add up. A member without rows steps with a zero gradient; one
        whose gradient or weights are not finite, or whose single completion does not fit into memory, is reported with
        a norm of NaN and takes no step.

        Args:
            batch: Rows of these members.
            loss_fn: Weighted losses of rows, given their numbers, log_probs and entropies; their sum is minimised.
            hyperparameters: By slot; `lr` and `max_grad_norm` are used.
            entropy_gradient: Whether the entropies are differentiable; costs a second product with the vocabulary.

        Returns:
            One report per member, by slot.
        """
        reports: dict[int, UpdateReport] = {}
        while len(reports) < len(hyperparameters):
            waiting = [slot for slot in sorted(hyperparameters) if slot not in reports]
            try:
                for slot, gradient, loss in self._gradients(batch, waiting, loss_fn, entropy_gradient):
                    reports[slot] = self._states.step(slot, gradient, hyperparameters[slot], loss)
            except torch.OutOfMemoryError:  # never from a micro-batch of one row, so this ends
                self.micro_batch_tokens = max(1, self.micro_batch_tokens // 2)
        return reports

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return how many tokens one pass over the batch processes for each member; shared prompts count once."""
        inputs: TokenInputs = batch.inputs
        tokens: dict[int, int] = {}
        pairs, rows = share_prefixes(batch.member_ids.cpu(), inputs.prompt_ids.cpu())
        for slot, prompt in pairs if self.base.shares_prefix else [pairs[row] for row in rows.tolist()]:
            tokens[slot] = tokens.get(slot, 0) + len(inputs.prompts[prompt])
        for slot, length in zip(batch.member_ids.tolist(), batch.present.sum(1).tolist(), strict=True):
            tokens[slot] += length
        return tokens

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt; see `LearnerStates.inherit`."""
        self._states.inherit(parents)

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of a member's adapters, AdamW moments `[k]` and step count."""
        return self._states.state(slot)

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot; see `LearnerStates.load_state`."""
        self._states.load_state(slot, state)

    def peft_files(self, slot: int) -> tuple[dict[str, Tensor], bytes]:
        """Return a member as PEFT stores it: tensors of adapter_model.safetensors, bytes of adapter_config.json."""
        config = replace(self.lora_config, base_model_name_or_path=self.base.model.name_or_path or None)
        return peft_files(self.targets, config, self._states.weights[slot])

    def policy(self, slot: int) -> nn.Module:
        """Return a module whose call gives one member's logits; it reads the bank, and holds no weights of its own."""
        return MemberPolicy(self, slot)

    def recompile(self) -> None:
        """Forget what torch.compile made of the base model, so that the next call compiles it again."""
        torch.compiler.reset()

    # ---- forward passes

    def _sample_wave(self, rows: Rows, wave: Tensor, route: Route) -> list[Rollout]:
        """Sample the rows numbered in `wave` together, or in halves where memory runs out."""
        device = self.base.device
        part = replace(
            rows,
            prompt_ids=rows.prompt_ids[wave].to(device),
            member_ids=rows.member_ids[wave].to(device),
            temperature=rows.temperature[wave].to(device),
            uniforms=rows.uniforms[wave].to(device),
        )
        try:
            return [generate(self.base, route, part, self.end_ids)]
        except torch.OutOfMemoryError:
            if len(wave) == 1:
                raise
        return [rollout for half in wave.chunk(2) for rollout in self._sample_wave(rows, half, route)]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Freeze the base and hook the adapters in, for as long as the bank computes."""
        with self._adapters.attached(), frozen(self.base.model), grouped_attention(self.base.device), self.autocast():
            yield

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

    def _score(self, batch: Batch, *, adapted: bool) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]`, without gradient."""
        log_probs = torch.zeros(batch.actions.shape, device=batch.actions.device)
        entropies = torch.zeros_like(log_probs)
        while True:
            try:
                with torch.no_grad(), self._running():
                    for part in self._parts(batch, NO_GRAD_FACTOR * self.micro_batch_tokens, adapted):
                        log_probs[part], entropies[part] = self._forward(batch.select(part), adapted=adapted)
                return log_probs, entropies
            except torch.OutOfMemoryError:
                if self.micro_batch_tokens == 1:
                    raise
                self.micro_batch_tokens //= 2

    def _gradients(
        self, batch: Batch, slots: Sequence[int], loss_fn: LossFunction, entropy_gradient: bool
    ) -> Iterator[tuple[int, Tensor, float]]:
        """Yield each member's slot, gradient `[k]` and loss as soon as its last micro-batch is done.

        Members follow each other in the micro-batches, so few gradients are alive at a time, whatever their number.
        The yielded gradient is only valid until the next one is asked for.
        """
        rows = torch.isin(batch.member_ids, torch.tensor(slots, device=batch.member_ids.device)).nonzero()[:, 0]
        parts = [rows[part] for part in self._parts(batch.select(rows), self.micro_batch_tokens, adapted=True)]
        members = [sorted(set(batch.member_ids[part].tolist())) for part in parts]
        last = {slot: number for number, present in enumerate(members) for slot in present}
        losses = dict.fromkeys(slots, 0.0)
        spare: list[Tensor] = []
        open_: dict[int, Tensor] = {}
        try:
            for slot in slots:
                if slot not in last:
                    yield slot, torch.zeros_like(self._states.weights[slot]), 0.0
            for number, (part, present) in enumerate(zip(parts, members, strict=True)):
                for slot in present:
                    if slot not in open_:
                        open_[slot] = spare.pop().zero_() if spare else torch.zeros_like(self._states.weights[slot])
                        self._adapters.gather_gradient(slot, open_[slot])
                self._backward(batch, part, loss_fn, entropy_gradient, losses, open_)
                for slot in present:
                    if last[slot] == number:
                        self._adapters.gather_gradient(slot, None)
                        yield slot, open_[slot], losses[slot]
                        spare.append(open_.pop(slot))
        finally:
            for slot in open_:
                self._adapters.gather_gradient(slot, None)

    def _backward(
        self,
        batch: Batch,
        part: Tensor,
        loss_fn: LossFunction,
        entropy_gradient: bool,
        losses: dict[int, float],
        gradients: dict[int, Tensor],
    ) -> None:
        """Add one micro-batch to its members' gradients and losses."""
        try:
            with self._running():
                scores = self._forward(batch.select(part), adapted=True, entropy_gradient=entropy_gradient)
            loss = loss_fn(part, *scores)
            loss.sum().backward()
        except torch.OutOfMemoryError:
            if len(part) > 1:
                raise
            gradients[int(batch.member_ids[part])].fill_(float("nan"))  # fails this member alone
            return
        for slot, value in zip(batch.member_ids[part].tolist(), loss.tolist(), strict=True):
            losses[slot] += value

    def _forward(self, batch: Batch, *, adapted: bool, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, t]` of rows sorted by member and prompt, in one forward pass."""
        inputs: TokenInputs = batch.inputs
        used = int(_lengths(batch.action_mask).max())
        mask = batch.action_mask[:, :used]
        hidden = self._hidden(batch, used, adapted)
        early = torch.arange(used, device=mask.device) < inputs.min_new_tokens
        scores = chunked_log_probs(
            hidden[mask],
            self.base.head,
            batch.actions[:, :used][mask],
            inputs.temperature.to(mask.device)[:, None].expand(mask.shape)[mask],
            early.expand(mask.shape)[mask],
            self.end_ids,
            self.logits_rows,
            entropy_gradient=entropy_gradient,
        )
        rows, columns = mask.nonzero(as_tuple=True)
        zeros = torch.zeros(batch.actions.shape, device=mask.device)
        log_probs, entropies = (zeros.index_put((rows, columns), values) for values in scores)
        return log_probs, entropies

    def _hidden(self, batch: Batch, used: int, adapted: bool) -> Tensor:
        """Return the hidden states `[n, used, h]` from which each of the first `used` actions is predicted."""
        inputs: TokenInputs = batch.inputs
        members = batch.member_ids if adapted else torch.zeros_like(batch.member_ids)
        fed, present = batch.actions[:, : used - 1], batch.present[:, : used - 1]
        if self.base.shares_prefix:
            pairs, rows = share_prefixes(members, inputs.prompt_ids.to(members.device))
            route = self._adapters.route if adapted else _adapters_off
            prompts = [inputs.prompts[prompt] for _, prompt in pairs]
            prefix = self.base.run_prefix(prompts, [slot for slot, _ in pairs], route)
            first = prefix.last_hidden[rows][:, None]
            if used == 1:
                return first
            route(members)
            return torch.cat([first, self.base.run_completions(prefix, rows, fed, present)], dim=1)
        prompts = [inputs.prompts[prompt] for prompt in inputs.prompt_ids.tolist()]
        ids, mask = pad_left(prompts, self.base.pad_id, self.base.device)
        self._adapters.route(members if adapted else None)
        hidden = self.base.run(torch.cat([ids, fed], dim=1), torch.cat([mask, present], dim=1), None)
        return hidden[:, ids.shape[1] - 1 :]


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
            bank._adapters.route(torch.full((len(input_ids),), self.slot))
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
