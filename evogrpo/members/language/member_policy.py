"""One member of a bank of language models as a torch module."""

import torch
from torch import Tensor, nn

from evogrpo.members.bank import PolicyVersion
from evogrpo.members.language.sampling import AdapterSampler


class MemberPolicy(nn.Module):
    """One member of a bank as a module: token ids in, logits out.

    Args:
        bank: Bank of the member.
        slot: Slot of the member.
        base: Use the base model without adapters.
    """

    def __init__(self, bank: AdapterSampler, slot: int, *, base: bool) -> None:
        super().__init__()
        # In a tuple, so that the base does not become a submodule.
        self._bank = (bank,)
        self.slot = slot
        self._policy_version: PolicyVersion = "base" if base else "weights"

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits `[n, t, v]` of tokens `[n, t]`, without gradient.

        Args:
            input_ids: `[n, t]` token ids.
            attention_mask: `[n, t]`, True or 1 for real tokens; all tokens by default.
        """
        # Under the bank's settings, so that the logits are those of training.
        (bank,) = self._bank
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        # All rows have the adapter of this member.
        make_hook = bank.hook_factory(self._policy_version)
        hook = make_hook(torch.full((len(input_ids),), self.slot))
        with torch.no_grad(), bank.base.working(), bank.base.autocast(), bank.base.in_lockstep():
            model = bank.model_of(self._policy_version, self.slot)
            hidden = model.run(input_ids, attention_mask.bool(), None, hook)
            return model.head(hidden)
