"""Policy networks: observation encoder, layers, the default network, and modules of the user.

Letters in shapes: `q` members, `w` observations of each, `m` observations of any members, `f`
features, `o` outputs, `k` parameters of a member.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import conv2d

from evogrpo.arrays import Float32Array
from evogrpo.config.network import Activation, Convolution, NetworkConfig
from evogrpo.members.networks.architecture import Parameters
from evogrpo.randomness import generator
from evogrpo.records import map_tensors
from evogrpo.spaces import describe_input, flatten, leaf_spaces, preprocess_observation, unflatten
from evogrpo.text import class_name, one_line
from evogrpo.warnings import warn

Image = tuple[int, int, int]
"""(channels, height, width)."""


class ObservationEncoder:
    """Converts observations of one space to features and images.

    Discrete and MultiDiscrete values are one-hot encoded, uint8 numbers are divided by 255, and
    other numbers stay as they are. A Box of uint8 with three dimensions (channels first or last:
    the smaller one), or with two (one channel), is an image. Parts of a Dict or Tuple are
    concatenated in the space's order.

    Args:
        space: A Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these.

    Attributes:
        features: Number of features, without images.
        images: Shape of each image.

    Raises:
        ValueError: If the space, or a part of it, is of another kind.
    """

    def __init__(self, space: spaces.Space[Any] | None) -> None:
        if space is None:
            raise ValueError("observation_space must be a Gymnasium space, got None.")
        self.space = space
        self._leaves = leaf_spaces(space)
        self.images: list[Image] = []
        self.features = 0
        for leaf in self._leaves:
            shape = _image(leaf)
            if shape is None:
                self.features += spaces.flatdim(leaf)
            else:
                self.images.append(shape)

    def __call__(
        self, observations: Any, device: torch.device | str
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return features `[m, f]` and images `[m, channels, height, width]`, as float32.

        The features are None if the space has images only.

        Args:
            observations: Tensors or arrays `[m, ...]` in the form of the space.
            device: Device of the results.

        Raises:
            ValueError: If the observations do not fit the space.
        """
        # The observations are checked against the space, and split into its leaves.
        vectors = []
        images = []
        tree = preprocess_observation(observations, self.space, device)
        for leaf, numbers in zip(self._leaves, flatten(self.space, tree), strict=True):
            if leaf.dtype == np.uint8 and isinstance(leaf, spaces.Box):
                values = numbers / 255
            else:
                values = numbers
            shape = _image(leaf)
            if shape is None:
                # Not `len(values)`, which torch.export would store as a constant.
                vectors.append(values.reshape(values.shape[0], -1))
            elif values.ndim == 3:
                # One channel.
                images.append(values[:, None])
            elif tuple(values.shape[1:]) == shape:
                images.append(values)
            else:
                # Channels last -> first.
                images.append(values.permute(0, 3, 1, 2))
        if not vectors:
            return None, images
        if len(vectors) == 1:
            return vectors[0], images
        return torch.cat(vectors, 1), images


def _image(space: spaces.Space[Any]) -> Image | None:
    """Return an image's shape with channels first, or None if the space is not an image."""
    if (
        not isinstance(space, spaces.Box)
        or space.dtype != np.uint8
        or len(space.shape) not in (2, 3)
    ):
        return None
    # Channels are the smaller one of the first and the last dimension.
    if len(space.shape) == 2:
        return (1, space.shape[0], space.shape[1])
    first, middle, last = space.shape
    if first < last:
        return (first, middle, last)
    return (last, first, middle)


# ---- activations, memory and initial weights of layers

# Example of dtype and device for `Workspace.take`: float32 on the CPU.
_NUMBERS = torch.empty(0)

