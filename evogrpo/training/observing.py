"""From a population's state to plain numbers: member reports, metrics and example completions."""

import math
from collections.abc import Mapping

from evogrpo.agents.collecting import Collected
from evogrpo.agents.population import Population
from evogrpo.envs.groups import GroupEnvironment
from evogrpo.evolution.fitness import Fitness
from evogrpo.records import LearnReport
from evogrpo.training.progress import Progress
from evogrpo.training.reports import Example, MemberReport


def member_reports(population: Population, progress: Progress) -> tuple[MemberReport, ...]:
    """Describe every member at the end of a generation, in slot order."""
    births = {birth.index: birth for birth in population.lineage.births}
    return tuple(
        MemberReport(
            slot=agent.slot,
            index=agent.index,
            parent=agent.parent,
            born=agent.born,
            hyperparameters=agent.hyperparameters,
            fitness=None if agent.fitness is None else agent.fitness.mean,
            standard_error=None if agent.fitness is None else agent.fitness.standard_error,
            failed=agent.failed,
            tokens=progress.member_tokens[agent.slot],
            seconds=progress.member_seconds[agent.slot],
            changes=births[agent.index].changes,
            reason=births[agent.index].reason,
            metrics=progress.mean_metrics(agent.slot),
        )
        for agent in population.agents
    )


def score(fitness: Fitness) -> dict[str, float]:
    """Return a fitness as the journal writes it."""
    return {"fitness": fitness.mean, "standard_error": fitness.standard_error}


def metrics(report: LearnReport) -> dict[str, float | None]:
    """Return a learning report's numbers; what was not measured is None, as JSON has no NaN."""
    values = {name: getattr(report, name) for name in report.__dataclass_fields__ if name != "failed"}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def examples_of(env: GroupEnvironment, collected: Collected, indices: Mapping[int, int]) -> tuple[Example, ...]:
    """Pick each member's first completion of a step, in words.

    Args:
        env: Where it was collected; one with a tokenizer shows the prompt as well.
        collected: The step's experience.
        indices: Who lives in each slot.
    """
    decode = getattr(getattr(env, "tokenizer", None), "decode", None)
    slots = collected.batch.member_ids.tolist()
    examples = []
    for slot, index in indices.items():
        row = slots.index(slot)
        prompt = collected.batch.inputs.prompts[int(collected.batch.inputs.prompt_ids[row])]
        reward = float(collected.scores.rewards[row])
        examples.append(
            Example(
                prompt=decode(list(prompt), skip_special_tokens=True) if decode else "",
                completion=collected.scores.completions[row],
                reward=reward if math.isfinite(reward) else None,
                index=index,
            )
        )
    return tuple(examples)
