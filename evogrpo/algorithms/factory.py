"""Construction of policy sets from the arguments of agents and populations."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from gymnasium import spaces
from peft import LoraConfig, PeftModel
from torch import jit, nn
from transformers import PreTrainedModel

from evogrpo.algorithms.learning.advantages import check_hyperparameters
from evogrpo.algorithms.policies.devices import autocast_context, choose_device
from evogrpo.algorithms.policies.language import LanguagePolicySet
from evogrpo.algorithms.policies.networks import NetworkPolicySet
from evogrpo.algorithms.policies.policy_set import PolicySet, Settings
from evogrpo.algorithms.policies.settings import (
    NETWORK_DEFAULTS,
    STEPWISE,
    Credit,
    JointSettings,
    LanguageSettings,
    NetworkSettings,
)
from evogrpo.config.checks import instance, refuse_unknown, whole_between
from evogrpo.config.default_space import default_space
from evogrpo.config.hyperparameters import HYPERPARAMETER_NAMES, HyperparameterOptions, Hyperparameters
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.search_space import (
    LANGUAGE_RANGES,
    MAX_MEMBERS,
    MAX_SAMPLES,
    NETWORK_RANGES,
    HyperparameterConfig,
    common_samples,
)
from evogrpo.envs.control.policy_mapping import AgentSpaces, Policies, PolicyMapping, map_policies, single_agent
from evogrpo.evolution.founders import warm_start_founders
from evogrpo.models.language.adapter_files import read_adapter
from evogrpo.models.language.compatibility import check_causal_class
from evogrpo.models.language.loading import BaseModel
from evogrpo.models.networks.architecture import ArchitectureLimits, NetworkConfig
from evogrpo.warnings import warn


class CommonOptions(HyperparameterOptions, total=False):
    """Optional arguments of all agents, in addition to the hyperparameters of the first member.

    Some defaults differ for small networks: lr 5e-3, batch_size 2048, update_epochs 4, gamma 0.99, and an objective
    of loss_type "dapo" with advantage "return_to_go_timestep" (`NETWORK_DEFAULTS` and `STEPWISE` of
    `evogrpo.algorithms.policies.settings`).

    Attributes:
        hp_config: Search space; None (default) = nothing evolves. "auto", for a population: the most important
            hyperparameters that are not set here, over wide ranges (`evogrpo.config.search_space`).
        index: Identity in the lineage; 0 by default. A population counts up from it.
        objective: The loss, advantages, KL, reference and reward switches.
        optimizer: AdamW settings: betas, eps, weight decay, warm-up and schedule.
        seed: Root of every random stream; 0 by default.
        device: Device of the model; by default where it is, and the CPU for small networks.
        network: Small networks only, as the next two: initial architecture; by default two tanh layers of 64, after
            convolutions for images.
        evolve_network: Limits within which mutation changes architectures; None (default) = architectures are fixed.
        normalise_observations: Standardise floating-point observations by each member's running mean and variance;
            False by default.
    """

    hp_config: HyperparameterConfig | Literal["auto"] | None
    index: int
    objective: Objective
    optimizer: Optimizer
    seed: int
    device: str | torch.device | None
    network: NetworkConfig
    evolve_network: ArchitectureLimits | None
    normalise_observations: bool


class Options(CommonOptions, total=False):
    """Optional arguments of `GRPO` and `GRPO.population`, in addition to the common ones.

    Attributes:
        accelerator: Chooses the device and the precision of forward passes.
        calc_position_embeddings: Language models only, as all that follow: pass position ids, counted without padding;
            True by default. False is for models that take none.
        reduce_memory_peak: Compute logits in chunks of a few hundred tokens; True by default. False computes the
            logits of a whole micro-batch at once. Same results, up to rounding.
        min_output_tokens: Minimum tokens before an end of sequence; 0 by default.
        max_output_tokens: Maximum tokens of a completion, or of one turn of a conversation; 128 by default.
        max_episode_tokens: Maximum tokens of a conversation, replies included; the model's context by default.
        top_k: Sample from the k most likely tokens; 0 (default) = all. Learning uses the full distribution: if this or
            one of the next three truncates it, old log-probabilities are computed by the trainer, and
            `Objective.importance_correction` can correct for the difference.
        top_p: Sample from the most likely tokens with this total probability; 1 by default.
        min_p: Sample from tokens at least this many times as likely as the most likely one; 0 by default.
        repetition_penalty: Divisor of the logits of tokens that occurred before, also in greedy decoding; 1 (default) =
            none.
        eos_token_ids: Token or tokens that end a completion; by default those of the model's generation config.
        lora_config: A `peft.LoraConfig`; None (default) = rank 16, alpha 32, on all linear layers except the head.
        adapter: Folder of a PEFT adapter, such as an export or a checkpoint, that all members start from; its
            lora_config is used. The reference and the baseline are the base without adapters.
        micro_batch_tokens: Maximum tokens in one forward pass with gradients. Default: 1024 on CPUs; on CUDA the
            largest power of two estimated to fit into half of the memory left by the base and the members. Halved if
            memory runs out.
        source: Name that the base model was loaded by, for checkpoints; the model's own name by default.
    """

    accelerator: Accelerator | None
    calc_position_embeddings: bool
    reduce_memory_peak: bool
    min_output_tokens: int
    max_output_tokens: int
    max_episode_tokens: int | None
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    eos_token_ids: int | tuple[int, ...]
    lora_config: LoraConfig | None
    adapter: str | Path | None
    micro_batch_tokens: int | None
    source: str | None


class MultiAgentOptions(CommonOptions, total=False):
    """Optional arguments of `MultiAgentGRPO` and `MultiAgentGRPO.population`, in addition to the common ones.

    Attributes:
        policies: "shared" (default): one policy for all agents; "prefix": one for each group of agents whose names
            agree before the last underscore; "independent": one for each agent.
        credit: "team" (default): rewards of all agents; "agent": the agent's own rewards, as in a competition.
        agent_ids: Add the agent's identity to the observations of a policy shared by several agents; False by
            default.
    """

    policies: Policies
    credit: Credit
    agent_ids: bool


POLICY_SETS: Mapping[str, type[LanguagePolicySet | NetworkPolicySet]] = {
    "language": LanguagePolicySet,
    "networks": NetworkPolicySet,
    "joint": NetworkPolicySet,
}
"""Policy sets by their kind in checkpoints; "joint" are small networks of several agents."""
AGENT_CLASSES = {"language": "GRPO", "networks": "GRPO", "joint": "MultiAgentGRPO"}
"""Names of the agents' classes by kind."""


