"""What a generation costs on many GPUs, by a model on paper; what waiting for the slowest costs, by simulation.

    python benchmarking/scale_model.py                      # the tables of docs/scale.md
    python benchmarking/scale_model.py --figure docs/scale.png

None of it was measured on a GPU. Bytes and messages are those that `evogrpo.training.traffic` counts, which were
measured; cards' figures are their makers'; what is attained of them is assumed, and stands in `Card`, or is what one
core attains of its own speed here, by `scale_fit.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarking.scale_waiting import simulate
from evogrpo.training.memory import state_size
from evogrpo.training.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU and its links; the defaults are NVIDIA's data sheet of the H100 SXM, in one direction.

    Attributes:
        memory: Bytes.
        bandwidth: Of it, bytes a second.
        flops: Dense bfloat16, a second.
        host: Bytes a second to and from the machine's memory, PCIe 5.0 x16.
        network: Bytes a second between machines, for each card: 400 Gbit/s InfiniBand.
        delay: Seconds of a message through the CPU and TCP (assumed).
        disk: Bytes a second that a checkpoint is hashed and written with (assumed).
        attained_bandwidth: Which part of the bandwidth decoding attains (assumed).
        attained_flops: Which part of the operations prompts and learning attain (assumed).
    """

    memory: float = 80e9
    bandwidth: float = 3.35e12
    flops: float = 989e12
    host: float = 64e9
    network: float = 50e9
    delay: float = 1e-4
    disk: float = 1e9
    attained_bandwidth: float = 0.5
    attained_flops: float = 0.4


