"""Where members compute."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator

from evogrpo.models.devices import check_device


def choose_device(accelerator: Accelerator | None, device: str | torch.device | None) -> str | torch.device | None:
    """Return the device that is wanted, or that an accelerator chooses; None = no wish.

    Raises:
        ValueError: If both are given, or the device is not there.
    """
    if accelerator is None:
        if device is not None:
            check_device(device)
        return device
    if not isinstance(accelerator, Accelerator):
        raise ValueError(f"accelerator must be one of accelerate's, Accelerator(), got {accelerator!r:.80}")
    if device is not None:
        raise ValueError(f"an accelerator chooses the device: leave out device={str(device)!r}")
    chosen: torch.device = accelerator.device
    return chosen


def autocast_context(accelerator: Accelerator | None) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the context that passes run in: none where an accelerator leaves the precision alone."""
    if accelerator is None or accelerator.mixed_precision == "no":
        return nullcontext
    autocast: Callable[[], AbstractContextManager[None]] = accelerator.autocast
    return autocast


def check_accelerator(accelerator: Accelerator | None) -> None:
    """Refuse with a ValueError to train one agent in several processes: each would train a copy of it."""
    if isinstance(accelerator, Accelerator) and accelerator.num_processes != 1:
        raise ValueError(
            f"one process trains an agent, got an accelerator with {accelerator.num_processes}: make a population, "
            "GRPO.population(...), whose members they share out, or start the program without a multi-process launcher"
        )