ACTIVATE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh_,
    "relu": torch.relu_,
    "elu": torch.nn.functional.elu_,
}
# Derivatives in place, (grad, value) -> grad; as functions of the value, they need no other tensor.
DERIVATIVES: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "tanh": lambda grad, value: torch.ops.aten.tanh_backward.grad_input(
        grad, value, grad_input=grad
    ),
    "relu": lambda grad, value: torch.ops.aten.threshold_backward.grad_input(
        grad, value, 0, grad_input=grad
    ),
    "elu": lambda grad, value: torch.ops.aten.elu_backward.grad_input(
        grad, 1, 1, 1, True, value, grad_input=grad
    ),
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
        # Grow the storage of this name if it is too small. Views of the old one are stale.
        storage = self._storage.get(name)
        count = math.prod(shape)
        if storage is None or storage.numel() < count:
            storage = like.new_empty(count)
            self._storage[name] = storage
            self._views.clear()
        elif len(self._views) > 256:  # shapes vary with the number of rows
            self._views.clear()
        view = storage[:count].view(shape)
        self._views[name, shape] = view
        return view


def orthogonal(rng: np.random.Generator, rows: int, columns: int) -> Tensor:
    """Return a random matrix `[rows, columns]` with orthonormal rows, or columns if fewer.

    Source: Exact solutions to the nonlinear dynamics of learning in deep linear networks
    (arXiv:1312.6120).
    """
    shape = (max(rows, columns), min(rows, columns))
    normal = rng.standard_normal(shape)
    q, r = np.linalg.qr(normal)
    # Otherwise the signs would depend on the QR routine.
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    if rows < columns:
        q = q.T
    return torch.from_numpy(np.ascontiguousarray(q)).float()


# ---- networks

Shapes = dict[str, tuple[int, ...]]

AddGradients = Callable[[Tensor, Parameters], None]
"""(gradient `[q, w, o]` of the outputs, gradients `[q, ...]` of the parameters to add to)."""

# Human-level control (Nature 518, 2015).
NATURE: tuple[Convolution, ...] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
SMALL: tuple[Convolution, ...] = ((16, 3, 1), (32, 3, 1))
# Minimum side of an image for NATURE.
MIN_NATURE_SIDE = 36


def split(flat: Tensor, shapes: Shapes) -> Parameters:
    """View flat vectors `[..., k]` as parameters `[..., *shape]` by name."""
    parameters = {}
    start = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        part = flat[..., start : start + count]
        shape_of_all = (*flat.shape[:-1], *shape)
        parameters[name] = part.view(shape_of_all)
        start += count
    return parameters


def join(parameters: Mapping[str, Tensor], shapes: Shapes) -> Tensor:
    """Return one member's parameters as a flat vector `[k]`, the inverse of `split`."""
    return torch.cat([parameters[name].flatten() for name in shapes])