OptionsT = TypeVar("OptionsT", Options, MultiAgentOptions)

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
"""Positional arguments of the constructors."""
NETWORKS_ONLY = ("network", "evolve_network", "normalise_observations")


def build_policy_set(
    size: int,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    actor_network: nn.Module | None,
    pad_token_id: int | None,
    options: Options,
) -> tuple[PolicySet, Hyperparameters]:
    """Validate constructor arguments and build the policy set: language models for a transformers model, else networks.

    Returns:
        The policy set, and the first member's hyperparameters.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.
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
    if actor_network is None and given != (None, None):
        raise ValueError("observation_space and action_space must both be given to train small networks.")
    if wordless:
        raise ValueError(
            f"actor_network must be a torch module, got {type(actor_network).__name__}. Leave it out for the "
            "default network, whose layers are network=NetworkConfig(hidden=(64, 64))."
        )
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
    elif isinstance(network, nn.DataParallel | jit.ScriptModule):
        remedy = f"a {type(network).__name__}. Pass the plain module that it was made from."
    if remedy:
        raise ValueError(f"actor_network is {remedy}")


def _open_language(
    size: int,
    given: tuple[spaces.Space[Any] | None, spaces.Space[Any] | None],
    model: PreTrainedModel,
    pad_token_id: int | None,
    options: Options,
) -> tuple[PolicySet, Hyperparameters]:
    values: Mapping[str, Any] = options
    _refuse_other_kind(NETWORKS_ONLY, values, "small networks")
    check_causal_class(model)
    if pad_token_id is None:
        raise ValueError("pad_token_id must be given, such as tokenizer.pad_token_id.")
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
    members = LanguagePolicySet(
        model,
        size,
        settings,
        values.get("hp_config"),
        lora_config=values.get("lora_config"),
        start=None if values.get("adapter") is None else read_adapter(values["adapter"]),
        source=values.get("source"),
        device=choose_device(accelerator, values.get("device")),
        autocast=autocast_context(accelerator),
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
) -> tuple[PolicySet, Hyperparameters]:
    chosen: Mapping[str, Any] = options
    values = {name: value for name, value in chosen.items() if value is not None}
    _refuse_other_kind(LANGUAGE_ONLY, values, "language models")
    if pad_token_id is not None:
        raise ValueError("pad_token_id is for language models. Leave it out, or pass a transformers model.")
    if module is not None and "network" in values:
        raise ValueError("network is for evogrpo's own networks. Leave it out if you pass actor_network.")
    names = NetworkSettings.__dataclass_fields__
    settings = NetworkSettings(**{name: values[name] for name in names if name in values})
    return _network_policy_set(size, single_agent(*given), settings, values, module)


def build_joint_policy_set(
    size: int, observation_spaces: AgentSpaces | None, action_spaces: AgentSpaces | None, options: MultiAgentOptions
) -> tuple[PolicySet, Hyperparameters]:
    """Check the constructor arguments of members that act for several agents, then make the banks they describe.

    Raises:
        ValueError: If an argument is unknown or out of range; nothing is made then.
    """
    refuse_unknown("argument", options, [*MultiAgentOptions.__annotations__, "observation_spaces", "action_spaces"])
    for name, given in (("observation_spaces", observation_spaces), ("action_spaces", action_spaces)):
        if not isinstance(given, Mapping) or not given:
            raise ValueError(f"{name} must be spaces by agent, such as env.{name}, got {given!r:.80}")
    assert observation_spaces is not None and action_spaces is not None
    values: Mapping[str, Any] = options
    names = JointSettings.__dataclass_fields__
    settings = JointSettings(**{name: values[name] for name in names if name in values})
    mapping = map_policies(observation_spaces, action_spaces, settings.policies, agent_ids=settings.agent_ids)
    return _network_policy_set(size, mapping, settings, values, None)


def _network_policy_set(
    size: int, mapping: PolicyMapping, settings: NetworkSettings, values: Mapping[str, Any], module: nn.Module | None
) -> tuple[PolicySet, Hyperparameters]:
    hyperparameters = _first_member(values, settings, NETWORK_DEFAULTS)
    space = values.get("hp_config") or HyperparameterConfig()
    check_hyperparameters(settings.objective, hyperparameters, space, per_action=True)
    device = choose_device(values.get("accelerator"), values.get("device")) or "cpu"
    members = NetworkPolicySet(mapping, size, settings, values.get("hp_config"), module=module, device=device)
    return members, hyperparameters


def check_space(name: str, space: object) -> None:
    """Raise ValueError if the argument is not a Gymnasium space."""
    if isinstance(space, spaces.Space):
        return
    what = repr(space) if isinstance(space, str) else type(space).__name__
    if isinstance(space, nn.Module):
        raise ValueError(f"{name} must be a Gymnasium space, got {what}. Pass a model as actor_network={what}(...).")
    raise ValueError(
        f"{name} must be a Gymnasium space, got {what:.80}. Use GRPO(env.observation_space, env.action_space), or "
        "evogrpo.train(env, total_timesteps=...) to train in an environment."
    )


def check_size(size: int | None, options: Mapping[str, Any]) -> int:
    """Return the number of members, or raise ValueError if it is missing or out of range."""
    if size is None:
        refuse_unknown("argument", options, ["size", *Options.__annotations__, *MultiAgentOptions.__annotations__])
        raise ValueError("size must be given: the number of members.")
    return whole_between("size", size, 1, MAX_MEMBERS)


def check_founders(
    given: object, first: Hyperparameters, space: HyperparameterConfig | None, samples: int
) -> tuple[Hyperparameters, ...]:
    """Return the user's founders, with a warning for values moved into range; empty for None.

    Raises:
        ValueError: If they are not `Hyperparameters`.
    """
    if given is None:
        return ()
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, Hyperparameters) for each in given):
        raise ValueError(
            "founders must be a list of Hyperparameters, as evogrpo.best_hyperparameters(RUN) returns, got "
            f"{given!r:.80}."
        )
    founders, moved = warm_start_founders(given, first, space or HyperparameterConfig(), samples)
    for words in moved:
        warn(f"founders: {words}")
    return founders


def founder_samples(options: CommonOptions, samples_per_step: int | None) -> int:
    """Return the samples per learning step that group sizes must divide.

    Raises:
        ValueError: If they are out of range, or not given and the group sizes have no common multiple in range.
    """
    if samples_per_step is not None:
        return whole_between("samples_per_step", samples_per_step, 2, MAX_SAMPLES)
    config = options.get("hp_config")
    if not isinstance(config, HyperparameterConfig):  # None, or invalid and rejected later
        config = HyperparameterConfig()
    return common_samples(options.get("group_size", Hyperparameters().group_size), config)


def resolve_search_space(
    options: OptionsT, samples_per_step: int | None, *, words: bool, unused: Collection[str] = ()
) -> OptionsT:
    """Replace `hp_config="auto"` by the default search space; other options are unchanged.

    Args:
        options: Options of the population.
        samples_per_step: Samples per learning step; group sizes evolve only if it is given.
        words: True for language models.
        unused: Hyperparameters that the algorithm does not use.
    """
    values: Mapping[str, Any] = options
    if values.get("hp_config") != "auto":
        return options
    chosen: dict[str, Any] = {name: values[name] for name in HYPERPARAMETER_NAMES if values.get(name) is not None}
    defaults = (
        {} if words else {name: NETWORK_DEFAULTS[name] for name in HYPERPARAMETER_NAMES if name in NETWORK_DEFAULTS}
    )
    objective = values.get("objective")
    if not isinstance(objective, Objective):  # None, or invalid and rejected later
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
            raise ValueError(f"{name} is for {kind}. Leave it out.")


def _first_member(values: Mapping[str, Any], settings: Settings, defaults: Mapping[str, Any]) -> Hyperparameters:
    """Return the first member's hyperparameters, checked against the objective and the search space."""
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
    """Return the end-of-sequence token or tokens in the model's configuration."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    if declared is None:
        raise ValueError("eos_token_ids must be given: the model's configuration has no end-of-sequence token.")
    return declared
