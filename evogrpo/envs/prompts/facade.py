"""The Gymnasium-shaped face of a prompt environment, for hand-written training loops."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evogrpo.config.checks import whole_between, whole_number
from evogrpo.data.rollout import single_turn_conversations
from evogrpo.envs.groups import SPLITS, Conversations, GroupEnvironment, Paced, Split, deal_starts

PromptTensors = dict[str, Tensor]
StepResult = tuple[list[PromptTensors], Tensor, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a caller stands: which split, which seed orders it, how many batches were answered, what is open."""

    split: Split
    seed: int
    step: int = 0
    starts: tuple[int, ...] = ()
    opened: Conversations | None = None


class Facade:
    """Serves `batch_size` prompts at a time and rewards their completions.

    Args:
        environment: Where the prompts come from.
        batch_size: Prompts per step.
        group_size: Completions per prompt that training steps must bring; None takes any number from 2.
        seed: Seed of the training order.
        eos_token_id: Ends a completion; None if the tokenizer has none.
        pad_token_id: Fills up completions on the right; None if the tokenizer has none.
    """

    def __init__(
        self,
        environment: GroupEnvironment,
        *,
        batch_size: int,
        group_size: int | None,
        seed: int,
        eos_token_id: int | None,
        pad_token_id: int | None,
    ) -> None:
        batch_size = whole_between("data_batch_size", batch_size, 1)
        if group_size is not None and whole_number("group_size", group_size) < 2:
            raise ValueError(
                f"group_size must be at least 2, got {group_size}: a lone completion has no group to be compared with"
            )
        self._environment = environment
        self._batch_size = batch_size
        self._group_size = group_size
        self._eos, self._pad = eos_token_id, pad_token_id
        self._place = _Place(split="train", seed=seed)

    @property
    def split(self) -> Split:
        """The split that is being served."""
        return self._place.split

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[list[PromptTensors], dict[str, Any]]:
        """Serve the batch of prompts at the cursor.

        Args:
            seed: Starts a new training order from its beginning; None goes on where the cursor stands.
            options: {"step": k} moves the cursor to the k-th batch.

        Returns:
            Per prompt {"input_ids", "attention_mask"}, each a LongTensor [1, prompt]; and which rows they are.

        Raises:
            ValueError: If an option is unknown or out of range.
        """
        place = self._place if seed is None else replace(self._place, seed=seed, step=0)
        for option, value in (options or {}).items():
            if option != "step" or not isinstance(value, int) or value < 0:
                raise ValueError(f'reset takes the option {{"step": int >= 0}}, got {{{option!r}: {value!r}}}')
            place = replace(place, step=value)
        self._place = self._opened(place)
        return self._observation(), {"split": place.split, "starts": self._place.starts}

    def step(self, completion_ids: Sequence[Tensor]) -> StepResult:
        """Reward one group of completions per served prompt, and serve the next batch.

        Args:
            completion_ids: Per served prompt a LongTensor [group_size, prompt + completion] whose rows repeat the
                prompt and are padded on the right after their EOS; the same group_size for all.

        Returns:
            The next prompts; rewards [prompts, group_size] (float32, NaN = not applicable); terminated, all True, and
            truncated, all False, both [prompts, group_size]; and a dict with "rewards/<function>" values
            [prompts, group_size], "completions" (texts per prompt), and the "split" and "starts" of the next prompts.

        Raises:
            ValueError: If nothing was served, or a shape or a prompt does not fit what was served.
            RewardError: If a reward function fails.
        """
        opened = self._place.opened
        if opened is None:
            raise ValueError("step answers the prompts that reset served, but nothing was served: call reset first")
        group_size = self._check_groups(completion_ids, len(opened.prompts))
        rows = [
            self._completion(row, prompt)
            for group, prompt in zip(completion_ids, opened.prompts, strict=True)
            for row in group.tolist()
        ]
        shape = (len(opened.prompts), group_size)
        if isinstance(self._environment, Paced) and self.split == "train":
            self._environment.at_step(self._place.step, 0)
        scores = opened.score(single_turn_conversations([n // group_size for n in range(len(rows))], rows))
        texts = [list(scores.completions[i * group_size : (i + 1) * group_size]) for i in range(shape[0])]
        self._place = self._opened(replace(self._place, step=self._place.step + 1))
        report: dict[str, Any] = {
            f"rewards/{name}": values.reshape(shape) for name, values in scores.components.items()
        }
        report |= scores.metrics
        report |= {"completions": texts, "split": self.split, "starts": self._place.starts}
        rewards = torch.as_tensor(scores.rewards.reshape(shape), dtype=torch.float32)
        return self._observation(), rewards, np.ones(shape, dtype=bool), np.zeros(shape, dtype=bool), report

    @contextmanager
    def eval_mode(self, split: Split) -> Iterator[None]:
        """Serve a held-out split from its first row inside a `with`; training goes on afterwards as if it never was."""
        if split not in SPLITS or split == "train":
            raise ValueError(f'eval_mode serves "validation" or "test", got {split!r}')
        before = self._place
        self._place = _Place(split=split, seed=before.seed)
        try:
            yield
        finally:
            self._place = before

    def _opened(self, place: _Place) -> _Place:
        size = self._environment.size(place.split)
        if place.split == "train":
            starts = deal_starts(place.seed, size, place.step, self._batch_size, self._batch_size)
        else:
            first = place.step % -(-size // self._batch_size) * self._batch_size
            starts = tuple(range(first, min(first + self._batch_size, size)))
        return replace(place, starts=starts, opened=self._environment.open(place.split, starts))

    def _observation(self) -> list[PromptTensors]:
        assert self._place.opened is not None
        ids = [torch.tensor([list(prompt)], dtype=torch.long) for prompt in self._place.opened.prompts]
        return [{"input_ids": prompt, "attention_mask": torch.ones_like(prompt)} for prompt in ids]

    def _check_groups(self, completion_ids: Sequence[Tensor], prompts: int) -> int:
        if len(completion_ids) != prompts:
            raise ValueError(f"step takes one group per served prompt, got {len(completion_ids)} for {prompts}")
        shapes = [tuple(group.shape) for group in completion_ids]
        if any(len(shape) != 2 or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(f"step takes tensors [group_size, prompt + completion] of one group_size, got {shapes}")
        group_size = int(shapes[0][0])
        smallest = 2 if self.split == "train" else 1
        if group_size < smallest:
            raise ValueError(f"group_size must be at least {smallest}, got {group_size}: sample more completions")
        if self.split == "train" and self._group_size not in (None, group_size):
            raise ValueError(f"step takes groups of group_size {self._group_size} as declared, got {group_size}")
        return group_size

    def _completion(self, row: list[int], prompt: Sequence[int]) -> list[int]:
        """Return what follows the prompt: up to the first EOS, else without trailing padding."""
        if row[: len(prompt)] != list(prompt):
            raise ValueError("every row must begin with the token ids of the prompt it answers: keep the served order")
        completion = row[len(prompt) :]
        if self._eos is not None and self._eos in completion:
            return completion[: completion.index(self._eos) + 1]
        while completion and completion[-1] == self._pad:
            completion.pop()
        return completion
