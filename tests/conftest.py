"""Settings of the test suite: no network, one thread, deterministic property tests."""

import gc
import os
import signal
from collections.abc import Iterator

# Before torch or transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models spend longer on waking threads than on computing

import pytest
from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options for CPU arithmetic that no environment variable selects."""
    parser.addoption("--no-mkldnn", action="store_true", help="compute without oneDNN's kernels")
    parser.addoption("--round-otherwise", type=int, help="round matrix products as CPU number so-and-so might")


def pytest_configure(config: pytest.Config) -> None:
    """Apply the options, and let Ctrl-C interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for background jobs
    if config.getoption("--no-mkldnn"):
        import torch

        torch.backends.mkldnn.enabled = False


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which would scan them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")  # fixtures must round like the tests that use them
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Apply the selected rounding to all tests."""
    seed = request.config.getoption("--round-otherwise")
    if seed is None:
        yield
        return
    from tests.rounding import rounding_otherwise

    with rounding_otherwise(seed):
        yield
