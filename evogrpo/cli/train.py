"""Commands `demo`, `train`, `replay` and `resume`: read the configuration, then start.

The configuration is read before torch is imported.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

import evogrpo
from evogrpo.synonyms import close_match
from evogrpo.training.console import make_console, spinner

if TYPE_CHECKING:
    from evogrpo.training.configuration.sections import Config


def demo(args: argparse.Namespace) -> int:
    """Train the packaged demo configuration."""
    overrides = _overrides(args)
    for text in overrides:
        if "=" not in text and Path(text).suffix in (".yaml", ".yml"):
            raise ValueError(f"demo takes no configuration file. Write `evogrpo train {text}`.")

    def read() -> "Config":
        """Return the packaged configuration, with the overrides of the command line."""
        from evogrpo.config.search_space import HyperparameterConfig
        from evogrpo.evolution.strategies import Fixed
        from evogrpo.training.configuration.reading import load_config

        with as_file(files("evogrpo.training.configuration") / "demo.yaml") as path:
            config = load_config(path, overrides)
        if not args.plain:
            return config
        # One agent takes as many samples as the population, and has nothing that evolves.
        size = config.population.size
        steps = config.schedule.steps_per_generation * size
        return dataclasses.replace(
            config,
            population=dataclasses.replace(config.population, size=1),
            schedule=dataclasses.replace(config.schedule, steps_per_generation=steps),
            search_space=HyperparameterConfig(),
            strategy=Fixed(),
        )

    name = "demo"
    if args.plain:
        name = "demo-plain"
    return _read_and_start(read, args, name)


def train(args: argparse.Namespace) -> int:
    """Train from a configuration file, or on an environment with packaged settings."""
    # 1. Options that stand for overrides.
    overrides = _overrides(args)
    if args.wrapper:
        if args.env is None:
            raise ValueError("--wrapper needs --env. In a configuration file, use task.wrappers.")
        overrides.append(f"task.wrappers={json.dumps(args.wrapper)}")
    # 2. With --env or --parallel-env, train with packaged settings.
    for option, key, name in (
        ("--env", "env", args.env),
        ("--parallel-env", "parallel_env", args.parallel_env),
    ):
        if name is not None:
            for text in overrides:
                # A word without "=" is a second CONFIG.
                setting = text.partition("=")[0].strip()
                if setting in (text.strip(), "task", f"task.{key}"):
                    raise ValueError(f"{option} {name} already sets the task. Remove {text!r}.")
            # Names such as "ALE/Pong-v5" cannot be the name of a folder.
            folder = re.sub(r"[^\w.-]+", "-", name)
            read_packaged = partial(_environment_config, key, name, overrides, args)
            return _read_and_start(read_packaged, args, folder)
    if args.preset:
        raise ValueError("--preset needs --env ID instead of CONFIG.")
    # 3. Otherwise the first word is CONFIG.
    is_override = bool(overrides) and "=" in overrides[0] and not Path(overrides[0]).exists()
    if not overrides or is_override:
        raise ValueError(
            "No configuration. Give a YAML file before KEY=VALUE, or --env ID, or --parallel-env"
            " MODULE."
        )
    path = Path(overrides[0])
    _check_config(path)

    def read() -> "Config":
        from evogrpo.training.configuration.reading import load_config

        return load_config(path, overrides[1:])

    return _read_and_start(read, args, path.stem)


def _check_config(path: Path) -> None:
    """Raise ValueError if the word for CONFIG is no configuration file, with its right use."""
    # 1. Files and folders of other kinds.
    name = str(path)
    if path.is_dir():
        if (path / "config.yaml").is_file():
            raise ValueError(
                f"{name} is a run. Continue it with `evogrpo resume {name}`, or give its"
                " config.yaml."
            )
        raise ValueError(f"{name} is a folder. Give a YAML file.")
    # FILE.py or FILE.py:FUNCTION.
    file, is_code, function = name.partition(".py")
    if is_code and function[:1] in ("", ":"):
        reference = f"{file}.py{function or ':FUNCTION'}"
        raise ValueError(
            f"{name} is Python code. Give a YAML file that names its function: task.reward:"
            f" {reference}."
        )
    if path.suffix in (".jsonl", ".csv", ".tsv", ".parquet"):
        raise ValueError(
            f"{name} is a dataset. Give a YAML file that names it, as task.dataset.train: {name}."
        )
    if path.exists():
        return
    # 2. A misspelt name of a file.
    if path.suffix in (".yaml", ".yml"):
        files = [*path.parent.glob("*.yaml"), *path.parent.glob("*.yml")]
        match = close_match(name, map(str, files))
        if match is not None:
            raise ValueError(f"There is no file {name}. Did you mean {match}?")
        return  # reading it raises the error
    if path.with_suffix(".yaml").exists():
        raise ValueError(f"{name} is not a file. Did you mean {path.with_suffix('.yaml')}?")
    # 3. The name of an environment, such as CartPole-v1 or mpe2.simple_spread_v3.
    if re.search(r"-v\d+$", name):
        raise ValueError(f"{name} is not a file. To train on an environment, write --env {name}.")
    if re.fullmatch(r"\w+(\.\w+)+", name) and path.suffix not in (".json", ".toml", ".txt"):
        raise ValueError(
            f"{name} is not a file. To train in an environment of several agents, write"
            f" --parallel-env {name}."
        )
    raise ValueError(
        f"There is no file {name}. CONFIG is a YAML file with a section task, such as task: {{name:"
        " two_digit_sums}. `evogrpo tasks` lists built-in tasks and environments."
    )


def replay(args: argparse.Namespace) -> int:
    """Train one agent with the schedule that a run has found."""

    def read() -> "Config":
        from evogrpo.training.replay import HyperparameterSchedule

        return HyperparameterSchedule.read(args.source).config(_overrides(args))

    return _read_and_start(read, args, f"{args.source.resolve().stem}-replay")


def resume(args: argparse.Namespace) -> int:
    """Resume a stored run."""
    with _show_imports():
        from evogrpo.cli.running import resume_run
    overrides = list(args.overrides)
    if args.generations is not None:
        overrides.append(f"generations={args.generations}")
    return resume_run(args.run_dir, overrides, args)


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return the overrides, with `--seed` and `--generations` appended."""
    overrides = list(args.overrides)
    if args.seed is not None:
        overrides.append(f"seed={args.seed}")
    # Only some commands have this option.
    generations = getattr(args, "generations", None)
    if generations is not None:
        overrides.append(f"schedule.generations={generations}")
    return overrides


