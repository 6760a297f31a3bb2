"""GRPO: an agent that learns by comparing the completions or episodes of a group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack, cast

import gymnasium
import numpy as np
import torch
from accelerate import Accelerator
from gymnasium import spaces
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from evogrpo.algorithms.agent import Agent
from evogrpo.algorithms.checkpointing import load_agent, read_agent, save_agent
from evogrpo.algorithms.factory import (
    Options,
    build_policy_set,
    check_founders,
    check_size,
    founder_samples,
    resolve_search_space,
)
from evogrpo.algorithms.learning.learning_step import learn
from evogrpo.algorithms.learning.training_rows import Learner
from evogrpo.algorithms.policies.devices import check_accelerator
from evogrpo.algorithms.policies.distributed import check_single_rank, distribute, placement_of
from evogrpo.algorithms.policies.policy_set import PolicySet
from evogrpo.algorithms.policies.settings import LanguageSettings, NetworkSettings
from evogrpo.algorithms.population import Population
from evogrpo.algorithms.rollout.evaluation import common_scores, evaluate
from evogrpo.algorithms.rollout.testing import open_test_environment
from evogrpo.config.checks import flag, lists_options, names_unknown, refuse_unknown, unknown_name_error
from evogrpo.config.hyperparameters import Hyperparameters
from evogrpo.config.search_space import HyperparameterConfig
from evogrpo.data import Experience, LearnReport
from evogrpo.envs.protocol import SPLITS, GroupEnvironment, Split
from evogrpo.spaces import action_dim, observation_dim, preprocess_observation


@dataclass(frozen=True)
class NetworkGroup:
    """Which of an agent's networks is evaluated as its policy.

    Attributes:
        eval_network: "actor", the network that learns, or "base", what it was before it had learnt anything.
    """

    eval_network: str


_NETWORKS = ("actor", "base")


class AgileRLAgent(Agent):
    """What AgileRL's users further call on an agent, in its terms."""

    __slots__ = ()

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies of what selection copies: the policy's own weights, its own reference, optimiser, statistics.

        Args:
            networks_only: Leave the optimiser and the running statistics out.
        """
        state = self.state()
        weights = {name: state.pop(name) for name in self.members.weights}
        if networks_only:
            return {"actor": weights}
        others: tuple[str, ...] = ("running_stats", "reference")
        kept = {name: {name: state.pop(name)} for name in others if name in state}
        return {"actor": weights, "optimizer": state, **kept}

    @staticmethod
    def inspect_attributes(agent: Agent, input_args_only: bool = False) -> dict[str, Any]:
        """Return an agent's attributes other than networks and optimisers.

        Args:
            agent: The agent.
            input_args_only: Only those that are constructor arguments.
        """
        members = agent.members
        arguments: dict[str, Any] = {
            "index": agent.index,
            "hp_config": agent.hp_config,
            **agent.hyperparameters.to_json(),
            **{field.name: getattr(members.settings, field.name) for field in fields(cast(Any, members.settings))},
            **members.arguments(),
        }
        if input_args_only:
            return arguments
        state = ("slot", "parent", "back_to", "born", "fitness", "failed", "retired", "training", "steps")
        return {**arguments, **{name: getattr(agent, name) for name in state}}

    def register_network_group(self, group: NetworkGroup) -> None:
        """Set which network `get_policy` returns and `test` evaluates; the actor learns all the same.

        Raises:
            ValueError: If the agent has no network of that name.
        """
        if group.eval_network not in _NETWORKS:
            raise unknown_name_error("network", group.eval_network, _NETWORKS)
        self._evaluated = group.eval_network

    @staticmethod
    def get_state_dim(observation_space: Any) -> Any:
        """Return the shape of an observation; see `evogrpo.spaces.observation_dim`."""
        return observation_dim(observation_space)

    @staticmethod
    def get_action_dim(action_space: Any) -> Any:
        """Return the number of outputs that an action needs; see `evogrpo.spaces.action_dim`."""
        return action_dim(action_space)

    def preprocess_observation(self, observation: Any) -> Any:
        """Turn an observation into tensors on the agent's device; see `evogrpo.spaces.preprocess_observation`."""
        if self.observation_space is None:
            raise ValueError("observation_space must be given to the agent before observations can be preprocessed")
        return preprocess_observation(observation, self.observation_space, self.device)

    def to_device(self, *experiences: Any) -> tuple[Any, ...]:
        """Return the experiences with every tensor in them, however nested, on the agent's device."""
        return tuple(_moved(item, self.device) for item in experiences)


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, Mapping):
        return {key: _moved(value, device) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_moved(value, device) for value in item)
    return item


