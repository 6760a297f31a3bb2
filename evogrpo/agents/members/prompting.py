"""How language models act: prompts in, whole completions out, rewarded by the environment."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.agents.learning.coefficients import Learner
from evogrpo.agents.members.experiences import Experiences, as_batch, as_completions, prompt_tokens
from evogrpo.agents.members.language import LanguageBody, LanguageSettings
from evogrpo.agents.members.play import Sampled, Wanted
from evogrpo.envs.control.normalisation import ObservationStatistics
from evogrpo.envs.groups import Conversations, GroupEnvironment, Scores, Split
from evogrpo.functional.reward_shaping import overlong_penalty, place_on_actions
from evogrpo.randomness import generator
from evogrpo.records import Batch, Rollout, Rows, TokenInputs
from evogrpo.records.transcripts import in_one_turn

PENALTY = "overlong_penalty"


class LanguagePlay:
    """Writes completions; see `evogrpo.agents.members.play.Play`."""

    def __init__(self, body: LanguageBody, settings: LanguageSettings) -> None:
        self._body, self._settings = body, settings

    def over(self, body: LanguageBody) -> "LanguagePlay":
        """Return the same for the members of another bank."""
        return LanguagePlay(body, self._settings)

    def check(self, env: Any) -> None:
        """Refuse an environment that asks no questions."""
        self._open(env, "train", [0])

    def _open(self, env: Any, split: Split, starts: Sequence[int]) -> Conversations:
        opened = env.open(split, starts)
        if not isinstance(opened, Conversations):
            raise ValueError(
                f"language models answer prompts, but {type(env).__name__} is played step by step: use HuggingFaceGym, "
                "or make members for it with its observation_space and action_space and without a language model"
            )
        return opened

    # ---- in environments

    def sample(self, env: GroupEnvironment, starts: Sequence[int], wanted: Wanted) -> Sampled:
        """Sample one completion for each row, and have it rewarded."""
        opened = self._open(env, "train", starts)
        draws = [
            generator(self._settings.seed, wanted.purpose, *stream).random(
                (count, self._settings.max_output_tokens), dtype=np.float32
            )
            for stream, count in zip(wanted.streams, wanted.counts, strict=True)
        ]
        rows = self._rows(
            opened, wanted.start_ids, wanted.member_ids, wanted.temperature, torch.from_numpy(np.concatenate(draws))
        )
        rollout = self._body.bank.sample(rows)
        scores = opened.score(in_one_turn(wanted.start_ids.tolist(), completions_of(rollout)))
        batch = _batch(self._settings, rows, rollout, scores, group_ids=wanted.group_ids)
        return Sampled(
            batch=batch,
            scores=replace(scores, step_rewards=None),
            tokens=self._body.bank.cost(batch),
            questions=tuple(opened.questions),
        )

    def evaluate(
        self, env: GroupEnvironment, split: Split, count: int, slots: Sequence[int], *, base: bool
    ) -> NDArray[np.float64]:
        """Answer the first `count` questions of a split greedily; return raw rewards `[slots * count]`."""
        opened = self._open(env, split, range(count))
        start_ids = torch.arange(count).repeat(len(slots))
        member_ids = torch.tensor(list(slots)).repeat_interleave(count)
        nothing = torch.zeros(len(start_ids), self._settings.max_output_tokens)
        rows = self._rows(opened, start_ids, member_ids, torch.zeros(len(start_ids)), nothing)
        rollout = self._body.bank.sample(rows, base=base)
        return opened.score(in_one_turn(start_ids.tolist(), completions_of(rollout))).rewards

    def absorb(self, observed: Sequence[ObservationStatistics]) -> None:
        """Do nothing: prompts have no running statistics."""

    def _rows(
        self, opened: Conversations, start_ids: Tensor, member_ids: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> Rows:
        return Rows(
            prompts=tuple(tuple(map(int, prompt)) for prompt in opened.prompts),
            prompt_ids=start_ids,
            member_ids=member_ids,
            temperature=temperature,
            uniforms=uniforms,
            min_new_tokens=self._settings.min_output_tokens,
        )

    # ---- in a caller's own loop

    def act(
        self, learner: Learner, seen: Sequence[Mapping[str, Tensor]], *, training: bool, action_mask: Any = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Answer prompts, in AgileRL's shapes; see `GRPO.get_action`."""
        if action_mask is not None:
            raise ValueError("action_mask is for small networks: a completion's tokens are all legal")
        prompts = prompt_tokens(seen)
        settings, size = self._settings, learner.hyperparameters.group_size if training else 1
        shape = (len(prompts) * size, settings.max_output_tokens)
        uniforms = np.zeros(shape, dtype=np.float32)
        if training:
            rng = generator(settings.seed, "get_action", learner.step, learner.index)
            uniforms = rng.random(shape, dtype=np.float32)
        rollout = self._body.bank.sample(
            Rows(
                prompts=tuple(prompts),
                prompt_ids=torch.arange(len(prompts)).repeat_interleave(size),
                member_ids=torch.full((shape[0],), learner.slot),
                temperature=torch.full((shape[0],), learner.hyperparameters.temperature if training else 0.0),
                uniforms=torch.from_numpy(uniforms),
                min_new_tokens=settings.min_output_tokens,
            )
        )
        return as_completions(prompts, rollout, size, settings.pad_token_id)

    def predict(
        self, learner: Learner, observation: Any, *, deterministic: bool, calls: int, action_masks: Any
    ) -> NDArray[Any]:
        """Refuse: language models answer prompts."""
        raise ValueError("predict is for small networks; a language model answers prompts with get_action")

    def batch(self, learner: Learner, experiences: Experiences) -> Batch:
        """Read `(completion_ids, action_masks, rewards)`."""
        hyperparameters, shortest = learner.hyperparameters, self._settings.min_output_tokens
        return as_batch(experiences, learner.slot, hyperparameters, shortest, self._body.device)


