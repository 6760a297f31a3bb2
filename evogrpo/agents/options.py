"""The constructor arguments of agents, declared once for single agents and populations."""

from pathlib import Path
from typing import Literal, TypedDict

import torch
from accelerate import Accelerator
from peft import LoraConfig

from evogrpo.agents.members.control.team_settings import Credit
from evogrpo.config.loss_types import AdvantageType, LossType
from evogrpo.config.objective import Objective
from evogrpo.config.optimizer import Optimizer
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.envs.control.joint.assignment import Policies
from evogrpo.policies.control.architecture import ArchitectureLimits, NetworkConfig


class CommonOptions(TypedDict, total=False):
    """Optional arguments of all agents.

    Some defaults are others for small networks: lr 5e-3, batch_size 2048, update_epochs 4, gamma 0.99, and an objective
    of loss_type "dapo" with advantage "return_to_go_timestep" (`NETWORK_DEFAULTS` and `STEPWISE` of
    `evogrpo.agents.members.control.network_settings`).

    Attributes:
        hp_config: What evolution may change; nothing by default. "auto", for a population: what decides most and has no
            value here, over wide ranges (`evogrpo.config.search_space`).
        index: Identity in the lineage; 0 by default. A population counts up from it.
        batch_size: Completions (for small networks transitions, of several agents each policy's) per optimizer step; 64
            by default, for small networks 2048.
        lr: AdamW step size; 1e-4 by default, for small networks 5e-3.
        clip_coef: Half-width of the trust region on the probability ratio; 0.2 by default.
        max_grad_norm: Bound on the norm of each policy's gradient; 0.5 by default.
        update_epochs: Passes over each learning step's samples; 1 by default, for small networks 4.
        group_size: Completions per prompt (episodes per reset seed); 8 by default.
        temperature: Divides the logits while sampling and learning; 1 by default. T means probabilities p^(1/T).
        beta: Weight of the KL to the reference policy; 0 by default, which costs no reference pass.
        clip_low: The lower half-width of the trust region apart; `clip_coef` by default.
        clip_high: The upper one; `clip_coef` by default.
        entropy_coef: Weight of the entropy bonus; 0 by default.
        advantage_clip: Bound on the size of advantages; none by default.
        gamma: Discount per action of the rewards ahead; 1 by default, for small networks 0.99.
        loss_type: The member's own loss type; the objective's by default.
        advantage: The member's own advantage; the objective's by default.
        objective: The loss, advantages, KL, reference and reward switches.
        optimizer: AdamW settings: betas, eps, weight decay, warm-up and schedule.
        seed: Root of every random stream; 0 by default.
        device: Where to put the model; it stays where it is by default. Small networks are on the CPU by default.
        network: For small networks, like all that follow. The architecture that members start with; two tanh layers
            of 64 by default, behind convolutions for images.
        evolve_network: Lets architectures change when members are mutated, within these limits; they stay as they are
            by default.
        normalise_observations: Show each member floating-point observations in deviations from their running mean;
            False by default.
    """

    hp_config: HyperparameterConfig | Literal["auto"] | None
    index: int
    batch_size: int
    lr: float
    clip_coef: float
    max_grad_norm: float
    update_epochs: int
    group_size: int
    temperature: float
    beta: float
    clip_low: float | None
    clip_high: float | None
    entropy_coef: float
    advantage_clip: float | None
    gamma: float
    loss_type: LossType | None
    advantage: AdvantageType | None
    objective: Objective
    optimizer: Optimizer
    seed: int
    device: str | torch.device | None
    network: NetworkConfig
    evolve_network: ArchitectureLimits | None
    normalise_observations: bool


class Options(CommonOptions, total=False):
    """Optional arguments of `GRPO` and `GRPO.population`, beside the common ones.

    Attributes:
        accelerator: Chooses the device and the precision of forward passes.
        calc_position_embeddings: For language models, like all that follow: pass positions, counted without padding,
            to the model; True by default. False is for models that take none.
        reduce_memory_peak: Compute logits in chunks of a few hundred tokens; True by default. False computes the
            logits of a whole micro-batch at once. Same results, up to rounding.
        min_output_tokens: Ends of sequence are ruled out for that many first tokens; 0 by default.
        max_output_tokens: Most tokens of a completion, or of one turn of a conversation; 128 by default.
        max_episode_tokens: Most tokens of a conversation, said and heard together; by default what the model's context
            takes.
        top_k: Draw completions from so many of the most likely tokens only; 0, all of them, by default. What is learnt
            is the whole distribution: where this or one of the next three leaves some of it out, old log-probabilities
            are the trainer's, and `Objective.importance_correction` can weigh the difference.
        top_p: Only from the most likely tokens that together have this probability; 1 by default.
        min_p: Only from tokens at least this many times as likely as the most likely one; 0 by default.
        repetition_penalty: Make tokens that are there already less likely, in greedy answers too; 1, no penalty, by
            default.
        eos_token_ids: Token, or tokens, that end a completion; the model's generation config names them by default.
        lora_config: What to adapt, as a `peft.LoraConfig`; None (default) = rank 16, alpha 32, on all linear layers but
            the vocabulary head.
        adapter: Folder of a PEFT adapter that every member starts from, an export or a checkpoint for instance, with
            the lora_config that it brings; the reference and the baseline stay the base without adapters.
        micro_batch_tokens: Most tokens in one forward pass with gradients, which trades memory for speed. Defaults
            to 1024 on CPUs, and on CUDA to the largest power of two that fits into half of the memory left by the base
            and the members, by estimate. Halved when memory runs out.
        source: What the base model was loaded from, for checkpoints; the model's own name by default.
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


class TeamOptions(CommonOptions, total=False):
    """Optional arguments of `MultiAgentGRPO` and `MultiAgentGRPO.population`, beside the common ones.

    Attributes:
        policies: "shared" (default): one policy for all agents; "prefix": one for all agents whose names agree before
            the last underscore; "independent": one for each agent.
        credit: "team" (default): an agent's action is worth what all agents earn from then on; "agent": what the agent
            earns itself, as in a competition.
        agent_ids: Tell a policy that acts for several agents which of them it acts for; False by default.
    """

    policies: Policies
    credit: Credit
    agent_ids: bool
