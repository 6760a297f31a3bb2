"""What a learning step measured, under the names of Stable-Baselines3, for members that play environments.

Counters are a slot's since the run began, whoever lived there, and go on when a run is resumed. Where a name cannot
mean exactly what it means in Stable-Baselines3's PPO, `SB3_NAMES` says what it means here.
"""

import sys
from collections.abc import Mapping

from evogrpo.agents.population import Population
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.training.kinds.registry import RUN_KINDS
from evogrpo.training.loop.progress import Progress

SB3_NAMES: Mapping[str, str] = {
    "rollout/ep_rew_mean": "mean undiscounted return of the episodes learnt from in this step, not of the last 100; of "
    "several agents each counts for itself, averaged over a policy's agents, then over policies",
    "rollout/ep_len_mean": "mean steps of these episodes, likewise",
    "train/approx_kl": "as `approx_kl`: over all of the step's optimizer steps, not over those of the last epoch",
    "train/clip_fraction": "as `clip_fraction`, likewise",
    "train/learning_rate": "as `learning_rate`",
    "train/loss": "as `loss`: the mean over the step's optimizer steps, not the last one's",
    "train/entropy_loss": "minus `entropy`, over the actions that needed a forward pass",
    "train/clip_range": "half-width of the clip range; missing where its sides differ, as there is one number there",
    "train/policy_gradient_loss": "as `loss`; missing where `beta` or `entropy_coef` adds a term of its own",
    "train/n_updates": "passes over the samples of learning steps since the run began, as PPO counts them",
    "time/iterations": "learning steps since the run began",
    "time/time_elapsed": "seconds since the run began, evaluations included, pauses of a resumed run left out",
    "time/total_timesteps": "steps in the environment since the run began, every agent's counted; neither the "
    "transitions that updates pass over again nor steps of evaluations",
    "time/fps": "`time/total_timesteps` by `time/time_elapsed`: one member's; a population's is its members' sum",
}
"""Every one of these names and what it means here. Where it cannot mean anything, it is missing."""

_SAME = {
    "rollout/ep_rew_mean": "reward",
    "rollout/ep_len_mean": "completions/mean_length",
    "train/approx_kl": "approx_kl",
    "train/clip_fraction": "clip_fraction",
    "train/learning_rate": "learning_rate",
    "train/loss": "loss",
}


def names_of(
    measured: Mapping[str, float | None],
    hyperparameters: Hyperparameters,
    *,
    iterations: int,
    seconds: float,
    timesteps: int | None,
    epochs: int | None,
) -> dict[str, float]:
    """Return one member's learning step under the names of Stable-Baselines3; what was not measured is missing.

    Args:
        measured: Under the names of `evogrpo.agents.learning.metrics.NAMES`; None = not finite.
        hyperparameters: That the member learnt with.
        iterations: Learning steps since the run began.
        seconds: Wall-clock time since then.
        timesteps: Steps in the environment to learn from since then; None = not counted.
        epochs: Passes over learning steps' samples since then; None = not counted.
    """
    low, high = hyperparameters.clip_bounds
    entropy = measured.get("entropy")
    values = {
        **{name: measured.get(own) for name, own in _SAME.items()},
        "train/entropy_loss": None if entropy is None else -entropy,
        "train/clip_range": high if low == high else None,  # one number there
        # With another term in it, the loss is not the policy's alone.
        "train/policy_gradient_loss": None
        if hyperparameters.beta or hyperparameters.entropy_coef
        else measured.get("loss"),
        "train/n_updates": epochs,
        "time/iterations": iterations,
        "time/time_elapsed": int(seconds),
        "time/total_timesteps": timesteps,
        "time/fps": None if timesteps is None else int(timesteps / max(seconds, sys.float_info.epsilon)),
    }
    return {name: value for name, value in values.items() if value is not None}


def sb3_names(
    population: Population, progress: Progress, measured: Mapping[int, Mapping[str, float | None]]
) -> dict[int, dict[str, float]]:
    """Return `names_of` the members of a counted learning step, by slot; none for members that write."""
    kind = RUN_KINDS.get(population.members.kind)
    if kind is None or not kind.sb3_names:
        return {slot: {} for slot in measured}
    return {
        slot: names_of(
            each,
            population.agents[slot].hyperparameters,
            iterations=progress.step,
            seconds=progress.seconds,
            timesteps=progress.slot_timesteps[slot] if progress.slot_timesteps else None,
            epochs=progress.slot_epochs[slot] if progress.slot_epochs else None,
        )
        for slot, each in measured.items()
    }
