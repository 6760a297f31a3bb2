"""AdapterBank: one frozen language model and one LoRA adapter per member, sampled and trained together."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.config.optimizer import Optimizer
from evogrpo.policies.bank import PolicyVersion
from evogrpo.policies.devices import USUAL_TOKENS
from evogrpo.policies.tokens.bases.parts import run_together
from evogrpo.policies.tokens.engine.causal import CausalModel
from evogrpo.policies.tokens.engine.probes import check_causal_class, check_token_ids
from evogrpo.policies.tokens.models import loadable_name
from evogrpo.policies.tokens.stored_adapters import StoredAdapter
from evogrpo.policies.tokens.token_bank import TokenBank
from evogrpo.policies.tokens.weights.adapter_weights import AdapterWeights


class AdapterBank(TokenBank[AdapterWeights]):
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
        reduce_memory_peak: See `TokenBank`.
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
        micro_batch_tokens: int = USUAL_TOKENS,
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
            weights, base = run_together(model, probed)
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
        view = bank.weights.route(self._acts_as)(torch.full((len(input_ids),), self.slot))
        with torch.no_grad(), bank.base.working(), bank.base.autocast():
            return bank.base.head(bank.base.run(input_ids, mask.bool(), None, view))
