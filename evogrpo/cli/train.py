"""The commands that train, from demo to resume; what can be refused without torch is refused before its import."""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path

import evogrpo
from evogrpo.evolution.strategies import Fixed
from evogrpo.training.configuration.reading import load_config, override, parse_config
from evogrpo.training.configuration.sections import AnyConfig
from evogrpo.training.display.console import make_console, working


def demo(args: argparse.Namespace) -> int:
    """Train on the packaged configuration."""
    overrides = _overrides(args)

    def read() -> AnyConfig:
        with as_file(files("evogrpo.training.configuration") / "demo.yaml") as path:
            config = load_config(path, overrides)
        if not args.fixed:
            return config
        population = dataclasses.replace(config.population, spread=False)
        return dataclasses.replace(config, population=population, strategy=Fixed())

    return _begin(read, args, "demo-fixed" if args.fixed else "demo")


def train(args: argparse.Namespace) -> int:
    """Train on the user's configuration, or on an environment with the packaged one."""
    words = _overrides(args)
    if args.wrapper:
        if args.env is None:
            raise ValueError("--wrapper goes with --env: in a configuration, write task.wrappers")
        words.append(f"task.wrappers={json.dumps(args.wrapper)}")
    for option, key, name in (("--env", "env", args.env), ("--parallel-env", "parallel_env", args.parallel_env)):
        if name is not None:
            for word in words:
                if "=" not in word or word.startswith(f"task.{key}="):
                    raise ValueError(f"{option} {name} already says what to train on: leave out {word!r}")
            folder = re.sub(r"[^\w.-]+", "-", name)
            return _begin(partial(_packaged, key, name, words, args), args, folder)
    if args.preset:
        raise ValueError("--preset is that of an environment: name it with --env, and give no CONFIG")
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise ValueError(
            "train needs a configuration, a YAML file, before any KEY=VALUE; or --env ID, or --parallel-env MODULE"
        )
    path = Path(words[0])
    if not path.exists() and re.search(r"-v\d+$", words[0]):
        raise ValueError(f"{path} is no file. To train on an environment write --env {path}")
    if not path.exists() and path.with_suffix(".yaml").exists():
        raise ValueError(f"{path} is no file: did you mean {path.with_suffix('.yaml')}?")
    return _begin(partial(load_config, path, words[1:]), args, path.stem)


def replay(args: argparse.Namespace) -> int:
    """Train one agent under the schedule that a run has found."""

    def read() -> AnyConfig:
        from evogrpo.training.replay import HyperparameterSchedule

        return HyperparameterSchedule.read(args.source).config(_overrides(args))

    return _begin(read, args, f"{args.source.resolve().stem}-replay")


def resume(args: argparse.Namespace) -> int:
    """Go on with a stored run."""
    with _importing():
        from evogrpo.cli.running import resume_run
    return resume_run(args)


def _overrides(args: argparse.Namespace) -> list[str]:
    """Return the overrides, followed by the settings that were given as options."""
    options = {"seed": args.seed, "schedule.generations": getattr(args, "generations", None)}
    return [*args.overrides, *(f"{key}={value}" for key, value in options.items() if value is not None)]


def _packaged(key: str, name: str, overrides: list[str], args: argparse.Namespace) -> AnyConfig:
    """Return the packaged configuration for an environment."""
    if key == "env":
        from evogrpo.training.configuration.environment_tasks import named_wrapper
        from evogrpo.training.presets import packaged_values, with_own_limits

        for wrapper in args.wrapper:  # their modules may be what registers the environment
            named_wrapper(wrapper)
        values = packaged_values(name, with_preset=args.preset)
        values = with_own_limits(values, override({}, overrides).get("schedule") or {})
        return parse_config(override(values, overrides))
    if args.preset:
        raise ValueError("--preset is that of a Gymnasium environment: leave it out beside --parallel-env")
    with as_file(files("evogrpo.training.configuration") / f"{key}.yaml") as path:
        return load_config(path, [*overrides, f"task.{key}={name}"])


def _begin(read: Callable[[], AnyConfig], args: argparse.Namespace, name: str) -> int:
    """Start a run of the configuration that is read, or only say what it would be."""
    with _importing():
        config = read()
        from evogrpo.cli.running import start_run
    return start_run(config, args, name)


@contextmanager
def _importing() -> Iterator[None]:
    """Show something from the beginning: torch and its companions take seconds to import."""
    console = make_console()
    if not console.is_terminal:
        console.print(f"evogrpo {evogrpo.__version__}")
    with working(console, "reading the configuration, importing torch"):
        yield
