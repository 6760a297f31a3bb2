"""Dimensions of spaces and preprocessing of observations."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo.spaces import action_dim, observation_dim, preprocess_observation

BOX = spaces.Box(-1.0, 1.0, (2, 3))
SPACES = [
    BOX,
    spaces.Box(0, 255, (4, 4, 3), dtype=np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    spaces.Dict({"a": spaces.Discrete(2), "b": BOX}),
    spaces.Tuple((spaces.Discrete(2), spaces.Dict({"c": spaces.MultiBinary(2)}))),
]


@pytest.mark.parametrize(
    ("space", "observed", "acted"),
    [
        (BOX, (2, 3), 6),
        (spaces.Box(0, 1, ()), (), 1),
        (spaces.Discrete(5), (5,), 5),
        (spaces.MultiDiscrete([2, 3]), (5,), 5),
        (spaces.MultiBinary([2, 2]), (4,), 4),
        (spaces.Sequence(spaces.Discrete(7)), (7,), 7),
        (
            spaces.Dict({"a": spaces.Discrete(2), "b": BOX}),
            {"a": (2,), "b": (2, 3)},
            {"a": 2, "b": 6},
        ),
        (spaces.Tuple((spaces.Discrete(2), BOX)), ((2,), (2, 3)), (2, 6)),
        ([spaces.Discrete(2), spaces.Discrete(3)], ((2,), (3,)), (2, 3)),
    ],
)
def test_dimensions_of_observations_and_actions(space, observed, acted):
    assert observation_dim(space) == observed
    assert action_dim(space) == acted


def shapes(tree):
    if isinstance(tree, dict):
        return {key: shapes(part) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(shapes(part) for part in tree)
    return tuple(tree.shape[1:])


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_preprocessed_observation_has_the_declared_dimension(space):
    space.seed(0)
    assert shapes(preprocess_observation(space.sample(), space)) == observation_dim(space)


@pytest.mark.parametrize(
    "space",
    [space for space in SPACES if not isinstance(space, spaces.Dict | spaces.Tuple)],
    ids=str,
)
def test_a_batch_equals_its_rows(space):
    space.seed(0)
    rows = [space.sample() for _ in range(4)]
    batch = preprocess_observation(np.stack(rows), space)
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.cat([preprocess_observation(row, space) for row in rows]))


def test_observations_become_one_hot_vectors_or_floats():
    assert preprocess_observation(-1, spaces.Discrete(3, start=-2)).tolist() == [[0, 1, 0]]
    assert preprocess_observation(torch.tensor([1, 0]), spaces.Discrete(2)).tolist() == [
        [0, 1],
        [1, 0],
    ]
    assert preprocess_observation([1, 2], spaces.MultiDiscrete([2, 3])).tolist() == [
        [0, 1, 0, 0, 1]
    ]
    assert preprocess_observation([1, 0, 1], spaces.MultiBinary(3)).tolist() == [[1, 0, 1]]
    assert preprocess_observation([[255]], spaces.Box(0, 255, (1, 1), dtype=np.uint8)).tolist() == [
        [[255.0]]
    ]
    tree = preprocess_observation({"a": 1, "b": np.zeros((2, 3))}, SPACES[8])
    assert tree["a"].tolist() == [[0, 1]]
    assert tree["b"].shape == (1, 2, 3)


@pytest.mark.parametrize("space", [None, spaces.Text(3), spaces.Graph(BOX, None)])
def test_unsupported_spaces_are_refused(space):
    for function in (observation_dim, action_dim, lambda space: preprocess_observation(0, space)):
        with pytest.raises(ValueError, match=r"space is None|must be Box.*got (Text|Graph)"):
            function(space)


@pytest.mark.parametrize(
    ("observation", "space", "message"),
    [
        (np.zeros((3, 2)), BOX, r"shape \(2, 3\) .*got \(3, 2\)"),
        (np.zeros((1, 1, 2, 3)), BOX, "got"),
        (5, spaces.Discrete(5), r"\[0, 4\], got 5"),
        (-3, spaces.Discrete(5, start=-2), r"\[-2, 2\], got -3"),
        ([1, 3], spaces.MultiDiscrete([2, 3]), r"\[0, 2\], got 3"),
        ({"a": 1}, SPACES[8], r"keys \['a', 'b'\], got \['a'\]"),
        (3, SPACES[8], "got int"),
        ((1,), SPACES[9], "sequence of 2 parts"),
    ],
)
def test_invalid_observations_are_refused(observation, space, message):
    with pytest.raises(ValueError, match=message):
        preprocess_observation(observation, space)
