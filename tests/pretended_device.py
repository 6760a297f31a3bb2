"""A device that is not there, as a plugin: `pytest -p tests.pretended_device` runs tests of accelerators on it.

Its tensors hold others on the CPU, which do the work. As on a GPU they may not meet tensors of the CPU, cannot become
arrays, and oneDNN knows nothing of them. So what mixes devices is found where there is no GPU.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from evogrpo.models.fast_llama import weight_layout
from evogrpo.models.language import causal_model

NAME = "pretended"
CROSSING = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
"""What takes numbers from one device to another."""
INDEXING = ("aten.index", "aten._unsafe_index", "aten._index_put_impl")
"""What takes indices from the CPU as well."""


class Module(backend_registration._DummyBackendModule):
    """What torch asks of a device besides its tensors: nothing is drawn on this one."""

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        pass


class Pretended(Tensor):
    """A tensor there, with the one on the CPU that does its work."""

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> "Pretended":
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
        return f"Pretended({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *args: object, **kwargs: object) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _done(func, args, kwargs or {})


class Pretending(TorchDispatchMode):
    """Sees what is made there out of nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _done(func, args, kwargs or {})


def _done(func, args, kwargs):
    """Do an operation on what tensors hold."""
    flat, spec = tree_flatten((args, kwargs))
    there = [each for each in flat if isinstance(each, Pretended)]
    device = kwargs.get("device")
    leaves = device is not None and torch.device(device).type != NAME
    if not there and (device is None or leaves):
        return func(*args, **kwargs)
    if there and func not in CROSSING:
        _check(func, flat)
    wrappers = {id(each.held): each for each in there}
    args_inside, kwargs_inside = tree_unflatten(
        [each.held if isinstance(each, Pretended) else each for each in flat], spec
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
        return wrappers[id(each)] if id(each) in wrappers else Pretended(each)

    outside = tree_map(wrapped, made)
    return return_and_correct_aliasing(func, args, kwargs, outside) if there else outside


def _check(func, flat) -> None:
    """Refuse what a GPU refuses: tensors of the CPU, but for single numbers and indices."""
    if "mkldnn" in str(func):
        raise RuntimeError(f"{func} is for CPUs")
    here = [each for each in flat if isinstance(each, Tensor) and not isinstance(each, Pretended) and each.dim()]
    if str(func).startswith(INDEXING):
        here = [each for each in here if each.is_floating_point()]
    if here and not _by_tests():
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in here)
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {NAME}:0 and cpu ({shapes})")


def _by_tests() -> bool:
    """Tell whether a test has asked, rather than the package: tests may compare what is here and there."""
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
    from tests.models import test_precision

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=) is not seen here
    test_precision.DEVICES[:] = [f"{NAME}:0"]
    # fast_llama requires plain weights; treat these as such.
    weight_layout.DEVICES = (*weight_layout.DEVICES, NAME)
    weight_layout._types = lambda weights: (nn.Parameter, Tensor)
    causal_model.head_matrix = _matrix_of
    Pretending().__enter__()
