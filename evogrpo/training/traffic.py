"""What several processes of a run send each other in a generation, in bytes and messages, and whose memory they share.

The constants were counted with `benchmarking/scale_bytes.py`: they are exact for the runs there, and within a tenth for
others, as names and numbers in records differ in length.
"""

import math
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from evogrpo.agents.members.spread.places import Places
from evogrpo.evolution.shared_experience import others_at_most
from evogrpo.processes import processes
from evogrpo.training.configuration.sections import AnyConfig

COLLECTED, LEARNT = 1400, 400
"""Bytes of what a process tells of its samples and of its learning, before the first member and sample."""
MEMBER = 450
"""Bytes of a member's report on a learning step."""
SAMPLE = 27 + 9
"""Bytes of a sample: who acted, from which start, its reward; and its advantage."""
WRITTEN, TOKEN = 25, 4
"""Bytes of a written completion beyond that, and of each of its tokens: its text travels for the completions table."""
LENT, LENT_SAMPLE, LENT_TOKEN, TOLD = 3400, 37, 15, 4
"""Bytes of what a process hands over of its samples to those that learn from them elsewhere, before the first; of a
sample; of each of its tokens or actions, without what is seen; and of its log-probability by the bank, where the
sampler's is another."""
PROMPT_TOKEN = 3
"""Bytes of a prompt's token."""
MESSAGES, LENDING = 30, 2
"""Messages of a learning step: samples, reports, and clock readings of the leading process; and more, where samples are
handed over: that it can be done, and two for each process that has some."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What travels between the processes of a run.

    Attributes:
        members: How many there are.
        shares: Members that each process holds; where there are more processes than members, some hold the same.
        samples: Samples of a member in a learning step.
        steps: Learning steps of a generation.
        state: Bytes of what a member has learnt: its weights and AdamW's moments.
        tokens: Of a completion; 0 where nothing is written.
        sources: Of how many others' samples a member learns at most.
        sample: Bytes of a sample that is learnt from in another process than that which took it.
    """

    members: int
    shares: Sequence[int]
    samples: int
    steps: int
    state: int
    tokens: int = 0
    sources: int = 0
    sample: int = 0

    @property
    def lent(self) -> int:
        """Bytes of samples that a process gets in a generation at most, as its members learn from them."""
        own = min(self.shares) if len(self.shares) > 1 else self.members
        others = min(self.sources, self.members - own)
        from_each = min(self._lenders, len(self.shares) - 1) * LENT
        return self.steps * (from_each + others * self.samples * self.sample) if others else 0

    @property
    def _lenders(self) -> int:
        """How many processes hand over samples at most."""
        return min(self.sources, self.members, len(self.shares))

    @property
    def records(self) -> int:
        """Bytes of records that every process gets in a generation, each padded to the longest of all."""
        each = SAMPLE + (WRITTEN + TOKEN * self.tokens if self.tokens else 0)
        longest = COLLECTED + LEARNT + max(self.shares) * (MEMBER + self.samples * each)
        return self.steps * (len(self.shares) - 1) * longest

    @property
    def messages(self) -> int:
        """Messages of a generation."""
        return self.steps * (MESSAGES + (LENDING + 2 * self._lenders if self.lent else 0))

    @property
    def gathered(self) -> int:
        """Bytes that a checkpoint brings to the leading process: the states of all members that live elsewhere."""
        return (self.members - self.shares[0]) * self.state

    @property
    def clones(self) -> int:
        """Most children of a generation whose parent can live elsewhere: all members but the elite."""
        return self.members - 1 if len(self.shares) > 1 else 0

    @property
    def _sharers(self) -> int:
        """How many processes share the work of one member at most."""
        return math.ceil(len(self.shares) / self.members)

    @property
    def pooled(self) -> int:
        """Bytes of samples that a process gets in a generation at most from those that share its member's work."""
        most = math.ceil(self.samples / self._sharers) * (self._sharers - 1)
        return self.steps * most * self.sample

    @property
    def gradients(self) -> int:
        """Bytes that each process of a member gives the others in an optimizer step; none if it has one process.

        It sends a part of its gradient to each of them, and the sum of its own part; see `Processes.summed`. Small
        networks learn everything in each process.
        """
        sharers = self._sharers if self.tokens else 1
        return 2 * (sharers - 1) * (self.state // 3) // sharers if sharers > 1 else 0


def traffic_of(config: AnyConfig, state: int, *, sample: int, tokens: int = 0) -> Traffic:
    """Return what the processes of this program would send each other in a configured run.

    Args:
        config: Of the run.
        state: Bytes of what a member has learnt.
        sample: Bytes of a sample that others learn from, as `lent_bytes` returns them.
        tokens: Of a completion; 0 where nothing is written.
    """
    schedule = config.schedule
    return Traffic(
        members=config.population.size,
        shares=shares_of(config.population.size),
        samples=schedule.samples_per_step,
        steps=schedule.steps_per_generation,
        state=state,
        tokens=tokens,
        sources=others_at_most(config.experience, config.population.size),
        sample=sample,
    )


def lent_bytes(config: AnyConfig, *, actions: int, each: int = 0, shared: int = 0) -> int:
    """Return the bytes of a sample that members in other processes learn from.

    Args:
        config: Of the run.
        actions: Tokens or actions of the longest.
        each: Bytes of what was seen and earned at each of them.
        shared: Tokens of the prompt.
    """
    untold = config.precision == "bfloat16" or config.agent.objective.importance_correction is not None
    action = LENT_TOKEN + each + (TOLD if untold else 0)
    group = min(config.hyperparameters.group_size, config.schedule.samples_per_step)
    return LENT_SAMPLE + actions * action + PROMPT_TOKEN * shared // group


def shares_of(members: int) -> list[int]:
    """Return how many of so many members each process of the run holds: one at least, to be asked questions."""
    count = processes().size
    return [max(1, len(own)) for own in Places(members, count, 0).shares]


def sharing(device: str) -> int:
    """Return how many processes of a run share a device's memory where it is most; all of them ask.

    Args:
        device: Of the process that asks, such as "cpu" or "cuda:1".
    """
    place = (socket.gethostname(), "cuda:0" if device == "cuda" else device)
    return max(Counter(processes().all(place)).values())
