"""The constructor arguments of language-model agents, declared once for single agents and populations."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from accelerate import Accelerator
from gymnasium import spaces
from peft import LoraConfig
from transformers import PreTrainedModel

from evogrpo.agents.shared import Settings, Shared, make_shared
from evogrpo.hyperparameters import HYPERPARAMETER_NAMES, HyperparameterConfig, Hyperparameters, refuse_unknown
from evogrpo.objective import Objective, Optimizer


class Options(TypedDict, total=False):
    """Optional arguments of `GRPO` and `GRPO.population`.

    Attributes:
        hp_config: What evolution may change; nothing by default.
        index: Identity in the lineage; 0 by default. A population counts up from it.
        batch_size: Completions per optimizer step; 64 by default.
        lr: AdamW step size; 1e-4 by default.
        clip_coef: Half-width of the trust region on the probability ratio; 0.2 by default.
        max_grad_norm: Bound on the gradient's norm; 0.5 by default.
        update_epochs: Passes over each learning step's completions; 1 by default.
        group_size: Completions per prompt; 8 by default.
        temperature: Divides the logits while sampling and learning; 1 by default.
        beta: Weight of the KL to the reference policy, the base model; 0 by default, which costs no reference pass.
        calc_position_embeddings: Pass positions, counted without padding, to the model; True by default. False is
            for models that take none.
        reduce_memory_peak: Compute log-probabilities over a few hundred tokens' logits at a time, with the same
            results; True by default.
        min_output_tokens: Ends of sequence are ruled out for that many first tokens; 0 by default.
        max_output_tokens: Most tokens of a completion; 128 by default.
        eos_token_ids: Tokens that end a completion; the model's generation config names them by default.
        accelerator: Chooses the device and the precision of forward passes; one process only.
        device: Where to put the model; it stays where it is by default.
        lora_config: What to adapt; rank 16 on all linear layers by default.
        objective: The loss.
        optimizer: AdamW settings: betas, eps, weight decay, warm-up and schedule.
        seed: Root of every random stream; 0 by default.
        micro_batch_tokens: Most tokens in one forward pass with gradients, the knob between memory and speed; 1024 by
            default.
        source: What the base model was loaded from, for checkpoints; the model's own name by default.
    """

    hp_config: HyperparameterConfig | None
    index: int
    batch_size: int
    lr: float
    clip_coef: float
    max_grad_norm: float
    update_epochs: int
    group_size: int
    temperature: float
    beta: float
    calc_position_embeddings: bool
    reduce_memory_peak: bool
    min_output_tokens: int
    max_output_tokens: int
    eos_token_ids: tuple[int, ...]
    accelerator: Accelerator | None
    device: str | torch.device | None
    lora_config: LoraConfig | None
    objective: Objective
    optimizer: Optimizer
    seed: int
    micro_batch_tokens: int
    source: str | None


def open_shared(
    size: int,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    actor_network: PreTrainedModel | None,
    pad_token_id: int | None,
    options: Options,
) -> tuple[Shared, Hyperparameters]:
    """Check the constructor arguments, then build the bank they describe.

    Returns:
        What members share, and the first member's hyperparameters.

    Raises:
        ValueError: If an argument is unknown, missing or out of range; nothing is built then.
    """
    refuse_unknown("argument", options, Options.__annotations__)
    if not isinstance(actor_network, PreTrainedModel):
        raise ValueError(
            f"actor_network must be a transformers model, got {type(actor_network).__name__}: "
            "load one with evogrpo.policies.models.load_base or AutoModelForCausalLM.from_pretrained"
        )
    if pad_token_id is None:
        raise ValueError("pad_token_id must be given, for instance tokenizer.pad_token_id")
    values: Mapping[str, Any] = options
    hyperparameters = Hyperparameters(**{name: values[name] for name in HYPERPARAMETER_NAMES if name in values})
    names = Settings.__dataclass_fields__
    settings = Settings(
        pad_token_id=pad_token_id,
        eos_token_ids=tuple(values.get("eos_token_ids") or _eos_of(actor_network)),
        **{name: values[name] for name in names if name in values and name != "eos_token_ids"},
    )
    shared = make_shared(
        actor_network,
        size,
        settings,
        lora_config=options.get("lora_config"),
        hp_config=options.get("hp_config"),
        source=options.get("source"),
        accelerator=options.get("accelerator"),
        device=options.get("device"),
        observation_space=observation_space,
        action_space=action_space,
    )
    return shared, hyperparameters


def _eos_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end-of-sequence tokens that the model itself declares."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    if declared is None:
        raise ValueError("eos_token_ids must be given: the model's configs name no end-of-sequence token")
    return tuple(declared) if isinstance(declared, list | tuple) else (declared,)
