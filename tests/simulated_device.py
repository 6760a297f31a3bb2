"""Simulated accelerator for pytest: `-p tests.simulated_device` runs accelerator tests.

Its tensors wrap CPU tensors. As on a GPU, they cannot be combined with CPU tensors or converted to
arrays, and oneDNN does not support them. So tests find mixed devices without a GPU.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from evogrpo.members.fast_llama import weight_layout
from evogrpo.members.language import causal_model

NAME = "simulated"
CROSSING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
"""Operations that copy between devices."""
INDEXING = ("aten.index", "aten._unsafe_index", "aten._index_put_impl")
"""Operations that also accept CPU indices."""


class Module(backend_registration._DummyBackendModule):
    """Device module for torch; without a random number generator."""

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass


class Simulated(Tensor):
    """A tensor of the simulated device that wraps a CPU tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "Simulated":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )

    def __init__(self, inner: Tensor, requires_grad: bool = False) -> None:
        self.held = inner

    def __repr__(self) -> str:
        return f"Simulated({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *args: object, **kwargs: object) -> Any:
        raise TypeError(
            f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first"
        )

    __array__ = numpy
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _done(func, args, kwargs or {})


class Simulating(TorchDispatchMode):
    """Wraps tensors that are created on the simulated device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _done(func, args, kwargs or {})


def _done(func, args, kwargs):
    """Run an operation on the wrapped tensors."""
    flat, spec = tree_flatten((args, kwargs))
    simulated = [each for each in flat if isinstance(each, Simulated)]
    device = kwargs.get("device")
    leaves = device is not None and torch.device(device).type != NAME
    if not simulated and (device is None or leaves):
        return func(*args, **kwargs)
    if simulated and func not in CROSSING:
        _check(func, flat)
    wrappers = {id(each.held): each for each in simulated}
    args_inside, kwargs_inside = tree_unflatten(
        [each.held if isinstance(each, Simulated) else each for each in flat], spec
    )
    if device is not None and not leaves:
        kwargs_inside["device"] = torch.device("cpu")
    kwargs_inside.pop("pin_memory", None)
    made = func(*args_inside, **kwargs_inside)
    if func is torch.ops.aten.copy_.default:
        return args[0]
    if leaves:
        return made

    def wrapped(each: object) -> object:
        if not isinstance(each, Tensor):
            return each
        return wrappers[id(each)] if id(each) in wrappers else Simulated(each)

    outside = tree_map(wrapped, made)
    if simulated:
        return return_and_correct_aliasing(func, args, kwargs, outside)
    return outside


def _check(func, flat) -> None:
    """Raise for CPU tensors as a GPU does, except for scalars and indices."""
    if "mkldnn" in str(func):
        raise RuntimeError(f"{func} is for CPUs")
    on_cpu = [
        each
        for each in flat
        if isinstance(each, Tensor) and not isinstance(each, Simulated) and each.dim()
    ]
    if str(func).startswith(INDEXING):
        on_cpu = [each for each in on_cpu if each.is_floating_point()]
    if on_cpu and not _by_tests():
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in on_cpu)
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, found {NAME}:0 and cpu"
            f" ({shapes})"
        )


def _by_tests() -> bool:
    """Return True if the caller is a test, which may compare tensors across devices."""
    frame = sys._getframe(3)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("evogrpo."):
            return False
        if name.startswith("tests.") and name != __name__:
            return True
        frame = frame.f_back
    return True


def _matrix_of(head: Any, hidden: Tensor) -> Tensor | None:
    plain = type(head) is nn.Linear and head.bias is None and weight_layout.is_unmodified(head)
    return head.weight.data if plain else None


def pytest_configure() -> None:
    """Register the device for the accelerator tests and for fast_llama."""
    from tests.members import test_devices

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.__future__.set_swap_module_params_on_conversion(True)
    # Needed for torch.tensor(..., device=) to reach this mode.
    torch._C._set_only_lift_cpu_tensors(True)
    test_devices.ACCELERATORS[:] = test_devices.DEVICES[:] = [f"{NAME}:0"]
    # fast_llama requires plain weights; treat these as such.
    weight_layout._has_plain_weights = lambda decoder: True
    causal_model.head_matrix = _matrix_of
    Simulating().__enter__()
