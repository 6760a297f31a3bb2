"""The constructor arguments of multi-agent agents, declared once for single agents and populations."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from gymnasium import spaces

from evogrpo.agents.learning.shaping import refuse_for_transitions
from evogrpo.agents.members.joint_body import Credit, JointBody, JointSettings
from evogrpo.agents.members.joint_play import joint_shared
from evogrpo.agents.members.networks import NETWORK_DEFAULTS
from evogrpo.agents.members.shared import Shared
from evogrpo.envs.control.assignment import Policies
from evogrpo.hyperparameters import (
    HYPERPARAMETER_NAMES,
    AdvantageType,
    HyperparameterConfig,
    Hyperparameters,
    LossType,
    refuse_unknown,
)
from evogrpo.objective import Objective, Optimizer
from evogrpo.policies.control.architecture import ArchitectureLimits, NetworkConfig


class JointOptions(TypedDict, total=False):
    """Optional arguments of `MultiAgentGRPO` and `MultiAgentGRPO.population`.

    Attributes:
        policies: "shared" (default): one policy for all agents; "prefix": one for all agents whose names agree before
            the last underscore; "independent": one for each agent.
        credit: "team" (default): an agent's action is worth what all agents earn from then on; "agent": what the agent
            earns itself, as in a competition.
        agent_ids: Tell a policy that acts for several agents which of them it acts for; False by default.
        network: The architecture of every policy; two tanh layers of 64 by default.
        evolve_network: Lets the architecture of a policy change when members are mutated, within these limits; they
            stay as they are by default.
        normalise_observations: Show floating-point observations in deviations from each policy's running mean; False
            by default.
        objective: The loss, advantages, KL, reference and reward switches; by default loss_type "dapo" and advantage
            "return_to_go_timestep".
        optimizer: AdamW settings: betas, eps, weight decay, warm-up and schedule.
        seed: Root of every random stream; 0 by default.
        hp_config: What evolution may change; nothing by default.
        index: Identity in the lineage; 0 by default. A population counts up from it.
        device: Where networks learn; the CPU by default.
        lr: AdamW step size; 5e-3 by default.
        batch_size: Actions per optimizer step of each policy; 2048 by default.
        update_epochs: Passes over each learning step's actions; 4 by default.
        group_size: Joint episodes per joint reset seed; 8 by default.
        clip_coef: Half-width of the trust region on the probability ratio; 0.2 by default.
        max_grad_norm: Bound on the norm of each policy's gradient; 0.5 by default.
        temperature: Divides the logits while sampling and learning; 1 by default.
        beta: Weight of the KL to the reference policy; 0 by default, which costs no reference pass.
        clip_low: The lower half-width of the trust region apart; `clip_coef` by default.
        clip_high: The upper one; `clip_coef` by default.
        entropy_coef: Weight of the entropy bonus; 0 by default.
        advantage_clip: Bound on the size of advantages; none by default.
        gamma: Discount per action of the rewards ahead; 0.99 by default.
        loss_type: The member's own loss type; the objective's by default.
        advantage: The member's own advantage; the objective's by default.
    """

    policies: Policies
    credit: Credit
    agent_ids: bool
    network: NetworkConfig
    evolve_network: ArchitectureLimits | None
    normalise_observations: bool
    objective: Objective
    optimizer: Optimizer
    seed: int
    hp_config: HyperparameterConfig | None
    index: int
    device: str | torch.device
    lr: float
    batch_size: int
    update_epochs: int
    group_size: int
    clip_coef: float
    max_grad_norm: float
    temperature: float
    beta: float
    clip_low: float | None
    clip_high: float | None
    entropy_coef: float
    advantage_clip: float | None
    gamma: float
    loss_type: LossType | None
    advantage: AdvantageType | None


def open_with_options(
    size: int,
    observation_spaces: Mapping[str, spaces.Space[Any]],
    action_spaces: Mapping[str, spaces.Space[Any]],
    options: JointOptions,
) -> tuple[Shared, Hyperparameters]:
    """Check the constructor arguments, then make the banks they describe.

    Returns:
        What members share, and the first member's hyperparameters.

    Raises:
        ValueError: If an argument is unknown or out of range; nothing is made then.
    """
    refuse_unknown("argument", options, JointOptions.__annotations__)
    values: Mapping[str, Any] = {**NETWORK_DEFAULTS, **options}
    hyperparameters = Hyperparameters(**{name: values[name] for name in HYPERPARAMETER_NAMES if name in values})
    settings = JointSettings(**{name: values[name] for name in JointSettings.__dataclass_fields__ if name in values})
    space = options.get("hp_config") or HyperparameterConfig()
    objective = settings.objective
    hyperparameters = objective.resolved(hyperparameters, space)
    objective.check(hyperparameters, space)
    refuse_for_transitions(objective, hyperparameters, space)
    body = JointBody(observation_spaces, action_spaces, size, settings, device=options.get("device", "cpu"))
    return joint_shared(body, options.get("hp_config")), hyperparameters
