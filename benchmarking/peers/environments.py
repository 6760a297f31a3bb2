"""Virtual environments of the peers, with the releases that each was made for."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

# AgileRL's documentation installs the `cpu-llm` extra for language models on a machine without an
# accelerator.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "trl": ("trl==1.16.0", "transformers==5.23.0", "peft==0.21.2"),
    "agilerl": ("agilerl[cpu-llm]==2.58.0",),
    "sb3": ("stable-baselines3==2.9.2", "gymnasium[box2d]==1.4.0"),
}


def torch_pin(constraints: Path) -> str:
    """Return the line of a constraints file that pins torch, e.g. "torch==2.13.0".

    Only torch is held equal between the systems: a peer may need another transformers than ours.

    Raises:
        ValueError: If the file pins no torch.
    """
    for line in constraints.read_text(encoding="utf-8").splitlines():
        pin = line.partition("#")[0].strip()
        if pin.startswith("torch=="):
            return pin
    raise ValueError(
        f"{constraints} must pin torch for every system to run on the same one: add"
        " 'torch==VERSION'"
    )


def install(system: str, cache: Path, constraints: Path) -> Path:
    """Create a peer's environment, or reuse one with the same requirements.

    Args:
        system: A key of `REQUIREMENTS`.
        cache: Folder that holds the environments.
        constraints: A pip constraints file, of which the line that pins torch is used.

    Returns:
        The environment's Python.

    Raises:
        ValueError: If the constraints pin no torch.
        subprocess.CalledProcessError: If pip fails; its own message is on the terminal.
    """
    folder = cache / system
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pin = torch_pin(constraints)
    wanted = "\n".join((sys.version, pin, *REQUIREMENTS[system])) + "\n"
    stamp = folder / "requirements.stamp"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"installing {' '.join(REQUIREMENTS[system])} with {pin} into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    own_constraints = folder / "constraints.txt"
    own_constraints.write_text(pin + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--constraint", str(own_constraints), pin, *REQUIREMENTS[system]], check=True
    )
    stamp.write_text(wanted, encoding="utf-8")
    return python
