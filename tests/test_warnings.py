"""Warnings point at the line of the program that called the library."""

import warnings

import pytest
import torch

from evogrpo.distributed import processes
from evogrpo.warnings import warn


def test_warnings_point_at_the_caller():
    scope = {"__name__": "evogrpo.somewhere", "warn": warn, "torch": torch}
    program = (
        "@torch.no_grad()\ndef inner():\n    warn('look', category=FutureWarning)\n\n\ndef"
        " outer():\n    inner()"
    )
    exec(program, scope)  # noqa: S102
    with pytest.warns(FutureWarning, match="look") as caught:
        scope["outer"]()
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.parametrize(
    ("size", "rank", "expected"), [("2", "0", 1), ("2", "1", 0), ("1", "1", 1)]
)
def test_warnings_need_no_other_rank(monkeypatch, size, rank, expected):
    """Other ranks may not have started."""
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    processes.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn("what all come to")
            warn("what one finds", rank_zero_only=False)
        assert [str(each.message) for each in caught] == ["what all come to"] * expected + [
            "what one finds"
        ]
        assert not torch.distributed.is_initialized()
    finally:
        processes.cache_clear()
