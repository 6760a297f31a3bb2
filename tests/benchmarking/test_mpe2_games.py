"""The benchmark of MPE2's games: all pairs play from the same starts."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mpe2")


@pytest.fixture
def games(monkeypatch):
    folder = Path(__file__).parents[2] / "benchmarking"
    monkeypatch.syspath_prepend(str(folder))
    for name in ("mpe2_games", "simple_spread"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import mpe2_games

    monkeypatch.setattr(mpe2_games, "TEST_STARTS", 4)
    tiny = {name: dataclasses.replace(game, joint_steps=1600) for name, game in mpe2_games.GAMES.items()}
    monkeypatch.setattr(mpe2_games, "GAMES", tiny)
    return mpe2_games


def test_all_pairs_play_and_no_training_is_repeated(games, tmp_path, monkeypatch):
    found = games.run("adversary", 0, tmp_path)
    assert set(found) == {f"{one} against {other}" for one in games.METHODS for other in games.METHODS}
    assert np.isfinite(list(found.values())).all()
    for name in ("train_grpo", "train_ppo", "measure"):
        monkeypatch.setattr(games, name, lambda *_: pytest.fail("it was done again"))
    assert games.run("adversary", 0, tmp_path) == found
    assert "| grpo |" in games.table("adversary", {0: found})


def test_a_cell_is_a_mean_with_its_standard_error(games):
    assert games.cell([3.0]) == "3.0"
    assert games.cell([1.0, 2.0, 6.0]) == "3.0 ± 1.5"  # sqrt(7) / sqrt(3)
