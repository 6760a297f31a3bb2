"""What constructor arguments build: the one place where kinds of members differ."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gymnasium import spaces
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel

from evogrpo.agents.learning.shaping import check_usable
from evogrpo.agents.members.control.network_members import NetworkMembers
from evogrpo.agents.members.control.network_settings import NETWORK_DEFAULTS, STEPWISE, NetworkSettings
from evogrpo.agents.members.control.stacked_policy import StackedPolicy
from evogrpo.agents.members.control.team_members import TeamMembers
from evogrpo.agents.members.control.team_settings import TeamSettings
from evogrpo.agents.members.devices import autocast_of, device_of
from evogrpo.agents.members.members import Members, Settings
from evogrpo.agents.members.tokens.language_members import LanguageMembers
from evogrpo.agents.members.tokens.language_settings import LanguageSettings
from evogrpo.agents.options import CommonOptions, Options, TeamOptions
from evogrpo.config.checks import instance, refuse_unknown, whole_between
from evogrpo.config.default_space import default_space
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.search_space import (
    LANGUAGE_RANGES,
    MOST_MEMBERS,
    MOST_SAMPLES,
    NETWORK_RANGES,
    HyperparameterConfig,
    common_samples,
)
from evogrpo.envs.control.joint.assignment import AgentSpaces
from evogrpo.evolution.founders import like_earlier
from evogrpo.policies.tokens.engine.probes import check_causal_class
from evogrpo.policies.tokens.models import BaseModel
from evogrpo.policies.tokens.stored_adapters import read_adapter
from evogrpo.warnings import warn

OptionsT = TypeVar("OptionsT", Options, TeamOptions)

LANGUAGE_ONLY = (
    "calc_position_embeddings",
    "reduce_memory_peak",
    "min_output_tokens",
    "max_output_tokens",
    "max_episode_tokens",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "eos_token_ids",
    "lora_config",
    "adapter",
    "micro_batch_tokens",
    "source",
)
FIRST_ARGUMENTS = ("observation_space", "action_space", "actor_network", "pad_token_id")
"""The arguments that constructors name before the options."""
NETWORKS_ONLY = ("network", "evolve_network", "normalise_observations")


def open_members(
    size: int,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    actor_network: nn.Module | None,
    pad_token_id: int | None,
    options: Options,
) -> tuple[Members, Hyperparameters]:
    """Check the constructor arguments, then build what they describe: the one place where kinds of members differ.

    A transformers model makes language models. Without one, spaces that are not of tokens make small networks.

    Returns:
        The members, and the first one's hyperparameters.

    Raises:
        ValueError: If an argument is unknown, missing or out of range; nothing is built then.
    """
    refuse_unknown("argument", options, [*Options.__annotations__, *FIRST_ARGUMENTS])
    given = observation_space, action_space
    for name, space in zip(FIRST_ARGUMENTS, given, strict=False):
        if space is not None:
            check_space(name, space)
    _check_wrapped(actor_network)
    if isinstance(actor_network, PreTrainedModel):
        return _open_language(size, given, actor_network, pad_token_id, options)
    wordless = not any(space is None or isinstance(space, spaces.Sequence) for space in given)
    if wordless and (actor_network is None or isinstance(actor_network, nn.Module)):
        return _open_networks(size, given, actor_network, pad_token_id, options)
    if isinstance(actor_network, type) and issubclass(actor_network, nn.Module):
        raise ValueError(f"actor_network must be a module, got its class. Pass {actor_network.__name__}(...).")
    raise ValueError(
        f"actor_network must be a transformers model, got {type(actor_network).__name__}. Load one with "
        "evogrpo.load_base(...).model, or pass observation_space and action_space to train small networks."
    )


def _check_wrapped(network: object) -> None:
    """Refuse a model inside a wrapper and name the model inside it."""
    remedy = ""
    if isinstance(network, BaseModel):
        remedy = "the result of load_base. Pass its model: actor_network=base.model."
    elif isinstance(network, PeftModel):
        remedy = "a PeftModel. Pass the plain base model, and adapter='FOLDER' to start from a saved adapter."
    elif isinstance(getattr(network, "_orig_mod", None), PreTrainedModel):
        remedy = "a compiled model. Pass the model that was given to torch.compile."
    elif isinstance(getattr(network, "module", None), PreTrainedModel):
        remedy = f"a model wrapped in {type(network).__name__}. Pass the model inside it: actor_network.module."
    if remedy:
        raise ValueError(f"actor_network is {remedy}")


def _open_language(
    size: int,
    given: tuple[spaces.Space[Any] | None, spaces.Space[Any] | None],
    model: PreTrainedModel,
    pad_token_id: int | None,
    options: Options,
) -> tuple[Members, Hyperparameters]:
    values: Mapping[str, Any] = options
    _refuse_other_kind(NETWORKS_ONLY, values, "small networks")
    check_causal_class(model)
    if pad_token_id is None:
        raise ValueError("pad_token_id must be given, for instance tokenizer.pad_token_id")
    names = LanguageSettings.__dataclass_fields__
    settings = LanguageSettings(
        pad_token_id=pad_token_id,
        eos_token_ids=_eos_of(model) if values.get("eos_token_ids") is None else values["eos_token_ids"],
        **{name: values[name] for name in names if name in values and name != "eos_token_ids"},
    )
    hyperparameters = _first_member(values, settings, {})
    accelerator = values.get("accelerator")
    kinds: tuple[tuple[str, Any, str], ...] = (
        ("lora_config", LoraConfig, "LoraConfig(r=8)"),
        ("adapter", str | Path, "'runs/demo/best'"),
        ("source", str, "'smollm2-135m'"),
    )
    for name, kind, example in kinds:
        if values.get(name) is not None:
            instance(name, values[name], kind, example)
    members = LanguageMembers(
        model,
        size,
        settings,
        values.get("hp_config"),
        lora_config=values.get("lora_config"),
        start=None if values.get("adapter") is None else read_adapter(values["adapter"]),
        source=values.get("source"),
        device=device_of(accelerator, values.get("device")),
        autocast=autocast_of(accelerator),
        observation_space=given[0],
        action_space=given[1],
    )
    return members, hyperparameters


def _open_networks(
    size: int,
    given: tuple[Any, Any],
    module: nn.Module | None,
    pad_token_id: int | None,
    options: Options,
) -> tuple[Members, Hyperparameters]:
    chosen: Mapping[str, Any] = options
    values = {name: value for name, value in chosen.items() if value is not None}
    _refuse_other_kind(LANGUAGE_ONLY, values, "language models")
    if pad_token_id is not None:
        raise ValueError("pad_token_id is for language models: leave it out, or give a transformers model")
    if module is not None and "network" in values:
        raise ValueError("network describes evogrpo's own networks: leave it out beside an actor_network")
    settings = NetworkSettings(
        **{name: values[name] for name in NetworkSettings.__dataclass_fields__ if name in values}
    )
    hyperparameters = _first_member(values, settings, NETWORK_DEFAULTS)
    space = values.get("hp_config") or HyperparameterConfig()
    check_usable(settings.objective, hyperparameters, space, of_transitions=True)
    device = device_of(values.get("accelerator"), values.get("device")) or "cpu"
    networks = StackedPolicy(*given, size, settings, module=module, device=device)
    return NetworkMembers(networks, values.get("hp_config")), hyperparameters


def open_team(
    size: int, observation_spaces: AgentSpaces | None, action_spaces: AgentSpaces | None, options: TeamOptions
) -> tuple[Members, Hyperparameters]:
    """Check the constructor arguments of members that act for several agents, then make the banks they describe.

    Raises:
        ValueError: If an argument is unknown or out of range; nothing is made then.
    """
    refuse_unknown("argument", options, [*TeamOptions.__annotations__, "observation_spaces", "action_spaces"])
    for name, given in (("observation_spaces", observation_spaces), ("action_spaces", action_spaces)):
        if not isinstance(given, Mapping) or not given:
            raise ValueError(f"{name} must be spaces by agent, such as env.{name}, got {given!r:.80}")
    assert observation_spaces is not None and action_spaces is not None
    values: Mapping[str, Any] = options
    settings = TeamSettings(**{name: values[name] for name in TeamSettings.__dataclass_fields__ if name in values})
    hyperparameters = _first_member(values, settings, NETWORK_DEFAULTS)
    space = values.get("hp_config") or HyperparameterConfig()
    check_usable(settings.objective, hyperparameters, space, of_transitions=True)
    device = device_of(None, values.get("device")) or "cpu"
    members = TeamMembers(observation_spaces, action_spaces, size, settings, values.get("hp_config"), device=device)
    return members, hyperparameters


def check_space(name: str, space: object) -> None:
    """Refuse with a ValueError what is no space, such as the policy or the environment that others' agents take."""
    if isinstance(space, spaces.Space):
        return
    what = repr(space) if isinstance(space, str) else type(space).__name__
    raise ValueError(
        f"{name} must be a Gymnasium space, got {what:.80}: an agent is made for spaces, "
        "GRPO(env.observation_space, env.action_space); to train in an environment write evogrpo.train(env, "
        "total_timesteps=...) with its id or what makes it"
    )