class DefaultNetwork:
    """Convolutions for images, then hidden layers over all features.

    The layers of all members are batched products with gradients by hand. Measured with 8 members,
    256 rows each and two layers of 64, forward and backward: 0.9 ms; autograd 2.7 ms.

    Args:
        config: The architecture.
        space: Observation space.
        outputs: Number of outputs.

    Attributes:
        config: As given.
        encoder: Converts observations to features and images.
        shapes: Shapes of one member's parameters by name, in their order in a flat vector.
        values_per_observation: Approximate number of values that the gradient of one observation
            keeps in memory.

    Raises:
        ValueError: If the space is not supported, or an image is too small for the convolutions.
    """

    def __init__(
        self, config: NetworkConfig, space: spaces.Space[Any] | None, outputs: int
    ) -> None:
        self.config = config
        self.encoder = ObservationEncoder(space)
        self.shapes: Shapes = {}
        self.values_per_observation = self.encoder.features
        # Workspaces that no pass uses.
        self._workspaces = list[Workspace]()
        # Names and strides of the convolutions of each image.
        self._images = list[list[tuple[str, int]]]()
        features = self.encoder.features
        for number, image in enumerate(self.encoder.images):
            layers, size = self._add_image(number, image)
            self._images.append(layers)
            features += size
        # Each layer maps one of `sizes` to the next, by a weight `[in, out]`.
        sizes = (features, *config.hidden, outputs)
        self._layers = [f"hidden{depth}" for depth in range(len(config.hidden))]
        self._layers.append("output")
        for name, (fan_in, fan_out) in zip(self._layers, pairwise(sizes), strict=True):
            self.shapes[f"{name}.weight"] = (fan_in, fan_out)
            self.shapes[f"{name}.bias"] = (fan_out,)
        # The forward pass keeps the values, the backward pass their gradients.
        self.values_per_observation += 2 * sum(sizes)

    def _add_image(self, number: int, image: Image) -> tuple[list[tuple[str, int]], int]:
        """Add one image's convolutions to `shapes`.

        Return their names, strides and number of features.
        """
        convolutions = self.config.convolutions
        if convolutions is None:
            if min(image[1:]) >= MIN_NATURE_SIDE:
                convolutions = NATURE
            else:
                convolutions = SMALL
        layers = []
        width, *sides = image
        self.values_per_observation += 2 * math.prod(image)
        for depth, (channels, kernel, stride) in enumerate(convolutions):
            if min(sides) < kernel:
                raise ValueError(
                    f"convolutions {convolutions} do not fit an image of {image} (channels, height,"
                    f" width): layer {depth} has a kernel of {kernel}, but its input is {sides}."
                    " Set NetworkConfig(convolutions=...)."
                )
            name = f"image{number}.layer{depth}"
            # Parameters, then size of the output without padding.
            self.shapes[f"{name}.weight"] = (channels, width, kernel, kernel)
            self.shapes[f"{name}.bias"] = (channels,)
            layers.append((name, stride))
            width = channels
            sides = [(side - kernel) // stride + 1 for side in sides]
            self.values_per_observation += 2 * width * math.prod(sides)
        return layers, width * math.prod(sides)

    def initial_parameters(self, seed: int) -> Parameters:
        """Return orthogonal weights of gain sqrt(2) (0.01 for the output) and biases of 0.

        Each layer has its own random stream, so architectures with the same layer start with the
        same weights in it.
        """
        parameters = {}
        for name, shape in self.shapes.items():
            if name.endswith(".bias"):
                parameters[name] = torch.zeros(shape)
            else:
                # A small output layer makes the first policy nearly uniform.
                rng = generator(seed, f"init {name}")
                gain = 0.01 if name == "output.weight" else 2**0.5
                matrix = orthogonal(rng, shape[0], math.prod(shape[1:]))
                parameters[name] = gain * matrix.reshape(shape)
        return parameters

    def __call__(self, parameters: Parameters, observations: Any) -> Tensor:
        """Return outputs `[q, w, o]` for observations `[q, w, ...]`, without gradient."""
        workspace = self._take_workspace()
        with torch.no_grad():
            features = self._features(parameters, observations)
            _, outputs = self._run(parameters, features, workspace)
        self._workspaces.append(workspace)
        return outputs

    def _take_workspace(self) -> Workspace:
        """Return a workspace that no other pass uses; append it to `_workspaces` after the pass."""
        if self._workspaces:
            return self._workspaces.pop()
        return Workspace()

    def vjp(self, parameters: Parameters, observations: Any) -> tuple[Tensor, AddGradients]:
        """Return outputs and a function that adds the gradients, to be called at most once."""
        # 1. Features. Autograd computes the gradients of convolutions, whose parameters are leaves;
        #    the other layers are differentiated below.
        leaves = {}
        for image in self._images:
            for layer, _ in image:
                for name in (f"{layer}.weight", f"{layer}.bias"):
                    leaves[name] = parameters[name].detach().requires_grad_()
        with torch.set_grad_enabled(bool(leaves)):
            features = self._features(parameters | leaves, observations)
        # 2. Layers.
        workspace = self._take_workspace()
        values, outputs = self._run(parameters, features.detach(), workspace)

        def add(grad: Tensor, gradients: Parameters) -> None:
            """Add the gradients of all parameters to `gradients`."""
            # 3. Backward through the layers, y = x W + b: dW = x^T dy, db = sum of dy, dx = dy W^T.
            #    The rounding of a product does not depend on the number of members, that of a sum
            #    does.
            ones = grad.new_ones(len(grad), 1, grad.shape[1])
            for number in reversed(range(len(values))):
                name = self._layers[number]
                x = values[number]  # [q, w, in]
                gradients[f"{name}.weight"].baddbmm_(x.transpose(1, 2), grad)
                gradients[f"{name}.bias"][:, None].baddbmm_(ones, grad)
                # Without convolutions, the features need no gradient.
                if number or leaves:
                    weight = parameters[f"{name}.weight"]
                    out = workspace.take(f"grad {number}", tuple(x.shape), grad)
                    grad = torch.bmm(grad, weight.transpose(1, 2), out=out)
                if number:
                    grad = DERIVATIVES[self.config.activation](grad, x)
            self._workspaces.append(workspace)
            # 4. Convolutions.
            if leaves:
                grads = torch.autograd.grad(features, list(leaves.values()), grad)
                for name, each in zip(leaves, grads, strict=True):
                    gradients[name] += each

        return outputs, add

    def differentiable(self, parameters: Parameters, observations: Any) -> Tensor:
        """Return outputs `[q, w, o]` without in-place operations, as `torch.export` needs."""
        # The same layers as `_run`.
        activate = getattr(torch.nn.functional, self.config.activation)
        values = self._features(parameters, observations)
        for name in self._layers:
            bias = parameters[f"{name}.bias"][:, None]
            values = torch.baddbmm(bias, values, parameters[f"{name}.weight"])
            if name != "output":
                values = activate(values)
        return values

    def outputs_in_numpy(
        self, parameters: Mapping[str, Float32Array], features: Float32Array
    ) -> Float32Array:
        """Return outputs `[q, w, o]` for features `[q, w, f]`, in numpy.

        Measured with 8 members, 32 rows each and two layers of 64: 40 microseconds; 105 in torch,
        mostly for its tanh.
        """
        workspace = self._take_workspace()
        values = features
        for name in self._layers[:-1]:
            weight = parameters[f"{name}.weight"]
            shape = (*values.shape[:2], weight.shape[2])
            hidden = workspace.take(name, shape, _NUMBERS)
            values = np.matmul(values, weight, out=hidden.numpy())
            values += parameters[f"{name}.bias"][:, None]
            # `values` is a view of it.
            self._activate(hidden)
        outputs: Float32Array = np.matmul(values, parameters["output.weight"])
        outputs += parameters["output.bias"][:, None]
        self._workspaces.append(workspace)
        return outputs

    def _features(self, parameters: Parameters, observations: Any) -> Tensor:
        """Return features `[q, w, f]`, including those of images."""
        # 1. Encode all observations in one call.
        first_leaf = flatten(self.encoder.space, observations)[0]
        lead = first_leaf.shape[:2]
        rows = map_tensors(observations, lambda leaf: leaf.flatten(0, 1))
        vector, images = self.encoder(rows, parameters["output.bias"].device)
        parts: list[Tensor] = []
        if vector is not None:
            parts.append(vector.unflatten(0, lead))
        # 2. Convolutions, member by member: with 8 members and 32 images of 84 x 84 x 4 each,
        #    forward and backward take 88 ms; with one grouped convolution or `torch.func.vmap`
        #    116 ms.
        for layers, image in zip(self._images, images, strict=True):
            features = []
            for row, pixels in enumerate(image.unflatten(0, lead)):
                values = pixels
                for name, stride in layers:
                    weight = parameters[f"{name}.weight"][row]
                    bias = parameters[f"{name}.bias"][row]
                    values = conv2d(values, weight, bias, stride).relu()
                features.append(values.flatten(1))
            parts.append(torch.stack(features))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=2)

    def _run(
        self, parameters: Parameters, features: Tensor, workspace: Workspace
    ) -> tuple[list[Tensor], Tensor]:
        """Return the inputs of each layer, and the outputs `[q, w, o]`."""
        # The backward pass needs the inputs of all layers; they stay in the workspace.
        inputs = []
        values = features
        for name in self._layers[:-1]:
            inputs.append(values)
            weight = parameters[f"{name}.weight"]
            bias = parameters[f"{name}.bias"][:, None]
            shape = (*features.shape[:2], weight.shape[2])
            hidden = workspace.take(name, shape, features)
            values = torch.baddbmm(bias, values, weight, out=hidden)
            self._activate(values)
        inputs.append(values)
        bias = parameters["output.bias"][:, None]
        return inputs, torch.baddbmm(bias, values, parameters["output.weight"])

    def _activate(self, hidden: Tensor) -> None:
        """Apply the activation function in place."""
        if self.config.activation == "tanh" and hidden.device.type == "cpu":
            array = hidden.numpy()
            # This tanh is ten times as fast as torch's.
            np.tanh(array, out=array)
        else:
            ACTIVATE[self.config.activation](hidden)


