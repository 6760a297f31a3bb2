"""Descriptions of networks, observations and actions."""

import re

import numpy as np
import pytest
from gymnasium import spaces

from evogrpo.models.networks.architecture import NetworkConfig
from evogrpo.models.networks.distributions import distribution_for
from evogrpo.models.networks.networks import DefaultNetwork, ModuleNetwork, ObservationEncoder
from tests.tiny_networks import CASES, MIXED, VECTOR, Branching

PICTURE = spaces.Box(0, 255, (96, 96, 3), np.uint8)
FOUND = spaces.Dict({"left": PICTURE, "right": spaces.Box(0, 255, (20, 24), np.uint8), "speed": VECTOR})


@pytest.mark.parametrize(
    ("space", "config", "words"),
    [
        (VECTOR, {}, "64-64 tanh"),
        (VECTOR, {"hidden": (5,), "activation": "relu"}, "5 relu"),
        (VECTOR, {"hidden": ()}, "linear"),
        (
            PICTURE,
            {"hidden": (7,)},
            "convolutions (32 of 8×8 stride 4, 64 of 4×4 stride 2, 64 of 3×3 stride 1), then 7 tanh",
        ),
        (PICTURE, {"hidden": (), "convolutions": ((4, 9, 3),)}, "convolutions (4 of 9×9 stride 3), then linear"),
        (
            FOUND,
            {"hidden": (8,)},
            "convolutions of left (32 of 8×8 stride 4, 64 of 4×4 stride 2, 64 of 3×3 stride 1), "
            "convolutions of right (16 of 3×3 stride 1, 32 of 3×3 stride 1), joined with 3 numbers, then 8 tanh",
        ),
    ],
)
def test_network_description_matches_parameters(space, config, words):
    network = DefaultNetwork(NetworkConfig(**config), space, 2)
    assert network.description == words
    filters = [(shape[0], shape[2]) for name, shape in network.shapes.items() if "layer" in name and len(shape) == 4]
    assert [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+)×", words)] == filters


def test_module_description():
    assert ModuleNetwork(Branching(3, 2), VECTOR, 2).description == "Branching, a module of your own"


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (VECTOR, "3 numbers"),
        (spaces.Box(-1, 1, (2, 3)), "6 numbers"),
        (spaces.Box(0, 255, (128,), np.uint8), "128 numbers, divided by 255"),
        (PICTURE, "an image of 96 × 96 with 3 channels"),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), "an image of 84 × 84 with 4 channels"),
        (spaces.Discrete(16), "one of 16, one-hot"),
        (
            MIXED,
            "camera: an image of 7 × 6 with 2 channels; flags: 2 bits; speed: 2 numbers; where.0: one of 3, one-hot; "
            "where.1: 2 choices, one-hot in 5 numbers; side by side",
        ),
    ],
)
def test_observation_description(space, words):
    assert ObservationEncoder(space).description == words


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Discrete(4, start=3), "one of 4, by a categorical distribution"),
        (spaces.MultiDiscrete([3, 2]), "2 choices among 3, 2, a categorical distribution each"),
        (spaces.MultiBinary(4), "4 bits, a Bernoulli distribution each"),
        (spaces.Box(-1, 1, (1,)), "1 real number, by a Gaussian"),
        (spaces.Box(-1, 1, (3,)), "3 real numbers, a Gaussian each"),
    ],
)
def test_action_description(space, words):
    assert distribution_for(space).description == words


def test_description_of_each_member():
    bank = CASES["architectures"].bank(3)
    assert [bank.description(slot) for slot in range(3)] == ["8-6 relu", "5 tanh", "8-6-6 elu"]
    assert CASES["module"].bank(1).description(0) == "Branching, a module of your own"
