"""An agent, and pairs of agents that differ in one hyperparameter."""

import pytest

from evogrpo import GRPO
from tests.tiny_routes import PLAIN, ROUTES, default_of
from tests.tiny_training import SPACE, learn_fixed_batch, randomise_adapter, tiny_agent


@pytest.fixture
def agent() -> GRPO:
    """Return an agent with random adapters after one learning step."""
    agent = tiny_agent(hp_config=SPACE, update_epochs=2)
    randomise_adapter(agent)
    learn_fixed_batch(agent)
    return agent


@pytest.fixture
def pair(request, tmp_path):
    """Return a function that makes an agent with a new value and its twin with the old one.

    The value arrives by assignment, or by the route of an indirect parameter.
    """
    route = ROUTES[getattr(request, "param", "assigned")]

    def make(name, value, **options):
        options = PLAIN | options
        agent = route(name, value, tmp_path, options)
        assert getattr(agent, name) == value
        twin = agent.clone()
        setattr(twin, name, default_of(name, options))
        assert getattr(twin, name) != value
        randomise_adapter(agent)
        randomise_adapter(twin)
        return agent, twin

    return make
