"""GRPO: an agent that learns by comparing the answers of a group."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch
from accelerate import Accelerator
from gymnasium import spaces
from torch import Tensor, nn
from transformers import PreTrainedModel

from evogrpo.agents.base import EvolvableAlgorithm
from evogrpo.agents.collecting import evaluate
from evogrpo.agents.experiences import Experiences, as_batch, as_completions, prompt_tokens
from evogrpo.agents.learning import learn
from evogrpo.agents.options import Options, open_shared
from evogrpo.agents.population import Population
from evogrpo.agents.saving import load_agent, read_agent, save_agent
from evogrpo.envs.groups import GroupEnvironment, Split
from evogrpo.evolution.mutation import spread_members
from evogrpo.hyperparameters import HyperparameterConfig, Hyperparameters
from evogrpo.randomness import generator
from evogrpo.records import LearnReport, Rows


class GRPO(EvolvableAlgorithm):
    """An agent trained by group relative policy optimisation.

    The constructor makes one agent in a bank of its own; `GRPO.population` makes several that share one base model.

    Args:
        observation_space: What it reads; may be None for a language model.
        action_space: What it does; may be None for a language model.
        actor_network: A causal language model of transformers; its weights and flags are never changed.
        pad_token_id: Token used for padding.
        options: Everything else, with defaults: see `evogrpo.agents.options.Options`.

    Raises:
        ValueError: If an argument is unknown, missing or out of range.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        actor_network: PreTrainedModel | None = None,
        pad_token_id: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        shared, hyperparameters = open_shared(1, observation_space, action_space, actor_network, pad_token_id, options)
        super().__init__(shared, 0, options.get("index", 0), hyperparameters)

    @classmethod
    def population(
        cls,
        size: int,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        wrapper_cls: type[Any] | None = None,
        wrapper_kwargs: Mapping[str, Any] | None = None,
        *,
        actor_network: PreTrainedModel | None = None,
        pad_token_id: int | None = None,
        samples_per_step: int | None = None,
        spread: bool = True,
        **options: Unpack[Options],
    ) -> Population:
        """Make agents that share one base model.

        The first member has the given hyperparameters; those that evolve are spread over their ranges for the others.

        Args:
            size: Number of members.
            observation_space: As for one agent.
            action_space: As for one agent.
            wrapper_cls: Wraps every agent that the population hands out: `wrapper_cls(agent, **wrapper_kwargs)`.
            wrapper_kwargs: See `wrapper_cls`.
            actor_network: As for one agent; loaded once for all.
            pad_token_id: As for one agent.
            samples_per_step: Completions per member and learning step, if group_size evolves over a range: only its
                divisors are dealt. Unneeded when group_size has choices.
            spread: False lets every member start with the given hyperparameters.
            options: As for one agent.

        Raises:
            ValueError: If an argument is unknown, missing or out of range.
        """
        config = options.get("hp_config") or HyperparameterConfig()
        samples = samples_per_step or _common_samples(options.get("group_size", Hyperparameters().group_size), config)
        shared, first = open_shared(size, observation_space, action_space, actor_network, pad_token_id, options)
        rng = generator(shared.settings.seed, "spread")
        # Members that start alike still sample their own completions, so they soon differ.
        records = spread_members(first, config if spread else HyperparameterConfig(), size, rng, samples)
        index = options.get("index", 0)
        agents = [cls._member(shared, slot, index + slot, record) for slot, record in enumerate(records)]
        return Population(agents, shared, wrapper_cls=wrapper_cls, wrapper_kwargs=wrapper_kwargs)

    # ---- acting and learning

    def get_action(
        self, states: Sequence[Mapping[str, Tensor]], training: bool | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Answer prompts.

        Args:
            states: Prompts `{"input_ids": [1, P], "attention_mask": [1, P]}`, as `HuggingFaceGym` serves them.
            training: True samples `group_size` completions per prompt; False takes the most likely tokens, once per
                prompt. None = the agent's training mode.

        Returns:
            Per prompt the completion ids `[g, P + C]`, prompt included and padded on the right, and the action masks
            `[g, P + C - 1]`: mask j is True where token j + 1 was sampled.
        """
        training = self.training if training is None else training
        prompts = prompt_tokens(states)
        settings, size = self._shared.settings, self.group_size if training else 1
        shape = (len(prompts) * size, settings.max_output_tokens)
        uniforms = np.zeros(shape, dtype=np.float32)
        if training:
            rng = generator(settings.seed, "get_action", self.steps, self.index)
            uniforms = rng.random(shape, dtype=np.float32)
            self.steps += 1
        rollout = self._shared.bank.sample(
            Rows(
                prompts=tuple(prompts),
                prompt_ids=torch.arange(len(prompts)).repeat_interleave(size),
                member_ids=torch.full((shape[0],), self.slot),
                temperature=torch.full((shape[0],), self.temperature if training else 0.0),
                uniforms=torch.from_numpy(uniforms),
                min_new_tokens=settings.min_output_tokens,
            )
        )
        return as_completions(prompts, rollout, size, settings.pad_token_id)

    def learn(self, experiences: Experiences) -> LearnReport:
        """Learn from rewarded completions.

        Args:
            experiences: `(completion_ids, action_masks, rewards)`: the first two as `get_action` returns them, rewards
                `[prompts, group_size]`; NaN = no reward applies.

        Returns:
            A report that unpacks as `loss, kl`; other measurements are its attributes.

        Raises:
            ValueError: If the parts do not fit together.
        """
        batch = as_batch(
            experiences, self.slot, self.hyperparameters, self._shared.settings.min_output_tokens, self.device
        )
        report = learn(self._shared, [self.learner()], batch)[self.slot]
        self.steps += 1
        self.failed = report.failed
        return report

    def test(self, env: GroupEnvironment, loop: int = 1, split: Split = "validation") -> float:
        """Return the mean greedy reward on a held-out split; training is not touched.

        Args:
            env: Where the questions come from.
            loop: How often to go through the split. Greedy answers to fixed questions do not vary, so more than once
                matters for rewards that do.
            split: "validation", or "test" for the final report.
        """
        if loop < 1:
            raise ValueError(f"loop must be at least 1, got {loop}")
        return float(np.mean([evaluate(self._shared, [self.slot], env, split) for _ in range(loop)]))

    # ---- the network

    def get_policy(self) -> nn.Module:
        """Return the policy as a module: `policy(input_ids, attention_mask)` gives this member's logits `[n, t, v]`."""
        return self._shared.bank.policy(self.slot)

    def recompile(self) -> None:
        """Forget what torch.compile made of the base model, so that the next call compiles it again.

        Does nothing for a model that the user has not compiled.
        """
        self._shared.bank.recompile()

    def unwrap_models(self) -> None:
        """Stop computing under the accelerator's precision; affects all members of the bank."""
        self._shared.bank.autocast = nullcontext

    # ---- checkpoints

    def save_checkpoint(self, path: str | Path, *, include_base: bool = False, replace: bool = False) -> None:
        """Save the agent as a folder that is a PEFT adapter and a checkpoint at once.

        Args:
            path: Folder to create.
            include_base: Save the base model as well, so that the folder needs nothing else.
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
        actor_network: PreTrainedModel | None = None,
    ) -> Self:
        """Bring a saved agent back, in a bank of its own.

        Args:
            path: Folder written by `save_checkpoint`.
            device: Where to put the model; where `actor_network` is, or the CPU, by default.
            accelerator: See the constructor.
            actor_network: The base model; by default the saved base, or the one named in the checkpoint if that is
                the demo model or a hub id. A folder named in a checkpoint is never followed.

        Raises:
            CheckpointError: If the checkpoint is damaged, or the base model is not the one it was trained on.
            ValueError: If the base model cannot be found.
        """
        return load_agent(cls, path, device=device, accelerator=accelerator, actor_network=actor_network)

    def load_checkpoint(self, path: str | Path) -> None:
        """Put a saved agent's weights, optimiser, hyperparameters and counters into this agent.

        Raises:
            CheckpointError: If the checkpoint is damaged or of another base model; the agent is unchanged then.
        """
        read_agent(self, path)


def _common_samples(group_size: int, config: HyperparameterConfig) -> int:
    """Return a number of samples that every possible group size divides."""
    parameter = config.get("group_size")
    if parameter is None:
        return group_size
    if parameter.choices is None:
        raise ValueError(
            "samples_per_step must be given when group_size evolves over a range, so that only its divisors are "
            "dealt; or give group_size choices"
        )
    return math.lcm(group_size, *(int(choice) for choice in parameter.choices))
