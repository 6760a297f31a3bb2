"""The plan of a run in words: what will be trained, and the arithmetic behind `--dry-run`."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evogrpo.envs.groups import SPLITS
from evogrpo.evolution.strategies import BUILT_IN
from evogrpo.hyperparameters import RLParameter, Value
from evogrpo.objective import Objective
from evogrpo.report.text import count_text, duration_text, number_text, printable
from evogrpo.report.words import LANGUAGE, NETWORKS
from evogrpo.training.configuration.environment_tasks import EnvironmentTask
from evogrpo.training.configuration.members import AgentConfig
from evogrpo.training.configuration.own_strategies import strategy_record
from evogrpo.training.configuration.question_tasks import DatasetTask, QuestionTask, Task
from evogrpo.training.configuration.record import Config, default_hyperparameters
from evogrpo.training.forecast import Arithmetic, LanguageArithmetic, Memory, NetworkArithmetic, Rounds
from evogrpo.training.prepared import Prepared, PreparedLanguage, PreparedNetworks


def show_plan(console: Console, prepared: Prepared, run_dir: Path) -> None:
    """Print what will be trained, in a few lines."""
    config = prepared.config
    start = ", ".join(f"{name} {number_text(value)}" for name, value in _start(config).items())
    rows = {
        **(_models(prepared) if isinstance(prepared, PreparedLanguage) else _networks(prepared)),
        "start": f"{start}{'' if _all_alike(config) else '; the other members spread over what evolves'}",
        "evolving": _evolving(prepared),
        "objective": _objective(config.agent.objective),
        "schedule": _schedule(config),
        "run directory": str(run_dir),
        **_your_code(config.task),
    }
    _show(console, rows)


def _models(prepared: PreparedLanguage) -> dict[str, str]:
    config = prepared.config
    return {
        "model": f"{prepared.model} on {prepared.device}",
        "task": f"{config.task.label}: {_sizes(prepared)} questions",
        "population": f"{_count(config.population.size, 'member')}, each a LoRA adapter of "
        f"rank {prepared.agent.lora.r}",
    }


def _networks(prepared: PreparedNetworks) -> dict[str, str]:
    config, network, env = prepared.config, prepared.agent.network, prepared.env
    layers = f"{'-'.join(map(str, network.hidden))} {network.activation}" if network.hidden else "linear"
    normalised = ", observations normalised" if prepared.agent.normalise_observations else ""
    native = "vectorised natively" if env.native else "one environment per lane"
    return {
        "environment": f"{config.task.label}, {native}: {_sizes(prepared)} starts",
        "population": f"{_count(config.population.size, 'member')}, each a network ({layers}, "
        f"{count_text(prepared.parameters)} parameters) on {prepared.device}{normalised}",
    }


def _sizes(prepared: Prepared) -> str:
    return ", ".join(f"{split} {count_text(prepared.env.size(split))}" for split in SPLITS)


def _your_code(task: Task) -> dict[str, str]:
    """Name the user's code that will be run, and say where rewards are computed and what stops them."""
    if isinstance(task, EnvironmentTask):
        module, colon, _ = task.env.partition(":")
        return {"your code": f"module {module}, which registers the environment"} if colon else {}
    if isinstance(task, DatasetTask):
        functions = task.reward if isinstance(task.reward, tuple) else (task.reward,)
        return {"your code": ", ".join(functions), **_rewards(task)}
    return _rewards(task)


def show_arithmetic(console: Console, prepared: Prepared, arithmetic: Arithmetic) -> None:
    """Print the arithmetic of a run that is not started."""
    if isinstance(arithmetic, LanguageArithmetic):
        rows = _language_rows(prepared.config, arithmetic)
    else:
        rows = _network_rows(prepared.config, arithmetic)
    console.print(Text("Arithmetic", "bold"))
    _show(console, rows)
    console.print("nothing was trained: leave out --dry-run to start")


def _language_rows(config: Config, arithmetic: LanguageArithmetic) -> dict[str, str]:
    size, samples = config.population.size, config.schedule.samples_per_step
    assert isinstance(config.agent, AgentConfig)
    fewest, most = arithmetic.optimizer_steps
    tokens = f"at most {count_text(arithmetic.tokens_per_step)} a learning step"
    if arithmetic.tokens is not None:
        tokens += f", {count_text(arithmetic.tokens)} in all"
    return {
        "samples": f"{samples} completions per member and learning step, {size * samples} in all"
        f"{_refills(config.agent.objective)}",
        "groups": _groups(arithmetic.rounds),
        "optimizer": f"{fewest if fewest == most else f'{fewest} to {most}'} steps per member and learning step",
        "steps": _steps(config, arithmetic.rounds, "completions of held-out questions"),
        "tokens": f"{tokens} (prompts of at most {arithmetic.longest_prompt}, completions of at most "
        f"{config.agent.max_output_tokens}; updates included, evaluations left out)",
        "parameters": f"{_millions(arithmetic.parameters)} in the base, "
        f"{_millions(arithmetic.adapter_parameters)} in each member's adapter",
        "memory": _memory(arithmetic.memory, size),
        "completions": _completions(config),
    }


