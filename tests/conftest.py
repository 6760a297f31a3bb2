"""Settings of the test suite: no network, one thread, deterministic property tests."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Before torch or transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tiny models spend longer on waking threads than on computing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.stored_runs import StoredRun

pytest.register_assert_rewrite("tests.policy_banks")  # its assertions then show the compared values
settings.register_profile(  # a busy machine is not a fault
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options for CPU arithmetic that no environment variable selects."""
    parser.addoption("--no-mkldnn", action="store_true", help="compute without oneDNN's kernels")


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


@pytest.fixture(autouse=True)
def unseeded_torch() -> Iterator[None]:
    """Undo `torch.manual_seed` after a test: agents of later tests would warn of it."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.initial_seed() < 1 << 32:
        torch.seed()


@pytest.fixture
def without_charts() -> Iterator[None]:
    """Leave out the charts of reports, which take longer than the runs of tests.

    Tests/reporting draws them.
    """
    from tests.cli.project import charts_left_out

    with charts_left_out():
        yield


@pytest.fixture(scope="session")
def stored_language_run(tmp_path_factory: pytest.TempPathFactory) -> "StoredRun":
    """Return a finished run of a language model; tests do not change its folder."""
    from tests.stored_runs import stored_run

    return stored_run("language", tmp_path_factory.mktemp("language") / "run")


@pytest.fixture(scope="session")
def stored_network_run(tmp_path_factory: pytest.TempPathFactory) -> "StoredRun":
    """Return a finished run of small networks; tests do not change its folder."""
    from tests.stored_runs import stored_run

    return stored_run("networks", tmp_path_factory.mktemp("networks") / "run")


@pytest.fixture(scope="session")
def stored_team_run(tmp_path_factory: pytest.TempPathFactory) -> "StoredRun":
    """Return a finished run of several agents; tests do not change its folder."""
    from tests.stored_runs import stored_run

    return stored_run("team", tmp_path_factory.mktemp("team") / "run")


@pytest.fixture(scope="session", params=["language", "network", "team"])
def any_stored_run(request: pytest.FixtureRequest) -> "StoredRun":
    """Return a finished run of each kind."""
    return request.getfixturevalue(f"stored_{request.param}_run")
