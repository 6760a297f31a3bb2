"""Bases in 8 and 4 bits: members learn together as alone; unsupported operations raise.

Tests that load one run if the packages of the extra `quantised` are installed.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from evogrpo import GRPO
from evogrpo.members.language.compatibility import is_quantised
from evogrpo.members.language.loading import (
    DEVICES,
    PACKAGES,
    check_quantised,
    fingerprint,
    load_base,
    load_outline,
    quantised_options,
)
from evogrpo.members.language.peft_files import check_export
from evogrpo.members.language.sizing import base_bytes, quantised_bytes
from tests.distributed.parting import compare_learning_steps, store
from tests.tiny_models import tiny_model
from tests.tiny_training import randomise_adapter, tiny_agent, tiny_population

LR = 1e-2


def needs(package: str) -> Any:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


KINDS = [pytest.param("int8", marks=needs("torchao"))]
"""What can be trained on a CPU."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in a folder."""
    folder = tmp_path_factory.mktemp("base")
    store(tiny_model(), folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def base(kind: Any, stored: Path) -> PreTrainedModel:
    return load_base(stored, dtype=kind).model


def test_population_equals_separate_agents(base: PreTrainedModel) -> None:
    """Members on a quantised base; fast_llama is not used."""
    before = fingerprint(base)
    bank = tiny_population(1, actor_network=base).members.bank
    with bank.base.working():
        assert not bank.base.uses_fast_llama
    compare_learning_steps(base, base)
    assert fingerprint(base) == before


def test_fingerprint_matches_the_plain_base(kind: Any, base: PreTrainedModel, stored: Path) -> None:
    """Equal fingerprint, similar logits, estimated size."""
    plain = tiny_model()
    ids = torch.arange(3, 12)[None]
    assert is_quantised(base)
    assert not is_quantised(plain)
    assert fingerprint(base) == fingerprint(plain)
    with torch.no_grad():
        expected = plain.eval()(input_ids=ids).logits
        got = base(input_ids=ids).logits
    off = float((got - expected).norm() / expected.norm())
    assert 1e-4 < off < 0.5
    estimate = quantised_bytes(load_outline(stored).model, kind, 4)
    assert estimate <= base_bytes(base) * 1.1
    assert base_bytes(base) <= estimate * 1.1 < 0.6 * base_bytes(plain)


def test_exports_load_on_the_plain_base(
    base: PreTrainedModel, stored: Path, tmp_path: Path
) -> None:
    """PEFT and an agent on the plain base load the adapter.

    Checkpoints do not contain the quantised base.
    """
    agent = tiny_agent(actor_network=base)
    randomise_adapter(agent)
    agent.save_checkpoint(tmp_path / "agent")
    assert check_export(tmp_path / "agent", load_outline(stored).model) == 2 * len(
        agent.members.bank.targets
    )
    again = GRPO.load(tmp_path / "agent", actor_network=tiny_model())
    assert torch.equal(again.state()["adapter"], agent.state()["adapter"])
    with pytest.raises(ValueError, match="quantised base"):
        tiny_agent(actor_network=base, device="meta")


def test_a_base_may_be_quantised_by_the_user(kind: Any, stored: Path, tmp_path: Path) -> None:
    """A base quantised by the user has its own fingerprint."""
    options = quantised_options(kind, torch.float32, "cpu")
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32, **options)
    same = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32, **options)
    agent = tiny_agent(actor_network=model)
    agent.save_checkpoint(tmp_path / "agent")
    assert (
        GRPO.load(tmp_path / "agent", actor_network=same).members.fingerprint
        == agent.members.fingerprint
    )


@pytest.mark.parametrize("wanted", list(PACKAGES))
def test_unsupported_device_or_sharding_raises(
    wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unsupported device, sharding or missing package, before the base is located."""
    for device in {"cpu", "cuda", "mps"} - set(DEVICES[wanted]):
        with pytest.raises(ValueError, match=f"{wanted} requires the device .*{device}"):
            check_quantised(wanted, device)
    with pytest.raises(ValueError, match="base_parts=2"):
        check_quantised(wanted, "cuda", parts=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=rf"A base in {wanted} requires {PACKAGES[wanted]}, .*pip install .*\[quantised\]",
    ):
        check_quantised(wanted, "cuda")
    with pytest.raises(ValueError, match="A base in int8 requires torchao"):
        load_base(tmp_path / "nowhere", dtype="int8")
    for plain in ("float32", "bfloat16", "auto", None):
        check_quantised(plain, "mps", parts=2)
