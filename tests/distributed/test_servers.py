"""Several ranks sample with vLLM: from one server, or each in its own process."""

import json
from pathlib import Path

import pytest

from evogrpo.storage.journal import read_journal
from tests.distributed.launching import launch
from tests.distributed.parting import store
from tests.distributed.scenarios import colocated, served
from tests.tiny_models import tiny_model
from tests.tiny_training import shared_model
from tests.vllm_server import VLLMServer


@pytest.mark.parametrize("place", ["whole", pytest.param("parts", marks=pytest.mark.slow)])
def test_ranks_divide_the_completions_and_rank_0_loads_the_adapters(
    place: str, tmp_path: Path
) -> None:
    """With a whole and with a sharded base."""
    folder = tmp_path / place
    store(shared_model(), tmp_path / "base")
    server = VLLMServer(tiny_model())
    try:
        for status, output in launch(2, tmp_path / "logs", served, str(folder), server.url).ended(
            120
        ):
            assert status == 0, output
    finally:
        server.stop()
    events = read_journal(folder / "run" / "journal.jsonl")
    assert (events[-1]["event"], events[0]["ranks"]) == ("ended", 2)
    names = [body["lora_name"] for body in server.posts("/v1/load_lora_adapter")]
    assert len(set(names)) == len(names) > 3  # each version once
    completions = sum(len(body["prompt"]) for body in server.posts("/v1/completions"))
    probes = 2 * 8
    learning = 4 * 3 * 8
    validation = (1 + 2 * 3) * 8
    test = 2 * 36
    assert completions == probes + learning + validation + test


def test_each_rank_samples_its_share_in_its_own_process(tmp_path: Path) -> None:
    for status, output in launch(2, tmp_path / "logs", colocated, str(tmp_path)).ended(120):
        assert status == 0, output
    events = read_journal(tmp_path / "run" / "journal.jsonl")
    assert (events[-1]["event"], events[0]["ranks"]) == ("ended", 2)
    engines = [json.loads((tmp_path / f"engine-{rank}.json").read_text()) for rank in range(2)]
    (first, first_rows), (second, second_rows) = engines
    assert first != second  # seeds
    probes = 2 * 8
    learning = 2 * 3 * 8
    validation = (1 + 3) * 8
    test = 2 * 36
    assert first_rows + second_rows == probes + learning + validation + test
    assert abs(first_rows - second_rows) <= 16
