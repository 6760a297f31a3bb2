"""Small networks: initial weights, observations, convolutions against torch, user modules."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from evogrpo.config.network import NetworkConfig
from evogrpo.members.networks.bank import StackedBank
from evogrpo.members.networks.networks import DefaultNetwork, ModuleNetwork, ObservationEncoder
from evogrpo.records import map_tensors
from tests.tiny_networks import MIXED, VECTOR, Branching, observe, stacked, tensors


def image(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


def sample_weights(space, count, seed=0):
    rng = np.random.default_rng(seed)
    return stacked([observe(space, rng) for _ in range(count)])


def test_initial_weights_are_orthogonal_and_biases_zero():
    network = DefaultNetwork(NetworkConfig(hidden=(16, 12)), image(12, 12, 3), 4)
    parameters = network.initial_parameters(0)
    for name, value in parameters.items():
        if name.endswith(".bias"):
            assert not value.any()
            continue
        rows = value.flatten(1) if value.ndim == 4 else value.T
        if rows.shape[0] <= rows.shape[1]:
            gram = rows @ rows.T
        else:
            gram = rows.T @ rows
        gain = 0.01 if name == "output.weight" else 2**0.5
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), rtol=1e-4, atol=1e-5)


def test_initial_weights_depend_on_seed_and_layer_only():
    one = StackedBank(VECTOR, spaces.Discrete(2), size=2, seed=3)
    same = StackedBank(VECTOR, spaces.Discrete(2), size=2, seed=3)
    other = StackedBank(VECTOR, spaces.Discrete(2), size=2, seed=4)
    assert torch.equal(one.state(0)["weights"], one.state(1)["weights"])
    assert torch.equal(one.state(0)["weights"], same.state(0)["weights"])
    assert not torch.equal(one.state(0)["weights"], other.state(0)["weights"])
    deep = DefaultNetwork(NetworkConfig(hidden=(8, 8, 8)), VECTOR, 2).initial_parameters(0)
    shallow = DefaultNetwork(NetworkConfig(hidden=(8, 8)), VECTOR, 2).initial_parameters(0)
    assert torch.equal(deep["hidden1.weight"], shallow["hidden1.weight"])


def test_parts_of_observations_are_concatenated():
    encoder = ObservationEncoder(MIXED)
    seen = {
        "camera": np.full((2, 7, 6, 2), 51, np.uint8),
        "where": (np.array([2, 4]), np.array([[1, 0], [0, 2]])),
        "flags": np.array([[1, 0], [1, 1]], np.int8),
        "speed": np.array([[0.5, -0.5], [1.0, 0.0]]),
    }
    vector, (camera,) = encoder(seen, "cpu")
    # In the space's own order: flags, speed, where (a Dict sorts its keys).
    assert vector.tolist() == [
        [1, 0, 0.5, -0.5, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1.0, 0.0, 0, 0, 1, 1, 0, 0, 0, 1],
    ]
    assert encoder.features == 12
    assert encoder.images == [(2, 7, 6)]
    torch.testing.assert_close(camera, torch.full((2, 2, 7, 6), 0.2))


@pytest.mark.parametrize(
    ("space", "expected"),
    [(image(5, 7, 3), (3, 5, 7)), (image(3, 5, 7), (3, 5, 7)), (image(5, 7), (1, 5, 7))],
)
def test_image_channels_come_first(space, expected):
    encoder = ObservationEncoder(space)
    seen = sample_weights(space, 4)
    vector, (pixels,) = encoder(seen, "cpu")
    assert vector is None
    assert encoder.images == [expected]
    assert tuple(pixels.shape[1:]) == expected
    if space.shape != (5, 7, 3):
        pixel = seen[2].reshape(expected)
    else:
        pixel = seen[2].transpose(2, 0, 1)
    np.testing.assert_allclose(pixels[2].numpy(), pixel / 255, rtol=1e-6)


@pytest.mark.parametrize("convolutions", [None, ((4, 3, 2), (5, 2, 1)), ()])
@pytest.mark.parametrize("side", [9, 40])
def test_convolutions_match_torch(side, convolutions):
    space = spaces.Dict({"eye": image(side, side, 3), "speed": VECTOR})
    network = DefaultNetwork(
        NetworkConfig(hidden=(6,), activation="elu", convolutions=convolutions), space, 2
    )
    members = []
    for seed in range(2):
        member = {}
        for name, value in network.initial_parameters(0).items():
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
            member[name] = value + 0.1 * noise
        members.append(member)
    stacked_parameters = {}
    for name in network.shapes:
        stacked_parameters[name] = torch.stack([member[name] for member in members])
    seen = tensors(sample_weights(space, 6), (2, 3))
    outputs = network(stacked_parameters, seen)
    recorded, _ = network.vjp(stacked_parameters, seen)
    assert torch.equal(outputs, recorded)
    strides = {None: {9: (1, 1), 40: (4, 2, 1)}[side], (): ()}.get(convolutions, (2, 1))
    for row, member in enumerate(members):
        values = seen["eye"][row].permute(0, 3, 1, 2) / 255
        for depth, stride in enumerate(strides):
            name = f"image0.layer{depth}"
            values = nn.functional.conv2d(
                values, member[f"{name}.weight"], member[f"{name}.bias"], stride
            ).relu()
        hidden = (
            torch.cat([seen["speed"][row], values.flatten(1)], 1) @ member["hidden0.weight"]
            + member["hidden0.bias"]
        )
        expected = nn.functional.elu(hidden) @ member["output.weight"] + member["output.bias"]
        torch.testing.assert_close(outputs[row], expected, rtol=1e-4, atol=1e-5)


def test_convolutions_larger_than_the_image_are_rejected():
    with pytest.raises(ValueError, match="convolutions"):
        DefaultNetwork(NetworkConfig(convolutions=((8, 5, 1),)), image(4, 4, 3), 2)


def test_user_module_is_copied():
    module = Branching(3, 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    bank = StackedBank(VECTOR, spaces.Discrete(4), size=2, network=module)
    state = bank.state(1)
    bank.load_state(1, state | {"weights": state["weights"] + 1})
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(
        bank.state(0)["weights"],
        torch.cat([value.detach().flatten() for value in module.parameters()]),
    )
    with torch.no_grad():
        for value in module.parameters():
            value.fill_(7.0)
    assert not (bank.state(0)["weights"] == 7.0).any()


def test_user_module_runs_without_dropout():
    module = Branching(3, 4)
    network = ModuleNetwork(module, VECTOR, 4)
    parameters = {
        name: torch.stack([value, 2 * value])
        for name, value in network.initial_parameters(0).items()
    }
    seen = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    outputs = network(parameters, seen)
    torch.testing.assert_close(outputs[0], module.eval()(seen[0]))
    with torch.no_grad():
        for value in module.parameters():
            value.mul_(2)
    torch.testing.assert_close(outputs[1], module(seen[1]))


def test_user_module_gets_composite_observations():
    seen_by_module = []

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, observations):
            seen_by_module.append(observations)
            return self.layer(observations["speed"])

    network = ModuleNetwork(Reading(), MIXED, 2)
    seen = tensors(sample_weights(MIXED, 3), (1, 3))
    network({name: value[None] for name, value in network.initial_parameters(0).items()}, seen)
    shapes = map_tensors(seen_by_module[-1], lambda leaf: torch.tensor(leaf.shape))
    assert shapes["camera"].tolist() == [3, 7, 6, 2]
    assert [part.tolist() for part in shapes["where"]] == [[3, 3], [3, 5]]
    assert float(seen_by_module[-1]["camera"].max()) > 1, "values are not rescaled"


class Scaled(nn.Module):
    """A layer whose outputs are multiplied by a scalar parameter, then changed by a function."""

    def __init__(self, change=lambda outputs, calls: outputs):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.change = change
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observations):
        return self.change(self.layer(observations) * self.scale, self.calls)


def test_user_module_may_have_a_parameter_without_dimensions():
    bank = StackedBank(VECTOR, spaces.Discrete(4), size=2, network=Scaled())
    state = bank.state(1)
    bank.load_state(
        1, state | {"weights": state["weights"].clone().index_fill_(0, torch.tensor(0), 6.0)}
    )
    seen = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(bank.outputs(1, seen), 3 * bank.outputs(0, seen))


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("differentiable", lambda outputs, calls: outputs.detach()),
        ("buffers", lambda outputs, calls: outputs + 0 * calls.add_(1)),
        ("randomness", lambda outputs, calls: outputs + torch.rand_like(outputs)),
        ("one observation", lambda outputs, calls: outputs - outputs.mean(0)),
        ("one observation", lambda outputs, calls: outputs - outputs.mean(0) * (len(outputs) > 8)),
        (r"\[n, 4\]", lambda outputs, calls: outputs.mean(0, keepdim=True)),
    ],
)
@pytest.mark.parametrize("space", [VECTOR, spaces.MultiBinary(3), spaces.Discrete(3, start=5)])
def test_modules_whose_rows_are_not_functions_of_one_observation_are_rejected(
    space, message, change
):
    ModuleNetwork(Scaled(), space, 4)
    with pytest.raises(ValueError, match=message):
        ModuleNetwork(Scaled(change), space, 4)


def test_unsuitable_modules_are_rejected():
    with pytest.raises(ValueError, match="actor_network"):
        StackedBank(VECTOR, spaces.Discrete(3), size=1, network=nn.Identity())
    with pytest.raises(ValueError, match=r"must return \[n, 5\]"):
        StackedBank(VECTOR, spaces.Discrete(5), size=1, network=nn.Linear(3, 4))
    with pytest.raises(ValueError, match="cannot change"):
        StackedBank(VECTOR, spaces.Discrete(4), size=1, network=nn.Linear(3, 4)).rebuild(
            0, NetworkConfig(), np.random.default_rng(0)
        )
