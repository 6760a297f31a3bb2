"""Construction of members from the arguments of agents and populations."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from gymnasium import spaces
from torch import jit, nn

from evogrpo.config.agent import (
    NETWORK_DEFAULTS,
    JointSettings,
    LanguageOptions,
    LanguageSettings,
    NetworkOptions,
    NetworkSettings,
)
from evogrpo.config.hyperparameters import HYPERPARAMETER_FIELDS, Hyperparameters
from evogrpo.config.keywords import (
    HyperparameterKeywords,
    LanguageKeywords,
    NetworkKeywords,
    SharedKeywords,
    TeamKeywords,
)
from evogrpo.config.objective import default_space
from evogrpo.config.search_space import (
    LANGUAGE_RANGES,
    NETWORK_RANGES,
    HyperparameterConfig,
)
from evogrpo.envs.control.policy_mapping import (
    AgentSpaces,
    PolicyMapping,
    map_policies,
    single_agent,
)
from evogrpo.members.devices import autocast_context, choose_device
from evogrpo.members.members import Members
from evogrpo.members.networks.members import NetworkMembers
from evogrpo.text import class_name, shown
from evogrpo.validation import flag, instance, refuse_unknown, whole_between, without_none
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import LoraConfig
    from transformers import PreTrainedModel


class CommonOptions(HyperparameterKeywords, SharedKeywords, NetworkKeywords, total=False):
    """Optional arguments of all agents: those that follow, and the fields of records.

    The records are `Hyperparameters`, `NetworkOptions` and `Seeded`. `lr="auto"`, the default,
    calibrates the learning rate: `target_kl` is then 0.01 unless it is given. Some defaults differ
    for small networks (`NETWORK_DEFAULTS` of `evogrpo.config.agent`).

    Attributes:
        hp_config: Search space; None (default) = nothing evolves. "auto", for a population: the
            most important hyperparameters that are not set here, over wide ranges
            (`evogrpo.config.search_space`).
        index: Identity in the lineage; 0 by default. A population counts up from it.
        device: Device of the model; by default where it is, and the CPU for small networks.
    """

    hp_config: HyperparameterConfig | Literal["auto"] | None
    index: int
    device: str | torch.device | None


class Options(CommonOptions, LanguageKeywords, total=False):
    """Optional arguments of `GRPO` and `GRPO.population`, in addition to the common ones.

    For language models, these are the fields of `LanguageOptions` and those that follow.

    Attributes:
        accelerator: Chooses the device and the precision of forward passes.
        lora_config: A `peft.LoraConfig`; None (default) = rank 16, alpha 32, on all linear layers
            except the head.
        full_finetuning: Train all weights of the model instead of adapters; False by default. Each
            member needs at least three times the memory of a base in float32, and members do not
            share passes.
        adapter: Folder of a PEFT adapter, such as an export or a checkpoint, that all members start
            from; its lora_config is used. The reference and the baseline are the base without
            adapters.
        source: Name that the base model was loaded by, for checkpoints; the model's own name by
            default.
    """

    accelerator: "Accelerator | None"
    lora_config: "LoraConfig | None"
    full_finetuning: bool
    adapter: str | Path | None
    source: str | None


class MultiAgentOptions(CommonOptions, TeamKeywords, total=False):
    """Optional arguments of `MultiAgentGRPO`: the common ones, and the fields of `TeamOptions`."""


class MultiAgentPopulationOptions(MultiAgentOptions, total=False):
    """Optional arguments of `MultiAgentGRPO.population`, with five of `GRPO.population`."""

    wrapper_cls: type[Any] | None
    wrapper_kwargs: Mapping[str, Any] | None
    samples_per_step: int | None
    spread: bool
    founders: Sequence[Hyperparameters] | None


AGENT_CLASSES = {"language": "GRPO", "networks": "GRPO", "joint": "MultiAgentGRPO"}
"""Names of the agents' classes by kind in checkpoints; "joint" are small networks of several
agents.
"""


def is_language_model(network: object) -> TypeGuard["PreTrainedModel"]:
    """Return True for a model of transformers, without importing transformers."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(network, loaded.PreTrainedModel)


_LANGUAGE = LanguageSettings.__dataclass_fields__
_NETWORKS = NetworkSettings.__dataclass_fields__
# Arguments that only one of the two kinds takes; the other kind refuses them.
LANGUAGE_ONLY = (
    *(name for name in _LANGUAGE if name not in _NETWORKS and name != "pad_token_id"),
    *("lora_config", "full_finetuning", "adapter", "source"),
)
NETWORKS_ONLY = tuple(name for name in _NETWORKS if name not in _LANGUAGE)
FIRST_ARGUMENTS = ("observation_space", "action_space", "actor_network", "pad_token_id")
"""Positional arguments of the constructors."""

Built = tuple[Members, Hyperparameters]
"""The members, and the first member's hyperparameters."""


