"""Borrowing a model: what is set for as long as a bank works with it, and put back afterwards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Run `model` without dropout and without gradients for its own weights; put all its flags back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for module, _ in modes:
            module.training = False
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, required in flags:
            parameter.requires_grad_(required)


@contextmanager
def grouped_attention(device: torch.device) -> Iterator[None]:
    """Let transformers' attention read keys and values shared by several heads where they are, rather than copy them.

    By default it does so without a mask only, because other devices' kernels need that; the CPU's does not.
    """
    name = "TRANSFORMERS_SDPA_FORCE_GQA"
    before = os.environ.get(name)
    try:
        if device.type == "cpu":
            os.environ[name] = "1"
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
