"""Devices and precision of policy sets."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator

from evogrpo.models.devices import check_device


def choose_device(accelerator: Accelerator | None, device: str | torch.device | None) -> str | torch.device | None:
    """Return the requested device, or that of the accelerator; None = not specified.

    Raises:
        ValueError: If both are given, or the device is not available.
    """
    if accelerator is None:
        if device is not None:
            check_device(device)
        return device
    if not isinstance(accelerator, Accelerator):
        raise ValueError(f"accelerator must be an accelerate.Accelerator, got {accelerator!r:.80}.")
    if device is not None:
        raise ValueError(f"The accelerator sets the device. Leave out device={str(device)!r}.")
    chosen: torch.device = accelerator.device
    return chosen


def autocast_context(accelerator: Accelerator | None) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of the autocast context of forward passes."""
    if accelerator is None or accelerator.mixed_precision == "no":
        return nullcontext
    autocast: Callable[[], AbstractContextManager[None]] = accelerator.autocast
    return autocast