def completions_of(rollout: Rollout) -> "list[list[int]]":
    """Return the sampled token ids of each row, without padding."""
    lengths = rollout.present.sum(1).tolist()
    return [row[:length] for row, length in zip(rollout.actions.tolist(), lengths, strict=True)]


def _batch(settings: LanguageSettings, rows: Rows, rollout: Rollout, scores: Scores, group_ids: Tensor) -> Batch:
    """Put together what members learn from; the overlong penalty joins the rewards here and nowhere else."""
    device = rollout.actions.device
    components, weights = dict(scores.components), scores.weights
    rewards = torch.from_numpy(scores.rewards).to(device)
    steps = None if scores.step_rewards is None else _widened(scores.step_rewards, rollout.present)
    buffer = settings.objective.overlong_buffer
    if buffer is not None:
        lengths = rollout.present.sum(1)
        penalty = overlong_penalty(lengths, settings.max_output_tokens, buffer).double()
        # A penalty alone makes no reward where none applies.
        penalty = torch.where(rewards.isnan(), torch.nan, penalty)
        rewards = rewards + penalty
        components, weights = {**components, PENALTY: penalty.cpu().numpy()}, (*weights, 1.0)
        if steps is not None:
            placed = place_on_actions(penalty, rollout.present)
            steps = torch.where(placed.isnan(), steps, steps.nan_to_num(nan=0.0) + placed)
    mask = rollout.present
    if settings.objective.mask_truncated:
        mask = mask & ~rollout.truncated[:, None]
    return Batch(
        inputs=TokenInputs(
            prompts=rows.prompts,
            prompt_ids=rows.prompt_ids.to(device),
            temperature=rows.temperature.to(device),
            min_new_tokens=rows.min_new_tokens,
        ),
        actions=rollout.actions,
        present=rollout.present,
        action_mask=mask,
        rewards=rewards.float(),
        group_ids=group_ids.to(device),
        member_ids=rows.member_ids.to(device),
        sampler_log_probs=rollout.log_probs,
        step_rewards=None if steps is None else steps.float(),
        reward_components=torch.from_numpy(np.stack(list(components.values()), axis=1)).float().to(device),
        component_weights=weights,
        component_names=tuple(components),
        truncated=rollout.truncated,
    )


def _widened(table: NDArray[np.float64], present: Tensor) -> Tensor:
    values = torch.from_numpy(table).to(present.device)
    return torch.nn.functional.pad(values, (0, present.shape[1] - values.shape[1]), value=torch.nan)
