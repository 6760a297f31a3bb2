"""FSDP: each rank stores a shard of every layer of the base and gathers layers in use.

Sharding and gathering are torch's FSDP2. fast_llama does not call the layers' own `forward`, so
this module decides when a layer is gathered. Embeddings and vocabulary head are replicated.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from evogrpo.distributed import processes, timeout_minutes
from evogrpo.text import class_name

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


NEEDS_SAMPLER = (
    "A sharded base model (base_parts above 1) only learns. Sample with an engine: sampler: {vllm:"
    " URL, adapters_dir: FOLDER}, or population.sample_with."
)
"""Message of an error: decoding would gather all layers for every token."""


class ShardedLayers:
    """Sharded layers of a model.

    All ranks run the same learning passes in lockstep. A layer is gathered before its forward pass
    and before its backward pass, and resharded afterwards. The layer that followed it last time is
    prefetched.

    Args:
        layers: Sharded layers.
        size: Number of shards.

    Attributes:
        size: Number of shards.
    """

    def __init__(self, layers: nn.ModuleList, size: int) -> None:
        self.size = size
        # The gathered layer.
        self._whole: Any = None
        # A layer, and the handle of its gather.
        self._prefetched: tuple[Any, Any] | None = None
        # Layer that was gathered after two layers, by these two.
        self._successors: dict[tuple[Any, Any], Any] = {}
        self._last_two: tuple[Any, Any] = (None, None)

        def before(module: nn.Module, args: object) -> None:
            self.gather(module)

        def after(module: nn.Module, args: object, output: object) -> None:
            self.gather_in_backward(module, output)

        for layer in layers:
            layer.register_forward_pre_hook(before, prepend=True)
            layer.register_forward_hook(after, prepend=True)
            _OWN_HOOKS[layer] = frozenset((*layer._forward_pre_hooks, *layer._forward_hooks))

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Run passes together with all ranks.

        An error inside ends the run, as the other ranks cannot follow.
        """
        ranks = processes()
        before = ranks.interruptible
        ranks.interruptible = False
        try:
            yield
        # The other ranks wait for this one in a collective: the error is for them too.
        except torch.OutOfMemoryError as error:
            ranks.lockstep_error = RuntimeError(
                "Out of memory in a pass of a sharded base, which cannot be repeated in smaller"
                f" micro-batches. Lower micro_batch_tokens, or raise base_parts ({error})."
            )
            raise ranks.lockstep_error from error
        except Exception as error:
            if not ranks.raised_on_all_ranks(error):
                ranks.lockstep_error = error
            raise
        finally:
            ranks.interruptible = before
            self.reshard()

    def gather(self, layer: Any) -> None:
        """Gather a layer and reshard the previous one.

        Raises:
            ValueError: If the other ranks do not take part.
            ProcessError: If another rank has ended.
        """
        ranks = processes()
        if not ranks.sharing_errors:
            raise ValueError(
                f"The base model is sharded over {self.size} processes, so one process cannot run"
                " it alone. Load the saved agent in a program of one process."
            )
        # 1. Gather this layer, unless it is prefetched. Free the previous one, and one prefetched
        #    by mistake.
        handle = None
        if self._prefetched is not None:
            prefetched, running = self._prefetched
            if prefetched is layer:
                handle = running
                self._prefetched = None
        if layer is not self._whole:
            self.reshard()
        if handle is None:
            ranks.wait(layer.unshard)
        else:
            ranks.wait(handle.wait)
        self._whole = layer
        # 2. Prefetch the layer that followed the last two last time. The pair tells forward from
        #    backward passes.
        _, previous = self._last_two
        self._successors[self._last_two] = layer
        self._last_two = (previous, layer)
        successor = self._successors.get(self._last_two)
        if self._prefetched is None and successor is not None and successor is not layer:
            # A gathered layer cannot be gathered again.
            successor.reshard()
            self._prefetched = (successor, successor.unshard(async_op=True))

    def reshard(self) -> None:
        """Free all gathered layers."""
        if self._prefetched is not None:
            layer, handle = self._prefetched
            self._prefetched = None
            # A gather in flight writes into the buffers that are freed next.
            if handle is not None:
                processes().wait(handle.wait)
            layer.reshard()
        if self._whole is not None:
            self._whole.reshard()
        self._whole = None

    def gather_in_backward(self, layer: nn.Module, output: Any) -> None:
        """Gather a layer again when a gradient of its output arrives."""
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient: self.gather(layer))


