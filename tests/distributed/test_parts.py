"""Sharded base models (FSDP): learning, refused calls and failures."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evogrpo.members.language.fsdp import check_sharding, layers_of, sharded_over
from evogrpo.members.language.loading import load_base
from evogrpo.members.language.sizing import parameters_per_rank
from tests.distributed.launching import launch
from tests.distributed.parting import compare_sharded, store, train_with_memory_error
from tests.distributed.scenarios import PARTS
from tests.tiny_models import CONFIGS, tiny_model
from tests.tiny_training import resumed_run, shared_model

ARCHITECTURES = ("gpt2",)
"""Computed by transformers' own passes; `test_equality` uses fast_llama."""


def test_a_sharded_base_gives_the_results_of_a_whole_one(tmp_path: Path) -> None:
    """Three members; ranks without work of their own; and a stop of one rank between passes."""
    for architecture in ARCHITECTURES:
        store(tiny_model(architecture), tmp_path / architecture)
    for status, output in launch(
        2, tmp_path / "logs", compare_sharded, str(tmp_path), *ARCHITECTURES
    ).ended():
        assert status == 0, output


def test_a_rank_of_a_sharded_base_that_is_out_of_memory_ends_the_run_with_advice(
    tmp_path: Path,
) -> None:
    """The other rank cannot repeat the pass, and ends as well."""
    store(shared_model(), tmp_path / "base")
    leader, other = launch(2, tmp_path / "logs", train_with_memory_error, str(tmp_path)).ended(60)
    assert (leader[0], other[0]) == (1, 1)
    assert "lost the connection" in leader[1]
    assert "micro_batch_tokens" in other[1]
    assert resumed_run(tmp_path / "run").population.members.size == 2


def test_a_single_process_loads_the_whole_base(tmp_path: Path) -> None:
    """For any number of parts, so that a run can be resumed anywhere."""
    store(shared_model(), tmp_path)
    assert sharded_over(load_base(tmp_path, parts=PARTS).model) == 1


@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_parameters_per_rank_are_the_shards_and_three_whole_layers(architecture: str) -> None:
    """A shard of each layer, everything outside of the layers, and three whole layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[architecture])
    total = sum(weights.numel() for weights in model.parameters())
    layers = []
    for layer in layers_of(model):
        layers.append(sum(weights.numel() for weights in layer.parameters()))
    assert len(layers) == 2
    assert parameters_per_rank(model, 1) == total
    assert parameters_per_rank(model, 2) == total - layers[0] + 3 * layers[0]


@pytest.mark.parametrize(
    ("parts", "device", "words"),
    [(2, "mps", "base_parts above 1 requires"), (2, "cpu", "has no list of layers")],
)
def test_bases_that_cannot_be_sharded_are_refused(parts: int, device: str, words: str) -> None:
    """For their device, or because they have no list of layers."""
    model = tiny_model()
    check_sharding(model, 1, device)
    if "layers" in words:
        model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=words):
        check_sharding(model, parts, device)


@pytest.mark.parametrize("parts", [0, -1, 1.5, "2", True])
def test_invalid_numbers_of_parts_are_refused(parts: object, tmp_path: Path) -> None:
    """Before anything is loaded."""
    with pytest.raises(ValueError, match="parts must be"):
        load_base(tmp_path, parts=parts)  # type: ignore[arg-type]  # what is refused
