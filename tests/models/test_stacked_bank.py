"""StackedBank: conformance for several spaces and members of different architectures."""

from evogrpo.testing.policy_banks import PolicyBankTestCase
from tests.tiny_networks import CASES, acted_batch


class StackedBankTestCase(PolicyBankTestCase):
    case = CASES["discrete"]

    @property
    def own_reference(self):
        return self.case.own_reference

    def make_bank(self, size):
        return self.case.bank(size)

    def act(self, bank, members, *, seed=0, nudge=0.0, equal_shapes=False, base=False):
        return acted_batch(self.case, bank, members, seed=seed, nudge=nudge, equal_shapes=equal_shapes, base=base)


class TestArchitectures(StackedBankTestCase):
    case = CASES["architectures"]


class TestSomeAlike(StackedBankTestCase):
    case = CASES["some alike"]


class TestImages(StackedBankTestCase):
    case = CASES["images"]


class TestModule(StackedBankTestCase):
    case = CASES["module"]
