"""Action noise by (row, step)."""

import numpy as np

from evogrpo.envs.control.conversion import ActionNoise
from evogrpo.randomness import generator


def table(draws, rows, t):
    return np.stack([draws((), np.arange(rows), np.full(rows, step)) for step in range(t)], axis=1)


def test_draws_equal_the_generators_numbers():
    draws = ActionNoise(5, "sample", streams=[(3, 0), (3, 1)], rows=[2, 4], width_of=lambda agent: 2)
    got = table(draws, 6, 64)
    expected = [generator(5, "sample", 3, i, 0).random((n, 64, 2), dtype=np.float32) for i, n in ((0, 2), (1, 4))]
    assert np.array_equal(got, np.concatenate(expected))


def test_draws_do_not_depend_on_order_repetition_or_other_rows():
    alone = table(ActionNoise(0, "x", streams=[(7,)], rows=[3], width_of=lambda agent: 1), 3, 300)
    draws = ActionNoise(0, "x", streams=[(2,), (7,)], rows=[5, 3], width_of=lambda agent: 1)
    for rows, t in (([7, 5, 6], [299, 0, 150]), ([6], [1]), ([5, 5], [64, 63]), ([7, 5, 6], [299, 0, 150])):
        assert np.array_equal(draws((), np.array(rows), np.array(t)), alone[np.array(rows) - 5, t])


def test_draws_are_uniform_and_distinct():
    got = table(ActionNoise(1, "x", streams=[(0,), (1,)], rows=[20, 20], width_of=lambda agent: 2), 40, 500)
    assert got.dtype == np.float32
    assert ((got >= 0) & (got < 1)).all()
    counts = np.histogram(got, 10, (0, 1))[0]
    assert (np.abs(counts - 4000) < 5 * np.sqrt(4000 * 0.9)).all()
    assert len({row.tobytes() for row in got.reshape(-1, 100)}) == 400