def build_members(
    size: int,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    actor_network: nn.Module | None,
    pad_token_id: int | None,
    options: Mapping[str, Any],
) -> Built:
    """Validate constructor arguments and build the members.

    They are language models for a transformers model, and otherwise small networks.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.
    """
    # 1. Check the names of the arguments and the spaces, whose names are the first two of
    #    FIRST_ARGUMENTS.
    refuse_unknown("argument", options, [*Options.__annotations__, *FIRST_ARGUMENTS])
    given_spaces = observation_space, action_space
    for name, space in zip(FIRST_ARGUMENTS, given_spaces, strict=False):
        if space is not None and not isinstance(space, spaces.Space):
            raise ValueError(
                f"{name} must be a Gymnasium space, got {shown(space)}. Use"
                " GRPO(env.observation_space, env.action_space), or evogrpo.train(env,"
                " total_timesteps=...) to train in an environment."
            )
    # 2. Choose the kind of members. Small networks need both spaces, and a module of torch or
    #    none.
    if is_language_model(actor_network):
        return _language_members(size, given_spaces, actor_network, pad_token_id, options)
    if actor_network is None and given_spaces.count(None) == 1:
        raise ValueError(
            "observation_space and action_space must both be given to train small networks."
        )
    plain = actor_network is None or (
        isinstance(actor_network, nn.Module)
        and not isinstance(actor_network, nn.DataParallel | jit.ScriptModule)
    )
    # Sequences of tokens are spaces of language models.
    unfit = any(space is None or isinstance(space, spaces.Sequence) for space in given_spaces)
    if not plain or unfit:
        raise ValueError(
            "actor_network must be a transformers model without wrappers, or a torch module with"
            f" its observation_space and action_space, got {class_name(actor_network)}:"
            f" {shown(actor_network)}. evogrpo.load_base(...).model returns a transformers model."
        )
    # 3. Refuse arguments of other kinds. None = not given, except for target_kl, where None turns
    #    calibration off.
    options = {
        name: value for name, value in options.items() if value is not None or name == "target_kl"
    }
    _refuse_other_kind(LANGUAGE_ONLY, options, "language models")
    if pad_token_id is not None:
        raise ValueError(
            "pad_token_id is for language models. Leave it out, or pass a transformers model."
        )
    if actor_network is not None and "network" in options:
        raise ValueError(
            "network is for evogrpo's own networks. Leave it out if you pass actor_network."
        )
    # 4. Build the members of a single agent.
    chosen = _named(_NETWORKS, options)
    mapping = single_agent(observation_space, action_space)  # type: ignore[arg-type]  # both are given
    return _network_members(size, mapping, NetworkSettings(**chosen), options, actor_network)


def _language_members(
    size: int,
    given_spaces: tuple[spaces.Space[Any] | None, spaces.Space[Any] | None],
    model: "PreTrainedModel",
    pad_token_id: int | None,
    options: Mapping[str, Any],
) -> Built:
    """Validate the arguments for a language model, and build the members."""
    from peft import LoraConfig

    from evogrpo.members.language.compatibility import check_causal_class
    from evogrpo.members.language.members import LanguageMembers
    from evogrpo.members.language.peft_files import read_adapter

    # 1. Check the model and the arguments that it needs.
    _refuse_other_kind(NETWORKS_ONLY, options, "small networks")
    check_causal_class(model)
    if pad_token_id is None:
        raise ValueError("pad_token_id must be given, such as tokenizer.pad_token_id.")
    kinds: Mapping[str, tuple[Any, str]] = {
        "lora_config": (LoraConfig, "LoraConfig(r=8)"),
        "adapter": (str | Path, "'runs/demo/best'"),
        "source": (str, "'smollm2-135m'"),
    }
    for name, (kind, example) in kinds.items():
        if options.get(name) is not None:
            instance(name, options[name], kind, example)
    # 2. Choose what members train: all weights, or adapters, which may start from a stored one.
    lora = options.get("lora_config")
    adapter = options.get("adapter")
    chosen = options.get("full_finetuning")
    full = chosen is not None and flag("full_finetuning", chosen)
    if full and (lora is not None or adapter is not None):
        raise ValueError("full_finetuning trains all weights. Leave out lora_config and adapter.")
    if lora is None and adapter is None and not full:
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    # 3. Build the settings, the first member's hyperparameters and the members.
    given = {**_named(_LANGUAGE, options), "pad_token_id": pad_token_id}
    settings = LanguageSettings(**given)
    first = _first_hyperparameters(options, settings, {})
    stored = None
    if adapter is not None:
        stored = read_adapter(adapter)
    members = LanguageMembers(
        model,
        size,
        settings,
        options.get("hp_config"),
        lora_config=lora,
        initial_adapter=stored,
        source=options.get("source"),
        device=choose_device(options.get("accelerator"), options.get("device")),
        autocast=autocast_context(options.get("accelerator")),
        observation_space=given_spaces[0],
        action_space=given_spaces[1],
    )
    return members, first


