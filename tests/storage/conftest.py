"""One small checkpoint of every kind of tensor and file."""

import pytest
import torch

from evogrpo.storage.checkpoint import write_checkpoint

TENSORS = {
    "weights": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
    "moments": torch.tensor([1.5, -2.25, 3e38], dtype=torch.bfloat16),
    "steps": torch.tensor(17),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}
RECORD = {"generation": 3, "members": [{"lr": 1e-4, "failed": None, "name": "é\u2028\x1b"}], "big": 2**70}
FILES = {"adapter_config.json": b'{"r": 8}\n', "adapter_model.safetensors": bytes(range(256)) * 5}
ALL_FILES = ["population.safetensors", "population.json", "manifest.json", *FILES]


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "generation-0003", TENSORS, RECORD, files=FILES)
    return tmp_path / "generation-0003"