def _environment_config(
    key: str, name: str, overrides: list[str], args: argparse.Namespace
) -> "Config":
    """Return the packaged configuration for an environment."""
    from evogrpo.training.configuration.reading import load_config, override, parse_config

    # 1. An environment of one agent: settings of its preset, or those of all environments.
    if key == "env":
        from evogrpo.training.configuration.environment_tasks import (
            named_wrapper,
            packaged_values,
            without_packaged_limits,
        )

        for wrapper in args.wrapper:  # importing them may register the environment
            named_wrapper(wrapper)
        values = packaged_values(name, with_preset=args.preset)
        schedule = override({}, overrides).get("schedule")
        # A wrong value of `schedule` is refused by `parse_config`.
        if not isinstance(schedule, Mapping):
            schedule = {}
        values = without_packaged_limits(values, schedule)
        return parse_config(override(values, overrides))
    # 2. An environment of several agents.
    if args.preset:
        raise ValueError("--preset is not available with --parallel-env. Remove it.")
    with as_file(files("evogrpo.training.configuration") / f"{key}.yaml") as path:
        return load_config(path, [*overrides, f"task.{key}={name}"])


def _read_and_start(read: "Callable[[], Config]", args: argparse.Namespace, name: str) -> int:
    """Read a configuration and start its run."""
    with _show_imports():
        config = read()
        from evogrpo.cli.running import start_run
    return start_run(config, args, name)


@contextmanager
def _show_imports() -> Iterator[None]:
    """Show progress while torch is imported, which takes seconds."""
    console = make_console()
    if not console.is_terminal:
        console.print(f"evogrpo {evogrpo.__version__}")
    with spinner(console, "reading the configuration, importing torch"):
        yield