def build_joint_members(
    size: int,
    observation_spaces: AgentSpaces | None,
    action_spaces: AgentSpaces | None,
    actor_network: None,
    pad_token_id: None,
    options: Mapping[str, Any],
) -> Built:
    """Validate constructor arguments of members that act for several agents, and build the members.

    Raises:
        ValueError: If an argument is unknown or out of range.
    """
    given_spaces = {"observation_spaces": observation_spaces, "action_spaces": action_spaces}
    refuse_unknown("argument", options, [*MultiAgentOptions.__annotations__, *given_spaces])
    for name, by_agent in given_spaces.items():
        if not isinstance(by_agent, Mapping) or not by_agent:
            raise ValueError(
                f"{name} must be spaces by agent, such as env.{name}, got {shown(by_agent)}."
            )
    assert observation_spaces is not None and action_spaces is not None
    settings = JointSettings(**_named(JointSettings.__dataclass_fields__, options))
    mapping = map_policies(
        observation_spaces, action_spaces, settings.policies, agent_ids=settings.agent_ids
    )
    return _network_members(size, mapping, settings, options, None)


def _network_members(
    size: int,
    mapping: PolicyMapping,
    settings: NetworkSettings,
    options: Mapping[str, Any],
    module: nn.Module | None,
) -> Built:
    """Return small networks and the first member's hyperparameters, for one agent or several."""
    first = _first_hyperparameters(options, settings, NETWORK_DEFAULTS)
    space = options.get("hp_config")
    device = choose_device(options.get("accelerator"), options.get("device")) or "cpu"
    members = NetworkMembers(mapping, size, settings, space, module=module, device=device)
    return members, first


def auto_space(
    options: Mapping[str, Any],
    samples_per_step: int | None,
    *,
    language: bool,
    unused: Collection[str],
) -> HyperparameterConfig:
    """Return the search space "auto": the most important hyperparameters that are not set.

    Args:
        options: Arguments of the agents.
        samples_per_step: Number that group sizes must divide; None = any.
        language: True for language models, False for small networks.
        unused: Hyperparameters that the algorithm does not use.
    """
    # 1. The ranges and defaults of the kind of members.
    kind: type[LanguageOptions | NetworkOptions]
    if language:
        kind = LanguageOptions
        ranges = LANGUAGE_RANGES
        defaults: Mapping[str, Any] = {}
    else:
        kind = NetworkOptions
        ranges = NETWORK_RANGES
        defaults = NETWORK_DEFAULTS
    # 2. The hyperparameters that are set, and the first member's values of all others.
    given = without_none(options)
    objective = kind(**_named(kind.__dataclass_fields__, given)).objective
    chosen = _named(HYPERPARAMETER_FIELDS, given)
    values = dict(chosen)
    if "target_kl" in unused:
        # Without calibration, the learning rate evolves instead of target_kl.
        values.setdefault("target_kl", None)
    # 3. The others get their default ranges, as far as the objective uses them.
    return default_space(
        ranges,
        objective,
        HyperparameterConfig().first(defaults, values),
        fixed={*chosen, *unused},
        samples_per_step=samples_per_step,
        rows_are_samples=language,
    )


def _named(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with these names."""
    return {name: options[name] for name in names if name in options}


def _refuse_other_kind(names: tuple[str, ...], options: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError if an option of another kind of members is set."""
    for name in names:
        if options.get(name) is not None:
            raise ValueError(f"{name} is for {kind}. Leave it out.")


def _first_hyperparameters(
    options: Mapping[str, Any],
    settings: LanguageSettings | NetworkSettings,
    defaults: Mapping[str, Any],
) -> Hyperparameters:
    """Return the first member's hyperparameters, which fit the settings and the search space."""
    # 1. Check the arguments that are not settings.
    warn_of_unused_seed(options)
    space = options.get("hp_config")
    if space is not None:
        instance(
            "hp_config",
            space,
            HyperparameterConfig,
            "HyperparameterConfig(lr=RLParameter(min=1e-5, max=1e-3))",
        )
    space = space or HyperparameterConfig()
    whole_between("index", options.get("index", 0), 0)
    # 2. Chosen values must lie in the search space; defaults are moved into it.
    chosen = _named(HYPERPARAMETER_FIELDS, options)
    first = settings.objective.resolved(space.first(defaults, chosen), space)
    settings.objective.check(first, space)
    settings.check(first, space)
    return first


def warn_of_unused_seed(options: Mapping[str, Any]) -> None:
    """Warn if the program has seeded torch, but gives no seed: agents do not use that of torch."""
    given = torch.initial_seed()
    # A seed that torch has chosen itself is a random number of 64 bits. 0 is also the default of
    # agents, so it needs no warning.
    if options.get("seed") is None and 0 < given < 1 << 32:
        warn(
            f"torch.manual_seed({given}) has no effect on agents and runs, whose seed is 0. Pass"
            f" seed={given} to agents and environment."
        )
