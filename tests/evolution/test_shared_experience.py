"""Settings of shared experience."""

import math

import pytest

from evogrpo.evolution import SharedExperience
from evogrpo.evolution.shared_experience import shared_experience
from evogrpo.validation import dump


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"least": 3}, "least"),
        ({"min_ess": 1.0}, r"min_ess must be below 1"),
        ({"min_ess": math.nan}, "must be finite"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        shared_experience(settings)
    with pytest.raises(ValueError, match="experience"):
        shared_experience("alone")


def test_names_and_settings_are_equivalent():
    assert shared_experience("own") is shared_experience(None) is None
    assert shared_experience("shared") == shared_experience({}) == SharedExperience()
    assert (
        dump(shared_experience(SharedExperience(min_ess=0.3)))
        == {"min_ess": 0.3}
        == dump(shared_experience({"min_ess": 0.3}))
    )
