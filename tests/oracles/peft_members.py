"""One member trained alone on its own copy of the base: PEFT's adapters, or all weights."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.members.language.bank import AdapterBank


class PeftMember:
    """A separate PEFT model that scores completions one at a time: no cache, no padding.

    Args:
        base: Copied, never changed.
        lora_config: What to adapt.
        adapter: Adapter tensors under the names of adapter_model.safetensors.
        end_ids: Tokens that end a completion.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        lora_config: LoraConfig,
        adapter: Mapping[str, Tensor],
        end_ids: Sequence[int],
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns about GPT-2's transposed weights
            self.model = get_peft_model(copy.deepcopy(base), copy.deepcopy(lora_config)).eval()
        parameters = dict(self.model.named_parameters())
        self.parameters = {
            name: parameters[name.replace(".weight", ".default.weight")] for name in adapter
        }
        trainable = {name for name, parameter in parameters.items() if parameter.requires_grad}
        assert trainable == {name.replace(".weight", ".default.weight") for name in adapter}
        with torch.no_grad():
            for name, values in adapter.items():
                self.parameters[name].copy_(values)
        self.end_ids = list(end_ids)

    def log_probs(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        temperature: float,
        min_new_tokens: int = 0,
    ) -> Tensor:
        """Return `[t]` log-probabilities of a completion's tokens, in nats, with gradient."""
        scores = self._scores(prompt, completion, temperature, min_new_tokens)
        return scores.gather(1, torch.tensor(completion)[:, None])[:, 0]

    def entropies(
        self, prompt: Sequence[int], completion: Sequence[int], *, temperature: float
    ) -> Tensor:
        """Return `[t]` entropies of the token distributions, with gradient."""
        return torch.distributions.Categorical(
            logits=self._scores(prompt, completion, temperature, 0)
        ).entropy()

    def _scores(
        self, prompt: Sequence[int], completion: Sequence[int], temperature: float, least: int
    ) -> Tensor:
        ids = torch.tensor([[*prompt, *completion]])
        logits = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        ruled_out = torch.zeros_like(logits, dtype=torch.bool)
        ruled_out[:least, self.end_ids] = True
        return logits.masked_fill(ruled_out, -torch.inf).log_softmax(1)

    def probabilities(self, prompt: Sequence[int], *, temperature: float) -> Tensor:
        """Return `[v]`: the probability of every next token, in float64."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([list(prompt)])).logits[0, -1]
        return (logits.double() / temperature).softmax(0)


class PlainMember(PeftMember):
    """A copy of a model with a member's weights, whose parameters are all trained."""

    def __init__(self, bank: AdapterBank, slot: int) -> None:
        self.model = copy.deepcopy(bank.base.model).eval().requires_grad_()
        self.parameters = dict(self.model.named_parameters())
        self.end_ids = bank.end_ids.tolist()
        torch.nn.utils.vector_to_parameters(bank.state(slot)["weights"], self.parameters.values())

    def flat(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `read` of all parameters as one vector, in the bank's order."""
        return torch.cat(
            [read(parameter).detach().reshape(-1) for parameter in self.parameters.values()]
        )
