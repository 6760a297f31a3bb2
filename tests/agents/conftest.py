"""The agent that most tests of methods use."""

import pytest

from evogrpo import GRPO
from tests.tiny_training import SPACE, practise, scatter, tiny_agent


@pytest.fixture
def agent() -> GRPO:
    """Return an agent with adapters of its own that has taken one learning step."""
    agent = tiny_agent(hp_config=SPACE, update_epochs=2)
    scatter(agent)
    practise(agent)
    return agent
