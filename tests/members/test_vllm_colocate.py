"""The sampler for vLLM in the trainer's process, with a module that stands for vLLM."""

import math
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from evogrpo import ColocatedVLLMSampler
from evogrpo.extras import MissingPackageError
from evogrpo.interruption import Interrupted, Stop
from evogrpo.members.language.vllm_server import VLLMError
from evogrpo.testing.samplers import SamplerTestCase, different_members, make_rows, tiny_llama
from tests import vllm_stub
from tests.tiny_batches import tiny_bank
from tests.tiny_models import tiny_model
from tests.tiny_training import settings_env, tiny_population

SIZE = 3
NAME = "org/base"


@pytest.fixture
def connect(monkeypatch, tmp_path):
    """Return a function that connects a sampler to a bank, whose base model gets a name."""

    def connected(bank, **settings):
        monkeypatch.setattr(bank.base.model.config, "name_or_path", NAME)
        sampler = ColocatedVLLMSampler(adapters_dir=tmp_path, **settings)
        sampler.connect(bank)
        return sampler

    return connected


class TestColocatedVLLMSampler(SamplerTestCase):
    uses_uniforms = False
    tolerance = 1e-3

    @pytest.fixture(autouse=True)
    def _install(self, monkeypatch, connect):
        vllm_stub.install(monkeypatch, lambda name, dtype: tiny_llama())
        self.connect = connect

    def make_sampler(self, bank):
        return self.connect(bank)


@pytest.fixture
def engine(monkeypatch):
    """Class of the engines of a test, with the model of `tiny_bank`."""
    return vllm_stub.install(
        monkeypatch, lambda name, dtype: tiny_model().to(getattr(torch, dtype))
    )


def test_the_engine_sleeps_except_while_it_samples(engine, connect):
    before = dict(os.environ)
    sampler = connect(tiny_bank(SIZE), gpu_memory_utilization=0.4, max_model_len=64)
    assert dict(os.environ) == before
    (llm,) = engine.engines
    assert llm.calls == ["sleep", "wake_up", "generate", "sleep"]  # the check of the base
    expected = {
        "model": NAME,
        "dtype": "float32",
        "gpu_memory_utilization": 0.4,
        "max_model_len": 64,
        "enable_sleep_mode": True,
        "enable_lora": True,
        "max_loras": SIZE,
        "max_lora_rank": 8,
        "logprobs_mode": "processed_logprobs",
    }
    assert expected.items() <= llm.settings.items()
    llm.calls.clear()
    finished = []
    rows = make_rows(range(SIZE))
    sampler.sample(rows, on_finished=lambda numbers, tokens: finished.extend(numbers))
    assert llm.calls == ["wake_up", "generate", "sleep"]  # members and temperatures together
    assert finished == list(range(len(rows)))
    # No rows: the engine is not woken up.
    assert len(sampler.sample(rows.select(torch.tensor([], dtype=torch.long))).actions) == 0
    assert llm.calls == ["wake_up", "generate", "sleep"]
    # A stop before sampling.
    stop = Stop()
    stop.request("test")
    with pytest.raises(Interrupted):
        sampler.sample(replace(rows, stop=stop))
    assert llm.calls == ["wake_up", "generate", "sleep"]


def test_adapters_of_a_bfloat16_base_are_in_bfloat16_and_replaced(engine, connect, tmp_path):
    bank = different_members(tiny_model().to(torch.bfloat16), SIZE)
    sampler = connect(bank)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == SIZE
    assert {tensor.dtype for tensor in load_file(files[0]).values()} == {torch.bfloat16}
    bank.inherit([1, 1, 2])
    sampler.sync(range(SIZE))
    later = sorted(tmp_path.rglob("*.safetensors"))
    assert len(later) == SIZE
    assert len(set(later) - set(files)) == 1  # an unchanged member is not written again
    sampler.sample(make_rows(range(SIZE)))
    del sampler
    assert not list(tmp_path.iterdir())


FAULTS = {
    "no number": lambda completion: completion.logprobs[0].update(
        {completion.token_ids[0]: vllm_stub.Logprob(math.nan)}
    ),
    "a missing token": lambda completion: completion.logprobs.pop(),
    "an unknown token": lambda completion: setattr(
        completion, "token_ids", (99, *completion.token_ids[1:])
    ),
    "a failure": lambda completion: (_ for _ in ()).throw(RuntimeError("CUDA error")),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_wrong_completions_and_failures_end_the_run_and_let_the_engine_sleep(kind, engine, connect):
    sampler = connect(tiny_bank(SIZE))
    engine.fault = staticmethod(FAULTS[kind])
    with pytest.raises(VLLMError):
        sampler.sample(make_rows([0]))
    assert not engine.engines[0].awake


def test_another_base_model_is_refused(monkeypatch, connect):
    def other(name, dtype):
        model = tiny_model()
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.1)
        return model

    vllm_stub.install(monkeypatch, other)
    with pytest.raises(VLLMError, match="base model"):
        connect(tiny_bank(SIZE))


def test_a_base_model_without_a_source_is_refused(engine):
    with pytest.raises(ValueError, match="load_base"):
        ColocatedVLLMSampler().connect(tiny_bank(1))


@pytest.mark.parametrize(
    "settings",
    [{"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.1}, {"max_model_len": 0}],
)
def test_wrong_settings_are_refused(settings, engine):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        ColocatedVLLMSampler(**settings)


def test_vllm_must_be_installed():
    with pytest.raises(MissingPackageError, match="vllm"):
        ColocatedVLLMSampler()


def test_members_of_a_population_learn_and_are_evaluated(engine, monkeypatch, tmp_path):
    population = tiny_population(2, lr=3e-3)
    monkeypatch.setattr(population.members.bank.base.model.config, "name_or_path", NAME)
    env = settings_env()
    population.sample_with(ColocatedVLLMSampler(adapters_dir=tmp_path))
    bank = population.members.bank
    for step in range(2):
        collected = population.collect(env, step=step, samples_per_step=8, starts_per_step=4)
        batch = collected.experience["default"]
        assert not batch.exact
        scored = bank.log_probs(batch)
        torch.testing.assert_close(batch.sampler_log_probs, scored, rtol=1e-3, atol=1e-3)
        reports = population.learn(collected.experience, step=step)
        assert all(report.failed is None for report in reports.values())
    (llm,) = engine.engines
    calls = len(llm.calls)
    population.evaluate(env)
    assert llm.calls[calls:] == ["wake_up", "generate", "sleep"]
