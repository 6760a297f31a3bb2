"""Settings of the whole suite: no network, one thread, and property tests that are the same on every run."""

import gc
import os
import signal
from collections.abc import Iterator

# Before anything imports torch or transformers.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models spend longer waking threads than computing

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare how a CPU may compute otherwise that no environment variable says."""
    parser.addoption("--no-mkldnn", action="store_true", help="compute without oneDNN's kernels")
    parser.addoption("--round-otherwise", type=int, help="round matrix products as CPU number so-and-so might")


def pytest_configure(config: pytest.Config) -> None:
    """Set what the options ask for, before any test computes, and let Ctrl-C interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs in the background ignore it
    if config.getoption("--no-mkldnn"):
        import torch

        torch.backends.mkldnn.enabled = False


def pytest_collection_finish() -> None:
    """Leave alone what all modules have brought: every full garbage collection would look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")  # what tests share is computed like what they compare with it
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let every test round as it was asked to."""
    seed = request.config.getoption("--round-otherwise")
    if seed is None:
        yield
        return
    from tests.rounding import rounding_otherwise

    with rounding_otherwise(seed):
        yield