@dataclass(frozen=True, kw_only=True)
class Base:
    """A frozen language model in bfloat16, and adapters of rank 16 on all its linear layers.

    Attributes:
        name: For people.
        parameters: Of the model.
        layers: How many.
        hidden: Width.
        intermediate: Width within the feed-forward layers.
        heads: Width of all query heads.
        key_heads: Width of all key heads.
        rank: Of the adapters.
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    rank: int = 16

    @property
    def size(self) -> float:
        """Bytes of its weights."""
        return 2 * self.parameters

    @property
    def adapter(self) -> int:
        """Parameters of one adapter: rank x (in + out) for each of a layer's seven matrices."""
        attention = 2 * (self.hidden + self.heads) + 2 * (self.hidden + self.key_heads)
        return self.layers * self.rank * (attention + 3 * (self.hidden + self.intermediate))

    @property
    def cached(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * 2 * self.layers * self.key_heads


BASES = (
    Base(name="0.5B", parameters=0.494e9, layers=24, hidden=896, intermediate=4864, heads=896, key_heads=128),
    Base(name="7B", parameters=7.62e9, layers=28, hidden=3584, intermediate=18944, heads=3584, key_heads=512),
    Base(name="70B", parameters=70.6e9, layers=80, hidden=8192, intermediate=28672, heads=8192, key_heads=1024),
)
"""Shapes of Qwen2.5-0.5B and 7B and of Llama-3.1-70B, by their configurations."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a member does in a generation.

    Attributes:
        samples: Completions of a learning step.
        group: Completions of a prompt.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion, on average.
        longest: Tokens of the longest one in a batch: until then everybody's cards decode.
        steps: Learning steps of a generation.
        validation: Held-out questions that a member answers.
    """

    samples: int = 64
    group: int = 8
    prompt: int = 256
    completion: int = 512
    longest: int = 2048
    steps: int = 10
    validation: int = 64


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A generation's seconds by what they are spent on, and the memory it takes.

    Attributes:
        base: Which model.
        cards: How many.
        together: Cards that hold one base, and are one process here.
        members: Of each such group of cards.
        sampling: Seconds of writing, held-out answers included.
        learning: Seconds of learning.
        records: Seconds of telling each other.
        cloning: Seconds of handing learner states over, one after the other.
        saving: Seconds of gathering and writing a checkpoint.
        card_bytes: Memory of a card that base, members and caches take.
        leader_bytes: Memory of the leading process's machine while it saves.
        records_bytes: Records that every process gets.
    """

    base: str
    cards: int
    together: int
    members: int
    sampling: float
    learning: float
    records: float
    cloning: float
    saving: float
    card_bytes: float
    leader_bytes: float
    records_bytes: float

    @property
    def seconds(self) -> float:
        """Of the generation."""
        return self.sampling + self.learning + self.exchange

    @property
    def exchange(self) -> float:
        """Seconds in which no card computes."""
        return self.records + self.cloning + self.saving


def cards_for(base: Base, card: Card) -> int:
    """Return how many cards hold a base in a quarter of their memory, a power of two."""
    return 2 ** max(0, math.ceil(math.log2(4 * base.size / card.memory)))


def generation(base: Base, cards: int, members: int, card: Card, work: Work) -> Cost:
    """Return what a generation costs if each process has so many members.

    A decoded token reads all weights once, and the keys and values of all rows; a prompt's token takes 2 operations a
    parameter, a learnt one 4, as the base's own weights have no gradient, and 2 more for checkpointed activations.
    """
    together = min(cards, cards_for(base, card))
    processes = cards // together
    rows = members * work.samples
    context = work.prompt / work.group + work.completion / 2
    bandwidth, flops = together * card.bandwidth * card.attained_bandwidth, together * card.flops * card.attained_flops
    token = max((base.size + rows * context * base.cached) / bandwidth, 2 * base.parameters * rows / flops)
    prompts = 2 * base.parameters * rows / work.group * work.prompt / flops
    one = work.longest * token + prompts
    learnt = rows * (work.prompt / work.group + work.completion)
    traffic = Traffic(
        members=members * processes,
        shares=[members] * processes,
        samples=work.samples,
        steps=work.steps,
        state=state_size(base.adapter),
        tokens=work.completion,
    )
    hops = math.ceil(math.log2(processes)) if processes > 1 else 0
    stored = processes * members * traffic.state
    return Cost(
        base=base.name,
        cards=cards,
        together=together,
        members=members,
        sampling=one * (work.steps + work.validation / work.samples),
        learning=work.steps * learnt * 6 * base.parameters / flops,
        records=traffic.records / card.network + traffic.messages * hops * card.delay,
        cloning=traffic.clones / 2 * traffic.state * (2 / card.host + 1 / card.network),
        saving=traffic.gathered * (1 / card.host + 1 / card.network) + stored / card.disk,
        card_bytes=(base.size + rows * (work.prompt / work.group + work.longest) * base.cached) / together
        + members * traffic.state,
        leader_bytes=stored,
        records_bytes=traffic.records,
    )


# ---- what is printed


def cost_table(card: Card, work: Work) -> Iterator[str]:
    """Yield the lines of the table of costs."""
    yield (
        "| base | GPUs | a base on | members | sampling | learning | records | cloning | saving | idle by exchange "
        "| on a GPU | leader holds | records to each |"
    )
    yield "|" + "---|" * 13
    for base in BASES:
        for cards in (8, 64, 1000):
            cost = generation(base, cards, 4, card, work)
            processes = cards // cost.together
            yield (
                f"| {base.name} | {cards:,} | {cost.together} | {4 * processes:,} | {cost.sampling:,.0f} s "
                f"| {cost.learning:,.0f} s | {cost.records:.1f} s | {cost.cloning:.1f} s | {cost.saving:,.1f} s "
                f"| {cost.exchange / cost.seconds:.0%} | {cost.card_bytes / 1e9:.0f} GB "
                f"| {cost.leader_bytes / 1e9:,.0f} GB | {cost.records_bytes / 1e6:,.0f} MB |"
            )


ATTAINED = Card(attained_bandwidth=0.28, attained_flops=0.88)
"""A GPU of whose speed as much is attained as of a CPU core's, by `scale_fit.py`."""
COUNTS = (2, 8, 64, 250, 1000)
ARMS = {"equal cards": 0.0, "cards that differ by 10 %": 0.1}


def waiting_table() -> Iterator[str]:
    """Yield the lines of the table of the simulation."""
    heads = (
        "processes",
        "cards",
        "waits, meeting each step",
        "each generation",
        "records apart",
        "found",
        "if waiting",
    )
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for name, slower in ARMS.items():
        for count in COUNTS:
            found = simulate(count, slower=slower)
            yield (
                f"| {count:,} | {name} | {found.step:.0%} | {found.generation:.0%} | {found.apart:.2f} generations "
                f"| {found.picked:.0%} | {found.together:.0%} |"
            )


def draw(path: Path) -> None:
    """Draw what the simulation found."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    waiting, picking = figure.subplots(1, 2)
    for name, slower in ARMS.items():
        found = [simulate(count, slower=slower) for count in COUNTS]
        style = "-" if not slower else "--"
        waiting.plot(COUNTS, [100 * each.step for each in found], f"C0o{style}", label=f"meeting each step, {name}")
        waiting.plot(COUNTS, [100 * each.generation for each in found], f"C1s{style}", label=f"each generation, {name}")
        picking.plot(COUNTS, [100 * each.picked for each in found], f"C2^{style}", label=f"never waiting, {name}")
        if not slower:  # who waits does equal work, whatever the cards
            picking.plot(COUNTS, [100 * each.together for each in found], "C0o-", label="waiting")
    waiting.plot(COUNTS, [0] * len(COUNTS), "C2:", label="never meeting (asynchronous)")
    waiting.set(title="What is waited", ylabel="part of the time, %", xlabel="processes", xscale="log", ylim=(-3, 100))
    picking.set(
        title="What not waiting costs", ylabel="of the best quarter, found by the plan, %", xlabel="processes",
        xscale="log", ylim=(0, 105),
    )  # fmt: skip
    for panel in (waiting, picking):
        panel.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
        panel.minorticks_off()
        panel.legend(fontsize="small", frameon=False, loc="best")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main(given: Sequence[str]) -> None:
    """Print the tables, and draw the figure if one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to draw the simulation, such as docs/scale.png")
    chosen = parser.parse_args(given)
    for line in (*cost_table(Card(), Work()), "", *cost_table(ATTAINED, Work()), "", *waiting_table()):
        print(line)
    if chosen.figure is not None:
        draw(chosen.figure)


if __name__ == "__main__":
    main(sys.argv[1:])