_OWN_HOOKS: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()
"""Ids of the forward hooks of each layer when it had just been sharded; later ones are the user's.
"""
_SHARDED: WeakKeyDictionary[PreTrainedModel, ShardedLayers] = WeakKeyDictionary()


def sharded_layers(model: PreTrainedModel) -> ShardedLayers | None:
    """Return the sharded layers of a model, or None if it is not sharded."""
    return _SHARDED.get(model)


def has_user_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks besides those that gather a layer."""
    hooks = {*module._forward_pre_hooks, *module._forward_hooks}
    return bool(hooks - _OWN_HOOKS.get(module, frozenset()))


def unsharded_class(module: nn.Module) -> type:
    """Return the class that a module had before it was sharded."""
    # `fully_shard` gives a module a class with two bases: one of FSDP, and the class before.
    if module in _OWN_HOOKS:
        return type(module).__bases__[1]
    return type(module)


def sharded_over(model: PreTrainedModel) -> int:
    """Return the number of shards of a model; 1 = not sharded."""
    layers = sharded_layers(model)
    if layers is None:
        return 1
    return layers.size


def run_on_all_ranks(model: PreTrainedModel, work: Callable[[], T]) -> T:
    """Run `work`, on all ranks at once if the model is sharded, and return its result."""
    layers = sharded_layers(model)
    if layers is None:
        return work()
    # Results of other ranks need not be sent, so this rank's result is kept here.
    found: list[T] = []

    def run() -> None:
        with layers.in_lockstep():
            found.append(work())

    processes().gather_results(run)
    return found[0]


def shard_count(wanted: int) -> int:
    """Return the number of shards: the greatest common divisor of `wanted` and the world size."""
    if wanted == 1:
        return 1
    return math.gcd(wanted, processes().size)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of layers of a model, with or without weights.

    Raises:
        ValueError: If there is none.
    """
    # The list with as many modules as the config has layers.
    count = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{class_name(model)} has no list of layers. Set base_parts=1 and gradient_checkpointing="
        "False, or use another architecture."
    )


def check_sharding(model: PreTrainedModel, parts: int, device: str) -> None:
    """Raise a ValueError if the model has no list of layers or the device no backend."""
    if parts == 1:
        return
    kind = torch.device(device).type
    if kind not in BACKENDS:
        raise ValueError(
            f"base_parts above 1 requires the device {' or '.join(BACKENDS)}, got {device!r}. Leave"
            " base_parts out."
        )
    # Raises the error for a model without such a list.
    layers_of(model)


def shard(model: PreTrainedModel, parts: int, device: str) -> None:
    """Shard a model's layers in place; all ranks must call this.

    Args:
        model: Whole model in CPU memory. On return, this rank's shards are on the device.
        parts: Number of shards, from `shard_count`.
        device: Device of the shards.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # 1. Form a grid of ranks: each row holds one copy of the base, and each rank of a row one part
    #    of it.
    check_sharding(model, parts, device)
    kind = torch.device(device).type
    if kind == "cuda":
        # The mesh uses the current device.
        if ":" not in device:
            device = f"{device}:0"
        torch.cuda.set_device(device)
    rows = torch.arange(processes().size).view(-1, parts).tolist()
    group, _ = dist.new_subgroups_by_enumeration(
        rows, timeout=timedelta(minutes=timeout_minutes()), backend=BACKENDS[kind]
    )
    mesh = DeviceMesh.from_group(group, kind)
    # 2. Shard the layers.
    model.requires_grad_(False)
    layers = layers_of(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    _SHARDED[model] = ShardedLayers(layers, parts)
    # 3. Move everything outside the layers to the device, and all buffers. FSDP has already moved
    #    the shards of the layers.
    in_layers = set(layers.parameters())
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter not in in_layers:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
