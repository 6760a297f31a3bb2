"""Oracle of a stacked bank: each member as its own torch module, dist and torch.optim.AdamW."""

import math
from itertools import pairwise

import torch
from gymnasium import spaces
from torch import Tensor, distributions, nn

from evogrpo.config.network import NetworkConfig
from evogrpo.members.networks.bank import StackedBank

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


class TorchMember(nn.Module):
    """One member that observes vectors, with the weights of a slot of a bank.

    Actions counted from 0.
    """

    def __init__(self, bank: StackedBank, slot: int, inputs: int, space: spaces.Space) -> None:
        super().__init__()
        config = bank.architecture(slot)
        assert isinstance(config, NetworkConfig)
        self.parts = list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]
        sizes = [inputs, *config.hidden, sum(map(outputs_of, self.parts))]
        layers = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), ACTIVATIONS[config.activation]()]
        self.layers = nn.Sequential(*layers[:-1])
        boxes = [part for part in self.parts if isinstance(part, spaces.Box)]
        self.box = bool(boxes)
        if self.box:
            self.log_std = nn.Parameter(torch.zeros(sum(map(outputs_of, boxes))))
        self.load(bank.state(slot)["weights"])

    def ordered(self) -> list[nn.Parameter]:
        """Return parameters in the bank's order: by layer, weight first, log_std last."""
        values = []
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                values.extend((layer.weight, layer.bias))
        return [*values, self.log_std] if self.box else values

    def load(self, flat: Tensor) -> None:
        """Load the weights of a flat vector, which holds matrices as [in, out]."""
        start = 0
        with torch.no_grad():
            for parameter in self.ordered():
                part = flat[start : start + parameter.numel()]
                parameter.copy_(part.view(parameter.shape[::-1]).T if parameter.ndim == 2 else part)
                start += parameter.numel()
        assert start == len(flat)

    def flat(self) -> Tensor:
        """Return the weights as a flat vector of the bank's kind."""
        return torch.cat(
            [p.detach().T.flatten() if p.ndim == 2 else p.detach() for p in self.ordered()]
        )

    def log_probs_and_entropies(
        self, observations: Tensor, actions: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return both `[n, t]` for observations `[n, t, f]`, by torch.distributions."""
        outputs = self.layers(observations).split([*map(outputs_of, self.parts)], dim=2)
        chosen = [actions]
        if len(self.parts) > 1:  # they stand side by side in an action
            widths = [math.prod(part.shape) for part in self.parts]
            chosen = actions.split(widths, dim=2)
        log_probs = 0
        entropies = 0
        free = 0
        for part, own, taken in zip(self.parts, outputs, chosen, strict=True):
            log_std = None
            if isinstance(part, spaces.Box):
                log_std = self.log_std[free : free + outputs_of(part)]
                free += outputs_of(part)
            found = scored(part, own, log_std, taken, temperature[:, None, None])
            log_probs += found[0]
            entropies += found[1]
        return log_probs, entropies


def outputs_of(space: spaces.Space) -> int:
    """Return the number of outputs of a network for one simple space."""
    if isinstance(space, spaces.Box):
        return space.shape[0]
    if isinstance(space, spaces.MultiBinary | spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum())


def scored(
    space: spaces.Space,
    outputs: Tensor,
    log_std: Tensor | None,
    actions: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies `[n, t]` of one simple space."""
    match space:
        case spaces.Box():
            low = torch.from_numpy(space.low.copy())
            high = torch.from_numpy(space.high.copy())
            bounded = (low.isfinite() & high.isfinite()).float()
            middle = torch.where(bounded > 0, (low + high) / 2, 0.0)
            half = torch.where(bounded > 0, (high - low) / 2, 1.0)
            dist = distributions.Normal(
                middle + half * outputs, half * log_std.exp() * scale.sqrt()
            )
            return dist.log_prob(actions).sum(2), dist.entropy().sum(2)
        case spaces.MultiBinary():
            dist = distributions.Bernoulli(logits=outputs / scale)
            return dist.log_prob(actions.float()).sum(2), dist.entropy().sum(2)
        case spaces.Discrete():
            parts = [outputs]
            chosen = [actions.reshape(outputs.shape[:2])]
        case _:
            parts = outputs.split(space.nvec.tolist(), dim=2)
            chosen = actions.unbind(2)
    laws = [distributions.Categorical(logits=part / scale) for part in parts]
    log_probs = sum(dist.log_prob(action) for dist, action in zip(laws, chosen, strict=True))
    return log_probs, sum(dist.entropy() for dist in laws)
