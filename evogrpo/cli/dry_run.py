"""What a run is going to be, in words; and with `--dry-run` its arithmetic instead of the run."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evogrpo.algorithms.policies.placement import Placement
from evogrpo.config.hyperparameters import Hyperparameters, Value
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import RLParameter
from evogrpo.distributed import processes
from evogrpo.evolution.strategies import BUILT_IN
from evogrpo.reporting.results import terms_of
from evogrpo.text import count_text, duration_text, number_text, pluralize, printable
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.configuration.user_code import strategy_record
from evogrpo.training.forecast import check_memory, gigabytes, possible
from evogrpo.training.task_types.registry import task_type_of
from evogrpo.training.task_types.task_type import PreparedRun


def show_plan(console: Console, prepared: PreparedRun, run_dir: Path, *, preset: bool = False) -> None:
    """Print what will be trained, in a few lines; also whether it begins with the preset of its environment."""
    config = prepared.config
    start = ", ".join(f"{name} {number_text(value)}" for name, value in _start(config).items())
    rows = {
        **prepared.facts(),
        **({"preset": f"that of {config.task.label}; anything given as KEY=VALUE takes precedence"} if preset else {}),
        "start": f"{start}{'' if _all_alike(config) else '; the other members spread over what evolves'}",
        "evolving": _evolving(prepared),
        "objective": _objective(config.agent.objective),
        "schedule": _schedule(config),
        "run directory": str(run_dir),
        **process_layout(config.population.size, processes().size, groups=_most_groups(config)),
        **config.task.facts(),
    }
    _show(console, rows)


def process_layout(members: int, count: int, *, groups: int) -> dict[str, str]:
    """Say how many members each of several processes has, or how many processes each member.

    Args:
        members: How many there are.
        count: How many processes.
        groups: That a member has in a learning step, at most: as many processes can share them.
    """
    if count == 1:
        return {}
    places = Placement(members, count, 0)
    squads = Counter(len(ranks) for ranks in places.squads)
    if count <= members:
        told = f"{count}, {_told(Counter(len(own) for own in places.shares), _with_members)}"
    elif members == 1:
        told = f"{count}, which share the work of the one member"
    else:
        told = f"{count}, {_told(squads, _with_a_member)}"
    idle = sum(number * max(0, squad - groups) for squad, number in squads.items())
    if idle:
        told = f"{told}; {idle} would sample nothing, as a member has {pluralize(groups, 'group')} in a step"
    return {"processes": told}


def _told(numbers: Mapping[int, int], words: Callable[[int, int], str]) -> str:
    """Say the same of one number of things, or of two that differ by one."""
    if len(numbers) == 1:
        ((size, _),) = numbers.items()
        return words(size, 0)
    return " and ".join(words(size, number) for size, number in numbers.items())


def _with_members(size: int, number: int) -> str:
    whose = pluralize(size, "member")
    return f"{number} with {whose}{' each' if number > 1 else ''}" if number else f"with {whose} each"


def _with_a_member(size: int, number: int) -> str:
    if size == 1:
        return f"{number} with a member{' each' if number > 1 else ' of its own'}"
    if not number:
        return f"of which {size} at a time share the work of a member"
    return f"{size} that share the work of {'one member' if number == 1 else f'each of {number} members'}"


def _most_groups(config: AnyConfig) -> int:
    """Return how many groups a member can have in a learning step, as group sizes begin and evolve."""
    return config.schedule.samples_per_step // min(possible(config, "group_size"))


def show_forecast(console: Console, prepared: PreparedRun, *, skip_memory_check: bool) -> None:
    """Print the arithmetic of a run that is not started.

    Raises:
        ValueError: If it needs more memory than there is, unless that is allowed.
    """
    console.print(Text("Arithmetic", "bold"))
    forecast = prepared.forecast()
    rows = dict(forecast.rows(prepared.config))
    need = forecast.need
    if need is not None:
        if need.processes > 1:
            rows["together"] = f"{gigabytes(need.total)}, as {need.processes} processes share that memory"
        rows["there is"] = check_memory(need, allowed=True)
    _show(console, rows)
    if need is not None:
        check_memory(need, allowed=skip_memory_check, remedy="--skip-memory-check")


def _show(console: Console, rows: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    console.print(table)
    console.print()


def _start(config: AnyConfig) -> dict[str, Value]:
    """Return what evolves, or the first three; and whatever else is set to something of its own."""
    names = list(config.search_space) or ["lr", "clip_coef", "group_size"]
    given = config.hyperparameters.to_json()
    defaults = Hyperparameters(**task_type_of(config.task).hyperparameters).to_json()
    # A loss type or an advantage that starts as the objective's is written out: None would say nothing.
    start = config.agent.objective.resolved(config.hyperparameters, config.search_space).to_json()
    return {name: start[name] for name in given if name in names or given[name] != defaults[name]}


def _objective(objective: Objective) -> str:
    """Write the loss type, the advantage and every switch that is not at its default."""
    defaults, given = vars(Objective()), vars(objective)
    switches = [
        f"{name} {str(value).lower() if isinstance(value, bool) else number_text(value)}"
        for name, value in given.items()
        if name not in ("loss_type", "advantage") and value != defaults[name]
    ]
    return ", ".join([f"loss {objective.loss_type}", f"{objective.advantage} advantages", *switches])


def _all_alike(config: AnyConfig) -> bool:
    return not config.search_space or not config.population.spread or config.population.size == 1


def _evolving(prepared: PreparedRun) -> str:
    config = prepared.config
    strategy = strategy_record(config.strategy)
    if strategy["name"] == "fixed":
        return "nothing: the control, without selection and mutation"
    if strategy["name"] == "replay":
        return f"nothing: it follows a schedule of {pluralize(len(strategy['stages']), 'stage')}"
    if config.population.size == 1 and strategy["name"] in BUILT_IN:
        return "nothing, as there is only one member"
    spaces = ", ".join(f"{name} in {_range(parameter)}" for name, parameter in config.search_space.items())
    if prepared.networks_evolve:
        spaces = f"{spaces}{', ' if spaces else ''}the networks themselves"
    # Of a tournament, what decides how hard it selects; of others all settings.
    shown = ("size", "z") if strategy["name"] == "tournament" else config.strategy.to_json()
    details = ", ".join(f"{key} {strategy[key]}" for key in shown if not isinstance(strategy[key], Mapping))
    return f"{spaces or 'no hyperparameter, selection only'}; {strategy['name']}{details and f' ({details})'}"


def _range(parameter: RLParameter) -> str:
    if parameter.choices is not None:
        return "{" + ", ".join(number_text(choice) for choice in parameter.choices) + "}"
    low, high = parameter.bounds
    details = ["log"] if parameter.scale == "log" else []
    if parameter.founders is not None:
        details.append(f"founders {number_text(parameter.founders[0])} to {number_text(parameter.founders[1])}")
    words = f" ({', '.join(details)})" if details else ""
    return f"[{number_text(low)}, {number_text(high)}]{words}"


def _schedule(config: AnyConfig) -> str:
    schedule, ends = config.schedule, []
    if schedule.generations is not None:
        ends.append(pluralize(schedule.generations, "generation"))
    if schedule.max_timesteps is not None:
        ends.append(f"{count_text(schedule.max_timesteps)} steps in the environment")
    if schedule.max_tokens is not None:
        ends.append(f"{count_text(schedule.max_tokens)} {terms_of(task_type_of(config.task).word).tokens}")
    if schedule.max_seconds is not None:
        ends.append(duration_text(schedule.max_seconds))
    if schedule.target_fitness is not None:
        ends.append(f"fitness {number_text(schedule.target_fitness)}")
    return f"until {' or '.join(ends)}, {pluralize(schedule.steps_per_generation, 'learning step')} a generation"
