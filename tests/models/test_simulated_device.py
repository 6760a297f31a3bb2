"""Accelerator tests run on a simulated device if there is no GPU, to find mixed devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

ROOT = Path(__file__).parents[2]
SELECTIONS = [
    ("separate or devices_agree and some", 2),
    pytest.param("waves or separate or devices_agree", 10, marks=pytest.mark.slow),
]
PROGRAM = """
import sys

import pytest
import torch

from tests import simulated_device

simulated_device.pytest_configure()
there, here = torch.ones(2, device="simulated"), torch.ones(2)
package = {"__name__": "evogrpo.somewhere", "torch": torch, "there": there, "here": here}
for refused in ("there + here", "torch.cat([here, there])", "here[there.long()]", "torch.where(there > 0, here, 0.0)"):
    with pytest.raises(RuntimeError, match="on the same device, found simulated:0 and cpu"):
        eval(refused, package)
with pytest.raises(TypeError, match=r"Use Tensor\\.cpu\\(\\) first"):
    there.numpy()
for allowed in ("there + 1.0", "there[here.long() - 1]", "there.cpu() + here", "there + here.to(there)"):
    eval(allowed, package)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="devices that are written in Python came with a later torch",
)
@pytest.mark.parametrize(("selection", "count"), SELECTIONS)
def test_accelerator_tests_pass_on_a_simulated_device(selection, count):
    files = [f"tests/models/test_{name}.py" for name in ("devices", "sampling", "stacked_bank")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", "-k", f"simulated and ({selection})", *files],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} passed" in done.stdout
