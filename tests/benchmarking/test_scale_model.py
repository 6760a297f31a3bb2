"""The model of what a generation costs, and the simulation of what processes wait."""

import math

import pytest

from benchmarking.scale_fit import fitted
from benchmarking.scale_model import BASES, Base, Card, Work, cost_table, generation
from benchmarking.scale_waiting import Delays, simulate
from evogrpo.training.memory import state_size
from evogrpo.training.traffic import Traffic
from tests.tiny_batches import lora
from tests.tiny_training import tiny_population

SAME = Delays(spread=0.0, reward=0.0)


def test_an_adapter_has_as_many_parameters_as_the_bank_gives_it():
    """Qwen2.5-0.5B's, rank 16 on all linear layers, counted by hand: 24 x 16 x (attention + feed-forward)."""
    attention = (896 + 896) + 2 * (896 + 128) + (896 + 896)
    assert BASES[0].adapter == 24 * 16 * (attention + 3 * (896 + 4864))
    members = tiny_population(1, lora_config=lora(r=16)).members
    text = members.bank.base.model.config
    heads = text.num_attention_heads
    own = Base(
        name="tiny", parameters=1, layers=text.num_hidden_layers, hidden=text.hidden_size,
        intermediate=text.intermediate_size, heads=text.hidden_size,
        key_heads=text.hidden_size * text.num_key_value_heads // heads,
    )  # fmt: skip
    assert own.adapter == members.banks.part(0, "adapter").numel()


def test_one_process_tells_nobody_anything():
    cost = generation(BASES[0], 1, 4, Card(), Work())
    assert (cost.records, cost.cloning) == (0, 0)
    assert Traffic(members=4, shares=[4], samples=8, steps=2, state=100).records == 0
    assert Traffic(members=4, shares=[4], samples=8, steps=2, state=100).gathered == 0


def test_processes_that_share_a_member_tell_each_other_gradients_and_gather_it_once():
    shared = Traffic(members=2, shares=[1, 1, 1], samples=8, steps=2, state=1200, tokens=4)
    assert (shared.gradients, shared.gathered) == (400, 1200)
    three = Traffic(members=1, shares=[1, 1, 1], samples=8, steps=2, state=1200, tokens=4)
    assert three.gradients == 2 * 2 * 400 // 3  # a third of it to each of two others, then its own third's sum
    assert Traffic(members=3, shares=[1, 1, 1], samples=8, steps=2, state=1200, tokens=4).gradients == 0


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
def test_more_cards_compute_no_longer_and_save_in_proportion(base):
    card, work = Card(), Work()
    costs = [generation(base, cards, 4, card, work) for cards in (64, 128)]
    assert costs[0].sampling == costs[1].sampling
    assert costs[0].learning == costs[1].learning
    assert costs[1].leader_bytes == 2 * costs[0].leader_bytes == 8 * 64 / costs[0].together * state_size(base.adapter)
    assert costs[0].card_bytes < card.memory
    assert math.isclose(costs[0].seconds, costs[0].sampling + costs[0].learning + costs[0].exchange)


def test_a_faster_link_helps_the_exchange_alone():
    slow, fast = (generation(BASES[1], 64, 4, Card(network=rate), Work()) for rate in (1e9, 50e9))
    assert slow.exchange > fast.exchange
    assert (slow.sampling, slow.learning) == (fast.sampling, fast.learning)


def test_the_tables_have_as_many_cells_as_heads():
    lines = list(cost_table(Card(), Work()))
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_nobody_waits_for_equal_steps_on_equal_cards():
    found = simulate(8, delays=SAME)
    assert found.step == found.generation == pytest.approx(0, abs=1e-12)
    assert found.apart == 0


def test_meeting_less_often_waits_less_and_more_processes_wait_more():
    few, many = simulate(4), simulate(32)
    for found in (few, many):
        assert 0 < found.generation < found.step < 1
    assert few.step < many.step
    assert few.generation < many.generation


def test_on_cards_that_differ_plans_that_do_not_wait_compare_unequal_work():
    equal, unequal = simulate(16), simulate(16, slower=0.2)
    assert unequal.apart > equal.apart
    assert unequal.picked < unequal.together
    assert unequal.generation > equal.generation


def test_a_fit_finds_what_the_seconds_are_made_of():
    """Factors are never negative; the error is that of the worst part."""
    reading, products = [1.0, 1.0, 1.0], [1.0, 4.0, 12.0]
    factors, error = fitted([reading, products], [3 + 0.5 * each for each in products])
    assert factors == pytest.approx([3.0, 0.5])
    assert error == pytest.approx(0.0, abs=1e-9)
    factors, error = fitted([reading, products], [2.0, 1.0, 1.0])
    assert min(factors) >= 0
    assert error > 0.2
