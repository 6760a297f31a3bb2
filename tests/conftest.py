"""Settings of the whole suite: no network, one thread, and property tests that are the same on every run."""

import os

# Before anything imports torch or transformers.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models spend longer waking threads than computing

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what `make test-cpus` varies and no environment variable does."""
    parser.addoption("--no-mkldnn", action="store_true", help="compute without oneDNN's kernels")


def pytest_configure(config: pytest.Config) -> None:
    """Set what the options ask for, before any test computes."""
    if config.getoption("--no-mkldnn"):
        import torch

        torch.backends.mkldnn.enabled = False
