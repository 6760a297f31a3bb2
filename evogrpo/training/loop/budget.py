"""Limits on steps or tokens that count everything: whether a further learning step and its evaluation fit into them."""

from evogrpo.training.loop.progress import Progress
from evogrpo.training.schedule import Schedule


def overstepped(schedule: Schedule, progress: Progress, *, samples: int, answers: int) -> str | None:
    """Return in words which limit another learning step would overstep, with an evaluation after it; None if none.

    Both are expected to take what the latest step took. Where limits leave evaluations out, none is overstepped so: a
    run then ends with the learning step that reaches its limit.

    Args:
        schedule: With the limits.
        progress: Where the run stands.
        samples: Of a learning step, all members'.
        answers: Of the evaluation.
    """
    if not (schedule.count_evaluations and progress.latest_timesteps):
        return None
    evaluation = answers * progress.latest_timesteps / samples
    spent = progress.spent(evaluations=True)
    steps = {"timesteps": progress.latest_timesteps, "tokens": progress.latest_tokens}
    for name, limit in (("timesteps", schedule.max_timesteps), ("tokens", schedule.max_tokens)):
        if limit is not None and spent[name] + steps[name] + evaluation > limit:
            return f"max_{name} {limit:,} leave no room for another learning step, after {spent[name]:,}"
    return None
