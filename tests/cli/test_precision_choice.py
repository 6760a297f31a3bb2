"""The precision of the base model: chosen at the start, printed, recorded and kept on resume."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from evogrpo.cli import main
from evogrpo.members.language.loading import choose_precision, has_bfloat16_products
from evogrpo.training.start import read_run
from tests.cli.project import build
from tests.tiny_models import COMMON


@pytest.fixture(scope="module")
def trained_in_bfloat16(project, tmp_path_factory):
    """Train one generation in bfloat16; return the run directory, which tests do not change."""
    folder = tmp_path_factory.mktemp("precision") / "run"
    less = [
        "schedule.generations=1",
        "schedule.steps_per_generation=1",
        "population.size=2",
        "precision=bfloat16",
    ]
    assert main(["train", str(project / "tiny.yaml"), "--run-dir", str(folder), *less]) == 0
    return folder


@pytest.fixture
def run_dir(trained_in_bfloat16, workdir):
    """Return a copy of the run directory."""
    return Path(shutil.copytree(trained_in_bfloat16, "run"))


def precision_of(config):
    """Return the dtype of the base model that a configuration loads."""
    population = build(config).population()
    return next(population.members.bank.base.model.parameters()).dtype


def test_auto_is_bfloat16_where_the_processor_has_instructions_for_it(monkeypatch):
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)
    sizes = COMMON | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    with torch.device("meta"):
        wide = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    assert choose_precision("auto", wide, "cpu") == (
        "bfloat16" if has_bfloat16_products() else "float32"
    )
    monkeypatch.setenv("EVOGRPO_SLOW", "1")
    assert choose_precision("auto", wide, "cpu") == "float32"


def test_precision_is_printed_and_recorded(project, run_dir, capsys):
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert stored["precision"] == "bfloat16"
    for chosen in ("auto", "bfloat16"):
        capsys.readouterr()
        assert main(["train", str(project / "tiny.yaml"), "--dry-run", f"precision={chosen}"]) == 0
        assert f"on cpu in {'float32' if chosen == 'auto' else chosen}" in " ".join(
            capsys.readouterr().out.split()
        )


def test_precision_is_kept_on_resume(run_dir, capsys):
    path = run_dir / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    assert precision_of(read_run(run_dir, ["generations=2"])[1]) == torch.bfloat16
    path.write_text(yaml.safe_dump(stored | {"precision": "float32"}))
    assert main(["resume", "run", "--generations", "2"]) == 2
    assert "precision 'bfloat16' -> 'float32'" in " ".join(capsys.readouterr().err.split())
