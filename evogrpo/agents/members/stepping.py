"""How small networks act: the environment drives whole episodes, and members choose one action at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.members.networks import NetworkBody
from evogrpo.agents.members.play import Sampled, Wanted
from evogrpo.agents.members.step_experiences import StepExperiences, as_arrays, as_step_batch, tensors_of
from evogrpo.envs.control.actions import legal_actions, to_environment
from evogrpo.envs.control.draws import StepDraws
from evogrpo.envs.control.episodes import Played
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.groups import GroupEnvironment, Scores, Split
from evogrpo.randomness import generator
from evogrpo.records import Acted, Batch, ObservationInputs


class StepPlay:
    """Plays episodes; see `evogrpo.agents.members.play.Play`."""

    def __init__(self, body: NetworkBody) -> None:
        self._body, self._settings = body, body.settings

    def over(self, body: NetworkBody) -> "StepPlay":
        """Return the same for the members of another bank."""
        return StepPlay(body)

    def check(self, env: Any) -> None:
        """Refuse an environment whose spaces are not the members' own."""
        for name in ("observation_space", "action_space"):
            own, given = getattr(self._body, name), getattr(env, name, None)
            if given != own:
                raise ValueError(
                    f"these members' {name} is {own}, but that of {type(env).__name__} is {given}: make members for it "
                    "with its own spaces (and for prompts with a language model as actor_network); a Gymnasium "
                    "environment is wrapped as evogrpo.envs.control.gymnasium.GymnasiumGroups(...)"
                )

    # ---- in environments

    def sample(self, env: GroupEnvironment, starts: Sequence[int], wanted: Wanted) -> Sampled:
        """Play one episode for each row."""
        self.check(env)
        draws = StepDraws(
            self._settings.seed,
            wanted.purpose,
            streams=wanted.streams,
            rows=wanted.counts,
            width=self._body.bank.uniforms_per_action,
        )
        temperature, member_ids = wanted.temperature, wanted.member_ids
        played = env.open("train", starts).play(
            self._body.bank,
            wanted.start_ids.tolist(),
            member_ids.tolist(),
            uniforms=draws,
            temperature=temperature.numpy(),
            statistics=self._body.statistics,
        )
        steps = np.bincount(member_ids.numpy(), weights=played.lengths, minlength=self._body.bank.size)
        return Sampled(
            batch=self._batch(played, wanted, temperature, member_ids),
            scores=Scores(rewards=played.rewards, components={}, completions=(), weights=()),
            tokens={learner.slot: int(steps[learner.slot]) for learner in wanted.learners},
            observed=() if played.observed is None else (played.observed,),
        )

    def _batch(self, played: Played, wanted: Wanted, temperature: Tensor, member_ids: Tensor) -> Batch:
        present, truncated = torch.from_numpy(played.present), torch.from_numpy(played.truncated)
        return Batch(
            inputs=ObservationInputs(
                observations=tensors_of(played.observations),
                temperature=temperature,
                action_masks=None if played.action_masks is None else torch.from_numpy(played.action_masks),
            ),
            actions=torch.from_numpy(played.actions),
            present=present,
            action_mask=present & ~truncated[:, None] if self._settings.objective.mask_truncated else present,
            rewards=torch.from_numpy(played.rewards).float(),
            group_ids=wanted.group_ids,
            member_ids=member_ids,
            sampler_log_probs=torch.from_numpy(played.log_probs),
            step_rewards=torch.from_numpy(played.step_rewards).float(),
            truncated=truncated,
        )

    def evaluate(
        self, env: GroupEnvironment, split: Split, count: int, slots: Sequence[int], *, base: bool
    ) -> NDArray[np.float64]:
        """Play the first `count` starts of a split greedily; return undiscounted returns `[slots * count]`."""
        self.check(env)
        played: Played = env.open(split, range(count)).play(
            self._body.bank,
            list(range(count)) * len(slots),
            np.repeat(list(slots), count).tolist(),
            statistics=self._body.statistics,
            base=base,
        )
        return played.rewards

    def absorb(self, observed: Sequence[ObservationStatistics]) -> None:
        """Add what a learning step's episodes observed to the members' running statistics."""
        for each in observed:
            self._body.absorb(each)

    # ---- in a caller's own loop

    def act(self, learner: Learner, seen: Any, *, training: bool, action_mask: Any = None) -> NDArray[Any]:
        """Choose actions for one observation or a batch of them; see `GRPO.get_action`."""
        rng = generator(self._settings.seed, "get_action", learner.step, learner.index) if training else None
        acted, single = self._choose(learner, seen, rng, action_mask)
        actions = numbered_as(self._body.action_space, acted.actions)
        return actions[0] if single else actions

    def predict(
        self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any
    ) -> NDArray[Any]:
        """Choose actions as the environment takes them; see `GRPO.predict`."""
        rng = None if deterministic else generator(self._settings.seed, "predict", calls, learner.index)
        acted, single = self._choose(learner, observation, rng, action_masks)
        actions = to_environment(self._body.action_space, acted.actions)
        chosen: NDArray[Any] = actions[0] if single else actions  # a scalar for Discrete: some environments look it up
        return chosen

    def _choose(
        self, learner: Learner, seen: Any, rng: np.random.Generator | None, action_mask: Any
    ) -> tuple[Acted, bool]:
        """Return actions for one observation, or for a batch of them, and whether it was one."""
        arrays, count = as_arrays(self._body.observation_space, seen)
        m, bank = count or 1, self._body.bank
        masks = None
        if action_mask is not None:
            masks = [action_mask] if count is None else _rows_of(action_mask, m)
        member_ids = np.full(m, learner.slot)
        acted = bank.act(
            self._body.shown(arrays, member_ids),
            member_ids,
            uniforms=None if rng is None else rng.random((m, bank.uniforms_per_action), dtype=np.float32),
            temperature=np.full(m, learner.hyperparameters.temperature, dtype=np.float32),
            action_mask=None if masks is None else legal_actions(self._body.action_space, masks),
        )
        return acted, count is None

    def batch(self, learner: Learner, experiences: StepExperiences) -> Batch:
        """Read `(observations, actions, action_masks, rewards)`; see `as_step_batch`."""
        return as_step_batch(experiences, learner, self._body)


def numbered_as(space: spaces.Space[Any], actions: NDArray[Any]) -> NDArray[Any]:
    """Return a policy's actions with the values of Discrete and MultiDiscrete counted as the space does."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return actions + space.start
    return actions


def _rows_of(action_mask: Any, count: int) -> list[Any]:
    """Return one mask per row of a batch of them; components of MultiDiscrete may come apart, as a tuple."""
    if isinstance(action_mask, tuple):
        return list(zip(*action_mask, strict=True))
    rows = list(np.asarray(action_mask))
    if len(rows) != count:
        raise ValueError(f"action_mask must have one row per observation, got {len(rows)} for {count}")
    return rows
