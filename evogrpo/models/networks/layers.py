"""Hidden layers of all members in batched products, with gradients by hand; convolutions; orthogonal weights."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d

from evogrpo.models.networks.architecture import Activation

FloatArray = NDArray[np.float32]
Layers = Sequence[tuple[Tensor, Tensor]]
"""Weights `[q, in, out]` and biases `[q, out]` of the hidden layers, then of the output."""

_NUMBERS = torch.empty(0)

Backward = Callable[[Tensor, Layers], Tensor | None]
"""(gradient `[q, w, o]` of the outputs, gradients of the layers to add to) -> gradient of the features or None."""

ACTIVATE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "elu": torch.nn.functional.elu_,
}
# Derivatives in place, (grad, value) -> grad; as functions of the value, they need no other tensor.
DERIVATIVES: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda grad, value: torch.ops.aten.tanh_backward.grad_input(grad, value, grad_input=grad),
    "relu": lambda grad, value: torch.ops.aten.threshold_backward.grad_input(grad, value, 0, grad_input=grad),
    "elu": lambda grad, value: torch.ops.aten.elu_backward.grad_input(grad, 1, 1, 1, True, value, grad_input=grad),
}


class Workspace:
    """Memory that passes reuse. Mapping new memory would take longer than the arithmetic."""

    def __init__(self) -> None:
        self._storage: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor of this shape, with the dtype and device of `like`."""
        view = self._views.get((name, shape))
        if view is not None:
            return view
        storage, count = self._storage.get(name), prod(shape)
        if storage is None or storage.numel() < count:
            storage = self._storage[name] = like.new_empty(count)
            self._views.clear()
        elif len(self._views) > 256:  # shapes vary with the number of rows
            self._views.clear()
        view = self._views[name, shape] = storage[:count].view(shape)
        return view


class HiddenLayers:
    """Hidden layers and a linear output layer of all members in batched products, with gradients by hand.

    Measured with 8 members, 256 rows each and two layers of 64, forward and backward: 0.9 ms; autograd 2.7 ms.

    Args:
        activation: Activation after each hidden layer.
    """

    def __init__(self, activation: Activation) -> None:
        self._activation = activation
        self._idle: list[Workspace] = []

    def act(self, layers: Sequence[tuple[FloatArray, FloatArray]], features: FloatArray) -> FloatArray:
        """Return outputs `[q, w, o]` for features `[q, w, f]`, all in numpy.

        Measured with 8 members, 32 rows each and two layers of 64: 40 microseconds; 105 in torch, mostly for its tanh.
        """
        space, values = self._idle.pop() if self._idle else Workspace(), features
        for number, (weight, bias) in enumerate(layers[:-1]):
            hidden = space.take(f"{number}", (*values.shape[:2], weight.shape[2]), _NUMBERS)
            values = np.matmul(values, weight, out=hidden.numpy())
            values += bias[:, None]
            self._activate(hidden)
        weight, bias = layers[-1]
        outputs: FloatArray = np.matmul(values, weight)
        outputs += bias[:, None]
        self._idle.append(space)
        return outputs

    def forward(self, layers: Layers, features: Tensor) -> Tensor:
        """Return outputs `[q, w, o]` for features `[q, w, f]`, without gradient."""
        space = self._idle.pop() if self._idle else Workspace()
        outputs = self._run(layers, features, space)[1]
        self._idle.append(space)
        return outputs

    def vjp(self, layers: Layers, features: Tensor, *, features_need_grad: bool) -> tuple[Tensor, Backward]:
        """Return outputs `[q, w, o]` and a function that adds the gradients of the layers, to be called at most once.

        Args:
            layers: The parameters.
            features: `[q, w, f]`.
            features_need_grad: The function also returns the gradient of the features.
        """
        space = self._idle.pop() if self._idle else Workspace()
        values, outputs = self._run(layers, features, space)

        def backward(grad: Tensor, gradients: Layers) -> Tensor | None:
            # The rounding of a product does not depend on the number of members, that of a sum does.
            ones = grad.new_ones(len(grad), 1, grad.shape[1])
            for number in reversed(range(len(values))):
                weight, bias = gradients[number]
                weight.baddbmm_(values[number].transpose(1, 2), grad)
                bias[:, None].baddbmm_(ones, grad)
                if number or features_need_grad:
                    out = space.take(f"grad {number}", tuple(values[number].shape), grad)
                    grad = torch.bmm(grad, layers[number][0].transpose(1, 2), out=out)
                if number:
                    grad = DERIVATIVES[self._activation](grad, values[number])
            self._idle.append(space)
            return grad if features_need_grad else None

        return outputs, backward

    def _run(self, layers: Layers, features: Tensor, space: Workspace) -> tuple[list[Tensor], Tensor]:
        values = [features]
        for number, (weight, bias) in enumerate(layers[:-1]):
            hidden = space.take(f"{number}", (*features.shape[:2], weight.shape[2]), features)
            torch.baddbmm(bias[:, None], values[-1], weight, out=hidden)
            self._activate(hidden)
            values.append(hidden)
        weight, bias = layers[-1]
        return values, torch.baddbmm(bias[:, None], values[-1], weight)

    def _activate(self, hidden: Tensor) -> None:
        if self._activation == "tanh" and hidden.device.type == "cpu":
            array = hidden.numpy()
            np.tanh(array, out=array)  # ten times as fast as torch's
        else:
            ACTIVATE[self._activation](hidden)


def convolve(layers: Sequence[tuple[str, int]], parameters: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Run convolutions, each followed by a ReLU, member by member.

    Measured with 8 members and 32 images of 84 x 84 x 4 each, forward and backward: 88 ms; one grouped convolution
    or `torch.func.vmap` takes 116 ms.

    Args:
        layers: Name and stride of each layer.
        parameters: "<name>.weight" `[q, out, in, k, k]` and "<name>.bias" `[q, out]`.
        images: `[q, w, c, h, w]`.

    Returns:
        `[q, w, f]`.
    """
    features = []
    for row, own in enumerate(images):
        values = own
        for name, stride in layers:
            values = conv2d(values, parameters[f"{name}.weight"][row], parameters[f"{name}.bias"][row], stride).relu()
        features.append(values.flatten(1))
    return torch.stack(features)


def orthogonal(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    """Return a random matrix `[rows, columns]` with orthonormal rows, or columns if those are fewer.

    Source: Exact solutions to the nonlinear dynamics of learning in deep linear networks (arXiv:1312.6120).
    """
    normal = rng.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(normal)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)  # otherwise the signs would depend on the QR routine
    return torch.from_numpy(np.ascontiguousarray(q if rows >= columns else q.T)).float()
