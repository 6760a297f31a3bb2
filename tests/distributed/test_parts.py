"""A base that several processes hold together: what members learn, what one process cannot do, what if one fails."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evogrpo.models.language.fsdp import check_sharding, layers_of, parameters_per_rank, sharded_over
from evogrpo.models.language.loading import load_base
from evogrpo.storage.journal import read_journal
from tests.distributed.launching import launch
from tests.distributed.parting import exhausted, failing, parted_and_whole, store
from tests.distributed.scenarios import PARTS
from tests.tiny_models import CONFIGS, tiny_model
from tests.tiny_training import resumed_run, shared_model

ARCHITECTURES = ("gpt2",)
"""Run by transformers' own passes; `test_equality` has members whose base runs by the direct one."""


def test_members_learn_over_a_base_in_parts_what_they_learn_over_a_whole_one(tmp_path: Path) -> None:
    """Three members; ranks without work of their own; and a stop of one rank between passes."""
    for architecture in ARCHITECTURES:
        store(tiny_model(architecture), tmp_path / architecture)
    for status, said in launch(2, tmp_path / "logs", parted_and_whole, str(tmp_path), *ARCHITECTURES).ended():
        assert status == 0, said


def test_a_failure_in_one_process_does_not_leave_the_others_waiting_for_its_part(tmp_path: Path) -> None:
    """They end as well, and say why; what was learnt goes on, over a whole base."""
    store(shared_model(), tmp_path / "base")
    leader, other = launch(2, tmp_path / "logs", failing, str(tmp_path)).ended(60)
    assert (leader[0], other[0]) == (1, 1)
    assert "Process 1 of 2 failed" in leader[1]
    assert "the verifier is gone" in leader[1]
    assert "LookupError: the verifier is gone" in other[1]
    assert "ProcessError" in read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"]
    assert resumed_run(tmp_path / "run").population.members.banks.size == 3


def test_a_rank_of_a_sharded_base_that_is_out_of_memory_ends_the_run_with_advice(tmp_path: Path) -> None:
    """The other rank cannot repeat the pass, and ends as well."""
    store(shared_model(), tmp_path / "base")
    leader, other = launch(2, tmp_path / "logs", exhausted, str(tmp_path)).ended(60)
    assert (leader[0], other[0]) == (1, 1)
    assert "lost the connection" in leader[1]
    assert "micro_batch_tokens" in other[1]
    assert resumed_run(tmp_path / "run").population.members.banks.size == 2


def test_one_process_has_all_of_a_base(tmp_path: Path) -> None:
    """However many are wanted, so that a run goes on anywhere."""
    store(shared_model(), tmp_path)
    assert sharded_over(load_base(tmp_path, parts=PARTS).model) == 1


@pytest.mark.parametrize("architecture", list(CONFIGS))
def test_what_a_process_holds_is_counted(architecture: str) -> None:
    """A part of the layers, and all that is outside of them; three whole layers at most on the way."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[architecture])
    whole = sum(weights.numel() for weights in model.parameters())
    layers = [sum(weights.numel() for weights in layer.parameters()) for layer in layers_of(model)]
    assert len(layers) == 2
    assert parameters_per_rank(model, 1) == whole
    assert parameters_per_rank(model, 2) == whole - layers[0] + 3 * layers[0]


@pytest.mark.parametrize(
    ("parts", "device", "words"),
    [(2, "mps", "base_parts above 1 requires"), (2, "cpu", "has no list of layers")],
)
def test_what_cannot_be_held_in_parts_is_refused(parts: int, device: str, words: str) -> None:
    """By its device, and by what it is made of."""
    model = tiny_model()
    check_sharding(model, 1, device)
    if "layers" in words:
        model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=words):
        check_sharding(model, parts, device)


@pytest.mark.parametrize("parts", [0, -1, 1.5, "2", True])
def test_a_number_of_processes_is_asked_for(parts: object, tmp_path: Path) -> None:
    """Before anything is loaded."""
    with pytest.raises(ValueError, match="parts must be"):
        load_base(tmp_path, parts=parts)  # type: ignore[arg-type]  # what is refused