class EvolvableAlgorithm(AgileRLAgent):
    """An agent that learns from groups of completions or episodes; how, its subclass says in `learn_together`.

    The constructor makes one agent in a bank of its own; `population` makes several that share one bank, and learn in
    the same batches. What they share (`members.policies[name].bank`) computes log-probabilities, and takes an optimizer
    step for every member under any loss: see `evogrpo.models.bank.PolicyBank.update`.

    Args:
        observation_space: What it reads; may be None for a language model.
        action_space: What it does; may be None for a language model.
        actor_network: A causal language model of transformers; its weights and flags are never changed. Without one the
            agent is a small network for its spaces; a torch module of your own takes the default network's place.
        pad_token_id: Token used for padding, for language models.
        options: Everything else, with defaults: see `evogrpo.algorithms.factory.Options`.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.
    """

    __slots__ = ()

    kinds: ClassVar[tuple[str, ...]] = ("language", "networks")

    @lists_options(Options.__annotations__, Hyperparameters, LanguageSettings, NetworkSettings)
    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        actor_network: nn.Module | None = None,
        pad_token_id: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._check_class(options)
        check_accelerator(options.get("accelerator"))
        members, first = build_policy_set(1, observation_space, action_space, actor_network, pad_token_id, options)
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
        """Make agents that share one bank: language models over one base model, or small networks side by side.

        The first member has the given hyperparameters; those that evolve are spread over their ranges for the others.

        Args:
            size: Number of members.
            observation_space: As for one agent.
            action_space: As for one agent.
            wrapper_cls: Wraps every agent that the population hands out: `wrapper_cls(agent, **wrapper_kwargs)`.
            wrapper_kwargs: See `wrapper_cls`.
            actor_network: As for one agent; one for all.
            pad_token_id: As for one agent.
            samples_per_step: Completions (or episodes) per member and learning step, if group_size evolves over a
                range: only its divisors are dealt. Unneeded when group_size has choices.
            spread: False lets every member start with the given hyperparameters.
            founders: What the first members begin with of what evolves, as `evogrpo.best_hyperparameters(RUN)` gives;
                the rest are spread. Values outside their ranges are moved to the nearest, with a warning.
            options: As for one agent.

        Raises:
            ValueError: If an argument is unknown, missing or out of range.
        """
        size = check_size(size, options)
        flag("spread", spread)
        words = isinstance(actor_network, PreTrainedModel)
        options = resolve_search_space(options, samples_per_step, words=words, unused=cls.unused_options)
        cls._check_class(options)
        samples = founder_samples(options, samples_per_step)
        places = placement_of(size)
        count = places.held
        members, first = build_policy_set(count, observation_space, action_space, actor_network, pad_token_id, options)
        members = distribute(members, places)
        given = check_founders(founders, first, members.hp_config, samples)
        agents = cls.founders(members, first, options.get("index", 0), samples=samples, spread=spread, given=given)
        return Population(agents, members, wrapper_cls=wrapper_cls, wrapper_kwargs=wrapper_kwargs)

    @classmethod
    def _check_class(cls, options: Mapping[str, Any]) -> None:
        if cls.learn_together.__func__ is Agent.learn_together.__func__:  # type: ignore[attr-defined]
            raise TypeError(
                f"{cls.__name__} does not say how it learns: define learn_together in a subclass, as GRPO does"
            )
        for name in cls.unused_options:
            space = options.get("hp_config")  # which may be anything yet
            if name in options or (isinstance(space, HyperparameterConfig) and name in space):
                raise ValueError(f"{name} means nothing to {cls.__name__}: leave it out")

    # ---- acting and learning

    def get_action(self, states: Any, training: bool | None = None, action_mask: Any = None) -> Any:
        """Answer prompts, or choose actions.

        Args:
            states: For a language model prompts `{"input_ids": [1, P], "attention_mask": [1, P]}`, as `HuggingFaceGym`
                serves them; for a small network one observation, or a batch of them along a leading axis.
            training: True samples, `group_size` completions per prompt, one action per observation; False takes what is
                most likely, once each. None = the agent's training mode.
            action_mask: Legal values of Discrete and MultiDiscrete actions, as environments give them in their info;
                None = all.

        Returns:
            For prompts, per prompt, the completion ids `[g, P + C]`, prompt included and padded on the right, and the
            action masks `[g, P + C - 1]`: mask j is True where token j + 1 was sampled. For observations an array of
            actions, to be given back to `learn` as they are; boxes are not clipped to their bounds yet.

        Raises:
            ValueError: If the states or the mask do not fit.
        """
        training = self.training if training is None else training
        chosen = self.members.act(self.learner(), states, training=training, action_mask=action_mask)
        self.steps += int(training)
        return chosen

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[NDArray[Any], Any]:
        """Choose actions as the environment takes them, boxes clipped: the interface of Stable-Baselines3.

        Training and its random streams are not touched, so it may be called at any time.

        Args:
            observation: One observation, or a batch of them along a leading axis.
            state: Handed back as it is: there are no recurrent networks.
            episode_start: Not needed, as there is no state.
            deterministic: Take the most likely action.
            action_masks: Legal values, as the environment's `info["action_mask"]` has them; None = all are. What an
                environment rules out has to be passed here, or another policy acts than the one that was trained.

        Returns:
            The action, or actions along a leading axis; and `state`.

        Raises:
            ValueError: If the agent is a language model, or the observation does not fit.
        """
        actions = self.members.predict(
            self.learner(),
            observation,
            deterministic=deterministic,
            calls=self._predictions,
            action_masks=action_masks,
        )
        self._predictions += 1
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
        """Answer texts with texts; for language models.

        Training and its random streams are not touched, so it may be called at any time.

        Args:
            prompts: Texts, which are continued as they are, or conversations: lists of {"role": ..., "content": ...},
                which go through the tokenizer's chat template.
            tokenizer: The base model's; loaded from where the base came from by default.
            n: Answers per prompt.
            temperature: 0 (default) takes what is most likely, always the same; above 0, as in training, probabilities
                are p^(1/T), and every call draws anew.
            max_output_tokens: Most tokens of an answer; the agent's own by default.

        Returns:
            `len(prompts) * n` texts, the n answers to a prompt next to each other, without special tokens.

        Raises:
            ValueError: If the agent is a small network, a prompt is none or too long, or the tokenizer is not known.
        """
        texts = self.members.generate(
            self.learner(),
            prompts,
            tokenizer=tokenizer,
            n=n,
            temperature=temperature,
            max_output_tokens=max_output_tokens,
            calls=self._predictions,
            base=self._evaluated == "base",
        )
        self._predictions += 1
        return texts

    def learn(self, experiences: Any = None, **elsewhere: Any) -> LearnReport:
        """Learn from rewarded completions or episodes of a loop of the caller's own.

        Args:
            experiences: For a language model `(completion_ids, action_masks, rewards)`: the first two as `get_action`
                returns them, rewards `[prompts, group_size]`; NaN = no reward applies. For a small network
                `(observations, actions, action_masks, rewards)`, each `[starts, group_size, steps, ...]`: whole
                episodes, padded to the longest, `group_size` of them from each start (reset seed); actions as
                `get_action` returns them, masks True for steps taken, and what each step earned. Where `get_action`
                was given an `action_mask`, those masks are a fifth part, `[starts, group_size, steps, k]`.
            elsewhere: None; what the method of this name takes in Stable-Baselines3 is answered.

        Returns:
            A report that unpacks as `loss, kl`; other measurements are its attributes.

        Raises:
            ValueError: If the parts do not fit together.
        """
        if elsewhere or experiences is None or isinstance(experiences, int):
            raise ValueError(_no_experiences(experiences, elsewhere))
        learner = self.learner()
        experience = self.members.experience(learner, experiences)
        self.members.banks.touch([self.slot])
        report = self.learn_together(self.members, [learner], experience)[self.slot]
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
        render: bool = False,
    ) -> float:
        """Return the mean greedy reward (or undiscounted return) on a held-out split; training is not touched.

        Args:
            env: Where the starts come from; or a single environment of Gymnasium, which is reset with seeds 0, 1, ...
                and stays open. One that was made with render_mode="human" shows itself.
            loop: How often to go through the split. Greedy answers to fixed questions do not vary, so more than once
                matters for rewards that do.
            split: "validation", or "test" for the final report.
            episodes: Only the first so many starts; None = all, but 1 of a single environment or with `render`.
            render: Play one episode after the other in a window, at the environment's own speed.

        Raises:
            ImportError: If what draws is not installed.
            ValueError: If an argument is out of range, the environment is not one for this agent, or it cannot be drawn
                or there is no display, or the agent is a member of a population that several processes share out.
        """
        if loop < 1:
            raise ValueError(f"loop must be at least 1, got {loop}")
        refuse_unknown("split", [split], SPLITS)
        check_single_rank(self.members, "test")  # whose questions are shared out as well: it would wait for the others
        base = self._evaluated == "base"
        with open_test_environment(env, episodes=episodes, render=render) as (shown, count):
            self.members.check(shown)
            rounds = [
                evaluate(self.members, [self.slot], shown, split, questions=count, base=base) for _ in range(loop)
            ]
        return float(np.mean([common_scores(rewards, split).mean() for rewards in rounds]))

    # ---- the network

    def get_policy(self) -> nn.Module:
        """Return the policy as a module that reads the agent's weights and holds none of its own.

        For a language model `policy(input_ids, attention_mask)` gives logits `[n, t, v]`; for a small network
        `policy(observations)` gives the numbers `[m, o]` that parametrise its actions (see `StackedPolicy.module`).
        """
        return self.members.policy(self.slot, base=self._evaluated == "base")

    def recompile(self) -> None:
        """Forget what torch.compile made of the base model, so that the next call compiles it again.

        Does nothing for a model that the user has not compiled.
        """
        self.members.recompile()

    def unwrap_models(self) -> None:
        """Stop computing under the accelerator's precision; affects all members of the bank."""
        self.members.unwrap()

    # ---- checkpoints

    def save_checkpoint(self, path: str | Path, *, include_base: bool = False, replace: bool = False) -> None:
        """Save the agent as a checkpoint folder, which for a language model is a PEFT adapter at once.

        Args:
            path: Folder to create.
            include_base: Save the base model as well, so that the folder needs nothing else; that of a small network
                never does.
            replace: Whether a checkpoint that is already there may be replaced.

        Raises:
            CheckpointError: If something is there and may not be replaced.
        """
        save_agent(self, path, include_base=include_base, replace=replace)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device | None = None,
        accelerator: Accelerator | None = None,
        actor_network: nn.Module | None = None,
        **elsewhere: Any,
    ) -> Self:
        """Bring a saved agent back, in a bank of its own.

        Args:
            path: Folder written by `save_checkpoint`.
            device: Where to put the model; where `actor_network` is, or the CPU, by default.
            accelerator: See the constructor.
            actor_network: The base model; by default the saved base, or the one named in the checkpoint if that is
                the demo model or a hub id. A folder named in a checkpoint is never followed. For small networks only a
                module of your own has to be given.
            elsewhere: None; what other libraries' `load` takes is answered.

        Raises:
            CheckpointError: If the checkpoint is damaged, or the base model is not the one it was trained on.
            ValueError: If the base model cannot be found, or a module is missing.
        """
        refuse_unknown("argument of load", elsewhere, ["path", "device", "accelerator", "actor_network"])
        return load_agent(cls, path, device=device, accelerator=accelerator, actor_network=actor_network)

    def load_checkpoint(self, path: str | Path) -> None:
        """Put a saved agent's weights, optimiser, hyperparameters and counters into this agent.

        Raises:
            CheckpointError: If the checkpoint is damaged or of another base model; the agent is unchanged then.
        """
        read_agent(self, path)


