"""Banks of language models: one frozen base model, one LoRA adapter per member."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.data import Batch, Rollout, SamplingBatch, TokenInputs, UpdateReport
from evogrpo.interruption import before_changes
from evogrpo.models.bank import LossFunction, PolicyVersion
from evogrpo.models.devices import DEFAULT_MICRO_BATCH_TOKENS
from evogrpo.models.language.adapter_files import StoredAdapter
from evogrpo.models.language.adapter_weights import AdapterWeights
from evogrpo.models.language.causal_model import CausalModel
from evogrpo.models.language.compatibility import check_causal_class, check_token_ids
from evogrpo.models.language.forward import ForwardPasses, share_prefixes
from evogrpo.models.language.fsdp import run_on_all_ranks
from evogrpo.models.language.loading import loadable_name
from evogrpo.models.language.sampling import sample
from evogrpo.models.language.token_model import TokenModel, Weights

W = TypeVar("W", bound=Weights)


class LanguageBank(Generic[W]):
    """A population of language models over one base; see `evogrpo.models.bank.PolicyBank`.

    It is its own sampler. The base is never changed and may be shared with other banks.

    Args:
        base: The base model, ready to change the modules that the weights change.
        weights: What members have learnt.
        eos_token_ids: Tokens that end a completion.
        micro_batch_tokens: Most tokens, padding included, in one forward pass with gradients. Halved when memory
            runs out.
        reduce_memory_peak: Compute logits in chunks of a few hundred tokens rather than for a whole micro-batch at
            once. Same results, up to rounding.

    Raises:
        ValueError: If no token ends a completion, or `micro_batch_tokens` is below 1.

    Attributes:
        base: As given.
        weights: As given.
        passes: How batches are scored and gradients found.
        end_ids: The tokens that end a completion, sorted.
        reduce_memory_peak: As given.
    """

    def __init__(
        self,
        base: TokenModel[Any],
        weights: W,
        *,
        eos_token_ids: Sequence[int],
        micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
        reduce_memory_peak: bool = True,
    ) -> None:
        if not eos_token_ids:
            raise ValueError("eos_token_ids must name at least one token: otherwise no completion can end")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
        self.base: TokenModel[Any] = base
        self.weights = weights
        self.reduce_memory_peak = reduce_memory_peak
        self.end_ids = torch.tensor(sorted(set(eos_token_ids)), device=base.device)
        self.passes = ForwardPasses(
            base,
            weights,
            self.end_ids,
            micro_batch_tokens=micro_batch_tokens,
            logits_rows=256 if reduce_memory_peak else 1 << 30,
        )

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.weights.size

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens, padding included, in one forward pass with gradients, after all halvings so far."""
        return self.passes.micro_batch_tokens

    @micro_batch_tokens.setter
    def micro_batch_tokens(self, tokens: int) -> None:
        self.passes.micro_batch_tokens = tokens

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """What makes the context that forward passes run in, for mixed precision."""
        return self.base.autocast

    @autocast.setter
    def autocast(self, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        self.base.autocast = autocast

    # ---- sampling

    def sample(self, rows: SamplingBatch, *, base: bool = False) -> Rollout:
        """Sample one completion per row; rows may come in any order.

        Args:
            rows: Which member completes which prompt; see `SamplingBatch`.
            base: Sample from the untrained base, whatever `rows.member_ids` says.

        Returns:
            Completions in the order of `rows`, at most `rows.max_new_tokens` tokens each.

        Raises:
            ValueError: If a prompt is empty or too long for the model's context, or there are no rows.
        """
        with torch.no_grad(), self.base.working(), self.base.autocast():
            return sample(self.base, self.weights, rows, self.end_ids, base=base)

    def sync(self, changed: Sequence[int]) -> None:
        """Do nothing: the bank samples from the weights that it trains."""

    # ---- scoring and learning

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the batch's actions, in nats, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Under the untrained base rather than under the members' policies.
        """
        with self.base.working():
            return self.passes.score(batch, "base" if base else "weights")[0]

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the distributions sampled from, in nats, without gradient; 0 where masked."""
        with self.base.working():
            return self.passes.score(batch, "weights")[1]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under the base without adapters, or under members' own references.

        Without own references, members share each prompt's pass.
        """
        with self.base.working():
            return self.passes.score(batch, "reference" if self.weights.own_reference else "base")[0]

    @property
    def rows_are_transitions(self) -> bool:
        """False: a token depends on those before it."""
        return False

    @property
    def running_stats(self) -> Tensor:
        """`[p, 4]` running statistics; see `evogrpo.models.bank.RUNNING_STATS`."""
        return self.weights.running_stats

    def keep_reference(self, slots: Sequence[int]) -> None:
        """Make the current adapters of these members their own references; see `TrainStates.keep_reference`."""
        self.weights.keep_reference(slots)

    def mix_reference(self, slot: int, mixing: float) -> None:
        """Move a member's own reference towards its adapters; see `TrainStates.mix_reference`."""
        self.weights.mix_reference(slot, mixing)

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
        last: bool = False,
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
            last: Whether the learning step ends with this one; all gradients are kept then until nothing can be
                abandoned, rather than a copy of what members have learnt, which is three times as large.

        Returns:
            One report per member, by slot.
        """
        reports: dict[int, UpdateReport] = {}
        kept: dict[int, tuple[Tensor, float]] = {}
        settle = before_changes(last=last)
        with self.base.working():
            while len(reports) + len(kept) < len(hyperparameters):
                waiting = [slot for slot in sorted(hyperparameters) if slot not in reports and slot not in kept]
                steps = self.passes.gradients(batch, waiting, loss_fn, entropy_gradient=entropy_gradient)
                try:
                    for slot, gradient, loss in steps:
                        if settle is None:
                            reports[slot] = self.weights.step(slot, gradient, hyperparameters[slot], loss)
                        else:
                            kept[slot] = gradient.clone(), loss
                except torch.OutOfMemoryError:  # never from a single row, so this ends
                    self.passes.halve()
        if settle is not None:
            settle()
            for slot, (gradient, loss) in kept.items():
                reports[slot] = self.weights.step(slot, gradient, hyperparameters[slot], loss)
        return reports

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return how many tokens one pass over the batch processes for each member; shared prompts count once."""
        inputs: TokenInputs = batch.inputs
        return self.tokens_of(inputs.prompts, inputs.prompt_ids, batch.member_ids, batch.present.sum(1).tolist())

    def tokens_of(
        self, prompts: Sequence[Sequence[int]], prompt_ids: Tensor, member_ids: Tensor, lengths: Sequence[int]
    ) -> dict[int, int]:
        """Return how many tokens rows of so many tokens after their prompts have, by slot; see `cost`."""
        tokens: dict[int, int] = {}
        pairs, rows = share_prefixes(member_ids.cpu(), prompt_ids.cpu())
        for slot, prompt in pairs if self.base.shares_prefix else [pairs[row] for row in rows.tolist()]:
            tokens[slot] = tokens.get(slot, 0) + len(prompts[prompt])
        for slot, length in zip(member_ids.tolist(), lengths, strict=True):
            tokens[slot] += length
        return tokens

    def inherit(self, parents: Sequence[int | None]) -> None:
        """Give slot i everything slot parents[i] has learnt; see `TrainStates.inherit`."""
        self.weights.inherit(parents)

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What a learner state consists of, by name."""
        return self.weights.state_keys

    def state_tensor(self, slot: int, name: str) -> Tensor:
        """Return a copy of one part of a member's learner state."""
        return self.weights.state_tensor(slot, name)

    def state(self, slot: int) -> dict[str, Tensor]:
        """Return copies of all parts of a member's learner state."""
        return {name: self.state_tensor(slot, name) for name in self.state_keys}

    def load_state(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Put what `state` returned into a slot; see `TrainStates.load_state`."""
        self.weights.load_state(slot, state)


class AdapterBank(LanguageBank[AdapterWeights]):
    """A population of language models that share one frozen base.

    Every member's adapters are one row of a flat matrix `[p, k]`, and so are its AdamW moments: cloning a member copies
    a row. Gradients live only while they are needed. The base is never changed and may be shared with other banks.

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
        reduce_memory_peak: See `LanguageBank`.
        explicit_positions: Whether positions, counted without padding, are passed to the model.
        autocast: Makes the context that forward passes run in, for mixed precision.
        own_reference: Whether every member is compared with a reference of its own, kept by `keep_reference` and moved
            by `mix_reference`, rather than with the base. It costs as much memory as the adapters.
        start: An adapter that every member starts from, with the lora_config that it brings; fresh ones by default.
        like: A bank over the same model with the same adapters, whose probes of the model are not repeated.
    """

    base: CausalModel

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
        micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
        reduce_memory_peak: bool = True,
        explicit_positions: bool = True,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        own_reference: bool = False,
        start: StoredAdapter | None = None,
        like: "AdapterBank | None" = None,
    ) -> None:
        if start is not None and lora_config is not None:
            raise ValueError("an adapter brings its own lora_config: leave out lora_config")
        check_causal_class(model)
        check_token_ids(model, [pad_token_id], "pad_token_id")
        check_token_ids(model, eos_token_ids, "eos_token_ids")
        own_weights = partial(
            AdapterWeights,
            model,
            size,
            lora_config,
            optimizer or Optimizer(),
            seed=seed,
            own_reference=own_reference,
            start=start,
        )

        def probed() -> tuple[AdapterWeights, CausalModel]:
            weights = own_weights()
            changed = weights.modules
            return weights, CausalModel(
                model, pad_token_id, changed=changed, explicit_positions=explicit_positions, autocast=autocast
            )

        if like is None:
            weights, base = run_on_all_ranks(model, probed)
        else:
            weights, base = own_weights(trained=like.weights.trained), like.base.again(autocast)
        super().__init__(
            base,
            weights,
            eos_token_ids=eos_token_ids,
            micro_batch_tokens=micro_batch_tokens,
            reduce_memory_peak=reduce_memory_peak,
        )

    @property
    def lora_config(self) -> LoraConfig:
        """What is adapted, and how."""
        return self.weights.lora_config

    def peft_files(self, slot: int) -> tuple[dict[str, Tensor], bytes]:
        """Return a member as PEFT stores it: tensors of adapter_model.safetensors, bytes of adapter_config.json."""
        return self.weights.files(slot, loadable_name(self.base.model))

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return a module whose call gives one member's logits; it reads the bank, and holds no weights of its own."""
        return MemberPolicy(self, slot, base=base)

    def recompile(self) -> None:
        """Forget what torch.compile made of the base model, so that the next call compiles it again."""
        torch.compiler.reset()


class MemberPolicy(nn.Module):
    """One member of a bank as a module: token ids in, logits out.

    Args:
        bank: Where the member's weights live.
        slot: Which member.
        base: The untrained base instead, whatever the slot.
    """

    def __init__(self, bank: AdapterBank, slot: int, *, base: bool = False) -> None:
        super().__init__()
        self._bank = (bank,)  # in a tuple, so that the base does not become a submodule
        self.slot = slot
        self._acts_as: PolicyVersion = "base" if base else "weights"

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits `[n, t, v]` of tokens `[n, t]`, without gradient.

        Args:
            input_ids: `[n, t]` token ids.
            attention_mask: `[n, t]`, True or 1 on real tokens; all are real by default.
        """
        (bank,) = self._bank
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hook = bank.weights.hook_factory(self._acts_as)(torch.full((len(input_ids),), self.slot))
        with torch.no_grad(), bank.base.working(), bank.base.autocast():
            return bank.base.head(bank.base.run(input_ids, mask.bool(), None, hook))
