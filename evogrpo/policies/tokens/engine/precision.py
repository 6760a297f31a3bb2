"""In which precision a frozen base is held: as asked for, or in bfloat16 where a short probe shows that this pays."""

import math
import time
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evogrpo.functional.products import product
from evogrpo.policies.devices import Precision
from evogrpo.policies.tokens.engine.direct.reading import anatomy, switched_off
from evogrpo.policies.tokens.engine.probes import find_decoder

Chosen = Literal["float32", "bfloat16", "int8", "nf4"]
SMALL = 20_000_000  # parameters, below which products are not what takes the time
PAYS = 1.5  # how much faster products have to be: what lies between them is a quarter of a step, and takes longer
TOKENS, ROUNDS, SECONDS = 256, 40, 1.0


def choose_precision(wanted: Precision, model: PreTrainedModel, device: str) -> Chosen:
    """Return the precision of a base's weights; adapters, moments and losses are in float32 anyway.

    Args:
        wanted: "auto" for bfloat16 where it pays: on a GPU that computes in it; on a CPU whose products are `PAYS`
            times as fast in it, for a model of more than `SMALL` parameters that is computed by the direct pass.
        model: The base, or its outline.
        device: Where it will be.
    """
    if wanted != "auto":
        return wanted
    if not device.startswith("cpu"):
        return "bfloat16" if not device.startswith("cuda") or torch.cuda.is_bf16_supported() else "float32"
    small = sum(weights.numel() for weights in model.parameters()) < SMALL
    if small or switched_off() or anatomy(model, find_decoder(model)) is None:
        return "float32"
    text = model.config.get_text_config()
    return "bfloat16" if speed_up(int(text.hidden_size), int(text.intermediate_size)) >= PAYS else "float32"


@cache
@torch.no_grad()
def speed_up(width_in: int, width_out: int) -> float:
    """Return how many times as fast the CPU's products are in bfloat16 as in float32.

    Compares the shortest processor times of one thread, measured by turns, so that other work on the machine does not
    change the result. Takes about a second at most.
    """
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(TOKENS, width_in, generator=rng), torch.randn(width_out, width_in, generator=rng)
    both = [(x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began, best = time.thread_time(), [math.inf, math.inf]
        for number in range(1 + ROUNDS):
            pair = [_seconds(*each) for each in both]
            if number:  # the first finds kernels
                best = [min(each) for each in zip(best, pair, strict=True)]
                if time.thread_time() - began > SECONDS:
                    break
    finally:
        torch.set_num_threads(threads)
    return best[0] / best[1]


def _seconds(x: Tensor, weight: Tensor) -> float:
    began = time.thread_time()
    product(x, weight)
    return time.thread_time() - began
