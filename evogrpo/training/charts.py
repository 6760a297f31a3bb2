"""The curves of a run: every member's numbers by name and slot, and the best and the mean of what members earn.

Tags are `name/slot_0`, `name/slot_1` and so on, and for what is in `EARNED` also `name/best` and `name/mean`, so that
the curves of a name stand side by side; the charts of "population" show those of `CHARTED` in one. What a learning step
measured, and the evaluation after it, stands under that step's number: a resumed run goes on where the stored one was.

Members that play have Stable-Baselines3's names for episodes; completions and tokens are spoken of for language models.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from evogrpo.history.records import MemberReport

EARNED = ("fitness", "reward", "rollout/ep_rew_mean")
"""What is also shown for all members together."""
CHARTED = ("fitness", "reward")
"""What has a chart with all its curves in it, under "custom scalars"."""

CURVES: Mapping[str, str] = {
    "fitness": "what selection goes by: the mean raw reward per held-out question, or what `fitness:` says",
    "measured_greedy": "mean reward of greedy answers to the validation questions",
    "measured_sampled": "mean reward of answers to them that are sampled at temperature 1",
    "measured_rollouts": "mean training reward of the last half of a generation's learning steps, start by start",
    "evaluation_cost": "tokens (small networks: steps) that the member's evaluation took",
}
"""What stands in the curves once a generation beside the hyperparameters that can differ, and what it means."""

_PLAYED: Mapping[str, str] = {
    "completions/min_length": "rollout/ep_len_min",
    "completions/max_length": "rollout/ep_len_max",
    "completions/clipped_ratio": "rollout/truncated_ratio",
    "num_tokens": "num_transitions",
    "tokens": "transitions",
}
"""What a step measured of any members -> its name where these play."""
_WRITTEN = ("completions/", "sampling/sampling_logp_difference/")
"""What else begins like this is of members that write: lengths of texts, and samplers that are not the trainer."""


def step_curves(members: Mapping[int, Mapping[str, float | None]], *, plays: bool) -> dict[str, float]:
    """Return the curves' values after a learning step, by tag.

    Args:
        members: What it measured of each, by slot; None = not finite.
        plays: Whether members take steps in an environment, rather than write.
    """
    return _curves({slot: dict(_of_players(each)) if plays else each for slot, each in members.items()})


def generation_curves(members: Sequence[MemberReport], evolving: Collection[str]) -> dict[str, float]:
    """Return the curves' values after an evaluation, by tag: fitness however measured, its cost, and what can differ.

    Args:
        members: Those that are alive.
        evolving: Names of the hyperparameters that evolve. Others are shown where members differ all the same.
    """
    values = {member.slot: member.hyperparameters.to_json() for member in members}
    first = next(iter(values.values()), {})
    shown = [name for name in first if name in evolving or any(own[name] != first[name] for own in values.values())]
    curves: dict[int, dict[str, float | None]] = {}
    for member in members:
        numbers = {name: own for name in shown if not isinstance(own := values[member.slot][name], str)}
        others = {f"measured_{name}": each.mean for name, each in member.measured.items()}
        cost = {} if member.evaluation is None else {"evaluation_cost": float(member.evaluation.tokens)}
        curves[member.slot] = {"fitness": member.fitness, **others, **cost, **numbers}
    return _curves(curves)


def layout() -> dict[str, dict[str, list[object]]]:
    """Return what TensorBoard shows as charts of several curves."""
    return {"population": {name: ["Multiline", [f"^{name}/"]] for name in CHARTED}}


def _of_players(measured: Mapping[str, float | None]) -> Iterator[tuple[str, float | None]]:
    for name, value in measured.items():
        if name in _PLAYED:
            yield _PLAYED[name], value
        elif not name.startswith(_WRITTEN):
            yield name, value


def _curves(members: Mapping[int, Mapping[str, float | None]]) -> dict[str, float]:
    curves = {
        f"{name}/slot_{slot}": value
        for slot, each in members.items()
        for name, value in each.items()
        if value is not None
    }
    for name in EARNED:
        values = [value for each in members.values() if (value := each.get(name)) is not None]
        if values:
            curves |= {f"{name}/best": max(values), f"{name}/mean": sum(values) / len(values)}
    return curves
