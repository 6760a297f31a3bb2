"""AdapterBank as a Sampler: conformance, in full and half precision."""

import torch

from evogrpo.models.language.bank import AdapterBank
from evogrpo.testing.samplers import SamplerTestCase, different_members, make_rows
from tests.tiny_models import tiny_model


class TestAdapterBankSamples(SamplerTestCase):
    def make_sampler(self, bank):
        return bank


class TestPlainAdapterBankSamples(TestAdapterBankSamples):
    """Conformance without a KV cache."""

    def make_bank(self):
        bank = super().make_bank()
        bank.base.shares_prefix = False
        return bank


class Returned:
    """A sampler with copies of the weights, read from PEFT files in `sync`."""

    def __init__(self, bank):
        self._bank = bank
        own = {"pad_token_id": bank.base.pad_id, "eos_token_ids": bank.end_ids.tolist()}
        self._copy = AdapterBank(bank.base.model, size=bank.size, lora_config=bank.lora_config, **own)
        self.sync(range(bank.size))

    def sync(self, slots):
        for slot in slots:
            tensors, _ = self._bank.peft_files(slot)
            state = self._copy.state(slot)
            for target in self._copy.targets:
                stem = f"base_model.model.{target.name}"
                target.a(state["adapter"]).copy_(tensors[f"{stem}.lora_A.weight"])
                target.b(state["adapter"]).copy_(tensors[f"{stem}.lora_B.weight"])
            self._copy.load_state(slot, state)

    def sample(self, rows, *, base=False, on_finished=None):
        return self._copy.sample(rows, base=base)


class TestSamplerWithCopies(SamplerTestCase):
    uses_uniforms = False  # as engines that take no uniforms

    def make_sampler(self, bank):
        return Returned(bank)


def test_rollouts_are_exact_in_float32_only():
    for dtype in (torch.float32, torch.bfloat16):
        bank = different_members(tiny_model("llama").to(dtype), 2)
        rows = make_rows(range(2))
        assert bank.sample(rows).exact is (dtype == torch.float32)
    bank.base.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    assert not bank.sample(rows).exact
