"""Fixtures of the tests of models."""

import pytest


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset EVOGRPO_SLOW, which disables fast_llama."""
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)
