"""StackedBank: conformance, acting, references, devices, and layouts of items by member."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.network import NetworkConfig
from evogrpo.members.networks.bank import StackedBank
from evogrpo.randomness import generator
from tests.members.test_devices import ACCELERATORS
from tests.policy_banks import PolicyBankTestCase
from tests.tiny_networks import CASES, VECTOR, acted_batch, observe, stacked


class StackedBankTestCase(PolicyBankTestCase):
    case = CASES["discrete"]

    @property
    def own_reference(self):
        return self.case.own_reference

    def make_bank(self, size):
        return self.case.bank(size)

    def act(self, bank, members, *, seed=0, nudge=0.0, equal_shapes=False, base=False):
        return acted_batch(
            self.case, bank, members, seed=seed, nudge=nudge, equal_shapes=equal_shapes, base=base
        )


class TestSomeAlike(StackedBankTestCase):
    case = CASES["some alike"]


class TestImages(StackedBankTestCase):
    case = CASES["images"]


class TestModule(StackedBankTestCase):
    case = CASES["module"]


def act_rows(case, bank, member_ids, *, seed=0, **settings):
    """Act with the same observations and uniform numbers in row i of every call."""
    rngs = [generator(seed, "test rows", row) for row in range(len(member_ids))]
    seen = stacked([observe(case.observations, rng) for rng in rngs])
    uniforms = np.stack([rng.random(bank.distribution.uniforms_per_action) for rng in rngs]).astype(
        np.float32
    )
    settings = {"uniforms": uniforms} | settings
    return bank.act(seen, np.asarray(member_ids, dtype=np.int64), **settings)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("member_ids", [[1, 1, 2], [0] + [1] * 30 + [2] * 2])
def test_rows_act_independently_of_other_members(name, member_ids):
    """With missing members and ragged, unsorted rows, each acts as in a bank of its own."""
    case = CASES[name]
    bank = case.bank(3)
    acted = act_rows(case, bank, member_ids)
    for slot in set(member_ids):
        alone = case.bank(1)
        alone.load_state(0, bank.state(slot))
        separate = act_rows(case, alone, [0] * len(member_ids))
        of_member = np.array(member_ids) == slot
        np.testing.assert_allclose(
            acted.actions[of_member], separate.actions[of_member], rtol=1e-4, atol=1e-4
        )
        np.testing.assert_allclose(
            acted.log_probs[of_member], separate.log_probs[of_member], rtol=1e-4, atol=1e-4
        )


def test_a_dict_or_tuple_of_one_box_acts_as_the_box():
    ids = np.zeros(5, np.int64)
    seen = np.random.default_rng(0).standard_normal((5, *VECTOR.shape), np.float32)
    plain = StackedBank(VECTOR, spaces.Discrete(3), size=1).act(seen, ids, uniforms=None)
    for space, same in (
        (spaces.Dict({"a": VECTOR}), {"a": seen}),
        (spaces.Tuple([VECTOR]), (seen,)),
    ):
        acted = StackedBank(space, spaces.Discrete(3), size=1).act(same, ids, uniforms=None)
        np.testing.assert_allclose(acted.log_probs, plain.log_probs, rtol=1e-5)


def test_acting_uses_current_weights():
    """No stale weights or layouts after learning, inheriting and rebuilding."""
    case = CASES["discrete"]
    bank = case.bank(2)
    rows = [0] * 20 + [1] * 20
    first = act_rows(case, bank, rows)
    batch = acted_batch(case, bank, range(2))
    bank.update(
        batch,
        lambda r, log_probs, e: log_probs.sum(1),
        {0: Hyperparameters(lr=0.1, max_grad_norm=1e6)},
    )
    second = act_rows(case, bank, rows)
    assert (second.log_probs[:20] != first.log_probs[:20]).all()
    assert (second.log_probs[20:] == first.log_probs[20:]).all()
    bank.inherit([1, 1])
    third = act_rows(case, bank, rows)
    np.testing.assert_array_equal(third.log_probs[20:], first.log_probs[20:])
    alike = act_rows(case, bank, [0] * 40)
    np.testing.assert_allclose(alike.log_probs[:20], third.log_probs[:20], rtol=1e-5, atol=1e-6)
    bank.rebuild(0, NetworkConfig(hidden=(20, 6)), generator(0, "test"))
    np.testing.assert_allclose(
        act_rows(case, bank, rows).log_probs, third.log_probs, rtol=1e-4, atol=1e-5
    )
    bank.load_state(0, case.bank(3).state(2))
    assert (act_rows(case, bank, rows).log_probs[:20] != third.log_probs[:20]).any()


@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("name", CASES)
def test_devices_agree(name, device):
    case = CASES[name]
    cpu = case.bank(3)
    moved = case.bank(3, device=device)
    batch = acted_batch(case, cpu, range(3))
    for one, other in (
        (cpu.log_probs(batch), moved.log_probs(batch)),
        (cpu.entropies(batch), moved.entropies(batch)),
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    rows = [0] * 5 + [1] * 2 + [2] * 3
    acted = [act_rows(case, bank, rows) for bank in (cpu, moved)]
    np.testing.assert_allclose(acted[0].log_probs, acted[1].log_probs, rtol=1e-3, atol=1e-3)
    steps = dict.fromkeys(range(3), Hyperparameters(lr=1e-3))
    reports = [
        bank.update(batch, lambda r, log_probs, e: log_probs.sum(1), steps).reports
        for bank in (cpu, moved)
    ]
    for slot in range(3):
        assert reports[0][slot].grad_norm == pytest.approx(reports[1][slot].grad_norm, rel=1e-2)
