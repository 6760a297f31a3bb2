"""The precision of the base model: chosen at the start, printed, recorded and kept on resume."""

import platform
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from evogrpo.cli import main
from evogrpo.models.language.loading import MIN_SPEED_UP, choose_precision, speed_up
from evogrpo.training.launch import read_resumable
from tests.cli.project import prepare
from tests.tiny_models import COMMON, tiny_model

WIDE = COMMON | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}


def empty_model(kind, **sizes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(kind(**sizes))


@pytest.fixture(scope="module")
def trained_in_bfloat16(project, tmp_path_factory):
    """Train one generation in bfloat16; return the run directory, which tests do not change."""
    folder = tmp_path_factory.mktemp("precision") / "run"
    less = [
        "schedule.generations=1",
        "schedule.steps_per_generation=1",
        "population.size=2",
        "logging.tensorboard=false",
    ]
    arguments = ["--run-dir", str(folder), *less, "precision=bfloat16"]
    assert main(["train", str(project / "tiny.yaml"), *arguments]) == 0
    return folder


@pytest.fixture
def run_dir(trained_in_bfloat16, workdir):
    """Return a copy of the run directory."""
    return Path(shutil.copytree(trained_in_bfloat16, "run"))


def is_x86():
    return platform.machine().lower() in ("x86_64", "amd64")


def precision_of(config):
    """Return the dtype of the base model that a configuration loads."""
    population = prepare(config).population()
    return next(population.members.bank.base.model.parameters()).dtype


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_explicit_precision_is_used(precision, device):
    assert choose_precision(precision, tiny_model(), device) == precision


def test_auto_is_bfloat16_on_cpus_where_matrix_products_are_faster(monkeypatch):
    monkeypatch.delenv("EVOGRPO_SLOW", raising=False)
    gains = speed_up(512, 2048) >= MIN_SPEED_UP
    assert choose_precision("auto", empty_model(LlamaConfig, **WIDE), "cpu") == ("bfloat16" if gains else "float32")
    assert gains <= (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported() or not is_x86())
    for other in (tiny_model(), empty_model(Gemma2Config, **WIDE)):  # small, or run by transformers
        assert choose_precision("auto", other, "cpu") == "float32"
    monkeypatch.setenv("EVOGRPO_SLOW", "1")
    assert choose_precision("auto", empty_model(LlamaConfig, **WIDE), "cpu") == "float32"


def test_precision_is_printed_and_recorded(project, run_dir, capsys):
    stored = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert stored["precision"] == "bfloat16"
    for chosen in ("auto", "float32", "bfloat16"):
        capsys.readouterr()
        assert main(["train", str(project / "tiny.yaml"), "--dry-run", f"precision={chosen}"]) == 0
        assert f"on cpu in {'float32' if chosen == 'auto' else chosen}" in " ".join(capsys.readouterr().out.split())


def test_precision_is_kept_on_resume(run_dir, capsys):
    path = run_dir / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    assert precision_of(read_resumable(run_dir, ["generations=2"]).config) == torch.bfloat16
    path.write_text(yaml.safe_dump(stored | {"precision": "float32"}))
    assert main(["resume", "run", "--generations", "2"]) == 2
    assert "precision 'bfloat16' -> 'float32'" in " ".join(capsys.readouterr().err.split())


def test_quantised_precisions_are_refused_where_unsupported(project, workdir, capsys, monkeypatch):
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", "precision=nf4"]) == 2
    assert "A base in nf4 requires the device cuda, got 'cpu'" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("evogrpo.extras.importlib.util.find_spec", lambda name: None)
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", "precision=int8"]) == 2
    assert "A base in int8 requires torchao, which is not installed" in " ".join(capsys.readouterr().err.split())
    assert list(workdir.iterdir()) == []


def test_base_parts_may_change_on_resume(project, run_dir, capsys):
    assert read_resumable(run_dir, ["base_parts=4"]).config.base_parts == 4
    assert main(["train", str(project / "tiny.yaml"), "--dry-run", "base_parts=4"]) == 0
    assert "not sharded: there is one process" in " ".join(capsys.readouterr().out.split())
