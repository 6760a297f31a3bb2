"""GRPO: agents that learn by comparing the completions (or episodes) of a group."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.checkpointing import load_agent, read_agent, save_agent
from evogrpo.algorithms.collect import check_groups
from evogrpo.algorithms.evaluation import common_scores, evaluate
from evogrpo.algorithms.factory import (
    Built,
    MultiAgentOptions,
    Options,
    auto_space,
    build_members,
    is_language_model,
)
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.algorithms.population import Population
from evogrpo.compat.agilerl import AgileRLMethods
from evogrpo.config.agent import LanguageSettings, NetworkSettings
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import (
    MAX_MEMBERS,
    MAX_SAMPLES,
    HyperparameterConfig,
)
from evogrpo.distributed import processes
from evogrpo.envs.control.gymnasium_groups import SingleEnvironment
from evogrpo.envs.protocol import SPLITS, GroupEnvironment, Split
from evogrpo.evolution.founders import spread_founders, warm_start_founders
from evogrpo.learn_reports import LearnReport
from evogrpo.members.members import Members, optional_method
from evogrpo.members.networks.members import NetworkMembers
from evogrpo.randomness import generator
from evogrpo.text import shown
from evogrpo.validation import (
    flag,
    lists_options,
    names_unknown,
    refuse_unknown,
    whole_between,
)
from evogrpo.warnings import warn

if TYPE_CHECKING:
    from accelerate import Accelerator


class EvolvableAlgorithm(Agent, AgileRLMethods):
    """Base class of agents that learn from groups of completions or episodes.

    Subclasses define `learn_together`.

    The constructor creates one agent in a bank of its own. `population` creates several agents that
    share one bank and learn in the same batches. The bank (`members.banks[policy]`) computes
    log-probabilities and takes optimizer steps for all members under any loss; see
    `evogrpo.members.bank.PolicyBank.update`.

    Args:
        observation_space: Observation space; may be None for a language model.
        action_space: Action space; may be None for a language model.
        actor_network: A causal language model of transformers; its weights and flags are never
            changed. None = a small network for the spaces. A torch module of your own replaces the
            default network.
        pad_token_id: Token used for padding, for language models.
        options: All other options, with defaults; see `evogrpo.algorithms.factory.Options`.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.
    """

    __slots__ = ()

    kinds: ClassVar[Mapping[str, type[Members] | str]] = {
        "language": "evogrpo.members.language.members:LanguageMembers",
        "networks": NetworkMembers,
    }
    _build: ClassVar[Callable[..., Built]] = staticmethod(build_members)

    @lists_options(Options.__annotations__, Hyperparameters, LanguageSettings, NetworkSettings)
    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        actor_network: nn.Module | None = None,
        pad_token_id: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        used = self.options_of_class(options)
        # An accelerator of several processes expects each of them to train its own share.
        accelerator = options.get("accelerator")
        count = getattr(accelerator, "num_processes", 1)
        if count != 1:
            raise ValueError(
                f"A single agent is trained by one process, got an accelerator with {count}"
                " processes. Use GRPO.population(...), or start the program without a"
                " multi-process launcher."
            )
        members, first = self._build(
            1, observation_space, action_space, actor_network, pad_token_id, used
        )
        super().__init__(members, 0, options.get("index", 0), first)

    @classmethod
    @lists_options(Options.__annotations__, Hyperparameters, LanguageSettings, NetworkSettings)
    def population(
        cls,
        size: int | None = None,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        wrapper_cls: type[Any] | None = None,
        wrapper_kwargs: Mapping[str, Any] | None = None,
        *,
        actor_network: nn.Module | None = None,
        pad_token_id: int | None = None,
        samples_per_step: int | None = None,
        spread: bool = True,
        founders: Sequence[Hyperparameters] | None = None,
        **options: Unpack[Options],
    ) -> Population:
        """Create agents that share one bank: language models, or small networks.

        The first member has the given hyperparameters; those that evolve are spread over their
        ranges for the others.

        Args:
            size: Number of members.
            observation_space: As for one agent.
            action_space: As for one agent.
            wrapper_cls: Class that wraps every agent: `population[i]` is
                `wrapper_cls(agent, **wrapper_kwargs)`.
            wrapper_kwargs: Keyword arguments of `wrapper_cls`.
            actor_network: As for one agent; one for all.
            pad_token_id: As for one agent.
            samples_per_step: Completions (or episodes) per member and learning step. Only needed if
                group_size evolves over a range: values are then divisors of it.
            spread: False starts all members with the given hyperparameters.
            founders: Hyperparameters of the first members, as `evogrpo.best_hyperparameters(RUN)`
                returns them; the others are spread. Values outside their ranges are moved to the
                nearest bound, and those that do not evolve are not used, with a warning.
            options: As for one agent.

        Raises:
            ValueError: If an argument is unknown, missing or out of range.
        """
        # 1. Check the arguments that only populations have, and replace hp_config="auto" by the
        #    default search space.
        if size is None:
            refuse_unknown(
                "argument",
                options,
                ["size", *Options.__annotations__, *MultiAgentOptions.__annotations__],
            )
            raise ValueError("size must be given: the number of members.")
        size = whole_between("size", size, 1, MAX_MEMBERS)
        flag("spread", spread)
        arguments: dict[str, Any] = {**options}
        if options.get("hp_config") == "auto":
            language = is_language_model(actor_network)
            unused = cls.unused_options
            arguments["hp_config"] = auto_space(
                options, samples_per_step, language=language, unused=unused
            )
        arguments = cls.options_of_class(arguments)
        # 2. Build the members, and an agent for each.
        members, first = cls._build(
            size, observation_space, action_space, actor_network, pad_token_id, arguments
        )
        return cls.population_of(
            members,
            first,
            wrapper_cls=wrapper_cls,
            wrapper_kwargs=wrapper_kwargs,
            samples_per_step=samples_per_step,
            spread=spread,
            founders=founders,
            index=options.get("index", 0),
        )

    @classmethod
    def population_of(
        cls,
        members: Members,
        first: Hyperparameters,
        *,
        wrapper_cls: type[Any] | None = None,
        wrapper_kwargs: Mapping[str, Any] | None = None,
        samples_per_step: int | None = None,
        spread: bool = True,
        founders: Sequence[Hyperparameters] | None = None,
        index: int = 0,
    ) -> Population:
        """Create the agents of existing members, such as those of a kind of your own.

        Args:
            members: The members, one agent each.
            first: Hyperparameters of the first member.
            wrapper_cls: See `population`.
            wrapper_kwargs: Keyword arguments of `wrapper_cls`.
            samples_per_step: Completions or episodes per member and learning step.
            spread: False starts all members with the first member's hyperparameters.
            founders: Hyperparameters of the first members.
            index: Index of the first member.

        Raises:
            ValueError: If an argument is out of range.
        """
        members.processes = processes()
        space = members.hp_config or HyperparameterConfig()
        # 1. Choose the number of samples that group sizes must divide.
        group_sizes = space.get("group_size")
        if samples_per_step is not None:
            samples = whole_between("samples_per_step", samples_per_step, 2, MAX_SAMPLES)
        elif group_sizes is None:
            samples = first.group_size
        elif group_sizes.choices is None:
            raise ValueError("samples_per_step must be given if group_size evolves over a range.")
        else:
            samples = math.lcm(first.group_size, *map(int, group_sizes.choices))
        # 2. Choose the founders: the user's, then a spread over the ranges of what evolves.
        chosen: tuple[Hyperparameters, ...] = ()
        if founders is not None:
            listed = isinstance(founders, Sequence) and len(founders) > 0
            if not listed or not all(isinstance(each, Hyperparameters) for each in founders):
                raise ValueError(
                    "founders must be a list of Hyperparameters, as"
                    f" evogrpo.best_hyperparameters(RUN) returns, got {shown(founders)}."
                )
            chosen, moved = warm_start_founders(founders, first, space, samples)
            for change in moved:
                warn(f"founders: {change}")
            first = chosen[0]
        # In an empty space, all founders have the first member's values.
        if not spread:
            space = HyperparameterConfig()
        records = spread_founders(
            first,
            space,
            members.size,
            generator(members.settings.seed, "spread"),
            samples,
            chosen,
        )
        # 3. Create the agents, with consecutive indices.
        agents = [
            cls.in_slot(members, slot, index + slot, record) for slot, record in enumerate(records)
        ]
        return Population(agents, members, wrapper_cls=wrapper_cls, wrapper_kwargs=wrapper_kwargs)

    # ---- acting and learning

    @names_unknown
    def get_action(self, states: Any, training: bool | None = None, action_mask: Any = None) -> Any:
        """Complete prompts, or choose actions.

        Args:
            states: For a language model, prompts `{"input_ids": [1, P], "attention_mask": [1, P]}`,
                as `HuggingFaceGym` returns them; for a small network, one observation or a batch
                along a leading axis; for several agents, observations by agent, as the environment
                returns them. Agents whose mask allows no action get none.
            training: True samples `group_size` completions per prompt, or one action per
                observation; False takes the most likely one. None = the agent's training mode.
            action_mask: Legal values of Discrete and MultiDiscrete actions, as environments return
                them in `info`, or by agent; None = all.

        Returns:
            For prompts, the completion ids `[g, P + C]` and the action masks `[g, P + C - 1]` of
            each prompt. The ids include the prompt and are padded on the right. Mask j is True
            where token j + 1 was sampled. For observations, an array of actions; pass them to
            `learn` unchanged. Box actions are not clipped to their bounds. For several agents,
            actions by agent, in the environment's format.

        Raises:
            ValueError: If the states or the mask do not fit.
        """
        if training is None:
            training = self.training
        act = optional_method(self.members, "act", "get_action")
        chosen = act(self.learner(), states, training=training, action_mask=action_mask)
        # The step count names the random stream of the next call.
        self.steps += int(training)
        return chosen

    @names_unknown
    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions in the environment's format, with Box actions clipped.

        Compatible with Stable-Baselines3.

        Training random streams are not touched, so it may be called at any time.

        Args:
            observation: One observation, or a batch along a leading axis.
            state: Returned unchanged; there are no recurrent networks.
            episode_start: Ignored.
            deterministic: Take the most likely action.
            action_masks: Legal values, as in the environment's `info["action_mask"]` or from its
                `action_masks()`; None = all. Pass them if the environment has them: the policy was
                trained with them. A mask in the observation is used anyway.

        Returns:
            The action, or actions along a leading axis; and `state`.

        Raises:
            ValueError: If the agent is a language model, or the observation does not fit.
        """
        actions = optional_method(self.members, "predict")(
            self.learner(),
            observation,
            deterministic=deterministic,
            calls=self._prediction_count,
            action_masks=action_masks,
            base=self._evaluated_network == "base",
        )
        self._prediction_count += 1  # the next call draws other random numbers
        return actions, state

    @names_unknown
    def generate(
        self,
        prompts: Sequence[Any],
        tokenizer: Any = None,
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_output_tokens: int | None = None,
    ) -> list[str]:
        """Complete texts; for language models.

        Training random streams are not touched, so it may be called at any time.

        Args:
            prompts: Texts to continue, or conversations: lists of {"role": ..., "content": ...},
                formatted by the tokenizer's chat template.
            tokenizer: Tokenizer of the base model; loaded from the base model's source by default.
            n: Completions per prompt.
            temperature: 0 (default) is greedy; above 0, tokens are sampled with probabilities
                p^(1/T), differently in every call.
            max_output_tokens: Maximum tokens of a completion; the agent's own by default.

        Returns:
            `len(prompts) * n` texts without special tokens; the n completions of a prompt are next
            to each other.

        Raises:
            ValueError: If the agent is a small network, a prompt is invalid or too long, or the
                tokenizer is unknown.
        """
        texts: list[str] = optional_method(self.members, "generate")(
            self.learner(),
            prompts,
            tokenizer=tokenizer,
            n=n,
            temperature=temperature,
            max_output_tokens=max_output_tokens,
            calls=self._prediction_count,
            base=self._evaluated_network == "base",
        )
        self._prediction_count += 1
        return texts

    @names_unknown
    def learn(self, experiences: Any) -> LearnReport:
        """Learn from rewarded completions or episodes of your own loop.

        Args:
            experiences: For a language model `(completion_ids, action_masks, rewards)`: the first
                two as `get_action` returns them, rewards `[prompts, group_size]`; NaN = no reward
                applies. For a small network `(observations, actions, action_masks, rewards)`, each
                `[starts, group_size, steps, ...]`: whole episodes, padded to the longest,
                `group_size` from each start (reset seed); actions as `get_action` returns them,
                masks True for steps taken, and the reward of each step. If `get_action` was called
                with an `action_mask`, these masks are a fifth part,
                `[starts, group_size, steps, k]`.

        Returns:
            A report that unpacks as `loss, kl`; other metrics are its attributes.

        Raises:
            ValueError: If the parts do not fit together.
        """
        self.check_single_rank("learn")
        if isinstance(experiences, int | float | str):
            raise ValueError(
                "experiences must be a tuple of sampled data and rewards, got"
                f" {shown(experiences)}. To train in an environment, use evogrpo.train(env,"
                " total_timesteps=...) or evogrpo.evolve(population, env)."
            )
        # 1. Convert the samples of the caller's loop to a batch.
        learner = self.learner()
        to_experience = optional_method(self.members, "experience", "learn")
        experience, observed = to_experience(learner, experiences)
        # 2. Learn. Observation statistics change afterwards, as in a population.
        report = self.learn_together(self.members, [learner], experience)[self.slot]
        self.members.update_statistics(observed)
        self.steps += 1
        self.failed = report.failed
        return report

    @names_unknown
    def test(
        self,
        env: "GroupEnvironment | gymnasium.Env[Any, Any]",
        loop: int = 1,
        split: Split = "validation",
        *,
        episodes: int | None = None,
    ) -> float:
        """Return the mean greedy reward (or undiscounted return) on a held-out split.

        Args:
            env: A group environment; or a single Gymnasium environment, which is reset with seeds
                0, 1, ... and stays open. With render_mode="human" it shows a window.
            loop: Number of passes over the split. More than one is useful only if rewards are
                random.
            split: "validation", or "test" for the final report.
            episodes: Number of starts, from the first on; None = all, but 1 for a single
                environment.

        Raises:
            ValueError: If an argument is out of range, the environment does not fit the agent, or
                the agent belongs to a population that is divided among ranks.
        """
        # 1. Check the arguments.
        loop = whole_between("loop", loop, 1)
        refuse_unknown("split", [split], SPLITS)
        self.check_single_rank("test")
        base = self._evaluated_network == "base"
        if episodes is not None:
            episodes = whole_between("episodes", episodes, 1)
        # 2. Make groups of a single environment, each start with one episode.
        groups: Any = env
        if isinstance(env, gymnasium.Env) and not hasattr(env, "select_starts"):
            if episodes is None:
                episodes = 1
            groups = SingleEnvironment(env, episodes)
        check_groups(groups)
        self.members.check(groups)
        # 3. Evaluate, and average over the starts that have a reward.
        rounds = [
            evaluate(
                self.members,
                [self.slot],
                groups,
                split,
                questions=episodes,
                settings={self.slot: self.hyperparameters.task_settings},
                base=base,
            )
            for _ in range(loop)
        ]
        means = [common_scores(rewards, split).mean() for rewards in rounds]
        return float(np.mean(means))

    # ---- the network

    def get_policy(self) -> Any:
        """Return the policy as a module.

        For a language model, `policy(input_ids, attention_mask)` returns logits `[n, t, v]`; it
        shares the agent's weights. For a small network, it is a copy: `policy(observations)`
        returns the distribution parameters `[m, o]` (see `StackedPolicy.module`). For several
        agents, a dictionary of such modules by policy.
        """
        policy = optional_method(self.members, "policy", "get_policy")
        return policy(self.slot, base=self._evaluated_network == "base")

    # ---- checkpoints

    @names_unknown
    def save_checkpoint(self, path: str | Path, *, replace: bool = False) -> None:
        """Save the agent as a checkpoint folder.

        For a language model it is also a PEFT adapter, or a full model.

        Args:
            path: Folder to create.
            replace: Replace an existing checkpoint.

        Raises:
            CheckpointError: If the path exists and must not be replaced.
        """
        save_agent(self, path, replace=replace)

    @classmethod
    @names_unknown
    def load(
        cls,
        path: str | Path,
        device: str | torch.device | None = None,
        accelerator: "Accelerator | None" = None,
        actor_network: nn.Module | None = None,
    ) -> Self:
        """Load a saved agent into a bank of its own.

        Args:
            path: Folder written by `save_checkpoint`.
            device: Device of the model; by default that of `actor_network`, or the CPU.
            accelerator: See the constructor.
            actor_network: The base model; by default the demo model or hub id named in the
                checkpoint. Paths named in a checkpoint are never followed. For small networks, only
                needed for a module of your own.

        Raises:
            CheckpointError: If the checkpoint is damaged, or of another base model.
            ValueError: If the base model cannot be found, or a module is missing.
        """
        return load_agent(
            cls, path, device=device, accelerator=accelerator, actor_network=actor_network
        )

    def load_checkpoint(self, path: str | Path) -> None:
        """Load a saved agent's weights, optimizer, hyperparameters and counters into this agent.

        This agent keeps its identity in a population: `index`, `parent`, `born` and `retired`.

        Raises:
            CheckpointError: If the checkpoint is damaged or of another base model; the agent is
                unchanged then.
        """
        read_agent(self, path)


class GRPO(EvolvableAlgorithm):
    """An agent trained by group relative policy optimisation.

    The constructor creates one agent in a bank of its own; `GRPO.population` creates several that
    share one bank.

    Args:
        observation_space: Observation space; may be None for a language model.
        action_space: Action space; may be None for a language model.
        actor_network: A causal language model of transformers; its weights and flags are never
            changed. None = a small network for the spaces. A torch module of your own replaces the
            default network.
        pad_token_id: Token used for padding, for language models.
        options: All other options, with defaults; see `evogrpo.algorithms.factory.Options`.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.
    """

    __slots__ = ()

    unused_options: ClassVar[tuple[str, ...]] = ()

    learn_together = staticmethod(learn)