def checked_size(size: int | None, options: Mapping[str, Any]) -> int:
    """Return the number of members, or raise ValueError if it is missing or out of range."""
    if size is None:
        refuse_unknown("argument", options, ["size", *Options.__annotations__, *TeamOptions.__annotations__])
        raise ValueError("size must be given: how many members the population has")
    return whole_between("size", size, 1, MOST_MEMBERS)


def chosen_founders(
    given: object, first: Hyperparameters, space: HyperparameterConfig | None, samples: int
) -> tuple[Hyperparameters, ...]:
    """Return the first members that the caller has chosen, and warn of values that had to be moved; none for None.

    Raises:
        ValueError: If they are not hyperparameters of members.
    """
    if given is None:
        return ()
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, Hyperparameters) for each in given):
        raise ValueError(
            "founders must be the hyperparameters of at least one member, as evogrpo.best_hyperparameters(RUN) returns "
            f"them, got {given!r:.80}"
        )
    founders, moved = like_earlier(given, first, space or HyperparameterConfig(), samples)
    for words in moved:
        warn(f"founders: {words}")
    return founders


def founders_samples(options: CommonOptions, samples_per_step: int | None) -> int:
    """Return the samples per learning step that founders' group sizes are to divide.

    Raises:
        ValueError: If none are given and there is no common number, or they are out of range.
    """
    if samples_per_step is not None:
        return whole_between("samples_per_step", samples_per_step, 2, MOST_SAMPLES)
    config = options.get("hp_config")
    if not isinstance(config, HyperparameterConfig):  # none, or one that is refused where the first member is made
        config = HyperparameterConfig()
    return common_samples(options.get("group_size", Hyperparameters().group_size), config)


