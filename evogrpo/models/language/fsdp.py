"""A base in parts: several processes hold a part of every layer each, and put a layer together where one needs it.

torch's FSDP2 keeps the parts and gathers them. When that happens is decided here, as processes of a population are not
at the same place of the same work: see `evogrpo.distributed`. What stands outside of the layers, which is the
embeddings and the vocabulary head, every process holds whole.
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
    """The layers of a model of which this process holds a part each.

    At most one is whole at a time, besides one that another process needs at the moment or all need next. A layer is
    gathered right before its forward pass, and again before its backward pass; where all processes are at the same
    layer, the one that followed it last time is gathered while this one computes.

    Args:
        layers: Modules that are called one after another, in parts already.
        errands: What the processes that have the other parts do together.

    Attributes:
        size: How many processes there are.
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
            layer.register_forward_hook(self._before_backward, prepend=True)
            _OWN_HOOKS[layer] = hooks_of(layer)

    def gather(self, layer: nn.Module) -> None:
        """Put a layer together, and the one before it away.

        Raises:
            ValueError: If the other processes will not take part.
            ProcessError: If one of them has ended.
        """
        self.put_away()
        number = self._numbers[layer]
        self._errands.need(number, self._expected(number))
        self._whole = ref(layer)

    def _expected(self, number: int) -> int:
        """Return which layer followed this one last time, forwards or backwards as now; `NOTHING` if that is new."""
        self._course[self._last] = number
        self._last = (self._last[1], number)
        return self._course.get(self._last, NOTHING)

    def put_away(self) -> None:
        """Keep no more than this process's part of any layer."""
        layer = None if self._whole is None else self._whole()
        if layer is not None:
            layer.reshard()
        self._whole = None

    def again(self, layer: nn.Module, output: Any) -> None:
        """Gather a layer again as soon as a gradient arrives at what it made."""
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self.gather(layer))

    def _before_backward(self, layer: nn.Module, args: object, output: Any) -> None:
        self.again(layer, output)


class _Gathering:
    """What all processes do where one needs a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._begun = ref(layer), None

    @property
    def _module(self) -> Any:
        module = self._layer()
        assert module is not None, "a base is in use in one process, and gone in another"
        return module

    def begin(self) -> None:
        """See `Errand`."""
        self._module.reshard()  # where its last use left it whole, it could not take part
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
_PARTED: WeakKeyDictionary[PreTrainedModel, ShardedLayers] = WeakKeyDictionary()


def sharded_layers(model: PreTrainedModel) -> ShardedLayers | None:
    """Return the layers of a model that `part` was called with; None for all others."""
    return _PARTED.get(model)


def hooks_of(module: nn.Module) -> frozenset[int]:
    """Return the numbers of what a module calls before and after its forward pass."""
    return frozenset((*module._forward_pre_hooks, *module._forward_hooks))


def own_hooks(module: nn.Module) -> frozenset[int]:
    """Return those of them that gather a layer, which a pass may do in another way."""
    return _OWN_HOOKS.get(module, frozenset())


def unsharded_class(module: nn.Module) -> type:
    """Return the class of a module, or that which it had before it was held in parts."""
    return type(module).__bases__[1] if module in _OWN_HOOKS else type(module)


def sharded_over(model: PreTrainedModel) -> int:
    """Return how many processes hold a model together: 1 = each that has it has all of it."""
    layers = sharded_layers(model)
    return 1 if layers is None else layers.size


def run_on_all_ranks(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """Return what some work that runs a model comes to; all processes do it at once where they hold it in parts."""
    if sharded_layers(model) is None:
        return work()
    found: list[T] = []
    processes().run_section(lambda: found.append(work()))
    return found[0]


def shard_count(wanted: int) -> int:
    """Return how many processes hold a base together, of those that there are: most often as many as are wanted.

    It is the greatest number that divides both, so that a run goes on in more or fewer processes.
    """
    return 1 if wanted == 1 else math.gcd(wanted, processes().size)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model, or of its outline.

    Raises:
        ValueError: If it has no list of them.
    """
    count = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__} has no list of layers, so several processes cannot hold it in parts: leave base_parts "
        "at 1, or use another architecture"
    )


def parameters_per_rank(model: PreTrainedModel, parts: int) -> int:
    """Return how many parameters of a model one process holds at most.

    In parts that is its part of every layer, all that stands outside of the layers, and three whole layers: one in
    use, one that another process needs meanwhile, and the room to put that together.
    """
    whole = sum(parameter.numel() for parameter in model.parameters())
    if parts == 1:
        return whole
    layers = _sizes(model)
    return whole - sum(layers) + math.ceil(sum(layers) / parts) + 3 * max(layers)


def base_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a loaded model's weights that this process holds at most."""
    if is_quantised(model):
        return sum(stored_bytes(weights.data) for weights in model.parameters())
    return parameters_per_rank(model, sharded_over(model)) * next(model.parameters()).element_size()


def gathered_parameters(model: PreTrainedModel, parts: int) -> int:
    """Return how many parameters one process gets from others for one pass through a model: those it has no part of."""
    return 0 if parts == 1 else sum(_sizes(model)) * (parts - 1) // parts


def _sizes(model: PreTrainedModel) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model)]


def check_sharding(model: PreTrainedModel, parts: int, device: str) -> None:
    """Refuse what cannot be held in parts.

    Raises:
        ValueError: If the device has no FSDP, or the model no list of layers.
    """
    if parts == 1:
        return
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise ValueError(f"base_parts above 1 is for {' and '.join(BACKENDS)}, got the device {device!r}: leave it out")
    layers_of(model)


def part(model: PreTrainedModel, parts: int, device: str) -> None:
    """Keep this process's part of each layer, and no more; all processes of the program call this.

    Args:
        model: Whole, in the CPU's memory, nobody else's. On return its parts are on the device.
        parts: How many processes hold it together, from `shard_count`.
        device: Where to.
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
    _PARTED[model] = ShardedLayers(layers, crew.errands(parts))
    own = {parameter for layer in layers for parameter in layer.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in own:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
