"""The built-in kinds of members pass the conformance suite."""

from evogrpo.testing.members import MembersTestCase
from tests.tiny_steps import STEP_SPACE, cart_pole, step_population
from tests.tiny_teams import team_env, team_population
from tests.tiny_training import SPACE, randomise_adapter, shared_model, tiny_env, tiny_population


class TestLanguageMembers(MembersTestCase):
    actor_network = shared_model()

    def make_population(self, size):
        return tiny_population(size, hp_config=SPACE)

    def make_env(self):
        return tiny_env()

    def trained(self, size=3):
        population = self.make_population(size)
        for agent in population:
            randomise_adapter(agent, agent.slot)
        return population


class TestNetworkMembers(MembersTestCase):
    def make_population(self, size):
        return step_population(size, hp_config=STEP_SPACE, normalise_observations=True)

    def make_env(self):
        return cart_pole()


class TestTeams(MembersTestCase):
    def make_population(self, size):
        return team_population(size, group_size=4)

    def make_env(self):
        return team_env()
