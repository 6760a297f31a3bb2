"""The soak test: its counts and findings."""

import shutil

import pytest

from benchmarking.soaking import world
from benchmarking.soaking.trials import TRIALS, Soak
from evogrpo.randomness import generator


@pytest.fixture(scope="module")
def soak(tmp_path_factory):
    world.SEEDS = 1
    return Soak(tmp_path_factory.mktemp("soak"))


@pytest.mark.parametrize("kind", [pytest.param("kill", marks=pytest.mark.slow), "journal"])
def test_a_trial_is_counted_and_removed(soak, kind):
    soak.try_once(kind, 0, generator(0, "soak", 2))  # which is one kill
    assert soak.failures == []
    assert soak.counts[f"trials: {kind}"] == 1
    assert not (soak.folder / "trial-0").exists()


def test_a_different_outcome_is_recorded(soak, monkeypatch):
    def copied(soak, place, seed, rng):
        shutil.copytree(soak.finished[seed], place)
        soak.finish(place, seed)

    monkeypatch.setitem(TRIALS, "journal", copied)
    soak.try_once("journal", 1, generator(0, "soak", 1))
    assert soak.failures == []
    monkeypatch.setattr(world, "outcome", lambda folder: "another")
    soak.try_once("journal", 2, generator(0, "soak", 2))
    (failure,) = soak.failures
    assert "trial 2 (journal, seed 0)" in failure
    assert "the outcome differs from that of the undisturbed run" in failure
    assert (soak.folder / "trial-2").exists()  # kept for inspection