def _network_rows(config: Config, arithmetic: NetworkArithmetic) -> dict[str, str]:
    size, samples = config.population.size, config.schedule.samples_per_step
    longest, steps, most = arithmetic.episode_steps, arithmetic.environment_steps, arithmetic.optimizer_steps
    unlimited = "unknown, as episodes of this environment have no limit: set task.max_episode_steps to give them one"
    return {
        "samples": f"{samples} episodes per member and learning step, {size * samples} in all"
        f"{_refills(config.agent.objective)}",
        "groups": _groups(arithmetic.rounds),
        "environment": f"at most {count_text(steps)} steps a learning step, all members, for episodes of {longest}"
        if steps is not None
        else unlimited,
        "optimizer": f"at most {most} steps per member and learning step" if most is not None else unlimited,
        "steps": _steps(config, arithmetic.rounds, "episodes from held-out starts"),
        "parameters": f"{count_text(arithmetic.parameters)} in each member's network as it starts",
    }


def _groups(rounds: Rounds) -> str:
    groups = ", ".join(f"{_count(count, 'group')} of {group}" for group, count in rounds.groups.items())
    return f"{groups} per member and learning step"


def _steps(config: Config, rounds: Rounds, held_out: str) -> str:
    if rounds.learning_steps is None or rounds.evaluated is None:
        return "until tokens or seconds run out"
    schedule = config.schedule
    return (
        f"{rounds.learning_steps} = {schedule.generations} generations × {schedule.steps_per_generation}, and "
        f"{count_text(rounds.evaluated)} {held_out}"
    )


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
    given, defaults = config.hyperparameters.to_json(), default_hyperparameters(config.task).to_json()
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


def _rewards(task: QuestionTask) -> dict[str, str]:
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


def _evolving(prepared: Prepared) -> str:
    config = prepared.config
    strategy = strategy_record(config.strategy)
    if strategy["name"] == "no_evolution":
        return "nothing: the control, without selection and mutation"
    spaces = ", ".join(f"{name} in {_range(parameter)}" for name, parameter in config.evolve.items())
    if isinstance(prepared, PreparedNetworks) and prepared.agent.evolve_network is not None:
        spaces = f"{spaces}{', ' if spaces else ''}the networks themselves"
    shown = ("size", "z") if strategy["name"] in BUILT_IN else config.strategy.to_json()
    details = ", ".join(f"{key} {strategy[key]}" for key in shown)
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


def _schedule(config: Config) -> str:
    schedule, ends = config.schedule, []
    if schedule.generations is not None:
        ends.append(_count(schedule.generations, "generation"))
    if schedule.max_tokens is not None:
        unit = (NETWORKS if isinstance(config.task, EnvironmentTask) else LANGUAGE).tokens
        ends.append(f"{count_text(schedule.max_tokens)} {unit}")
    if schedule.max_seconds is not None:
        ends.append(duration_text(schedule.max_seconds))
    if schedule.target_fitness is not None:
        ends.append(f"fitness {number_text(schedule.target_fitness)}")
    return f"until {' or '.join(ends)}, {_count(schedule.steps_per_generation, 'learning step')} a generation"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{count_text(number)} {what}{'' if number == 1 else plural}"


def _memory(memory: Memory, size: int) -> str:
    return (
        f"about {_gigabytes(memory.total)} at the peak (an estimate): base {_gigabytes(memory.base)} + members "
        f"{_gigabytes(memory.members)} ({size} × adapter and two moments, float32) + the larger of learning "
        f"{_gigabytes(memory.learning)} (activations and logits of a micro-batch) and sampling "
        f"{_gigabytes(memory.sampling)} (keys and values); Python and its libraries come on top"
    )


def _refills(objective: Objective) -> str:
    most = objective.dynamic_sampling
    times = "once" if most == 1 else f"up to {most} times"
    return f"; groups whose rewards are all equal are sampled anew {times}" if most else ""


def _completions(config: Config) -> str:
    most, form = config.logging.completions, config.logging.completions_format
    return f"{most} of each learning step are written as {form}" if most else "none are written"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else count_text(count)
