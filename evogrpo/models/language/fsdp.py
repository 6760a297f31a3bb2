"""FSDP: each rank stores a shard of every layer of the base, and layers are gathered when a rank needs them.

Sharding and gathering are torch's FSDP2. Ranks of a population run different work, so this module decides the time of
each gather; see `evogrpo.distributed`. Embeddings and vocabulary head are replicated.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from evogrpo.distributed import NOTHING, Errands, processes
from evogrpo.models.language.quantised import is_quantised, stored_bytes

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class ShardedLayers:
    """Sharded layers of a model.

    A layer is gathered before its forward pass and before its backward pass, and resharded afterwards. If all ranks
    need the same layer, its expected successor is prefetched.

    Args:
        layers: Sharded layers, in the order of their calls.
        errands: Collectives with the ranks of the other shards.

    Attributes:
        size: Number of shards.
    """

    def __init__(self, layers: nn.ModuleList, errands: Errands) -> None:
        self.size = len(errands.ranks)
        self._errands = errands
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._whole: Any = None
        self._course: dict[tuple[int, int], int] = {}
        self._last = (NOTHING, NOTHING)
        for layer in layers:
            self._numbers[layer] = errands.add(_Gathering(layer))
            layer.register_forward_pre_hook(lambda module, args: self.gather(module), prepend=True)
            layer.register_forward_hook(lambda module, args, out: self.gather_in_backward(module, out), prepend=True)
            _OWN_HOOKS[layer] = hooks_of(layer)

    def gather(self, layer: nn.Module) -> None:
        """Gather a layer and reshard the previous one.

        Raises:
            ValueError: If the other ranks do not take part.
            ProcessError: If another rank has ended.
        """
        self.reshard()
        number = self._numbers[layer]
        self._errands.need(number, self._expected(number))
        self._whole = ref(layer)

    def _expected(self, number: int) -> int:
        """Return the layer that followed this one last time in the same direction, or `NOTHING`."""
        self._course[self._last] = number
        self._last = (self._last[1], number)
        return self._course.get(self._last, NOTHING)

    def reshard(self) -> None:
        """Free all gathered layers."""
        layer = None if self._whole is None else self._whole()
        if layer is not None:
            layer.reshard()
        self._whole = None

    def gather_in_backward(self, layer: nn.Module, output: Any) -> None:
        """Gather a layer again when a gradient of its output arrives."""
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self.gather(layer))


class _Gathering:
    """Collective that gathers a layer on all ranks."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._begun = ref(layer), None

    @property
    def _module(self) -> Any:
        module = self._layer()
        assert module is not None, "the base was deleted on one rank and is in use on another"
        return module

    def begin(self) -> None:
        """See `Errand`."""
        self._module.reshard()  # a gathered layer cannot be gathered again
        self._begun = self._module.unshard(async_op=True)

    def finish(self, needed: bool) -> None:
        """See `Errand`."""
        if self._begun is None:
            self.begin()
        if self._begun is not None:
            self._begun.wait()
        self._begun = None
        if not needed:
            self._module.reshard()


_OWN_HOOKS: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
_SHARDED: WeakKeyDictionary[PreTrainedModel, ShardedLayers] = WeakKeyDictionary()


def sharded_layers(model: PreTrainedModel) -> ShardedLayers | None:
    """Return the sharded layers of a model, or None if it is not sharded."""
    return _SHARDED.get(model)


def hooks_of(module: nn.Module) -> frozenset[int]:
    """Return the ids of a module's forward hooks."""
    return frozenset((*module._forward_pre_hooks, *module._forward_hooks))


def own_hooks(module: nn.Module) -> frozenset[int]:
    """Return the ids of the hooks that gather a layer."""
    return _OWN_HOOKS.get(module, frozenset())


def unsharded_class(module: nn.Module) -> type:
    """Return the class that a module had before it was sharded."""
    return type(module).__bases__[1] if module in _OWN_HOOKS else type(module)


def sharded_over(model: PreTrainedModel) -> int:
    """Return the number of shards of a model; 1 = not sharded."""
    layers = sharded_layers(model)
    return 1 if layers is None else layers.size


def run_on_all_ranks(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """Run `work`, on all ranks at once if the model is sharded, and return its result."""
    if sharded_layers(model) is None:
        return work()
    found: list[T] = []
    processes().run_section(lambda: found.append(work()))
    return found[0]


def shard_count(wanted: int) -> int:
    """Return the number of shards: the greatest common divisor of `wanted` and the world size."""
    return 1 if wanted == 1 else math.gcd(wanted, processes().size)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of layers of a model, with or without weights.

    Raises:
        ValueError: If there is none.
    """
    count = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no list of layers and cannot be sharded. Set base_parts=1 or use another "
        "architecture."
    )


def parameters_per_rank(model: PreTrainedModel, parts: int) -> int:
    """Return the maximum number of parameters in a rank's memory.

    With several parts: its shard of every layer, everything outside the layers, and three full layers (one in use, one
    that another rank needs, and a buffer to gather it).
    """
    whole = sum(parameter.numel() for parameter in model.parameters())
    if parts == 1:
        return whole
    layers = _sizes(model)
    return whole - sum(layers) + math.ceil(sum(layers) / parts) + 3 * max(layers)


def base_bytes(model: PreTrainedModel) -> int:
    """Return the maximum bytes of a loaded model's weights on this rank."""
    if is_quantised(model):
        return sum(stored_bytes(weights.data) for weights in model.parameters())
    return parameters_per_rank(model, sharded_over(model)) * next(model.parameters()).element_size()


def gathered_parameters(model: PreTrainedModel, parts: int) -> int:
    """Return the number of parameters that a rank receives from others in one forward pass."""
    return 0 if parts == 1 else sum(_sizes(model)) * (parts - 1) // parts


def _sizes(model: PreTrainedModel) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]


def check_sharding(model: PreTrainedModel, parts: int, device: str) -> None:
    """Raise a ValueError if the model has no list of layers or the device no backend."""
    if parts == 1:
        return
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise ValueError(
            f"base_parts above 1 requires the device {' or '.join(BACKENDS)}, got {device!r}. Leave base_parts out."
        )
    layers_of(model)


def shard(model: PreTrainedModel, parts: int, device: str) -> None:
    """Shard a model's layers in place; all ranks must call this.

    Args:
        model: Whole model in CPU memory. On return, this rank's shards are on the device.
        parts: Number of shards, from `shard_count`.
        device: Device of the shards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check_sharding(model, parts, device)
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device if ":" in device else f"{device}:0")
    crew = processes()
    names = ("copies", "parts")
    mesh = init_device_mesh(
        kind, (crew.size // parts, parts), mesh_dim_names=names, backend_override={"parts": BACKENDS[kind]}
    )["parts"]
    model.requires_grad_(False)
    layers = layers_of(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    _SHARDED[model] = ShardedLayers(layers, crew.errands(parts))
    own = {parameter for layer in layers for parameter in layer.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in own:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