_CHECKED_ROWS = 64
"""Rows for which a user's module is checked: in some modules, a row depends on others in larger
batches only.
"""


class ModuleNetwork:
    """A user's module, called once per member with that member's parameters.

    N members take N forward passes; `torch.func.vmap` measured no faster and does not support
    branches on values. The module is copied in evaluation mode, so dropout is off. Buffers, and
    parameters that require no gradient, are shared by all members. Members start from the module's
    weights.

    Args:
        module: Differentiable function of observations from `evogrpo.spaces.preprocess_observation`
            that returns `[batch, outputs]`. It computes each row from one observation, without
            randomness, and keeps its buffers.
        space: Observation space.
        outputs: Required number of outputs.
        device: Device of the copy.

    Attributes:
        module: The copy, with the weights that members start from.
        name: Name of the module's class.

    Raises:
        ValueError: If the space is not supported, or the module has no parameters or is not such a
            function.
    """

    # Unknown; this guess allows a few thousand observations per pass.
    values_per_observation = 1 << 14

    def __init__(
        self,
        module: nn.Module,
        space: spaces.Space[Any] | None,
        outputs: int,
        device: torch.device | str = "cpu",
    ) -> None:
        # 1. Copy the module, and collect the parameters that members train. The constructor of the
        #    encoder raises an error if the space is not supported.
        ObservationEncoder(space)
        assert space is not None
        self.module = deepcopy(module).to(device).eval()
        self._space = space
        self.name = type(module).__qualname__
        self._initial = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                self._initial[name] = parameter.detach().float()
        if not self._initial:
            raise ValueError(
                f"actor_network must have parameters that require a gradient, got {self.name}"
                " without any. Call requires_grad_() on it, or add layers."
            )
        self.shapes: Shapes = {name: tuple(value.shape) for name, value in self._initial.items()}
        # 2. Run it on two observations (zeros and ones, or the first values of discrete spaces),
        #    then on many rows, of which only the last one is the second observation: outputs of the
        #    same observation must be equal.
        parts = []
        for leaf in leaf_spaces(space):
            # Number of values of each entry; a Box or bits have at least two.
            if isinstance(leaf, spaces.Discrete):
                counts = leaf.n
            else:
                counts = getattr(leaf, "nvec", 2)
            start = getattr(leaf, "start", 0)
            first = np.full(leaf.shape or (), start, leaf.dtype)
            # The next value, except where an entry has only one.
            second = first + np.where(np.asarray(counts) > 1, 1, 0)
            parts.append(np.stack([first, second]).astype(leaf.dtype))
        buffers = {name: value.clone() for name, value in self.module.named_buffers()}
        weights = {name: value.clone().requires_grad_() for name, value in self._initial.items()}
        rows = [0] * (_CHECKED_ROWS - 1) + [1]
        many = [part[rows] for part in parts]
        try:
            with torch.enable_grad():
                output = self._member(weights, unflatten(space, parts))
                again = self._member(weights, unflatten(space, many))
        except Exception as error:
            raise ValueError(
                f"actor_network must accept float32 observations {describe_input(space)} for any n,"
                f" and return [n, {outputs}], but {self.name} raised {class_name(error)}:"
                f" {one_line(error)}"
            ) from error
        # 3. Check its outputs: shape and gradient.
        if tuple(output.shape) != (2, outputs):
            raise ValueError(
                f"actor_network must return [n, {outputs}] for this action space, but {self.name}"
                f" returned {list(output.shape)} for n = 2 observations {describe_input(space)}."
                " Match its last layer."
            )
        if not output.requires_grad:
            raise ValueError(
                f"actor_network must be differentiable, but the output of {self.name} requires no"
                " gradient. Remove no_grad and detach from its forward."
            )
        # 4. Check that the output of a row depends on its observation only.
        after = dict(self.module.named_buffers())
        changed = []
        for name, value in buffers.items():
            if not torch.equal(value, after[name]):
                changed.append(name)
        if changed:
            raise ValueError(
                "actor_network must not change its buffers, as all members share them, but"
                f" {self.name} changed {changed}. Remove the change from its forward."
            )
        # Rows of the same two observations, among many.
        repeated = again[[0, -1]]
        if not torch.allclose(output, repeated, rtol=1e-4, atol=1e-5, equal_nan=True):
            raise ValueError(
                "actor_network must compute each row from one observation, without randomness, but"
                f" two outputs of {self.name} for the same observation differ. Change its forward."
            )
        # 5. Warn if the outputs look like probabilities.
        first_row = output.detach()[0]
        sums_to_1 = math.isclose(float(first_row.sum()), 1.0, abs_tol=1e-5)
        if outputs > 1 and sums_to_1 and bool((first_row >= 0).all()):
            warn(
                f"{self.name} returns probabilities, but its outputs are used as logits. Remove the"
                " softmax at its end."
            )

    def initial_parameters(self, seed: int) -> Parameters:
        """Return copies of the module's parameters; the seed has no effect."""
        return {name: value.clone() for name, value in self._initial.items()}

    def __call__(self, parameters: Parameters, observations: Any) -> Tensor:
        """Return outputs `[q, w, o]` for observations `[q, w, ...]`, without gradient."""
        with torch.no_grad():
            return self._stacked(parameters, observations)

    def vjp(self, parameters: Parameters, observations: Any) -> tuple[Tensor, AddGradients]:
        """Return outputs and a function that adds the gradients, to be called at most once."""
        # Autograd computes the gradients with respect to leaves, which share the weights' memory.
        leaves = {name: parameters[name].detach().requires_grad_() for name in self.shapes}
        with torch.enable_grad():
            outputs = self._stacked(leaves, observations)

        def add(grad: Tensor, gradients: Parameters) -> None:
            """Add the gradients of all parameters to `gradients`."""
            inputs = list(leaves.values())
            grads = torch.autograd.grad(outputs, inputs, grad, materialize_grads=True)
            for name, values in zip(leaves, grads, strict=True):
                gradients[name] += values

        return outputs.detach(), add

    def _stacked(self, parameters: Parameters, observations: Any) -> Tensor:
        """Return the outputs of all members, `[members, ...]`, one after the other."""
        # Any leaf has one entry for each member.
        members = len(flatten(self._space, observations)[0])
        outputs = []
        for row in range(members):
            own_parameters = {name: parameters[name][row] for name in self.shapes}
            own_observations = map_tensors(observations, itemgetter(row))
            outputs.append(self._member(own_parameters, own_observations))
        return torch.stack(outputs)

    def _member(self, parameters: Parameters, observations: Any) -> Tensor:
        """Return the outputs of one member, float32."""
        device = next(iter(parameters.values())).device
        inputs = preprocess_observation(observations, self._space, device)
        outputs: Tensor = functional_call(self.module, parameters, (inputs,))
        if not isinstance(outputs, Tensor):
            raise TypeError(f"The module must return a tensor, got {class_name(outputs)}.")
        return outputs.float()


Network = DefaultNetwork | ModuleNetwork
"""A function of parameters and observations, for several members at once."""
