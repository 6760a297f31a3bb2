"""Bank of language models: one frozen base model, and one LoRA adapter or all weights per member."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.config.hyperparameters import Hyperparameters, Optimizer
from evogrpo.data import Batch, Rollout, SamplingBatch, TokenInputs, UpdateReport
from evogrpo.models.bank import FinishedCallback, LossFunction, PolicyVersion, Update
from evogrpo.models.devices import DEFAULT_MICRO_BATCH_TOKENS
from evogrpo.models.language.adapters import AdapterStates
from evogrpo.models.language.causal_model import CausalModel
from evogrpo.models.language.compatibility import check_causal_class, check_token_ids
from evogrpo.models.language.forward import ForwardPasses, distinct_prefixes
from evogrpo.models.language.fsdp import run_on_all_ranks
from evogrpo.models.language.full_finetuning import AllWeights, choose_trained, transformers_files
from evogrpo.models.language.loading import loadable_name
from evogrpo.models.language.lora import StoredAdapter, peft_files, tensors_file
from evogrpo.models.language.sampling import sample

REDUCED_LOGITS_ROWS = 256
"""Tokens whose logits exist at once with `reduce_memory_peak`."""


class AdapterBank(AdapterStates):
    """PolicyBank and Sampler of language models: LoRA adapters of all members on one frozen base model.

    Without `lora_config`, each member has all weights of the model instead, and its own passes. Weights and AdamW
    moments of a member are rows of matrices `[p, k]`, so cloning a member copies rows. Gradients exist only until their
    optimizer step. The base is never changed and can be shared with other banks.

    Args:
        model: A causal language model of transformers, on its device and in its dtype.
        size: Number of members.
        pad_token_id: Token used for padding.
        eos_token_ids: Tokens that end a completion.
        lora_config: LoRA configuration; None = members train all weights, unless `start` is given.
        optimizer: AdamW settings shared by all members.
        seed: Root seed of the initial adapters.
        micro_batch_tokens: Maximum tokens, padding included, of a forward pass with gradients. Halved when out of
            memory.
        reduce_memory_peak: Compute logits in chunks of 256 tokens instead of a whole micro-batch at once. Results
            agree up to rounding.
        explicit_positions: Pass position ids, counted without padding, to the model.
        autocast: Returns the context manager of forward passes, for mixed precision.
        own_reference: Store one reference per member for the KL term, instead of using the base. Takes as much memory
            as the adapters. See `mix_reference`.
        start: Adapter that every member starts from; brings its own lora_config.
        like: Bank over the same model with the same adapters; its compatibility checks are not repeated.

    Raises:
        ValueError: If the model is not supported or an argument is invalid.

    Attributes:
        base: The base model.
        passes: Scores batches and computes gradients.
        end_ids: Sorted `eos_token_ids`.
    """

    rows_are_transitions = False  # a token depends on the tokens before it

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
        # 1. Check the arguments.
        if start is not None and lora_config not in (None, start.lora_config):
            raise ValueError("An adapter brings its own lora_config. Leave lora_config out.")
        if not eos_token_ids:
            raise ValueError("eos_token_ids must contain at least one token, got none")
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
        check_causal_class(model)
        check_token_ids(model, [pad_token_id], "pad_token_id")
        check_token_ids(model, eos_token_ids, "eos_token_ids")

        if start is not None:
            lora_config = start.lora_config

        # 2. Train states, and the base model with its compatibility checks.
        def build() -> CausalModel:
            trained = choose_trained(model, lora_config) if like is None else like.trained
            super(AdapterBank, self).__init__(
                model,
                size,
                trained,
                lora_config,
                optimizer or Optimizer(),
                seed=seed,
                own_reference=own_reference,
                start=start,
            )
            if like is not None:
                return copy(like.base)
            return CausalModel(model, pad_token_id, changed=trained.modules, explicit_positions=explicit_positions)

        self.base = build() if like is not None else run_on_all_ranks(model, build)
        self.base.autocast = autocast
        self._own_passes = {
            version: [self.base.with_model(own) for own in models] for version, models in self.member_models.items()
        }
        self.end_ids = torch.tensor(sorted(set(eos_token_ids)), device=self.base.device)
        self.passes = ForwardPasses(
            self.base,
            self,
            self.end_ids,
            model_of=self.model_of,
            micro_batch_tokens=micro_batch_tokens,
            logits_rows=REDUCED_LOGITS_ROWS if reduce_memory_peak else 1 << 30,
        )

    def model_of(self, policy: PolicyVersion, slot: int) -> CausalModel:
        """Return the model that computes a member's rows: the base with hooks, or the member's own."""
        own = self._own_passes.get(policy)
        return self.base if own is None else own[slot].following(self.base)

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum tokens, padding included, of a forward pass with gradients; halved when out of memory."""
        return self.passes.micro_batch_tokens

    @micro_batch_tokens.setter
    def micro_batch_tokens(self, tokens: int) -> None:
        self.passes.micro_batch_tokens = tokens

    # ---- sampling

    def sample(
        self, rows: SamplingBatch, *, base: bool = False, on_finished: FinishedCallback | None = None
    ) -> Rollout:
        """Sample one completion per row; rows may be in any order.

        Args:
            rows: Prompts, members and sampling options.
            base: Sample from the base model and ignore `rows.member_ids`.
            on_finished: Called once for each finished row; see `evogrpo.models.bank.FinishedCallback`.

        Returns:
            Completions in the order of `rows`, at most `rows.max_new_tokens` tokens each.

        Raises:
            ValueError: If there are no rows, or a prompt is empty or exceeds the model's context.
        """
        with torch.no_grad(), self.base.working(), self.base.autocast(), self.base.in_lockstep():
            return sample(self.base, self.model_of, self, rows, self.end_ids, base=base, on_finished=on_finished)

    def sync(self, slots: Sequence[int]) -> None:
        """Do nothing: the bank samples with the weights it trains."""

    # ---- scoring and learning

    def log_probs(self, batch: Batch, *, base: bool = False) -> Tensor:
        """Return `[n, t]` log-probabilities of the actions in nats, without gradient; 0 where masked.

        Args:
            batch: Rows of any members, in any order.
            base: Use the base model instead of the members' policies.
        """
        with self.base.working():
            return self.passes.score(batch, "base" if base else "weights")[0]

    def entropies(self, batch: Batch) -> Tensor:
        """Return `[n, t]` entropies of the sampling distributions in nats, without gradient; 0 where masked."""
        with self.base.working():
            return self.passes.score(batch, "weights")[1]

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return `[n, t]` log-probabilities under members' own references, or under the base without adapters.

        Under the base, all members share the forward pass of a prompt.
        """
        with self.base.working():
            return self.passes.score(batch, "base" if self.reference is None else "reference")[0]

    def update(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        hyperparameters: Mapping[int, Hyperparameters],
        *,
        entropy_gradient: bool = False,
    ) -> Update:
        """Take one AdamW step for every slot in `hyperparameters`.

        Gradients of micro-batches are summed. A member without rows steps with a zero gradient. A member takes no step,
        and its report has a norm of NaN, if its gradient is not finite or one completion alone is out of memory.

        Args:
            batch: Rows of these members.
            loss_fn: Weighted losses of rows, given their numbers, log_probs and entropies; their sum is minimised.
            hyperparameters: By slot; `lr` and `max_grad_norm` are used.
            entropy_gradient: Make entropies differentiable; costs a second product with the vocabulary.
        """
        reports: dict[int, UpdateReport] = {}
        log_probs, entropies = (torch.zeros(batch.actions.shape, device=batch.actions.device) for _ in range(2))
        with self.base.working():
            while len(reports) < len(hyperparameters):
                waiting = [slot for slot in sorted(hyperparameters) if slot not in reports]
                steps = self.passes.gradients(
                    batch, waiting, loss_fn, (log_probs, entropies), entropy_gradient=entropy_gradient
                )
                try:
                    for slot, gradient, loss in steps:
                        reports[slot] = self.step(slot, gradient, hyperparameters[slot], loss)
                except torch.OutOfMemoryError as error:  # a single row never raises, so the loop ends
                    self.passes.halve(error)
        return Update(reports=reports, log_probs=log_probs, entropies=entropies)

    def cost(self, batch: Batch) -> dict[int, int]:
        """Return the tokens of one pass over the batch, by slot; shared prompts count once."""
        inputs: TokenInputs = batch.inputs
        return self.tokens_of(inputs.prompts, inputs.prompt_ids, batch.member_ids, batch.present.sum(1).tolist())

    def tokens_of(
        self, prompts: Sequence[Sequence[int]], prompt_ids: Tensor, member_ids: Tensor, lengths: Sequence[int]
    ) -> dict[int, int]:
        """Return the tokens of rows with completions of these lengths, by slot; see `cost`."""
        tokens: dict[int, int] = {}
        pairs, rows = distinct_prefixes(member_ids.cpu(), prompt_ids.cpu())
        for slot, prompt in pairs if self.base.shares_prefix else [pairs[row] for row in rows.tolist()]:
            tokens[slot] = tokens.get(slot, 0) + len(prompts[prompt])
        for slot, length in zip(member_ids.tolist(), lengths, strict=True):
            tokens[slot] += length
        return tokens

    # ---- export

    def files(self, slot: int) -> dict[str, bytes | Callable[[], bytes]]:
        """Return a member as a PEFT adapter, or as a model of transformers: contents by file name.

        A function returns the content when it is called, so that files need not be in memory together.
        """
        if isinstance(self.trained, AllWeights):
            return {**transformers_files(self.member_models["weights"][slot])}
        tensors, config = self.peft_files(slot)
        return {"adapter_model.safetensors": lambda: tensors_file(tensors), "adapter_config.json": config}

    def peft_files(self, slot: int) -> tuple[dict[str, Tensor], bytes]:
        """Return a member in PEFT's format: tensors of adapter_model.safetensors, bytes of adapter_config.json."""
        assert self.lora_config is not None
        config = replace(self.lora_config, base_model_name_or_path=loadable_name(self.base.model))
        return peft_files(self.targets, config, self.weights[slot])

    def policy(self, slot: int, *, base: bool = False) -> nn.Module:
        """Return one member as a module; it reads the weights of the bank."""
        return MemberPolicy(self, slot, base=base)


class MemberPolicy(nn.Module):
    """One member of a bank as a module: token ids in, logits out.

    Args:
        bank: Bank of the member.
        slot: Slot of the member.
        base: Use the base model without adapters.
    """

    def __init__(self, bank: AdapterBank, slot: int, *, base: bool = False) -> None:
        super().__init__()
        self._bank = (bank,)  # in a tuple, so that the base does not become a submodule
        self.slot = slot
        self._policy_version: PolicyVersion = "base" if base else "weights"

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits `[n, t, v]` of tokens `[n, t]`, without gradient.

        Args:
            input_ids: `[n, t]` token ids.
            attention_mask: `[n, t]`, True or 1 for real tokens; all tokens by default.
        """
        (bank,) = self._bank
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hook = bank.hook_factory(self._policy_version)(torch.full((len(input_ids),), self.slot))
        with torch.no_grad(), bank.base.working(), bank.base.autocast(), bank.base.in_lockstep():
            model = bank.model_of(self._policy_version, self.slot)
            return model.head(model.run(input_ids, mask.bool(), None, hook))
