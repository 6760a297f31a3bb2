"""Accelerator tests run on a simulated device if there is no GPU, to find mixed devices."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from tests.forking import Forked

ROOT = Path(__file__).parents[2]
FILES = [f"tests/members/test_{name}.py" for name in ("devices", "sampling", "stacked_bank")]
SELECTIONS = [
    ("separate or devices_agree and some or free_memory", 4),
    pytest.param(
        "or_batches or separate or devices_agree or free_memory or kernels",
        13,
        marks=pytest.mark.slow,
    ),
]


def run_on_simulated_device(*arguments):
    """Run pytest on the simulated device, after a check that it refuses to mix with the CPU."""
    from tests import simulated_device

    simulated_device.pytest_configure()
    there = torch.ones(2, device=simulated_device.NAME)
    here = torch.ones(2)
    package = {"__name__": "evogrpo.somewhere", "torch": torch, "there": there, "here": here}
    for mixed in (
        "there + here",
        "torch.cat([here, there])",
        "here[there.long()]",
        "torch.where(there > 0, here, 0.0)",
    ):
        with pytest.raises(RuntimeError, match="on the same device, found simulated:0 and cpu"):
            eval(mixed, package)  # noqa: S307
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\) first"):
        there.numpy()
    for allowed in (
        "there + 1.0",
        "there[here.long() - 1]",
        "there.cpu() + here",
        "there + here.to(there)",
    ):
        eval(allowed, package)  # noqa: S307
    sys.exit(pytest.main(list(arguments)))


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="devices that are written in Python came with a later torch",
)
@pytest.mark.parametrize(("selection", "count"), SELECTIONS)
def test_accelerator_tests_pass_on_a_simulated_device(selection, count):
    words = ("-q", "-p", "no:cacheprovider", "-k", f"simulated and ({selection})", *FILES)
    process = Forked(run_on_simulated_device, *words, cwd=ROOT)
    output, errors = process.communicate(400)
    assert process.returncode == 0, output + errors
    assert f"{count} passed" in output
