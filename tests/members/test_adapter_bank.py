"""AdapterBank: conformance as bank and sampler, micro-batches, schedules and errors."""

from dataclasses import replace

import pytest
import torch

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.optimizer import Optimizer
from evogrpo.members.language.adapters import LoraAdapters
from evogrpo.members.language.bank import AdapterBank
from evogrpo.records import SamplingBatch
from evogrpo.testing.samplers import (
    PROMPTS,
    SamplerTestCase,
    as_batch,
    different_members,
    make_rows,
)
from tests.policy_banks import PolicyBankTestCase, same_state
from tests.tiny_batches import assert_banks_agree, grpo_loss, sampled_batch, tiny_bank
from tests.tiny_models import DISTINCT, EOS, PAD, tiny_model

TOKENS = 5


class TestAdapterBank(PolicyBankTestCase):
    def make_bank(self, size):
        return tiny_bank(size)

    def act(self, bank, members, *, seed=0, nudge=0.0, equal_shapes=False, base=False):
        rows = make_rows(
            members,
            seed=seed,
            nudge=nudge,
            tokens=TOKENS,
            min_new_tokens=TOKENS if equal_shapes else 0,
        )
        return as_batch(rows, bank.sample(rows, base=base))


HYPERPARAMETERS = {slot: Hyperparameters(lr=1e-2, max_grad_norm=1e6) for slot in range(3)}
SYSTEM = (7, 9, 4, 8, 5, 6, 11, 10, 9)
ROWS = {
    # Longer together than gemma2's sliding window of 6.
    "prompts": {"tokens": 8, "prompts": (*PROMPTS, (20,))},
    "prompts that begin alike": {
        "tokens": 8,
        "prompts": tuple((*SYSTEM, *prompt) for prompt in (*PROMPTS, (20,))),
    },
    # The gradient flows through the prompt only.
    "one token": {"tokens": 1},
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("architecture", DISTINCT)
def test_shared_prefixes_and_micro_batches_keep_results(architecture, rows):
    """Against one pass over whole rows that share no prefix."""
    shared = tiny_bank(3, architecture, micro_batch_tokens=280)
    plain = tiny_bank(3, architecture, micro_batch_tokens=10**6)
    assert shared.base.shares_prefix
    plain.base.shares_prefix = False
    assert_banks_agree(shared, plain, make_rows(range(3), **ROWS[rows]))


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 1}, {"reduce_memory_peak": False}])
def test_results_are_equal_row_by_row_and_with_all_logits_at_once(settings):
    plain = tiny_bank()
    other = tiny_bank(**settings)
    plain.logits_rows = 7  # a tiny batch would fit into one chunk
    assert_banks_agree(other, plain, make_rows(range(3), tokens=4, prompts=PROMPTS[:2]))


def test_lr_schedule_uses_the_members_inherited_step():
    bank = tiny_bank(optimizer=Optimizer(warmup_steps=1, schedule="linear", total_steps=5))
    batch = sampled_batch(bank)
    loss = grpo_loss(batch)
    first = bank.update(batch, loss, {0: HYPERPARAMETERS[0], 1: HYPERPARAMETERS[1]}).reports
    second = bank.update(batch, loss, {0: HYPERPARAMETERS[0]}).reports
    bank.inherit([0, 1, 0])
    third = bank.update(batch, loss, HYPERPARAMETERS).reports
    assert [first[0].lr, first[1].lr, second[0].lr] == pytest.approx([0.0, 0.0, 0.01])
    assert [third[0].lr, third[1].lr, third[2].lr] == pytest.approx([0.0075, 0.01, 0.0075])
    for _ in range(3):
        last = bank.update(batch, loss, HYPERPARAMETERS).reports
    assert last[0].lr == 0.0


def test_calibrated_members_start_with_smaller_steps():
    bank = tiny_bank()
    batch = sampled_batch(bank)
    hyperparameters = {0: HYPERPARAMETERS[0], 1: replace(HYPERPARAMETERS[1], target_kl=0.01)}
    for step in range(2):
        reports = bank.update(batch, grpo_loss(batch), hyperparameters).reports
        assert reports[0].lr == HYPERPARAMETERS[0].lr
        assert reports[1].lr == pytest.approx(
            HYPERPARAMETERS[1].lr * Optimizer().momentum_warmup(step)
        )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": 0}, "size"),
        ({"size": 90_000_000}, "90000000 members"),  # beyond memory
        ({"eos_token_ids": []}, "eos_token_ids"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
    ],
)
def test_invalid_arguments_raise(settings, named):
    with pytest.raises(ValueError, match=named):
        AdapterBank(
            tiny_model(), **({"size": 1, "pad_token_id": PAD, "eos_token_ids": [EOS]} | settings)
        )


def test_invalid_step_raises_and_keeps_the_state():
    bank = tiny_bank(1)
    before = bank.state(0)
    for step in (torch.tensor(-1), torch.tensor([1, 2]), torch.tensor(0.5)):
        with pytest.raises(ValueError, match="step"):
            bank.load_state(0, {**tiny_bank(2).state(1), "step": step})
        assert same_state(bank.state(0), before)


def test_empty_rows_and_prompts_raise():
    bank = tiny_bank(1)
    nothing = torch.zeros(0, dtype=torch.long)
    with pytest.raises(ValueError, match="rows"):
        bank.sample(
            SamplingBatch(
                prompts=((1,),),
                prompt_ids=nothing,
                member_ids=nothing,
                temperature=torch.zeros(0),
                uniforms=torch.zeros(0, 3),
            )
        )
    with pytest.raises(ValueError, match="prompt"):
        bank.sample(make_rows([0], prompts=((3, 4), ())))


class TestAdapterBankSamples(SamplerTestCase):
    def make_sampler(self, bank):
        return bank


def test_rollouts_are_exact_in_float32_only(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        bank = different_members(tiny_model("llama").to(dtype), 2)
        rows = make_rows(range(2))
        assert bank.sample(rows).exact is (dtype == torch.float32)
    # Products may be in TF32.
    bank = different_members(tiny_model("llama"), 2)
    for precision in ("high", "medium"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda kind=precision: kind)
        assert not bank.sample(rows).exact
    monkeypatch.undo()
    bank.base.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    assert not bank.sample(rows).exact


@pytest.mark.parametrize("slots", [[0, 1], [0, 3]], ids=["adjacent", "apart"])
def test_a_module_keeps_its_own_matrices_only(slots):
    """Decoding keeps the matrices of all modules: copies of whole members would take gigabytes."""
    bank = tiny_bank(4)
    before = bank.weights.untyped_storage().nbytes()
    adapters = LoraAdapters(bank.targets, bank.weights, 1.0)
    hook = adapters.hook(torch.tensor(slots))
    for name in adapters.targets:
        (part,) = hook.stacked((name,), len(slots), torch.float32)
        for kept in (part.a, part.b[0][2]):
            storage = kept.untyped_storage()
            own = storage.data_ptr() != bank.weights.untyped_storage().data_ptr()
            assert storage.nbytes() == (kept.nbytes if own else before)