def _no_experiences(experiences: int | None, elsewhere: Mapping[str, Any]) -> str:
    """Say what to write where `learn` is called as in Stable-Baselines3."""
    given = [f"{name}={value!r:.40}" for name, value in elsewhere.items()]
    given = given if experiences is None else [repr(experiences), *given]
    steps = elsewhere.get("total_timesteps", 100_000 if experiences is None else experiences)
    return (
        f"learn takes the experiences of one learning step, got {', '.join(given) or 'nothing'}: to train in an "
        f"environment write evogrpo.train(env, total_timesteps={steps!r:.40}), whose result has `best`, an agent, and "
        "`learn`, to go on"
    )


class GRPO(EvolvableAlgorithm):
    """An agent trained by group relative policy optimisation.

    The constructor makes one agent in a bank of its own; `GRPO.population` makes several that share one bank.

    Args:
        observation_space: What it reads; may be None for a language model.
        action_space: What it does; may be None for a language model.
        actor_network: A causal language model of transformers; its weights and flags are never changed. Without one the
            agent is a small network for its spaces; a torch module of your own takes the default network's place.
        pad_token_id: Token used for padding, for language models.
        options: Everything else, with defaults: see `evogrpo.algorithms.factory.Options`.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.
    """

    __slots__ = ()

    unused_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def learn_together(
        cls, members: PolicySet, learners: Sequence[Learner], experience: Experience
    ) -> dict[int, LearnReport]:
        """Take one learning step under the members' objective; see `algorithms.learning.learning_step.learn`."""
        return learn(members, learners, experience)
