"""A configuration checked against the machine, the task and the members' kind, before anything expensive."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from evogrpo.agents.grpo import GRPO
from evogrpo.agents.members.network_settings import NetworkSettings
from evogrpo.agents.members.stacked_policy import StackedPolicy
from evogrpo.agents.population import Population
from evogrpo.envs.control.gymnasium import GymnasiumGroups
from evogrpo.envs.prompts.huggingface import HuggingFaceGym
from evogrpo.policies.control.encoding import Encoding
from evogrpo.policies.tokens.lora import Target, check_supported, find_targets, lora_from_json
from evogrpo.policies.tokens.models import BaseModel, load_base, load_outline
from evogrpo.training.configuration.environment_tasks import EnvironmentTask
from evogrpo.training.configuration.members import AgentConfig, NetworkAgentConfig
from evogrpo.training.configuration.question_tasks import QuestionTask
from evogrpo.training.configuration.record import Config
from evogrpo.training.configuration.typed import plain
from evogrpo.training.progress import Progress
from evogrpo.training.rundir import Saved

ONE_THREAD = 1 << 15
"""Parameters of a member up to which a second thread gains little: measured for 8 members, 9 % at 4,500 and 5 % at
17,000 (two layers of 64 and 128), but 25 % at 67,000."""


@dataclass(frozen=True, kw_only=True)
class PreparedLanguage:
    """Everything about a run of language models that can be had without loading weights.

    Attributes:
        config: The configuration.
        agent: Its part about members.
        model: Its base model.
        outline: The base model's tokenizer and architecture.
        env: Where members act.
        device: Where they will live.
        lora: The adapters.
        targets: The modules they adapt.
    """

    config: Config
    agent: AgentConfig
    model: str
    outline: BaseModel
    env: HuggingFaceGym
    device: str
    lora: LoraConfig
    targets: tuple[Target, ...]

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token; for one that has none, its end of sequence, as padding is masked anyway."""
        tokenizer = self.outline.tokenizer
        chosen = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return int(chosen or 0)

    def population(self) -> Population:
        """Load the base model and make the founders; raises ValueError if the weights cannot be loaded."""
        options = self.agent.settings()
        if self.agent.eos_token_ids is not None:
            options["eos_token_ids"] = self.agent.eos_token_ids
        return _founders(
            self.config,
            self.env,
            options,
            actor_network=load_base(self.model, device=self.device).model,
            pad_token_id=self.pad_token_id,
            lora_config=self.lora,
            source=self.model,
        )

    def restore(self, saved: Saved) -> tuple[Population, Progress]:
        """Load the base model and the members of a stored run; raises ValueError if they do not belong together."""
        return saved.restore(load_base(self.model, device=self.device).model)


@dataclass(frozen=True, kw_only=True)
class PreparedNetworks:
    """Everything about a run of small networks but the networks themselves.

    Attributes:
        config: The configuration.
        agent: Its part about members.
        env: Where members act.
        device: Where they will live.
        parameters: Of one member's network, as it starts.
    """

    config: Config
    agent: NetworkAgentConfig
    env: GymnasiumGroups
    device: str
    parameters: int

    @property
    def one_thread(self) -> bool:
        """Whether the products are so small that further threads of torch mostly wait: short vectors, on the CPU."""
        on_cpu = torch.device(self.device).type == "cpu"
        return on_cpu and self.parameters <= ONE_THREAD and not Encoding(self.env.observation_space).images

    def population(self) -> Population:
        """Make the founders."""
        return _founders(self.config, self.env, self.agent.settings(), device=self.device)

    def restore(self, saved: Saved) -> tuple[Population, Progress]:
        """Make the members of a stored run."""
        return saved.restore(device=self.device)


Prepared = PreparedLanguage | PreparedNetworks


def prepare(config: Config) -> Prepared:
    """Check a configuration against the device, the model's architecture and tokenizer, and the task.

    Raises:
        ValueError: If one of them does not fit, with what to do.
    """
    seed = config.seed if config.task.seed is None else config.task.seed
    if isinstance(config.task, EnvironmentTask):
        assert isinstance(config.agent, NetworkAgentConfig)  # parse_config chose it by the task
        return _prepare_networks(config, config.agent, config.task.environment(seed=seed))
    assert isinstance(config.agent, AgentConfig)
    assert config.model is not None  # Config refuses that
    return _prepare_language(config, config.agent, config.model, config.task, seed)


def _prepare_language(
    config: Config, agent: AgentConfig, model: str, task: QuestionTask, seed: int
) -> PreparedLanguage:
    device = choose_device(config.device)
    lora = lora_from_json(plain(agent.lora))
    check_supported(lora)
    outline = load_outline(model)
    targets = find_targets(outline.model, lora)
    longest = task.max_prompt_length
    context = getattr(outline.model.config.get_text_config(), "max_position_embeddings", None)
    if longest is None and context is not None:
        longest = int(context) - agent.max_output_tokens
        if longest < 1:
            raise ValueError(
                f"agent.max_output_tokens must leave room for a prompt in the model's context of {context} tokens, "
                f"got {agent.max_output_tokens}"
            )
    env = task.environment(outline.tokenizer, seed=seed, max_prompt_length=longest)
    return PreparedLanguage(
        config=config, agent=agent, model=model, outline=outline, env=env, device=device, lora=lora, targets=targets
    )


def _prepare_networks(config: Config, agent: NetworkAgentConfig, env: GymnasiumGroups) -> PreparedNetworks:
    policy = StackedPolicy(env.observation_space, env.action_space, 1, NetworkSettings(**agent.settings()))
    return PreparedNetworks(
        config=config,
        agent=agent,
        env=env,
        device="cpu" if config.device is None else choose_device(config.device),
        parameters=policy.bank.state(0)["weights"].numel(),
    )


def _founders(
    config: Config, env: HuggingFaceGym | GymnasiumGroups, settings: dict[str, Any], **members: Any
) -> Population:
    """Make the founders that a configuration describes."""
    options: dict[str, Any] = {**members, **settings, **config.hyperparameters.to_json()}
    return GRPO.population(
        config.population.size,
        env.observation_space,
        env.action_space,
        samples_per_step=config.schedule.samples_per_step,
        spread=config.population.spread,
        hp_config=config.evolve,
        seed=config.seed,
        **options,
    )


def choose_device(wanted: str | None) -> str:
    """Return the device to use: the one asked for if it is there, else a GPU if there is one.

    Raises:
        ValueError: If the device does not exist here.
    """
    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {wanted!r} cannot be used: {str(error).splitlines()[0]}") from error
    return wanted
