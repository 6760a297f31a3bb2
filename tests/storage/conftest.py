"""One small checkpoint of every kind of tensor and file."""

import json

import pytest
import torch

from evogrpo.storage.checkpoint import write_checkpoint

TENSORS = {
    "weights": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
    "moments": torch.tensor([1.5, -2.25, 3e38], dtype=torch.bfloat16),
    "steps": torch.tensor(17),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "double": torch.tensor([float("nan"), float("-inf"), -0.0], dtype=torch.float64),
    "half": torch.tensor([0.1], dtype=torch.float16),
    "bytes": torch.arange(256, dtype=torch.uint8),
}
RECORD = {
    "generation": 3,
    "members": [{"lr": 1e-4, "failed": None, "name": "é\u2028\x1b"}],
    "big": 2**70,
}
FILES = {"adapter_config.json": b'{"r": 8}\n', "adapter_model.safetensors": bytes(range(256)) * 5}
ALL_FILES = ["population.safetensors", "population.json", "manifest.json", *FILES]


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "generation-0003", TENSORS, RECORD, files=FILES)
    return tmp_path / "generation-0003"


def rewrite_manifest(folder, **changes):
    """Change the manifest, as a forger could, and keep it well-formed."""
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
