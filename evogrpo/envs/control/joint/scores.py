"""What a joint episode is worth as fitness: whose returns count, and how they are put together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evogrpo.envs.control.joint.assignment import listed, prefix_of
from evogrpo.envs.identity import code_hash

ScoreFunction = Callable[[Mapping[str, float]], float]
"""(what each agent earned in a joint episode) -> what the episode is worth to whoever selects members."""

Score = str | Sequence[str] | ScoreFunction
"""How callers name one: "sum", "min" or "mean" over all agents; agents, or groups of agents named alike but for their
number, whose returns are added up; or a function."""


def summed(returns: Mapping[str, float]) -> float:
    """Return what all agents earned together."""
    return float(sum(returns.values()))


def _least(returns: Mapping[str, float]) -> float:
    return float(min(returns.values(), default=0.0))


def _mean(returns: Mapping[str, float]) -> float:
    return summed(returns) / max(1, len(returns))


_OVER_ALL: Mapping[str, tuple[ScoreFunction, str]] = {
    "sum": (summed, "what all agents earn together"),
    "min": (_least, "what the agent earns that earns least"),
    "mean": (_mean, "what an agent earns on average"),
}


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A score that was chosen.

    Attributes:
        function: What computes it.
        label: What it is, in words.
        identity: What tells it from others, for fingerprints.
        by_default: Whether nobody chose it: the sum, which says nothing where agents are opposed.
        sum_is_meant: Whether somebody chose the sum.
    """

    function: ScoreFunction
    label: str
    identity: str
    by_default: bool = False
    sum_is_meant: bool = False


def scoring(score: Score, agents: Sequence[str]) -> Scoring:
    """Return the score that a caller names.

    Args:
        score: See `Score`.
        agents: The agents that are known beforehand.

    Raises:
        ValueError: If it names an agent that is not among them, or nothing at all.
    """
    if callable(score):
        name = getattr(score, "__name__", type(score).__name__)
        label = _OVER_ALL["sum"][1] if score is summed else f"your {name}"
        identity = f"code {code_hash(score)}"
        return Scoring(function=score, label=label, identity=identity, by_default=score is summed)
    if isinstance(score, str) and score in _OVER_ALL:
        function, label = _OVER_ALL[score]
        identity = f"code {code_hash(function)}"
        return Scoring(function=function, label=label, identity=identity, sum_is_meant=function is summed)
    named = _named(score, agents)
    chosen = tuple(agent for agent in agents if agent in named or prefix_of(agent) in named)

    def earned(returns: Mapping[str, float]) -> float:
        # By name, not by `chosen`: agents of a group may be born that nobody knew.
        return float(sum(own for agent, own in returns.items() if agent in named or prefix_of(agent) in named))

    label = f"what {listed(chosen)} {'earns' if len(chosen) == 1 else 'earn together'}"
    return Scoring(function=earned, label=label, identity=f"returns of {', '.join(sorted(named))}")


def _named(score: Score, agents: Sequence[str]) -> frozenset[str]:
    names = [score] if isinstance(score, str) else list(score) if isinstance(score, Sequence) else []
    groups = list(dict.fromkeys(map(prefix_of, agents)))
    wrong = [name for name in names if name not in agents and name not in groups]
    if wrong or not names:
        raise ValueError(
            f"score must be one of {', '.join(map(repr, _OVER_ALL))}, a function of what each agent earned, or name "
            f"agents ({', '.join(agents)}) or groups of agents named alike but for their number ({', '.join(groups)}), "
            f"got {wrong[0] if wrong else score!r}"
        )
    return frozenset(names)