def with_space(
    options: OptionsT, samples_per_step: int | None, *, words: bool, unused: Collection[str] = ()
) -> OptionsT:
    """Return a population's options with the space that is searched where `hp_config` is "auto"; others as they are.

    Args:
        options: As given.
        samples_per_step: As given; group sizes evolve only where it is.
        words: Whether members are language models.
        unused: Hyperparameters that mean nothing to the algorithm.
    """
    values: Mapping[str, Any] = options
    if values.get("hp_config") != "auto":
        return options
    chosen: dict[str, Any] = {name: values[name] for name in HYPERPARAMETER_NAMES if values.get(name) is not None}
    defaults = (
        {} if words else {name: NETWORK_DEFAULTS[name] for name in HYPERPARAMETER_NAMES if name in NETWORK_DEFAULTS}
    )
    objective = values.get("objective")
    if not isinstance(objective, Objective):  # none, or one that is refused where members are made
        objective = Objective() if words else STEPWISE
    space = default_space(
        LANGUAGE_RANGES if words else NETWORK_RANGES,
        objective,
        Hyperparameters.from_json({**defaults, **chosen}),
        fixed={*chosen, *unused},
        samples_per_step=samples_per_step,
        rows_are_samples=words,
    )
    found: Any = {**values, "hp_config": space}
    searched: OptionsT = found
    return searched


def _refuse_other_kind(names: tuple[str, ...], values: Mapping[str, Any], kind: str) -> None:
    for name in names:
        if name in values:
            raise ValueError(f"{name} is for {kind}: leave it out")


def _first_member(values: Mapping[str, Any], settings: Settings, defaults: Mapping[str, Any]) -> Hyperparameters:
    """Return the hyperparameters of the first member, checked with the objective and with what evolves."""
    given = values.get("hp_config")
    if given is not None:
        instance("hp_config", given, HyperparameterConfig, "HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))")
    whole_between("index", values.get("index", 0), 0)
    space = given or HyperparameterConfig()
    hyperparameters = space.first(
        {name: value for name, value in defaults.items() if name in HYPERPARAMETER_NAMES},
        {name: values[name] for name in HYPERPARAMETER_NAMES if name in values},
    )
    hyperparameters = settings.objective.resolved(hyperparameters, space)
    settings.objective.check(hyperparameters, space)
    return hyperparameters


def _eos_of(model: PreTrainedModel) -> Any:
    """Return the end-of-sequence token, or tokens, that the model itself declares."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    if declared is None:
        raise ValueError("eos_token_ids must be given: the model's configs name no end-of-sequence token")
    return declared
