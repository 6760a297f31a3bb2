"""Learning that is abandoned half-way: nobody has learnt anything, and copies are made only where they are needed."""

import pytest

from evogrpo import MultiAgentGRPO, Objective
from evogrpo.envs.control.pettingzoo_groups import PettingZooGroups
from evogrpo.interruption import Interrupted, Undo, interruptible, undoing_with
from tests.envs import joint_probes
from tests.tiny_steps import cart_pole, step_population
from tests.tiny_training import equal_states, tiny_env, tiny_population


def language(**options):
    return tiny_population(2, beta=0.1, micro_batch_tokens=40, **options), tiny_env()


def networks(**options):
    return step_population(2, beta=0.1, **options), cart_pole()


def teams(**options):
    env = PettingZooGroups(joint_probes.Favours, validation_size=4, test_size=4, score="sum")
    return MultiAgentGRPO.population(2, env.observation_spaces, env.action_spaces, group_size=4, **options), env


CASES = {
    "language": (lambda: language(batch_size=64), False),
    "language, two passes": (lambda: language(batch_size=64, update_epochs=2), True),
    "language, two optimizer steps": (lambda: language(batch_size=4), True),
    "language, rewards by running statistics": (
        lambda: language(batch_size=64, objective=Objective(reward_norm="running", advantage="mean_only")),
        True,
    ),
    "networks": (lambda: networks(batch_size=4096, update_epochs=1), False),
    "networks, two passes": (lambda: networks(batch_size=4096, update_epochs=2), True),
    "teams, a policy each": (lambda: teams(policies="independent", batch_size=4096, update_epochs=1), True),
}


class Looks:
    """Asks for an end at the given look, and counts them."""

    def __init__(self, last):
        self.last, self.seen = last, 0

    def __call__(self):
        self.seen += 1
        return self.seen > self.last


@pytest.mark.parametrize("case", CASES)
def test_learning_that_is_abandoned_at_any_look_has_changed_nothing(case):
    begin, copies = CASES[case]
    population, env = begin()
    banks, slots = population.members.banks, range(len(population))
    collected = population.collect(env, step=0, samples_per_step=8, block=2)
    before = banks.snapshot(slots)
    reports = population.learn(collected.experience, step=0)
    after = banks.snapshot(slots)
    assert not any(equal_states(after[slot], before[slot]) for slot in slots)

    def learn(looks):
        """Learn from the beginning; return what was copied, and after how many looks nothing was to be abandoned."""
        for slot in slots:
            banks.load_state(slot, before[slot])
        kept, settled = {}, []
        undo = Undo(lambda: kept.update(banks.snapshot(slots)), lambda: settled.append(looks.seen))
        try:
            with undoing_with(undo), interruptible(looks):
                assert population.learn(collected.experience, step=0) == reports
        finally:
            for slot, state in kept.items() if looks.seen > looks.last else ():
                banks.load_state(slot, state)
        return kept, settled

    whole = Looks(float("inf"))
    kept, settled = learn(whole)
    assert (bool(kept), settled) == (copies, [] if copies else [whole.seen])  # nobody looks after that
    assert all(equal_states(banks.state(slot), after[slot]) for slot in slots)
    for last in range(whole.seen):
        with pytest.raises(Interrupted):
            learn(Looks(last))
        assert all(equal_states(banks.state(slot), before[slot]) for slot in slots)
