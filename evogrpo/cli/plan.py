"""The plan of a run in words: what will be trained, and the arithmetic behind `--dry-run`."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evogrpo.hyperparameters import Hyperparameters, RLParameter, Value
from evogrpo.objective import Objective
from evogrpo.report.text import count_text, duration_text, number_text, printable
from evogrpo.training.config import Config
from evogrpo.training.launch import Prepared
from evogrpo.training.planning import Arithmetic
from evogrpo.training.schedule import Schedule
from evogrpo.training.tasks import DatasetTask, Task


def show_plan(console: Console, prepared: Prepared, run_dir: Path) -> None:
    """Print what will be trained, in a few lines."""
    config, env = prepared.config, prepared.env
    sizes = ", ".join(f"{split} {count_text(env.size(split))}" for split in ("train", "validation", "test"))
    size = config.population.size
    start = ", ".join(f"{name} {number_text(value)}" for name, value in _start(config).items())
    rows = {
        "model": f"{config.model} on {prepared.device}",
        "task": f"{config.task.label}: {sizes} questions",
        "population": f"{_count(size, 'member')}, each a LoRA adapter of rank {config.agent.lora.r}",
        "start": f"{start}{'' if _all_alike(config) else '; the other members spread over what evolves'}",
        "evolving": _evolving(config),
        "objective": _objective(config.agent.objective),
        "schedule": _schedule(config.schedule),
        "run directory": str(run_dir),
    }
    if isinstance(config.task, DatasetTask):
        functions = config.task.reward if isinstance(config.task.reward, tuple) else (config.task.reward,)
        rows = {**rows, "your code": ", ".join(functions)}
    rows |= _rewards(config.task)
    _show(console, rows)


def show_arithmetic(console: Console, prepared: Prepared, arithmetic: Arithmetic) -> None:
    """Print the arithmetic of a run that is not started."""
    config = prepared.config
    schedule, size = config.schedule, config.population.size
    samples = schedule.samples_per_step
    groups = ", ".join(f"{count} groups of {group}" for group, count in arithmetic.groups.items())
    fewest, most = arithmetic.optimizer_steps
    steps = "until tokens or seconds run out"
    tokens = f"at most {count_text(arithmetic.tokens_per_step)} a learning step"
    if arithmetic.learning_steps is not None and arithmetic.evaluated is not None:
        steps = (
            f"{arithmetic.learning_steps} = {schedule.generations} generations × {schedule.steps_per_generation}, and "
            f"{count_text(arithmetic.evaluated)} completions of held-out questions"
        )
        tokens += f", {count_text(arithmetic.tokens)} in all"
    rows = {
        "samples": f"{samples} completions per member and learning step, {size * samples} in all{_refills(config)}",
        "groups": f"{groups} per member and learning step",
        "optimizer": f"{fewest if fewest == most else f'{fewest} to {most}'} steps per member and learning step",
        "steps": steps,
        "tokens": f"{tokens} (prompts of at most {arithmetic.longest_prompt}, completions of at most "
        f"{config.agent.max_output_tokens}; updates included, evaluations left out)",
        "parameters": f"{_millions(arithmetic.parameters)} in the base, "
        f"{_millions(arithmetic.adapter_parameters)} in each member's adapter",
        "memory": _memory(arithmetic, size),
        "completions": _completions(config),
    }
    console.print(Text("Arithmetic", "bold"))
    _show(console, rows)
    console.print("nothing was trained: leave out --dry-run to start")


def _show(console: Console, rows: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    console.print(table)
    console.print()


def _start(config: Config) -> dict[str, Value]:
    """Return what evolves, or the first three; and whatever else is set to something of its own."""
    names = list(config.evolve) or ["lr", "clip_coef", "group_size"]
    given, defaults = config.hyperparameters.to_json(), Hyperparameters().to_json()
    # A loss type or an advantage that starts as the objective's is written out: None would say nothing.
    start = config.agent.objective.resolved(config.hyperparameters, config.evolve).to_json()
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


def _rewards(task: Task) -> dict[str, str]:
    """Write where rewards are computed and what stops them, where that has been set."""
    parts = []
    if task.reward_workers is not None:
        parts.append(_count(task.reward_workers, "worker process", "es"))
    if task.reward_timeout is not None:
        parts.append(f"at most {number_text(task.reward_timeout)} s a call")
    if task.on_reward_error == "exclude":
        parts.append("completions whose reward fails are left out")
    return {"rewards": ", ".join(parts)} if parts else {}


def _all_alike(config: Config) -> bool:
    return not config.evolve or not config.population.spread or config.population.size == 1


def _evolving(config: Config) -> str:
    strategy = config.strategy.to_json()
    if strategy["name"] == "no_evolution":
        return "nothing: the control, without selection and mutation"
    spaces = ", ".join(f"{name} in {_range(parameter)}" for name, parameter in config.evolve.items())
    details = ", ".join(f"{key} {value}" for key, value in strategy.items() if key in ("size", "z"))
    return f"{spaces or 'no hyperparameter, selection only'}; {strategy['name']} ({details})"


def _range(parameter: RLParameter) -> str:
    if parameter.choices is not None:
        return "{" + ", ".join(number_text(choice) for choice in parameter.choices) + "}"
    low, high = parameter.bounds
    return f"[{number_text(low)}, {number_text(high)}]{' (log)' if parameter.scale == 'log' else ''}"


def _schedule(schedule: Schedule) -> str:
    ends = []
    if schedule.generations is not None:
        ends.append(_count(schedule.generations, "generation"))
    if schedule.max_tokens is not None:
        ends.append(f"{count_text(schedule.max_tokens)} tokens")
    if schedule.max_seconds is not None:
        ends.append(duration_text(schedule.max_seconds))
    if schedule.target_fitness is not None:
        ends.append(f"fitness {number_text(schedule.target_fitness)}")
    return f"until {' or '.join(ends)}, {_count(schedule.steps_per_generation, 'learning step')} a generation"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{count_text(number)} {what}{'' if number == 1 else plural}"


def _memory(arithmetic: Arithmetic, size: int) -> str:
    memory = arithmetic.memory
    return (
        f"about {_gigabytes(memory.total)} at the peak (an estimate): base {_gigabytes(memory.base)} + members "
        f"{_gigabytes(memory.members)} ({size} × adapter and two moments, float32) + the larger of learning "
        f"{_gigabytes(memory.learning)} (activations and logits of a micro-batch) and sampling "
        f"{_gigabytes(memory.sampling)} (keys and values); Python and its libraries come on top"
    )


def _refills(config: Config) -> str:
    most = config.agent.objective.dynamic_sampling
    times = "once" if most == 1 else f"up to {most} times"
    return f"; groups whose rewards are all equal are sampled anew {times}" if most else ""


def _completions(config: Config) -> str:
    most, form = config.logging.completions, config.logging.completions_format
    return f"{most} of each learning step are written as {form}" if most else "none are written"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else count_text(count)
