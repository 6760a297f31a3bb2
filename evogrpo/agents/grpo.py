"""GRPO: an agent that learns by comparing the completions, or the episodes, of a group."""

from collections.abc import Sequence
from typing import ClassVar

from evogrpo.agents.algorithm import EvolvableAlgorithm
from evogrpo.agents.learning.learner import Learner
from evogrpo.agents.learning.step import learn
from evogrpo.agents.members.members import Members
from evogrpo.data import Experience, LearnReport


class GRPO(EvolvableAlgorithm):
    """An agent trained by group relative policy optimisation.

    The constructor makes one agent in a bank of its own; `GRPO.population` makes several that share one bank.

    Args:
        observation_space: What it reads; may be None for a language model.
        action_space: What it does; may be None for a language model.
        actor_network: A causal language model of transformers; its weights and flags are never changed. Without one the
            agent is a small network for its spaces; a torch module of your own takes the default network's place.
        pad_token_id: Token used for padding, for language models.
        options: Everything else, with defaults: see `evogrpo.agents.options.Options`.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.
    """

    __slots__ = ()

    unused_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def learn_together(
        cls, members: Members, learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Take one learning step under the members' objective; see `evogrpo.agents.learning.step.learn`."""
        return learn(members, learners, experience)
